"""What hybrid models have in common: one layer has attention, two have states, which snapshots of
KVX carry. Gated delta nets, Mamba 2 and short convolutions.

States decay slowly here: with the usual random numbers they forget within a few tokens, and prove
nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from kvx_conformance.engine import Floats, State, Table
from kvx_core import CacheFacts, CacheView, KvxError, Section, Snapshot

DECAYS = ("A_log", "dt_bias")
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
}


class Hybrid:
    """A cache of layers, of which some have keys and values, the others states.

    Subclasses give `model`, `cache`, `run`, `describe` and `state_view`.
    """

    computes, num_sequences, max_tokens = True, 1, 20
    attention, recurrent = 0, (1, 2)  # layers
    rotary_dim: ClassVar[int]
    version: ClassVar[str]
    cache: Sequence[Any]

    def __init__(self) -> None:
        self.ids: list[int] = []

    def run(self, tokens: Sequence[int]) -> None:
        """A step of the model."""
        raise NotImplementedError

    def state_view(self) -> CacheView:
        """The states of all recurrent layers."""
        raise NotImplementedError

    def describe(self) -> CacheView:
        """Of the layers with attention."""
        raise NotImplementedError

    def write(self, sequence: int, tokens: Sequence[int], keys: None, values: None) -> None:
        self.run(tokens)
        self.ids += tokens

    def read(self, sequence: int, position: int) -> tuple[Floats, Floats]:
        if not 0 <= position < len(self.ids):
            raise LookupError(position)
        layer = self.cache[self.attention]  # (1, num_kv_heads, slots, head_dim)
        keys, values = (self.in_host_memory(one) for one in (layer.keys, layer.values))
        return keys[:, :, position], values[:, :, position]

    @staticmethod
    def in_host_memory(array: Any) -> Floats:
        """A copy of the engine's array."""
        return np.array(array)

    def table(self, sequence: int) -> Table:
        return Table(len(self.ids))

    def facts(self) -> CacheFacts:
        return CacheFacts(
            engine=self.version,
            fingerprint=type(self).__name__,
            num_layers=1,
            first_layer=self.attention,
            first_kv_head=0,
            total_kv_heads=2,
            window=0,
            rope_applied=self.rotary_dim > 0,
            rotary="half" if self.rotary_dim else "none",
            rotary_dim=self.rotary_dim,
        )

    def state(self, sequence: int) -> State:
        """A snapshot of K, V and states, as a file has it."""
        with tempfile.TemporaryFile() as file:
            snapshot = Snapshot.capture(self.ids, self._sections())
            assert snapshot is not None  # no block is null
            snapshot.save(file)
            file.seek(0)
            return State(len(self.ids), [np.frombuffer(file.read(), np.uint8)])

    def set_state(self, sequence: int, state: State) -> None:
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(state.data[0].tobytes())
            try:
                snapshot = Snapshot.open(file, name="the state")
                found = snapshot.read((self.attention, *self.recurrent))
            except KvxError as error:
                raise ValueError(str(error)) from error
        ids = [int(token) for token in found.tokens]
        self.write(0, [0] * len(ids), None, None)  # makes the memory that it goes to
        self.ids = ids
        for section in self._sections():
            found.restore(section, 0, len(ids))

    def _sections(self) -> list[Section]:
        return [
            Section((self.attention,), self.describe(), None),
            Section(self.recurrent, self.state_view(), None, state_tokens=len(self.ids)),
        ]


def slow(name: str, count: int) -> Floats:
    """A weight of DECAYS: a state keeps 0.98 to 0.9998 of itself from token to token."""
    found = np.log(np.geomspace(2e-4, 2e-2, count)) if name.endswith("A_log") else np.zeros(count)
    return found.astype(np.float32)
