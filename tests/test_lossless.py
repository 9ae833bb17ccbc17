"""The lossless encoding of bfloat16, read by a decoder that follows the spec. Spec: E.19"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvx_core import InvalidArgumentError, KvxError, OutOfRangeError, UnsupportedError
from kvx_core._c import abi, abi_lossless
from kvx_core.encodings import lossless
from tests.lossless_reference import BLOCK, Bits, Bytes, reference
from tests.native import ROOT, run, sentences_in
from tests.trained import trained

SEEDS = (1, 2, 3)


# --- the spec, slow and obvious -----------------------------------------------------------------


# --- numbers ------------------------------------------------------------------------------------


def bf16(values: npt.NDArray[np.float32]) -> Bits:
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def gaussian(count: int, seed: int) -> Bits:
    return bf16(np.random.default_rng(seed).standard_normal(count, np.float32))


def channels(count: int, seed: int) -> Bits:
    """128 channels of very different sizes."""
    random = np.random.default_rng(seed)
    sizes = np.exp2(random.normal(0, 4, 128)).astype(np.float32)
    return bf16(random.standard_normal(count, np.float32) * np.resize(sizes, count))


def sparse(count: int, seed: int) -> Bits:
    random = np.random.default_rng(seed)
    return np.where(random.random(count) < 0.5, 0, gaussian(count, seed)).astype(np.uint16)


def noise(count: int, seed: int) -> Bits:
    return np.random.default_rng(seed).integers(0, 1 << 16, count, dtype=np.uint16)


def special(count: int, seed: int) -> Bits:
    """Zeros, subnormals, infinities and NaN of all kinds among usual numbers."""
    found = np.array([0, 0x8000, 1, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x7FFF], np.uint16)
    random = np.random.default_rng(seed)
    mixed = np.where(random.random(count) < 0.1, random.choice(found, count), gaussian(count, seed))
    return mixed.astype(np.uint16)


def constant(count: int, seed: int) -> Bits:
    return np.full(count, 0x3F80 + seed, np.uint16)


def edges(count: int, seed: int) -> Bits:
    """Only the smallest and the largest exponents."""
    exponents = np.random.default_rng(seed).choice([0, 1, 2, 253, 254, 255], count)
    return (exponents.astype(np.uint16) << 7) | 5


KINDS: list[Callable[[int, int], Bits]] = [
    *(gaussian, channels, sparse, noise, special, constant, edges)
]
SIZES = (0, 1, 2, 31, 32, 33, 100, 4095, 4096, 4097, 8192 + 65)


def encoded_of(numbers: Bits) -> Bytes:
    found: Bytes = lossless.encode(numbers.view(ml_dtypes.bfloat16))
    return found


def decoded(encoded: Bytes, first: int = 0, count: int | None = None) -> Bits:
    found: Bits = lossless.decode(encoded, first=first, count=count).view(np.uint16)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_comes_back(kind: Callable[[int, int], Bits]) -> None:
    for size in SIZES:
        for seed in SEEDS:
            numbers = kind(size, seed)
            encoded = encoded_of(numbers)
            assert np.array_equal(decoded(encoded), numbers), (size, seed)
            assert len(encoded) <= abi_lossless.bound(size)
            if seed == 1:
                assert np.array_equal(reference(encoded), numbers), size


@pytest.mark.parametrize("seed", SEEDS)
def test_every_number(seed: int) -> None:
    numbers = np.random.default_rng(seed).permutation(1 << 16).astype(np.uint16)
    assert np.array_equal(decoded(encoded_of(numbers)), numbers)
    in_order = np.sort(numbers)  # a block has 32 exponents
    assert np.array_equal(decoded(encoded_of(in_order)), in_order)
    assert len(encoded_of(in_order)) < 2 * len(in_order)


def test_numbers_that_cannot_shrink_are_stored() -> None:
    numbers = noise(BLOCK, 1)
    encoded = encoded_of(numbers)
    assert len(encoded) == 24 + 8 + 8 + 2 * BLOCK == abi_lossless.bound(BLOCK)
    assert np.array_equal(encoded[-2 * BLOCK :].view("<u2"), numbers)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_range_reads_its_blocks_alone(seed: int) -> None:
    """What is damaged elsewhere is not seen; numbers before and behind `into` stay."""
    numbers = channels(10 * BLOCK + 77, seed)
    encoded = encoded_of(numbers)
    random = np.random.default_rng(seed)
    ends = [24 + 8 * 11, *encoded[24 : 24 + 8 * 11].view("<u8").astype(int).tolist()]
    for _ in range(20):
        first = int(random.integers(0, len(numbers)))
        count = int(random.integers(0, min(3 * BLOCK, len(numbers) - first) + 1))
        touched = range(first // BLOCK, -(-(first + count) // BLOCK) if count else first // BLOCK)
        damaged = encoded.copy()
        for block in set(range(11)) - set(touched):
            damaged[ends[block] : ends[block + 1]] ^= 0xFF
        into = np.full(count + 2, 0xABCD, np.uint16)
        lossless.decode(damaged, into=into[1:-1].view(ml_dtypes.bfloat16), first=first)
        assert np.array_equal(into[1:-1], numbers[first : first + count])
        assert into[0] == into[-1] == 0xABCD


def test_torch_and_numpy_and_bytes() -> None:
    numbers = torch.randn(3, 50, 2, 64).to(torch.bfloat16)
    encoded = lossless.encode(numbers)
    assert isinstance(encoded, torch.Tensor)
    assert encoded.dtype is torch.uint8
    assert lossless.num_numbers(encoded) == numbers.numel()
    back = lossless.decode(encoded)
    assert back.dtype is torch.bfloat16
    assert back.tolist() == numbers.flatten().tolist()
    into = torch.empty_like(numbers)
    assert lossless.decode(bytes(encoded.numpy()), into=into) is into
    assert torch.equal(into, numbers)
    part = lossless.decode(memoryview(encoded.numpy()), first=130, count=70)
    assert part.dtype == ml_dtypes.bfloat16
    assert part.tolist() == numbers.flatten()[130:200].tolist()
    same = lossless.encode(numbers.view(torch.uint16).numpy().view(ml_dtypes.bfloat16))
    assert same.tolist() == encoded.tolist()


# --- how small it is ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gaussian_takes_eleven_bits(seed: int) -> None:
    numbers = gaussian(64 * BLOCK, seed)
    assert 2 * len(numbers) / len(encoded_of(numbers)) > 1.46


def test_the_cache_of_a_trained_model_is_1_4_times_smaller() -> None:
    pytest.importorskip("transformers")
    cache = trained()
    assert cache.first_loss > 5
    assert cache.last_loss < cache.entropy, "it has learned nothing but how frequent bytes are"
    sizes = {"k": [0, 0], "v": [0, 0]}
    for name, layers in (("k", cache.keys), ("v", cache.values)):
        for layer in layers:
            encoded = lossless.encode(layer)
            assert torch.equal(
                lossless.decode(encoded).view(torch.int16), layer.view(torch.int16).flatten()
            )
            sizes[name][0] += layer.nbytes
            sizes[name][1] += encoded.nbytes
    ratios = {name: before / after for name, (before, after) in sizes.items()}
    assert min(ratios.values()) >= 1.4, ratios


# --- what is refused ----------------------------------------------------------------------------


def header(encoded: Bytes, at: int, value: int, num_bytes: int = 8) -> Bytes:
    changed = encoded.copy()
    changed[at : at + num_bytes] = list(value.to_bytes(num_bytes, "little"))
    return changed


ONE = encoded_of(gaussian(4200, 1))  # blocks of 4096 and 104 numbers
FIRST = 24 + 16  # byte of the first block
END = int(ONE[24:32].view("<u8")[0])
PLANES = 8 + 104  # byte of the second block, in which its planes begin


def cut(encoded: Bytes, num_bytes: int) -> Bytes:
    return header(encoded, 16, len(encoded) - num_bytes)[:-num_bytes].copy()


REFUSED = [
    (ONE[:0], "encoded has 0 bytes, expected at least the 24 of a header"),
    (ONE[:23], "encoded has 23 bytes, expected at least the 24"),
    (header(ONE, 0, 1, 1), "encoded begins with 01 56 58 4c, expected 'KVXL'"),
    (header(ONE, 5, 1, 1), "encoded has dtype 1 and reserved bytes 00 00, expected BF16 (2)"),
    (header(ONE, 6, 1, 1), "encoded has dtype 2 and reserved bytes 01 00, expected BF16"),
    (header(ONE, 8, 2**63), "encoded says that it has 9223372036854775808 numbers"),
    (header(ONE, 8, 10**9), "encoded says that it has 1000000000 numbers, which do not fit"),
    (ONE[:-1], f"encoded has {len(ONE) - 1} bytes, expected the {len(ONE)} that its header"),
    (header(ONE, 24, 2**64 - 1), "encoded block 0 is at bytes 40 to 18446744073709551615"),
    (header(ONE, 24, 39), "encoded block 0 is at bytes 40 to 39, expected ascending"),
    (header(ONE, 32, END - 1), f"encoded block 1 is at bytes {END} to {END - 1}"),
    (header(ONE, 32, len(ONE) - 1), f"encoded block 1 is at bytes {END} to {len(ONE) - 1}"),
    (header(ONE, 24, 47), "encoded block 0 of 7 bytes is damaged: its length is not one"),
    (header(ONE, FIRST, 5, 1), "is damaged: a width is not 1 to 4"),
    (header(ONE, FIRST + 2, 0, 1), "is damaged: a width is not 1 to 4"),
    (header(ONE, FIRST + 1, 254, 1), "is damaged: a level has symbols past 255"),
    (header(ONE, FIRST + 4, 4097, 2), "is damaged: a level has more other symbols than"),
    (header(ONE, FIRST + 6, 4000, 2), "is damaged: a level has more other symbols than"),
    (header(ONE, FIRST, 0, 1), "is damaged: bytes 1 to 7 of a block of stored numbers"),
    (header(ONE, FIRST, 0, 8), "is damaged: its numbers are cut short"),
    (header(ONE, FIRST + 6, 1, 2), "is damaged: its parts do not add up to its length"),
    (header(ONE, END + PLANES, 2**32 - 1, 4), "damaged: its planes have another number of"),
    (header(ONE, END + PLANES + 4 * 3 * int(ONE[END]) + 3, 128, 1), "ones behind the last"),
]


@pytest.mark.parametrize(("encoded", "sentence"), REFUSED)
def test_what_does_not_fit_is_refused(encoded: Bytes, sentence: str) -> None:
    into = np.full(4200, 7, np.uint16)
    with pytest.raises(InvalidArgumentError, match=re.escape(sentence)) as raised:
        lossless.decode(encoded, into=into.view(ml_dtypes.bfloat16))
    assert "(spec E.19)" in str(raised.value)
    assert (into == 7).all()


def test_what_is_asked_for_must_be_there() -> None:
    into = np.zeros(4200, ml_dtypes.bfloat16)
    with pytest.raises(UnsupportedError, match="encoded has version 2, expected 1"):
        lossless.decode(header(ONE, 4, 2, 1))
    with pytest.raises(OutOfRangeError, match="numbers 1 to 4201 are asked for"):
        lossless.decode(ONE, into=into, first=1)
    with pytest.raises(OutOfRangeError, match="numbers 18446744073709551615 to 4199 are"):
        lossless.decode(ONE, into=into, first=2**64 - 1)
    with pytest.raises(InvalidArgumentError, match="count is 4201, expected at most the 4200"):
        lossless.decode(ONE, count=4201)
    with pytest.raises(InvalidArgumentError, match="into has 4200 numbers, expected 3 as count"):
        lossless.decode(ONE, into=into, count=3)
    assert len(lossless.decode(ONE, first=4200)) == 0


def test_tensors_that_do_not_fit() -> None:
    numbers = torch.zeros(4, 4, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"numbers.dtype is F16, expected BF16"):
        lossless.encode(numbers.half())
    with pytest.raises(InvalidArgumentError, match=r"numbers.stride is \(1, 4\), expected a cont"):
        lossless.encode(numbers.T)
    with pytest.raises(InvalidArgumentError, match=r"numbers is 3, expected a torch"):
        lossless.encode(3)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"encoded.dtype is BF16, expected U8"):
        lossless.decode(numbers)
    with pytest.raises(UnsupportedError, match=r"into.dtype is F32, expected BF16"):
        lossless.decode(ONE, into=torch.zeros(4200))
    frozen = np.zeros(4200, ml_dtypes.bfloat16)
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="into is read-only memory"):
        lossless.decode(ONE, into=frozen)
    with pytest.raises(InvalidArgumentError, match="encoded cannot be read"):
        lossless.decode(memoryview(ONE)[::2])
    for name in ("first", "count"):
        with pytest.raises(InvalidArgumentError, match=f"{name} is True, expected an integer"):
            lossless.decode(ONE, **{name: True})


def wrong_calls(room: Bytes) -> list[tuple[Callable[[], object], str]]:
    """Calls of the C functions that are refused; `room` has 1000 bytes."""
    numbers = gaussian(100, 1)
    data, to, one = numbers.ctypes.data, room.ctypes.data, (ONE.ctypes.data, len(ONE))
    encode, decode = abi_lossless.encode, abi_lossless.decode
    raw = abi_lossless.functions().kvx_lossless_encode
    return [
        (lambda: encode(to, 1000, 0, 100, 2), "data is NULL"),
        (lambda: encode(0, 1000, data, 100, 2), "encoded is NULL"),
        (lambda: encode(to, 239, data, 100, 2), "capacity is 239, expected at least"),
        (lambda: encode(to, 1000, data + 1, 99, 2), "aligned to 2 bytes"),
        (lambda: encode(to, 1000, to + 998, 100, 2), "overlaps encoded"),
        (lambda: encode(to, 1000, data, 2**61, 2), "there are 2305843009213693952"),
        (lambda: encode(to, 1000, 2**64 - 4, 100, 2), "past the end of memory"),
        (lambda: encode(to, 1000, data, 100, 1), "dtype is 1, expected BF16 (2)"),
        (lambda: abi.check(raw(to, 1000, None, numbers.ctypes.data, 100, 2)), "bytes is NULL"),
        (lambda: abi_lossless.num_numbers(0, 24), "encoded is NULL"),
        (lambda: decode(one[0], 0, 2, *one), "overlaps encoded"),
        (lambda: decode(data, 4200, 1, *one), "numbers 4200 to 4201 are asked for"),
        (lambda: lossless.decode(header(ONE, 4, 2, 1)), "encoded has version 2, expected 1"),
    ]


def test_the_functions_of_c_refuse_addresses() -> None:
    room = np.zeros(1000, np.uint8)
    for call, sentence in wrong_calls(room):
        with pytest.raises(KvxError, match=re.escape(sentence)):
            call()
    assert abi_lossless.bound(2**61) == 2**64 - 1
    assert not room.any()


def test_every_sentence_is_said() -> None:
    """A new rule in the sources without a call here that breaks it fails."""
    said = []
    calls = [call for call, _ in wrong_calls(np.zeros(1000, np.uint8))]
    calls += [lambda e=encoded: lossless.decode(e) for encoded, _ in REFUSED]  # type: ignore[misc]
    for call in calls:
        with pytest.raises(KvxError) as raised:
            call()
        said.append(str(raised.value))
    sources = sorted((ROOT / "csrc/encodings").glob("lossless*.cc"))
    sentences = [sentence for source in sources for sentence in sentences_in(source)]
    reasons = re.findall(
        r'"(its [^"]+|a (?:width|level) [^"]+|bytes 1 to 7[^"]+)"', sources[1].read_text()
    )
    assert (len(sentences), len(reasons)) == (17, 9)
    for sentence in sentences:
        pattern = re.sub(r"%(?:ll|0?2)?[a-z]", ".*", re.escape(sentence))
        assert any(re.fullmatch(pattern, text) for text in said), sentence
    for reason in reasons:
        assert any(reason in text for text in said), reason


# --- other instruction sets, and hostile bytes --------------------------------------------------


def digests() -> dict[str, str]:
    """Of what each kind of numbers is encoded into."""
    found = {}
    for kind in KINDS:
        numbers = kind(3 * BLOCK + 77, 2)
        encoded = encoded_of(numbers)
        assert np.array_equal(decoded(encoded), numbers)
        found[kind.__name__] = hashlib.sha256(encoded.tobytes()).hexdigest()
    return found


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_another_instruction_set_writes_the_same_bytes(isa: str) -> None:
    program = "from tests.test_lossless import digests; print(digests())"
    assert run([sys.executable, "-c", program], env={"KVX_CPU_ISA": isa}).strip() == str(digests())
