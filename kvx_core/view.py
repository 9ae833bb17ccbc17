"""All layers of one engine's cache, and where sequences lie in them: one end of a migration.

Spec: E.3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvx_core import _abi
from kvx_core.descriptors import (
    BlockTable,
    CacheDesc,
    ScaleDesc,
    SeqLens,
    SlotMapping,
    TensorDesc,
    same_memory,
)
from kvx_core.errors import InvalidArgumentError
from kvx_core.facts import CacheFacts
from kvx_core.tensors import TensorLike


@dataclass(frozen=True, slots=True)
class CacheView:
    """All layers of one engine's cache and what their bytes mean.

    Used directly as an end of migrate or verify it is `at()`: dense, sequence s is block s.
    Raises InvalidArgumentError if a list of scales has not one entry per layer.
    """

    layers: tuple[CacheDesc, ...]
    facts: CacheFacts
    k_scales: tuple[ScaleDesc | None, ...] | None = None  # one per layer; None: no scales
    v_scales: tuple[ScaleDesc | None, ...] | None = None
    null_block_id: int = _abi.NO_NULL_BLOCK  # block id that holds nothing (vLLM: 0)
    secondary_num_blocks: int = 0  # blocks in the secondary pool; 0: as many as num_blocks
    _layers: Any = field(init=False, compare=False, repr=False)  # the C arrays, built once
    _k_scales: Any = field(init=False, compare=False, repr=False)
    _v_scales: Any = field(init=False, compare=False, repr=False)
    # Summed up once, since a migration of few tokens is over sooner than a walk over all layers.
    read_only: dict[str, TensorDesc] = field(init=False, compare=False, repr=False)  # by name
    _bytes: dict[int, int] = field(init=False, compare=False, repr=False)  # by num_heads; 0: all

    def __post_init__(self) -> None:
        def set_(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        set_("layers", tuple(self.layers))
        structs = [layer.to_c() for layer in self.layers]
        set_("_layers", _abi.pointer_array(structs, _abi.kvx_cache_desc_t))
        for name in ("k_scales", "v_scales"):
            scales = getattr(self, name)
            set_(f"_{name}", None if scales is None else self._scales_to_c(name, scales))
        tensors = {
            f"layers[{i}].{name}": tensor
            for i, layer in enumerate(self.layers)
            for name, tensor in layer.tensors.items()
        }
        set_("read_only", {name: t for name, t in tensors.items() if not t.writable})
        set_("_bytes", {})

    def bytes_per_token(self, num_heads: int | None = None) -> int:
        """Bytes of a token's K and V in all layers: of `num_heads` heads, or of all."""
        found = self._bytes.get(num_heads or 0)
        if found is None:
            found = sum((num_heads or la.num_kv_heads) * la.head_bytes for la in self.layers)
            self._bytes[num_heads or 0] = found
        return found

    def _scales_to_c(self, name: str, scales: Sequence[ScaleDesc | None]) -> Any:
        object.__setattr__(self, name, tuple(scales))
        if len(scales) != len(self.layers):
            raise InvalidArgumentError(
                f"{name} has {len(scales)} entries, expected {len(self.layers)}, one per layer "
                "(spec E.3)"
            )
        for i, (layer, scale) in enumerate(zip(self.layers, scales, strict=True)):
            if scale is not None:
                same_memory(f"{name}[{i}]", scale.memory, f"layers[{i}].k is", layer.k.memory)
        structs = [None if scale is None else scale.to_c() for scale in scales]
        return _abi.pointer_array(structs, _abi.kvx_scale_desc_t)

    def at(
        self,
        block_table: BlockTable | TensorLike | Sequence[Sequence[int]] | None = None,
        slots: SlotMapping | TensorLike | Sequence[int] | None = None,
        starts: SeqLens | TensorLike | Sequence[int] | None = None,
        head_start: int = 0,
    ) -> CacheSpan:
        """Where sequences lie in this cache.

        block_table: a BlockTable, or what BlockTable.packed takes: (seq_count, max_blocks_per_seq)
        slots:       (num_tokens,), one per moved token, the sequences one after the other; at most
                     one of block_table and slots is given, neither means sequence s is block s
        starts:      (seq_count,), the first token of each sequence here; None: 0
        head_start:  first head here
        Raises InvalidArgumentError, UnsupportedError.
        """
        return CacheSpan(
            view=self,
            block_table=None if block_table is None else BlockTable.of(block_table),
            slots=None if slots is None else SlotMapping.of(slots),
            starts=None if starts is None else SeqLens.of(starts),
            head_start=head_start,
        )


@dataclass(frozen=True, slots=True)
class CacheSpan:
    """One end of a migration: a CacheView and where sequences lie in it. See CacheView.at."""

    view: CacheView
    block_table: BlockTable | None = None
    slots: SlotMapping | None = None
    starts: SeqLens | None = None
    head_start: int = 0

    @classmethod
    def of(cls, end: CacheSpan | CacheView) -> CacheSpan:
        """`end` itself if it is a CacheSpan, else the whole view."""
        return end if isinstance(end, CacheSpan) else end.at()

    def to_c(self) -> _abi.kvx_view_t:
        """A new C struct with these fields."""
        view = self.view
        return _abi.kvx_view_t(
            num_layers=len(view.layers),
            layers=view._layers,
            block_table=_abi.pointer_to(self.block_table),
            slots=_abi.pointer_to(self.slots),
            starts=_abi.pointer_to(self.starts),
            head_start=self.head_start,
            secondary_num_blocks=view.secondary_num_blocks,
            null_block_plus_1=_abi.null_block_plus_1(view.null_block_id),
            k_scales=view._k_scales,
            v_scales=view._v_scales,
        )
