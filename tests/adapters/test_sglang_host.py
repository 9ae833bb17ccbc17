"""kvx_adapters.sglang on HiCache's host pools, all five layouts.

SGLang copies pages between device and host with CUDA kernels. Here the host pool's own
set_from_flat_data_page and get_data_page write and read them, which its storage backends call; for
page_unified, which they refuse, the axes of its PageUnifiedLayout.page_dims.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import sglang
from kvx_core import InvalidArgumentError, UnsupportedError, migrate, verify
from tests import sglang_wheel as wheel
from tests.documents import Document
from tests.facts import SAME_MODEL
from tests.sglang_pools import (
    SEEDS,
    Requests,
    buffers,
    bytes_of,
    mha,
    mla,
    random_rows,
    scheduled,
    store,
    windows,
)
from tests.sglang_pools import SENTINEL as S
from tests.ways_out import WayOut, leads_out

PAGE, LAYERS = 16, 2
every_seed = pytest.mark.parametrize("seed", SEEDS)
FLAT = ("layer_first", "page_first", "page_first_direct", "page_head")
LATENT = ("layer_first", "page_first", "page_first_direct", "page_unified")
# Axes of one page as they lie in memory: K or V, layer, token, head, dim; g is a group of heads.
AXES = {
    "layer_first": "clthd",
    "page_first": "ctlhd",
    "page_first_direct": "clthd",
    "page_head": "chtld",
}


def host_of(pool: Any, layout: str, *, groups: int = 1, pages: int = 9) -> Any:
    """The host pool of a device pool, every byte of it a sentinel."""
    (info,) = (found.buffer_info for found in pool.get_device_pool_infos())
    common = {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": PAGE,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": pool.size,
        "start_layer": 0,
        "end_layer": LAYERS - 1,
        "host_token_capacity": pages * PAGE,
    }
    if type(pool).__name__ == "MLATokenToKVPool":
        host = wheel.mla_host.MLATokenToKVPoolHost(info, target_layer_num=LAYERS, **common)
    else:
        host = wheel.mha_host.get_mha_host_pool_cls(info)(info, head_group_num=groups, **common)
    for raw in raw_of(host):
        raw.fill_(S)
    return host


def raw_of(host: Any) -> list[Tensor]:
    held = host.kv_buffer
    return [bytes_of(t) for t in ([held] if isinstance(held, Tensor) else held)]


class Pages:
    """Four pages of tokens in a device pool, and where they go on the host."""

    def __init__(self, pool: Any, host: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.here = (torch.randperm(7, generator=generator)[:4] + 1) * PAGE
        own = host.alloc(9 * PAGE).view(9, PAGE)
        self.there = own[torch.randperm(9, generator=generator)[:4]][:, 0]
        latent = type(pool).__name__ == "MLATokenToKVPool"
        heads = 1 if latent else pool.head_num
        dims = (pool.kv_cache_dim,) if latent else (pool.head_dim, pool.v_head_dim)
        self.tokens = [  # [K, V][layer, page, token, head, dim]
            random_rows(seed + c, LAYERS, 4, PAGE, heads, dim, dtype=torch.float32).to(pool.dtype)
            for c, dim in enumerate(dims)
        ]
        for layer in range(LAYERS):
            store(
                pool, layer, self.slots(self.here), *(t[layer].flatten(0, 1) for t in self.tokens)
            )

    @staticmethod
    def slots(firsts: Tensor) -> Tensor:
        return (firsts[:, None] + torch.arange(PAGE)).flatten()

    def flat(self, page: int, layout: str) -> Tensor:
        """A page as set_from_flat_data_page takes it, in the host pool's dtype."""
        both = torch.stack([half[:, page] for half in self.tokens])  # cltghd
        order = ["clthd".index(axis) for axis in AXES[layout]]
        found = both.permute(order).flatten()
        return found.view(torch.uint8) if found.itemsize == 1 else found


def moved(pool: Any, host: Any, pages: Pages, **scales: Any) -> None:
    """From the device to the host, one view of the host after the other."""
    (src, *views) = (
        sglang.cache_view(pool, SAME_MODEL, **scales),
        *sglang.host_views(host, pool, SAME_MODEL, **scales),
    )
    for i, view in enumerate(views):
        heads = view.layers[0].num_kv_heads
        a = src.at(slots=pages.slots(pages.here), head_start=i * heads)
        b = view.at(slots=pages.slots(pages.there))
        migrate(a, b, [4 * PAGE], num_heads=heads)
        assert verify(a, b, [4 * PAGE], num_heads=heads).ok


