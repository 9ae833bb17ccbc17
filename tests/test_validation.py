"""Every rule of validation, broken alone, and its sentence.

validation_rules.txt has the rules: a valid call, the fields that are changed in it, and the whole
sentence that must come back. This file makes the calls, breaks them, checks that nothing was
written, and finds sentences in the sources that no rule covers.
"""

from __future__ import annotations

import copy
import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_core._c import abi, abi_attend, abi_hybrid, abi_plan
from kvx_core._c.abi_plan import kvx_take_ranges_t
from kvx_core.errors import InvalidArgumentError, KvxError, OutOfRangeError, UnsupportedError
from kvx_core.types import ScaleGranularity
from tests.block_calls import Blocks
from tests.block_calls import run as run_blocks
from tests.block_layouts import Dims
from tests.caches import LAYOUTS, Cache, Geometry
from tests.calls import CPU, Backend, View
from tests.hybrid_calls import FUNCTIONS as HYBRID
from tests.native import sentences_in
from tests.planes import Paged, filled, table
from tests.plans import Migration, Plan, planned
from tests.reference import Dense, End, Half, KvOffsets, Layer, Packed, Ragged, Slots
from tests.tables import POISON

TESTS = Path(__file__).parent
CSRC = TESTS.parent / "csrc"
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


WITHOUT_STREAM = ("kvx_validate_cache_desc", "kvx_find_tokens", "kvx_attend_kv")


# --- valid calls ------------------------------------------------------------------------------


@dataclass
class Call:
    """A valid call whose fields a test may change, by the names that the sentences use."""

    on: Backend
    function: str
    arguments: tuple[str, ...]
    roots: dict[str, Any]  # structs of the call and tensors that they point to
    kept: Any  # whatever else they point to
    caches: tuple[Cache, ...]

    def run(self) -> None:
        structs = [self.roots[name] for name in self.arguments]
        if self.function in WITHOUT_STREAM:
            library = self.on.library()
            abi_attend.declare(library)
            abi.check(getattr(library, self.function)(*structs), library)
        else:
            self.on.call(self.function, *structs)

    def set(self, path: str, value: int | str) -> None:
        """Sets a field or an entry: `cache.k.shape[1]`, `src.layers[0].v.dtype`, `slots[2]`.

        value: a number, NULL for no pointer, +n for a pointer n bytes further on, or another field.
        """
        *steps, last = re.findall(r"\w+", path)
        at: Any = self.roots
        for step in steps:
            at = follow(at, step)
        if isinstance(at, ctypes._Pointer) and not last.isdigit():
            at = at.contents
        if isinstance(value, str) and value.startswith("+"):
            value = follow(at, last) + int(value)
        elif isinstance(value, str) and value != "NULL":
            value = self.get(value)
        if isinstance(at, Tensor):
            at.view(-1)[int(last)] = value
        elif last.isdigit():
            at[int(last)] = at._type_() if value == "NULL" else value
        elif isinstance(at, dict):
            at[last] = None if value == "NULL" else value
        else:
            assert hasattr(at, last), path
            setattr(at, last, None if value == "NULL" else value)

    def get(self, path: str) -> Any:
        """What a field or an entry holds."""
        at: Any = self.roots
        for step in re.findall(r"\w+", path):
            at = follow(at, step)
        return at

    def memory(self) -> list[Tensor]:
        """A copy of everything that the call could write to."""
        tensors = [t for t in self.roots.values() if isinstance(t, Tensor)]
        return [t.clone() for t in tensors + [s for cache in self.caches for s in cache.storages]]


def follow(at: Any, step: str) -> Any:
    """One step of a path: an index, a root, or a field of a struct or of a pointer's target."""
    if step.isdigit():
        return at[int(step)]
    if isinstance(at, dict):
        return at[step]
    return getattr(at.contents if isinstance(at, ctypes._Pointer) else at, step)


def scaled(cache: Cache, granularity: ScaleGranularity) -> Cache:
    """The cache with scales of 0.5, if it is FP8."""
    if cache.layers[0].k.tensor.dtype != E4M3:
        return cache

    def scale(half: Half, name: str) -> tuple[Tensor, ScaleGranularity]:
        shapes = {
            ScaleGranularity.PER_TENSOR: (),
            ScaleGranularity.PER_HEAD: (half.num_kv_heads,),
            ScaleGranularity.PER_BLOCK_HEAD: (half.num_blocks, half.num_kv_heads),
            ScaleGranularity.PER_TOKEN_HEAD: (half.num_blocks, half.block_size, half.num_kv_heads),
        }
        return torch.full(shapes[granularity], 0.5), granularity

    return cache.with_scales(scale)


def write(on: Backend, dtype: torch.dtype = BF16, layout: str = "mixed") -> Call:
    """3 tokens into 5 blocks of 4 tokens, 2 heads of 16: NHD keys, values in packs of 4."""
    cache = LAYOUTS[layout](Geometry(num_layers=1), dtype, 1)
    cache = scaled(cache, ScaleGranularity.PER_BLOCK_HEAD)
    layer = cache.layers[0]
    key, value = torch.zeros(2, 3, 2, 16, dtype=dtype)
    slots = torch.tensor([3, -1, 17])
    roots = {
        "cache": on.layer(layer),
        "write": abi.kvx_write_desc_t(
            io=on.io(key, None if layer.v is None else value, 3),
            slots=on.slots(slots),
            k_scale_desc=on.scale(layer.k),
            v_scale_desc=on.scale(layer.v),
        ),
        "slots": slots,
    }
    if layer.k.scale is not None:
        roots |= {"k_scale": layer.k.scale, "v_scale": layer.v.scale}
    return Call(on, "kvx_write_kv", ("cache", "write"), roots, (key, value), (cache,))


def describe(on: Backend, layout: str = "mixed") -> Call:
    call = write(on, layout=layout)
    return replace(call, function="kvx_validate_cache_desc", arguments=("cache",))


def describe_packed(on: Backend) -> Call:
    """Keys in packs of 8."""
    return describe(on, "packed8")


def write_mla(on: Backend) -> Call:
    """A cache without V."""
    return write(on, layout="mla")


def write_fp8(on: Backend) -> Call:
    """Scales PER_BLOCK_HEAD."""
    return write(on, E4M3)


def write_one_scale(on: Backend) -> Call:
    """The scale pointers of v1, both to 0.5."""
    call = write(on, E4M3)
    scale = call.roots["scale"] = torch.tensor([0.5])
    desc = call.roots["write"]
    desc.k_scale_desc = desc.v_scale_desc = abi.kvx_scale_desc_t()
    desc.k_scale = desc.v_scale = on.address(scale)
    return call


def write_with_options(on: Backend) -> Call:
    call = write(on)
    call.roots["options"] = abi.kvx_write_options_t()
    arguments = ("cache", "write", "options")
    return replace(call, function="kvx_write_kv_ext", arguments=arguments)


