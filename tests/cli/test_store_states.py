"""`kvx store` of a model with states: what is counted, checked, deleted, exported and imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvx_core import Directory, Snapshot
from tests.cli.stores import CHUNK, entries, kvx, listed, totals
from tests.stores.machine import check_load, save_state, save_tokens, store_of

TOKENS = [*range(1, 41)]
STOPS = (16, 22, 40)  # the end of a chunk, a rung, and the end of the prompt


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three chunks in two groups of layers, and three states."""
    store = store_of(Directory(tmp_path / "store"), CHUNK)
    save_tokens(store, TOKENS)
    for stop in STOPS:
        save_state(store, TOKENS[:stop])
    return tmp_path / "store"


def hits(path: Path) -> list[int]:
    """Of the prompts up to each end; all of them are loaded."""
    found = []
    for stop in STOPS:
        store = store_of(Directory(path), CHUNK)
        match = store.lookup(TOKENS[:stop])
        check_load(store, TOKENS, match)
        found.append(match.num_tokens)
    return found


def test_states_are_counted_and_shown(path: Path) -> None:
    (space,) = listed(path)
    assert (space["num_entries"], space["num_tokens"], space["num_states"]) == (3, 40, 3)
    assert space["num_entries_of_unknown_length"] == 0
    holds = {kind["kind"]: (kind["holds"], kind["num_files"]) for kind in space["kinds"]}
    assert sorted(holds.values()) == [("states", 3), ("tokens", 3), ("tokens", 3)]
    found = totals(path)
    assert (found["num_entries"], found["num_tokens"], found["num_states"]) == (3, 40, 3)
    shown = kvx("ls", path).stdout.splitlines()
    assert "states" in shown[0].split()
    lines = kvx("ls", path, "--kinds").stdout.splitlines()
    assert "holds" in lines[0].split()
    assert sum("states" in line.split() for line in lines[1:]) == 1


def test_a_bad_state_is_found_and_deleted(path: Path) -> None:
    (space,) = listed(path)
    kvx("verify", path)
    (kind,) = [kind["kind"] for kind in space["kinds"] if kind["holds"] == "states"]
    bad = next(file for file in entries(path) if kind in file.name)
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    assert bad.name in kvx("verify", path, code=1).output
    kvx("verify", path, "--delete", code=1)
    assert not bad.exists()
    assert totals(path)["num_states"] == 2
    kvx("verify", path)


def test_export_and_import_of_states(path: Path, tmp_path: Path) -> None:
    """A state is a snapshot of its own, which no other one is joined to."""
    out, other = tmp_path / "out", tmp_path / "other"
    kvx("export", path, "abc", out)
    states = {}
    for file in sorted(out.glob("*/*.safetensors")):
        with Snapshot.open(file) as snapshot:
            if not any(name.startswith("layers.") for name in snapshot.tensors):
                states[snapshot.header.start + len(snapshot.tokens)] = file
    assert states.keys() == {*STOPS}
    kvx("import", other, out, "--chunk-tokens", CHUNK)
    assert hits(other) == [*STOPS] == hits(path)

    def names(root: Path) -> set[str]:
        return {str(file.relative_to(root)) for file in entries(root)}

    assert names(other) == names(path)
    said = kvx("import", tmp_path / "chunks", out, "--chunk-tokens", 24, code=1).output
    assert "begins at token 32, expected a multiple of chunk_tokens 24" in said
    store = store_of(Directory(tmp_path / "chunks"), 24)
    assert store.lookup(TOKENS[:16]).num_tokens == 16  # this state begins at token 0


def imported(path: Path, out: Path) -> str:
    return kvx("import", path, out, "--chunk-tokens", CHUNK, code=1).output


def test_files_with_tokens_and_states_are_not_imported(path: Path, tmp_path: Path) -> None:
    """Their layers' planes are those of neither."""
    out = tmp_path / "out"
    kvx("export", path, "abc", out)
    record = next(out.rglob("space.json"))
    raw = record.read_text().replace('"planes":[[1,', '"planes":[[0,')
    assert raw != record.read_text()
    record.write_text(raw)
    assert "has other planes of layer 1" in imported(tmp_path / "other", out)


def test_trim_and_rm_take_states(path: Path) -> None:
    kvx("trim", path, "1")
    assert entries(path) == []
    assert totals(path)["num_states"] == 0
