"""docs/transformers.md: its snippets run one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.adapters.test_transformers_groups import (
    HEADS,
    MIXED,
    NUM_LAYERS,
    WINDOW,
    model,
    paged,
    store,
)
from tests.adapters.test_transformers_groups import prompt as prompt_of
from tests.documents import Document

PAGE = Document("transformers.md")


def test_the_snippets(capsys: pytest.CaptureFixture[str]) -> None:
    like = model("Llama")
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    padded = transformers.DynamicCache(config=like.config)
    like(input_ids=torch.ones(2, 5, dtype=torch.int64), attention_mask=mask, past_key_values=padded)
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
        "attention_mask": mask,
        "paged": pages,
    }
    assert len(PAGE.snippets()) == 5
    PAGE.run(names)
    assert capsys.readouterr().out.splitlines() == PAGE.prints()
    for layer, key in zip(names["dst"].layers, keys, strict=True):
        assert torch.equal(layer.keys[0, :, :12].transpose(0, 1), key)
