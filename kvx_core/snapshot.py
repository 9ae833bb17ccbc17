"""Snapshot: tokens of one sequence at rest, between the caches of any engines and a file.

A snapshot has the keys and values of a run of tokens, for some layers and some heads of a model:
per layer (num_tokens, num_kv_heads, head_dim), in the dtype of the cache that it was captured from.
Block size, layout and place are left behind; facts and scales travel with it. The file is
safetensors. Which file belongs to which prompt is for kvx_core.stores.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from kvx_core.cache import CacheDesc
from kvx_core.descriptors import (
    BlockTable,
    ScaleDesc,
    SeqLens,
    TensorDesc,
)
from kvx_core.errors import (
    InvalidArgumentError,
    KvxError,
    OutOfRangeError,
    UnsupportedError,
)
from kvx_core.facts import CacheFacts, compare
from kvx_core.migrate import copy_tokens
from kvx_core.ops import device_status
from kvx_core.tensors import int64_array, is_torch, read_array, row_major
from kvx_core.types import BlockTableFormat, DType, Layout, Memory, ScaleGranularity
from kvx_core.view import CacheView

FORMAT = 1
VALUES = "values"  # the encoding of numbers; any other name is that of opaque rows, U8

_ALIGN = 64  # bytes, of each tensor in memory
_PAGE = 4096
_FP8 = (DType.F8_E4M3, DType.F8_E5M2)
_ROWS = (DType.F16, DType.BF16, DType.F32, *_FP8, DType.U8)  # what K and V may be
_SAFETENSORS = {dtype.name: dtype for dtype in _ROWS} | {"I64": DType.S64}
_THREADED_BYTES = 4 << 20  # below it, starting threads costs more than they save

_Bytes = npt.NDArray[np.uint8]
_T = TypeVar("_T")
_R = TypeVar("_R")


class StoreError(KvxError, RuntimeError):
    """Stored tokens cannot be read, written, or used here."""


class CorruptError(StoreError):
    """A file is not what it says it is; it is of no use to anyone."""


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
                        f"{tensor.dtype.name}, expected U8 for opaque rows and only for them"
                    )

    @property
    def heads(self) -> tuple[int, int]:
        """The heads of the model that are held here: first, and one past the last."""
        first = self.view.facts.first_kv_head or 0
        return first, first + self.view.layers[0].num_kv_heads

    def of(self, layers: Sequence[int]) -> Section:
        """The same for some of its layers."""
        return replace(self, layers=tuple(layers), view=_layers_of(self, layers))

    def null_blocks(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which blocks of tokens `start` to `stop` stand for nothing.

        Raises OutOfRangeError if the table does not reach so far.
        """
        block_size, table = self.view.layers[0].block_size, self.block_table
        if table is None:
            _check_reach(stop, block_size)
            return np.zeros(1, np.bool_)
        rows = _indices(table).reshape(2 if table.format is BlockTableFormat.KV_OFFSETS else 1, -1)
        if table.format is BlockTableFormat.RAGGED:
            block_size = 1  # an entry per token
        _check_reach(stop, rows.shape[1] * block_size)
        used = rows[:, start // block_size : -(-stop // block_size)]
        if table.format is BlockTableFormat.KV_OFFSETS:
            null: npt.NDArray[np.bool_] = (used == -1).any(0)
        else:
            null = (used[0] < 0) | (used[0] == self.view.null_block_id)
        return null


@dataclass(frozen=True, slots=True)
class Part:
    """Layers of a snapshot that share facts and encoding: what was one section."""

    layers: tuple[int, ...]
    facts: CacheFacts
    encoding: str


@dataclass(frozen=True, slots=True)
class Header:
    """What a snapshot is of, without its tokens and tensors."""

    start: int  # position in the sequence of the first token
    prefix: str  # stands for the tokens before it; what it is, is the store's affair
    heads: tuple[int, int]
    parts: tuple[Part, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted(layer for part in self.parts for layer in part.layers))


@dataclass(frozen=True, slots=True)
class _FileHeader:
    """The header as a file has it."""

    header: Header
    checksums: dict[str, str]


_FILE_HEADER = TypeAdapter(_FileHeader)


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor: type, shape, and where its bytes begin in the file or in memory."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    checksum: str = ""  # in a file

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Tokens of one sequence in some layers and heads; the data in memory, or still in a file."""

    header: Header
    tokens: npt.NDArray[np.int64]
    tensors: dict[str, Stored] = field(repr=False)  # "tokens" is among them
    memory: _Bytes | None = field(default=None, repr=False, compare=False)
    path: Path | None = None  # that it was opened from

    @classmethod
    def capture(
        cls,
        tokens: Sequence[int] | npt.NDArray[Any],
        sections: Sequence[Section],
        *,
        start: int = 0,
        prefix: str = "",
    ) -> Self | None:
        """Copies tokens of a sequence out of caches, into new memory of the host.

        tokens:   their ids; the first one is token `start` of the sequence in every section
        sections: all hold the same heads, none a layer of another
        Returns when the caches may change again; None if a block of these tokens is null.
        Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        snapshot = cls.reserve(tokens, sections, start=start, prefix=prefix)
        if snapshot is not None:
            for section in sections:
                snapshot.fill(section)
            snapshot.settle(sections)
        return snapshot

    @classmethod
    def reserve(
        cls,
        tokens: Sequence[int] | npt.NDArray[Any],
        sections: Sequence[Section],
        *,
        start: int = 0,
        prefix: str = "",
    ) -> Self | None:
        """Memory for what `capture` copies, to be copied layer by layer.

        `fill` each layer once and `settle` before the caches change. Arguments, result and errors
        are those of `capture`.
        """
        ids = token_ids(tokens)
        _check_capture(ids, sections)
        stop = start + len(ids)
        if any(section.null_blocks(start, stop).any() for section in sections):
            return None
        header = Header(
            start=start,
            prefix=prefix,
            heads=sections[0].heads,
            parts=tuple(Part(s.layers, s.view.facts, s.encoding) for s in sections),
        )
        tensors, num_bytes = _placed(
            entry for section in sections for entry in _to_capture(section, len(ids))
        )
        tensors["tokens"] = Stored(DType.S64, ids.shape, num_bytes)
        num_bytes += tensors["tokens"].num_bytes
        memory = host_memory(num_bytes, pinned=_device(sections) is not None)
        snapshot = cls(header, ids, tensors, memory)
        snapshot.array("tokens")[:] = ids
        return snapshot

    def fill(self, section: Section) -> None:
        """Copies the layers of a section, which was reserved, or is `of` some layers of one.

        Mutates this snapshot. A device is not waited for.
        Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        num_tokens, device = len(self.tokens), _device([section])
        copy = _Copy(
            lens=_ints([num_tokens], device),
            src_starts=_ints([self.header.start], device),
            table=_table_on(section.block_table, device),
        )
        copy.run(_bare(section.view), self._view(section.layers, scales=False), into_table=False)
        if _has_row_scales(section.view):
            scales = _scale_rows(self._view(section.layers))
            copy.run(_scale_rows(section.view), scales, into_table=False)
            return
        for kind in _SCALE_KINDS:
            for layer, scale in zip(section.layers, _scales(section.view, kind), strict=True):
                if scale is not None:
                    self.array(f"layers.{layer}.{kind}")[:] = _scale_values(scale)

    def settle(self, sections: Sequence[Section]) -> None:
        """Waits until what `fill` copies is here. Raises OutOfRangeError."""
        if _device(sections) is not None:
            device_status()

    @classmethod
    def open(cls, path: Path) -> Self:
        """The snapshot in a file; only its header and tokens are read.

        Raises CorruptError if the file is not what `save` wrote, StoreError if it cannot be read.
        """
        try:
            with safe_open(path, "numpy", backend="pread") as file:
                metadata = file.metadata() or {}
                slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
                found = [(name, s.get_dtype(), tuple(s.get_shape())) for name, s in slices]
            with path.open("rb") as raw:
                offset = 8 + int.from_bytes(raw.read(8), "little")
            text = metadata.get("header", "")
            stored = _FILE_HEADER.validate_json(text, strict=True)
        except SafetensorError as error:
            raise CorruptError(f"{path} is not a safetensors file: {error}") from None
        except ValidationError as error:
            wrong = error.errors()[0]
            raise CorruptError(
                f"{path} has no header of a KVX snapshot: {wrong['loc']}: {wrong['msg']}"
            ) from None
        except (OSError, MemoryError) as error:
            raise StoreError(f"{path} cannot be read: {error}") from None
        tensors = {}
        for name, code, shape in found:
            if code not in _SAFETENSORS:
                raise CorruptError(f"{path}: {name} is {code}, expected {', '.join(_SAFETENSORS)}")
            checksum = stored.checksums.get(name, "")
            tensors[name] = Stored(_SAFETENSORS[code], shape, offset, checksum)
            offset += tensors[name].num_bytes
        if metadata.get("digest") != _digest(text, tensors):
            raise CorruptError(f"{path}: its header has been changed since it was written")
        snapshot = cls(stored.header, np.empty(0, np.int64), tensors, path=path)
        reason = _inconsistency(stored.header, tensors)
        if reason:
            raise CorruptError(f"{path}: {reason}")
        return replace(snapshot, tokens=snapshot._read(["tokens"], None).array("tokens"))

    def save(self, path: Path) -> None:
        """Writes the snapshot; the file is not synced. Raises StoreError if it cannot be written.

        path: overwritten if it is there
        """
        names = list(self.tensors)
        sums = _in_threads(lambda name: _checksum(self._bytes(name)), names, self.num_bytes)
        checksums = dict(zip(names, sums, strict=True))
        text = _FILE_HEADER.dump_json(_FileHeader(self.header, checksums)).decode()
        specs = {
            name: TensorSpec(
                dtype=tensor.dtype.array_name,
                shape=tensor.shape,
                data_ptr=self._address(name),
                data_len=tensor.num_bytes,
            )
            for name, tensor in self.tensors.items()
        }
        digest = _digest(text, self.tensors)
        metadata = {"kvx_snapshot": str(FORMAT), "header": text, "digest": digest}
        try:
            serialize_file(specs, path, metadata)
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{path} cannot be written: {error}") from None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def names_of(self, layers: Iterable[int]) -> list[str]:
        """The tensors of these layers."""
        names = (f"layers.{layer}.{kind}" for layer in layers for kind in ("k", "v", *_SCALE_KINDS))
        return [name for name in names if name in self.tensors]

    def memory_for(self, layers: Iterable[int]) -> int:
        """Bytes of memory that `read` needs for these layers, a multiple of a page."""
        num_bytes = _placed((n, *_type(self.tensors[n])) for n in self.names_of(layers))[1]
        return -(-num_bytes // _PAGE) * _PAGE

    def read(self, layers: Iterable[int], memory: _Bytes | None = None) -> Snapshot:
        """The same with the data of some layers in memory, every byte of it checked.

        memory: of at least memory_for(layers) bytes, from host_memory; None: new memory
        Raises CorruptError if the data is not what was written, StoreError if it cannot be read.
        """
        return self._read(self.names_of(layers), memory)

    def mismatch(self, section: Section) -> list[str]:
        """Why the section cannot take its layers from here: a sentence each, or none.

        Layers and heads that only one of them has are no reason.
        """
        reasons = []
        facts = section.view.facts
        held = dict(zip(section.layers, section.view.layers, strict=True))
        for part in self.header.parts:
            shared = [i for i in part.layers if i in held and f"layers.{i}.k" in self.tensors]
            if not shared:
                continue
            if part.encoding != section.encoding:
                reasons.append(
                    f"layers {shared} are stored as {part.encoding!r}, expected "
                    f"{section.encoding!r} as the cache is"
                )
            # Layers and heads are matched by their indices, one by one.
            of_file = replace(
                part.facts,
                num_layers=facts.num_layers,
                first_layer=facts.first_layer,
                first_kv_head=facts.first_kv_head,
            )
            reasons += compare(of_file, facts)
            for layer in shared:
                reasons += self._unlike(layer, held[layer])
        return reasons

    def restore(self, section: Section, start: int, stop: int, *, stream: int | None = None) -> int:
        """Copies tokens `start` to `stop` into the layers and heads that both have.

        start, stop: within this snapshot
        Mutates the section's cache, except null blocks. Waits for a device.
        Returns the bytes of these tokens as the section stores them.
        Raises StoreError if `mismatch` has a reason, InvalidArgumentError, UnsupportedError,
        OutOfRangeError.
        """
        reasons = self.mismatch(section)
        if reasons:
            raise StoreError(f"{self.path or 'the snapshot'}: {'; '.join(reasons)}")
        layers = [layer for layer in section.layers if f"layers.{layer}.k" in self.tensors]
        first = max(self.header.heads[0], section.heads[0])
        num_heads = min(self.header.heads[1], section.heads[1]) - first
        if not layers or num_heads <= 0 or start >= stop:
            return 0
        device = _device([section])
        view = _layers_of(section, layers)
        copy = _Copy(
            lens=_ints([stop - start], device),
            src_starts=_ints([start - self.header.start], device),
            dst_starts=_ints([start], device),
            src_head=first - self.header.heads[0],
            dst_head=first - section.heads[0],
            num_heads=num_heads,
            table=_table_on(section.block_table, device),
            stream=stream,
        )
        into_rows = _has_row_scales(view)
        if into_rows and self._has_row_scales(layers, view):
            copy.run(self._view(layers, scales=False), _bare(view))
            copy.run(_scale_rows(self._view(layers)), _scale_rows(view))
        else:
            copy.run(self._view(layers), view, find_scales=into_rows)
        if device is not None:
            device_status(stream)  # what it reads is freed now
        return (stop - start) * view.bytes_per_token(num_heads)

    def array(self, name: str) -> npt.NDArray[Any]:
        """A tensor in memory; BF16 and FP8, which numpy has not, as another type of their size."""
        tensor = self.tensors[name]
        return self._bytes(name).view(_NUMPY[tensor.dtype.itemsize]).reshape(tensor.shape)

    def _bytes(self, name: str) -> _Bytes:
        assert self.memory is not None, "the snapshot is still in its file: read it"
        tensor = self.tensors[name]
        return self.memory[tensor.offset : tensor.offset + tensor.num_bytes]

    def _address(self, name: str) -> int:
        assert self.memory is not None, "the snapshot is still in its file: read it"
        address: int = self.memory.ctypes.data
        return address + self.tensors[name].offset

    def _read(self, names: Sequence[str], memory: _Bytes | None) -> Snapshot:
        tensors, num_bytes = _placed((name, *_type(self.tensors[name])) for name in names)
        assert self.path is not None
        assert self.memory is None, "the snapshot is in memory already"
        try:
            if memory is None:
                memory = host_memory(num_bytes)
            snapshot = replace(self, tensors=tensors, memory=memory)
            with self.path.open("rb", buffering=0) as file:

                def read(name: str) -> bool:
                    data = snapshot._bytes(name)
                    _read_at(file.fileno(), data, self.tensors[name].offset)
                    return _checksum(data) == self.tensors[name].checksum

                good = _in_threads(read, names, num_bytes)
        except EOFError:
            raise CorruptError(f"{self.path} is shorter than its header says") from None
        except (OSError, MemoryError) as error:
            raise StoreError(f"{self.path} cannot be read: {error}") from None
        for name, is_good in zip(names, good, strict=True):
            if not is_good:
                raise CorruptError(
                    f"{self.path}: the bytes of {name} have changed since they were written"
                )
            if name.endswith("_scale") and not _are_good(snapshot.array(name)):
                raise CorruptError(f"{self.path}: {name} is not finite and greater than zero")
        return snapshot

    def _unlike(self, layer: int, cache: CacheDesc) -> list[str]:
        """Why rows of this layer cannot be rows of `cache`."""
        reasons = []
        dims = {"k": cache.head_dim, "v": cache.v_head_dim}
        for kind, head_dim in dims.items():
            tensor = self.tensors.get(f"layers.{layer}.{kind}")
            stored = 0 if tensor is None else tensor.shape[2]
            if stored != head_dim:
                reasons.append(
                    f"layers.{layer}.{kind} has head_dim {stored}, expected {head_dim} as the "
                    "cache has"
                )
        return reasons

    def _view(self, layers: Sequence[int], *, scales: bool = True) -> CacheView:
        """Layers in memory as a dense cache of one block."""

        def cache(layer: int) -> CacheDesc:
            v = f"layers.{layer}.v"
            k = self._rows(f"layers.{layer}.k")
            return CacheDesc.from_kv(k, self._rows(v) if v in self.tensors else None)

        def scales_of(kind: str) -> tuple[ScaleDesc | None, ...] | None:
            return tuple(self._scale(f"layers.{i}.{kind}") for i in layers) if scales else None

        return CacheView(
            layers=tuple(map(cache, layers)),
            facts=CacheFacts(),
            k_scales=scales_of("k_scale"),
            v_scales=scales_of("v_scale"),
            dense=True,
        )

    def _rows(self, name: str) -> TensorDesc:
        tensor = self.tensors[name]
        shape = (1, *tensor.shape)
        return TensorDesc(
            dtype=tensor.dtype,
            layout=Layout.BLOCK_NHD,
            memory=Memory.HOST,
            shape=shape,
            stride=row_major(shape),
            data=self._address(name),
            owner=self.memory,
        )

    def _scale(self, name: str) -> ScaleDesc | None:
        if name not in self.tensors:
            return None
        scale = self.array(name)
        if scale.ndim == 2:
            return ScaleDesc.of(scale[None], ScaleGranularity.PER_TOKEN_HEAD)
        per_head = len(scale) > 1
        return ScaleDesc.of(
            scale, ScaleGranularity.PER_HEAD if per_head else ScaleGranularity.PER_TENSOR
        )

    def _has_row_scales(self, layers: Sequence[int], view: CacheView) -> bool:
        """Whether rows and scales of `view` can take these layers' byte for byte."""
        return all(
            self.tensors[f"layers.{layer}.{kind}"].dtype is tensor.dtype
            and len(self.tensors.get(f"layers.{layer}.{kind}_scale", _NOTHING).shape) == 2
            for layer, cache in zip(layers, view.layers, strict=True)
            for kind, tensor in cache.tensors.items()
        ) and all(
            scale is None or scale.dtype is DType.F32
            for kind in _SCALE_KINDS
            for scale in _scales(view, kind)
        )


@dataclass(frozen=True, slots=True)
class _Copy:
    """One sequence from one view to another; the table belongs to the end that is a cache."""

    lens: SeqLens
    src_starts: SeqLens
    table: BlockTable | None
    dst_starts: SeqLens | None = None
    src_head: int = 0
    dst_head: int = 0
    num_heads: int | None = None
    stream: int | None = None

    def run(
        self,
        src: CacheView,
        dst: CacheView,
        *,
        into_table: bool = True,
        find_scales: bool = False,
    ) -> None:
        """Facts have been compared, layer by layer, so they are not here."""
        copy_tokens(
            src.at(
                block_table=None if into_table else self.table,
                starts=self.src_starts,
                head_start=self.src_head,
            ),
            dst.at(
                block_table=self.table if into_table else None,
                starts=self.dst_starts,
                head_start=self.dst_head,
            ),
            self.lens,
            num_heads=self.num_heads,
            find_scales=find_scales,
            stream=self.stream,
        )


_SCALE_KINDS = ("k_scale", "v_scale")
_NUMPY = {1: "u1", 2: "f2", 4: "f4", 8: "i8"}  # by size
_NOTHING = Stored(DType.U8, (), 0)


def token_ids(tokens: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Token ids as an array. Raises InvalidArgumentError for what is not a list of integers."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InvalidArgumentError(
                f"tokens is an array of {tokens.dtype} with {tokens.ndim} axes, expected integers "
                "with 1 axis"
            )
        return tokens.astype("<i8", copy=False)
    return int64_array("tokens", tokens)


def stored_tokens(path: Path, num_tokens: int) -> npt.NDArray[np.int64]:
    """The tokens in a file, of which there are so many; of its header little else is checked.

    Raises CorruptError if it is not a file of a snapshot, StoreError if it cannot be read.
    """
    try:
        with safe_open(path, "numpy", backend="pread") as file:
            shape = file.get_slice("tokens").get_shape()
            if shape != [num_tokens]:
                raise CorruptError(f"{path} has tokens of shape {shape}, expected {num_tokens}")
            return token_ids(file.get_tensor("tokens"))
    except (SafetensorError, InvalidArgumentError) as error:
        raise CorruptError(f"{path} is not a file of a snapshot: {error}") from None
    except (OSError, MemoryError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from None


def host_memory(num_bytes: int, *, pinned: bool = False) -> _Bytes:
    """New memory of the host, from the start of a page; contents arbitrary.

    pinned: reachable by CUDA devices; needs torch
    """
    if pinned:
        import torch

        buffer: _Bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return buffer
    raw = np.empty(num_bytes + _PAGE, np.uint8)
    skip = -raw.__array_interface__["data"][0] % _PAGE
    return raw[skip : skip + num_bytes]


def _check_capture(ids: npt.NDArray[np.int64], sections: Sequence[Section]) -> None:
    if not len(ids):
        raise InvalidArgumentError("tokens is empty, expected at least 1 token")
    if not sections:
        raise InvalidArgumentError("sections is empty, expected at least 1 section")
    layers = [layer for section in sections for layer in section.layers]
    if len(set(layers)) != len(layers):
        raise InvalidArgumentError(f"sections have the layers {layers}, expected each once")
    for section in sections:
        if section.heads != sections[0].heads:
            raise InvalidArgumentError(
                f"sections have the heads {section.heads} and {sections[0].heads}, expected the "
                "same. Capture them apart"
            )
        wrong = compare(section.view.facts, section.view.facts)
        if wrong:
            raise InvalidArgumentError(wrong[0])


def _to_capture(section: Section, num_tokens: int) -> Iterator[tuple[str, DType, tuple[int, ...]]]:
    """Name, type and shape of each tensor that a section needs."""
    num_heads = section.view.layers[0].num_kv_heads
    for layer, cache in zip(section.layers, section.view.layers, strict=True):
        yield f"layers.{layer}.k", cache.k.dtype, (num_tokens, num_heads, cache.head_dim)
        if cache.v is not None:
            yield f"layers.{layer}.v", cache.v.dtype, (num_tokens, num_heads, cache.v_head_dim)
    for kind in _SCALE_KINDS:
        for layer, scale in zip(section.layers, _scales(section.view, kind), strict=True):
            if scale is not None:
                yield f"layers.{layer}.{kind}", DType.F32, _scale_shape(scale, num_tokens)


def _scale_shape(scale: ScaleDesc, num_tokens: int) -> tuple[int, ...]:
    if scale.granularity is ScaleGranularity.PER_TENSOR:
        return (1,)
    if scale.granularity is ScaleGranularity.PER_HEAD:
        return scale.shape
    if scale.granularity is ScaleGranularity.PER_TOKEN_HEAD:
        return (num_tokens, scale.shape[-1])
    raise UnsupportedError(
        f"the cache has scales {scale.granularity.name}, expected PER_TENSOR, PER_HEAD or "
        "PER_TOKEN_HEAD, which mean the same without blocks"
    )


def _placed(
    entries: Iterable[tuple[str, DType, tuple[int, ...]]],
) -> tuple[dict[str, Stored], int]:
    """Tensors one after the other in memory, and the bytes that they take."""
    tensors: dict[str, Stored] = {}
    offset = 0
    for name, dtype, shape in entries:
        tensors[name] = Stored(dtype, shape, offset)
        offset += -(-tensors[name].num_bytes // _ALIGN) * _ALIGN
    return tensors, offset


def _type(tensor: Stored) -> tuple[DType, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


def _inconsistency(header: Header, tensors: dict[str, Stored]) -> str | None:
    """What in a header cannot be, or None."""
    layers = [layer for part in header.parts for layer in part.layers]
    tokens = tensors.get("tokens", _NOTHING)
    if tokens.dtype is not DType.S64 or len(tokens.shape) != 1 or not tokens.shape[0]:
        return f"tokens is {tokens.dtype.name} {tokens.shape}, expected I64 of 1 axis"
    if not layers or len(set(layers)) != len(layers) or min(layers) < 0:
        return f"its layers are {layers}, expected indices of layers of the model, each once"
    first, last = header.heads
    if header.start < 0 or not 0 <= first < last:
        return f"start is {header.start}, heads are {header.heads}, expected a range of each"
    rows = (tokens.shape[0], last - first)
    for part in header.parts:
        for layer in part.layers:
            for kind in ("k", "v"):
                name = f"layers.{layer}.{kind}"
                if name not in tensors and kind == "v":
                    continue
                stored = tensors.get(name, _NOTHING)
                if (
                    stored.shape[:2] != rows
                    or len(stored.shape) != 3
                    or not stored.shape[2]
                    or stored.dtype not in _ROWS
                    or (stored.dtype is DType.U8) is (part.encoding == VALUES)
                ):
                    return (
                        f"{name} is {stored.dtype.name} {stored.shape}, expected {rows} and a "
                        f"head_dim, of a dtype of {part.encoding!r}"
                    )
                scale = tensors.get(f"{name}_scale")
                if scale is not None and (
                    scale.dtype is not DType.F32
                    or stored.dtype not in _FP8
                    or scale.shape not in ((1,), rows[1:], rows)
                ):
                    return (
                        f"{name}_scale is {scale.dtype.name} {scale.shape} for {name} of "
                        f"{stored.dtype.name}, expected F32 (1,), {rows[1:]} or {rows} for FP8"
                    )
    return None


def _layers_of(section: Section, layers: Sequence[int]) -> CacheView:
    """The section's view, of some of its layers only."""
    if tuple(layers) == section.layers:
        return section.view
    view = section.view
    at = [section.layers.index(layer) for layer in layers]
    return replace(
        view,
        layers=tuple(view.layers[i] for i in at),
        k_scales=tuple(_scales(view, "k_scale")[i] for i in at),
        v_scales=tuple(_scales(view, "v_scale")[i] for i in at),
    )


def _bare(view: CacheView) -> CacheView:
    """The view without scales: its bytes as they are."""
    if view.k_scales is None and view.v_scales is None:
        return view
    return replace(view, k_scales=None, v_scales=None)


def _scales(view: CacheView, kind: str) -> tuple[ScaleDesc | None, ...]:
    """The scales of K or V, one per layer; those that others than FP8 may have are 1 (spec 6.6)."""
    scales: Sequence[ScaleDesc | None] = getattr(view, f"{kind}s") or (None,) * len(view.layers)
    tensors = (layer.tensors.get(kind[0]) for layer in view.layers)
    return tuple(
        scale if tensor is not None and tensor.dtype in _FP8 else None
        for scale, tensor in zip(scales, tensors, strict=True)
    )


def _has_row_scales(view: CacheView) -> bool:
    """Whether the scales are per token and head. Raises UnsupportedError if only some are."""
    per_row = {
        scale is not None and scale.granularity is ScaleGranularity.PER_TOKEN_HEAD
        for i, layer in enumerate(view.layers)
        for scale in (_scales(view, f"{kind}_scale")[i] for kind in layer.tensors)
    }
    if len(per_row) == 2:
        raise UnsupportedError(
            "some scales of the section are PER_TOKEN_HEAD, expected all or none. Make a section "
            "of each"
        )
    return per_row.pop()


def _scale_rows(view: CacheView) -> CacheView:
    """Scales per token and head as a cache of their own, with head_dim 1."""

    def rows(scale: ScaleDesc | None) -> TensorDesc | None:
        if scale is None:
            return None
        return TensorDesc(
            dtype=scale.dtype,
            layout=Layout.BLOCK_NHD,
            memory=scale.memory,
            shape=(*scale.shape, 1),
            stride=(*scale.stride, 1),
            data=scale.data,
            writable=scale.writable,
            owner=scale.owner,
        )

    layers = []
    for k_scale, v_scale in zip(_scales(view, "k_scale"), _scales(view, "v_scale"), strict=True):
        k = rows(k_scale)
        assert k is not None  # by _has_row_scales
        layers.append(CacheDesc.from_kv(k, rows(v_scale)))
    return replace(_bare(view), layers=tuple(layers))


def _scale_values(scale: ScaleDesc) -> npt.NDArray[np.float32]:
    """Scales as float32, flat; those of a torch tensor are read back from its device."""
    if scale.memory is Memory.DEVICE and is_torch(scale.owner):
        values: npt.NDArray[np.float32] = scale.owner.float().cpu().numpy()
    else:
        values = scale.to_numpy().astype(np.float32)
    if not _are_good(values):
        raise InvalidArgumentError(
            f"a scale of the cache is {values}, expected it finite and greater than zero (spec 6.6)"
        )
    return values.reshape(-1)


def _are_good(scales: npt.NDArray[np.float32]) -> bool:
    return bool((np.isfinite(scales) & (scales > 0)).all())


def _device(sections: Sequence[Section]) -> Any:
    """The torch device that copies of these caches run on; None: the host."""
    k = sections[0].view.layers[0].k
    if k.memory is Memory.HOST:
        return None
    if not is_torch(k.owner):
        raise UnsupportedError(
            f"the cache's memory belongs to a {type(k.owner).__name__} on a device, expected a "
            "torch.Tensor there"
        )
    return k.owner.device


def _ints(numbers: Sequence[int], device: Any) -> SeqLens:
    """Numbers where a copy reads them."""
    if device is None:
        return SeqLens.of(numbers)
    import torch

    return SeqLens.of(torch.tensor(numbers, dtype=torch.int64, device=device))


def _table_on(table: BlockTable | None, device: Any) -> BlockTable | None:
    """The table where a copy reads it."""
    if table is None or device is None or table.memory is not Memory.HOST:
        return table
    import torch

    if table.format is not BlockTableFormat.PACKED:
        raise UnsupportedError(
            f"section.block_table is {table.format.name} on the host, expected it on the device "
            "as the cache is"
        )
    return BlockTable.packed(torch.from_numpy(_indices(table)).reshape(1, -1).to(device))


def _indices(table: BlockTable) -> npt.NDArray[Any]:
    """The entries of a table, a copy. A torch tensor is read back from its device."""
    if table.memory is Memory.DEVICE and is_torch(table.owner):
        on_host: npt.NDArray[Any] = table.owner.cpu().numpy().reshape(-1)
        return on_host
    shape, stride = (table.indices_count,), (1,)
    return read_array(
        "block_table.indices", table.indices, shape, stride, table.index_dtype, table.memory
    )


def _check_reach(stop: int, num_tokens: int) -> None:
    if stop > num_tokens:
        raise OutOfRangeError(
            f"section.block_table holds {num_tokens} tokens, expected at least {stop}"
        )


def _digest(text: str, tensors: dict[str, Stored]) -> str:
    """Of all that a file's header says; the header has checksums of the data."""
    types = sorted(f"{name} {t.dtype.name} {list(t.shape)}" for name, t in tensors.items())
    return hashlib.sha256("\n".join([text, *types]).encode()).hexdigest()


def _checksum(data: _Bytes) -> str:
    """CRC-32: sees what disks and networks do, at more than twice the speed of SHA-256."""
    return f"{zlib.crc32(data.data):08x}"


def _read_at(file: int, data: _Bytes, offset: int) -> None:
    """Fills `data`. Raises EOFError, OSError."""
    view = data.data
    while view:
        count = os.preadv(file, [view], offset)
        if not count:
            raise EOFError
        view, offset = view[count:], offset + count


def _in_threads(work: Callable[[_T], _R], items: Sequence[_T], num_bytes: int) -> list[_R]:
    """[work(item) for item in items]; for many bytes, several at once."""
    num_threads = min(os.cpu_count() or 1, 4, len(items))
    if num_bytes < _THREADED_BYTES or num_threads < 2:
        return [work(item) for item in items]
    results: list[Any] = [None] * len(items)

    def work_on(first: int) -> None:
        for i in range(first, len(items), num_threads):
            results[i] = work(items[i])

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work_on, range(num_threads)))
    return results
