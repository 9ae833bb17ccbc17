"""The scheduler of the connector, on rank 0: looks prompts up, and plans what a step copies.

TensorRT-LLM treats tokens that a connector has promised as computed, and a connector cannot report
later that a load has failed. So the scheduler reads and checks tokens before it promises them, and
sends their data to the workers with the step's plan. It promises no tokens of missing or broken
files: TensorRT-LLM computes them. It catches errors, unless a promise cannot be kept: the results
would be wrong.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvx_adapters.tensorrt_llm_plugin import api
from kvx_adapters.tensorrt_llm_plugin.model import Model
from kvx_adapters.tensorrt_llm_plugin.opened import opened_store
from kvx_adapters.tensorrt_llm_plugin.settings import Settings
from kvx_adapters.tensorrt_llm_plugin.steps import Load, StepPlan
from kvx_adapters.tensorrt_llm_plugin.witness import weights_changed, weights_of_process
from kvx_core import BlockTable, InvalidArgumentError
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.epochs import Epochs
from kvx_core.connector.lookups import Lookups
from kvx_core.connector.policy import Policy
from kvx_core.connector.scoped import Scoped
from kvx_core.connector.threads import Workers
from kvx_core.snapshot import Section, StoreError
from kvx_core.stores.loads import Progress
from kvx_core.stores.match import Match
from kvx_core.stores.prefix import PrefixStore
from kvx_core.stores.walk import Walk

# If a request has one of these, its keys and values depend on more than its token ids.
# Source: TensorRT-LLM main 2026-09, cpp/tensorrt_llm/nanobind/batch_manager/bindings.cpp
_NOT_PLAIN = (
    "lora_task_id",
    "prompt_embedding_table",
    "multimodal_embedding",
    "multimodal_hashes",
    "multimodal_positions",
    "mrope_rotary_cos_sin",
)


@dataclass(slots=True)
class _Promise:
    """Tokens that the scheduler has promised: TensorRT-LLM will not compute them."""

    blocks: npt.NDArray[np.uint8]  # as Load has them
    start: int  # a multiple of tokens_per_block
    stop: int


@dataclass(slots=True)
class _Read:
    """A lookup in a thread, which then reads the blocks that it finds."""

    walk: Walk
    start: int
    room: int  # bytes that its blocks may take
    progress: Progress = field(default_factory=Progress)
    promise: _Promise | None = None
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def position(self) -> tuple[int, int]:
        """The number of tokens found, and of tokens read."""
        return self.walk.num_found, self.progress.stop


@dataclass(slots=True)
class _Request:
    """A request in the form that a Policy reads."""

    request_id: int
    num_prompt_tokens: int
    source: Any  # TensorRT-LLM's own request
    promise: _Promise | None = None  # until it is sent to the workers
    all_token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


class _Policy(Policy):
    """A Policy for TensorRT-LLM's requests."""

    __slots__ = ()

    def salt_of(self, request: Any) -> str | None:
        return _salt(request.source) if _is_plain(request.source) else None