def write_layers(on: Backend) -> Call:
    """3 tokens into each of 3 layers of 5 blocks of 4 tokens, 2 heads of 16."""
    cache = LAYOUTS["nhd"](Geometry(num_layers=3), BF16, 1)
    key, value = torch.zeros(2, 3, 2, 16, dtype=BF16)
    slots = torch.tensor([3, -1, 17])
    writes = [
        abi.kvx_write_desc_t(io=on.io(key, value, 3), slots=on.slots(slots)) for _ in cache.layers
    ]
    caches = [on.layer(layer) for layer in cache.layers]
    roots = {
        "caches": abi.pointer_array(caches, abi.kvx_cache_desc_t),
        "writes": abi.pointer_array(writes, abi.kvx_write_desc_t),
        "num_layers": 3,
        "options": abi.kvx_write_options_t(),
        "slots": slots,
    }
    arguments = ("caches", "writes", "num_layers", "options")
    return Call(on, "kvx_write_layers", arguments, roots, (key, value, writes), (cache,))


def write_found(on: Backend) -> Call:
    """Scales PER_TOKEN_HEAD, which the call finds."""
    call = write_with_options(on)
    cache = scaled(
        LAYOUTS["mixed"](Geometry(num_layers=1), E4M3, 1), ScaleGranularity.PER_TOKEN_HEAD
    )
    layer = cache.layers[0]
    call.roots["cache"] = on.layer(layer)
    call.roots["write"].k_scale_desc = on.scale(layer.k)
    call.roots["write"].v_scale_desc = on.scale(layer.v)
    call.roots["options"].flags = abi.FLAG_FIND_SCALES
    return replace(call, caches=(cache,))


def write_unit_scale(on: Backend) -> Call:
    """A scale of 1 on a cache that is not FP8, which is allowed."""
    call = write(on)
    scale = call.roots["scale"] = torch.tensor([1.0])
    call.roots["write"].k_scale = on.address(scale)
    return call


def gather(
    on: Backend,
    end: Packed | Ragged | KvOffsets | None = None,
    layout: str = "nhd",
    dtype: torch.dtype = BF16,
) -> Call:
    """9 and 5 tokens out of 5 blocks of 4, at most 12 of a sequence."""
    end = end or Packed(torch.tensor([[1, 4, 0], [2, 3, POISON]]), 4)
    cache = LAYOUTS[layout](Geometry(), dtype, 1)
    granularity = ScaleGranularity.PER_HEAD if layout == "tensorrt_llm" else None
    cache = scaled(cache, granularity or ScaleGranularity.PER_BLOCK_HEAD)
    layer = cache.layers[0]
    assert layer.v is not None
    table = on.block_table(end)
    rows = 2 * table.beam_width
    key, value = torch.zeros(2, rows, 12, 2, 16, dtype=dtype)
    lengths = torch.tensor([9, 5])
    scales = [ctypes.pointer(on.scale(half)) for half in (layer.k, layer.v)]
    roots = {
        "cache": on.layer(layer, cache.bytes_per_block),
        "gather": abi.kvx_gather_desc_t(
            io=on.io(key, value, rows * 12),
            block_table=table,
            seq_lens=on.seq_lens(lengths),
            max_seq_len=12,
        ),
        "options": abi.kvx_gather_options_t(
            secondary_num_blocks=7 if cache.bytes_per_block else 0,
            k_scale=scales[0],
            v_scale=scales[1],
        ),
        "lengths": lengths,
        "indices": end.indices,
        "key": key,
        "value": value,
    }
    if isinstance(end, Ragged):
        roots["indptr"] = end.indptr
    if layer.k.scale is not None:
        roots |= {"k_scale": layer.k.scale, "v_scale": layer.v.scale}
    arguments = ("cache", "gather", "options")
    return Call(on, "kvx_gather_kv_ext", arguments, roots, (end, scales), (cache,))


def gather_fp8(on: Backend) -> Call:
    """Scales PER_BLOCK_HEAD."""
    return gather(on, dtype=E4M3)


def gather_ragged(on: Backend) -> Call:
    blocks = torch.tensor([1] * 4 + [4] * 4 + [0] + [2] * 4 + [3])
    return gather(on, Ragged(blocks, torch.tensor([0, 9, 14]), 4))


def offsets() -> KvOffsets:
    """Two sequences of two beams, in a pool of 5 blocks of 4 sub-blocks; one block is elsewhere."""
    blocks = torch.tensor([[[1, 4, 0], [2, 0, 3]], [[2, 3, 0], [0, 1, 0]]])
    indices = torch.stack([blocks * 4, blocks * 4 + 1], dim=2)
    indices[0, 1, 0, 1] = 6 * 4 - (1 << 31)  # block 6 of the secondary pool
    indices[1, :, :, 2] = POISON
    return KvOffsets(indices.to(torch.int32), 4, 4)


def gather_offsets(on: Backend) -> Call:
    return gather(on, offsets(), "tensorrt_llm")


def gather_offsets_fp8(on: Backend) -> Call:
    """Scales PER_HEAD, since there is a secondary pool."""
    return gather(on, offsets(), "tensorrt_llm", E4M3)


def migrate(
    on: Backend,
    src_end: End | None = None,
    dst_end: End | None = None,
    *,
    layout: str = "nhd",
    dtype: torch.dtype = BF16,
    heads: int = 2,
    lengths: tuple[int, int] = (9, 5),
) -> Call:
    """9 and 5 tokens of two layers, from 5 blocks of 4 tokens to 8 blocks of 8."""
    src_end = src_end or Packed(torch.tensor([[1, 4, 0], [2, 3, POISON]]), 4)
    dst_end = dst_end or Packed(torch.tensor([[6, 2], [5, POISON]]), 8)
    src = LAYOUTS[layout](Geometry(num_kv_heads=heads), dtype, 1)
    dst = LAYOUTS["hnd"](Geometry(num_blocks=8, block_size=8), dtype, 2)
    with_pools = layout == "tensorrt_llm"
    granularity = ScaleGranularity.PER_TENSOR if with_pools else ScaleGranularity.PER_BLOCK_HEAD
    src = scaled(src, granularity)
    dst = scaled(dst, ScaleGranularity.PER_BLOCK_HEAD)
    roots: dict[str, Any] = {"lengths": torch.tensor(lengths)}
    views = []
    for name, cache, end in (("src", src, src_end), ("dst", dst, dst_end)):
        starts = None
        if isinstance(end, Slots):
            roots[f"{name}_slots"] = end.slots
        else:
            rows = 4 if isinstance(src_end, KvOffsets) else 2
            starts = roots[f"{name}_starts"] = torch.zeros(rows, dtype=torch.int64)
        if isinstance(end, Packed | KvOffsets):
            roots[f"{name}_indices"] = end.indices
        views.append(View(on, cache, end, starts, 0))
        roots[name] = views[-1].desc
        if cache.layers[0].k.scale is not None:
            roots[f"{name}_scale"] = cache.layers[0].k.scale
    seq_lens = on.seq_lens(roots["lengths"])
    roots["migrate"] = abi.kvx_migrate_desc_t(
        num_heads=0 if heads == 2 else 2,
        seq_lens=ctypes.pointer(seq_lens),
        src=ctypes.pointer(roots["src"]),
        dst=ctypes.pointer(roots["dst"]),
    )
    kept = (src_end, dst_end, views, seq_lens)
    return Call(on, "kvx_migrate_kv", ("migrate",), roots, kept, (src, dst))


