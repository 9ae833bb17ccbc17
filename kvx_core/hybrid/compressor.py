"""The weights of a compressor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Compressor:
    """The weights that turn the tokens of an entry into the entry; dim numbers, ratio tokens.

    Source: arXiv 2606.19348, eq. 11, 12, 22, 23
    """

    ape_a: Tensor  # (ratio, dim) float32, added to the scores of the entry's tokens
    ape_b: Tensor | None  # the same for the tokens of the entry before; None for HCA
    norm_weight: Tensor  # (dim,) float32, of the RMSNorm
    cos_sin: Tensor  # (positions, rope_dim) float32, cosines and then sines
    eps: float = 1e-6  # of the RMSNorm
