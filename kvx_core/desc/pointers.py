"""Blocks that a POINTERS table names by address, given as tensors or as numbers. Spec: E.12"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvx_core._c.dlpack import Exported
from kvx_core.argument_checks import address, each
from kvx_core.desc.in_place import is_in_place, is_torch, moved
from kvx_core.desc.tensors import Borrowed, Numbers, TensorLike, borrow, is_tensor, own
from kvx_core.errors import InvalidArgumentError


class PointedTo(NamedTuple):
    """Tensors that a POINTERS table names, kept, and their addresses when it was made."""

    owners: list[Any]
    addresses: list[int]

    @classmethod
    def by(cls, blocks: Any) -> PointedTo:
        """The tensors in a list of anything, nested or not."""
        found = cls([], [])
        found._add(blocks)
        return found

    def _add(self, block: Any) -> None:
        if isinstance(block, (tuple, list)):
            for one in block:
                self._add(one)
        elif is_torch(block):
            self.owners.append(block)
            self.addresses.append(block.data_ptr())
        elif isinstance(block, np.ndarray):
            self.owners.append(block)
            self.addresses.append(block.__array_interface__["data"][0])
        elif is_tensor(block):
            exported = Exported.of("block", block)
            self.owners.append(exported)
            self.addresses.append(exported.found.data)

    def require_in_place(self, name: str) -> None:
        """Raises if the memory of a tensor has moved."""
        for owner, begin in zip(self.owners, self.addresses, strict=True):
            if begin and not is_in_place(owner, begin, begin + 1, begin):
                raise moved(name)


def nested(blocks: Any, depth: int) -> list[Any]:
    """Lists in lists, as deep as that. Raises InvalidArgumentError.

    blocks: lists or tuples, or what else has a length
    """
    if depth == 0:
        return blocks  # type: ignore[no-any-return]  # a block
    found = each("blocks", blocks, "a tensor of addresses, or lists of rows of blocks")
    return [nested(one, depth - 1) for one in found]


def addresses_of_planes(
    rows: Sequence[Sequence[Sequence[TensorLike | int | None]]], seen: dict[int, Borrowed]
) -> Numbers:
    """Nested lists of blocks as an array of addresses (seq_count, max_blocks_per_seq, planes).

    seen: gets the first tensor of each plane; the others are like it
    """
    planes = {len(block) for row in rows for block in row}
    if not planes and len(rows):
        raise InvalidArgumentError(
            f"blocks has {len(rows)} rows without a block, expected at least one block in all: how "
            "many planes there are is not known without. Leave sequences without tokens out, or "
            "give an array of zeros, (seq_count, 1, planes)"
        )
    if len(planes) > 1:
        raise InvalidArgumentError(
            f"block_table has blocks with {sorted(planes)} planes, expected the same number in all"
        )
    table = np.zeros((len(rows), max(1, *map(len, rows), 1), max(planes, default=1)), np.uint64)
    for i, row in enumerate(rows):
        for j, block in enumerate(row):
            for k, plane in enumerate(block):
                if is_tensor(plane):
                    name = f"block_table[{i}][{j}][{k}]"
                    given = borrow(plane, name=name)
                    first = seen.setdefault(k, given)
                    if _strided(given) != _strided(first):
                        raise InvalidArgumentError(
                            f"{name} is {_strided(given)}, expected {_strided(first)} as the first "
                            f"block of plane {k}: one descriptor stands for all (spec E.12)"
                        )
                    table[i, j, k] = given.data
                elif plane is not None:
                    table[i, j, k] = address(f"block_table[{i}][{j}][{k}]", plane)
    return own(table)


def check_blocks(blocks: Sequence[Borrowed | None], planes: Sequence[Borrowed]) -> None:
    """Refuses a POINTERS table whose blocks, given as tensors, have other strides than `planes`.

    blocks: the first block of each plane; None where it was given as an address
    planes: K and V of layer 0, of layer 1, ... as described, of one block each. Blocks of another
            element size or with other numbers of axes say nothing.
    Raises InvalidArgumentError.
    """
    for i, (block, plane) in enumerate(zip(blocks, planes, strict=False)):
        if block is None or block.dtype.itemsize != plane.dtype.itemsize:
            continue
        skipped = len(plane.shape) - len(block.shape)  # the axis of blocks
        if skipped not in (0, 1):
            continue
        axes = [
            (extent, step if extent > 1 else 0)
            for extent, step in zip(plane.shape[skipped:], plane.stride[skipped:], strict=True)
        ]
        found = [
            (extent, step if extent > 1 else 0)
            for extent, step in zip(block.shape, block.stride, strict=True)
        ]
        if axes != found:
            raise InvalidArgumentError(
                f"block_table has blocks of plane {i} that are {_strided(block)}, but the view "
                f"describes {_strided(plane)}: its strides hold for every block (spec E.12). "
                "Describe one of these blocks, or give addresses"
            )


def _strided(tensor: Borrowed) -> str:
    return f"{tensor.dtype.name} {list(tensor.shape)} with strides {list(tensor.stride)}"


def addresses_of_blocks(rows: Sequence[Sequence[TensorLike | int | None]]) -> Numbers:
    """Whole blocks given one by one as (seq_count, max_blocks_per_seq) addresses.

    Raises InvalidArgumentError.
    """
    if len(rows) and not any(map(len, rows)):
        raise InvalidArgumentError(
            f"blocks has {len(rows)} rows without a block, expected at least one block in all: "
            "null blocks would pass over tokens that were given no place. Leave sequences without "
            "tokens out, or give an array of zeros, (seq_count, 1)"
        )
    table = np.zeros((len(rows), max(1, *map(len, rows), 1)), np.uint64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = [address_of(f"block_table[{i}]", block) for block in row]
    return own(table)


def address_of(name: str, block: TensorLike | int | None) -> int:
    """The address of a block that is given as a tensor, an address or None."""
    if is_tensor(block):
        return borrow(block, name=name).data
    return 0 if block is None else address(name, block)
