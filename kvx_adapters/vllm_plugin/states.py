"""The recurrent layers of a hybrid model: which states vLLM keeps, and the sections of a request's.

A state is in the block of its last token's column, or in a request's only block where prefixes are
not cached. A step changes it in place, so that it exists only where a step ends. Block 0 is
nobody's, and the blocks of all groups share memory.
Source: vllm 0.32 v1/kv_cache_interface.py, MambaSpec; v1/worker/mamba_utils.py
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor
from vllm.version import __version__ as vllm_version

from kvx_adapters import vllm
from kvx_adapters.vllm.encodings import FP8
from kvx_adapters.vllm.groups import layer_index
from kvx_adapters.vllm.spec import minor
from kvx_adapters.vllm.state_self_test import FACTS
from kvx_adapters.vllm.states import conv_layout_here, state_column
from kvx_adapters.vllm_plugin.state_steps import self_test_of_layers
from kvx_adapters.vllm_plugin.windows import window_of
from kvx_core import (
    CacheFacts,
    CacheView,
    InvalidArgumentError,
    PlaneKind,
    SlotMapping,
    UnsupportedError,
    write_kv,
)
from kvx_core.connector.plan import BlockIds
from kvx_core.desc.states import StateFacts, stored_heads
from kvx_core.model.recurrent import recurrent_state
from kvx_core.snapshot import Section

_SPEC = "MambaSpec"
_PLAIN = ("auto", "float16", "bfloat16", "float32", *FP8)  # dtypes of caches that write_kv writes
_FIRST_MINOR = 30  # the first vLLM 0.x that can be told which requests' loads have failed


@dataclass(frozen=True, slots=True)
class States:
    """The recurrent layers of an engine's model."""

    config: Any  # hf_text_config: says what a state is made of
    groups: Mapping[int, Any]  # by index: KVCacheGroupSpec of recurrent layers
    attention: Mapping[int, Any]  # by index: the other groups
    num_ranks: int = 1  # of tensor parallelism
    _tensors: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)  # of a worker, by layer
    _of_thread: threading.local = field(default_factory=threading.local)

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> Self:
        """Raises UnsupportedError for an engine whose states the connector does not share."""
        found = cls.held(
            vllm_config.model_config.hf_text_config,
            kv_cache_config,
            vllm_config.parallel_config.tensor_parallel_size,
        )
        if found:
            _check(vllm_config)
            _check_windows(found.attention)
            found.heads_of(0)
        for group in found.groups.values():
            state_column(group.kv_cache_spec, 1)
        return found

    @classmethod
    def held(cls, config: Any, kv_cache_config: Any, num_ranks: int = 1) -> Self:
        """The recurrent layers of any engine. config: hf_text_config"""
        groups = dict(enumerate(kv_cache_config.kv_cache_groups))
        states = {i: one for i, one in groups.items() if _is_state(one.kv_cache_spec)}
        others = {i: one for i, one in groups.items() if i not in states}
        return cls(config, states, others, num_ranks)

    def __bool__(self) -> bool:
        """True if the model has recurrent layers."""
        return bool(self.groups)

    @property
    def layers(self) -> tuple[int, ...]:
        """The indices in the model of the layers with states, in order."""
        names = (name for group in self.groups.values() for name in group.layer_names)
        return tuple(sorted(map(self._layer, names)))

    def has_kv(self, layer: int) -> bool:
        """True if a layer of the model has keys and values: some have states or nothing."""
        groups = self.attention.values() if self else ()
        return not self or any(layer == layer_index(n) for one in groups for n in one.layer_names)

    def _layer(self, name: str) -> int:
        """Returns the index in the model of a layer with a state.

        Falcon-H1 has both in each layer, and counts states on behind the keys and values.
        Source: vllm 0.32 model_executor/models/falcon_h1.py, FalconH1ParallelHybrid
        """
        index, count = layer_index(name), int(self.config.num_hidden_layers)
        return index - count if self.config.model_type == "falcon_h1" else index

    def _parts(self, num_ranks: int = 1) -> list[StateFacts]:
        """What each layer has: a convolution and, but for short ones, a state."""
        sizes = recurrent_state(self.config)
        parts = [sizes.conv_facts(num_ranks=num_ranks)]
        return [*parts, sizes.state_facts(num_ranks=num_ranks)] if sizes.state else parts

    @property
    def planes(self) -> list[PlaneKind]:
        """What a store has of these layers: each section of their parts."""
        parts = self._parts() if self else []
        return [
            PlaneKind(layer, part.stored_role(section.name), 0, section.replicated)
            for layer in self.layers
            for part in parts
            for section in part.sections
        ]

    @property
    def heads(self) -> int:
        """Into how many heads a store cuts the states of a layer, over all ranks."""
        return stored_heads(self._parts())

    def heads_of(self, rank: int) -> tuple[int, int]:
        """Returns the heads of the states that a rank has: first, and one past the last.

        Raises UnsupportedError for ranks that do not share states so.
        """
        heads, num_ranks = self.heads, self.num_ranks
        if heads % num_ranks:
            raise UnsupportedError(
                f"tensor_parallel_size is {num_ranks}, expected a divisor of {heads}, the heads "
                "into which a store cuts the states of this model's layers. Serve it so, or "
                "without KVXConnector"
            )
        self._parts(num_ranks)  # raises if groups of B and C cannot be shared so
        return rank * heads // num_ranks, (rank + 1) * heads // num_ranks

    def offered(
        self, offers: Iterable[tuple[int, int, int]], block_ids: BlockIds
    ) -> Iterator[tuple[int, BlockIds]]:
        """Yields the boundaries at which vLLM keeps states of all groups until a step ends: the
        number of tokens, and a request's blocks with these states.

        offers:    (group, block, tokens), as SchedulerOutput.kv_connector_block_state has them
        block_ids: of the request
        Source: vllm 0.32 v1/core/kv_cache_manager.py, take_boundary_state_offloads
        """
        found: dict[int, dict[int, int]] = {}
        for group, block, num_tokens in offers:
            found.setdefault(num_tokens, {})[group] = block
        for num_tokens, blocks in found.items():
            if blocks.keys() != self.groups.keys():
                continue
            there = list(map(list, block_ids))
            for index, block in blocks.items():
                column = state_column(self.groups[index].kv_cache_spec, num_tokens)
                there[index] = [*there[index][:column], block]
            yield num_tokens, tuple(there)

    def bind(self, layers: Mapping[str, Any]) -> None:
        """Takes a worker's tensors. layers: static_forward_context of its compilation config"""
        for group in self.groups.values():
            for name in group.layer_names:
                self._tensors[self._layer(name)] = tuple(layers[name].kv_cache)

    def self_test(self, layers: Mapping[str, Any]) -> None:
        """Has vLLM's own ops add tokens to a state of each layer, and reads it back through KVX.

        layers: as for `bind`, which comes before; the cache must not be in use
        Restores what it writes. Raises InvalidArgumentError naming what differs, UnsupportedError
        where no step of such a layer can be run alone.
        """
        if not self:
            return
        if self.num_ranks > 1:
            raise UnsupportedError(
                f"tensor_parallel_size is {self.num_ranks}, expected 1: steps of one rank alone "
                "have not been tried"
            )
        names = {self._layer(n): n for one in self.groups.values() for n in one.layer_names}
        last = min(tensors[0].shape[0] for tensors in self._tensors.values()) - 1
        view = vllm.state_view(
            self._tensors,
            dict.fromkeys(names, (last,)),
            FACTS,
            config=self.config,
            num_tokens=[0],
            conv_layout=conv_layout_here(),
        )
        planes = {name: [p for p in view.planes if p.layer == i] for i, name in names.items()}
        self_test_of_layers(planes, recurrent_state(self.config), layers, last)

    def has_blocks(self, block_ids: BlockIds, num_tokens: int) -> bool:
        """True if a request has blocks for its states after `num_tokens` tokens."""
        return all(
            block_ids[index][column : column + 1] > [0]
            for index, group in self.groups.items()
            for column in (state_column(group.kv_cache_spec, num_tokens),)
        )

    def section(
        self, block_ids: BlockIds, num_tokens: int, facts: CacheFacts, rank: int = 0
    ) -> Section:
        """Returns a rank's states of a request after `num_tokens` tokens, zero-copy.

        It is this thread's until the thread calls it again: a view of 72 planes takes longer to
        make than their bytes to copy.
        facts, rank: the same in all calls
        Raises InvalidArgumentError if a block of them is null, IndexError if there is none.
        """
        here = getattr(self._of_thread, "found", None)
        if here is None:
            here = self._of_thread.found = self._described(facts, rank)
        for index, group in self.groups.items():
            block = block_ids[index][state_column(group.kv_cache_spec, num_tokens)]
            if block < 1:
                raise InvalidArgumentError(
                    f"the state of group {index} after {num_tokens} tokens is in block {block}, "
                    "expected 1 or more: block 0 holds no state"
                )
            here.slots[index][0] = block
        here.num_tokens = num_tokens
        return here.section.of_sequence(None, num_tokens)

    def _described(self, facts: CacheFacts, rank: int) -> _OfThread:
        """Describes the states of a request: whose they are, `section` says."""
        of_layer = {
            self._layer(name): i for i, one in self.groups.items() for name in one.layer_names
        }
        view = vllm.state_view(
            self._tensors,
            dict.fromkeys(of_layer, (1,)),
            facts,
            config=self.config,
            num_tokens=[0],
            conv_layout=conv_layout_here(),
            rank=rank,
            num_ranks=self.num_ranks,
        )
        device = next(iter(self._tensors.values()))[0].device
        slots = {index: torch.ones(1, dtype=torch.int64, device=device) for index in self.groups}
        mappings = {index: SlotMapping.of(block) for index, block in slots.items()}
        planes = tuple(replace(p, slots=mappings[of_layer[p.layer]]) for p in view.planes)
        found = _OfThread(slots)
        view = replace(view, planes=planes, state_tokens=lambda: found.num_tokens)
        section = Section(self.layers, view, None).states
        assert section is not None
        found.section = section
        return found