def find(on: Backend) -> Call:
    """The source of `migrate`, whose tables the host reads."""
    call = migrate(on.reader(abi.FLAG_COPY_ENGINE))
    call.roots["places"] = torch.zeros(14, 2, dtype=torch.int64)
    call.roots["find"] = abi.kvx_find_desc_t(
        span=ctypes.pointer(call.roots["src"]),
        seq_lens=call.roots["migrate"].seq_lens,
        place_count=14,
        places=call.roots["places"].data_ptr(),
    )
    return replace(call, function="kvx_find_tokens", arguments=("find",))


def attend(on: Backend, dtype: torch.dtype = BF16, layout: str = "nhd") -> Call:
    """4 query heads to tokens 1 and 2 of block 3; a host computes, whatever moves bytes."""
    on = CPU
    cache = scaled(
        LAYOUTS[layout](Geometry(num_layers=1), dtype, 1), ScaleGranularity.PER_TOKEN_HEAD
    )
    layer = cache.layers[0]
    query, out = torch.ones(4, 16), torch.zeros(4, 16)
    roots: dict[str, Any] = {"cache": on.layer(layer), "query": query, "out": out}
    roots["attend"] = abi_attend.kvx_attend_desc_t(
        block=3, start=1, end=3, query=on.tensor(query), out=on.tensor(out), scale=0.25
    )
    scales = []
    if layer.k.scale is not None:
        scales = [on.scale(half) for half in layer.halves()]
        roots["attend"].k_scale, roots["attend"].v_scale = map(ctypes.pointer, scales)
        roots |= {"k_scale": layer.k.scale}
    return Call(on, "kvx_attend_kv", ("cache", "attend"), roots, scales, (cache,))


def attend_fp8(on: Backend) -> Call:
    return attend(on, E4M3)


def attend_mla(on: Backend) -> Call:
    return attend(on, layout="mla")


def attend_packed(on: Backend) -> Call:
    return attend(on, layout="packed8")


def attend_affine(on: Backend) -> Call:
    call = attend(on, torch.uint8)
    call.roots["cache"].k.dtype = call.roots["cache"].v.dtype = 15
    return call


def migrate_pointers(on: Backend, dtype: torch.dtype = BF16, layout: str = "nhd") -> Call:
    """The same blocks of the source, by their addresses."""
    call = migrate(on, dtype=dtype, layout=layout)
    (cache, _), view = call.caches, call.roots["src"]
    halves = [half for layer in cache.layers for half in layer.halves()]
    table = torch.zeros(2, 3, len(halves), dtype=torch.int64)
    for row, blocks in enumerate([[1, 4, 0], [2, 3]]):
        for column, block in enumerate(blocks):
            for plane, half in enumerate(halves):
                table[row, column, plane] = on.address(half.tensor[block])
    call.roots["src_indices"] = table
    for layer in range(2):
        desc = view.layers[layer].contents
        desc.num_blocks = desc.k.shape[0] = desc.v.shape[0] = 1
    desc = view.block_table.contents
    desc.format, desc.index_dtype = 4, 9
    desc.indices, desc.indices_count = on.address(table), table.numel()
    return replace(call, kept=(call.kept, halves))


def migrate_whole_blocks(on: Backend) -> Call:
    """The same blocks, each by the address of its first byte, with all planes in it."""
    call = migrate_pointers(on, layout="tensorrt_llm")
    table = call.roots["src_indices"][:, :, :1].contiguous()
    call.roots["src_indices"] = table
    desc = call.roots["src"].block_table.contents
    desc.flags, desc.indices, desc.indices_count = 4, on.address(table), table.numel()
    desc.indptr = call.roots["src"].layers[0].contents.k.data
    return call


def migrate_fp8(on: Backend) -> Call:
    """Scales PER_BLOCK_HEAD at both ends."""
    return migrate(on, dtype=E4M3)


def migrate_heads(on: Backend) -> Call:
    """2 of the source's 3 heads."""
    return migrate(on, heads=3)


def migrate_to_slots(on: Backend) -> Call:
    return migrate(on, dst_end=Slots(torch.arange(40, 54), [9, 5], 8))


def migrate_to_dense(on: Backend) -> Call:
    """8 and 5 tokens into rows of 8."""
    return migrate(on, dst_end=Dense(), lengths=(8, 5))


def migrate_pointers_planes(on: Backend) -> Call:
    """A plane beside layers whose blocks are given by address: never valid."""
    call, other = migrate_pointers(on), migrate_planes(on)
    call.roots["src"].planes, call.roots["src"].num_planes = other.roots["src"].planes, 1
    return replace(call, kept=(call.kept, other))


def migrate_pointers_fp8(on: Backend) -> Call:
    """Scales PER_BLOCK_HEAD, of one block: never valid."""
    call = migrate_pointers(on, E4M3)
    for layer in range(2):
        for scales in (call.roots["src"].k_scales, call.roots["src"].v_scales):
            scales[layer].contents.shape[0] = 1
    return call


def migrate_into_itself(on: Backend) -> Call:
    """Every block to itself: never valid."""
    call = migrate_pointers(on)
    call.roots["migrate"].dst = ctypes.pointer(call.roots["src"])
    return call


def migrate_slots_and_table(on: Backend) -> Call:
    """Two ways to find a token at one end: never valid."""
    call, other = migrate_to_slots(on), migrate(on)
    call.roots["dst"].block_table = other.roots["dst"].block_table
    return replace(call, kept=(call.kept, other))


def migrate_slots_and_starts(on: Backend) -> Call:
    """Slots with a start: never valid."""
    call, other = migrate_to_slots(on), migrate(on)
    call.roots["dst"].starts = other.roots["dst"].starts
    return replace(call, kept=(call.kept, other))


def migrate_out_of_secondary(on: Backend) -> Call:
    """The secondary pool of the source is the destination under another name: never valid."""
    call = migrate_offsets(on)
    pool = call.caches[0]
    layers = tuple(
        Layer(*(Half(half.secondary, half.layout) for half in layer.halves()))
        for layer in pool.layers
    )
    view = View(on, Cache(pool.storages, layers), Dense(), None, 0)
    call.roots["migrate"].dst = ctypes.pointer(view.desc)
    call.roots["dst"] = view.desc
    return replace(call, kept=(call.kept, view))


