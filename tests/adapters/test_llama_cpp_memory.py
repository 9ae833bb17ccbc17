"""What waits in a llama.cpp context for its next step is done before its cache is read; more tokens
than it holds are refused."""

from __future__ import annotations

import ctypes as c
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvx_adapters import llama_cpp
from kvx_adapters.cli.engines.live_llama_cpp import Context
from kvx_adapters.cli.engines.llama_cpp_abi import library
from kvx_adapters.cli.engines.llama_cpp_library import LIBLLAMA, folder
from kvx_adapters.llama_cpp import Memory, State
from kvx_adapters.llama_cpp.held import positions_held
from kvx_core import (
    CacheSpan,
    FactsMismatchError,
    InvalidArgumentError,
    OutOfRangeError,
    UnsupportedError,
    migrate,
    verify,
)
from tests.engines import tiny_model, windows_model
from tests.engines.tiny_model import tiny
from tests.engines.windows_model import windowed

HELD, FROM, TO = 20, 4, 9  # tokens 4 to 8 go; those behind move five positions to the front
LEFT = HELD - (TO - FROM)
Rows = dict[int, NDArray[np.float32]]  # keys or values of a layer by position


def computed(num_tokens: int = HELD, **options: Any) -> Context:
    context = Context(tiny(), **options)
    context.run(tiny_model.prompt(num_tokens))
    return context


def memory_of(context: Context) -> Any:
    return library().llama_get_memory(context.context)


def shift(context: Context) -> None:
    """Forgets some tokens and closes the gap, as a context that is full is shifted."""
    library().llama_memory_seq_rm(memory_of(context), 0, FROM, TO)
    library().llama_memory_seq_add(memory_of(context), 0, TO, -1, FROM - TO)
    del context.cells[0][FROM:TO], context.full_cells[0][FROM:TO]


def raw_state(context: Context, sequence: int = 0) -> bytes:
    """llama_state_seq_get_data and nothing else."""
    llama = c.CDLL(str(folder() / LIBLLAMA))
    size, get = llama.llama_state_seq_get_size, llama.llama_state_seq_get_data
    size.restype = get.restype = c.c_size_t
    size.argtypes = c.c_void_p, c.c_int32
    get.argtypes = c.c_void_p, c.c_char_p, c.c_size_t, c.c_int32
    data = c.create_string_buffer(size(context.context, sequence))
    assert get(context.context, data, len(data), sequence) == len(data)
    return data.raw


def in_state(data: bytes, num_caches: int = 1) -> list[tuple[Rows, Rows]]:
    """K and V of each layer of all caches, by position."""
    state = State.read(data, num_kv_heads=2, num_caches=num_caches)
    found = []
    for cells in state.caches:
        for layer in cells.layers:
            halves = [np.asarray(half.owner)[0] for half in (layer.k, layer.v) if half]
            k, v = (dict(zip(cells.positions.tolist(), rows, strict=True)) for rows in halves)
            found.append((k, v))
    return found


def through(span: CacheSpan, *seq_lens: int) -> list[tuple[Rows, Rows]]:
    """The same, of a span's tokens in their order, through a migration."""
    count = sum(seq_lens)
    sizes = {"num_layers": 4, "num_kv_heads": 2, "k_head_dim": 64, "v_head_dim": 64}
    made = State.new(count, **sizes, k_dtype="F32", v_dtype="F32", v_transposed=True)
    (cells,) = made.caches
    migrate(span, cells.span(span.view.facts), seq_lens)
    assert verify(span, cells.span(span.view.facts), seq_lens).ok
    return in_state(made.data.tobytes())


def are_equal(got: list[tuple[Rows, Rows]], want: list[tuple[Rows, Rows]]) -> bool:
    """Whether every token of `got` is in `want` with the same bytes."""
    return all(
        np.array_equal(rows[at], there[at])
        for ours, theirs in zip(got, want, strict=True)
        for rows, there in zip(ours, theirs, strict=True)
        for at in rows
    )


def common(
    rows: list[tuple[Rows, Rows]], after: list[tuple[Rows, Rows]]
) -> list[tuple[Rows, Rows]]:
    """Without the tokens that are not in `after`: a step moves the windows on."""
    return [
        ({at: k[at] for at in k if at in there}, {at: v[at] for at in v if at in there})
        for (k, v), (there, _) in zip(rows, after, strict=True)
    ]


