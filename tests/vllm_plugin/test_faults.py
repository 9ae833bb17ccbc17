"""Engines on a file system that fails, and engines that are killed: the tokens stay the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import faults
from tests.fakes.vllm import needs_cpu_op
from tests.soak.vandal import PHASES, environment
from tests.vllm_plugin.conftest import Stock
from tests.vllm_plugin.engine import EngineError, EngineProcess, connector, same_tokens
from tests.vllm_plugin.models import prompt

pytestmark = needs_cpu_op

NUM_NEW = 8
MAX_ROUNDS = 200  # of a phase: on a quick machine the first ones may be over before a file is read
# What some calls of each phase come to.
STRUCK = {
    "errors": ("EIO", "ESTALE", "ENOSPC"),
    "full": ("ENOSPC",),
    "short": ("short",),
    "slow": ("delayed",),
    "stale": ("ESTALE",),
}
PROMPTS = [prompt(n, seed=80 + n) for n in (40, 100, 170, 255)]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[EngineProcess]]:
    made: list[EngineProcess] = []
    yield made
    for process in made:
        process.close()


def test_errors_short_reads_and_delays(
    llama: Path, stock: Stock, processes: list[EngineProcess], tmp_path: Path
) -> None:
    """One phase after the other, while an engine saves and loads: until each fault has struck."""
    expected = stock(llama, PROMPTS, NUM_NEW)
    store, flags, log = tmp_path / "store", tmp_path / "flags", tmp_path / "log"
    flags.mkdir()
    hits = tmp_path / "hits"
    hits.touch()
    faulty = EngineProcess(log, **environment(store, flags), KVX_FAULTS_LOG=str(hits))
    processes.append(faulty)
    config = connector(store, "kv_both", "recompute", chunk_tokens=32)
    with faulty.engine(llama, block_size=32, kv_transfer_config=config) as engine:
        num_free_blocks = engine.num_free_blocks()
        for phase in PHASES:
            (flags / phase).touch()
            before, missing = hits.stat().st_size, set(STRUCK[phase])
            for round_ in range(MAX_ROUNDS):
                same_tokens(engine.generate(PROMPTS, max_tokens=NUM_NEW), expected)
                engine.call("reset_prefix_cache")
                assert engine.num_free_blocks() == num_free_blocks
                struck = hits.read_bytes()[before:].decode().split()
                missing -= set(struck)
                if round_ and not missing:
                    break
            assert not missing, f"no fault of the phase {phase} was {missing}"
            (flags / phase).unlink()
            for path in list(store.rglob("*.safetensors"))[::2]:  # something to save again
                path.unlink(missing_ok=True)
        time.sleep(0.3)  # until no lookup remembers files that were there before: fresh_seconds
        for _ in range(2):  # calm again: all is stored, then all is there
            outputs = engine.generate(PROMPTS, max_tokens=NUM_NEW)
            same_tokens(outputs, expected)
            engine.call("reset_prefix_cache")
    with faulty.engine(llama, block_size=64, kv_transfer_config=config) as engine:
        outputs = engine.generate(PROMPTS, max_tokens=NUM_NEW)
    same_tokens(outputs, expected)
    assert [output.num_cached_tokens for output in outputs] == [len(one) - 1 for one in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["call=*,frozen=1", "call=read+write,rate=50000"])
def test_a_disk_that_does_not_answer_delays_no_step(
    fault: str, llama: Path, stock: Stock, processes: list[EngineProcess], tmp_path: Path
) -> None:
    """Lookups, loads and saves wait for it; what runs goes on, and what is unknown is computed."""
    expected = stock(llama, PROMPTS, NUM_NEW)
    store, flag, hits = tmp_path / "store", tmp_path / "flag", tmp_path / "hits"
    rule = f"{fault},path={store}/,if={flag}"
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


@pytest.mark.slow
@pytest.mark.parametrize("call", ["sync", "write", "link+rename"])
def test_killed_while_it_saves(
    call: str, llama: Path, stock: Stock, processes: list[EngineProcess], tmp_path: Path
) -> None:
    """The next engine finds nothing half written, and takes what nobody finishes away."""
    expected = stock(llama, PROMPTS, NUM_NEW)
    store = tmp_path / "store"
    config = connector(store, "kv_both", "recompute", chunk_tokens=32)
    after = {"sync": 13, "write": 7, "link+rename": 9}[call]  # the records, and some files
    rule = f"call={call},path={store}/,kill=9,after={after}"
    first = EngineProcess(tmp_path / "first", **faults.environment(rule))
    second = EngineProcess(tmp_path / "second")
    processes += [first, second]
    with (  # noqa: PT012
        pytest.raises(EngineError, match="the process ended"),
        first.engine(llama, block_size=32, kv_transfer_config=config) as engine,
    ):
        engine.generate(PROMPTS, max_tokens=NUM_NEW)
        engine.generate(PROMPTS, max_tokens=NUM_NEW)  # files may be written after the first
        pytest.fail("it was not killed")
    assert list(store.rglob("*.safetensors")) or call != "link+rename"
    with second.engine(llama, block_size=64, kv_transfer_config=config) as engine:
        for _ in range(2):
            same_tokens(engine.generate(PROMPTS, max_tokens=NUM_NEW), expected)
            engine.call("reset_prefix_cache")
        engine.generate([prompt(90, seed=7)], max_tokens=1)  # all of the others may be stored
        assert engine.call("wait_until_saved")
    assert temporary_files(store) == []  # its first save has taken away what the other one left


def temporary_files(store: Path) -> list[Path]:
    """Of writers: they begin with a dot, or lie in a folder that does."""
    return [
        path
        for path in store.rglob("*")
        if path.is_file() and any(part.startswith(".") for part in path.relative_to(store).parts)
    ]