def migrate_offsets_fp8(on: Backend) -> Call:
    """Scales PER_TENSOR at the source, since there is a secondary pool."""
    return migrate(on, offsets(), Dense(), layout="tensorrt_llm", dtype=E4M3, lengths=(8, 5))


def migrate_offsets(on: Backend) -> Call:
    """Two beams of each sequence, to four dense rows."""
    return migrate(on, offsets(), Dense(), layout="tensorrt_llm", lengths=(8, 5))


def migrate_mla(on: Backend) -> Call:
    """From a cache without V into another."""
    call = migrate(on, layout="mla")
    for layer in range(2):
        call.roots["dst"].layers[layer].contents.v = abi.kvx_tensor_desc_t()
    return call


def migrate_within(on: Backend) -> Call:
    """From some blocks of a pool to others."""
    call = migrate(on)
    (src, _), views = call.caches, call.kept[2]
    end = Packed(torch.tensor([[3], [POISON]]), 4)
    views[1] = View(on, src, end, call.roots["dst_starts"], 0)
    call.roots |= {"dst": views[1].desc, "dst_indices": end.indices}
    call.roots["migrate"].dst = ctypes.pointer(views[1].desc)
    call.roots["lengths"].copy_(torch.tensor([4, 0]))
    return replace(call, kept=(call.kept, end), caches=(src,))


def migrate_planes(on: Backend) -> Call:
    """Beside the layers a latent by the view's tables, and FP8 keys with tables of their own."""
    call = migrate(on)
    for name, n, blocks in (("src", 4, 5), ("dst", 8, 8)):
        latent = Paged(filled((blocks, n, 16), BF16), ("block", "token", "dim"), role=2)
        keys = Paged(
            filled((6, 12, 2, 2, 8), E4M3),
            ("block", "token", "head", "dim", "dim"),
            role=4,
            layer=1,
        )
        one = torch.ones(1)
        keys.scale = abi.kvx_scale_desc_t(dtype=3, granularity=1, data=on.address(one))
        keys.table, indices = table(on, [[1 if name == "src" else 4], [2]])
        found = [plane.to_c(on) for plane in (latent, keys)]
        call.roots |= {f"{name}_latent": latent.tensor, f"{name}_keys": keys.tensor}
        call.roots[name].planes = abi.pointer_array(found, abi.kvx_plane_t)
        call.roots[name].num_planes = 2
        call = replace(call, kept=(call.kept, found, keys, indices, one))
    return call


def _affine(on: Backend, blocks: int, tokens: int, *, over_tokens: bool) -> tuple[Any, Any, Any]:
    """Scales and zero points of 2 heads of 16 numbers, and the tensors that they lie in."""
    shape = (blocks, 2, 16) if over_tokens else (blocks, tokens, 2, 2)
    tensors = torch.ones(2, *shape)
    found = [
        abi.kvx_scale_desc_t(
            dtype=3,
            granularity=32 if over_tokens else 33,
            ndim=len(shape),
            shape=abi.dims(shape),
            stride=abi.dims(tensor.stride()),
            data=on.address(tensor),
        )
        for tensor in tensors
    ]
    return *found, tensors


def migrate_affine(on: Backend, dst_end: Any = None) -> Call:
    """K U8_ZERO with scales per channel, V U8_BIAS with two groups of 8 numbers."""
    call = migrate(on, dtype=torch.uint8, **({} if dst_end is None else {"dst_end": dst_end}))
    for name in ("src", "dst"):
        span = call.roots[name]
        first = span.layers[0].contents
        size = first.num_blocks, first.block_size
        for half, over_tokens, dtype in (("k", True, 14), ("v", False, 15)):
            found = [_affine(on, *size, over_tokens=over_tokens) for _ in range(2)]
            for layer in range(2):
                getattr(span.layers[layer].contents, half).dtype = dtype
            for which, field in enumerate(("scales", "zeros")):
                array = abi.pointer_array([f[which] for f in found], abi.kvx_scale_desc_t)
                setattr(span, f"{half}_{field}", array)
            call = replace(call, kept=(call.kept, found))
            for layer in range(2):
                call.roots[f"{name}_{half}_beside_{layer}"] = found[layer][2]
    return call


def migrate_affine_to_slots(on: Backend) -> Call:
    """K per channel into slots: never valid."""
    return migrate_affine(on, Slots(torch.arange(40, 54), [9, 5], 8))


def migrate_affine_planes(on: Backend) -> Call:
    """A plane of U8_ZERO with scales per channel beside the layers."""
    call = migrate(on)
    for name, n, blocks in (("src", 4, 5), ("dst", 8, 8)):
        keys = Paged(
            filled((blocks, n, 2, 16), torch.uint8), ("block", "token", "head", "dim"), role=4
        )
        scale, zero, tensors = _affine(on, blocks, n, over_tokens=True)
        plane = keys.to_c(on)
        plane.dtype = 14
        plane.scale, plane.zero = ctypes.pointer(scale), ctypes.pointer(zero)
        call.roots |= {f"{name}_keys": keys.tensor, f"{name}_beside": tensors}
        call.roots[name].planes = abi.pointer_array([plane], abi.kvx_plane_t)
        call.roots[name].num_planes = 1
        call = replace(call, kept=(call.kept, plane, keys, scale, zero))
    return call


def migrate_state(on: Backend) -> Call:
    """Beside the layers a state of each sequence, by a slot of its own at the source."""
    call = migrate(on)
    for name in ("src", "dst"):
        state = Paged(filled((3, 2, 8), BF16), ("block", "head", "dim"), 8, tokens_per_entry=0)
        slots = torch.tensor([2, 0])
        if name == "src":
            state.slots = on.slots(slots)
        found = [state.to_c(on)]
        call.roots |= {f"{name}_state": state.tensor}
        call.roots[name].planes = abi.pointer_array(found, abi.kvx_plane_t)
        call.roots[name].num_planes = 1
        call = replace(call, kept=(call.kept, found, slots, state))
    return call


def migrate_entries(on: Backend) -> Call:
    """Beside the layers a plane of an entry for 4 tokens, by the view's tables."""
    call = migrate(on)
    for name, blocks, entries in (("src", 5, 1), ("dst", 8, 2)):
        plane = Paged(filled((blocks, entries, 16), BF16), ("block", "token", "dim"), 6)
        plane.tokens_per_entry = 4
        found = [plane.to_c(on)]
        call.roots |= {f"{name}_entries": plane.tensor}
        call.roots[name].planes = abi.pointer_array(found, abi.kvx_plane_t)
        call.roots[name].num_planes = 1
        call = replace(call, kept=(call.kept, found, plane))
    return call


