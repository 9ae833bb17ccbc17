"""Witnesses: counts each call that may write an engine's weights, while it runs.

vLLM tells a connector nothing about weights, and the weights in a process cannot be digested: they
are sharded, fused, repacked and partly dropped. So this module wraps the methods that write
weights, on their classes, once per process.

    worker     reload_weights, start_weight_update, start_draft_weight_update, update_weights,
               finish_weight_update; sleep and discard if they drop weights
    model      load_weights, called by a user or by a worker's extension
    adapters   _load_adapter of the manager of LoRA adapters: see kvx_core.connector.adapters
    engine     collective_rpc and apply_model, unless the call is known to write no weights;
               set_weight_version, with which a user names weights

docs/security.md names the writes that none of these methods makes.
Source: vllm 0.26 to 0.32 v1/worker/gpu_worker.py, v1/worker/cpu_worker.py, v1/engine/core.py,
model_executor/model_loader/reload/inplace.py
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from vllm.logger import init_logger
from vllm.utils.import_utils import resolve_obj_by_qualname

from kvx_adapters.vllm_plugin.identity import AdapterFiles, adapter_settings, files_state
from kvx_core import KvxError
from kvx_core.connector.watched import Judge, watch
from kvx_core.connector.weights import AsRanksSay, Files, Unknown, Weights
from kvx_core.model.adapter_files import adapter_files_state

logger = init_logger("vllm.kvx")

# Methods that `collective_rpc` may run without a change of weights. Source: vllm 0.32
# v1/engine/core.py, v1/executor/abstract.py, v1/worker/worker_base.py
_WRITES_NONE = frozenset(
    {
        "add_lora",
        "annotate_profile",
        "check_health",
        "compute_weight_checksums",
        "determine_available_memory",
        "execute_dummy_batch",
        "get_cache_block_size_bytes",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_node_and_gpu_ids",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "take_draft_token_ids",
        "update_config",
        "wake_up",
    }
)
# Methods of a worker that are wrapped there: the wrapper decides if a call is a change.
_WORKER_METHODS = (
    "reload_weights",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "sleep",
    "discard",
)

# The weights by the id() of an engine's CacheConfig, which all parts of the engine in a process
# share, also those with a copy of its VllmConfig. An instance_id would not do: vLLM gives an engine
# a new one while it starts.
_engines: weakref.WeakValueDictionary[int, Weights] = weakref.WeakValueDictionary()
# The same, and the settings of adapters, by the id() of the LoRAConfig, which the manager of the
# adapters has.
_managers: dict[int, tuple[weakref.ref[Weights], str]] = {}
_in_change: ContextVar[bool] = ContextVar("kvx_in_change", default=False)


def weights_of(vllm_config: Any, *, in_worker: bool) -> Weights:
    """Returns the weights of an engine, and watches their changes in this process from now on.

    Both halves of a connector get the same object if they share a process.
    in_worker: True if this process has the model, False if it has the scheduler
    """
    (_watch_worker if in_worker else _watch_engine)(vllm_config)
    key = id(vllm_config.cache_config)
    weights = _engines.get(key)
    if weights is None:
        weights = _engines[key] = Weights()
    if in_worker and getattr(vllm_config, "lora_config", None) is not None:
        _watch_adapters(vllm_config, weights)
    return weights


def _watch_engine(vllm_config: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    _wrap(EngineCore, "collective_rpc", _collective_rpc)
    _wrap(EngineCore, "set_weight_version", _set_weight_version)
    _wrap(EngineCore, "reset_encoder_cache", _reset_encoder_cache)
    _wrap(Executor.get_class(vllm_config), "collective_rpc", _executor_rpc)
    _wrap(Scheduler, "reset_prefix_cache", _reset_prefix_cache)


def _watch_worker(vllm_config: Any) -> None:
    from vllm.model_executor.model_loader.utils import get_model_architecture

    worker = resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
    _wrap(worker, "load_model", _load_model)
    for name in _WORKER_METHODS:
        _wrap(worker, name, functools.partial(_worker_method, name))
    model = get_model_architecture(vllm_config.model_config)[0]
    _wrap(model, "load_weights", _load_weights)


def _watch_adapters(vllm_config: Any, weights: Weights) -> None:
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    settings = adapter_settings(vllm_config)
    _managers[id(vllm_config.lora_config)] = weakref.ref(weights), settings
    _wrap(LRUCacheWorkerLoRAManager, "_load_adapter", _load_adapter)


def _give_up(error: Exception) -> None:
    """Shares nothing any more: a change of weights may have gone unseen."""
    for weights in tuple(_engines.values()):
        weights.is_lost = True
    logger.warning(
        "KVX shares nothing until the next start: it may miss new weights", exc_info=error
    )


def _wrap(kind: type, name: str, judge: Judge) -> None:
    watch(kind, name, judge, _give_up)


@contextmanager
def _change(*engines: Weights) -> Iterator[None]:
    """A context for a change of these engines' weights. Changes inside belong to it."""
    token = _in_change.set(True)
    try:
        with ExitStack() as stack:
            for weights in engines:
                stack.enter_context(weights.change())
            yield
    finally:
        _in_change.reset(token)


def _of(owner: Any) -> Weights | None:
    """Returns the weights of the engine of a worker, a scheduler, an executor or an engine core."""
    config = getattr(owner, "vllm_config", None)
    return _engines.get(id(getattr(config, "cache_config", None)))


# ---- the engine's process ----


