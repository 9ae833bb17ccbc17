"""Packed caches as an end of a migration: a dense CacheView, a cache per layer, zero-copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from kvx_core.argument_checks import bad_argument, instance, integer
from kvx_core.caches.packed.cache import Held, PackedKVCache
from kvx_core.caches.packed.heads import repeats_of
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.facts import CacheFacts
from kvx_core.desc.tensor_desc import TensorDesc, describe
from kvx_core.desc.view import CacheView
from kvx_core.errors import InvalidArgumentError
from kvx_core.types import Layout


def packed_view(
    caches: PackedKVCache | Sequence[PackedKVCache],
    facts: CacheFacts,
    num_kv_heads: int,
    *,
    num_heads: int | None = None,
) -> CacheView:
    """The tokens that packed caches hold now, as a dense view: sequence s is row s of the batch.

    caches:       one per layer, each holding tokens; to migrate into one, make room for them first:
                  cache.set_packed(torch.zeros(batch, seq, dim), torch.zeros(batch, seq, dim))
    num_kv_heads: of keys and values; head_dim is dim divided by it
    num_heads:    where the caches hold heads that the model has repeated: how many. The view then
                  shows each KV head once and is read-only
    Where a copy of a cache has the same memory the view is read-only: pass set_packed tensors of
    its own to migrate into it. The view is out of date when a cache has other tensors, as after an
    append for which there was no room, or fewer tokens, or when it was copied: migrate and verify
    then refuse it.
    Raises InvalidArgumentError, UnsupportedError.
    """
    listed = [caches] if isinstance(caches, PackedKVCache) else caches
    expected = "a PackedKVCache, or a list or tuple with one per layer"
    if not isinstance(listed, (list, tuple)) or not listed:
        raise bad_argument("caches", caches, expected)
    instance("facts", facts, CacheFacts, "a CacheFacts: what the bytes mean")
    integer("num_kv_heads", num_kv_heads, 1)
    repeats = 1 if num_heads is None else repeats_of(num_kv_heads, num_heads)
    described: list[tuple[PackedKVCache, Held]] = []
    layers = []
    for i, cache in enumerate(listed):
        held = instance(f"caches[{i}]", cache, PackedKVCache, "a PackedKVCache")._held
        if held is None or held.seq_len == 0:
            raise InvalidArgumentError(
                f"caches[{i}] holds no tokens, expected at least one. To migrate into it, make "
                "room with set_packed"
            )
        layers.append(_layer(f"caches[{i}]", held, num_kv_heads, repeats))
        described.append((cache, replace(held)))
    return CacheView(tuple(layers), facts, dense=True, outdated=lambda: _outdated(described))


def _layer(name: str, held: Held, num_kv_heads: int, repeats: int) -> CacheDesc:
    dim = held.keys.shape[2]
    stored = num_kv_heads * repeats
    if dim % stored or dim == 0:
        raise InvalidArgumentError(
            f"{name} has dim {dim}, expected a multiple of the {stored} heads that it holds"
        )

    def half(name: str, packed: Tensor) -> TensorDesc:
        # (batch, seq, head, repeat, dim): the first of equal heads stands for all
        tokens = packed[:, : held.seq_len].detach()
        batch, seq_len, _ = tokens.shape
        heads = tokens.view(batch, seq_len, num_kv_heads, repeats, dim // stored)
        desc = describe(heads[:, :, :, 0], Layout.BLOCK_NHD, name=name)
        return replace(desc, writable=False) if repeats > 1 or held.is_shared else desc

    return CacheDesc.from_kv(half(f"{name} keys", held.keys), half(f"{name} values", held.values))


def _outdated(described: list[tuple[PackedKVCache, Held]]) -> str | None:
    """Why the caches are no longer the ones described."""
    for i, (cache, then) in enumerate(described):
        now = cache._held
        if now is None or now.keys is not then.keys or now.values is not then.values:
            return (
                f"caches[{i}] has new tensors, expected those described. A PackedKVCache replaces "
                "them where there is no room for an append: call packed_view again"
            )
        if now.is_shared and not then.is_shared:
            return (
                f"caches[{i}] was copied, expected no copy that has the memory described. Call "
                "packed_view again"
            )
        if now.seq_len < then.seq_len:
            return (
                f"caches[{i}] holds {now.seq_len} tokens, expected the {then.seq_len} described. "
                "Call packed_view again"
            )
    return None
