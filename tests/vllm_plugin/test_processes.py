"""Engines whose scheduler and workers run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.vllm import needs_cpu_op
from tests.vllm_plugin.conftest import Stock
from tests.vllm_plugin.engine import EngineProcess, connector, same_tokens
from tests.vllm_plugin.models import prompt

pytestmark = needs_cpu_op

NUM_NEW = 16
FROM_OTHERS = [prompt(n, seed=20 + n) for n in (33, 101, 257)]
FOR_OTHERS = [prompt(n, seed=21 + n) for n in (33, 101, 257)]


@pytest.mark.slow
def test_both_ways(llama: Path, engines: EngineProcess, stock: Stock, tmp_path: Path) -> None:
    """An engine whose core is in a process of its own takes what one in one process has stored, and
    the other way round. Several ranks are a case of kvx_conformance/connector_cases/settings.py.
    """
    expected = stock(llama, FROM_OTHERS + FOR_OTHERS, NUM_NEW)
    config = connector(tmp_path)
    with engines.engine(llama, block_size=32, kv_transfer_config=config) as engine:
        engine.generate(FROM_OTHERS, max_tokens=NUM_NEW)

    processes = EngineProcess(tmp_path / "log", VLLM_ENABLE_V1_MULTIPROCESSING="1")
    try:
        with processes.engine(llama, block_size=64, kv_transfer_config=config) as engine:
            outputs = engine.generate(FROM_OTHERS + FOR_OTHERS, max_tokens=NUM_NEW)
    finally:
        processes.close()
    same_tokens(outputs, expected)
    cached = [output.num_cached_tokens for output in outputs]
    assert cached == [len(one) - 1 for one in FROM_OTHERS] + [0] * len(FOR_OTHERS)

    with engines.engine(llama, block_size=128, kv_transfer_config=config) as engine:
        outputs = engine.generate(FOR_OTHERS, max_tokens=NUM_NEW)
    same_tokens(outputs, expected[len(FROM_OTHERS) :])
    assert [output.num_cached_tokens for output in outputs] == [len(one) - 1 for one in FOR_OTHERS]


@pytest.mark.slow
def test_the_connector_is_registered_when_vllm_first_looks_for_it() -> None:
    """Its factory takes a second to import, which register() does not spend."""
    script = """
import sys
import kvx_adapters.vllm_plugin as plugin
def waiting():
    return sum(isinstance(finder, plugin._WaitForFactory) for finder in sys.meta_path)
plugin.register(), plugin.register()
assert plugin._FACTORY not in sys.modules
assert waiting() == 1
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
assert waiting() == 0
print(KVConnectorFactory.get_connector_class_by_name("KVXConnector").__module__)
"""
    environment = {**os.environ, "VLLM_PLUGINS": ""}  # no other hand registers it
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split()[-1] == "kvx_adapters.vllm_plugin.connector"