@contextmanager
def _collective_rpc(core: Any, method: Any, *arguments: Any, **keywords: Any) -> Iterator[None]:
    weights = _of(core)
    if weights is None or (isinstance(method, str) and method in _WRITES_NONE):
        yield
        return
    with _change(weights):
        if isinstance(method, str) and method in _WORKER_METHODS:
            weights.came_from(AsRanksSay())
            yield
            return
        name = method if isinstance(method, str) else getattr(method, "__qualname__", "a callable")
        logger.info("KVX: collective_rpc of %s counts as a change of weights", name)
        yield
        weights.came_from(Unknown())


@contextmanager
def _executor_rpc(executor: Any, method: Any, *arguments: Any, **keywords: Any) -> Iterator[None]:
    """Counts users' calls of the executor. vLLM itself passes it only names of methods."""
    if isinstance(method, str) or _in_change.get():
        yield
        return
    with _collective_rpc(executor, method):
        yield


@contextmanager
def _set_weight_version(core: Any, weight_version: str) -> Iterator[None]:
    yield
    if weights := _of(core):
        weights.say(str(weight_version))


@contextmanager
def _reset_encoder_cache(core: Any, *arguments: Any, **keywords: Any) -> Iterator[None]:
    """Notes that no output of an encoder of older weights is kept."""
    yield
    if weights := _of(core):
        weights.encoders = weights.generation


@contextmanager
def _reset_prefix_cache(scheduler: Any, *arguments: Any, **keywords: Any) -> Iterator[list[Any]]:
    """Counts resets that succeed: no request has blocks. Source: vllm 0.32 v1/core/block_pool.py"""
    done: list[Any] = []
    yield done
    if any(done) and (weights := _of(scheduler)):
        weights.num_resets += 1


# ---- a worker's process ----


@contextmanager
def _load_model(worker: Any, *arguments: Any, **keywords: Any) -> Iterator[None]:
    """Keeps the start of an engine from counting as a change of another engine in this process."""
    with _change(*filter(None, [_of(worker)])):
        yield


@contextmanager
def _worker_method(name: str, worker: Any, *arguments: Any, **keywords: Any) -> Iterator[None]:
    weights = _of(worker)
    if weights is None or not _may_write(name, *arguments, **keywords):
        yield
        return
    reloads = name == "reload_weights"
    before = _files(worker, *arguments, **keywords) if reloads else None
    try:
        with _change(weights):
            yield
            after = _files(worker, *arguments, **keywords) if reloads else None
            weights.came_from(before if before is not None and before == after else Unknown())
    except BaseException:
        weights.hold(False)  # vLLM ends an update that fails
        raise
    if name in ("start_weight_update", "start_draft_weight_update"):
        weights.hold(True)
    elif name == "finish_weight_update":
        weights.hold(False)


def _may_write(name: str, *arguments: Any, **keywords: Any) -> bool:
    """True if a call may write or drop weights. Sleep at level 1 keeps a copy of them."""
    if name == "sleep":
        level = keywords.get("level", arguments[0] if arguments else 1)
        keeps = isinstance(level, int) and level < 2
        logger.info("KVX: the engine sleeps at level %s, %s", level, _KEEPS if keeps else _DROPS)
        return not keeps
    if name == "discard":
        return "weights" in keywords.get("tags", arguments[0] if arguments else ("weights",))
    return True


_KEEPS = "which keeps its weights: what it has stored is found again afterwards"
_DROPS = "which drops its weights: nothing is shared until it has others"


def _files(
    worker: Any,
    weights_iterator: Any = None,
    weights_path: str | None = None,
    is_checkpoint_format: bool = True,
) -> Files | None:
    """Returns the files that `reload_weights` loads all weights from; None: no or unknown files."""
    if weights_iterator is not None or not is_checkpoint_format:
        return None
    model = worker.vllm_config.model_config
    with suppress(Exception):
        if weights_path is not None:
            return Files(str(weights_path), None, files_state(str(weights_path), None))
        if not model.model_weights:
            return Files(model.model, model.revision, files_state(model.model, model.revision))
    return None


@contextmanager
def _load_weights(model: Any, *arguments: Any, **keywords: Any) -> Iterator[None]:
    """Counts a change of all engines in this process: the call does not show whose model it is."""
    if _in_change.get():
        yield
        return
    with _change(*_engines.values()):
        yield
        for weights in _engines.values():
            weights.came_from(Unknown())


@contextmanager
def _load_adapter(manager: Any, request: Any) -> Iterator[None]:
    """Notes which files an adapter was loaded from. A load that fails leaves the old one in place.

    request: a LoRARequest
    Source: vllm 0.32 lora/worker_manager.py, LRUCacheWorkerLoRAManager.add_adapter
    """
    of_engine, settings = _managers.get(id(manager.lora_config), (lambda: None, ""))
    weights = of_engine()
    if weights is None:
        yield
        return
    if getattr(request, "is_3d_lora_weight", False):
        settings += " is_3d_lora_weight"
    before = _adapter_files(request, settings)
    yield
    source = before if before == _adapter_files(request, settings) else None
    name = functools.partial(_name_adapter, request, source)
    weights.adapters.loaded(request.lora_int_id, source, name)


def _adapter_files(request: Any, settings: str) -> AdapterFiles | None:
    """Returns the files of an adapter as they are now; None: there are none."""
    from vllm.lora.utils import get_adapter_absolute_path

    with suppress(Exception):
        directory = get_adapter_absolute_path(request.lora_path)
        state = adapter_files_state(directory)
        return AdapterFiles(request.lora_path, directory, state, settings)
    return None


def _name_adapter(request: Any, files: AdapterFiles | None) -> str | None:
    """Runs in a thread. Returns None if the files have changed since they were loaded."""
    try:
        return None if files is None else files.name()
    except (KvxError, OSError) as error:
        logger.warning("KVX shares no requests of adapter %s: %s", request.lora_name, error)
        return None