@dataclass(slots=True)
class _OfThread:
    """A section that one thread uses for one request after the other."""

    slots: dict[int, Tensor]  # by index of a group: the block of its states
    section: Section = field(init=False)
    num_tokens: int = 0  # that the states are after


def zero_behind(
    view: CacheView,
    block_tokens: int,
    block_ids: Sequence[int],
    num_tokens: int,
    device: torch.device,
) -> None:
    """Writes zeros behind the first `num_tokens` tokens of a request, up to the end of a block.

    block_tokens: tokens of a block of `block_ids`
    """
    rest = -num_tokens % block_tokens
    if not rest:
        return
    first = block_ids[num_tokens // block_tokens] * block_tokens + num_tokens % block_tokens
    slots = torch.arange(first, first + rest, device=device)
    for i, layer in enumerate(view.layers):
        key, value = (
            torch.zeros(rest, layer.num_kv_heads, dim, device=device)
            for dim in (layer.head_dim, layer.v_head_dim)
        )
        scales = [None if given is None else given[i] for given in (view.k_scales, view.v_scales)]
        v = value if layer.v is not None else None
        write_kv(layer, key, v, slots, k_scale=scales[0], v_scale=scales[1])


def _is_state(spec: Any) -> bool:
    return type(spec).__name__ == _SPEC


def _check(config: Any) -> None:
    """Raises UnsupportedError for settings with which states are elsewhere, or are others."""
    if minor(vllm_version) < _FIRST_MINOR:
        raise UnsupportedError(
            f"vllm is {vllm_version}, expected 0.{_FIRST_MINOR} or later for a model whose layers "
            "keep a state: before, a connector cannot report which requests' loads have failed"
        )
    cache, parallel = config.cache_config, config.parallel_config
    for name, found, expected, why in (
        (
            "pipeline_parallel_size",
            parallel.pipeline_parallel_size,
            1,
            "KVXConnector has not been tested so",
        ),
        ("use_replayssm", getattr(cache, "use_replayssm", False), False, "states lag behind"),
        (
            "enable_stochastic_rounding",
            config.mamba_config.enable_stochastic_rounding,
            False,
            "the same tokens then have other states each time",
        ),
    ):
        if found != expected:
            raise UnsupportedError(
                f"{name} is {found}, expected {expected} for a model whose layers keep a state: "
                f"{why}. Serve it so, or without KVXConnector"
            )
    if cache.cache_dtype not in _PLAIN:
        raise UnsupportedError(
            f"kv_cache_dtype is {cache.cache_dtype!r}, expected one of {', '.join(_PLAIN)} for a "
            "model whose layers keep a state: a load zeroes the rest of a block, which KVX does "
            "not do where scales lie beside the values. Serve it so, or without KVXConnector"
        )
    if config.kv_transfer_config.kv_connector_extra_config.get("layerwise"):
        raise UnsupportedError(
            "layerwise is True, expected False for a model whose layers keep a state: a state is "
            "complete after the step alone"
        )
    if config.speculative_config is not None:
        raise UnsupportedError(
            "speculative_config is set, expected none for a model whose layers keep a state: which "
            "of its states counts then changes in each step. Serve it without, or without "
            "KVXConnector"
        )


def _check_windows(attention: Mapping[int, Any]) -> None:
    """Raises UnsupportedError for a hybrid model with sliding windows, or without K and V."""
    if not attention or any(map(window_of, (one.kv_cache_spec for one in attention.values()))):
        raise UnsupportedError(
            "the model's layers keep states, and others a sliding window or no keys and values, "
            "expected full attention in these: KVXConnector has not been tested with such models. "
            "Serve it without KVXConnector"
        )
