"""A store with a format under real vLLM: what is stored, what is loaded, and what is not found."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from kvx_core import DType, InvalidArgumentError, Snapshot
from kvx_core.snapshot import StorageFormat
from tests.fakes.vllm import needs_cpu_op
from tests.store_files import entry_files, precision_of, snapshot_of
from tests.vllm_plugin.engine import EngineProcess, connector
from tests.vllm_plugin.models import prompt

Q8_0 = GGMLQuantizationType.Q8_0


def arrays(path: Path) -> dict[str, np.ndarray]:
    with Snapshot.open(path) as snapshot:
        read = snapshot.read(snapshot.header.layers)
        return {name: read.array(name) for name in read.tensors}


def stored(store: Path, precision: str) -> dict[str, np.ndarray]:
    """All tokens of the files of this precision, by tensor."""
    files = [snapshot_of(file) for file in entry_files(store) if precision_of(file) == precision]
    files.sort(key=lambda file: file.header.start)
    parts = [{name: file.array(name) for name in file.tensors} for file in files]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@needs_cpu_op
@pytest.mark.slow  # starts two engines
def test_a_prompt_in_q8_0(llama: Path, engines: EngineProcess, tmp_path: Path) -> None:
    store, loads, one = tmp_path / "store", tmp_path / "loads", prompt(150, seed=1)
    loads.mkdir()
    config = connector(store, format="q8_0", fresh_seconds=0)  # lookups ask the disk each time
    with engines.engine(llama, block_size=32, kv_transfer_config=config) as engine:
        (first,) = engine.generate([one], max_tokens=1)
        until = time.monotonic() + 60
        while len(list(store.rglob("*.safetensors"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        engine.call("keep_loads", folder=str(loads))
        engine.call("reset_prefix_cache")
        (again,) = engine.generate([one], max_tokens=4)
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == 149
    assert again.finish_reason == "length"
    assert len(again.tokens) == 4

    # Without a format: nothing is found, and the same engine stores the exact numbers.
    with engines.engine(llama, block_size=32, kv_transfer_config=connector(store)) as engine:
        (exact,) = engine.generate([one], max_tokens=1)
    assert exact.num_cached_tokens == 0
    assert exact.tokens == first.tokens

    numbers, units, loaded = (
        stored(store, "f32"),
        stored(store, "f32+q8_0"),
        arrays(loads / "0-149"),
    )
    assert numbers.keys() == units.keys() == loaded.keys()
    assert len(units) == 6  # K and V of three layers
    for name, values in numbers.items():
        np.testing.assert_array_equal(units[name][:150], quantize(values, Q8_0))
        np.testing.assert_array_equal(loaded[name], dequantize(units[name][:149], Q8_0))
        assert not np.array_equal(loaded[name], values[:149])


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("q9", r"kv_connector_extra_config\.format: .*format is 'q9', expected None or one of f16"),
        (8, r"kv_connector_extra_config\.format: .*string"),
    ],
)
def test_a_format_that_is_none(format: object, message: str) -> None:
    pytest.importorskip("vllm")
    from kvx_adapters.vllm_plugin.settings import Settings

    transfer = SimpleNamespace(kv_connector_extra_config={"path": "/store", "format": format})
    with pytest.raises(InvalidArgumentError, match=message):
        Settings.of(SimpleNamespace(kv_transfer_config=transfer))


def test_a_format_whose_units_span_heads() -> None:
    """Whether it fits depends on the heads of a rank, which the cache says later."""
    pytest.importorskip("vllm")
    from kvx_adapters.vllm_plugin.settings import Settings

    transfer = SimpleNamespace(kv_connector_extra_config={"path": "/store", "format": "q4_k"})
    settings = Settings.of(SimpleNamespace(kv_transfer_config=transfer))
    assert StorageFormat.of(settings.format).dtype is DType.Q4_K
