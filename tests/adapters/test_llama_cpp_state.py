"""kvx_adapters.llama_cpp.State: states that llama.cpp v0.5.0 writes and reads, and hostile ones."""

from __future__ import annotations

import random
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from kvx_adapters.cli.engines.live_llama_cpp import Context
from kvx_adapters.cli.engines.live_transformers import Live as HF
from kvx_adapters.llama_cpp import State, migrate_rotated
from kvx_core import InvalidArgumentError, KvxError, UnsupportedError, migrate, verify
from tests.engines import tiny_model
from tests.engines.tiny_model import tiny

COUNT, HELD = 8, 19
PROMPT = tiny_model.prompt(HELD + 1)
WANTED = list(tiny_model.greedy(HELD + 1, COUNT))
SIZES = {"num_layers": 4, "num_kv_heads": 2, "k_head_dim": 64, "v_head_dim": 64}


def new(num_tokens: int = HELD, **changes: Any) -> State:
    given = SIZES | {"k_dtype": "F32", "v_dtype": "F32", "v_transposed": True}
    return State.new(num_tokens, **given | changes)


def prefilled() -> HF:
    found = HF(tiny())
    found.prefill(PROMPT[:-1])
    return found


def interleaved(keys: Tensor) -> Tensor:
    """Half order to interleaved order, along the last axis."""
    return keys.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def go_on(context: Context, state: State, sequence: int = 0) -> list[int]:
    """What llama.cpp says after it has read a state. Its cells do not matter then."""
    assert context.set_state(state.data.tobytes(), sequence) == state.data.nbytes
    context.cells[sequence] = list(range(HELD))
    return context.decode(COUNT, after=PROMPT[-1], sequence=sequence)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
@pytest.mark.parametrize("flash_attention", [False, True])
def test_a_state_goes_on(dtype: str, flash_attention: bool) -> None:
    """From transformers as a state into llama.cpp, from llama.cpp as a state into transformers."""
    options: Any = {"k_dtype": dtype, "v_dtype": dtype, "flash_attention": flash_attention}
    own = Context(tiny(), **options)
    own.run(PROMPT[:-1])
    written = State.read(own.state(), num_kv_heads=2)
    (cells,) = written.caches
    assert cells.positions.tolist() == list(range(HELD))
    assert cells.v_transposed is own.v_transposed is not flash_attention
    assert (cells.num_streams, len(cells.layers)) == (1, 4)
    assert (written.sequence, written.tokens) == (0, None)
    assert verify(own.span(), cells.span(own.facts()), [HELD]).ok
    home, back = prefilled(), HF(tiny())
    back.reserve(HELD)
    migrate(cells.span(own.facts()), back.view(), [HELD])
    assert back.decode(COUNT, after=PROMPT[-1]) == WANTED

    made = new(k_dtype=dtype, v_dtype=dtype, v_transposed=not flash_attention)
    rows = 16 + 12 * HELD + 8 + 12  # where the first row begins
    assert made.data[:rows].tobytes() == own.state()[:rows]
    control = go_on(Context(tiny(), **options), made)
    migrate(home.view(), made.caches[0].span(own.facts()), [HELD])
    assert control != WANTED == go_on(Context(tiny(), **options), made)


def test_a_quantized_state_goes_on_as_in_llama_cpp() -> None:
    options: Any = {"k_dtype": "Q8_0", "v_dtype": "Q8_0", "flash_attention": True}
    own, plain = Context(tiny(), **options), Context(tiny(), flash_attention=True)
    own.run(PROMPT[:-1])
    plain.run(PROMPT[:-1])
    made = new(k_dtype="Q8_0", v_dtype="Q8_0", v_transposed=False)
    assert made.data.nbytes == len(own.state())
    there = made.caches[0].span(own.facts())
    migrate_rotated(plain.span(), there, [HELD], own.rotation)
    of_own = State.read(own.state(), num_kv_heads=2).caches[0].layers[0]
    found = np.asarray(made.caches[0].layers[0].k.owner) != np.asarray(of_own.k.owner)
    assert found.mean() < 0.002
    assert len(go_on(Context(tiny(), **options), made)) == COUNT


@pytest.mark.parametrize("unified", [True, False])
def test_several_sequences(unified: bool) -> None:
    """A state names the streams of a context, and is read into any sequence of it."""
    context = Context(tiny(), num_sequences=3, unified=unified)
    context.run([1, 2, 3], 0)
    context.run(PROMPT[:-1], 2)
    state = State.read(context.state(2), num_kv_heads=2)
    streams = 1 if unified else 3
    assert (state.sequence, state.caches[0].num_streams) == (2, streams)
    made = new(num_streams=streams, stream=0 if unified else 1, sequence=1)
    migrate(state.caches[0].span(context.facts()), made.caches[0].span(context.facts()), [HELD])
    assert state.caches[0].positions.tolist() == made.caches[0].positions.tolist()
    for src, dst in zip(state.caches[0].layers, made.caches[0].layers, strict=True):
        for name in "kv":
            assert np.array_equal(*(np.asarray(getattr(one, name).owner) for one in (src, dst)))
    assert go_on(context, made, sequence=1) == WANTED


