"""The scheduler of the connector, on rank 0: looks prompts up, and plans what a step copies.

TensorRT-LLM treats tokens that a connector has promised as computed, and a connector cannot report
later that a load has failed. So tokens are read and checked before they are promised, and their
data goes to the workers with the step's plan. Tokens of missing or broken files are not promised:
TensorRT-LLM computes them. Errors are caught, except where a promise cannot be kept: results would
be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvx_adapters.tensorrt_llm_plugin import api
from kvx_adapters.tensorrt_llm_plugin.model import Model
from kvx_adapters.tensorrt_llm_plugin.opened import opened_store
from kvx_adapters.tensorrt_llm_plugin.settings import Settings
from kvx_adapters.tensorrt_llm_plugin.steps import Load, Save, StepPlan
from kvx_core import BlockTable, InvalidArgumentError
from kvx_core.connector.boundary import Boundary
from kvx_core.snapshot import Section
from kvx_core.stores.prefix import Match, PrefixStore

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
class _Request:
    salt: str
    num_prompt_tokens: int
    promise: _Promise | None = None  # until it is sent to the workers
    tokens: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    saved: int = 0  # tokens that are in the store, or need not be saved


class KVXConnectorScheduler(api.KvCacheConnectorScheduler):  # type: ignore[misc]
    """KVX as a KV cache connector's scheduler.

    Raises InvalidArgumentError, UnsupportedError at start-up; later only InvalidArgumentError, if
    TensorRT-LLM gives a request too few blocks for the tokens it was promised.

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

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """How many tokens past `num_computed_tokens` the next step loads before its forward pass.

        Called once for each allocation of a request's blocks. Whole blocks only, as in
        TensorRT-LLM's own connectors: it may still be copying a block that it has begun.
        Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/connectors/mooncake_store/scheduler.py
        """
        with self._boundary.guard("loads nothing for", f"request {request.request_id}"):
            return self._promise(request, num_computed_tokens), False
        self._requests.pop(request.request_id, None)
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Does nothing: build_connector_meta gets all blocks, including some not known here."""

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        plan = StepPlan()
        for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests):
            tracked = self._requests.get(data.request_id)
            if tracked is None:
                continue
            tracked.tokens.extend(data.new_tokens)
            tracked.block_ids.extend(data.new_block_ids)
            position = data.computed_position
            promise, tracked.promise = tracked.promise, None
            if promise is not None:
                plan.loads.append(self._load(data.request_id, tracked, promise))
                # The position does not count promised tokens; in the first versions it did.
                if position not in (promise.start, promise.stop):
                    del self._requests[data.request_id]
                    continue
                position = promise.stop
                tracked.saved = promise.stop
            with self._boundary.guard("did not save", f"request {data.request_id}") as guard:
                save = self._save(data.request_id, tracked, position + data.num_scheduled_tokens)
                if save is not None:
                    plan.saves.append(save)
            if guard.failed:
                del self._requests[data.request_id]
        return plan

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """False: TensorRT-LLM may free the blocks. Saves copy within their step."""
        self._requests.pop(request.request_id, None)
        return False

    def request_reset(self, request: Any) -> None:
        """The request lost its blocks and starts again. Called by TensorRT-LLM main only."""
        self._requests.pop(request.request_id, None)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """TensorRT-LLM computes tokens [start, end) of a promise itself. Called by main only.

        If this raises, the whole promise is loaded, which is correct too.
        """
        with self._boundary.guard("loads all that it promised to", f"request {request.request_id}"):
            tracked = self._requests.get(request.request_id)
            if tracked is not None and tracked.promise is not None:
                tracked.promise = self._without(tracked.promise, start, end)

    def _without(self, promise: _Promise, start: int, end: int) -> _Promise | None:
        """The blocks of a promise that hold none of these tokens."""
        if end <= promise.start or promise.stop <= start:
            return promise
        block_size = self._model.tokens_per_block
        if start <= promise.start:  # drops the beginning, or all
            first = min(end, promise.stop) // block_size * block_size
            blocks = promise.blocks[(first - promise.start) // block_size :]
            kept = _Promise(blocks, first, promise.stop)
        else:
            last = -(-start // block_size) * block_size
            blocks = promise.blocks[: (last - promise.start) // block_size]
            kept = _Promise(blocks, promise.start, last)
        return kept if len(kept.blocks) else None

    def _promise(self, request: Any, num_computed_tokens: int) -> int:
        """Tracks a request; returns how many tokens past `num_computed_tokens` it promises."""
        salt = _salt(request)
        if self._store is None or salt is None or not _is_plain(request):
            return 0
        request_id = request.request_id
        tokens = np.asarray(request.get_tokens(0), dtype=np.int64)
        tracked = self._requests[request_id] = _Request(salt, len(tokens))
        if num_computed_tokens % self._model.tokens_per_block:
            return 0
        if getattr(request, "return_context_logits", False):
            return 0  # needs the logits of every token of the prompt
        with self._boundary.guard("loads nothing for", f"request {request_id}"):
            tracked.promise = self._read(self._store.salted(salt), tokens, num_computed_tokens)
        if tracked.promise is None:
            return 0
        count = tracked.promise.stop - num_computed_tokens
        api.logger.info(
            f"KVX: request {request_id} takes {count} of {len(tokens)} prompt tokens from the store"
        )
        return count

    def _read(
        self, store: PrefixStore, tokens: npt.NDArray[np.int64], start: int
    ) -> _Promise | None:
        """Reads blocks from token `start` on, as far as the store has them in good files."""
        model, settings = self._model, self._settings
        block_size, heads = model.tokens_per_block, (0, model.total_kv_heads)
        match = store.lookup(tokens)
        # At least one token is computed: its logits choose the next one.
        num_blocks = (min(match.num_tokens, len(tokens) - 1) - start) // block_size
        block = model.spec(1, heads)
        block_bytes = block.sub_block_bytes * block.sub_blocks_per_block
        waiting = sum(r.promise.blocks.nbytes for r in self._requests.values() if r.promise)
        num_blocks = min(num_blocks, (settings.max_load_bytes - waiting) // block_bytes)
        if num_blocks * block_size < settings.min_tokens:
            return None
        spec = model.spec(num_blocks, heads)
        pool = torch.empty(spec.pool_shape, dtype=spec.torch_dtype)
        absent = [-1] * (start // block_size)
        table = BlockTable.packed([[*absent, *range(num_blocks)]])
        section = Section(spec.layers, model.view(pool, heads), table)
        stop = self._fill(store, match, start, start + num_blocks * block_size, section)
        num_blocks = (stop - start) // block_size
        if num_blocks * block_size < settings.min_tokens:
            return None
        blocks = pool.view(torch.uint8).numpy()[:num_blocks]
        return _Promise(blocks, start, start + num_blocks * block_size)

    def _fill(
        self, store: PrefixStore, match: Match, start: int, stop: int, section: Section
    ) -> int:
        """Fills the section up to the first bad file. Returns the token at which it stopped."""
        for span in match.spans:
            lo, hi = max(start, span.start), min(stop, span.stop)
            if lo < hi:
                with self._boundary.guard("computes", f"tokens from {lo} on") as guard:
                    store.load(match, lo, hi, [section])
                if guard.failed:
                    return lo
        return stop

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

    def _save(self, request_id: int, tracked: _Request, stop: int) -> Save | None:
        """What to store once `stop` tokens have been computed.

        Full chunks when they are complete, and the whole prompt when its end is computed.
        """
        assert self._store is not None  # without a store no request is tracked
        stop = min(stop, len(tracked.tokens))  # without draft tokens
        full = stop - stop % self._store.chunk_tokens
        if stop >= tracked.num_prompt_tokens > tracked.saved:
            full = max(full, tracked.num_prompt_tokens)
        if not self._settings.save_generated:
            full = min(full, tracked.num_prompt_tokens)
        if full <= tracked.saved:
            return None
        start = tracked.saved - tracked.saved % self._store.chunk_tokens
        tracked.saved = full
        return Save(
            request_id=request_id,
            salt=tracked.salt,
            tokens=np.asarray(tracked.tokens[:full], dtype=np.int64),
            start=start,
            block_ids=tracked.block_ids[: -(-full // self._model.tokens_per_block)],
        )


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
