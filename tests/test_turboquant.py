"""TurboQuant against its definition in float64; vLLM's slots against vLLM's kernels. Spec: E.20"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvx_core import InvalidArgumentError, UnsupportedError
from kvx_core._c import abi, abi_turboquant
from kvx_core.encodings import turboquant
from tests import lloyd_max
from tests.native import ROOT, run, sentences_in
from tests.vllm_turboquant import inputs

Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
SEEDS = (1, 2, 3)
DIMS = (64, 128, 256)
BITS = (2, 3, 4)
NEAR = 3e-6  # of a midpoint: float32 rounding decides


# --- the definition, slow and obvious -----------------------------------------------------------


def pi_bits(count: int) -> list[int]:
    """The first bits of the fraction of pi, by Machin's formula in integers."""
    one = 1 << (count + 32)

    def arctan_of_inverse(x: int) -> int:
        total, power, n = 0, one // x, 1
        while power:
            total += power // n if n % 4 == 1 else -(power // n)
            power //= x * x
            n += 2
        return total

    pi = 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))
    fraction = (pi - 3 * one) >> 32
    return [fraction >> (count - 1 - i) & 1 for i in range(count)]


PI = pi_bits(512)
SIGNS = [np.array([-1.0 if bit else 1.0 for bit in PI[at : at + 256]]) for at in (0, 256)]


def hadamard(dim: int) -> Floats:
    ones = np.bitwise_count(np.arange(dim)[:, None] & np.arange(dim))
    return np.where(ones % 2, -1.0, 1.0)


def book(dim: int, bits: int) -> Floats:
    half = lloyd_max.centroids(dim, bits)
    return np.concatenate([-half[::-1], half])