@pytest.mark.parametrize("by", ["state", "span", "earlier span", "destination", "file"])
def test_a_shift_that_waits_is_done_first(by: str, tmp_path: Any) -> None:
    """Positions change at once, keys are rotated in the next step: both as after that step."""
    context, other = computed(), computed()
    earlier = context.cache()
    for one in (context, other):
        shift(one)
    waiting = in_state(raw_state(context))
    assert list(waiting[0][0]) == list(range(LEFT))
    other.run([7])
    after = in_state(raw_state(other))
    assert not are_equal(waiting, after)
    match by:
        case "state":
            found = in_state(context.memory.state())
        case "span":
            found = through(context.span(), LEFT)
        case "earlier span":
            span = llama_cpp.span(earlier, {0: context.cells[0]}, memory=context.memory)
            found = through(span, LEFT)
        case "file":
            context.save(tmp_path / "saved", [1])
            data = (tmp_path / "saved").read_bytes()
            found = in_state(data)
        case _:  # what is written must not be rotated by the step after it
            source = computed(LEFT)
            migrate(source.span(), context.span(), [LEFT])
            context.run([7])
            want = in_state(raw_state(source))
            found, after = common(in_state(raw_state(context)), want), want
    assert [len(k) for k, _ in found] == [LEFT] * 4
    assert are_equal(found, after)


def test_a_shift_of_both_caches_of_a_model_with_windows() -> None:
    def made() -> Context:
        context = Context(windowed(), architecture="olmo2")
        context.run(tiny_model.prompt(40))
        shift(context)
        return context

    context, other = made(), made()
    other.run([7])
    after = in_state(raw_state(other), num_caches=2)
    assert not are_equal(common(in_state(raw_state(context), 2), after), after)
    found = common(in_state(context.memory.state(), 2), after)
    assert [len(k) for k, _ in found] == [35] + [windows_model.WINDOW - 1] * 3
    assert are_equal(found, after)


@pytest.mark.parametrize("by", ["state", "span"])
def test_a_copy_between_streams_that_waits_is_done_first(by: str) -> None:
    """llama_memory_seq_cp gives positions at once, and keys and values in the next step."""
    context = Context(tiny(), num_sequences=2, unified=False)
    context.run(tiny_model.prompt(HELD), 0)
    context.run([9] * 3, 1)
    library().llama_memory_seq_cp(memory_of(context), 0, 1, -1, -1)
    room = context.cells[1][0]
    context.cells[1] = [room + i for i in range(HELD)]
    source = in_state(raw_state(context, 0))
    assert not are_equal(in_state(raw_state(context, 1)), source)
    of_state = by == "state"
    found = in_state(context.memory.state(1)) if of_state else through(context.span(1), HELD)
    assert [len(k) for k, _ in found] == [HELD] * 4
    assert are_equal(found, source)


def test_nothing_is_done_where_nothing_waits() -> None:
    context = computed()
    before = raw_state(context)
    context.memory.settle()
    assert context.memory.state() == before == raw_state(context)


# ---- tokens that a sequence holds ----


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(("first", "stop"), [(4, 9), (1, 2), (18, 19)])
def test_tokens_that_were_removed_from_the_middle(first: int, stop: int, unified: bool) -> None:
    """Without a shift: cells are free, and K of the tokens behind is as rotated as it was."""
    context, there = computed(num_sequences=3, unified=unified), computed()
    earlier = context.span()
    library().llama_memory_seq_rm(memory_of(context), 0, first, stop)
    del context.cells[0][first:stop]
    left = HELD - (stop - first)
    dst = there.cache().at(slots=there.cells[0][:left])
    (cells,) = State.read(context.memory.state(), num_kv_heads=2).caches
    assert cells.positions.tolist() == [*range(first), *range(stop, HELD)]
    before = in_state(raw_state(there))
    tries = (
        lambda: context.span(),
        lambda: migrate(earlier, there.span(), [HELD]),
        lambda: migrate(there.span(), earlier, [HELD]),
        lambda: verify(earlier, there.span(), [HELD]),
        lambda: migrate(cells.span(context.facts()), dst, [left]),
    )
    for one in tries:
        with pytest.raises(InvalidArgumentError) as raised:
            one()
        assert f"{left} tokens at the positions 0 to 19, expected one at each" in str(raised.value)
    assert are_equal(in_state(raw_state(there)), before)
    library().llama_memory_seq_add(memory_of(context), 0, stop, -1, first - stop)
    migrate(context.span(), dst, [left])
    assert verify(context.span(), dst, [left])


