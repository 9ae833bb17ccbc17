"""Real engines whose store has tiers: a directory each, and one object store for all of them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvx_core import Directory
from kvx_core.stores.tiers import ObjectStore, Tiers
from tests.fakes.vllm import needs_cpu_op
from tests.tiers.servers import BUCKET, FaultyProxy, s3_server
from tests.vllm_plugin.conftest import Stock
from tests.vllm_plugin.engine import Engine, EngineProcess, same_tokens
from tests.vllm_plugin.models import prompt

pytestmark = [needs_cpu_op, pytest.mark.slow]

PROMPTS = [prompt(200, seed=500), prompt(257, seed=501), prompt(40, seed=502)]
OTHERS = [prompt(150, seed=600 + i) for i in range(6)]
NUM_NEW = 12
URL = f"s3://{BUCKET}/vllm"
SECONDS = 3.0  # for a call to the object store
MOST_STEP = 2.0  # seconds, on a busy machine


class Site:
    """An object store behind a proxy, and machines that use it."""

    def __init__(self, folder: Path, proxy: FaultyProxy, environment: dict[str, str]) -> None:
        self.folder, self.proxy = folder, proxy
        self._processes: dict[str, EngineProcess] = {}
        self._environment = environment

    def engine(
        self, machine: str, model: Path, *, load_or_compute: bool = False, **options: Any
    ) -> Any:
        """An engine on a machine, with its own directory. The model is so small that to compute a
        prompt is quicker than to ask for it.
        """
        if machine not in self._processes:
            log = self.folder / f"{machine}.log"
            self._processes[machine] = EngineProcess(log, **self._environment)
        tiers = options.pop("tiers", [str(self.disk(machine)), URL])
        config = {
            "kv_connector": "KVXConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "tiers": tiers,
                "tier_seconds": SECONDS,
                "chunk_tokens": 64,
                "save_generated": False,
                "load_or_compute": load_or_compute,
            },
        }
        return self._processes[machine].engine(model, kv_transfer_config=config, **options)

    def disk(self, machine: str) -> Path:
        return self.folder / machine

    def log_of(self, machine: str) -> str:
        return self._processes[machine].log.read_text()

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with s3_server(tmp_path / "s3.log") as server:
        proxy = FaultyProxy(server.port)
        environment = server.environment(proxy.port)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        found = Site(tmp_path, proxy, environment)
        yield found
        found.close()
        proxy.close()


def answers(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> list[int | None]:
    """How many tokens of each prompt were reused; the answers are right."""
    outputs = engine.generate(prompts, max_tokens=NUM_NEW)
    same_tokens(outputs, expected)
    assert engine.call("wait_until_saved")
    return [output.num_cached_tokens for output in outputs]


def test_machines_share_an_object_store(llama: Path, site: Site, stock: Stock) -> None:
    """What one stores another one loads, and has on its own disk from then on."""
    expected = stock(llama, PROMPTS, NUM_NEW)
    whole = [len(each) - 1 for each in PROMPTS]
    with site.engine("a", llama) as engine:
        assert answers(engine, PROMPTS, expected) == [0, 0, 0]
    # A shutdown waits until what was stored is in the object store.
    assert ObjectStore(URL).names("")
    with site.engine("b", llama, block_size=64) as engine:
        assert answers(engine, PROMPTS, expected) == whole
    site.proxy.drops = True
    site.proxy.cut()
    with site.engine("b", llama, block_size=32) as engine:
        assert answers(engine, PROMPTS, expected) == whole
    others = stock(llama, OTHERS, NUM_NEW)
    with site.engine("c", llama) as engine:  # whose disk is empty
        engine.call("longest_step")
        assert answers(engine, PROMPTS + OTHERS, expected + others) == [0] * 9
        assert engine.call("longest_step") < MOST_STEP
        time.sleep(0.3)  # for so long a lookup may believe that nothing is stored
        assert answers(engine, OTHERS, others) == [
            len(each) - 1 for each in OTHERS
        ]  # from its own disk or cache
    site.proxy.drops = False
    with site.engine("c", llama) as engine:
        assert answers(engine, OTHERS, others) == [len(each) - 1 for each in OTHERS]


def test_a_server_that_freezes_delays_no_step(llama: Path, site: Site, stock: Stock) -> None:
    expected = stock(llama, PROMPTS, NUM_NEW)
    with site.engine("a", llama) as engine:
        answers(engine, PROMPTS, expected)
    site.proxy.freezes = True
    others = stock(llama, OTHERS, NUM_NEW)
    with site.engine("a", llama) as engine:
        engine.call("longest_step")
        for each, right in zip(OTHERS, others, strict=True):
            assert answers(engine, [each], [right]) == [0]
        assert engine.call("longest_step") < MOST_STEP
        assert answers(engine, PROMPTS, expected) == [len(each) - 1 for each in PROMPTS]
    site.proxy.freezes = False


def test_what_is_sooner_computed_is_not_loaded(llama: Path, site: Site, stock: Stock) -> None:
    """Once that is known: each answer is right, and no request waits for long."""
    stored = [prompt(180, seed=700 + i) for i in range(10)]
    expected, others = stock(llama, stored, NUM_NEW), stock(llama, OTHERS, NUM_NEW)
    with site.engine("a", llama) as engine:
        answers(engine, stored, expected)
    site.proxy.delay = 0.05
    with site.engine("b", llama, load_or_compute=True, enable_prefix_caching=False) as engine:
        for each, right in zip(OTHERS, others, strict=True):  # one by one: what a token costs
            answers(engine, [each], [right])
        reused, seconds = [], []
        for each, right in zip(stored, expected, strict=True):
            begun = time.monotonic()
            reused += answers(engine, [each], [right])
            seconds.append(time.monotonic() - begun)
    assert reused[-5:] == [0] * 5
    assert max(seconds) < 3 * SECONDS
    site.proxy.delay = 0.0
    with site.engine("b", llama, load_or_compute=False) as engine:
        assert answers(engine, stored, expected) == [179] * 10


def test_memory_before_a_directory(llama: Path, site: Site, stock: Stock) -> None:
    """Engines that start one after another find what is in memory; what is not is on the disk."""
    expected = stock(llama, PROMPTS, NUM_NEW)
    whole = [len(each) - 1 for each in PROMPTS]
    disk = site.disk("m")
    tiers = ["memory:64MB", str(disk)]
    memory, _ = Tiers.parse(tiers).open()
    assert memory.root is not None
    try:
        with site.engine("m", llama, tiers=tiers) as engine:
            assert answers(engine, PROMPTS, expected) == [0, 0, 0]
            files = set(disk.rglob("*.safetensors"))
            assert {path.relative_to(disk) for path in files} == {
                path.relative_to(memory.root) for path in memory.root.rglob("*.safetensors")
            }
        for path in files:
            path.unlink()  # from the disk
        with site.engine("m", llama, tiers=tiers, block_size=64) as engine:
            assert answers(engine, PROMPTS, expected) == whole
        shutil.copytree(memory.root, disk, dirs_exist_ok=True)
        shutil.rmtree(memory.root)  # as if the machine had restarted
        with site.engine("m", llama, tiers=tiers, block_size=32) as engine:
            assert answers(engine, PROMPTS, expected) == whole
        # What was loaded: a file of each prompt ends where its last token is, which is computed.
        assert [*memory.root.rglob("*.safetensors")]
        assert "KVX keeps prefixes in memory (0.1 GB), " in site.log_of("m")
        assert Directory(disk).names("")
    finally:
        shutil.rmtree(memory.root, ignore_errors=True)
