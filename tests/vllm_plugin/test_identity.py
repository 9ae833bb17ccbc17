"""The ModelRecord of an engine's configuration: which engines share a store."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvx_core import InvalidArgumentError, ModelRecord, UnsupportedError, model_files_digest
from tests.fakes.vllm import needs_cpu_op
from tests.vllm_plugin import models

pytestmark = needs_cpu_op

Record = Callable[..., ModelRecord]


@pytest.fixture
def record(llama: Path, tmp_path: Path, environment: None) -> Record:
    """The record of an engine with these options; settings of the connector in `extra`."""

    def record(
        model: Path = llama,
        extra: dict[str, Any] | None = None,
        meanwhile: Callable[[], object] = bool,
        **options: Any,
    ) -> ModelRecord:
        from vllm.engine.arg_utils import EngineArgs

        from kvx_adapters.vllm_plugin.identity import model_record
        from kvx_adapters.vllm_plugin.settings import Settings

        defaults = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 512}
        config = EngineArgs(model=str(model), **(defaults | options)).create_engine_config()
        meanwhile()
        return model_record(config, Settings(path=tmp_path, **(extra or {})))

    return record


@pytest.fixture
def environment() -> Iterator[None]:
    """vLLM's configuration writes to os.environ."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_a_plain_engine_is_its_files_and_their_rope(record: Record, llama: Path) -> None:
    assert record() == ModelRecord(
        files=model_files_digest(llama),
        architecture="llama",
        rope={"": {"rope_theta": 10000.0, "rope_type": "default"}},
    )


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32", "kv_cache_dtype": "fp8"},
        {"max_model_len": 256, "max_num_seqs": 3, "seed": 5, "block_size": 64},
        {"enforce_eager": False, "enable_prefix_caching": False, "async_scheduling": True},
        {"load_format": "safetensors", "generation_config": "vllm", "revision": "main"},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"served_model_name": "a", "max_logprobs": 3},
    ],
)
def test_what_does_not_matter(record: Record, options: dict[str, Any]) -> None:
    assert record(**options) == record()


BLOCKS = {"linear": {"weight": "fp8_per_block_static", "activation": "fp8_per_block_dynamic"}}
TENSORS = {"linear": {"weight": "fp8_per_tensor_static", "activation": "fp8_per_tensor_dynamic"}}


