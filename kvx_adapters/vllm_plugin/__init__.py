"""KVX in vLLM: `register` is the entry point `kvx` of vllm.general_plugins.

vLLM calls `register` in every process that it starts, before it knows the model. `register` only
registers names; their modules are imported when an engine uses them.

    CUSTOM        attention backend on CUDA: FlashAttention with a cache that KVX writes
    CPU_ATTN      vLLM's attention on CPU with a cache that KVX writes, if the environment has
                  KVX_VLLM_CPU_ATTENTION (on CPU vLLM ignores --attention-backend). 1: KVX writes
                  the bytes that vLLM would write, and vLLM writes FP8 caches itself. nearest: KVX
                  writes FP8 caches too and rounds to nearest, as on CUDA; vLLM's own write on CPU
                  rounds towards zero
    KVXConnector  KV connector that saves prefixes to a KVX store and loads them
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

FIRST_MINOR, LAST_MINOR = 26, 33  # of vLLM 0.x, whose plugin interfaces this module uses

_BACKEND = "kvx_adapters.vllm_plugin.attention.KVXFlashAttentionBackend"
_CPU_BACKEND = "kvx_adapters.vllm_plugin.cpu_attention.KVXCPUAttentionBackend"
_CONNECTOR = ("KVXConnector", "kvx_adapters.vllm_plugin.connector", "KVXConnector")
_CONFIG = "vllm.config.vllm"
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"

_logger = logging.getLogger("vllm.kvx")  # a child of vllm's logger: uses its handlers


def register() -> None:
    """Registers KVX's attention backends and connector with vLLM. Idempotent.

    Raises nothing: an error here would end every vLLM process, even processes without KVX. It logs
    each part that it cannot register.
    """
    try:
        _check_version()
    except Exception as error:
        _logger.warning("KVX is not registered: %s", error)
        return
    for name, registration in (
        ("attention backend CUSTOM", _register_backend),
        ("attention backend CPU_ATTN", _register_cpu_backend),
        ("KV connector KVXConnector", _register_connector),
        ("check of a start with KVXConnector", _check_early),
    ):
        try:
            registration()
        except Exception as error:
            _logger.warning("KVX's %s is not registered: %s", name, error)


def _check_version() -> None:
    from vllm import __version__ as version

    match = re.match(r"0\.(\d+)\.", version)
    if match is None or not FIRST_MINOR <= int(match[1]) <= LAST_MINOR:
        raise RuntimeError(
            f"vllm is {version}, expected 0.{FIRST_MINOR} to 0.{LAST_MINOR}, with which KVX has "
            "been tested. Install one of those, or a newer KVX"
        )


def _register_backend() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    _override(AttentionBackendEnum.CUSTOM, _BACKEND)


def _register_cpu_backend() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    chosen = os.environ.get("KVX_VLLM_CPU_ATTENTION", "0")
    if chosen in ("1", "nearest"):
        _override(AttentionBackendEnum.CPU_ATTN, _CPU_BACKEND)
    elif chosen != "0":
        raise ValueError(f"KVX_VLLM_CPU_ATTENTION is {chosen!r}, expected '0', '1' or 'nearest'")


def _override(backend: Any, path: str) -> None:
    from vllm.v1.attention.backends.registry import register_backend

    if backend.is_overridden() and backend.get_path() != path:
        raise ValueError(f"it is {backend.get_path()} already. Choose plugins by VLLM_PLUGINS")
    register_backend(backend, path)


def _register_connector() -> None:
    """Registers the connector now or, if vLLM's factory is not imported yet, after its import.

    Importing the factory takes a second, which processes without an engine should not spend.
    """
    if _FACTORY in sys.modules:
        factory = sys.modules[_FACTORY].KVConnectorFactory
        with suppress(ValueError):  # the connector is registered already
            factory.register_connector(*_CONNECTOR)
        _look_at_connectors(factory)
    elif not any(isinstance(finder, _WaitForFactory) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WaitForFactory())


def _check_early() -> None:
    """Has vLLM check the connector's settings and the model when it makes its configuration.

    vLLM makes it in the process that the user has started, before weights are loaded. There no hook
    of a connector sees both settings and model, and an error in an engine's own process ends up in
    the middle of the log.
    Source: vllm 0.32 config/vllm.py, VllmConfig.__post_init__
    """
    module = sys.modules.get(_CONFIG)  # without it this process makes no configuration
    if module is None or hasattr(module.VllmConfig.__post_init__, "checks_kvx"):
        return
    own = module.VllmConfig.__post_init__

    @wraps(own)
    def __post_init__(self: Any) -> None:
        transfer = self.kv_transfer_config
        if transfer is not None and transfer.kv_connector == _CONNECTOR[0]:
            from kvx_adapters.vllm_plugin.settings import check_model, check_settings

            check_settings(transfer)
            if self.model_config is not None:
                check_model(self.model_config)
        own(self)

    __post_init__.checks_kvx = True  # type: ignore[attr-defined]
    module.VllmConfig.__post_init__ = __post_init__


_engines: dict[str, str] = {}  # by engine id, the outermost connector that vLLM made


def _look_at_connectors(factory: Any) -> None:
    """Notes each connector that vLLM itself makes, not the connectors that a connector makes.

    Source: vllm 0.26 to 0.33 distributed/kv_transfer/kv_connector/factory.py, create_connector
    """
    own = factory.create_connector
    if hasattr(own, "kvx_looks"):
        return

    @wraps(own)
    def create_connector(config: Any, *arguments: Any, **keywords: Any) -> Any:
        transfer = config.kv_transfer_config
        if transfer is not None:
            _engines[transfer.engine_id] = transfer.kv_connector
        return own(config, *arguments, **keywords)

    create_connector.kvx_looks = True  # type: ignore[attr-defined]
    factory.create_connector = staticmethod(create_connector)


def is_alone(kv_transfer_config: Any) -> bool:
    """True if KVXConnector is an engine's only connector, so that no other one fills blocks.

    A connector that contains others, such as vLLM's MultiConnector, gives each of them a
    configuration that names that connector alone, but has the engine's id.
    """
    return _engines.get(kv_transfer_config.engine_id) == _CONNECTOR[0]


class _WaitForFactory(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _FACTORY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_load_factory, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _load_factory(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    load(module)
    register()
