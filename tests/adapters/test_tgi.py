"""TGI's caches, as its KVCache allocates them, through the adapter and back.

The other end is always a mock that has only TGI's own indexing: tests/fakes/tgi.py. FP8 is in
test_tgi_fp8.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import tensorrt_llm, tgi
from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    FactsMismatchError,
    InvalidArgumentError,
    Layout,
    OutOfRangeError,
    UnsupportedError,
    compare,
    describe,
    gather_kv,
    migrate,
    verify,
    write_kv,
)
from tests.facts import SAME_MODEL
from tests.fakes.tgi import FLAVOURS, SENTINEL, Batch, Cache, KVScales, SimpleAllocator
from tests.ways_out import WayOut, leads_out

SEEDS = [0, 1, 2]
every_flavour = pytest.mark.parametrize("flavour", FLAVOURS, ids="-".join)
Flavour = tuple[str, str, str]


def random_tokens(seed: int, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bytes(found: Cache, expected: Cache) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found.raw, expected.raw, strict=True))


def describe_cache(cache: Cache) -> CacheDesc:
    return tgi.cache_desc(cache.key, cache.value, cache.spec())


def view_of(*layers: Cache, facts: CacheFacts | None = None) -> CacheView:
    pairs = [(layer.key, layer.value) for layer in layers]
    return tgi.cache_view(pairs, layers[0].spec(), facts or SAME_MODEL)


# ---- where K and V lie ----


@pytest.mark.parametrize(
    ("flavour", "dtype", "k_shape", "v_shape"),
    [
        (("flashinfer", "cuda", ""), torch.float16, (2048, 1, 2, 64), (2048, 1, 2, 64)),
        (("flashdecoding", "cuda", ""), torch.float16, (9, 256, 2, 64), (9, 256, 2, 64)),
        (("paged", "cuda", ""), torch.float16, (9, 2, 8, 16, 8), (9, 2, 64, 16)),
        (("paged", "cuda", ""), torch.float32, (9, 2, 16, 16, 4), (9, 2, 64, 16)),
        (("paged", "cuda", ""), torch.float8_e4m3fn, (9, 2, 4, 16, 16), (9, 2, 64, 16)),
        (("paged", "rocm", ""), torch.bfloat16, (9, 2, 8, 16, 8), (9, 2, 64, 16)),
        (("paged", "ipex", "cpu"), torch.bfloat16, (9, 2, 16, 64), (9, 2, 16, 64)),
        (("paged", "ipex", "xpu"), torch.float16, (9, 2, 64, 16, 1), (9, 2, 64, 16)),
        (("flashdecoding-ipex", "ipex", "cpu"), torch.float32, (9, 2, 64, 64), (9, 2, 64, 64)),
        (("flashdecoding-ipex", "ipex", "xpu"), torch.float16, (9, 64, 2, 64), (9, 64, 2, 64)),
        (("paged", "hpu", ""), torch.bfloat16, (9 * 128, 2, 64), (9 * 128, 2, 64)),
    ],
    ids=str,
)
def test_shapes_as_tgi_itself_printed_them(
    flavour: Flavour, dtype: torch.dtype, k_shape: tuple[int, ...], v_shape: tuple[int, ...]
) -> None:
    attention, system, device = flavour
    spec = tgi.CacheSpec(
        attention=attention,
        system=system,
        device=device,
        num_blocks=2048 if attention == "flashinfer" else 9,
        num_kv_heads=2,
        head_dim=64,
        dtype=dtype,
    )
    assert (spec.k_shape, spec.v_shape) == (k_shape, v_shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@every_flavour
def test_a_cache_is_described_in_place(flavour: Flavour, dtype: torch.dtype) -> None:
    cache = Cache(*flavour, num_blocks=5, num_heads=3, head_size=80, dtype=dtype)
    desc = describe_cache(cache)
    assert desc.v is not None
    assert (desc.k.data, desc.v.data) == (cache.raw[0].data_ptr(), cache.raw[1].data_ptr())
    assert (desc.num_blocks, desc.num_kv_heads, desc.head_dim) == (5, 3, 80)
    assert desc.block_size == cache.block_size == cache.spec().block_size
    assert (tuple(cache.key.shape), tuple(cache.value.shape)) == cache.shapes()
    desc.validate()


def test_the_paged_v_is_a_view_with_strides() -> None:
    desc = describe_cache(Cache("paged", "cuda", "cuda"))
    assert desc.v is not None
    assert (desc.k.layout, desc.v.layout) == (Layout.BLOCK_HND_PACKED, Layout.BLOCK_HND)
    assert desc.v.shape == (9, 2, 16, 64)
    assert desc.v.stride == (2 * 64 * 16, 64 * 16, 1, 16)


# ---- writing and reading ----


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("heads", "dim"), [(1, 80), (3, 64), (2, 24)])
@every_flavour
def test_kvx_writes_what_tgi_reads(flavour: Flavour, heads: int, dim: int, seed: int) -> None:
    """Keys as TGI has them: slices of a projection, with a stride from token to token."""
    blocks = 99 if flavour[0] == "flashinfer" else 9
    found, expected = (Cache(*flavour, blocks, heads, dim) for _ in range(2))
    kv = random_tokens(seed, 29, 2, heads, dim)
    key, value = kv[:, 0], kv[:, 1]
    assert not key.is_contiguous()
    num_slots = found.num_blocks * found.block_size
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[:29]
    slots[::5] = -1
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected.store(slot, key[i], value[i])

    write_kv(describe_cache(found), key, value, tgi.slot_mapping(slots))

    assert same_bytes(found, expected)
    assert not found.raw[0].eq(SENTINEL).all()


@pytest.mark.parametrize("seed", SEEDS)
@every_flavour
def test_kvx_reads_what_tgi_wrote(flavour: Flavour, seed: int) -> None:
    """A batch of a step after others; columns past a request's blocks are poison."""
    cache = Cache(*flavour, num_heads=3, head_size=40, num_blocks=70)
    allocator = SimpleAllocator(cache, seed=seed)
    tokens = [cache.block_size + 3, 1, cache.block_size, 37]
    batch = Batch.of([allocator.allocate(count + 5) for count in tokens], [1] * 4, tokens)
    lengths = [count + 1 for count in tokens]
    sequences = [random_tokens(seed + i, n, 2, 3, 40) for i, n in enumerate(lengths)]
    for i, tokens_of in enumerate(sequences):
        first = int(batch.cu_slots[i])
        for slot, (key, value) in zip(batch.slots[first:].tolist(), tokens_of, strict=False):
            cache.store(slot, key, value)

    found_lens = tgi.seq_lens(batch.input_lengths, batch.cache_lengths)
    table = tgi.block_table(batch.block_tables_tensor)
    assert table.indices == batch.block_tables_tensor.data_ptr()
    key, value = gather_kv(describe_cache(cache), table, found_lens)

    assert found_lens.to_numpy().tolist() == lengths
    for i, expected in enumerate(sequences):
        assert torch.equal(key[i, : lengths[i]], expected[:, 0])
        assert torch.equal(value[i, : lengths[i]], expected[:, 1])


