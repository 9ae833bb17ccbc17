"""The worker's half of KVXConnector: lets a Saver and a Loader copy from and to vLLM's blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from kvx_adapters import vllm
from kvx_adapters.vllm_plugin.settings import Settings
from kvx_adapters.vllm_plugin.states import States, zero_behind
from kvx_adapters.vllm_plugin.stats import KVXStats
from kvx_adapters.vllm_plugin.steps import Load, StepPlan
from kvx_core import CacheFacts, CacheView
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.counts import Counts
from kvx_core.connector.loader import Loader
from kvx_core.connector.plan import BlockIds, Save, ScopedStores
from kvx_core.connector.saver import Saver
from kvx_core.connector.weights import Report, Weights
from kvx_core.snapshot import Section

_IDLE_STEP_SECONDS = 0.01  # the wait for loads in a step without a forward pass
_CHANGED = "the model's weights or an adapter have changed since the step was planned"


@dataclass(frozen=True, slots=True)
class Held:
    """Layers that share a list of block ids, a sliding window and heads."""

    index: int  # of the layers' KV cache group
    group: vllm.LayerGroup
    view: CacheView
    kernel_blocks: int  # number per block

    @property
    def heads(self) -> tuple[int, int]:
        """The heads of the model that this rank has in these layers: first, one past the last."""
        first = self.view.facts.first_kv_head or 0
        return first, first + self.view.layers[0].num_kv_heads

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, as the scheduler counts them."""
        return int(self.group.specs[0].block_size)


