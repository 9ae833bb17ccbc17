"""Cover: which kinds of files together hold all that a reader needs of one sort.

There are two sorts: what tokens have, in every layer that has something of them; and states, which
belong to all tokens of a prefix together. Their files live and die apart.
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

_MOST_ASKED = 32  # files of one key that a lookup asks for
_MOST_GAINS = 256  # that are remembered

Held = list[npt.NDArray[np.bool_]]  # of each layer: which heads
Heads = tuple[int, int] | Sequence[tuple[int, int]]  # of all layers, or of each: first, and end
_Parts = frozenset[tuple[int, int]]  # a layer, and a head of it
_Gain = tuple[Kind, _Parts]  # what a kind holds


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
        """heads:  of each layer of the model, 0 where it has nothing of this sort
        reach:  how far back before the end of a prefix the reader needs each layer
        demand: the precision of each layer of the reader's cache
        """
        self.heads, self.is_states = tuple(heads), is_states
        self._reach, self._demand = tuple(reach), tuple(demand)
        self.coarsest = reduce(Precision.meet, demand)  # a state is computed from all layers
        self.all: tuple[Kind, ...] = ()  # those that files of this model are of, best first
        self._ranked: tuple[Kind, ...] = ()  # those of them that are loaded here
        self.best: tuple[Kind, ...] = ()  # the first that hold all; none: they do not
        self._gains: dict[object, tuple[object, _Parts, tuple[_Gain, ...]]] = {}  # see hold

    def rank(self, kinds: Iterable[Kind], accepts: Callable[[Kind], bool]) -> None:
        """Takes those of this sort, and sorts them: own precision first, then finer ones, then
        coarser ones; then by size.
        """
        mine = (kind for kind in kinds if kind.is_states == self.is_states)
        self.all = tuple(sorted(mine, key=self._order))
        self._ranked = tuple(filter(accepts, self.all))
        lacking, chosen = self.covered(self._ranked)
        self.best = () if lacking else tuple(chosen)

    def asked(self) -> Sequence[Kind]:
        """The kinds of files that a lookup asks for at most, best first."""
        return self._ranked[:_MOST_ASKED]

    def demand(self, kind: Kind, layer: int) -> Precision:
        """The precision that the reader's cache has in a layer of a kind.

        States are loaded as they were stored, and are as precise as the layers before them.
        """
        if self.is_states:
            return self.coarsest.meet(kind.precision_of_planes(layer))
        return self._demand[layer]

    def covered(self, kinds: Iterable[Kind]) -> tuple[int, list[Kind]]:
        """How far back the reader needs the layers that kinds do not hold together with all heads,
        0 if they hold all; and the first that hold what they do.
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
        """Whether files that are there hold these heads of these layers, at least as precise as
        they are here.

        heads:   first, and one past the last, of all layers or of each
        carried: the coarsest precision that values here had before
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
        """What kinds hold of these layers and heads, as precise as it is here."""
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
    """The heads of each of some layers: first, and one past the last."""
    each = (heads,) * num_layers if isinstance(heads[0], int) else heads
    return cast("Sequence[tuple[int, int]]", each)


def _rank(precision: Precision, wanted: Precision) -> tuple[int, int]:
    """The order of loading: the wanted precision, then those that include it, the smallest first,
    then the closest of the others.
    """
    if precision == wanted:
        return 0, 0
    if precision.includes(wanted):
        return 1, precision.digits
    return 2, -precision.digits


def _adds(kind: Kind, held: Held) -> bool:
    """Whether a kind has something that is not held; then it is."""
    adds = False
    for layer in kind.layers:
        part = held[layer][slice(*kind.heads_of(layer))]
        if not part.all():
            part[:] = adds = True
    return adds
