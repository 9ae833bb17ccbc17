"""Every engine against every engine: random caches migrate there and back, and whole memories are
compared with what the engines' own indexing writes.

tests/engines knows the engines; nothing here does. A test takes two of them. The cache of the first
is filled by its own indexing and migrated into an empty one of the second, which must then equal
one that the second has filled; the way back must restore the first. Bytes outside the tokens are
part of the comparison. Sequences have odd lengths, none and one among them, lie in scattered
blocks of their engine's size, and their tables are padded with poison, which a device would report.

What migrates does so on every backend of tests/calls.py: the host grid runs the CUDA kernels on the
CPU, and tells from which kernels they were (KERNELS).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import combinations_with_replacement, product
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from kvx_adapters import tgi
from kvx_core import (
    BlockTable,
    BlockTableFormat,
    CacheSpan,
    DType,
    FactsMismatchError,
    InvalidArgumentError,
    Memory,
    SlotMapping,
    Transfer,
    UnsupportedError,
    compare,
    migrate,
    verify,
)
from kvx_core.desc.layouts import axes
from kvx_core.ops.reorder import reordered
from tests import reference, tables
from tests.affine import Affine, openvino_k, openvino_v
from tests.affine_values import from_dense
from tests.caches import LAYOUTS, Geometry, random_values
from tests.calls import BACKENDS, HOSTGRID, Backend, Mirror, host_memory
from tests.engines import (
    E4M3,
    E5M2,
    ENGINES,
    FP8,
    REFUSED,
    SENTINEL,
    Engine,
    EngineCache,
    Sizes,
)
from tests.engines.vllm import fp8_rows, int4_rows
from tests.found_scales import find_scales
from tests.fp4 import Fp4
from tests.fp4 import page as nvfp4_page
from tests.migrations import check_migrate
from tests.native import ROOT
from tests.test_ggml import test_units_are_ggml_s as move_units
from tests.token_calls import check_write, key_value

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LAYERS, HEADS, DIM = 2, 3, 48
LONGEST = 41  # tokens: what the engines that keep a sequence in one block have room for


# ---- what is moved ----


@dataclass(frozen=True, eq=False)
class Tokens:
    """K and V of every layer: (num_layers, num_tokens, num_kv_heads, head_dim). MLA has no V."""

    key: Tensor
    value: Tensor | None


@cache
def some_lengths(seed: int) -> tuple[int, ...]:
    choose = random.Random(f"lengths {seed}")
    lengths = [0, 1, LONGEST, choose.randrange(2, 20), choose.randrange(20, LONGEST)]
    choose.shuffle(lengths)
    return tuple(lengths)


@cache
def some_tokens(seed: int, dtype: torch.dtype, num_heads: int, has_v: bool) -> Tokens:
    shape = (NUM_LAYERS, sum(some_lengths(seed)), num_heads, DIM)
    value = random_values(shape, dtype, seed + 100) if has_v else None
    return Tokens(random_values(shape, dtype, seed), value)


Scales = tuple[tuple[float, float], ...]  # of K and V, per layer


@cache
def converted(
    tokens: Tokens, dtype: torch.dtype, src: Scales | None = None, dst: Scales | None = None
) -> Tokens:
    """What tests/reference.py, slow and obvious, makes of the tokens of a cache with scales."""

    def convert(half: Tensor, kv: int) -> Tensor:
        scales = [
            None if pairs is None else torch.tensor([pair[kv] for pair in pairs]).view(-1, 1, 1, 1)
            for pairs in (src, dst)
        ]
        return reference.convert(half, dtype, *scales)

    value = None if tokens.value is None else convert(tokens.value, 1)
    return Tokens(convert(tokens.key, 0), value)


@cache
def beside_sentinels(tokens: Tokens, num_heads: int) -> Tokens:
    """The same tokens as the last heads of `num_heads`, the others as an empty cache has them."""

    def widen(half: Tensor) -> Tensor:
        shape = (*half.shape[:2], num_heads, DIM)
        wide = torch.full((*shape, half.itemsize), SENTINEL, dtype=torch.uint8)
        wide = wide.flatten(-2).view(half.dtype)
        wide[:, :, num_heads - half.shape[2] :] = half
        return wide

    return Tokens(widen(tokens.key), None if tokens.value is None else widen(tokens.value))


# ---- where it lies ----


@dataclass(frozen=True, eq=False)
class End:
    """Sequences in scattered blocks of one engine's cache, which can be made again and again."""

    engine: Engine
    sizes: Sizes
    lengths: tuple[int, ...]
    sequences: list[list[int]]

    def empty(self) -> EngineCache:
        return self.engine.build(self.sizes)

    def span(self, made: EngineCache, head_start: int = 0) -> CacheSpan:
        return made.span(self.sequences, self.lengths, head_start=head_start)