def test_a_step_writes_its_own_slots() -> None:
    """batch.slots has those of all tokens to come; slot_indices says which are this step's."""
    found, expected = (Cache("paged", "cuda", "cuda", num_blocks=40) for _ in range(2))
    allocator = SimpleAllocator(found)
    requests = [allocator.allocate(count) for count in (30, 50, 17)]
    batch = Batch.of(requests, input_lengths=[4, 1, 9], cache_lengths=[20, 40, 0])
    tokens = random_tokens(3, 14, 2, 2, 64)
    own = [*requests[0][1][20:24], *requests[1][1][40:41], *requests[2][1][:9]]
    for slot, (key, value) in zip(own, tokens, strict=True):
        expected.store(slot, key, value)
    slots = tgi.slot_mapping(batch.slots, batch.slot_indices)
    write_kv(describe_cache(found), tokens[:, 0], tokens[:, 1], slots)
    assert same_bytes(found, expected)


def test_the_table_of_flashinfer() -> None:
    """One entry per token, which is its slot."""
    cache = Cache("flashinfer", "cuda", "cuda", num_blocks=99)
    allocator = SimpleAllocator(cache)
    requests = [allocator.allocate(count) for count in (30, 1, 17)]
    batch = Batch.of(requests, input_lengths=[1, 1, 17], cache_lengths=[28, 0, 0])
    tokens = random_tokens(4, 99, 2, 2, 64)
    for slot, (key, value) in enumerate(tokens):
        cache.store(slot, key, value)
    indices, cu_seqlen_k = batch.ragged()
    table = tgi.ragged(indices, cu_seqlen_k, cache.spec())
    assert (table.indices, table.indptr) == (indices.data_ptr(), cu_seqlen_k.data_ptr())
    key, value = gather_kv(
        describe_cache(cache), table, tgi.seq_lens(batch.input_lengths, batch.cache_lengths)
    )
    for i, (length, (_, slots)) in enumerate(zip((29, 1, 17), requests, strict=True)):
        assert torch.equal(key[i, :length], tokens[slots[:length], 0])
        assert torch.equal(value[i, :length], tokens[slots[:length], 1])


