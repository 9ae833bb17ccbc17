"""KVXConnector beside another connector: what that one fills counts once vLLM trusts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vllm import needs_cpu_op
from tests.vllm_plugin import models
from tests.vllm_plugin.conftest import Stock
from tests.vllm_plugin.engine import EngineProcess, connector, same_tokens

pytestmark = needs_cpu_op

PROMPTS = [models.prompt(150, seed=seed) for seed in (800, 801, 802)]
FOLLOWED = [prompt[:120] + models.prompt(60, seed=803) for prompt in PROMPTS]


def beside(store: Path, *, comes_first: bool, loads_beside: bool) -> Any:
    """KVX and a connector whose loads all fail, in a MultiConnector."""
    failing = {
        "kv_connector": "FailingConnector",
        "kv_connector_module_path": "tests.vllm_plugin.failing_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"beside": loads_beside},
    }
    both = [connector(store, "kv_both", "recompute"), failing]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": both[::-1] if comes_first else both},
    }


@pytest.mark.parametrize(
    ("comes_first", "loads_beside", "prefix_caching"),
    [(True, False, True), (False, False, True), (True, True, True), (False, False, False)],
    ids=["first", "last", "beside-steps", "without-prefix-caching"],
)
def test_loads_of_another_connector_that_fail(
    comes_first: bool,
    loads_beside: bool,
    prefix_caching: bool,
    llama: Path,
    engines: EngineProcess,
    stock: Stock,
    tmp_path: Path,
) -> None:
    expected, then = stock(llama, PROMPTS), stock(llama, FOLLOWED)
    transfer = beside(tmp_path, comes_first=comes_first, loads_beside=loads_beside)
    options = {"block_size": 32, "enable_prefix_caching": prefix_caching}
    with engines.engine(llama, kv_transfer_config=transfer, **options) as engine:
        same_tokens(engine.generate(PROMPTS), expected)
        same_tokens(engine.generate(FOLLOWED), then)
        engine.call("wait_until_saved")
    with engines.engine(llama, block_size=32, kv_transfer_config=connector(tmp_path)) as engine:
        found = engine.generate(PROMPTS)
        same_tokens(found, expected)
        assert [output.num_cached_tokens for output in found] == [149] * 3
        same_tokens(engine.generate(FOLLOWED), then)
