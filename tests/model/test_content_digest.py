"""content_digest: equal only if every part is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvx_core import InvalidArgumentError, content_digest


def test_digest_of_parts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert len(content_digest("model")) == 64
    assert content_digest("model") == content_digest(b"model")
    assert content_digest("ab", "c") != content_digest("a", "bc")
    assert content_digest("a", "b") != content_digest("b", "a")
    assert content_digest(tmp_path / "config.json") == content_digest("{}")


def test_digest_of_a_directory_sees_names_and_contents(tmp_path: Path) -> None:
    def of(files: dict[str, str]) -> str:
        root = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return content_digest(root)

    model = {"config.json": "{}", "weights/0.bin": "abc"}
    assert of(model) == of(dict(reversed(model.items())))
    assert of(model) != of({**model, "weights/0.bin": "abd"})
    assert of(model) != of({"config.json": "{}", "weights/1.bin": "abc"})
    assert of(model) != of({"config.json": "{}"})


def test_digest_of_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="is neither a file nor a directory"):
        content_digest(tmp_path / "none")
