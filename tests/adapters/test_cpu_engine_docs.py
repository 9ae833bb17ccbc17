"""docs/mlx.md, docs/openvino.md, docs/onnxruntime.md: their snippets, run with the real engines."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.models.cache import KVCache

from kvx_core import CacheSpan, verify
from tests.documents import Document
from tests.engines import live_onnxruntime, openvino_model, tiny_model
from tests.engines.live_transformers import Live as HF


@pytest.fixture
def source() -> CacheSpan:
    hf = HF()
    hf.prefill(tiny_model.prompt(99))
    return hf.view()


def run(page: str, source: CacheSpan, **given: Any) -> dict[str, Any]:
    document = Document(page)
    assert document.snippets()
    return document.run({"source": source, **given})


def test_mlx(source: CacheSpan) -> None:
    names = run("mlx.md", source, cache=[KVCache() for _ in range(tiny_model.NUM_LAYERS)])
    assert verify(source, names["adapter"].span(names["cache"], names["facts"]), [99]).ok


def test_openvino(source: CacheSpan) -> None:
    names = run("openvino.md", source, compiled=openvino_model.compiled("f32"))
    assert verify(source, names["view"].at([[5, 2, 7, 0]]), [99]).ok


def test_onnxruntime(source: CacheSpan) -> None:
    session = live_onnxruntime.session()
    names = run("onnxruntime.md", source, session=session)
    view = names["adapter"].cache_view(session, names["buffers"], names["facts"])
    assert verify(source, view, [99]).ok
