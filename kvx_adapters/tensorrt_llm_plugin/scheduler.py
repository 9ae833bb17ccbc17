"""The scheduler of the connector, on rank 0: looks prompts up, and plans what a step copies.

TensorRT-LLM treats tokens that a connector has promised as computed, and a connector cannot report
later that a load has failed. So tokens are read and checked before they are promised, and their
data goes to the workers with the step's plan. Tokens of missing or broken files are not promised:
TensorRT-LLM computes them. Errors are caught, except where a promise cannot be kept: results would
be wrong.
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
from kvx_core.connector.settings import Scoped
from kvx_core.connector.threads import Workers
from kvx_core.snapshot import Section, StoreError
from kvx_core.stores.loads import Progress
from kvx_core.stores.match import Match
from kvx_core.stores.prefix import PrefixStore
from kvx_core.stores.walk import Walk

# Keys and values of a request with one of these depend on more than its token ids.
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
    """A lookup in a thread that reads what it finds."""

    walk: Walk
    start: int
    room: int  # bytes that it may take
    progress: Progress = field(default_factory=Progress)
    promise: _Promise | None = None
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def position(self) -> tuple[int, int]:
        """Tokens found, and tokens read."""
        return self.walk.num_found, self.progress.stop


@dataclass(slots=True)
class _Request:
    """A request, as a Policy reads it."""

    request_id: int
    num_prompt_tokens: int
    source: Any  # TensorRT-LLM's own
    promise: _Promise | None = None  # until it is sent to the workers
    all_token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


class _Policy(Policy):
    """A Policy of TensorRT-LLM's requests."""

    __slots__ = ()

    def salt_of(self, request: Any) -> str | None:
        return _salt(request.source) if _is_plain(request.source) else None


