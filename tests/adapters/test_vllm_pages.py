"""Every backend and version that the adapter's table knows, through KVX and through the engine's
own indexing; and what is refused.

The `store_*` functions are how the sources of that version index the tensor that they bind to a
layer. Where the installed vllm still has the function, it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import vllm
from kvx_adapters.vllm.cache_tensor import kernel_blocks
from kvx_adapters.vllm.encodings import encoding_of
from kvx_adapters.vllm.pages import page_of
from kvx_core import (
    CacheDesc,
    CacheView,
    DType,
    FactsMismatchError,
    InvalidArgumentError,
    Layout,
    ScaleGranularity,
    UnsupportedError,
    describe,
    gather_kv,
    migrate,
    write_kv,
)
from tests.facts import SAME_MODEL
from tests.fakes.vllm import (
    LAYOUTS,
    SENTINEL,
    B,
    D,
    H,
    L,
    N,
    dense,
    make_spec,
    needs_vllm,
    random_tokens,
    some_slots,
    views_of,
)

Store = Callable[[Tensor, int, int, Tensor, Tensor], None]  # cache, block, token, K and V (H, D)


def store_tensors(cache: Tensor, b: int, n: int, k: Tensor, v: Tensor) -> None:
    key_cache, value_cache = cache.unbind(0)
    key_cache[b, n], value_cache[b, n] = k, v


def store_planes(cache: Tensor, b: int, n: int, k: Tensor, v: Tensor) -> None:
    key_cache, value_cache = cache.unbind(1)
    key_cache[b, n], value_cache[b, n] = k, v


def store_halves(cache: Tensor, b: int, n: int, k: Tensor, v: Tensor) -> None:
    sizes = [k.shape[-1], v.shape[-1]]
    key_cache, value_cache = cache.transpose(1, 2).split(sizes, dim=-1)
    key_cache[b, n], value_cache[b, n] = k, v


def store_halves_of_tokens(cache: Tensor, b: int, n: int, k: Tensor, v: Tensor) -> None:
    cache[b, n, :, : k.shape[-1]], cache[b, n, :, k.shape[-1] :] = k, v


def store_slots(cache: Tensor, b: int, n: int, k: Tensor, v: Tensor) -> None:
    key_cache, value_cache = cache.unflatten(-1, k.shape).unbind(1)
    key_cache[b, n], value_cache[b, n] = k, v


def store_packed(cache: Tensor, b: int, n: int, k: Tensor, v: Tensor) -> None:
    (heads, dim), x = k.shape, 16 // cache.element_size()
    key_cache = cache[0].view(cache.shape[1], heads, dim // x, -1, x)
    value_cache = cache[1].view(cache.shape[1], heads, dim, -1)
    key_cache[b, :, :, n], value_cache[b, :, :, n] = k.view(heads, dim // x, x), v


def store_packed_slots(cache: Tensor, b: int, n: int, k: Tensor, v: Tensor) -> None:
    store_packed(cache.transpose(0, 1), b, n, k, v)


def store_cpu_tensors(cache: Tensor, b: int, n: int, k: Tensor, v: Tensor) -> None:
    heads, dim = k.shape
    cache[0, b].view(heads, dim, -1)[:, :, n], cache[1, b, :, n] = k, v


def store_cpu_pages(cache: Tensor, b: int, n: int, k: Tensor, v: Tensor) -> None:
    heads, dim = k.shape
    k_pages, v_pages = cache[b].view(heads, 2, -1).unbind(1)
    k_pages.view(heads, dim, -1)[:, :, n], v_pages.view(heads, -1, dim)[:, n] = k, v


# backend, versions, axes of the bound tensor, {layout: axes in memory}, how the engine indexes it.
# K: the two of K and V; C: a row of K or V, or what `cell` says. Source: get_kv_cache_shape and
# get_kv_cache_stride_order of those versions; since 0.29 customize_spec.
NHD_HND = {"NHD": "BNHC", "HND": "BHNC"}
SAME = {"NHD": "BHNC", "HND": "BHNC"}
SIX = {name: name for name in LAYOUTS}
CASES: list[tuple[str, tuple[str, ...], str, dict[str, str], Store]] = [
    *(
        ("FLASH_ATTN", versions, axes, {"NHD": axes, "HND": hnd}, store)
        for versions, axes, hnd, store in (
            (("0.20.2", "0.22.1"), "KBNHC", "KBHNC", store_tensors),
            (("0.23.0", "0.25.1"), "BKNHC", "BKHNC", store_planes),
        )
    ),
    *(
        (backend, ("0.20.0", "0.25.1"), "BKNHC", {"NHD": "BKNHC", "HND": "BKHNC"}, store_planes)
        for backend in ("FLASHINFER", "TRITON_ATTN")
    ),
    *(
        (backend, versions, "BHNC", orders, store_halves)
        for backend in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
        for versions, orders in (
            (("0.26.0", "0.28.1"), NHD_HND),
            (("0.29.0", "0.31.0", "0.32.0", "0.33.0"), SIX),
        )
    ),
    ("FLEX_ATTENTION", ("0.22.0",), "KBNHC", {"NHD": "KBNHC", "HND": "KBNHC"}, store_tensors),
    ("FLEX_ATTENTION", ("0.23.0",), "BKNHC", {"NHD": "BNKHC", "HND": "BNKHC"}, store_planes),
    ("FLEX_ATTENTION", ("0.26.0", "0.28.1"), "BHNC", {"NHD": "BNHC", "HND": "BNHC"}, store_halves),
    ("FLEX_ATTENTION", ("0.29.0",), "BHNC", {"LBNHC": "LBNHC", "NHD": "LBNHC"}, store_halves),
    ("FLEX_ATTENTION", ("0.33.0",), "BHNC", {"LBNHC": "LBNHC"}, store_halves),
    ("TRITON_FLASH_ATTN", ("0.30.0",), "BHNC", SIX, store_halves),
    ("TRITON_FLASHINFER", ("0.33.0",), "BHNC", SIX, store_halves),
    ("HPC_ATTN", ("0.29.0",), "BHNC", {"LBNHC": "LBNHC"}, store_halves),
    ("CPU_ATTN", ("0.20.2", "0.22.1"), "KBHNC", {"HND": "KBHNC"}, store_cpu_tensors),
    ("CPU_ATTN", ("0.23.0", "0.28.0"), "BHNC", {"HND": "BHNC"}, store_cpu_pages),
    ("CPU_ATTN", ("0.29.0", "0.33.0"), "BHNC", {"LBHNC": "LBHNC"}, store_cpu_pages),
    ("ROCM_ATTN", ("0.20.2", "0.28.0"), "KBNHC", {"NHD": "KBNHC", "HND": "KBNHC"}, store_packed),
    ("ROCM_AITER_UNIFIED_ATTN", ("0.26.0", "0.28.1"), "BHNC", SAME, store_halves),
    *(
        (
            backend,
            ("0.29.0", "0.33.0"),
            "BHNC",
            {"LBHNC": "LBHNC", "LHBNC": "LHBNC"},
            store_halves,
        )
        for backend in ("ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN")
    ),
]
# Two head slots, K and V, of all heads of a token: (B, 2, N, H * D).
SLOT_CASES: list[tuple[str, str, tuple[str, ...], Store]] = [
    ("ROCM_ATTN", "0.29.0", ("LHBNC", "LBHNC"), store_packed_slots),
    ("ROCM_ATTN", "0.32.0", ("LHBNC", "LBHNC"), store_packed_slots),
    ("ROCM_SEGMENTED_ATTN", "0.32.0", ("LHBNC", "LBHNC"), store_slots),
    ("B12X", "0.30.0", ("LBHNC", "BLHNC"), store_slots),
]


def cases() -> list[Any]:
    return [
        pytest.param(
            backend, version, axes, layout, order, store, id=f"{backend}-{version}-{layout}"
        )
        for backend, versions, axes, orders, store in CASES
        for version in versions
        for layout, order in orders.items()
    ]


def check_both_ways(
    spec: vllm.LayerSpec, raw: Tensor, cache: Tensor, store: Store, v_dim: int = D
) -> None:
    """KVX writes the bytes that the engine would, and reads what the engine wrote."""
    heads, num_slots = spec.num_kv_heads, spec.num_blocks * spec.block_size
    slots = some_slots(31, num_slots)
    key = random_tokens(31, spec.dtype, heads, spec.head_size)
    value = random_tokens(33, spec.dtype, heads, v_dim)[:31]
    expected = raw.clone()
    theirs = expected.view(spec.dtype).as_strided(
        cache.shape, cache.stride(), cache.storage_offset()
    )
    for slot, k, v in zip(slots.tolist(), key, value, strict=True):
        if slot >= 0:
            store(theirs, slot // spec.block_size, slot % spec.block_size, k, v)
    assert (expected != SENTINEL).any()

    desc = vllm.cache_desc(cache, spec)
    desc.validate()
    write_kv(desc, key, value, vllm.slot_mapping(slots))
    torch.testing.assert_close(raw, expected, rtol=0, atol=0)

    blocks = [list(range(spec.num_blocks))]
    found_k, found_v = gather_kv(vllm.cache_desc(theirs, spec), blocks, [num_slots])
    kept = slots >= 0
    assert torch.equal(found_k[0, slots[kept]], key[kept])
    assert torch.equal(found_v[0, slots[kept]], value[kept])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize(("backend", "version", "axes", "layout", "order", "store"), cases())
def test_every_backend_and_version(
    backend: str,
    version: str,
    axes: str,
    layout: str,
    order: str,
    store: Store,
    dtype: torch.dtype,
) -> None:
    num_layers = L if "L" in order else 1
    row = D if "K" in axes else 2 * D
    extent = {"L": num_layers, "B": B, "K": 2, "H": H, "N": N, "C": row}
    raw, cache = dense(("L" if "L" in order else "") + axes, order, extent, dtype)
    if "L" in order:
        cache = cache[1]
    spec = make_spec(
        layout,
        backend=backend,
        version=version,
        dtype=dtype,
        num_layers=num_layers,
        isa="vec" if backend == "CPU_ATTN" else None,
    )
    check_both_ways(spec, raw, cache, store)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize(
    ("backend", "version", "layout", "store"),
    [
        pytest.param(backend, version, layout, store, id=f"{backend}-{version}-{layout}")
        for backend, version, layouts, store in SLOT_CASES
        for layout in layouts
    ],
)
def test_two_head_slots(
    backend: str, version: str, layout: str, store: Store, dtype: torch.dtype
) -> None:
    heads = 3
    extent = {"L": L, "B": B, "H": 2, "N": N, "C": heads * D}
    raw, caches = dense("LBHNC", layout, extent, dtype)
    spec = make_spec(
        layout,
        backend=backend,
        version=version,
        dtype=dtype,
        num_kv_heads=heads,
        num_head_slots=2,
        state_content_bytes=heads * D * dtype.itemsize,
    )
    check_both_ways(spec, raw, caches[2], store)


@pytest.mark.parametrize(
    ("backend", "version", "layout", "order"),
    [
        ("FLASH_ATTN_DIFFKV", "0.22.1", "NHD", "BNHC"),
        ("FLASH_ATTN_DIFFKV", "0.25.1", "HND", "BHNC"),
        ("TRITON_ATTN_DIFFKV", "0.24.0", "HND", "BHNC"),
        ("FLASH_ATTN_DIFFKV", "0.26.0", "NHD", "BNHC"),
        ("TRITON_ATTN_DIFFKV", "0.28.0", "HND", "BHNC"),
        *(("FLASH_ATTN_DIFFKV", "0.32.0", layout, layout) for layout in LAYOUTS),
        ("TRITON_ATTN_DIFFKV", "0.33.0", "LBNHC", "LBNHC"),
    ],
)
def test_v_of_another_size(backend: str, version: str, layout: str, order: str) -> None:
    size_v = 8
    axes = "BHNC" if make_spec(version=version).minor >= 26 else "BNHC"
    num_layers = L if "L" in order else 1
    extent = {"L": num_layers, "B": B, "H": H, "N": N, "C": D + size_v}
    raw, cache = dense(("L" if "L" in order else "") + axes, order, extent, torch.bfloat16)
    if "L" in order:
        cache = cache[0]
    spec = make_spec(
        layout,
        backend=backend,
        version=version,
        num_layers=num_layers,
        head_size_v=size_v,
        page_size_bytes=H * N * (D + size_v) * 2,
    )
    store = store_halves if axes == "BHNC" else store_halves_of_tokens
    check_both_ways(spec, raw, cache, store, v_dim=size_v)
    desc = vllm.cache_desc(cache, spec)
    assert (desc.head_dim, desc.v_head_dim) == (D, size_v)


@pytest.mark.parametrize("version", ["0.20.2", "0.28.0", "0.29.0", "0.32.0"])
def test_mla_has_no_v(version: str) -> None:
    """Before 0.29 the tensor has no axis of heads; since then only the layer's view lacks it."""
    size = 576
    layout = "NHD" if version < "0.29" else "LBNHC"
    raw, cache = dense("BNC", "BNC", {"B": B, "N": N, "C": size}, torch.bfloat16)
    spec = make_spec(
        layout,
        backend="TRITON_MLA",
        version=version,
        num_kv_heads=1,
        head_size=size,
        head_size_v=0,
        page_size_bytes=N * size * 2,
        num_layers=1,
    )
    key, slots = random_tokens(9, torch.bfloat16, 1, size), some_slots(9, B * N)
    desc = vllm.cache_desc(cache.unsqueeze(1), spec)
    assert desc.v is None
    assert desc == vllm.cache_desc(cache, spec)
    write_kv(desc, key, None, vllm.slot_mapping(slots))
    kept = slots >= 0
    assert torch.equal(cache.view(-1, 1, size)[slots[kept]], key[kept])
    assert (raw == SENTINEL).sum() >= raw.numel() - int(kept.sum()) * size * 2
    view = vllm.cache_view([cache], spec, SAME_MODEL)
    assert (view.k_scales, view.v_scales) == (None, None)


