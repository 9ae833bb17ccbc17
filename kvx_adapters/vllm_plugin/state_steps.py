"""One step of vLLM's own op of a recurrent layer, with inputs of one's own.

The layer's code runs, with its cache, but with a stand-in of the layer: what depends on the model's
weights is replaced, so that it is known which numbers a state must have afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from math import log
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import override_forward_context

from kvx_adapters import vllm
from kvx_adapters.vllm.state_self_test import RATE, StateStep
from kvx_core import KvxError, Plane, UnsupportedError
from kvx_core.model.recurrent import RecurrentState

Add = Callable[[Any, int, StateStep], None]  # layer, block, tokens


def self_test_of_layers(
    planes: Mapping[str, list[Plane]], sizes: RecurrentState, layers: Mapping[str, Any], block: int
) -> None:
    """Runs `self_test_states` on every recurrent layer of a worker.

    planes: by the name of a layer, of the state in `block`, which nobody else may use meanwhile
    layers: static_forward_context
    Restores the block. Raises as `self_test_states`; UnsupportedError too where vLLM's step does
    not run with such inputs.
    """
    if sizes.kind not in _ADD:
        raise UnsupportedError(f"no step of {sizes.kind} is known, expected one of {[*_ADD]}")
    for name, of_layer in planes.items():
        tensors = layers[name].kv_cache
        if tensors[0].device.type != "cpu":
            raise UnsupportedError(
                f"{name} is on {tensors[0].device}, expected the CPU: steps of recurrent layers "
                "have not been tried on other devices"
            )
        saved = [tensor[block].clone() for tensor in tensors]
        try:
            vllm.self_test_states(of_layer, sizes, _adder(layers[name], sizes, block), name=name)
        finally:
            for tensor, before in zip(tensors, saved, strict=True):
                tensor[block].copy_(before)


def _adder(layer: Any, sizes: RecurrentState, block: int) -> Callable[[StateStep], None]:
    def add(step: StateStep) -> None:
        try:
            _ADD[sizes.kind](layer, block, step)
        except KvxError:
            raise
        except Exception as error:  # of an op that expects what a version of vLLM adds
            raise UnsupportedError(
                f"a step of {type(layer).__name__} alone failed: {type(error).__name__}: {error}"
            ) from error

    return add


class _StandIn:
    """A layer with some attributes of one's own."""

    def __init__(self, layer: Any, **own: Any) -> None:
        self.__dict__.update(own, _layer=layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _delta(layer: Any, block: int, step: StateStep) -> None:
    """Source: vllm 0.32 model_executor/layers/mamba/ops/cpu/gdn_attention.py"""
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import cpu_gdn_attention_core
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    count = len(step.conv)
    metadata = _made(
        GDNAttentionMetadata,
        **_counts(step),
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=count,
        has_initial_state=torch.tensor([not step.is_first]),
        non_spec_query_start_loc=_ints(0, count),
        non_spec_state_indices_tensor=_ints(block),
    )
    mixed = step.mixed.to(torch.bfloat16)
    here = _StandIn(
        layer,
        A_log=torch.full_like(layer.A_log, log(RATE)),
        dt_bias=torch.zeros_like(layer.dt_bias),
        rearrange_mixed_qkv=lambda _: layer.rearrange_mixed_qkv(mixed),
    )
    gates = step.gates.to(torch.bfloat16)
    out = mixed.new_zeros(count, *layer.kv_cache[1].shape[1:3])
    with _context(layer, here, metadata):
        cpu_gdn_attention_core(step.conv.to(torch.bfloat16), gates, gates, out, layer.prefix)


def _scan(layer: Any, block: int, step: StateStep) -> None:
    """Source: vllm 0.32 model_executor/layers/mamba/mamba_mixer2.py, conv_ssm_forward"""
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata

    count, dtype = len(step.conv), layer.conv1d.weight.dtype
    metadata = _made(
        Mamba2AttentionMetadata,
        **_of_sequences(step, block),
        prep_initial_states=not step.is_first,
        chunk_size=256,
        seq_idx_p=torch.zeros(1, count, dtype=torch.int32),
        cu_chunk_seqlen_p=_ints(0, count),
        last_chunk_indices_p=_ints(0),
    )
    mixed = step.mixed.to(dtype)
    here = _StandIn(
        layer,
        A=torch.full_like(layer.A, -RATE),
        D=torch.zeros_like(layer.D),
        dt_bias=torch.zeros_like(layer.dt_bias),
        split_hidden_states_B_C_fn=lambda _: layer.split_hidden_states_B_C_fn(mixed),
    )
    gate = torch.zeros(count, layer.tped_intermediate_size)
    projected = torch.cat([gate, step.conv, step.gates], dim=1).to(dtype)
    out = torch.zeros(count, layer.tped_intermediate_size, dtype=dtype)
    with _context(layer, here, metadata):
        type(layer).conv_ssm_forward(here, projected, out)


def _short(layer: Any, block: int, step: StateStep) -> None:
    """Source: vllm 0.32 model_executor/layers/mamba/short_conv.py, forward_native"""
    from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadata

    metadata = _made(ShortConvAttentionMetadata, **_of_sequences(step, block))
    here = _StandIn(
        layer,
        in_proj=lambda x: (torch.cat([torch.ones_like(x), torch.ones_like(x), x], dim=-1), None),
        out_proj=lambda x: (x, None),
    )
    conv = step.conv.to(layer.conv.weight.dtype)
    with _context(layer, here, metadata):
        type(layer).forward_native(here, conv, torch.zeros_like(conv))


_ADD: dict[str, Add] = {"gdn": _delta, "mamba2": _scan, "short_conv": _short}


def _counts(step: StateStep) -> dict[str, int]:
    """A sequence without a state is a prefill, one with a state and one token a decode."""
    count, first = len(step.conv), int(step.is_first)
    return {
        "num_prefills": first,
        "num_prefill_tokens": first * count,
        "num_decodes": 1 - first,
        "num_decode_tokens": (1 - first) * count,
    }


def _of_sequences(step: StateStep, block: int) -> dict[str, Any]:
    """What all kinds but gated delta nets are told."""
    count = len(step.conv)
    found: dict[str, Any] = {**_counts(step), "num_reqs": 1, "seq_lens": _ints(count)}
    if step.is_first:
        return found | {
            "has_initial_states_p": torch.tensor([False]),
            "query_start_loc_p": _ints(0, count),
            "state_indices_tensor_p": _ints(block),
        }
    return found | {"state_indices_tensor_d": _ints(block)[:, None]}


def _made(metadata: Any, **given: Any) -> Any:
    """An object of a dataclass of vLLM. Versions differ in fields: those not given are None."""
    found = metadata.__new__(metadata)
    for each in fields(metadata):
        default = each.default if isinstance(each.default, (bool, int)) else None
        setattr(found, each.name, given.get(each.name, default))
    return found


def _context(layer: Any, here: _StandIn, metadata: Any) -> AbstractContextManager[None]:
    context: AbstractContextManager[None] = override_forward_context(
        SimpleNamespace(
            no_compile_layers={layer.prefix: here}, attn_metadata={layer.prefix: metadata}
        )
    )
    return context


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
