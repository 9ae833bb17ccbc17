"""`kvx store explain`: how much of a prompt is stored, where that ends and why."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvx_adapters.cli.store_walk import differences
from kvx_core import ModelRecord
from kvx_core.model.rope import standard_rope
from kvx_core.stores import Directory
from kvx_core.stores.names import key_of
from kvx_core.stores.space import SpaceRecord
from kvx_core.stores.stored_space import Space
from tests.cli.stores import (
    CHUNK,
    KEY,
    entries,
    key_files,
    kvx,
    prefix_store,
    prompt_of,
    save,
    save_tokenizer,
    section,
    two_models,
)
from tests.documents import blocks
from tests.native import ROOT
from tests.stores.machine import save_state, save_tokens, store_of

A, B = "a" * 64, "b" * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return two_models(tmp_path / "store")


def explained(path: Path, ids: Any, *options: object) -> dict[str, Any]:
    file = path.with_name("ids.json")
    file.write_text(json.dumps([int(token) for token in ids]))
    found: dict[str, Any] = json.loads(kvx("explain", path, file, "--json", *options).stdout)
    return found


def one(path: Path, ids: Any, *options: object) -> tuple[int, str]:
    """Tokens and the reason, of the first space that was asked for."""
    first = explained(path, ids, *options)["asked"][0]
    return first["num_tokens"], first["why"] or ""


def entry(path: Path, ids: Any, chunk: int, space: str) -> Path:
    """The file of a chunk of a prompt."""
    node = space
    for at in range(0, chunk * CHUNK, CHUNK):
        node = key_of(node, ids[at : at + CHUNK])
    key = key_of(node, ids[chunk * CHUNK : (chunk + 1) * CHUNK])
    (file,) = [file for file in entries(path) if file.name.startswith(key)]
    return file


def test_all_of_a_prompt(path: Path) -> None:
    assert one(path, prompt_of(1), "--model", A) == (40, "")
    output = kvx("explain", path, path.with_name("ids.json"), "--model", A, "--salt", "").stdout
    assert output.splitlines()[0] == "Model aaaaaaaaaaaa: 40 of 40 tokens"
    assert "3 files of f32, the least recently used" in output
    assert "no more" not in output


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_ends_where_a_lookup_ends(path: Path, seed: int) -> None:
    """At any token at which a prompt goes on otherwise, and at ends of prompts."""
    chance, ids = random.Random(seed), prompt_of(1)
    store = prefix_store(path)
    for _ in range(20):
        shared, more = chance.randrange(1, 41), chance.randrange(0, 30)
        prompt = np.concatenate([ids[:shared], np.full(more, 5000, np.int64)])
        expected = store.lookup(prompt).num_tokens
        found, why = one(path, prompt, "--model", A, "--salt", "")
        assert found == expected
        assert bool(why) == (found < len(prompt))


def test_why_it_ends(path: Path) -> None:
    ids = prompt_of(1)
    other = np.concatenate([ids[:37], [5000] * 10])
    assert one(path, other, "--model", A) == (
        37,
        "the entry that begins so goes on with other tokens",
    )
    longer = np.concatenate([ids, [5000] * 10])
    assert one(path, longer, "--model", A) == (40, "the entry that begins so ends there")
    space = explained(path, ids, "--model", A, "--salt", "")["asked"][0]["space"]
    file = entry(path, ids, 1, space)
    content = file.read_bytes()
    file.write_bytes(content[:200] + b"x" + content[201:])
    tokens, why = one(path, ids, "--model", A)
    assert tokens == 16
    assert why.startswith(f"of tokens 16 to 32 {file.name[:12]} is of no use: ")
    file.unlink()
    assert one(path, ids, "--model", A) == (
        16,
        "of tokens 16 to 32 there is no file: nobody has stored them, or they were evicted",
    )


def test_a_rank_that_has_not_stored_its_heads(tmp_path: Path) -> None:
    path = tmp_path / "store"
    save(prefix_store(path, total_kv_heads=6), 1)
    tokens, why = one(path, prompt_of(1))
    assert tokens == 0
    assert why.startswith(
        "of tokens 0 to 16 layers 0-1 are missing, or some of their heads: a rank"
    )
    save(prefix_store(path, total_kv_heads=6), 1, first_kv_head=3)
    assert one(path, prompt_of(1)) == (40, "")


def test_what_others_have(path: Path) -> None:
    """What the store has under another salt and of another model is shown, with what differs."""
    found = explained(path, prompt_of(3), "--model", A, "--salt", "")
    assert [space["num_tokens"] for space in found["asked"]] == [0]
    (near,) = found["others"]
    assert near["num_tokens"] == 40
    assert [fact["name"] for fact in near["differs"]] == ["salt"]
    (fact,) = explained(path, prompt_of(4), "--model", A, "--salt", "")["others"][0]["differs"]
    assert fact == {"name": "model", "asked": A[:12], "here": B[:12]}
    output = kvx("explain", path, path.with_name("ids.json"), "--model", A, "--salt", "").stdout
    assert f"  other model: {B[:12]}, expected {A[:12]}" in output


def test_models_differ_by_name_and_value(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for theta, seed in ((10000.0, 1), (20000.0, 2)):
        rope = standard_rope({"rope_theta": theta})
        save(prefix_store(path, ModelRecord(files="f" * 64, architecture="llama", rope=rope)), seed)
    asked = explained(path, prompt_of(1))["asked"][0]["space"]
    (near,) = explained(path, prompt_of(2), "--model", asked)["others"]
    names = [fact["name"] for fact in near["differs"]]
    assert names
    assert all(name.startswith("model rope") for name in names)


def hybrid(path: Path) -> tuple[Any, list[int], dict[tuple[int, int], str]]:
    """A store of a model with states and a window, a prompt, and its files by chunk and part."""
    store, prompt = store_of(Directory(path)), list(range(100, 180))
    return store, prompt, save_tokens(store, prompt)


def test_states_end_a_prefix(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store, prompt, _ = hybrid(path)
    assert one(path, prompt) == (
        0,
        "keys and values of 80 tokens are there, and the model's states after none of them",
    )
    for count in (64, 37, 66):
        save_state(store, prompt[:count])
    tokens, why = one(path, prompt)
    assert tokens == store.lookup(prompt).num_tokens == 66
    assert why.endswith("and the model's states after 66 of them")


def test_windows(tmp_path: Path) -> None:
    """What a sliding window has left is missing for those who read all of the layer."""
    path = tmp_path / "store"
    store, prompt, names = hybrid(path)
    save_state(store, prompt)
    assert one(path, prompt) == (80, "")
    for chunk in range(2):
        (path / names[chunk, 1]).unlink()
    (found,) = explained(path, prompt)["asked"]
    assert found["num_tokens"] == 0
    assert found["num_tokens_with_windows"] == 80 == store.lookup(prompt).num_tokens
    assert "layers 2 are missing" in found["why"]
    output = kvx("explain", path, path.with_name("ids.json")).stdout
    assert "  80 where a sliding window has left layers 2\n" in output


def test_a_store_with_keys(tmp_path: Path) -> None:
    path = tmp_path / "store"
    save(prefix_store(path, key=KEY), 1)
    (key,) = key_files(tmp_path, KEY)
    assert one(path, prompt_of(1)) == (40, "")
    assert one(path, prompt_of(1), "--key-file", key) == (40, "")


def test_wrong_input(path: Path) -> None:
    file = path.with_name("ids")
    for text, said in (
        ("1, two, 3", "TOKENS has 'two', expected ids"),
        ("", "TOKENS has 0 ids, expected 1 to"),
        ("[99999999999999999999]", "TOKENS has '99999999999999999999', expected ids"),
    ):
        file.write_text(text)
        assert said in " ".join(kvx("explain", path, file, code=2).output.split())
    file.write_bytes(bytes([255, 254]))
    assert "expected text" in kvx("explain", path, file, code=2).output
    assert "No such file" in kvx("explain", path, path / "none", code=2).output
    file.write_text("1 2 3")
    assert "tokenizer.json" in kvx("explain", path, file, "--tokenizer", path, code=2).output
    found = kvx("explain", path, file, "--model", "ffff").stdout
    assert found.startswith("The store has nothing of it: no engine has stored a prompt")


def test_text(path: Path) -> None:
    save_tokenizer(path.with_name("tokenizer.json"))
    file = path.with_name("text")
    file.write_text("two one two")
    found = kvx("explain", path, file, "--tokenizer", path.parent, "--model", A).stdout
    assert "0 of 3 tokens" in found


def test_the_page_shows_what_is_printed(tmp_path: Path) -> None:
    """docs/operations.md: the same lines, but for names, numbers and times."""
    (shown,) = (b.text for b in blocks(ROOT / "docs/operations.md") if b.language == "text")
    path = tmp_path / "store"
    for salt, length in (("", 32), ("tenant", 40)):
        store, ids = prefix_store(path, salt=salt), prompt_of(1)
        held = section(1, 40)
        store.commit_all(
            [store.capture(ids, *span, [held]) for span in store.spans(length)]  # type: ignore
        )
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(prompt_of(1).tolist()))
    printed = kvx("explain", path, file, "--model", A, "--salt", "").stdout

    def form(text: str) -> list[str]:
        words = r"\b[0-9a-f]{12}\b|[0-9][0-9,]*[smhdw]?\b|\bb?f(16|32)\b"
        return [re.sub(words, "_", line) for line in text.splitlines()]

    assert form(printed) == form(shown)


def test_a_shorter_entry_in_place_of_an_incomplete_one(tmp_path: Path) -> None:
    """As a lookup finds it: the chunk lacks a window's layer, another entry begins like it."""
    path = tmp_path / "store"
    store, prompt, names = hybrid(path)
    other = [*prompt[:70], *range(500, 506)]
    save_tokens(store, other)
    for count in (64, 70):
        save_state(store, prompt[:count])
    (path / names[4, 0]).unlink()
    tokens, why = one(path, prompt)
    assert tokens == store.lookup(prompt).num_tokens == 70
    assert why


def test_many_salts(tmp_path: Path) -> None:
    """Those that have nothing of a prompt are counted, not shown."""
    path = tmp_path / "store"
    for i in range(5):
        save(prefix_store(path, salt=f"tenant {i}"), i, 16)
    explained(path, prompt_of(3, 16))
    lines = kvx("explain", path, path.with_name("ids.json")).stdout.splitlines()
    assert len([line for line in lines if line.startswith("Model ")]) == 1
    assert lines[-1] == "4 other models, epochs and salts have no more of it."


def test_a_record_of_a_model_that_is_nested_deeply() -> None:
    """As a stranger may have written it: the fingerprints are what differs."""
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    ends = [Space(name, SpaceRecord(name * 64, (1,)), model=deep | {"b": 1}) for name in "ab"]
    assert differences(*ends) == [("model", "a" * 12, "b" * 12)]
