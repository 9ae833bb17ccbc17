"""Block tables, slots and lengths, which say where tokens are in a cache: structs of kvx_abi.h.

A descriptor holds addresses, never a copy, and keeps the tensor behind them alive (`owner`).
libkvx validates it in every call. Spec: 5, 6.3 to 6.5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvx_core._c import abi
from kvx_core.argument_checks import (
    address,
    coerce_fields,
    flag,
    format_repr,
    int64,
    integer,
    plural,
)
from kvx_core.desc.in_place import is_torch, require_array_in_place
from kvx_core.desc.indices import (
    INDEX,
    LENS,
    SLOTS,
    TABLE,
    are_uint32,
    has_index_types,
    host_copy,
    index_dtype,
    index_list,
    made,
    padded,
    read_numbers,
    table_dtype,
    table_indices,
)
from kvx_core.desc.memory_checks import same_memory
from kvx_core.desc.pointers import (
    PointedTo,
    address_of,
    addresses_of_blocks,
    addresses_of_planes,
    nested,
)
from kvx_core.desc.tensors import Borrowed, TensorLike, dtype_name, is_tensor, read_array
from kvx_core.errors import InvalidArgumentError
from kvx_core.types import BlockTableFormat, DType, Memory

_PACKED, _NONE, _HOST = BlockTableFormat.PACKED, DType.INVALID, Memory.HOST


@dataclass(frozen=True, slots=True, repr=False)
class BlockTable:
    """Logical to physical blocks of each sequence. Spec: 5.1, 6.3"""

    format: BlockTableFormat
    index_dtype: DType
    seq_count: int
    max_blocks_per_seq: int
    indices: int  # address of [indices_count]
    indices_count: int
    indptr_dtype: DType = DType.INVALID
    indptr: int = 0  # address of [indptr_count]
    indptr_count: int = 0
    beam_width: int = 1
    flags: int = 0
    memory: Memory = Memory.HOST
    owner: object = field(default=None, compare=False)
    # POINTERS: a block of each plane, for those that were given as tensors.
    blocks: tuple[Borrowed | None, ...] = field(default=(), compare=False)
    c_bytes: bytes = field(init=False, compare=False)  # the C struct, see bound.Binding

    def __post_init__(self) -> None:
        kinds = type(self.format), type(self.indptr_dtype), type(self.indptr)
        counts = self.seq_count, self.max_blocks_per_seq, self.indptr_count, self.beam_width
        if not (
            kinds == (BlockTableFormat, DType, int)
            and has_index_types(self.index_dtype, self.memory, self.indices, self.indices_count)
            and are_uint32(*counts, self.flags)
            and 0 <= self.indptr < 2**64
        ):
            names = ("seq_count", "max_blocks_per_seq", "indices_count", "indptr_count")
            coerce_fields(
                self,
                format=BlockTableFormat.called,
                index_dtype=table_dtype,
                indptr_dtype=index_dtype,
                indices=address,
                indptr=address,
                memory=Memory.called,
                **dict.fromkeys((*names, "beam_width", "flags"), integer),
            )
        c_bytes = TABLE.pack(
            TABLE.size,
            self.format,
            self.index_dtype,
            self.indptr_dtype,
            self.seq_count,
            self.beam_width,
            self.max_blocks_per_seq,
            self.indices,
            self.indptr,
            self.indices_count,
            self.indptr_count,
            self.flags,
        )
        object.__setattr__(self, "c_bytes", c_bytes)

    def __repr__(self) -> str:
        rows = plural(self.seq_count, "sequence")
        if self.beam_width > 1:
            rows += f" x {plural(self.beam_width, 'beam')}"
        if self.format is BlockTableFormat.RAGGED:
            rows += f", {plural(self.indices_count, 'token')}"
        else:
            rows += f" x {plural(self.max_blocks_per_seq, 'block')}"
        return format_repr(
            "BlockTable", rows, self.format.name, *_kind(self.index_dtype, self.memory)
        )

    @classmethod
    def packed(cls, indices: TensorLike | Sequence[Sequence[int]]) -> Self:
        """Block ids, one row per sequence.

        indices: (seq_count, max_blocks_per_seq), int32 or int64, contiguous; or a list of rows,
                 padded with -1 to the longest. Entries past a sequence's blocks are never read.
        Raises InvalidArgumentError, UnsupportedError.
        """
        found, owner = read_numbers(indices, 2)
        if found is None and not is_tensor(indices):
            found, owner = read_numbers(padded("block_table", indices), 2)
        if found is not None:  # in a step of an engine: described in one go
            index, rows, width, place, _ = found
            c = TABLE.pack(TABLE.size, 1, index, 0, rows, 1, width, place, 0, rows * width, 0, 0)
            fields = _PACKED, INDEX[index], rows, width, place, rows * width
            return made(cls, *fields, _NONE, 0, 0, 1, 0, _HOST, owner, (), c)
        table = table_indices(indices, 2)  # type: ignore[arg-type]  # which is a tensor
        (rows, width), count = table.shape, table.shape[0] * table.shape[1]
        kind = _PACKED, table.dtype, rows, width, table.data, count
        return cls(*kind, memory=table.memory, owner=table.owner)

    @classmethod
    def ring(cls, indices: TensorLike | Sequence[Sequence[int]]) -> Self:
        """Block ids of rings, one row per sequence: token t is in number t // block_size % blocks.

        A ring keeps the last max_blocks_per_seq * block_size tokens of its sequence, as a sliding
        window does; a call moves as many of a sequence at most.

        indices: as for `packed`, but every row has all blocks of its ring
        Raises InvalidArgumentError, UnsupportedError.
        Spec: E.16
        """
        return replace(cls.packed(indices), format=BlockTableFormat.RING)

    @classmethod
    def ragged(
        cls,
        indices: TensorLike | Sequence[int],
        indptr: TensorLike | Sequence[int],
        *,
        exact: bool = True,
    ) -> Self:
        """One block id per token, the sequences one after the other.

        For a list of each sequence's blocks (FlashInfer's paged_kv_indices) use `packed`.

        indices: (indptr[-1],), int32 or int64, contiguous, or a list of int
        indptr:  (seq_count + 1,), int32 or int64, running token counts, or a list of int
        exact:   a call is refused unless each sequence has as many entries as tokens (start +
                 length); False: it may have more
        Raises InvalidArgumentError, UnsupportedError.
        """
        ids = index_list("block_table.indices", indices)
        ends = index_list("block_table.indptr", indptr)
        same_memory("block_table.indptr", ends.memory, "block_table.indices is", ids.memory)
        return cls(
            format=BlockTableFormat.RAGGED,
            index_dtype=ids.dtype,
            seq_count=max(0, ends.shape[0] - 1),
            max_blocks_per_seq=0,
            indices=ids.data,
            indices_count=ids.shape[0],
            indptr_dtype=ends.dtype,
            indptr=ends.data,
            indptr_count=ends.shape[0],
            flags=abi.FLAG_EXACT if flag("exact", exact) else 0,
            memory=ids.memory,
            owner=(ids.owner, ends.owner),
        )

    @classmethod
    def kv_offsets(cls, indices: TensorLike) -> Self:
        """TensorRT-LLM's table of KVCacheIndex.

        indices: (seq_count, beam_width, 2, max_blocks_per_seq), int32, contiguous; [..., 0, :]
                 is K and [..., 1, :] is V
        Raises InvalidArgumentError, UnsupportedError.
        """
        table = table_indices(indices, 4, (DType.S32,))
        seq_count, beam_width, kv, max_blocks_per_seq = table.shape
        if kv != 2:
            raise InvalidArgumentError(
                f"block_table.indices.shape[2] is {kv}, expected 2, K and V (KV_OFFSETS, spec 5.1)"
            )
        size = seq_count, max_blocks_per_seq, table.data
        return cls(
            BlockTableFormat.KV_OFFSETS,
            table.dtype,
            *size,
            seq_count * beam_width * 2 * max_blocks_per_seq,
            beam_width=beam_width,
            flags=abi.FLAG_KVCACHEINDEX,
            memory=table.memory,
            owner=table.owner,
        )

    @classmethod
    def pointers(
        cls, blocks: TensorLike | Sequence[Sequence[Sequence[TensorLike | int | None]]]
    ) -> Self:
        """The address of each block, for caches whose blocks lie anywhere. Spec: E.12

        blocks: (seq_count, max_blocks_per_seq, planes), int64 or uint64, contiguous: the address of
                the block in K of layer 0, V of layer 0, K of layer 1, ...; 0 is a null block. Or
                nested lists, [sequence][block][plane], of tensors, addresses or None: tensors are
                kept alive, and short sequences padded with null blocks. Tensors of a
                plane have the same shape, strides and dtype; CacheView.at compares them to its own
        Raises InvalidArgumentError, UnsupportedError.
        """
        return cls._of_addresses(blocks, 3)

    @classmethod
    def whole_blocks(
        cls,
        blocks: TensorLike | Sequence[Sequence[TensorLike | int | None]],
        described: TensorLike | int,
    ) -> Self:
        """The address of each block, for caches whose blocks lie anywhere with all planes in them.

        blocks:    (seq_count, max_blocks_per_seq), int64 or uint64, contiguous; 0 is a null block.
                   Or a list of rows of blocks, each a tensor, an address or None, as for `pointers`
        described: the block that the layers' tensors describe, a tensor or its address: in all
                   others each plane is as far from the beginning
        Raises InvalidArgumentError, UnsupportedError. Spec: E.15
        """
        found = cls._of_addresses(blocks, 2)
        origin = address_of("described", described)
        return replace(found, indptr=origin, flags=abi.FLAG_WHOLE)

    @classmethod
    def _of_addresses(cls, blocks: Any, ndim: int) -> Self:
        kept: PointedTo | None = None
        seen: dict[int, Borrowed] = {}
        if not is_tensor(blocks):
            rows = nested(blocks, ndim)
            blocks = addresses_of_blocks(rows) if ndim == 2 else addresses_of_planes(rows, seen)
            kept = PointedTo.by(rows)
        table = table_indices(blocks, ndim, (DType.S64, DType.U64))
        seq_count, max_blocks_per_seq, planes = (*table.shape, 1)[:3]
        size = seq_count, max_blocks_per_seq, table.data
        return cls(
            BlockTableFormat.POINTERS,
            DType.U64,
            *size,
            seq_count * max_blocks_per_seq * planes,
            memory=table.memory,
            owner=table.owner if kept is None else (table.owner, kept),
            blocks=tuple(map(seen.get, range(planes))) if seen else (),
        )

    @classmethod
    def of(cls, table: BlockTable | TensorLike | Sequence[Sequence[int]]) -> BlockTable:
        """`table` itself if it is a BlockTable, else `packed`.

        Raises InvalidArgumentError, UnsupportedError; for a BlockTable if its arrays have moved.
        """
        if isinstance(table, BlockTable):
            table._require_arrays_in_place("block_table")
            return table
        return cls.packed(table)

    @property
    def has_planes(self) -> bool:
        """Each plane of a span has entries of its own: POINTERS, but for whole blocks."""
        return self.format is BlockTableFormat.POINTERS and not self.flags & abi.FLAG_WHOLE

    @property
    def num_rows(self) -> int:
        """Rows of the table: one per sequence, or per beam of each."""
        return self.seq_count * max(self.beam_width, 1)

    def require_in_place(self, name: str) -> None:
        """Refuses a table whose memory, or that of blocks, belongs to others by now."""
        owner = self.owner
        if isinstance(owner, tuple) and isinstance(owner[-1], PointedTo):
            owner[-1].require_in_place(f"{name}.indices")
        self._require_arrays_in_place(name)

    def _require_arrays_in_place(self, name: str) -> None:
        itemsize = self.index_dtype.itemsize
        owner = self.owner
        if isinstance(owner, tuple) and isinstance(owner[-1], PointedTo):
            owner = owner[0]
        arrays = [("indices", self.indices, self.indices_count * itemsize)]
        if self.indptr:
            num_bytes = self.indptr_count * self.indptr_dtype.itemsize
            arrays.append(("indptr", self.indptr, num_bytes))
        for array, begin, num_bytes in arrays:
            require_array_in_place(f"{name}.{array}", owner, begin, num_bytes)

    @property
    def has_holes(self) -> bool:
        """See `with_holes`."""
        return bool(self.flags & abi.FLAG_HOLES)

    def with_holes(self) -> BlockTable:
        """The same table, with null entries for tokens of a call: left out, not refused. 5.1"""
        return replace(self, flags=self.flags | abi.FLAG_HOLES)

    def of_parts(self) -> BlockTable:
        """The same table, not `exact`, for calls that each move some of its tokens."""
        return replace(self, flags=self.flags & ~abi.FLAG_EXACT)

    def on_host(self) -> BlockTable:
        """The table itself or, if torch holds it on a device, a copy in HOST memory.

        Raises UnsupportedError.
        """
        if self.memory is not Memory.DEVICE:
            return self
        if self.format is not BlockTableFormat.RAGGED:
            held = self.owner[0] if isinstance(self.owner, tuple) else self.owner
            indices, owner = host_copy("block_table.indices", self.indices, held)
            return replace(self, indices=indices, memory=Memory.HOST, owner=owner)
        owners = self.owner if isinstance(self.owner, tuple) else (self.owner, self.owner)
        indices, ids = host_copy("block_table.indices", self.indices, owners[0])
        indptr, ends = host_copy("block_table.indptr", self.indptr, owners[1])
        return replace(self, indices=indices, indptr=indptr, memory=Memory.HOST, owner=(ids, ends))

    def to_c(self) -> abi.kvx_block_table_t:
        """A new C struct with these fields."""
        return abi.kvx_block_table_t.from_buffer_copy(self.c_bytes)


@dataclass(frozen=True, slots=True, repr=False)
class SlotMapping:
    """The slot of each token: block_id * block_size + block_offset. Spec: 5.2, 6.4"""

    dtype: DType
    token_count: int
    slots: int  # address of [token_count]
    invalid_slot: int = -1  # skipped, as every negative slot is
    memory: Memory = Memory.HOST
    owner: object = field(default=None, compare=False)
    c_bytes: bytes = field(init=False, compare=False)  # the C struct, see bound.Binding

    def __post_init__(self) -> None:
        if not has_index_types(
            self.dtype, self.memory, self.slots, self.token_count, self.invalid_slot
        ):
            coerce_fields(
                self,
                dtype=index_dtype,
                token_count=integer,
                slots=address,
                invalid_slot=int64,
                memory=Memory.called,
            )
        numbers = self.dtype, self.token_count, self.invalid_slot, self.slots
        object.__setattr__(self, "c_bytes", SLOTS.pack(SLOTS.size, *numbers))

    def __repr__(self) -> str:
        skipped = None if self.invalid_slot == -1 else f"invalid_slot {self.invalid_slot}"
        tokens = plural(self.token_count, "token")
        return format_repr("SlotMapping", tokens, *_kind(self.dtype, self.memory), skipped)

    @classmethod
    def of(
        cls, slots: SlotMapping | TensorLike | Sequence[int], *, invalid_slot: int = -1
    ) -> SlotMapping:
        """Slots, one per token; a SlotMapping is returned as it is.

        slots: (token_count,), int32 or int64, contiguous, or a list of int
        Raises InvalidArgumentError, UnsupportedError.
        """
        if isinstance(slots, SlotMapping):
            slots.require_in_place("slots")
            return slots
        read, owner = read_numbers(slots, 1)
        if read is not None:
            index, count, _, place, _ = read
            return cls(INDEX[index], count, place, invalid_slot, owner=owner)
        found = index_list("slots", slots)
        (count,) = found.shape
        return cls(found.dtype, count, found.data, invalid_slot, found.memory, found.owner)

    def require_in_place(self, name: str) -> None:
        """Refuses slots whose memory has been freed or belongs to others by now."""
        num_bytes = self.token_count * self.dtype.itemsize
        require_array_in_place(name, self.owner, self.slots, num_bytes)

    def part(self, lo: int, hi: int) -> SlotMapping:
        """The slots of tokens `lo` to `hi`, 0 <= lo <= hi <= token_count."""
        address = self.slots + lo * self.dtype.itemsize
        return replace(self, slots=address, token_count=hi - lo)

    def on_host(self) -> SlotMapping:
        """The slots themselves or, if torch holds them on a device, a copy in HOST memory.

        Raises UnsupportedError.
        """
        if self.memory is not Memory.DEVICE:
            return self
        slots, owner = host_copy("slots", self.slots, self.owner)
        return replace(self, slots=slots, memory=Memory.HOST, owner=owner)

    def to_numpy(self) -> npt.NDArray[Any]:
        """The slots in their own dtype, a copy. Raises UnsupportedError for those on a device."""
        return read_array("slots", self.slots, (self.token_count,), (1,), self.dtype, self.memory)

    def to_c(self) -> abi.kvx_slot_mapping_t:
        """A new C struct with these fields."""
        return abi.kvx_slot_mapping_t.from_buffer_copy(self.c_bytes)


@dataclass(frozen=True, slots=True, repr=False)
class SeqLens:
    """Tokens per sequence. Spec: 5.3, 6.5"""

    dtype: DType
    seq_count: int
    lengths: int  # address of [seq_count]
    memory: Memory = Memory.HOST
    owner: object = field(default=None, compare=False)
    c_bytes: bytes = field(init=False, compare=False)  # the C struct, see bound.Binding

    def __post_init__(self) -> None:
        if not has_index_types(self.dtype, self.memory, self.lengths, self.seq_count):
            coerce_fields(
                self, dtype=index_dtype, seq_count=integer, lengths=address, memory=Memory.called
            )
        numbers = self.dtype, self.seq_count, self.lengths
        object.__setattr__(self, "c_bytes", LENS.pack(LENS.size, *numbers))

    def __repr__(self) -> str:
        sequences = plural(self.seq_count, "sequence")
        return format_repr("SeqLens", sequences, *_kind(self.dtype, self.memory))

    @classmethod
    def of(
        cls, lengths: SeqLens | TensorLike | Sequence[int], *, name: str = "seq_lens"
    ) -> SeqLens:
        """Lengths, one per sequence; a SeqLens is returned as it is.

        lengths: (seq_count,), int32 or int64, contiguous, or a list of int
        name:    what errors call them
        Raises InvalidArgumentError, UnsupportedError.
        """
        if isinstance(lengths, SeqLens):
            lengths.require_in_place(name)
            return lengths
        read, owner = read_numbers(lengths, 1)
        if read is not None:
            index, count, _, place, _ = read
            c = LENS.pack(LENS.size, index, count, place)
            return made(cls, INDEX[index], count, place, _HOST, owner, c)
        found = index_list(name, lengths)
        return cls(found.dtype, found.shape[0], found.data, found.memory, found.owner)

    def require_in_place(self, name: str) -> None:
        """Refuses lengths whose memory has been freed or belongs to others by now."""
        require_array_in_place(name, self.owner, self.lengths, self.seq_count * self.dtype.itemsize)

    def to_numpy(self) -> npt.NDArray[np.int64]:
        """The lengths as int64, a copy. A torch tensor is read back from its device."""
        if self.memory is Memory.DEVICE and is_torch(self.owner):
            return self.owner.cpu().numpy().astype(np.int64)  # type: ignore[no-any-return]
        shape, stride = (self.seq_count,), (1,)
        found = read_array("seq_lens", self.lengths, shape, stride, self.dtype, self.memory)
        return found.astype(np.int64)

    def to_c(self) -> abi.kvx_seq_lens_t:
        """A new C struct with these fields."""
        return abi.kvx_seq_lens_t.from_buffer_copy(self.c_bytes)


DESCRIPTORS = BlockTable, SlotMapping, SeqLens  # that bound calls read in C


def _kind(dtype: DType, memory: Memory) -> tuple[str | None, str | None]:
    return dtype_name(dtype), None if memory is Memory.HOST else memory.name
