"""Checks that a tensor has the dtype, shape, strides and storage that vLLM describes.

Source: vllm 0.32 v1/kv_cache_interface.py, compute_layout_strides and create_kv_cache_views; before
0.29 v1/worker/gpu/attn_utils.py, _reshape_attention_kv_cache
"""

from __future__ import annotations

import math

from torch import Tensor

from kvx_adapters.vllm.encodings import Encoding
from kvx_adapters.vllm.pages import Page, order_of
from kvx_adapters.vllm.spec import LayerSpec
from kvx_core import InvalidArgumentError, UnsupportedError


def checked(kv_cache: Tensor, spec: LayerSpec, page: Page, encoding: Encoding) -> Tensor:
    """`kv_cache` with the axes of `page`, checked to be what `spec` implies.

    Raises InvalidArgumentError, UnsupportedError.
    """
    if kv_cache.dtype != spec.dtype:
        raise InvalidArgumentError(f"kv_cache.dtype is {kv_cache.dtype}, expected {spec.dtype}")
    if page.v == "none" and kv_cache.ndim == 3:
        kv_cache = kv_cache.unsqueeze(1)  # the layer's own view of MLA's one head
    order = order_of(spec, page)
    _check_contents(spec, page, encoding)
    n = kernel_blocks(kv_cache, spec, page)
    extent = _extents(spec, page, encoding, n)
    expected = tuple(extent[axis] for axis in page.axes)
    if tuple(kv_cache.shape) != expected:
        raise InvalidArgumentError(
            f"kv_cache.shape is {tuple(kv_cache.shape)}, expected {expected}: axes {page.axes} of "
            f"{spec.backend} in vllm {spec.version}"
        )
    strides = _strides(spec, order, extent, n)
    wanted = tuple(strides[axis] for axis in page.axes)
    found = tuple(stride * kv_cache.itemsize for stride in kv_cache.stride())
    if any(extent > 1 and at != to for extent, at, to in zip(expected, found, wanted, strict=True)):
        raise InvalidArgumentError(
            f"kv_cache.stride is {found} bytes, expected {wanted} for layout {spec.layout} with "
            f"num_layers {spec.num_layers}. Pass the resolved layout, "
            "KVCacheConfig.kv_cache_layout, and the layers of the KVCacheTensor"
        )
    _check_storage(kv_cache)
    return kv_cache


def kernel_blocks(kv_cache: Tensor, spec: LayerSpec, page: Page) -> int:
    """Into how many kernel blocks vLLM has split a block; 1 if `kv_cache` has no such axis."""
    at = page.axes.index("N") - len(page.axes)
    kernel_block_size = kv_cache.shape[at] if kv_cache.ndim >= -at else 0
    return max(1, spec.block_size // kernel_block_size) if kernel_block_size else 1


def _check_contents(spec: LayerSpec, page: Page, encoding: Encoding) -> None:
    """A page must hold K and V of every head and token, and nothing else."""
    content = page.cell_elements(spec.num_kv_heads, encoding) * spec.dtype.itemsize
    sizes_of_v: dict[str, tuple[int | None, ...]] = {
        "like k": (None, spec.head_size),
        "own size": (spec.head_size_v,),
        "none": (None, 0),
    }
    for field, found, expected in (
        ("head_size_v", spec.head_size_v, sizes_of_v[page.v]),
        ("num_head_slots", spec.num_head_slots, (2 if page.cell == "all heads" else None,)),
        ("state_content_bytes", spec.state_content_bytes, (None, content)),
        ("tokens_per_state", spec.tokens_per_state, (1,)),
    ):
        if found not in expected:
            raise UnsupportedError(
                f"{field} is {found}, expected {' or '.join(map(str, expected))} for "
                f"{spec.backend} with num_kv_heads {spec.num_kv_heads} and head_size "
                f"{spec.head_size}: the page holds more or other than K and V"
            )


def _extents(spec: LayerSpec, page: Page, encoding: Encoding, n: int) -> dict[str, int]:
    """The extent of every axis of the cache, in kernel blocks."""
    return {
        "L": spec.num_layers,
        "B": spec.num_blocks * n,
        "K": 2,
        "H": 2 if page.cell == "all heads" else spec.num_kv_heads,
        "N": spec.block_size // n,
        "C": page.cell_elements(spec.num_kv_heads, encoding),
    }


def _strides(spec: LayerSpec, order: str, extent: dict[str, int], n: int) -> dict[str, int]:
    """Bytes between neighbours along every axis of `order`. `n` kernel blocks make a block."""
    page = n * math.prod(extent[axis] for axis in order if axis not in "LB") * spec.dtype.itemsize
    if spec.page_size_bytes < page:
        raise InvalidArgumentError(
            f"page_size_bytes is {spec.page_size_bytes}, expected at least {page}: K and V of "
            f"{spec.num_kv_heads} heads x {spec.block_size} tokens"
        )
    padded = spec.page_size_bytes > page
    if n > 1 and (padded or spec.block_stride_bytes not in (None, page)):
        raise InvalidArgumentError(
            f"page_size_bytes is {spec.page_size_bytes} and block_stride_bytes "
            f"{spec.block_stride_bytes}, expected {page} for both: padded blocks are not split "
            f"into {n} kernel blocks"
        )
    grid_end = max(order.find(axis) for axis in "LB")
    outside = {axis for axis in order[:grid_end] if extent[axis] > 1}
    if padded and not outside <= {"L", "B"}:
        raise UnsupportedError(
            f"page_size_bytes is {spec.page_size_bytes}, expected {page} in layout {spec.layout}, "
            "whose pages are not contiguous and so cannot be padded"
        )
    strides = {}
    step = spec.dtype.itemsize
    for axis in reversed(order):
        if axis == order[grid_end] and padded:
            step = max(step, spec.page_size_bytes)
        if axis == "B" and spec.block_stride_bytes is not None:
            step = spec.block_stride_bytes // n
        strides[axis] = step
        step *= extent[axis]
    return strides


def _check_storage(kv_cache: Tensor) -> None:
    last = kv_cache.storage_offset() + sum(
        stride * (extent - 1)
        for stride, extent in zip(kv_cache.stride(), kv_cache.shape, strict=True)
    )
    end, size = (last + 1) * kv_cache.itemsize, kv_cache.untyped_storage().nbytes()
    if kv_cache.numel() and end > size:
        raise InvalidArgumentError(f"kv_cache ends at byte {end}, past its storage of {size} bytes")
