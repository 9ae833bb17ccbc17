"""kvx_adapters.mlx against mlx-lm on CPU, in every class of cache; four traps of MLX's memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)

from kvx_adapters import mlx as adapter
from kvx_adapters import transformers as hf
from kvx_adapters.cli.engines.live_mlx import Live, facts, mlx_model
from kvx_adapters.cli.engines.live_transformers import Live as HF
from kvx_core import (
    FactsMismatchError,
    InvalidArgumentError,
    OutOfRangeError,
    UnsupportedError,
    borrow,
    migrate,
    verify,
)
from tests.documents import Document
from tests.engines import tiny_model
from tests.engines.live import check_alone_and_zeros, check_there_and_back, hop
from tests.engines.tiny_model import tiny
from tests.ways_out import WayOut, leads_out

COUNT = 12
HEADS, DIM = tiny_model.NUM_KV_HEADS, tiny_model.HEAD_DIM


def prefilled(num_tokens: int) -> HF:
    """All but the last token of a prompt, in transformers."""
    found = HF(tiny())
    found.prefill(tiny_model.prompt(num_tokens)[:-1])
    return found


@pytest.mark.parametrize("num_tokens", [2, 37, 258])
def test_a_sequence_moves_there_and_back(num_tokens: int) -> None:
    """From 258 tokens on, the cache grows while it decodes nothing; with 257 held it has 512."""
    check_there_and_back(Live(tiny()), num_tokens)


def test_decoding_in_allocated_room_moves_no_array() -> None:
    there = Live(tiny())
    hop(prefilled(37), there)
    at = borrow(there.cache[0].keys).data
    there.decode(4, after=tiny_model.prompt(37)[-1])
    assert borrow(there.cache[0].keys).data == at


def test_the_engine_alone_and_a_cache_of_zeros() -> None:
    check_alone_and_zeros("mlx")


def test_a_batch_padded_on_the_left() -> None:
    """Rows of 99 and 60 tokens, from two caches of transformers."""
    cache: list[Any] = [BatchKVCache([0, 39]) for _ in range(tiny_model.NUM_LAYERS)]
    for layer in cache:
        layer.keys, layer.values = (mx.zeros((2, HEADS, 256, DIM)) for _ in "kv")
        layer._idx, layer.offset = 99, mx.array([99, 60])
    assert adapter.seq_lens(cache).to_numpy().tolist() == [99, 60]
    span = adapter.span(cache, facts(tiny()))
    for row, (length, pad) in enumerate(((99, 0), (60, 39))):
        move = span.view.at(block_table=[[row]], starts=[pad], first_positions=-pad)
        source = prefilled(length + 1)
        migrate(source.view(), move, [length])
        for layer, there in zip(source.cache.layers, cache, strict=True):  # token by token
            for tokens, array in ((layer.keys, there.keys), (layer.values, there.values)):
                assert np.array_equal(tokens[0].numpy(), np.asarray(array)[row, :, pad:99])
    del span, move, there, array
    tokens = [[tiny_model.prompt(100)[-1]], [tiny_model.prompt(61)[-1]]]
    found: list[list[int]] = []
    for _ in range(COUNT):
        logits = mlx_model(tiny())(mx.array(tokens), cache=cache)
        tokens = mx.argmax(logits[:, -1], -1)[:, None].tolist()
        found.append([token for (token,) in tokens])
    assert [a for a, _ in found] == list(tiny_model.greedy(100, COUNT))
    assert [b for _, b in found] == list(tiny_model.greedy(61, COUNT))


def test_eight_bits_are_written_as_mlx_quantizes_them() -> None:
    source, engine = prefilled(100), Live(tiny(), kind=partial(QuantizedKVCache, 32, 8))
    engine.reserve(99)
    migrate(source.view(), engine.view(), [99])
    for layer, quantized in zip(source.cache.layers, engine.cache, strict=True):
        for given, half in ((layer.keys, quantized.keys), (layer.values, quantized.values)):
            want = mx.quantize(mx.array(given.numpy()), group_size=32, bits=8)
            for got, part in zip(half, want, strict=True):
                assert mx.array_equal(got[:, :, :99], part)
    first = engine.decode(1, after=tiny_model.prompt(100)[-1])
    assert first == list(tiny_model.greedy(100, 1))


# ---- tokens that are not all there, or not in order ----


def numbered(layer: Any, *counts: int) -> Any:
    """A cache into which runs of tokens went, whose keys are their positions and values twice."""
    first = 0
    for count in counts:
        keys = mx.broadcast_to(
            mx.arange(first, first + count, dtype=mx.float32)[None, None, :, None],
            (1, HEADS, count, DIM),
        )
        layer.update_and_fetch(mx.contiguous(keys), mx.contiguous(2 * keys))
        first += count
    return layer


def read(layer: Any, first: int | None = None, *, kept: bool = False) -> list[float]:
    """The keys of the tokens in the order of their positions, through KVX."""
    one = [layer]
    length = int(adapter.seq_lens(one, first=first, kept=kept).to_numpy()[0])
    dst: list[Any] = [KVCache()]
    adapter.reserve(dst, batch_size=1, num_tokens=length, num_kv_heads=HEADS, head_dim=DIM)
    migrate(
        adapter.span(one, facts(tiny()), first=first, kept=kept),
        adapter.span(dst, facts(tiny())),
        [length],
        new_positions=True,  # the numbers are looked at, and no query attends to them
    )
    keys, values = (np.asarray(half)[0, 0, :length, 0] for half in (dst[0].keys, dst[0].values))
    assert np.array_equal(2 * keys, values)
    found: list[float] = keys.tolist()
    return found


@pytest.mark.parametrize(
    ("keep", "counts", "kept", "held"),
    [
        (2, [1] * 5, [], range(5)),  # nothing was dropped: 0 and 1 are among the others
        (2, [1] * 8, [], range(8)),
        (2, [1] * 9, [0, 1], range(3, 9)),
        (2, [1] * 12, [0, 1], range(6, 12)),
        (2, [1] * 14, [0, 1], range(8, 14)),
        (2, [8], [], range(8)),
        (2, [12], [0, 1], range(6, 12)),  # the others are there, and never read again
        (2, [12, 1], [0, 1], range(7, 13)),
        (2, [12, 1, 1, 1], [0, 1], range(9, 15)),
        (2, [12, 5], [0, 1], range(11, 17)),
        (0, [5, 12], [], range(9, 17)),
        (0, [1] * 13, [], range(5, 13)),
        (4, [9, 1, 1, 1], [0, 1, 2, 3], range(8, 12)),
    ],
)
def test_a_ring_is_read_in_order(
    keep: int, counts: list[int], kept: list[int], held: range
) -> None:
    layer = numbered(RotatingKVCache(max_size=8, keep=keep), *counts)
    assert adapter.positions(layer) == held
    assert adapter.num_kept(layer) == len(kept)
    assert read(layer) == list(held)
    assert read(layer, first=held.stop - 3) == list(held)[-3:]
    assert read(layer, kept=True) == [*kept, *held]
    assert read(layer, first=held.stop - 3, kept=True) == [*kept, *list(held)[-3:]]


def test_a_row_of_a_batch_of_rings_holds_no_padding() -> None:
    """Right padding that finalize() rolls to the front is older than what the window reads."""
    batch = BatchRotatingKVCache(10, [0])
    keys = mx.arange(1, 16).astype(mx.float32).reshape(1, 1, 15, 1) * mx.ones((1, HEADS, 15, DIM))
    batch.update_and_fetch(keys[:, :, :10], 2 * keys[:, :, :10])
    batch.prepare(lengths=[4], right_padding=[1])
    batch.update_and_fetch(keys[:, :, 10:], 2 * keys[:, :, 10:])  # 4 tokens and a padding
    batch.finalize()
    row = batch.extract(0)
    assert adapter.positions(row) == range(4, 14)
    assert read(row) == [position + 1.0 for position in range(4, 14)]


def test_a_ring_that_is_empty_keeps_nothing() -> None:
    layer = RotatingKVCache(max_size=8, keep=4)
    assert adapter.positions(layer) == range(0)
    assert adapter.num_kept(layer) == 0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_kept_tokens_move_to_another_ring(seed: int) -> None:
    """Both have dropped tokens; afterwards the second attends to what the first one does."""
    more = 3 + 5 * seed
    src = numbered(RotatingKVCache(max_size=8, keep=4), 9, *[1] * more)
    dst = numbered(RotatingKVCache(max_size=8, keep=4), *[1] * (9 + more))
    dst.keys, dst.values = mx.full(dst.keys.shape, -1.0), mx.full(dst.values.shape, -1.0)
    ends = [adapter.span([layer], facts(tiny()), kept=True) for layer in (src, dst)]
    migrate(*ends, adapter.seq_lens([src], kept=True))
    del ends
    for half in ("keys", "values"):
        want, got = (np.asarray(getattr(layer, half))[0, :, :8] for layer in (src, dst))
        assert sorted(got[0, :, 0]) == sorted(want[0, :, 0])
    for token in range(9 + more, 12 + more):  # they go on alike
        new = mx.full((1, HEADS, 1, DIM), float(token))
        pairs = [layer.update_and_fetch(new, new) for layer in (src, dst)]
        keys = [sorted(np.asarray(pair[0])[0, 0, :, 0].tolist()) for pair in pairs]
        assert keys[0] == keys[1]
        assert keys[0][:4] == [0, 1, 2, 3]


def test_kept_tokens_say_no_positions() -> None:
    """They do not go on, so that an engine without positions takes them; the others do."""
    layer = numbered(RotatingKVCache(max_size=8, keep=2), *[1] * 12)
    there = adapter.span(right(1, 8), facts(tiny()))
    migrate(adapter.span([layer], facts(tiny()), kept=True), there, [8])
    with pytest.raises(FactsMismatchError, match="moves from position 6 at the source to position"):
        migrate(adapter.span([layer], facts(tiny())), there, [6])
    none_kept = numbered(RotatingKVCache(max_size=8), *[1] * 12)
    with pytest.raises(FactsMismatchError, match="moves from position 4 at the source to position"):
        migrate(adapter.span([none_kept], facts(tiny()), kept=True), there, [8])


def test_a_chunk_begins_where_it_was_cut() -> None:
    layer = numbered(ChunkedKVCache(8), 12)
    assert read(layer) == list(range(12))
    layer.maybe_trim_front()
    assert adapter.positions(layer) == range(4, 12)
    assert read(layer) == list(range(4, 12))
    assert read(layer, first=10) == [10, 11]
    with pytest.raises(InvalidArgumentError, match=r"first is 3, expected .* holds: 4 to 11"):
        adapter.span([layer], facts(tiny()), first=3)


def right_padded(lengths: list[int], num_layers: int = 1) -> list[Any]:
    """A batch that mlx-lm is computing: its shorter rows end with padding, of keys -1.

    Row r has the keys 100 r, 100 r + 1, ... and values twice.
    Source: mlx-lm 0.32.2 generate.py, BatchGenerator._process_prompts
    """
    longest = max(lengths)
    keys = [[100 * r + t if t < n else -1 for t in range(longest)] for r, n in enumerate(lengths)]
    array = mx.broadcast_to(
        mx.array(keys, mx.float32)[:, None, :, None], (len(lengths), HEADS, longest, DIM)
    )
    cache: list[Any] = [BatchKVCache([0] * len(lengths)) for _ in range(num_layers)]
    for layer in cache:
        layer.prepare(lengths=lengths, right_padding=[longest - n for n in lengths])
        layer.update_and_fetch(mx.contiguous(array), mx.contiguous(2 * array))
    return cache


def rows(cache: list[Any]) -> list[list[float]]:
    """The keys of each row of a batch, through KVX."""
    found: list[list[float]] = []
    lengths = adapter.seq_lens(cache).to_numpy().tolist()
    dst: list[Any] = [KVCache() for _ in cache]
    room = {"batch_size": len(lengths), "num_tokens": max(lengths)}
    adapter.reserve(dst, **room, num_kv_heads=HEADS, head_dim=DIM)
    migrate(adapter.span(cache, facts(tiny())), adapter.span(dst, facts(tiny())), lengths)
    for row, length in enumerate(lengths):
        keys, values = (np.asarray(h)[row, 0, :length, 0] for h in (dst[-1].keys, dst[-1].values))
        assert np.array_equal(2 * keys, values)
        found.append(keys.tolist())
    return found


@pytest.mark.parametrize("lengths", [[5, 3], [1, 7, 4], [6, 6, 2, 5, 1, 3, 6, 2, 4]])
def test_a_batch_that_is_not_finalized_is_refused(lengths: list[int]) -> None:
    """Until finalize() its counts hold the padding, and the tokens of its rows lie elsewhere."""
    cache = right_padded(lengths)
    padding = [max(lengths) - n for n in lengths]
    error = rf"\[0\] has right padding \{padding}, which it counts .* Call finalize\(\)"
    for call in (
        lambda: adapter.cache_view(cache, facts(tiny())),
        lambda: adapter.span(cache, facts(tiny())),
        lambda: adapter.seq_lens(cache),
    ):
        with pytest.raises(InvalidArgumentError, match="cache" + error):
            call()
    with pytest.raises(InvalidArgumentError, match="layer has right padding"):
        adapter.cache_desc(cache[0])
    cache[0].finalize()
    assert rows(cache) == [[100.0 * r + t for t in range(n)] for r, n in enumerate(lengths)]


def test_a_layer_that_is_not_finalized_is_found_among_others() -> None:
    cache = right_padded([5, 3], num_layers=3)
    for layer in cache[:2]:
        layer.finalize()
    for call in (partial(adapter.span, cache, facts(tiny())), partial(adapter.seq_lens, cache)):
        with pytest.raises(InvalidArgumentError, match=r"cache\[2\] has right padding \[0, 2\]"):
            call()
    cache[2].finalize()
    assert rows(cache) == [[0, 1, 2, 3, 4], [100, 101, 102]]


def test_a_view_is_refused_while_its_batch_is_prepared() -> None:
    """The next chunk of a prompt is being computed in rows that were described before."""
    cache = right_padded([5, 3])
    cache[0].finalize()
    span, dst = adapter.span(cache, facts(tiny())), adapter.span(right(2, 5), facts(tiny()))
    migrate(span, dst, [5, 3])
    cache[0].prepare(lengths=[1, 2], right_padding=[1, 0])
    for ends in ((span, dst), (dst, span)):
        with pytest.raises(InvalidArgumentError, match=r"cache\[0\] has right padding \[1, 0\]"):
            migrate(*ends, [5, 3])


def right(num_rows: int, num_tokens: int) -> list[Any]:
    cache: list[Any] = [KVCache()]
    sizes = {"batch_size": num_rows, "num_tokens": num_tokens}
    adapter.reserve(cache, **sizes, num_kv_heads=HEADS, head_dim=DIM)
    return cache


def trimmed(layer: Any) -> None:
    layer.trim(2)


def stepped_back(layer: Any) -> None:
    layer._idx -= 1


@pytest.mark.parametrize(
    ("kind", "change", "name"),
    [
        (KVCache, trimmed, "offset is 3, expected 5"),
        (partial(ChunkedKVCache, 8), trimmed, "offset is 3, expected 5"),
        (partial(QuantizedKVCache, 64, 8), trimmed, "offset is 3, expected 5"),
        (partial(RotatingKVCache, 8), trimmed, "offset is 3, expected 5"),
        (partial(RotatingKVCache, 8), stepped_back, "_idx is 4, expected 5"),
        (partial(BatchKVCache, [0]), trimmed, r"offset is \[3\], expected \[5\]"),
    ],
)
def test_a_view_is_refused_when_its_tokens_are_others(kind: Any, change: Any, name: str) -> None:
    """A trim moves no array: only the counts say that tokens are gone."""
    cache = [numbered(kind(), 5)]
    known = facts(tiny(), quantized=isinstance(cache[0], QuantizedKVCache))
    view = adapter.cache_view(cache, known)
    change(cache[0])
    with pytest.raises(InvalidArgumentError, match=rf"out of date: cache\[0\]\.{name} as when"):
        migrate(view.at(), adapter.span(right(1, 5), facts(tiny())), [3])


def cut_chunk() -> Any:
    """The tokens 4 to 12, at slots 0 to 8."""
    layer = numbered(ChunkedKVCache(8), 12)
    layer.maybe_trim_front()
    return numbered(layer, 1)


@pytest.mark.parametrize(
    ("layer", "held"),
    [
        (numbered(KVCache(), 5), 5),
        (numbered(QuantizedKVCache(64, 8), 5), 5),
        (cut_chunk(), 9),
        (numbered(RotatingKVCache(8), 5), 5),
        (numbered(RotatingKVCache(8), *[1] * 5), 5),
        (numbered(RotatingKVCache(8), *[1] * 12), 8),
        (numbered(BatchKVCache([0]), 5), 5),
    ],
)
def test_no_more_tokens_than_a_cache_counts(layer: Any, held: int) -> None:
    """There is room for 256, or for what the ring has, and the numbers behind are anything."""
    known = facts(tiny(), quantized=isinstance(layer, QuantizedKVCache))
    view, there = adapter.cache_view([layer], known), adapter.span(right(1, 10), facts(tiny()))
    error = rf"holds {held} tokens of sequence 0 by its engine's own count, expected at least"
    if view.layers[0].k.shape[2] > held:
        for ends in ((view.at(), there), (there, view.at())):
            with pytest.raises(OutOfRangeError, match=error):
                migrate(*ends, [held + 1])
    migrate(view.at(), there, [held])


def test_the_least_of_the_layers_counts_and_is_asked_again() -> None:
    cache: list[Any] = [numbered(KVCache(), n) for n in (6, 4, 5)]
    view, there = adapter.cache_view(cache, facts(tiny())), right(1, 9)
    there += right(1, 9) + right(1, 9)
    error = "src holds 4 tokens of sequence 0 by its engine's own count, expected at least 5"
    with pytest.raises(OutOfRangeError, match=error):
        migrate(view, adapter.span(there, facts(tiny())), [5])
    assert view.holds is not None
    assert view.holds() == 4
    cache[2].trim(3)
    assert view.holds() == 2


# ---- prompt cache files ----


@pytest.mark.parametrize("kind", [KVCache, partial(QuantizedKVCache, 64, 8)])
def test_a_prompt_cache_file_holds_what_was_migrated(tmp_path: Path, kind: Any) -> None:
    engine, back = Live(tiny(), kind=kind), HF(tiny())
    engine.reserve(99)
    migrate(prefilled(100).view(), engine.view(), [99])
    name = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(name, engine.cache)
    loaded = load_prompt_cache(name)
    src = adapter.span(loaded, facts(tiny(), quantized=engine.quantized))
    back.reserve(99)
    migrate(src, back.view(), [99])
    ids = tiny_model.prompt(100)
    assert back.decode(3, after=ids[-1]) == list(tiny_model.greedy(100, 3))


@pytest.mark.parametrize("counts", [[12], [1] * 12])
@pytest.mark.parametrize("kind", [partial(RotatingKVCache, 8, 2), partial(ChunkedKVCache, 8)])
def test_rings_and_chunks_in_a_file(tmp_path: Path, kind: Any, counts: list[int]) -> None:
    layer = numbered(kind(), *counts)
    if isinstance(layer, ChunkedKVCache):
        layer.maybe_trim_front()
    name = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(name, [layer])
    (loaded,) = load_prompt_cache(name)
    assert adapter.positions(loaded) == adapter.positions(layer)
    assert read(loaded) == list(adapter.positions(layer))


# ---- memory ----


def test_trap_1_a_view_holds_its_memory() -> None:
    """numpy.asarray of an array does not: it would read what others have put there."""
    cache = [numbered(KVCache(), 5)]
    view = adapter.cache_view(cache, facts(tiny()))
    cache.clear()
    mx.clear_cache()
    others = [mx.full((1, HEADS, 256, DIM), 3.25) for _ in range(4)]
    mx.eval(others)
    dst = [numbered(KVCache(), 1, 4)]
    mx.eval(dst[0].keys)
    np.asarray(dst[0].keys)[:] = 0
    migrate(replace(view, outdated=None), adapter.span(dst, facts(tiny())), [5])
    assert np.asarray(dst[0].keys)[0, 0, :5, 0].tolist() == [0, 1, 2, 3, 4]


def test_trap_2_a_view_is_refused_when_a_step_has_moved_the_cache() -> None:
    cache, dst = [numbered(KVCache(), 5)], [numbered(KVCache(), 5)]
    span = adapter.span(cache, facts(tiny()))
    numbered(cache[0], 1)
    mx.eval(cache[0].keys)
    for src, to in (
        (span, adapter.span(dst, facts(tiny()))),
        (adapter.span(dst, facts(tiny())), span),
    ):
        with pytest.raises(InvalidArgumentError, match=r"out of date: cache\[0\] has its keys"):
            migrate(src, to, [5])
    assert adapter.seq_lens(cache).to_numpy().tolist() == [6]
    migrate(adapter.span(cache, facts(tiny())), adapter.span(dst, facts(tiny())), [5])


def test_trap_3_lazy_arrays_are_evaluated_first() -> None:
    cache = [KVCache()]
    cache[0].keys, cache[0].values = (mx.full((1, HEADS, 8, DIM), x) + 1 for x in (1.0, 2.0))
    cache[0].offset = 8
    recorded = cache[0].keys * 10
    view = adapter.cache_view(cache, facts(tiny()))
    src: list[Any] = [KVCache()]
    src[0].keys, src[0].values = (mx.full((1, HEADS, 8, DIM), x) for x in (5.0, 6.0))
    src[0].offset = 8
    migrate(adapter.span(src, facts(tiny())), view, [8])
    assert float(np.asarray(cache[0].keys)[0, 0, 7, 0]) == 5
    assert float(np.asarray(cache[0].values)[0, 0, 7, 0]) == 6
    # Recorded before, evaluated after: it reads what was migrated.
    assert float(np.asarray(recorded)[0, 0, 7, 0]) == 50


def test_trap_4_repeated_memory_is_refused() -> None:
    cache = [KVCache()]
    cache[0].keys = cache[0].values = mx.broadcast_to(mx.array(1.0), (1, HEADS, 8, DIM))
    cache[0].offset = 8
    with pytest.raises(InvalidArgumentError, match=r"cache\[0\]\.keys\.stride\[1\] is 0, expected"):
        adapter.cache_view(cache, facts(tiny()))


# ---- refusals ----


def test_other_caches_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"cache\[0\] is a ArraysCache, expected one of KV"):
        adapter.cache_view([ArraysCache(2)], facts(tiny()))
    with pytest.raises(UnsupportedError, match="layers of ChunkedKVCache, KVCache, expected one"):
        adapter.cache_view([KVCache(), ChunkedKVCache(8)], facts(tiny()))
    with pytest.raises(InvalidArgumentError, match=r"cache\[0\]\.keys is None, expected"):
        adapter.cache_view([KVCache()], facts(tiny()))
    few = QuantizedKVCache(64, 4)
    few.update_and_fetch(*(mx.zeros((1, HEADS, 5, DIM)) for _ in "kv"))
    with pytest.raises(UnsupportedError, match=r"cache\[0\]\.bits is 4, expected 8"):
        adapter.cache_view([few], facts(tiny()))


def test_the_ways_out_of_a_batch_of_rings() -> None:
    """Its refusal names extract: each row is then a ring that is read in order."""
    cache = BatchRotatingKVCache(8, [0, 2])
    for t in range(12):
        keys = mx.broadcast_to(
            mx.array([t, 100 + t - 2], mx.float32)[:, None, None, None], (2, HEADS, 1, DIM)
        )
        cache.update_and_fetch(mx.contiguous(keys), mx.contiguous(2 * keys))
    error = r"cache\[0\] is a BatchRotatingKVCache, .* rows are rings, .* extract\(row\) gives a Ro"
    with pytest.raises(UnsupportedError, match=error):
        adapter.cache_view([cache], facts(tiny()))
    assert read(cache.extract(0)) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert read(cache.extract(1)) == [102, 103, 104, 105, 106, 107, 108, 109]


def test_the_ways_out_of_concatenated_arrays_and_lists() -> None:
    joined = numbered(ConcatenateKVCache(), 5, 1)
    joined.trim(2)
    with pytest.raises(
        UnsupportedError, match=r"ConcatenateKVCache, .* Take them into a KVCache: "
    ):
        adapter.cache_view([joined], facts(tiny()))
    plain = KVCache.from_state((joined.keys, joined.values, joined.offset))
    assert read(plain) == [0, 1, 2, 3]
    several = CacheList(numbered(KVCache(), 5), numbered(RotatingKVCache(8), 1))
    with pytest.raises(
        UnsupportedError, match=r"CacheList, .*: it holds several .*: \[c\[0\] for c"
    ):
        adapter.cache_view([several], facts(tiny()))
    assert (read(several[0]), read(several[1])) == ([0, 1, 2, 3, 4], [0])


def test_layers_of_other_lengths_are_refused() -> None:
    cache = [numbered(KVCache(), 5), numbered(KVCache(), 6)]
    with pytest.raises(InvalidArgumentError, match=r"cache\[1\] has offset 6 .* offset is 5"):
        adapter.span(cache, facts(tiny()))
    with pytest.raises(InvalidArgumentError, match=r"cache\[1\] has offset 6 .* offset is 5"):
        adapter.seq_lens(cache)


def batch(left_padding: list[int], num_tokens: int = 5) -> Any:
    """Rows whose keys and values are zero."""
    layer = BatchKVCache(left_padding)
    layer.keys, layer.values = (mx.zeros((len(left_padding), HEADS, 8, DIM)) for _ in "kv")
    layer._idx = num_tokens
    return layer


def rotated(max_size: int = 8, keep: int = 2, idx: int | None = None) -> Any:
    layer = numbered(RotatingKVCache(max_size, keep), *[1] * 7)
    layer._idx = idx or layer._idx
    return layer


def chunk(start: int) -> Any:
    layer = numbered(ChunkedKVCache(8), 5)
    layer.start_position = start
    return layer


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (rotated(), rotated(idx=5)),
        (rotated(), rotated(keep=3)),
        (rotated(), rotated(max_size=9)),
        (chunk(0), chunk(1)),
        (batch([0, 1]), batch([1, 0])),
        (batch([0, 1]), batch([0, 1], 4)),
        # mx writes the middle of longer arrays as dots
        (batch([0] * 9), batch([0] * 4 + [1] + [0] * 4)),
    ],
)
def test_layers_whose_tokens_lie_elsewhere_are_refused(first: Any, other: Any) -> None:
    """Their offsets may be equal: each count of a layer is compared."""
    for cache in ([first, other], [first, first, other]):
        for call in (partial(adapter.span, cache, facts(tiny())), partial(adapter.seq_lens, cache)):
            with pytest.raises(
                InvalidArgumentError, match=r"slots elsewhere, expected as cache\[0"
            ):
                call()


def test_a_batch_has_no_positions() -> None:
    batch = BatchKVCache([0, 1])
    with pytest.raises(UnsupportedError, match="each row has tokens of its own"):
        adapter.positions(batch)
    batch.update_and_fetch(*(mx.zeros((2, HEADS, 5, DIM)) for _ in "kv"))
    with pytest.raises(InvalidArgumentError, match="first is 1, expected None for a BatchKVCache"):
        adapter.span([batch], facts(tiny()), first=1)


def test_a_row_that_is_still_in_its_padding_holds_nothing() -> None:
    """mlx-lm computes long prompts in parts: of a short row the first part may be padding alone."""
    layers = tiny_model.NUM_LAYERS
    cache: list[Any] = [BatchKVCache([7, 0]) for _ in range(layers)]
    dst: list[Any] = [run(BatchKVCache([0, 0]), 2) for _ in range(layers)]
    for layer in cache:
        layer.update_and_fetch(*(mx.ones((2, HEADS, 3, DIM)) for _ in "kv"))
    lengths = adapter.seq_lens(cache)
    assert lengths.to_numpy().tolist() == [0, 3]
    migrate(adapter.span(cache, facts(tiny())), adapter.span(dst, facts(tiny())), lengths)
    for layer in dst:
        held = np.array(layer.keys)[:, 0, :5, 0]
        assert held.tolist() == [[0, 0, 0, 0, 0], [1, 1, 1, 0, 0]]
    with pytest.raises(InvalidArgumentError, match=r"keys.shape is .*, expected a slot at least"):
        adapter.cache_view([layer.extract(0) for layer in cache], facts(tiny()))


def test_reserve_wants_an_empty_cache_with_room_for_all_tokens() -> None:
    room = {"batch_size": 1, "num_tokens": 5, "num_kv_heads": HEADS, "head_dim": DIM}
    with pytest.raises(InvalidArgumentError, match=r"cache\[0\] holds 5 tokens, expected none"):
        adapter.reserve([numbered(KVCache(), 5)], **room)
    with pytest.raises(UnsupportedError, match=r"cache\[0\] is a RotatingKVCache, expected KVC"):
        adapter.reserve([RotatingKVCache(8)], **room)


def test_facts_say_what_was_given() -> None:
    found = adapter.cache_facts(
        rotary="interleaved", rotary_dim=32, num_layers=3, num_kv_heads=5, window=16, version="1"
    )
    assert (found.rotary, found.rotary_dim, found.window) == ("interleaved", 32, 16)
    assert (found.num_layers, found.total_kv_heads, found.engine) == (3, 5, "mlx-lm 1")
    assert found.lossy is None  # unless they say that the layers are quantized
    assert facts(tiny()).window == 0


def test_one_layer() -> None:
    layer = run(KVCache(), 2)
    desc = adapter.cache_desc(layer)
    assert (desc.k.shape, desc.v.shape) == ((2, HEADS, 256, DIM),) * 2
    assert (desc.k.data, desc.v.data) == (borrow(layer.keys).data, borrow(layer.values).data)
    assert adapter.num_kept(layer) == 0


@pytest.mark.parametrize(("num_tokens", "kept"), [(3, 0), (4, 0), (5, 1), (9, 1)])
def test_a_ring_that_keeps_one_token(num_tokens: int, kept: int) -> None:
    layer = RotatingKVCache(max_size=4, keep=1)
    for _ in range(num_tokens):
        layer.update_and_fetch(*(mx.zeros((1, HEADS, 1, DIM)) for _ in "kv"))
    assert adapter.num_kept(layer) == kept


def test_quantized_arrays_that_mlx_would_copy_are_refused() -> None:
    layer = run(QuantizedKVCache(64, 8))
    packed, *beside = layer.values
    apart = mx.contiguous(packed.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2)
    mx.eval(apart)
    layer.values = (apart, *beside)
    with pytest.raises(UnsupportedError, match=r"values\[0\] is strided so that MLX copies it"):
        viewed(layer)


def test_only_quantized_layers_have_scales() -> None:
    plain, packed = run(KVCache()), run(QuantizedKVCache(64, 8))
    for layer in (plain, packed):
        view = adapter.cache_view([layer], facts(tiny(), quantized=layer is packed))
        beside = (view.k_scales, view.v_scales, view.k_zeros, view.v_zeros)
        assert all((found is not None) is (layer is packed) for found in beside)


def test_facts_of_quantized_layers_are_lossy() -> None:
    assert facts(tiny(), quantized=True).lossy == "u8_bias"
    assert facts(tiny()).lossy is None
    assert hf.cache_facts(tiny_model.model()).rotary == facts(tiny()).rotary


def test_the_page() -> None:
    source, cache = prefilled(100).view(), [KVCache() for _ in range(tiny_model.NUM_LAYERS)]
    names = Document("mlx.md").run({"source": source, "cache": cache})
    assert verify(source, adapter.span(cache, names["facts"]), [99]).ok


# ---- ways out ----

ROOM: dict[str, Any] = {"batch_size": 1, "num_tokens": 5, "num_kv_heads": HEADS, "head_dim": DIM}


def viewed(*layers: Any) -> None:
    adapter.cache_view(layers, facts(tiny()))


def spanned(*layers: Any, first: int | None = None) -> None:
    adapter.span(layers, facts(tiny()), first=first)


def zeros(num_rows: int = 1) -> tuple[Any, Any]:
    return mx.zeros((num_rows, HEADS, 5, DIM)), mx.zeros((num_rows, HEADS, 5, DIM))


def run(layer: Any, num_rows: int = 1) -> Any:
    """A layer that a model has put 5 tokens into."""
    layer.update_and_fetch(*zeros(num_rows))
    return layer


def reserved(layer: Any) -> Any:
    adapter.reserve([layer], **ROOM)
    return layer


def with_state(layer: Any, *state: Any) -> Any:
    layer.state = state
    return layer


def of_keys(keys: Any) -> Any:
    layer = run(KVCache())
    layer.keys = keys
    return layer


def padded(*, finalized: bool) -> Any:
    (layer,) = right_padded([5, 3])
    if finalized:
        layer.finalize()
    return layer


def of_eight_bits(bits: int) -> Any:
    return run(QuantizedKVCache(64, bits))


def dequantized(layer: Any) -> Any:
    halves = (mx.dequantize(*half, layer.group_size, layer.bits) for half in layer.state[:2])
    return KVCache.from_state((*halves, layer.offset))


COUNTS_OF_A_RING = 5, 0, 8, 5  # offset, keep, max_size, _idx
REPEATED = mx.broadcast_to(mx.array(1.0), (1, HEADS, 256, DIM))
WAYS_OUT = [
    WayOut(
        "tokens of others lie elsewhere. Give the layers of one class at a time",
        lambda: viewed(run(KVCache()), run(ChunkedKVCache(8))),
        lambda: [viewed(run(KVCache())), viewed(run(ChunkedKVCache(8)))],
    ),
    WayOut(
        "Call reserve(cache, ...) or run the model once",
        lambda: viewed(KVCache()),
        lambda: [viewed(reserved(KVCache())), viewed(run(KVCache()))],
    ),
    WayOut(
        "its rows begin at left_padding",
        lambda: spanned(run(BatchKVCache([0, 2]), 2), first=1),
        lambda: spanned(run(BatchKVCache([0, 2]), 2)),
    ),
    WayOut(
        "each row has tokens of its own. Use span and seq_lens",
        lambda: adapter.positions(run(BatchKVCache([0, 2]), 2)),
        lambda: [
            spanned(run(BatchKVCache([0, 2]), 2)),
            adapter.seq_lens([run(BatchKVCache([0, 2]), 2)]),
        ],
    ),
    WayOut(
        "Set its state to arrays of mx.zeros, or run any prompt of as many tokens",
        lambda: reserved(RotatingKVCache(8)),
        lambda: [
            spanned(with_state(RotatingKVCache(8), *zeros(), *COUNTS_OF_A_RING)),
            spanned(run(RotatingKVCache(8))),
        ],
    ),
    WayOut(
        "Set its state to arrays of mx.zeros, or run any prompt of as many tokens",
        lambda: reserved(BatchKVCache([0])),
        lambda: [
            spanned(with_state(BatchKVCache([0]), *zeros(), mx.array([5]), mx.array([0]), 5)),
            spanned(run(BatchKVCache([0]))),
        ],
    ),
    WayOut(
        "holds 5 tokens, expected none. Pass a new one",
        lambda: reserved(run(KVCache())),
        lambda: reserved(KVCache()),
    ),
    WayOut(
        "Use QuantizedKVCache(bits=8), or mx.dequantize into a KVCache",
        lambda: viewed(of_eight_bits(4)),
        lambda: [viewed(of_eight_bits(8)), viewed(dequantized(of_eight_bits(4)))],
    ),
    WayOut(
        "the array repeats its memory. Make it with mx.zeros, or mx.contiguous, and evaluate it",
        lambda: viewed(of_keys(REPEATED)),
        lambda: [
            viewed(of_keys(keys)) for keys in (mx.zeros(REPEATED.shape), mx.contiguous(REPEATED))
        ],
    ),
    WayOut(
        "expected None. Call finalize() of all layers first",
        lambda: viewed(padded(finalized=False)),
        lambda: viewed(padded(finalized=True)),
    ),
]


@pytest.mark.parametrize("case", WAYS_OUT, ids=str)
def test_each_way_out_leads_out(case: WayOut) -> None:
    leads_out(case)


def test_rows_of_a_ring_have_slots_of_their_own() -> None:
    """Two sequences in one ring, whose keys are 10 and 20 times their positions."""
    layer = RotatingKVCache(max_size=8, keep=2)
    for position in range(11):
        keys = mx.array([10.0 * position, 20.0 * position])[:, None, None, None]
        keys = mx.contiguous(mx.broadcast_to(keys, (2, HEADS, 1, DIM)))
        layer.update_and_fetch(keys, 2 * keys)
    dst: list[Any] = [KVCache()]
    adapter.reserve(dst, batch_size=2, num_tokens=8, num_kv_heads=HEADS, head_dim=DIM)
    src = adapter.span([layer], facts(tiny()), kept=True)
    migrate(src, adapter.span(dst, facts(tiny())), [8, 8], new_positions=True)
    positions = [0, 1, *range(5, 11)]
    for row, factor in enumerate((10, 20)):
        assert np.asarray(dst[0].keys)[row, 0, :8, 0].tolist() == [factor * p for p in positions]