def test_mla_fp8_has_one_scale() -> None:
    _, cache = dense("BHNC", "BHNC", {"B": B, "H": 1, "N": N, "C": 64}, torch.uint8)
    spec = make_spec(
        backend="FLASHMLA",
        dtype=torch.uint8,
        kv_cache_dtype="fp8",
        num_kv_heads=1,
        head_size=64,
        head_size_v=0,
        page_size_bytes=N * 64,
        num_layers=1,
    )
    view = vllm.cache_view([cache], spec, SAME_MODEL, k_scales=[0.5], v_scales=[1.0])
    assert view.layers[0].k.dtype is DType.F8_E4M3
    assert view.k_scales is not None
    assert view.k_scales[0] is not None


# ---- rows with a scale of their own ----


def per_token_head_spec(name: str, layout: str = "LBHNC", **fields: Any) -> vllm.LayerSpec:
    row = (D // 2 if name.startswith("int4") else D) + 4
    defaults = {
        "kv_cache_dtype": f"{name}_per_token_head",
        "dtype": torch.int8 if name == "int8" else torch.uint8,
        "state_content_bytes": 2 * row,
        "page_size_bytes": H * N * 2 * row,
    }
    return make_spec(layout, **(defaults | fields))


def per_token_head_caches(spec: vllm.LayerSpec) -> list[Tensor]:
    content = spec.page_size_bytes // (H * N)
    extent = {"L": L, "B": B, "H": H, "N": N, "C": content}
    return list(dense("LBHNC", spec.layout, extent, spec.dtype)[1])


PER_TOKEN_HEAD = {"fp8": (torch.float8_e4m3fn, 448.0, 1 / 15), "int8": (torch.int8, 127.0, 0.0)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PER_TOKEN_HEAD)
def test_bytes_with_a_scale_per_token_and_head(name: str, layout: str) -> None:
    dtype, largest, rtol = PER_TOKEN_HEAD[name]
    spec = per_token_head_spec(name, layout)
    caches = per_token_head_caches(spec)
    view = vllm.cache_view(caches, spec, SAME_MODEL)
    assert view.k_scales is not None
    assert view.v_scales is not None
    k_scale, v_scale = view.k_scales[1], view.v_scales[1]
    assert k_scale is not None
    assert v_scale is not None
    assert k_scale.granularity is ScaleGranularity.PER_TOKEN_HEAD
    assert k_scale.data == view.layers[1].k.data + D
    assert vllm.inline_scales(caches[1], spec) == (k_scale, v_scale)
    assert view.layers[1].head_dim == D
    key, value = random_tokens(9, torch.float32), random_tokens(11, torch.float32)[:9]
    slots = torch.arange(40, 49)
    write_kv(view.layers[1], key, value, slots, k_scale=k_scale, v_scale=v_scale, find_scales=True)
    # Read as Triton's kernels do: [K | scale | V | scale] per token and head.
    rows = caches[1].transpose(1, 2)[slots // N, slots % N]
    for token, row in ((key, rows[..., : D + 4]), (value, rows[..., D + 4 :])):
        scale = row[..., D:].contiguous().view(torch.float32)
        torch.testing.assert_close(scale[..., 0], token.abs().amax(-1) / largest, rtol=1e-6, atol=0)
        found = row[..., :D].contiguous().view(dtype).float() * scale
        atol = 1e-3 if rtol else float(scale.max()) * 0.501  # half a step
        torch.testing.assert_close(found, token, rtol=rtol, atol=atol)


def test_rows_with_a_scale_are_known_since_0_26() -> None:
    spec = per_token_head_spec("int8", "NHD", version="0.26.0")
    assert encoding_of(spec).inline_scales


def test_int8_rows_of_vllm_are_numbers() -> None:
    """What vLLM's kernel has stored, in one order, becomes another engine's bfloat16 in another.

    Source: vllm 0.32 v1/attention/ops/triton_reshape_and_cache_flash.py
    """
    spec = per_token_head_spec("int8", "BHLNC")
    caches = per_token_head_caches(spec)
    tokens = random_tokens(L * 2 * 9, torch.float32).view(L, 2, 9, H, D)
    slots = torch.arange(40, 49)
    for i, cache in enumerate(caches):
        rows = cache.transpose(1, 2)  # [block, token, head, 2 * (D + 4)]
        for half in (0, 1):
            token = tokens[i, half]
            scale = (token.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-6)
            codes = token * (1 / scale)
            codes = (
                torch.where(codes >= 0, codes + 0.5, codes - 0.5).clamp(-128, 127).to(torch.int8)
            )
            tokens[i, half] = codes.float() * scale
            row = torch.cat([codes, scale.view(torch.int8)], -1)
            begin = half * (D + 4)
            rows[slots // N, slots % N, :, begin : begin + D + 4] = row
    out = torch.zeros(2, L, 3, 4, H, D, dtype=torch.bfloat16)
    layers = (
        CacheDesc.from_kv(describe(k, Layout.BLOCK_NHD), describe(v, Layout.BLOCK_NHD))
        for k, v in zip(*out, strict=True)
    )
    target = CacheView(tuple(layers), SAME_MODEL)
    source = vllm.cache_view(caches, spec, SAME_MODEL)
    assert source.layers[0].k.dtype is DType.S8
    migrate(source.at(slots=slots), target.at(block_table=[[2, 0, 1]]), [9])
    found = out[:, :, [2, 0, 1]].flatten(2, 3)[:, :, :9]
    assert torch.equal(found.transpose(0, 1), tokens.to(torch.bfloat16))


@needs_vllm
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PER_TOKEN_HEAD)
def test_inline_scales_are_where_triton_has_them(name: str, layout: str) -> None:
    """TRITON_ATTN's own spec, and the function that makes its scale tensors."""
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

    spec = per_token_head_spec(name, layout)
    theirs = TritonAttentionBackend.customize_spec(
        interface.FullAttentionSpec(
            block_size=N,
            num_kv_heads=H,
            head_size=D,
            dtype=spec.dtype,
            kv_quant_mode=interface.get_kv_quant_mode(f"{name}_per_token_head"),
        )
    )
    assert theirs.state_content_bytes == spec.state_content_bytes
    _, caches = views_of(theirs, spec)
    impl = SimpleNamespace(_k_scale_cache=None)
    TritonAttentionImpl._ensure_scale_caches(impl, caches[2])
    scales = vllm.inline_scales(caches[2], spec)
    assert scales is not None
    for ours, tensor in zip(scales, (impl._k_scale_cache, impl._v_scale_cache), strict=True):
        assert (ours.data, ours.shape) == (tensor.data_ptr(), tuple(tensor.shape))
        assert ours.stride == tensor.stride()


def test_rows_of_bytes_go_to_their_own_kind_as_they_are() -> None:
    """Blocks of 16 of one order into blocks of 4 of another: the bytes of every row are kept."""
    name = "int4"
    src_spec = per_token_head_spec(name, "BHLNC")
    row = src_spec.page_size_bytes // (H * N * 2)
    dst_spec = per_token_head_spec(
        name, "LBNHC", num_blocks=4 * B, block_size=4, page_size_bytes=H * 4 * 2 * row
    )
    src, dst = (
        per_token_head_caches(src_spec),
        list(
            dense(
                "LBHNC", "LBNHC", {"L": L, "B": 4 * B, "H": H, "N": 4, "C": 2 * row}, src_spec.dtype
            )[1]
        ),
    )
    for i, cache in enumerate(src):
        generator = torch.Generator().manual_seed(i)
        cache.copy_(torch.randint(-128, 128, cache.shape, generator=generator).to(cache.dtype))
    ends = [
        vllm.cache_view(caches, spec, SAME_MODEL)
        for caches, spec in ((src, src_spec), (dst, dst_spec))
    ]
    assert ends[0].layers[0].k.dtype is DType.U8
    assert ends[0].layers[0].head_dim == row
    migrate(ends[0].at([[3, 5]]), ends[1].at([[9, 1, 7, 2, 5]]), [19])
    for one, other in zip(src, dst, strict=True):
        for i in range(19):
            assert torch.equal(
                one[[3, 5][i // N], :, i % N], other[[9, 1, 7, 2, 5][i // 4], :, i % 4]
            )


def test_rows_of_bytes_are_not_numbers() -> None:
    opaque = vllm.cache_view(
        per_token_head_caches(per_token_head_spec("int4")),
        per_token_head_spec("int4"),
        SAME_MODEL,
    )
    spec = make_spec(head_size=D // 2 + 4)
    extent = {"L": L, "B": B, "H": H, "N": N, "C": 2 * (D // 2 + 4)}
    values = vllm.cache_view(
        list(dense("LBHNC", "LBNHC", extent, torch.bfloat16)[1]), spec, SAME_MODEL
    )
    with pytest.raises(
        (InvalidArgumentError, FactsMismatchError), match="U8 holds opaque bytes and is never conv"
    ):
        migrate(opaque.at([[1]]), values.at([[1]]), [4])


@pytest.mark.parametrize(("name", "row"), [("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352)])
def test_rows_of_sparse_mla(name: str, row: int) -> None:
    spec = make_spec(
        backend="FLASHMLA_SPARSE",
        kv_cache_dtype=name,
        dtype=torch.uint8,
        num_kv_heads=1,
        head_size=576,
        head_size_v=0,
        state_content_bytes=row,
        block_size=64,
        page_size_bytes=64 * row,
        num_layers=1,
    )
    _, cache = dense("BHNC", "BHNC", {"B": B, "H": 1, "N": 64, "C": row}, torch.uint8)
    desc = vllm.cache_desc(cache, spec)
    assert (desc.k.dtype, desc.head_dim, desc.v) == (DType.U8, row, None)
    tokens = torch.arange(3 * row).view(3, 1, row).to(torch.uint8)
    write_kv(desc, tokens, None, [64, -1, 127])
    assert torch.equal(cache[1, :, [0, 63]].transpose(0, 1), tokens[[0, 2]])


# ---- tensors that look alike ----


def test_split_and_packed_look_alike_at_two_heads() -> None:
    """What corrupted LMCache: [NB, BS, 2, NH * HS] of old and [NB, BS, NH, 2 * HS] of 0.26.

    At NH = 2 both are the same 4-tuple. Who takes K to be [:, :, 0] reads K and V of head 0.
    """
    heads = 2
    split_raw, split = dense(
        "BKNHC", "BNKHC", {"B": B, "K": 2, "N": N, "H": 2, "C": D}, torch.float32
    )
    packed_raw, packed = dense("BHNC", "BNHC", {"B": B, "H": 2, "N": N, "C": 2 * D}, torch.float32)
    as_lmcache_sees_it = [
        raw.view(torch.float32).view(B, N, 2, 2 * D) for raw in (split_raw, packed_raw)
    ]
    key, value = random_tokens(1, torch.float32)[0], random_tokens(2, torch.float32)[0]
    store_planes(split, 3, 5, key, value)
    store_halves(packed, 3, 5, key, value)

    assert torch.equal(as_lmcache_sees_it[0][3, 5, 0].view(heads, D), key)
    guessed = as_lmcache_sees_it[1][3, 5, 0].view(heads, D)
    assert not torch.equal(guessed, key)
    assert torch.equal(guessed, torch.stack([key[0], value[0]]))

    split_spec = make_spec(
        "NHD", backend="FLEX_ATTENTION", version="0.25.1", dtype=torch.float32, num_layers=1
    )
    packed_spec = make_spec(
        "NHD", backend="FLEX_ATTENTION", version="0.26.0", dtype=torch.float32, num_layers=1
    )
    for cache, spec in ((split, split_spec), (packed, packed_spec)):
        found_k, found_v = gather_kv(vllm.cache_desc(cache, spec), [[3]], [N])
        assert torch.equal(found_k[0, 5], key)
        assert torch.equal(found_v[0, 5], value)
    for raw, spec in ((split_raw, split_spec), (packed_raw, packed_spec)):
        with pytest.raises(InvalidArgumentError, match=r"kv_cache\.shape is \(7, 16, 2, 48\), exp"):
            vllm.cache_desc(raw.view(torch.float32).view(B, N, 2, 2 * D), spec)


def test_head_slots_and_heads_look_alike_at_two_heads() -> None:
    """[B, 2, N, 2 * D] is K and V of two heads to B12X, two heads of K and V to FLASH_ATTN."""
    _, cache = dense("BHNC", "BHNC", {"B": B, "H": 2, "N": N, "C": 2 * D}, torch.bfloat16)
    slots = make_spec(
        "LBHNC", backend="B12X", num_layers=1, num_head_slots=2, state_content_bytes=2 * D * 2
    )
    heads = make_spec("LBHNC", backend="FLASH_ATTN", num_layers=1)
    assert vllm.cache_desc(cache, slots).k.stride == (2 * N * 2 * D, D, 2 * D, 1)
    assert vllm.cache_desc(cache, heads).k.stride == (2 * N * 2 * D, N * 2 * D, 2 * D, 1)
    for backend, num_head_slots, message in (
        ("FLASH_ATTN", 2, "num_head_slots is 2, expected None for FLASH_ATTN"),
        ("B12X", None, "num_head_slots is None, expected 2 for B12X"),
        ("ROCM_AITER_FA", 2, "ROCM_AITER_FA keeps V in groups of tokens of 16 bytes, which str"),
    ):
        spec = make_spec("LBHNC", backend=backend, num_layers=1, num_head_slots=num_head_slots)
        with pytest.raises(UnsupportedError, match=message):
            vllm.cache_desc(cache, spec)


@needs_vllm
def test_rocm_attn_as_the_installed_vllm_has_it() -> None:
    """Its own spec, views and split_kv_cache, on tensors of the CPU."""
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
    from vllm.v1.attention.ops.paged_attn import PagedAttention

    theirs = RocmAttentionBackend.customize_spec(
        interface.FullAttentionSpec(block_size=N, num_kv_heads=3, head_size=D, dtype=torch.bfloat16)
    )
    for layout in RocmAttentionBackend.supported_kv_cache_layouts():
        spec = make_spec(
            layout.name,
            backend=RocmAttentionBackend.get_name(),
            num_kv_heads=3,
            num_head_slots=theirs.num_head_slots,
            state_content_bytes=theirs.state_content_bytes,
            head_size_v=theirs.head_size_v,
        )
        _, caches = views_of(theirs, spec)
        k, v = PagedAttention.split_kv_cache(caches[1].transpose(0, 1), 3, D)
        desc = vllm.cache_desc(caches[1], spec)
        assert desc.v is not None
        assert (desc.k.data, desc.k.shape, desc.k.stride) == (
            k.data_ptr(),
            tuple(k.shape),
            k.stride(),
        )
        assert (desc.v.data, desc.v.stride) == (v.data_ptr(), v.transpose(2, 3).stride())


# ---- what is refused ----

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"version": "0.19.1"}, "vllm is 0.19.1, expected 0.20 to 0.33: other versions may place K"),
    ({"version": "0.34.0"}, "vllm is 0.34.0, expected 0.20 to 0.33"),
    ({"version": "1.0.0"}, "vllm is 1.0.0, expected 0.20 to 0.33"),
    ({"version": "dev"}, "vllm is dev, expected 0.20 to 0.33"),
    ({"backend": "CUSTOM"}, "backend is 'CUSTOM', expected one of FLASH_ATTN, "),
    ({"backend": "MINIMAX_M3_SPARSE"}, "where others put K and V inside a page is not described"),
    (
        {"backend": "DEEPSEEK_V32_INDEXER"},
        "backend is 'DEEPSEEK_V32_INDEXER': its pages hold the data of all tokens and then their",
    ),
    ({"backend": "DEEPSEEK_SPARSE_SWA"}, "its pages hold the data of all tokens and then their"),
    ({"backend": "FLASHMLA_SPARSE_DSV4"}, "its pages hold the data of all tokens and then their"),
    ({"backend": "CompressorBackend"}, "its rows are tokens that no compressed entry stands for"),
    (
        {"backend": "TURBOQUANT"},
        "its vectors are rotated and coded, in an order that depends",
    ),
    (
        {"backend": "ULTRAQUANT"},
        "its vectors are rotated and coded, in an order that depends",
    ),
    (
        {"backend": "ROCM_AITER_FA", "version": "0.28.0", "layout": "NHD"},
        "vllm is 0.28.0, expected 0.29 or later for backend ROCM_AITER_FA, whose earlier pages",
    ),
    (
        {"backend": "ROCM_ATTN", "version": "0.33.0", "interleaved_v": True},
        "backend ROCM_ATTN keeps V in groups of tokens of 16 bytes, which strides cannot say",
    ),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype is 'nvfp4': its pages hold the FP4 data of all"),
    ({"kv_cache_dtype": "turboquant_k8v4"}, "its vectors are rotated and coded, in an order that"),
    ({"kv_cache_dtype": "ultraquant_4bit"}, "its vectors are rotated and coded, in an order that"),
    ({"kv_cache_dtype": "octave_k3v4"}, "its vectors are rotated and coded, in an order that"),
    (
        {"kv_cache_dtype": "fp8_per_token_head", "backend": "FLASH_ATTN"},
        "kv_cache_dtype is 'fp8_per_token_head' for backend FLASH_ATTN of vllm 0.32.0, expected "
        "TRITON_ATTN since 0.26",
    ),
    (
        {"kv_cache_dtype": "int8_per_token_head", "version": "0.25.1", "layout": "NHD"},
        "expected TRITON_ATTN since 0.26",
    ),
    (
        {
            "kv_cache_dtype": "fp8_ds_mla",
            "head_size": 576,
            "tokens_per_state": 2,
            "backend": "FLASHMLA_SPARSE",
        },
        "with head_size 576, state_content_bytes None and tokens_per_state 2, expected 576, 656 an",
    ),
    (
        {"kv_cache_dtype": "fp8_ds_mla", "head_size": 512, "backend": "FLASHMLA_SPARSE"},
        "kv_cache_dtype is 'fp8_ds_mla' with head_size 512, state_content_bytes None and "
        "tokens_per_state 1, expected 576, 656 and 1: the pages of other models hold the data",
    ),
    ({"kv_cache_dtype": "float16"}, "'float16' for dtype torch.bfloat16, expected 'auto' or"),
    ({"kv_cache_dtype": "fp8_inc"}, "kv_cache_dtype is 'fp8_inc' for dtype torch.bfloat16"),
    ({"dtype": torch.uint8}, "dtype is torch.uint8 for kv_cache_dtype 'auto', expected"),
    ({"head_size_v": 16}, "head_size_v is 16, expected None or 24 for TRITON_ATTN"),
    ({"num_head_slots": 4}, "num_head_slots is 4, expected None for TRITON_ATTN"),
    ({"state_content_bytes": 104}, "state_content_bytes is 104, expected None or 96"),
    ({"tokens_per_state": 4}, "tokens_per_state is 4, expected 1 for TRITON_ATTN"),
    (
        {"layout": "LHBNC", "page_size_bytes": H * N * 2 * D * 2 + 64},
        "whose pages are not contiguous and so cannot be padded",
    ),
    (
        {"backend": "CPU_ATTN", "layout": "LBHNC", "isa": "amx"},
        "isa is 'amx', expected 'vec' or 'vec16': AMX pages are tiles of 16 x 2",
    ),
    ({"backend": "CPU_ATTN", "layout": "LBHNC", "isa": "neon"}, "isa is 'neon', expected 'vec' or"),
    ({"backend": "CPU_ATTN", "layout": "LBHNC"}, "isa is None, expected 'vec' or 'vec16'"),
    (
        {"backend": "ROCM_ATTN", "layout": "LHBNC", "kv_cache_dtype": "fp8", "dtype": torch.uint8},
        "kv_cache_dtype is 'fp8' on ROCm, whose FP8 may be the FNUZ variant",
    ),
]


@pytest.mark.parametrize(
    ("fields", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED]
)
def test_unknown_is_refused(fields: dict[str, Any], message: str) -> None:
    spec = make_spec(**fields)
    kv_cache = torch.zeros(B, H, N, 2 * D, dtype=spec.dtype)
    with pytest.raises(UnsupportedError) as error:
        vllm.cache_desc(kv_cache, spec)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["fp8", "fp8_per_token_head"])
def test_fp8_on_rocm_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec("LBHNC", dtype=torch.uint8, kv_cache_dtype=name)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(UnsupportedError, match="on ROCm, whose FP8 may be the FNUZ variant"):
        vllm.cache_desc(torch.zeros(B, H, N, 2 * D, dtype=torch.uint8), spec)
    encoding_of(per_token_head_spec("int8"))


def test_a_cache_of_values_has_no_scales_in_it() -> None:
    spec = make_spec("LBHNC", num_layers=1)
    assert vllm.inline_scales(torch.zeros(B, H, N, 2 * D, dtype=spec.dtype), spec) is None


def test_scales_in_the_cache_began_with_0_26() -> None:
    assert encoding_of(per_token_head_spec("int8", "NHD", version="0.26.0")).inline_scales


def test_a_cache_without_an_axis_of_tokens_is_not_cut() -> None:
    spec = make_spec("LBHNC")
    for shape in ((), (3,), (B, H, 0, 2 * D)):
        assert kernel_blocks(torch.zeros(shape), spec, page_of(spec)) == 1
