"""Tokens in, compressed entries out: flush and handle of kvx_core.hybrid."""

from __future__ import annotations

import random
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_core import InvalidArgumentError
from kvx_core.hybrid import (
    Compressor,
    KVCacheManager,
    compress_csa,
    compress_hca,
    flush,
    handle,
    maybe_flush_csa,
    maybe_flush_hca,
    ops,
    prefill,
    prepare_forward,
)
from tests.hybrid import models, reference
from tests.hybrid.models import SMALL, Tokens, manager, tokens, weights

SWA, CSA, HCA = 0, 1, 2  # layers of `manager`
MAIN = weights(4, SMALL.head_dim, True, 1)
INDEX = weights(4, SMALL.indexer_head_dim, True, 2)
WHOLE = weights(128, SMALL.head_dim, False, 3)


@pytest.fixture(autouse=True, params=[reference, ops], ids=["torch", "libkvx"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels: those in torch, and KVX's own."""
    for module in (flush, handle, prefill):
        monkeypatch.setattr(module, "ops", request.param)
    found: ModuleType = request.param
    return found


def forward(
    caches: KVCacheManager,
    slots: list[int],
    before: list[int],
    after: list[int],
    csa: list[Tokens],
    hca: list[Tokens],
) -> None:
    """A step of one CSA and one HCA layer. csa, hca: all tokens of each request."""
    prepare_forward(caches, slots, before, after)
    parts = list(zip(before, after, strict=True))
    mine = Tokens.joined([t.part(*p) for t, p in zip(csa, parts, strict=True)])
    compress_csa(caches.acquire(CSA), *mine, MAIN, INDEX)
    whole = Tokens.joined([t.part(*p) for t, p in zip(hca, parts, strict=True)])
    compress_hca(caches.acquire(HCA), whole.k, whole.z, WHOLE)


def stored(caches: KVCacheManager, layer: int, slot: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """The valid entries of a slot: codes, RoPE dims, indexer keys with their scales behind."""
    view = caches.acquire(layer).read_classical_view()
    valid, per_block = int(view.valid_lens[slot]), view.entries_fp8.shape[1]
    e = torch.arange(valid)
    at = view.block_table[slot].long()[e // per_block], e % per_block
    keys = None
    if layer == CSA:
        index = caches.acquire(layer).read_indexer_view()
        keys = torch.cat((index.keys[at], index.scales[at]), 1)
    values = view.entries_fp8[at].view(torch.float8_e4m3fn).float() * view.inv_scale[at][:, None]
    return values, view.entries_rope[at], keys


def check(caches: KVCacheManager, slot: int, count: int, csa: Tokens, hca: Tokens) -> None:
    """The entries of a slot are those of the formulas, quantized once."""
    nope = SMALL.nope_dim
    for layer, k, z, ratio, compressor in (
        (CSA, csa.k, csa.z, 4, MAIN),
        (HCA, hca.k, hca.z, 128, WHOLE),
    ):
        wanted = models.entries(k[:count], z[:count], ratio, compressor).bfloat16()
        values, rope, keys = stored(caches, layer, slot)
        assert len(values) == len(wanted) == count // ratio
        # Sums in another order may round the other way.
        torch.testing.assert_close(rope, wanted[:, nope:], rtol=2**-7, atol=1e-6)
        largest = wanted[:, :nope].float().abs().amax(1, keepdim=True)
        error = (values - wanted[:, :nope].float()).abs()
        assert bool((error <= largest * (16 / 448) * (1 + 1e-5)).all())
        if keys is not None:
            index = models.entries(csa.index_k[:count], csa.index_z[:count], 4, INDEX).bfloat16()
            bytes_ = torch.stack([torch.cat(reference.fp4(row)) for row in index])
            assert float((bytes_ != keys).float().mean()) < 0.01


@pytest.mark.parametrize(
    ("form", "rounding"),
    [("fp8", "nearest_even"), ("mxfp4", "nearest_even"), ("mxfp4", "thresholds")],
)
@pytest.mark.parametrize("steps", [[141], [1] * 141, [7, 20, 1, 113]])
def test_keys_are_written_in_steps_of_any_size(steps: list[int], form: str, rounding: str) -> None:
    caches = manager(index_keys=form, index_rounding=rounding)
    slot, csa, hca, at = caches.admit_request(), tokens(141, 2, 5), tokens(141, 1, 6), 0
    for step in steps:
        forward(caches, [slot], [at], [at + step], [csa], [hca])
        at += step
    view, e = caches.acquire(CSA).read_indexer_view(), torch.arange(141 // 4)
    assert (view.form, view.rounding) == (form, rounding)
    place = view.block_table[slot].long()[e // 32], e % 32
    wanted = models.entries(csa.index_k, csa.index_z, 4, INDEX).bfloat16()
    encode = reference.ENCODE[form, rounding]
    codes, scales = zip(*(encode(row) for row in wanted[: len(e)]), strict=True)
    # Sums in another order may round the other way.
    assert float((view.keys[place] != torch.stack(codes)).float().mean()) < 0.01
    assert torch.equal(view.scales[place], torch.stack(scales))


# --- the whole path -----------------------------------------------------------------------------


def test_steps_of_any_size_write_the_same_entries() -> None:
    """Three requests of random steps beside each other, decoding and prefilling."""
    rng = random.Random(0)
    caches = manager()
    slots = [caches.admit_request() for _ in range(3)]
    csa = [tokens(150, 2, 10 + i) for i in range(3)]
    hca = [tokens(150, 1, 20 + i) for i in range(3)]
    counts = [0, 0, 0]
    while min(counts) < 140:
        after = [min(150, n + rng.choice([0, 1, 1, 5, 40, 130])) for n in counts]
        forward(caches, slots, counts, after, csa, hca)
        counts = after
        tails = caches.states[CSA].tail_len, caches.states[HCA].tail_len
        assert tails[0] is not None
        assert tails[1] is not None
        assert tails[0].tolist() == [n % 4 for n in counts]
        assert tails[1].tolist() == [n % 128 for n in counts]
    for slot, count, c, h in zip(slots, counts, csa, hca, strict=True):
        check(caches, slot, count, c, h)


def test_a_prompt_at_once_is_its_tokens_one_by_one() -> None:
    """Every byte of pools and tails, with 150 tokens in two steps and in steps of 1 to 3."""
    csa, hca = tokens(150, 2, 3), tokens(150, 1, 4)
    found = []
    for steps in ([127, 23], [1, 3, 2] * 25):
        caches = manager(1)
        slot, count = caches.admit_request(), 0
        for step in steps:
            forward(caches, [slot], [count], [count + step], [csa], [hca])
            count += step
        found.append(everything(caches))
        assert caches.held_blocks(CSA, slot) == [7, 6]
    for name, tensor in found[0].items():
        assert torch.equal(tensor.view(torch.uint8), found[1][name].view(torch.uint8)), name


def test_a_slot_forgets_its_last_request() -> None:
    """The first entry of a request must not see the tokens of the one before in its slot."""
    caches = manager(1)
    for seed in range(2):
        slot = caches.admit_request()
        csa, hca = tokens(140, 2, seed), tokens(140, 1, seed)
        forward(caches, [slot], [0], [138 + seed], [csa], [hca])
        check(caches, slot, 138 + seed, csa, hca)
        caches.release_request(slot)


def test_narrow_tails_diverge_from_the_second_entry_on() -> None:
    """tail_row_width "single" reads one projection as both: the first entry is right, the others
    are as far off as an unrelated vector would be."""
    wide = tokens(64, 2, 5)
    half = SMALL.head_dim, SMALL.indexer_head_dim
    narrow = Tokens(
        *(
            tensor[:, size:].contiguous()
            for tensor, size in zip(wide, (half[0], half[0], half[1], half[1]), strict=True)
        )
    )
    found = []
    for width, given in (("wide", wide), ("single", narrow)):
        caches = manager(1, types=("SWA", "CSA"), tail_row_width=width)
        slot = caches.admit_request()
        prepare_forward(caches, [slot], [0], [64])
        compress_csa(caches.acquire(CSA), *given, MAIN, INDEX)
        values, rope, _ = stored(caches, CSA, slot)
        found.append(torch.cat((values, rope.float()), 1))
    right, wrong = found
    assert torch.equal(right[0], wrong[0])
    error = (right - wrong).norm(dim=1) / right.norm(dim=1)
    assert error[1:].min() > 0.3
    assert error[1:].mean() > 0.7


def test_bfloat16_tails() -> None:
    caches = manager(1, tail_dtype=torch.bfloat16)
    slot = caches.admit_request()
    csa, hca = tokens(130, 2, 7), tokens(130, 1, 8)
    forward(caches, [slot], [0], [130], [csa], [hca])
    rounded = [Tokens(*(t.bfloat16().float() for t in part)) for part in (csa, hca)]
    check(caches, slot, 130, *rounded)


# --- one flush ----------------------------------------------------------------------------------


def everything(caches: KVCacheManager) -> dict[Any, Tensor]:
    found: dict[Any, Tensor] = {}
    for layer, state in caches.states.items():
        found |= {(layer, name): t.clone() for name, t in state.tensors.items()}
    for layer, pool in caches.paged.items():
        if pool is not None:
            found |= {(layer, name): t.clone() for name, t in pool.tensors.items()}
    return found


def changed(before: dict[Any, Tensor], caches: KVCacheManager) -> set[Any]:
    after = everything(caches)
    return {
        name
        for name, tensor in before.items()
        if not torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8))
    }


def test_a_flush_without_a_complete_entry_changes_no_byte() -> None:
    caches = manager()
    slot = caches.admit_request()
    csa, hca = tokens(3, 2, 1), tokens(3, 1, 1)
    forward(caches, [slot], [0], [3], [csa], [hca])
    before = everything(caches)
    maybe_flush_csa(caches.acquire(CSA), MAIN, INDEX)
    maybe_flush_hca(caches.acquire(HCA), WHOLE)
    assert changed(before, caches) == set()


def test_tails_rotate() -> None:
    """After four tokens b is what a was, a is empty; other requests keep theirs."""
    caches = manager()
    slots = [caches.admit_request(), caches.admit_request()]
    csa, hca = [tokens(4, 2, s) for s in (1, 2)], [tokens(4, 1, s) for s in (1, 2)]
    forward(caches, slots, [0, 0], [4, 2], csa, hca)
    state = caches.states[CSA].tensors
    for k, z, a, b in (
        ("tail_kb", "tail_zb", "tail_ka", "tail_za"),
        ("idx_kb", "idx_zb", "idx_ka", "idx_za"),
    ):
        given = csa[0].k if k == "tail_kb" else csa[0].index_k
        scores = csa[0].z if z == "tail_zb" else csa[0].index_z
        assert torch.equal(state[k][0], given)
        assert torch.equal(state[z][0], scores)
        assert not state[a][0].any()
        assert not state[b][0].any()
        assert not state[k][1].any()
        assert bool((state[z][1] == -1e9).all())
        assert bool(state[a][1, :2].any())
    assert state["tail_len"].tolist() == state["idx_tail_len"].tolist() == [0, 2, 0]


def test_the_kernels_run_in_order(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressor, write, state: whatever the masks are."""
    caches = manager()
    slot = caches.admit_request()
    prepare_forward(caches, [slot], [0], [1])
    called: list[str] = []
    for name in (
        "compress",
        "flush_write_csa",
        "flush_write_hca",
        "csa_rotate_state",
        "hca_reset_state",
    ):
        monkeypatch.setattr(kernels, name, lambda *_, name=name, **__: called.append(name))
    maybe_flush_csa(caches.acquire(CSA), MAIN, INDEX)
    assert called == [*["compress"] * 2, "flush_write_csa", *["csa_rotate_state"] * 2]
    called.clear()
    maybe_flush_hca(caches.acquire(HCA), WHOLE)
    assert called == ["compress", "flush_write_hca", "hca_reset_state"]


def test_flushes_that_are_refused() -> None:
    caches = manager()
    slot = caches.admit_request()
    prepare_forward(caches, [slot], [0], [9])
    none = torch.zeros(0, 1)
    with pytest.raises(InvalidArgumentError, match="of several entries in layer 1, expected one"):
        maybe_flush_csa(caches.acquire(CSA), MAIN, INDEX)
    with pytest.raises(InvalidArgumentError, match="layer 2 is of type HCA, expected CSA"):
        compress_csa(caches.acquire(HCA), none, none, none, none, MAIN, INDEX)
    with pytest.raises(InvalidArgumentError, match="layer 0 is of type SWA, expected HCA"):
        compress_hca(caches.acquire(SWA), none, none, WHOLE)
    with pytest.raises(InvalidArgumentError, match="layer 1 is of type CSA, expected HCA"):
        maybe_flush_hca(caches.acquire(CSA), WHOLE)


def test_weights_are_a_record() -> None:
    assert isinstance(MAIN, Compressor)
    assert MAIN.ape_b is not None
    assert WHOLE.ape_b is None


# --- windows ------------------------------------------------------------------------------------


def test_steps_of_several_tokens_say_where_they_stand(kernels: ModuleType) -> None:
    """A step's spans: else a device looks for the tokens of a request among all of them."""
    caches = manager(types=("SWA",))
    slots = [caches.admit_request(), caches.admit_request()]
    given: list[Any] = []

    def appended(*_: object, spans: ops.Spans | None, **__: object) -> None:
        given.append(spans and (spans.of.tolist(), spans.starts.tolist()))

    handle, x = caches.acquire(0), torch.zeros(45, SMALL.head_dim).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "append_swa", appended)
        prepare_forward(caches, slots, [0, 0], [40, 3])
        handle.write_swa(x[:43])
        prepare_forward(caches, slots[::-1], [3, 40], [3, 42])
        handle.write_swa(x[43:])
        prepare_forward(caches, slots, [42, 3], [43, 4])  # a place by an addition to the head
        handle.write_swa(x[:2])
    assert given == [([0] * 40 + [1] * 3, [0, 40, 43]), ([1, 1], [0, 0, 2]), None]


@pytest.mark.parametrize("ratios", [(4, 64), (16, 32), (8, 8)])
def test_other_ratios(ratios: tuple[int, int]) -> None:
    """A step at once and token by token write the entries of the formulas."""
    config = replace(SMALL, csa_compression_ratio=ratios[0], hca_compression_ratio=ratios[1])
    main = models.weights(ratios[0], SMALL.head_dim, True, 1)
    index = models.weights(ratios[0], SMALL.indexer_head_dim, True, 2)
    whole = models.weights(ratios[1], SMALL.head_dim, False, 3)
    csa, hca = tokens(150, 2, 3), tokens(150, 1, 4)
    found = []
    for steps in ([130, 20], [1] * 150):
        caches = KVCacheManager(config, models.layers("SWA", "CSA", "HCA"), 1, 150)
        slot, at = caches.admit_request(150), 0
        for step in steps:
            prepare_forward(caches, [slot], [at], [at + step])
            part, rest = csa.part(at, at + step), hca.part(at, at + step)
            compress_csa(caches.acquire(1), *part, main, index)
            compress_hca(caches.acquire(2), rest.k, rest.z, whole)
            at += step
        for layer, given, ratio, compressor in (
            (1, csa, ratios[0], main),
            (2, hca, ratios[1], whole),
        ):
            wanted = models.entries(given.k, given.z, ratio, compressor).bfloat16()
            _values, rope, _keys = stored(caches, layer, slot)
            assert len(rope) == 150 // ratio
            torch.testing.assert_close(rope, wanted[:, SMALL.nope_dim :], rtol=2**-7, atol=1e-6)
        found.append(everything(caches))
    for name, tensor in found[0].items():
        assert torch.equal(tensor.view(torch.uint8), found[1][name].view(torch.uint8)), name


def test_a_manager_without_scales() -> None:
    """Windows and entries in E4M3 of the numbers themselves."""
    caches = manager(needs_inv_scale=False)
    slot, csa, hca = caches.admit_request(), tokens(140, 2, 3), tokens(140, 1, 4)
    for first, last in ((0, 100), (100, 140)):
        forward(caches, [slot], [first], [last], [csa], [hca])
    for layer, given, ratio, compressor in ((CSA, csa, 4, MAIN), (HCA, hca, 128, WHOLE)):
        wanted = models.entries(given.k, given.z, ratio, compressor).bfloat16()
        view = caches.acquire(layer).read_classical_view()
        assert view.inv_scale is None
        e, per_block = torch.arange(140 // ratio), view.entries_fp8.shape[1]
        codes = view.entries_fp8[view.block_table[slot].long()[e // per_block], e % per_block]
        nope = wanted[:, : SMALL.nope_dim].float()
        expected = nope.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert float((codes != expected).float().mean()) < 0.01  # sums in another order
    x = 300 * torch.randn(3, SMALL.head_dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    prepare_forward(caches, [slot], [140], [143])
    handle = caches.acquire(SWA)
    handle.write_swa(x)
    window = handle.read_swa_view()
    assert window.inv_scale is None
    codes = x[:, : SMALL.nope_dim].float().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(window.fp8[slot, :3], codes.view(torch.uint8))


def test_windows() -> None:
    """More tokens than the window in one step, and two requests beside each other."""
    caches = manager(types=("SWA",))
    slots = [caches.admit_request(), caches.admit_request()]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, SMALL.head_dim, generator=generator).bfloat16()
    handle = caches.acquire(0)
    prepare_forward(caches, slots, [0, 0], [40, 3])
    handle.write_swa(x[:43])
    prepare_forward(caches, slots[::-1], [3, 40], [4, 41])
    handle.write_swa(x[43:45])
    view = handle.read_swa_view()
    assert view.head.tolist() == [41, 4, 0]
    for slot, rows in ((slots[0], [*range(25, 40), 44]), (slots[1], [40, 41, 42, 43])):
        order = view.in_order(slot)
        last = {slots[0]: 41, slots[1]: 4}[slot]
        assert view.positions[slot, order].tolist() == list(range(last - len(rows), last))
        assert torch.equal(view.rope[slot, order], x[rows, SMALL.nope_dim :])
        values = view.fp8[slot, order].view(torch.float8_e4m3fn).float()
        values *= view.inv_scale[slot, order][:, None]
        wanted = x[rows, : SMALL.nope_dim].float()
        bound = wanted.abs().amax(1, keepdim=True) * (16 / 448) * (1 + 1e-5)
        assert bool(((values - wanted).abs() <= bound).all())
    assert bool((view.positions[2] == -1).all())
