"""Settings that can never work end a start at once, in one sentence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvx_adapters.cli import doctor_model
from tests.fakes.vllm import needs_cpu_op
from tests.vllm_plugin.engine import ROOT, EngineError, EngineProcess, connector
from tests.vllm_plugin.models import prompt

pytestmark = needs_cpu_op

PREFIX = "kvx_adapters.vllm_plugin.settings.SettingsError: KVX cannot start with these settings: "


def last_line(error: EngineError) -> str:
    return str(error).strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"pth": "x"}, r"kv_connector_extra_config\.pth: Extra inputs are not permitted\. KVXCo"),
        ({"path": "FILE"}, r"root is .*/file, a file, expected a directory"),
        ({"path": "FILE/store"}, r"path is .*/file/store, made below .*/file, which is a file, "),
        ({"max_bytes": "much"}, r"kv_connector_extra_config\.max_bytes: .*max_bytes is 'much', "),
        ({"format": "q9"}, r"kv_connector_extra_config\.format: .*format is 'q9', expected None "),
        ({"key_files": "FILE.none"}, r"key_files .*/file\.none cannot be read: "),
        ({"chunk_tokens": 15}, r"kv_connector_extra_config\.chunk_tokens: .* than or equal to 16"),
    ],
)
def test_a_wrong_setting(
    extra: dict[str, Any], expected: str, llama: Path, engines: EngineProcess, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "kvx-store.json").write_text('{"format": 3, "chunk_tokens": 128}')
    config = connector(tmp_path)
    config["kv_connector_extra_config"] |= {
        name: value.replace("FILE", str(file)) if isinstance(value, str) else value
        for name, value in extra.items()
    }
    start = engines.log.stat().st_size if engines.log.exists() else 0
    with pytest.raises(EngineError) as caught, engines.engine(llama, kv_transfer_config=config):
        pass
    line = last_line(caught.value)
    assert line.startswith(PREFIX)
    assert re.match(expected, line.removeprefix(PREFIX))
    with engines.log.open() as log:
        log.seek(start)
        assert "Initializing a V1 LLM engine" not in log.read()


def test_what_a_file_of_the_store_says_ends_no_engine(
    llama: Path, engines: EngineProcess, tmp_path: Path
) -> None:
    """Whoever may write to the store can have written it: the engine says so, and runs without."""
    text = '{"format": 3, "chunk_tokens": 128}'
    (tmp_path / "kvx-store.json").write_text(text)
    start = engines.log.stat().st_size if engines.log.exists() else 0
    config = connector(tmp_path, chunk_tokens=64)
    with engines.engine(llama, kv_transfer_config=config) as engine:
        (output,) = engine.generate([prompt(70, seed=3)])
    assert output.finish_reason == "length"
    assert [path.name for path in tmp_path.iterdir()] == ["kvx-store.json"]
    with engines.log.open() as log:
        log.seek(start)
        said = "KVX saves and loads nothing until the next start: chunk_tokens is 64, expected 128 "
        assert said in log.read()


# Of layers that no store keeps: fields of the config, and doctor's reason.
UNSHARED: dict[str, tuple[dict[str, Any], str]] = {
    "Mamba2ForCausalLM": (
        {"model_type": "mamba2", "num_heads": 8, "head_dim": 64, "hidden_size": 256},
        "layers keep a state",
    ),
}


@pytest.mark.parametrize("architecture", UNSHARED)
def test_a_model_that_cannot_be_shared_ends_a_start_before_its_weights_are_read(
    architecture: str, engines: EngineProcess, tmp_path: Path
) -> None:
    """There are none: the folder has nothing but the config."""
    fields, reason = UNSHARED[architecture]
    config = {"architectures": [architecture], "torch_dtype": "float32", "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with (
        pytest.raises(EngineError) as caught,
        engines.engine(
            tmp_path,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=128,
            kv_transfer_config=connector(tmp_path / "store"),
        ),
    ):
        pass
    model = fields["model_type"]
    assert last_line(caught.value) == (
        "kvx_adapters.vllm_plugin.settings.SettingsError: KVXConnector does not share prefixes of "
        f"{model}: {reason}. `kvx doctor --model` says what its caches hold. Serve it without "
        "KVXConnector"
    )
    assert not (tmp_path / "store").exists()
    verdicts = {check.name: check.text for check in doctor_model.check_model(tmp_path)}
    assert verdicts["vLLM"] == f"the connector refuses it: {reason}"


@pytest.mark.slow
def test_the_log_of_a_server_ends_with_the_sentence(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(llama)),
        *("--port", "0", "--max-model-len", "512", "--enforce-eager", "--dtype", "float32"),
        *("--kv-transfer-config", repr(connector(tmp_path / "file")).replace("'", '"')),
    ]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    begun = time.monotonic()
    server = subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert server.returncode == 1, f"after {time.monotonic() - begun:.0f} s"
    lines = server.stdout.strip().splitlines()
    assert lines[-1] == f"{PREFIX}root is {tmp_path}/file, a file, expected a directory"
    assert not [line for line in lines if "EngineCore" in line]
