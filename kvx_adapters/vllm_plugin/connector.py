"""KVXConnector: a KV connector for vLLM that keeps prefixes in a KVX store.

    --kv-transfer-config '{"kv_connector": "KVXConnector", "kv_role": "kv_both",
                           "kv_connector_extra_config": {"path": "/the/stores/directory"}}'

Any engine that serves the same model finds the saved prefixes: vLLM with another block size,
layout, cache dtype, tensor-parallel size or version, or another engine. settings.py has the
settings. KVXConnector only translates vLLM's hooks: scheduler.py plans, worker.py copies.

Source: vllm 0.26 to 0.33 distributed/kv_transfer/kv_connector/v1/base.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.model_executor.layers import rotary_embedding
from vllm.version import __version__ as vllm_version

from kvx_adapters import vllm
from kvx_adapters.vllm_plugin import is_alone
from kvx_adapters.vllm_plugin.items import VllmItems
from kvx_adapters.vllm_plugin.scheduler import SchedulerHalf
from kvx_adapters.vllm_plugin.settings import (
    Settings,
    check_engine,
    check_model,
    check_settings,
)
from kvx_adapters.vllm_plugin.states import States
from kvx_adapters.vllm_plugin.stats import KVXPromMetrics, KVXStats
from kvx_adapters.vllm_plugin.steps import RankReports, StepPlan
from kvx_adapters.vllm_plugin.stores import Stores
from kvx_adapters.vllm_plugin.windows import reach_of, window_of
from kvx_adapters.vllm_plugin.witnesses import weights_of
from kvx_adapters.vllm_plugin.worker import Held, WorkerHalf
from kvx_core import CacheFacts, UnsupportedError
from kvx_core.connector.adapters import LoadedAdapters
from kvx_core.connector.boundary import Boundary, Guard
from kvx_core.connector.choices import Choices
from kvx_core.connector.epochs import Epochs
from kvx_core.connector.lookups import Lookups
from kvx_core.connector.plan import Save, Scope
from kvx_core.connector.spread import SaveBudget
from kvx_core.connector.state_positions import StatePositions
from kvx_core.snapshot import Section, StorageFormat, StoreError
from kvx_core.stores.dry_run import never_found
from kvx_core.stores.prefix import PrefixStore

logger = init_logger("vllm.kvx")

# Since vLLM 0.30 a worker can report the requests whose loads have failed. Before, it reports
# blocks, whose ids are ambiguous with several KV cache groups.
_BY_REQUEST = hasattr(base, "KVConnectorTransferResults")


class KVXConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """KVX as a KV connector. Raises InvalidArgumentError, UnsupportedError, only at start-up."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = Settings.of(vllm_config)
        check_engine(vllm_config, self._settings)
        check_model(vllm_config.model_config)
        check_settings(vllm_config.kv_transfer_config)
        windows = [window_of(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
        shortest = min(filter(None, windows), default=0)
        self._boundary = Boundary(logger.warning)
        self._states = States.of(vllm_config, kv_cache_config)
        reach = reach_of(kv_cache_config.kv_cache_groups)
        self._stores = _stores(
            self._boundary, vllm_config, self._settings, shortest, reach, self._states
        )
        self._weights = weights_of(vllm_config, in_worker=role is KVConnectorRole.WORKER)
        self._worker: WorkerHalf | None = None
        self._scheduler: SchedulerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._new_scheduler(len(windows) > 1, shortest)
            if isinstance(self._stores, Stores):
                stores = self._stores
                logger.info("%s", self._settings.told(stores.fingerprint, stores.chunk_tokens))
                if said := stores.said_of_layers:
                    logger.info("%s", said)
                if warning := self._settings.limit_warning():
                    logger.warning("%s", warning)

    def _new_scheduler(self, hybrid: bool, window: int) -> SchedulerHalf:
        transfer = self._vllm_config.kv_transfer_config
        if self._states and not is_alone(transfer):
            raise UnsupportedError(
                "KVXConnector is beside another connector, expected it alone for a model whose "
                "layers keep a state: vLLM loses a state that a connector loads within a step, and "
                "what is computed then would be stored. Serve it with one of them, and with the "
                "plugin kvx in VLLM_PLUGINS if that is set"
            )
        is_there = isinstance(self._stores, Stores)
        produces, consumes = (
            transfer.is_kv_producer and is_there,
            transfer.is_kv_consumer and is_there,
        )
        if consumes and hybrid and not _BY_REQUEST:
            logger.warning(
                "KVX loads nothing: with several KV cache groups vllm %s cannot be told that a "
                "load has failed. Use 0.30 or later, or --disable-hybrid-kv-cache-manager",
                vllm_version,
            )
            consumes = False
        if produces and 0 < window < self._stores.chunk_tokens:
            logger.warning(
                "chunk_tokens is %d, expected at most the sliding window, %d: when a chunk is full "
                "its beginning may have left the window, and then it is not saved",
                self._stores.chunk_tokens,
                window,
            )
        # If a step loads blocks, vLLM adds them to its prefix cache before the step has run, and
        # does not remove all of them if the load fails. It adds the blocks of an asynchronous load
        # after the load.
        # Source: vllm 0.32 v1/core/sched/scheduler.py, _update_requests_with_invalid_blocks
        shares = self._vllm_config.cache_config.enable_prefix_caching
        settings, stores = self._settings, self._stores
        config = self._vllm_config
        epochs = Epochs(
            self._weights,
            config.parallel_config.world_size,
            name_files=stores.files.name if isinstance(stores, Stores) else None,
            log=lambda line: logger.info("KVX: %s", line),
            boundary=self._boundary,
            trusts_said=settings.weights == "versioned",
        )
        return SchedulerHalf(
            stores=self._stores,
            boundary=self._boundary,
            lookups=Lookups(
                self._boundary, threads=settings.lookup_threads, seconds=settings.lookup_seconds
            ),
            min_tokens=settings.min_tokens,
            save_generated=settings.save_generated,
            chunk_tokens=self._stores.chunk_tokens,
            produces=produces,
            consumes=consumes,
            asynchronous=settings.loads_beside or shares or hybrid or bool(window),
            window=window,
            # A state does not wait: the next step changes it.
            spread=None if self._states else SaveBudget(self._stores.chunk_tokens),
            states=StatePositions(settings.state_every_tokens) if self._states else None,
            offered=self._states.offered if self._states else None,
            others_fill=not is_alone(transfer),
            epochs=epochs,
            items=VllmItems(config, settings) if isinstance(stores, Stores) else None,
            adapters=LoadedAdapters(config.parallel_config.world_size),
            adapted=stores.adapted if isinstance(stores, Stores) else None,
            block_size=self._vllm_config.cache_config.block_size,
            choices=Choices(transfer.kv_load_failure_policy == "recompute")
            if settings.chooses
            else None,
        )

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        config = self._vllm_config
        layers = config.compilation_config.static_forward_context
        states = self._states
        of_attention = replace(
            self._kv_cache_config, kv_cache_groups=list(states.attention.values())
        )
        groups = vllm.layer_groups(
            of_attention, layers, vllm_version, layout=vllm.layout_before_29()
        )
        _check_layers(groups, states, config)
        states.bind(layers)
        _tested(partial(states.self_test, layers), "recurrent states")
        held, sections = [], []
        stored = StorageFormat.of(self._settings.format)
        for index, group in zip(states.attention, groups, strict=True):
            _tested(partial(vllm.self_test_group, group, kv_caches, layers), "KV cache")
            for part in _alike(group, layers):
                facts = _facts(config, part.layers[0])
                view, kernel_blocks = vllm.group_view(part, kv_caches, facts, layers)
                sections.append(Section(part.layers, view, None, part.encoding))
                stored.check(sections[-1])
                held.append(Held(index, part, view, kernel_blocks))
        if isinstance(self._stores, Stores):
            _check_found(self._stores[Scope()], sections, config)
        device = next(iter(kv_caches.values())).device
        self._worker = WorkerHalf(
            self._stores,
            self._settings,
            held,
            device,
            self._boundary,
            by_request=_BY_REQUEST,
            weights=self._weights,
            states=states,
            rank=parallel_state.get_tensor_model_parallel_rank(),
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        with self._guard("did not load what a step reads"):
            if self._worker is not None:
                step = self._step()
                if step.is_idle:  # before 0.30 vLLM calls no wait_for_save for idle steps
                    self._worker.save(step)
                self._worker.load(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: start_load_kv has loaded all layers when it returns."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if not self._settings.layerwise:  # called for every layer of every step
            return
        with self._guard("did not save a layer"):
            if self._worker is not None:
                self._worker.save_layer(self._step(), layer_name)

    def wait_for_save(self) -> None:
        with self._guard("did not save a step"):
            if self._worker is not None and not self._step().is_idle:
                self._worker.save(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        with self._guard("did not report what is saved and loaded"):
            if self._worker is not None:
                self._worker.cancel(finished_req_ids)
                saved, loaded, _ = self._worker.take_results()
                return saved, loaded
        return None, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        saved, loaded, failed = set[str](), set[str](), set[str]()
        with self._guard("did not report what is saved and loaded"):
            if self._worker is not None:
                self._worker.cancel(finished_req_ids)
                saved, loaded, failed = self._worker.take_results()
        return base.KVConnectorTransferResults(saved, loaded, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        with self._guard("did not report what could not be loaded"):
            if self._worker is not None:
                return self._worker.take_failed_blocks()
        return set()

    def get_kv_connector_stats(self) -> KVXStats | None:
        """Returns the stats of this half. vLLM asks both halves."""
        with self._guard("did not report its stats"):
            if self._worker is not None:
                return self._worker.take_stats()
            stats = KVXStats(self._boundary.take_counts())
            if self._scheduler is not None:
                stats.add(**self._scheduler.lookups.take_counts())
                stats.add_by_reason("unshared_requests", self._scheduler.take_unshared())
            return None if stats.is_empty() else stats
        return None

    def build_connector_worker_meta(self) -> RankReports | None:
        with self._guard("did not report changes of weights"):
            report = None if self._worker is None else self._worker.take_report()
            if report is not None:
                return RankReports({self._vllm_config.parallel_config.rank: report})
        return None

    def save_now(self, save: Save) -> bool:
        """Stores the save of `to_hand_over` before it returns. Returns True if all is stored.

        handover.py calls it; it is no hook of vLLM.
        """
        with self._guard("did not hand over", f"request {save.request_id}"):
            return self._worker is not None and self._worker.save_now(save)
        return False

    def shutdown(self) -> None:
        with self._guard("did not shut down"):
            if self._worker is not None:
                self._worker.shutdown()
            elif self._scheduler is not None:
                self._scheduler.shutdown()

    def _step(self) -> StepPlan:
        step = self._get_connector_metadata()
        assert isinstance(step, StepPlan)
        return step

    # ---- scheduler ----

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        with self._guard("found nothing for", f"request {request.request_id}"):
            return self._half.num_new_matched_tokens(request, num_computed_tokens)
        self._half.forget(request.request_id)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        block_ids = blocks.get_block_ids()
        with self._guard("plans nothing for", f"request {request.request_id}") as guard:
            self._half.blocks_allocated(request, block_ids, num_external_tokens)
        if guard.failed:
            self._half.give_up(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        with self._guard("did not plan what to save") as guard:
            self._half.plan_saves(scheduler_output)
        if guard.failed:  # the block ids of requests may be out of date
            self._half.forget_all()
        return self._half.take_step(scheduler_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        with self._guard("did not save", f"request {request.request_id}", count="dropped_saves"):
            return self._half.has_finished(request, block_ids), None
        self._half.ended(request.request_id)
        return False, None

    def to_hand_over(self, request: Any) -> Save | None:
        """Returns the save of a running request's missing tokens, for the worker's `save_now`.

        None: the request may not be saved now. handover.py calls it; it is no hook of vLLM.
        """
        with self._guard("did not hand over", f"request {request.request_id}"):
            return self._half.to_hand_over(request)
        return None

    def update_connector_output(self, connector_output: Any) -> None:
        with self._guard("did not read which loads have failed") as guard:
            self._half.blocks_failed(connector_output.invalid_block_ids or ())
            self._half.reported(
                failed=getattr(connector_output, "failed_recving", None) or (),
                finished=connector_output.finished_recving or (),
                blocks=bool(connector_output.invalid_block_ids),
            )
        if guard.failed:
            self._half.give_up_loads()
        with self._guard("did not read reports of changed weights") as guard:
            found = getattr(connector_output, "kv_connector_worker_meta", None)
            if isinstance(found, RankReports):
                self._half.take_reports(found.reports)
        if guard.failed:
            self._half.stop()

    def reset_cache(self) -> bool:
        with self._guard("shares nothing any more") as guard:
            self._half.reset()
            logger.info("KVX forgets what it has looked up. What is stored stays")
        if guard.failed:
            self._half.stop()
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # an engine computes tokens again that were not saved

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler

    # ---- both ----

    def _guard(self, failed_to: str, of: str = "", *, count: str = "errors") -> Guard:
        """Guards a call from vLLM into the scheduler's or the worker's half."""
        return self._boundary.guard(failed_to, of, count=count)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise"))  # a full graph would skip save_kv_layer

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVXStats:
        return KVXStats(data)

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVXPromMetrics:
        return KVXPromMetrics(*args)


@dataclass(frozen=True, slots=True)
class _BrokenStore:
    """Takes the place of Stores if the store is broken: loads fail, saves are dropped."""

    error: StoreError
    chunk_tokens: int = 1
    fingerprint: str = ""

    def __getitem__(self, scope: Scope) -> PrefixStore:
        raise StoreError(f"the store was broken when the engine started: {self.error}")


def _stores(boundary: Boundary, *arguments: Any) -> Stores | _BrokenStore:
    """Returns the stores, or a _BrokenStore: a broken store counts as an error, but ends no engine.

    arguments: those of Stores
    Raises InvalidArgumentError, UnsupportedError.
    """
    try:
        stores = Stores(*arguments)
        stores.chunk_tokens  # noqa: B018
    except StoreError as error:
        boundary.caught(error, "saves and loads nothing until the next start", "", "errors")
        return _BrokenStore(error)
    return stores


def _facts(config: Any, layer: int | None = None) -> CacheFacts:
    """Returns the facts of this rank's cache without a fingerprint: weights may change, and the
    store of a load or a save has the fingerprint.

    layer: the layer whose heads are counted

    A connector does not see the model, but vLLM keeps all rotary embeddings of a process.
    Source: vllm 0.32 model_executor/layers/rotary_embedding/__init__.py, get_rope
    """
    ranks = config.parallel_config.tensor_parallel_size
    rank = parallel_state.get_tensor_model_parallel_rank()
    return vllm.cache_facts(
        config.model_config,
        getattr(rotary_embedding, "_ROPE_DICT", {}).values(),
        version=vllm_version,
        fingerprint=None,
        first_kv_head=vllm.kv_heads_of(config.model_config, rank, ranks, layer)[0],
        layer=layer,
    )


def _check_found(store: PrefixStore, sections: Sequence[Section], config: Any) -> None:
    """Checks that lookups would find the entries that the workers of these layers store.

    Raises UnsupportedError.
    """
    ranks = config.parallel_config.tensor_parallel_size
    heads = {
        layer: [vllm.kv_heads_of(config.model_config, i, ranks, layer) for i in range(ranks)]
        for section in sections
        for layer in section.layers
    }
    if reason := never_found(store, sections, heads):
        raise UnsupportedError(f"KVXConnector would store what it never finds: {reason}")


def _check_layers(groups: Iterable[vllm.LayerGroup], states: States, config: Any) -> None:
    """Checks that this worker's cache has all layers of its part of the model, and no others.

    Raises UnsupportedError.
    """
    found = sorted(layer for group in groups for layer in group.layers)
    first, last = config.model_config.get_layers_start_end_indices(config.parallel_config)
    last = min(last, vllm.num_kv_layers(config.model_config))
    if found != [layer for layer in range(first, last) if states.has_kv(layer)]:
        raise UnsupportedError(
            f"the KV cache has layers {found}, expected each of {first} to {last - 1} once: "
            "KVXConnector does not serve models with other layers, or with a draft model's"
        )


def _alike(group: vllm.LayerGroup, layers: Mapping[str, Any]) -> list[vllm.LayerGroup]:
    """Splits a group by the sliding windows, heads and cache dtypes of its layers. In a group of
    vLLM all layers have blocks of equally many tokens, and with hybrid groups the same window.
    """
    found: dict[tuple[int, int, str], list[int]] = {}
    for i, (name, spec) in enumerate(zip(group.layer_names, group.specs, strict=True)):
        window = getattr(layers[name], "sliding_window", None) or 0
        found.setdefault((window, spec.num_kv_heads, spec.kv_cache_dtype), []).append(i)
    return [
        replace(
            group,
            layer_names=tuple(group.layer_names[i] for i in at),
            layers=tuple(group.layers[i] for i in at),
            specs=tuple(group.specs[i] for i in at),
            window=window,
        )
        for (window, _, _), at in sorted(found.items())
    ]


def _tested(self_test: Callable[[], None], of: str) -> None:
    """Has vLLM write and KVX read. Raises InvalidArgumentError if they differ."""
    try:
        self_test()
    except UnsupportedError as error:
        logger.warning("KVX has not tested its description of the %s: %s", of, error)
