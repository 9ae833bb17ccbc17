"""Reads, checks and describes scales of a view as a snapshot stores them, without blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.in_place import is_torch
from kvx_core.desc.scales import ScaleDesc
from kvx_core.desc.tensor_desc import TensorDesc
from kvx_core.desc.view import CacheView
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.snapshot.contents import SCALED
from kvx_core.types import Layout, Memory, ScaleGranularity

_LARGEST = 0x7E  # 448 in E4M3, the largest number: 0x7f is NaN, and 0x80 and above have a sign


def bare(view: CacheView) -> CacheView:
    """Returns the view without scales and planes, so that copies do not change bytes of K and V."""
    if view.k_scales is None and view.v_scales is None and not view.planes:
        return view
    return replace(view, k_scales=None, v_scales=None, planes=())


def scales_of(view: CacheView, kind: str) -> tuple[ScaleDesc | None, ...]:
    """Returns the scales of K or V, one per layer; None for a layer without, whose scale is 1.

    kind: "k_scale" or "v_scale"
    """
    scales: Sequence[ScaleDesc | None] = getattr(view, f"{kind}s") or (None,) * len(view.layers)
    tensors = (layer.tensors.get(kind[0]) for layer in view.layers)
    return tuple(
        scale if tensor is not None and tensor.dtype in SCALED else None
        for scale, tensor in zip(scales, tensors, strict=True)
    )


def has_vector_scales(view: CacheView) -> bool:
    """True if the scales of the layers are per token and head.

    Raises UnsupportedError if only some of the scales are.
    """
    if view.k_scales is None and view.v_scales is None:
        return False
    per_vector = {
        scale is not None and scale.granularity is ScaleGranularity.PER_TOKEN_HEAD
        for kind in ("k", "v")
        for layer, scale in zip(view.layers, scales_of(view, f"{kind}_scale"), strict=True)
        if kind in layer.tensors
    }
    if len(per_vector) == 2:
        raise UnsupportedError(
            "some scales of the section are PER_TOKEN_HEAD, expected all or none. Make a section "
            "of each"
        )
    return True in per_vector


def scale_shape(scale: ScaleDesc, num_tokens: int) -> tuple[int, ...]:
    """Returns the shape of a scale in a snapshot. Raises UnsupportedError for scales of blocks."""
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


def scales_as_cache(view: CacheView) -> CacheView:
    """Returns the scales per token and head as a cache of their own, with head_dim 1."""

    def tensor(scale: ScaleDesc | None) -> TensorDesc | None:
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
    pairs = zip(scales_of(view, "k_scale"), scales_of(view, "v_scale"), strict=True)
    for k_scale, v_scale in pairs:
        k = tensor(k_scale)
        assert k is not None  # has_vector_scales has checked it
        layers.append(CacheDesc.from_kv(k, tensor(v_scale)))
    return replace(bare(view), layers=tuple(layers), facts=view.facts.of_parts())


def scale_values(scale: ScaleDesc) -> npt.NDArray[np.float32]:
    """Returns scales as a flat array of float32. Copies a torch tensor from its device to the host.

    Raises InvalidArgumentError if a scale is invalid.
    """
    if scale.memory is Memory.DEVICE and is_torch(scale.owner):
        values: npt.NDArray[np.float32] = scale.owner.float().cpu().numpy()
    else:
        values = scale.to_numpy().astype(np.float32)
    if not are_good(values):
        raise InvalidArgumentError(
            f"a scale of the cache is {values}, expected it finite and greater than zero (spec 6.6)"
        )
    return values.reshape(-1)


def are_good(scales: npt.NDArray[Any]) -> bool:
    """True if all scales are finite and greater than zero; scales of groups may be 0.

    scales: floats, or scales of groups as bytes of E4M3
    """
    if scales.dtype == np.uint8:
        return bool((scales <= _LARGEST).all())
    return bool((np.isfinite(scales) & (scales > 0)).all())
