"""compress and compress_bulk against equations 11, 12, 22 and 23; the life of a tail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvx_core import InvalidArgumentError, OutOfRangeError
from kvx_core._c import abi, abi_hybrid
from kvx_core.hybrid import _arrays, ops
from kvx_core.types import DType
from tests.hybrid_ops import oracle
from tests.hybrid_ops.conftest import On

SEEDS = (0, 1, 2)
EPS = 1e-6


def cos_sin(positions: int, rope: int) -> Tensor:
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, rope, 2) / rope)
    return torch.cat([angles.cos(), angles.sin()], -1).float()


class Weights:
    def __init__(self, seed: int, ratio: int, dim: int, rope: int) -> None:
        made = torch.Generator().manual_seed(100 + seed)
        self.ape_a, self.ape_b = torch.randn(2, ratio, dim, generator=made).unbind()
        self.norm = torch.rand(dim, generator=made) + 0.5
        self.cos_sin = cos_sin(2048, rope)

    def finished(self, entry: Tensor, positions: Tensor) -> Tensor:
        return oracle.normed_and_rotated(entry, self.norm, EPS, self.cos_sin, positions)


def close(got: Tensor, expected: Tensor, most: float = 3e-6) -> None:
    assert (got.cpu().double() - expected).abs().max() <= most * expected.abs().max()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("ratio", "dim", "rope"), [(4, 512, 64), (3, 70, 6), (4, 128, 64)])
def test_csa_entries(on: On, ratio: int, dim: int, rope: int, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    ka, za, kb, zb = torch.randn(4, 3, ratio, 2 * dim, generator=made).unbind()
    kb[1], zb[1] = 0, -1e9
    w, positions = Weights(seed, ratio, dim, rope), torch.tensor([0, 4, 2044])
    mask, out = torch.tensor([True, True, False]), torch.full((3, dim), 7.0)
    moved = on(ka, za, kb, zb, w.ape_a, w.ape_b, w.norm)
    to = on(out)
    ops.compress(*moved, EPS, *on(w.cos_sin, positions, mask), to)
    entry = oracle.csa_entry(ka, za, kb, zb, w.ape_a, w.ape_b)
    close(to[:2], w.finished(entry, positions)[:2])
    assert (to[2] == 7).all()
    only_a = oracle.hca_entry(ka[1, :, dim:], za[1, :, dim:], w.ape_a)
    close(to[1:2], w.finished(only_a[None], positions[1:2]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_hca_entries_by_slot(on: On, out_dtype: torch.dtype, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    ratio, dim = 128, 512
    ka, za = torch.randn(2, 3, ratio, dim, generator=made).to(torch.bfloat16).unbind()
    w, positions = Weights(seed, ratio, dim, 64), torch.tensor([128, 0, 0, 1920], dtype=torch.int32)
    slots = torch.tensor([2, -1, 1, 0], dtype=torch.int32)
    to = on(torch.full((4, dim), 7.0, dtype=out_dtype))
    ops.compress(
        *on(ka, za), None, None, on(w.ape_a), None, on(w.norm), EPS,
        *on(w.cos_sin, positions), None, to, slots=on(slots),
    )  # fmt: skip
    entry = oracle.hca_entry(ka[slots], za[slots], w.ape_a)
    expected = w.finished(entry, positions)
    expected[1] = 7
    close(to, expected, 3e-6 if out_dtype == torch.float32 else 2**-8)


def test_a_row_of_a_bulk_whose_slot_is_minus_1_is_skipped(on: On) -> None:
    """Through C, as compress_bulk takes no slots. Others say nothing in bulk, however large."""
    rows, ratio, dim = 5, 4, 32
    k, z = on(*torch.randn(2, rows * ratio, dim, generator=torch.Generator().manual_seed(1)))
    found, every = on(torch.full((rows, dim), 7.0)), on(torch.full((rows, dim), 7.0))
    slots = on(torch.tensor([5, -1, -1, 2**31 - 1, -1], dtype=torch.int32))
    for out, given in ((every, None), (found, slots.data_ptr())):
        desc = abi_hybrid.kvx_hybrid_compress_t(
            memory=_arrays.memory_of(k.device),
            num_rows=rows,
            num_slots=1,
            ratio=ratio,
            head_dim=dim,
            position_bytes=8,
            state=DType.F32,
            out_dtype=DType.F32,
            flags=abi_hybrid.BULK | abi_hybrid.NO_OVERLAP,
            ka=k.data_ptr(),
            za=z.data_ptr(),
            out=out.data_ptr(),
            slots=given,
        )
        abi.check(abi_hybrid.functions().kvx_hybrid_compress(desc, None))
    skipped = torch.tensor([False, True, True, False, True])
    assert (found.cpu()[skipped] == 7).all()
    assert torch.equal(found.cpu()[~skipped], every.cpu()[~skipped])


def test_all_scores_absent_is_their_mean_and_no_nan(on: On) -> None:
    ka, za = torch.randn(1, 4, 16), torch.full((1, 4, 16), -1e9)
    out = on(torch.zeros(1, 16))
    ops.compress(*on(ka, za), *[None] * 5, EPS, None, None, None, out)
    close(out, ka.mean(1).double())


@pytest.mark.parametrize("seed", SEEDS)
def test_12_tokens_step_by_step_are_the_bulk(on: On, seed: int) -> None:
    """The whole life of a CSA tail: append, compress, rotate; and narrow rows are not the paper."""
    made = torch.Generator().manual_seed(seed)
    ratio, dim, rope = 4, 96, 8
    k, z = torch.randn(2, 12, 2 * dim, generator=made).unbind()
    w, first = Weights(seed, ratio, dim, rope), torch.tensor([0])
    everything = on(w.ape_a, w.ape_b, w.norm)
    tables = on(w.cos_sin)

    def steps(width: int, row: str) -> Tensor:
        state = [torch.zeros(1, ratio, width) for _ in range(3)]
        state.append(torch.full((1, ratio, width), -1e9))
        ka, za, kb, zb = on(*state)
        lens, slots = on(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
        made = []
        for t in range(12):
            rows = (k[t : t + 1, -width:], z[t : t + 1, -width:])
            ops.append_tail(*on(*(r.contiguous() for r in rows)), slots, ka, za, lens)
            done = (t + 1) % ratio == 0
            out = on(torch.zeros(1, dim))
            mask, position = on(torch.tensor([done]), first + t // ratio * ratio)
            ops.compress(ka, za, kb, zb, *everything, EPS, tables, position, mask, out, row=row)
            before = ka.clone(), za.clone()
            ops.csa_rotate_state(slots, mask, ka, za, kb, zb, lens)
            if done:
                assert torch.equal(kb, before[0])
                assert torch.equal(zb, before[1])
                assert not ka.any()
                assert not za.any()
                assert lens.item() == 0
                made.append(out)
        return torch.cat(made)

    wide = steps(2 * dim, "wide")
    bulk = on(torch.zeros(3, dim))
    positions = on(torch.arange(0, 12, ratio))
    ops.compress_bulk(*on(k, z), *everything, EPS, tables, positions, bulk)
    assert (wide - bulk).abs().max() <= 1e-6
    tail = ka, za, kb, zb = [], [], [], []
    for i in range(3):
        ka.append(k[4 * i : 4 * i + 4]), za.append(z[4 * i : 4 * i + 4])
        kb.append(k[4 * i - 4 : 4 * i] if i else torch.zeros(4, 2 * dim))
        zb.append(z[4 * i - 4 : 4 * i] if i else torch.full((4, 2 * dim), -1e9))
    entry = oracle.csa_entry(*map(torch.stack, tail), w.ape_a, w.ape_b)
    close(bulk, w.finished(entry, torch.arange(0, 12, ratio)))
    continued = on(torch.zeros(2, dim))
    ops.compress_bulk(
        *on(k[4:], z[4:]), *everything, EPS, tables, positions[1:], continued,
        kb=on(k[:4]), zb=on(z[:4]),
    )  # fmt: skip
    assert torch.equal(continued, bulk[1:])
    narrow = steps(dim, "single")
    assert torch.equal(narrow[0], wide[0])
    error = (narrow[1:] - wide[1:]).norm(dim=-1) / wide[1:].norm(dim=-1)
    # About 1.05: as far off as an unrelated vector, for want of the second projection.
    assert ((error > 0.8) & (error < 1.3)).all()


def test_127_tokens_make_no_hca_entry_and_the_128th_does(on: On) -> None:
    dim, ratio = 32, 128
    k, z = torch.randn(2, ratio, dim).unbind()
    ka, za, lens = on(torch.zeros(2, ratio, dim), torch.zeros(2, ratio, dim), torch.zeros(2).int())
    slots = torch.ones(127, dtype=torch.int32)
    ops.append_tail(*on(k[:127], z[:127], slots), ka, za, lens)
    assert lens.tolist() == [0, 127]
    ops.append_tail(*on(k[127:], z[127:], slots[:1]), ka, za, lens)
    out = on(torch.zeros(2, dim))
    mask = on(lens.cpu() == ratio)
    ops.compress(ka, za, *[None] * 5, EPS, None, None, mask, out)
    close(out[1:], oracle.hca_entry(k, z, torch.zeros(1))[None])
    ops.hca_reset_state(on(torch.tensor([0, 1]).int()), mask, ka, za, lens)
    assert not ka.any()
    assert not za.any()
    assert lens.tolist() == [0, 0]
    bulk = on(torch.zeros(1, dim))
    ops.compress_bulk(*on(k, z), *[None] * 3, EPS, None, None, bulk, overlap=False)
    assert torch.equal(bulk[0], out[1])


def test_wrong_arguments_are_named() -> None:
    ka, za, kb, zb = torch.zeros(4, 2, 4, 16).unbind()
    out, table, positions = torch.zeros(2, 8), cos_sin(4, 4), torch.tensor([0, 4])
    none = [None] * 3
    with pytest.raises(OutOfRangeError, match=r"compress.positions\[1\] is 4, expected 0 to 3"):
        ops.compress(ka, za, kb, zb, *none, EPS, table, positions, None, out)
    mask = torch.tensor([True, False])
    ops.compress(ka, za, kb, zb, *none, EPS, table, positions, mask, out)
    for call, options, sentence in (
        ((ka, za, kb, zb, *none, EPS, None, None, None, out), {"row": "narrow"}, "row is 'narrow'"),
        ((ka, za, kb, zb, *none, EPS, None, None, None, out), {"row": "single"}, r"ka.shape\[2\]"),
        ((ka, za, kb, None, *none, EPS, None, None, None, out), {}, "compress.kb is"),
        ((ka, za, kb, zb, *none, "1", None, None, None, out), {}, "eps is '1'"),
        ((ka, za, kb, zb, *none, -1.0, None, None, None, out), {}, "compress.eps is -1"),
        ((ka, za, kb, zb, *none, EPS, table, None, None, out), {}, "positions is None"),
        ((ka, za, kb, zb, *none, EPS, table[:, :3].contiguous(), positions, None, out), {}, "even"),
        ((ka, za, kb, zb, *none, EPS, None, None, None, torch.zeros(3, 8)), {}, "or pass slots"),
    ):
        with pytest.raises(InvalidArgumentError, match=sentence):
            ops.compress(*call, **options)
    k, z = torch.zeros(2, 7, 16).unbind()
    with pytest.raises(InvalidArgumentError, match=r"k.shape\[0\] is 7, expected a multiple of"):
        ops.compress_bulk(k, z, *none, EPS, None, None, out)


@pytest.mark.parametrize("dim", [512, 70])
def test_every_backend_has_the_same_bits(on: On, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.Generator().manual_seed(5)
    tails = torch.randn(4, 3, 4, 2 * dim, generator=made).unbind()
    w, positions = Weights(5, 4, dim, 6), torch.tensor([0, 4, 1024])
    given = (w.ape_a, w.ape_b, w.norm)
    out = on(torch.zeros(3, dim))
    ops.compress(*on(*tails), *on(*given), EPS, *on(w.cos_sin, positions), None, out)
    monkeypatch.undo()  # on the CPU
    expected = torch.zeros(3, dim)
    ops.compress(*tails, *given, EPS, w.cos_sin, positions, None, expected)
    assert torch.equal(out.cpu(), expected)
