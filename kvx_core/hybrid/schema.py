"""The shape of one layer's cache in a model of DeepSeek-V4's kind, from its configuration.

Layers are of three types. All keep the latest tokens in a window. CSA layers also keep an entry for
every m tokens (m = 4), which a sparse indexer chooses from, HCA layers one for every m' = 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import lcm

from kvx_core.errors import InvalidArgumentError
from kvx_core.words import fix, instance, integer, wrong

# Tokens that a block of compressed entries stands for: lcm(4, 128), so that a block of a CSA layer
# (32 entries) and one of an HCA layer (1 entry) end at the same token.
BLOCK_SIZE_ORIGINAL_TOKENS = 128


class AttentionType(StrEnum):
    """What a layer attends to beside its window."""

    CSA = "csa"  # entries of m tokens, chosen by an indexer
    HCA = "hca"  # entries of m' tokens, all of them
    SWA = "swa"  # nothing


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
            fix(self, **{name: lambda field, value: integer(field, value, 1, 2**20)})
        if self.rope_dim >= self.head_dim:
            raise InvalidArgumentError(
                f"rope_dim is {self.rope_dim}, expected less than head_dim, {self.head_dim}"
            )
        if self.indexer_head_dim % 16:
            raise InvalidArgumentError(
                f"indexer_head_dim is {self.indexer_head_dim}, expected a multiple of 16: indexer "
                "keys have a scale for 16 numbers"
            )

    @property
    def nope_dim(self) -> int:
        """Numbers of an entry before its RoPE dims, which are kept in FP8."""
        return self.head_dim - self.rope_dim


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer of the model. Raises InvalidArgumentError."""

    layer_idx: int
    attn: AttentionType

    def __post_init__(self) -> None:
        fix(self, layer_idx=integer)
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

    needs_inv_scale: bool = True  # FP8 numbers have a scale per entry

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

    Raises InvalidArgumentError if the compression ratios do not divide a block of 128 tokens, or if
    a shorter block would hold complete entries of both.
    """
    instance("config", config, DSV4Config, "a DSV4Config")
    instance("spec", spec, LayerSpec, "a LayerSpec")
    csa, hca = config.csa_compression_ratio, config.hca_compression_ratio
    for name, ratio in (("csa_compression_ratio", csa), ("hca_compression_ratio", hca)):
        if BLOCK_SIZE_ORIGINAL_TOKENS % ratio:
            raise InvalidArgumentError(
                f"{name} is {ratio}, expected a divisor of {BLOCK_SIZE_ORIGINAL_TOKENS}, the "
                "tokens of a block"
            )
    if lcm(csa, hca) != BLOCK_SIZE_ORIGINAL_TOKENS:
        raise InvalidArgumentError(
            f"the least common multiple of csa_compression_ratio {csa} and hca_compression_ratio "
            f"{hca} is {lcm(csa, hca)}, expected {BLOCK_SIZE_ORIGINAL_TOKENS}, a block"
        )
    ratio = {AttentionType.CSA: csa, AttentionType.HCA: hca, AttentionType.SWA: 0}[spec.attn]
    entries = BLOCK_SIZE_ORIGINAL_TOKENS // ratio if ratio else 0
    is_csa = spec.attn is AttentionType.CSA
    return LayerCacheSchema(
        layer_idx=spec.layer_idx,
        attn_type=spec.attn,
        entries_per_block=entries,
        entry_head_dim=config.head_dim,
        rope_dim=config.rope_dim,
        indexer_entries_per_block=entries if is_csa else 0,
        indexer_head_dim=config.indexer_head_dim if is_csa else 0,
        swa_window_size=config.sliding_window,
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
    Raises InvalidArgumentError.
    Source: vllm 0.32 models/deepseek_v4/attention.py, max(1, ratio)
    """
    config = instance("config", config or DSV4Config(), DSV4Config, "a DSV4Config")
    num_layers = integer("num_layers", num_layers)
    if not isinstance(compress_ratios, (list, tuple)):
        raise wrong("compress_ratios", compress_ratios, "a list or tuple of integers")
    types = {
        0: AttentionType.SWA,
        1: AttentionType.SWA,
        config.csa_compression_ratio: AttentionType.CSA,
        config.hca_compression_ratio: AttentionType.HCA,
    }
    if len(compress_ratios) < num_layers:
        raise InvalidArgumentError(
            f"compress_ratios has {len(compress_ratios)} numbers, expected at least {num_layers}, "
            "one per layer"
        )
    for i, ratio in enumerate(compress_ratios[:num_layers]):
        if ratio not in types:
            raise wrong(
                f"compress_ratios[{i}]", ratio, f"one of {', '.join(map(str, sorted(types)))}"
            )
    return [LayerSpec(i, types[ratio]) for i, ratio in enumerate(compress_ratios[:num_layers])]


def specs(name: str, schedule: Sequence[LayerSpec]) -> Sequence[LayerSpec]:
    """`schedule` if it is one. Raises InvalidArgumentError."""
    if not isinstance(schedule, (list, tuple)):
        raise wrong(name, schedule, "a list or tuple of LayerSpec, one per layer")
    for i, spec in enumerate(schedule):
        instance(f"{name}[{i}]", spec, LayerSpec, "a LayerSpec")
    return schedule
