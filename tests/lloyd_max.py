"""The best scalar quantizers of the coordinates of a random unit vector, by Lloyd's iteration.

csrc/formats/turboquant.h has their results; `python -m tests.lloyd_max` prints them.
A coordinate t of a vector that is uniform on the unit sphere of dim dimensions has the density
c * (1 - t^2)^((dim - 3) / 2): of t^2, a Beta density. Source: arXiv 2504.19874, TurboQuant, lemma 1
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
BITS, DIMS = (1, 2, 3, 4), (64, 128, 256)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


def _integral(dim: int, begin: Floats, end: Floats, power: int) -> Floats:
    """Of t^power times the density, without its constant factor, by Gauss and Legendre."""
    middle, half = (begin + end) / 2, (end - begin) / 2
    t = middle[:, None] + half[:, None] * _NODES
    density = np.exp((dim - 3) / 2 * np.log1p(-np.minimum(t * t, 1 - 1e-15)))
    found: Floats = (t**power * density * _WEIGHTS).sum(1) * half
    return found


def centroids(dim: int, bits: int) -> Floats:
    """The positive half of the 2^bits centroids, ascending, times sqrt(dim)."""
    count = 1 << (bits - 1)
    found = (np.arange(count) + 0.5) / count * 3 / math.sqrt(dim)
    last = 9 / math.sqrt(dim) if dim > 81 else 1.0  # there is next to nothing behind
    for _ in range(5000):
        edges = np.concatenate([[0.0], (found[:-1] + found[1:]) / 2, [last]])
        mass = _integral(dim, edges[:-1], edges[1:], 0)
        moved = _integral(dim, edges[:-1], edges[1:], 1) / mass
        if np.abs(moved - found).max() < 1e-15:
            break
        found = moved
    return found * math.sqrt(dim)


def distortion(dim: int, bits: int) -> float:
    """The expected square of the error of a unit vector."""
    found = centroids(dim, bits) / math.sqrt(dim)
    last = 9 / math.sqrt(dim) if dim > 81 else 1.0
    edges = np.concatenate([[0.0], (found[:-1] + found[1:]) / 2, [last]])
    first, second = edges[:-1], edges[1:]
    mass, mean, square = (_integral(dim, first, second, power) for power in (0, 1, 2))
    error = square - 2 * found * mean + found * found * mass
    return float(dim * error.sum() / mass.sum())


if __name__ == "__main__":
    for bits in BITS:
        for dim in DIMS:
            text = ", ".join(f"{c:.9f}f" for c in centroids(dim, bits))
            print(f"{bits} bits, dim {dim}: {text}  // error {distortion(dim, bits):.6f}")