def test_the_table_of_flashinfer_is_wrong_for_larger_blocks() -> None:
    cache = Cache("flashdecoding", "cuda", "cuda", num_blocks=3)
    batch = Batch.of([SimpleAllocator(cache).allocate(300)], [2], [0])
    with pytest.raises(
        UnsupportedError,
        match="block_size is 256 for flashdecoding on cuda, expected 1: block_tables_ragged has "
        r"the first seq_len blocks of a row, not a block per token\. Use block_table",
    ):
        tgi.ragged(*batch.ragged(), cache.spec())


# ---- block 0, negative slots, shared prefixes ----


def test_the_reserved_block_is_nobodys() -> None:
    """Requests that pad a CUDA graph have block 0 in their rows."""
    src, dst = (Cache("paged", "cuda", "cuda") for _ in range(2))
    for slot in range(src.num_blocks * src.block_size):
        src.store(slot, *random_tokens(slot, 2, 2, 64))
    before = [raw.clone() for raw in dst.raw]
    from_, to = BlockTable.packed([[3, 0]]), BlockTable.packed([[0, 5]])
    with pytest.raises(OutOfRangeError, match="0, a null block"):
        migrate(view_of(src).at(from_), view_of(dst).at([[6, 5]]), [32])
    migrate(view_of(src).at(from_.with_holes()), view_of(dst).at(to.with_holes()), [32])
    assert all(torch.equal(a, b) for a, b in zip(dst.raw, before, strict=True))
    migrate(view_of(src).at(from_.with_holes()), view_of(dst).at([[6, 5]]), [32])
    for token in range(16):
        assert torch.equal(dst.load(6 * 16 + token)[0], src.load(3 * 16 + token)[0])
    assert dst.raw[0].view(9, -1)[5].eq(SENTINEL).all()


def test_negative_slots_never_reach_tgi() -> None:
    kv = random_tokens(5, 9, 2, 2, 64)
    slots = torch.tensor([4, -1, 7, 0, -100])
    key, value, kept = tgi.without_negative_slots(kv[:, 0], kv[:, 1], slots)
    assert kept.tolist() == [4, 7, 0]
    assert torch.equal(key, kv[[0, 2, 3], 0])
    assert torch.equal(value, kv[[0, 2, 3], 1])
    key, value, kept = tgi.without_negative_slots(kv[:, 0], kv[:, 1], slots.abs())
    assert key.data_ptr() == kv.data_ptr()
    assert len(key) == len(value) == len(kept) == 5


def test_a_shared_prefix_is_read_only() -> None:
    cache = Cache("flashinfer", "cuda", "cuda", num_blocks=64)
    prefix = [9, 3, 31, 12]
    own = [[20, 21, 22], [40, 41, 42, 43]]
    requests = [(prefix + mine, prefix + mine) for mine in own]
    batch = Batch.of(requests, input_lengths=[3, 4], cache_lengths=[4, 4])
    shared = tgi.request_slots(batch.slots, batch.cu_slots, batch.cache_lengths)
    assert shared.tolist() == prefix + prefix
    tokens = random_tokens(6, 7, 2, 2, 64)
    desc = describe_cache(cache)
    for slot in prefix:
        one_too_many = torch.tensor([20, 21, 22, slot, 40, 41, 42])
        with pytest.raises(
            InvalidArgumentError,
            match=rf"slots\[3\] is {slot}, in a prefix that other requests read too, expected a "
            r"slot of one request alone\. Write its tokens from prefix_len on",
        ):
            write_kv(
                *(desc, tokens[:, 0], tokens[:, 1]),
                tgi.slot_mapping(one_too_many, shared=shared[:4]),
            )
    assert all(raw.eq(SENTINEL).all() for raw in cache.raw)

    slots = tgi.slot_mapping(batch.slots, batch.slot_indices, shared=shared)
    write_kv(desc, tokens[:, 0], tokens[:, 1], slots)
    for slot, (key, _) in zip(own[0] + own[1], tokens, strict=True):
        assert torch.equal(cache.load(slot)[0], key)


def test_no_shared_prefix_is_checked_too() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    padded = tgi.slot_mapping(torch.tensor([5, 0, 0, -1, -1]), shared=nothing)
    assert (padded.token_count, padded.invalid_slot) == (5, -1)
    with pytest.raises(
        InvalidArgumentError,
        match=r"^slots\[1\] and slots\[3\] are both 1, expected each slot once: a window is cyclic",
    ):
        tgi.slot_mapping(torch.tensor([5, 1, 0, 1]), shared=nothing)


