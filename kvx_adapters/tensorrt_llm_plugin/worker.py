"""The worker of the connector, on every rank: writes blocks into its pool, and saves tokens of it.

A load is complete before the forward pass begins. A save copies into host memory before its step
ends, because TensorRT-LLM may give the blocks to other requests afterwards; a thread writes the
file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvx_adapters.tensorrt_llm_plugin import api
from kvx_adapters.tensorrt_llm_plugin.model import Model
from kvx_adapters.tensorrt_llm_plugin.opened import opened_store
from kvx_adapters.tensorrt_llm_plugin.settings import Settings
from kvx_adapters.tensorrt_llm_plugin.steps import Load
from kvx_adapters.tensorrt_llm_plugin.witness import weights_changed, weights_of_process
from kvx_core import (
    BlockTable,
    CacheView,
    InvalidArgumentError,
    OutOfRangeError,
    UnsupportedError,
    migrate,
)
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.counts import Counts
from kvx_core.connector.plan import BlockIds
from kvx_core.connector.saver import Saver
from kvx_core.connector.scoped import Scoped
from kvx_core.snapshot import Section, StorageFormat
from kvx_core.stores.dry_run import never_found


class KVXConnectorWorker(api.KvCacheConnectorWorker):  # type: ignore[misc]
    """KVX as a KV cache connector's worker. Owns threads, which `close` ends.

    Raises InvalidArgumentError, UnsupportedError at start-up. Later only `start_load_kv` raises,
    because TensorRT-LLM would treat unwritten blocks, or blocks of old weights, as computed.

    Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/connectors/kv_cache_connector.py,
    KvCacheConnectorWorker
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._settings = Settings.read()
        self._model = Model.of(llm_args, self._settings)
        self._heads = self._model.heads_of(api.mpi_rank())
        self._store = opened_store(self._model, self._settings)
        self._boundary = Boundary(api.logger.warning)
        self._weights = weights_of_process()
        self._saver: Saver | None = None  # made by register_kv_caches

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """Takes the rank's pool.

        kv_cache_tensor: (num_blocks, num_layers, kv_factor, num_kv_heads * tokens_per_block *
                         head_dim)
        Raises InvalidArgumentError if the pool does not match the model and the arguments, or
        cannot be stored in the format of the settings. Raises UnsupportedError if no lookup would
        find its entries.
        """
        expected = self._model.spec(1, self._heads).torch_dtype
        if kv_cache_tensor.dtype != expected:
            raise InvalidArgumentError(
                f"kv_cache_tensor is of {kv_cache_tensor.dtype}, expected {expected} by "
                "kv_cache_config.dtype and the model's config. Where the checkpoint decides, set "
                "kv_cache_config.dtype to what it says"
            )
        self._view: CacheView = self._model.view(kv_cache_tensor, self._heads)
        StorageFormat.of(self._settings.format).check(self._section(None))
        ranks = range(self._model.tensor_parallel_size)
        heads = [self._model.heads_of(rank) for rank in ranks]
        if self._store is not None and (
            reason := never_found(self._store, [self._section(None)], heads)
        ):
            raise UnsupportedError(f"KVX would store what it never finds: {reason}")
        self._blocks = kv_cache_tensor
        if self._store is not None and self._saver is None:
            self._saver = Saver(
                Scoped(self._store),
                self._settings,
                self._boundary,
                Counts(),
                self._sections,
                range(self._model.num_layers),
                self._heads,
            )

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Takes the rank's pool in the form in which KVCacheManagerV2 describes it.

        Raises UnsupportedError for any layout but the one that register_kv_caches takes.
        Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/connectors/kv_cache_layout.py
        """
        model = self._model
        roles = ("key", "value")[: model.kv_factor]
        expected = [(layer, role, 1) for layer in range(model.num_layers) for role in roles]
        regions = [
            region
            for group in layout.groups
            for region in (*group.regions, *getattr(group, "replicated_regions", ()))
        ]
        found = [[(b.layer_id, b.role, b.expansion) for b in r.buffers] for r in regions]
        windows = [group.window_size for group in layout.groups]
        if found != [expected] or windows != [None]:
            raise UnsupportedError(
                f"the KV cache has the regions {found} and the windows {windows}, expected one "
                f"region without a window, {' and '.join(roles)} of each of {model.num_layers} "
                "layers. Set kv_cache_config.use_kv_cache_manager_v2 to False"
            )
        (region,) = regions
        blocks = region.as_tensor(model.spec(1, self._heads).torch_dtype)
        shape = (region.num_slots, model.num_layers, model.kv_factor, -1)
        self.register_kv_caches(blocks.view(shape))

    def start_load_kv(self, stream: Any) -> None:
        """Writes the blocks that this step's forward pass reads, on its stream."""
        plan = self._metadata
        if plan is None:
            return
        # TensorRT-LLM keeps the plan until it has a new one.
        loads, plan.loads = plan.loads, []
        if loads and self._are_new:
            raise weights_changed("the loads of this step")
        with torch.cuda.stream(stream):
            for load in loads:
                self._write(load)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Does nothing: start_load_kv has written all layers."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Does nothing: wait_for_save copies all layers."""

    def wait_for_save(self, stream: Any) -> None:
        """Copies the tokens of this step's saves. A thread writes the files later."""
        plan = self._metadata
        if plan is None or self._saver is None:
            return
        saves, plan.saves = plan.saves, []
        if self._are_new:
            return
        with self._boundary.guard("did not save a step"), torch.cuda.stream(stream):
            self._saver.save(plan, saves)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Reports no requests: saves and loads end within their step."""
        return [], []

    def close(self) -> None:
        """Waits at most shutdown_seconds until all files are written. TensorRT-LLM does not call
        it; the interpreter waits for the files at exit as well.
        """
        with self._boundary.guard("did not shut down"):
            if self._saver is not None:
                self._saver.shutdown()

    @property
    def _are_new(self) -> bool:
        """True if this rank's weights have changed, or are changing, since the start."""
        return self._weights.is_changing or self._weights.generation > 0

    def _write(self, load: Load) -> None:
        """Writes this rank's heads of a load's blocks. Raises OutOfRangeError."""
        wrong = [i for i in load.block_ids if not 0 <= i < len(self._blocks)]
        if wrong:
            raise OutOfRangeError(
                f"block_ids has {wrong[0]}, expected one of the pool's {len(self._blocks)} blocks"
            )
        if self._store is not None:
            self._store.carry(load.carried)
        model, device, count = self._model, self._blocks.device, len(load.block_ids)
        all_heads, (first, last) = (0, model.total_kv_heads), self._heads
        spec = model.spec(count, all_heads)
        pool = torch.from_numpy(load.blocks).view(spec.torch_dtype).view(spec.pool_shape)
        tables = torch.tensor([[*range(count)], load.block_ids], device=device)
        src = model.view(pool.to(device), all_heads).at(tables[:1], head_start=first)
        dst = self._view.at(tables[1:])
        migrate(src, dst, [count * model.tokens_per_block], num_heads=last - first)

    def _sections(self, block_ids: BlockIds, num_tokens: int) -> list[Section]:
        """Returns one section with this rank's heads of all layers of a request's first tokens."""
        num_blocks = -(-num_tokens // self._model.tokens_per_block)
        return [self._section(BlockTable.packed([block_ids[0][:num_blocks]]))]

    def _section(self, table: BlockTable | None) -> Section:
        """Returns a section with this rank's heads of all layers. table: a request's, or None"""
        return Section(tuple(range(self._model.num_layers)), self._view, table)