def test_positions_say_the_order() -> None:
    """Free cells are taken in their order, so that later tokens can be in earlier cells."""
    context = Context(tiny(), num_sequences=2, unified=True)
    context.run([9] * 4, 0)
    context.run(PROMPT[:10], 1)
    context.remove(0)
    context.run(PROMPT[10:-1], 1)
    assert context.cells[1] != sorted(context.cells[1])
    state = State.read(context.state(1), num_kv_heads=2)
    assert state.caches[0].positions.tolist()[0] == 10
    home = HF(tiny())
    home.reserve(HELD)
    migrate(state.caches[0].span(context.facts()), home.view(), [HELD])
    # Token by token: attention over rotated keys would say the same in any order.
    for there, here in zip(context.cache().layers, home.cache.layers, strict=True):
        assert there.v is not None
        for stored, got in ((there.k, interleaved(here.keys)), (there.v, here.values)):
            rows = np.asarray(stored.owner)[0, context.cells[1]]  # (token, head, dim)
            assert np.array_equal(got[0].transpose(0, 1).numpy(), rows)
    assert home.decode(COUNT, after=PROMPT[-1]) == WANTED


def test_files(tmp_path: Path) -> None:
    own = Context(tiny())
    own.run(PROMPT[:-1])
    own.save(tmp_path / "own", PROMPT[:-1])
    stored = (tmp_path / "own").read_bytes()
    found = State.read(stored, num_kv_heads=2)
    assert (found.sequence, found.tokens) == (None, tuple(PROMPT[:-1]))
    made = new(tokens=PROMPT[:-1])
    migrate(own.span(), made.caches[0].span(own.facts()), [HELD])
    assert made.data.tobytes() == stored


def test_the_most_tokens_of_a_state() -> None:
    with pytest.raises(InvalidArgumentError, match=r"num_tokens is .*, expected 1 to 2147483647"):
        new(2**31)


def test_a_sequence_without_tokens() -> None:
    context = Context(tiny())
    context.run([1, 2])
    context.remove(0)
    (cells,) = State.read(context.state(), num_kv_heads=2).caches
    assert (cells.layers, len(cells.positions)) == ((), 0)
    with pytest.raises(InvalidArgumentError, match="holds no token of this sequence, expected at"):
        cells.span(context.facts())


# ---- nothing in a state is trusted ----


@cache
def blob(**changes: Any) -> bytes:
    return new(3, num_layers=2, **changes).data.tobytes()


def patched(at: int, number: int, data: bytes | None = None) -> bytes:
    data = blob() if data is None else data
    return data[:at] + struct.pack("<I", number) + data[at + 4 :]


# magic 0, sequence 4, streams 8, cells 12, then 3 cells of 12 bytes: v_transposed at 52, layers 56,
# type of k 60, bytes of a row 64, rows 72; v of layer 0 after two of k.
V = 60 + 2 * (12 + 3 * 512)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (patched(0, 7), "magic is 0x7 before byte 4, expected 0xaf143cd8 of llama_state_seq_get_"),
        (patched(8, 0), "streams is 0 before byte 12, expected 1 to 256"),
        (patched(8, 257), "streams is 257 before byte 12"),
        (patched(8, 2), "has 0 bytes left at byte .*, expected 4 for the cells of stream 1"),
        (patched(12, 2**31), r"expected 25769803776 for the cells: it is cut off, or a length bef"),
        (patched(16, 2**32 - 1), "positions of cells is .*, expected different ones, not < 0"),
        (patched(28, 0), r"positions of cells is \[0, 0, 2\]"),
        (patched(28, 0, new(12, num_layers=2).data.tobytes()), r" \[0, 0, 2, 3, 4, 5, 6, 7\] "),
        (patched(20, 2), "sequences of cell 0 is 2 before byte 52, expected 1. A model whose"),
        (patched(24, 5), "sequence of cell 0 is 5 before byte 52, expected 0"),
        (patched(52, 2), "v_transposed is 2 before byte 56, expected 0 or 1"),
        (patched(52, 0), "bytes of a row of v of layer 0 is 549755813892 .*, expected whole uni|"
         "numbers of v of layer 0 is"),
        (patched(56, 0), "layers is 0 before byte 60, expected 1 to"),
        (patched(56, 2**31), "layers is 2147483648 before byte 60, expected 1 to"),
        (patched(60, 12), r"type of k of layer 0 is ggml_type 12 \(q4_K\)"),
        (patched(64, 511), "bytes of a row of k of layer 0 is 511 .*, expected whole units of 4"),
        (patched(64, 0), "numbers of k of layer 0 is 0 .*, expected num_kv_heads, 2, times a head"),
        (patched(64, 516), "numbers of k of layer 0 is 129"),
        (patched(68, 2**31), "numbers of k of layer 0 is|for the rows of k of layer 0"),
        (patched(V, 8), "type of v of layer 0 is q8_0 and transposed, expected f32, f16 or bf16"),
        (patched(V + 4, 2), "bytes of v of layer 0 is 2 before byte .*, expected 4 of a F32"),
        (patched(V + 8, 2**31), "expected 25769803776 for the rows of v of layer 0"),
        (patched(V + 8, 127), "numbers of v of layer 0 is 127"),
        (blob() + b"\0", "has 1 bytes behind the state's end at byte .*num_caches=2"),
        (b"", "data has 0 bytes left at byte 0, expected 4 for the magic"),
        (patched(4, 2, blob(tokens=(1, 2, 3))), "version is 2 before byte 8, expected 3, of llama"),
        (patched(8, 2**30, blob(tokens=(1,))), "expected 4294967296 for the token ids"),
        (patched(8, 2) + blob()[12:], "cells of stream 1 is 3 .*, expected 0: a sequence is in"),
    ],
)  # fmt: skip
def test_refusals(data: bytes, error: str) -> None:
    with pytest.raises((InvalidArgumentError, UnsupportedError), match=error):
        State.read(data, num_kv_heads=2)