def test_lengths_are_added_request_by_request() -> None:
    """FlashCausalLMBatch has them as lists too, whose + would put one behind the other."""
    for new, before in (([1, 7], [299, 0]), (torch.tensor([1, 7]).int(), torch.tensor([299, 0]))):
        assert tgi.seq_lens(new, before).to_numpy().tolist() == [300, 7]
    assert tgi.seq_lens([], []).seq_count == 0
    with pytest.raises(
        InvalidArgumentError, match=r"^input_lengths has 1 entries, expected 2, those of cache_len"
    ):
        tgi.seq_lens(torch.tensor([1]), torch.tensor([299, 0]))


def test_slots_of_another_batch() -> None:
    slots, cu_slots = torch.arange(10), torch.tensor([0, 4, 10])
    with pytest.raises(
        InvalidArgumentError,
        match=r"^cu_slots ends at 10, expected at most 9, the number of slots: give both of one ba",
    ):
        tgi.request_slots(slots[:9], cu_slots, torch.tensor([4, 6]))
    with pytest.raises(
        InvalidArgumentError,
        match=r"^ends has 1 entries, expected 2, one per request of cu_slots$",
    ):
        tgi.request_slots(slots, cu_slots, torch.tensor([4]))
    with pytest.raises(InvalidArgumentError, match=r"^starts has 3 entries, expected 2, one per"):
        tgi.request_slots(slots, cu_slots, torch.tensor([4, 6]), torch.tensor([0, 0, 0]))


def test_slots_beyond_a_request() -> None:
    slots, cu_slots = torch.arange(10), torch.tensor([0, 4, 10])
    with pytest.raises(
        InvalidArgumentError,
        match="tokens of request 0 are 1 to 5, expected within 0 to 4, the slots that it has by cu",
    ):
        tgi.request_slots(slots, cu_slots, torch.tensor([5, 6]), torch.tensor([1, 0]))
    assert tgi.request_slots(slots, cu_slots[:1], torch.empty(0)).tolist() == []


# ---- cyclic windows ----


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cyclic_window_is_read_and_written_by_slots(seed: int) -> None:
    """Window 40 in 3 blocks of 16: 48 slots, and token 48 is written over token 0."""
    window, lengths = 40, [97, 12, 41]
    src, dst, expected = (Cache("paged", "cuda", "cuda", num_blocks=12) for _ in range(3))
    tokens = [random_tokens(seed + i, n, 2, 2, 64) for i, n in enumerate(lengths)]
    allocator = SimpleAllocator(src, window, seed)
    batch = Batch.of([allocator.allocate(n) for n in lengths], lengths, [0] * 3)
    for i, sequence in enumerate(tokens):
        first = int(batch.cu_slots[i])
        for slot, (key, value) in zip(batch.slots[first:].tolist(), sequence, strict=False):
            src.store(slot, key, value)

    ends = torch.tensor(lengths)
    starts = (ends - window).clamp(min=0)
    assert starts.tolist() == [57, 0, 1]
    held = tgi.request_slots(batch.slots, batch.cu_slots, ends, starts)
    allocator = SimpleAllocator(dst, window, seed + 1)
    theirs = Batch.of([allocator.allocate(n) for n in lengths], lengths, [0] * 3)
    wanted = tgi.request_slots(theirs.slots, theirs.cu_slots, ends, starts)
    nothing = torch.empty(0, dtype=torch.int64)
    migrate(
        view_of(src).at(slots=tgi.slot_mapping(held)),
        view_of(dst).at(slots=tgi.slot_mapping(wanted, shared=nothing)),
        ends - starts,
    )

    last = [sequence[start:] for sequence, start in zip(tokens, starts.tolist(), strict=True)]
    for slot, (key, value) in zip(wanted.tolist(), torch.cat(last), strict=True):
        expected.store(slot, key, value)
    assert same_bytes(dst, expected)

    i, j = (slot in theirs.slots[48:97].tolist() for slot in theirs.slots[:2].tolist())
    assert i
    assert j
    with pytest.raises(
        InvalidArgumentError,
        match=r"slots\[\d+\] and slots\[\d+\] are both \d+, expected each slot once: a window is "
        r"cyclic\. Write its last tokens alone",
    ):
        tgi.slot_mapping(theirs.slots, theirs.slot_indices, shared=nothing)


# ---- from flavour to flavour ----


