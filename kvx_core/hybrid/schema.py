"""The shape of one layer's cache in a model of DeepSeek-V4's kind, from its configuration.

Layers are of three types. All keep the latest tokens in a window. CSA layers also keep an entry for
every m tokens (m = 4), which a sparse indexer chooses from, HCA layers one for every m' = 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from kvx_core.argument_checks import bad_argument, coerce_fields, instance, integer, one_of
from kvx_core.errors import InvalidArgumentError
from kvx_core.hybrid.config import DSV4Config, as_object, dims, field, indexer_dim

# Tokens that a block of compressed entries stands for: lcm(4, 128), so that a block of a CSA layer
# (32 entries) and one of an HCA layer (1 entry) end at the same token. Of models with other ratios,
# too.
BLOCK_SIZE_ORIGINAL_TOKENS = 128


class AttentionType(StrEnum):
    """What a layer attends to beside its window."""

    CSA = "csa"  # entries of m tokens, chosen by an indexer
    HCA = "hca"  # entries of m' tokens, all of them
    SWA = "swa"  # nothing


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer of the model. Raises InvalidArgumentError."""

    layer_idx: int
    attn: AttentionType

    def __post_init__(self) -> None:
        coerce_fields(self, layer_idx=integer)
        instance("attn", self.attn, AttentionType, "an AttentionType: CSA, HCA or SWA")


