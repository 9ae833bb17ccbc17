"""Aborted and preempted requests: no leaked block, no partial file, no wrong token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fakes.vllm import needs_cpu_op
from tests.vllm_plugin.conftest import Stock
from tests.vllm_plugin.engine import EngineProcess, connector, same_tokens
from tests.vllm_plugin.models import prompt

pytestmark = needs_cpu_op

NUM_REQUESTS = 200
NUM_NEW = 12


def requests() -> list[list[int]]:
    """Prompts of 1 to 150 tokens, some of which begin alike or are the same."""
    chance = random.Random(0)
    return [
        prompt(chance.randrange(1, 64), seed=chance.randrange(20))
        + prompt(chance.randrange(0, 88), seed=chance.randrange(40))
        for _ in range(NUM_REQUESTS)
    ]


@pytest.mark.parametrize(
    ("name", "num_blocks", "prefix_caching"),
    # Fewer blocks than eight requests need: some are preempted.
    [
        ("llama", 20, False),
        ("llama", 20, True),
        pytest.param("gemma", 40, True, marks=pytest.mark.slow),
    ],
    ids=["sync", "async", "windows"],
)
def test_aborts_and_preemptions(
    name: str,
    num_blocks: int,
    prefix_caching: bool,
    engines: EngineProcess,
    stock: Stock,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    model = request.getfixturevalue(name)
    prompts = requests()
    expected = stock(model, prompts, NUM_NEW)
    chance = random.Random(1)
    aborted = chance.sample(range(NUM_REQUESTS), NUM_REQUESTS // 3)
    abort_at = {i: chance.randrange(300) for i in aborted}

    config = connector(tmp_path, "kv_both", chunk_tokens=32)
    with engines.engine(
        model,
        block_size=32,
        num_gpu_blocks_override=num_blocks,
        enable_prefix_caching=prefix_caching,  # without it, loads are sync
        max_num_batched_tokens=128,
        max_model_len=192,
        disable_log_stats=False,
        kv_transfer_config=config,
    ) as engine:
        num_free_blocks = engine.num_free_blocks()
        outputs = engine.generate(prompts, max_tokens=NUM_NEW, abort_at=abort_at)
        assert engine.num_free_blocks() == num_free_blocks
        assert engine.metrics()["vllm:num_preemptions_total"] > 0
        finished = [i for i, output in enumerate(outputs) if output.finish_reason != "abort"]
        assert NUM_REQUESTS // 2 < len(finished) < NUM_REQUESTS
        same_tokens([outputs[i] for i in finished], [expected[i] for i in finished])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json", ".mark"}

    # Nothing that was stored on the way is wrong.
    config = connector(tmp_path, "kv_consumer")
    with engines.engine(
        model, block_size=64, enable_prefix_caching=False, kv_transfer_config=config
    ) as engine:
        outputs = engine.generate(prompts, max_tokens=NUM_NEW)
        same_tokens(outputs, expected)
    num_loaded = sum(output.num_cached_tokens or 0 for output in outputs)
    assert num_loaded > sum(map(len, prompts)) // 2