@pytest.mark.parametrize("seed", SEEDS)
def test_from_every_flavour_to_the_next(seed: int) -> None:
    lengths = [37, 1, 18]
    tokens = [random_tokens(seed + i, n, 2, 3, 40) for i, n in enumerate(lengths)]
    facts = CacheFacts(fingerprint="f", rotary="half", rotary_dim=40, rope_applied=True)

    def made(flavour: Flavour) -> tuple[list[Cache], Batch]:
        blocks = 60 if flavour[0] == "flashinfer" else 8
        caches = [Cache(*flavour, blocks, num_heads=3, head_size=40) for _ in range(2)]
        allocator = SimpleAllocator(caches[0], seed=seed)
        return caches, Batch.of([allocator.allocate(n) for n in lengths], [1] * 3, [0] * 3)

    def fill(caches: list[Cache], batch: Batch) -> None:
        for layer_idx, cache in enumerate(caches):
            for i, sequence in enumerate(tokens):
                first = int(batch.cu_slots[i])
                for slot, (key, value) in zip(batch.slots[first:].tolist(), sequence, strict=False):
                    cache.store(slot, key + layer_idx, value - layer_idx)

    for here, there in zip(FLAVOURS, FLAVOURS[1:] + FLAVOURS[:1], strict=True):
        (src, src_batch), (dst, dst_batch), (expected, _) = made(here), made(there), made(there)
        fill(src, src_batch)
        fill(expected, dst_batch)
        src_end = view_of(*src, facts=facts).at(tgi.block_table(src_batch.block_tables_tensor))
        dst_end = view_of(*dst, facts=facts).at(tgi.block_table(dst_batch.block_tables_tensor))
        migrate(src_end, dst_end, lengths)
        assert all(map(same_bytes, dst, expected)), (here, there)
        assert verify(src_end, dst_end, lengths).ok


# ---- facts ----


def test_facts() -> None:
    spec = Cache("flashinfer", "cuda", "cuda").spec()
    facts = tgi.cache_facts(
        spec,
        fingerprint="a model",
        rotary="half",
        rotary_dim=64,
        num_layers=3,
        window=0,
        total_kv_heads=8,
        first_kv_head=2,
    )
    assert facts == CacheFacts(
        engine="tgi 3.3.7",
        fingerprint="a model",
        rotary="half",
        rotary_dim=64,
        rope_applied=True,
        hadamard=False,
        scale_convention="multiply",
        num_layers=3,
        first_layer=0,
        window=0,
        total_kv_heads=8,
        first_kv_head=2,
        compute_dtype=DType.F16,
        negative_slots="wrap",
    )
    fp8 = replace(spec, dtype=torch.float8_e4m3fn)
    assert tgi.cache_facts(fp8).compute_dtype is None
    unknown = tgi.cache_facts(spec)
    assert (unknown.rotary, unknown.rope_applied, unknown.first_layer) == (None, None, None)
    none = tgi.cache_facts(spec, rotary="none", rotary_dim=0)
    pool = tensorrt_llm.PoolSpec(
        layers=(0,), num_blocks=9, tokens_per_block=16, num_kv_heads=2, head_dim=64, dtype="HALF"
    )
    same_model = tensorrt_llm.cache_facts(
        pool,
        version="1.2.1",
        fingerprint=None,
        is_neox=None,
        rotary_dim=0,
        total_kv_heads=None,
        first_kv_head=None,
    )
    theirs = replace(same_model, num_layers=None, first_layer=None, window=None)
    assert not compare(none, theirs, same_model=True).reasons_as_is
    (reason,) = compare(none, theirs).reasons
    assert reason.startswith("fingerprint is unknown at the source (tgi 3.3.7) and destination (")


@pytest.mark.parametrize(
    ("flavour", "policy"),
    [
        (("flashdecoding", "rocm", ""), "wrap"),
        (("paged", "cuda", "cuda"), "skip"),
        (("paged", "ipex", "cpu"), "undefined"),
    ],
)
def test_what_tgi_does_with_a_negative_slot(flavour: Flavour, policy: str) -> None:
    assert tgi.cache_facts(Cache(*flavour).spec()).negative_slots == policy


def test_other_models_are_refused() -> None:
    src, dst = Cache("paged", "cuda", "cuda"), Cache("flashinfer", "cuda", "cuda")
    ours = tgi.cache_facts(src.spec(), fingerprint="a", rotary="half", rotary_dim=64)
    theirs = replace(ours, fingerprint="b")
    with pytest.raises(FactsMismatchError, match=r"fingerprint is 'a' at the source \(tgi 3\.3\.7"):
        migrate(view_of(src, facts=ours).at([[1]]), view_of(dst, facts=theirs).at([[1]]), [1])


# ---- what is refused ----


