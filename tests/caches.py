"""Every way of storing a KV cache that the tests know, as torch views into guarded allocations.

A cache here is what an engine would hold: one allocation (two with a secondary pool) of random
bytes, and K and V of each layer as views into it. Comparing whole allocations shows both the values
that were stored and the bytes around them that must stay as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvx_core.types import Layout, ScaleGranularity
from tests.reference import FORMATS, Half, Layer, from_bits

GUARD_BYTES = 192  # random bytes on both sides of every allocation

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
)


def random_values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Finite numbers of every magnitude that `dtype` has, zeros and subnormals included."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    if dtype == torch.float32:
        exponent = torch.randint(-20, 20, (count,), generator=generator)
        return torch.ldexp(torch.randn(count, generator=generator), exponent).reshape(shape)
    fmt = FORMATS[dtype]
    finite = ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
    magnitude = torch.randint(0, finite, (count,), generator=generator)
    sign = torch.randint(0, 2, (count,), generator=generator) << (
        fmt.exponent_bits + fmt.mantissa_bits
    )
    return from_bits((magnitude | sign).numpy().astype(fmt.bits), dtype).reshape(shape)


@dataclass(frozen=True)
class Geometry:
    """The numbers of a cache; every one of them is odd somewhere in the tests."""

    num_blocks: int = 5
    block_size: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int | None = None  # None: as head_dim
    num_layers: int = 2

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim if self.v_head_dim is None else self.v_head_dim


@dataclass(frozen=True)
class Cache:
    """Layers, and the allocations that they are views of."""

    storages: tuple[Tensor, ...]
    layers: tuple[Layer, ...]
    sub_blocks: int = 0  # KV_OFFSETS: sub-blocks per block of the pool
    bytes_per_block: int = 0  # KV_OFFSETS: one sub-block

    @property
    def block_size(self) -> int:
        return self.layers[0].k.block_size

    @property
    def num_blocks(self) -> int:
        return self.layers[0].k.num_blocks

    def fill(self, seed: int) -> Cache:
        """Stores random finite values everywhere a token can lie."""
        for layer in self.layers:
            for half in layer.halves():
                for tensor in (half.tensor, half.secondary):
                    if tensor is not None:
                        seed += 1
                        tensor.copy_(random_values(tensor.shape, tensor.dtype, seed))
        return self

    def clone(self) -> Cache:
        """The same bytes and the same views, elsewhere."""
        copies = {s.untyped_storage().data_ptr(): s.clone() for s in self.storages}

        def moved(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            flat = copies[tensor.untyped_storage().data_ptr()].view(tensor.dtype)
            return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

        def moved_half(half: Half) -> Half:
            return replace(half, tensor=moved(half.tensor), secondary=moved(half.secondary))

        layers = tuple(
            Layer(moved_half(layer.k), None if layer.v is None else moved_half(layer.v))
            for layer in self.layers
        )
        return replace(self, storages=tuple(copies.values()), layers=layers)

    def with_scales(self, scale: Callable[[Half, str], tuple[Tensor, ScaleGranularity]]) -> Cache:
        """The cache with `scale(half, "k" or "v")` as the scales of every half."""

        def scaled(half: Half, name: str) -> Half:
            tensor, granularity = scale(half, name)
            return replace(half, scale=tensor, granularity=granularity)

        layers = tuple(
            Layer(scaled(layer.k, "k"), None if layer.v is None else scaled(layer.v, "v"))
            for layer in self.layers
        )
        return replace(self, layers=layers)


# The shape of the scales of each granularity. Spec: 6.6
SCALE_SHAPES = {
    ScaleGranularity.PER_TENSOR: lambda half: (),
    ScaleGranularity.PER_BLOCK: lambda half: (half.num_blocks,),
    ScaleGranularity.PER_HEAD: lambda half: (half.num_kv_heads,),
    ScaleGranularity.PER_BLOCK_HEAD: lambda half: (half.num_blocks, half.num_kv_heads),
    ScaleGranularity.PER_TOKEN_HEAD: lambda half: (
        half.num_blocks,
        half.block_size,
        half.num_kv_heads,
    ),
}


def scaled(
    cache: Cache,
    granularity: ScaleGranularity,
    seed: int,
    dtype: torch.dtype = torch.float32,
    strided: bool = False,
) -> Cache:
    """The cache with random positive scales of this granularity."""
    generator = torch.Generator().manual_seed(seed)

    def scale(half: Half, name: str) -> tuple[Tensor, ScaleGranularity]:
        shape = SCALE_SHAPES[granularity](half)
        values = (torch.rand(shape, generator=generator) * 4 + 0.01).to(dtype)
        if strided and shape:  # axes in the opposite order, each with a gap, NaN in the gaps
            room = torch.full([n * 2 + 1 for n in reversed(shape)], math.nan, dtype=dtype)
            view = room.permute(*reversed(range(len(shape))))[
                tuple(slice(1, None, 2) for _ in shape)
            ]
            values = view.copy_(values)
        return values, granularity

    return cache.with_scales(scale)


def assert_same_bytes(actual: Cache, expected: Cache) -> None:
    """Whole allocations are equal; otherwise the first differing element is named."""
    for index, (got, wanted) in enumerate(zip(actual.storages, expected.storages, strict=True)):
        if torch.equal(got, wanted):
            continue
        for layer, (got_layer, wanted_layer) in enumerate(
            zip(actual.layers, expected.layers, strict=True)
        ):
            halves = zip("KV", got_layer.halves(), wanted_layer.halves(), strict=False)
            for name, got_half, wanted_half in halves:
                for pool in ("tensor", "secondary"):
                    a, b = getattr(got_half, pool), getattr(wanted_half, pool)
                    if a is not None:
                        where = f"layer {layer} {name} {pool} {got_half.layout.name}"
                        assert_same_elements(a, b, where)
        at = int((got != wanted).nonzero()[0])
        raise AssertionError(
            f"allocation {index}: byte {at} of {got.numel()}, outside every token, was "
            f"{int(wanted[at]):#04x} and is now {int(got[at]):#04x}"
        )


def assert_same_elements(actual: Tensor, expected: Tensor, where: str) -> None:
    """Bitwise equal; otherwise the first differing coordinate and both values."""
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    differ = (actual.contiguous().view(as_int) != expected.contiguous().view(as_int)).nonzero()
    if len(differ):
        at = tuple(differ[0].tolist())
        got, wanted = actual[at], expected[at]
        bits = [int(t.reshape(1).view(as_int)) for t in (got, wanted)]
        raise AssertionError(
            f"{where}: {len(differ)} elements differ, the first at {list(at)}: "
            f"{got.item()} (bits {bits[0]:#x}), expected {wanted.item()} (bits {bits[1]:#x})"
        )


class Allocation:
    """Random bytes with guards; `take` cuts the next tensor out of them."""

    def __init__(self, num_bytes: int, seed: int, shift_bytes: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = (2 * GUARD_BYTES + num_bytes + shift_bytes + 15) // 16 * 16
        self.storage = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        self.next_byte = GUARD_BYTES + shift_bytes

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        part = self.storage[self.next_byte : self.next_byte + num_bytes]
        self.next_byte += num_bytes
        return part.view(dtype).view(*shape)


def pack_of(head_dim: int, wanted: int) -> int:
    """The largest pack of at most `wanted` that divides head_dim."""
    return next(x for x in range(wanted, 0, -1) if head_dim % x == 0)


Builder = Callable[[Geometry, torch.dtype, int], Cache]


def canonical(layout: Layout, pack: int = 8, v_layout: Layout | None = None) -> Builder:
    """K and V of every layer contiguous in the axes of their layouts, one after the other."""

    def build(g: Geometry, dtype: torch.dtype, seed: int) -> Cache:
        return _separate(g, (dtype, dtype), seed, (layout, v_layout or layout), pack)

    return build


def mixed(g: Geometry, dtype: torch.dtype, seed: int, v_dtype: torch.dtype | None = None) -> Cache:
    """NHD keys and packed values, of different dtypes if asked."""
    layouts = (Layout.BLOCK_NHD, Layout.BLOCK_HND_PACKED)
    return _separate(g, (dtype, v_dtype or dtype), seed, layouts, pack=4)


def _separate(
    g: Geometry,
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
    layouts: tuple[Layout, Layout],
    pack: int,
) -> Cache:
    shapes = []
    for dim, layout in zip(g.head_dims, layouts, strict=True):
        x = pack_of(dim, pack)
        shapes.append(
            {
                Layout.BLOCK_NHD: (g.num_blocks, g.block_size, g.num_kv_heads, dim),
                Layout.BLOCK_HND: (g.num_blocks, g.num_kv_heads, g.block_size, dim),
                Layout.BLOCK_HND_PACKED: (
                    g.num_blocks,
                    g.num_kv_heads,
                    dim // x,
                    g.block_size,
                    x,
                ),
            }[layout]
        )
    sizes = [math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True)]
    sizes = [-(-s // 16) * 16 for s in sizes]
    memory = Allocation(g.num_layers * sum(sizes), seed)
    start, layers = memory.next_byte, []
    for _ in range(g.num_layers):
        halves = []
        for shape, dtype, layout, size in zip(shapes, dtypes, layouts, sizes, strict=True):
            memory.next_byte = start
            halves.append(Half(memory.take(shape, dtype), layout))
            start += size
        layers.append(Layer(*halves))
    return Cache((memory.storage,), tuple(layers))


def vllm(order: str) -> Builder:
    """vLLM's single tensor [layer, block, head, token, K | V], stored in one of its six orders."""

    def build(g: Geometry, dtype: torch.dtype, seed: int) -> Cache:
        dim_k, dim_v = g.head_dims
        extents = {
            "L": g.num_layers,
            "B": g.num_blocks,
            "N": g.block_size,
            "H": g.num_kv_heads,
            "C": dim_k + dim_v,
        }
        memory = Allocation(math.prod(extents.values()) * dtype.itemsize, seed)
        stored = memory.take([extents[axis] for axis in order], dtype)
        logical = stored.permute([order.index(axis) for axis in "LBHNC"])
        layers = tuple(
            Layer(Half(k, Layout.BLOCK_HND), Half(v, Layout.BLOCK_HND))
            for k, v in (layer.split([dim_k, dim_v], dim=-1) for layer in logical)
        )
        return Cache((memory.storage,), layers)

    return build


