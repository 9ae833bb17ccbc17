"""Dynamo KVBM's kernels under their own names, on KVX: a KVBM user changes one import.

    from kvx_adapters import kvbm as kernels      # was: from kvbm import kernels

    kernels.block_to_universal(blocks, universals, layout="NHD")
    kernels.universal_to_block(universals, blocks, layout="NHD")
    kernels.block_to_operational(blocks, operationals, backend="auto")
    kernels.operational_to_block(operationals, blocks, backend="auto")

Tensors may lie on the CPU or on a GPU. Work on a GPU is put on torch's current stream, or the one
that is given, and is not waited for. Imports no kvbm.
Source: ai-dynamo/dynamo lib/bindings/kvbm, python/tests/test_tensor_kernels.py and src/python.rs
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from kvx_core import (
    CacheSpan,
    InvalidArgumentError,
    Memory,
    SeqLens,
    TensorLike,
    UnsupportedError,
)
from kvx_core.argument_checks import bad_argument, flag, integer
from kvx_core.blocks.copies import (
    BACKENDS,
    backend_number,
    copy_operational,
    copy_universal,
    has_memcpy_batch_async,
    is_contiguous,
    is_stub_build,
    memcpy_batch,
    vectorized_copy,
)
from kvx_core.blocks.layouts import (
    MixedDtypesError,
    Tensors,
    operational_planes,
    operational_tensors,
    stack_planes,
    stack_tensors,
    universal_planes,
    universal_tensors,
)
from kvx_core.ops.migrate import copy_tokens

__all__ = [
    "block_to_operational",
    "block_to_universal",
    "has_memcpy_batch_async",
    "is_stub_build",
    "memcpy_batch",
    "operational_to_block",
    "universal_to_block",
    "vectorized_copy",
]


def block_to_universal(
    blocks: Sequence[Sequence[TensorLike]],
    universals: Sequence[TensorLike],
    layout: str = "NHD",
    *,
    head_start: int | None = None,
    convert: bool = False,
    stream: int | None = None,
) -> None:
    """Copies block stacks into universal blocks.

    blocks:     nb lists of nl * no tensors, (nt, nh, hd) for "NHD" or (nh, nt, hd) for "HND"
    universals: nb tensors (nh, nl, no, nt, hd)
    head_start: first head of the universal blocks that is copied, which then may have more heads
                than the stacks: a rank's share; None: both have the same heads
    convert:    the two may have different dtypes, and numbers are rounded as in spec E.6
    stream:     CUDA stream; None: torch's current one. Ignored on the CPU
    Mutates the universal blocks, nothing else. Any strides, the same in all tensors of a list.
    Raises InvalidArgumentError, which for mixed dtypes is a TypeError too, UnsupportedError.
    Spec: E.15
    """
    _universal(blocks, universals, layout, head_start, convert, stream, to_universal=True)


def universal_to_block(
    universals: Sequence[TensorLike],
    blocks: Sequence[Sequence[TensorLike]],
    layout: str = "NHD",
    *,
    head_start: int | None = None,
    convert: bool = False,
    stream: int | None = None,
) -> None:
    """Copies universal blocks into block stacks: block_to_universal the other way round.

    Mutates the stacks, nothing else. Spec: E.15
    """
    _universal(blocks, universals, layout, head_start, convert, stream, to_universal=False)


def block_to_operational(
    blocks: Sequence[Sequence[TensorLike]],
    operationals: Sequence[TensorLike],
    backend: str | None = "auto",
    *,
    convert: bool = False,
    stream: int | None = None,
) -> None:
    """Copies block stacks into operational blocks.

    blocks:       nb lists of nl * no tensors of three axes, whose order is kept
    operationals: nb tensors (nl, no, inner), inner the product of a chunk's axes
    backend:      "auto", which takes the first that can of "vectorized", "batch" and "async";
                  "vectorized" (8 bytes or more at a time, all aligned), "kernel" (whatever the
                  alignment), "async" (memcpy of each chunk), "batch" (cudaMemcpyBatchAsync). The
                  names of KVBM's enum will do, too. Tensors with strides and conversions take
                  "auto" or "kernel"
    convert, stream: as for block_to_universal
    Mutates the operational blocks, nothing else.
    Raises InvalidArgumentError, which for mixed dtypes is a TypeError too, UnsupportedError.
    Spec: E.15
    """
    _operational(blocks, operationals, backend, convert, stream, to_operational=True)


def operational_to_block(
    operationals: Sequence[TensorLike],
    blocks: Sequence[Sequence[TensorLike]],
    backend: str | None = "auto",
    *,
    convert: bool = False,
    stream: int | None = None,
) -> None:
    """Copies operational blocks into block stacks: block_to_operational the other way round.

    Mutates the stacks, nothing else. Spec: E.15
    """
    _operational(blocks, operationals, backend, convert, stream, to_operational=False)


def _universal(
    blocks: Sequence[Sequence[TensorLike]],
    universals: Sequence[TensorLike],
    layout: str,
    head_start: int | None,
    convert: bool,
    stream: int | None,
    *,
    to_universal: bool,
) -> None:
    if _are_empty("blocks", blocks, "universals", universals):
        return
    whole = universal_tensors(universals)
    nh, nl, no, nt, hd = whole.numbers
    stack, planes = stack_tensors(blocks, max(no, 1), layout)
    ends = _Ends(stack, planes, whole, "universals", to_stack=not to_universal)
    ends.check(nl * no, convert)
    held = stack.numbers[0 if layout == "HND" else 1]
    num_heads = nh if head_start is None else held
    wanted = (num_heads, nt, hd) if layout == "HND" else (nt, num_heads, hd)
    if stack.numbers != wanted:
        hint = "" if held == nh else ". Give head_start to copy some of the heads"
        raise InvalidArgumentError(
            f"blocks[0][0].shape is {stack.numbers}, expected {wanted} as universals[0] is "
            f"{whole.numbers} (nh, nl, no, nt, hd){hint} (spec E.15)"
        )
    first = 0 if head_start is None else integer("head_start", head_start)
    if first + num_heads > nh:
        raise InvalidArgumentError(
            f"head_start is {first}, expected at most {nh - num_heads}: the {num_heads} heads of "
            f"blocks[0][0] reach past the {nh} of universals[0] (spec E.15)"
        )
    if 0 in stack.shape:
        return
    if ends.are_alike:
        copy_universal(stack, whole, layout, first, to_universal, stream)
        return
    ends.copy(
        stack.span(stack_planes(stack, planes, layout), no, once=True),
        whole.span(universal_planes(whole), no, head_start=first, once=True),
        nt,
        num_heads,
        stream,
    )


def _operational(
    blocks: Sequence[Sequence[TensorLike]],
    operationals: Sequence[TensorLike],
    backend: str | None,
    convert: bool,
    stream: int | None,
    *,
    to_operational: bool,
) -> None:
    number = backend_number(backend)
    if _are_empty("blocks", blocks, "operationals", operationals):
        return
    stack, planes = stack_tensors(blocks, 1, "NHD")
    whole = operational_tensors(operationals, stack.numbers)
    nl, no, nt, nh, _ = whole.shape
    ends = _Ends(stack, planes, whole, "operationals", to_stack=not to_operational)
    ends.check(nl * no, convert)
    if 0 in stack.shape:
        return
    if ends.are_alike:
        copy_operational(stack, whole, to_operational, number, stream)
        return
    if BACKENDS[number] not in ("auto", "kernel_only"):
        raise InvalidArgumentError(
            f"backend is {backend!r}, expected 'auto' or 'kernel' for tensors that are not "
            "contiguous or have two dtypes (spec E.15)"
        )
    ends.copy(
        stack.span(stack_planes(stack, planes, "NHD"), no, once=True),
        whole.span(operational_planes(whole, "NHD"), no, once=True),
        nt,
        nh,
        stream,
    )


class _Ends:
    """A stack and blocks that have all planes in one tensor each."""

    def __init__(
        self, stack: Tensors, planes: int, whole: Tensors, name: str, *, to_stack: bool
    ) -> None:
        self.stack, self.planes, self.whole, self.name = stack, planes, whole, name
        self.to_stack = to_stack

    def check(self, planes: int, convert: bool) -> None:
        """Refuses ends that do not belong together."""
        stack, whole = self.stack, self.whole
        num_blocks = len(stack.tensors) // self.planes
        if num_blocks != len(whole.tensors):
            raise InvalidArgumentError(
                f"{self.name} has {len(whole.tensors)} blocks, expected {num_blocks} as blocks has "
                "(spec E.15)"
            )
        if self.planes != planes:
            raise InvalidArgumentError(
                f"blocks[0] has {self.planes} tensors, expected nl * no = {planes} as "
                f"{self.name}[0] has (spec E.15)"
            )
        if not flag("convert", convert) and stack.label != whole.label:
            raise MixedDtypesError(
                f"{self.name}[0].dtype is {whole.label}, expected {stack.label} as blocks[0][0] "
                "has. Give convert=True to convert numbers on the way (spec E.15)"
            )
        for found, named in ((stack, "blocks[0][0]"), (whole, f"{self.name}[0]")):
            if stack.label != whole.label and found.is_bytes:
                raise UnsupportedError(
                    f"{named}.dtype is {found.label}, whose numbers KVX copies and does not "
                    "convert. Pass both ends in one dtype (spec E.15)"
                )
        if stack.memory is not whole.memory:
            raise InvalidArgumentError(
                f"{self.name}[0] is in {whole.memory.name} memory, expected {stack.memory.name} as "
                "blocks[0][0] is (spec E.15)"
            )
        written, name = (stack, "blocks") if self.to_stack else (whole, self.name)
        if not written.writable:
            raise InvalidArgumentError(
                f"{name} has read-only memory, expected writable. Pass writable copies"
            )
        has_bytes = 0 not in written.shape
        if has_bytes and len(set(written.addresses.tolist())) != len(written.tensors):
            raise InvalidArgumentError(
                f"{name} has a tensor twice, expected memory of its own for each: the call writes "
                "them (spec E.15)"
            )

    @property
    def are_alike(self) -> bool:
        """Both are contiguous and of one dtype."""
        both = self.stack, self.whole
        return self.stack.label == self.whole.label and all(map(is_contiguous, both))

    def copy(
        self, stack: CacheSpan, whole: CacheSpan, nt: int, num_heads: int, stream: int | None
    ) -> None:
        """Moves all tokens of all blocks."""
        src, dst = (whole, stack) if self.to_stack else (stack, whole)
        tokens: Any = [len(self.whole.tensors) * nt]
        if self.whole.memory is not Memory.HOST:
            torch: Any = sys.modules["torch"]
            tokens = torch.tensor(tokens, device=self.whole.tensors[0].device)
        copy_tokens(src, dst, SeqLens.of(tokens), num_heads=num_heads, stream=stream)


def _are_empty(first: str, blocks: Any, second: str, others: Any) -> bool:
    """Whether there is nothing to do: no blocks at all, which is no mistake."""
    for name, given in ((first, blocks), (second, others)):
        if not isinstance(given, (list, tuple)):
            raise bad_argument(name, given, "a list with an entry per block")
    return not blocks and not others