def restored(pool: Any, host: Any, pages: Pages, **scales: Any) -> None:
    """From the host into a device pool."""
    dst = sglang.cache_view(pool, SAME_MODEL, **scales)
    for i, view in enumerate(sglang.host_views(host, pool, SAME_MODEL, **scales)):
        heads = view.layers[0].num_kv_heads
        a = dst.at(slots=pages.slots(pages.here), head_start=i * heads)
        migrate(view.at(slots=pages.slots(pages.there)), a, [4 * PAGE], num_heads=heads)


def check(make: Any, host: Any, expected: Any, pool: Any, pages: Pages, **scales: Any) -> None:
    """Whole memories of the host, and of a device pool that is restored from it."""
    moved(pool, host, pages, **scales)
    for a, b in zip(raw_of(host), raw_of(expected), strict=True):
        assert torch.equal(a, b)
        assert a.eq(S).sum() > a.numel() // 3  # five of nine pages are nobody's
    back = make()
    restored(back, expected, pages, **scales)
    for a, b in zip(buffers(back), buffers(pool), strict=True):
        assert torch.equal(bytes_of(a), bytes_of(b))


@every_seed
@pytest.mark.parametrize("hnd", [False, True], ids=["nhd", "hnd"])
@pytest.mark.parametrize("layout", FLAT)
def test_pages_of_keys_and_values(layout: str, hnd: bool, seed: int) -> None:
    pool = mha(hnd=hnd)
    host, expected = host_of(pool, layout), host_of(pool, layout)
    pages = Pages(pool, host, seed)
    for i, first in enumerate(pages.there.tolist()):
        expected.set_from_flat_data_page(first, pages.flat(i, layout))
    check(lambda: mha(hnd=hnd), host, expected, pool, pages)
    for i, first in enumerate(pages.there.tolist()):
        assert torch.equal(host.get_data_page(first), pages.flat(i, layout))


@every_seed
@pytest.mark.parametrize("layout", FLAT)
def test_pages_of_fp8(layout: str, seed: int) -> None:
    """The host pool has bytes; their dtype is that of the device pool."""
    pool = mha(dtype=torch.float8_e4m3fn)
    scales = {"k_scales": [0.5, 2.0], "v_scales": [None, 4.0]}
    host, expected = host_of(pool, layout), host_of(pool, layout)
    pages = Pages(pool, host, seed)
    assert host.kv_buffer.dtype == torch.uint8
    for i, first in enumerate(pages.there.tolist()):
        expected.set_from_flat_data_page(first, pages.flat(i, layout))
    check(lambda: mha(dtype=torch.float8_e4m3fn), host, expected, pool, pages, **scales)


