"""Numbers of tokens that an engine says of its sequences, when it is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core.argument_checks import bad_argument
from kvx_core.errors import InvalidArgumentError


def said_counts(name: str, said: Any, num_rows: int) -> npt.NDArray[np.int64]:
    """One number for each sequence.

    name: what errors call it
    said: an integer for all, or at least one per sequence
    Raises InvalidArgumentError.
    """
    found = np.atleast_1d(np.asarray(said))
    if found.ndim > 1 or (found.dtype.kind not in "iu" and found.size):
        raise bad_argument(name, said, "an integer, or one per sequence")
    counts: npt.NDArray[np.int64] = found.astype(np.int64)
    if counts.shape == (1,):
        return np.broadcast_to(counts, num_rows)
    if len(counts) < num_rows:
        raise InvalidArgumentError(
            f"{name} gives {len(counts)} numbers, expected 1 or at least {num_rows}, one per "
            "sequence"
        )
    return counts
