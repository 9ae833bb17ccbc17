"""StateFacts: what the numbers of a state mean, which strides do not show.

A recurrent layer keeps two things of a sequence: the last inputs of its convolution, and a state
that all tokens have been added to. Both belong to a prefix of one length. Engines store them with
other axes outermost, other columns, and on several ranks. Spec: E.24
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from kvx_core.argument_checks import bad_argument, coerce_fields, flag, integer, list_of, one_of
from kvx_core.errors import InvalidArgumentError
from kvx_core.types import Axis, Role

# Of each kind, the axes of its recurrent state beside "block". Ranks split the first one.
KINDS: dict[str, tuple[str, ...]] = {
    "mamba1": ("channel", "state"),
    "mamba2": ("head", "head_dim", "state"),
    "gdn": ("head", "key", "value"),
    "kda": ("head", "key", "value"),
    "lightning": ("head", "key", "value"),
    "short_conv": (),
}
CONV_AXES = ("channel", "time")
# The sections of each convolution, in the order in which files have them.
CONV_SECTIONS = {
    "mamba1": ("x",),
    "mamba2": ("x", "b", "c"),
    "gdn": ("q", "k", "v"),
    "kda": ("q", "k", "v"),
    "short_conv": ("x",),
}
_NO_CONV = ("lightning",)
CONV_ROLES = 1000  # roles of further convolutions of a layer: CONV_STATE, 1001, 1002, ...
MAX_STORED_HEADS = 64  # into which a store cuts the states of a layer: so many ranks share one


@dataclass(frozen=True, slots=True)
class StateSection:
    """Channels or heads that ranks split by themselves: Q, K and V of a convolution are three.

    Raises InvalidArgumentError.
    """

    name: str  # such as "q" or "heads": the same at both ends
    width: int  # channels or heads of the model, over all ranks
    replicated: bool = False  # every rank has all of them

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise bad_argument("name", self.name, "the name of a section, such as 'q'")
        coerce_fields(self, replicated=flag, width=lambda n, v: integer(n, v, 1, 2**31 - 1))


class HeldSection(NamedTuple):
    """The part of a section that a rank holds."""

    name: str
    begin: int  # channel or head of the model's section
    end: int
    offset: int  # of `begin` along the plane's axis


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts:
    """The meaning of a plane of one entry per sequence: one part of the state of a layer.

    Both ends of a migration have the same kind, sections and number of columns; ranks, the order
    of sections, axes and columns may differ.
    Raises InvalidArgumentError.
    Spec: E.24
    """

    kind: str  # one of KINDS
    sections: tuple[StateSection, ...]  # in the order in which the plane has them
    rank: int = 0  # of num_ranks that share the layer
    num_ranks: int = 1
    # Of a convolution: the inputs that it keeps, kernel size - 1. None: it is the recurrent state
    num_columns: int | None = None
    first_column: int = 0  # where the plane has them: others before and behind mean nothing
    newest_first: bool = False

    def __post_init__(self) -> None:
        one_of("state.kind", self.kind, *KINDS)
        object.__setattr__(
            self,
            "sections",
            list_of("state.sections", self.sections, StateSection, "StateSection"),
        )
        coerce_fields(
            self,
            num_ranks=lambda name, value: integer(f"state.{name}", value, 1),
            first_column=integer,
            newest_first=flag,
        )
        integer("state.rank", self.rank, 0, self.num_ranks - 1)
        if self.num_columns is None:
            if self.first_column or self.newest_first or not KINDS[self.kind]:
                raise InvalidArgumentError(
                    f"state.num_columns is None, expected kernel size - 1: {self._words()} is a "
                    "convolution"
                )
        elif self.kind in _NO_CONV:
            raise bad_argument("state.num_columns", self.num_columns, f"None: {self.kind} has none")
        else:
            integer("state.num_columns", self.num_columns, 1)
        names = [section.name for section in self.sections]
        if len(set(names)) != len(names) or not names:
            raise InvalidArgumentError(
                f"state.sections are {names}, expected at least one, and each name once"
            )
        for section in self.sections:
            if not section.replicated and section.width % self.num_ranks:
                raise InvalidArgumentError(
                    f"section {section.name} has {section.width} channels or heads and num_ranks "
                    f"is {self.num_ranks}, expected a divisor, or replicated=True where every rank "
                    "has all of them"
                )

    @property
    def is_conv(self) -> bool:
        """Whether this is the inputs of a convolution."""
        return self.num_columns is not None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of such a plane beside "block": the first is split in sections."""
        return CONV_AXES if self.is_conv else KINDS[self.kind]

    def held(self) -> Iterator[HeldSection]:
        """What this rank holds of each section, in the plane's order."""
        offset = 0
        for section in self.sections:
            begin, end = 0, section.width
            if not section.replicated:
                share = section.width // self.num_ranks
                begin, end = self.rank * share, (self.rank + 1) * share
            yield HeldSection(section.name, begin, end, offset)
            offset += end - begin

    def why_not_stored(self) -> str | None:
        """Why files cannot have such a plane; None if they can."""
        names = {section.name for section in self.sections}
        if self.newest_first:
            return "has its newest input first, expected the oldest"
        if self.is_conv and not names <= set(CONV_SECTIONS[self.kind]):
            return f"has the sections {sorted(names)}, expected some of {CONV_SECTIONS[self.kind]}"
        return None

    def why_not_whole(self) -> str | None:
        """Why a snapshot, which has states whole, cannot have such a plane; None if it can."""
        names = tuple(section.name for section in self.sections)
        if self.num_ranks > 1 and not all(section.replicated for section in self.sections):
            return f"is rank {self.rank} of {self.num_ranks}, expected all ranks together"
        if self.is_conv and names != CONV_SECTIONS[self.kind]:
            return f"has the sections {names}, expected {CONV_SECTIONS[self.kind]}"
        return None

    def stored_role(self, section: str) -> int:
        """The role of the plane that a store has of a section."""
        if not self.is_conv:
            return int(Role.STATE)
        i = CONV_SECTIONS[self.kind].index(section)
        return CONV_ROLES + i if i else int(Role.CONV_STATE)

    def check(self, axes: Sequence[Axis], shape: Sequence[int], tokens_per_entry: int) -> None:
        """Raises InvalidArgumentError unless a plane of these axes can hold such a state."""
        dims = [extent for axis, extent in zip(axes, shape, strict=True) if axis is Axis.DIM]
        heads = [extent for axis, extent in zip(axes, shape, strict=True) if axis is Axis.HEAD]
        first, *others = self.axes
        if tokens_per_entry or len(heads) != 1 or len(dims) != len(others):
            raise InvalidArgumentError(
                f"{self._words()} has axes {[axis.name for axis in axes]} and tokens_per_entry "
                f"{tokens_per_entry}, expected HEAD for {first}, DIM for {' and '.join(others)} "
                "and tokens_per_entry 0. Use Plane.of_state"
            )
        wanted = sum(part.end - part.begin for part in self.held())
        if heads[0] != wanted:
            parts = ", ".join(f"{part.name} {part.end - part.begin}" for part in self.held())
            raise InvalidArgumentError(
                f"axis {first} of {self._words()} has {heads[0]} entries, expected {wanted} on "
                f"rank {self.rank} of {self.num_ranks}: {parts}"
            )
        if self.num_columns is not None and dims[0] < self.first_column + self.num_columns:
            raise InvalidArgumentError(
                f"axis time of {self._words()} has {dims[0]} columns, expected at least "
                f"{self.first_column + self.num_columns}: first_column {self.first_column} and "
                f"num_columns {self.num_columns}"
            )

    def _words(self) -> str:
        part = "convolution" if self.is_conv or not KINDS[self.kind] else "state"
        return f"the {part} of {self.kind}"


