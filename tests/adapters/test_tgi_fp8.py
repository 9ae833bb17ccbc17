"""FP8 caches of TGI: when it applies scales, their effect on the bytes, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import tgi
from kvx_core import (
    CacheView,
    InvalidArgumentError,
    ScaleDesc,
    UnsupportedError,
    gather_kv,
    migrate,
    write_kv,
)
from tests.facts import SAME_MODEL
from tests.fakes.tgi import Cache, KVScales

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLASHINFER = ("flashinfer", "cuda", "cuda")
SLOTS = torch.tensor([7, 3, 30, 1, 12])


def fp8_quantize(x: Tensor, scale: Tensor, qdtype: torch.dtype) -> Tensor:
    """Source: TGI 3.3.7 layers/fp8.py, fp8_quantize, with a scale and without marlin_kernels"""
    finfo = torch.finfo(qdtype)
    return (x.float() * scale.reciprocal()).clamp(finfo.min, finfo.max).to(qdtype)


def stored_by_tgi(x: Tensor, scale: Tensor, scaled: bool, qdtype: torch.dtype) -> Tensor:
    """Source: TGI 3.3.7 layers/attention/kv_cache.py, KVCache.store"""
    return fp8_quantize(x, scale, qdtype) if scaled and float(scale) != 1 else x.to(qdtype)


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(5, 2, 2, 64, generator=generator) * 20
    return kv[:, 0].half(), kv[:, 1].half()


def view_of(cache: Cache, scales: KVScales) -> CacheView:
    pair = (cache.key, cache.value)
    return tgi.cache_view([pair], cache.spec(), SAME_MODEL, kv_scales=[scales])


def scales_of(view: CacheView) -> tuple[ScaleDesc, ScaleDesc]:
    assert view.k_scales is not None
    assert view.v_scales is not None
    (k,), (v,) = view.k_scales, view.v_scales
    assert k is not None
    assert v is not None
    return k, v


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("flavour", "dtype", "scales", "scaled"),
    [
        (FLASHINFER, E4M3, (1.0, 1.0), False),
        (FLASHINFER, E4M3, (0.5, 0.25), True),
        (FLASHINFER, E4M3, (0.03125, 1.0), True),
        (FLASHINFER, E4M3, (1.0, 2.0), True),
        (FLASHINFER, E5M2, (0.5, 0.25), False),  # "Ignoring FP8 KV cache scales"
        (("paged", "cuda", "cuda"), E4M3, (1.0, 1.0), False),
        (("paged", "ipex", "xpu"), E4M3, (1.0, 1.0), False),
        (("paged", "ipex", "xpu"), E5M2, (1.0, 1.0), False),
        (("flashdecoding-ipex", "ipex", "xpu"), E4M3, (1.0, 1.0), False),
        (("flashdecoding-ipex", "ipex", "xpu"), E5M2, (1.0, 1.0), False),
        (("paged", "ipex", "cpu"), E5M2, (0.5, 0.25), False),  # IPEX ignores them too
        (("flashdecoding-ipex", "ipex", "cpu"), E5M2, (1.0, 1.0), False),
    ],
)
def test_kvx_stores_and_reads_the_bytes_of_tgi(
    flavour: tuple[str, str, str],
    dtype: torch.dtype,
    scales: tuple[float, float],
    scaled: bool,
    seed: int,
) -> None:
    blocks = 40 if flavour == FLASHINFER else 4
    found, expected = (Cache(*flavour, blocks, dtype=dtype) for _ in range(2))
    kv_scales = KVScales.of(*scales)
    key, value = tokens(seed)
    theirs_k = stored_by_tgi(key, kv_scales.key_scale, scaled, dtype)
    theirs_v = stored_by_tgi(value, kv_scales.value_scale, scaled, dtype)
    for slot, k, v in zip(SLOTS.tolist(), theirs_k, theirs_v, strict=True):
        expected.store(slot, k, v)

    view = view_of(found, kv_scales)
    k_scale, v_scale = scales_of(view)
    write_kv(view.layers[0], key, value, SLOTS, k_scale=k_scale, v_scale=v_scale)

    assert found.spec().can_scale(kv_scales) is scaled
    assert (k_scale.to_numpy(), v_scale.to_numpy()) == (scales if scaled else (1.0, 1.0))
    assert torch.equal(found.raw[0], expected.raw[0])
    assert torch.equal(found.raw[1], expected.raw[1])

    # Attention multiplies by k_scale and v_scale if they count.
    table = [[slot] for slot in SLOTS.tolist()]
    if found.block_size > 1:
        table = [[slot // found.block_size] for slot in SLOTS.tolist()]
    lengths = [slot % found.block_size + 1 for slot in SLOTS.tolist()]
    read_k, read_v = gather_kv(
        view.layers[0], table, lengths, dtype="float32", k_scale=k_scale, v_scale=v_scale
    )
    for i, length in enumerate(lengths):
        assert torch.equal(read_k[i, length - 1], theirs_k[i].float() * k_scale.to_numpy().item())
        assert torch.equal(read_v[i, length - 1], theirs_v[i].float() * v_scale.to_numpy().item())


def test_the_scales_are_tgis_own_tensors() -> None:
    cache = Cache(*FLASHINFER, dtype=E4M3)
    kv_scales = KVScales(torch.tensor([0.5]), torch.tensor(0.25))  # checkpoints have both shapes
    k_scale, v_scale = scales_of(view_of(cache, kv_scales))
    assert k_scale.data == kv_scales.key_scale.data_ptr()
    assert v_scale.data == kv_scales.value_scale.data_ptr()
    key, value = tokens(0)
    write_kv(
        tgi.cache_desc(cache.key, cache.value, cache.spec()),
        *(key, value, torch.tensor([7, 3, 8, 1, 2])),
        k_scale=k_scale,
        v_scale=v_scale,
    )


def test_scales_that_are_no_powers_of_two() -> None:
    """TGI multiplies by the reciprocal, KVX divides: some numbers end up on the next code."""
    found, expected = (Cache(*FLASHINFER, 40, dtype=E4M3) for _ in range(2))
    kv_scales = KVScales.of(0.3, 0.07)
    key, value = tokens(3)
    k_scale, v_scale = scales_of(view_of(found, kv_scales))
    desc = tgi.cache_desc(found.key, found.value, found.spec())
    write_kv(desc, key, value, SLOTS, k_scale=k_scale, v_scale=v_scale)
    divided = [
        (x.float() / scale).clamp(-448, 448).to(E4M3)
        for x, scale in ((key, kv_scales.key_scale), (value, kv_scales.value_scale))
    ]
    for slot, k, v in zip(SLOTS.tolist(), *divided, strict=True):
        expected.store(slot, k, v)
    assert torch.equal(found.raw[0], expected.raw[0])
    assert torch.equal(found.raw[1], expected.raw[1])
    theirs = fp8_quantize(key, kv_scales.key_scale, E4M3).view(torch.uint8).int()
    assert (theirs - divided[0].view(torch.uint8).int()).abs().max() <= 1


def test_without_scales_kvx_saturates_where_tgi_overflows() -> None:
    """Without scales TGI's store is Tensor.to alone, which makes infinity of what E5M2 has not."""
    cache = Cache(*FLASHINFER, dtype=E5M2)
    key = torch.full((1, 2, 64), 1e6)
    k_scale, v_scale = scales_of(view_of(cache, KVScales.of(1.0, 1.0)))
    desc = tgi.cache_desc(cache.key, cache.value, cache.spec())
    write_kv(desc, key, key, [5], k_scale=k_scale, v_scale=v_scale)
    assert stored_by_tgi(key, torch.tensor(1.0), False, E5M2).float().isinf().all()
    assert cache.load(5)[0].float().eq(57344).all()


