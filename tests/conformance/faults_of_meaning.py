"""Engines with one thing wrong each: windows, scales, states, operations, facts, moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvx_conformance.engine import State
from kvx_core import CacheDesc, CacheView, ScaleDesc, describe
from tests.conformance.doubles import (
    DIM,
    HEADS,
    Computing,
    Paged,
    Recurrent,
    Scaled,
    Window,
    fault,
)

# ---- windows ----


@fault("windows.the_window_holds_the_last_tokens")
@fault("windows.a_ring_moves_in_order")
class RingTurnedByOne(Window):
    def slot(self, position: int) -> int:
        return (position + (self.count > self.window)) % self.window


@fault("windows.the_window_holds_the_last_tokens")
class RingTooSmall(Window):
    def held(self) -> int:
        return min(self.count, self.window - 3)


@fault("windows.dropped_tokens_cannot_be_read")
class ReadsWhatHasGone(Window):
    def read(self, sequence: int, position: int) -> Any:
        slot = position % self.window
        return tuple(np.stack([one[0, slot] for one in half]) for half in (self.k, self.v))


@fault("windows.tokens_keep_their_positions")
class PositionsFromZero(Window):
    def span(self, sequences: Any) -> Any:
        return self.describe().at(slots=[*(self.table(0).slots or ())], first_positions=0)


@fault("windows.the_window_is_a_fact")
class WindowUnsaid(Window):
    def facts(self) -> Any:
        return replace(super().facts(), window=0)


# ---- scales ----


@fault("scales.each_number_has_its_scale")
class ScaleOfTheNextHead(Scaled):
    def describe(self) -> Any:
        found = super().describe()
        rolled = tuple(
            ScaleDesc.of(np.roll(scale[0], 1).copy(), "PER_HEAD") for scale in self.scales
        )
        return replace(found, k_scales=rolled)


@fault("scales.each_number_has_its_scale")
class ScalesOfKAndVExchanged(Scaled):
    def describe(self) -> Any:
        found = super().describe()
        return replace(found, k_scales=found.v_scales, v_scales=found.k_scales)


@fault("scales.each_number_has_its_scale")
class InverseScales(Scaled):
    def describe(self) -> Any:
        k, v = (
            tuple(ScaleDesc.of(1 / scale[half], "PER_HEAD") for scale in self.scales)
            for half in (0, 1)
        )
        return replace(super().describe(), k_scales=k, v_scales=v)


@fault("scales.each_number_has_its_scale")
class AnotherFp8(Scaled):
    def layer(self, i: int) -> CacheDesc:
        halves = (describe(one[i], "BLOCK_HND", dtype="float8_e5m2") for one in (self.k, self.v))
        return CacheDesc.from_kv(*halves)


@fault("scales.numbers_are_near_those_given")
class MultipliesToStore(Scaled):
    def store(self, block: int, offset: int, key: Any, value: Any) -> None:
        scales = np.stack(self.scales)[..., None] ** 2
        super().store(block, offset, key * scales[:, 0], value * scales[:, 1])


@fault("scales.scales_are_of_this_cache")
class NegativeScales(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [-scale for scale in self.scales]


@fault("scales.scales_are_read_when_used")
class CopiesItsScales(Scaled):
    """Every step doubles the scales and halves what is stored; a description has a copy of them."""

    def write(self, sequence: int, tokens: Any, keys: Any, values: Any) -> None:
        for scale in self.scales:
            scale *= 2
        for half in (self.k, self.v):
            for one in half:
                numbers = one.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
                one[...] = (numbers / 2).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        super().write(sequence, tokens, keys, values)

    def describe(self) -> Any:
        k, v = (
            tuple(ScaleDesc.of(scale[half].copy(), "PER_HEAD") for scale in self.scales)
            for half in (0, 1)
        )
        return replace(super().describe(), k_scales=k, v_scales=v)


@fault("scales.the_convention_is_said")
class ConventionUnsaid(Scaled):
    def facts(self) -> Any:
        return replace(super().facts(), scale_convention=None)


# ---- states and positions ----


@fault("states.a_state_stands_for_its_tokens")
class StateOffByOne(Recurrent):
    def state(self, sequence: int) -> State:
        found = super().state(sequence)
        return replace(found, position=found.position + 1)


@fault("states.a_state_that_was_exported_stays")
class StateIsAlive(Recurrent):
    def write(self, sequence: int, tokens: Any, keys: Any, values: Any) -> None:
        kept = self.states[sequence][1]
        super().write(sequence, tokens, keys, values)
        count, sums = self.states[sequence]
        kept[...] = sums
        self.states[sequence] = count, kept

    def state(self, sequence: int) -> State:
        count, sums = self.states[sequence]
        return State(count, [sums])


@fault("states.a_state_goes_on_alike")
class StateOfZeros(Recurrent):
    def set_state(self, sequence: int, state: State) -> None:
        super().set_state(sequence, replace(state, data=[0 * state.data[0]]))


@fault("states.a_state_goes_on_alike")
class StateForgetsItsTokens(Recurrent):
    """It is the last token alone, so that one of a token less would do."""

    def write(self, sequence: int, tokens: Any, keys: Any, values: Any) -> None:
        super().write(sequence, tokens, keys, values)
        self.states[sequence] = self.states[sequence][0], np.full(4, float(tokens[-1]))

    def state(self, sequence: int) -> State:
        return replace(super().state(sequence), position=self.lengths[sequence])

    def set_state(self, sequence: int, state: State) -> None:
        super().set_state(sequence, replace(state, position=7))


@fault("states.a_state_that_is_cut_is_refused")
class TakesHalfAState(Recurrent):
    def set_state(self, sequence: int, state: State) -> None:
        super().set_state(sequence, replace(state, data=[np.resize(state.data[0], 4)]))


@fault("states.tokens_have_their_own_positions")
class PositionsFromOne(Paged):
    def positions(self, sequence: int) -> list[int]:
        return [position + 1 for position in super().positions(sequence)]


@fault("states.keys_turn_as_the_facts_say")
class SaysInterleaved(Computing):
    def facts(self) -> Any:
        return replace(super().facts(), rotary="interleaved")


@fault("states.keys_turn_as_the_facts_say")
class SaysFewerDims(Computing):
    def facts(self) -> Any:
        return replace(super().facts(), rotary_dim=DIM - 2)


@fault("states.keys_turn_as_the_facts_say")
class SaysNotApplied(Computing):
    def facts(self) -> Any:
        return replace(super().facts(), rope_applied=False)


@fault("states.keys_turn_as_the_facts_say")
class TurnsUnevenly(Computing):
    def turned(self, key: Any, position: int) -> Any:
        return super().turned(key, position + (position > 5))


# ---- operations ----


@fault("operations.the_middle_is_refused")
@fault("operations.the_middle_is_not_written")
class OperationUnseen(Paged):
    def describe(self) -> CacheView:
        found: CacheView = super().describe()
        return replace(found, outdated=None)


@fault("operations.the_end_is_right")
class OperationNeverEnds(Paged):
    @contextmanager
    def operation(self) -> Iterator[None]:
        with super().operation():
            yield
        self.pending = True


# ---- facts ----


@fault("facts.facts_are_complete")
class NoFingerprint(Paged):
    def facts(self) -> Any:
        return replace(super().facts(), fingerprint=None)


@fault("facts.facts_are_complete")
class NoVersion(Paged):
    def facts(self) -> Any:
        return replace(super().facts(), engine="double")


@fault("facts.facts_are_stable")
class FingerprintOfAnObject(Paged):
    def facts(self) -> Any:
        return replace(super().facts(), fingerprint=f"model at {id(self)}")


@fault("facts.facts_are_stable")
class AnotherModelInItsViews(Paged):
    def describe(self) -> Any:
        return replace(super().describe(), facts=replace(self.facts(), fingerprint="another"))


@fault("facts.facts_fit_the_descriptors")
class HeadsOfARank(Paged):
    def facts(self) -> Any:
        return replace(super().facts(), first_kv_head=2)


@fault("facts.facts_fit_the_descriptors")
class LayersOfTheModel(Paged):
    def facts(self) -> Any:
        return replace(super().facts(), num_layers=32)


# ---- moves ----


@fault("moves.the_engine_goes_on")
class ComputesOnItsOwnCopy(Computing):
    def __init__(self) -> None:
        super().__init__()
        self.own: dict[tuple[int, int], Any] = {}
        self.inside = False

    def write(self, sequence: int, tokens: Any, keys: Any, values: Any) -> None:
        self.inside = True
        super().write(sequence, tokens, keys, values)
        self.inside = False

    def read(self, sequence: int, position: int) -> Any:
        if not self.inside:
            return super().read(sequence, position)
        return self.own.setdefault((sequence, position), super().read(sequence, position))

    def reserve(self, sequence: int, count: int) -> None:
        super().reserve(sequence, count)
        for position in range(count):
            self.own[sequence, position] = super().read(sequence, position)


@fault("moves.the_engine_goes_on")
class ComputesOnNothing(Computing):
    def read(self, sequence: int, position: int) -> Any:
        return super().read(sequence, position)

    def write(self, sequence: int, tokens: Any, keys: Any, values: Any) -> None:
        for token in tokens:
            position = self.lengths.get(sequence, 0)
            own = np.random.default_rng(token).standard_normal((2, 2, HEADS, DIM))
            pair = (
                np.stack([self.turned(one, position) for one in own[0]])[:, None],
                own[1][:, None],
            )
            Paged.write(self, sequence, [token], *(one.astype(np.float32) for one in pair))


@fault("moves.tokens_come_back")
class HeadsShareMemory(Paged):
    """The description gives head 1 the memory of head 0."""

    def layer(self, i: int) -> CacheDesc:
        found = []
        for one in (self.k[i], self.v[i]):
            strides = (one.strides[0], 0, *one.strides[2:])
            found.append(describe(as_strided(one, one.shape, strides), "BLOCK_HND"))
        return CacheDesc.from_kv(*found)
