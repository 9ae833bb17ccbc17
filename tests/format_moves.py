"""Moves numbers into each format and out of it by `migrate`, vector by vector."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    Layout,
    describe,
)
from kvx_core.desc.view import CacheSpan
from tests import ggml, reference
from tests.calls import Backend

FNUZ = torch.float8_e4m3fnuz


TORCH = {
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F32: torch.float32,
    DType.F8_E4M3: torch.float8_e4m3fn,
    DType.F8_E5M2: torch.float8_e5m2,
    DType.F8_E4M3FNUZ: FNUZ,
    DType.S8: torch.int8,
}


GGML = tuple(ggml.NAMES)


FORMATS = [*TORCH, *GGML]


SEEDS = (1, 2, 3)


def bytes_of(values: Tensor) -> np.ndarray:
    return values.contiguous().view(torch.uint8).numpy()


def encode(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The bytes of float32 numbers, [..., numbers] to [..., bytes]."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype in GGML:
        return ggml.quantize(values, dtype)
    numbers = torch.from_numpy(values)
    if dtype is DType.F8_E4M3FNUZ:
        return bytes_of(numbers.clamp(-240, 240).to(FNUZ))
    return bytes_of(reference.encode(numbers, TORCH[dtype]))


def decode(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """The float32 numbers of bytes."""
    if dtype in GGML:
        return ggml.dequantize(stored, dtype)
    numbers = torch.from_numpy(stored.copy()).view(TORCH[dtype])
    return (numbers.float() if dtype is DType.F8_E4M3FNUZ else reference.decode(numbers)).numpy()


def values(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers of many magnitudes, whole vectors of zeros and of one number among them."""
    random = np.random.default_rng(seed)
    found = random.standard_normal(shape) * 2.0 ** random.integers(-12, 6, (*shape[:-1], 1))
    found[..., ::7] = 0
    found[0] = 0
    found[1] = 3.5
    return found.astype(np.float32)


def memory(dtype: DType, lead: tuple[int, ...], dim: int, seed: int) -> np.ndarray:
    """Random bytes with room for vectors of `dim` numbers, [*lead, bytes]."""
    size = dim // dtype.numbers * dtype.itemsize
    return np.random.default_rng(seed).integers(0, 256, (*lead, size), np.uint8)


def span(raw: np.ndarray, dtype: DType, layout: Layout, table: list[list[int]]) -> CacheSpan:
    """A cache of one layer, whose K is in `raw`: [axes of the layout but dim, bytes]."""
    tensor = torch.from_numpy(raw)
    k = describe(tensor.view(TORCH.get(dtype, torch.uint8)), layout, dtype=dtype)
    view = CacheView(layers=(CacheDesc.from_kv(k),), facts=CacheFacts())
    return view.at(block_table=table)


def move(
    backend: Backend, src: CacheSpan, dst: CacheSpan, lens: list[int], *raw: np.ndarray
) -> None:
    backend.migrate_spans(src, dst, lens, map(torch.from_numpy, raw))


def one_vector(backend: Backend, stored: np.ndarray, a: DType, b: DType) -> np.ndarray:
    """What vectors [n, bytes] become, each a token."""
    dim = stored.shape[-1] // a.itemsize * a.numbers
    source, target = stored[None, :, None], memory(b, (1, len(stored), 1), dim, 9)
    ends = (span(raw, dtype, Layout.BLOCK_NHD, [[0]]) for raw, dtype in ((source, a), (target, b)))
    move(backend, *ends, [len(stored)], source, target)
    return target[0, :, 0]
