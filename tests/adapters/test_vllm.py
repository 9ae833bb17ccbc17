"""vLLM's caches of today, built as vLLM builds them, through the adapter and back.

Where vllm is installed its own functions build the tensors and its own CPU op writes them; without
it the same shapes are made by permuting axes, and CPU_ATTN's pages by indexing their planes. Other
backends and versions are in test_vllm_pages.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import vllm
from kvx_adapters.vllm import LayerSpec
from kvx_adapters.vllm.pages import page_of
from kvx_core import (
    DType,
    InvalidArgumentError,
    ScaleGranularity,
    UnsupportedError,
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
    by_permutation,
    by_vllm,
    make_spec,
    needs_cpu_op,
    needs_vllm,
    random_tokens,
    some_slots,
)
from tests.native import ROOT, run
from tests.ways_out import WayOut, leads_out

Views = Callable[[LayerSpec], tuple[Tensor, list[Tensor]]]


@pytest.fixture(params=[by_permutation, pytest.param(by_vllm, marks=needs_vllm)])
def views(request: pytest.FixtureRequest) -> Views:
    return request.param


def engine_split(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """K and V as [block, token, head, dim], as the attention backends of vLLM 0.32 split them."""
    k, v = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return k, v


# ---- packed K | V in six physical orders ----


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_descriptor_points_into_the_engines_storage(
    layout: str, backend: str, views: Views
) -> None:
    spec = make_spec(layout, backend=backend)
    raw, kv_caches = views(spec)
    for kv_cache in kv_caches:
        desc = vllm.cache_desc(kv_cache, spec)
        theirs_k, theirs_v = engine_split(kv_cache, D)
        assert desc.k.data == theirs_k.data_ptr()
        assert desc.v is not None
        assert desc.v.data == theirs_v.data_ptr()
        assert raw.data_ptr() <= desc.k.data < desc.v.data < raw.data_ptr() + raw.nbytes
        assert (desc.num_blocks, desc.block_size, desc.num_kv_heads, desc.head_dim) == (B, N, H, D)
        block, token, head, dim = theirs_k.stride()
        assert desc.k.stride == desc.v.stride == (block, head, token, dim)
        desc.validate()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kvx_writes_what_the_engine_reads(layout: str, dtype: torch.dtype, views: Views) -> None:
    spec = make_spec(layout, dtype=dtype)
    raw, kv_caches = views(spec)
    expected, expected_caches = views(spec)
    slots = some_slots(23, B * N)
    key, value = random_tokens(23, dtype), random_tokens(29, dtype)[:23]
    layer_idx = 1
    engine_k, engine_v = engine_split(expected_caches[layer_idx], D)
    for slot, k, v in zip(slots.tolist(), key, value, strict=True):
        if slot >= 0:
            engine_k[slot // N, slot % N] = k
            engine_v[slot // N, slot % N] = v

    desc = vllm.cache_desc(kv_caches[layer_idx], spec)
    write_kv(desc, key, value, vllm.slot_mapping(slots))

    assert not torch.equal(expected, torch.full_like(expected, SENTINEL))
    torch.testing.assert_close(raw, expected, rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kvx_reads_what_the_engine_wrote(layout: str, views: Views) -> None:
    spec = make_spec(layout)
    _, kv_caches = views(spec)
    lengths = [N + 5, 1, 2 * N]
    table = torch.tensor([[6, 2], [1, 0], [3, 5]], dtype=torch.int32)
    sequences = [random_tokens(length, torch.bfloat16) for length in lengths]
    engine_k, engine_v = engine_split(kv_caches[2], D)
    for blocks, tokens in zip(table.tolist(), sequences, strict=True):
        for i, token in enumerate(tokens):
            engine_k[blocks[i // N], i % N] = token
            engine_v[blocks[i // N], i % N] = -token

    desc = vllm.cache_desc(kv_caches[2], spec)
    key, value = gather_kv(desc, vllm.block_table(table), vllm.seq_lens(torch.tensor(lengths)))

    for row, tokens in enumerate(sequences):
        assert torch.equal(key[row, : len(tokens)], tokens)
        assert torch.equal(value[row, : len(tokens)], -tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_head_and_one_layer(layout: str, views: Views) -> None:
    """Axes of extent 1 may have any stride in vLLM, and do."""
    spec = make_spec(layout, num_kv_heads=1, num_layers=1, head_size=80)
    raw, (kv_cache,) = views(spec)
    key, value = (
        random_tokens(3, torch.bfloat16, 1, 80),
        random_tokens(5, torch.bfloat16, 1, 80)[:3],
    )
    write_kv(vllm.cache_desc(kv_cache, spec), key, value, [N, -1, 2 * N - 1])
    engine_k, engine_v = engine_split(kv_cache, 80)
    assert torch.equal(engine_k[1, [0, N - 1]], key[[0, 2]])
    assert torch.equal(engine_v[1, [0, N - 1]], value[[0, 2]])
    assert (raw == SENTINEL).sum() >= raw.numel() - 2 * 2 * 80 * 2


@pytest.mark.parametrize("axis", range(3))
def test_each_axis_of_two_or_more_is_where_the_layout_has_it(axis: int) -> None:
    spec = make_spec("LBHNC", num_blocks=2, block_size=2, num_kv_heads=2)
    kv_cache = by_permutation(spec)[1][0]
    vllm.cache_desc(kv_cache, spec)
    stride = [0 if i == axis else step for i, step in enumerate(kv_cache.stride())]
    with pytest.raises(InvalidArgumentError, match=r"kv_cache\.stride is .* for layout LBHNC"):
        vllm.cache_desc(kv_cache.as_strided(kv_cache.shape, stride), spec)


@needs_vllm
@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "LHBNC"])
def test_kernel_blocks(layout: str) -> None:
    """vLLM cuts blocks of 48 into kernel blocks of 16; slots mean the same in both."""
    spec = make_spec(layout, block_size=48)
    if layout == "LHBNC":  # vLLM refuses: another head's page lies before the next block
        with pytest.raises(ValueError, match="does not store blocks as dense"):
            by_vllm(spec, kernel_block_size=16)
        return
    _, kv_caches = by_vllm(spec, kernel_block_size=16)
    desc = vllm.cache_desc(kv_caches[0], spec)
    assert (desc.num_blocks, desc.block_size) == (3 * B, 16)
    slots = some_slots(31, B * 48)
    key, value = random_tokens(31, torch.bfloat16), random_tokens(37, torch.bfloat16)[:31]
    write_kv(desc, key, value, slots)
    engine_k, _ = engine_split(kv_caches[0], D)
    for slot, k in zip(slots.tolist(), key, strict=True):
        if slot >= 0:
            assert torch.equal(engine_k[slot // 48 * 3 + slot % 48 // 16, slot % 16], k)
    table = vllm.block_table([[1, 2, 3, 4, 5, 6]], kernel_blocks_per_block=3)
    found, _ = gather_kv(desc, table, [6 * 48])
    kept = slots >= 48
    assert torch.equal(found[0, slots[kept] - 48], key[kept])


@needs_vllm
@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
def test_padded_pages(layout: str) -> None:
    page = H * N * 2 * D * 2
    spec = make_spec(layout, page_size_bytes=page + 192)
    raw, kv_caches = by_vllm(spec, page_size_padded=page + 192)
    slots = torch.arange(B * N)
    tokens = random_tokens(B * N, torch.bfloat16)
    for kv_cache in kv_caches:
        write_kv(vllm.cache_desc(kv_cache, spec), tokens, -tokens, slots)
    pages = raw.view(L * B, page + 192)
    assert (pages[:, page:] == SENTINEL).all()
    engine_k, _ = engine_split(kv_caches[1], D)
    assert torch.equal(engine_k.reshape(B * N, H, D), tokens)


@pytest.mark.parametrize("layout", ["BLNHC", "BLHNC"])
def test_aligned_blocks(layout: str) -> None:
    """KVCacheTensor.block_stride may be larger than the layers' pages together."""
    page = H * N * 2 * D * 2
    spec = make_spec(layout, block_stride_bytes=L * page + 64)
    raw = torch.full((B * (L * page + 64),), SENTINEL, dtype=torch.int8)
    dense = make_spec(layout)
    _, (like, *_) = by_permutation(dense)
    stride = (spec.block_stride_bytes // 2, *like.stride()[1:])
    kv_cache = raw.view(torch.bfloat16).as_strided(like.shape, stride)
    desc = vllm.cache_desc(kv_cache, spec)
    assert desc.k.stride[0] == (L * page + 64) // 2
    with pytest.raises(InvalidArgumentError, match=r"kv_cache\.stride is .* for layout"):
        vllm.cache_desc(kv_cache, dense)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8", torch.float8_e4m3fn),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_fp8_takes_its_dtype_from_kv_cache_dtype(name: str, dtype: torch.dtype) -> None:
    spec = make_spec("LBHNC", dtype=torch.uint8, kv_cache_dtype=name)
    _, kv_caches = by_permutation(spec)
    scales = [torch.tensor(0.5), torch.tensor(0.25), torch.tensor(2.0)]
    view = vllm.cache_view(kv_caches, spec, SAME_MODEL, k_scales=scales, v_scales=[1.0, 2.0, 4.0])
    assert view.layers[0].k.dtype is DType.of(dtype)
    assert view.k_scales is not None
    assert view.k_scales[1] is not None
    assert view.k_scales[1].data == scales[1].data_ptr()
    assert view.k_scales[1].granularity is ScaleGranularity.PER_TENSOR
    key, value = random_tokens(9, torch.float32), random_tokens(11, torch.float32)[:9]
    slots = torch.arange(40, 49)
    write_kv(view.layers[1], key, value, slots, k_scale=0.25, v_scale=2.0)
    engine_k, engine_v = engine_split(kv_caches[1].view(dtype), D)
    stored = engine_k[slots // N, slots % N]
    assert torch.equal(stored.view(torch.uint8), (key / 0.25).to(dtype).view(torch.uint8))
    stored = engine_v[slots // N, slots % N]
    assert torch.equal(stored.view(torch.uint8), (value / 2.0).to(dtype).view(torch.uint8))


def test_scales_per_head() -> None:
    spec = make_spec("LBHNC", dtype=torch.uint8, kv_cache_dtype="fp8")
    _, kv_caches = by_permutation(spec)
    scales = [torch.ones(H)] * L
    view = vllm.cache_view(kv_caches, spec, SAME_MODEL, k_scales=scales, v_scales=scales)
    assert view.k_scales is not None
    assert [scale and scale.granularity for scale in view.k_scales] == (
        [ScaleGranularity.PER_HEAD] * L
    )


@pytest.mark.parametrize(
    ("scales", "missing"),
    [({}, "k"), ({"k_scales": [1.0] * L}, "v"), ({"v_scales": [1.0] * L}, "k")],
)
def test_fp8_without_scales_is_refused(scales: dict[str, Any], missing: str) -> None:
    spec = make_spec("LBHNC", dtype=torch.uint8, kv_cache_dtype="fp8")
    _, kv_caches = by_permutation(spec)
    with pytest.raises(InvalidArgumentError, match=f"{missing}_scales is None, expected one sc"):
        vllm.cache_view(kv_caches, spec, SAME_MODEL, **scales)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_migrates_between_layouts(layout: str) -> None:
    """Six to one: blocks of 16 in any order into blocks of 4, null blocks left alone."""
    src_spec, dst_spec = make_spec(layout), make_spec("LBHNC", block_size=4, num_blocks=4 * B)
    _, src_caches = by_permutation(src_spec)
    _, dst_caches = by_permutation(dst_spec)
    for i, kv_cache in enumerate(src_caches):
        kv_cache.copy_(torch.randn(kv_cache.shape, generator=torch.Generator().manual_seed(i)))
    src_table, length = [[4, vllm.NULL_BLOCK_ID, 6]], 2 * N + 3
    dst_table = [list(range(9, 18))]
    facts = SAME_MODEL
    migrate(
        vllm.cache_view(src_caches, src_spec, facts).at(vllm.block_table(src_table).with_holes()),
        vllm.cache_view(dst_caches, dst_spec, facts).at(vllm.block_table(dst_table)),
        [length],
    )
    untouched = torch.full((4 * 2 * D,), SENTINEL, dtype=torch.int8).view(torch.bfloat16)[: 2 * D]
    for src, dst in zip(src_caches, dst_caches, strict=True):
        for i in range(length):
            there = dst[dst_table[0][i // 4], :, i % 4]
            here = (
                untouched.expand(H, -1) if N <= i < 2 * N else src[src_table[0][i // N], :, i % N]
            )
            assert torch.equal(there, here), f"token {i}"


# ---- CPU_ATTN: a plane of K, [head_size, block_size], then a plane of V, per head ----


def cpu_spec(**fields: Any) -> LayerSpec:
    defaults = {"backend": "CPU_ATTN", "layout": "LBHNC", "isa": "vec", "num_layers": 1}
    return make_spec(**(defaults | {"block_size": 32, "head_size": 64} | fields))


def cpu_write_by_planes(kv_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """What CPU_ATTN's op does to a page, one element after the other."""
    _, heads, block_size, content = kv_cache.shape
    pages = kv_cache.view(kv_cache.shape[0], heads, -1)
    dim = content // 2
    for slot, k, v in zip(slots.tolist(), key, value, strict=True):
        if slot >= 0:
            block, token = divmod(slot, block_size)
            pages[block, :, torch.arange(dim) * block_size + token] = k
            pages[block, :, (block_size + token) * dim : (block_size + token + 1) * dim] = v


def cpu_write_by_vllm(
    kv_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    *,
    isa: str = "vec",
    kv_cache_dtype: str = "auto",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """vLLM's own op, called as CPUAttentionBackendImpl.do_kv_cache_update calls it."""
    from vllm import _custom_ops
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.import_kernels()  # those of this processor
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    halves = kv_cache.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(2, dim=2)
    _custom_ops.cpu_attn_reshape_and_cache(
        key, value, *halves, slots, isa, k_scale, v_scale, kv_cache_dtype
    )


CPU_WRITERS = [
    cpu_write_by_planes,
    pytest.param(
        cpu_write_by_vllm,
        marks=needs_cpu_op,
    ),
]


@pytest.mark.parametrize("engine_write", CPU_WRITERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("isa", "head_size"), [("vec", 64), ("vec", 128), ("vec16", 80)])
def test_cpu_attn_both_ways(
    isa: str, head_size: int, dtype: torch.dtype, engine_write: Callable[..., None]
) -> None:
    spec = cpu_spec(isa=isa, head_size=head_size, dtype=dtype)
    raw, (kv_cache,) = by_permutation(spec)
    expected, (engine_cache,) = by_permutation(spec)
    slots = some_slots(45, B * 32)
    key = random_tokens(45, dtype, H, head_size)
    value = random_tokens(47, dtype, H, head_size)[:45].contiguous()
    engine_write(engine_cache, key, value, slots)

    desc = vllm.cache_desc(kv_cache, spec)
    assert desc.k.data == kv_cache.data_ptr()
    assert desc.v is not None
    assert desc.v.data == kv_cache.data_ptr() + 32 * head_size * dtype.itemsize
    desc.validate()
    write_kv(desc, key, value, vllm.slot_mapping(slots))
    torch.testing.assert_close(raw, expected, rtol=0, atol=0)

    slots = slots[slots >= 0]
    found_k, found_v = gather_kv(
        vllm.cache_desc(engine_cache, spec),
        vllm.block_table([list(range(B))]),
        [B * 32],
    )
    kept = torch.arange(45) % 5 != 0
    assert torch.equal(found_k[0, slots], key[kept])
    assert torch.equal(found_v[0, slots], value[kept])


@needs_cpu_op
@pytest.mark.parametrize(
    ("name", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)]
)
def test_cpu_attn_fp8_is_read_as_the_engine_wrote_it(name: str, dtype: torch.dtype) -> None:
    """The engine's op rounds towards zero, so its bytes are the truth and KVX only reads them."""
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's FP8 cache on CPU needs AVX-512")
    spec = cpu_spec(dtype=torch.uint8, kv_cache_dtype=name)
    _, (kv_cache,) = by_permutation(spec)
    key, value = random_tokens(9, torch.float32, H, 64), random_tokens(11, torch.float32, H, 64)[:9]
    slots = torch.arange(60, 69)
    cpu_write_by_vllm(
        kv_cache, key, value.contiguous(), slots, kv_cache_dtype=name, k_scale=0.5, v_scale=2.0
    )
    found_k, found_v = gather_kv(
        vllm.cache_desc(kv_cache, spec),
        [[1, 2]],
        [64],
        dtype="float32",
        k_scale=0.5,
        v_scale=2.0,
    )
    found_k, found_v = found_k[0, 28:37], found_v[0, 28:37]
    for found, wanted, scale in ((found_k, key, 0.5), (found_v, value, 2.0)):
        nearest = (wanted / scale).to(dtype).view(torch.uint8).int()
        stored = (found / scale).to(dtype).view(torch.uint8).int()
        assert (nearest - stored).unique().tolist() == [0, 1]  # the same, or one closer to zero


def test_cpu_attn_pages_are_not_halves() -> None:
    """The same tensor means something else to FLASH_ATTN: only the backend's name tells."""
    _, (kv_cache,) = by_permutation(cpu_spec())
    cpu = vllm.cache_desc(kv_cache, cpu_spec())
    packed = vllm.cache_desc(kv_cache, cpu_spec(backend="FLASH_ATTN"))
    assert cpu.k.stride == (H * 32 * 128, 32 * 128, 1, 32)
    assert packed.k.stride == (H * 32 * 128, 32 * 128, 128, 1)


# ---- what does not agree is refused ----

PAGE = H * N * 2 * D * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"backend": "FLEX_ATTENTION", "layout": "LBHNC"},
            "layout is 'LBHNC', expected LBNHC or NHD: all that FLEX_ATTENTION of vllm 0.32.0",
        ),
        (
            {"backend": "CPU_ATTN", "isa": "vec"},
            "layout is 'LBNHC', expected LBHNC or HND: all that CPU_ATTN of vllm 0.32.0 reads",
        ),
        ({"kv_cache_dtype": "fp8"}, "dtype is torch.bfloat16, expected torch.uint8"),
        ({"dtype": torch.float16}, "kv_cache.dtype is torch.bfloat16, expected torch.float16"),
        ({"page_size_bytes": PAGE - 1}, f"page_size_bytes is {PAGE - 1}, expected at least {PAGE}"),
        ({"num_blocks": B + 1}, "kv_cache.shape is (7, 2, 16, 48), expected (8, 2, 16, 48)"),
        ({"num_kv_heads": 1}, "kv_cache.shape is (7, 2, 16, 48), expected (7, 1, 16, 48)"),
        ({"head_size": 12}, "kv_cache.shape is (7, 2, 16, 48), expected (7, 2, 16, 24)"),
        (
            {"block_size": 24, "page_size_bytes": 2 * PAGE},
            "kv_cache.shape is (7, 2, 16, 48), expected (7, 2, 24, 48)",
        ),
        ({"num_layers": L, "layout": "BLNHC"}, "for layout BLNHC with num_layers 3"),
        ({"layout": "LBHNC"}, "for layout LBHNC with num_layers 1"),
        ({"layout": "HND"}, "for layout HND with num_layers 1"),
        ({"page_size_bytes": PAGE + 64}, "for layout LBNHC"),
    ],
)
def test_disagreement_is_refused(fields: dict[str, Any], message: str) -> None:
    """Each breaks one thing that the tensor and vLLM's word for it must agree on."""
    _, (kv_cache,) = by_permutation(make_spec(num_layers=1))
    spec = make_spec(**({"num_layers": 1, "page_size_bytes": PAGE} | fields))
    with pytest.raises(InvalidArgumentError) as error:
        vllm.cache_desc(kv_cache, spec)
    assert message in str(error.value)


def test_padded_pages_of_one_head_lie_apart_in_every_order() -> None:
    page = N * 2 * D
    spec = make_spec("LHBNC", num_kv_heads=1, num_layers=1, page_size_bytes=2 * page + 64)
    raw = torch.zeros(B * (page + 32), dtype=torch.bfloat16)
    cache = raw.as_strided((B, 1, N, 2 * D), (page + 32, 1, 2 * D, 1))
    assert vllm.cache_desc(cache, spec).k.stride[0] == page + 32


def test_a_cache_without_blocks() -> None:
    spec = make_spec(num_blocks=0)
    assert [vllm.cache_desc(one, spec).num_blocks for one in by_permutation(spec)[1]] == [0] * L


def test_padded_pages_have_no_kernel_blocks() -> None:
    _, (kv_cache,) = by_permutation(make_spec(num_layers=1))
    fields = {"num_layers": 1, "num_blocks": 3, "block_size": 2 * N}
    vllm.cache_desc(kv_cache[:6], make_spec(**fields))
    for padding in ({"page_size_bytes": 2 * PAGE + 64}, {"block_stride_bytes": 2 * PAGE + 64}):
        with pytest.raises(
            InvalidArgumentError, match=r"expected 6144 for both: padded blocks are"
        ):
            vllm.cache_desc(kv_cache[:6], make_spec(**fields, **padding))


def test_a_tensor_past_its_storage_is_refused() -> None:
    spec = make_spec(num_layers=1)
    _, (kv_cache,) = by_permutation(spec)
    kv_cache.untyped_storage().resize_(kv_cache.untyped_storage().nbytes() - 2)
    with pytest.raises(
        InvalidArgumentError, match=r"kv_cache ends at byte 21504, past its storage"
    ):
        vllm.cache_desc(kv_cache, spec)


def test_not_four_axes() -> None:
    with pytest.raises(InvalidArgumentError, match=r"kv_cache\.shape is \(2, 7, 16, 2, 24\)"):
        vllm.cache_desc(torch.zeros(2, B, N, H, D, dtype=torch.bfloat16), make_spec(num_layers=1))


def test_names_before_0_29() -> None:
    for old, new in (("NHD", "LBNHC"), ("HND", "LBHNC")):
        _, (kv_cache,) = by_permutation(make_spec(new, num_layers=1))
        spec = make_spec(old, num_layers=1, version="0.26.0")
        assert vllm.cache_desc(kv_cache, spec) == vllm.cache_desc(
            kv_cache, replace(spec, layout=new, version="0.33.0rc1")
        )


def test_cache_view_needs_a_spec_per_layer() -> None:
    spec = make_spec()
    _, kv_caches = by_permutation(spec)
    with pytest.raises(InvalidArgumentError, match="specs has 2 layers, kv_caches 3"):
        vllm.cache_view(kv_caches, [spec, spec], SAME_MODEL)


# ---- tables ----


def rows_of(table: Any) -> list[list[int]]:
    owner = torch.as_tensor(table.owner)
    return owner.tolist()


def test_scales_are_given_for_every_layer() -> None:
    spec = make_spec(dtype=torch.uint8, kv_cache_dtype="fp8")
    caches = by_permutation(spec)[1]
    with pytest.raises(InvalidArgumentError, match="v_scales has 1 entries, expected 3, one per l"):
        vllm.cache_view(caches, spec, SAME_MODEL, k_scales=[1.0] * L, v_scales=[1.0])


def test_block_table_is_not_copied() -> None:
    table = torch.tensor([[3, 1, 0], [2, 0, 0]], dtype=torch.int32)
    assert vllm.block_table(table).indices == table.data_ptr()


@pytest.mark.parametrize("given", [[[0, 5], [2]], torch.tensor([[0, 5], [2, -1]])])
def test_block_table_in_kernel_blocks(given: Any) -> None:
    table = vllm.block_table(given, kernel_blocks_per_block=3)
    # All of the null block is null, not just the first third of it, and so is padding.
    assert rows_of(table) == [[0, 0, 0, 15, 16, 17], [6, 7, 8, -3, -2, -1]]


def test_block_table_of_attention_metadata() -> None:
    table = torch.tensor([[0, 1, 2, 15, 16, 17], [6, 7, 8, 0, 1, 2]], dtype=torch.int32)
    found = vllm.block_table(table, kernel_blocks_per_block=3, kernel_ids=True)
    assert rows_of(found) == [[0, 0, 0, 15, 16, 17], [6, 7, 8, 0, 0, 0]]
    assert table[0].tolist() == [0, 1, 2, 15, 16, 17]


def test_kernel_blocks_per_block_must_be_positive() -> None:
    with pytest.raises(
        InvalidArgumentError, match="kernel_blocks_per_block is 0, expected at leas"
    ):
        vllm.block_table([[1]], kernel_blocks_per_block=0)


# ---- a live engine; see test_demo.py too ----


@needs_cpu_op
@pytest.mark.parametrize("kv_cache_dtype", ["auto", pytest.param("fp8", marks=pytest.mark.slow)])
def test_live_engine(kv_cache_dtype: str, tmp_path: Path) -> None:
    if kv_cache_dtype == "fp8" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's FP8 cache on CPU needs AVX-512")
    script = ROOT / "tests/adapters/live_vllm.py"
    command = [sys.executable, script, tmp_path, kv_cache_dtype]
    said = run(command, env={"PYTHONPATH": str(ROOT)}, timeout=300)
    assert "as HF computed them\n" in said


def test_an_engine_in_another_process_is_refused() -> None:
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace()))
    with pytest.raises(UnsupportedError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        vllm.live_view(llm)


def live_llm(groups: int = 1, **parallel: int) -> Any:
    """As much of an engine in this process as live_view looks at before it describes anything."""
    sizes = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
    }
    requests = {"0": object()}
    group = SimpleNamespace(layer_names=["l0"])
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[group] * groups, num_blocks=4, kv_cache_layout="NHD"
        ),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    core = SimpleNamespace(
        scheduler=SimpleNamespace(requests=requests),
        model_executor=SimpleNamespace(driver_worker=worker),
    )
    config = SimpleNamespace(parallel_config=SimpleNamespace(**(sizes | parallel)))
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core), vllm_config=config)
    return SimpleNamespace(llm_engine=engine)


