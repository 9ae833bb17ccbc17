"""Proof of a description of states: vLLM's own ops add tokens to one, and KVX reads it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from kvx_core import CacheFacts, CacheView, InvalidArgumentError, Plane, UnsupportedError, migrate
from kvx_core.model.recurrent import RecurrentState

RATE = 0.5  # a state is multiplied by exp(-RATE * softplus(gate)) for each token
FACTS = CacheFacts(
    engine="vllm", fingerprint="self-test", rotary="none", rotary_dim=0, rope_applied=False
)
_TOLERANCE = 0.05  # of the largest number of a state; others are as large, wherever they stand
_ABOVE = 2  # tokens of a prompt beyond those that a convolution keeps


@dataclass(frozen=True, slots=True)
class StateStep:
    """Tokens that one step of vLLM adds to the state of a sequence."""

    conv: Tensor  # (num_tokens, channels) float32: inputs of the convolution
    mixed: Tensor  # (num_tokens, channels) float32: what the convolution is to give
    gates: Tensor  # (num_tokens, heads) float32: how much a token adds, how much is kept before
    is_first: bool  # the sequence has no state yet


# Adds the tokens to the state of one layer in the block that `planes` of `self_test_states` name
AddTokens = Callable[[StateStep], None]


def self_test_states(
    planes: Sequence[Plane], sizes: RecurrentState, add: AddTokens, *, name: str
) -> None:
    """Lets vLLM add a prompt and then one token to a state, and reads it back through KVX.

    planes: of one layer, of one sequence: its convolution and, but for short ones, its state
    sizes:  of the model's states
    add:    vLLM's own op
    name:   of the layer, for the error
    Mutates the state. Raises InvalidArgumentError naming what differs; UnsupportedError for a kind
    whose numbers are not known here.
    """
    if sizes.state and sizes.kind not in _ADD:
        raise UnsupportedError(
            f"{name} has states of {sizes.kind}, expected one of {', '.join(_ADD)} or short "
            "convolutions: KVX cannot compute the numbers of others"
        )
    channels = sum(width for _, width in sizes.conv)
    heads = sizes.state[0] if sizes.state else 1
    conv, state = torch.zeros(0, channels), torch.zeros(sizes.state)
    chance = torch.Generator().manual_seed(0)
    for num_tokens in (sizes.num_columns + _ABOVE, 1):
        step = StateStep(
            _numbers((num_tokens, channels), chance),
            _numbers((num_tokens, channels), chance),
            _numbers((num_tokens, heads), chance),
            is_first=not len(conv),
        )
        add(step)
        conv = torch.cat([conv, step.conv])
        found = _read(planes, sizes, len(conv))
        kept = conv[-sizes.num_columns :].T
        _compare(f"{name}, the convolution of {sizes.kind}", kept, found[0], 0.0, planes[0])
        if sizes.state:
            for mixed, gate in zip(step.mixed, step.gates, strict=True):
                state = _ADD[sizes.kind](state, mixed, gate, sizes)
            near = _TOLERANCE * float(state.abs().max())
            _compare(f"{name}, the state of {sizes.kind}", state, found[1], near, planes[1])


def _numbers(shape: tuple[int, ...], chance: torch.Generator) -> Tensor:
    """Random ones that every dtype of a cache but FP8 has, and none of them 0."""
    found = torch.randint(1, 65, shape, generator=chance) / 32.0
    return found * (2.0 * torch.randint(2, shape, generator=chance) - 1)


def _sections(mixed: Tensor, sizes: RecurrentState) -> list[Tensor]:
    ends = list(accumulate(width for _, width in sizes.conv))
    return list(mixed.tensor_split(ends[:-1]))


def _delta(state: Tensor, mixed: Tensor, gate: Tensor, sizes: RecurrentState) -> Tensor:
    """A gated delta net. state: (heads, key, value)

    Source: transformers 5.19 modeling_qwen3_next.py, torch_recurrent_gated_delta_rule
    """
    heads, keys, values = sizes.state
    _, key, value = _sections(mixed, sizes)
    key = normalize(key.view(-1, keys), dim=-1)
    key = key.repeat_interleave(heads // len(key), dim=0)
    state = state * torch.exp(-RATE * softplus(gate))[:, None, None]
    change = value.view(heads, values) - torch.einsum("hkv,hk->hv", state, key)
    return state + torch.einsum("hk,hv,h->hkv", key, change, torch.sigmoid(gate))


def _scan(state: Tensor, mixed: Tensor, gate: Tensor, sizes: RecurrentState) -> Tensor:
    """Mamba 2. state: (heads, head_dim, state)

    Source: transformers 5.19 modeling_mamba2.py, Mamba2Mixer.torch_forward
    """
    heads, dim, size = sizes.state
    x, b, _ = _sections(mixed, sizes)
    b = b.view(-1, size)
    b = b.repeat_interleave(heads // len(b), dim=0)
    gate = softplus(gate)
    state = state * torch.exp(-RATE * gate)[:, None, None]
    return state + torch.einsum("hp,hn,h->hpn", x.view(heads, dim), b, gate)


_ADD = {"gdn": _delta, "mamba2": _scan}


def _read(planes: Sequence[Plane], sizes: RecurrentState, num_tokens: int) -> list[Tensor]:
    """The numbers that KVX reads, in the order of files: (channels, columns), (heads, ...)."""
    tensors, described = [], []
    for plane in planes:
        assert plane.state is not None
        shape: tuple[int, ...] = sizes.state
        if plane.state.is_conv:
            shape = (sum(width for _, width in sizes.conv), sizes.num_columns)
        facts = sizes.conv_facts() if plane.state.is_conv else sizes.state_facts()
        tensors.append(torch.zeros(1, *shape))
        axes = ("block", *plane.state.axes)
        described.append(Plane.of_state(tensors[-1], axes, facts, plane.layer))
    src = CacheView((), FACTS, planes=tuple(planes), dense=True, state_tokens=[num_tokens])
    dst = replace(src, planes=tuple(described))
    migrate(src, dst, [num_tokens], convert_states=True)
    return [tensor[0] for tensor in tensors]


def _compare(name: str, wanted: Tensor, found: Tensor, near: float, plane: Plane) -> None:
    """Raises at the first number that differs by more than `near`."""
    wrong = (~((found - wanted).abs() <= near)).nonzero().tolist()  # so is NaN
    if wrong:
        assert plane.state is not None
        at = tuple(wrong[0])
        axes = ", ".join(f"{a} {i}" for a, i in zip(plane.state.axes, at, strict=True))
        raise InvalidArgumentError(
            f"{name}: vLLM wrote {float(wanted[at]):g} to {axes}, and KVX reads "
            f"{float(found[at]):g}; {len(wrong)} of {prod(found.shape)} differ. The description is "
            "wrong"
        )
