"""The digest of an adapter: of all that its results depend on, and of nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvx_core import InvalidArgumentError
from kvx_core.model.adapter_files import adapter_files_digest, adapter_files_state

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj"],
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def adapter(directory: Path, config: dict[str, Any] = CONFIG, value: float = 0.0) -> Path:
    directory.mkdir(exist_ok=True)
    tensors = {name: torch.zeros(8, 5) for name in ("q_proj.lora_A.weight", "q_proj.lora_B.weight")}
    tensors["q_proj.lora_B.weight"][7, 4] = value
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def test_what_it_depends_on(tmp_path: Path) -> None:
    first = adapter_files_digest(adapter(tmp_path / "first"))
    assert adapter_files_digest(str(adapter(tmp_path / "second"))) == first
    reordered = dict(reversed(CONFIG.items()))
    assert adapter_files_digest(adapter(tmp_path / "third", reordered)) == first
    (tmp_path / "first" / "README.md").write_text("an adapter")
    assert adapter_files_digest(tmp_path / "first") == first
    others = {
        adapter_files_digest(adapter(tmp_path / "value", value=1e-3)),
        adapter_files_digest(adapter(tmp_path / "alpha", CONFIG | {"lora_alpha": 32})),
        adapter_files_digest(
            adapter(tmp_path / "modules", CONFIG | {"target_modules": ["k_proj"]})
        ),
    }
    assert len(others | {first}) == 4


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    directory = adapter(tmp_path / "adapter")
    (directory / "adapter_model.safetensors").unlink()
    weights = directory / "adapter_model.bin"
    weights.write_bytes(b"no pickle")
    first = adapter_files_digest(directory)
    weights.write_bytes(b"no pickles")
    assert adapter_files_digest(directory) != first


def test_the_state_differs_if_a_file_is_another(tmp_path: Path) -> None:
    directory = adapter(tmp_path / "adapter")
    before = adapter_files_state(directory)
    assert adapter_files_state(directory) == before
    adapter(directory, CONFIG | {"r": 4})
    assert adapter_files_state(directory) != before


@pytest.mark.parametrize("missing", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_file_is_missing(missing: str, tmp_path: Path) -> None:
    directory = adapter(tmp_path / "adapter")
    (directory / missing).unlink()
    for function in (adapter_files_digest, adapter_files_state):
        with pytest.raises(InvalidArgumentError, match="expected an adapter as PEFT saves it"):
            function(directory)


@pytest.mark.parametrize(
    ("name", "raw"),
    [("adapter_config.json", b"{"), ("adapter_model.safetensors", b"\x08\0\0\0\0\0\0\0{}      ")],
)
def test_a_file_is_broken(name: str, raw: bytes, tmp_path: Path) -> None:
    directory = adapter(tmp_path / "adapter")
    (directory / name).write_bytes(raw[:-1])
    with pytest.raises(InvalidArgumentError, match=name):
        adapter_files_digest(directory)