@every_seed
@pytest.mark.parametrize(("heads", "groups"), [(3, 1), (3, 3), (2, 2), (4, 2), (1, 1)])
def test_page_unified_is_one_view_or_one_of_each_group(heads: int, groups: int, seed: int) -> None:
    """[page, group, layer, K or V, token, head of the group, dim]: by PageUnifiedLayout."""
    pool = mha(heads=heads)
    host, expected = (host_of(pool, "page_unified", groups=groups) for _ in range(2))
    pages = Pages(pool, host, seed)
    for i, first in enumerate(pages.there.tolist()):
        for c, half in enumerate(pages.tokens):
            by_group = half[:, i].unflatten(2, (groups, -1))  # layer, token, group, head, dim
            expected.kv_buffer[first // PAGE, :, :, c] = by_group.permute(2, 0, 1, 3, 4)
    facts = replace(SAME_MODEL, total_kv_heads=heads, first_kv_head=0)
    views = sglang.host_views(host, pool, facts)
    assert [view.facts.first_kv_head for view in views] == ([0, 2] if heads == 4 else [0])
    check(lambda: mha(heads=heads), host, expected, pool, pages)


@every_seed
def test_groups_of_heads_meet_by_their_facts(seed: int) -> None:
    """Facts that say which heads a view holds, as those of one rank do."""
    pool = mha(heads=4)
    host = host_of(pool, "page_unified", groups=2)
    pages = Pages(pool, host, seed)
    facts = replace(SAME_MODEL, total_kv_heads=4, first_kv_head=0)
    src = sglang.cache_view(pool, facts)
    for view in sglang.host_views(host, pool, facts):
        start = view.facts.first_kv_head or 0
        a = src.at(slots=pages.slots(pages.here), head_start=start)
        migrate(a, view.at(slots=pages.slots(pages.there)), [4 * PAGE], num_heads=2)
    for i, first in enumerate(pages.there.tolist()):
        for c, half in enumerate(pages.tokens):
            by_group = half[:, i].unflatten(2, (2, 2)).permute(2, 0, 1, 3, 4)
            assert torch.equal(host.kv_buffer[first // PAGE, :, :, c], by_group)


@every_seed
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_another_head_dim_of_v(layout: str, seed: int) -> None:
    """AsymmetricMHATokenToKVPoolHost: K and V in an allocation each."""
    pool = mha(dim=80, v_dim=24)
    host, expected = host_of(pool, layout), host_of(pool, layout)
    assert type(host).__name__ == "AsymmetricMHATokenToKVPoolHost"
    pages = Pages(pool, host, seed)
    for i, first in enumerate(pages.there.tolist()):
        for buffer, half in zip(expected.kv_buffer, pages.tokens, strict=True):
            if layout == "page_first":
                buffer[first : first + PAGE] = half[:, i].transpose(0, 1)
            else:
                buffer[first // PAGE] = half[:, i]
    check(lambda: mha(dim=80, v_dim=24), host, expected, pool, pages)


@every_seed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("layout", LATENT)
def test_pages_of_latents(layout: str, dtype: torch.dtype, seed: int) -> None:
    pool = mla(dtype=dtype)
    host, expected = host_of(pool, layout), host_of(pool, layout)
    pages = Pages(pool, host, seed)
    (latents,) = pages.tokens
    for i, first in enumerate(pages.there.tolist()):
        page = latents[:, i]  # layer, token, 1, dim
        page = page.view(torch.uint8) if dtype.itemsize == 1 else page
        if layout == "page_unified":
            expected.kv_buffer[first // PAGE] = page[:, :, 0]
            continue
        in_order = page.transpose(0, 1) if layout == "page_first" else page
        expected.set_from_flat_data_page(first, in_order.flatten())
    check(lambda: mla(dtype=dtype), host, expected, pool, pages)


# ---- refusals ----


def test_a_destroyed_pool_is_refused() -> None:
    pool = mha()
    host = host_of(pool, "page_first")
    pages = Pages(pool, host, 0)
    (view,) = sglang.host_views(host, pool, SAME_MODEL)
    src = sglang.cache_view(pool, SAME_MODEL).at(slots=pages.slots(pages.here))
    dst = view.at(slots=pages.slots(pages.there))
    held = host.kv_buffer
    host.kv_buffer = held.clone()
    with pytest.raises(InvalidArgumentError, match="host_pool has its buffer elsewhere"):
        migrate(src, dst, [4 * PAGE])
    host.kv_buffer = held
    migrate(src, dst, [4 * PAGE])
    host.destroy()
    with pytest.raises(InvalidArgumentError, match="host_pool has been destroyed"):
        migrate(src, dst, [4 * PAGE])
    with pytest.raises(InvalidArgumentError, match=r"host_pool\.kv_buffer is None, expected"):
        sglang.host_views(host, pool, SAME_MODEL)


def test_the_device_pool_is_the_one_that_is_backed_up() -> None:
    pool = mha()
    host = host_of(pool, "page_first")
    for other, message in [
        (mha(heads=2), r"host_pool\.head_num is 3, expected 2 as in `pool`"),
        (mha(page=5), r"host_pool\.page_size is 16, expected 5"),
        (mha(dim=24), r"host_pool\.head_dim is 80, expected 24"),
        (mha(layers=1), r"host_pool\.target_layer_num is 2, expected 1"),
        (
            mha(dtype=torch.float8_e5m2),
            r"host_pool\.dtype is torch\.float16, expected torch\.uint8",
        ),
        (mla(), r"pool is a MLATokenToKVPool, expected the MHATokenToKVPool that the MHA"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            sglang.host_views(host, other, SAME_MODEL)


def test_other_host_pools_are_refused() -> None:
    pool = mha()
    host = host_of(pool, "page_first")
    with pytest.raises(UnsupportedError, match="host_pool is a MHATokenToKVPool, expected one of"):
        sglang.host_views(pool, pool, SAME_MODEL)
    host.dcp_size = 2
    with pytest.raises(UnsupportedError, match=r"host_pool\.dcp_size is 2, expected 1"):
        sglang.host_views(host, pool, SAME_MODEL)
    host.dcp_size, host.layout = 1, "page_first_kv_split"
    with pytest.raises(UnsupportedError, match=r"host_pool\.layout is 'page_first_kv_split'"):
        sglang.host_views(host, pool, SAME_MODEL)


# ---- ways out ----


def of_host(field: str = "page_size", value: Any = PAGE) -> None:
    """A host pool with a field as it may be."""
    pool = mha()
    host = host_of(pool, "page_first")
    setattr(host, field, value)
    sglang.host_views(host, pool, SAME_MODEL)


def in_layout(layout: str) -> None:
    pool = mha()
    host = host_of(pool, layout if layout in FLAT else "page_first")
    host.layout = layout
    sglang.host_views(host, pool, SAME_MODEL)


def backed_up(other: Any) -> None:
    """The views of a host pool beside a pool that may be another's."""
    pool = mha()
    sglang.host_views(host_of(pool, "page_first"), other or pool, SAME_MODEL)


def moved_elsewhere(*, again: bool) -> None:
    """A host pool that has another buffer than when it was described."""
    pool = mha()
    host = host_of(pool, "page_first")
    pages = Pages(pool, host, 0)
    views = sglang.host_views(host, pool, SAME_MODEL)
    host.kv_buffer = host.kv_buffer.clone()
    if again:
        moved(pool, host, pages)
        return
    src = sglang.cache_view(pool, SAME_MODEL).at(slots=pages.slots(pages.here))
    migrate(src, views[0].at(slots=pages.slots(pages.there)), [4 * PAGE])


def destroyed(*, other: bool) -> None:
    pool = mha()
    host = host_of(pool, "page_first")
    pages = Pages(pool, host, 0)
    (view,) = sglang.host_views(host, pool, SAME_MODEL)
    host.destroy()
    if other:
        now = host_of(pool, "page_first")
        moved(pool, now, Pages(pool, now, 0))
        return
    src = sglang.cache_view(pool, SAME_MODEL).at(slots=pages.slots(pages.here))
    migrate(src, view.at(slots=pages.slots(pages.there)), [4 * PAGE])


WAYS_OUT = [
    WayOut(
        "Give the device pool that it backs up",
        lambda: backed_up(mha(heads=2)),
        lambda: backed_up(None),
    ),
    WayOut(
        "expected the MHATokenToKVPool that the MHATokenToKVPoolHost backs up",
        lambda: backed_up(mla()),
        lambda: backed_up(mha()),
    ),
    WayOut(
        "each rank holds some tokens of a page. Start SGLang with --dcp-size 1",
        lambda: of_host("dcp_size", 2),
        lambda: of_host("dcp_size", 1),
    ),
    WayOut(
        "host_pool.layout is 'page_first_kv_split', expected one of layer_first, page_first, "
        "page_first_direct, page_head, page_unified. Choose another --hicache-mem-layout",
        lambda: in_layout("page_first_kv_split"),
        lambda: [in_layout(layout) for layout in FLAT],
    ),
    WayOut(
        "Call host_views again",
        lambda: moved_elsewhere(again=False),
        lambda: moved_elsewhere(again=True),
    ),
    WayOut(
        "host_pool has been destroyed. Describe the pool that the engine uses now",
        lambda: destroyed(other=False),
        lambda: destroyed(other=True),
    ),
]


@pytest.mark.parametrize("case", WAYS_OUT, ids=str)
def test_each_way_out_leads_out(case: WayOut) -> None:
    leads_out(case)


# ---- docs/sglang.md ----


def test_the_page() -> None:
    """Its snippets move a request out of the pool, of a window, and pages from the host."""
    pool, swa_pool = mha(), windows()
    requests = Requests([37, 20], page=PAGE, pages=7, seed=3)
    lengths = [37, 20]
    for layer in range(LAYERS):
        key, value = (random_rows(layer + i, 57, 3, 80) for i in range(2))
        store(pool, layer, requests.all_slots, key, value)
    other = mha(page=5, pages=30)
    into = Requests(lengths, page=5, pages=30, seed=4)
    mapping = torch.arange(PAGE * 8 + 1) % 30 + 5
    swa_pool.register_mapping(mapping)
    hosts = [host_of(pool, "page_first"), host_of(mha(heads=3), "page_unified", groups=3)]
    document = Document("sglang.md")
    snippets = document.snippets()
    names: dict[str, Any] = {
        "pool": pool,
        "req_to_token": requests.table,
        "req_pool_indices": requests.rows,
        "seq_lens": lengths,
        "requests": scheduled(requests.rows, lengths),
        "swa_pool": swa_pool,
        "host_pool": hosts[0],
        "unified_pool": hosts[1],
        "host_slots": hosts[0].alloc(64)[:57],
    }
    turning = {"rotary": "half", "rotary_dim": pool.head_dim}
    facts = sglang.cache_facts(
        pool, version="0.5.23", fingerprint="of one model", window=0, **turning
    )
    view = sglang.cache_view(other, facts)
    names["destination"] = view.at(slots=into.all_slots)
    names = document.run(names, snippets[0])
    assert verify(names["span"], names["destination"], lengths).ok
    whole = names["span"]
    names["facts"] = replace(facts, rotary_dim=24)  # of the pool with a window
    names = document.run(names, snippets[1])
    names["facts"] = facts
    assert names["span"].slots.token_count == 24
    names["table"] = whole.block_table
    moved_to = names["view"].at(names["table"])
    (host,) = sglang.host_views(hosts[0], pool, facts)
    migrate(moved_to, host.at(slots=names["host_slots"]), lengths)
    names["destination"] = view.at(slots=into.all_slots)
    document.run(names, snippets[2])
    document.run(names, snippets[3])
    assert len(snippets) == 5  # the last is in test_sglang_states.py
