"""KVXConnector while calls into KVX raise, one at a time: vLLM goes on and gets true reports.

Every call that the connector and its halves make into KVX raises once, in vLLM's own scheduler and
on caches as vLLM makes them. No error reaches vLLM, no block leaks, no request waits forever, and
tokens are loaded and stored correctly or not at all.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvx_core.connector import lookups, writer
from kvx_core.connector.epochs import Epochs
from kvx_core.stores.blobs import Directory
from tests.fakes.vllm import SENTINEL
from tests.injection import Injection
from tests.vllm_plugin import test_scheduler_half as scheduler_half
from tests.vllm_plugin.models import prompt
from tests.vllm_plugin.schedulers import STORED, Steps
from tests.vllm_plugin.workers import TOKENS, Worker, filled

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")

environment, start, stored = (
    scheduler_half.environment,
    scheduler_half.start,
    scheduler_half.stored,
)
ERRORS = [RuntimeError, AttributeError, MemoryError, RecursionError]
PLUGIN = "kvx_adapters.vllm_plugin"
OURS = [PLUGIN, "kvx_core.connector"]
# What a hook falls back on cannot fail: it calls nothing.
FALLBACKS = (
    *("_guard", "_half"),
    *(
        "forget",
        "forget_all",
        "ended",
        "give_up",
        "give_up_loads",
        "stop",
        "take_step",
        "take_plan",
    ),
    *("_begin", "_end"),  # of calls that are watched: they catch what fails in them
)
names = (f"request {number}" for number in itertools.count())


# ---- the scheduler's half ----


def answer(steps: Steps, plan: Any) -> dict[str, Any]:
    """What workers report of a plan. They fail a load whose match does not hold its tokens."""
    loads = [load for load in plan.loads if not load.wait]
    failed = [load for load in plan.loads if load.match.num_tokens < load.stop]
    return {
        "finished_sending": {save.request_id for save in plan.saves if save.final},
        "finished_recving": {load.request_id for load in loads},
        "failed_recving": {load.request_id for load in failed if not load.wait},
        "invalid_block_ids": {
            block for load in failed if load.wait for block in blocks(load, load.start, load.stop)
        },
    }


def blocks(plan: Any, start: int, stop: int) -> list[int]:
    (ids,) = plan.block_ids
    return list(ids[start // scheduler_half.BLOCK_SIZE : -(-stop // scheduler_half.BLOCK_SIZE)])


def check(steps: Steps, plan: Any) -> None:
    """What is planned is complete and right: whose tokens, and in which blocks."""
    for save in plan.saves:
        request = steps.requests[save.request_id]
        assert save.tokens.tolist() == list(request.all_token_ids)[save.start : save.stop]
        own = steps.blocks(save.request_id)
        assert blocks(save, 0, save.stop) == own[: -(-save.stop // 32)]
        assert own
    for load in plan.loads:
        assert blocks(load, 0, load.stop) == steps.blocks(load.request_id)[: -(-load.stop // 32)]


def serve(steps: Steps) -> None:
    """Three requests that load, save, are preempted or aborted, to the end, by faithful workers."""
    from vllm.v1.request import RequestStatus

    num_free_blocks = steps.num_free_blocks()
    a, b, c = next(names), next(names), next(names)
    requests = [
        steps.add(a, STORED[:150] + prompt(20, seed=8), max_tokens=70),
        steps.add(b, prompt(60, seed=9), max_tokens=8),
        steps.add(c, STORED, max_tokens=50),
    ]
    for step in range(300):
        if step == 20:
            steps.scheduler.finish_requests([c], RequestStatus.FINISHED_ABORTED)
        plan = steps.plan()
        check(steps, plan)
        steps.run(**answer(steps, plan))
        if step == 12:
            steps.scheduler.reset_prefix_cache(reset_running_requests=True)
        if step == 40:
            assert steps.scheduler.connector.reset_cache()
        if step == 45:
            with steps.scheduler.connector._weights.change():
                pass
        if not steps.scheduler.has_requests():
            break
    # All have ended, and have had their steps in vain only where a load has failed.
    assert [request.status.name for request in requests] == [
        "FINISHED_LENGTH_CAPPED",
        "FINISHED_LENGTH_CAPPED",
        "FINISHED_ABORTED",
    ]
    assert list(requests[0].output_token_ids) == [scheduler_half.NEW] * 70
    assert not steps.scheduler.has_requests()
    assert steps.num_free_blocks() == num_free_blocks
    half = steps.scheduler.connector._scheduler
    assert (half._tracked, half._lookups, half._given_up, half._loading) == ({}, {}, set(), {})
    assert half._chains == {}
    assert (half._next.saves, half._next.loads) == ([], [])


@pytest.mark.parametrize(
    "asynchronous",
    [pytest.param(False, id="sync"), pytest.param(True, id="async", marks=pytest.mark.slow)],
)
def test_whatever_the_scheduler_half_meets(
    asynchronous: bool, start: Any, stored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same calls every time: each lookup asks the disk, and is asked for twice.
    monkeypatch.setattr(lookups, "_LOOKUP_WAIT_SECONDS", 0)
    extra = {"fresh_seconds": 0, "lookup_seconds": 60}
    injection = Injection(
        OURS, ["kvx_core", "kvx_core.connector.policy", "kvx_adapters"], FALLBACKS
    )
    options = {"enable_prefix_caching": asynchronous, "num_blocks": 14}
    steps = start(extra, **options)
    with injection.recording():
        serve(steps)
    sites = list(injection.sites())
    assert len({site for site, _ in sites}) > 20
    errors = itertools.cycle(ERRORS)
    for site, number in sites:
        steps = start(extra, **options)
        with injection.raising(next(errors), site, number):
            serve(steps)
        assert injection.has_struck, f"nothing was raised at call {number} of {site}"


@pytest.mark.parametrize("error", ERRORS)
def test_a_lookup_that_raises(error: type[Exception], start: Any, stored: None) -> None:
    """As a file of 216 bytes could make it: no engine ends, and vLLM computes the tokens."""
    steps = start()
    injection = Injection(OURS, ["kvx_core.stores"])
    with injection.raising(error, "Lookups._begin -> PrefixStore.walk", 1):
        steps.add("a", STORED)
        assert scheduler_half.loads(steps.plan()) == []
    assert injection.has_struck
    stats = steps.scheduler.connector.get_kv_connector_stats()
    assert stats.data == {"lookup_failures": 1}
    assert steps.scheduler.connector.get_kv_connector_stats() is None
    steps.run()
    assert list(steps.requests["a"].output_token_ids) == [scheduler_half.NEW]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_load_that_cannot_be_planned_fails(asynchronous: bool, start: Any, stored: None) -> None:
    """vLLM was promised its tokens: it has to hear that they are not there."""
    steps = start({"async_load": asynchronous})
    injection = Injection([PLUGIN], [PLUGIN])
    with injection.raising(
        RuntimeError, "KVXConnector.update_state_after_alloc -> SchedulerHalf.blocks_allocated", 1
    ):
        steps.add("a", STORED)
        plan = steps.plan()
    assert injection.has_struck
    (load,) = plan.loads
    assert (load.start, load.stop, load.match.num_tokens) == (0, 199, 0)
    assert load.wait != asynchronous
    steps.run(**answer(steps, plan))
    plan = steps.plan()
    assert plan.loads == []
    check(steps, plan)
    assert steps.requests["a"].num_computed_tokens == 200


def test_after_a_reset_that_failed_nothing_is_shared(start: Any, stored: None) -> None:
    """What the store has may be of another model."""
    steps = start()
    injection = Injection([PLUGIN], ["kvx_core.connector.policy"])
    with injection.raising(OSError, "KVXConnector.reset_cache -> Policy.reset", 1):
        assert steps.scheduler.connector.reset_cache()
    assert injection.has_struck
    steps.add("a", STORED, max_tokens=2)
    for _ in range(3):
        plan = steps.plan()
        assert (plan.loads, plan.saves) == ([], [])
        steps.run()


def test_after_reports_of_weights_that_failed_nothing_is_shared(
    start: Any, stored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may have weights of which this half does not know."""
    from kvx_adapters.vllm_plugin.steps import RankReports

    steps = start()

    def fails(*given: object) -> None:
        raise OSError("as a test says")

    monkeypatch.setattr(Epochs, "take", fails)
    output = SimpleNamespace(
        finished_recving=None, invalid_block_ids=set(), kv_connector_worker_meta=RankReports({})
    )
    steps.scheduler.connector.update_connector_output(output)
    steps.add("a", STORED, max_tokens=2)
    for _ in range(3):
        plan = steps.plan()
        assert (plan.loads, plan.saves) == ([], [])
        steps.run()


