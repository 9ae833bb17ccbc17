"""accept, format and key_files: which entries an engine loads, how precise what it stores is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvx_core import InvalidArgumentError
from tests.store_files import entry_files, precision_of
from tests.tensorrt_llm_plugin.conftest import SIZES, Factory
from tests.vllm_plugin.models import prompt

BF16 = {"args": {"dtype": "bfloat16"}, "sizes": replace(SIZES, dtype=torch.bfloat16)}


def precisions(store: Path) -> set[str]:
    return {precision_of(path) for path in entry_files(store)}


def test_a_coarser_pool_is_loaded_where_it_is_asked_for_and_stays_coarse(serve: Factory) -> None:
    tokens = prompt(150, 1)
    first = serve(**BF16)
    first.ask(tokens)
    first.close()
    assert precisions(serve.store) == {"bf16"}
    strict = serve(8)
    assert strict.ask(tokens).computed == 150
    strict.close()
    assert precisions(serve.store) == {"bf16", "f32"}
    for path in entry_files(serve.store):
        if precision_of(path) == "f32":
            path.unlink()
    serve.set(accept="lossy")
    lossy = serve(8)
    assert lossy.ask(tokens).computed == 150 - 144
    # The rank that saves is told what the scheduler has loaded.
    assert lossy.ask(prompt(100, 2)).computed == 100
    lossy.close()
    assert precisions(serve.store) == {"bf16"}


def test_a_finer_pool_serves_a_coarser_one(serve: Factory) -> None:
    tokens = prompt(150, 1)
    first = serve()
    first.ask(tokens)
    first.close()
    assert serve(8, **BF16).ask(tokens).computed == 150 - 144


def test_engines_with_the_same_key_share(serve: Factory, tmp_path: Path) -> None:
    tokens = prompt(150, 1)
    keys = [tmp_path / "one", tmp_path / "two"]
    for i, key in enumerate(keys):
        key.write_bytes(bytes([i]) * 32)
        key.chmod(0o600)
    serve.set(key_files=str(keys[0]))
    first = serve()
    first.ask(tokens)
    first.close()
    assert serve(8).ask(tokens).computed == 150 - 144
    serve.set(key_files=str(keys[1]))
    assert serve(8).ask(tokens).computed == 150
    serve.set()
    assert serve(8).ask(tokens).computed == 150
    keys[0].chmod(0o644)
    serve.set(key_files=str(keys[0]))
    with pytest.raises(InvalidArgumentError, match=r"key_files .* has mode 0644, expected 0600"):
        serve()


def test_a_lossy_format_is_a_store_of_its_own(serve: Factory) -> None:
    tokens = prompt(150, 1)
    serve.set(format="f16")
    first = serve()
    first.ask(tokens)
    first.close()
    assert precisions(serve.store) == {"f16"}
    for format in (None, "f8_e4m3"):
        serve.set(format=format, accept="lossy")
        assert serve(8).ask(tokens).computed == 150


def test_an_exact_format_shares_with_all(serve: Factory) -> None:
    tokens = prompt(150, 1)
    serve.set(format="f32")
    first = serve(**BF16)
    first.ask(tokens)
    first.close()
    assert precisions(serve.store) == {"bf16"}
    serve.set()
    assert serve(8, **BF16).ask(tokens).computed == 150 - 144


def test_formats_that_are_refused_at_start(serve: Factory) -> None:
    serve.set(format="q9")
    with pytest.raises(
        InvalidArgumentError, match=r"TRTLLM_KVX\.format: .*format is 'q9', expected"
    ):
        serve()
    serve.set(format="q8_0")
    with pytest.raises(
        InvalidArgumentError,
        match="format is 'q8_0' and k of layer 0 has head_dim 10, in 2 heads 20 numbers,",
    ):
        serve()
