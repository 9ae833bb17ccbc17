"""KVCacheIndex, an entry of TensorRT-LLM's tables: 31 bits of number, one bit for the pool.

Source: TensorRT-LLM main 2026-09, cpp/include/tensorrt_llm/kernels/kvCacheIndex.h
"""

from __future__ import annotations

from dataclasses import dataclass

from kvx_core import OutOfRangeError

NULL_INDEX = -1  # KVCacheIndex::nullIndex; BAD_PAGE_INDEX of KVCacheManagerV2
UNSET = 0x7FFF_FFFF  # entry of a request's table before its block is known
_SECONDARY = 1 << 31


@dataclass(frozen=True, slots=True)
class PoolIndex:
    """A block, or sub-block, by its number in the primary or secondary pool."""

    index: int
    is_secondary: bool = False


def decode(value: int) -> PoolIndex | None:
    """The block that an entry names; None for null (whose bit of the secondary pool is set).

    value: int32, as torch reads it
    """
    if value == NULL_INDEX:
        return None
    return PoolIndex(value % _SECONDARY, is_secondary=value < 0)


def encode(place: PoolIndex | None) -> int:
    """The int32 of a block; null for None. Raises OutOfRangeError for numbers that do not fit."""
    if place is None:
        return NULL_INDEX
    # The highest number means null in the secondary pool, and UNSET in the primary.
    if not 0 <= place.index < UNSET:
        raise OutOfRangeError(
            f"index is {place.index}, expected at least 0 and below {UNSET} (KVCacheIndex)"
        )
    return place.index - _SECONDARY if place.is_secondary else place.index