def spec_of(**fields: Any) -> tgi.CacheSpec:
    defaults: dict[str, Any] = {
        "attention": "paged",
        "system": "cuda",
        "num_blocks": 9,
        "num_kv_heads": 2,
        "head_dim": 64,
        "dtype": torch.float16,
    }
    return tgi.CacheSpec(**(defaults | fields))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"attention": "flashinfer", "system": "rocm"}, "flashinfer on rocm"),
        ({"attention": "flashdecoding-ipex"}, "flashdecoding-ipex on cuda"),
        ({"system": "ipex"}, "paged on ipex:"),
        ({"system": "ipex", "device": "cuda"}, "paged on ipex:cuda"),
        ({"system": "cpu"}, "paged on cpu"),
        ({"system": "xpu"}, "paged on xpu"),
        ({"attention": "flashdecoding", "system": "hpu"}, "flashdecoding on hpu"),
    ],
)
def test_what_tgi_does_not_have(fields: dict[str, str], name: str) -> None:
    with pytest.raises(
        UnsupportedError,
        match=f"attention and system are {name}, expected one of flashinfer on cuda, flashdecoding "
        "on cuda, flashdecoding on rocm, paged on cuda, ",
    ):
        spec_of(**fields)


def test_a_head_that_x_does_not_divide() -> None:
    with pytest.raises(
        InvalidArgumentError,
        match=r"head_dim is 20, expected a multiple of 8, TGI's x for torch\.float16 and paged on "
        "cuda: KVCache has no room for the rest",
    ):
        spec_of(head_dim=20)
    assert spec_of(head_dim=20, dtype=torch.float32).k_shape == (9, 2, 5, 16, 4)
    assert spec_of(head_dim=20, attention="flashdecoding").pack == 1


def test_an_unknown_dtype() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"dtype is torch\.int8, expected one of torch\.float16, torch\.bfloat16, "
        r"torch\.float32, torch\.float8_e4m3fn for paged on cuda$",
    ):
        spec_of(dtype=torch.int8)


@pytest.mark.parametrize("which", ["key_cache", "value_cache"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.bfloat16(), r"\.dtype is torch\.bfloat16, expected torch\.float16$"),
        (lambda t: t[1:], r"\.shape is \(8, 256, 2, 64\), expected \(9, 256, 2, 64\) for flashdec"),
        (
            lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
            r"\.stride is \(32768, 64, 16384, 1\), expected contiguous, as KVCache allocates it",
        ),
        (
            lambda t: t.to("meta"),
            r"\.device is meta, expected cpu or cuda: KVX reaches no other memory\. Pass a copy on",
        ),
    ],
    ids=["dtype", "shape", "stride", "device"],
)
def test_a_tensor_that_is_not_what_the_spec_says(which: str, change: Any, sentence: str) -> None:
    cache = Cache("flashdecoding", "cuda", "cuda")
    tensors = {"key_cache": cache.key, "value_cache": cache.value}
    tensors[which] = change(tensors[which])
    with pytest.raises((InvalidArgumentError, UnsupportedError), match=which + sentence):
        tgi.cache_desc(**tensors, spec=cache.spec())


def test_one_tensor_is_not_two() -> None:
    cache = Cache("flashdecoding", "cuda", "cuda")
    with pytest.raises(
        InvalidArgumentError,
        match=r"^value_cache is in the memory of key_cache, expected a tensor of its own: KVCache",
    ):
        tgi.cache_desc(cache.key, cache.key, cache.spec())


def test_one_shape_with_two_meanings() -> None:
    """(9, 64, 64, 64) is NHD on XPU and HND on a CPU: the spec decides, never the shape."""
    on_cpu = Cache("flashdecoding-ipex", "ipex", "cpu", num_heads=64)
    on_xpu = Cache("flashdecoding-ipex", "ipex", "xpu", num_heads=64)
    assert on_cpu.shapes() == on_xpu.shapes()
    assert describe_cache(on_cpu).k.layout is Layout.BLOCK_HND
    assert describe_cache(on_xpu).k.layout is Layout.BLOCK_NHD


def test_the_views_of_the_tests_are_not_what_is_tested() -> None:
    """The double against torch's own indexing, where TGI's store is an index_put."""
    cache = Cache("flashdecoding", "cuda", "cuda")
    key, value = random_tokens(1, 2, 2, 64)
    cache.store(300, key, value)
    assert torch.equal(cache.key.view(-1, 2, 64)[300], key)
    assert torch.equal(cache.value.view(-1, 2, 64)[300], value)
    paged = Cache("paged", "cuda", "cuda")
    paged.store(35, key, value)
    assert torch.equal(paged.key[2, :, :, 3].reshape(2, 64), key)
    assert torch.equal(paged.value[2, :, :, 3], value)
    assert describe(paged.key, Layout.BLOCK_HND_PACKED).shape == (9, 2, 8, 16, 8)


