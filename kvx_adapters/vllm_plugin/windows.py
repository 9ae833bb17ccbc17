"""The sliding windows of vLLM's groups of layers: which tokens it has blocks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvx_adapters.vllm.groups import layer_index
from kvx_core import UnsupportedError


def window_of(spec: Any) -> int:
    """The sliding window of a group, after which vLLM frees its blocks; 0: it keeps them.

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
    """Of layers whose blocks vLLM frees, how many tokens before the end of a prefix the first block
    that it keeps can begin. It loads one token less than the prefix, and keeps whole blocks.

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
    """The spec of the first layer of a group whose layers have their own."""
    return next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
