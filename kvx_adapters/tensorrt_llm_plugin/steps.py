"""What the scheduler tells the workers to do in one step. TensorRT-LLM sends it as a pickle."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvx_core.connector.plan import Save
from kvx_core.snapshot import Precision

__all__ = ["Load", "Save", "StepPlan"]


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks that have been read and checked, and the block ids they are written to."""

    # (num_blocks, num_layers, kv_factor, bytes), as on a rank that holds all heads
    blocks: npt.NDArray[np.uint8]
    block_ids: list[int]  # one for each of `blocks`
    carried: Precision = field(
        default_factory=Precision
    )  # of what this process has loaded so far: see PrefixStore.carry


@dataclass(slots=True)
class StepPlan:
    """The saves and loads of one step. A worker removes those that it has done."""

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