def test_what_matters(record: Record, tmp_path: Path, llama: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    changed = json.loads((llama / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (config / "config.json").write_text(json.dumps(changed))
    named = "vllm.model_executor.models.llama:LlamaForCausalLM"  # whatever stands behind the name
    options: list[dict[str, Any]] = [
        {},
        {"load_format": "dummy"},
        {"load_format": "dummy", "dtype": "float32"},
        {"load_format": "dummy", "tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        {
            "load_format": "dummy",
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "mp",
        },
        {"quantization": "fp8"},
        {"quantization": "online", "quantization_config": BLOCKS},
        {"quantization": "online", "quantization_config": TENSORS},
        {"quantization": "online", "quantization_config": TENSORS | {"ignore": ["lm_head"]}},
        {"hf_config_path": str(config)},
        {"model_class_overrides": {"LlamaForCausalLM": named}},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}},
        {"hf_overrides": {"rope_theta": 5e5}},
        {
            "hf_overrides": {
                "rope_theta": 3e5,
                "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
            }
        },
        {"hf_overrides": {"rms_norm_eps": 1e-4}},
        {"hf_overrides": louder},
        {"additional_config": {"a": 1}},
        {"model_impl": "transformers"},
        {"disable_sliding_window": True},
        {"config_format": "hf"},
        {"model_loader_extra_config": {"enable_multithread_load": True}},
        {"extra": {"fingerprint": "f"}},
        {"extra": {"fingerprint": "f"}, "quantization": "fp8"},
        {"extra": {"fingerprint": "f"}, "load_format": "dummy"},
        {"extra": {"fingerprint_sampling": True}},
    ]
    records = [record(**option) for option in options]
    assert [record(**option) for option in options] == records
    assert len({found.fingerprint for found in records}) == len(options)


def louder(config: Any) -> Any:
    config.rms_norm_eps = 1e-2
    return config


def test_a_class_that_a_plugin_has_put_in_the_models_place(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import ModelRegistry

    own = dataclasses.replace(
        ModelRegistry.models["LlamaForCausalLM"], module_name="somebody.llama", class_name="Llama"
    )
    found = record(
        meanwhile=lambda: monkeypatch.setitem(ModelRegistry.models, "LlamaForCausalLM", own)
    )
    assert found.salts["model class"] == "somebody.llama:Llama"
    assert found.salts["engine"].startswith("vllm ")


@pytest.mark.parametrize(
    ("parameters", "by_length"),
    [
        ({"rope_type": "linear", "factor": 2.0}, False),
        ({"rope_type": "default", "use_fope": True}, True),
        ({"rope_type": "ntk", "factor": 2.0}, True),
    ],
)
def test_angles_that_may_depend_on_the_length(parameters: dict[str, Any], by_length: bool) -> None:
    from types import SimpleNamespace

    from kvx_adapters.vllm.model_record import _rope

    config = {"rope_parameters": {"rope_theta": 1e4} | parameters}
    text = SimpleNamespace(max_position_embeddings=512, to_dict=lambda: config)
    short, long = (
        _rope(SimpleNamespace(hf_text_config=text, max_model_len=length)) for length in (256, 512)
    )
    assert (short != long) is by_length


@pytest.mark.parametrize(
    ("max_model_len", "generation", "expected"),
    [(32768, {}, False), (32769, {}, True), (32769, {"attn_temperature_tuning": False}, False)],
)
def test_llama_4_is_tempered_by_its_length(
    max_model_len: int, generation: dict[str, Any], expected: bool
) -> None:
    """And by the generation config, of all things."""
    from types import SimpleNamespace

    from kvx_adapters.vllm.model_record import _overrides

    model = SimpleNamespace(
        hf_overrides={},
        hf_text_config=SimpleNamespace(model_type="llama4_text"),
        max_model_len=max_model_len,
        override_generation_config=generation,
        try_get_generation_config=dict,
    )
    assert _overrides(model) == {"attn_temperature_tuning": expected}
    model.original_max_model_len = -1
    found_out = _overrides(model)["attn_temperature_tuning"]
    assert found_out == ("by length" if not generation else expected)


def test_a_variable_of_the_environment_that_quantises(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = record()
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    assert record().salts["VLLM_CPU_INT4_W4A8"] == "1"
    assert record().fingerprint != plain.fingerprint


def test_a_config_from_elsewhere_is_the_same_as_in_its_place(
    record: Record, tmp_path: Path, llama: Path
) -> None:
    model, config = tmp_path / "model", tmp_path / "config"
    shutil.copytree(llama, model)
    config.mkdir()
    changed = json.loads((llama / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    for directory in (model, config):
        (directory / "config.json").write_text(json.dumps(changed))
    assert record(hf_config_path=str(config)) == record(model)


@pytest.mark.parametrize("when", ["never", "before", "while they are read"])
def test_the_name_of_files_that_take_the_place_of_others(
    when: str,
    llama: Path,
    tmp_path: Path,
    environment: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody knows what was loaded from files that have changed since."""
    from vllm.engine.arg_utils import EngineArgs

    from kvx_adapters.vllm_plugin import identity
    from kvx_adapters.vllm_plugin.settings import Settings
    from kvx_core.connector.weights import Files

    other = models.with_another_layer(llama, tmp_path / "other")
    config = EngineArgs(model=str(llama), dtype="bfloat16", max_model_len=512)
    config, settings = config.create_engine_config(), Settings(path=tmp_path / "store")
    first = identity.model_record(config, settings).fingerprint
    start = identity.StartFiles(config, settings, first)
    loaded = Files(str(other), None, identity.files_state(str(other), None))
    read = identity.model_record

    def change() -> None:
        (other / "model.safetensors").touch()

    def read_and_change(*arguments: Any) -> ModelRecord:
        found = read(*arguments)
        change()
        return found

    if when == "before":
        change()
    elif when == "while they are read":
        monkeypatch.setattr(identity, "model_record", read_and_change)
    name = start.name(loaded)
    if when != "never":
        assert name is None
        return
    (kind, _, fingerprint) = str(name).partition(":")
    assert kind == "files"
    config = EngineArgs(model=str(other), dtype="bfloat16", max_model_len=512)
    started = identity.model_record(config.create_engine_config(), settings)
    assert fingerprint == started.fingerprint != first
    of_first = Files(str(llama), None, identity.files_state(str(llama), None))
    assert start.name(of_first) == ""
    named = Settings(path=tmp_path / "store", fingerprint="a name")  # which says nothing of files
    assert identity.StartFiles(config.create_engine_config(), named, first).name(loaded) is None
    tensors = load_file(other / "model.safetensors")
    tensors.popitem()
    save_file(tensors, other / "model.safetensors")
    fewer = Files(str(other), None, identity.files_state(str(other), None))
    assert start.name(fewer) is None  # the engine keeps what they lack


def test_a_quantised_checkpoint_alone_and_with_more(record: Record, tmp_path: Path) -> None:
    """How its files are quantised is in their digest."""
    model = models.llama(tmp_path / "model")
    path = model / "config.json"
    stored = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stored}))
    alone = record(model)
    assert alone.quantization is None
    assert record(model, quantization="fp8") == alone
    more = [
        record(model, quantization_config={"moe": part["linear"]}) for part in (BLOCKS, TENSORS)
    ]
    assert len({found.fingerprint for found in (alone, *more)}) == 3


def test_what_is_loaded_of_a_directory_with_two_formats(
    record: Record, llama: Path, tmp_path: Path
) -> None:
    """One digest of all files does not say which of them an engine has loaded."""
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    (file,) = model.glob("*.safetensors")
    shutil.copy(file, model / "consolidated.safetensors")
    files = model_files_digest(model)
    for load_format in ("safetensors", "mistral"):
        assert record(model, load_format=load_format).files == f"{files} by {load_format}"


@pytest.mark.parametrize(
    ("method", "is_stored"),
    [("modelopt", True), ("modelopt_fp4", True), ("modelopts", False), ("fp8", False)],
)
def test_variants_of_the_method_of_a_checkpoint(method: str, is_stored: bool) -> None:
    """vLLM names the variant, the files its family."""
    from kvx_adapters.vllm.model_record import _quantization

    model = SimpleNamespace(
        quantization=method,
        quantization_config=None,
        model_arch_config=SimpleNamespace(quantization_config={"quant_method": "modelopt"}),
    )
    assert (_quantization(model, "0.32.0") is None) is is_stored


def test_longrope_is_that_of_the_longest_sequence(record: Record, tmp_path: Path) -> None:
    model = models.phi3(tmp_path / "phi3")
    records = [record(model, max_model_len=n) for n in (128, 256, 257, 512)]
    assert records[0] == records[1]
    assert records[2] == records[3]
    assert records[1].fingerprint != records[2].fingerprint


def test_transformers_applies_what_vllm_does(
    record: Record, llama: Path, gemma: Path, tmp_path: Path
) -> None:
    """Of the model as it is and with other parameters, however they were given."""
    from transformers import AutoModelForCausalLM

    from kvx_adapters import transformers as hf

    def of_transformers(model: Path, num_tokens: int | None = None, **changes: Any) -> ModelRecord:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, **changes)
        return hf.model_record(loaded, model, num_tokens=num_tokens)

    phi3 = models.phi3(tmp_path / "phi3")
    assert of_transformers(llama) == record()
    assert of_transformers(gemma) == record(gemma)
    assert of_transformers(phi3, num_tokens=256) == record(phi3, max_model_len=256)
    assert of_transformers(phi3, num_tokens=300) == record(phi3, max_model_len=512)
    for changes in (
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rms_norm_eps": 1e-3},
    ):
        assert of_transformers(llama, **changes) == record(hf_overrides=changes)
        assert of_transformers(llama, **changes) != record()


@pytest.mark.parametrize("load_format", ["pt", "npcache", "tensorizer"])
def test_weights_that_are_not_the_safetensors_are_refused(record: Record, load_format: str) -> None:
    with pytest.raises(UnsupportedError, match="Give kv_connector_extra_config a 'fingerprint'"):
        record(load_format=load_format)
    assert record(load_format=load_format, extra={"fingerprint": "f"}).files == "f"


def test_a_directory_without_safetensors_is_refused(
    record: Record, llama: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(llama, tmp_path / "model")
    (model / "model.safetensors").unlink()
    with pytest.raises(InvalidArgumentError, match="or give the fingerprint yourself"):
        record(model)
    assert record(model, load_format="dummy").weights.startswith("dummy of vllm ")


def test_a_field_that_nobody_has_judged_salts_and_is_logged(
    record: Record, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """additional_config, were it in no list."""
    import logging

    from kvx_adapters.vllm import judged_fields

    plain = record()
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.delitem(judged_fields.COUNT, "VllmConfig")
    assert record() == plain
    assert "KVX does not know" not in caplog.text
    found = record(additional_config={"a": 1})
    assert found.salts["VllmConfig.additional_config"] == {"a": 1}
    assert found.salts["engine"].startswith("vllm ")
    record(additional_config={"a": 1})
    told = "does not know whether VllmConfig.additional_config={'a': 1} matter"
    # Two handlers may have been given one record.
    assert len({id(r) for r in caplog.records if told in r.getMessage()}) == 1


@pytest.mark.parametrize(("own", "expected"), [("r2", "r2"), (None, "r1")])
def test_a_config_from_elsewhere_has_a_revision_of_its_own(
    own: str | None, expected: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM keeps the one that it has resolved; else that of the model counts."""
    from kvx_adapters.vllm_plugin import identity

    asked: list[tuple[str, str | None]] = []

    def local(name: str, revision: str | None, *others: Any, **options: Any) -> Path:
        asked.append((name, revision))
        return llama

    monkeypatch.setattr(identity, "local_model", local)
    model = SimpleNamespace(
        model="the/model", revision="r1", hf_config_path="a/config", _hf_config_revision=own
    )
    load = SimpleNamespace(download_dir=None, load_format="dummy")
    config = SimpleNamespace(model_config=model, load_config=load)
    identity._files(config, sample=False)
    assert asked == [("the/model", "r1"), ("a/config", expected)]
