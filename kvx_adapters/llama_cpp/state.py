"""llama.cpp's sequence states: what llama_state_seq_get_data, _set_data and _save_file exchange.

A state is one piece of bytes: the positions of a sequence's tokens, then their K and V in all
layers, in the cache's own types. Take it with Memory.state: keys that wait for their rotation do
not show in it. `State.read` checks every length in it and describes the rows in place, `State.new`
makes one of zeros to migrate into. Little endian, without padding.

    u32 0xaf143cd8, i32 sequence                            as data, or
    u32 "ggsq", u32 3, u32 tokens, i32 token ids            as a file
    then for each cache (a model with sliding windows has two):
    u32 streams, and for each stream u32 cells; nothing more for a stream without cells
      per cell:    i32 position, u32 1, i32 sequence
      u32 v_transposed, u32 layers
      per layer:   i32 type of K, u64 bytes of a row, a row per cell
      per layer:   i32 type of V, u64 bytes of a row, a row per cell; or, transposed,
                   i32 type of V, u32 bytes of a number, u32 numbers, that many rows of all cells
Source: llama.cpp v0.5.0 src/llama-kv-cache.cpp, state_write, state_write_meta, state_write_data;
        src/llama-context.cpp, state_seq_get_data, state_seq_save_file
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvx_adapters.llama_cpp.cells import require_same_head_dim, shaped
from kvx_adapters.llama_cpp.ggml_types import (
    cache_type,
    dtype_of,
    ggml_type,
    row_bytes,
)
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    DType,
    InvalidArgumentError,
    UnsupportedError,
)
from kvx_core.argument_checks import flag, integer, plural

_DATA, _FILE, _FILE_VERSION = 0xAF143CD8, 0x67677371, 3
_MOST_STREAMS = 256  # LLAMA_MAX_SEQ
_CELL = struct.Struct("<iIi")
_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StateCells:
    """The tokens of a sequence in one cache.

    positions: (num_tokens,) int32, of the tokens in the order of the state's rows
    """

    positions: npt.NDArray[np.int32]
    v_transposed: bool
    num_streams: int
    layers: tuple[CacheDesc, ...]  # a block of num_tokens tokens each; none without tokens

    def span(self, facts: CacheFacts) -> CacheSpan:
        """The tokens in order of their positions: one end of a migration.

        facts: as of the cache: see `cache_facts`
        It says at which position they begin. Raises InvalidArgumentError for a cache without
        tokens, or without some in the middle.
        """
        if not self.layers:
            raise InvalidArgumentError(
                "the state holds no token of this sequence, expected at least one. Take it after "
                "llama_decode"
            )
        first, last = int(self.positions.min()), int(self.positions.max())
        if last - first >= len(self.positions):
            raise InvalidArgumentError(
                f"the state holds {plural(len(self.positions), 'token')} at the positions {first} "
                f"to {last}, expected one at each: some were removed (llama_memory_seq_rm), and K "
                "of those behind is rotated for where they stand. Close the gap with "
                "llama_memory_seq_add before the state is taken"
            )
        order = np.argsort(self.positions, kind="stable")
        return CacheView(self.layers, facts).at(slots=order, first_positions=first)


@dataclass(frozen=True, slots=True)
class State:
    """The state of a sequence.

    data:   (num_bytes,) uint8, the whole state: for llama_state_seq_set_data, or for a file
    tokens: ids of a file; None: the state is not a file
    caches: one, or two of a model with sliding windows: full attention, then windows
    """

    data: _Bytes
    sequence: int | None  # as it was saved; a reader chooses its own. None in a file
    tokens: tuple[int, ...] | None
    caches: tuple[StateCells, ...]

    @classmethod
    def read(cls, data: Any, *, num_kv_heads: int, num_caches: int = 1) -> Self:
        """Describes a state in place. Nothing in it is trusted: every length is checked first.

        data:         bytes, bytearray, or (num_bytes,) uint8; kept, not copied. See Memory.state
        num_kv_heads: of every layer, llama_model_n_head_kv
        num_caches:   2 for a model with sliding windows, unless the state has windows only
        Raises InvalidArgumentError with the position of what is wrong, UnsupportedError for
        quantities that no cache has.
        """
        heads = integer("num_kv_heads", num_kv_heads, 1)
        reader = _Reader(data)
        sequence: int | None = None
        tokens: tuple[int, ...] | None = None
        magic = reader.u32("magic")
        if magic == _DATA:
            sequence = reader.i32("sequence")
        elif magic == _FILE:
            version = reader.u32("version")
            if version != _FILE_VERSION:
                raise reader.wrong("version", version, f"{_FILE_VERSION}, of llama.cpp v0.5.0")
            count = reader.u32("tokens")
            tokens = tuple(reader.array("token ids", "<i4", count).tolist())
        else:
            raise reader.wrong(
                "magic",
                hex(magic),
                f"{hex(_DATA)} of llama_state_seq_get_data or {hex(_FILE)} of a file",
            )
        caches = tuple(
            _read_cache(reader, heads, sequence)
            for _ in range(integer("num_caches", num_caches, 1, 2))
        )
        reader.require_end()
        return cls(reader.data, sequence, tokens, caches)

    @classmethod
    def new(
        cls,
        num_tokens: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        k_head_dim: int,
        v_head_dim: int,
        k_dtype: DType | str,
        v_dtype: DType | str,
        v_transposed: bool,
        sequence: int = 0,
        num_streams: int = 1,
        stream: int = 0,
        tokens: Sequence[int] | None = None,
    ) -> Self:
        """A state of one cache whose K and V are zero bytes, to migrate into.

        num_tokens:   tokens at positions 0, 1, ..
        v_transposed: as the context has it that reads the state; it refuses the other
        num_streams:  1, or n_seq_max of a context with kv_unified false
        stream:       that of `sequence` in the context
        tokens:       makes the state one of a file, with these ids
        Raises InvalidArgumentError, UnsupportedError.
        """
        count = integer("num_tokens", num_tokens, 1, 2**31 - 1)
        layers = integer("num_layers", num_layers, 1)
        streams = integer("num_streams", num_streams, 1, _MOST_STREAMS)
        chosen = integer("stream", stream, 0, streams - 1)
        heads = integer("num_kv_heads", num_kv_heads, 1)
        seq_id = integer("sequence", sequence, 0, _MOST_STREAMS - 1)
        if tokens is None:
            parts = [struct.pack("<Ii", _DATA, seq_id)]
        else:
            numbers = [integer(f"tokens[{i}]", one, 0, 2**31 - 1) for i, one in enumerate(tokens)]
            ids = np.asarray(numbers, "<i4")
            parts = [struct.pack("<III", _FILE, _FILE_VERSION, len(ids)), ids.tobytes()]
        parts.append(struct.pack("<I", streams) + bytes(4 * chosen) + struct.pack("<I", count))
        cells = np.empty((count, 3), "<i4")
        cells[:] = 0, 1, seq_id
        cells[:, 0] = np.arange(count)
        transposed = flag("v_transposed", v_transposed)
        parts += [cells.tobytes(), struct.pack("<II", transposed, layers)]
        k, v = cache_type(k_dtype, "k_dtype"), cache_type(v_dtype, "v_dtype")
        key = _rows("k", k, heads * integer("k_head_dim", k_head_dim, 1), count, False)
        value = _rows("v", v, heads * integer("v_head_dim", v_head_dim, 1), count, transposed)
        parts += [key] * layers + [value] * layers + [bytes(4 * (streams - 1 - chosen))]
        return cls.read(bytearray(b"".join(parts)), num_kv_heads=heads)


def _rows(name: str, dtype: DType, numbers: int, count: int, transposed: bool) -> bytes:
    """The header and the zero rows of K or V of one layer."""
    kind = ggml_type(dtype)
    if numbers % dtype.numbers:
        raise InvalidArgumentError(
            f"num_kv_heads times {name}_head_dim is {numbers}, expected a multiple of the "
            f"{dtype.numbers} numbers of a unit of {dtype.name.lower()}"
        )
    size = row_bytes(dtype, numbers)
    if transposed:
        return struct.pack("<iII", kind, dtype.itemsize, numbers) + bytes(size * count)
    return struct.pack("<iQ", kind, size) + bytes(size * count)


def _read_cache(reader: _Reader, heads: int, sequence: int | None) -> StateCells:
    streams = reader.u32("streams")
    if not 1 <= streams <= _MOST_STREAMS:
        raise reader.wrong("streams", streams, f"1 to {_MOST_STREAMS}")
    found: StateCells | None = None
    for stream in range(streams):
        count = reader.u32(f"cells of stream {stream}")
        if count == 0:
            continue
        if found is not None:
            raise reader.wrong(
                f"cells of stream {stream}", count, "0: a sequence is in one stream only"
            )
        found = _read_cells(reader, heads, count, streams, sequence)
    return found or StateCells(np.empty(0, np.int32), False, streams, ())


def _read_cells(
    reader: _Reader, heads: int, count: int, streams: int, sequence: int | None
) -> StateCells:
    cells = reader.array("cells", "<i4", 3 * count).reshape(count, 3)
    for column, name, expected in ((1, "sequences", 1), (2, "sequence", sequence)):
        unequal = cells[:, column] != (cells[0, 2] if expected is None else expected)
        if unequal.any():
            i = int(unequal.argmax())
            raise reader.wrong(
                f"{name} of cell {i}",
                cells[i, column],
                f"{'that of the first' if expected is None else expected}. A model whose cells "
                "have more than a position (M-RoPE) is not known here",
            )
    positions = cells[:, 0]
    if positions.min() < 0 or len(np.unique(positions)) != count:
        raise reader.wrong("positions of cells", positions.tolist()[:8], "different ones, not < 0")
    transposed = reader.u32("v_transposed")
    if transposed > 1:
        raise reader.wrong("v_transposed", transposed, "0 or 1")
    layers = reader.u32("layers")
    # Each layer has two headers of 12 bytes, so that a wrong number ends here.
    if not 1 <= layers <= reader.left // 24:
        raise reader.wrong("layers", layers, f"1 to {reader.left // 24} in the bytes that follow")
    keys = [_read_rows(reader, f"k of layer {i}", heads, count, False) for i in range(layers)]
    values = [
        _read_rows(reader, f"v of layer {i}", heads, count, bool(transposed)) for i in range(layers)
    ]
    described = tuple(CacheDesc.from_kv(k, v) for k, v in zip(keys, values, strict=True))
    require_same_head_dim(described)
    return StateCells(positions, bool(transposed), streams, described)


def _read_rows(reader: _Reader, name: str, heads: int, count: int, transposed: bool) -> Any:
    dtype = dtype_of(reader.u32(f"type of {name}"), f"type of {name}")
    if transposed:
        if dtype.numbers > 1:
            raise UnsupportedError(
                f"type of {name} is {dtype.name.lower()} and transposed, expected f32, f16 or bf16"
            )
        size, numbers = reader.u32(f"bytes of {name}"), reader.u32(f"numbers of {name}")
        if size != dtype.itemsize:
            raise reader.wrong(f"bytes of {name}", size, f"{dtype.itemsize} of a {dtype.name}")
    else:
        size = reader.u64(f"bytes of a row of {name}")
        units, rest = divmod(size, dtype.itemsize)
        numbers = units * dtype.numbers
        if rest:
            raise reader.wrong(
                f"bytes of a row of {name}", size, f"whole units of {dtype.itemsize} bytes"
            )
    if numbers == 0 or numbers % (heads * dtype.numbers):
        raise reader.wrong(
            f"numbers of {name}", numbers, f"num_kv_heads, {heads}, times a head_dim of whole units"
        )
    flat = reader.array(f"rows of {name}", "u1", count * row_bytes(dtype, numbers))
    return shaped(name, flat, dtype, (1, count, heads, numbers), transposed)


class _Reader:
    """Reads numbers and arrays of a state from its beginning, none beyond its end."""

    def __init__(self, data: Any) -> None:
        try:
            found = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data
        except (TypeError, ValueError):
            found = np.empty(0)
        if found.dtype != np.uint8 or found.ndim != 1 or not found.flags.c_contiguous:
            raise InvalidArgumentError(
                f"data is {type(data).__name__}, expected bytes or a contiguous (num_bytes,) uint8"
            )
        self.data: _Bytes = found
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that are not yet read."""
        return len(self.data) - self._at

    def array(self, name: str, kind: str, count: int) -> npt.NDArray[Any]:
        """The next `count` numbers, in place."""
        size = count * np.dtype(kind).itemsize
        if size > self.left:
            raise InvalidArgumentError(
                f"data has {self.left} bytes left at byte {self._at}, expected {size} for the "
                f"{name}: it is cut off, or a length before it is wrong"
            )
        found = self.data[self._at : self._at + size].view(kind)
        self._at += size
        return found

    def u32(self, name: str) -> int:
        return int(self.array(name, "<u4", 1)[0])

    def i32(self, name: str) -> int:
        return int(self.array(name, "<i4", 1)[0])

    def u64(self, name: str) -> int:
        return int(self.array(name, "<u8", 1)[0])

    def wrong(self, name: str, value: object, expected: str) -> InvalidArgumentError:
        """The exception for a number that was just read."""
        return InvalidArgumentError(
            f"data: {name} is {value} before byte {self._at}, expected {expected}"
        )

    def require_end(self) -> None:
        if self.left:
            raise InvalidArgumentError(
                f"data has {self.left} bytes behind the state's end at byte {self._at}, expected "
                "none. A model with sliding windows has two caches: num_caches=2"
            )
