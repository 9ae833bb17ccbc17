"""Finds out whether two described tensors have an element in common."""

from __future__ import annotations

from kvx_core.desc.tensor_desc import TensorDesc

_MOST_STEPS = 10_000  # of a search that takes a hundred for caches as they are


def share_an_element(a: TensorDesc, b: TensorDesc) -> bool:
    """Whether a byte belongs to an element of both.

    Exact, unless strides have so little in common that it would take too many steps to tell: then
    tensors count as apart. Two halves of one axis share nothing.
    """
    if 0 in a.shape or 0 in b.shape or not a.data or not b.data:
        return False
    if a.data == b.data:
        return True
    # They share a byte if the distance b - a, up to an element, is a sum of steps of a, less steps
    # of b, each taken less often than its axis is long: up to m - 1 times, and back n - 1 times.
    axes = {1: (a.dtype.itemsize, b.dtype.itemsize)}
    for tensor, forward in ((a, True), (b, False)):
        for stride, extent in zip(tensor.stride, tensor.shape, strict=True):
            if step := abs(stride * tensor.dtype.itemsize):
                m, n = axes.get(step, (1, 1))
                more = (extent - 1, 0) if (stride > 0) is forward else (0, extent - 1)
                axes[step] = m + more[0], n + more[1]
    budget = [_MOST_STEPS]
    return _is_sum(b.data - a.data, sorted((step, *mn) for step, mn in axes.items()), budget)


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
