"""model_fingerprint: what of a model's directory matters to the keys and values it computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvx_core import InvalidArgumentError, model_fingerprint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "rope_parameters": {"rope_theta": 10000.0},
    "text_config": {"layers": 2, "dtype": "bfloat16"},
    "transformers_version": "5.19.0",
    "dtype": "bfloat16",
    "_name_or_path": "somewhere",
}
TENSORS = {
    "model.embed.weight": torch.arange(60 * 100.0).reshape(60, 100),
    "model.norm.weight": torch.ones(7, dtype=torch.bfloat16),
    "model.empty": torch.empty(0, 3),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "truncation": null}')
    (folder / "generation_config.json").write_text("{}")
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def config(**changes: object) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(
        json.dumps(dict(sorted((CONFIG | changes).items())), indent=2)
    )


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    return lambda folder: save_file(
        {**TENSORS, name: change(TENSORS[name].clone())}, folder / "model.safetensors"
    )


def in_two_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    names = sorted(TENSORS)
    for i, part in enumerate((names[:1], names[1:])):
        tensors = {name: TENSORS[name] for name in part}
        save_file(tensors, folder / f"model-{i}.safetensors", {"format": "pt"})


def tokenizer(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "tokenizer.json").write_text(text)


@pytest.mark.parametrize(
    "change",
    [
        config(transformers_version="4.57.0", dtype="float32", torch_dtype="float32"),
        config(_name_or_path="elsewhere", text_config={"layers": 2, "torch_dtype": "float16"}),
        in_two_files,
        tokenizer('{"truncation": {"max_length": 9}, "padding": 1, "model": {"vocab":{"a": 0}}}'),
        lambda folder: (folder / "generation_config.json").write_text('{"temperature": 2}'),
        lambda folder: (folder / "README.md").write_text("a model"),
        lambda folder: folder.rename(folder.with_name("moved")) and None,
    ],
    ids=["versions", "names", "two files", "tokenizer", "generation", "readme", "moved"],
)
def test_what_does_not_matter(model: Path, change: Callable[[Path], object]) -> None:
    before = [model_fingerprint(model, whole=whole) for whole in (False, True)]
    change(model)
    moved = model.with_name("moved")
    model = moved if moved.exists() else model
    assert [model_fingerprint(str(model), whole=whole) for whole in (False, True)] == before


@pytest.mark.parametrize(
    "change",
    [
        config(hidden_size=65),
        config(rope_parameters={"rope_theta": 500000.0}),
        config(new=None),
        tensor("model.norm.weight", lambda t: t * 2),
        tensor("model.norm.weight", lambda t: t.float()),
        tensor("model.norm.weight", lambda t: t.reshape(7, 1)),
        tensor("model.embed.weight", lambda t: t + 1),
        tensor("model.empty", lambda t: t.reshape(3, 0)),
        tokenizer('{"model": {"vocab": {"b": 0}}, "truncation": null}'),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: save_file({"more": torch.ones(1)}, folder / "more.safetensors"),
        lambda folder: (folder / "tokenizer.model").write_bytes(b"vocabulary"),
    ],
)
def test_what_matters(model: Path, change: Callable[[Path], object]) -> None:
    before = [model_fingerprint(model, whole=whole) for whole in (False, True)]
    change(model)
    after = [model_fingerprint(model, whole=whole) for whole in (False, True)]
    assert not set(before) & set(after)


def test_only_the_middle_of_large_tensors_is_read_unless_asked(model: Path) -> None:
    before, all_before = (model_fingerprint(model, whole=whole) for whole in (False, True))
    for element, is_seen in ((0, False), (3000, True), (5999, False)):
        tensors = load_file(model / "model.safetensors")
        tensors["model.embed.weight"].view(-1)[element] += 1
        save_file(tensors, model / "model.safetensors")
        assert (model_fingerprint(model) != before) is is_seen
        assert model_fingerprint(model, whole=True) != all_before
        save_file(TENSORS, model / "model.safetensors")
    assert model_fingerprint(model) == before
    assert before != all_before


def test_a_model_that_transformers_saves_again_stays_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 50,
    }
    first = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    first.save_pretrained(tmp_path / "first")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    again.save_pretrained(tmp_path / "again", max_shard_size="10KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    assert model_fingerprint(tmp_path / "first") == model_fingerprint(tmp_path / "again")
    with torch.no_grad():
        again.model.layers[0].mlp.up_proj.weight += 1e-3
    again.save_pretrained(tmp_path / "tuned")
    assert model_fingerprint(tmp_path / "first") != model_fingerprint(tmp_path / "tuned")


def weights(data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").write_bytes(data)


def one_tensor(begin: int, end: int) -> bytes:
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [begin, end]}}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"12345678"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: (folder / "config.json").unlink(),
            r"has no config\.json, expected a model",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json is not JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no tensors in \*\.safetensors"),
        (shutil.rmtree, r"has no config\.json"),
        (weights(b""), r"model\.safetensors is not a safetensors file"),
        (weights(b"\xff" * 40), "its header ends at byte"),
        (weights(b"\x02" + b"\0" * 7 + b"[]"), "is not a safetensors file"),
        (weights(b"\x02" + b"\0" * 7 + b'"a'), "is not a safetensors file"),
        (weights(b"\x08" + b"\0" * 7 + b'{"a": 1}'), "is not a safetensors file"),
        (weights(one_tensor(0, 9)), "bytes, expected at least"),
        (weights(one_tensor(-9, -1)), "a has the bytes -9 to -1"),
        (weights(one_tensor(8, 0)), "a has the bytes 8 to 0"),
    ],
)
def test_directories_that_are_no_model(
    model: Path, change: Callable[[Path], object], message: str
) -> None:
    change(model)
    with pytest.raises(InvalidArgumentError, match=message):
        model_fingerprint(model)