def tgi(g: Geometry, dtype: torch.dtype, seed: int) -> Cache:
    """TGI's paged attention: packed K [B, H, D / x, N, x], transposed V [B, H, D, N]."""
    dim_k, dim_v = g.head_dims
    x = pack_of(dim_k, 16 // dtype.itemsize)
    per_token = g.num_blocks * g.num_kv_heads * g.block_size
    memory = Allocation(g.num_layers * per_token * (dim_k + dim_v) * dtype.itemsize, seed)
    layers = []
    for _ in range(g.num_layers):
        k = memory.take((g.num_blocks, g.num_kv_heads, dim_k // x, g.block_size, x), dtype)
        v = memory.take((g.num_blocks, g.num_kv_heads, dim_v, g.block_size), dtype)
        layers.append(
            Layer(Half(k, Layout.BLOCK_HND_PACKED), Half(v.transpose(2, 3), Layout.BLOCK_HND))
        )
    return Cache((memory.storage,), tuple(layers))


def flashinfer(g: Geometry, dtype: torch.dtype, seed: int) -> Cache:
    """[num_blocks, 2, block_size, num_kv_heads, head_dim] per layer."""
    assert g.head_dims[0] == g.head_dims[1]
    shape = (g.num_layers, g.num_blocks, 2, g.block_size, g.num_kv_heads, g.head_dim)
    memory = Allocation(math.prod(shape) * dtype.itemsize, seed)
    layers = tuple(
        Layer(Half(layer[:, 0], Layout.BLOCK_NHD), Half(layer[:, 1], Layout.BLOCK_NHD))
        for layer in memory.take(shape, dtype)
    )
    return Cache((memory.storage,), layers)


def tensorrt_llm(g: Geometry, dtype: torch.dtype, seed: int) -> Cache:
    """TensorRT-LLM's pool [block, layer, K/V, head, token, dim] and a secondary pool like it."""
    assert g.head_dims[0] == g.head_dims[1]
    per_block = (g.num_layers, 2, g.num_kv_heads, g.block_size, g.head_dim)
    pools, storages = [], []
    for i, num_blocks in enumerate((g.num_blocks, g.num_blocks + 2)):
        shape = (num_blocks, *per_block)
        memory = Allocation(math.prod(shape) * dtype.itemsize, seed + i)
        pools.append(memory.take(shape, dtype))
        storages.append(memory.storage)

    def half(layer: int, kv: int) -> Half:
        primary, secondary = (pool[:, layer, kv] for pool in pools)
        return Half(primary, Layout.BLOCK_HND, secondary=secondary)

    layers = tuple(Layer(half(layer, 0), half(layer, 1)) for layer in range(g.num_layers))
    sub_block = g.num_kv_heads * g.block_size * g.head_dim * dtype.itemsize
    return Cache(tuple(storages), layers, 2 * g.num_layers, sub_block)


def universal(g: Geometry, dtype: torch.dtype, seed: int) -> Cache:
    """A universal block: [block, head, layer, K/V, token, dim]."""
    assert g.head_dims[0] == g.head_dims[1]
    shape = (g.num_blocks, g.num_kv_heads, g.num_layers, 2, g.block_size, g.head_dim)
    memory = Allocation(math.prod(shape) * dtype.itemsize, seed)
    stored = memory.take(shape, dtype)
    layers = tuple(
        Layer(
            Half(stored[:, :, layer, 0], Layout.BLOCK_HND),
            Half(stored[:, :, layer, 1], Layout.BLOCK_HND),
        )
        for layer in range(g.num_layers)
    )
    return Cache((memory.storage,), layers)


def layout_of(tensor: torch.Tensor) -> Layout:
    """CUSTOM, or the layout of the same axes where extents do not tell them apart. Spec: 4.2"""
    extents = [extent for extent in tensor.shape if extent > 1]
    if len(set(extents)) == len(extents):
        return Layout.BLOCK_CUSTOM
    return Layout.BLOCK_HND_PACKED if tensor.ndim == 5 else Layout.BLOCK_HND


def custom(order: str, padding: int = 3, shift: int = 1) -> Builder:
    """CUSTOM strides: axes stored in any order, each with padding, from an unaligned address.

    order: the stored axes, outermost first; B block, H head, N token, D dim, or for the 5-D form
    P dim / pack and X pack instead of D.
    """
    axes = "BHPNX" if "X" in order else "BHND"

    def build(g: Geometry, dtype: torch.dtype, seed: int) -> Cache:
        shapes = []
        for dim in g.head_dims:
            x = pack_of(dim, 4)
            shapes.append(
                {
                    "B": g.num_blocks,
                    "H": g.num_kv_heads,
                    "N": g.block_size,
                    "D": dim,
                    "P": dim // x,
                    "X": x,
                }
            )
        padded = [[shape[axis] + padding for axis in order] for shape in shapes]
        num_bytes = g.num_layers * sum(math.prod(p) for p in padded) * dtype.itemsize
        memory = Allocation(num_bytes, seed, shift * dtype.itemsize)
        layers = []
        for _ in range(g.num_layers):
            halves = []
            for shape, extents in zip(shapes, padded, strict=True):
                stored = memory.take(extents, dtype).permute([order.index(a) for a in axes])
                cut = stored[tuple(slice(shape[a]) for a in axes)]
                halves.append(Half(cut, layout_of(cut)))
            layers.append(Layer(*halves))
        return Cache((memory.storage,), tuple(layers))

    return build


def uneven(axis: str) -> Builder:
    """Each V row right behind a K row, but every second K row along `axis` (B, H or N) has none.

    The first rows look like packed K | V halves, and the strides of one axis say that they are not.
    """
    order = axis + "BHN".replace(axis, "")

    def build(g: Geometry, dtype: torch.dtype, seed: int) -> Cache:
        dim_k, dim_v = g.head_dims
        extents = {"B": g.num_blocks, "H": g.num_kv_heads, "N": g.block_size}
        rows = [2 * extents[axis], *(extents[a] for a in order[1:])]
        row = dim_k + dim_v
        memory = Allocation(g.num_layers * math.prod(rows) * row * dtype.itemsize, seed)
        layers = []
        for _ in range(g.num_layers):
            stored = memory.take((*rows, row), dtype)
            logical = [order.index(a) for a in "BHN"] + [3]
            k = stored[: extents[axis], ..., :dim_k].permute(logical)
            v = stored[::2, ..., dim_k:].permute(logical)
            layers.append(Layer(Half(k, Layout.BLOCK_HND), Half(v, Layout.BLOCK_HND)))
        return Cache((memory.storage,), tuple(layers))

    return build


def mla(g: Geometry, dtype: torch.dtype, seed: int) -> Cache:
    """One latent head and no V."""
    shape = (g.num_layers, g.num_blocks, g.block_size, g.num_kv_heads, g.head_dim)
    memory = Allocation(math.prod(shape) * dtype.itemsize, seed)
    layers = tuple(Layer(Half(k, Layout.BLOCK_NHD), None) for k in memory.take(shape, dtype))
    return Cache((memory.storage,), layers)


VLLM_ORDERS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC")

LAYOUTS: dict[str, Builder] = {
    "nhd": canonical(Layout.BLOCK_NHD),
    "hnd": canonical(Layout.BLOCK_HND),
    "packed8": canonical(Layout.BLOCK_HND_PACKED, 8),
    "packed16": canonical(Layout.BLOCK_HND_PACKED, 16),
    "packed1": canonical(Layout.BLOCK_HND_PACKED, 1),
    "nhd_k_hnd_v": canonical(Layout.BLOCK_NHD, v_layout=Layout.BLOCK_HND),
    "mixed": mixed,
    **{f"vllm_{order}": vllm(order) for order in VLLM_ORDERS},
    "tgi": tgi,
    "flashinfer": flashinfer,
    "tensorrt_llm": tensorrt_llm,
    "universal": universal,
    "custom_dim_outermost": custom("DHNB"),
    "custom_token_innermost": custom("HBDN"),
    "custom_block_innermost": custom("NHDB", padding=0, shift=0),
    "custom_padded_rows": custom("BNHD", padding=1),
    "custom_packed": custom("XBNPH"),
    "uneven_heads": uneven("H"),
    "uneven_tokens": uneven("N"),
    "uneven_blocks": uneven("B"),
    "mla": mla,
}

# Those whose K and V share one head_dim by construction.
SAME_HEAD_DIM = ("flashinfer", "tensorrt_llm", "universal")
