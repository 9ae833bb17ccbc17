"""The numbers of a model that its cache depends on, read from whatever has them.

Every function of kvx_core.hybrid that takes a config reads only the fields that it needs: of a
DSV4Config, of any object with fields of its names, or of a Hugging Face config, whose names differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvx_core.argument_checks import bad_argument, coerce_fields, integer
from kvx_core.errors import InvalidArgumentError

_CSA, _HCA = "compressed_sparse_attention", "heavily_compressed_attention"


@dataclass(frozen=True, slots=True)
class DSV4Config:
    """The numbers of a model that its cache depends on. Defaults: DeepSeek-V4, Flash and Pro.

    Raises InvalidArgumentError.
    Source: arXiv 2606.19348, 4.2.1
    """

    head_dim: int = 512  # numbers of an entry, the RoPE dims included
    rope_dim: int = 64  # the last of them, which are kept in BF16
    indexer_head_dim: int = 128  # numbers of an indexer key
    sliding_window: int = 128  # tokens
    csa_compression_ratio: int = 4  # m, tokens per entry
    hca_compression_ratio: int = 128  # m'

    def __post_init__(self) -> None:
        for name in self.__slots__:
            coerce_fields(self, **{name: lambda field, value: integer(field, value, 1, 2**20)})
        dims(self)
        indexer_dim(self)

    @property
    def nope_dim(self) -> int:
        """Numbers of an entry before its RoPE dims, which are kept in FP8."""
        return self.head_dim - self.rope_dim


def field(config: Any, name: str) -> int:
    """A number of DSV4Config from an object that has it, under its name or Hugging Face's.

    Raises InvalidArgumentError.
    """
    value = getattr(config, name, None)
    if value is None and name in _OF_HF:
        value = _OF_HF[name](config)
    if value is None:
        raise bad_argument(
            "config",
            config,
            f"a DSV4Config, or another object with {name}; a config.json is read by hf_config",
        )
    return integer(name, value, 1, 2**20)


def dims(config: Any) -> tuple[int, int]:
    """head_dim and rope_dim. Raises InvalidArgumentError."""
    head_dim, rope_dim = field(config, "head_dim"), field(config, "rope_dim")
    if rope_dim >= head_dim:
        raise InvalidArgumentError(
            f"rope_dim is {rope_dim}, expected less than head_dim, {head_dim}"
        )
    return head_dim, rope_dim


def indexer_dim(config: Any) -> int:
    """indexer_head_dim. Raises InvalidArgumentError."""
    dim = field(config, "indexer_head_dim")
    if dim % 16:
        raise InvalidArgumentError(
            f"indexer_head_dim is {dim}, expected a multiple of 16: indexer keys have a scale for "
            "16 numbers"
        )
    return dim


# ---- Hugging Face's names ----


def as_object(config: Any) -> Any:
    """A config whose fields are attributes, from one of these or the dict of a config.json."""
    return SimpleNamespace(**config) if isinstance(config, Mapping) else config


def _rope_dim(config: Any) -> Any:
    dim = getattr(config, "qk_rope_head_dim", None)
    share = getattr(config, "partial_rotary_factor", None)
    if dim is None and isinstance(share, float):
        return int(field(config, "head_dim") * share)
    return dim


def _rate(layer_type: str, name: str, default: int) -> Callable[[Any], Any]:
    def read(config: Any) -> Any:
        value, rates = getattr(config, name, None), getattr(config, "compress_rates", None)
        if value is None and isinstance(rates, Mapping):
            value = rates.get(layer_type)
        # A config.json may say neither. Those of other models do not have these.
        is_of_v4 = getattr(config, "model_type", None) == "deepseek_v4"
        is_of_v4 = is_of_v4 or hasattr(config, "compress_ratios")
        return default if value is None and is_of_v4 else value

    return read


# Source: transformers 5, models/deepseek_v4/configuration_deepseek_v4.py, DeepseekV4Config
_OF_HF: dict[str, Callable[[Any], Any]] = {
    "rope_dim": _rope_dim,
    "indexer_head_dim": lambda config: getattr(config, "index_head_dim", None),
    "csa_compression_ratio": _rate(_CSA, "compress_rate_csa", 4),
    "hca_compression_ratio": _rate(_HCA, "compress_rate_hca", 128),
}
