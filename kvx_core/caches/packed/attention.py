"""Attention of a transformer block: over its cache and the new tokens, or over given tokens."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvx_core.argument_checks import bad_argument, flag, instance, integer
from kvx_core.caches.packed.cache import PackedKVCache, require_packed
from kvx_core.caches.packed.heads import repeats_of, split_heads
from kvx_core.caches.packed.masks import (
    alibi_mask,
    alibi_slopes,
    causal_mask,
    require_padding,
)
from kvx_core.errors import InvalidArgumentError


class CachedAttention(torch.nn.Module):
    """Causal attention of one transformer block, with the block's cache in `kv_cache`.

    With a cache it appends the new keys and values and attends to all that the cache then holds: a
    prompt, a step, or several tokens at once. Without one (kv_cache is None) it attends to the
    keys and values that it is given: the full computation, with the same result if these are all.
    It has no parameters: projections and rotary embedding are the block's own, and keys come
    rotated. Sequences of unequal length share a batch with padding: key_padding_mask of forward.

    num_heads:    of the queries
    num_kv_heads: of keys and values; None: num_heads
    alibi:        add a bias that falls with the distance (alibi_slopes), in the queries' dtype
    scale:        of the scores; None: 1 / sqrt(head_dim)
    kv_cache:     the cache of the block, or None: a field, to be read, set and unset
    Raises InvalidArgumentError, also where kv_cache is set to something else.
    """

    kv_cache: PackedKVCache | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        alibi: bool = False,
        scale: float | None = None,
        kv_cache: PackedKVCache | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = integer("num_heads", num_heads, 1)
        self.head_dim = integer("head_dim", head_dim, 1)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        repeats_of(self.num_kv_heads, num_heads)
        if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
            raise bad_argument("scale", scale, "a number or None")
        self.scale = scale
        self.alibi = flag("alibi", alibi)
        self._slopes: Tensor | None = None  # made where the first queries are
        self.kv_cache = kv_cache

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "kv_cache" and value is not None:
            instance(name, value, PackedKVCache, "a PackedKVCache or None")
        super().__setattr__(name, value)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: PackedKVCache | Literal["own"] | None = "own",
        *,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Attends from the last tokens to all of them.

        query:      (batch, q_len, num_heads * head_dim): of the last q_len of all tokens
        key, value: (batch, new, num_kv_heads * head_dim) of the new tokens, in the queries' dtype;
                    or num_heads * head_dim, where the block has repeated its heads
        kv_cache:   "own": self.kv_cache; a cache: that one instead; None: no cache, so the full
                    computation over key and value
        key_padding_mask: (batch, kv_len), bool, True where a key is padding, of all keys: those
                    that the cache holds, then `key`. No query sees padding, but a query that is
                    padding sees its own key. None: there is none
        Returns (batch, q_len, num_heads * head_dim). Mutates the cache: key and value are appended.
        Raises InvalidArgumentError, and leaves the cache as it was.
        """
        cache = self.kv_cache if isinstance(kv_cache, str) and kv_cache == "own" else kv_cache
        if cache is not None and not isinstance(cache, PackedKVCache):
            raise bad_argument("kv_cache", kv_cache, "a PackedKVCache, None or 'own'")
        self._require(query, key, value, 0 if cache is None else cache.seq_len, key_padding_mask)
        keys: Tensor | None = key
        values: Tensor | None = value
        if cache is not None:
            cache.append_packed(key, value)
            keys, values = cache.packed_keys(), cache.packed_values()
        assert keys is not None
        assert values is not None
        q_len, kv_len = query.shape[1], keys.shape[1]
        stored = keys.shape[2] // self.head_dim
        mask = self._mask(q_len, kv_len, query, key_padding_mask)
        mixed = scaled_dot_product_attention(
            split_heads(query, self.num_heads),
            split_heads(keys, stored),
            split_heads(values, stored),
            attn_mask=mask,
            is_causal=mask is None and q_len > 1,
            scale=self.scale,
            enable_gqa=stored != self.num_heads,
        )
        return mixed.transpose(1, 2).flatten(2)

    def _mask(
        self, q_len: int, kv_len: int, query: Tensor, padding: Tensor | None
    ) -> Tensor | None:
        """None where all see all, or as many queries as keys let torch make the mask."""
        if self.alibi:
            if self._slopes is None or self._slopes.device != query.device:
                self._slopes = alibi_slopes(self.num_heads, device=query.device)
            bias = alibi_mask(self._slopes, q_len, kv_len, key_padding_mask=padding)
            return bias.to(query.dtype)
        if padding is not None:
            return causal_mask(q_len, kv_len, key_padding_mask=padding)[:, None]
        if q_len in (1, kv_len):
            return None
        return causal_mask(q_len, kv_len, device=query.device)

    def _require(
        self, query: Tensor, key: Tensor, value: Tensor, cached: int, padding: Tensor | None
    ) -> None:
        require_packed("key", key, "value", value)
        instance("query", query, Tensor, "a torch.Tensor (batch, q_len, num_heads * head_dim)")
        of_queries = self.num_heads * self.head_dim
        of_keys = self.num_kv_heads * self.head_dim
        if key.shape[2] not in (of_keys, of_queries):
            raise InvalidArgumentError(
                f"key.shape[2] is {key.shape[2]}, expected {of_keys}, num_kv_heads "
                f"{self.num_kv_heads} * head_dim {self.head_dim}, or {of_queries} with repeated "
                "heads"
            )
        if query.ndim != 3 or (query.shape[0], query.shape[2]) != (key.shape[0], of_queries):
            raise InvalidArgumentError(
                f"query.shape is {tuple(query.shape)}, expected ({key.shape[0]}, q_len, "
                f"{of_queries}): batch of key, num_heads {self.num_heads} * head_dim "
                f"{self.head_dim}"
            )
        kv_len = cached + key.shape[1]
        if query.shape[1] > kv_len:
            raise InvalidArgumentError(
                f"query.shape[1] is {query.shape[1]}, expected at most {kv_len}: {cached} tokens "
                f"of the cache and {key.shape[1]} of key"
            )
        for field in ("dtype", "device"):
            if getattr(query, field) != getattr(key, field):
                raise InvalidArgumentError(
                    f"query.{field} is {getattr(query, field)}, expected "
                    f"{getattr(key, field)} as key has"
                )
        if padding is None:
            return
        require_padding(padding, key.shape[0], kv_len)
        if padding.device != key.device:
            raise InvalidArgumentError(
                f"key_padding_mask.device is {padding.device}, expected {key.device} as key has"
            )