@pytest.mark.parametrize(
    "size",
    [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ],
)
def test_an_engine_of_several_ranks_is_refused(size: str) -> None:
    for call in (vllm.live_view, lambda llm: vllm.live_block_table(llm, ["0"])):
        with pytest.raises(UnsupportedError) as raised:
            call(live_llm(**{size: 2}))
        assert str(raised.value) == (
            f"{size} is 2, expected 1: the other ranks run in other processes. Describe each "
            "rank's tensors there, with cache_view"
        )


def test_a_request_that_is_finished_has_no_blocks() -> None:
    with pytest.raises(InvalidArgumentError, match="request_ids has '7', which is not an unfini"):
        vllm.live_block_table(live_llm(), ["0", "7"])


@pytest.mark.parametrize("count", [0, 2])
def test_an_engine_of_several_groups_is_refused(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvx_adapters.vllm import live

    monkeypatch.setattr(live, "layer_groups", lambda *_, **__: ("group",) * count)
    monkeypatch.setattr(live, "layout_before_29", lambda: None)
    monkeypatch.setattr(live, "vllm_version", lambda _: "0.32.0")
    with pytest.raises(UnsupportedError) as raised:
        vllm.live_view(live_llm())
    assert str(raised.value) == (
        f"the engine has {count} KV cache groups, expected 1. Describe each group with "
        "group_view: every group has its own block table"
    )


# ---- ways out ----


def first_layer(like: LayerSpec, said: LayerSpec) -> None:
    """A layer of a cache of one spec, described by another."""
    vllm.cache_desc(by_permutation(like)[1][0], said)


def of_fp8(scales: Any) -> None:
    spec = make_spec("LBHNC", dtype=torch.uint8, kv_cache_dtype="fp8")
    vllm.cache_view(by_permutation(spec)[1], spec, SAME_MODEL, k_scales=scales, v_scales=scales)


def of_cpu(isa: str, dtype: torch.dtype) -> None:
    spec = make_spec("LBHNC", backend="CPU_ATTN", isa=isa, block_size=32, dtype=dtype)
    first_layer(spec, spec)


def of_rocm(*, interleaved: bool) -> None:
    spec = make_spec("BHLNC", backend="ROCM_ATTN", interleaved_v=interleaved, version="0.29.0")
    page_of(spec)


def on_a_cpu_with_amx(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ISA that vLLM's attention on such a CPU uses."""
    from vllm.v1.attention.backends import cpu_attn

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    found: str = cpu_attn._get_attn_isa(dtype, 32, 64)
    return found


WAYS_OUT = [
    WayOut(
        "for layout LBHNC with num_layers 3. Pass the resolved layout, KVCacheConfig."
        "kv_cache_layout, and the layers of the KVCacheTensor",
        lambda: first_layer(make_spec("BLNHC"), make_spec("LBHNC")),
        lambda: first_layer(make_spec("BLNHC"), make_spec("BLNHC")),
    ),
    WayOut(
        "for layout BLNHC with num_layers 1. Pass the resolved layout, KVCacheConfig."
        "kv_cache_layout, and the layers of the KVCacheTensor",
        lambda: first_layer(make_spec("BLNHC"), make_spec("BLNHC", num_layers=1)),
        lambda: first_layer(make_spec("BLNHC"), make_spec("BLNHC", num_layers=3)),
    ),
    WayOut(
        "all that CPU_ATTN of vllm 0.32.0 reads. Pass the resolved layout, "
        "KVCacheConfig.kv_cache_layout",
        lambda: first_layer(
            make_spec("LBHNC"), make_spec("LBNHC", backend="CPU_ATTN", isa="vec", block_size=N)
        ),
        lambda: first_layer(
            make_spec("LBHNC"), make_spec("LBHNC", backend="CPU_ATTN", isa="vec", block_size=N)
        ),
    ),
    WayOut(
        "expected one scale per layer of an FP8 cache. They are layer._k_scale, or 1.0",
        lambda: of_fp8(None),
        lambda: [of_fp8(scales) for scales in ([1.0] * L, [torch.tensor(0.5)] * L)],
    ),
    WayOut(
        "Describe them as planes with amx_planes, or run vLLM with dtype float32 or float16, where "
        "it uses 'vec'",
        lambda: of_cpu("amx", torch.bfloat16),
        lambda: [
            vllm.amx_planes(torch.zeros(3, 2, 32, 128, dtype=torch.bfloat16)),
            of_cpu("vec", torch.float32),
            of_cpu("vec", torch.float16),
        ],
    ),
    WayOut(
        "Run vLLM without VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT and its fused QK-norm, RoPE and cache "
        "write",
        lambda: of_rocm(interleaved=True),
        lambda: of_rocm(interleaved=False),
    ),
]


@pytest.mark.parametrize("case", WAYS_OUT, ids=str)
def test_each_way_out_leads_out(case: WayOut) -> None:
    leads_out(case)


@needs_cpu_op
def test_attention_on_a_cpu_with_amx_uses_vec_for_other_dtypes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [
        on_a_cpu_with_amx(dtype, monkeypatch)
        for dtype in (torch.bfloat16, torch.float32, torch.float16)
    ]
    assert found == ["amx", "vec", "vec"]
