"""The memory pools of the SGLang wheel itself, on a machine without a GPU.

SGLang's pools run on a CPU, but importing them imports the rest of SGLang: attention kernels, model
configurations, multimodal processors, an HTTP server. `pools` imports the files of the pools as the
wheel has them. Packages in BARE are entered without running their __init__.py, and modules in
ABSENT are replaced by empty ones, whose names are classes without content: they belong to
attention, to the DeepSeek indexer and to FP4. No class that holds keys, values, states or tables of
requests is replaced.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

if sys.version_info >= (3, 14):
    pytest.skip("sglang 0.5.23 has no wheel for Python 3.14", allow_module_level=True)

BARE = (
    "sglang",
    "sglang.srt.configs",
    "sglang.srt.layers.attention",
    "sglang.srt.layers.quantization",
)
ABSENT = (
    "sglang.srt.layers.attention.dsa.utils",
    "sglang.srt.layers.quantization.fp4_kv_cache_quant_method",
    "sglang.srt.layers.radix_attention",
    "sglang.srt.mem_cache.index_key_cache",
)
_RUNNER = "sglang.srt.model_executor.runner"  # asked whether a CUDA graph is being captured


class _Empty(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {"__module__": self.__name__})
        setattr(self, name, found)
        return found


def _prepare() -> None:
    found = find_spec("sglang")
    assert found is not None, "sglang is not installed: `make setup` installs the pinned wheel"
    (root,) = map(Path, found.submodule_search_locations or ())
    for name in BARE:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    for name in ABSENT:
        sys.modules[name] = _Empty(name)
    runner = ModuleType(_RUNNER)
    runner.get_is_capture_mode = lambda: False  # type: ignore[attr-defined]
    sys.modules[_RUNNER] = runner


_prepare()
VERSION = version("sglang")


def _module(name: str) -> Any:
    return import_module(f"sglang.srt.{name}")


# With a GPU they would import SGLang's kernels, which are another package.
with pytest.MonkeyPatch.context() as _without_gpu:
    _without_gpu.setattr(torch.cuda, "is_available", lambda: False)
    envs = _module("environ").envs
    parallel = _module("runtime_context").get_parallel
    device = _module("mem_cache.memory_pool")
    swa = _module("mem_cache.swa_memory_pool")
    mha_host = _module("mem_cache.pool_host.mha")
    mla_host = _module("mem_cache.pool_host.mla")
    mamba_config = _module("configs.mamba_utils")