def find_entries(on: Backend) -> Call:
    """The entries of the plane that `migrate_entries` reads: two and one."""
    call = migrate_entries(on.reader(abi.FLAG_COPY_ENGINE))
    call.roots["places"] = torch.zeros(3, 2, dtype=torch.int64)
    call.roots["find"] = abi.kvx_find_desc_t(
        span=ctypes.pointer(call.roots["src"]),
        seq_lens=call.roots["migrate"].seq_lens,
        place_count=3,
        places=call.roots["places"].data_ptr(),
        plane_plus_1=1,
    )
    return replace(call, function="kvx_find_tokens", arguments=("find",))


def migrate_offsets_planes(on: Backend) -> Call:
    """A plane in a view whose table is KV_OFFSETS, without one of its own: never valid."""
    call, other = migrate_offsets(on), migrate_planes(on)
    call.roots["src"].planes, call.roots["src"].num_planes = other.roots["src"].planes, 1
    return replace(call, kept=(call.kept, other))


def migrate_dense_planes(on: Backend) -> Call:
    """Planes alone, dense at both ends."""
    call = migrate_planes(on)
    call.set("migrate.src.num_layers", 0)
    call.set("migrate.dst.num_layers", 0)
    for name in ("src", "dst"):
        call.set(f"{name}.num_planes", 1)
        call.roots[name].block_table = None
    call.roots["lengths"].copy_(torch.tensor([4, 3]))
    return call


def migrate_own_tables(on: Backend) -> Call:
    """Planes alone, each by a table of its own; those of the destination are one memory."""
    call = migrate_planes(on)
    one = filled((4, 4, 8), BF16)
    for name in ("src", "dst"):
        planes, indices = [], []
        for role, block in enumerate((1, 2)):
            tensor = one if name == "dst" else filled((4, 4, 8), BF16)
            planes.append(Paged(tensor, ("block", "token", "dim"), role))
            planes[-1].table, rows = table(on, [[block], [3]])
            indices.append(rows)
        found = [plane.to_c(on) for plane in planes]
        call.roots |= {f"{name}_one": one, f"{name}_rows": indices[0]}
        call.roots[name].planes = abi.pointer_array(found, abi.kvx_plane_t)
        call.roots[name].block_table = None
        call.set(f"{name}.num_layers", 0)
        call = replace(call, kept=(call.kept, found, planes, indices))
    call.roots["lengths"].copy_(torch.tensor([4, 0]))
    return call


def migrate_slots_and_table_of_plane(on: Backend) -> Call:
    """Two ways to find a token of a plane: never valid."""
    call, other = migrate_planes(on), migrate_to_slots(on)
    call.roots["dst"].planes[1].contents.slots = other.roots["dst"].slots
    return replace(call, kept=(call.kept, other))


@dataclass
class PlanCall(Call):
    """A call of kvx_plan.h: `kept` is the migration that the plan is made of."""

    def run(self) -> None:
        with planned(self.on, self.kept[0].desc) as plan:
            if self.roots["plan"] is None:
                plan = replace_handle(plan)
            lookups, library = self.roots["lookups"], plan.library
            if self.function == "kvx_plan_run":
                return plan.run(lookups)
            take = self.roots.get("take")
            arguments = (
                (take if take is not None else kvx_take_ranges_t(), None)
                if self.function == "kvx_plan_ranges"
                else (self.roots["info"], self.roots["planes"], self.roots["counts"]["num_planes"])
            )
            return abi.check(
                getattr(library, self.function)(plan.handle, lookups, *arguments), library
            )


def replace_handle(plan: Plan) -> Plan:
    """The same without a plan: what is freed stays with `plan`."""
    other = copy.copy(plan)
    other.handle = None
    return other


def plan_run(
    on: Backend, function: str = "kvx_plan_run", dst_end: End | None = None, dtype: Any = BF16
) -> PlanCall:
    """A plan of 3 tokens from 5 blocks of 4 tokens to others, run for 5 tokens of 2 sequences."""
    src, dst = LAYOUTS["nhd"](Geometry(), BF16, 1), LAYOUTS["hnd"](Geometry(), dtype, 2)
    flags = abi.FLAG_COPY_ENGINE if function == "kvx_plan_ranges" else 0
    table = Packed(torch.tensor([[1], [2]]), 4)
    lengths = torch.tensor([3, 2])
    made = Migration(on, (src, table), (dst, dst_end or table), lengths, flags=flags)
    other = Migration(on, (src, table), (dst, dst_end or table), lengths, flags=flags)
    slots = made.reader.slots(torch.arange(5))
    block_table = made.reader.block_table(table)
    info = abi_plan.kvx_plan_info_t()
    planes = (abi_plan.kvx_plane_info_t * 4)(*[abi_plan.kvx_plane_info_t()] * 4)
    roots = {
        "plan": made,
        "lookups": other.lookups(),
        "a_table": ctypes.pointer(block_table),
        "some_slots": ctypes.pointer(slots),
        "info": info,
        "planes": planes,
        "counts": {"num_planes": 4},
        "take": kvx_take_ranges_t(lambda context, ranges, count: 0),
    }
    return PlanCall(on, function, ("lookups",), roots, (made, other, table, slots), (src, dst))


def plan_run_of_whole_blocks(on: Backend) -> PlanCall:
    return plan_run_of_pointers(on, migrate_whole_blocks(on))


def plan_run_of_pointers(on: Backend, call: Call | None = None) -> PlanCall:
    """A plan of a source whose blocks are given by address, run with a copy of its table."""
    call = call or migrate_pointers(on)
    table = type(call.roots["src"].block_table.contents).from_buffer_copy(
        call.roots["src"].block_table.contents
    )
    end = abi_plan.kvx_end_lookup_t(ctypes.pointer(table), None, None)
    made = SimpleNamespace(desc=call.roots["migrate"])
    roots = {"plan": made, "lookups": abi_plan.kvx_plan_lookups_t(src=end)}
    return PlanCall(on, "kvx_plan_run", ("lookups",), roots, (made, call, table), call.caches)


def plan_run_to_slots(on: Backend) -> PlanCall:
    return plan_run(on, dst_end=Slots(torch.arange(5), [3, 2], 4))


def plan_run_to_dense(on: Backend) -> PlanCall:
    return plan_run(on, dst_end=Dense())


def plan_describe(on: Backend) -> PlanCall:
    return plan_run(on, "kvx_plan_describe")


def plan_ranges(on: Backend) -> PlanCall:
    return plan_run(on, "kvx_plan_ranges")


def plan_ranges_of_a_conversion(on: Backend) -> PlanCall:
    """From BF16 to F16: never valid."""
    return plan_run(on, "kvx_plan_ranges", dtype=torch.float16)


@dataclass
class BlockCall(Call):
    """A call of kvx_blocks.h, whose arguments are structs, addresses and numbers."""

    def run(self) -> None:
        given = [self.roots[name] for name in self.arguments]
        on_host = self.on.memory == 1 or self.on.mirror is not None
        references = [ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in given]
        run_blocks(self.on, self.function, *references, stream=None if on_host else 8)


