"""`kvx store export` and `kvx store import`: prompts as snapshots, and back, byte for byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvx_adapters.cli.store_runs import Run, chunks_of
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    InvalidArgumentError,
    Plane,
    ScaleDesc,
    describe,
)
from kvx_core.snapshot import Precision, Section, Snapshot
from kvx_core.stores import Directory, PrefixStore
from kvx_core.types import DType
from tests.cli.stores import (
    CHUNK,
    KEY,
    NEW_KEY,
    SECRET,
    entries,
    key_files,
    kvx,
    listed,
    prefix_store,
    prompt_of,
    save,
    section,
)


def snapshots(folder: Path) -> list[Snapshot]:
    """Those of an export, in memory."""
    found = []
    for path in sorted(folder.glob("*/*.safetensors")):
        with Snapshot.open(path) as snapshot:
            found.append(snapshot.read(snapshot.header.layers))
    return found


def bytes_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in entries(path)}


def test_chunks_of_a_prompt_become_one_snapshot(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = kvx("export", path, "aaaa", out, "--salt", "").stdout
    assert said.startswith("2 snapshots of 1 space, ")
    found = {snapshot.tokens.tobytes(): snapshot for snapshot in snapshots(out)}
    assert found.keys() == {prompt_of(1).tobytes(), prompt_of(2).tobytes()}
    for seed in (1, 2):
        snapshot = found[prompt_of(seed).tobytes()]
        assert (snapshot.header.start, snapshot.header.layers) == (0, (0, 1))
        (part,) = snapshot.header.parts
        assert (part.facts.fingerprint, part.precision) == ("a" * 64, "f32")
        captured = Snapshot.capture(prompt_of(seed), [section(seed, 40)])
        assert captured is not None
        assert snapshot.digest() == captured.digest()
    assert out.stat().st_mode & 0o777 == 0o700
    assert sorted(file.name for file in out.glob("*/*.json")) == ["space.json"]


def test_what_prompts_share_is_in_the_snapshot_of_each(tmp_path: Path) -> None:
    """Those that another one begins with have none of their own."""
    path, out = tmp_path / "store", tmp_path / "out"
    store, held = prefix_store(path), section(0, 48)
    prompts = [[*range(32), *range(100, 108)], [*range(32), *range(200, 216)], [*range(32)]]
    for prompt in prompts:
        for span in store.spans(len(prompt)):
            part = store.capture(prompt, *span, [held])
            assert part is not None
            store.commit(part)
    kvx("export", path, "a", out)
    found = sorted(snapshot.tokens.tolist() for snapshot in snapshots(out))
    assert found == sorted(prompts[:2])


def test_import_makes_the_same_files(path: Path, tmp_path: Path) -> None:
    """In a store of its own, byte for byte; again, nothing is new."""
    other = tmp_path / "other"
    for model in "ab":
        kvx("export", path, model, tmp_path / model)
        said = kvx("import", other, tmp_path / model, "--chunk-tokens", CHUNK).stdout
        assert " entries were new, " in said
    assert bytes_of(other) == bytes_of(path)
    assert {s["salt"] for s in listed(other)} == {s["salt"] for s in listed(path)}
    assert prefix_store(other, salt="tenant").lookup(prompt_of(3)).num_tokens == 40
    assert prefix_store(other).lookup([*prompt_of(1)[:37], 1, 2]).num_tokens == 37  # by marks
    said = json.loads(kvx("import", other, tmp_path / "b", "--json").stdout)
    assert (said["num_files"], said["num_entries"], said["failed"]) == (1, 3, [])
    assert (said["num_new_entries"], said["bytes"]) == (0, 0)
    kvx("verify", other)


@pytest.mark.parametrize("chunk_tokens", [20, 64])
def test_other_chunks(chunk_tokens: int, path: Path, tmp_path: Path) -> None:
    """A prompt that begins at token 0 is cut as the other store cuts prompts."""
    kvx("export", path, "b", tmp_path / "out")
    other = tmp_path / "other"
    kvx("import", other, tmp_path / "out", "--chunk-tokens", chunk_tokens)
    store = PrefixStore(
        Directory(other),
        fingerprint="b" * 64,
        num_layers=2,
        total_kv_heads=3,
        precision=Precision.of(DType.F32),
    )
    assert store.chunk_tokens == chunk_tokens
    match = store.lookup(prompt_of(4))
    assert match.num_tokens == 40
    room = section(99, 40)
    store.load(match, 0, 40, [room])
    loaded, expected = (Snapshot.capture(prompt_of(4), [held]) for held in (room, section(4, 40)))
    assert loaded is not None
    assert expected is not None
    assert loaded.digest() == expected.digest()


def test_keys(tmp_path: Path) -> None:
    """From a signed and encrypted store of an old key into one of a new key."""
    path, other, out = tmp_path / "store", tmp_path / "other", tmp_path / "out"
    old, new, secret = key_files(tmp_path, KEY, NEW_KEY, SECRET)
    save(prefix_store(path, key=KEY, encryption_key=SECRET), 1)
    hidden = ("--encryption-key-file", secret)
    said = kvx("export", path, "a", out, *hidden, code=1).stdout
    assert "3 entries were left out." in said
    assert "is signed, and no key is given" in said
    (out / listed(path)[0]["space"] / "space.json").unlink()
    (out / listed(path)[0]["space"]).rmdir()
    result = kvx("export", path, "a", out, *hidden, "--key-file", old)
    assert "The store is encrypted, and the snapshots are not: keep them safe." in result.stderr

    makes = ("--chunk-tokens", CHUNK)
    said = kvx("import", other, out, *makes, "--key-file", new, code=1).stdout
    assert "is signed with the key " in said
    assert "which this process does not have, or take what is not signed: --unsigned" in said
    assert "1 snapshots were left out" in said
    assert entries(other) == []
    kvx("import", other, out, "--key-file", new, "--key-file", old)
    assert prefix_store(other, key=NEW_KEY).lookup(prompt_of(1)).num_tokens == 40
    assert kvx("verify", other, "--key-file", new).stdout.endswith(" files are good.\n")


def test_snapshots_that_are_not_signed(path: Path, tmp_path: Path) -> None:
    """Whoever has keys says so to take them."""
    (key_file,) = key_files(tmp_path, KEY)
    out, other = tmp_path / "out", tmp_path / "other"
    kvx("export", path, "b", out)
    words = ("import", other, out, "--chunk-tokens", CHUNK, "--key-file", key_file)
    assert "is not signed" in kvx(*words, code=1).stdout
    kvx(*words, "--unsigned")
    assert prefix_store(other, "b", key=KEY).lookup(prompt_of(4)).num_tokens == 40


def test_damaged_entries_are_left_out(path: Path, tmp_path: Path) -> None:
    """What comes before them in a prompt is exported; what comes behind them is no use alone."""
    space = next(s["space"] for s in listed(path, "--model", "b"))
    ends = {file.stat().st_size: file for file in entries(path / space)}
    short = ends[min(ends)]  # the last 8 tokens
    raw = bytearray(short.read_bytes())
    raw[-1] ^= 1
    short.write_bytes(raw)
    out = tmp_path / "out"
    said = json.loads(kvx("export", path, "b", out, "--json", code=1).stdout)
    assert (said["num_files"], len(said["failed"])) == (1, 1)
    assert "have changed since they were written" in said["failed"][0]
    (found,) = snapshots(out)
    assert found.tokens.tolist() == prompt_of(4)[:32].tolist()


def test_scales_that_differ_are_not_joined(tmp_path: Path) -> None:
    """FP8 with a scale for all of a chunk: chunks of other scales are snapshots of their own, which
    begin where the others end; import puts them together.
    """
    path, out, other = tmp_path / "store", tmp_path / "out", tmp_path / "other"
    store = prefix_store(path, precision=Precision.of(DType.F32, DType.F8_E4M3))
    tokens = prompt_of(1)
    bytes_ = torch.randint(0, 120, (2, 2, 1, 40, 3, 8), dtype=torch.uint8)
    layers = tuple(
        CacheDesc.from_kv(*(describe(t.view(torch.float8_e4m3fn), "BLOCK_NHD") for t in kv))
        for kv in bytes_
    )
    facts = CacheFacts(rotary="half", rotary_dim=8, rope_applied=True, first_kv_head=0)
    for number, span in enumerate(store.spans(40)):
        scale = ScaleDesc.of(torch.tensor([1.0 if number < 2 else 0.5]), "PER_TENSOR")
        view = CacheView(layers, facts, k_scales=(scale,) * 2, v_scales=(scale,) * 2, dense=True)
        part = store.capture(tokens, *span, [Section((0, 1), view, None)])
        assert part is not None
        store.commit(part)
    kvx("export", path, "a", out)
    found = sorted(snapshots(out), key=lambda snapshot: snapshot.header.start)
    assert [(s.header.start, len(s.tokens)) for s in found] == [(0, 32), (32, 8)]
    assert [s.array("layers.1.v_scale").tolist() for s in found] == [[1.0], [0.5]]
    kvx("import", other, out, "--chunk-tokens", CHUNK)
    assert bytes_of(other) == bytes_of(path)
    said = kvx("import", tmp_path / "third", out, "--chunk-tokens", 20, code=1).stdout
    assert "begins at token 32, expected a multiple of chunk_tokens 20 of the store" in said


def with_planes(num_tokens: int) -> Snapshot:
    """Keys, a plane with an entry for 4 tokens, and one for each."""
    room = -(-num_tokens // 4) * 4
    keys = torch.arange(room * 2 * 8, dtype=torch.float32).reshape(1, room, 2, 8)
    every, fourth = torch.arange(room)[None, :, None].float(), torch.arange(room // 4)
    view = CacheView(
        (CacheDesc.from_kv(describe(keys, "BLOCK_NHD"), describe(-keys, "BLOCK_NHD")),),
        CacheFacts(first_kv_head=0, total_kv_heads=2),
        planes=(
            Plane.of(every, ("block", "token", "dim"), "index_k", 0, replicated=True),
            Plane.of(
                fourth[None, :, None].float(),
                ("block", "token", "dim"),
                "index_k_scale",
                0,
                tokens_per_entry=4,
                replicated=True,
            ),
        ),
        dense=True,
    )
    found = Snapshot.capture(range(num_tokens), [Section((0,), view, None)])
    assert found is not None
    return found


def test_planes_are_cut_and_joined() -> None:
    """Entries for several tokens; behind the last complete one there is none."""
    whole, space = with_planes(38), "ab" * 32
    chunks = list(chunks_of(whole, space, CHUNK))
    assert [len(chunk.tokens) for chunk in chunks] == [16, 16, 6]
    assert [chunk.array("planes.0.index_k_scale").ravel().tolist() for chunk in chunks] == [
        *([0, 1, 2, 3], [4, 5, 6, 7], [8]),
    ]
    assert chunks[0].header.prefix == space
    run = Run(chunks[0], 38)
    assert run.add(chunks[1])
    assert not run.add(chunks[0])  # it does not follow them
    assert run.add(chunks[2])
    assert run.snapshot().digest() == whole.digest()
    lone = list(chunks_of(whole, space, 36))[1]
    assert "planes.0.index_k_scale" not in lone.tensors
    with pytest.raises(InvalidArgumentError, match="with an entry for 4 tokens, expected a divis"):
        list(chunks_of(whole, space, 18))


def test_keys_of_chunks_follow_the_format() -> None:
    """docs/store_format.md: SHA-256(parent | ids)."""
    whole, space = with_planes(38), "ab" * 32
    first, second, third = chunks_of(whole, space, CHUNK)
    key = hashlib.sha256(bytes.fromhex(space) + np.arange(16, dtype="<i8").tobytes()).hexdigest()
    assert second.header.prefix == key
    ids = np.arange(16, 32, dtype="<i8").tobytes()
    assert third.header.prefix == hashlib.sha256(bytes.fromhex(key) + ids).hexdigest()
    assert [chunk.header.start for chunk in (first, second, third)] == [0, 16, 32]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "c" * 64}, "is of model 'bbbb"),
        ({"kv_heads": [3]}, "has layer 1, expected one of 1 as space.json beside it says"),
        ({"kv_heads": [3, 2]}, "has heads 0 to 2 of layer 1, expected 2 at most as space.json"),
        ({"planes": [[1, 40, 1, True]]}, "has other planes of layer 1 than space.json beside it"),
    ],
)
def test_snapshots_of_another_model(
    change: dict[str, Any], message: str, path: Path, tmp_path: Path
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    kvx("export", path, "b", out)
    (record,) = out.glob("*/space.json")
    fields = json.loads(record.read_text()) | change
    record.write_text(json.dumps(fields, sort_keys=True, separators=(",", ":")))
    said = kvx("import", other, out, "--chunk-tokens", CHUNK, code=1).stdout
    assert message in said
    assert entries(other) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "STORE", "", "new"), "MODEL is '', expected the beginning of a model"),
        (("export", "STORE", "cc", "new"), "MODEL is cc, expected the beginning of a model or of"),
        (("export", "STORE", "a", "."), "FOLDER is ., which exists, expected a new folder"),
        (("export", "STORE", "a", "file"), "FOLDER is file, which exists, expected a new folder"),
        (("export", ".", "a", "new"), "is no store: it has no kvx-store.json"),
        (("import", "STORE", "nowhere"), "FOLDER is nowhere, expected what `kvx store export`"),
        (("import", "STORE", "empty"), "has no space.json, neither itself nor in a folder of it"),
        (("import", "STORE", "bad"), "is no record of a space"),
        (("import", "nowhere", "OUT"), "PATH is nowhere, expected the directory of a store"),
        (("import", ".", "OUT"), "is no store: it has no kvx-store.json"),
        (("import", "STORE", "OUT", "--chunk-tokens", "32"), "chunk_tokens is 32, expected 16"),
        (("import", "new", "OUT", "--chunk-tokens", "99999"), "chunk_tokens is 99999, expected"),
    ],
)
def test_wrong_input_is_one_sentence(
    arguments: tuple[str, ...],
    message: str,
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "work/bad").mkdir(parents=True)
    (tmp_path / "work/empty").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("file").write_text("mine")
    Path("bad/space.json").write_text("{}")
    kvx("export", path, "b", tmp_path / "out")
    there = {"STORE": path, "OUT": tmp_path / "out"}
    before = bytes_of(path)
    said = kvx(*(there.get(word, word) for word in arguments), code=2).stderr
    assert message in " ".join(said.split())
    assert bytes_of(path) == before
    assert not Path("new").exists()


def test_what_is_no_snapshot_is_left_out(path: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    kvx("export", path, "b", out)
    (good,) = out.glob("*/*.safetensors")
    (good.with_name("0.safetensors")).write_bytes(b"no snapshot")
    (good.with_name("1.safetensors")).symlink_to(good)
    (good.with_name("2.safetensors")).mkdir()
    good.with_name("notes.txt").write_text("mine")
    result = json.loads(kvx("import", other, out, "--json", "--chunk-tokens", CHUNK, code=1).stdout)
    assert (result["num_files"], result["num_new_entries"], len(result["failed"])) == (4, 3, 3)
    assert prefix_store(other, "b").lookup(prompt_of(4)).num_tokens == 40
