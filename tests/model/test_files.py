"""model_files_digest: which files of a model change it, and which do not."""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvx_core import InvalidArgumentError, model_files_digest
from kvx_core.model import digest_cache, tensor_digests

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


@pytest.fixture(autouse=True)
def _nothing_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()


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
    before = [model_files_digest(model, sample=sample) for sample in (False, True)]
    change(model)
    moved = model.with_name("moved")
    model = moved if moved.exists() else model
    assert [model_files_digest(str(model), sample=sample) for sample in (False, True)] == before


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
    before = [model_files_digest(model, sample=sample) for sample in (False, True)]
    change(model)
    after = [model_files_digest(model, sample=sample) for sample in (False, True)]
    assert not set(before) & set(after)


def test_every_value_of_every_tensor_counts(model: Path) -> None:
    """A fine-tune may change a few rows of an embedding and nothing else."""
    found = {model_files_digest(model)}
    for element in (0, 1, 3000, 5998, 5999):
        tensors = load_file(model / "model.safetensors")
        tensors["model.embed.weight"].view(-1)[element] += 1
        save_file(tensors, model / "model.safetensors")
        found.add(model_files_digest(model))
        save_file(TENSORS, model / "model.safetensors")
    assert len(found) == 6
    assert model_files_digest(model) in found


def test_every_piece_of_a_large_tensor_counts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """24000 bytes in pieces of 1000, each in reads of 300, by several threads."""
    monkeypatch.setattr(tensor_digests, "PIECE_BYTES", 1000)
    monkeypatch.setattr(tensor_digests, "_READ_BYTES", 300)
    found = {model_files_digest(model)}
    for element in (0, 249, 250, 3000, 5999):
        changed = TENSORS["model.embed.weight"].clone()
        changed.view(-1)[element] += 1
        save_file(TENSORS | {"model.embed.weight": changed}, model / "model.safetensors")
        found.add(model_files_digest(model))
    assert len(found) == 6
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one thread
    assert model_files_digest(model) in found


def test_a_sample_is_the_middle_of_large_tensors(model: Path) -> None:
    before = model_files_digest(model, sample=True)
    assert before != model_files_digest(model)
    for element, is_seen in ((0, False), (3000, True), (5999, False)):
        changed = TENSORS["model.embed.weight"].clone()
        changed.view(-1)[element] += 1
        save_file(TENSORS | {"model.embed.weight": changed}, model / "model.safetensors")
        assert (model_files_digest(model, sample=True) != before) is is_seen


def test_a_sample_of_small_tensors_is_not_all_bytes(model: Path) -> None:
    """Though it has read the same bytes: who asks for all of them must not find it."""
    save_file({"a": torch.ones(3)}, model / "model.safetensors")
    assert model_files_digest(model) != model_files_digest(model, sample=True)


# ---- rotary parameters, as each transformers writes them ----

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4}
LONG = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2, 4.5]}


@pytest.mark.parametrize(
    ("four", "five"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 500000, "rope_type": "default"}}),
        (
            {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.5},
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3, "max_position_embeddings": 8192},
            {
                "rope_parameters": LLAMA3
                | {"rope_theta": 5e5, "original_max_position_embeddings": 8192},
                "max_position_embeddings": 8192,
            },
        ),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": LONG | {"type": "su"},
                "original_max_position_embeddings": 4096,
            },
            {
                "rope_parameters": LONG | {"rope_type": "longrope", "rope_theta": 1e4},
                "original_max_position_embeddings": 4096,
            },
        ),
    ],
)
def test_rope_is_the_same_in_both_ways_to_write_it(
    model: Path, four: dict[str, object], five: dict[str, object]
) -> None:
    rest = {key: value for key, value in CONFIG.items() if key != "rope_parameters"}
    for part in ({}, {"text_config": {}}):
        found = []
        for written in (four, five):
            whole = rest | (part and {"text_config": written}) if part else rest | written
            (model / "config.json").write_text(json.dumps(whole))
            found.append(model_files_digest(model))
        assert found[0] == found[1]
    changed = json.loads(json.dumps(four).replace("10000.0", "20000.0").replace("500000.0", "1e6"))
    (model / "config.json").write_text(json.dumps(rest | changed))
    assert model_files_digest(model) not in found