# ---- the worker's half ----


def connected(worker: Worker, **settings: Any) -> Any:
    """A connector as vLLM's model runner has it."""
    from kvx_adapters.vllm_plugin.connector import KVXConnector

    connector = object.__new__(KVXConnector)
    connector._worker, connector._boundary = worker.half, worker.half._boundary
    connector._settings = SimpleNamespace(layerwise=settings.get("layerwise", False))
    return connector


def run_step(connector: Any, plan: Any) -> Any:
    """The calls of a step. Returns results and failed blocks."""
    connector.bind_connector_metadata(plan)
    connector.start_load_kv(None)
    for name in connector._worker._layer_of:
        connector.wait_for_layer_load(name)
        connector.save_kv_layer(name, torch.empty(0), None)
    connector.wait_for_save()
    results = connector.get_transfer_results(set())
    failed_blocks = connector.get_block_ids_with_load_errors()
    connector.clear_connector_metadata()
    return results, failed_blocks


def exchange(path: Path, layerwise: bool) -> tuple[torch.Tensor, list[str]]:
    """A worker saves, and loads what another one has stored, in a step and beside it.

    Returns what it has saved, and which loads went well.
    """
    from kvx_adapters.vllm_plugin.steps import Load, Save, Scope, StepPlan

    worker = Worker(Directory(path))
    worker.fill()
    known = worker.tokens([3, 1, 5], len(TOKENS)).clone()  # as the one that filled the store
    expected = worker.store.lookup(TOKENS)
    assert expected.num_tokens == len(TOKENS)
    for kv_cache in worker.kv_caches:
        kv_cache += 1
    wanted = worker.tokens([3, 1, 5], len(TOKENS)).clone()
    connector = connected(worker, layerwise=layerwise)
    node = worker.store.nodes([])[0]
    save = Save("saved", Scope(), node, 0, np.array(TOKENS[::-1]), ([3, 1, 5],), final=True)
    now = Load("now", Scope(), expected, 0, 40, ([4, 2, 6],), wait=True)
    results, failed_blocks = run_step(connector, StepPlan(saves=[save], loads=[now]))
    assert results.finished_sending == {"saved"}
    assert results.finished_recving == results.failed_recving == set()
    assert failed_blocks in (set(), {4, 2, 6})
    loaded = [] if failed_blocks else ["now"]
    if loaded:
        assert torch.equal(worker.tokens([4, 2, 6], 40), known)

    worker.raw.fill_(SENTINEL)
    beside = Load("beside", Scope(), expected, 0, 40, ([4, 2, 6],), wait=False)
    results, failed_blocks = run_step(connector, StepPlan(loads=[beside]))
    over = results.finished_recving
    assert worker.half._loader._workers.wait(60)
    for _ in range(2):
        more, more_blocks = run_step(connector, StepPlan(is_idle=True))
        over, failed_blocks = over | more.finished_recving, failed_blocks | more_blocks
    assert over == {"beside"}
    assert failed_blocks in (set(), {4, 2, 6})
    if not failed_blocks:
        assert torch.equal(worker.tokens([4, 2, 6], 40), known)
        loaded.append("beside")
    connector.get_kv_connector_stats()
    connector.shutdown()
    assert worker.half._saver._writer._pending_bytes == worker.half._loader.num_loading == 0
    assert worker.half._saver._open == {}
    return wanted, loaded


