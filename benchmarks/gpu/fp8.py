"""FP8 in torch, as the spec defines it, and its scales. Spec: E.6, E.9

Scales are tensors on the device: by a number of the host, torch multiplies with its reciprocal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.places import Place
from kvx_core import ScaleDesc, ScaleGranularity

E4M3 = torch.float8_e4m3fn
_STATIC = 0.37  # no power of two, so that every rounding shows
_MAX = torch.finfo(E4M3).max


def static_scales(num_layers: int, place: Place) -> Tensor:
    """One scale for K and one for V of each layer: (num_layers, 2)."""
    return torch.full((num_layers, 2), _STATIC, device=place.device)


def describe_scales(scales: Tensor, place: Place) -> tuple[ScaleDesc, ScaleDesc]:
    """Those of K and V of a layer: each one, or (num_blocks, block_size, num_kv_heads)."""
    granularity = (
        ScaleGranularity.PER_TENSOR if scales.ndim == 1 else ScaleGranularity.PER_TOKEN_HEAD
    )
    k, v = (place.located(ScaleDesc.of(scale, granularity)) for scale in scales)
    return k, v


def found_scales(values: Tensor) -> Tensor:
    """One per row, (..., 1): its largest number becomes the largest of E4M3."""
    largest = values.float().abs().amax(-1, keepdim=True)
    return largest / torch.full_like(largest, _MAX)


def encode(values: Tensor, scale: Tensor) -> Tensor:
    """round(values / scale), as bytes."""
    return (values.float() / scale).clamp(-_MAX, _MAX).to(E4M3).view(torch.uint8)


def decode(stored: Tensor, scale: Tensor) -> Tensor:
    """stored * scale, as bfloat16."""
    return (stored.view(E4M3).float() * scale).bfloat16()