# ---- what is read, and when ----


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of tensors, one item a read."""
    found: list[int] = []
    preadv = os.preadv

    def counted(*arguments: object) -> int:
        found.append(preadv(*arguments))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return found


TELLS = tensor_digests.tells_of_mapped_writes  # of the real file system


@pytest.fixture(autouse=True)
def telling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are remembered, whatever file system the tests run on."""
    monkeypatch.setattr(tensor_digests, "tells_of_mapped_writes", lambda handle: True)


NUM_BYTES = sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are remembered at once, not from two seconds after they were written."""
    monkeypatch.setattr(digest_cache, "_SETTLED_NS", -(1 << 62))


@pytest.mark.usefixtures("settled")
def test_bytes_are_read_once(model: Path, reads: list[int]) -> None:
    before = model_files_digest(model)
    assert sum(reads) == NUM_BYTES
    assert model_files_digest(model) == before
    assert sum(reads) == NUM_BYTES
    assert model_files_digest(model, config=model / "config.json") == before
    assert sum(reads) == NUM_BYTES


@pytest.mark.usefixtures("settled")
def test_a_file_is_read_again_when_it_changes(model: Path, reads: list[int]) -> None:
    """Saved in place, with the same size and the same time."""
    path = model / "model.safetensors"
    before, times = model_files_digest(model), os.stat(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert model_files_digest(model) != before
    assert sum(reads) == 2 * NUM_BYTES


@pytest.mark.usefixtures("settled")
def test_a_blob_of_a_hub_cache_that_is_saved_over_is_read_again(
    model: Path, reads: list[int]
) -> None:
    """Its name still says what its content was."""
    path = model / "model.safetensors"
    blob = model.parent / ("0" * 64)
    path.rename(blob)
    path.symlink_to(blob)
    before = model_files_digest(model)
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    assert model_files_digest(model) != before


def test_a_file_that_was_written_just_now_is_not_remembered(model: Path, reads: list[int]) -> None:
    """It could be written once more within a tick of the clock of its file system."""
    for i in (1, 2):
        model_files_digest(model)
        assert sum(reads) == i * NUM_BYTES
    later = time.time_ns() + 3_000_000_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: later)
        model_files_digest(model)
        assert sum(reads) == 3 * NUM_BYTES
        model_files_digest(model)
        assert sum(reads) == 3 * NUM_BYTES


def test_times_in_whole_seconds_are_not_trusted() -> None:
    """An image with the times of its recipe gives two models one state."""
    a_while_ago = 1_700_000_000 * 1_000_000_000
    assert not digest_cache._is_telling((1, 2, 3, a_while_ago, a_while_ago))
    assert digest_cache._is_telling((1, 2, 3, a_while_ago, a_while_ago + 4_000_000))


# ---- what was remembered ----


def remembered_in() -> Path:
    return Path(os.environ["XDG_CACHE_HOME"]) / "kvx"


def remembered() -> list[Path]:
    return sorted(remembered_in().glob("*.json"))


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-20]),
        lambda path: path.write_text("{}"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text(path.read_text().replace("digests", "others")),
        lambda path: path.write_text(
            path.read_text().replace('"model.empty": "', '"model.empty": "0', 1)
        ),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.unlink() or path.mkdir(),
        lambda path: path.unlink() or os.mkfifo(path),
        lambda path: path.rename(path.with_suffix(".x")).chmod(0o666),
        lambda path: path.chmod(0o666),
        lambda path: (
            path.rename(path.with_suffix(".x")) and path.symlink_to(path.with_suffix(".x"))
        ),
    ],
)
def test_what_was_torn_or_spoilt_is_read_again(
    model: Path, reads: list[int], spoil: Callable[[Path], object]
) -> None:
    before = model_files_digest(model)
    (path,) = remembered()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    spoil(path)
    assert model_files_digest(model) == before
    assert sum(reads) == 2 * NUM_BYTES


@pytest.mark.usefixtures("settled")
def test_digests_of_another_file_are_not_used(model: Path, reads: list[int]) -> None:
    """Moved to the place of this one's, checksum and all."""
    model_files_digest(model)
    (first,) = remembered()
    changed = {**TENSORS, "model.norm.weight": TENSORS["model.norm.weight"] * 2}
    save_file(changed, model / "other.safetensors")
    (model / "model.safetensors").unlink()
    expected = model_files_digest(model)
    (other,) = set(remembered()) - {first}
    other.write_bytes(first.read_bytes())
    assert model_files_digest(model) == expected


