"""Records of engines' pages: an oracle's bytes, and those that vLLM's own kernels write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_core import InvalidArgumentError, OutOfRangeError
from kvx_core.hybrid import ops
from tests.hybrid_ops import oracle
from tests.hybrid_ops.conftest import On
from tests.hybrid_ops.test_compress import cos_sin
from tests.native import run

SEEDS = (0, 1, 2)
SENTINEL = 0xC3
EPS = 1e-6


def rows_of(seed: int, count: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 512, generator=made)
    rows *= torch.exp2(torch.randint(-14, 12, (count, 1), generator=made))
    rows[0] = 0
    rows[1, :64] = 0
    rows[2, ::3] *= -1e-3
    return rows


@pytest.mark.parametrize(("entries", "num_bytes"), [(64, 37440), (32, 19008), (2, 1728), (1, 1152)])
def test_pages_have_the_bytes_of_engines(entries: int, num_bytes: int) -> None:
    assert ops.v4_page_bytes(entries) == num_bytes


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entries", [1, 2, 5, 64])
def test_records_are_the_oracles(on: On, entries: int, dtype: torch.dtype, seed: int) -> None:
    rows = rows_of(seed, 6).to(dtype)
    # Pages of several layers that follow each other: they lie apart, the last one is short.
    page = ops.v4_page_bytes(entries)
    whole = on(torch.full((7, 3 * page), SENTINEL, dtype=torch.uint8))
    pages, expected = whole[:, page : 2 * page], whole.cpu().clone()
    slots = torch.randperm(7 * entries, generator=torch.Generator().manual_seed(seed))[:6]
    slots[3] = -1
    ops.write_v4_page(*on(rows, slots), pages, entries_per_page=entries)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot >= 0:
            at, entry = divmod(slot, entries)
            data, scales = oracle.page_record(row)
            own = expected[at, page : 2 * page]
            own[576 * entry : 576 * entry + 576] = data
            own[576 * entries + 8 * entry :][:8] = scales
    assert torch.equal(whole.cpu(), expected)
    for out_dtype in (torch.float32, torch.bfloat16):
        out = on(torch.full((6, 512), 7.0, dtype=out_dtype))
        ops.read_v4_page(pages, on(slots), out, entries_per_page=entries)
        got = out.cpu().float()
        assert (got[3] == 7).all()
        for i in (0, 1, 2, 4, 5):
            data, scales = oracle.page_record(rows[i])
            codes = oracle.e4m3_decode(data[:448]).view(7, 64)
            values = (codes * torch.exp2(scales[:7].float() - 127)[:, None]).flatten()
            assert torch.equal(got[i, :448], values.to(out_dtype).float())
            rope = rows[i, 448:].to(torch.bfloat16)
            assert torch.equal(got[i, 448:].to(torch.bfloat16), rope)


def test_wrong_pages_are_named() -> None:
    rows, slots = torch.zeros(2, 512), torch.tensor([0, 4])
    pages = torch.full((2, 1728), SENTINEL, dtype=torch.uint8)
    with pytest.raises(OutOfRangeError, match=r"pages.slots\[1\] is 4, expected -1 to 3"):
        ops.write_v4_page(rows, slots, pages, entries_per_page=2)
    for call, entries, sentence in (
        ((rows, slots, pages), 3, r"pages.shape\[1\] is 1728, expected at least 1752"),
        ((rows[:, :448].contiguous(), slots, pages), 2, r"entries.shape\[1\] is 448, expected 512"),
        ((rows, slots.int(), pages), 2, "slots.dtype is int32, expected int64"),
        ((rows, slots, pages.T), 2, "pages.stride|pages.shape"),
        ((rows, slots, pages), 0, "entries_per_page is 0"),
    ):
        with pytest.raises(InvalidArgumentError, match=sentence):
            ops.write_v4_page(*call, entries_per_page=entries)
    assert (pages == SENTINEL).all()


class Compressed:
    """Tokens of one request as vLLM keeps them, and the pages that its compressor writes."""

    def __init__(self, ratio: int, num_entries: int, seed: int, dim: int = 512) -> None:
        self.dim = dim
        made = torch.Generator().manual_seed(seed)
        self.ratio, self.tokens = ratio, ratio * num_entries
        self.overlap = ratio == 4
        self.width = 2 * dim if self.overlap else dim
        self.k, self.z = torch.randn(2, self.tokens, self.width, generator=made).unbind()
        self.ape = torch.randn(ratio, self.width, generator=made)
        self.norm = torch.rand(dim, generator=made) + 0.5
        self.cos_sin = cos_sin(self.tokens, 64)
        self.positions = torch.arange(self.tokens)
        self.per_page = 256 // ratio
        self.slots = torch.full((self.tokens,), -1)
        ends = self.positions[ratio - 1 :: ratio]
        self.slots[ends] = torch.randperm(2 * self.per_page, generator=made)[:num_entries]
        self.entry_slots = self.slots[ends].contiguous()
        self.block = 4 if self.overlap else 8
        scores = self.z + self.ape[self.positions % ratio]
        self.state = torch.cat([self.k, scores], -1).view(-1, self.block, 2 * self.width)

    def empty(self) -> Tensor:
        pages = torch.full((2, ops.v4_page_bytes(self.per_page)), SENTINEL, dtype=torch.uint8)
        return pages

    def entries(self) -> Tensor:
        halves = self.ape.split(self.dim, -1)
        entries = torch.empty(self.tokens // self.ratio, self.dim, dtype=torch.bfloat16)
        ape_a, ape_b = (half.contiguous() for half in (halves[-1], halves[0]))
        ops.compress_bulk(
            self.k, self.z, ape_a, ape_b if self.overlap else None, self.norm, EPS, self.cos_sin,
            self.positions[:: self.ratio].contiguous(), entries, overlap=self.overlap,
        )  # fmt: skip
        return entries

    def ours(self) -> Tensor:
        pages = self.empty()
        ops.write_v4_page(self.entries(), self.entry_slots, pages, entries_per_page=self.per_page)
        return pages

    def bound(self, pages: Tensor) -> Tensor:
        """Pages as vLLM binds them: its shape, whose rows are no entries."""
        return pages.as_strided((2, self.per_page, 584), (pages.shape[1], 584, 1))

    def job(self) -> dict[str, Any]:
        """The arguments of vLLM's function, which writes `kv_cache`."""
        return {
            "state_cache": self.state,
            "num_actual": self.tokens,
            "token_to_req_indices": torch.zeros(self.tokens, dtype=torch.int32),
            "positions": self.positions,
            "slot_mapping": self.positions,
            "block_table": torch.arange(len(self.state), dtype=torch.int32)[None],
            "block_size": self.block,
            "state_width": self.width,
            "cos_sin_cache": self.cos_sin,
            "kv_cache": self.bound(self.empty()),
            "head_dim": self.dim,
            "rope_head_dim": 64,
            "compress_ratio": self.ratio,
            "overlap": self.overlap,
            "rms_norm_weight": self.norm,
            "rms_norm_eps": EPS,
            "kv_slots": self.slots,
        }


