"""States of a model over all ranks as plain arrays, what a rank holds of them, and in which memory.

The rule of ranks is written out here once, with nothing of KVX: a section is cut into equal parts,
and the parts of all sections stand one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvx_core import CacheFacts, CacheView, Plane, StateFacts, StateSection

SENTINEL = 0x5A
# The config.json of a delta net whose states are no squares: 4 heads of 6 x 5.
GDN_CONFIG = {
    "model_type": "qwen3_next",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}
FACTS = CacheFacts(
    engine="test", fingerprint="model", rotary="none", rotary_dim=0, rope_applied=False
)


@dataclass(frozen=True)
class Family:
    """The state of one layer of a model.

    conv:  channels of each section of its convolution; state: (heads or channels, others ...)
    whole: sections that a rank has all of if ranks cannot split their groups
    """

    kind: str
    conv: dict[str, int]
    state: tuple[int, ...]
    num_columns: int = 3
    whole: tuple[str, ...] = ()


FAMILIES = [
    Family("mamba1", {"x": 24}, (24, 5)),
    Family("mamba2", {"x": 48, "b": 10, "c": 10}, (8, 6, 10), whole=("b", "c")),
    Family("mamba2", {"x": 48, "b": 40, "c": 40}, (8, 6, 5)),
    Family("gdn", {"q": 24, "k": 24, "v": 40}, (8, 3, 5)),
    Family("kda", {"q": 32, "k": 32, "v": 32}, (8, 4, 4)),
    Family("short_conv", {"x": 40}, (), num_columns=2),
    Family("lightning", {}, (8, 4, 4)),
]


@dataclass
class Layout:
    """How one engine stores states.

    conv, state: the order of the axes, as indices into (slot, channel, time) and (slot, head, ...)
    before, behind: columns of no meaning beside those of a convolution
    """

    conv: tuple[int, ...] = (0, 1, 2)
    state: tuple[int, ...] = (0, 1, 2, 3)
    before: int = 0
    behind: int = 0
    sections: tuple[str, ...] | None = None  # the order in which this engine has them
    newest_first: bool = False
    gap: int = 0  # numbers between the entries of the outermost axis
    dtypes: tuple[Any, Any] = (np.float32, np.float32)

    def order_of_state(self, ndim: int) -> tuple[int, ...]:
        return tuple(i for i in self.state if i < ndim)


@dataclass
class Rank:
    """The memory of one rank, filled with a sentinel, and its planes."""

    family: Family
    layout: Layout
    rank: int
    num_ranks: int
    num_slots: int = 3
    slots: tuple[int, ...] = (2, 0)
    memory: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lay, fam = self.layout, self.family
        if fam.conv:
            channels = sum(len(self.part(name, n)) for name, n in self.sections().items())
            shape = (self.num_slots, channels, lay.before + fam.num_columns + lay.behind)
            self.memory["conv"] = _memory(shape, lay.conv, lay.gap, lay.dtypes[0])
        if fam.state:
            heads = len(self.part("heads", fam.state[0]))
            shape = (self.num_slots, heads, *fam.state[1:])
            self.memory["state"] = _memory(
                shape, lay.order_of_state(len(shape)), lay.gap, lay.dtypes[1]
            )

    def sections(self) -> dict[str, int]:
        order = self.layout.sections or tuple(self.family.conv)
        return {name: self.family.conv[name] for name in order}

    def is_whole(self, name: str) -> bool:
        return name in self.family.whole

    def part(self, name: str, width: int) -> range:
        """The channels or heads of a section that this rank has."""
        if self.is_whole(name):
            return range(width)
        return range(width * self.rank // self.num_ranks, width * (self.rank + 1) // self.num_ranks)

    def planes(self, layer: int = 0) -> list[Plane]:
        fam, lay = self.family, self.layout
        ranks: dict[str, Any] = {"kind": fam.kind, "rank": self.rank, "num_ranks": self.num_ranks}
        found = []
        if fam.conv:
            sections = [StateSection(n, w, self.is_whole(n)) for n, w in self.sections().items()]
            facts = StateFacts(
                sections=tuple(sections),
                num_columns=fam.num_columns,
                first_column=lay.before,
                newest_first=lay.newest_first,
                **ranks,
            )
            found.append(self._plane("conv", facts, lay.conv, layer))
        if fam.state:
            facts = StateFacts(sections=(StateSection("heads", fam.state[0]),), **ranks)
            order = lay.order_of_state(1 + len(fam.state))
            found.append(self._plane("state", facts, order, layer))
        return found

    def _plane(self, name: str, facts: StateFacts, order: tuple[int, ...], layer: int) -> Plane:
        axes = [("block", *facts.axes)[i] for i in order]
        tensor = self.memory[name].transpose(order)
        return Plane.of_state(tensor, axes, facts, layer, slots=list(self.slots))

    def view(self, tokens: int | None = None, layer: int = 0) -> CacheView:
        return CacheView(
            (), FACTS, planes=tuple(self.planes(layer)), dense=True, state_tokens=tokens
        )

    def write(self, full: dict[str, Any]) -> None:
        """Stores states of the model, (sequence, channel or head, ...), in the slots."""
        for name, memory in self.memory.items():
            for sequence, slot in enumerate(self.slots):
                self._used(name, memory)[slot] = self.expected(name, full[name][sequence])

    def expected(self, name: str, full: Any) -> Any:
        """What this rank holds of one sequence's state of the model."""
        if name == "state":
            return full[list(self.part("heads", len(full)))]
        first, taken = {}, 0
        for section, width in self.family.conv.items():
            first[section] = taken
            taken += width
        rows = [
            first[section] + i
            for section, width in self.sections().items()
            for i in self.part(section, width)
        ]
        return full[rows][:, ::-1] if self.layout.newest_first else full[rows]

    def _used(self, name: str, memory: Any) -> Any:
        """The columns that mean something."""
        if name == "state":
            return memory
        first = self.layout.before
        return memory[:, :, first : first + self.family.num_columns]

    def check(self, full: dict[str, Any]) -> None:
        """The states are there to the byte, and all other bytes are sentinels."""
        for name, memory in self.memory.items():
            used = self._used(name, memory)
            for sequence, slot in enumerate(self.slots):
                expected = self.expected(name, full[name][sequence]).astype(memory.dtype)
                np.testing.assert_array_equal(used[slot], expected)
            used[list(self.slots)].fill(0)  # a copy
            for slot in self.slots:
                used[slot] = np.frombuffer(bytes([SENTINEL] * memory.itemsize), memory.dtype)[0]
            base = memory.base if memory.base is not None else memory
            assert set(np.unique(base.view(np.uint8))) <= {SENTINEL}


def model_states(family: Family, num_sequences: int, seed: int) -> dict[str, Any]:
    """Random states of a model, over all ranks."""
    rng = np.random.default_rng(seed)
    conv = (num_sequences, sum(family.conv.values()), family.num_columns)
    found = {}
    if family.conv:
        found["conv"] = rng.standard_normal(conv).astype(np.float32)
    if family.state:
        found["state"] = rng.standard_normal((num_sequences, *family.state)).astype(np.float32)
    return found


def _memory(shape: tuple[int, ...], order: tuple[int, ...], gap: int, dtype: Any) -> Any:
    """(slot, channel or head, ...) in memory with the axes in `order`, outermost first."""
    stored = [shape[i] for i in order]
    row = int(np.prod(stored[1:])) + gap
    flat = np.full(stored[0] * row * np.dtype(dtype).itemsize, SENTINEL, np.uint8).view(dtype)
    cut = flat.reshape(stored[0], row)[:, : row - gap]
    steps = [row * cut.itemsize, *(s * 1 for s in np.empty(stored[1:], dtype).strides)]
    whole = np.lib.stride_tricks.as_strided(flat, stored, steps)
    return whole.transpose(np.argsort(order))