@cache
def end_of(
    name: str, side: Literal["first", "second"], seed: int, dtype: torch.dtype, **fields: Any
) -> End:
    engine, lengths = ENGINES[name], some_lengths(seed)
    counts = [max(1, -(-length // engine.block_size)) for length in lengths]
    sizes = Sizes(
        num_layers=NUM_LAYERS,
        num_blocks=sum(counts) + 4,
        block_size=engine.block_size,
        head_dim=DIM,
        dtype=dtype,
        **({"num_kv_heads": 1 if engine.mla else HEADS} | fields),
    )
    free = list(range(len(counts)))
    if not engine.in_order:
        free = random.Random(f"{side}{seed}").sample(engine.build(sizes).blocks, sum(counts))
    blocks = iter(free)
    return End(engine, sizes, lengths, [[next(blocks) for _ in range(n)] for n in counts])


@lru_cache(maxsize=256)
def holding(end: End, tokens: Tokens, absent: frozenset[int] = frozenset()) -> EngineCache:
    """A cache that the engine itself has written; not to be changed."""
    made = end.empty()
    write(end, made, tokens, absent)
    return made


def write(
    end: End, made: EngineCache, tokens: Tokens, absent: frozenset[int] = frozenset()
) -> None:
    """absent: numbers of tokens that are left out, counted over all sequences"""
    size = made.block_size
    places = [
        (blocks[token // size], token % size)
        for blocks, length in zip(end.sequences, end.lengths, strict=True)
        for token in range(length)
    ]
    kept = [i for i in range(len(places)) if i not in absent]
    blocks, offsets = torch.tensor(places)[kept].unbind(1)
    for layer in range(NUM_LAYERS):
        value = None if tokens.value is None else tokens.value[layer, kept]
        made.write(layer, blocks, offsets, tokens.key[layer, kept], value)


def assert_same_memory(got: EngineCache, wanted: EngineCache) -> None:
    for i, (a, b) in enumerate(zip(got.raw, wanted.raw, strict=True)):
        if not torch.equal(a, b):
            at = (a != b).nonzero().flatten()
            raise AssertionError(
                f"{got.view.facts.engine}, allocation {i}: {len(at)} of {len(a)} bytes differ, the "
                f"first is byte {int(at[0])}: {int(a[at[0]]):#04x}, expected {int(b[at[0]]):#04x}"
            )


def assert_untouched(made: EngineCache) -> None:
    assert all((raw == SENTINEL).all() for raw in made.raw)


def check_there_and_back(
    backend: Backend,
    first: End,
    second: End,
    tokens: Tokens,
    there: Tokens,
    back: Tokens,
    *,
    head_starts: tuple[int, int] = (0, 0),
    num_heads: int | None = None,
    transfer: Transfer = Transfer.KERNEL,
) -> None:
    """Migrates `tokens` into the second end, where they are `there`, and back as `back`."""
    source, target, returned = holding(first, tokens), second.empty(), first.empty()
    at_source, at_target = first.span(source, head_starts[0]), second.span(target, head_starts[1])
    at_returned = first.span(returned, head_starts[0])
    options = {"num_heads": num_heads, "transfer": transfer}
    move(backend, source, at_source, target, at_target, first.lengths, **options)
    assert_same_memory(target, holding(second, there))
    move(backend, target, at_target, returned, at_returned, first.lengths, **options)
    assert_same_memory(returned, holding(first, back))


def move(
    backend: Backend,
    src: EngineCache,
    at_src: CacheSpan,
    dst: EngineCache,
    at_dst: CacheSpan,
    lengths: Sequence[int],
    **options: Any,
) -> None:
    """migrate, or its call in the memory of a device."""
    before = [raw.clone() for raw in src.raw]
    if backend.memory is Memory.HOST:
        migrate(at_src, at_dst, lengths, **options)
    else:
        backend.migrate_spans(at_src, at_dst, lengths, (*src.raw, *dst.raw), **options)
    assert all(map(torch.equal, src.raw, before)), "the source was written"


def put_nulls(end: End, span: CacheSpan) -> frozenset[int]:
    """Makes the first block of one sequence null and the last of another; absent are their tokens.

    Null is what the engine calls so in the one, another negative entry in the other.
    """
    index = span.slots or span.block_table
    if index is None:
        return frozenset()
    known, other, absent = span.view.null_block_id, -7, set()
    if isinstance(index, SlotMapping):
        known = -1
    elif index.format is BlockTableFormat.KV_OFFSETS:
        other = -1
    shorter, longest = sorted(range(len(end.lengths)), key=end.lengths.__getitem__)[-2:]
    last = len(end.sequences[shorter]) - 1
    for row, block, null in ((longest, 0, known), (shorter, last, other)):
        begin = sum(end.lengths[:row])
        tokens = range(begin, begin + end.lengths[row])
        tokens = tokens[block * end.engine.block_size :][: end.engine.block_size]
        absent.update(tokens)
        if isinstance(index, SlotMapping) or index.format is BlockTableFormat.RAGGED:
            entries(index)[tokens] = null
        else:
            entries(index).view(index.seq_count, -1, index.max_blocks_per_seq)[row, :, block] = null
    return frozenset(absent)


def entries(index: BlockTable | SlotMapping) -> Tensor:
    """Of a table or slots, in the engine's memory."""
    if isinstance(index, SlotMapping):
        address, count, dtype = index.slots, index.token_count, index.dtype
    else:
        address, count, dtype = index.indices, index.indices_count, index.index_dtype
    return host_memory(address, count * dtype.itemsize).view(getattr(torch, dtype.array_name))


# ---- who meets whom ----

Names = tuple[str, str]


def why_never(first: str, second: str) -> str | None:
    """What migrate says to a pair whose tokens are not of one kind; None if they are.

    MLA keeps one latent row per token and no V, the others K and V of every head.
    """
    if ENGINES[first].mla == ENGINES[second].mla:
        return None
    has = "no" if ENGINES[second].mla else "a"
    return f"dst.layers[0] has {has} V, expected as src.layers[0]"


PAIRS = [pair for pair in combinations_with_replacement(ENGINES, 2) if not why_never(*pair)]


def of_pairs(pairs: Sequence[Names]) -> pytest.MarkDecorator:
    ids = [f"{first} - {second}" for first, second in pairs]
    return pytest.mark.parametrize(("first", "second"), pairs, ids=ids)


# Devices take their time: these pairs always run on them, all others of a test with --slow.
# Tokens in rows; packed K and transposed V, found by slots; heads in two pools, by KVCacheIndex.
ROWS = {"torch NHD", "torch MLA"}
HUBS = {"tgi paged cuda", "tensorrt_llm V1 offloaded", *ROWS}
WITH_ROWS = [pair for pair in PAIRS if ROWS & {*pair}]
WITH_HUBS = [pair for pair in PAIRS if HUBS & {*pair}]
SOME = [
    ("vllm FLASH_ATTN LBNHC", "tensorrt_llm V1"),
    ("vllm FLASHMLA", "tensorrt_llm MLA"),
    ("tensorrt_llm V1 offloaded", "tgi flashinfer"),
    ("tgi paged cuda", "torch NHD"),
    ("vllm CPU_ATTN", "torch HND"),
]


def on_backends(
    pairs: Sequence[Names], quick: Sequence[Names], slow: Sequence[Names] = PAIRS
) -> pytest.MarkDecorator:
    """All pairs on the CPU; on a device `quick` of them, and with --slow `slow` of them."""

    def params(backend: Backend) -> Iterator[Any]:
        for pair in pairs:
            name = f"{backend.name}: {' - '.join(pair)}"
            if backend.memory is Memory.HOST or pair in quick:
                yield pytest.param(backend, *pair, id=name)
            elif pair in slow or pair[::-1] in slow:
                yield pytest.param(backend, *pair, id=name, marks=pytest.mark.slow)

    return pytest.mark.parametrize(
        ("built_backend", "first", "second"),
        [param for backend in BACKENDS for param in params(backend)],
        indirect=["built_backend"],
    )


def partners(name: str) -> list[str]:
    return [other for other in ENGINES if not why_never(name, other)]


def two_ends(first: str, second: str, seed: int, dtype: torch.dtype) -> tuple[End, End, Tokens]:
    """The ends of a pair, of one dtype, and tokens for the first."""
    ends = end_of(first, "first", seed, dtype), end_of(second, "second", seed, dtype)
    heads, has_v = ends[0].sizes.num_kv_heads, not ENGINES[first].mla
    return (*ends, some_tokens(seed, dtype, heads, has_v))


# ---- the matrix ----


@pytest.mark.parametrize("name", ENGINES)
def test_every_allocation_is_used(name: str) -> None:
    """An allocation that tokens never reach would compare equal whatever became of it."""
    for seed, side in product(range(3), ("first", "second")):
        end = end_of(name, side, seed, torch.bfloat16)
        tokens = some_tokens(seed, torch.bfloat16, end.sizes.num_kv_heads, not end.engine.mla)
        assert all((raw != SENTINEL).any() for raw in holding(end, tokens).raw)
        assert all((raw == SENTINEL).any() for raw in holding(end, tokens).raw)


@on_backends(PAIRS, WITH_ROWS)
def test_same_dtype(backend: Backend, first: str, second: str) -> None:
    """The same bytes there and back; and verify finds what the two engines wrote equal."""
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        a, b, tokens = two_ends(first, second, seed, dtype)
        check_there_and_back(backend, a, b, tokens, there=tokens, back=tokens)
    if backend.memory is Memory.HOST:
        found = verify(a.span(holding(a, tokens)), b.span(holding(b, tokens)), a.lengths)
        assert str(found).startswith(f"equal: {sum(a.lengths)} tokens")


@on_backends(WITH_HUBS, WITH_HUBS)
def test_null_blocks(backend: Backend, first: str, second: str) -> None:
    """No null entry is followed, at either end: the tokens of those blocks stay away."""
    a, b, tokens = two_ends(first, second, 3, torch.bfloat16)
    for src, dst in ((a, b), (b, a)):
        source, target = src.empty(), dst.empty()
        for raw in source.raw:  # a null block, too, holds what an empty cache does not
            raw.fill_(~SENTINEL & 0xFF)
        write(src, source, tokens)
        at_source, at_target = src.span(source), dst.span(target)
        absent = put_nulls(src, at_source) | put_nulls(dst, at_target)
        at_source, at_target = with_holes(at_source), with_holes(at_target)
        move(backend, source, at_source, target, at_target, src.lengths)
        assert_same_memory(target, holding(dst, tokens, absent))


def with_holes(span: CacheSpan) -> CacheSpan:
    table = span.block_table
    return span if table is None else replace(span, block_table=table.with_holes())


# FP8 times a scale that is a power of 2 is exact in both.
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
WIDER |= {E4M3: torch.bfloat16, E5M2: torch.float16}
POWERS_OF_2 = ((0.5, 0.5), (0.125, 0.125))


@on_backends(PAIRS, SOME, WITH_ROWS)
def test_wider_dtype(backend: Backend, first: str, second: str) -> None:
    """A wider dtype holds the same values, and gives them back exactly."""
    for seed, (narrow, wide) in enumerate(WIDER.items()):
        if narrow not in ENGINES[first].dtypes:
            continue
        scales = POWERS_OF_2 if narrow in FP8 and narrow not in ENGINES[first].unscaled else None
        ends = (
            end_of(first, "first", seed, narrow, scales=scales),
            end_of(second, "second", seed, wide),
        )
        tokens = some_tokens(seed, narrow, ends[0].sizes.num_kv_heads, not ENGINES[first].mla)
        there = converted(tokens, wide, scales)
        check_there_and_back(backend, *ends, tokens, there=there, back=tokens)


SCALES = ((0.37, 0.19), (0.021, 1.0))
OTHER_SCALES = ((0.11, 0.37), (0.0185, 0.7))


def scales_of(name: str, dtype: torch.dtype, scales: Scales) -> Scales | None:
    """`scales` as far as the engine has any; None: all are 1."""
    if dtype in ENGINES[name].unscaled:
        return None
    return tuple((k, k) for k, _ in scales) if ENGINES[name].one_scale else scales


HAVE_FP8 = [pair for pair in PAIRS if all({*ENGINES[name].dtypes} & {*FP8} for name in pair)]


@on_backends(HAVE_FP8, SOME, WITH_ROWS)
def test_fp8(backend: Backend, first: str, second: str) -> None:
    """One dtype and scale at both ends is the same bytes; others round once more each way."""
    for seed, (at_first, at_second) in enumerate(product(FP8, FP8)):
        if at_first not in ENGINES[first].dtypes or at_second not in ENGINES[second].dtypes:
            continue
        src = scales_of(first, at_first, SCALES)
        dst = scales_of(second, at_second, OTHER_SCALES)
        a = end_of(first, "first", seed, at_first, scales=src)
        b = end_of(second, "second", seed, at_second, scales=dst)
        tokens = some_tokens(seed, at_first, a.sizes.num_kv_heads, not ENGINES[first].mla)
        there = converted(tokens, at_second, src, dst)
        back = converted(there, at_first, dst, src)
        check_there_and_back(backend, a, b, tokens, there, back)
        if at_first == at_second and src and dst:
            same = tuple((k, k) for k, _ in SCALES)
            a = end_of(first, "first", seed, at_first, scales=same)
            b = end_of(second, "second", seed, at_second, scales=same)
            check_there_and_back(backend, a, b, tokens, there=tokens, back=tokens)


def rank_first(first: str, second: str) -> Names | None:
    """A pair whose first may be one rank of a tensor-parallel model; None if there is none.

    MLA has one head. transformers' caches hold all heads.
    """
    if ENGINES[first].mla or (ENGINES[first].whole and ENGINES[second].whole):
        return None
    return (second, first) if ENGINES[first].whole else (first, second)


@on_backends([pair for pair in (rank_first(*pair) for pair in PAIRS) if pair], SOME)
def test_head_ranges(backend: Backend, first: str, second: str) -> None:
    """Heads 2 and 3 of 4, all that the first holds, into the second, which holds all, and back."""
    dtype = torch.bfloat16
    share = {"num_kv_heads": 2, "first_kv_head": 2, "total_kv_heads": 4}
    rank = end_of(first, "first", 0, dtype, **share)
    whole = end_of(second, "second", 0, dtype, num_kv_heads=4)
    tokens = some_tokens(0, dtype, 2, True)
    there = beside_sentinels(tokens, 4)
    check_there_and_back(
        backend, rank, whole, tokens, there, tokens, head_starts=(0, 2), num_heads=2
    )

    source, target = holding(rank, tokens), whole.empty()
    with pytest.raises(FactsMismatchError) as refused:
        migrate(rank.span(source), whole.span(target, 0), rank.lengths, num_heads=2)
    engines = [made.view.facts.engine for made in (source, target)]
    assert refused.value.reasons == (
        f"first_kv_head + head_start is 2 at the source ({engines[0]}) and 0 at the destination "
        f"({engines[1]})",
    )


@cache
def quantised(tokens: Tokens) -> Tokens:
    """Rows of bytes: E4M3 and a float32 scale of each row, as tests/test_find_scales.py says."""

    def rows(half: Tensor) -> Tensor:
        wide = half.float()
        scales = find_scales(wide, E4M3, torch.float32).unsqueeze(-1)
        codes = reference.encode(wide / scales, E4M3)
        return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], -1)

    assert tokens.value is not None
    return Tokens(rows(tokens.key), rows(tokens.value))


@pytest.mark.parametrize("first", ["torch NHD", "tgi paged cuda", "tensorrt_llm V1 offloaded"])
def test_scales_that_are_found(backend: Backend, first: str) -> None:
    """Into vLLM's FP8 rows, each of which ends in its scale: not in ENGINES, as it rounds."""
    a = end_of(first, "first", 0, torch.bfloat16)
    sizes = replace(a.sizes, num_blocks=64, block_size=16, dtype=torch.uint8)
    b = replace(a, engine=Engine(fp8_rows, 16, (torch.uint8,)), sizes=sizes)
    b = replace(b, sequences=[[5 * i + j + 1 for j in range(5)] for i in range(len(a.lengths))])
    tokens = some_tokens(0, torch.bfloat16, HEADS, True)
    source, target = holding(a, tokens), b.empty()
    move(backend, source, a.span(source), target, b.span(target), a.lengths, find_scales=True)
    assert_same_memory(target, holding(b, quantised(tokens)))


@pytest.mark.parametrize("name", ENGINES)
def test_verify_finds_one_wrong_bit(name: str) -> None:
    a, b, tokens = two_ends(name, name, 0, torch.bfloat16)
    half = "key" if tokens.value is None else "value"
    wrong, sequence = getattr(tokens, half).clone(), a.lengths.index(LONGEST)
    wrong.view(torch.int16)[1, sum(a.lengths[:sequence]) + 5, -1, 7] ^= 1
    ends = a.span(holding(a, tokens)), b.span(holding(b, replace(tokens, **{half: wrong})))
    found = verify(*ends, a.lengths).difference
    assert found is not None
    place = (found.layer, found.kv, found.sequence, found.token, found.head, found.dim)
    assert place == (1, half[0].upper(), sequence, 5, a.sizes.num_kv_heads - 1, 7)


# ---- the kernels of devices ----


BF16 = torch.bfloat16


def on_the_grid(
    first: str,
    second: str,
    at_first: torch.dtype = BF16,
    at_second: torch.dtype = BF16,
    transfer: Transfer = Transfer.KERNEL,
) -> None:
    a, b = end_of(first, "first", 0, at_first), end_of(second, "second", 0, at_second)
    tokens = some_tokens(0, at_first, HEADS, True)
    there = converted(tokens, at_second)
    back = converted(there, at_first)
    check_there_and_back(HOSTGRID, a, b, tokens, there, back, transfer=transfer)


def write_a_token() -> None:
    """What a decode step writes."""
    cache = LAYOUTS["hnd"](Geometry(), BF16, seed=1)
    tokens = key_value(cache.layers[-1], 1, BF16, 2)
    check_write(HOSTGRID, cache, tokens, torch.tensor([9]))


def move_large_tokens() -> None:
    """More units of 16 bytes per token than two for each lane of a warp."""
    geometry = Geometry(num_kv_heads=9, head_dim=64)
    src, dst = (LAYOUTS[layout](geometry, BF16, seed=1) for layout in ("nhd", "hnd"))
    src_end, dst_end = tables.packed(src, [7, 5], 1), tables.packed(dst, [7, 5], 2, shared=False)
    check_migrate(HOSTGRID, src, src_end, dst, dst_end, [7, 5])


def move_zero_points(backend: Backend, make: Callable[..., Affine | Fp4]) -> None:
    """Keys of a dense cache into OpenVINO's, or into NVFP4."""
    cache, src = make(2, 4, 2, 64, 1), from_dense(torch.randn(3, 2, 64), torch.float16)
    raw = src.view.layers[0].k.owner
    backend.migrate_spans(src, cache.span([[1]]), [3], [raw, *cache.raw])


# Each kernel of docs/kernels.md, and caches of engines that it alone moves. Pairs of one dtype go
# by the first four, often K by one and V by another; the last two run if a caller asks for them.
KERNELS: dict[str, Callable[[], None]] = {
    "slots": write_a_token,
    "blocks": partial(on_the_grid, "torch NHD", "tgi flashinfer"),
    "vectors": move_large_tokens,
    "remap": partial(on_the_grid, "vllm ROCM_ATTN LBHNC", "tgi paged cuda"),
    "tile": partial(on_the_grid, "torch HND", "tgi paged ipex xpu"),
    "convert": partial(on_the_grid, "torch NHD", "torch HND", BF16, torch.float32),
    "generic": partial(on_the_grid, "torch NHD", "torch HND", E4M3, E5M2),
    "bulk": partial(on_the_grid, "torch NHD", "tgi flashinfer", transfer=Transfer.BACKGROUND),
    "quantize": partial(test_scales_that_are_found, HOSTGRID, "torch NHD"),
    "units": partial(move_units, HOSTGRID, DType.Q8_0, 1),
    "affine": partial(move_zero_points, HOSTGRID, openvino_v),
    "channels": partial(move_zero_points, HOSTGRID, openvino_k),
    "fp4": partial(move_zero_points, HOSTGRID, nvfp4_page),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_is_reached(
    kernel: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The host grid says where each launch comes from, and a kernel has its file."""
    monkeypatch.setenv("HOSTGRID_TRACE", "1")
    KERNELS[kernel]()
    launched = re.findall(r"launch from .*?(\w+)\.cu:", capfd.readouterr().err)
    assert {*launched} - {"status"} == {kernel}


def test_no_kernel_is_missing() -> None:
    files = (ROOT / "csrc/cuda").glob("*.cu")
    launches = re.compile(r"^(KVX_INSTANTIATE\(|void launch_)", re.MULTILINE)
    assert {*KERNELS} == {file.stem for file in files if launches.search(file.read_text())}


class Hidden(Mirror):
    """Copies, whose originals hold garbage while the call runs."""

    def upload(self) -> None:
        super().upload()
        for here, _ in self.copies.values():
            here.fill_(0xEE)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tensorrt_llm V1 offloaded", "tgi paged cuda"),
        ("vllm FLASH_ATTN LBNHC", "tgi flashinfer"),
        ("tensorrt_llm V2", "dense"),
        ("vllm FLASHMLA", "tensorrt_llm MLA"),
    ],
)
def test_nothing_is_left_on_the_host(first: str, second: str) -> None:
    """A device is given caches, tables, slots, lengths and scales in memory of its own."""
    hidden = Backend("hidden", Memory.DEVICE, HOSTGRID.library, Hidden("cpu"))
    test_null_blocks(hidden, first, second)
    test_fp8(hidden, first, second)


def turned(span: CacheSpan, rotary: Literal["half", "interleaved"]) -> CacheSpan:
    """The same, of an engine that keeps K's dims in this order. All of a head rotates."""
    facts = replace(span.view.facts, rotary=rotary, rotary_dim=DIM)
    return replace(span, view=replace(span.view, facts=facts))


@on_backends(WITH_HUBS, SOME, WITH_ROWS)
def test_orders_of_rotary_dims(backend: Backend, first: str, second: str) -> None:
    """Pairs of dims that are halves apart in the first engine are neighbours in the second."""
    a, b, tokens = two_ends(first, second, 4, torch.bfloat16)
    halves = tokens.key.unflatten(-1, (2, DIM // 2))
    there = Tokens(halves.transpose(-1, -2).flatten(-2).contiguous(), tokens.value)
    source, target, returned = holding(a, tokens), b.empty(), a.empty()
    at_source, at_returned = (turned(a.span(made), "half") for made in (source, returned))
    at_target = turned(b.span(target), "interleaved")
    keys = [end.view.layers[0].k for end in (at_source, at_target)]
    packs = [axes(k.layout, k.shape).pack for k in keys]
    if min(packs) > 1:  # no strides step through both
        with pytest.raises(FactsMismatchError, match="is packed by"):
            migrate(at_source, at_target, a.lengths)
        return assert_untouched(target)
    for src, dst in ((at_source, at_target), (at_target, at_returned)):
        found = compare(src.view.facts, dst.view.facts)
        assert not found.reasons
        if backend.memory is Memory.HOST:
            migrate(src, dst, a.lengths)
            assert verify(src, dst, a.lengths)
        else:
            ends = reordered(src, dst, *found.transforms)
            allocations = (*source.raw, *target.raw, *returned.raw)
            backend.migrate_spans(*ends, a.lengths, allocations)
    assert_same_memory(target, holding(b, there))
    assert_same_memory(returned, source)


# ---- what is refused ----

# A fact, and what it is not. Source: kvx_core/desc/facts.py
OTHER_FACTS: dict[str, Any] = {
    "fingerprint": "of another model",
    "rotary": "none",
    "rotary_dim": 16,
    "rope_applied": False,
    "hadamard": True,
    "num_layers": 32,
    "first_layer": 2,
    "window": 1024,
    "total_kv_heads": 8,
    "first_kv_head": 1,
}


@pytest.mark.parametrize("second", ENGINES)
def test_facts_are_compared(second: str) -> None:
    """What the adapters say of one model agrees; each fact that does not is named, alone."""
    target = end_of(second, "second", 0, torch.bfloat16).empty()
    theirs = target.view.facts
    for first in partners(second):
        a, b, tokens = two_ends(first, second, 0, torch.bfloat16)
        source, span = a.span(holding(a, tokens)), b.span(target)
        ours = source.view.facts
        assert not compare(ours, theirs).reasons_as_is
        at = f"at the source ({ours.engine})", f"at the destination ({theirs.engine})"
        for fact, other in OTHER_FACTS.items():
            known = getattr(ours, fact)
            told = "first_kv_head + head_start" if fact == "first_kv_head" else fact
            view = replace(target.view, facts=replace(theirs, **{fact: other}))
            with pytest.raises(FactsMismatchError) as refused:
                migrate(source, replace(span, view=view), a.lengths)
            wanted = f"{told} is {known!r} {at[0]} and {other!r} {at[1]}"
            assert refused.value.reasons == (wanted,)
        view = replace(target.view, facts=replace(theirs, fingerprint=None))
        with pytest.raises(FactsMismatchError, match="fingerprint of the destination"):
            migrate(source, replace(span, view=view), a.lengths)
    assert_untouched(target)


OTHER_SIZES = (
    ({"num_layers": 3}, "dst.num_layers is 3, expected src.num_layers 2"),
    ({"head_dim": 64}, "dst.layers[0].k has head_dim 64, expected that of src.layers[0].k, 48"),
    ({"num_kv_heads": 5}, "dst.layers[0].num_kv_heads is 5, expected that of src.layers[0], 3"),
)


@pytest.mark.parametrize("second", ENGINES)
def test_sizes_must_agree(second: str) -> None:
    """Whatever the facts say."""
    for sizes, reason in OTHER_SIZES:
        if not (ENGINES[second].mla and "num_kv_heads" in sizes):  # MLA has one
            check_sizes(second, sizes, reason)


def check_sizes(second: str, sizes: dict[str, int], reason: str) -> None:
    b = end_of(second, "second", 0, torch.bfloat16)
    target = replace(b, sizes=replace(b.sizes, **sizes)).empty()
    for first in partners(second):
        a, _, tokens = two_ends(first, second, 0, torch.bfloat16)
        source = a.span(holding(a, tokens))
        view = replace(target.view, facts=source.view.facts)
        with pytest.raises(InvalidArgumentError, match=re.escape(reason)):
            migrate(source, replace(b.span(target), view=view), a.lengths)
    assert_untouched(target)


@of_pairs([pair for pair in product(ENGINES, repeat=2) if why_never(*pair)])
def test_pairs_that_never_meet(first: str, second: str) -> None:
    """They are refused even if they have one head each and agree in every fact."""
    a = end_of(first, "first", 0, torch.bfloat16, num_kv_heads=1)
    b = end_of(second, "second", 0, torch.bfloat16, num_kv_heads=1)
    target = b.empty()
    with pytest.raises(InvalidArgumentError, match=re.escape(str(why_never(first, second)))):
        migrate(a.span(a.empty()), b.span(target), a.lengths)
    assert_untouched(target)


@pytest.mark.parametrize("first", [name for name, engine in ENGINES.items() if not engine.mla])
def test_rows_of_bytes_are_no_values(first: str) -> None:
    """INT4 with a scale in each row goes to its own kind only, though all sizes agree."""
    rows = Engine(int4_rows, 16, (torch.uint8,))
    a = end_of(first, "first", 0, torch.bfloat16)
    b = replace(a, engine=rows, sizes=replace(a.sizes, num_blocks=64, block_size=16))
    b = replace(b, sequences=[[5 * i + j + 1 for j in range(5)] for i in range(len(a.lengths))])
    source, target = a.empty(), b.empty()
    view = replace(target.view, facts=source.view.facts)
    with pytest.raises(InvalidArgumentError, match="U8 holds opaque bytes and is never converted"):
        migrate(a.span(source), replace(b.span(target), view=view), a.lengths)
    assert_untouched(target)


@pytest.mark.parametrize("name", REFUSED)
def test_caches_without_a_view(name: str) -> None:
    refused = REFUSED[name]
    sizes = Sizes(
        num_layers=2,
        num_blocks=3,
        block_size=16,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=refused.dtype,
    )
    with pytest.raises(UnsupportedError, match=re.escape(refused.reason)):
        refused.build(sizes)


@pytest.mark.parametrize("name", [name for name in ENGINES if name.startswith("tgi ")])
def test_a_prefix_that_requests_of_tgi_share_is_no_destination(name: str) -> None:
    """Their slots are refused before a span of them can be made."""
    end = end_of(name, "second", 0, torch.bfloat16)
    slots = end.empty().slots(end.sequences, end.lengths)
    with pytest.raises(InvalidArgumentError, match="in a prefix that other requests read too"):
        tgi.slot_mapping(slots, shared=slots[-7:])
    assert tgi.slot_mapping(slots[:-7], shared=slots[-7:]).token_count == len(slots) - 7
