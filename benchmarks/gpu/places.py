"""Where benchmarks run: a GPU or, to rehearse them, the CPU; how work is timed there."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from benchmarks.rounds import Contestant, once
from kvx_core import Memory

Call = Callable[[], object]
_Desc = TypeVar("_Desc", bound=Any)  # a descriptor with a memory

_WARM_UP_FLUSHES = 2000  # for about 0.1 s, in which an idle GPU raises its clocks


class Place(Protocol):
    """A device, and what KVX is told of it."""

    device: str  # of the memory
    draws: str  # which random numbers for it come from: a CPU would take seconds for them

    def empty(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """New memory here."""

    def located(self, desc: _Desc) -> _Desc:
        """`desc` with the memory that descriptors have here."""

    def settle(self) -> None:
        """Waits until all calls have ended."""

    def contestant(self, calls: Sequence[Call], parts: int) -> Contestant:
        """`calls`, one after the other, timed together: seconds for one of `parts`."""

    def flush(self, contestant: str) -> None:
        """Goes ahead of every timing and empties the caches."""


class Gpu:
    """The current GPU. Everything runs on one stream of its own."""

    device = draws = "cuda"

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        torch.cuda.set_stream(self._stream)
        cache_bytes = torch.cuda.get_device_properties("cuda").L2_cache_size
        self._junk = torch.empty(2 * cache_bytes, dtype=torch.uint8, device="cuda")
        for _ in range(_WARM_UP_FLUSHES):
            self.flush("")

    def empty(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(sizes), dtype=dtype, device=self.device)

    def located(self, desc: _Desc) -> _Desc:
        return desc

    def settle(self) -> None:
        torch.cuda.synchronize()

    def contestant(self, calls: Sequence[Call], parts: int) -> Contestant:
        """The calls as a CUDA graph, timed by events around a replay.

        The replay is queued while the flush before it still runs, so that no time of the host
        counts. What waits for the GPU cannot be captured, and raises before it is: a capture that
        fails leaves torch's random numbers and its memory unusable for all later cases.
        """
        _raise_on_sync("error")
        try:
            for call in calls:
                call()
        finally:
            _raise_on_sync("default")
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


def _raise_on_sync(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


class Rehearsal:
    """The CPU. Every line but those of Gpu runs; what is timed means nothing.

    memory: what descriptors say of the tensors. DEVICE is for a libkvx whose kernels run on the
            CPU (tests/hostgrid)
    """

    device = draws = "cpu"

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        torch.set_num_threads(1)  # more would wait for each other longer than they work

    def empty(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(sizes), dtype=dtype)

    def located(self, desc: _Desc) -> _Desc:
        return replace(desc, memory=self._memory)

    def settle(self) -> None:
        pass

    def contestant(self, calls: Sequence[Call], parts: int) -> Contestant:
        def run() -> None:
            for call in calls:
                call()

        return once(run)

    def flush(self, contestant: str) -> None:
        pass


class PinnedHost:
    """Memory of the host that the GPU of `place` reads and writes. Calls run where they do there.

    Its tensors are described as they are: HOST.
    """

    device = "cpu"

    def __init__(self, place: Place) -> None:
        self._place, self.draws = place, place.draws

    def empty(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(sizes), dtype=dtype, pin_memory=self._place.device != "cpu")

    def located(self, desc: _Desc) -> _Desc:
        return desc

    def settle(self) -> None:
        self._place.settle()

    def contestant(self, calls: Sequence[Call], parts: int) -> Contestant:
        return self._place.contestant(calls, parts)

    def flush(self, contestant: str) -> None:
        self._place.flush(contestant)


class OtherGpu:
    """A second GPU. What runs on two is timed by the host, until both have ended."""

    device = draws = "cuda:1"

    def empty(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(sizes), dtype=dtype, device=self.device)

    def located(self, desc: _Desc) -> _Desc:
        return desc

    def settle(self) -> None:
        for device in ("cuda:0", self.device):
            torch.cuda.synchronize(device)

    def contestant(self, calls: Sequence[Call], parts: int) -> Contestant:
        def run() -> float:
            self.settle()
            begin = time.perf_counter()
            for call in calls:
                call()
            self.settle()
            return (time.perf_counter() - begin) / parts

        return run

    def flush(self, contestant: str) -> None:
        """Nothing: both ends are far larger than the caches."""
