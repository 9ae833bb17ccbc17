"""Plan: a migration that is validated once, described, run many times, or listed. Spec: E.13"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, Unpack

import numpy as np
import numpy.typing as npt

from kvx_core import _abi, _abi_plan, _bound, facts
from kvx_core._abi_plan import (
    CONVERTS,
    EXACT,
    FINDS_SCALES,
    JOINED,
    OF_SCALES,
    OF_ZEROS,
    UNKNOWN,
)
from kvx_core.errors import FactsMismatchError, InvalidArgumentError
from kvx_core.memory_checks import check_index_memory
from kvx_core.options import MoveKeywords, MoveOptions
from kvx_core.reorder import reordered
from kvx_core.streams import current_stream, stream_number
from kvx_core.tables import BlockTable, SeqLens, SlotMapping
from kvx_core.tensors import TensorLike
from kvx_core.types import DType, Memory, Transfer
from kvx_core.view import CacheSpan, CacheView
from kvx_core.words import flag, many

Table = BlockTable | TensorLike | Sequence[Sequence[int]]
Slots = SlotMapping | TensorLike | Sequence[int]
Lens = SeqLens | TensorLike | Sequence[int]

# What Plan.ranges returns; src 0 stands for zeros.
RANGE = np.dtype(
    [("plane", "u4"), ("reserved", "u4"), ("src", "u8"), ("dst", "u8"), ("bytes", "u8")]
)
_ROLES = ("K", "V", "latent", "latent rope", "index K", "index K scale", "compressed", "conv")


@dataclass(frozen=True, slots=True)
class PlaneInfo:
    """What a plan does with K, V or another plane of a layer. None: the host cannot know."""

    layer: int
    role: int  # 0: K, 1: V; see kvx_plane.h
    joined: bool  # the next plane's vectors (V's after K's) follow at both ends: one entry for both
    converts: bool  # numbers are converted; else bytes are copied
    exact: bool  # every finite source number can be had back
    finds_scales: bool
    src_dtype: DType
    dst_dtype: DType
    num_heads: int
    vector_size: int
    kernel: str  # on a device the kernel, else "copy", "transpose" or "convert"
    launch: int  # on a device: which launch moves it
    run_bytes: int  # the longest run that is contiguous at both ends, in a block; 0: converted
    num_vectors: int | None
    bytes_read: int | None
    bytes_written: int | None
    # What it copies of a plane of U8_ZERO or U8_BIAS, beside its data; None: the data
    beside: Literal["scales", "zeros"] | None = None

    @property
    def name(self) -> str:
        """'K', 'V', 'K and V', 'latent', 'K scales', ..."""
        role = _ROLES[self.role] if self.role < len(_ROLES) else f"role {self.role}"
        if self.beside is not None:
            return f"{role} {self.beside}"
        return (f"{role} and V" if self.role == 0 else f"{role} and next") if self.joined else role


@dataclass(frozen=True, slots=True, repr=False)
class PlanInfo:
    """What a plan does; its repr is a table. None: the host cannot know."""

    planes: tuple[PlaneInfo, ...]
    on_device: bool
    num_launches: int
    num_threads: int
    exact: bool
    num_sequences: int
    num_tokens: int | None
    num_moved: int | None
    num_null_src: int | None
    num_null_dst: int | None
    bytes_read: int | None
    bytes_written: int | None
    copy_bytes_per_second: float | None
    seconds: float | None  # an estimate from the speed at which this machine copies memory

    def __repr__(self) -> str:
        where = many(self.num_launches, "launch").replace("launchs", "launches")
        parts = [
            many(self.num_sequences, "sequence"),
            "tokens unknown to the host" if self.num_tokens is None else self._tokens(),
            "bytes unknown" if self.bytes_written is None else f"{self.bytes_written:,} bytes",
            where if self.on_device else many(self.num_threads, "thread"),
            "exact" if self.exact else "not exact",
        ]
        if self.seconds is not None:
            parts.append(f"about {1e6 * self.seconds:,.0f} us")
        rows = [("layers", "plane", "numbers", "from", "to", "by", "run bytes")]
        for plane in self.planes:
            row = (
                plane.name,
                f"{plane.num_heads} x {plane.vector_size}",
                plane.src_dtype.name,
                plane.dst_dtype.name + ("" if plane.exact else ", not exact"),
                plane.kernel,
                str(plane.run_bytes or "-"),
            )
            seen = [at for at, (_, *other) in enumerate(rows) if at and tuple(other) == row]
            if seen:
                first, _, _ = rows[seen[0]][0].partition("-")
                rows[seen[0]] = (f"{first}-{plane.layer}", *row)
            else:
                rows.append((str(plane.layer), *row))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n  ".join([f"PlanInfo({', '.join(parts)})", *lines])

    def _tokens(self) -> str:
        nulls = {"source": self.num_null_src, "destination": self.num_null_dst}
        without = [f"{count} without a {end}" for end, count in nulls.items() if count]
        tokens = many(self.num_tokens or 0, "token")
        return f"{tokens} ({', '.join(without)})" if without else tokens


class Plan:
    """A migration that is kept: see Plan.migrate.

    A plan keeps both ends and their tensors alive until it is closed. It refuses to run once their
    storage has been resized or replaced. Threads may share it. Spec: E.13
    """

    __slots__ = ("_call", "_dst", "_handle", "_held", "_layers", "_src", "_stream", "_transfer")

    _call: Any
    _handle: _abi_plan.Handle | None

    @classmethod
    def migrate(
        cls,
        src: CacheView | CacheSpan,
        dst: CacheView | CacheSpan,
        seq_lens: Lens | None = None,
        *,
        same_model: bool = False,
        **options: Unpack[MoveKeywords],
    ) -> Self:
        """Validates what kvx_core.migrate would do with these arguments; keeps it, moves nothing.

        src, dst, same_model, options: as for kvx_core.migrate. Each run may name other sequences,
                  found in the same way: view.at(block_table=[]) is a table to begin with
        seq_lens: (seq_count,), as for migrate; None: none, each run gives its own
        Raises FactsMismatchError, InvalidArgumentError, UnsupportedError as migrate does.
        Spec: E.13
        """
        src, dst = CacheSpan.of(src, name="src"), CacheSpan.of(dst, name="dst")
        chosen = MoveOptions.of(options)
        found = facts.compare(
            src.view.facts,
            dst.view.facts,
            src_head_start=src.head_start,
            dst_head_start=dst.head_start,
            same_model=flag("same_model", same_model),
        )
        if found.reasons:
            raise FactsMismatchError(found.reasons)
        ends = src, dst
        for transform in found.transforms:
            ends = reordered(*ends, transform, find_scales=chosen.find_scales)
        return cls()._bind(src, dst, ends, seq_lens, chosen)

    def _bind(
        self,
        src: CacheSpan,
        dst: CacheSpan,
        ends: tuple[CacheSpan, CacheSpan],
        seq_lens: Lens | None,
        options: MoveOptions,
    ) -> Self:
        src.view.require_current("src")
        dst.view.require_current("dst")
        for name, tensor in dst.view.read_only.items():
            tensor.require_writable(f"dst.{name}")
        if options.find_scales:
            for name, scales in (("k_scales", dst.view.k_scales), ("v_scales", dst.view.v_scales)):
                for i, scale in enumerate(scales or ()):
                    if scale is not None:
                        scale.require_writable(f"dst.{name}[{i}]")
        self._src, self._dst, self._transfer = src, dst, options.transfer
        # K that moves in two parts has its second ones in layers behind all layers.
        pairs = enumerate(zip(src.view.layers, ends[0].view.layers, strict=False))
        parted = (i for i, (whole, part) in pairs if whole.head_dim != part.head_dim)
        self._layers = [*range(len(src.view.layers)), *parted]
        self._held = src.held("src"), dst.held("dst")
        lens = None if seq_lens is None else SeqLens.of(seq_lens)
        places = {
            f"{end}.{name}": getattr(span, name)
            for end, span in (("src", src), ("dst", dst))
            for name in ("block_table", "slots", "starts")
        }
        self._check_memory({**places, "seq_lens": lens})
        struct = _abi.kvx_migrate_desc_t(
            flags=options.flags,
            num_heads=options.num_heads or 0,
            seq_lens=_abi.pointer_to(SeqLens.of(()) if lens is None else lens),
            src=_abi.pointer_to(ends[0]),
            dst=_abi.pointer_to(ends[1]),
        )
        self._handle = handle = _abi_plan.Handle(struct)
        memory = self._memory()
        self._stream = current_stream(*(tensor.owner for tensor in self._tensors().values()))
        binding = _bound.Binding(
            held=self._held,
            memory=memory,
            index_memory=Memory.HOST if options.transfer is Transfer.COPY_ENGINE else memory,
            stream=self._stream,
            kept=(handle, lens),
        )
        token_bytes = dst.view.bytes_per_token(options.num_heads)
        brief = len(dst.view.layers) <= 8
        self._call = _bound.run_plan(
            binding, handle.value, token_bytes * brief, (_invalid(src), _invalid(dst))
        )
        return self

    def run(
        self,
        seq_lens: Lens | None = None,
        *,
        src_block_table: Table | None = None,
        src_slots: Slots | None = None,
        src_starts: Lens | None = None,
        dst_block_table: Table | None = None,
        dst_slots: Slots | None = None,
        dst_starts: Lens | None = None,
        stream: int | None = None,
    ) -> None:
        """Moves the tokens.

        seq_lens: (seq_count,), the tokens to move of each sequence; None: the plan's
        src_..., dst_...: where the sequences lie, as for CacheView.at; None: as the plan was made.
                  A table where the plan has a table of its format, slots where it has slots, which
                  skip the plan's invalid_slot unless they are a SlotMapping
        stream:   CUDA stream; None: torch's current one if a tensor is torch's, else the default
                  stream. Ignored for HOST memory
        Mutates what kvx_core.migrate would, nothing else.
        Raises InvalidArgumentError, OutOfRangeError; then nothing was written.
        Spec: E.13
        """
        call = self._call
        if call is None:
            raise _closed()
        src, dst = self._src.view, self._dst.view
        if src.outdated is not None:
            src.require_current("src")
        if dst.outdated is not None:
            dst.require_current("dst")
        if stream is not None:
            stream = stream_number(stream)
        status = call(
            seq_lens,
            *(src_block_table, src_slots, src_starts),
            *(dst_block_table, dst_slots, dst_starts),
            stream,
        )
        if status:
            if status > 0:
                _abi.check(status)
            ends = (
                (src_block_table, src_slots, src_starts),
                (dst_block_table, dst_slots, dst_starts),
            )
            self._run_described(seq_lens, ends, stream)

    def _run_described(self, seq_lens: Any, ends: Any, stream: int | None) -> None:
        handle = self._require_open()
        lookups = self._lookups(seq_lens, *ends)
        if stream is None:
            stream = _abi.stream_now(self._stream)
        _abi.check(handle.library.kvx_plan_run(handle.value, lookups, stream))

    @property
    def info(self) -> PlanInfo:
        """What `run()` would do: `describe()`."""
        return self.describe()

    def describe(
        self,
        seq_lens: Lens | None = None,
        *,
        src_block_table: Table | None = None,
        src_slots: Slots | None = None,
        src_starts: Lens | None = None,
        dst_block_table: Table | None = None,
        dst_slots: Slots | None = None,
        dst_starts: Lens | None = None,
    ) -> PlanInfo:
        """What `run` would do with the same arguments, and whether it would be refused.

        The first call in a process measures how fast this machine copies, for some milliseconds.
        Raises what run would raise. Spec: E.13
        """
        handle = self._require_open()
        src, dst = (
            (src_block_table, src_slots, src_starts),
            (dst_block_table, dst_slots, dst_starts),
        )
        lookups, info = self._lookups(seq_lens, src, dst), _abi_plan.kvx_plan_info_t()
        describe = handle.library.kvx_plan_describe
        _abi.check(describe(handle.value, lookups, info, None, 0))
        count = info.num_planes
        planes = (_abi_plan.kvx_plane_info_t * count)(*[_abi_plan.kvx_plane_info_t()] * count)
        _abi.check(describe(handle.value, lookups, info, planes, count))
        for plane in planes:
            if plane.layer < len(self._layers):
                plane.layer = self._layers[plane.layer]
        return _info(info, planes)

    def ranges(
        self,
        seq_lens: Lens | None = None,
        *,
        src_block_table: Table | None = None,
        src_slots: Slots | None = None,
        src_starts: Lens | None = None,
        dst_block_table: Table | None = None,
        dst_slots: Slots | None = None,
        dst_starts: Lens | None = None,
    ) -> npt.NDArray[np.void]:
        """The copies that `run` would make with the same arguments, as an array of RANGE.

        plane: which of info.planes; src, dst: addresses, src 0 for zeros; bytes: how many. They
        come plane by plane, in the order of sequences and tokens; what follows each other at both
        ends is one range. Tables and lengths lie in memory that the host can read.
        Raises UnsupportedError for a plan that converts, else what run would raise. Spec: E.13
        """
        handle = self._require_open()
        src, dst = (
            (src_block_table, src_slots, src_starts),
            (dst_block_table, dst_slots, dst_starts),
        )
        lookups = self._lookups(seq_lens, src, dst)
        pieces: list[npt.NDArray[np.void]] = []

        take = _abi_plan.taker(lambda some: pieces.append(np.frombuffer(some, RANGE)))
        _abi.check(handle.library.kvx_plan_ranges(handle.value, lookups, take, None))
        return np.concatenate(pieces) if pieces else np.zeros(0, RANGE)

    def close(self) -> None:
        """Lets go of the plan; runs that have begun are not disturbed. Idempotent."""
        self._call = self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> _abi_plan.Handle:
        handle = self._handle
        if handle is None:
            raise _closed()
        self._src.view.require_current("src")
        self._dst.view.require_current("dst")
        if self._held != (self._src.held("src"), self._dst.held("dst")):
            raise InvalidArgumentError(
                "the memory of src or dst lies elsewhere than when the plan was made, expected it "
                "in place. Make a new plan"
            )
        return handle

    def _lookups(self, seq_lens: Any, src: Any, dst: Any) -> _abi_plan.kvx_plan_lookups_t:
        lens = None if seq_lens is None else SeqLens.of(seq_lens)
        indices: dict[str, SlotMapping | BlockTable | SeqLens | None] = {"seq_lens": lens}
        ends = []
        for name, span, (table, slots, starts) in (
            ("src", self._src, src),
            ("dst", self._dst, dst),
        ):
            found = (
                None if table is None else span.view.table_of(table),
                None if slots is None else SlotMapping.of(slots, invalid_slot=_invalid(span)),
                None if starts is None else SeqLens.of(starts, name=f"{name}_starts"),
            )
            for field, index in zip(("block_table", "slots", "starts"), found, strict=True):
                indices[f"{name}_{field}"] = index
            ends.append(_abi_plan.kvx_end_lookup_t(*map(_abi.pointer_to, found)))
        self._check_memory(indices)
        lookups = _abi_plan.kvx_plan_lookups_t(
            seq_lens=_abi.pointer_to(lens), src=ends[0], dst=ends[1]
        )
        lookups.kept = indices
        return lookups

    def _tensors(self) -> dict[str, Any]:
        """The first tensor of each end, by name: they say where the call runs."""
        found: dict[str, Any] = {}
        for name, span in (("src", self._src), ("dst", self._dst)):
            if span.view.layers:
                found[f"{name}.layers[0].k"] = span.view.layers[0].k
            elif span.view.planes:
                found[f"{name}.planes[0]"] = span.view.planes[0]
        return found

    def _memory(self) -> Memory:
        memory: set[Memory] = {tensor.memory for tensor in self._tensors().values()}
        memory -= {Memory.HOST}
        return next(iter(memory or {Memory.HOST}))

    def _check_memory(self, indices: Any) -> None:
        if tensors := self._tensors():
            check_index_memory(indices, tensors, self._transfer)


def _closed() -> InvalidArgumentError:
    return InvalidArgumentError("the plan is closed, expected an open one. Make a new plan")


def _invalid(span: CacheSpan) -> int:
    """The slot that is skipped in slots that a run gives as numbers alone."""
    return -1 if span.slots is None else span.slots.invalid_slot


def _known(number: int) -> int | None:
    return None if number == UNKNOWN else number


def _info(info: _abi_plan.kvx_plan_info_t, planes: Any) -> PlanInfo:
    return PlanInfo(
        planes=tuple(map(_plane_info, planes)),
        on_device=bool(info.on_device),
        num_launches=info.num_launches,
        num_threads=info.num_threads,
        exact=bool(info.is_exact),
        num_sequences=info.num_sequences,
        num_tokens=_known(info.num_tokens),
        num_moved=_known(info.num_moved),
        num_null_src=_known(info.num_null_src),
        num_null_dst=_known(info.num_null_dst),
        bytes_read=_known(info.bytes_read),
        bytes_written=_known(info.bytes_written),
        copy_bytes_per_second=info.copy_bytes_per_second or None,
        seconds=info.seconds if info.copy_bytes_per_second else None,
    )


def _plane_info(plane: _abi_plan.kvx_plane_info_t) -> PlaneInfo:
    return PlaneInfo(
        layer=plane.layer,
        role=plane.role,
        joined=bool(plane.flags & JOINED),
        converts=bool(plane.flags & CONVERTS),
        exact=bool(plane.flags & EXACT),
        finds_scales=bool(plane.flags & FINDS_SCALES),
        src_dtype=DType(plane.src_dtype),
        dst_dtype=DType(plane.dst_dtype),
        num_heads=plane.num_heads,
        vector_size=plane.vector_size,
        kernel=plane.kernel.decode(),
        launch=plane.launch,
        run_bytes=plane.run_bytes,
        num_vectors=_known(plane.num_vectors),
        bytes_read=_known(plane.bytes_read),
        bytes_written=_known(plane.bytes_written),
        beside="scales" if plane.flags & OF_SCALES else "zeros" if plane.flags & OF_ZEROS else None,
    )
