"""append_swa and append_tail: every byte of rings and tails, against what the spec says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvx_core import InvalidArgumentError, OutOfRangeError
from kvx_core.hybrid import ops
from tests.hybrid_ops import oracle
from tests.hybrid_ops.conftest import On

WINDOW, NOPE, ROPE = 128, 448, 64
SENTINEL = 0xA5
SEEDS = (0, 1, 2)


class Rings:
    """Rings filled with a sentinel, and an oracle that appends token by token."""

    def __init__(self, on: On, slots: int = 2, window: int = WINDOW, nope: int = NOPE) -> None:
        self.window, self.nope = window, nope
        fp8 = torch.full((slots, window, nope), SENTINEL, dtype=torch.uint8)
        rope = torch.full((slots, window, 2 * ROPE), SENTINEL, dtype=torch.uint8)
        self.tensors: tuple[Tensor, ...] = on(
            fp8,
            rope.view(torch.bfloat16),
            torch.ones(slots, window),
            torch.full((slots, window), -1, dtype=torch.int32),
            torch.zeros(slots, dtype=torch.int32),
        )
        self.on = on
        self.expected = [t.cpu().clone() for t in self.tensors]

    def append(
        self,
        x: Tensor,
        positions: Tensor,
        slots: Tensor,
        one_each: bool = False,
        spans: ops.Spans | None = None,
    ) -> None:
        ops.append_swa(*self.on(x, positions, slots), *self.tensors, one_each=one_each, spans=spans)
        fp8, rope, inv, pos, head = self.expected
        for token, position, slot in zip(x, positions.tolist(), slots.tolist(), strict=True):
            if slot < 0:
                continue
            place = int(head[slot]) % self.window
            head[slot] += 1
            values, numbers, inv[slot, place] = oracle.quantized(token, self.nope)
            fp8[slot, place] = values.to(torch.float8_e4m3fn).view(torch.uint8)
            rope[slot, place] = numbers
            pos[slot, place] = position

    def check(self) -> None:
        for name, got, expected in zip(
            ("fp8", "rope", "inv", "pos", "head"), self.tensors, self.expected, strict=True
        ):
            got = got.cpu().contiguous().view(torch.uint8)
            assert torch.equal(got, expected.view(torch.uint8)), name

    @property
    def pos(self) -> Tensor:
        return self.tensors[3].cpu()

    @property
    def head(self) -> list[int]:
        return self.tensors[4].tolist()


def tokens(count: int, seed: int = 0, nope: int = NOPE) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(count, nope + ROPE, generator=made).to(torch.bfloat16)


def of_slot(count: int, slot: int = 0) -> Tensor:
    return torch.full((count,), slot, dtype=torch.int32)


def test_one_token_a_full_ring_and_one_more(on: On) -> None:
    rings = Rings(on)
    rings.append(tokens(1), torch.tensor([0]), of_slot(1))
    assert rings.head == [1, 0]
    assert rings.pos[0, 0] == 0
    rings.append(tokens(127, 1), torch.arange(1, 128), of_slot(127))
    assert rings.pos[0].tolist() == list(range(128))
    rings.append(tokens(1, 2), torch.tensor([128]), of_slot(1))
    assert rings.pos[0, 0] == 128
    assert rings.head == [129, 0]
    rings.check()


@pytest.mark.parametrize("steps", ["one at a time", "at once", "by seven"])
def test_300_tokens_leave_the_last_window(on: On, steps: str) -> None:
    rings, x, step = Rings(on), tokens(300), {"one at a time": 1, "at once": 300, "by seven": 7}
    for first in range(0, 300, step[steps]):
        last = min(first + step[steps], 300)
        rings.append(x[first:last], torch.arange(first, last), of_slot(last - first))
    assert all(rings.pos[0, p % WINDOW] == p for p in range(172, 300))
    assert rings.head == [300, 0]
    rings.check()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("nope", [NOPE, 7, 130])
def test_requests_are_apart(on: On, seed: int, nope: int) -> None:
    made = torch.Generator().manual_seed(seed)
    rings = Rings(on, slots=5, window=6, nope=nope)
    for step, count in enumerate((1, 13, 40)):
        slots = torch.randint(-1, 4, (count,), generator=made, dtype=torch.int32)
        positions = torch.randint(0, 2**31 - 1, (count,), generator=made)
        rings.append(tokens(count, seed + step, nope), positions.to(torch.int32), slots)
    rings.check()
    assert rings.head[4] == 0


def test_one_each_takes_places_in_one_launch(on: On) -> None:
    rings = Rings(on, slots=4, window=3)
    for step in range(5):
        slots = torch.tensor([2, -1, 0, 3], dtype=torch.int32)
        rings.append(tokens(4, step), torch.full((4,), step), slots, one_each=True)
    rings.check()


def spans_of(on: On, counts: list[int]) -> ops.Spans:
    """Spans of so many tokens each."""
    lengths = torch.tensor(counts)
    starts = torch.tensor([0, *lengths.cumsum(0).tolist()], dtype=torch.int32)
    of = torch.repeat_interleave(torch.arange(len(counts)), lengths).to(torch.int32)
    return ops.Spans(*on(of, starts))


@pytest.mark.parametrize("window", [1, 5, 40])
@pytest.mark.parametrize("slots", [[3, 0, 2, 1], [0, -1, 3, -1], [2, 1, 0, 3]])
@pytest.mark.parametrize("counts", [[1, 0, 13, 40], [6, 6, 5, 4], [0, 0, 0, 9]])
def test_tokens_in_spans(on: On, window: int, slots: list[int], counts: list[int]) -> None:
    """The same bytes as without spans, also from heads that have begun."""
    rings = Rings(on, slots=5, window=window, nope=7)
    for step in range(3):
        of_tokens = torch.repeat_interleave(torch.tensor(slots), torch.tensor(counts)).int()
        total = sum(counts)
        positions = torch.arange(step * 100, step * 100 + total)
        rings.append(tokens(total, step, 7), positions, of_tokens, spans=spans_of(on, counts))
        rings.check()
        counts = counts[1:] + counts[:1]


def test_no_token_of_another_span_is_looked_at(on: On) -> None:
    """Else the time of a prompt grows with its square. Two spans of one slot show it."""
    rings = Rings(on, window=4)
    call = *on(tokens(2), torch.arange(2), of_slot(2)), *rings.tensors
    spans = spans_of(on, [1, 1])
    if on.looks_first:
        says = r"append.slots\[1\] is 0, expected a slot that no span before has"
        with pytest.raises(OutOfRangeError, match=says):
            ops.append_swa(*call, spans=spans)
        rings.check()
        return
    ops.append_swa(*call, spans=spans)
    assert rings.pos[0, 0] in (0, 1)  # both are the first of their spans
    assert (rings.pos[0, 1:] == -1).all()
    assert rings.head == [2, 0]
    ka = torch.zeros(2, 4, 8)
    tails = on(ka, ka.clone(), torch.zeros(2, dtype=torch.int32))
    ops.append_tail(*on(torch.ones(2, 8), torch.ones(2, 8), of_slot(2)), *tails, spans=spans)
    assert tails[0].cpu().sum(-1).tolist() == [[8, 0, 0, 0], [0] * 4]


def test_spans_that_are_out_of_range(on: On) -> None:
    """Refused in host memory, skipped on a device: no byte but of rings that are named."""
    of, starts = torch.tensor([0, 0, 1], dtype=torch.int32), [0, 2, 3]
    for wrong_of, wrong_starts, says in (
        ([0, 2, 1], starts, r"append.span_of\[1\] is 2, expected the span that its token lies in"),
        ([0, -1, 1], starts, r"append.span_of\[1\] is -1, expected the span"),
        (of, [1, 2, 3], r"append.span_starts\[0\] is 1, expected the end of the span before"),
        (of, [0, 2, 2], r"append.span_starts\[2\] is 2, expected num_tokens"),
        (of, [0, 2, 4], r"append.span_starts\[2\] is 4, expected no less than the one before"),
        (of, [0, -5, 3], r"append.span_starts\[1\] is -5, expected no less than the one before"),
        (of, [0, 1, 3], r"append.slots\[1\] is 2, expected a slot that no span before has"),
    ):
        rings = Rings(on, slots=4, window=2)
        slots = torch.tensor([2, 2, 1], dtype=torch.int32)
        spans = ops.Spans(*on(torch.as_tensor(wrong_of).int(), torch.tensor(wrong_starts).int()))
        call = *on(tokens(3), torch.arange(3), slots), *rings.tensors
        if on.looks_first:
            with pytest.raises(OutOfRangeError, match=says):
                ops.append_swa(*call, spans=spans)
            rings.check()
        else:
            ops.append_swa(*call, spans=spans)
            for tensor, was in zip(rings.tensors, rings.expected, strict=True):
                kept = tensor.cpu()[[0, 3]].contiguous().view(torch.uint8)
                assert torch.equal(kept, was[[0, 3]].contiguous().view(torch.uint8))


def test_spans_of_slots_that_differ_are_refused() -> None:
    on = On.__new__(On)
    on.name = "cpu"
    rings = Rings(on)
    slots = torch.tensor([0, 1], dtype=torch.int32)
    call = (tokens(2), torch.arange(2), slots)
    with pytest.raises(OutOfRangeError, match=r"slots\[1\] is 1, expected that of its whole span"):
        ops.append_swa(*call, *rings.tensors, spans=spans_of(on, [2]))
    for spans, says in (
        (ops.Spans(slots, torch.zeros(1, dtype=torch.int32)), "shape.0. is 1, expected at least 2"),
        (ops.Spans(slots[:1], slots), r"spans.of.shape\[0\] is 1, expected 2"),
        (ops.Spans(slots.long(), slots), "spans.of.dtype is int64, expected int32"),
        ((slots, slots), "spans is a tuple, expected Spans"),
    ):
        with pytest.raises(InvalidArgumentError, match=says):
            ops.append_swa(*call, *rings.tensors, spans=spans)  # type: ignore[arg-type]
    rings.check()


@pytest.mark.parametrize("nope", [NOPE, 7])
def test_rows_without_scales(on: On, nope: int) -> None:
    """E4M3 of the numbers themselves; 448 is the largest. No scale is written."""
    x = (tokens(20, 3, nope).float() * 100).bfloat16()
    x[0, :4] = torch.tensor([1000.0, -449.0, 448.0, 0.001])
    rings = Rings(on, nope=nope)
    fp8, rope, _, pos, head = rings.tensors
    ops.append_swa(*on(x, torch.arange(20), of_slot(20)), fp8, rope, None, pos, head)
    codes = x[:, :nope].float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(fp8.cpu()[0, :20], codes)
    assert fp8[0, 0, :2].tolist() == [0x7E, 0xFE]
    numbers = x[:, nope:].contiguous().view(torch.int16)
    assert torch.equal(rope.cpu()[0, :20].contiguous().view(torch.int16), numbers)
    assert rings.pos[0, :20].tolist() == list(range(20))
    assert (fp8.cpu()[0, 20:] == SENTINEL).all()
    assert (rings.tensors[2] == 1).all()


def test_numbers_at_the_edges(on: On) -> None:
    x = torch.zeros(6, NOPE + ROPE)
    x[1, 3] = 448.0
    x[2, 5] = 1e-30
    x[3, :3] = torch.tensor([torch.nan, 2.0, -1.0])
    x[4, :3] = torch.tensor([torch.inf, 1.0, -torch.inf])
    x[5] = -0.0
    rings = Rings(on)
    ops.append_swa(*on(x.to(torch.bfloat16), torch.arange(6), of_slot(6)), *rings.tensors)
    fp8, inv = rings.tensors[0].cpu()[0], rings.tensors[2].cpu()[0]
    assert not fp8[0].any()
    assert inv[0] == 1
    assert inv[1] == 1
    assert fp8[1, 3] == 0x7E
    assert inv[2] == x[2, 5].to(torch.bfloat16).float() / 448
    assert fp8[2, 5] == 0x7E
    assert fp8[3, 0] & 0x7F == 0x7F
    assert inv[3] == torch.tensor(2.0) / 448
    assert fp8[3, 1] == 0x7E
    assert inv[4].isfinite()
    assert fp8[4, :3].tolist() == [0x7E, 0, 0xFE]
    assert (fp8[5] == 0x80).all()
    assert inv[5] == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_error_of_a_row_is_at_most_a_28th_of_its_largest(on: On, seed: int) -> None:
    rings, x = Rings(on), tokens(WINDOW, seed)
    ops.append_swa(*on(x, torch.arange(WINDOW), of_slot(WINDOW)), *rings.tensors)
    fp8, rope, inv = (t.cpu()[0] for t in rings.tensors[:3])
    got, true = oracle.e4m3_decode(fp8) * inv[:, None], x[:, :NOPE].float()
    largest = true.abs().amax(-1)
    assert ((got - true).abs().amax(-1) <= largest * (16 / 448) * (1 + 1e-6)).all()
    assert ((got - true).norm(dim=-1) / true.norm(dim=-1) < 0.036).all()
    assert torch.equal(rope.view(torch.int16), x[:, NOPE:].contiguous().view(torch.int16))


def test_what_is_out_of_range_is_refused_or_skipped(on: On) -> None:
    rings = Rings(on)
    call = (tokens(2), torch.arange(2), torch.tensor([2, 1], dtype=torch.int32))
    if on.looks_first:
        with pytest.raises(OutOfRangeError, match=r"append.slots\[0\] is 2, expected -1 to 1"):
            ops.append_swa(*call, *rings.tensors)
    else:
        ops.append_swa(*on(*call), *rings.tensors)
        rings.append(tokens(0), torch.arange(0), of_slot(0))
        assert rings.head == [0, 1]
        assert (rings.tensors[0][0] == SENTINEL).all()
        return
    rings.check()
    with pytest.raises(OutOfRangeError, match=r"append.positions\[0\] is 2147483648"):
        ops.append_swa(tokens(1), torch.tensor([2**31]), of_slot(1), *rings.tensors)
    rings.check()


def test_wrong_tensors_are_named() -> None:
    on_host = On.__new__(On)
    on_host.name = "cpu"
    rings = Rings(on_host)
    x, positions, slots = tokens(2), torch.arange(2), of_slot(2)
    fp8, *rest = rings.tensors
    for call, sentence in (
        ((x.float(), positions, slots, fp8), "x.dtype is float32, expected bfloat16"),
        ((x[:, 1:], positions, slots, fp8), r"x.shape\[1\] is 511, expected 512"),
        ((x, positions.float(), slots, fp8), "positions.dtype is float32"),
        ((x, positions, slots.long(), fp8), "slots.dtype is int64, expected int32"),
        ((x, positions, slots[:1], fp8), r"slots.shape\[0\] is 1, expected 2"),
        ((x.T.contiguous().T, positions, slots, fp8), "x.stride is .*, expected contiguous"),
        ((x, positions, slots, fp8[0]), "swa_fp8.ndim is 2, expected 3"),
        (([1], positions, slots, fp8), "x is a list, expected a torch.Tensor"),
    ):
        with pytest.raises(InvalidArgumentError, match=sentence):
            ops.append_swa(*call, *rest)
    rings.check()


@pytest.mark.parametrize("in_spans", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_tails_grow_in_order(
    on: On, seed: int, given: torch.dtype, kept: torch.dtype, in_spans: bool
) -> None:
    made = torch.Generator().manual_seed(seed)
    ratio, row = 5, 33
    ka = torch.full((3, ratio, row), 7.0, dtype=kept)
    za, lens = ka.clone(), torch.tensor([0, 2, 4], dtype=torch.int32)
    expected = ka.clone(), za.clone(), lens.clone()
    k, z = torch.randn(2, 6, row, generator=made).to(given)
    slots = torch.tensor([1, 0, -1, 1, 2, 0], dtype=torch.int32)
    spans = None
    if in_spans:
        slots, spans = slots[[0, 3, 1, 5, 2, 4]], spans_of(on, [2, 2, 1, 0, 1])
    tensors = on(ka, za, lens)
    ops.append_tail(*on(k, z, slots), *tensors, spans=spans)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            at = slot, int(expected[2][slot])
            expected[0][at], expected[1][at] = k[i].to(kept), z[i].to(kept)
            expected[2][slot] += 1
    for got, wanted in zip(tensors, expected, strict=True):
        assert torch.equal(got.cpu(), wanted)


def test_a_full_tail_takes_no_more(on: On) -> None:
    ka = torch.zeros(2, 4, 8)
    za, lens = ka.clone(), torch.tensor([3, 0], dtype=torch.int32)
    slots = torch.tensor([1, 0, 0], dtype=torch.int32)
    tensors = on(ka, za, lens)
    call = *on(torch.ones(3, 8), torch.ones(3, 8), slots), *tensors
    if on.looks_first:
        with pytest.raises(OutOfRangeError, match=r"tail.slots\[2\] is 0, whose tail has no room"):
            ops.append_tail(*call)
        assert not ka.any()
        assert lens.tolist() == [3, 0]
    else:
        ops.append_tail(*call)
        assert tensors[2].tolist() == [4, 1]
        assert tensors[0].cpu().sum(-1).tolist() == [[0, 0, 0, 8], [8, 0, 0, 0]]
