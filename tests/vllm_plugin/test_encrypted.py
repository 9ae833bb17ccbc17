"""Encrypted stores under real engines: the same tokens, and damage costs a hit."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fakes.vllm import needs_cpu_op
from tests.vllm_plugin.conftest import Stock
from tests.vllm_plugin.engine import EngineProcess, connector, same_tokens
from tests.vllm_plugin.models import prompt

pytestmark = needs_cpu_op

PROMPTS = [prompt(200, seed=300), prompt(257, seed=301)]
NUM_NEW = 16
MAX_BYTES = 400 << 20  # that the process takes more when it meets hostile files
MAX_SECONDS = 5  # of a step: the files below, read whole, take longer than that each


def test_an_encrypted_store(
    llama: Path, engines: EngineProcess, stock: Stock, tmp_path: Path
) -> None:
    store, keys = tmp_path / "store", [tmp_path / "key", tmp_path / "other"]
    keys.append(tmp_path / "unknown")
    for i, key in enumerate(keys):
        key.write_bytes(bytes([i] * 32))
        key.chmod(0o600)
    expected = stock(llama, PROMPTS, NUM_NEW)

    def cached(block_size: int, *given: Path) -> list[int | None]:
        """How many tokens an engine loads: its keys are keys[0], or those that are given."""
        files = [str(key) for key in given] or str(keys[0])
        config = connector(
            store, "kv_both", "recompute", encryption_key_files=files, save_generated=False
        )
        with engines.engine(llama, block_size=block_size, kv_transfer_config=config) as engine:
            before = engine.call("peak_bytes")
            outputs = engine.generate(PROMPTS, max_tokens=NUM_NEW)
            assert engine.call("wait_until_saved")
            assert engine.call("peak_bytes") - before < MAX_BYTES
            assert engine.call("longest_step") < MAX_SECONDS
        same_tokens(outputs, expected)
        return [output.num_cached_tokens for output in outputs]

    assert cached(32) == [0, 0]
    files = sorted(store.rglob("*.safetensors"))
    assert all(b'"pieces":{"dtype":"U8"' in path.read_bytes()[:8192] for path in files)
    assert cached(64, keys[1], keys[0]) == [199, 256]  # keys change: the new one, and the old one
    first = files[0].read_bytes()
    for path in files:
        raw = bytearray(path.read_bytes())
        raw[-20] ^= 1
        path.write_bytes(raw)
    # A lookup deletes all damaged files of a prompt, and the tokens are stored again: at once,
    # unless its thread is slower than the request.
    assert cached(64) == [0, 0]
    # Whoever may write makes files as large as it likes, which take no disk: half of them begin as
    # good files do, to the last byte, the others by what a reader without the key can see.
    for i, path in enumerate(files):
        raw = path.read_bytes() if path.exists() else first
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw if i % 2 else raw[:28])
        os.truncate(path, (1 << 31) - 100)
    assert cached(64) == [0, 0]
    assert cached(64) in ([128, 128], [128, 256], [199, 128], [199, 256])
    assert cached(64) == [199, 256]
    # Another key: the engine runs without the store, and says so.
    other = connector(store, encryption_key_files=str(keys[2]))
    start = engines.log.stat().st_size
    with engines.engine(llama, kv_transfer_config=other) as engine:
        outputs = engine.generate(PROMPTS, max_tokens=NUM_NEW)
    same_tokens(outputs, expected)
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert sorted(store.rglob("*.safetensors")) == files
    with engines.log.open() as log:
        log.seek(start)
        assert "is not authenticated by the encryption key that is given" in log.read()
