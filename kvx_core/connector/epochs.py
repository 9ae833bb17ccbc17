"""Epochs: names an engine's weights, for use in keys. Runs in the scheduler's half.

    ""              the weights come from the model's files, as at the start
    files:<...>     all weights were loaded from other files, whose record follows. Engines that
                    start from these files share prefixes with this engine
    said:<version>  the user has named the weights, and promises that the name means the same
                    weights everywhere
    random:<...>    the weights are unknown: only this engine finds its entries, until the next
                    change

From the beginning of a change until the weights have a new name, the engine shares nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvx_core.connector.boundary import Boundary
from kvx_core.connector.threads import Workers
from kvx_core.connector.weights import START, Agreement, Files, Report, Stamp, Weights

# Returns the name of weights that were loaded from these files; None: files cannot name them.
NameOfFiles = Callable[[Files], str | None]


class Epoch(NamedTuple):
    """The weights that a plan is for: their name in keys, and the generations seen so far."""

    name: str = ""
    stamp: Stamp = START


FIRST = Epoch()


@dataclass(slots=True)
class _Naming:
    """A job that reads the files of new weights."""

    stamp: Stamp
    name: str | None = None
    is_over: bool = False


@dataclass(slots=True)
class Epochs:
    """Names an engine's weights anew after each change. Only one thread may call it.

    weights:     the weights as this process knows them
    num_ranks:   the number of ranks that report
    name_files:  names weights by their files; runs in a thread, since it may read all files
    log:         logs a line when weights begin to change, and when they have a new name
    trusts_said: True if the names that the user gives to weights count
    """

    weights: Weights = field(default_factory=Weights)
    num_ranks: int = 1
    name_files: NameOfFiles | None = None
    log: Callable[[str], object] = lambda line: None
    boundary: Boundary | None = None
    trusts_said: bool = False
    _agreement: Agreement = field(init=False)
    _epoch: Epoch = FIRST
    _said: tuple[str, int] | None = None  # `weights.said` when the epoch was named
    _naming: _Naming | None = None
    _workers: Workers | None = None
    _tells: bool = True  # True: the next change is still to be logged
    _blocks: object = None  # the epoch that computed all blocks the engine may reuse
    _num_resets: int = -1  # weights.num_resets in the last step

    def __post_init__(self) -> None:
        self._agreement = Agreement(self.weights, self.num_ranks)

    @property
    def generation(self) -> int:
        """The generation of this process's weights, for the next plan."""
        return self.weights.generation

    def take(self, reports: Mapping[int, Report]) -> None:
        """Takes the reports of ranks."""
        self._agreement.take(dict(reports))

    def current(self) -> Epoch | None:
        """Returns the epoch to plan for; None while the weights change or have no name yet."""
        stamp = self._agreement.stamp
        if stamp is None:
            if self._tells and self.weights.generation:
                self._tells = False
                self.log("the weights change: nothing is shared until all ranks have new ones")
            return None
        if stamp == self._epoch.stamp and self.weights.said == self._said:
            return self._epoch
        name = self._name(stamp)
        if name is None:
            return None
        if name != self._epoch.name or stamp != self._epoch.stamp:
            what = f"weights {name}" if name else "the weights that the engine has started with"
            self.log(f"prefixes are shared under new keys from now on: {what}")
        self._epoch, self._said, self._naming = Epoch(name, stamp), self.weights.said, None
        self._tells = True
        return self._epoch

    def step_computes(self) -> None:
        """Notes that a step computes tokens with the current weights."""
        before, self._blocks = self._blocks, None
        epoch = self.current()
        if self._num_resets != self.weights.num_resets:  # the engine has dropped all older blocks
            self._num_resets, self._blocks = self.weights.num_resets, epoch
        elif before is epoch:
            self._blocks = epoch

    def has_current_blocks(self) -> bool:
        """True if all blocks that the engine keeps for later requests are of this epoch.

        An engine may keep blocks when its weights change, but tokens that it computes after such
        blocks must not be saved.
        """
        epoch = self.current()
        is_empty = self._num_resets != self.weights.num_resets
        return epoch is not None and (is_empty or self._blocks is epoch)

    def shutdown(self) -> None:
        """Ends the threads without waiting for them."""
        if self._workers is not None:
            self._workers.shutdown(0)

    def _name(self, stamp: Stamp) -> str | None:
        """Returns the name of the weights of a stamp; None: the name is not known yet."""
        said = self._said_name(stamp)
        origin = self._agreement.origin
        if stamp == self._epoch.stamp:  # only the name that the user gives is new
            return said if said is not None and not self._is_of_files else self._epoch.name
        if isinstance(origin, Files) and self.name_files is not None:
            naming = self._naming
            if naming is None or naming.stamp != stamp:
                naming = self._naming = self._start_naming(stamp, origin, self.name_files)
            if not naming.is_over:
                return None
            if naming.name is not None:
                return naming.name
        return said if said is not None else f"random:{secrets.token_hex(16)}"

    @property
    def _is_of_files(self) -> bool:
        return not self._epoch.name or self._epoch.name.startswith("files:")

    def _said_name(self, stamp: Stamp) -> str | None:
        said = self.weights.said
        if not self.trusts_said or said is None:
            return None
        version, generation = said
        is_old = said == self._said and stamp != self._epoch.stamp  # the weights have changed since
        return None if is_old or generation != self.weights.generation else f"said:{version}"

    def _start_naming(self, stamp: Stamp, files: Files, name_files: NameOfFiles) -> _Naming:
        naming = _Naming(stamp)

        def run() -> None:
            assert self.boundary is not None
            with self.boundary.guard("does not know the files of the new weights"):
                naming.name = name_files(files)
            naming.is_over = True

        if self._workers is None:
            self._workers = Workers(1, "kvx-weights", exit_seconds=0)
        self._workers.submit(run)
        return naming