def check_stored(path: Path, tokens: list[int], wanted: torch.Tensor) -> None:
    """What is found of the tokens that were saved is what was saved."""
    from kvx_adapters.vllm_plugin.steps import Load, Scope, StepPlan

    other = Worker(Directory(path))
    match = other.store.lookup(tokens)
    load = Load("a", Scope(), match, 0, match.num_tokens, ([6, 4, 2],), wait=True)
    other.half.load(StepPlan(loads=[load]))
    assert other.half.take_failed_blocks() == set()
    found = other.tokens([6, 4, 2], match.num_tokens)
    assert torch.equal(found, wanted[:, :, : match.num_tokens])
    other.half.shutdown()


@pytest.mark.parametrize("layerwise", [False, True], ids=["after-all-layers", "layerwise"])
def test_when_a_layer_is_copied(layerwise: bool, tmp_path: Path) -> None:
    """As soon as vLLM says that it is computed, or when the step is over."""
    from kvx_adapters.vllm_plugin.steps import Save, Scope, StepPlan

    worker = Worker(Directory(tmp_path))
    worker.fill()
    connector = connected(worker, layerwise=layerwise)
    save = Save("a", Scope(), worker.store.nodes([])[0], 0, np.array(TOKENS), ([3, 1, 5],))
    connector.bind_connector_metadata(StepPlan(saves=[save]))
    expected = worker.tokens([3, 1, 5], len(TOKENS)).clone()
    for name, kv_cache in zip(worker.half._layer_of, worker.kv_caches, strict=True):
        connector.save_kv_layer(name, torch.empty(0), None)
        kv_cache += 1
    if not layerwise:
        expected = worker.tokens([3, 1, 5], len(TOKENS)).clone()
    connector.wait_for_save()
    connector.shutdown()
    check_stored(tmp_path, TOKENS, expected)