def test_tokens_that_were_removed_from_the_beginning() -> None:
    """Those that are left stand where they stood."""
    context, there, other = computed(), computed(), computed()
    earlier = context.span()
    for one in (context, other):
        library().llama_memory_seq_rm(memory_of(one), 0, 0, 5)
        del one.cells[0][:5]
    dst = there.cache().at(slots=there.cells[0][:15], first_positions=0)
    before = in_state(raw_state(there))
    with pytest.raises(InvalidArgumentError, match="sequence 0 began at position 0 when the span"):
        migrate(earlier, there.span(), [HELD])
    (cells,) = State.read(context.memory.state(), num_kv_heads=2).caches
    for span in (context.span(), cells.span(context.facts())):
        with pytest.raises(FactsMismatchError, match="sequence 0 moves from position 5 at the sou"):
            migrate(span, dst, [15])
    assert are_equal(in_state(raw_state(there)), before)
    migrate(context.span(), other.span(), [15])
    assert list(in_state(raw_state(other))[0][0]) == list(range(5, 20))
    last = context.span()
    context.remove(0)  # what is gone begins nowhere
    with pytest.raises(OutOfRangeError, match="src holds 0 tokens of sequence 0"):
        migrate(last, dst, [15])


def test_a_span_says_where_sequences_begin_if_it_has_all_their_cells() -> None:
    context = Context(tiny(), num_sequences=2, unified=True)
    context.run([1, 2, 3], 0)
    context.run([4, 5], 1)
    view, cells = replace(context.cache(), outdated=None), context.cells
    for count, begins in ((3, [0, 0]), (2, None)):
        some = {0: cells[0][:count], 1: cells[1]}
        span = llama_cpp.span(view, some, memory=context.memory)
        assert span.view.outdated is not None
        assert span.view.outdated() is None
        found = span.first_positions
        assert (found if found is None else np.asarray(found).tolist()) == begins


def test_cells_of_tokens_are_slots() -> None:
    assert np.asarray(llama_cpp.slot_mapping([3, 1, 7]).owner).tolist() == [3, 1, 7]


def test_a_view_of_some_layers_holds_what_all_do() -> None:
    """Its bytes say nothing of how many tokens a state has."""
    for num_tokens in range(1, 12):
        context = Context(tiny())
        context.run(tiny_model.prompt(num_tokens))
        for layers in (slice(0, 1), slice(0, 2), slice(1, 4)):
            view = context.cache(layers)
            span = llama_cpp.span(view, {0: context.cells[0]}, memory=context.memory)
            assert span.view.holds is not None
            assert span.view.holds() == [num_tokens]


def test_both_caches_of_a_model_with_windows_without_some_tokens() -> None:
    for first, stop, of_windows in ((4, 9, False), (30, 33, True)):
        context = Context(windowed(), architecture="olmo2")
        context.run(tiny_model.prompt(40))
        library().llama_memory_seq_rm(memory_of(context), 0, first, stop)
        full = context.cache(slice(3, 4), window=0), context.full_cells[0]
        del context.cells[0][first:stop]
        windows = context.cache(slice(0, 3)), context.cells[0]
        with pytest.raises(InvalidArgumentError, match="tokens at the positions 0 to 39, expected"):
            llama_cpp.span(full[0], {0: full[1]}, memory=context.memory)
        if of_windows:
            with pytest.raises(InvalidArgumentError, match="has 13 tokens at the positions 24 to"):
                llama_cpp.span(windows[0], {0: windows[1]}, memory=context.memory)
        else:
            llama_cpp.span(windows[0], {0: windows[1]}, memory=context.memory)