@pytest.mark.parametrize(
    ("counts", "error"),
    [
        ({"num_kv_heads": 0}, "num_kv_heads is 0, expected 1 to"),
        ({"num_kv_heads": 2, "num_caches": 0}, "num_caches is 0, expected 1 to 2"),
        ({"num_kv_heads": 2, "num_caches": 3}, "num_caches is 3, expected 1 to 2"),
    ],
)
def test_counts_that_no_state_has(counts: dict[str, int], error: str) -> None:
    with pytest.raises(InvalidArgumentError, match=error):
        State.read(blob(), **counts)


@pytest.mark.parametrize("data", [None, 7, "text", np.zeros(3), np.zeros(8, "u1")[::2]])
def test_other_things(data: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"data is .*, expected bytes or a contiguous"):
        State.read(data, num_kv_heads=2)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_tokens": 0}, "num_tokens is 0, expected 1 to"),
        ({"stream": 1}, "stream is 1, expected 0 to 0"),
        ({"stream": -1}, "stream is -1, expected 0 to 0"),
        ({"num_layers": 0}, "num_layers is 0, expected 1 to"),
        ({"num_streams": 0}, "num_streams is 0, expected 1 to"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0, expected 1 to"),
        ({"k_head_dim": 0}, "k_head_dim is 0, expected 1 to"),
        ({"v_head_dim": 0}, "v_head_dim is 0, expected 1 to"),
        ({"sequence": -1}, "sequence is -1, expected 0 to 255"),
        ({"sequence": 256}, "sequence is 256, expected 0 to 255"),
        ({"tokens": [5, -1]}, r"tokens\[1\] is -1, expected 0 to 2147483647"),
        ({"k_dtype": "Q4_K"}, "dtype is q4_k, expected one of f32"),
        ({"v_dtype": "Q8_0"}, "type of v of layer 0 is q8_0 and transposed"),
        ({"k_dtype": "Q8_0", "k_head_dim": 40}, "num_kv_heads times k_head_dim is 80, expected a"),
        ({"tokens": [5, 2**31]}, r"tokens\[1\] is 2147483648, expected 0 to 2147483647"),
        ({"v_transposed": 3}, "v_transposed is 3, expected True or False"),
    ],
)
def test_new_ones_that_no_context_has(changes: dict[str, Any], error: str) -> None:
    with pytest.raises((InvalidArgumentError, UnsupportedError), match=error):
        new(**{"num_tokens": 3} | changes)


def test_fuzz() -> None:
    """Changed, cut and lengthened states are described within their bytes, or refused."""
    rng = random.Random(17)
    seeds = [
        blob(),
        blob(v_transposed=False),
        blob(k_dtype="Q8_0", v_dtype="Q5_1", v_transposed=False),
        blob(k_dtype="BF16", v_dtype="F16", num_streams=3, stream=1),
        blob(tokens=(1, 2, 3)),
        blob() + blob(k_dtype="Q8_0", v_transposed=False)[8:],  # two caches
    ]
    assert len(State.read(seeds[-1], num_kv_heads=2, num_caches=2).caches) == 2
    odd = (0, 1, 2, 3, 255, 256, 2**31 - 1, 2**31, 2**32 - 1)
    kept = 0
    for _ in range(4000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(0, rng.choice((80, len(data) - 8)), 4)
            data[at : at + 4] = struct.pack("<I", rng.choice((*odd, rng.getrandbits(32))))
        data = data[: rng.randrange(len(data))] if rng.random() < 0.2 else data
        data += bytes(rng.choice((0, 0, 0, 1, 12)))
        stored = np.frombuffer(bytes(data), np.uint8)
        try:
            state = State.read(stored, num_kv_heads=2, num_caches=rng.choice((1, 1, 2)))
        except KvxError:
            continue
        kept += 1
        first = stored.ctypes.data
        for cells in state.caches:
            for layer in cells.layers:
                for tensor in layer.tensors.values():
                    low, high = np.lib.array_utils.byte_bounds(np.asarray(tensor.owner))
                    assert first <= low <= high <= first + stored.nbytes
    assert 100 < kept < 3900
