"""Cover: chooses the kinds of files that together hold all layers and heads that a reader needs.

A Cover is of one of two sorts. Kinds of tokens hold K, V and planes of tokens. Kinds of states hold
recurrent states, each of which belongs to all tokens of a prefix. Files of the two sorts are stored
and deleted independently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import islice
from typing import cast

import numpy as np
import numpy.typing as npt

from kvx_core.snapshot import Precision
from kvx_core.snapshot.kind import Kind

_MOST_ASKED = 32  # a lookup asks for so many files of one key at most
_MOST_GAINS = 256  # calls of `hold` whose gains are remembered

Held = list[npt.NDArray[np.bool_]]  # for each layer: True for each head that is held
Heads = tuple[int, int] | Sequence[tuple[int, int]]  # (first, end) of all layers, or of each
_Parts = frozenset[tuple[int, int]]  # pairs of a layer and a head of it
_Gain = tuple[Kind, _Parts]  # a kind, and the wanted heads that it holds


class Cover:
    """The kinds of one sort in a space. Threads may share it."""

    def __init__(
        self,
        heads: Sequence[int],
        reach: Sequence[int],
        demand: Sequence[Precision],
        *,
        is_states: bool = False,
    ) -> None:
        """heads:  the number of heads of each layer of the model, 0 if it has nothing of this sort
        reach:  for each layer, how many tokens before the end of a prefix the reader needs
        demand: the precision of each layer of the reader's cache
        """
        self.heads, self.is_states = tuple(heads), is_states
        self._reach, self._demand = tuple(reach), tuple(demand)
        self.coarsest = reduce(Precision.meet, demand)  # states are computed from all layers
        self.all: tuple[Kind, ...] = ()  # kinds of this sort of the model, best first
        self._ranked: tuple[Kind, ...] = ()  # the kinds in `all` that this reader may load
        self.best: tuple[Kind, ...] = ()  # kinds that together hold all heads; empty: no kinds do
        self._gains: dict[object, tuple[object, _Parts, tuple[_Gain, ...]]] = {}  # see `hold`

    def rank(self, kinds: Iterable[Kind], accepts: Callable[[Kind], bool]) -> None:
        """Takes the kinds of this sort, and sorts them by precision: the reader's own first, then
        finer ones, then coarser ones. Among equals, the kind with most heads is first.

        accepts: True for a kind that this reader may load
        """
        mine = (kind for kind in kinds if kind.is_states == self.is_states)
        self.all = tuple(sorted(mine, key=self._order))
        self._ranked = tuple(filter(accepts, self.all))
        lacking, chosen = self.covered(self._ranked)
        self.best = () if lacking else tuple(chosen)

    def asked(self) -> Sequence[Kind]:
        """Returns the kinds whose files a lookup asks for, best first; at most 32."""
        return self._ranked[:_MOST_ASKED]

    def demand(self, kind: Kind, layer: int) -> Precision:
        """Returns the precision of the reader's cache in a layer of a kind.

        States are loaded as they were stored. They count as no more precise than the coarsest layer
        of the cache, since they are computed from all layers.
        """
        if self.is_states:
            return self.coarsest.meet(kind.precision_of_planes(layer))
        return self._demand[layer]

    def covered(self, kinds: Iterable[Kind]) -> tuple[int, list[Kind]]:
        """Returns how far before the end of a prefix the reader needs the layers of which `kinds`
        lack a head; 0 if they lack none. Also returns the kinds that contribute heads, in order.
        """
        held: Held = [np.zeros(heads, np.bool_) for heads in self.heads]
        chosen = []
        for kind in kinds:
            if _adds(kind, held):
                chosen.append(kind)
                if all(layer.all() for layer in held):
                    return 0, chosen
        lacking = (self._reach[i] for i, layer in enumerate(held) if not layer.all())
        return max(lacking, default=0), chosen

    def hold(
        self,
        layers: tuple[int, ...],
        heads: Heads,
        carried: Precision,
        is_there: Callable[[Kind], bool],
    ) -> bool:
        """True if existing files hold these heads of these layers, at least as precisely as the
        caller has them.

        heads:    the first head and one past the last, of all layers or of each
        carried:  the coarsest precision that the caller's values had before
        is_there: True if the file of a kind exists
        """
        key, kinds = (layers, heads, carried), self.all
        known = self._gains.get(key)
        if known is None or known[0] is not kinds:
            if len(self._gains) >= _MOST_GAINS:
                self._gains.clear()
            each = zip(layers, heads_of(heads, len(layers)), strict=True)
            of = frozenset((layer, head) for layer, held in each for head in range(*held))
            known = self._gains[key] = kinds, of, tuple(self._gains_of(kinds, of, carried))
        _, wanted, gains = known
        if any(gain == wanted and is_there(kind) for kind, gain in gains):
            return True
        lacking = wanted
        for kind, gain in gains:
            if gain != wanted and gain & lacking and is_there(kind):
                lacking = lacking - gain
        return not lacking

    def _gains_of(
        self,
        kinds: Iterable[Kind],
        wanted: _Parts,
        carried: Precision,
    ) -> Iterator[_Gain]:
        """Yields each kind that holds some of the wanted heads at least as precisely as the caller,
        and those heads.
        """
        for kind in islice(kinds, _MOST_ASKED):
            held = frozenset(
                (layer, head)
                for layer in kind.layers
                if kind.precision_of(layer).includes(self.demand(kind, layer).meet(carried))
                for head in range(*kind.heads_of(layer))
            )
            if held & wanted:
                yield kind, held & wanted

    def _order(self, kind: Kind) -> tuple[int, int, int, str]:
        rank = max(_rank(kind.precision_of(i), self.demand(kind, i)) for i in kind.layers)
        size = sum(hi - lo for lo, hi in map(kind.heads_of, kind.layers))
        return *rank, -size, kind.id


def heads_of(heads: Heads, num_layers: int) -> Sequence[tuple[int, int]]:
    """Returns the first head and one past the last for each of `num_layers` layers."""
    each = (heads,) * num_layers if isinstance(heads[0], int) else heads
    return cast("Sequence[tuple[int, int]]", each)


def _rank(precision: Precision, wanted: Precision) -> tuple[int, int]:
    """Returns a sort key for loading: the wanted precision first; then precisions that include it,
    the one with fewest digits first; then the others, the one with most digits first.
    """
    if precision == wanted:
        return 0, 0
    if precision.includes(wanted):
        return 1, precision.digits
    return 2, -precision.digits


def _adds(kind: Kind, held: Held) -> bool:
    """True if a kind has a head that is not held yet. Marks the kind's heads as held."""
    adds = False
    for layer in kind.layers:
        part = held[layer][slice(*kind.heads_of(layer))]
        if not part.all():
            part[:] = adds = True
    return adds
