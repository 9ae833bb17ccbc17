"""States of every family between engines' layouts and numbers of ranks, against tests/states.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvx_core import (
    CacheView,
    FactsMismatchError,
    InvalidArgumentError,
    Plan,
    Section,
    Snapshot,
    UnsupportedError,
    migrate,
    verify,
)
from tests.states import FACTS, FAMILIES, Family, Layout, Rank, model_states

# As engines store them: (slot, channel, time) or (slot, time, channel), [K, V] or [V, K].
LAYOUTS = {
    "ds": Layout(),
    "sd": Layout(conv=(0, 2, 1)),
    "vk": Layout(state=(0, 1, 3, 2)),
    "padded": Layout(before=1, gap=7),
    "drafts": Layout(conv=(0, 2, 1), behind=2, gap=3),
    "slots-inside": Layout(conv=(1, 0, 2), state=(1, 0, 2, 3)),
}
SHARDS = [(1, 2), (2, 4), (4, 8), (8, 1), (8, 2), (2, 8), (4, 4)]


def ranks(family: Family, layout: Layout, count: int, **slots: Any) -> list[Rank]:
    return [Rank(family, layout, rank, count, **slots) for rank in range(count)]


def move(src: list[Rank], dst: list[Rank], tokens: int = 9, **options: Any) -> None:
    """Between all ranks that hold channels in common."""
    for a in src:
        for b in dst:
            ends = a.view(tokens), b.view(tokens), [tokens] * len(a.slots)
            if shares(a, b):
                migrate(*ends, **options)
            else:
                with pytest.raises(InvalidArgumentError, match="no channel or head in common"):
                    migrate(*ends, **options)


def shares(a: Rank, b: Rank) -> bool:
    """Whether two ranks have a channel or head of the model in common."""
    widths = {**a.family.conv, **({"heads": a.family.state[0]} if a.family.state else {})}
    return any(set(a.part(name, n)) & set(b.part(name, n)) for name, n in widths.items())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("counts", SHARDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.kind}-{len(f.whole)}")
def test_ranks_n_to_m(family: Family, counts: tuple[int, int], seed: int) -> None:
    layouts = list(LAYOUTS.values())
    rng = np.random.default_rng(seed)
    full = model_states(family, 2, seed)
    src, dst = (
        ranks(family, layouts[rng.integers(len(layouts))], count, slots=slots)
        for count, slots in zip(counts, ((2, 0), (0, 1)), strict=True)
    )
    for rank in src:
        rank.write(full)
    move(src, dst)
    for rank in dst:
        rank.check(full)
    for rank in src:
        rank.check(full)


@pytest.mark.parametrize("there", LAYOUTS)
@pytest.mark.parametrize("here", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.kind}-{len(f.whole)}")
def test_layouts(family: Family, here: str, there: str) -> None:
    full = model_states(family, 2, 5)
    (src,), (dst,) = ranks(family, LAYOUTS[here], 1), ranks(family, LAYOUTS[there], 1)
    src.write(full)
    moved = migrate(src.view(4), dst.view(), [4, 4])
    assert moved == 0  # bytes of tokens: there are none
    found = verify(src.view(4), dst.view(), [4, 4])
    assert found
    assert found.num_values == 2 * sum(one[0].size for one in full.values())
    dst.check(full)


def test_the_order_of_sections_and_of_time() -> None:
    family = FAMILIES[3]
    full = model_states(family, 2, 1)
    src = Rank(family, Layout(sections=("v", "q", "k"), newest_first=True), 0, 1)
    dst = Rank(family, Layout(conv=(0, 2, 1), before=1), 0, 1)
    src.write(full)
    migrate(src.view(3), dst.view(3), [3, 3])
    dst.check(full)


def test_a_plan_of_states_is_kept() -> None:
    family = FAMILIES[3]
    full = model_states(family, 2, 1)
    src, dst = Rank(family, LAYOUTS["vk"], 0, 1), Rank(family, LAYOUTS["sd"], 0, 1)
    stood_for = [3, 3]
    view = src.view()
    object.__setattr__(view, "state_tokens", lambda: stood_for)
    plan = Plan.migrate(view, dst.view(), [3, 3])  # as many as slots name
    src.write(full)
    plan.run([3, 3])
    dst.check(full)
    stood_for[1] = 4
    with pytest.raises(FactsMismatchError, match="sequence 1 stand for 4 tokens at the source"):
        plan.run([3, 3])


def test_a_sequence_that_does_not_move_keeps_its_state() -> None:
    family = FAMILIES[5]
    full = model_states(family, 2, 1)
    src, dst = Rank(family, Layout(), 0, 1), Rank(family, Layout(), 0, 1)
    src.write(full)
    migrate(src.view(7), dst.view(), [7, 0])
    dst.slots = (dst.slots[0],)
    dst.check(full)


@pytest.mark.parametrize("absent", ["src", "dst"])
def test_a_sequence_does_not_move_without_its_state(absent: str) -> None:
    slots = {"src": (2, 0), "dst": (2, 0)} | {absent: (1, -1)}
    src, dst = (Rank(FAMILIES[3], Layout(), 0, 1, slots=slots[end]) for end in ("src", "dst"))
    with pytest.raises(InvalidArgumentError, match="sequence 1 has no slot for its state at the"):
        migrate(src.view(3), dst.view(), [3, 3])
    migrate(src.view(3), dst.view(), [3, 0])  # of which no token moves


class TestTheNumberOfTokens:
    """A state is never cut, never extended."""

    def ends(self) -> tuple[Rank, Rank]:
        src, dst = (Rank(FAMILIES[3], Layout(), 0, 1) for _ in range(2))
        src.write(model_states(FAMILIES[3], 2, 1))
        return src, dst

    @pytest.mark.parametrize("lens", [[8, 9], [9, 10]])
    def test_other_tokens_are_refused(self, lens: list[int]) -> None:
        src, dst = self.ends()
        with pytest.raises(FactsMismatchError, match="stand for 9 tokens at the source"):
            migrate(src.view(9), dst.view(), lens)
        with pytest.raises(FactsMismatchError, match="stand for 9 tokens at the source"):
            verify(src.view(9), dst.view(), lens)
        dst.slots = ()
        dst.check({"conv": [], "state": []})

    def test_the_destination_is_asked_too(self) -> None:
        src, dst = self.ends()
        with pytest.raises(FactsMismatchError, match="stand for 12 tokens at the destination"):
            migrate(src.view(9), dst.view(12), [9, 9])

    def test_it_must_be_known(self) -> None:
        src, dst = self.ends()
        with pytest.raises(FactsMismatchError, match="state_tokens is unknown at the source"):
            migrate(src.view(), dst.view(9), [9, 9])

    def test_starts_count(self) -> None:
        src, dst = self.ends()
        view, there = src.view(9), dst.view(9)
        with pytest.raises(FactsMismatchError, match="move end at 5"):
            migrate(view.at(starts=[0, 0]), there.at(starts=[0, 0]), [5, 5])
        migrate(view.at(starts=[4, 4]), there.at(starts=[4, 4]), [5, 5])

    @pytest.mark.parametrize("given", [[9], lambda: [9, 9], np.array([9, 9])])
    def test_how_it_is_said(self, given: Any) -> None:
        src, dst = self.ends()
        view = src.view()
        object.__setattr__(view, "state_tokens", given)
        migrate(view, dst.view(), [9, 9])

    @pytest.mark.parametrize(
        ("given", "sentence"),
        [
            (lambda: "9", "is '9', expected an integer, or one per sequence"),
            ([9, 9, 9][:0], "gives 0 numbers, expected 1 or at least 2"),
        ],
    )
    def test_what_it_may_not_be(self, given: Any, sentence: str) -> None:
        src, dst = self.ends()
        view = src.view()
        object.__setattr__(view, "state_tokens", given)
        with pytest.raises(InvalidArgumentError, match=sentence):
            migrate(view, dst.view(), [9, 9])


class TestWhatIsNotAlike:
    """Refused by name, with all reasons."""

    def refused(self, a: Family, b: Family, here: Layout | None = None, **options: Any) -> str:
        src, dst = Rank(a, here or Layout(), 0, 1), Rank(b, Layout(), 0, 1)
        with pytest.raises(FactsMismatchError) as error:
            migrate(src.view(1), dst.view(), [1, 1], **options)
        return str(error.value)

    def test_kinds(self) -> None:
        said = self.refused(FAMILIES[3], Family("kda", FAMILIES[3].conv, FAMILIES[3].state))
        assert "kind of CONV_STATE of layer 0 is 'gdn' at the source and 'kda'" in said

    def test_widths_and_columns(self) -> None:
        said = self.refused(FAMILIES[5], Family("short_conv", {"x": 20}, (), num_columns=3))
        assert "section x of CONV_STATE x of layer 0 has 40 entries at the source and 20" in said
        assert "num_columns of CONV_STATE x of layer 0 is 2 at the source and 3" in said

    def test_numbers_of_a_head(self) -> None:
        said = self.refused(Family("lightning", {}, (8, 4, 5)), Family("lightning", {}, (8, 5, 4)))
        assert "has [4, 5] numbers in ('key', 'value') at the source and [5, 4]" in said

    def test_sections_of_one_end(self) -> None:
        said = self.refused(FAMILIES[0], FAMILIES[5])
        assert "layer 0 has section heads of its recurrent state at one end alone" in said

    def test_rounding_is_asked_for(self) -> None:
        half = Layout(dtypes=(np.float16, np.float16))
        said = self.refused(FAMILIES[3], FAMILIES[3], half)
        assert "CONV_STATE of layer 0 is F16 at the source and F32 at the destination" in said
        src, dst = Rank(FAMILIES[3], half, 0, 1), Rank(FAMILIES[3], Layout(), 0, 1)
        full = model_states(FAMILIES[3], 2, 1)
        full = {name: one.astype(np.float16).astype(np.float32) for name, one in full.items()}
        src.write(full)
        migrate(src.view(1), dst.view(), [1, 1], convert_states=True)
        dst.check(full)

    def test_ranks_apart(self) -> None:
        src, dst = Rank(FAMILIES[3], Layout(), 0, 2), Rank(FAMILIES[3], Layout(), 1, 2)
        with pytest.raises(InvalidArgumentError, match="rank 0 of 2 at src and rank 1 of 2 at dst"):
            migrate(src.view(1), dst.view(), [1, 1])


def test_verify_names_the_place() -> None:
    family = FAMILIES[3]
    full = model_states(family, 2, 1)
    src = Rank(family, Layout(), 0, 1)
    dst = Rank(family, Layout(conv=(0, 2, 1), sections=("k", "q", "v")), 0, 1)
    src.write(full)
    dst.write(full)
    assert verify(src.view(2), dst.view(), [2, 2])
    dst.memory["conv"][dst.slots[1], 5, 2] += 1  # k begins the plane: its channel 5, last column
    found = verify(src.view(2), dst.view(), [2, 2]).difference
    assert found is not None
    assert (found.layer, found.kv, found.sequence, found.head, found.dim) == (
        0,
        "CONV_STATE k",
        1,
        5,
        2,
    )


class TestFiles:
    """What a section of a snapshot or a store may have."""

    def section(self, family: Family, layout: Layout, count: int = 1) -> Section:
        rank = Rank(family, layout, 0, count, slots=(1,))
        facts = replace(FACTS, first_kv_head=0, total_kv_heads=1)
        view = CacheView((), facts, planes=tuple(rank.planes()), dense=True)
        return Section((0,), view, None, state_tokens=3)

    def test_columns_without_a_meaning_are_left_out(self) -> None:
        for layout in (Layout(before=1), Layout(conv=(0, 2, 1), behind=2)):
            conv = self.section(FAMILIES[3], layout).view.planes[0]
            assert conv.extent("dim") == 3

    def test_states_that_files_do_not_have_so(self) -> None:
        with pytest.raises(UnsupportedError, match="has its newest input first"):
            self.section(FAMILIES[3], Layout(newest_first=True))
        for layout, count, sentence in (
            (Layout(), 2, "CONV_STATE of layer 0 .* is rank 0 of 2, expected all ranks together"),
            (Layout(sections=("v", "q", "k")), 1, r"has the sections \('v', 'q', 'k'\)"),
        ):
            section = self.section(FAMILIES[3], layout, count)
            with pytest.raises(UnsupportedError, match=sentence):
                Snapshot.capture([1, 2, 3], [section])