def test_from_half_to_fp8_and_back() -> None:
    half, back = (Cache("paged", "cuda", "cuda") for _ in range(2))
    fp8 = Cache(*FLASHINFER, 40, dtype=E4M3)
    key, value = tokens(4)
    for slot, k, v in zip((32, 33, 34, 35, 36), key, value, strict=True):
        half.store(slot, k, v)
    kv_scales = KVScales.of(0.25, 0.5)
    middle = view_of(fp8, kv_scales).at(slots=tgi.slot_mapping(SLOTS))
    facts = SAME_MODEL
    src = tgi.cache_view([(half.key, half.value)], half.spec(), facts).at([[2]])
    dst = tgi.cache_view([(back.key, back.value)], back.spec(), facts).at([[7]])
    migrate(src, middle, [5])
    migrate(middle, dst, [5])
    for i in range(5):
        k, v = back.load(7 * 16 + i)
        assert torch.equal(k, (fp8_quantize(key[i], kv_scales.key_scale, E4M3).float() / 4).half())
        assert torch.equal(v, (fp8_quantize(value[i], kv_scales.value_scale, E4M3).half() / 2))


# ---- what is refused ----


@pytest.mark.parametrize(
    ("flavour", "dtype", "why"),
    [
        (("flashdecoding", "cuda", ""), E4M3, "TGI allocates no such cache"),
        (("flashdecoding", "rocm", ""), E5M2, "TGI allocates no such cache"),
        (
            ("paged", "cuda", ""),
            E5M2,
            "KVCache.store lets the kernel write 16-bit elements into it",
        ),
        (
            ("paged", "rocm", ""),
            E4M3,
            "the kernel writes the FP8 of the GPU, float8_e4m3fnuz or not, and the cache does "
            "not say which",
        ),
        (("paged", "ipex", "cpu"), E4M3, "TGI allocates no such cache"),
        (("flashdecoding-ipex", "ipex", "cpu"), E4M3, "TGI allocates no such cache"),
        (
            ("paged", "hpu", ""),
            E4M3,
            "the gaudi server stores value * scale, and Gaudi 2's E4M3 ends at 240",
        ),
    ],
    ids=str,
)
def test_fp8_that_is_refused(flavour: tuple[str, str, str], dtype: torch.dtype, why: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        Cache(*flavour, dtype=dtype).spec()
    assert str(raised.value).startswith(f"dtype is {dtype}, expected one of torch.float16, ")
    assert str(raised.value).endswith(f": {why}")


@pytest.mark.parametrize(
    ("flavour", "why"),
    [
        (("paged", "cuda", ""), "KVCache.store gives FP8 keys to a kernel that takes none"),
        (("paged", "ipex", "xpu"), "how IPEX applies them on XPU is not known here"),
        (("flashdecoding-ipex", "ipex", "xpu"), "how IPEX applies them on XPU is not known here"),
    ],
)
def test_scales_that_are_refused(flavour: tuple[str, str, str], why: str) -> None:
    cache = Cache(*flavour, dtype=E4M3)
    with pytest.raises(UnsupportedError) as raised:
        view_of(cache, KVScales.of(1.0, 0.5))
    assert str(raised.value) == (
        f"kv_scales[0] are 1.0 and 0.5, expected 1.0 for {cache.spec().name}: {why}"
    )


@pytest.mark.parametrize(("given", "count"), [(None, "no"), ([], "0"), (2, "2")])
def test_scales_are_one_per_layer(given: Any, count: str) -> None:
    cache = Cache(*FLASHINFER, dtype=E4M3)
    kv_scales = [KVScales.of(1.0, 1.0)] * given if isinstance(given, int) else given
    with pytest.raises(InvalidArgumentError) as raised:
        tgi.cache_view([(cache.key, cache.value)], cache.spec(), SAME_MODEL, kv_scales=kv_scales)
    assert str(raised.value) == (
        f"kv_scales has {count} entries, expected 1, one per layer of a torch.float8_e4m3fn cache: "
        "its attention's kv_scales"
    )