def stored_heads(parts: Iterable[StateFacts]) -> int:
    """Returns into how many heads a store cuts the states of a layer, over all ranks.

    Each section that ranks split has equally many channels, or heads of its own, in each. So what
    engines on other numbers of ranks store is the same, as long as these divide it.
    parts: of the layer: its convolution, its recurrent state
    """
    sections = [section for part in parts for section in part.sections]
    widths = [section.width for section in sections if not section.replicated]
    return gcd(MAX_STORED_HEADS, *widths) if widths else 1


def state_axes(name: str, axes: Sequence[str], facts: StateFacts) -> tuple[list[int], list[Axis]]:
    """The order of a state's axes in which a plane lists them, and what each is there.

    axes: the names of the tensor's axes: "block" and those of the facts, in any order
    Raises InvalidArgumentError.
    """
    wanted = ("block", *facts.axes)
    if not isinstance(axes, (list, tuple)) or sorted(map(str, axes)) != sorted(wanted):
        given = list(axes) if isinstance(axes, (list, tuple)) else axes
        part = "a convolution" if facts.is_conv else "a recurrent state"
        raise InvalidArgumentError(
            f"{name} is {given!r}, expected {', '.join(map(repr, wanted))} in the order of the "
            f"tensor's axes: it is {part} of {facts.kind}"
        )
    order = [list(axes).index(one) for one in wanted]
    return order, [Axis.BLOCK, Axis.HEAD, *[Axis.DIM] * (len(wanted) - 2)]
