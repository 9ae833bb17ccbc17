"""MambaPool: recurrent states, one slot per request, as planes of one entry per sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from kvx_adapters.sglang.tables import Rows, numbers
from kvx_core import (
    CacheFacts,
    CacheView,
    InvalidArgumentError,
    Plane,
    Role,
    StateFacts,
    UnsupportedError,
)
from kvx_core.desc.states import CONV_ROLES
from kvx_core.model.recurrent import RecurrentState, recurrent_state

_CONV, _KDA_CONV = ("block", "channel", "time"), ("block", "time", "channel")
_ANY_CONV = ("block", "dim", "dim")


# The axes of `temporal` beside layers and slots, of the kinds that SGLang's kernels show.
_STATE = {
    "gdn": ("block", "head", "value", "key"),
    "mamba2": ("block", "head", "head_dim", "state"),
    "mamba1": ("block", "channel", "state"),
}


def state_view(
    mamba_pool: Any,
    slots: Rows,
    facts: CacheFacts,
    *,
    config: Any = None,
    num_tokens: Rows | Callable[[], Sequence[int]] | None = None,
    rank: int = 0,
    num_ranks: int = 1,
) -> CacheView:
    """The states of some requests, zero-copy: a dense view of planes, without K and V.

    mamba_pool: MambaPool, whose states are conv, [layers, slots, dim, kernel - 1] each, oldest
                token first (KDA: kernel - 1 before dim), and temporal,
                [layers, slots, heads, head_dim, state_size]
    slots:      (num_requests,): HybridReqToTokenPool.get_mamba_indices(req_pool_indices), from 1 on
    facts:      of the model
    config:     of the model: says what a state is made of, so that other engines and other numbers
                of ranks take it. None: a MambaPool of the same model and as many ranks takes it
    num_tokens: (num_requests,): how many tokens each state stands for; with a config it is needed.
                Steps change states in place: numbers are those of this moment, make a new view
                after a step; a function is asked before each use
    rank, num_ranks: of attention's tensor parallelism
    A migration moves a state whole if tokens of its request move. To move K and V in the same call:
    view.beside(state_view(...)).
    Raises UnsupportedError for states that are in several places, InvalidArgumentError.
    Source: sglang 0.5.23 mem_cache/memory_pool.py, MambaPool.__init__, copy_from;
    configs/mamba_utils.py, Mamba2StateShape.create
    """
    kind = type(mamba_pool).__name__
    if kind != "MambaPool":
        raise UnsupportedError(
            f"mamba_pool is a {kind}, expected a MambaPool: HybridReqToTokenPool.mamba_pool"
        )
    if mamba_pool.enable_linear_replayssm or mamba_pool.enable_linear_replayssm_spec:
        raise UnsupportedError(
            "mamba_pool keeps the last updates of a state in a ring (ReplaySSM), expected whole "
            "states. Start SGLang without --enable-linear-replayssm and "
            "--enable-linear-replayssm-spec"
        )
    if mamba_pool._slot_siblings:
        raise UnsupportedError(
            f"mamba_pool has {len(mamba_pool._slot_siblings)} further states of a slot "
            "(register_slot_state), expected none: a model would go on without them"
        )
    chosen = numbers("slots", slots)
    for i, slot in enumerate(chosen):
        if not 1 <= slot <= mamba_pool.size:
            raise InvalidArgumentError(
                f"slots[{i}] is {slot}, expected 1 to {mamba_pool.size}: slot 0 is that of padded "
                "requests. Give those of get_mamba_indices"
            )
    if len(set(chosen)) != len(chosen):
        raise InvalidArgumentError(
            f"slots are {chosen}, expected each once: a request has a state of its own"
        )
    sizes = None if config is None else recurrent_state(config)
    ranks = rank, num_ranks
    planes = []
    for name, role, tensor in _tensors(mamba_pool):
        meaning = None if sizes is None else _meaning(sizes, role, ranks)
        for i, layer in enumerate(mamba_pool.mamba_layer_ids):
            where: Any = {"slots": chosen, "name": f"mamba_pool.{name}[{i}]"}
            if meaning is None:
                axes = ("block", "head", "dim", "dim") if role == Role.STATE else _ANY_CONV
                where |= {"tokens_per_entry": 0}
                planes.append(Plane.of(tensor[i], axes, role, layer, **where))
            else:
                found = tensor[i, :, :, 0] if meaning[0] == _STATE["mamba1"] else tensor[i]
                planes.append(Plane.of_state(found, *meaning, layer, **where))
    counts: Callable[[], Sequence[int]] | Sequence[int] | None = None
    if callable(num_tokens):
        counts = num_tokens
    elif num_tokens is not None:
        counts = numbers("num_tokens", num_tokens)
        if len(counts) != len(chosen):
            raise InvalidArgumentError(
                f"num_tokens has {len(counts)} numbers, expected {len(chosen)}, one per slot"
            )
    return CacheView(
        (),
        facts,
        planes=tuple(planes),
        dense=True,
        outdated=partial(_outdated, mamba_pool, _addresses(mamba_pool)),
        state_tokens=counts,
    )


def _meaning(
    sizes: RecurrentState, role: int, ranks: tuple[int, int]
) -> tuple[tuple[str, ...], StateFacts] | None:
    """The axes of a tensor and what it means; None of what SGLang's kernels do not show.

    Raises UnsupportedError for a convolution in several tensors.
    """
    rank, num_ranks = ranks
    if role == Role.STATE:
        axes = _STATE.get(sizes.kind)
        return None if axes is None else (axes, sizes.state_facts(rank=rank, num_ranks=num_ranks))
    if role != Role.CONV_STATE:
        raise UnsupportedError(
            "mamba_pool has several convolutions, expected one: which section each of them is is "
            "not known. Give no config, for a MambaPool of the same kind"
        )
    axes = _KDA_CONV if sizes.kind == "kda" else _CONV
    return axes, sizes.conv_facts(rank=rank, num_ranks=num_ranks)


def _tensors(pool: Any) -> list[tuple[str, int, Tensor]]:
    """Name, role and tensor of each kind of state."""
    state = pool.mamba_cache
    convs = [
        (f"conv[{i}]", CONV_ROLES + i if i else int(Role.CONV_STATE), tensor)
        for i, tensor in enumerate(state.conv)
    ]
    # A model of short convolutions has no temporal state.
    temporal = [("temporal", int(Role.STATE), state.temporal)] if state.temporal.numel() else []
    return [*convs, *temporal]


def _addresses(pool: Any) -> list[int]:
    return [tensor.data_ptr() for _, _, tensor in _tensors(pool)]


def _outdated(pool: Any, described: list[int]) -> str | None:
    if _addresses(pool) != described:
        return "mamba_pool has its states elsewhere. Call state_view again"
    return None
