"""flush_write_csa, flush_write_hca and the state kernels: every byte of pools and tails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvx_core import InvalidArgumentError, OutOfRangeError
from kvx_core.hybrid import ops
from tests.hybrid_ops import oracle
from tests.hybrid_ops.conftest import On

SENTINEL = 0x5A
SEEDS = (0, 1, 2)


class Pool:
    """A pool filled with a sentinel, and what an oracle makes of it."""

    def __init__(self, on: On, keys: str | None, blocks: int, per_block: int, nope: int) -> None:
        self.on, self.keys, self.nope, self.per_block = on, keys, nope, per_block
        group = 32 if keys == "mxfp4" else 16

        def filled(*shape: int) -> Tensor:
            return torch.full((blocks, per_block, *shape), SENTINEL, dtype=torch.uint8)

        tensors = [
            filled(nope),
            filled(128).view(torch.bfloat16),
            filled(4).view(torch.float32)[..., 0].contiguous(),
        ]
        if keys == "fp8":
            tensors += [filled(128), filled(4).view(torch.float32)[..., 0].contiguous()]
        elif keys:
            tensors += [filled(64), filled(128 // group)]
        self.tensors = [on(t) for t in tensors]
        self.expected = [t.cpu().clone() for t in tensors]

    def write(
        self, entry: Tensor, key: Tensor, slots: Tensor, ids: Tensor, mask: Tensor, table: Tensor
    ) -> None:
        rows = self.on(slots, ids, mask, table)
        if self.keys:
            ops.flush_write_csa(self.on(entry), self.on(key), *rows, *self.tensors, keys=self.keys)
        else:
            ops.flush_write_hca(self.on(entry), *rows, *self.tensors)
        for i in range(len(entry)):
            if not mask[i] or slots[i] < 0:
                continue
            number = int(ids[i])
            at = int(table[i, number // self.per_block]), number % self.per_block
            values, rope, inverse = oracle.quantized(entry[i], self.nope)
            self.expected[0][at] = values.to(torch.float8_e4m3fn).view(torch.uint8)
            self.expected[1][at], self.expected[2][at] = rope, inverse
            if self.keys:
                encode = {"nvfp4": oracle.nvfp4, "mxfp4": oracle.mxfp4, "fp8": oracle.fp8_key}
                self.expected[3][at], self.expected[4][at] = encode[self.keys](key[i])

    def check(self) -> None:
        for number, (got, expected) in enumerate(zip(self.tensors, self.expected, strict=True)):
            assert torch.equal(got.cpu().view(torch.uint8), expected.view(torch.uint8)), number


def entries(count: int, seed: int, nope: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-12, 12, (count, 1), generator=made).float())
    entry = torch.randn(count, nope + 64, generator=made) * size
    return entry.to(dtype), (torch.randn(count, 128, generator=made) * size).to(dtype)


def i32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", ["nvfp4", "mxfp4", "fp8", None])
def test_entries_go_where_tables_say(
    on: On, keys: str | None, dtype: torch.dtype, seed: int
) -> None:
    nope = 448 if seed else 451
    pool = Pool(on, keys, blocks=7, per_block=32, nope=nope)
    table = torch.tensor([[4, 2], [6, -1], [1, 0], [3, -1], [9, 9]], dtype=torch.int32)
    entry, key = entries(5, seed, nope, dtype)
    mask = torch.tensor([True, True, True, False, True])
    pool.write(entry, key, i32(0, 1, 2, 3, -1), i32(31, 0, 32, 5, 7), mask, table)
    pool.write(entry.flip(0), key.flip(0), i32(0, 1, 2, 3, -1), i32(33, 1, 30, 70, 9), mask, table)
    pool.check()
    assert (pool.tensors[0].cpu()[3] == SENTINEL).all(), "the row whose mask is False was written"


@pytest.mark.parametrize("slot", [-2, -(2**31)])
@pytest.mark.parametrize("keys", ["fp8", None])
def test_a_slot_below_minus_1_is_out_of_range(on: On, keys: str | None, slot: int) -> None:
    """On the host nothing is written; a kernel, which cannot refuse, skips the row."""
    pool = Pool(on, keys, blocks=3, per_block=2, nope=448)
    entry, key = entries(2, 0, 448, torch.bfloat16)
    table, mask = torch.tensor([[1], [2]], dtype=torch.int32), torch.ones(2, dtype=torch.bool)
    if on.looks_first:
        says = rf"flush.slots\[1\] is {slot}, expected -1 to 2147483647"
        with pytest.raises(OutOfRangeError, match=says):
            pool.write(entry, key, i32(0, slot), i32(0, 1), mask, table)
    else:
        pool.write(entry, key, i32(0, slot), i32(0, 1), mask, table)
    pool.check()
    mask[1] = False  # a masked row's slot is not looked at
    pool.write(entry, key, i32(0, slot), i32(0, 1), mask, table)
    pool.check()


def test_no_mask_set_changes_no_byte(on: On) -> None:
    for keys in ("nvfp4", None):
        pool = Pool(on, keys, blocks=3, per_block=1, nope=448)
        entry, key = entries(2, 0, 448, torch.bfloat16)
        table = torch.zeros(2, 3, dtype=torch.int32)
        pool.write(entry, key, i32(0, 1), i32(0, 1), torch.zeros(2, dtype=torch.bool), table)
        pool.write(entry, key, i32(-1, -1), i32(0, 1), torch.ones(2, dtype=torch.bool), table)
        pool.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nope", [448, 451])
def test_entries_without_scales(on: On, nope: int, dtype: torch.dtype) -> None:
    """E4M3 of the numbers themselves, 448 at most; keys as ever, and no scale is written."""
    pool = Pool(on, "nvfp4", blocks=2, per_block=2, nope=nope)
    entry, key = entries(2, 5, nope, dtype)
    entry[0, :2] = torch.tensor([1000.0, -449.0])
    fp8, rope, _inv_scale, *keys = pool.tensors
    rows = on(i32(0, 1), i32(1, 0), torch.ones(2, dtype=torch.bool), i32(1, 0)[:, None])
    ops.flush_write_csa(on(entry), on(key), *rows, fp8, rope, None, *keys, keys="nvfp4")
    for i, at in ((0, (1, 1)), (1, (0, 0))):
        numbers = entry[i, :nope].float().clamp(-448, 448).to(torch.float8_e4m3fn)
        pool.expected[0][at] = numbers.view(torch.uint8)
        pool.expected[1][at] = entry[i, nope:].bfloat16()
        pool.expected[3][at], pool.expected[4][at] = oracle.nvfp4(key[i])
    pool.check()


def test_hca_has_an_entry_per_block(on: On) -> None:
    pool = Pool(on, None, blocks=4, per_block=1, nope=448)
    entry, key = entries(2, 3, 448, torch.float32)
    table = torch.tensor([[3, 1], [0, -1]], dtype=torch.int32)
    mask = torch.ones(2, dtype=torch.uint8)
    pool.write(entry, key, i32(0, 1), i32(1, 0), mask, table)
    pool.check()


def test_what_is_out_of_range_is_refused_or_skipped(on: On) -> None:
    entry, key = entries(2, 0, 448, torch.bfloat16)
    mask = torch.ones(2, dtype=torch.bool)
    for ids, table, sentence in (
        (i32(0, 4), [[0, 1], [1, 2]], r"flush.entry_ids\[1\] is 4, expected 0 to 3"),
        (i32(-1, 0), [[0, 1], [1, 2]], r"flush.entry_ids\[0\] is -1"),
        (i32(0, 3), [[0, 1], [1, -1]], r"flush.block_table\[3\] is -1, expected 0 to 2"),
        (i32(0, 0), [[3, 1], [1, 2]], r"flush.block_table\[0\] is 3"),
    ):
        pool = Pool(on, "nvfp4", blocks=3, per_block=2, nope=448)
        where = on(i32(0, 1), ids, mask, torch.tensor(table, dtype=torch.int32))
        call = on(entry), on(key), *where, *pool.tensors
        if on.looks_first:
            with pytest.raises(OutOfRangeError, match=sentence):
                ops.flush_write_csa(*call)
            pool.check()
        else:
            ops.flush_write_csa(*call)
            written = (pool.tensors[0].cpu() != SENTINEL).any(-1)
            assert written.sum() == 1


def test_wrong_arguments_are_named() -> None:
    on = On.__new__(On)
    on.name = "cpu"
    pool = Pool(on, "nvfp4", blocks=3, per_block=2, nope=448)
    entry, key = entries(2, 0, 448, torch.bfloat16)
    rows = (i32(0, 1), i32(0, 1), torch.ones(2, dtype=torch.bool))
    table = torch.zeros(2, 2, dtype=torch.int32)
    for call, sentence in (
        ((entry, key.float(), *rows, table), "index_key.dtype is float32, expected bfloat16"),
        ((entry, key[:, :64], *rows, table), "index_key.stride"),
        ((entry, key, *rows, table[0]), "block_table.ndim is 1"),
        ((entry, key, *rows, table[:1]), r"block_table.shape\[0\] is 1, expected 2"),
    ):
        with pytest.raises(InvalidArgumentError, match=sentence):
            ops.flush_write_csa(*call, *pool.tensors)
    with pytest.raises(InvalidArgumentError, match="keys is 'int4', expected 'nvfp4', "):
        ops.flush_write_csa(entry, key, *rows, table, *pool.tensors, keys="int4")
    with pytest.raises(InvalidArgumentError, match="rounding is 'up', expected 'nearest_even' or"):
        ops.flush_write_csa(entry, key, *rows, table, *pool.tensors, rounding="up")
    fp8, rope, inv, _codes, scales = pool.tensors
    same = fp8.view(-1)[: 3 * 2 * 64].view(3, 2, 64)
    with pytest.raises(InvalidArgumentError, match=r"flush.fp8 at .* overlaps key_codes"):
        ops.flush_write_csa(entry, key, *rows, table, fp8, rope, inv, same, scales)
    pool.check()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", [64, 9])
def test_states_rotate_and_reset(on: On, row: int, dtype: torch.dtype, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    ka, za, kb, zb = torch.randn(4, 5, 3, row, generator=made).to(dtype).unbind()
    lens = torch.full((5,), 3, dtype=torch.int32)
    slots, mask = i32(3, 0, -1, 1), torch.tensor([True, True, True, False])
    tensors = on(*(t.clone() for t in (ka, za, kb, zb, lens)))
    ops.csa_rotate_state(*on(slots, mask), *tensors)
    rotated = [3, 0]
    for got, before, after in zip(tensors, (ka, za, kb, zb, lens), (0, 0, ka, za, 0), strict=True):
        expected = before.clone()
        expected[rotated] = 0 if isinstance(after, int) else after[rotated]
        assert torch.equal(got.cpu(), expected)
    ka2, za2, _, _, lens2 = tensors
    ops.hca_reset_state(*on(slots, ~mask), ka2, za2, lens2)
    assert not ka2[1].any()
    assert not za2[1].any()
    assert lens2.tolist() == [0, 0, 3, 0, 3]
    assert torch.equal(ka2[2].cpu(), ka[2])
    assert torch.equal(ka2[4].cpu(), ka[4])


def test_a_slot_that_is_none_is_refused() -> None:
    ka, za = torch.ones(2, 2, 3, 8).unbind()
    lens = torch.ones(2, dtype=torch.int32)
    with pytest.raises(OutOfRangeError, match=r"state.slots\[1\] is 2, expected -1 to 1"):
        ops.hca_reset_state(i32(0, 2), None, ka, za, lens)
    assert ka.all()
    assert lens.all()