class KVXConnectorScheduler(api.KvCacheConnectorScheduler):  # type: ignore[misc]
    """KVX as a KV cache connector's scheduler.

    Raises InvalidArgumentError, UnsupportedError at start-up. Later it raises InvalidArgumentError
    only, if TensorRT-LLM gives a request too few blocks for its promised tokens, or if the weights
    change between the promise and its plan.

    Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/connectors/kv_cache_connector.py,
    KvCacheConnectorScheduler
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._settings = Settings.read()
        self._model = Model.of(llm_args, self._settings)
        self._boundary = Boundary(api.logger.warning)
        self._store = opened_store(self._model, self._settings)
        self._requests: dict[int, _Request] = {}
        self._reader = Workers(self._settings.loader_threads, "kvx-read", exit_seconds=0)
        self._policy: Policy | None = None  # plans the saves
        self._weights = weights_of_process()
        if self._store is not None:
            api.logger.info(self._settings.told(self._model.fingerprint, self._store.chunk_tokens))
            if warning := self._settings.limit_warning():
                api.logger.warning(warning)
            self._policy = _Policy(
                Scoped(self._store),
                self._boundary,
                Lookups(self._boundary, threads=1),
                self._store.chunk_tokens,
                save_generated=self._settings.save_generated,
                consumes=False,  # loads are planned here, not by the policy
                epochs=Epochs(self._weights, log=self._weights_change),
            )

    def _weights_change(self, line: str) -> None:
        api.logger.warning("KVX shares nothing until the next start: the weights have changed")

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Returns how many tokens past `num_computed_tokens` the next step loads before its forward
        pass, and False: the load is not asynchronous.

        TensorRT-LLM cannot be told to ask again. So this waits while the store finds or reads a
        chunk every chunk_seconds, and at most lookup_seconds. If the store is slower TensorRT-LLM
        computes the tokens, but the lookup goes on: the next one finds its results in the index.

        TensorRT-LLM calls it once for each allocation of a request's blocks. It promises whole
        blocks only, as TensorRT-LLM's own connectors do: TensorRT-LLM may still be copying a block
        that is partly filled.
        Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/connectors/mooncake_store/scheduler.py
        """
        with self._boundary.guard("loads nothing for", f"request {request.request_id}"):
            return self._promise(request, num_computed_tokens), False
        self._forget(request.request_id)
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Does nothing: build_connector_meta gets all blocks, also blocks not known here."""

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        plan = StepPlan()
        if self._policy is not None:
            self._policy.look_at_weights()
        for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests):
            tracked = self._requests.get(data.request_id)
            if tracked is None:
                continue
            assert self._policy is not None  # requests are tracked only if there is a store
            tracked.all_token_ids.extend(data.new_tokens)
            tracked.block_ids.extend(data.new_block_ids)
            position = data.computed_position
            promise, tracked.promise = tracked.promise, None
            if promise is not None:
                if self._weights.is_changing or self._weights.generation:
                    raise weights_changed(f"request {data.request_id}")
                plan.loads.append(self._load(data.request_id, tracked, promise))
                # The position does not count promised tokens; in the first versions it did.
                if position not in (promise.start, promise.stop):
                    self._forget(data.request_id)
                    continue
                position = promise.stop
                self._policy.has_loaded(data.request_id, promise.stop)
            stop = position + data.num_scheduled_tokens
            self._policy.step(data.request_id, position, stop, (), are_new=False)
        if self._policy is not None:
            plan.saves = self._policy.take_plan(is_idle=False).saves
        return plan

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Returns False: TensorRT-LLM may free the blocks. Saves copy within their step."""
        self._forget(request.request_id)
        return False

    def request_reset(self, request: Any) -> None:
        """Forgets a request that has lost its blocks. Only TensorRT-LLM main calls it."""
        self._forget(request.request_id)

    def _forget(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
        if self._policy is not None:
            self._policy.ended(request_id)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """Takes back tokens [start, end) of a promise: TensorRT-LLM computes them.

        Only TensorRT-LLM main calls it. After an error, which is caught, the whole promise is
        loaded, which is correct too.
        """
        with self._boundary.guard("loads all that it promised to", f"request {request.request_id}"):
            tracked = self._requests.get(request.request_id)
            if tracked is not None and tracked.promise is not None:
                tracked.promise = self._without(tracked.promise, start, end)

    def _without(self, promise: _Promise, start: int, end: int) -> _Promise | None:
        """Returns the rest of a promise if TensorRT-LLM computes tokens [start, end): the blocks
        with other tokens, without a gap; None: no blocks.
        """
        block_size, blocks = self._model.tokens_per_block, promise.blocks
        first, last = promise.start, promise.stop
        if start <= first < end:
            first = min(end, last) // block_size * block_size
        elif start < last <= end:
            last = -(-start // block_size) * block_size
        begin = (first - promise.start) // block_size
        kept = blocks[begin : begin + (last - first) // block_size]
        return _Promise(kept, first, last) if len(kept) else None

    def _promise(self, request: Any, num_computed_tokens: int) -> int:
        """Tracks a request; returns how many tokens past `num_computed_tokens` it promises."""
        salt = _salt(request)
        if self._store is None or salt is None or not _is_plain(request):
            return 0
        request_id = request.request_id
        assert self._policy is not None  # there is a store
        self._forget(request_id)
        tokens = request.get_tokens(0)
        tracked = _Request(request_id, len(tokens), request)
        self._policy.look_at_weights()
        if self._policy.scope_of(tracked) is None:
            return 0
        self._requests[request_id] = tracked
        self._policy.allocated(tracked, (tracked.block_ids,), 0)
        if num_computed_tokens % self._model.tokens_per_block:
            return 0
        if getattr(request, "return_context_logits", False):
            return 0  # it needs the logits of every prompt token
        waiting = sum(r.promise.blocks.nbytes for r in self._requests.values() if r.promise)
        room = self._settings.max_load_bytes - waiting
        if self._reader.stuck_seconds() > self._settings.chunk_seconds:
            return 0  # the store does not answer
        store, what = self._store.salted(salt), f"request {request_id}"
        read = _Read(store.walk(store.chain_of(tokens), len(tokens)), num_computed_tokens, room)
        self._reader.submit(lambda: self._read(store, read, what))
        promise = self._wait_for(read)
        self._policy.look_at_weights()  # they may have changed meanwhile
        if promise is None or self._policy.scope_of(tracked) is None:
            return 0
        tracked.promise = promise
        count = promise.stop - num_computed_tokens
        api.logger.info(
            f"KVX: request {request_id} takes {count} of {len(tokens)} prompt tokens from the store"
        )
        return count

    def _wait_for(self, read: _Read) -> _Promise | None:
        """Returns the blocks that a thread reads; None if it takes too long: no more is read."""
        settings, position = self._settings, read.position
        deadline = time.monotonic() + settings.lookup_seconds
        while not read.is_over.wait(min(settings.chunk_seconds, deadline - time.monotonic())):
            before, position = position, read.position
            if position == before or time.monotonic() >= deadline:
                read.progress.is_cancelled = True
                return None
        return read.promise

    def _read(self, store: PrefixStore, read: _Read, what: str) -> None:
        """Runs in a thread. Reads blocks up to the first token without a good file."""
        with self._boundary.guard("loads nothing for", what):
            read.promise = self._promise_of(store, read)
        read.is_over.set()

    def _promise_of(self, store: PrefixStore, read: _Read) -> _Promise | None:
        model, settings, start = self._model, self._settings, read.start
        block_size, heads = model.tokens_per_block, (0, model.total_kv_heads)
        read.walk.resume(store.finder)
        for error in store.index.take_failures():
            self._boundary.caught(
                error, "did not read what a prompt may begin with", "", "lookup_failures"
            )
        match = read.walk.match
        # TensorRT-LLM computes at least the last token: its logits choose the next one.
        num_blocks = (min(match.num_tokens, read.walk.num_tokens - 1) - start) // block_size
        block = model.spec(1, heads)
        num_blocks = min(
            num_blocks, read.room // (block.sub_block_bytes * block.sub_blocks_per_block)
        )
        if num_blocks * block_size < settings.min_tokens or read.progress.is_cancelled:
            return None
        spec = model.spec(num_blocks, heads)
        pool = torch.empty(spec.pool_shape, dtype=spec.torch_dtype)
        absent = [-1] * (start // block_size)
        table = BlockTable.packed([[*absent, *range(num_blocks)]])
        section = Section(spec.layers, model.view(pool, heads), table)
        stop = start + num_blocks * block_size
        stop = self._fill(store, match, start, stop, section, read.progress)
        num_blocks = (stop - start) // block_size
        if num_blocks * block_size < settings.min_tokens:
            return None
        blocks = pool.view(torch.uint8).numpy()[:num_blocks]
        return _Promise(blocks, start, start + num_blocks * block_size)

    def _fill(
        self,
        store: PrefixStore,
        match: Match,
        start: int,
        stop: int,
        section: Section,
        progress: Progress,
    ) -> int:
        """Fills the section up to the first bad file. Returns the token at which it stopped."""
        with self._boundary.guard("computes tokens that it found") as guard:
            try:
                store.load(match, start, stop, [section], progress=progress)
            except StoreError:
                if progress.is_cancelled:
                    return start  # a cancelled load does not count as a failure
                raise
        return max(start, progress.stop) if guard.failed else stop

    def _load(self, request_id: int, tracked: _Request, promise: _Promise) -> Load:
        assert self._store is not None  # there are no promises without a store
        block_size = self._model.tokens_per_block
        ids = tracked.block_ids[promise.start // block_size : promise.stop // block_size]
        if len(ids) != len(promise.blocks):
            raise InvalidArgumentError(
                f"request {request_id} has {len(tracked.block_ids)} blocks, expected at least "
                f"{promise.stop // block_size} for the {promise.stop} tokens that it was promised"
            )
        return Load(promise.blocks, ids, self._store.carried)


def _is_plain(request: Any) -> bool:
    """True if a request's keys and values depend only on its token ids and the model's files."""
    if getattr(request, "is_dummy_request", False):
        return False
    return all(getattr(request, name, None) is None for name in _NOT_PLAIN)


def _salt(request: Any) -> str | None:
    """Returns a request's cache_salt; None if it has a salt that cannot be read.

    A request of the C++ runtime, which KVCacheManager uses, has only a hash of the salt.
    """
    salt: str | None = getattr(request, "cache_salt", None)
    if salt is None and getattr(request, "cache_salt_id", None) is None:
        return ""
    return salt
