"""The sizes of a model's recurrent state, as its configuration says: the same for every engine.

Source: the modeling files of transformers 5.19 that the functions name, and vllm 0.32
model_executor/layers/mamba/mamba_utils.py, MambaStateShapeCalculator
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvx_core.desc.states import StateFacts, StateSection
from kvx_core.errors import InvalidArgumentError, UnsupportedError


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """What each recurrent layer of a model keeps of a sequence, over all ranks."""

    kind: str  # see kvx_core.desc.states.KINDS
    conv: tuple[tuple[str, int], ...]  # sections of its convolution and their channels
    num_columns: int  # inputs that a convolution keeps, kernel size - 1; 0: there is none
    state: tuple[int, ...]  # extents of the recurrent state's axes, as KINDS names them
    groups: tuple[str, ...] = ()  # sections of which a rank has whole groups of num_groups
    num_groups: int = 1

    def conv_facts(
        self,
        sections: tuple[str, ...] = (),
        *,
        rank: int = 0,
        num_ranks: int = 1,
        first_column: int = 0,
    ) -> StateFacts:
        """The meaning of a plane of the convolution.

        sections: those that the plane has, in its order; (): all
        Raises InvalidArgumentError, UnsupportedError for groups that ranks cannot share.
        """
        widths = dict(self.conv)
        if not set(sections) <= widths.keys():
            raise InvalidArgumentError(f"sections are {sections}, expected some of {[*widths]}")
        return StateFacts(
            kind=self.kind,
            sections=tuple(
                StateSection(name, widths[name], self._is_whole(name, num_ranks))
                for name in sections or widths
            ),
            rank=rank,
            num_ranks=num_ranks,
            num_columns=self.num_columns,
            first_column=first_column,
        )

    def state_facts(self, *, rank: int = 0, num_ranks: int = 1) -> StateFacts:
        """The meaning of a plane of the recurrent state. Raises InvalidArgumentError."""
        if not self.state:
            raise InvalidArgumentError(f"{self.kind} has no recurrent state, expected one that has")
        section = StateSection("heads", self.state[0])
        return StateFacts(kind=self.kind, sections=(section,), rank=rank, num_ranks=num_ranks)

    def _is_whole(self, name: str, num_ranks: int) -> bool:
        """Whether every rank has all of a section.

        Source: vllm 0.32 mamba_utils.py, extra_groups_for_head_shards: one group is repeated
        """
        if name not in self.groups:
            return False
        if self.num_groups == 1:
            return True
        if self.num_groups % num_ranks == 0:
            return False
        raise UnsupportedError(
            f"section {name} has {self.num_groups} groups and num_ranks is {num_ranks}, expected a "
            "divisor, or a model with one group, which every rank has"
        )


def recurrent_state(config: Any) -> RecurrentState:
    """What each recurrent layer keeps, by a model's configuration.

    config: of the decoder: config.json as a dict, or an object with its fields
    Raises UnsupportedError for a model whose state is not known here, InvalidArgumentError for a
    configuration that does not say a size.
    """
    model_type = _get(config, "model_type")
    of_type = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if of_type is None:
        raise UnsupportedError(
            f"model_type is {model_type!r}, whose recurrent state is not known, expected one of "
            f"{', '.join(sorted(_FAMILIES))}. Describe it with Plane.of_state"
        )
    return of_type(config)


def has_recurrent_state(config: Any) -> bool:
    """Whether `recurrent_state` knows models of this type."""
    return _get(config, "model_type") in _FAMILIES


def _get(config: Any, *names: str) -> Any:
    """The first of these fields that is there, else None."""
    for name in names:
        found = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if found is not None:
            return found
    return None


def _number(config: Any, *names: str) -> int:
    """The first of these fields, a positive number."""
    found = _get(config, *names)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found < 2**31:
        raise InvalidArgumentError(
            f"config.{names[0]} is {found!r}, expected a number of 1 or more: the size of a "
            "recurrent state"
        )
    return found


def _gdn(config: Any) -> RecurrentState:
    """Source: transformers 5.19 modeling_qwen3_next.py, Qwen3NextGatedDeltaNet."""
    key_heads = _number(config, "linear_num_key_heads")
    value_heads = _number(config, "linear_num_value_heads")
    key_dim = _number(config, "linear_key_head_dim")
    value_dim = _number(config, "linear_value_head_dim")
    keys = key_heads * key_dim
    return RecurrentState(
        "gdn",
        (("q", keys), ("k", keys), ("v", value_heads * value_dim)),
        _number(config, "linear_conv_kernel_dim") - 1,
        (value_heads, key_dim, value_dim),
    )


def _kda(config: Any) -> RecurrentState:
    """Source: transformers 5.19 modeling_kimi_linear.py, KimiLinearDeltaAttention."""
    where = _get(config, "linear_attn_config")
    names = "num_heads", "head_dim", "short_conv_kernel_size"  # as Kimi's own configuration says
    if not isinstance(where, Mapping):
        where = config
        names = "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"
    heads, dim, kernel = names
    num_heads, head_dim = _number(where, heads), _number(where, dim)
    width = num_heads * head_dim
    return RecurrentState(
        "kda",
        (("q", width), ("k", width), ("v", width)),
        _number(where, kernel) - 1,
        (num_heads, head_dim, head_dim),
    )


def _mamba2(config: Any) -> RecurrentState:
    """Source: transformers 5.19 modeling_bamba.py, BambaMixer, and the same
    of the other models."""
    heads = _number(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    groups = _number(config, "mamba_n_groups", "mamba_ngroups", "n_groups")
    size = _number(config, "mamba_d_state", "ssm_state_size", "state_size")
    head_dim = _get(config, "mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    if not isinstance(head_dim, int):  # "auto"
        head_dim = _inner(config) // heads
    return RecurrentState(
        "mamba2",
        (("x", heads * head_dim), ("b", groups * size), ("c", groups * size)),
        _number(config, "mamba_d_conv", "conv_kernel") - 1,
        (heads, head_dim, size),
        groups=("b", "c"),
        num_groups=groups,
    )


def _mamba1(config: Any) -> RecurrentState:
    """Source: transformers 5.19 modeling_mamba.py, MambaMixer; modeling_jamba.py,
    JambaMambaMixer."""
    width = _inner(config)
    return RecurrentState(
        "mamba1",
        (("x", width),),
        _number(config, "mamba_d_conv", "conv_kernel") - 1,
        (width, _number(config, "mamba_d_state", "state_size")),
    )


def _short_conv(config: Any) -> RecurrentState:
    """Source: transformers 5.19 modeling_lfm2.py, Lfm2ShortConv."""
    width = _number(config, "hidden_size")
    return RecurrentState("short_conv", (("x", width),), _number(config, "conv_L_cache") - 1, ())


def _inner(config: Any) -> int:
    """The width of a Mamba layer."""
    found = _get(config, "mamba_d_ssm")
    if found is not None:
        return _number(config, "mamba_d_ssm")
    return int(_number(config, "mamba_expand", "expand") * _number(config, "hidden_size"))


_FAMILIES: dict[str, Callable[[Any], RecurrentState]] = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"),
        _gdn,
    ),
    "kimi_linear": _kda,
    **dict.fromkeys(
        ("granitemoehybrid", "bamba", "falcon_h1", "nemotron_h", "zamba2", "mamba2"), _mamba2
    ),
    **dict.fromkeys(("jamba", "mamba", "falcon_mamba"), _mamba1),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _short_conv),
}