def test_a_span_holds_what_generate_token_has_stored() -> None:
    """Between steps input_lengths are those of the next step, whose tokens are not there yet."""
    caches = [Cache("paged", "cuda", "cuda", num_blocks=9) for _ in range(2)]
    for layer in caches:
        layer.key.normal_()
        layer.value.normal_()
    requests = [SimpleAllocator(caches[0]).allocate(n) for n in (20, 5)]
    batch: Any = Batch.of(requests, input_lengths=[1, 1], cache_lengths=[19, 4])
    batch.cache_lengths_tensor = batch.cache_lengths
    spec = caches[0].spec()
    facts = tgi.cache_facts(spec, fingerprint="f", rotary="none", rotary_dim=0, num_layers=2)
    view = tgi.cache_view([(c.key, c.value) for c in caches], spec, facts)
    there = [Cache("flashdecoding", "cuda", "cuda", num_blocks=3) for _ in range(2)]
    theirs = tgi.cache_view([(c.key, c.value) for c in there], there[0].spec(), facts)
    span, dst = tgi.span(view, batch), theirs.at(block_table=[[2], [1]])
    migrate(span, dst, [19, 4])
    for slot, at in ((requests[0][1][18], 2 * 256 + 18), (requests[1][1][3], 256 + 3)):
        assert torch.equal(there[1].load(at)[0], caches[1].load(slot)[0])
    for i, more in ((0, [20, 4]), (1, [19, 5])):
        error = f"src holds {[19, 4][i]} tokens of sequence {i} by its engine's own count"
        with pytest.raises(OutOfRangeError, match=error):
            migrate(span, dst, more)
    batch.cache_lengths_tensor = torch.tensor([20, 5])
    migrate(span, dst, [20, 5])


def test_a_span_of_a_window_that_has_gone_round_is_refused() -> None:
    """Its table has fewer blocks than tokens; what is behind them is memory of others."""
    cache = Cache("paged", "cuda", "cuda", num_blocks=12)
    allocator = SimpleAllocator(cache, window=30)
    requests = [allocator.allocate(40), SimpleAllocator(cache, seed=1).allocate(60)]
    batch: Any = Batch.of(requests, input_lengths=[1, 1], cache_lengths=[39, 59])
    batch.cache_lengths_tensor = batch.cache_lengths
    batch.block_tables_tensor[0, 2:] = 5  # memory that is not initialised may look like a block
    spec = cache.spec()
    facts = tgi.cache_facts(spec, fingerprint="f", rotary="none", rotary_dim=0, num_layers=1)
    view = tgi.cache_view([(cache.key, cache.value)], spec, facts)
    there = Cache("flashdecoding", "cuda", "cuda", num_blocks=3)
    theirs = tgi.cache_view([(there.key, there.value)], there.spec(), facts)
    span, dst = tgi.span(view, batch), theirs.at(block_table=[[2], [1]])
    for ends in ((span, dst), (dst, span)):
        with pytest.raises(InvalidArgumentError) as raised:
            migrate(*ends, [39, 59])
        assert "request 0 has 39 tokens in blocks for 32, expected" in str(raised.value)
    batch.cache_lengths_tensor = torch.tensor([32, 59], dtype=torch.int32)  # before it goes round
    migrate(span, dst, [32, 59])


# ---- ways out ----

FP8 = torch.float8_e4m3fn


def of_scales(*scales: KVScales) -> CacheView:
    cache = Cache("flashinfer", "cuda", "cuda", dtype=FP8)
    pairs = [(cache.key, cache.value)]
    return tgi.cache_view(pairs, cache.spec(), SAME_MODEL, kv_scales=scales)


def paged_scales(scale: float) -> CacheView:
    cache = Cache("paged", "cuda", "cuda", dtype=FP8)
    scales = [KVScales.of(scale, scale)]
    return tgi.cache_view([(cache.key, cache.value)], cache.spec(), SAME_MODEL, kv_scales=scales)


def elsewhere(device: str) -> None:
    cache = Cache("paged", "cuda", "cuda")
    tgi.cache_desc(cache.key.to(device), cache.value.to(device), cache.spec()).validate()


def values_of(cache: Cache, value: Tensor) -> None:
    tgi.cache_desc(cache.key, value, cache.spec()).validate()


def one_cache() -> Cache:
    return Cache("flashdecoding", "cuda", "cuda")


