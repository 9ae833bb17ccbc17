"""Frozen descriptions of a paged cache and of what addresses it: the structs of kvx_abi.h.

A descriptor holds addresses, never a copy, and keeps the tensor behind them alive (`owner`).
Whether it is valid is for libkvx to say, in every call and in CacheDesc.validate; only what C
cannot see is checked here. Spec: 4, 5, 6
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvx_core import _abi, layouts
from kvx_core.errors import InvalidArgumentError
from kvx_core.tensors import (
    Borrowed,
    TensorLike,
    borrow,
    borrow_ints,
    int64_array,
    is_torch,
    read_array,
    row_major,
)
from kvx_core.types import BlockTableFormat, DType, Layout, Memory, ScaleGranularity, Transfer


@dataclass(frozen=True, slots=True)
class TensorDesc:
    """One K, V, key or value tensor. Shape in the order of `layout`, strides in elements.

    Spec: 6.2
    """

    dtype: DType
    layout: Layout
    memory: Memory
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: int
    writable: bool = True
    owner: object = field(default=None, compare=False, repr=False)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def to_c(self) -> _abi.kvx_tensor_desc_t:
        """A new C struct with these fields."""
        _check_ndim(self.shape, "tensor")
        return _abi.kvx_tensor_desc_t(
            dtype=self.dtype,
            layout=self.layout,
            memory=self.memory,
            ndim=len(self.shape),
            shape=_abi.dims(self.shape),
            stride=_abi.dims(self.stride),
            data=self.data,
        )


def describe(tensor: TensorLike, layout: Layout, *, dtype: DType | str | None = None) -> TensorDesc:
    """Describes a K or V tensor, zero-copy.

    tensor: shape in the order of `layout`; any strides, dtype, library and device
    layout: which axis is which; never guessed from the shape
    dtype:  what the elements are, where the tensor stores them as something else of the same
            size, such as FP8 in uint8
    Raises InvalidArgumentError, UnsupportedError.
    Spec: 4.2, 6.2
    """
    borrowed = borrow(tensor)
    return TensorDesc(
        dtype=borrowed.dtype if dtype is None else _stored_as(borrowed.dtype, dtype),
        layout=layout,
        memory=borrowed.memory,
        shape=borrowed.shape,
        stride=borrowed.stride,
        data=borrowed.data,
        writable=borrowed.writable,
        owner=borrowed.owner,
    )


@dataclass(frozen=True, slots=True)
class PoolDesc:
    """The pool behind a KV_OFFSETS table, seen from one layer. Addresses; 0 for no secondary.

    Spec: 6.7
    """

    memory: Memory
    bytes_per_block: int  # one K or V sub-block of one layer
    primary: int
    secondary: int = 0
    owner: object = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        primary: TensorLike,
        bytes_per_block: int,
        secondary: TensorLike | None = None,
    ) -> Self:
        """A pool whose first K sub-block of this layer is element 0 of `primary`.

        primary, secondary: tensors, any shape; their first elements are the addresses
        Raises InvalidArgumentError, UnsupportedError.
        """
        first = borrow(primary)
        second = None if secondary is None else borrow(secondary)
        return cls(
            memory=first.memory,
            bytes_per_block=bytes_per_block,
            primary=first.data,
            secondary=0 if second is None else second.data,
            owner=(first.owner, second and second.owner),
        )

    def to_c(self) -> _abi.kvx_pool_desc_t:
        """A new C struct with these fields."""
        return _abi.kvx_pool_desc_t(
            memory=self.memory,
            bytes_per_block=self.bytes_per_block,
            primary=self.primary,
            secondary=self.secondary,
        )


@dataclass(frozen=True, slots=True)
class CacheDesc:
    """The cache of one layer. Spec: 6.1"""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int  # of K
    k: TensorDesc
    v: TensorDesc | None = None  # None: no V (MLA)
    pool: PoolDesc | None = None  # KV_OFFSETS only
    _c: _abi.kvx_cache_desc_t = field(init=False, compare=False, repr=False)
    # Of write_kv and gather_kv without options: made by the first such call.
    bound_calls: dict[str, Callable[..., int]] = field(
        init=False, compare=False, repr=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        struct = _abi.kvx_cache_desc_t(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            k=self.k.to_c(),
            v=_abi.kvx_tensor_desc_t() if self.v is None else self.v.to_c(),
        )
        if self.pool is not None:
            struct.pool = self.pool.to_c()
        object.__setattr__(self, "_c", struct)

    @classmethod
    def from_kv(
        cls, k: TensorDesc, v: TensorDesc | None = None, *, pool: PoolDesc | None = None
    ) -> Self:
        """The cache whose K is `k`, V is `v`; its sizes are those of `k`.

        V may differ in layout, strides, dtype and head_dim, or be None.
        Raises InvalidArgumentError if `k` has not the axes of its layout; the rest is checked by
        `validate` and by every call.
        """
        sizes = layouts.axes(k.layout, k.shape)
        return cls(
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            k=k,
            v=v,
            pool=pool,
        )

    @property
    def v_head_dim(self) -> int:
        """head_dim of V; 0 without V."""
        return 0 if self.v is None else layouts.axes(self.v.layout, self.v.shape).head_dim

    @property
    def head_bytes(self) -> int:
        """Bytes of K and V of one token and head, as they are stored."""
        dims = self.head_dim, self.v_head_dim
        return sum(
            dim * tensor.dtype.itemsize
            for dim, tensor in zip(dims, self.tensors.values(), strict=False)
        )

    @property
    def tensors(self) -> dict[str, TensorDesc]:
        """K and, if there is one, V, by their names "k" and "v"."""
        return {"k": self.k} if self.v is None else {"k": self.k, "v": self.v}

    def validate(self) -> None:
        """Checks everything that can be checked without reading the cache.

        Raises InvalidArgumentError, UnsupportedError.
        Spec: 7.1
        """
        _abi.check(_abi.library().kvx_validate_cache_desc(self._c))

    def to_c(self) -> _abi.kvx_cache_desc_t:
        """The C struct with these fields: built once, shared, to be read only."""
        return self._c


@dataclass(frozen=True, slots=True)
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
    owner: object = field(default=None, compare=False, repr=False)

    @classmethod
    def packed(cls, indices: TensorLike | Sequence[Sequence[int]]) -> Self:
        """Block ids, one row per sequence.

        indices: (seq_count, max_blocks_per_seq), int32 or int64, contiguous; or a list of rows,
                 padded with -1 to the longest. Entries past a sequence's blocks are never read.
        Raises InvalidArgumentError, UnsupportedError.
        """
        if isinstance(indices, Sequence):
            width = max(1, 1, *map(len, indices))
            rows = [[*row, *[-1] * (width - len(row))] for row in indices]
            flat = int64_array("block_table.indices", [block for row in rows for block in row])
            indices = flat.reshape(-1, width)
        table = _contiguous("block_table.indices", borrow(indices), 2)
        seq_count, max_blocks_per_seq = table.shape
        return cls(
            format=BlockTableFormat.PACKED,
            index_dtype=table.dtype,
            seq_count=seq_count,
            max_blocks_per_seq=max_blocks_per_seq,
            indices=table.data,
            indices_count=seq_count * max_blocks_per_seq,
            memory=table.memory,
            owner=table.owner,
        )

    @classmethod
    def ragged(
        cls,
        indices: TensorLike | Sequence[int],
        indptr: TensorLike | Sequence[int],
        *,
        exact: bool = True,
    ) -> Self:
        """One block id per token, the sequences one after the other.

        This is no list of each sequence's blocks (FlashInfer's paged_kv_indices): make that
        `packed`.

        indices: (indptr[-1],), int32 or int64, contiguous, or a list of int
        indptr:  (seq_count + 1,), int32 or int64, running token counts, or a list of int
        exact:   a call is refused where a sequence has not as many entries as tokens (its start
                 and length); False: it may have more
        Raises InvalidArgumentError, UnsupportedError.
        """
        ids = _list("block_table.indices", indices)
        ends = _list("block_table.indptr", indptr)
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
            flags=_abi.FLAG_EXACT if exact else 0,
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
        table = _contiguous("block_table.indices", borrow(indices), 4)
        seq_count, beam_width, kv, max_blocks_per_seq = table.shape
        if kv != 2:
            raise InvalidArgumentError(
                f"block_table.indices.shape[2] is {kv}, expected 2, K and V (KV_OFFSETS, spec 5.1)"
            )
        return cls(
            format=BlockTableFormat.KV_OFFSETS,
            index_dtype=table.dtype,
            seq_count=seq_count,
            max_blocks_per_seq=max_blocks_per_seq,
            indices=table.data,
            indices_count=seq_count * beam_width * 2 * max_blocks_per_seq,
            beam_width=beam_width,
            flags=_abi.FLAG_KVCACHEINDEX,
            memory=table.memory,
            owner=table.owner,
        )

    @classmethod
    def of(cls, table: BlockTable | TensorLike | Sequence[Sequence[int]]) -> BlockTable:
        """`table` itself if it is a BlockTable, else `packed`."""
        return table if isinstance(table, BlockTable) else cls.packed(table)

    @property
    def num_rows(self) -> int:
        """Rows of tokens that the table finds: sequences, or beams of them."""
        return self.seq_count * max(self.beam_width, 1)

    def of_parts(self) -> BlockTable:
        """The same table for calls that each move a part of its tokens: not `exact`."""
        return replace(self, flags=self.flags & ~_abi.FLAG_EXACT)

    def to_c(self) -> _abi.kvx_block_table_t:
        """A new C struct with these fields."""
        return _abi.kvx_block_table_t(
            format=self.format,
            index_dtype=self.index_dtype,
            indptr_dtype=self.indptr_dtype,
            seq_count=self.seq_count,
            beam_width=self.beam_width,
            max_blocks_per_seq=self.max_blocks_per_seq,
            indices=self.indices,
            indptr=self.indptr,
            indices_count=self.indices_count,
            indptr_count=self.indptr_count,
            flags=self.flags,
        )


@dataclass(frozen=True, slots=True)
class SlotMapping:
    """Where each token goes: slot = block_id * block_size + block_offset. Spec: 5.2, 6.4"""

    dtype: DType
    token_count: int
    slots: int  # address of [token_count]
    invalid_slot: int = -1  # skipped, as every negative slot is
    memory: Memory = Memory.HOST
    owner: object = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls, slots: SlotMapping | TensorLike | Sequence[int], *, invalid_slot: int = -1
    ) -> SlotMapping:
        """Slots, one per token; a SlotMapping is returned as it is.

        slots: (token_count,), int32 or int64, contiguous, or a list of int
        Raises InvalidArgumentError, UnsupportedError.
        """
        if isinstance(slots, SlotMapping):
            return slots
        found = _list("slots", slots)
        return cls(
            dtype=found.dtype,
            token_count=found.shape[0],
            slots=found.data,
            invalid_slot=invalid_slot,
            memory=found.memory,
            owner=found.owner,
        )

    def part(self, lo: int, hi: int) -> SlotMapping:
        """The slots of tokens `lo` to `hi`, 0 <= lo <= hi <= token_count."""
        address = self.slots + lo * self.dtype.itemsize
        return replace(self, slots=address, token_count=hi - lo)

    def to_c(self) -> _abi.kvx_slot_mapping_t:
        """A new C struct with these fields."""
        return _abi.kvx_slot_mapping_t(
            dtype=self.dtype,
            token_count=self.token_count,
            invalid_slot=self.invalid_slot,
            slots=self.slots,
        )


@dataclass(frozen=True, slots=True)
class SeqLens:
    """Tokens per sequence. Spec: 5.3, 6.5"""

    dtype: DType
    seq_count: int
    lengths: int  # address of [seq_count]
    memory: Memory = Memory.HOST
    owner: object = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, lengths: SeqLens | TensorLike | Sequence[int]) -> SeqLens:
        """Lengths, one per sequence; a SeqLens is returned as it is.

        lengths: (seq_count,), int32 or int64, contiguous, or a list of int
        Raises InvalidArgumentError, UnsupportedError.
        """
        if isinstance(lengths, SeqLens):
            return lengths
        found = _list("seq_lens", lengths)
        return cls(
            dtype=found.dtype,
            seq_count=found.shape[0],
            lengths=found.data,
            memory=found.memory,
            owner=found.owner,
        )

    def to_numpy(self) -> npt.NDArray[np.int64]:
        """The lengths as int64, a copy. A torch tensor is read back from its device."""
        if self.memory is Memory.DEVICE and is_torch(self.owner):
            return self.owner.cpu().numpy().astype(np.int64)  # type: ignore[no-any-return]
        shape, stride = (self.seq_count,), (1,)
        return read_array("seq_lens", self.lengths, shape, stride, self.dtype, self.memory).astype(
            np.int64
        )

    def to_c(self) -> _abi.kvx_seq_lens_t:
        """A new C struct with these fields."""
        return _abi.kvx_seq_lens_t(dtype=self.dtype, seq_count=self.seq_count, lengths=self.lengths)


@dataclass(frozen=True, slots=True)
class ScaleDesc:
    """Scales of an FP8 tensor: value = stored * scale. Spec: 6.6"""

    dtype: DType
    granularity: ScaleGranularity
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: int
    memory: Memory = Memory.HOST
    writable: bool = True
    owner: object = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        scale: ScaleDesc | TensorLike | float,
        granularity: ScaleGranularity = ScaleGranularity.PER_TENSOR,
    ) -> ScaleDesc:
        """Scales from a tensor, zero-copy, or one scale from a number.

        scale:       F32, F16 or BF16, any strides, or a float. PER_TENSOR one element,
                     PER_BLOCK (num_blocks,), PER_HEAD (num_kv_heads,), PER_BLOCK_HEAD
                     (num_blocks, num_kv_heads), PER_TOKEN_HEAD
                     (num_blocks, block_size, num_kv_heads). A ScaleDesc is returned as it is.
        Raises InvalidArgumentError, UnsupportedError.
        """
        if isinstance(scale, ScaleDesc):
            return scale
        if isinstance(scale, (int, float)):
            scale = np.array(scale, np.float32)
        found = borrow(scale)
        return cls(
            dtype=found.dtype,
            granularity=granularity,
            shape=found.shape,
            stride=found.stride,
            data=found.data,
            memory=found.memory,
            writable=found.writable,
            owner=found.owner,
        )

    def to_numpy(self) -> npt.NDArray[Any]:
        """The scales, a copy. Raises UnsupportedError if they are on a device."""
        return read_array("scale", self.data, self.shape, self.stride, self.dtype, self.memory)

    def to_c(self) -> _abi.kvx_scale_desc_t:
        """A new C struct with these fields."""
        _check_ndim(self.shape, "scale")
        return _abi.kvx_scale_desc_t(
            dtype=self.dtype,
            granularity=self.granularity,
            ndim=len(self.shape),
            shape=_abi.dims(self.shape),
            stride=_abi.dims(self.stride),
            data=self.data,
        )


def _stored_as(stored: DType, dtype: DType | str) -> DType:
    wanted = DType.of(dtype)
    if wanted.itemsize != stored.itemsize:
        raise InvalidArgumentError(
            f"dtype is {wanted.name} of {wanted.itemsize} bytes, expected one of the "
            f"{stored.itemsize} bytes that the tensor's {stored.name} elements have"
        )
    return wanted


def _check_ndim(shape: tuple[int, ...], name: str) -> None:
    if len(shape) > _abi.MAX_TENSOR_DIMS:
        raise InvalidArgumentError(
            f"{name}.ndim is {len(shape)}, expected at most {_abi.MAX_TENSOR_DIMS} (spec 6.2)"
        )


def _list(name: str, numbers: TensorLike | Sequence[int]) -> Borrowed:
    return _contiguous(name, borrow_ints(name, numbers), 1)


def _contiguous(name: str, borrowed: Borrowed, ndim: int) -> Borrowed:
    """The tables of the ABI have no strides, so a strided tensor cannot be one."""
    if len(borrowed.shape) != ndim:
        raise InvalidArgumentError(f"{name}.ndim is {len(borrowed.shape)}, expected {ndim}")
    if not borrowed.is_contiguous:
        raise InvalidArgumentError(
            f"{name}.stride is {borrowed.stride}, expected {row_major(borrowed.shape)}, "
            "contiguous. Pass a contiguous copy"
        )
    return borrowed


def same_memory(name: str, memory: Memory, other: str, expected: Memory) -> None:
    """Refuses two buffers of one call of which only one is on the host: C sees bare addresses."""
    if (memory is Memory.HOST) != (expected is Memory.HOST) and Memory.UNIFIED not in (
        memory,
        expected,
    ):
        raise InvalidArgumentError(
            f"{name}.memory is {memory.name}, expected {expected.name}, where {other}. "
            "Move it there first"
        )


def check_index_memory(
    indices: Mapping[str, SlotMapping | BlockTable | SeqLens | None],
    tensors: Mapping[str, TensorDesc],
    transfer: Transfer,
) -> None:
    """Refuses slots, tables and lengths that lie where the call does not run.

    A call runs on the device if any of its tensors lies there; with COPY_ENGINE the host reads the
    indices all the same.
    """
    if transfer is Transfer.COPY_ENGINE:
        other, expected = "COPY_ENGINE reads them", Memory.HOST
    else:
        on_device = (name for name, tensor in tensors.items() if tensor.memory is not Memory.HOST)
        name = next(on_device, next(iter(tensors)))
        other, expected = f"{name} is", tensors[name].memory
    for name, index in indices.items():
        if index is not None:
            same_memory(name, index.memory, other, expected)


def require_writable(name: str, tensor: TensorDesc | ScaleDesc) -> None:
    """Refuses read-only memory as a destination: C sees bare addresses."""
    if not tensor.writable:
        raise InvalidArgumentError(
            f"{name} is read-only memory, expected writable. Pass a writable copy"
        )
