"""The connector while calls into KVX raise, one at a time: TensorRT-LLM goes on.

Before each forward pass the mock compares all that counts as computed with what the model would
have computed, so a promise that is not kept fails.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from kvx_core.connector import writer
from kvx_core.stores.prefix import PrefixStore
from kvx_core.stores.walk import Walk
from tests.fakes.tensorrt_llm_executor import LlmRequest
from tests.injection import Injection
from tests.tensorrt_llm_plugin.conftest import Factory
from tests.vllm_plugin.models import prompt

ERRORS = [RuntimeError, AttributeError, MemoryError, RecursionError]
PLUGIN = "kvx_adapters.tensorrt_llm_plugin"
# Start-up raises, and start_load_kv: blocks that are not written would be taken for computed.
PASSED = ("__init__", "register_kv_caches", "start_load_kv", "_load")
KNOWN, NEW = prompt(100, seed=40), prompt(70, seed=41)


def serve_two(serve: Factory, source: Path) -> None:
    """A prompt of which the store has the beginning, and one of which it has nothing."""
    shutil.rmtree(serve.store)
    shutil.copytree(source, serve.store)
    engine = serve(honours=4)
    requests = [LlmRequest(1, KNOWN + NEW, 12), LlmRequest(2, NEW, 3)]
    engine.run(*requests)
    engine.close()
    assert [len(request.answer) for request in requests] == [12, 3]
    assert engine.scheduler._requests == {}
    assert engine.ranks[0].worker._saver._writer._pending_bytes == 0


@pytest.mark.slow
def test_whatever_it_meets(serve: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "TOGETHER", 1)  # the same calls every time
    engine = serve()
    engine.ask(KNOWN)
    engine.close()
    source = Path(shutil.copytree(serve.store, tmp_path / "source"))
    injection = Injection(
        [PLUGIN, "kvx_core.connector"], ["kvx_core", "kvx_adapters.tensorrt_llm."], PASSED
    )
    with injection.recording():
        serve_two(serve, source)
    sites = list(injection.sites())
    assert len({site for site, _ in sites}) > 12
    errors = itertools.cycle(ERRORS)
    for site, number in sites:
        with injection.raising(next(errors), site, number):
            serve_two(serve, source)
        assert injection.has_struck, f"nothing was raised at call {number} of {site}"
        engine = serve()  # finds out if what was stored on the way is wrong
        assert engine.ask(KNOWN + NEW).computed <= 170 - 96
        engine.close()


def test_a_lookup_that_raises_is_logged_once(serve: Factory, trtllm: ModuleType) -> None:
    engine = serve()
    tokens = prompt(100, seed=42)

    class Broken(Walk):
        def resume(self, *_: object) -> None:
            None.dtype  # type: ignore[attr-defined]  # noqa: B018

    salted = engine.scheduler._store.salted

    def broken(salt: str) -> PrefixStore:
        store: PrefixStore = salted(salt)
        store.walk = Broken  # type: ignore[method-assign,assignment]
        return store

    engine.scheduler._store.salted = broken
    for _ in range(3):
        assert engine.ask(tokens).computed == 100
    (warning,) = trtllm.logger.warnings()
    assert warning.startswith("warning: KVX loads nothing for request 1: ")
    assert "Traceback" in warning
    assert engine.scheduler._boundary.take_counts() == {"errors": 3}


@pytest.mark.parametrize(
    "config",
    [
        *(b"", b"{}", b"\xff\xfe", b"[" * 100_000),
        b'{"format": 3, "chunk_tokens": 48}',  # the settings have others
        b'{"format": 3, "chunk_tokens": 1}',
        b'{"format": 3, "chunk_tokens": 24, "encryption": "AES-256-GCM"}',
    ],
)
def test_a_broken_store_ends_no_engine(serve: Factory, trtllm: ModuleType, config: bytes) -> None:
    serve.store.mkdir()
    (serve.store / "kvx-store.json").write_bytes(config)
    engine = serve()
    tokens = prompt(100, seed=43)
    for _ in range(2):
        assert engine.ask(tokens).computed == 100
    assert engine.ranks[0].worker._saver is None  # it has nowhere to save
    engine.close()
    warnings = trtllm.logger.warnings()
    assert len(warnings) == 2  # the scheduler's and the rank's
    assert all("KVX saves and loads nothing until the next start: " in w for w in warnings)
    assert not list(serve.store.rglob("*.safetensors"))
