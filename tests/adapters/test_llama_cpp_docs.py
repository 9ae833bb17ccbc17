"""docs/llama_cpp.md: its snippets run one after the other, against llama.cpp itself."""

from __future__ import annotations

from typing import Any

import pytest

from kvx_adapters.cli.engines.live_llama_cpp import Context
from kvx_adapters.cli.engines.live_transformers import Live
from kvx_adapters.cli.engines.llama_cpp_abi import library
from tests.documents import Document
from tests.engines import tiny_model
from tests.engines.tiny_model import tiny

PAGE = Document("llama_cpp.md")
NUM_TOKENS = 9


def test_the_snippets(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = tiny_model.prompt(NUM_TOKENS + 1)
    wanted = list(tiny_model.greedy(NUM_TOKENS + 1, 6))
    home = Live(tiny())
    home.prefill(prompt[:-1])
    context = Context(tiny())
    quantized = Context(tiny(), k_dtype="Q8_0", v_dtype="Q8_0", flash_attention=True)
    for one in (context, quantized):
        one.run([0] * NUM_TOKENS)
    names: dict[str, Any] = {
        "tensors": context.tensors(),
        "k_indices": context.indices["cache_k_l0"],
        "v_indices": context.indices["cache_v_l0"],
        "libllama": library(),
        "context": context.context,
        "theirs": home.view(),
        "num_tokens": NUM_TOKENS,
        "quantized": quantized.span(),
    }
    assert len(PAGE.snippets()) == 3
    PAGE.run(names)
    assert capsys.readouterr().out.splitlines() == PAGE.prints()
    assert names["own"].data.tobytes() == context.state()
    assert context.decode(6, after=prompt[-1]) == wanted
    other = Context(tiny())
    assert other.set_state(names["data"]) == len(names["data"])
    other.cells[0] = list(range(NUM_TOKENS))
    assert other.decode(6, after=prompt[-1]) == wanted
