"""Blocks at any address, as spans: block stacks, operational and universal blocks. Spec: E.15

    stack         nl * no tensors per block: (nt, nh, hd) "NHD" or (nh, nt, hd) "HND"
    operational   one tensor per block: (nl, no, nt * nh * hd)
    universal     one tensor per block: (nh, nl, no, nt, hd), in which heads are a slice

nl layers, no outer chunks (2: K and V), nt tokens of a block, nh heads, hd numbers of a head. Each
function describes such blocks zero-copy; `migrate`, `Plan` and `verify` take them at either end,
with any other cache at the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core._c import bound
from kvx_core.argument_checks import bad_argument, integer
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.facts import CacheFacts
from kvx_core.desc.in_place import is_torch
from kvx_core.desc.pointers import PointedTo
from kvx_core.desc.tables import BlockTable
from kvx_core.desc.tensor_desc import TensorDesc, stored_as
from kvx_core.desc.tensors import TensorLike, borrowed_fields, require_whole
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.types import DType, Layout, Memory

_LAYOUTS = {"NHD": Layout.BLOCK_NHD, "HND": Layout.BLOCK_HND}


class MixedDtypesError(InvalidArgumentError, TypeError):
    """Tensors of one call have different dtypes. A TypeError too, which KVBM raises."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors of one shape, stride, dtype and device, each at an address of its own."""

    tensors: list[Any]
    addresses: npt.NDArray[np.uint64]  # (len(tensors),)
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements of `dtype`
    dtype: DType  # U8 for numbers that KVX only copies: hd then counts bytes
    label: str  # what the tensors' library calls their dtype
    memory: Memory
    writable: bool
    itemsize: int = 1  # bytes of a number that is copied as bytes, which `shape` counts

    @classmethod
    def of(
        cls,
        tensors: list[Any],
        name_of: Callable[[int], str],
        ndim: int | None,
        axes: str,
        dtype: DType | str | None = None,
    ) -> Tensors:
        """Raises InvalidArgumentError for tensors that differ, naming the first that does."""
        first, name = tensors[0], name_of(0)
        fields, label = _stored(name, first, dtype)
        shape, stride = fields["shape"], fields["stride"]
        if ndim is not None and len(shape) != ndim:
            raise InvalidArgumentError(f"{name}.ndim is {len(shape)}, expected {ndim}: {axes}")
        if is_torch(first):
            addresses = _torch_addresses(tensors, name_of)
        else:
            listed = [fields["data"]]
            for i, other in enumerate(tensors[1:], 1):
                other_name = name_of(i)
                found, found_label = _stored(other_name, other, dtype)
                _require_same(other_name, "dtype", found_label, name, label)
                for field in ("shape", "stride", "memory"):
                    _require_same(other_name, field, found[field], name, fields[field])
                fields["writable"] &= found["writable"]
                listed.append(found["data"])
            addresses = np.array(listed, np.uint64)
        return cls(
            tensors=tensors,
            addresses=addresses,
            shape=shape,
            stride=stride,
            dtype=fields["dtype"],
            label=label,
            memory=fields["memory"],
            writable=fields["writable"],
            itemsize=fields.get("itemsize", 1),
        )

    @property
    def is_bytes(self) -> bool:
        """Whether KVX copies these numbers and does not know their format."""
        return self.dtype is DType.U8 and self.label != DType.U8.label

    @property
    def numbers(self) -> tuple[int, ...]:
        """The shape in numbers, as the tensors' library has it."""
        return (*self.shape[:-1], self.shape[-1] // self.itemsize)

    def desc(self, index: int, layout: Layout, axes: Sequence[int], step: int = 0) -> TensorDesc:
        """`axes` of tensor `index`, as a cache of one block, from element `step` on."""
        return TensorDesc(
            data=int(self.addresses[index]) + step * self.dtype.itemsize,
            shape=(1, *(self.shape[axis] for axis in axes)),
            stride=(0, *(self.stride[axis] for axis in axes)),
            dtype=self.dtype,
            memory=self.memory,
            writable=self.writable,
            owner=self.tensors[index],
            layout=layout,
        )

    @property
    def alignment(self) -> npt.NDArray[np.uint64]:
        """The largest power of two that divides each address."""
        return self.addresses & (~self.addresses + np.uint64(1))

    @property
    def least_aligned(self) -> int:
        """The index of the tensor with the least aligned address."""
        return int(self.alignment.argmin())

    def span(
        self,
        planes: Sequence[TensorDesc],
        no: int,
        blocks_per_seq: Sequence[int] | None = None,
        head_start: int = 0,
        facts: CacheFacts | None = None,
        *,
        once: bool = False,
    ) -> CacheSpan:
        """The span whose planes these are: a tensor per plane and block, or one per block.

        once: for a call that begins now, in which no tensor moves
        """
        step = 2 if no == 2 else 1
        layers = tuple(
            CacheDesc.from_kv(*planes[i : i + step]) for i in range(0, len(planes), step)
        )
        view = CacheView(layers, CacheFacts() if facts is None else facts)
        table = self._table(len(planes), blocks_per_seq)
        owner = table.owner if once else (table.owner, PointedTo.by(self.tensors))
        return view.at(block_table=replace(table, owner=owner), head_start=head_start)

    def _table(self, planes: int, blocks_per_seq: Sequence[int] | None) -> BlockTable:
        is_stack = len(self.shape) == 3
        rows = self.addresses.reshape(-1, planes) if is_stack else self.addresses
        counts = [len(rows)] if blocks_per_seq is None else _counts(blocks_per_seq, len(rows))
        table = np.zeros((len(counts), max(counts), *rows.shape[1:]), np.uint64)
        begin = 0
        for row, count in zip(table, counts, strict=True):
            row[:count] = rows[begin : begin + count]
            begin += count
        pointers: Any = table
        if self.memory is not Memory.HOST:
            if not is_torch(self.tensors[0]):
                raise UnsupportedError(
                    f"the blocks are in {self.memory.name} memory and a "
                    f"{type(self.tensors[0]).__name__}, expected torch tensors there"
                )
            torch: Any = sys.modules["torch"]
            pointers = torch.from_numpy(table.view(np.int64)).to(self.tensors[0].device)
        if is_stack:
            return BlockTable.pointers(pointers)
        return BlockTable.whole_blocks(pointers, int(self.addresses[self.least_aligned]))


def block_stack(
    blocks: Sequence[Sequence[TensorLike]],
    layout: str = "NHD",
    *,
    no: int = 2,
    dtype: DType | str | None = None,
    blocks_per_seq: Sequence[int] | None = None,
    head_start: int = 0,
    facts: CacheFacts | None = None,
) -> CacheSpan:
    """Blocks with a tensor for each layer and outer chunk.

    blocks: nb lists of nl * no tensors, that of layer l and chunk o at l * no + o: (nt, nh, hd) for
            "NHD", (nh, nt, hd) for "HND"; all of one shape, stride and dtype, any strides. Where
            `no` is 2, the chunks are K and V of a layer, else K of a layer each
    dtype:  what the elements are, as `describe` takes it. Numbers that KVX has no format for, such
            as float64, are copied as bytes
    blocks_per_seq: how many of the blocks, in order, each sequence has; None: one has all
    head_start: first head here
    facts:  what the bytes mean; None: nothing is known
    Raises InvalidArgumentError, UnsupportedError. Spec: E.15
    """
    found, planes = stack_tensors(blocks, integer("no", no, 1), layout, dtype)
    return found.span(stack_planes(found, planes, layout), no, blocks_per_seq, head_start, facts)


def universal_blocks(
    universals: Sequence[TensorLike],
    *,
    dtype: DType | str | None = None,
    blocks_per_seq: Sequence[int] | None = None,
    head_start: int = 0,
    facts: CacheFacts | None = None,
) -> CacheSpan:
    """Blocks with one tensor each, heads first.

    universals: nb tensors (nh, nl, no, nt, hd), all of one shape, stride and dtype, any strides
    dtype, blocks_per_seq, head_start, facts: as for block_stack
    Raises InvalidArgumentError, UnsupportedError. Spec: E.15
    """
    found = universal_tensors(universals, dtype)
    return found.span(universal_planes(found), found.shape[2], blocks_per_seq, head_start, facts)


def operational_blocks(
    operationals: Sequence[TensorLike],
    shape: Sequence[int],
    layout: str = "NHD",
    *,
    dtype: DType | str | None = None,
    blocks_per_seq: Sequence[int] | None = None,
    head_start: int = 0,
    facts: CacheFacts | None = None,
) -> CacheSpan:
    """Blocks with one tensor each, in which the axes of a chunk are one.

    operationals: nb tensors (nl, no, inner), all of one shape, stride and dtype; `inner` has stride
                  1 and prod(shape) elements
    shape:        of a chunk: (nt, nh, hd) for "NHD", (nh, nt, hd) for "HND"
    dtype, blocks_per_seq, head_start, facts: as for block_stack
    Raises InvalidArgumentError, UnsupportedError. Spec: E.15
    """
    found = operational_tensors(operationals, shape, dtype)
    planes = operational_planes(found, layout)
    return found.span(planes, found.shape[1], blocks_per_seq, head_start, facts)


def stack_tensors(
    blocks: Sequence[Sequence[TensorLike]], no: int, layout: str, dtype: DType | str | None = None
) -> tuple[Tensors, int]:
    """The tensors of a block stack, block after block, and how many each block has."""
    _layout(layout)
    table = [_list(f"blocks[{b}]", block) for b, block in enumerate(_list("blocks", blocks))]
    planes = len(table[0])
    for b, block in enumerate(table):
        if len(block) == planes and planes and planes % no == 0:
            continue
        expected = f"nl * no = {planes} as blocks[0] has" if b else f"nl * no, with no = {no}"
        raise InvalidArgumentError(
            f"blocks[{b}] has {len(block)} tensors, expected {expected} (spec E.15)"
        )
    tensors = [tensor for block in table for tensor in block]
    axes = "(nt, nh, hd)" if layout == "NHD" else "(nh, nt, hd)"

    def name_of(i: int) -> str:
        return f"blocks[{i // planes}][{i % planes}]"

    return Tensors.of(tensors, name_of, 3, axes, dtype), planes


def universal_tensors(
    universals: Sequence[TensorLike], dtype: DType | str | None = None
) -> Tensors:
    """The tensors of universal blocks."""
    tensors = _list("universals", universals)
    return Tensors.of(tensors, "universals[{}]".format, 5, "(nh, nl, no, nt, hd)", dtype)


def operational_tensors(
    operationals: Sequence[TensorLike],
    shape: Sequence[int],
    dtype: DType | str | None = None,
) -> Tensors:
    """The tensors of operational blocks, with the axes of a chunk in place of `inner`."""
    if not isinstance(shape, (list, tuple)):
        raise bad_argument("shape", shape, "the three extents of a chunk")
    chunk = tuple(integer(f"shape[{i}]", extent) for i, extent in enumerate(shape))
    tensors = _list("operationals", operationals)
    found = Tensors.of(tensors, "operationals[{}]".format, 3, "(nl, no, inner)", dtype)
    *outer, inner = found.numbers
    if len(chunk) != 3 or prod(chunk) != inner:
        raise InvalidArgumentError(
            f"operationals[0].shape[2] is {inner}, expected nt * nh * hd = {prod(chunk)} of chunks "
            f"{tuple(shape)} (spec E.15)"
        )
    *steps, step = found.stride
    if inner > 1 and step != 1:
        raise InvalidArgumentError(
            f"operationals[0].stride[2] is {step}, expected 1: `inner` is one axis (spec E.15)"
        )
    chunk = (*chunk[:2], chunk[2] * found.itemsize)
    strides = (*steps, chunk[1] * chunk[2], chunk[2], 1)
    return replace(found, shape=(*outer, *chunk), stride=strides)


def stack_planes(found: Tensors, planes: int, layout: str) -> list[TensorDesc]:
    """A block of each plane of a stack."""
    order = _layout(layout)
    # Any block of a plane may describe it; the least aligned one gives the alignment of all.
    odd = found.alignment.reshape(-1, planes).argmin(axis=0) * planes + np.arange(planes)
    return [found.desc(int(index), order, range(3)) for index in odd]


def universal_planes(found: Tensors) -> list[TensorDesc]:
    """Each plane in a universal block."""
    return _chunks(found, (1, 2), Layout.BLOCK_HND, (0, 3, 4))


def operational_planes(found: Tensors, layout: str) -> list[TensorDesc]:
    """Each plane in an operational block."""
    return _chunks(found, (0, 1), _layout(layout), (2, 3, 4))


def _chunks(
    found: Tensors, outer: tuple[int, int], layout: Layout, axes: Sequence[int]
) -> list[TensorDesc]:
    """Each chunk of a block that has all of them, in the order of layers and outer chunks."""
    layer, chunk = outer
    index = found.least_aligned
    return [
        found.desc(index, layout, axes, la * found.stride[layer] + o * found.stride[chunk])
        for la in range(found.shape[layer])
        for o in range(found.shape[chunk])
    ]


def _stored(name: str, tensor: Any, dtype: DType | str | None) -> tuple[dict[str, Any], str]:
    """The fields of a tensor as KVX copies it, and what its library calls its dtype."""
    given = getattr(tensor, "dtype", None)
    label = str(given).removeprefix("torch.")
    try:
        known = DType.of(given)
    except InvalidArgumentError:
        known = DType.INVALID
    if dtype is not None:
        fields = borrowed_fields(name, tensor)
        return fields | stored_as(name, fields, dtype), DType.of(dtype).label
    if given is None or known.format.rounding or known is DType.U8:
        fields = borrowed_fields(name, tensor)
        return fields, fields["dtype"].label
    return _bytes(name, tensor, label), label


def _bytes(name: str, tensor: Any, label: str) -> dict[str, Any]:
    """The fields of a tensor of numbers that KVX only copies: its last axis counts bytes."""
    if is_torch(tensor) and (tensor.is_neg() or tensor.is_conj()):
        bit = "neg" if tensor.is_neg() else "conj"
        raise UnsupportedError(
            f"{name}.is_{bit}() is True, expected False: in memory are other numbers than torch "
            f"reads. Pass {name}.resolve_{bit}()"
        )
    strides = tensor.stride() if is_torch(tensor) else tensor.strides
    step = 1 if is_torch(tensor) else tensor.itemsize
    if not strides or strides[-1] != step:
        raise UnsupportedError(
            f"{name} is {label}, which is copied as bytes, and the numbers of its last axis do not "
            "follow each other. Pass a contiguous copy (spec E.15)"
        )
    uint8: Any = sys.modules["torch"].uint8 if is_torch(tensor) else np.uint8
    fields = borrowed_fields(name, tensor.view(uint8))
    return fields | {"owner": tensor, "itemsize": tensor.itemsize}


def _torch_addresses(tensors: list[Any], name_of: Callable[[int], str]) -> npt.NDArray[np.uint64]:
    """The addresses of torch tensors that are like the first, which `borrowed_fields` has taken.

    Raises InvalidArgumentError, UnsupportedError.
    """
    first = tensors[0]
    dtype, shape, stride, device = first.dtype, first.shape, first.stride(), first.device
    if not dtype.is_complex:  # whose conjugate bit C does not see
        read = _identity()
        found = [read(*tensors[i : i + 4]) for i in range(0, len(tensors), 4)]
        read_all = [one for one in found if isinstance(one, bytes)]
        if len(read_all) == len(found):
            # address, bytes of the storage, and what is to be the same
            words = np.frombuffer(b"".join(read_all), np.int64).reshape(len(tensors), -1)
            if (words[:, 2:] == words[0, 2:]).all():
                return np.array(words[:, 0].view(np.uint64))
    for i, other in enumerate(tensors):
        if not is_torch(other):
            raise bad_argument(name_of(i), other, f"a torch.Tensor as {name_of(0)} is")
        _require_same(name_of(i), "dtype", other.dtype, name_of(0), dtype)
        _require_same(name_of(i), "shape", other.shape, name_of(0), shape)
        _require_same(name_of(i), "stride", other.stride(), name_of(0), stride)
        _require_same(name_of(i), "device", other.device, name_of(0), device)
        if other.is_neg() or other.is_conj():
            _stored(name_of(i), other, None)  # refuses it
        require_whole(name_of(i), other)
    return np.array([tensor.data_ptr() for tensor in tensors], np.uint64)


@cache
def _identity() -> Callable[..., bytes | int]:
    return bound.identity()


def _require_same(name: str, field: str, value: Any, first: str, expected: Any) -> None:
    if value == expected:
        return
    if field == "dtype":
        raise MixedDtypesError(
            f"{name}.dtype is {value}, expected {expected} as {first} has: convert the tensors to "
            "one dtype (spec E.15)"
        )
    hint = ": pass contiguous copies" if field == "stride" else ""
    shown, wanted = (tuple(v) if isinstance(v, (tuple, list)) else v for v in (value, expected))
    raise InvalidArgumentError(
        f"{name}.{field} is {shown}, expected {wanted} as {first} has{hint} (spec E.15)"
    )


def _layout(layout: str) -> Layout:
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise bad_argument("layout", layout, "'NHD' or 'HND'")
    return _LAYOUTS[layout]


def _list(name: str, given: Any) -> list[Any]:
    if not isinstance(given, (list, tuple)):
        raise bad_argument(name, given, "a list of tensors")
    if not given:
        raise InvalidArgumentError(f"{name} is empty, expected at least one tensor (spec E.15)")
    return list(given)


def _counts(blocks_per_seq: Sequence[int], num_blocks: int) -> list[int]:
    if not isinstance(blocks_per_seq, (list, tuple)):
        raise bad_argument(
            "blocks_per_seq", blocks_per_seq, "a list of the blocks of each sequence"
        )
    counts = [integer(f"blocks_per_seq[{i}]", count) for i, count in enumerate(blocks_per_seq)]
    if sum(counts) != num_blocks or not counts:
        raise InvalidArgumentError(
            f"blocks_per_seq adds up to {sum(counts)}, expected {num_blocks} blocks (spec E.15)"
        )
    return counts