class WorkerHalf:
    """Saves and loads tokens of one worker. `shutdown` ends its threads.

    held:       all layers of this worker with keys and values
    device:     the device of the caches
    by_request: True if vLLM asks for failed requests too, not only for failed blocks
    states:     its layers with a state; None: none
    rank:       of tensor parallelism
    """

    def __init__(
        self,
        stores: ScopedStores,
        settings: Settings,
        held: Sequence[Held],
        device: torch.device,
        boundary: Boundary,
        *,
        by_request: bool,
        weights: Weights,
        states: States | None = None,
        rank: int = 0,
    ) -> None:
        self._weights = weights
        self._seen = 0  # the scheduler's generation of weights, as the last plan had it
        self._asked = 0  # Plan.asks, as the last plan had it
        self._told = Report(0, 0, False, weights.origin)
        self._boundary, self._held, self._device = boundary, held, device
        self._by_request = by_request
        self._states, self._rank = states or None, rank
        self._has_one_group = len({part.index for part in held}) == 1 and self._states is None
        self._layer_of = {
            name: layer
            for part in held
            for name, layer in zip(part.group.layer_names, part.group.layers, strict=True)
        }
        self._block_tokens = held[0].block_tokens  # for _blocks, with one group
        self._counts = Counts()
        heads = {layer: part.heads for part in held for layer in part.group.layers}
        if self._states is not None:
            heads = dict.fromkeys(self._states.layers, (0, 1)) | heads
        self._saver = Saver(
            *(stores, settings, boundary, self._counts, self._sections),
            list(heads),
            list(heads.values()),
            None if self._states is None else self._states.heads_of(rank),
        )
        # Asynchronous loads use it. None without CUDA: torch.cuda.stream(None) does nothing.
        new_stream: Any = torch.cuda.Stream
        self._stream = new_stream(device) if device.type == "cuda" else None
        self._loader = Loader(
            stores, settings, boundary, self._counts, self._to_load, self._beside, self._era
        )
        self._loaded: set[Any] = set()
        self._untold: set[Any] = set()  # failed loads whose blocks are not reported to vLLM yet
        self._failed: set[Any] = set()
        self._failed_blocks: set[int] = set()

    def load(self, step: StepPlan) -> None:
        """Loads the tokens that this step's forward pass reads, and starts asynchronous loads.

        Without a forward pass vLLM runs steps without a pause, which keeps the loading threads from
        running. So an idle step waits a little for a load to end.
        """
        accepts = self._accepts(step)
        for load in step.loads:
            if not (accepts and self._weights.adapters.has(load.scope.adapter)):
                self._loader.refuse(load, _CHANGED)
            elif load.wait:
                self._loader.load(load)
            else:
                self._loader.start(load)
        if step.is_idle:
            self._loader.wait(_IDLE_STEP_SECONDS)

    def save_layer(self, step: StepPlan, layer_name: str) -> None:
        """Copies one layer of this step's saves. `save` copies the remaining layers."""
        layer = self._layer_of.get(layer_name)  # None: it uses the K and V of another one
        if layer is not None and self._accepts(step):
            self._saver.save_layer(step, self._parted(step.saves)[0], layer)

    def save(self, step: StepPlan) -> None:
        """Copies the tokens of this step's saves. Threads write the files later."""
        good, outdated = self._parted(step.saves) if self._accepts(step) else ([], step.saves)
        if good or not outdated:
            self._saver.save(step, good)
        if outdated:
            self._saver.refuse(outdated, _CHANGED)

    def save_now(self, save: Save) -> bool:
        """Stores tokens of a running request before it returns: see Saver.save_now."""
        if self._weights.adapters.has(save.scope.adapter):
            return self._saver.save_now(save)
        self._saver.refuse([save], _CHANGED)
        return False

    def _parted(self, saves: Sequence[Save]) -> tuple[Sequence[Save], Sequence[Save]]:
        """Parts saves into those whose adapter is still loaded, and the others."""
        good: list[Save] = []
        outdated: list[Save] = []
        for save in saves:
            has_it = self._weights.adapters.has(save.scope.adapter)
            (good if has_it else outdated).append(save)
        return good, outdated

    def cancel(self, request_ids: Collection[str]) -> None:
        """Cancels the loads of requests that have ended."""
        self._loader.cancel(request_ids)

    def take_results(self) -> tuple[set[Any], set[Any], set[Any]]:
        """Returns request ids: final saves that are done, loads that ended, loads that failed."""
        self._take_from_loader()
        loaded, failed = self._loaded, self._failed
        self._loaded, self._failed = set(), set()
        return self._saver.take_saved(), loaded, failed

    def take_failed_blocks(self) -> set[int]:
        """Returns the blocks that loads did not write. These loads count as ended only after this
        call: vLLM treats all blocks of an ended load as written.
        """
        self._take_from_loader()
        blocks, self._failed_blocks = self._failed_blocks, set()
        self._loaded |= self._untold
        self._untold = set()
        return blocks

    def _take_from_loader(self) -> None:
        results = self._loader.take_results()
        for load, first in results.failed:
            blocks = self._blocks(load, first)
            if blocks or not self._by_request:
                self._failed_blocks |= blocks
                self._untold |= results.loaded & {load.request_id}
            else:
                self._failed.add(load.request_id)
        self._loaded |= results.loaded - self._untold

    def take_stats(self) -> KVXStats | None:
        counts, errors = self._counts.take(), self._boundary.take_counts()
        if not counts and not errors:  # as in most steps
            return None
        stats = KVXStats(counts)
        stats.add(**errors)
        return None if stats.is_empty() else stats

    def take_report(self) -> Report | None:
        """Returns this rank's report about its weights; None: it is the same as the last one."""
        weights = self._weights
        adapters = weights.adapters.report(self._asked)
        report = Report(
            self._seen, weights.generation, weights.is_changing, weights.origin, adapters
        )
        if report == self._told:
            return None
        self._told = report
        return report

    def _accepts(self, step: StepPlan) -> bool:
        """True if the weights have not changed since a step was planned."""
        with self._boundary.guard("did not compare generations of weights"):
            weights, stamp = self._weights, step.stamp
            if step.generation != self._seen:
                self._seen = step.generation
            self._asked = step.asks
            return (
                stamp is not None
                and stamp.ranks == weights.generation
                and stamp.scheduler == self._seen
                and not weights.is_changing
            )
        return False

    def _era(self, load: Load) -> object:
        weights = self._weights
        return self._seen, weights.generation, weights.adapters.has(load.scope.adapter)

    def shutdown(self) -> None:
        """Cancels the loads and waits for those that run, then waits until all files are written:
        at most shutdown_seconds each.
        """
        self._loader.shutdown()
        self._saver.shutdown()

    def _beside(self) -> AbstractContextManager[object]:
        """Returns the stream of a load beside steps. It waits for steps that may use the blocks."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def _blocks(self, load: Load, first: int) -> set[int]:
        """Returns a load's blocks from token `first` on: vLLM then uses the blocks before. Empty
        with several KV cache groups, whose block ids are ambiguous.
        """
        with suppress(TypeError, IndexError):  # wrong block ids, which made the load fail
            if self._has_one_group:
                ids, size = load.block_ids[0], self._block_tokens
                return set(ids[first // size : -(-load.stop // size)])
        return set()

    @cached_property
    def _of_no_sequence(self) -> list[Section]:
        """Sections without block tables. The first save or load makes them, inside its guard."""
        return [Section(p.group.layers, p.view, None, p.group.encoding) for p in self._held]

    def _sections(self, block_ids: BlockIds, num_tokens: int) -> list[Section]:
        """Returns the sections of the first `num_tokens` tokens of a request, and of its states
        after them if it has blocks for them.
        """
        found = [
            section.of_sequence(
                vllm.block_table(
                    [block_ids[part.index][: -(-num_tokens // part.block_tokens)]],
                    kernel_blocks_per_block=part.kernel_blocks,
                )
            )
            for part, section in zip(self._held, self._of_no_sequence, strict=True)
        ]
        if self._states is not None and self._states.has_blocks(block_ids, num_tokens):
            states = self._states.section(block_ids, num_tokens, self._facts_of_states, self._rank)
            found.append(states)
        return found

    def _to_load(self, block_ids: BlockIds, num_tokens: int) -> list[Section]:
        """Returns the sections that a load of `num_tokens` tokens fills.

        In a hybrid model all groups share memory: behind the last token its block holds what a
        state has left there, and attention multiplies it by 0, which NaN survives. So that is
        zeroed. A step does it for the blocks that it allocates itself.
        Source: vllm 0.32 v1/worker/gpu_model_runner.py, _zero_block_ids
        """
        if self._states is not None:
            for part in self._held:
                ids = block_ids[part.index]
                zero_behind(part.view, part.block_tokens, ids, num_tokens, self._device)
        return self._sections(block_ids, num_tokens)

    @cached_property
    def _facts_of_states(self) -> CacheFacts:
        return replace(self._held[0].view.facts, first_kv_head=0, total_kv_heads=None)