COMPRESSED = [Compressed(4, 17, seed=0), Compressed(128, 2, seed=1), Compressed(4, 3, seed=2)]


class Keys(Compressed):
    """Indexer keys in pages of 64, FP8 numbers and a float32 scale."""

    def __init__(self) -> None:
        super().__init__(4, 17, seed=4, dim=128)

    def empty(self) -> Tensor:
        return torch.full((2, 64 * 132), SENTINEL, dtype=torch.uint8)

    def ours(self) -> Tensor:
        """A pool whose blocks are as large as pages, and its bytes in the order of a page."""
        pages, keys = self.empty(), self.entries()
        codes = pages[:, : 64 * 128].contiguous().view(2, 64, 128)
        scales = pages[:, 64 * 128 :].contiguous().view(torch.float32)
        rest = torch.zeros(2, 64, 1, dtype=torch.uint8), torch.zeros(2, 64, 64).bfloat16()
        ids = self.entry_slots.int()
        where = None, ids % 64, None, (ids // 64)[:, None].contiguous()
        entry = torch.zeros(len(keys), 65, dtype=torch.bfloat16)
        pool = *rest, torch.zeros(2, 64), codes, scales
        ops.flush_write_csa(entry, keys, *where, *pool, keys="fp8")
        return torch.cat((codes.flatten(1), scales.view(torch.uint8)), 1)

    def bound(self, pages: Tensor) -> Tensor:
        return pages.view(2, 64, 132)


KEYS = Keys()


class Window:
    """Rows that vLLM's kernel of windows quantises into pages of 64 tokens."""

    rows = rows_of(3, 9).to(torch.bfloat16)
    slots = torch.tensor([127, 0, 64, 63, -1, 5, 99, 1, 2])

    @staticmethod
    def empty() -> Tensor:
        return torch.full((2, ops.v4_page_bytes(64)), SENTINEL, dtype=torch.uint8)


@pytest.fixture(scope="module")
def vllm_wrote(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The jobs after vLLM's Triton kernels have run in the interpreter."""
    folder = tmp_path_factory.mktemp("triton")
    insert = {"k": Window.rows, "k_cache": Window.empty(), "slot_mapping": Window.slots}
    jobs = {
        "compress": [given.job() for given in COMPRESSED],
        "insert": insert,
        "keys": [KEYS.job()],
    }
    torch.save(jobs, folder / "given")
    program = Path(__file__).with_name("vllm_triton.py")
    command = [sys.executable, program, folder / "given", folder / "made"]
    run(command, env={"TRITON_INTERPRET": "1"})
    made: dict[str, Any] = torch.load(folder / "made")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("which", range(len(COMPRESSED)))
def test_entries_are_those_of_vllms_compressor(vllm_wrote: dict[str, Any], which: int) -> None:
    """All bytes, but that sums in another order may round a number to its neighbour."""
    given = COMPRESSED[which]
    ours = given.ours()
    theirs = vllm_wrote["compress"][which]["kv_cache"].as_strided(ours.shape, ours.stride())
    written = given.tokens // given.ratio * 584
    assert (ours != theirs).sum() <= written // 500
    scales = slice(576 * given.per_page, 584 * given.per_page)
    assert torch.equal(ours[:, scales], theirs[:, scales])
    values = torch.empty(2, len(given.entry_slots), 512)
    for pages, out in zip((ours, theirs), values, strict=True):
        ops.read_v4_page(pages, given.entry_slots, out, entries_per_page=given.per_page)
    largest = values[1].abs().amax(-1, keepdim=True)
    assert ((values[0] - values[1]).abs() <= largest / 14).all()


@pytest.mark.slow
def test_keys_are_those_of_vllms_compressor(vllm_wrote: dict[str, Any]) -> None:
    """All bytes, but that sums in another order may round a number to its neighbour."""
    ours, theirs = KEYS.ours(), vllm_wrote["keys"][0]["kv_cache"].view(2, -1)
    assert (ours != theirs).sum() <= 17 * 132 // 500 + 1
    assert torch.equal(ours[:, 64 * 128 :], theirs[:, 64 * 128 :])
    written = torch.zeros(2, 64, dtype=torch.bool)
    written.view(-1)[KEYS.entry_slots] = True
    untouched = theirs[:, : 64 * 128].reshape(2, 64, 128)[~written]
    assert (untouched == SENTINEL).all()


@pytest.mark.slow
def test_windows_are_those_of_vllms_kernel(vllm_wrote: dict[str, Any]) -> None:
    """Every byte; and what vLLM wrote is read."""
    pages = Window.empty()
    ops.write_v4_page(Window.rows, Window.slots, pages, entries_per_page=64)
    theirs = vllm_wrote["insert"]["k_cache"]
    assert torch.equal(pages, theirs)
    out = torch.zeros(9, 512)
    ops.read_v4_page(theirs, Window.slots, out, entries_per_page=64)
    kept = Window.slots >= 0
    assert torch.equal(out[kept, 448:], Window.rows[kept, 448:].float())
    groups = Window.rows[:, :448].float().view(9, 7, 64)
    error = (out[:, :448].view(9, 7, 64) - groups)[kept].abs().amax(-1)
    assert (error <= groups[kept].abs().amax(-1).clamp(min=1e-4) / 14).all()
