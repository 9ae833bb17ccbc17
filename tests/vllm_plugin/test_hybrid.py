"""A model with sliding windows: blocks that left the window are null, groups share memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from struct import unpack_from

import pytest
import torch
from safetensors import safe_open

from tests.fakes.vllm import needs_cpu_op
from tests.vllm_plugin.conftest import Stock
from tests.vllm_plugin.engine import EngineProcess, connector, same_tokens
from tests.vllm_plugin.models import (
    WINDOW,
    gemma4,
    gemma4_that_shares,
    prompt,
    same_keys_and_values,
)
from tests.vllm_plugin.prefill import transformers_prefills

pytestmark = needs_cpu_op

NUM_NEW = 16
# Within the window, around it, and many windows long; the last two begin alike.
LENGTHS = (20, WINDOW - 1, WINDOW, WINDOW + 1, 131, 300)
PROMPTS = [prompt(n, seed=10 + n) for n in LENGTHS]
PROMPTS.append(PROMPTS[-1][:250] + prompt(30, seed=11))
OF_TRANSFORMERS = prompt(100, seed=12)
LOADED = [len(one) - 1 for one in PROMPTS]


def drop_windows(store: Path, tokens: list[int], stop: int) -> int:
    """Deletes files of layers with a window that hold tokens of a prompt before `stop`, as
    docs/store_format.md says where that stands. Returns how many.
    """
    count = 0
    for path in store.rglob("*.safetensors"):
        _, kind, _ = path.name.split(".")
        (parts,) = (json.loads(one.read_bytes()) for one in store.rglob(f"kinds/{kind}.json"))
        with safe_open(path, "pt") as file:
            record = bytes.fromhex(file.metadata()["kvx"])
        (num_tokens,), (start,) = unpack_from("<I", record, 12), unpack_from("<Q", record, 132)
        ids = list(unpack_from(f"<{num_tokens}q", record, 140))
        has_window = all(group["facts"]["window"] for group in parts["groups"])
        if has_window and start + num_tokens <= stop and tokens[start : start + num_tokens] == ids:
            path.unlink()
            count += 1
    return count


@pytest.mark.parametrize(
    ("produced_by", "consumed_by", "chunk_tokens"),
    [
        ("groups", "groups", 32),
        ("groups", "one", 32),
        pytest.param("one", "groups", 128, marks=pytest.mark.slow),
    ],
)
def test_windows(
    produced_by: str,
    consumed_by: str,
    chunk_tokens: int,
    gemma: Path,
    engines: EngineProcess,
    stock: Stock,
    tmp_path: Path,
) -> None:
    """Groups of layers with blocks of their own, or one group in which all layers keep all.

    Groups load a prompt of which the files of windows are gone that no window reaches.
    The last prompt was computed by transformers, not by vLLM.
    """
    expected = stock(gemma, [*PROMPTS, OF_TRANSFORMERS], NUM_NEW)
    config = connector(tmp_path, "kv_producer", chunk_tokens=chunk_tokens)
    with engines.engine(
        gemma,
        block_size=32,
        disable_hybrid_kv_cache_manager=produced_by == "one",
        kv_transfer_config=config,
    ) as engine:
        assert engine.call("num_cache_groups") == (1 if produced_by == "one" else 3)
        same_tokens(engine.generate(PROMPTS, max_tokens=NUM_NEW), expected[:-1])
    transformers_prefills(gemma, tmp_path, OF_TRANSFORMERS)
    if (produced_by, consumed_by) == ("groups", "groups"):
        # The two longest begin alike; the block that their last window begins in is loaded whole.
        stop = 250 - WINDOW - 64
        assert drop_windows(tmp_path, PROMPTS[5], stop) == stop // chunk_tokens

    loaded = [*LOADED, len(OF_TRANSFORMERS) - 1]
    if produced_by == "groups" and chunk_tokens > WINDOW:
        # Its prompt was computed in two steps, which cut the second chunk: when the end was there,
        # the window had left the beginning. What it has in common with the next prompt is found.
        loaded[5] = 250
    config = connector(tmp_path, "kv_consumer")
    with engines.engine(
        gemma,
        block_size=64,
        disable_hybrid_kv_cache_manager=consumed_by == "one",
        kv_transfer_config=config,
    ) as engine:
        num_free_blocks = engine.num_free_blocks()
        loads = tmp_path / "loads"
        loads.mkdir()
        engine.call("keep_raw_loads", folder=str(loads))
        outputs = engine.generate([*PROMPTS, OF_TRANSFORMERS], max_tokens=NUM_NEW)
        same_tokens(outputs, expected)
        assert [output.num_cached_tokens for output in outputs] == loaded
        assert engine.num_free_blocks() == num_free_blocks
    same_keys_and_values(gemma, PROMPTS[:5], loads)


@pytest.mark.parametrize(
    ("make", "layerwise"),
    [
        pytest.param(gemma4_that_shares, True, id="shared"),
        pytest.param(gemma4, False, id="heads", marks=pytest.mark.slow),
    ],
)
def test_layers_that_are_not_alike(
    make: Callable[[Path], Path], layerwise: bool, engines: EngineProcess, tmp_path: Path
) -> None:
    """Layers with a window have two small heads, the others one large one; or some have none, and
    use those of others. All of a prompt is found, and what is loaded is what transformers computes.
    """
    loads, store, model = tmp_path / "loads", tmp_path / "store", tmp_path / "model"
    loads.mkdir()
    model.mkdir()
    make(model)
    caching = connector(store, layerwise=layerwise)
    with engines.engine(model, block_size=32, kv_transfer_config=caching) as engine:
        outputs = engine.generate(PROMPTS, max_tokens=NUM_NEW)
    expected = [output.tokens for output in outputs]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    with engines.engine(model, block_size=64, kv_transfer_config=caching) as engine:
        engine.call("keep_raw_loads", folder=str(loads))
        outputs = engine.generate(PROMPTS, max_tokens=NUM_NEW)
    same_tokens(outputs, expected)
    assert [output.num_cached_tokens for output in outputs] == LOADED
    same_keys_and_values(model, PROMPTS[:5], loads)


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's FP8 on CPU needs AVX-512")
def test_layers_with_other_heads_and_dtypes(
    gemma4: Path, engines: EngineProcess, tmp_path: Path
) -> None:
    """Layers with a window in bfloat16, the others in FP8: an engine with the same layers takes all
    of it, and one with all layers in FP8 as well; one that keeps the others does not.
    """
    prompts = [PROMPTS[0], PROMPTS[4]]

    def ask(*skipped: str, block_size: int = 64) -> list[int | None]:
        with engines.engine(
            gemma4,
            dtype="bfloat16",
            kv_cache_dtype="fp8",
            kv_cache_dtype_skip_layers=list(skipped),
            block_size=block_size,
            kv_transfer_config=connector(tmp_path),
        ) as engine:
            return [output.num_cached_tokens for output in engine.generate(prompts)]

    all_but_one = [len(one) - 1 for one in prompts]
    assert ask("sliding_window", block_size=32) == [0, 0]
    assert ask("sliding_window") == ask("0", "2") == ask() == all_but_one
    assert ask("1", "3") == [0, 0]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_that_fails(
    policy: str, gemma: Path, engines: EngineProcess, stock: Stock, tmp_path: Path
) -> None:
    """With several groups vLLM is told which request has failed: block ids mean nothing."""
    prompts = PROMPTS[4:6]
    expected = stock(gemma, prompts, NUM_NEW)
    config = connector(tmp_path, "kv_producer")
    with engines.engine(gemma, block_size=32, kv_transfer_config=config) as engine:
        engine.generate(prompts, max_tokens=1)
    config = connector(tmp_path, "kv_consumer", policy)
    with engines.engine(gemma, block_size=64, kv_transfer_config=config) as engine:
        num_free_blocks = engine.num_free_blocks()
        engine.call("on_next_load", delete=str(tmp_path))
        outputs = engine.generate(prompts, max_tokens=NUM_NEW)
        if policy == "recompute":
            same_tokens(outputs, expected)
        else:
            assert outputs[0].finish_reason == "error"
            if outputs[1].finish_reason != "error":  # it was looked up before the files went
                same_tokens(outputs[1:], expected[1:])
        assert engine.num_free_blocks() == num_free_blocks
        same_tokens(engine.generate(prompts, max_tokens=NUM_NEW), expected)
