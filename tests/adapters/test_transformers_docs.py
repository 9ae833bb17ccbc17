"""docs/transformers.md: its snippets run one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvx_core import Snapshot, StoreError
from tests.adapters.test_transformers_groups import (
    HEADS,
    MIXED,
    NUM_LAYERS,
    WINDOW,
    decode,
    model,
    paged,
    store,
)
from tests.adapters.test_transformers_groups import prompt as prompt_of
from tests.documents import Document
from tests.native import ROOT

PAGE = Document("transformers.md")


def programs() -> list[str]:
    """The two snippets that are whole programs."""
    found = PAGE.snippets()[1:3]
    assert [program.splitlines()[0] for program in found] == ["# save.py", "# go_on.py"]
    return found


@torch.inference_mode()
def test_the_snippets(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    like = model("Llama")
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    padded = transformers.DynamicCache(config=like.config)
    padded_ids = torch.tensor([[0, 0, 7, 1, 4], [2, 9, 9, 5, 3]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    like(input_ids=padded_ids, attention_mask=mask, position_ids=positions, past_key_values=padded)
    ids = prompt_of(12)
    pages = paged(like)
    for group in pages.cache_allocators.values():
        for _ in range(6):
            pages.pool.allocate_sector(group.index)
    keys = torch.randn(NUM_LAYERS, 12, HEADS, 16)
    store(pages, "a", 0, keys)
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED}
    names: dict[str, Any] = {
        "model": like,
        "mixed": model("Qwen2", **windows),
        "input_ids": ids,
        "padded": padded,
        "padded_ids": padded_ids,
        "folder": tmp_path,
        "attention_mask": mask,
        "paged": pages,
    }
    snippets = [snippet for snippet in PAGE.snippets() if snippet not in programs()]
    assert len(snippets) == 8
    PAGE.run(names, *snippets)
    assert capsys.readouterr().out.splitlines() == PAGE.prints()

    # The row without its padding, as if it had been computed alone.
    with Snapshot.open(tmp_path / "row") as file:
        assert file.tokens.tolist() == [7, 1, 4]
    computed = transformers.DynamicCache(config=like.config)
    like(input_ids=torch.tensor([[7, 1, 4]]), past_key_values=computed)
    for layer, expected in zip(names["alone"].layers, computed.layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.values, expected.values, rtol=1e-4, atol=1e-4)

    # The windows that went through files: every byte, and the same next tokens.
    for layer, expected in zip(names["fresh"].layers, names["windowed"].layers, strict=True):
        assert torch.equal(layer.keys, expected.keys)
        assert torch.equal(layer.values, expected.values)
    following = [decode(names["mixed"], names[name], 11) for name in ("fresh", "windowed")]
    assert following[0] == following[1]

    for layer, key in zip(names["dst"].layers, keys, strict=True):
        assert torch.equal(layer.keys[0, :, :12].transpose(0, 1), key)


@pytest.mark.slow
def test_a_cache_goes_through_a_file_to_another_process(tmp_path: Path) -> None:
    like = model("Llama")
    like.save_pretrained(tmp_path / "model")
    results = []
    for program in programs():
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results.append(done.stdout)
    prompt = torch.tensor([[5, 17, 3, 40, 8, 21, 9]])
    expected = like.generate(prompt, max_new_tokens=8, do_sample=False)[0, 7:].tolist()
    assert results == ["", f"{expected}\n"]

    # Another model is refused before a token is used.
    other = transformers.LlamaForCausalLM(like.config)
    other.save_pretrained(tmp_path / "model")
    with pytest.raises(StoreError, match="fingerprint"):
        PAGE.run(
            {},
            programs()[1]
            .replace('"model"', repr(str(tmp_path / "model")))
            .replace('"prompt.safetensors"', repr(str(tmp_path / "prompt.safetensors"))),
        )
