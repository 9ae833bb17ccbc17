"""Tokens for KvCacheStore, and what a store of any format holds: used by its tests."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kvx_core import DType, KvCacheStore
from kvx_core.caches.kv import KvStorage

LAYERS, HEADS = 2, 3
# Every format of the table that a write converts to: floats and units of numbers.
FORMATS = [
    dtype
    for dtype in DType
    if (dtype.format.rounding or dtype.numbers > 1) and not dtype.format.affine
]
DIM = 64
SEEDS = (1, 2, 3)
OTHERS = (DType.Q8_0, DType.F8_E4M3, DType.BF16)  # the other half of a store, by seed
TOKEN = torch.zeros(HEADS, DIM)  # keys or values of one


def dim_of(*formats: DType) -> int:
    """The head_dim of a store: DIM, or the numbers of a unit if these are more."""
    return max(DIM, *(dtype.numbers for dtype in formats))


def some(
    num_tokens: int, seed: int, *, layers: int = LAYERS, heads: int = HEADS, dim: int = DIM
) -> Tensor:
    """Keys and values, (layers, 2, num_tokens, heads, dim), of many magnitudes."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randn(layers, 2, num_tokens, heads, dim, generator=random)
    return tokens * 2.0 ** torch.randint(-6, 4, (layers, 2, num_tokens, heads, 1), generator=random)


def store_of(
    key: DType | str = "Q8_0", value: DType | str = "Q4_0", max_seq_len: int = 41
) -> KvCacheStore:
    formats = DType.of(key), DType.of(value)
    head_dim = dim_of(*formats)
    return KvCacheStore(
        LAYERS, HEADS, head_dim, max_seq_len, key_encoding=formats[0], value_encoding=formats[1]
    )


def fill(store: KvCacheStore, tokens: Tensor, counts: Iterable[int] | None = None) -> KvCacheStore:
    """Appends tokens to all layers, in steps of `counts` tokens, or at once."""
    begin = 0
    for count in [tokens.shape[2]] if counts is None else counts:
        for layer, (keys, values) in enumerate(tokens[:, :, begin : begin + count]):
            store.append(layer, keys, values)
        begin += count
    return store


def stored(storage: KvStorage) -> list[Tensor]:
    """The bytes of tokens as they are stored, and their scales."""
    data = storage.data.contiguous().view(torch.uint8)
    return [data] if storage.scale is None else [data, storage.scale.contiguous()]


def contents(store: KvCacheStore) -> list[Tensor]:
    """A copy of all that a store holds, with what it says of itself."""
    found = [torch.tensor([store.current_seq_len])]
    for layer in range(store.num_layers):
        held = store.layer_seq_len(layer)
        found.append(torch.tensor([held]))
        for read in (store.read_key_storage, store.read_value_storage):
            found += [part.clone() for part in stored(read(layer, 0, held))]
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))
