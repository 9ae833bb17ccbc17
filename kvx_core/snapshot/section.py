"""Section: what one engine holds of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError
from kvx_core.lookup import find_tokens
from kvx_core.snapshot.precision import VALUES, Precision
from kvx_core.snapshot.scales import has_vector_scales, scales_of
from kvx_core.tables import BlockTable, BlockTableFormat, SeqLens
from kvx_core.tensors import is_torch, read_array
from kvx_core.types import DType, Memory
from kvx_core.view import CacheView


@dataclass(frozen=True, slots=True)
class Section:
    """What one engine holds of some layers of one sequence.

    Layers that share a block table and facts; an engine with hybrid groups has several sections.
    Raises InvalidArgumentError.
    """

    layers: tuple[int, ...]  # index in the model of each of view.layers
    view: CacheView  # facts.first_kv_head is known
    block_table: BlockTable | None  # the row of the sequence, from its token 0; None: block 0
    encoding: str = VALUES

    def __post_init__(self) -> None:
        view = self.view
        if len(set(self.layers)) != len(self.layers) or len(self.layers) != len(view.layers):
            raise InvalidArgumentError(
                f"section.layers is {self.layers}, expected one index for each of the "
                f"{len(view.layers)} layers of its view"
            )
        if not self.layers or min(self.layers) < 0:
            raise InvalidArgumentError(
                f"section.layers is {self.layers}, expected indices of layers of the model"
            )
        if view.planes:
            raise UnsupportedError(
                f"section.view has {len(view.planes)} planes, expected none: a snapshot holds K "
                "and V of layers. Leave the planes out with dataclasses.replace(view, planes=())"
            )
        if self.block_table is not None and self.block_table.format is BlockTableFormat.POINTERS:
            raise UnsupportedError(
                "section.block_table is POINTERS, expected a table of block ids, in which a null "
                "block is null for K and V of all layers"
            )
        if view.facts.first_kv_head is None:
            raise InvalidArgumentError(
                "section.view.facts.first_kv_head is None, expected the index in the model of the "
                "first head held here"
            )
        if len({layer.num_kv_heads for layer in view.layers}) != 1:
            raise InvalidArgumentError(
                f"section.view has layers with {[layer.num_kv_heads for layer in view.layers]} "
                "heads, expected the same number in all. Make a section of each"
            )
        if self.block_table is not None and self.block_table.num_rows != 1:
            raise InvalidArgumentError(
                f"section.block_table has {self.block_table.num_rows} rows, expected the one of "
                "the sequence"
            )
        for layer, cache in zip(self.layers, view.layers, strict=True):
            for name, tensor in cache.tensors.items():
                if (tensor.dtype is DType.U8) is (self.encoding == VALUES):
                    raise InvalidArgumentError(
                        f"section.encoding is {self.encoding!r} and {name} of layer {layer} is "
                        f"{tensor.dtype.name}, expected U8 for opaque bytes and only for them"
                    )

    @property
    def heads(self) -> tuple[int, int]:
        """The heads of the model that are held here: first, and one past the last."""
        first = self.view.facts.first_kv_head or 0
        return first, first + self.view.layers[0].num_kv_heads

    @property
    def precision(self) -> Precision:
        """The precision of the values, from facts.compute_dtype and the dtypes of K and V."""
        if self.encoding != VALUES:
            return Precision.of(opaque=self.encoding)
        dtypes: set[DType] = {t.dtype for layer in self.view.layers for t in layer.tensors.values()}
        if self.view.facts.compute_dtype is not None:
            dtypes.add(self.view.facts.compute_dtype)
        return Precision.of(*dtypes, vector_scales=has_vector_scales(self.view))

    def of(self, layers: Sequence[int]) -> Section:
        """The precision of some of the layers."""
        return replace(self, layers=tuple(layers), view=view_of(self, layers))

    def null_tokens(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which of tokens `start` to `stop` are stored nowhere, be it K or V: in null blocks.

        Raises OutOfRangeError if the table is too short, or has block ids that are out of range.
        """
        self._check_reach(stop)
        table = None if self.block_table is None else self.block_table.of_parts()
        span = self.view.at(block_table=table, starts=[start])
        lens = SeqLens.of([stop - start])
        null: npt.NDArray[np.bool_] = find_tokens(span, lens)["block"] < 0
        if self.view.layers[0].v is not None:
            null |= find_tokens(span, lens, v=True)["block"] < 0
        return null

    def _check_reach(self, stop: int) -> None:
        table, num_tokens = self.block_table, self.view.layers[0].block_size
        if table is not None and table.format is BlockTableFormat.RAGGED:
            num_tokens = table.indices_count
        elif table is not None:
            num_tokens *= table.max_blocks_per_seq
        if stop > num_tokens:
            raise OutOfRangeError(
                f"section.block_table holds {num_tokens} tokens, expected at least {stop}"
            )


def view_of(section: Section, layers: Sequence[int]) -> CacheView:
    """The section's view, of some of its layers only."""
    if tuple(layers) == section.layers:
        return section.view
    view = section.view
    at = [section.layers.index(layer) for layer in layers]
    return replace(
        view,
        layers=tuple(view.layers[i] for i in at),
        k_scales=tuple(scales_of(view, "k_scale")[i] for i in at),
        v_scales=tuple(scales_of(view, "v_scale")[i] for i in at),
    )


def device_of(sections: Sequence[Section]) -> Any:
    """The torch device on which copies of these caches run; None: the host."""
    k = sections[0].view.layers[0].k
    if k.memory is Memory.HOST:
        return None
    if not is_torch(k.owner):
        raise UnsupportedError(
            f"the cache's memory belongs to a {type(k.owner).__name__} on a device, expected a "
            "torch.Tensor there"
        )
    return k.owner.device


def ints_on(numbers: Sequence[int], device: Any) -> SeqLens:
    """Numbers in memory that a copy on this device can read."""
    if device is None:
        return SeqLens.of(numbers)
    import torch

    return SeqLens.of(torch.tensor(numbers, dtype=torch.int64, device=device))


def table_on(table: BlockTable | None, device: Any) -> BlockTable | None:
    """The table in memory that a copy on this device can read."""
    if table is None or device is None or table.memory is not Memory.HOST:
        return None if table is None else table.of_parts()
    import torch

    if table.format is not BlockTableFormat.PACKED:
        raise UnsupportedError(
            f"section.block_table is {table.format.name} on the host, expected it on the device "
            "as the cache is"
        )
    indices = read_array(
        "block_table.indices",
        table.indices,
        (1, table.indices_count),
        (table.indices_count, 1),
        table.index_dtype,
        table.memory,
    )
    return BlockTable.packed(torch.from_numpy(indices).to(device))
