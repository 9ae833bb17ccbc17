"""No index reaches outside a cache, even if arrays change during a call; and checks cost little.

validation_rules.txt has the calls that are refused. This file tests calls that stay allowed, arrays
that another thread changes, and the cost of checks.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvx_core._c import abi
from kvx_core.errors import InvalidArgumentError
from kvx_core.types import BlockTableFormat, DType, Layout, Memory, ScaleGranularity
from tests import reference
from tests.caches import LAYOUTS, Cache, Geometry
from tests.calls import CPU, Backend, View
from tests.native import CXX, ROOT, compile_program, run
from tests.reference import Dense, Half, Layer, Slots
from tests.test_validation import BF16, E4M3, Call, offsets

# --- another thread ---------------------------------------------------------------------------

KINDS = (
    "write to slots",
    "gather from a table",
    "ragged to slots",
    "offsets to a table",
    "within a pool",
    "with scales",
    "planes",
    "pointers",
    "a kept plan",
)


@pytest.fixture(scope="module")
def flip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/c/flip.cc against the library that the Python package takes."""
    library = tmp_path_factory.mktemp("flip") / "libkvx.so"
    for name in ("libkvx.so", "libkvx.so.1"):  # to link to, and what it may call itself
        library.with_name(name).symlink_to(abi.library_path().resolve())
    return compile_program(
        [CXX, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"],
        ROOT / "tests/c/flip.cc",
        library.with_name("flip"),
        include=ROOT / "csrc/include",
        library=library,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_indices_that_another_thread_changes_lead_nowhere_else(flip: Path, kind: str) -> None:
    """A segmentation fault, a byte outside or a call without an end fails."""
    output = run([flip, "0.5", kind], timeout=120)
    assert output.startswith(f"{kind}: ")


# --- what lies near, but apart ----------------------------------------------------------------


def write_call(on: Backend, cache: Cache, slots: Tensor, scale: Half | None = None) -> Call:
    """As many random keys as there are slots, into a cache without V."""
    k = cache.layers[0].k
    key = torch.randn(slots.numel(), k.num_kv_heads, k.head_dim)
    desc = abi.kvx_write_desc_t(
        io=abi.kvx_kv_io_desc_t(
            key=on.tensor(key),
            num_tokens=slots.numel(),
            num_kv_heads=k.num_kv_heads,
            head_dim=k.head_dim,
        ),
        slots=on.slots(slots),
        k_scale_desc=on.scale(scale),
    )
    roots = {"cache": on.layer(cache.layers[0]), "write": desc, "key": key}
    return Call(on, "kvx_write_kv", ("cache", "write"), roots, (slots, scale), (cache,))


@pytest.mark.parametrize("where", ["before", "after", "last byte", "first byte"])
def test_an_array_may_touch_the_tensor_but_not_meet_it(backend: Backend, where: str) -> None:
    """Spec: 7. The bytes of 4 slots and of a cache of 512 bytes lie in one allocation."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    start = {"before": 1024 - 32, "after": 1536, "last byte": 1536 - 8, "first byte": 1024 - 24}
    slots = memory[start[where] :][:32].view(torch.int64)
    k = memory[1024:1536].view(BF16).view(4, 4, 1, 16)
    cache = Cache((memory,), (Layer(Half(k, Layout.BLOCK_NHD), None),))
    call = write_call(backend, cache, slots)
    if where in ("before", "after"):
        slots.copy_(torch.tensor([3, -1, 9, 0]))
        call.run()
        key = call.roots["key"].to(BF16)
        for token, slot in ((0, 3), (2, 9), (3, 0)):
            assert torch.equal(k[slot // 4, slot % 4], key[token])
    else:
        message = r"^write\.slots\.slots is 0x[0-9a-f]+: its 32 bytes meet cache\.k, "
        with pytest.raises(InvalidArgumentError, match=message):
            call.run()


def test_scales_may_lie_beside_their_rows(backend: Backend) -> None:
    """Spec: E.4, 7. The last 4 bytes of each row are its scale, as some engines keep them."""
    memory = torch.zeros(8 * 4 * 2, 20, dtype=torch.uint8)
    rows = memory.view(8, 4, 2, 20)
    scale = rows[..., 16:].view(torch.float32)[..., 0].fill_(0.5)
    k = Half(rows[..., :16].view(E4M3), Layout.BLOCK_NHD, scale, ScaleGranularity.PER_TOKEN_HEAD)
    cache = Cache((memory,), (Layer(k, None),))
    call = write_call(backend, cache, torch.tensor([5, 30]), k)
    call.run()
    for token, slot in ((0, 5), (1, 30)):
        expected = reference.encode(call.roots["key"][token] / 0.5, E4M3)
        stored = k.tensor[slot // 4, slot % 4]
        assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, torch.full_like(scale, 0.5))


def test_a_call_without_tokens_writes_nothing_and_may_meet_anything(backend: Backend) -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    cache = Cache(
        (memory,), (Layer(Half(memory[:512].view(BF16).view(4, 4, 1, 16), Layout.BLOCK_NHD), None),)
    )
    write_call(backend, cache, memory[:0].view(torch.int64)).run()


@pytest.mark.parametrize("pool", ["primary", "secondary"])
def test_both_pools_of_a_destination_are_written(backend: Backend, pool: str) -> None:
    """Spec: 7. From slots to a KV_OFFSETS table whose destination holds the slots."""
    src = LAYOUTS["nhd"](Geometry(num_blocks=16), BF16, 1)
    dst = LAYOUTS["tensorrt_llm"](Geometry(), BF16, 2)
    k = dst.layers[1].k
    inside = k.tensor if pool == "primary" else k.secondary
    assert inside is not None
    lengths = torch.tensor([4, 4, 4, 4])
    slots = inside[0].view(-1)[:64].view(torch.int64).copy_(torch.arange(16))
    views = [
        View(backend, src, Slots(slots, [4] * 4, 4), None, 0),
        View(backend, dst, offsets(), None, 0),
    ]
    lens = backend.seq_lens(lengths)
    desc = abi.kvx_migrate_desc_t(
        seq_lens=ctypes.pointer(lens),
        src=ctypes.pointer(views[0].desc),
        dst=ctypes.pointer(views[1].desc),
    )
    named = r"dst\.layers\[.\]\." + ("k" if pool == "primary" else r"pool\.secondary")
    with pytest.raises(InvalidArgumentError, match=rf"^src\.slots\.slots is .* meet {named}, "):
        backend.call("kvx_migrate_kv", desc)


def test_found_scales_of_a_migration_are_written(backend: Backend) -> None:
    """Spec: 7, E.9."""
    src = LAYOUTS["nhd"](Geometry(num_layers=1), BF16, 1)
    dst = LAYOUTS["nhd"](Geometry(num_layers=1), E4M3, 2).with_scales(
        lambda half, _: (torch.ones(5, 4, 2), ScaleGranularity.PER_TOKEN_HEAD)
    )
    room = dst.layers[0].k.scale
    assert room is not None
    lengths = room.view(-1)[:4].view(torch.int64).copy_(torch.tensor([4, 2]))
    views = [View(backend, cache, Dense(), None, 0) for cache in (src, dst)]
    lens = backend.seq_lens(lengths)
    desc = abi.kvx_migrate_desc_t(
        flags=abi.FLAG_FIND_SCALES,
        seq_lens=ctypes.pointer(lens),
        src=ctypes.pointer(views[0].desc),
        dst=ctypes.pointer(views[1].desc),
    )
    message = r"^migrate\.seq_lens\.lengths is .* meet dst\.k_scales\[0\], which the call writes; "
    with pytest.raises(InvalidArgumentError, match=message):
        backend.call("kvx_migrate_kv", desc)


# --- what it costs ----------------------------------------------------------------------------


def byte_cache(data: int, num_blocks: int) -> abi.kvx_cache_desc_t:
    """Blocks of one token of one head of one byte, without V."""
    return abi.kvx_cache_desc_t(
        num_blocks=num_blocks,
        block_size=1,
        num_kv_heads=1,
        head_dim=1,
        k=abi.kvx_tensor_desc_t(
            dtype=DType.U8,
            layout=Layout.BLOCK_NHD,
            memory=Memory.HOST,
            ndim=4,
            shape=abi.dims((num_blocks, 1, 1, 1)),
            stride=abi.dims((1, 1, 1, 1)),
            data=data,
        ),
    )


def byte_view(layers: list[abi.kvx_cache_desc_t], block: Tensor) -> abi.kvx_span_t:
    """One sequence in one block of every layer."""
    table = abi.kvx_block_table_t(
        format=BlockTableFormat.PACKED,
        index_dtype=DType.S64,
        seq_count=1,
        max_blocks_per_seq=1,
        indices=block.data_ptr(),
        indices_count=1,
    )
    return abi.kvx_span_t(
        num_layers=len(layers),
        layers=abi.pointer_array(layers, abi.kvx_cache_desc_t),
        block_table=ctypes.pointer(table),
    )


def migrate_bytes(src: abi.kvx_span_t, dst: abi.kvx_span_t) -> Callable[[], None]:
    """Moves one token."""
    length = torch.tensor([1])
    lens = CPU.seq_lens(length)
    desc = abi.kvx_migrate_desc_t(
        seq_lens=ctypes.pointer(lens), src=ctypes.pointer(src), dst=ctypes.pointer(dst)
    )

    def call() -> None:
        assert length.item() == 1  # kept until here
        CPU.call("kvx_migrate_kv", desc)

    return call


def quickest(call: Callable[[], object], times: int) -> float:
    """Seconds of the quickest of several calls: what disturbs the others is not the call's."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def test_a_migration_within_a_pool_costs_what_moves_not_what_the_pool_holds() -> None:
    """One token of 2^32 - 1 blocks. A bit for every block took half a second."""
    num_blocks = 2**32 - 1
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's; Python has it since 3.13
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, num_blocks, flags=flags)
    memory[3] = 7
    data = ctypes.addressof(ctypes.c_uint8.from_buffer(memory))
    blocks = torch.tensor([3]), torch.tensor([num_blocks - 1])
    layers = [byte_cache(data, num_blocks)]
    call = migrate_bytes(*(byte_view(layers, block) for block in blocks))
    assert quickest(call, 5) < 1e-3
    assert memory[num_blocks - 1] == 7
    blocks[1][0] = 3
    with pytest.raises(InvalidArgumentError, match=r"^block 3 is a destination of row 0 and a "):
        call()


@pytest.mark.parametrize("apart", [True, False])
def test_thousands_of_layers_are_compared_in_little_time(apart: bool) -> None:
    """8,000 layers by turns of the source and of the destination. Each with each took seconds."""
    num_layers = 8000
    memory = torch.arange(4 * num_layers + 2, dtype=torch.int32).view(torch.uint8)
    at = memory.data_ptr()
    src = [byte_cache(at + 4 * layer, 2) for layer in range(num_layers)]
    dst = [byte_cache(at + 4 * layer + 2, 2) for layer in reversed(range(num_layers))]
    if not apart:
        dst[6000].k.data = src[4321].k.data + 1
    block = torch.tensor([1])
    call = migrate_bytes(byte_view(src, block), byte_view(dst, block))
    if apart:
        expected = memory.clone()
        for layer in range(num_layers):
            expected[4 * (num_layers - 1 - layer) + 3] = memory[4 * layer + 1]
        call()
        assert torch.equal(memory, expected)
        assert quickest(call, 3) < 0.1
        return

    def refused() -> None:
        message = r"^dst\.layers\[6000\]\.k shares memory with src\.layers\[4321\]\.k, but "
        with pytest.raises(InvalidArgumentError, match=message):
            call()

    assert quickest(refused, 3) < 0.1
