"""An engine on a disk that is too slow for it: the tokens stay the same, and no step waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import faults
from tests.fakes.vllm import needs_cpu_op
from tests.vllm_plugin.conftest import Stock
from tests.vllm_plugin.engine import EngineProcess, connector, same_tokens
from tests.vllm_plugin.models import prompt

pytestmark = needs_cpu_op

NUM_NEW = 8
PROMPTS = [prompt(n, seed=80 + n) for n in (40, 100, 170, 255)]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[EngineProcess]]:
    made: list[EngineProcess] = []
    yield made
    for process in made:
        process.close()


@pytest.mark.slow
def test_a_disk_of_50_kb_per_second_delays_no_step(
    llama: Path, stock: Stock, processes: list[EngineProcess], tmp_path: Path
) -> None:
    """Lookups, loads and saves wait for it; what runs goes on, and what is unknown is computed.

    kvx_conformance/connector_cases/faults.py has disks that fail in other ways.
    """
    expected = stock(llama, PROMPTS, NUM_NEW)
    store, flag, hits = tmp_path / "store", tmp_path / "flag", tmp_path / "hits"
    rule = f"call=read+write,rate=50000,path={store}/,if={flag}"
    process = EngineProcess(tmp_path / "log", **faults.environment(rule, log=hits))
    processes.append(process)
    config = connector(store, "kv_both", "recompute", chunk_tokens=32, lookup_seconds=0.2)
    with process.engine(llama, block_size=32, kv_transfer_config=config) as engine:
        same_tokens(engine.generate(PROMPTS[:2], max_tokens=NUM_NEW), expected[:2])
        engine.call("reset_prefix_cache")
        calm = engine.call("longest_step")
        flag.touch()
        thaw = threading.Timer(5, flag.unlink)
        thaw.start()
        same_tokens(engine.generate(PROMPTS, max_tokens=NUM_NEW), expected)
        longest = engine.call("longest_step")
        thaw.join()
    assert hits.read_text(), "no call met the fault"
    assert longest < 2 + calm, f"a step took {longest:.1f} s on a disk that answers after 5 s"