def blocks_call(
    on: Backend, function: str, arguments: str, universal: bool, **numbers: int
) -> Call:
    """Stacks of 2 blocks, 3 layers, K and V, 4 tokens, 2 heads of 4 numbers, into blocks."""
    dims = Dims(nh=2, nl=3, no=2, nt=4, hd=4, nb=2)
    blocks = Blocks.of(on, dims, 1, universal=universal, from_stack=True)
    tables = {"blocks": blocks.table(blocks.chunks), "whole": blocks.table(blocks.whole)}
    roots: dict[str, Any] = {"sizes": blocks.sizes(), "used": None, **numbers}
    for name, found in tables.items():
        own = {"whole": "universals" if universal else "operationals"}.get(name, name)
        roots |= {own: on.address(found), f"{own}_host": found.data_ptr(), f"{own}_table": found}
    kept = blocks, [t.clone() for t in blocks.whole]
    roots |= {f"bytes_of_block_{i}": block for i, block in enumerate(blocks.whole)}
    return BlockCall(on, function, tuple(arguments.split()), roots, kept, ())


def universal_from_block(on: Backend) -> Call:
    return blocks_call(on, "kvx_universal_from_block", "universals blocks sizes", True)


def operational_copy(on: Backend) -> Call:
    arguments = "blocks_host blocks operationals_host operationals sizes direction backend used"
    return blocks_call(on, "kvx_operational_copy", arguments, False, direction=0, backend=1)


def pairs_call(on: Backend, function: str, arguments: str, **numbers: int) -> Call:
    """2 chunks of 64 bytes to others."""
    call = blocks_call(on, function, arguments, False, **numbers)
    call.roots |= {"memory": on.memory, "bytes": 64, "num_pairs": 2}
    call.roots |= {"srcs": call.roots["blocks"], "dsts": call.roots["operationals"]}
    if function == "kvx_memcpy_batch":
        call.roots["srcs"] = call.roots["blocks_host"]
        call.roots["dsts"] = call.roots["operationals_host"]
    return call


def vectorized_copy(on: Backend) -> Call:
    arguments = "srcs dsts bytes num_pairs memory alignment"
    return pairs_call(on, "kvx_vectorized_copy", arguments, alignment=2)


def memcpy_batch(on: Backend) -> Call:
    return pairs_call(on, "kvx_memcpy_batch", "srcs dsts bytes num_pairs memory mode", mode=1)


def hybrid_call(name: str) -> Callable[[Backend], Call]:
    function, make, struct = HYBRID[name]

    def made(on: Backend) -> Call:
        abi_hybrid.declare(on.library())
        return Call(on, function, (struct,), make(on), None, ())

    return made


CALLS: dict[str, Callable[[Backend], Call]] = {name: hybrid_call(name) for name in HYBRID} | {
    make.__name__: make
    for make in (
        describe,
        describe_packed,
        write,
        write_mla,
        write_fp8,
        write_one_scale,
        write_unit_scale,
        write_with_options,
        write_layers,
        write_found,
        gather,
        gather_fp8,
        gather_ragged,
        gather_offsets,
        gather_offsets_fp8,
        migrate,
        find,
        attend,
        attend_fp8,
        find_entries,
        migrate_pointers,
        migrate_whole_blocks,
        migrate_fp8,
        migrate_heads,
        migrate_to_slots,
        migrate_to_dense,
        migrate_offsets,
        migrate_offsets_fp8,
        migrate_mla,
        migrate_within,
        migrate_planes,
        migrate_affine,
        migrate_affine_planes,
        migrate_dense_planes,
        migrate_own_tables,
        plan_run,
        plan_run_of_pointers,
        plan_run_of_whole_blocks,
        plan_run_to_slots,
        plan_run_to_dense,
        plan_describe,
        universal_from_block,
        operational_copy,
        vectorized_copy,
        memcpy_batch,
        plan_ranges,
        migrate_state,
        migrate_entries,
    )
}
NEVER_VALID: dict[str, Callable[[Backend], Call]] = {
    make.__name__: make
    for make in (
        attend_mla,
        attend_packed,
        attend_affine,
        migrate_pointers_planes,
        migrate_affine_to_slots,
        migrate_pointers_fp8,
        migrate_into_itself,
        migrate_slots_and_table,
        migrate_slots_and_starts,
        migrate_out_of_secondary,
        migrate_offsets_planes,
        migrate_slots_and_table_of_plane,
        plan_ranges_of_a_conversion,
    )
}


# --- the rules --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """`call` with `changes` made to it is refused with `sentence`."""

    line: int
    call: str
    changes: tuple[tuple[str, int | float | str], ...]
    error: type[KvxError]
    sentence: str
    without_cuda: bool  # of a build that has no kernels
    of_device: tuple[str, ...] = ()  # what a device says as well, or instead

    def __str__(self) -> str:
        return "-".join([str(self.line), self.call, *(path for path, _ in self.changes[:1])])


def read_rules() -> list[Rule]:
    """validation_rules.txt; its first lines say how it reads."""
    errors = {
        "UNSUPPORTED without CUDA": UnsupportedError,
        "INVALID_ARGUMENT": InvalidArgumentError,
        "UNSUPPORTED": UnsupportedError,
        "OUT_OF_RANGE": OutOfRangeError,
    }
    rules: list[Rule] = []
    status = ""
    lines = (TESTS / "validation_rules.txt").read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("["):
            status = line.strip("[]")
        elif not line.startswith(" "):
            call, _, text = line.partition(": ")
            changes = [] if text == "as it is" else [c.split(" = ") for c in text.split(", ")]
            values = tuple((path, number_or_word(value)) for path, value in changes)
            without_cuda = status == "UNSUPPORTED without CUDA"
            rules.append(Rule(number, call, values, errors[status], "", without_cuda))
        elif line.startswith("    device: "):
            said = line.removeprefix("    device: ")
            rules[-1] = replace(rules[-1], of_device=(*rules[-1].of_device, said))
        else:
            sentence = f"{rules[-1].sentence} {line.strip()}".strip()
            rules[-1] = replace(rules[-1], sentence=sentence)
    return rules


def number_or_word(text: str) -> int | float | str:
    if text.startswith("+"):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


RULES = read_rules()
SKIPPED = r"; what is out of range is skipped, [1-9]\d* times since the last report$"


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_are_valid_until_a_rule_is_broken(backend: Backend, name: str) -> None:
    CALLS[name](backend).run()


