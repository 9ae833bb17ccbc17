"""Pages of DeepSeek-V4 in vLLM and SGLang: kvx_core/hybrid/engine_pages.py and pending_rows.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_core import InvalidArgumentError, OutOfRangeError, UnsupportedError
from kvx_core.hybrid import (
    DSV4Config,
    IndexerPages,
    LayerSpec,
    PagedCache,
    RecordPages,
    StateCache,
    build_schema,
    byte_pages,
    migrate_pages,
    migrate_pending,
    ops,
    page_bytes,
    pending_to_tails,
    pending_tokens,
    requantize_entries,
    requantize_keys,
    tails_to_pending,
)
from kvx_core.hybrid.schema import AttentionType
from tests.fakes.vllm import needs_vllm
from tests.hybrid import reference
from tests.hybrid.schemas import FLASH, PRO

SENTINEL = 0xA5


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def untouched(*shape: int) -> Tensor:
    return torch.full(shape, SENTINEL, dtype=torch.uint8)


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "size", "found"),
    [
        (64, 584, 37440),
        (32, 584, 19008),
        (2, 584, 1728),
        (1, 584, 1152),
        (256, 584, 149760),
        (64, 132, 8640),
        (64, 68, 4608),
        (4, 8192, 32832),
        (4, 2048, 8640),
        (8, 4096, 32832),
    ],
)
def test_page_bytes(entries: int, size: int, found: int) -> None:
    assert page_bytes(entries, size) == found


def test_pages_of_sglang_s_indexer_are_not_padded() -> None:
    assert [page_bytes(64, size, 1) for size in (132, 68)] == [8448, 4352]


def vllm_specs(ratio: int) -> dict[str, Any]:
    """vLLM's own specs of a layer, by what they hold.

    Source: vllm 0.32 models/deepseek_v4/{attention,compressor}.py, mla/sparse_swa.py,
    get_kv_cache_spec
    """
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    one: dict[str, Any] = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 576}
    record = one | {
        "head_size": 512,
        "dtype": torch.uint8,
        "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
        "state_content_bytes": 584,
    }
    specs: dict[str, Any] = {
        "swa": SlidingWindowMLASpec(block_size=64, sliding_window=128, **record)
    }
    if ratio > 1:
        specs["main"] = MLAAttentionSpec(block_size=256, tokens_per_state=ratio, **record)

    def state(size: int) -> Any:
        return SlidingWindowMLASpec(
            block_size=4 if ratio == 4 else 8,
            head_size=size,
            dtype=torch.float32,
            sliding_window=8 if ratio == 4 else 128,
            **one,
        )

    if ratio == 4:
        specs["indexer"] = MLAAttentionSpec(
            block_size=256, head_size=132, dtype=torch.uint8, tokens_per_state=4, **one
        )
        specs["indexer mxfp4"] = MLAAttentionSpec(
            block_size=256, head_size=68, dtype=torch.uint8, tokens_per_state=4, **one
        )
        specs |= {"state": state(2048), "indexer state": state(512)}
    if ratio == 128:
        specs["state"] = state(1024)
    return specs


@needs_vllm
def test_pages_are_as_large_as_vllm_s() -> None:
    csa, hca = vllm_specs(4), vllm_specs(128)
    for spec, entries, size in (
        (csa["main"], 64, 584),
        (hca["main"], 2, 584),
        (csa["swa"], 64, 584),
        (csa["indexer"], 64, 132),
        (csa["indexer mxfp4"], 64, 68),
        (csa["state"], 4, 8192),
        (csa["indexer state"], 4, 2048),
        (hca["state"], 8, 4096),
    ):
        assert spec.page_size_bytes == page_bytes(entries, size)


@needs_vllm
@pytest.mark.parametrize(
    ("ratios", "layers", "total", "groups"),
    [
        (PRO, 61, 1_435_968, [1_160_640, 1_123_200, 1_435_968, 1_017_792, 1_244_160]),
        (FLASH, 43, 1_002_240, [823_680, 786_240, 1_002_240, 656_640, 870_912]),
    ],
)
def test_groups_of_vllm(ratios: list[int], layers: int, total: int, groups: list[int]) -> None:
    """vLLM puts all caches of a model into blocks of one size: those of its largest group."""
    from types import SimpleNamespace

    from vllm.v1.core import kv_cache_utils

    layout = SimpleNamespace(is_block_outermost=True)
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout),
        speculative_config=None,
    )
    specs = {
        f"layers.{i}.{name}": spec
        for i, ratio in enumerate(ratios[:layers])
        for name, spec in vllm_specs(max(1, ratio)).items()
        if name != "indexer mxfp4"
    }
    found = kv_cache_utils._get_packed_kv_cache_groups(config, specs)
    assert found is not None
    sizes = sorted(
        sum(specs[name].page_size_bytes for name in group.layer_names) for group in found
    )
    assert sizes == sorted(groups)
    assert max(sizes) == total


# --- records ------------------------------------------------------------------------------------


def test_a_record_in_its_page() -> None:
    """Data at 576 * o, scales behind the data of all entries, numbers code * 2^(scale - 127)."""
    raw = random_bytes(3, page_bytes(64), seed=1)
    raw[raw == 0x7F] = 0
    raw[raw == 0xFF] = 0
    scales = raw[:, 576 * 64 : 584 * 64]
    scales[:] = scales % 16 + 120
    pages = RecordPages(raw, 0, 64, 4)
    for page, entry in ((0, 0), (1, 63), (2, 17)):
        values = pages.read(torch.tensor([page * 64 + entry]))[0]
        row = raw[page, 576 * entry : 576 * entry + 576]
        at = 576 * 64 + 8 * entry
        for i in (0, 63, 64, 447):
            code = row[i : i + 1].view(torch.float8_e4m3fn).float()
            assert values[i] == code * 2.0 ** (int(raw[page, at + i // 64]) - 127)
        assert torch.equal(values[448:], row[448:].clone().view(torch.bfloat16).float())


@pytest.mark.parametrize("seed", range(2))
def test_values_of_records_survive(seed: int) -> None:
    """Written, read and written again: the same values; RoPE dims as they were; a zero pad byte."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 512, generator=generator) * torch.logspace(-6, 3, 40)[:, None]
    x = x.bfloat16().float()
    x[7] = 0
    x[8, :64] = 448
    pages = RecordPages(untouched(2, page_bytes(64)), 0, 64, 4)
    slots = torch.arange(50, 90)
    pages.write(x, slots)
    values = pages.read(slots)
    assert torch.equal(values[:, 448:], x[:, 448:])
    scale = pages.scales[slots // 64, slots % 64]
    assert not scale[:, 7].any()
    assert int(scale[8, 0]) == 127
    # Half of a step of 32 at the largest code, which a scale rounded up leaves above 224.
    largest = x[:, :448].abs().view(40, 7, 64).amax(2).clamp(min=1e-4)
    error = (values - x)[:, :448].abs().view(40, 7, 64).amax(2)
    assert bool((error <= largest * (16 / 224) / 1.2 + 1e-12).all())
    again = RecordPages(untouched(2, page_bytes(64)), 0, 64, 4)
    again.write(values, slots)
    assert torch.equal(again.read(slots), values)
    assert bool((pages.pages[0, : 576 * 50] == SENTINEL).all())


# --- between engines ----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1000, 256, 255, 3])
def test_entries_of_two_engines(tokens: int) -> None:
    """CSA and HCA entries and both kinds of indexer keys, pages of 256 tokens in one call. vLLM's
    pages lie apart, those of several layers in one block; SGLang's indexer pages are not padded."""
    block = 37440 + 1728 + 8640 + 4608
    pool = random_bytes(7, block, seed=2)
    at = {"csa": 0, "hca": 37440, "fp8": 39168, "mxfp4": 47808}

    def ends(tensors: dict[str, Tensor]) -> list[RecordPages | IndexerPages]:
        return [
            RecordPages(tensors["csa"], 0, 64, 4),
            RecordPages(tensors["hca"], 1, 2, 128),
            IndexerPages(tensors["fp8"], 0, 64, "fp8", hadamard=False),
            IndexerPages(tensors["mxfp4"], 2, 64, "mxfp4", hadamard=False),
        ]

    sizes = {"csa": 37440, "hca": 1728, "fp8": 8640, "mxfp4": 4608}
    src = {name: pool[:, at[name] : at[name] + size] for name, size in sizes.items()}
    sizes |= {"fp8": 8448, "mxfp4": 4352}
    dst = {name: untouched(9, size) for name, size in sizes.items()}
    expected = {name: tensor.clone() for name, tensor in dst.items()}
    tables = [5, 2, 6, 1], [8, 3, 0, 4]
    for name, per, ratio, data, scale in (
        ("csa", 64, 4, 576, 8),
        ("hca", 2, 128, 576, 8),
        ("fp8", 64, 4, 128, 4),
        ("mxfp4", 64, 4, 64, 4),
    ):
        for e in range(tokens // ratio):
            a, b, o = tables[0][e // per], tables[1][e // per], e % per
            for first, size in ((o * data, data), (per * data + o * scale, scale)):
                expected[name][b, first : first + size] = src[name][a, first : first + size]
    migrate_pages(ends(src), ends(dst), [tables[0]], [tables[1]], [tokens])
    for name, tensor in dst.items():
        assert torch.equal(tensor, expected[name]), name
    if tokens == 1000:  # complete pages are copies of pages, up to their padding
        assert torch.equal(dst["csa"][8, :37376], src["csa"][5, :37376])


def test_pages_of_other_sizes() -> None:
    """Two pages of 128 tokens for one of 256."""
    src = RecordPages(random_bytes(3, page_bytes(64)), 0, 64, 4)
    dst = RecordPages(untouched(6, page_bytes(32)), 0, 32, 4)
    migrate_pages([src], [dst], [[2, 0]], [[5, 1, 3, 0]], [512])
    for e in range(128):
        a, b = ([2, 0][e // 64], e % 64), ([5, 1, 3, 0][e // 32], e % 32)
        assert torch.equal(src.data[a], dst.data[b])
        assert torch.equal(src.scales[a], dst.scales[b])


def test_keys_of_deepseek_v32() -> None:
    """A key per token: pages of 64 tokens, as vLLM and SGLang have them, into smaller ones.

    Source: vllm 0.32 models/deepseek_v4/attention.py, DeepseekV4IndexerCache: "tokens_per_state=1
    for V3.2"; sglang 0.5.23 srt/mem_cache/memory_pool.py, DSATokenToKVPool
    """
    src = IndexerPages(random_bytes(5, 64 * 132), 0, 64, "fp8", True, tokens_per_entry=1)
    dst = IndexerPages(untouched(9, 32 * 132), 0, 32, "fp8", True, tokens_per_entry=1)
    tables = [3, 0, 4], [8, 1, 2, 7, 5]
    migrate_pages([src], [dst], [tables[0]], [tables[1]], [150])
    for t in range(150):
        for theirs, ours in zip(src._parts(), dst._parts(), strict=True):
            assert torch.equal(theirs[tables[0][t // 64], t % 64], ours[tables[1][t // 32], t % 32])
    assert bool((dst._parts()[0][5, 22:] == SENTINEL).all())
    v4 = IndexerPages(dst.pages, 0, 32, "fp8", True)
    with pytest.raises(UnsupportedError, match=r"keys in fp8 for 1 tokens, expected .* for 4"):
        migrate_pages([src], [v4], [[0]], [[1]], [4])


def test_windows_move_row_by_row() -> None:
    """vLLM's pages of 64 tokens into SGLang's of 256: as many bytes, in another order. Blocks that
    the window has left are block 0."""
    src = RecordPages(random_bytes(6, page_bytes(64), seed=3), 4, 64, 1)
    dst = RecordPages(untouched(3, page_bytes(256)), 4, 256, 1)
    assert 4 * src.pages.shape[1] == dst.pages.shape[1]
    tokens, first = 300, 300 - 128
    expected = dst.pages.clone()
    wanted = RecordPages(expected, 4, 256, 1)
    tables = [0, 0, 3, 5, 1], [2, 1]
    for t in range(first, tokens):
        a, b = (tables[0][t // 64], t % 64), (tables[1][t // 256], t % 256)
        wanted.data[b], wanted.scales[b] = src.data[a], src.scales[a]
    migrate_pages(
        [src], [dst], [tables[0]], [tables[1]], [tokens - first], starts=[first], null_block_id=0
    )
    assert torch.equal(dst.pages, expected)
    flat = torch.cat([src.pages[b] for b in (2, 3, 5, 1)])
    assert not torch.equal(flat[: 576 * 256], dst.pages[2, : 576 * 256])


def test_pages_within_a_tensor_of_other_axes() -> None:
    """vLLM binds (blocks, 64, 584), whose rows are no entries, in blocks of several layers."""
    pool = random_bytes(4, 2 * 37440)
    bound = pool.as_strided((4, 64, 584), (2 * 37440, 584, 1), 37440)
    found = byte_pages(bound, 584 * 64)
    assert torch.equal(found, pool[:, 37440 : 37440 + 584 * 64])
    assert found.data_ptr() == bound.data_ptr()
    words = torch.zeros(4, 3, dtype=torch.float32)
    assert byte_pages(words, 12).shape == (4, 12)
    with pytest.raises(InvalidArgumentError, match="pages of tensor are 12 bytes apart, expected"):
        byte_pages(words, 13)
    with pytest.raises(InvalidArgumentError, match="pages of tensor end at byte 13 of memory"):
        byte_pages(torch.zeros(1, 3), 13)


# --- numbers that change ------------------------------------------------------------------------


def index_pages(encoding: Any, pages: int = 3) -> IndexerPages:
    size = 132 if encoding == "fp8" else 68
    return IndexerPages(
        torch.zeros(pages, page_bytes(64, size), dtype=torch.uint8), 0, 64, encoding, hadamard=True
    )


def key_values(q: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Numbers of keys: (entries, 128)."""
    if kind == "fp8":
        return q.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)
    codes = torch.stack((q & 15, q >> 4), -1).flatten(-2)
    numbers = torch.where(codes > 7, -1.0, 1.0) * reference.CODES[(codes & 7).long()]
    if kind == "mxfp4":
        return numbers * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    return numbers * scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)


def test_keys_of_another_encoding() -> None:
    """FP8 pages to MXFP4 pages, to the NVFP4 keys of a pool, and back to MXFP4 pages."""
    schema = build_schema(DSV4Config(), LayerSpec(0, AttentionType.CSA))
    first, second, pool, third = (
        index_pages("fp8"),
        index_pages("mxfp4"),
        PagedCache(schema, 5),
        index_pages("mxfp4"),
    )
    data, scales = first._parts()
    x = torch.randn(3, 64, 128, generator=torch.Generator().manual_seed(0))
    data[:] = (x * 64).to(torch.float8_e4m3fn).view(torch.uint8)
    scales.view(torch.float32)[:] = 1 / 64
    requantize_keys(first, second, [0, 1], [1, 2], 100)
    requantize_keys(second, pool, [1, 2], [4, 0, 3, 1], 100)
    requantize_keys(pool, third, [4, 0, 3, 1], [2, 0], 100)
    e = torch.arange(100)
    a = key_values(*(t[[0, 1]].flatten(0, 1)[:100] for t in first._parts()), "fp8")
    b = key_values(*(t[[1, 2]].flatten(0, 1)[:100] for t in second._parts()), "mxfp4")
    d = key_values(*(t[[2, 0]].flatten(0, 1)[:100] for t in third._parts()), "mxfp4")
    assert pool.indexer_keys is not None
    assert pool.indexer_scales is not None
    at = torch.tensor([4, 0, 3, 1])[e // 32], e % 32
    c = key_values(pool.indexer_keys[at], pool.indexer_scales[at], "nvfp4")
    assert 0.08 < float((a - b).norm() / a.norm()) < 0.14
    for row in (0, 63, 64, 99):
        codes, scale = reference.fp4(b[row])
        assert torch.equal(pool.indexer_keys[at][row], codes)
        assert torch.equal(pool.indexer_scales[at][row], scale)
    assert float((b - c).norm() / b.norm()) < 0.12
    assert float((c - d).norm() / c.norm()) < 0.14
    assert not third.pages[0, 64 * 36 : 64 * 64].any()  # past entry 99


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "fp8"])
def test_keys_into_fp8(form: Any) -> None:
    """A pool's keys into FP8 pages: an FP4 number and a scale that is a power of two fit into E4M3,
    NVFP4 scales lose what E4M3 cannot hold. FP8 keys survive, from pages to a pool and back."""
    schema = build_schema(DSV4Config(), LayerSpec(0, AttentionType.CSA))
    pool = PagedCache(schema, 4, index_keys=form)
    x = torch.randn(100, 128, generator=torch.Generator().manual_seed(3))
    x *= torch.logspace(-3, 3, 100)[:, None]
    x[5] = 0
    e = torch.arange(100)
    entry, ids = torch.zeros(100, 512), (e % 32).int()
    table = torch.tensor([3, 0, 2, 1], dtype=torch.int32)[e // 32][:, None].contiguous()
    assert pool.indexer_keys is not None
    assert pool.indexer_scales is not None
    ops.flush_write_csa(
        entry, x, None, ids, None, table, pool.entries_fp8, pool.entries_rope, pool.inv_scale,
        pool.indexer_keys, pool.indexer_scales, keys=form,
    )  # fmt: skip
    pages, back = index_pages("fp8"), PagedCache(schema, 4, index_keys="fp8")
    requantize_keys(pool, pages, [3, 0, 2, 1], [2, 0], 100)
    data, scales = (part[[2, 0]].flatten(0, 1)[:100] for part in pages._parts())
    found = key_values(data, scales, "fp8")
    at = table[:, 0].long(), e % 32
    stored = pool.indexer_scales[at]
    given = key_values(pool.indexer_keys[at], stored if form != "fp8" else stored[:, None], form)
    largest = given.abs().amax(-1, keepdim=True)
    if form == "nvfp4":
        assert bool(((found - given).abs() <= largest / 16).all())
    else:
        assert torch.equal(found, given)
    mantissa, _ = torch.frexp(scales.view(torch.float32))
    assert bool((mantissa == 0.5).all()), "scales of engines are powers of two"
    requantize_keys(pages, back, [2, 0], [0, 1, 2, 3], 100)
    again = index_pages("fp8")
    requantize_keys(back, again, [0, 1, 2, 3], [2, 0], 100)
    theirs = (part[[2, 0]].flatten(0, 1)[:100] for part in again._parts())
    assert torch.equal(key_values(*theirs, "fp8"), found)


def test_keys_that_are_refused() -> None:
    mine = index_pages("mxfp4")
    other = IndexerPages(mine.pages.clone(), 0, 64, "mxfp4", hadamard=False)
    with pytest.raises(UnsupportedError, match=r"hadamard is True and .* is False: queries"):
        migrate_pages([mine], [other], [[0]], [[1]], [256])
    with pytest.raises(UnsupportedError, match=r"src.hadamard and dst.hadamard differ: queries"):
        requantize_keys(mine, other, [0], [1], 64)
    with pytest.raises(InvalidArgumentError, match="dst_blocks has 1 blocks of 64 entries, expect"):
        requantize_keys(mine, index_pages("fp8"), [0, 1], [1], 65)
    with pytest.raises(UnsupportedError, match=r"in fp8 for 4 tokens, expected .* requantize_keys"):
        migrate_pages([index_pages("fp8")], [mine], [[0]], [[1]], [256])
    pool = PagedCache(build_schema(DSV4Config(), LayerSpec(7, AttentionType.HCA)), 5)
    with pytest.raises(InvalidArgumentError, match="layer 7 is of type HCA, which has no indexer"):
        requantize_keys(pool, mine, [0], [1], 1)


def test_what_is_no_copy_is_refused() -> None:
    csa, hca = (RecordPages(untouched(2, page_bytes(64)), 0, 64, n) for n in (4, 128))
    with pytest.raises(UnsupportedError, match=r"584 bytes for 4 tokens, expected .* for 128"):
        migrate_pages([csa], [hca], [[0]], [[1]], [256])
    with pytest.raises(UnsupportedError, match=r"stores indexer keys in fp8 .* expected records"):
        migrate_pages([index_pages("fp8")], [csa], [[0]], [[1]], [256])
    with pytest.raises(InvalidArgumentError, match="src has 1 pages, expected 2, as dst has"):
        migrate_pages([csa], [csa, csa], [[0]], [[1]], [256])
    with pytest.raises(InvalidArgumentError, match=r"src\[0\] is 3, expected RecordPages or Index"):
        migrate_pages([3], [csa], [[0]], [[1]], [256])  # type: ignore[list-item]
    with pytest.raises(InvalidArgumentError, match=r"pages is \(2, 37375\) .* 37376 or"):
        RecordPages(csa.pages[:, :37375], 0, 64, 4)
    with pytest.raises(InvalidArgumentError, match="encoding is 'nvfp4', expected 'fp8'"):
        IndexerPages(csa.pages, 0, 64, "nvfp4", hadamard=False)  # type: ignore[arg-type]


def test_entries_between_pages_and_a_pool() -> None:
    """Two blocks of 32 entries for a page of 64. Values survive within what both scales allow."""
    schema = build_schema(DSV4Config(), LayerSpec(0, AttentionType.CSA))
    pool, back = PagedCache(schema, 5), RecordPages(untouched(2, page_bytes(64)), 0, 64, 4)
    pages = RecordPages(untouched(3, page_bytes(64)), 0, 64, 4)
    x = torch.randn(100, 512, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    slots = torch.tensor([2 * 64 + e if e < 64 else e - 64 for e in range(100)])
    pages.write(x, slots)
    values = pages.read(slots)
    requantize_entries(pages, pool, [2, 0], [4, 0, 3, 1], 100)
    e = torch.arange(100)
    at = torch.tensor([4, 0, 3, 1])[e // 32], e % 32
    assert torch.equal(pool.entries_rope[at].float(), x[:, 448:])
    for row in (0, 31, 32, 99):
        codes, scale = reference.quantized(values[row, :448])
        assert torch.equal(pool.entries_fp8[at][row], codes)
        assert pool.inv_scale[at][row] == scale
    requantize_entries(pool, back, [4, 0, 3, 1], [1, 0], 100)
    found = back.read(torch.tensor([64 + n if n < 64 else n - 64 for n in range(100)]))
    assert float((found - values).norm() / values.norm()) < 0.04
    with pytest.raises(InvalidArgumentError, match="dst_blocks has 1 blocks of 64 entries, expect"):
        requantize_entries(pool, back, [4, 0, 3, 1], [1], 100)


# --- tokens that wait ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "csa", "hca"),
    [(3, 3, 3), (4, 4, 4), (7, 7, 7), (8, 4, 8), (10, 6, 10), (128, 4, 0), (131, 7, 3)],
)
def test_tokens_that_wait(tokens: int, csa: int, hca: int) -> None:
    for ratio, overlap, count in ((4, True, csa), (128, False, hca)):
        found = pending_tokens(tokens, ratio, overlap=overlap)
        assert (len(found), found.stop) == (count, tokens)


@pytest.mark.parametrize("both", [False, True])
def test_waiting_tokens_with_and_without_their_bias(both: bool) -> None:
    """From vLLM's pages of 4 rows, whose scores have the bias, to SGLang's flat rows, and back."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(5, 4, 32, generator=generator)
    ape = torch.randn(4, 16, generator=generator)
    positions = torch.tensor(list(pending_tokens(10, 4, overlap=True)))
    src_rows = torch.tensor([3, 1, 4])[positions // 4] * 4 + positions % 4
    flat = torch.full((40, 1, 32), 7.0)
    has: dict[str, Any] = {"src_has_ape": True, "dst_has_ape": both, "ape": ape}
    migrate_pending(raw, flat, src_rows, 20 + positions, positions, **has)
    for p in positions.tolist():
        row = raw[[3, 1, 4][p // 4], p % 4].clone()
        if not both:
            row[16:] -= ape[p % 4]
        assert torch.equal(flat[20 + p, 0], row)
    assert bool((flat[:24] == 7).all())
    assert bool((flat[30:] == 7).all())
    back = torch.zeros_like(raw)
    has = {"src_has_ape": both, "dst_has_ape": True, "ape": ape}
    migrate_pending(flat, back, 20 + positions, src_rows, positions, **has)
    torch.testing.assert_close(
        back.view(-1, 32)[src_rows], raw.view(-1, 32)[src_rows], atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("has_ape", [False, True])
@pytest.mark.parametrize("tokens", [0, 3, 4, 6, 11])
@pytest.mark.parametrize("part", ["csa", "indexer", "hca"])
def test_waiting_tokens_in_tails(part: str, tokens: int, has_ape: bool) -> None:
    """An engine's rows into a slot's tails and back: what decoding token by token had left there,
    with the bias added at the engine's end or not. Other slots keep their bytes."""
    attn = AttentionType.HCA if part == "hca" else AttentionType.CSA
    config = DSV4Config(head_dim=80, csa_compression_ratio=4, hca_compression_ratio=128)
    schema = build_schema(config, LayerSpec(3, attn))
    generator = torch.Generator().manual_seed(tokens)
    state = StateCache(schema, 3)
    ka, za, kb, zb, lens = state.tails(indexer=part == "indexer")
    ratio, width = ka.shape[1:]
    k, z = torch.randn(2, tokens, width, generator=generator).unbind()
    ape = torch.randn(ratio, width, generator=generator)
    at = torch.arange(tokens)
    engine = torch.cat((k, z + ape[at % ratio] if has_ape else z), 1)[:, None]
    needed = torch.tensor(list(pending_tokens(tokens, ratio, overlap=kb is not None)))
    needed = needed.to(torch.int64)
    for tensor in state.tensors.values():
        tensor.fill_(7)
    bias = {"ape": ape} if has_ape else {}
    indexer = part == "indexer"
    pending_to_tails(state, 1, engine, needed, tokens, src_has_ape=has_ape, indexer=indexer, **bias)
    whole = tokens // ratio * ratio
    assert int(lens[1]) == tokens - whole
    tolerance: dict[str, Any] = {"atol": 1e-6 if has_ape else 0, "rtol": 0}
    for current, previous, values, empty in ((ka, kb, k, 0), (za, zb, z, -1e9)):
        expected = torch.zeros(ratio, width)
        expected[: tokens - whole] = values[whole:]
        torch.testing.assert_close(current[1], expected, **tolerance)
        if previous is not None:
            expected = values[whole - ratio : whole] if whole else torch.full_like(expected, empty)
            torch.testing.assert_close(previous[1], expected, **tolerance)
    assert all(bool((tensor[[0, 2]] == 7).all()) for tensor in state.tensors.values())
    back = torch.full_like(engine, 9)
    tails_to_pending(state, 1, back, needed, tokens, dst_has_ape=has_ape, indexer=indexer, **bias)
    torch.testing.assert_close(back[needed], engine[needed], **tolerance)
    assert bool((back[: tokens - len(needed)] == 9).all())


def test_tails_that_are_refused() -> None:
    spec = LayerSpec(2, AttentionType.HCA)
    state = StateCache(build_schema(DSV4Config(), spec), 2)
    rows, at = torch.zeros(5, 1, 1024), torch.arange(5)
    with pytest.raises(InvalidArgumentError, match="src_rows has 5 rows, expected 3: positions 0"):
        pending_to_tails(state, 0, rows, at, 3, src_has_ape=False)
    with pytest.raises(InvalidArgumentError, match="slot 0 has 0 waiting tokens, expected 5"):
        tails_to_pending(state, 0, rows, at, 5, dst_has_ape=False)
    with pytest.raises(UnsupportedError, match="at one end only: pass ape"):
        pending_to_tails(state, 0, rows, at, 5, src_has_ape=True)
    with pytest.raises(InvalidArgumentError, match="of type HCA, which has no tails of an indexer"):
        pending_to_tails(state, 0, rows, at, 5, src_has_ape=False, indexer=True)
    half = StateCache(build_schema(DSV4Config(), spec), 2, tail_dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"tails of layer 2 are torch.bfloat16, expected"):
        pending_to_tails(half, 0, rows, at, 5, src_has_ape=False)
    with pytest.raises(InvalidArgumentError, match="slot is 2"):
        pending_to_tails(state, 2, rows, at, 5, src_has_ape=False)


def test_waiting_tokens_that_are_refused() -> None:
    state, at = torch.zeros(2, 4, 32), torch.zeros(1, dtype=torch.int64)
    differ: dict[str, Any] = {"src_has_ape": True, "dst_has_ape": False}
    with pytest.raises(UnsupportedError, match="at one end only: pass ape, or drop these rows"):
        migrate_pending(state, state.clone(), at, at, at, **differ)
    with pytest.raises(InvalidArgumentError, match=r"ape is \(4, 8\), expected \(ratio, 16\)"):
        migrate_pending(state, state.clone(), at, at, at, **differ, ape=torch.zeros(4, 8))
    with pytest.raises(InvalidArgumentError, match="rows of src have 32 numbers, expected 16"):
        migrate_pending(state, torch.zeros(2, 4, 16), at, at, at, **differ)
    with pytest.raises(InvalidArgumentError, match=r"dst is .* of torch.float16, expected"):
        migrate_pending(state, state.half(), at, at, at, **differ)


@pytest.mark.parametrize(
    ("src_rows", "dst_rows", "positions", "says"),
    [
        ([0, -1], [0, 1], [4, 5], r"src_rows\[1\] is -1, expected 0 to 5"),
        ([0, 6], [0, 1], [4, 5], r"src_rows\[1\] is 6, expected 0 to 5"),
        ([0, 1], [-1, 1], [4, 5], r"dst_rows\[0\] is -1, expected 0 to 7"),
        ([0, 1], [3, 3], [4, 5], r"dst_rows is \[3, 3\], expected a row for each token"),
        ([0, 1], [0, 1], [4, -1], r"positions\[1\] is -1"),
        ([0, 1], [0, 1], [4], "have 2, 2 and 1 numbers"),
        ([0, 1], [0, 1, 2], [4, 5], "have 2, 3 and 2 numbers"),
        ([True, False], [0, 1], [4, 5], "src_rows is .* of torch.bool, expected .n,. of torch.i"),
    ],
)
def test_rows_that_are_none_are_refused(
    src_rows: list[int], dst_rows: list[int], positions: list[int], says: str
) -> None:
    """torch takes -1 for the last row, bools for a mask, and lets two tokens have one row."""
    src, dst = torch.randn(2, 3, 8), torch.full((2, 4, 8), 7.0)
    numbers = [torch.tensor(given) for given in (src_rows, dst_rows, positions)]
    with pytest.raises((InvalidArgumentError, OutOfRangeError), match=says):
        migrate_pending(src, dst, *numbers, src_has_ape=True, dst_has_ape=True)
    assert (dst == 7).all()
    at = torch.arange(2, dtype=torch.int32)
    migrate_pending(src, dst, at, at, at, src_has_ape=True, dst_has_ape=True)
    assert torch.equal(dst[0, :2], src[0, :2])


def test_rows_whose_memory_is_gone_are_refused() -> None:
    src, dst, at = torch.randn(2, 3, 8), torch.full((2, 4, 8), 7.0), torch.arange(3, 6)
    src.untyped_storage().resize_(64)
    with pytest.raises(InvalidArgumentError, match="src has a storage of 64 bytes, expected"):
        migrate_pending(src, dst, at, at, at, src_has_ape=True, dst_has_ape=True)
    records = RecordPages(random_bytes(2, page_bytes(4)), 0, 4, 4)
    others = RecordPages(untouched(2, page_bytes(4)), 0, 4, 4)
    records.pages.untyped_storage().resize_(64)
    with pytest.raises(InvalidArgumentError, match="pages has a storage of 64 bytes, expected"):
        migrate_pages([records], [others], [[0]], [[1]], [16])
    assert (dst == 7).all()
    assert (others.pages == SENTINEL).all()


@pytest.mark.parametrize("kind", ["entries", "keys", "keys in mxfp4", "pool"])
@pytest.mark.parametrize(
    ("src_blocks", "dst_blocks", "says"),
    [
        ([0, 1], [2, 2], r"dst_blocks\[1\] is 2, as dst_blocks\[0\] is"),
        ([0, 1], [2, -1], r"dst_blocks\[1\] is -1, expected 0 to 3"),
        ([0, 1], [2, 4], r"dst_blocks\[1\] is 4, expected 0 to 3"),
        ([0, -1], [2, 3], r"src_blocks\[1\] is -1, expected 0 to 3"),
        ([0, 4], [2, 3], r"src_blocks\[1\] is 4, expected 0 to 3"),
        ([0], [2, 3], r"src_blocks has 1 blocks of 1 entries, expected room for 2"),
    ],
)
def test_blocks_that_are_none_are_refused(
    kind: str, src_blocks: list[int], dst_blocks: list[int], says: str
) -> None:
    """With one entry in a page, block -1 would be a slot that is skipped."""
    hca = build_schema(DSV4Config(), LayerSpec(0, AttentionType.HCA))
    if kind.startswith("keys"):
        to: Any = "mxfp4" if kind == "keys in mxfp4" else "fp8"
        src: Any = IndexerPages(random_bytes(4, 132), 0, 1, "fp8", False)
        dst: Any = IndexerPages(untouched(4, 132), 0, 1, to, False)
        copy: Any = requantize_keys
    else:
        src = PagedCache(hca, 4) if kind == "pool" else RecordPages(random_bytes(4, 584), 0, 1, 128)
        dst, copy = RecordPages(untouched(4, 584), 0, 1, 128), requantize_entries
    with pytest.raises((InvalidArgumentError, OutOfRangeError), match=says):
        copy(src, dst, src_blocks, dst_blocks, 2)
    assert (dst.pages == SENTINEL).all()
    copy(src, dst, [], [], 0)
    assert (dst.pages == SENTINEL).all()
    copy(src, dst, [0, 0], [2, 3, -1], 2)  # what is read may be one block, what is not used any