class KVXConnectorScheduler(api.KvCacheConnectorScheduler):  # type: ignore[misc]
    """KVX as a KV cache connector's scheduler.

    Raises InvalidArgumentError, UnsupportedError at start-up; later only InvalidArgumentError, if
    TensorRT-LLM gives a request too few blocks for the tokens it was promised, or new weights
    between the promise and its plan.

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
        self._policy: Policy | None = None  # of what is saved
        self._weights = weights_of_process()
        if self._store is not None:
            api.logger.info(self._settings.told(self._model.fingerprint, self._store.chunk_tokens))
            if warning := self._settings.warned():
                api.logger.warning(warning)
            self._policy = _Policy(
                Scoped(self._store),
                self._boundary,
                Lookups(self._boundary, threads=1),
                self._store.chunk_tokens,
                save_generated=self._settings.save_generated,
                consumes=False,  # what is loaded has been read before
                epochs=Epochs(self._weights, log=self._weights_change),
            )

    def _weights_change(self, line: str) -> None:
        api.logger.warning("KVX shares nothing until the next start: the weights have changed")

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """How many tokens past `num_computed_tokens` the next step loads before its forward pass.

        Waits for the store while it finds or reads a chunk every chunk_seconds, and at most
        lookup_seconds: TensorRT-LLM cannot be told to ask again. If that is not enough it computes,
        and the index knows next time what the lookup goes on to find.

        Called once for each allocation of a request's blocks. Whole blocks only, as in
        TensorRT-LLM's own connectors: it may still be copying a block that it has begun.
        Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/connectors/mooncake_store/scheduler.py
        """
        with self._boundary.guard("loads nothing for", f"request {request.request_id}"):
            return self._promise(request, num_computed_tokens), False
        self._forget(request.request_id)
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Does nothing: build_connector_meta gets all blocks, including some not known here."""

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        plan = StepPlan()
        if self._policy is not None:
            self._policy.look_at_weights()
        for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests):
            tracked = self._requests.get(data.request_id)
            if tracked is None:
                continue
            assert self._policy is not None  # without a store no request is tracked
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
        """False: TensorRT-LLM may free the blocks. Saves copy within their step."""
        self._forget(request.request_id)
        return False

    def request_reset(self, request: Any) -> None:
        """The request lost its blocks and starts again. Called by TensorRT-LLM main only."""
        self._forget(request.request_id)

    def _forget(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
        if self._policy is not None:
            self._policy.ended(request_id)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """TensorRT-LLM computes tokens [start, end) of a promise itself. Called by main only.

        If this raises, the whole promise is loaded, which is correct too.
        """
        with self._boundary.guard("loads all that it promised to", f"request {request.request_id}"):
            tracked = self._requests.get(request.request_id)
            if tracked is not None and tracked.promise is not None:
                tracked.promise = self._without(tracked.promise, start, end)

    def _without(self, promise: _Promise, start: int, end: int) -> _Promise | None:
        """What is loaded of a promise if tokens [start, end) are computed: the blocks that have
        other tokens, without a gap.
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
            return 0  # needs the logits of every token of the prompt
        waiting = sum(r.promise.blocks.nbytes for r in self._requests.values() if r.promise)
        room = self._settings.max_load_bytes - waiting
        if self._reader.stuck_seconds() > self._settings.chunk_seconds:
            return 0  # the store does not answer
        store, what = self._store.salted(salt), f"request {request_id}"
        read = _Read(store.walk(store.chain_of(tokens), len(tokens)), num_computed_tokens, room)
        self._reader.submit(lambda: self._read(store, read, what))
        promise = self._wait_for(read)
        self._policy.look_at_weights()  # which may have changed meanwhile
        if promise is None or self._policy.scope_of(tracked) is None:
            return 0
        tracked.promise = promise
        count = promise.stop - num_computed_tokens
        api.logger.info(
            f"KVX: request {request_id} takes {count} of {len(tokens)} prompt tokens from the store"
        )
        return count

    def _wait_for(self, read: _Read) -> _Promise | None:
        """What has been read; None if that takes too long. Then nothing more is read."""
        settings, position = self._settings, read.position
        deadline = time.monotonic() + settings.lookup_seconds
        while not read.is_over.wait(min(settings.chunk_seconds, deadline - time.monotonic())):
            before, position = position, read.position
            if position == before or time.monotonic() >= deadline:
                read.progress.is_cancelled = True
                return None
        return read.promise

    def _read(self, store: PrefixStore, read: _Read, what: str) -> None:
        """Runs in a thread. Reads blocks as far as the store has them in good files."""
        with self._boundary.guard("loads nothing for", what):
            read.promise = self._promise_of(store, read)
        read.is_over.set()

    def _promise_of(self, store: PrefixStore, read: _Read) -> _Promise | None:
        model, settings, start = self._model, self._settings, read.start
        block_size, heads = model.tokens_per_block, (0, model.total_kv_heads)
        read.walk.go_on(store.finder)
        for error in store.index.take_failures():
            self._boundary.caught(
                error, "did not read what a prompt may begin with", "", "lookup_failures"
            )
        match = read.walk.match
        # At least one token is computed: its logits choose the next one.
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
                    return start  # nobody waits for it, so nothing has failed
                raise
        return max(start, progress.stop) if guard.failed else stop

    def _load(self, request_id: int, tracked: _Request, promise: _Promise) -> Load:
        assert self._store is not None  # else nothing is promised
        block_size = self._model.tokens_per_block
        ids = tracked.block_ids[promise.start // block_size : promise.stop // block_size]
        if len(ids) != len(promise.blocks):
            raise InvalidArgumentError(
                f"request {request_id} has {len(tracked.block_ids)} blocks, expected at least "
                f"{promise.stop // block_size} for the {promise.stop} tokens that it was promised"
            )
        return Load(promise.blocks, ids, self._store.carried)


def _is_plain(request: Any) -> bool:
    """Whether its keys and values depend only on its token ids and the model's files."""
    if getattr(request, "is_dummy_request", False):
        return False
    return all(getattr(request, name, None) is None for name in _NOT_PLAIN)


def _salt(request: Any) -> str | None:
    """The request's cache_salt; None if it has one that cannot be read.

    A request of the C++ runtime, which KVCacheManager uses, has only a hash of it.
    """
    salt: str | None = getattr(request, "cache_salt", None)
    if salt is None and getattr(request, "cache_salt_id", None) is None:
        return ""
    return salt