def codes_of(units: Bytes, dim: int, bits: int) -> npt.NDArray[np.int64]:
    """Codes of `bits` bits, the first in the lowest bits of the first byte."""
    stream = np.unpackbits(units[..., : dim * bits // 8], axis=-1, bitorder="little")
    in_codes = stream.reshape(*units.shape[:-1], dim, bits)
    found: npt.NDArray[np.int64] = (in_codes.astype(np.int64) << np.arange(bits)).sum(-1)
    return found


def half_at(units: Bytes, at: int) -> Floats:
    return units[..., at : at + 2].copy().view("<f2")[..., 0].astype(np.float64)


def rotated(values: Floats, signs: Floats | None) -> Floats:
    """sqrt(dim) times the rotated vectors."""
    dim = values.shape[-1]
    found: Floats = (values if signs is None else values * signs[:dim]) @ hadamard(dim)
    return found


def reference_decode(units: Bytes, dim: int, bits: int, residual: bool) -> Floats:
    bits -= residual
    at = dim * bits // 8
    y = book(dim, bits)[codes_of(units, dim, bits)]
    norm = half_at(units, at + dim // 8 * residual)
    if residual:
        signs = 2.0 * codes_of(units[..., at:], dim, 1) - 1
        length = half_at(units, at + dim // 8 + 2)[..., None]
        mean = lloyd_max.centroids(dim, 1)[0]
        y = y + length / mean / math.sqrt(dim) * (signs @ hadamard(dim)) * SIGNS[1][:dim]
    found: Floats = norm[..., None] * (y @ hadamard(dim)) / dim * SIGNS[0][:dim]
    return found


def vectors(rows: int, dim: int, seed: int, outliers: int = 0) -> npt.NDArray[np.float32]:
    random = np.random.default_rng(seed)
    found = random.standard_normal((rows, dim))
    if outliers:
        found[:, random.permutation(dim)[:outliers]] *= 20
    return found.astype(np.float32)


def relative_error(values: Floats, decoded: Floats) -> float:
    return float(((values - decoded) ** 2).sum() / (values**2).sum())


# --- tables -------------------------------------------------------------------------------------


def test_the_constants_are_those_that_are_computed() -> None:
    header = (ROOT / "csrc/formats/turboquant.h").read_text()
    table = header.partition("kCentroids[4][3][8] =")[2].partition("};")[0]
    found = [float(number) for number in re.findall(r"([\d.]+)f", table)]
    wanted = [
        centroid
        for bits in (1, 2, 3, 4)
        for dim in DIMS
        for centroid in lloyd_max.centroids(dim, bits)
    ]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)
    words = header.partition("kSignBits")[2].partition("};")[0]
    bits = "".join(f"{int(word, 16):032b}" for word in re.findall(r"0x[0-9a-f]{8}", words))
    assert [int(bit) for bit in bits] == PI


@pytest.mark.parametrize(
    ("bits", "golden"),
    [
        (2, (0.4525, 1.5052)),
        (3, (0.2444, 0.7533, 1.3366, 2.1315)),
        (4, (0.1279, 0.3864, 0.6536, 0.9371, 1.2478, 1.6043, 2.0459, 2.6889)),
    ],
)
def test_centroids_of_128_numbers(bits: int, golden: tuple[float, ...]) -> None:
    np.testing.assert_allclose(lloyd_max.centroids(128, bits), golden, atol=5e-5)


# --- units --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", DIMS)
def test_units_are_the_nearest_centroids(dim: int, bits: int) -> None:
    for seed in SEEDS:
        values = vectors(257, dim, seed) * np.float32(2.0**seed)
        units = turboquant.encode(values, bits)
        assert units.shape == (257, dim * bits // 8 + 2)
        norms = np.linalg.norm(values.astype(np.float64), axis=1)
        assert np.array_equal(half_at(units, dim * bits // 8), norms.astype(np.float16))
        y = rotated(values.astype(np.float64) / norms[:, None], SIGNS[0])
        centroids = book(dim, bits)
        codes = codes_of(units, dim, bits)
        nearest = np.abs(y[..., None] - centroids).argmin(-1)
        middles = (centroids[:-1] + centroids[1:]) / 2
        is_clear = np.abs(y[..., None] - middles).min(-1) > NEAR
        assert np.array_equal(codes[is_clear], nearest[is_clear])
        assert is_clear.mean() > 0.999
        decoded = turboquant.decode(units, dim, bits)
        wanted = reference_decode(units, dim, bits, False)
        np.testing.assert_allclose(decoded, wanted, rtol=0, atol=2e-6 * norms.max())


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", DIMS)
def test_any_bytes_are_a_unit(dim: int, bits: int, residual: bool) -> None:
    """All codes, and norms of all kinds but infinity and NaN, which spread."""
    size = turboquant.unit_bytes(dim, bits, residual=residual)
    assert size == dim * bits // 8 + (4 if residual else 2)
    for seed in SEEDS:
        units = np.random.default_rng(seed).integers(0, 256, (64, size), np.uint8)
        halves = (size - 2, size - 4) if residual else (size - 2,)
        for at in halves:
            units[:, at + 1] &= 0xBB  # finite
        decoded = turboquant.decode(units, dim, bits, residual=residual)
        wanted = reference_decode(units, dim, bits, residual)
        largest = np.abs(wanted).max(-1, keepdims=True)
        assert (np.abs(decoded - wanted) <= 1e-5 * largest + 1e-30).all()
    units[:, size - 1 - 2 * residual] = 0x7C
    assert not np.isfinite(turboquant.decode(units, dim, bits, residual=residual)).any()


@pytest.mark.parametrize(
    ("bits", "error", "with_outliers"),
    [(2, 0.1161, 0.1173), (3, 0.0339, 0.0336), (4, 0.0094, 0.0090)],
)
def test_the_error_is_the_published_one(bits: int, error: float, with_outliers: float) -> None:
    """Of 4096 vectors of 128 numbers; no larger if 4 channels are 20 times as large."""
    for seed in SEEDS:
        values = vectors(4096, 128, seed)
        decoded = turboquant.decode(turboquant.encode(values, bits), 128, bits)
        assert relative_error(values, decoded) == pytest.approx(error, rel=0.03)
        assert relative_error(values, decoded) == pytest.approx(
            lloyd_max.distortion(128, bits), rel=0.02
        )
        values = vectors(4096, 128, seed, outliers=4)
        decoded = turboquant.decode(turboquant.encode(values, bits), 128, bits)
        assert relative_error(values, decoded) < 1.03 * with_outliers


@pytest.mark.parametrize("dim", DIMS)
def test_errors_of_other_dims(dim: int) -> None:
    for bits in BITS:
        values = vectors(2048, dim, 1)
        decoded = turboquant.decode(turboquant.encode(values, bits), dim, bits)
        wanted = lloyd_max.distortion(dim, bits)
        assert relative_error(values, decoded) == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize("bits", BITS)
def test_a_residual_makes_inner_products_unbiased(bits: int) -> None:
    """Without it they shrink; the variance is below that of the published, independent rotation."""
    published = {2: 0.56, 3: 0.18, 4: 0.052}[bits]
    slopes, variances = {}, {}
    for residual in (False, True):
        values = vectors(4096, 128, 7).astype(np.float64)
        values /= np.linalg.norm(values, axis=1, keepdims=True)
        units = turboquant.encode(values.astype(np.float32), bits, residual=residual)
        decoded = turboquant.decode(units, 128, bits, residual=residual).astype(np.float64)
        queries = np.random.default_rng(8).standard_normal((512, 128))
        queries /= np.linalg.norm(queries, axis=1, keepdims=True)
        exact, found = queries @ values.T, queries @ decoded.T
        slopes[residual] = float((exact * found).sum() / (exact * exact).sum())
        variances[residual] = float(128 * ((found - exact) ** 2).mean())
    assert slopes[True] == pytest.approx(1, abs=0.004)
    assert slopes[False] == pytest.approx(1 - lloyd_max.distortion(128, bits), abs=0.004)
    assert variances[False] == pytest.approx(lloyd_max.distortion(128, bits), rel=0.05)
    assert variances[False] < variances[True] < published


def test_numbers_that_are_none() -> None:
    """Zeros give zeros; NaN counts as 0, infinity as 2^100, norms stay finite."""
    values = vectors(8, 128, 1)
    values[0] = 0
    values[1] = -0.0
    values[2, 5] = np.nan
    values[3, 7], values[4, 7] = np.inf, -np.inf
    values[5] *= 1e20
    values[6] *= 1e-30
    values[7] = np.nan
    for bits in BITS:
        for residual in (False, True):
            units = turboquant.encode(values, bits, residual=residual)
            decoded = turboquant.decode(units, 128, bits, residual=residual)
            assert np.isfinite(decoded).all()
            assert not decoded[[0, 1, 6, 7]].any()
            without = values[2].copy()
            without[5] = 0
            same = turboquant.encode(without, bits, residual=residual)
            assert np.array_equal(units[2], same)
            cut = values[3].copy()
            cut[7] = 2.0**100
            assert np.array_equal(units[3], turboquant.encode(cut, bits, residual=residual))
            assert np.linalg.norm(decoded[5]) == pytest.approx(65504, rel=0.3)


def test_tensors_of_any_shape_and_dtype() -> None:
    values = torch.randn(3, 5, 2, 64).to(torch.bfloat16)
    units = turboquant.encode(values, 3)
    assert isinstance(units, torch.Tensor)
    assert units.shape == (3, 5, 2, 26)
    alike = values.float().numpy().astype(ml_dtypes.bfloat16)
    assert np.array_equal(turboquant.encode(alike, 3), units.numpy())
    half = values.transpose(0, 1)
    assert torch.equal(turboquant.encode(half, 3), units.transpose(0, 1))
    assert torch.equal(turboquant.encode(values.double().float(), 3), units)
    wide = torch.zeros(3, 5, 2, 40, dtype=torch.uint8)
    wide[..., :26] = units
    decoded = turboquant.decode(wide, 64, 3)
    assert decoded.shape == values.shape
    assert torch.equal(decoded, turboquant.decode(units, 64, 3))
    assert turboquant.encode(values[:0], 3).shape == (0, 5, 2, 26)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: turboquant.encode(torch.zeros(3, 96), 3), "dim is 96 and bits 3, expected 64"),
        (lambda: turboquant.encode(torch.zeros(3, 64), 5), "dim is 64 and bits 5, expected 64"),
        (lambda: turboquant.encode(torch.zeros(64), 3, residual=1), "residual is 1, expected True"),  # type: ignore[arg-type]
        (lambda: turboquant.encode(torch.zeros(()), 3), "values has no axes"),
        (lambda: turboquant.encode(torch.zeros(64).int(), 3), "values.dtype is S32, expected F32"),
        (lambda: turboquant.encode(3, 3), "values is 3, expected a torch.Tensor"),  # type: ignore[arg-type]
        (lambda: turboquant.decode(torch.zeros(3, 25).byte(), 64, 3), "units.shape[1] is 25, exp"),
        (lambda: turboquant.decode(torch.zeros(3, 26), 64, 3), "units.dtype is F32, expected U8"),
        (lambda: turboquant.slot_bytes(64, "fp8"), "cache_dtype is 'fp8', expected one of turboq"),
        (lambda: turboquant.slot_bytes(80, turboquant.SLOTS[0]), "dim is 80, expected 64, 128 or"),
        (
            lambda: turboquant.encode_slots(
                torch.zeros(2, 64), torch.zeros(1, 64), turboquant.SLOTS[0]
            ),
            "values.shape is (1, 64), expected (2, 64)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises((InvalidArgumentError, UnsupportedError), match=re.escape(sentence)):
        call()


def wrong_calls(values: npt.NDArray[np.float32], units: Bytes) -> list[tuple[str, Any, str]]:
    """Functions of C, arguments that are refused, and what is said."""
    v, u = values.ctypes.data, units.ctypes.data
    return [
        ("encode", (u, 26, v, 64, 2, 65, 3, 0), "dim is 65, expected 64, 128 or 256"),
        ("encode", (u, 26, v, 64, 2, 64, 1, 0), "bits is 1, expected 2, 3 or 4"),
        ("encode", (u, 26, v, 64, 2, 64, 3, 2), "flags is 0x2, expected no bits but RESIDUAL"),
        ("encode", (None, 26, v, 64, 2, 64, 3, 0), "units is NULL"),
        ("encode", (u, 25, v, 64, 2, 64, 3, 0), "units has a stride of 25 bytes, expected at"),
        ("encode", (u, 26, v + 2, 64, 1, 64, 3, 0), "expected a multiple of 4 bytes"),
        ("encode", (u, 26, v, 63, 2, 64, 3, 0), "values has a stride of 252 bytes, expected at"),
        ("encode", (u, 26, v, -64, 2, 64, 3, 0), "values has a stride of -256 bytes"),
        ("encode", (u, 26, v, 2**62, 2, 64, 3, 0), "past the end of memory"),
        ("encode", (u, 2**62, v, 64, 3, 64, 3, 0), "past the end of memory"),
        ("encode", (v + 100, 26, v, 64, 2, 64, 3, 0), "units at"),
        ("decode", (v, 64, v + 100, 26, 2, 64, 3, 0), "values at"),
        ("decode", (v, 64, u, 26, 2, 64, 3, 8), "flags is 0x8"),
        ("encode_slots", (u, 70, v, v, 64, 2, 65, 0), "dim is 65"),
        ("encode_slots", (u, 100, v, v, 64, 2, 64, 4), "kind is 4, expected K8V4 (0) to 3BIT_NC"),
        ("encode_slots", (u, 99, v, v, 64, 2, 64, 0), "slots has a stride of 99 bytes"),
        ("encode_slots", (u, 100, v, None, 64, 2, 64, 0), "values is NULL"),
        ("decode_slots", (v, v, 64, u, 100, 1, 64, 0), "keys at"),
    ]


def test_the_functions_of_c_refuse_addresses() -> None:
    """And what they say is all that they can say."""
    lib = abi_turboquant.functions()
    values = np.ones((2, 64), np.float32)
    units = np.full((4, 100), 7, np.uint8)
    said = []
    for name, arguments, sentence in wrong_calls(values, units):
        with pytest.raises(InvalidArgumentError, match=re.escape(sentence)) as raised:
            abi.check(getattr(lib, f"kvx_turboquant_{name}")(*arguments))
        said.append(str(raised.value))
    assert (units == 7).all()
    assert (values == 1).all()
    assert lib.kvx_turboquant_encode(None, 0, None, 0, 0, 64, 3, 0) == 0
    sentences = sentences_in(ROOT / "csrc/encodings/turboquant.cc")
    assert len(sentences) == 10
    for text in sentences:
        pattern = re.sub(r"%#?(?:ll)?[a-z]", ".*", re.escape(text).replace(r"\#", "#"))
        assert text.endswith("(spec E.20)")
        assert any(re.fullmatch(pattern, found) for found in said), text


def test_bytes_between_units_and_rows_stay() -> None:
    values = np.full((5, 70), 9, np.float32)
    values[:, :64] = vectors(5, 64, 1)
    units = np.full((5, 33), 7, np.uint8)
    lib = abi_turboquant.functions()
    u, v = units.ctypes.data, values.ctypes.data
    abi.check(lib.kvx_turboquant_encode(u, 33, v, 70, 5, 64, 3, 0))
    assert (units[:, 26:] == 7).all()
    assert np.array_equal(units[:, :26], turboquant.encode(values[:, :64], 3))
    before = units.copy()
    abi.check(lib.kvx_turboquant_decode(v, 70, u, 33, 5, 64, 3, 0))
    assert (values[:, 64:] == 9).all()
    assert np.array_equal(values[:, :64], turboquant.decode(units, 64, 3))
    assert np.array_equal(units, before)


def digest() -> str:
    """Of everything that the functions make of some vectors."""
    made = hashlib.sha256()
    for dim in DIMS:
        values = vectors(65, dim, 3)
        values[1] = 0
        values[2, 3] = np.nan
        for bits in BITS:
            for residual in (False, True):
                units = turboquant.encode(values, bits, residual=residual)
                made.update(units.tobytes())
                made.update(turboquant.decode(units, dim, bits, residual=residual).tobytes())
        for kind in turboquant.SLOTS:
            slots = turboquant.encode_slots(values, values[::-1], kind)
            made.update(slots.tobytes())
            for decoded in turboquant.decode_slots(slots, dim, kind):
                made.update(decoded.tobytes())
    return made.hexdigest()


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_another_instruction_set_computes_the_same(isa: str) -> None:
    program = "from tests.test_turboquant import digest; print(digest())"
    assert run([sys.executable, "-c", program], env={"KVX_CPU_ISA": isa}).strip() == digest()


# --- vLLM's slots -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM's kernels make of the tokens of tests/vllm_turboquant.py, with three seeds."""
    for name in ("vllm", "triton"):
        pytest.importorskip(name)
    out = tmp_path_factory.mktemp("slots") / "slots.npz"
    run(
        [sys.executable, "-m", "tests.vllm_turboquant", out, *map(str, SEEDS)],
        env={"TRITON_INTERPRET": "1"},
    )
    return dict(np.load(out))


SLOT_BYTES = {64: (100, 70, 62, 54), 128: (196, 134, 118, 102), 256: (388, 262, 230, 198)}


GOLDEN = {  # of token 5, head 1 of inputs(64, 1), by vLLM 0.32's kernels
    "turboquant_k8v4": (
        "4c142dc3bca4b72ab04b3ea03bafac38c0b2502abc382c0ead3ea8a5313dbbb63d1e39322eb03539"
        "32b0b8b1ab3dbbb7391f333ebcbc3cb43a31b2393cb935c849ba921d8be8ab42688975b7ed8545c3"
        "984828084ca7bc59b62a7f5db3895ca7fc34e8c0"
    ),
    "turboquant_4bit_nc": (
        "bc4aae78ca81ea9a69bcb66da6cd77bb6b38d917c568c9b5a8ab4b9d63bcb6db564b49ba921d8be8"
        "ab42688975b7ed8545c3984828084ca7bc59b62a7f5db3895ca7fc34e8c0"
    ),
    "turboquant_k3v4_nc": (
        "6ef57235d8979cbb7aabbdb51d430f3247ab6cdb9899bbd6564b49ba921d8be8ab42688975b7ed85"
        "45c3984828084ca7bc59b62a7f5db3895ca7fc34e8c0"
    ),
    "turboquant_3bit_nc": (
        "6ef57235d8979cbb7aabbdb51d430f3247ab6cdb9899bbd6564b541b1a25dd461ca9adb628c524c5"
        "10d6d8526bf3592959ad5739e8c0"
    ),
}


@pytest.mark.parametrize("preset", turboquant.SLOTS)
def test_a_slot_of_vllm(preset: str) -> None:
    keys, values = inputs(64, 1)
    slots = turboquant.encode_slots(keys, values, preset)
    assert slots[5, 1].numpy().tobytes().hex() == GOLDEN[preset]
    assert slots.shape[-1] == SLOT_BYTES[64][turboquant.SLOTS.index(preset)]


@pytest.mark.slow
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("preset", turboquant.SLOTS)
def test_slots_are_vllms(preset: str, dim: int, theirs: dict[str, Any]) -> None:
    """Byte for byte, but for codes of keys where float32 rounding decides between two."""
    size = turboquant.slot_bytes(dim, preset)
    assert size == SLOT_BYTES[dim][turboquant.SLOTS.index(preset)]
    key_bits = {"k8v4": 8, "4bit_nc": 4}.get(preset.removeprefix("turboquant_"), 3)
    codes = dim * key_bits // 8
    for seed in SEEDS:
        found = {
            name: theirs[f"{preset} {dim} {seed} {name}"]
            for name in ("slots", "keys", "values", "slot_size", "centroids")
        }
        assert found["slot_size"] == size
        keys, values = inputs(dim, seed)
        slots = turboquant.encode_slots(keys, values, preset).numpy()
        np.testing.assert_array_equal(slots[..., codes:], found["slots"][..., codes:size])
        if key_bits == 8:
            # GPUs round to nearest, ties to even, as torch does. Triton 3.9's interpreter rounds
            # ties up and loses a carry into the exponent: 1.99 becomes 1.
            e4m3 = keys.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            np.testing.assert_array_equal(slots[..., :codes], e4m3)
            assert (e4m3 == found["slots"][..., :codes]).mean() > 0.9
        else:
            ours, wanted = (codes_of(s, dim, key_bits) for s in (slots, found["slots"]))
            exact = keys.double().numpy()
            norms = np.linalg.norm(exact, axis=-1, keepdims=True) + 1e-8
            y = rotated(exact / norms, None) / math.sqrt(dim)
            middles = (found["centroids"][:-1] + found["centroids"][1:]) / 2
            is_near = np.abs(y[..., None] - middles).min(-1) < NEAR / math.sqrt(dim)
            assert (ours == wanted)[~is_near].all()
            assert (is_near & (y != 0)).mean() < 1e-3
        read_keys, read_values = turboquant.decode_slots(found["slots"], dim, preset)
        np.testing.assert_array_equal(read_values.astype(np.float16), found["values"])
        if key_bits == 8:
            np.testing.assert_array_equal(read_keys.astype(np.float16), found["keys"])
        else:
            turned = rotated(read_keys.astype(np.float64), None) / math.sqrt(dim)
            np.testing.assert_allclose(turned, found["keys"], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("preset", turboquant.SLOTS)
def test_any_bytes_are_a_slot(preset: str) -> None:
    for dim in DIMS:
        size = turboquant.slot_bytes(dim, preset)
        slots = np.random.default_rng(dim).integers(0, 256, (33, size + 3), np.uint8)
        keys, values = turboquant.decode_slots(slots, dim, preset)
        assert keys.shape == values.shape == (33, dim)


@pytest.mark.parametrize(
    ("preset", "key_error", "value_error"),
    [
        ("turboquant_k8v4", 8e-4, 0.012),
        ("turboquant_4bit_nc", 0.0095, 0.012),
        ("turboquant_k3v4_nc", 0.035, 0.012),
        ("turboquant_3bit_nc", 0.035, 0.055),
    ],
)
def test_what_slots_lose(preset: str, key_error: float, value_error: float) -> None:
    for seed in SEEDS:
        keys, values = vectors(1024, 128, seed), vectors(1024, 128, seed + 10)
        slots = turboquant.encode_slots(keys, values, preset)
        read_keys, read_values = turboquant.decode_slots(slots, 128, preset)
        assert relative_error(keys, read_keys) < key_error
        assert relative_error(values, read_values) < value_error


def test_slots_of_numbers_that_are_none() -> None:
    keys, values = vectors(3, 128, 1), vectors(3, 128, 2)
    keys[0] = values[0] = 0
    keys[1, 3] = values[1, 3] = np.nan
    without = keys.copy(), values.copy()
    without[0][1, 3] = without[1][1, 3] = 0
    for preset in turboquant.SLOTS:
        slots = turboquant.encode_slots(keys, values, preset)
        for read in turboquant.decode_slots(slots, 128, preset):
            assert not read[0].any()
        if preset != "turboquant_k8v4":  # E4M3 has a NaN
            assert np.array_equal(slots, turboquant.encode_slots(*without, preset))
        else:
            read_keys, read_values = turboquant.decode_slots(slots, 128, preset)
            assert np.argwhere(np.isnan(read_keys)).tolist() == [[1, 3]]
            assert not np.isnan(read_values).any()


def test_slots_of_large_numbers() -> None:
    """Keys of K8V4 saturate; of values the scale and the least number are float16, or infinite."""
    keys, values = vectors(2, 128, 1), vectors(2, 128, 2)
    keys[0, :3] = 449, -1e30, np.inf
    values[0, 5], values[1, 7] = 1e30, -70000
    for preset in turboquant.SLOTS:
        slots = turboquant.encode_slots(keys, values, preset)
        scale, least = slots[:, -4:].copy().view(np.float16).T
        assert np.isinf(scale).tolist() == [True, False]
        assert np.isinf(least).tolist() == [False, True]
        if preset == "turboquant_k8v4":
            read, _ = turboquant.decode_slots(slots, 128, preset)
            assert read[0, :3].tolist() == [448, -448, 448]
