"""Stores of several models and salts, for tests of `kvx store`, and what it prints of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from typer.testing import CliRunner, Result

from kvx_adapters.cli.commands import app
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    ModelRecord,
    describe,
)
from kvx_core.snapshot import Precision, Section
from kvx_core.stores import Directory, PrefixStore
from kvx_core.types import DType

CHUNK = 16


DAY = 86400


KEY, NEW_KEY, SECRET = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))


def prefix_store(
    path: Path,
    model: str | ModelRecord = "a",
    salt: str = "",
    max_bytes: int | None = None,
    **options: Any,
) -> PrefixStore:
    options = {"total_kv_heads": 3, "precision": Precision.of(DType.F32)} | options
    return PrefixStore(
        Directory(path, max_bytes),
        fingerprint=model * 64 if isinstance(model, str) else model,
        num_layers=2,
        chunk_tokens=CHUNK,
        salt=salt,
        **options,
    )


def section(seed: int, num_tokens: int, first_kv_head: int = 0) -> Section:
    """Keys and values of a prompt, 3 heads of 8 in 2 layers."""
    generator = torch.Generator().manual_seed(seed)
    caches = torch.randn(2, 2, 1, num_tokens, 3, 8, generator=generator)
    facts = CacheFacts(
        rotary="half",
        rotary_dim=8,
        rope_applied=True,
        first_kv_head=first_kv_head,
        compute_dtype=DType.F32,
    )
    layers = (
        CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD")) for k, v in caches
    )
    return Section((0, 1), CacheView(tuple(layers), facts, dense=True), None)


def prompt_of(seed: int, num_tokens: int = 40) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 1000, num_tokens)


def save(store: PrefixStore, seed: int, num_tokens: int = 40, first_kv_head: int = 0) -> None:
    """Stores a prompt: of 40 tokens three chunks, the last one of 8."""
    tokens, held = prompt_of(seed, num_tokens), section(seed, num_tokens, first_kv_head)
    parts = [store.capture(tokens, *span, [held]) for span in store.spans(num_tokens)]
    for stored in store.commit_all([part for part in parts if part is not None]):
        assert isinstance(stored, int)


def kvx(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["store", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def listed(path: Path, *arguments: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(kvx("ls", path, "--json", *arguments).stdout)
    return found


def totals(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kvx("stat", path, "--json").stdout)
    return found


def entries(path: Path) -> list[Path]:
    return sorted(path.rglob("*.safetensors"))


def all_files(path: Path) -> list[Path]:
    """Those of spaces, not those of the store itself."""
    return sorted(file for file in path.glob("*/**/*") if file.is_file())


def key_files(folder: Path, *secrets: bytes) -> list[Path]:
    """Files of keys, as their owner has made them."""
    paths = [folder / f"key-{hashlib.sha256(secret).hexdigest()[:8]}" for secret in secrets]
    for path, secret in zip(paths, secrets, strict=True):
        path.write_bytes(secret)
        path.chmod(0o600)
    return paths


def two_models(path: Path) -> Path:
    """The first has two salts."""
    save(prefix_store(path), 1)
    save(prefix_store(path), 2)
    save(prefix_store(path, salt="tenant"), 3)
    save(prefix_store(path, "b"), 4)
    return path


def save_tokenizer(path: Path) -> None:
    """A tokenizer.json of two words."""
    words = WordLevel({"one": 1, "two": 2, "?": 0}, unk_token="?")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path))
