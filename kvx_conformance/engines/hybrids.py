"""Hybrid models in HF transformers and mlx-lm. KVX's snapshots carry their states.

One layer has attention, two have states: gated delta nets, Mamba 2 or short convolutions. States
decay slowly here: with the usual random numbers they forget within a few tokens, and prove nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, ClassVar, TypeAlias

import mlx.core as mx
import mlx_lm
import numpy as np
import torch
import transformers
from mlx.utils import tree_flatten
from mlx_lm.models import lfm2, qwen3_next
from torch.utils.dlpack import from_dlpack

from kvx_adapters import mlx as mlx_adapter
from kvx_adapters import transformers as hf_adapter
from kvx_adapters.transformers.cache import num_held, outdated
from kvx_conformance.engine import Floats, State, Table
from kvx_conformance.engines.tiny import SIZES, made
from kvx_core import CacheFacts, CacheView, KvxError, Plane, Section, Snapshot

_CONV, _STATE = 64, "state"  # roles of planes
_DECAYS = ("A_log", "dt_bias")
_DELTA_NET = {
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
_MAMBA = {
    "num_local_experts": 0,
    "shared_intermediate_size": 160,
    "mamba_n_heads": 12,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


_Part: TypeAlias = tuple[int, str | int, torch.Tensor]  # of a state: layer, role, memory (1, ...)


class _Hybrid:
    """A cache of layers, of which some have keys and values, the others states.

    Subclasses give `model`, `cache`, `run`, `describe` and `states`.
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

    def states(self) -> list[_Part]:
        """Each layer's parts."""
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
        return np.array(layer.keys)[:, :, position], np.array(layer.values)[:, :, position]

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
        planes = [
            Plane.of(
                memory,
                ("block", *["dim"] * (memory.ndim - 1)),
                role,
                layer,
                tokens_per_entry=0,
                slots=[0],
                replicated=True,
            )
            for layer, role, memory in self.states()
        ]
        states = CacheView(layers=(), facts=self.facts(), dense=True, planes=tuple(planes))
        return [
            Section((self.attention,), self.describe(), None),
            Section(self.recurrent, states, None, state_tokens=len(self.ids)),
        ]


def _slow(name: str, count: int) -> Floats:
    """A weight of _DECAYS: a state keeps 0.98 to 0.9998 of itself from token to token."""
    found = np.log(np.geomspace(2e-4, 2e-2, count)) if name.endswith("A_log") else np.zeros(count)
    return found.astype(np.float32)


class _OfTransformers(_Hybrid):
    """DynamicCache with LinearAttentionLayers."""

    version = f"transformers {transformers.__version__}"
    kind: ClassVar[str]  # prefix of the model's classes
    config: ClassVar[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.dynamic = transformers.DynamicCache(config=self.model().config)
        self.cache = self.dynamic.layers

    @classmethod
    @cache
    def model(cls) -> Any:
        config = getattr(transformers, f"{cls.kind}Config")(**SIZES | cls.config)
        model = made(getattr(transformers, f"{cls.kind}ForCausalLM"), config)
        for name, weight in model.state_dict().items():
            if name.endswith(_DECAYS):
                weight.copy_(torch.from_numpy(_slow(name, weight.numel())))
        return model

    @torch.inference_mode()
    def run(self, tokens: Sequence[int]) -> None:
        self.model()(input_ids=torch.tensor([list(tokens)]), past_key_values=self.dynamic)

    def describe(self) -> CacheView:
        layers = [self.cache[self.attention]]
        described = [hf_adapter.cache_desc(layer) for layer in layers]
        return CacheView(
            layers=tuple(described),
            facts=self.facts(),
            dense=True,
            outdated=partial(outdated, layers, described),
            holds=partial(num_held, layers),
        )

    def states(self) -> list[_Part]:
        found: list[_Part] = []
        for layer in self.recurrent:
            found.append((layer, _CONV, self.cache[layer].conv_states[0]))
            if (state := self.cache[layer].recurrent_states.get(0)) is not None:
                found.append((layer, _STATE, state))
        return found


class DeltaNet(_OfTransformers):
    """Qwen3-Next: gated delta nets."""

    kind, rotary_dim = "Qwen3Next", 8
    config: ClassVar[dict[str, Any]] = _DELTA_NET | {
        "layer_types": ["full_attention", "linear_attention", "linear_attention"]
    }


class Mamba(_OfTransformers):
    """Granite 4: Mamba 2, no rotation."""

    kind, rotary_dim = "GraniteMoeHybrid", 0
    config: ClassVar[dict[str, Any]] = _MAMBA | {"layer_types": ["attention", "mamba", "mamba"]}


class ShortConvolution(_OfTransformers):
    """LFM2: the last inputs of a convolution alone."""

    kind, rotary_dim = "Lfm2", 32
    config: ClassVar[dict[str, Any]] = {
        "conv_L_cache": 3,
        "layer_types": ["full_attention", "conv", "conv"],
    }


class _OfMlx(_Hybrid):
    """KVCache and ArraysCache."""

    version = f"mlx-lm {mlx_lm.__version__}"

    module: ClassVar[Any]
    config: ClassVar[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.cache = self.model().make_cache()

    @classmethod
    @cache
    def model(cls) -> Any:
        mx.set_default_device(mx.cpu)
        mx.random.seed(1)
        model = cls.module.Model(cls.module.ModelArgs.from_dict(SIZES | cls.config))
        slow = [
            (name, mx.array(_slow(name, weight.size)))
            for name, weight in tree_flatten(model.parameters())
            if name.endswith(_DECAYS)
        ]
        model.load_weights(slow, strict=False)
        mx.eval(model.parameters())
        return model

    def run(self, tokens: Sequence[int]) -> None:
        mx.eval(self.model()(mx.array([list(tokens)]), cache=self.cache))
        mx.eval([layer.state for layer in self.cache])

    def describe(self) -> CacheView:
        return mlx_adapter.cache_view([self.cache[self.attention]], self.facts())

    def states(self) -> list[_Part]:
        roles: tuple[str | int, ...] = (_CONV, _STATE)
        return [
            (layer, role, from_dlpack(array))
            for layer in self.recurrent
            for role, array in zip(roles, self.cache[layer].cache, strict=False)
        ]


class DeltaNetOfMlx(_OfMlx):
    """Qwen3-Next, whose first layer is a gated delta net."""

    attention, recurrent, rotary_dim = 1, (0, 2), 8
    module = qwen3_next
    config: ClassVar[dict[str, Any]] = _DELTA_NET | {
        "model_type": "qwen3_next",
        "full_attention_interval": 2,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
    }


class ShortConvolutionOfMlx(_OfMlx):
    """LFM2."""

    rotary_dim, module = 24, lfm2
    config: ClassVar[dict[str, Any]] = {
        "model_type": "lfm2",
        "full_attn_idxs": [0],
        "norm_eps": 1e-6,
        "block_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "conv_bias": False,
        "conv_L_cache": 3,
    }


ENGINES = (DeltaNet, Mamba, ShortConvolution, DeltaNetOfMlx, ShortConvolutionOfMlx)
