"""MambaPool: recurrent states, one slot per request, as planes of one entry per sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from kvx_adapters.sglang.tables import Rows, numbers
from kvx_core import CacheFacts, CacheView, InvalidArgumentError, Plane, Role, UnsupportedError

CONV_ROLES = 1000  # roles of further convolutions: CONV_STATE, 1001, 1002, ...


def state_view(mamba_pool: Any, slots: Rows, facts: CacheFacts) -> CacheView:
    """The states of some requests, zero-copy: a dense view of planes, without K and V.

    mamba_pool: MambaPool, whose states are conv, [layers, slots, dim, kernel - 1] each, oldest
                token first (KDA: kernel - 1 before dim), and temporal,
                [layers, slots, heads, head_dim, state_size]
    slots:      (num_requests,): HybridReqToTokenPool.get_mamba_indices(req_pool_indices), from 1 on
    facts:      of the model
    A migration moves a state whole if tokens of its request move. It is that of a prefix of one
    length, which KVX cannot see: both engines must go on from the same token. To move K and V in
    the same call, put its planes beside them: dataclasses.replace(view, planes=states.planes).
    Raises UnsupportedError for states that are in several places, InvalidArgumentError.
    Source: sglang 0.5.23 mem_cache/memory_pool.py, MambaPool.__init__, copy_from
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
    planes = [
        Plane.of(
            tensor[i],
            ("block", "head", "dim", "dim") if role == Role.STATE else ("block", "dim", "dim"),
            role,
            layer,
            tokens_per_entry=0,
            slots=chosen,
            name=f"mamba_pool.{name}[{i}]",
        )
        for name, role, tensor in _tensors(mamba_pool)
        for i, layer in enumerate(mamba_pool.mamba_layer_ids)
    ]
    return CacheView(
        (),
        facts,
        planes=tuple(planes),
        dense=True,
        outdated=partial(_outdated, mamba_pool, _addresses(mamba_pool)),
    )


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
