"""Imports TensorRT-LLM's connector interface from the module that has it in this version.

Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/connectors/kv_cache_connector.py; 1.1 and 1.2:
_torch/pyexecutor/kv_cache_connector.py
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

_PLACES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)


def _engine() -> ModuleType:
    try:
        return import_module("tensorrt_llm")
    except ModuleNotFoundError as error:
        if error.name != "tensorrt_llm":
            raise
        raise ImportError(
            "kvx_adapters.tensorrt_llm_plugin runs inside TensorRT-LLM, and there is no module "
            "tensorrt_llm here. Install it, or use kvx_adapters.tensorrt_llm, which describes its "
            "caches without it",
            name="tensorrt_llm",
        ) from None


def _interface(version: str) -> ModuleType:
    for place in _PLACES:
        try:
            return import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # the module exists, but one that it imports does not
    raise ImportError(
        f"tensorrt_llm is {version} and has neither {' nor '.join(_PLACES)}, expected one of them: "
        "KV cache connectors came with 1.1",
        name=_PLACES[0],
    )


_tensorrt_llm = _engine()
version: str = _tensorrt_llm.__version__
logger: Any = _tensorrt_llm.logger  # takes one string
mpi_rank: Any = _tensorrt_llm.mpi_rank

_connector = _interface(version)
KvCacheConnectorScheduler: Any = _connector.KvCacheConnectorScheduler
KvCacheConnectorWorker: Any = _connector.KvCacheConnectorWorker
