"""Scales that a call finds, by their definition. Spec: E.9"""

from __future__ import annotations

import torch
from torch import Tensor

from tests import reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


LARGEST = {E4M3: 448.0, E5M2: 57344.0, torch.int8: 127.0}


def find_scales(value: Tensor, fp8: torch.dtype, scale_dtype: torch.dtype) -> Tensor:
    """The scale of every row of `value` [.., head_dim], float32, as `scale_dtype` holds it."""
    magnitude = value.abs()
    magnitude[magnitude.isnan()] = 0
    exact = magnitude.amax(-1) / torch.tensor(LARGEST[fp8])
    scale = reference.decode(reference.encode(exact, scale_dtype))
    return torch.where((scale > 0) & scale.isfinite(), scale, 1.0)
