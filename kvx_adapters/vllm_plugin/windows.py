"""The sliding windows of vLLM's groups of layers, and the tokens that vLLM has blocks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvx_adapters.vllm.groups import layer_index
from kvx_core import UnsupportedError


def window_of(spec: Any) -> int:
    """Returns the sliding window of a group: vLLM frees blocks that have left it; 0: it frees none.

    Raises UnsupportedError for groups that free blocks in another way.
    Source: vllm 0.32 v1/core/single_type_kv_cache_manager.py, get_num_skipped_tokens
    """
    spec = _first(spec)
    name = type(spec).__name__
    if name.startswith("ChunkedLocalAttention"):
        raise UnsupportedError(
            f"a KV cache group has a {name}, expected full attention or a sliding window. Use "
            "--disable-hybrid-kv-cache-manager"
        )
    return spec.sliding_window if name.startswith("SlidingWindow") else 0


def reach_of(groups: Iterable[Any]) -> dict[int, int]:
    """Returns, for each layer whose blocks vLLM frees, how many tokens before the end of a prefix
    its first kept block can begin. vLLM loads one token less than the prefix, and keeps whole
    blocks.

    Source: vllm 0.32 v1/core/single_type_kv_cache_manager.py, allocate_new_computed_blocks
    """
    found: dict[int, int] = {}
    for group in groups:
        if window := window_of(group.kv_cache_spec):
            spec = _first(group.kv_cache_spec)
            more = getattr(spec, "extra_retained_tokens", 0) + spec.block_size
            found |= {layer_index(name): window + more for name in group.layer_names}
    return found


def _first(spec: Any) -> Any:
    """Returns the first layer's spec if a group's layers have their own specs, else the spec."""
    return next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