def test_a_span_of_tokens_that_were_shifted_since_is_refused() -> None:
    """The cells of the tokens that are gone are still among its own."""
    context, there = computed(), computed()
    span, dst = context.span(), there.cache().at(slots=there.cells[0][:LEFT])
    shift(context)
    before = in_state(raw_state(there))
    with pytest.raises(InvalidArgumentError, match="positions were shifted, or sequences copied"):
        migrate(span, dst, [LEFT])
    assert are_equal(in_state(raw_state(there)), before)
    migrate(context.span(), dst, [LEFT])
    assert verify(context.span(), dst, [LEFT]).ok


def test_the_order_of_the_sequences_is_that_of_the_cells() -> None:
    context = Context(tiny(), num_sequences=3, unified=True)
    for sequence, tokens in ((2, [1] * 3), (0, [2] * 4), (2, [3] * 2)):
        context.run(tokens, sequence)
    cells = {2: context.cells[2], 1: [], 0: context.cells[0]}
    span = llama_cpp.span(context.cache(), cells, memory=context.memory)
    want = [context.state(2), context.state(0)]
    states = [State.read(data, num_kv_heads=2).caches[0] for data in want]
    found = through(span, 5, 0, 4)[1][0]  # keys of layer 1, one sequence after the other
    keys = [np.asarray(cell.layers[1].k.owner)[0] for cell in states]
    assert np.array_equal(np.stack(list(found.values())), np.concatenate(keys))
    assert span.view.holds is not None
    assert span.view.holds() == [5, 0, 4]


# ---- refusals ----


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(tiny(), num_sequences=2)
    context.run([1, 2, 3])
    for sequence in (-1, 2, "0"):
        with pytest.raises(InvalidArgumentError, match=r"sequence is .*, 0 to 1|expected 0 to 1"):
            context.memory.positions(sequence)  # type: ignore[arg-type]
    update = "_ZN13llama_context13memory_updateEb"
    span = context.span()
    monkeypatch.setitem(context.memory._functions, update, lambda *_: True)
    with pytest.raises(
        InvalidArgumentError, match=r"llama\.cpp has not applied a shift of positions"
    ):
        context.memory.settle()
    with pytest.raises(
        InvalidArgumentError, match=r"src is out of date: llama.cpp has not applied"
    ):
        migrate(span, span, [3])
    monkeypatch.undo()
    monkeypatch.setitem(context.memory._functions, "llama_state_seq_get_data", lambda *_: 5)
    with pytest.raises(InvalidArgumentError, match="llama_state_seq_get_data wrote 5 bytes, expec"):
        context.memory.state()
    with pytest.raises(
        UnsupportedError, match="library has no _ZN13llama_context13memory_updateEb"
    ):
        Memory(c.CDLL("libc.so.6"), context.context)
    with pytest.raises(UnsupportedError, match=r"expected ctypes\.CDLL of the libllama"):
        Memory(None, context.context)


def test_a_library_is_used_as_it_is() -> None:
    context = computed()
    own = c.CDLL(str(folder() / LIBLLAMA))
    memory = Memory(own, c.c_void_p(context.context))
    assert memory.positions(0) == range(HELD)
    assert own.llama_n_seq_max.argtypes is None
    assert own.llama_n_seq_max.restype is c.c_int


@pytest.mark.parametrize(("held", "count"), [(1, 1), (7, 7), (8, 8), (9, 1), (16, 8), (21, 5)])
def test_a_layer_that_sees_its_chunk_holds_that(held: int, count: int) -> None:
    """Of chunks of 8 tokens (Llama 4) a state has those of the last one; fewer were removed."""
    context = computed(3)
    view = context.cache()
    view = replace(view, facts=replace(view.facts, window=8))
    ends = 8 + 4 + 4 * view.layers[0].num_blocks + 8 + 24 * len(view.layers)

    def found(num_cells: int) -> range:
        def state_bytes(sequence: int, *, windows: bool = False) -> int:
            return ends + num_cells * (12 + view.bytes_per_token()) + 1000 * (not windows)

        memory: Any = SimpleNamespace(
            positions=lambda sequence: range(held), state_bytes=state_bytes
        )
        return positions_held(memory, view, 0)

    assert found(count) == range(held)
    for wrong in {count - 1, count + 1} - {0, min(held, 8), min(held, 8) + 1}:
        with pytest.raises(InvalidArgumentError, match=rf"has {wrong} tokens? at the positions"):
            found(wrong)
