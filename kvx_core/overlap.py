"""Finds out whether two described tensors have an element in common."""

from __future__ import annotations

from kvx_core.tensor_desc import TensorDesc

_MOST_STEPS = 10_000  # of a search that takes a hundred for caches as they are


def share_an_element(a: TensorDesc, b: TensorDesc) -> bool:
    """Whether a byte belongs to an element of both.

    Exact for tensors of equal byte strides, as K and V of one allocation have: two halves of one
    axis share nothing. Tensors of other strides are found only if they begin at the same address.
    """
    if 0 in a.shape or 0 in b.shape or not a.data or not b.data:
        return False
    if a.data == b.data:
        return True
    steps = [stride * a.dtype.itemsize for stride in a.stride]
    if steps != [stride * b.dtype.itemsize for stride in b.stride]:
        return False
    # They share a byte if the distance b - a, up to an element, is a sum of steps, each taken less
    # often than the axis is long in either tensor.
    axes = sorted(
        (abs(step), *((m, n) if step > 0 else (n, m)))
        for step, m, n in zip(steps, a.shape, b.shape, strict=True)
        if step
    )
    axes.insert(0, (1, a.dtype.itemsize, b.dtype.itemsize))
    budget = [_MOST_STEPS]
    return _is_sum(b.data - a.data, axes, budget)


def _is_sum(distance: int, axes: list[tuple[int, int, int]], budget: list[int]) -> bool:
    """Whether distance = sum(step * c) for some -(n - 1) <= c <= m - 1 of the axes (step, m, n)."""
    budget[0] -= 1
    if not axes or budget[0] < 0:
        return distance == 0
    *smaller, (step, m, n) = axes
    below = sum(s * (j - 1) for s, _, j in smaller)  # the most that the smaller steps add up to
    above = sum(s * (i - 1) for s, i, _ in smaller)
    first = max(-(n - 1), -((above - distance) // step))
    last = min(m - 1, (distance + below) // step)
    return any(_is_sum(distance - step * c, smaller, budget) for c in range(first, last + 1))