@pytest.mark.usefixtures("settled")
def test_the_oldest_are_forgotten(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_cache, "_MAX_FILES", 3)
    folder = remembered_in()
    model_files_digest(model)
    (first,) = remembered()
    os.utime(first, (1, 1))
    for i in range(3):
        save_file({f"{i}": torch.ones(1)}, model / f"{i}.safetensors")
    model_files_digest(model)
    assert len(list(folder.iterdir())) == 3
    assert not first.exists()


@pytest.mark.usefixtures("settled")
def test_a_lock_that_is_held_is_not_forgotten(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_cache, "_MAX_FILES", 1)
    folder = remembered_in()
    held, abandoned = folder / "held.lock", folder / ".left.tmp"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in (held, abandoned):
        path.touch()
    os.utime(held, (1, time.time() - 3600))
    os.utime(abandoned, (1, 1))
    for i in range(3):
        save_file({f"{i}": torch.ones(1)}, model / f"{i}.safetensors")
    model_files_digest(model)
    assert held.exists()
    assert not abandoned.exists()
    assert len([path for path in folder.iterdir() if path.suffix == ".json"]) == 1


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(
    model: Path, reads: list[int], mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = remembered_in()
    folder.mkdir()
    folder.chmod(mode)
    for _ in range(2):
        model_files_digest(model)
    assert sum(reads) == 2 * NUM_BYTES
    assert not list(folder.iterdir())
    assert f"its mode is {mode:o}, expected that nobody else may write" in caplog.text


@pytest.mark.usefixtures("settled")
def test_a_folder_of_somebody_else_is_not_used(
    model: Path, reads: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    model_files_digest(model)
    assert f"it belongs to user {os.getuid()}, expected" in caplog.text
    assert not remembered()


def test_without_a_place_to_remember_it_works_all_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = model_files_digest(model)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert model_files_digest(model) == before


def test_one_process_reads_and_the_others_wait(model: Path, reads: list[int]) -> None:
    states = [digest_cache.state_of(os.stat(model / "model.safetensors"))]
    cache = digest_cache.DigestCache()
    waited: list[float] = []

    def release(_: float) -> None:
        waited.append(sum(reads))
        held.__exit__(None, None, None)

    held = cache.lock(states)
    held.__enter__()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", release)
        model_files_digest(model)
    assert waited == [0]
    assert sum(reads) == NUM_BYTES
    cache.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: os.utime(path, ns=(1, 1)),
    ],
)
def test_a_file_that_changes_while_it_is_read_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    preadv = os.preadv

    def changed(*arguments: object) -> int:
        change(model / "model.safetensors")
        return preadv(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", changed)
    with pytest.raises(InvalidArgumentError, match=r"changed while it was read\. Wait until"):
        model_files_digest(model)
    assert not remembered()


def test_progress_is_told_when_it_takes_long(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[int, int]] = []
    model_files_digest(model, progress=lambda *found: told.append(found))
    assert not told
    monkeypatch.setattr(tensor_digests, "_FIRST_SECONDS", 0)
    monkeypatch.setattr(tensor_digests, "_NEXT_SECONDS", 0)
    model_files_digest(model, progress=lambda *found: told.append(found))
    assert told[-1] == (NUM_BYTES, NUM_BYTES)
    caplog.set_level("INFO", "kvx")
    model_files_digest(model)
    assert "Reading the weights in" in caplog.text


# ---- which files count ----


def test_code_counts_where_the_config_names_it(model: Path) -> None:
    code = model / "modeling_own.py"
    code.write_text("theta = 1")
    before = model_files_digest(model)
    code.write_text("theta = 2")
    assert model_files_digest(model) == before  # nobody runs it
    config(auto_map={"AutoModelForCausalLM": "modeling_own.Model"})(model)
    named = model_files_digest(model)
    code.write_text("theta = 3")
    assert len({before, named, model_files_digest(model)}) == 3


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json"])
def test_how_it_is_quantised_counts(model: Path, name: str) -> None:
    found = {model_files_digest(model)}
    for bits in (4, 8):
        (model / name).write_text(json.dumps({"bits": bits}))
        found.add(model_files_digest(model))
    assert len(found) == 3


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_dtypes_of_a_quantiser_count(model: Path, name: str) -> None:
    """Where they are a model's own, they say how it was saved."""
    found = []
    for dtype in ("fp4", "fp6_e3m2"):
        config(**{name: {"input_tensors": {"dtype": dtype}}})(model)
        found.append(model_files_digest(model))
    assert len(set(found)) == 2


def test_what_torchaos_files_say_of_their_tensors_counts(model: Path) -> None:
    found = []
    for method, scale in (("torchao", "1"), ("torchao", "2"), ("awq", "1"), ("awq", "2")):
        config(quantization_config={"quant_method": method})(model)
        save_file(TENSORS, model / "model.safetensors", {"model.norm.weight": scale})
        found.append(model_files_digest(model))
    assert len(set(found)) == 3
    assert found[2] == found[3]


@pytest.mark.parametrize("on", ["the disk of this machine", "a tmpfs"])
def test_a_change_through_a_mapping_is_seen(
    on: str,
    model: Path,
    settled: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A page that is still to be written may change again without changing a time; on a tmpfs, none
    ever changes one.
    """
    monkeypatch.setattr(tensor_digests, "tells_of_mapped_writes", TELLS)
    if on == "a tmpfs":
        assert not remembers(Path("/dev/shm"))
        found = Path(tempfile.mkdtemp(dir="/dev/shm"))
        shutil.copytree(model, found / "model")
        model = found / "model"
    try:
        with caplog.at_level(logging.INFO):
            check_mapped_writes(model)
        told = f"the weights in {model} are not remembered: its file system may not tell of every"
        assert (told in caplog.text) == (on == "a tmpfs" or not remembers(model))
    finally:
        if on == "a tmpfs":
            shutil.rmtree(model.parent)


def remembers(path: Path) -> bool:
    """Whether the file system tells of every write."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return TELLS(handle)
    finally:
        os.close(handle)


def test_file_systems_that_tell_of_every_write() -> None:
    """Only those that are known to: none of the kernel's own is one."""
    assert not any(map(remembers, (Path("/dev/shm"), Path("/proc"), Path("/sys"))))


def check_mapped_writes(model: Path) -> None:
    path = model / "model.safetensors"
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        found = []
        for value in (1, 2, 3):
            mapped[-8] = value
            found.append(model_files_digest(model))
    assert len(set(found)) == 3


def test_mistrals_own_config_counts(model: Path) -> None:
    found = {model_files_digest(model)}
    for dim in (1, 2):
        (model / "params.json").write_text(json.dumps({"dim": dim}))
        found.add(model_files_digest(model))
    (model / "config.json").unlink()
    found.add(model_files_digest(model))
    assert len(found) == 4


def test_which_of_two_tensors_with_one_name_counts(model: Path) -> None:
    """Engines load those that the index names, or the last."""
    other = {**TENSORS, "model.norm.weight": TENSORS["model.norm.weight"] * 2}
    found = set()
    for first, second in ((TENSORS, other), (other, TENSORS)):
        save_file(first, model / "model.safetensors")
        save_file(second, model / "more.safetensors")
        found.add(model_files_digest(model))
    index = model / "model.safetensors.index.json"
    for name in ("model", "more"):
        weight_map = {"model.norm.weight": f"{name}.safetensors"}
        index.write_text(json.dumps({"weight_map": weight_map}))
        found.add(model_files_digest(model))
    assert len(found) == 4


def test_the_same_tensors_twice_are_the_same_model(model: Path) -> None:
    before = model_files_digest(model)
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    assert model_files_digest(model) == before


def test_another_config_in_place_of_the_models_own(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "config"
    other.mkdir()
    shutil.copy(model / "config.json", other)
    assert model_files_digest(model, config=other) == model_files_digest(model)
    config(hidden_size=65)(other)
    changed = model_files_digest(model, config=other)
    assert changed != model_files_digest(model)
    config(hidden_size=65)(model)
    assert changed == model_files_digest(model)


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
    assert model_files_digest(tmp_path / "first") == model_files_digest(tmp_path / "again")
    with torch.no_grad():
        again.model.layers[0].mlp.up_proj.weight += 1e-3
    again.save_pretrained(tmp_path / "tuned")
    assert model_files_digest(tmp_path / "first") != model_files_digest(tmp_path / "tuned")


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
        *(
            (weights(one_tensor(begin, end)), f"a has the bytes {begin} to {end}")
            for begin, end in ((False, 8), (0, True), (-1, 8), (8, 7), (0.0, 8), (0, 8.0))
        ),
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
        model_files_digest(model)
