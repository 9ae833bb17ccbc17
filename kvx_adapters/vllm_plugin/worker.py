"""The worker's half of KVXConnector: copies tokens out of vLLM's blocks, and into them.

A save copies to host memory before the step ends, because vLLM may give the blocks to other
requests afterwards, and writes the file in a thread. A load reads a file and writes blocks: before
the forward pass, or in a thread beside other requests' steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvx_adapters import vllm
from kvx_adapters.vllm_plugin.settings import Settings
from kvx_adapters.vllm_plugin.stats import KVXStats
from kvx_adapters.vllm_plugin.steps import BlockIds, Load, SaltedStores, Save, StepPlan
from kvx_core import CacheView
from kvx_core.connector.boundary import Boundary, Guard
from kvx_core.connector.threads import started_threads
from kvx_core.snapshot import Section, Snapshot
from kvx_core.stores.prefix import PrefixStore

_PATIENCE_SECONDS = 0.01  # that a step without a forward pass waits for loads


@dataclass(frozen=True, slots=True)
class Held:
    """Layers that share a list of block ids, and a sliding window."""

    index: int  # of their KV cache group
    group: vllm.LayerGroup
    view: CacheView
    kernel_blocks: int  # per block


@dataclass(slots=True)
class _Span:
    """One chunk that is being copied, to be stored."""

    store: PrefixStore
    snapshot: Snapshot
    sections: list[Section]
    missing: set[int]  # layers that have not been copied

    def fill(self, layers: Collection[int]) -> None:
        for section in self.sections:
            if held := [layer for layer in section.layers if layer in layers]:
                self.snapshot.fill(section.of(held))
        self.missing = self.missing.difference(layers)


class WorkerHalf:
    """Owns two thread pools; `shutdown` ends them. A failed save or load does not affect others.

    held:       all layers of this worker
    device:     of the caches
    by_request: vLLM asks for failed requests, not only for failed blocks
    """

    def __init__(
        self,
        stores: SaltedStores,
        settings: Settings,
        held: Sequence[Held],
        device: torch.device,
        boundary: Boundary,
        *,
        by_request: bool,
    ) -> None:
        self._stores, self._settings, self._boundary = stores, settings, boundary
        self._held, self._device, self._by_request = held, device, by_request
        self._layer_of = {
            name: layer
            for part in held
            for name, layer in zip(part.group.layer_names, part.group.layers, strict=True)
        }
        self._layers = list(self._layer_of.values())
        first = held[0].view
        first_head = first.facts.first_kv_head or 0
        self._heads = first_head, first_head + first.layers[0].num_kv_heads
        self._block_size: int = held[0].group.specs[0].block_size  # of the only group, for _blocks
        self._writers = started_threads(settings.writer_threads, "kvx-save")
        self._loaders = started_threads(1, "kvx-load")
        # For asynchronous loads. None without CUDA: torch.cuda.stream(None) does nothing.
        new_stream: Any = torch.cuda.Stream
        self._stream = new_stream(device) if device.type == "cuda" else None
        self._open_step: StepPlan | None = None  # for which save_layer was called
        self._open: dict[str, list[_Span]] = {}  # its spans, by request
        self._lock = threading.Lock()  # of all below
        self._load_is_over = threading.Condition(self._lock)
        self._num_loading = 0  # asynchronous loads
        self._pending_bytes = 0  # copied, not yet written
        self._saved: set[str] = set()
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._stats = KVXStats()

    def load(self, step: StepPlan) -> None:
        """Loads what this step's forward pass reads, and starts the asynchronous loads.

        Without a forward pass vLLM runs step after step without a pause, which keeps the loading
        thread from running. So this waits a little for it.
        """
        for load in step.loads:
            if load.wait:
                self._load(load)
            else:
                self._start(load)
        if step.is_idle:
            with self._lock:
                if self._num_loading and not self._loaded:
                    self._load_is_over.wait(_PATIENCE_SECONDS)

    def save_layer(self, step: StepPlan, layer_name: str) -> None:
        """Copies one layer of what this step saves. `save` copies the remaining layers."""
        if self._open_step is not step:
            self._open_step, self._open = step, {}
            for save in step.saves:
                with self._saving(save):
                    self._open[save.request_id] = list(self._reserve(save))
        layer = self._layer_of.get(layer_name)
        for save in step.saves:
            with self._saving(save):
                for span in self._open.get(save.request_id, ()):
                    if layer in span.missing:
                        span.fill([layer])

    def save(self, step: StepPlan) -> None:
        """Copies what this step has computed. Threads write the files later."""
        opened = self._open if self._open_step is step else {}
        self._open_step, self._open = None, {}
        for save in step.saves:
            begin, num_tokens = time.perf_counter(), 0
            with self._saving(save):
                for span in opened.get(save.request_id) or self._reserve(save):
                    span.fill(span.missing)
                    span.snapshot.settle(span.sections)
                    num_tokens += len(span.snapshot.tokens)
                    self._hand_over(span)
            if num_tokens:
                self._count(saved_tokens=num_tokens, save_seconds=time.perf_counter() - begin)
            if save.final:
                with self._lock:
                    self._saved.add(save.request_id)

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """Ids of requests: saved after they finished, loads that ended, and loads that failed."""
        with self._lock:
            results = self._saved, self._loaded, self._failed
            self._saved, self._loaded, self._failed = set(), set(), set()
        return results

    def take_failed_blocks(self) -> set[int]:
        with self._lock:
            blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_stats(self) -> KVXStats | None:
        with self._lock:
            stats, self._stats = self._stats, KVXStats()
        stats.add(**self._boundary.take_counts())
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """Cancels loads that have not begun, and waits until all files are written."""
        self._loaders.shutdown(cancel_futures=True)
        self._writers.shutdown()

    def _reserve(self, save: Save) -> Iterator[_Span]:
        """Allocates memory for the chunks of a save that are not stored yet."""
        store = self._stores[save.salt]
        sections = self._sections(save.block_ids, len(save.tokens))
        nodes = store.nodes(save.tokens)
        for start, stop in store.spans(len(save.tokens), save.start):
            node = nodes[start // store.chunk_tokens]
            if not store.missing(save.tokens, start, stop, self._layers, self._heads, node=node):
                continue
            with self._lock:
                full = self._pending_bytes > self._settings.max_pending_bytes
            if full:
                self._count(dropped_saves=1)
                return
            snapshot = store.reserve(save.tokens, start, stop, sections, node=node)
            if snapshot is not None:  # None: some of these tokens have left a sliding window
                yield _Span(store, snapshot, sections, set(self._layers))

    def _saving(self, save: Save) -> Guard:
        """Guards a save: an error costs a later hit, nothing else."""
        return self._boundary.guard(
            "did not save", f"request {save.request_id}", count="dropped_saves"
        )

    def _hand_over(self, span: _Span) -> None:
        """Passes a chunk to the threads that write."""
        num_bytes = span.snapshot.num_bytes
        self._wait_to_be_written(num_bytes)
        try:
            self._writers.submit(self._write, span, num_bytes)
        except BaseException:
            self._wait_to_be_written(-num_bytes)
            raise

    def _write(self, span: _Span, num_bytes: int) -> None:
        begin = time.perf_counter()
        with self._boundary.guard("could not write to its store", count="dropped_saves"):
            written = span.store.commit(span.snapshot)
            self._count(saved_bytes=written, write_seconds=time.perf_counter() - begin)
            if written and self._settings.format is not None:
                self._count(spared_bytes=max(0, span.snapshot.cache_bytes - written))
        self._wait_to_be_written(-num_bytes)

    def _wait_to_be_written(self, num_bytes: int) -> None:
        with self._lock:
            self._pending_bytes += num_bytes

    def _start(self, load: Load) -> None:
        """Starts an asynchronous load."""
        with self._lock:
            self._num_loading += 1
        with self._loading(load) as guard:
            if self._stream is not None:  # earlier steps may still use these blocks
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._loaders.submit(self._load_beside, load)
        if guard.failed:
            self._load_failed(load)
            self._is_over(load, good=False)

    def _load_beside(self, load: Load) -> None:
        """Runs in the loading thread."""
        self._is_over(load, good=self._load(load, self._stream))

    def _is_over(self, load: Load, *, good: bool) -> None:
        """Reports the end of an asynchronous load: vLLM waits for the report."""
        with self._lock:
            self._num_loading -= 1
            self._loaded.add(load.request_id)
            if not good:
                self._failed.add(load.request_id)
            self._load_is_over.notify_all()

    def _load(self, load: Load, stream: Any = None) -> bool:
        """Loads tokens; returns whether that succeeded.

        Every failure is reported: vLLM treats unreported loads as successful.
        """
        with self._loading(load) as guard:
            begin = time.perf_counter()
            with torch.cuda.stream(stream):
                sections = self._sections(load.block_ids, load.stop)
                loaded = self._stores[load.salt].load(load.match, load.start, load.stop, sections)
            self._count(
                loaded_tokens=load.stop - load.start,
                loaded_bytes=loaded,
                load_seconds=time.perf_counter() - begin,
            )
        if guard.failed:
            self._load_failed(load)
        return not guard.failed

    def _loading(self, load: Load) -> Guard:
        return self._boundary.guard(
            "could not load", f"request {load.request_id}", count="load_failures"
        )

    def _load_failed(self, load: Load) -> None:
        if load.wait or not self._by_request:
            with self._lock:
                self._failed_blocks |= self._blocks(load)

    def _blocks(self, load: Load) -> set[int]:
        """The blocks of the tokens to load. Only used with a single KV cache group."""
        ids, block_size = load.block_ids[0], self._block_size
        return set(ids[load.start // block_size : -(-load.stop // block_size)])

    def _sections(self, block_ids: BlockIds, num_tokens: int) -> list[Section]:
        """Sections for the first `num_tokens` tokens of a request."""
        sections = []
        for part in self._held:
            num_blocks = -(-num_tokens // part.group.specs[0].block_size)
            ids = torch.tensor(
                [block_ids[part.index][:num_blocks]], dtype=torch.int32, device=self._device
            )
            table = vllm.block_table(ids, kernel_blocks_per_block=part.kernel_blocks)
            sections.append(Section(part.group.layers, part.view, table, part.group.encoding))
        return sections

    def _count(self, **values: float) -> None:
        with self._lock:
            self._stats.add(**values)
