"""Where benchmarks run: a GPU or, to rehearse them, the CPU; how work is timed there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.rounds import Contestant, once
from kvx_core import Memory

Call = Callable[[], object]
_Desc = TypeVar("_Desc", bound=Any)  # a descriptor with a memory

_WARM_UP_FLUSHES = 2000  # for about 0.1 s, in which an idle GPU raises its clocks


class Place(Protocol):
    """A device, and what KVX is told of it."""

    device: str

    def located(self, desc: _Desc) -> _Desc:
        """`desc` with the memory that descriptors have here."""

    def contestant(self, calls: Sequence[Call], parts: int) -> Contestant:
        """`calls`, one after the other, timed together: seconds for one of `parts`."""

    def flush(self, contestant: str) -> None:
        """Goes ahead of every timing and empties the caches."""


class Gpu:
    """The current GPU. Everything runs on one stream of its own."""

    device = "cuda"

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        torch.cuda.set_stream(self._stream)
        cache_bytes = torch.cuda.get_device_properties("cuda").L2_cache_size
        self._junk = torch.empty(2 * cache_bytes, dtype=torch.uint8, device="cuda")
        for _ in range(_WARM_UP_FLUSHES):
            self.flush("")

    def located(self, desc: _Desc) -> _Desc:
        return desc

    def contestant(self, calls: Sequence[Call], parts: int) -> Contestant:
        """The calls as a CUDA graph, timed by events around a replay.

        The replay is queued while the flush before it still runs, so that no time of the host
        counts.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            for call in calls:
                call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def run() -> float:
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) * 1e-3 / parts

        return run

    def flush(self, contestant: str) -> None:
        """Writes twice the size of the L2."""
        self._junk.fill_(1)


class Rehearsal:
    """The CPU. Every line but those of Gpu runs; what is timed means nothing.

    memory: what descriptors say of the tensors. DEVICE is for a libkvx whose kernels run on the
            CPU (tests/hostgrid)
    """

    device = "cpu"

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        torch.set_num_threads(1)  # more would wait for each other longer than they work

    def located(self, desc: _Desc) -> _Desc:
        return replace(desc, memory=self._memory)

    def contestant(self, calls: Sequence[Call], parts: int) -> Contestant:
        def run() -> None:
            for call in calls:
                call()

        return once(run)

    def flush(self, contestant: str) -> None:
        pass