def test_what_vllm_before_0_30_asks_for(tmp_path: Path) -> None:
    """Which requests are saved, and of which the load is over."""
    from kvx_adapters.vllm_plugin.steps import Load, Save, Scope, StepPlan

    worker = filled(tmp_path)
    match = worker.store.lookup(TOKENS)
    worker = Worker(Directory(tmp_path))
    connector = connected(worker)
    node = worker.store.nodes([])[0]
    save = Save("a", Scope(), node, 0, np.array(TOKENS[::-1]), ([3, 1, 5],), final=True)
    load = Load("b", Scope(), match, 0, 40, ([4, 2, 6],), wait=False)
    connector.bind_connector_metadata(StepPlan(saves=[save], loads=[load]))
    connector.start_load_kv(None)
    connector.wait_for_save()
    assert worker.half._loader._workers.wait(60)
    assert connector.get_finished(set()) == ({"a"}, {"b"})
    assert connector.get_finished(set()) == (set(), set())
    connector.shutdown()
    connector._worker = None  # as before the cache is there
    assert connector.get_finished(set()) == (None, None)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Path]:
    """Copies of a store that has TOKENS."""
    worker = filled(tmp_path / "first")
    assert worker.store.lookup(TOKENS).num_tokens == len(TOKENS)

    def copies() -> Iterator[Path]:
        for number in itertools.count():
            copy = tmp_path / f"copy-{number}"
            shutil.copytree(tmp_path / "first", copy)
            yield copy
            shutil.rmtree(copy)

    return copies()


@pytest.mark.parametrize("layerwise", [False, True], ids=["after-all-layers", "layerwise"])
def test_whatever_the_worker_half_meets(
    layerwise: bool, stores: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "TOGETHER", 1)  # the same calls every time
    injection = Injection(OURS, ["kvx_core", "kvx_adapters.vllm."])
    with injection.recording():
        _, loaded = exchange(next(stores), layerwise)
    assert loaded == ["now", "beside"]
    sites = list(injection.sites())
    assert len({site for site, _ in sites}) >= 12
    errors = itertools.cycle(ERRORS)
    for site, number in sites:
        path = next(stores)
        with injection.raising(next(errors), site, number):
            saved, _ = exchange(path, layerwise)
        check_stored(path, TOKENS[::-1], saved)
        assert injection.has_struck, f"nothing was raised at call {number} of {site}"