def without_addresses(said: str, rule: Rule) -> str:
    """Numbers as long as an address are one, unless the rule says them."""
    address = r"0x[0-9a-f]{7,}|\(nil\)"
    known = " ".join((rule.sentence, *rule.of_device))
    return re.sub(address, lambda found: found[0] if found[0] in known else "<address>", said)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rule(backend: Backend, rule: Rule) -> None:
    if rule.without_cuda and backend.has_kernels():
        pytest.skip("this build has kernels")
    call = (CALLS | NEVER_VALID)[rule.call](backend)
    for path, value in rule.changes:
        call.set(path, value)
    before = call.memory()
    if not backend.looks_first and rule.of_device == ("nothing",):
        return call.run()
    with pytest.raises(KvxError) as refusal:
        call.run()
    said = without_addresses(str(refusal.value), rule)
    if not backend.looks_first and re.search(SKIPPED, said):
        said = re.sub(SKIPPED, "", said)
        allowed = [re.escape(text).replace(r"\.\.\.", ".*") for text in rule.of_device]
        assert said == rule.sentence or any(re.fullmatch(text, said) for text in allowed), said
        return  # the other tokens were written
    assert said == rule.sentence, f"validation_rules.txt:{rule.line}"
    assert type(refusal.value) is rule.error
    for now, then in zip(call.memory(), before, strict=True):
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (now, then))), (
            "something was written"
        )


def test_every_sentence_has_a_rule() -> None:
    """A new rule in the sources without one in validation_rules.txt fails here."""
    sources = [
        *CSRC.glob("*.cc"),
        *CSRC.glob("abi/*.cc"),
        *CSRC.glob("rules/*.*"),
        *CSRC.glob("plan/*.cc"),
    ]
    sentences = [sentence for source in sources for sentence in sentences_in(source)]
    assert len(sentences) > 90, "the sources no longer look as this test expects"
    covered_elsewhere = {
        "out of memory",  # cannot be provoked
        # test_the_other_functions_refuse_null
        "version is NULL",
        "dtype is %d, expected a kvx_dtype_t from 1 to %u (spec 4.3)",
        # It takes a build with CUDA on a machine without a device.
        "%s.memory is DEVICE, but no CUDA device can be used here: %s (spec 4.3)",
        # Devices say it, see `device:` in validation_rules.txt.
        "%s has %llu entries (token_count), expected as many as seq_lens add up to (spec E.3)",
        "abi_major.abi_minor is %u.%u, expected %d.0 to %d.%d as this libkvx has it: compile "
        "against its headers, or load the libkvx of yours (spec 3)",  # tests/c/conformance.c
        # tests/test_planes.py: only devices say it.
        "%s.axes splits TOKEN into parts of %lld, which calls on DEVICE memory do not move; "
        "migrate in HOST memory (spec E.11)",
        # tests/test_affine.py: it takes two rows with one block.
        "block %lld is a destination of row %llu and, again, of row %llu, but a scale covers all "
        "its tokens (PER_CHANNEL): expected blocks of its own for each row (spec E.14)",
        # tests/test_affine.py: it takes ranges.
        "%c of layer %zu has scales that cover all tokens of a block (PER_CHANNEL), but ranges are "
        "copies of tokens: run the plan (spec E.13)",
        # tests/test_plans_of_tokens.py: it takes the plan of a write.
        "lookups.max_seq_len is %u, expected 0: %s (spec E.13)",
        # It takes tables in the memory of a device.
        "%s lies in device memory, expected host memory: the host lists ranges (spec E.13)",
        # tests/c/kvbm.c: KVBM's functions have statuses alone.
        "dtype_value is %d, expected F16 (0), BF16 (1), F32 (2) or F64 (3); kvx_blocks.h copies "
        "numbers of 1 byte, too (spec E.15)",
        "elem_size is %zu, expected %u as dtype_value %d has (spec E.15)",
        "num_pairs is %d, expected 0 or more (spec E.15)",
        # tests/test_fp4.py has the rules of F4_E2M1.
        "%s.dtype is %s, a scale for each %lld numbers, but head_dim is %lld, expected a multiple "
        "(spec E.18)",
        "%s.ndim is %u, expected 4 for granularity %d (spec E.18)",
        "%s.shape[%u] is %lld, expected %lld: [num_blocks, block_size, num_kv_heads, groups of "
        "%lld numbers] (spec E.18)",
        "%s.granularity is PER_GROUP_4X4 (34) with %lld tokens of a block and %lld groups, "
        "expected multiples of 4 (spec E.18)",
        "%s is given, but %s.dtype is %s, expected none: MX has no such scale (spec E.18)",
        "%s is %s of granularity %d, expected one F32 (PER_TENSOR, 1), the scale of all numbers "
        "(spec E.18)",
        "%s is %g, expected a finite scale above 0 whose inverse is finite, above 2^-128 (spec "
        "E.18)",
        "%s is NULL, but %s.dtype is F4_E2M1: each group of numbers has a scale (spec E.18)",
        "%s.dtype is %d (%s), expected F8_E4M3 (NVFP4) or F8_E8M0 (MX) (spec E.18)",
        "%s.granularity is %d, expected PER_GROUP (33) or PER_GROUP_4X4 (34) for F4_E2M1 "
        "(spec E.18)",
        "%s.dtype is %s, whose group scales this call has no fields for; migrate between two "
        "spans (spec E.18)",
        "%s is F4_E2M1 at both ends, and scales that are PER_GROUP_4X4 are not copied by calls on "
        "DEVICE memory; migrate in HOST memory (spec E.18)",
        "%s is F4_E2M1 at both ends, whose scales of the tensor cannot be compared on a DEVICE; "
        "pass one array for both, or migrate by way of F16 (spec E.18)",
        "%s goes from F4_E2M1 to %s with scales that are PER_CHANNEL, which calls on DEVICE memory "
        "do not convert; migrate by way of F16 (spec E.18)",
        # tests/test_turboquant_formats.py and test_rotated_moves.py: only devices say these.
        "%s goes from %s to %s, whose scales calls on DEVICE memory do not find for %s; migrate by "
        "way of F16 (spec E.20)",
        "%s is rotated in groups of %u numbers, and calls on DEVICE memory rotate %u at most; "
        "migrate in HOST memory (spec E.17)",
        # tests/test_hadamard.py has the rules of kvx_hadamard.
        "dim is 0, expected at least 2 (spec E.17)",
        "dim is %u, whose largest power of two is %u, expected 2 to %u; name an order that divides "
        "dim, or rotate a part of each row (spec E.17)",
        "order is %u, expected a power of two from 2 to %u, or 0 (spec E.17)",
        "order is %u, which does not divide dim %u; expected at most %u (spec E.17)",
        "values is NULL, expected %u numbers per row (spec E.17)",
        "values is %p, expected a multiple of 4 bytes (spec E.17)",
        "row_stride is %lld, expected at least dim %u: rows would share numbers (spec E.17)",
        "rows is %llu and row_stride %lld: they reach past the end of the address space "
        "(spec E.17)",
    }
    said = [rule.sentence for rule in RULES]
    missing = []
    for sentence in sentences:
        pattern = re.escape(sentence.replace("%%", "%"))
        pattern = re.sub(r"%\\?#?(?:ll|z)?[a-z]", ".*", pattern)
        if sentence not in covered_elsewhere and not any(re.fullmatch(pattern, s) for s in said):
            missing.append(sentence)
    assert not missing, f"no rule in validation_rules.txt makes libkvx say: {missing}"


