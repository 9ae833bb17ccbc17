"""The keys, or the values, of all layers as they are stored: a row per token.

A layer is a cache of blocks of one token, so that write_kv encodes new tokens into it and gather_kv
decodes any range of it; a row holds a token's heads one after the other. Where units span heads, it
is described as one head of all numbers. FP8 and S8 have a float32 scale
per token and head beside it, which the write finds; other formats have theirs inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvx_core.argument_checks import format_repr, product
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.scales import ScaleDesc
from kvx_core.desc.tensor_desc import TensorDesc, describe
from kvx_core.errors import InvalidArgumentError, KvxError, UnsupportedError
from kvx_core.ops.token_plans import GatherPlan, WritePlan
from kvx_core.types import DType, Layout, ScaleGranularity

_ROWS_BYTES = 1 << 20  # of float32 numbers that are decoded at once where units span heads


class KvStorage(NamedTuple):
    """Tokens of one layer as they are stored, zero-copy: views of the store's buffers.

    data:     (num_heads, tokens, head_dim) of the format's torch dtype; where torch has none, such
              as for Q8_0, (num_heads, tokens, bytes) of uint8. Heads of a token are neighbours.
              Where units span heads, (1, tokens, bytes of all heads)
    encoding: the format
    scale:    of FP8 and S8: (num_heads, tokens), float32, value = stored * scale; otherwise None
    """

    data: Tensor
    encoding: DType
    scale: Tensor | None

    def __repr__(self) -> str:
        scaled = None if self.scale is None else "with scales"
        return format_repr("KvStorage", product(self.data.shape), self.encoding.name, scaled)

    @property
    def nbytes(self) -> int:
        """Bytes of these tokens, scales included."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


class Sizes(NamedTuple):
    """The numbers that both halves of a store share."""

    num_layers: int
    max_seq_len: int
    num_heads: int
    head_dim: int