@dataclass(frozen=True)
class LayerCacheSchema:
    """Cache layout of one layer. Sizes count entries; bytes come from the dtypes."""

    layer_idx: int
    attn_type: AttentionType

    # A block of compressed entries.
    entries_per_block: int
    entry_head_dim: int
    rope_dim: int

    # Indexer keys beside them, of CSA layers.
    indexer_entries_per_block: int
    indexer_head_dim: int

    # A request's slot in the state cache: its window, and tokens that are not compressed yet.
    swa_window_size: int
    # An entry of a CSA layer is made of its own m tokens and the m before them, so that the latter
    # are kept until the next entry.
    tail_buffer_size_a: int  # m (CSA), m' (HCA): tokens since the last entry
    tail_buffer_size_b: int  # m (CSA): tokens of the last entry

    # FP8 numbers have an inverse scale per token and entry. Without, it is 1, none is stored, and
    # numbers above 448 become 448.
    needs_inv_scale: bool = True

    @property
    def tail_buffer_size(self) -> int:
        """Rows of both tails."""
        return self.tail_buffer_size_a + self.tail_buffer_size_b

    @property
    def compression_ratio(self) -> int:
        """Tokens per entry; 0 for a layer without entries."""
        if not self.entries_per_block:
            return 0
        return BLOCK_SIZE_ORIGINAL_TOKENS // self.entries_per_block

    @property
    def nope_dim(self) -> int:
        """Numbers of an entry before its RoPE dims."""
        return self.entry_head_dim - self.rope_dim

    def entries(self, num_tokens: int) -> int:
        """Compressed entries of a sequence of `num_tokens` tokens."""
        return num_tokens // self.compression_ratio if self.compression_ratio else 0

    def blocks(self, num_tokens: int) -> int:
        """Blocks that hold the compressed entries of a sequence of `num_tokens` tokens."""
        return (
            -(-self.entries(num_tokens) // self.entries_per_block) if self.entries_per_block else 0
        )


def build_schema(config: DSV4Config, spec: LayerSpec) -> LayerCacheSchema:
    """The cache layout of a layer.

    config: a DSV4Config, or another object with the fields that the layer's type needs: its own
            names or Hugging Face's (DeepseekV4Config)
    spec:   a LayerSpec, or another object with its fields
    Raises InvalidArgumentError, also if the ratio does not divide a block of 128 tokens.
    """
    layer_idx, attn = _spec("spec", spec)
    head_dim, rope_dim = dims(config)
    is_csa = attn is AttentionType.CSA
    ratio = _ratio(config, attn) if attn is not AttentionType.SWA else 0
    if ratio and BLOCK_SIZE_ORIGINAL_TOKENS % ratio:
        raise InvalidArgumentError(
            f"{attn}_compression_ratio is {ratio}, expected a divisor of "
            f"{BLOCK_SIZE_ORIGINAL_TOKENS}, the tokens of a block"
        )
    entries = BLOCK_SIZE_ORIGINAL_TOKENS // ratio if ratio else 0
    return LayerCacheSchema(
        layer_idx=layer_idx,
        attn_type=attn,
        entries_per_block=entries,
        entry_head_dim=head_dim,
        rope_dim=rope_dim,
        indexer_entries_per_block=entries if is_csa else 0,
        indexer_head_dim=indexer_dim(config) if is_csa else 0,
        swa_window_size=field(config, "sliding_window"),
        tail_buffer_size_a=ratio,
        tail_buffer_size_b=ratio if is_csa else 0,
    )


def compute_block_budget(
    config: DSV4Config,
    schedule: Sequence[LayerSpec],
    max_context_tokens: int,
    max_concurrent_requests: int,
) -> dict[str, int]:
    """Blocks of each layer's pool, by type of layer, with a tenth of headroom: {"csa": ..., "hca":
    ...}, without a key for a type that the schedule does not have.

    Complete blocks only: a pool of this size may be too small for requests that end inside a block,
    which KVCacheManager.admit_request checks.
    """
    schedule = specs("schedule", schedule)
    blocks_per_request = integer("max_context_tokens", max_context_tokens, 0, 2**40) // (
        BLOCK_SIZE_ORIGINAL_TOKENS
    )
    total = integer("max_concurrent_requests", max_concurrent_requests) * blocks_per_request
    types = dict.fromkeys(spec.attn for spec in schedule if spec.attn is not AttentionType.SWA)
    return {attn.value: total * 11 // 10 for attn in types}


def schedule_of(
    compress_ratios: Sequence[int], num_layers: int, config: DSV4Config | None = None
) -> list[LayerSpec]:
    """The layers of a model, from `compress_ratios` of its config.json.

    compress_ratios: a number per layer, then those of layers for multi-token prediction, which are
                     left out: 0 or 1 is a layer with a window alone
    num_layers:      num_hidden_layers
    config:          an object with the two compression ratios, as build_schema takes it
    Raises InvalidArgumentError.
    Source: vllm 0.32 models/deepseek_v4/attention.py, max(1, ratio)
    """
    num_layers = integer("num_layers", num_layers)
    if not isinstance(compress_ratios, (list, tuple)):
        raise bad_argument(
            "compress_ratios",
            compress_ratios,
            "a list or tuple of integers. A config that has none is read by hf_config",
        )
    types = {0: AttentionType.SWA, 1: AttentionType.SWA}
    for attn in (AttentionType.CSA, AttentionType.HCA):
        ratio = _ratio(DSV4Config() if config is None else config, attn)
        if ratio in types:
            raise InvalidArgumentError(
                f"{attn}_compression_ratio is {ratio}, the ratio of {types[ratio].name} layers, "
                "too: expected another, or LayerSpecs in place of compress_ratios"
            )
        types[ratio] = attn
    if len(compress_ratios) < num_layers:
        raise InvalidArgumentError(
            f"compress_ratios has {len(compress_ratios)} numbers, expected at least {num_layers}, "
            "one per layer"
        )
    ratios = [integer(f"compress_ratios[{i}]", r) for i, r in enumerate(compress_ratios)]
    for i, ratio in enumerate(ratios[:num_layers]):
        if ratio not in types:
            raise bad_argument(
                f"compress_ratios[{i}]", ratio, f"one of {', '.join(map(str, sorted(types)))}"
            )
    return [LayerSpec(i, types[ratio]) for i, ratio in enumerate(ratios[:num_layers])]


_OF_LAYER_TYPES = {
    "sliding_attention": AttentionType.SWA,
    "compressed_sparse_attention": AttentionType.CSA,
    "heavily_compressed_attention": AttentionType.HCA,
}


def hf_config(config: Any) -> tuple[DSV4Config, list[LayerSpec]]:
    """The numbers and the layers of a model, from its Hugging Face config.

    config: transformers' or vLLM's DeepseekV4Config, or the dict of a config.json. Layers are those
            of compress_ratios or, where these are absent or None, of layer_types
    Raises InvalidArgumentError, also if both are there and differ.
    Source: transformers 5, models/deepseek_v4/configuration_deepseek_v4.py
    """
    config = as_object(config)
    numbers = DSV4Config(**{name: field(config, name) for name in DSV4Config.__slots__})
    count = integer("num_hidden_layers", getattr(config, "num_hidden_layers", None), 1)
    ratios, names = (getattr(config, name, None) for name in ("compress_ratios", "layer_types"))
    if ratios is None and names is None:
        raise InvalidArgumentError(
            "config has neither compress_ratios nor layer_types, expected one: they say which "
            "layers compress"
        )
    by_ratios = None if ratios is None else schedule_of(ratios, count, numbers)
    if by_ratios is not None and names is None:
        return numbers, by_ratios
    if not isinstance(names, (list, tuple)) or len(names) < count:
        raise bad_argument("layer_types", names, f"a list of at least {count} names, one per layer")
    found = []
    for i, name in enumerate(names[:count]):
        found.append(
            LayerSpec(i, _OF_LAYER_TYPES[one_of(f"layer_types[{i}]", name, *_OF_LAYER_TYPES)])
        )
        if by_ratios is not None and by_ratios[i] != found[i]:
            raise InvalidArgumentError(
                f"layer_types[{i}] is {name!r} and compress_ratios says a layer of type "
                f"{by_ratios[i].attn.name}, expected one type"
            )
    return numbers, found


def specs(name: str, schedule: Sequence[LayerSpec]) -> list[LayerSpec]:
    """`schedule` if it is one. Raises InvalidArgumentError."""
    if not isinstance(schedule, (list, tuple)):
        raise bad_argument(name, schedule, "a list or tuple of LayerSpec, one per layer")
    return [LayerSpec(*_spec(f"{name}[{i}]", spec)) for i, spec in enumerate(schedule)]


def _spec(name: str, spec: Any) -> tuple[int, AttentionType]:
    """The fields of a LayerSpec. Raises InvalidArgumentError."""
    layer_idx, attn = getattr(spec, "layer_idx", None), getattr(spec, "attn", None)
    if layer_idx is None or attn is None:
        raise bad_argument(name, spec, "a LayerSpec, or another object with layer_idx and attn")
    if isinstance(attn, Enum) and attn.name in AttentionType.__members__:  # of another library
        attn = AttentionType[attn.name]
    checked = LayerSpec(layer_idx, attn)
    return checked.layer_idx, checked.attn


def _ratio(config: Any, attn: AttentionType) -> int:
    return field(config, f"{attn}_compression_ratio")