def test_every_section_that_is_named_exists() -> None:
    """ "(spec 4.2)" in a sentence and "Spec: 4.2" in a header lead to a heading of docs/spec.md."""
    spec = (TESTS.parent / "docs" / "spec.md").read_text()
    headings = set(re.findall(r"^##+ (E?[0-9.]*[0-9])\.? ", spec, re.MULTILINE))
    assert {"3", "4.2", "6.10", "7.1", "11", "E.8"} <= headings
    named = set()
    for source in [*CSRC.rglob("*.cc"), *CSRC.rglob("*.h")]:
        for text in re.findall(
            r"[Ss]pec:? (E?[0-9.]*[0-9](?:, E?[0-9.]*[0-9])*)", source.read_text()
        ):
            named |= set(text.split(", "))
    assert len(named) > 15, "the sources no longer look as this test expects"
    assert named <= headings, f"not in docs/spec.md: {sorted(named - headings)}"


# --- what is no rule of one field -------------------------------------------------------------


def test_the_other_functions_refuse_null() -> None:
    library = abi.library()
    with pytest.raises(InvalidArgumentError, match=r"^version is NULL$"):
        abi.check(library.kvx_get_version(None))
    with pytest.raises(InvalidArgumentError, match=r"^info is NULL$"):
        abi.check(library.kvx_backend_info(None))
    info = abi.kvx_backend_info_t()
    size, info.size = info.size, info.size - 1
    message = rf"^info\.size is {size - 1}, expected at least {size} \(spec 6\)$"
    with pytest.raises(InvalidArgumentError, match=message):
        abi.check(library.kvx_backend_info(info))
    with pytest.raises(InvalidArgumentError, match=r"^info is NULL$"):
        abi.check(library.kvx_format_info(1, None))
    row = abi.kvx_format_info_t()
    for dtype in (0, -1, 30):
        message = rf"^dtype is {dtype}, expected a kvx_dtype_t from 1 to 29 \(spec 4.3\)$"
        with pytest.raises(InvalidArgumentError, match=message):
            abi.check(library.kvx_format_info(dtype, row))
    row.size -= 1
    message = rf"^info\.size is {row.size}, expected at least {row.size + 1} \(spec 6\)$"
    with pytest.raises(InvalidArgumentError, match=message):
        abi.check(library.kvx_format_info(1, row))


@pytest.mark.parametrize("name", CALLS)
def test_a_larger_size_is_a_newer_header(backend: Backend, name: str) -> None:
    """Spec: 3. Every struct of the call says that it is 8 bytes longer than we know."""
    call = CALLS[name](backend)

    def enlarge(struct: Any) -> None:
        struct.size += 8 if struct.size else 0  # 0: it is not used
        for field in struct._fields_:
            value = getattr(struct, field[0])
            if isinstance(value, abi._Struct):
                enlarge(value)
            elif isinstance(value, ctypes._Pointer) and value:
                if isinstance(value.contents, abi._Struct):
                    enlarge(value.contents)
                elif isinstance(value.contents, ctypes._Pointer):  # [num_layers] or [num_planes]
                    count = struct.num_planes if field[0] == "planes" else struct.num_layers
                    for i in range(count):
                        enlarge(value[i].contents)

    for argument in call.arguments:
        if isinstance(call.roots[argument], abi._Struct):
            enlarge(call.roots[argument])
    call.run()


def test_gather_without_options_is_gather(backend: Backend) -> None:
    call = gather(backend)
    call.roots["options"] = None
    call.run()
    v1 = gather(backend)
    replace(v1, function="kvx_gather_kv", arguments=("cache", "gather")).run()
    for name in ("key", "value"):
        got, expected = (c.roots[name].view(torch.int16) for c in (call, v1))
        assert torch.equal(got, expected)
        assert got.any()


@pytest.mark.parametrize("pointers", ["NULL", "dangling"])
def test_nothing_to_do_needs_no_pointers(backend: Backend, pointers: str) -> None:
    """Spec: 7. With no tokens, the pointers to data are not looked at."""
    value: int | str = "NULL" if pointers == "NULL" else 4096  # no process has memory there
    call = write(backend)
    for path in ("write.io.num_tokens", "write.slots.token_count"):
        call.set(path, 0)
    for path in ("write.io.key.data", "write.io.value.data", "write.slots.slots"):
        call.set(path, value)
    call.run()

    call = gather(backend)
    for tensor in ("key", "value"):
        call.set(f"gather.io.{tensor}.shape[0]", 0)
        call.set(f"gather.io.{tensor}.data", value)
    for path in ("io.num_tokens", "block_table.seq_count", "block_table.indices_count"):
        call.set(f"gather.{path}", 0)
    call.set("gather.seq_lens.seq_count", 0)
    for path in ("block_table.indices", "seq_lens.lengths"):
        call.set(f"gather.{path}", value)
    call.run()

    call = gather(backend)  # two sequences, but no room for a token of theirs
    for tensor in ("key", "value"):
        call.set(f"gather.io.{tensor}.shape[1]", 0)
        call.set(f"gather.io.{tensor}.data", value)
    for path in ("io.num_tokens", "max_seq_len"):
        call.set(f"gather.{path}", 0)
    call.run()

    call = migrate(backend)
    call.set("migrate.seq_lens.seq_count", 0)
    call.set("migrate.seq_lens.lengths", value)
    for end in ("src", "dst"):
        for path in ("block_table.seq_count", "block_table.indices_count", "starts.seq_count"):
            call.set(f"{end}.{path}", 0)
        call.set(f"{end}.block_table.indices", value)
        call.set(f"{end}.starts.lengths", value)
    call.run()


def test_a_failing_call_leaves_its_sentence_and_a_good_one_keeps_it(backend: Backend) -> None:
    """Spec: E.7. The sentence is that of the last failing call of this thread."""
    call = write(backend)
    call.set("cache.block_size", 0)
    with pytest.raises(InvalidArgumentError):
        call.run()
    sentence = backend.library().kvx_last_error()
    assert sentence == b"cache.block_size is 0, expected at least 1 (spec 7.1)"
    write(backend).run()
    assert backend.library().kvx_last_error() == sentence


def test_the_sentence_belongs_to_its_thread(backend: Backend) -> None:
    from concurrent.futures import ThreadPoolExecutor

    call = write(backend)
    call.set("cache.block_size", 0)
    with pytest.raises(InvalidArgumentError):
        call.run()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(backend.library().kvx_last_error).result() == b""