class Half:
    """Keys, or values, of all layers.

    name: "key" or "value", for errors
    Raises UnsupportedError, InvalidArgumentError for formats that libkvx does not write.
    """

    __slots__ = (
        "_data",
        "_readers",
        "_scales",
        "_writers",
        "encoding",
        "has_rows",
        "name",
        "sizes",
    )

    def __init__(self, name: str, sizes: Sizes, encoding: DType, placement: torch.device) -> None:
        self.name, self.sizes, self.encoding = name, sizes, encoding
        self.has_rows = sizes.head_dim % encoding.numbers != 0  # of units that span heads
        heads = 1 if self.has_rows else sizes.num_heads
        rows = sizes.num_layers, sizes.max_seq_len, heads
        stored = getattr(torch, encoding.label, None)
        units = sizes.num_heads * sizes.head_dim // (heads * encoding.numbers)
        last = units * encoding.itemsize if stored is None else units
        self._data = _zeros((*rows, last), torch.uint8 if stored is None else stored, placement)
        self._scales = None
        if encoding.format.scaled:
            self._scales = _zeros(rows, torch.float32, placement)
        self._writers: dict[int, WritePlan] = {}  # by layer, each made at its first use
        self._readers: dict[int, GatherPlan] = {}
        self._writer(0)  # so that libkvx refuses now what it does not convert
        self._reader(0)

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return self._data.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token of one layer, scales included."""
        return self.storage(0, 0, 1).nbytes

    @property
    def allocated_bytes(self) -> int:
        return sum(
            t.untyped_storage().nbytes() for t in (self._data, self._scales) if t is not None
        )

    def owns(self, tokens: Any) -> bool:
        """Whether `tokens` are a view of the buffers."""
        if isinstance(tokens, Tensor):
            if tokens.layout is not torch.strided or tokens.device != self.device:
                return False
            first = tokens.data_ptr()
        else:
            first = tokens.ctypes.data
        return any(
            t is not None and 0 <= first - t.data_ptr() < t.nbytes
            for t in (self._data, self._scales)
        )

    def write(self, layer: int, begin: int, tokens: Any) -> None:
        """Encodes `tokens`, (num_tokens, num_heads, head_dim), from token `begin` on.

        Raises what write_kv raises, and then nothing was written.
        """
        slots = torch.arange(begin, begin + len(tokens), device=self.device)
        if self.has_rows:
            tokens = tokens.reshape(len(tokens), 1, -1)
        with _called(f"{self.name}s"):
            self._writer(layer)(tokens, None, slots)

    def read(self, layer: int, start: int, end: int, head: int | None, out: Any) -> None:
        """Decodes tokens into `out`, (tokens, heads, head_dim), any strides."""
        if start == end:
            return
        if self.has_rows:
            self._read_rows(layer, start, end, head, out)
            return
        reader = self._reader(layer) if head is None else self._gather(layer, head)
        ids = torch.arange(start, end, device=self.device).view(1, -1)
        with _called("out"):
            reader(out, None, ids, torch.tensor([end - start], device=self.device))

    def _read_rows(self, layer: int, start: int, end: int, head: int | None, out: Any) -> None:
        """Decodes whole rows, a few tokens at a time, and copies their heads into `out`."""
        heads, head_dim = self.sizes.num_heads, self.sizes.head_dim
        chosen = slice(None) if head is None else slice(head, head + 1)
        most = min(max(_ROWS_BYTES // (4 * heads * head_dim), 1), end - start)
        shape = most, 1, heads * head_dim
        _require_writable(out)
        rows: Any = (
            torch.empty(shape, dtype=out.dtype, device=out.device)
            if isinstance(out, Tensor)
            else np.empty(shape, out.dtype)
        )
        for at in range(start, end, most):
            count = min(most, end - at)
            ids = torch.arange(at, at + count, device=self.device).view(1, -1)
            with _called("out"):
                lens = torch.tensor([count], device=self.device)
                self._reader(layer)(rows[:count], None, ids, lens)
            found = rows[:count].reshape(count, heads, head_dim)
            out[at - start : at - start + count] = found[:, chosen]

    def require_heads(self) -> None:
        """Raises UnsupportedError if units span heads."""
        if self.has_rows:
            raise UnsupportedError(
                f"{self.name}_encoding is {self.encoding.name} and head_dim {self.sizes.head_dim}: "
                f"units of {self.encoding.numbers} numbers span heads, expected a format whose "
                f"units divide head_dim. Read the numbers with read_{self.name}s"
            )

    def storage(self, layer: int, start: int, end: int) -> KvStorage:
        """The bytes of some tokens, by head."""
        data = self._data[layer, start:end].transpose(0, 1)
        if self._scales is None:
            return KvStorage(data, self.encoding, None)
        return KvStorage(data, self.encoding, self._scales[layer, start:end].transpose(0, 1))

    def fill_zeros(self, start: int, end: int) -> None:
        """Makes some tokens of all layers zero. Their bytes are zero, and a scale is 1."""
        self._data.view(torch.uint8)[:, start:end] = 0
        if self._scales is not None:
            self._scales[:, start:end] = 1

    def blocks(
        self, layer: int, num_tokens: int, block_size: int
    ) -> tuple[TensorDesc, ScaleDesc | None]:
        """The first tokens of a layer, which are whole blocks, and their scales."""

        def in_blocks(tokens: Tensor) -> Tensor:
            found = tokens[layer, :num_tokens]
            return found.view(-1, block_size, *found.shape[1:])

        data = self._described(in_blocks(self._data))
        return data, None if self._scales is None else self._scale(in_blocks(self._scales))

    def _writer(self, layer: int) -> WritePlan:
        found = self._writers.get(layer)
        if found is None:
            cache, scale = self._cache(layer, None)
            finds = scale is not None
            found = WritePlan(cache, self._like(cache), None, k_scale=scale, find_scales=finds)
            self._writers[layer] = found
        return found

    def _reader(self, layer: int) -> GatherPlan:
        found = self._readers.get(layer)
        if found is None:
            found = self._readers[layer] = self._gather(layer, None)
        return found

    def _gather(self, layer: int, head: int | None) -> GatherPlan:
        cache, scale = self._cache(layer, head)
        return GatherPlan(cache, self._like(cache), None, k_scale=scale)

    def _cache(self, layer: int, head: int | None) -> tuple[CacheDesc, ScaleDesc | None]:
        """A layer, or one head of it, as a cache of blocks of one token, and its scales."""
        heads = slice(None) if head is None else slice(head, head + 1)
        cache = CacheDesc.from_kv(self._described(self._data[layer, :, None, heads]))
        scales = None if self._scales is None else self._scale(self._scales[layer, :, None, heads])
        return cache, scales

    def _like(self, cache: CacheDesc) -> Tensor:
        shape = 1, cache.num_kv_heads, cache.head_dim
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _described(self, data: Tensor) -> TensorDesc:
        return describe(data, Layout.BLOCK_NHD, dtype=self.encoding, name=f"{self.name}s")

    def _scale(self, scales: Tensor) -> ScaleDesc:
        name = f"scales of {self.name}s"
        return ScaleDesc.of(scales, ScaleGranularity.PER_TOKEN_HEAD, name=name)


def _require_writable(out: Any) -> None:
    """What libkvx requires of an output, where torch and numpy write it."""
    found = describe(out[None], Layout.BLOCK_NHD, name="out")
    found.require_writable("out")
    for axis, (size, stride) in enumerate(zip(out.shape, found.stride[1:], strict=True)):
        if size > 1 and stride == 0:
            raise InvalidArgumentError(
                f"out.stride[{axis}] is 0, expected at least 1: elements overlap (spec 4.2)"
            )


@contextmanager
def _called(name: str) -> Iterator[None]:
    """Gives the tokens of a write or a gather this name in errors, which call them key."""
    try:
        yield
    except KvxError as error:
        said = re.sub(r"^(?:(?:write|gather)\.io\.)?key\b", name, str(error))
        if said == str(error):
            raise
        raise type(error)(said) from None


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, placement: torch.device) -> Tensor:
    """On a host, memory that the system zeroes when a page is first touched."""
    try:
        # Not of inference mode: those could not be written outside of it.
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=placement)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise UnsupportedError(
            f"placement is {placement}, where torch allocates no {dtype} of {product(shape)}: "
            f"{error}. Pass a device that this torch has, and sizes that fit its memory"
        ) from error