class Ring:
    """A request of 60 tokens whose window of 40 has gone round its 3 blocks of 16."""

    def __init__(self) -> None:
        self.cache = Cache("paged", "cuda", "cuda", num_blocks=12)
        self.tokens = random_tokens(5, 60, 2, 2, 64)
        allocator = SimpleAllocator(self.cache, window=40)
        self.batch: Any = Batch.of([allocator.allocate(61)], [1], [60])
        self.batch.cache_lengths_tensor = self.batch.cache_lengths
        for slot, (key, value) in zip(self.batch.slots.tolist(), self.tokens, strict=False):
            self.cache.store(slot, key, value)

    def into_dense(self, source: Any, first: int) -> None:
        """Moves tokens `first` to 60 and compares them with those of the request."""
        there = Cache("flashdecoding", "cuda", "cuda", num_blocks=3)
        migrate(source, view_of(there).at([[2]]), [60 - first])
        for i in range(60 - first):
            pairs = zip(there.load(2 * 256 + i), self.tokens[first + i], strict=True)
            assert all(torch.equal(found, token) for found, token in pairs)

    def by_table(self) -> None:
        self.into_dense(tgi.span(view_of(self.cache), self.batch), 0)

    def by_slots(self) -> None:
        ends, starts = torch.tensor([60]), torch.tensor([20])
        slots = tgi.request_slots(self.batch.slots, self.batch.cu_slots, ends, starts)
        self.into_dense(view_of(self.cache).at(slots=tgi.slot_mapping(slots)), 20)

    def written(self, first: int) -> None:
        """The slots of tokens `first` to 60, to be written."""
        ends, starts = torch.tensor([60]), torch.tensor([first])
        slots = tgi.request_slots(self.batch.slots, self.batch.cu_slots, ends, starts)
        tgi.slot_mapping(slots, shared=torch.empty(0, dtype=torch.int64))


def table_of(cache: Cache, *, ragged: bool) -> None:
    batch = Batch.of([SimpleAllocator(cache).allocate(20)], [1], [19])
    if ragged:
        tgi.ragged(*batch.ragged(), spec=cache.spec())
    else:
        view_of(cache).at(tgi.block_table(batch.block_tables_tensor))


def behind_a_prefix(first: int) -> None:
    """Writes tokens from `first` on of a request whose first 16 others read, too."""
    slots, cu_slots = torch.arange(32, 72), torch.tensor([0, 40])
    shared = tgi.request_slots(slots, cu_slots, torch.tensor([16]))
    own = tgi.request_slots(slots, cu_slots, torch.tensor([40]), torch.tensor([first]))
    tgi.slot_mapping(own, shared=shared)


def slots_of(num_slots: int) -> None:
    tgi.request_slots(torch.arange(num_slots), torch.tensor([0, 4, 10]), torch.tensor([4, 6]))


WAYS_OUT = [
    WayOut(
        "expected one of ... for paged on cuda: KVCache.store lets the kernel write 16-bit "
        "elements into it",
        lambda: spec_of(dtype=torch.float8_e5m2),
        lambda: [spec_of(dtype=dtype) for dtype in (torch.float16, torch.bfloat16, FP8)],
    ),
    WayOut(
        "expected a multiple of 8, TGI's x for torch.float16 and paged on cuda: KVCache has no "
        "room for the rest",
        lambda: spec_of(head_dim=20),
        lambda: spec_of(head_dim=24),
    ),
    WayOut(
        "KVX reaches no other memory. Pass a copy on the host",
        lambda: elsewhere("meta"),
        lambda: elsewhere("cpu"),
    ),
    WayOut(
        "expected a tensor of its own: KVCache.value",
        lambda: values_of(cache := one_cache(), cache.key),
        lambda: values_of(cache := one_cache(), cache.value),
    ),
    WayOut("its attention's kv_scales", of_scales, lambda: of_scales(KVScales.of(0.5, 2.0))),
    WayOut(
        "expected 1.0 for paged on cuda: KVCache.store gives FP8 keys to a kernel that takes none",
        lambda: paged_scales(0.5),
        lambda: paged_scales(1.0),
    ),
    WayOut(
        "which a block table cannot describe. Give the slots of the tokens that it still has: "
        "request_slots(slots, cu_slots, ends, starts)",
        lambda: Ring().by_table(),
        lambda: Ring().by_slots(),
    ),
    WayOut(
        "expected each slot once: a window is cyclic. Write its last tokens alone",
        lambda: Ring().written(0),
        lambda: Ring().written(20),
    ),
    WayOut(
        "not a block per token. Use block_table",
        lambda: table_of(one_cache(), ragged=True),
        lambda: table_of(one_cache(), ragged=False),
    ),
    WayOut(
        "expected a slot of one request alone. Write its tokens from prefix_len on",
        lambda: behind_a_prefix(0),
        lambda: behind_a_prefix(16),
    ),
    WayOut(
        "expected at most 9, the number of slots: give both of one batch",
        lambda: slots_of(9),
        lambda: slots_of(10),
    ),
]


@pytest.mark.parametrize("case", WAYS_OUT, ids=str)
def test_each_way_out_leads_out(case: WayOut) -> None:
    leads_out(case)
