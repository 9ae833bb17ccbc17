"""The plan of a step, from the scheduler to the workers. TensorRT-LLM sends it as a pickle."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvx_core.connector.plan import Save
from kvx_core.snapshot import Precision

__all__ = ["Load", "Save", "StepPlan"]


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks that were read and checked, and the ids of the pool's blocks to write them to."""

    # (num_blocks, num_layers, kv_factor, bytes), as on a rank that holds all heads
    blocks: npt.NDArray[np.uint8]
    block_ids: list[int]  # one for each of `blocks`
    carried: Precision = field(
        default_factory=Precision
    )  # the coarsest precision loaded so far: see PrefixStore.carry


@dataclass(slots=True)
class StepPlan:
    """The saves and loads of one step. A worker removes them before it does them."""

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
