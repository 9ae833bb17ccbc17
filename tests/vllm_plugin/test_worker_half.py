"""The worker's half of KVXConnector, on caches as vLLM makes them: cases no engine makes on cue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from kvx_adapters import vllm
from kvx_core import UnsupportedError
from kvx_core._c.os_files import OpenFile
from kvx_core.connector.plan import Scope
from kvx_core.connector.weights import Stamp
from kvx_core.snapshot import Section, StoreError
from kvx_core.stores.blobs import Directory
from tests.fakes.vllm import SENTINEL, B, H, L, N
from tests.vllm_plugin.workers import CHUNK, TOKENS, Worker, filled

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


def test_tokens_arrive_and_nothing_else_is_written(tmp_path: Path) -> None:
    source = filled(tmp_path)
    worker = Worker(Directory(tmp_path), block_size=2 * N)
    match = worker.store.lookup(TOKENS)
    assert match.num_tokens == 40
    worker.load([4, 2], 10, 37, match, wait=True)
    found = worker.tokens([4, 2], 2 * 2 * N)
    assert torch.equal(found[:, :, 10:37], source.tokens([3, 1, 5], 40)[:, :, 10:37])
    found[:, :, 10:37].view(torch.int8).fill_(SENTINEL)
    for kv_cache, layer in zip(worker.kv_caches, found, strict=True):
        kv_cache[[4, 2]] = layer.unflatten(1, (2, 2 * N)).transpose(0, 1)
    assert (worker.raw == SENTINEL).all()
    assert worker.stats()["loaded_tokens"] == 27


@pytest.mark.parametrize(
    ("generation", "stamp", "is_saved"),
    [
        (0, (0, 0), True),
        (1, (1, 0), True),
        (1, (0, 0), False),
        (0, (0, 1), False),
        (0, None, False),
    ],
)
def test_a_step_that_was_planned_for_other_weights_is_not_saved(
    generation: int, stamp: tuple[int, int] | None, is_saved: bool, tmp_path: Path
) -> None:
    """The scheduler's have changed since it was planned, or this rank's, or nobody knows."""
    from kvx_adapters.vllm_plugin.steps import Save, StepPlan

    worker = Worker(Directory(tmp_path))
    worker.fill()
    node = worker.store.nodes([])[0]
    step = StepPlan(
        saves=[Save("a", Scope(), node, 0, np.array(TOKENS), ([3, 1, 5],), final=True)],
        generation=generation,
        stamp=None if stamp is None else Stamp(*stamp),
    )
    assert worker.half.take_report() is None  # the scheduler takes that for granted
    worker.half.save(step)
    worker.half.shutdown()
    assert [worker.half.take_report() is None for _ in "ab"] == [generation == 0, True]
    assert worker.half.take_results()[0] == {"a"}  # its blocks need not wait
    assert worker.store.lookup(TOKENS).num_tokens == (40 if is_saved else 0)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_an_adapter_that_is_not_loaded_any_more(
    is_loaded: bool, layerwise: bool, tmp_path: Path
) -> None:
    """What it has computed is not saved, and nothing is loaded for it. Others go on."""
    from kvx_adapters.vllm_plugin.steps import Load, Save, StepPlan

    worker = Worker(Directory(tmp_path))
    worker.fill()
    worker.half._weights.adapters.loaded(1, "files", lambda: "adapter")
    end = time.monotonic() + 10
    while not (known := worker.half._weights.adapters.report(0).known) and time.monotonic() < end:
        time.sleep(0.001)
    scope = Scope(adapter=known[1] if is_loaded else known[1]._replace(changes=1))
    node, other = worker.store.nodes([])[0], TOKENS[::-1]
    saves = [
        Save("a", scope, node, 0, np.array(TOKENS), ([3, 1, 5],), final=True),
        Save("b", Scope(), node, 0, np.array(other), ([3, 1, 5],), final=True),
    ]
    step = StepPlan(saves=saves)
    for layer in range(L) if layerwise else ():
        worker.half.save_layer(step, f"model.layers.{layer}")
    worker.half.save(step)
    assert worker.half.save_now(saves[0]) == is_loaded
    worker.half._saver._writer.threads.wait(10)
    assert worker.half.take_results()[0] == {"a", "b"}
    assert worker.store.lookup(TOKENS).num_tokens == (40 if is_loaded else 0)
    match = worker.store.lookup(other)
    assert match.num_tokens == 40
    loads = [Load("a", scope, match, 0, 40, ([4, 2, 6],), wait=True)]
    worker.half.load(StepPlan(loads=loads))
    assert worker.half.take_failed_blocks() == (set() if is_loaded else {4, 2, 6})
    beside = Load("c", scope, match, 0, 40, ([4, 2, 6],), wait=False)
    worker.half.load(StepPlan(loads=[beside]))
    worker.half._loader._workers.wait(10)
    worker.half._weights.adapters.loaded(1, None, lambda: None)
    assert worker.half.take_failed_blocks() == {4, 2, 6}  # it has changed meanwhile
    assert worker.half.take_results()[1] == {"c"}
    worker.half.shutdown()


def test_ranks_with_a_head_each_and_one_with_both(tmp_path: Path) -> None:
    ranks = [Worker(Directory(tmp_path), heads) for heads in ((0, 1), (1, 2))]
    whole = Worker(Directory(tmp_path))
    whole.store.index.fresh_seconds = 0.0  # kinds of other ranks are listed at each miss
    for i, rank in enumerate(ranks):
        assert whole.store.lookup(TOKENS).num_tokens == 0  # half the heads are no hit
        rank.fill()
        rank.kv_caches[0] += i
        rank.save([3, 1, 5])
        rank.half.shutdown()
    match = whole.store.lookup(TOKENS)
    assert match.num_tokens == 40
    whole.load([6, 2, 4], 0, 40, match, wait=True)
    parts = torch.cat([rank.tokens([3, 1, 5], 40) for rank in ranks], dim=1)
    assert torch.equal(whole.tokens([6, 2, 4], 40), parts)

    for heads in ((0, 1), (1, 2)):
        rank = Worker(Directory(tmp_path), heads)
        rank.load([2, 3, 4], 0, 40, match, wait=True)
        assert torch.equal(rank.tokens([2, 3, 4], 40), parts[:, slice(*heads)])


def test_layers_are_copied_when_they_are_computed(tmp_path: Path) -> None:
    source = Worker(Directory(tmp_path))
    source.fill()
    expected = source.tokens([3, 1, 5], 40)
    source.save([3, 1, 5], layerwise=True)
    source.half.shutdown()
    assert not torch.equal(source.tokens([3, 1, 5], 40), expected)
    worker = Worker(Directory(tmp_path))
    worker.load([3, 1, 5], 0, 40, worker.store.lookup(TOKENS), wait=True)
    assert torch.equal(worker.tokens([3, 1, 5], 40), expected)


def test_a_null_block_is_neither_saved_nor_written(tmp_path: Path) -> None:
    source = filled(tmp_path)
    windowed = Worker(Directory(tmp_path / "other"))
    windowed.fill()
    windowed.save([0, 0, 5])  # the first chunk has left the window, the second has not
    windowed.half.shutdown()
    assert len(list((tmp_path / "other").rglob("*.safetensors"))) == 1
    assert not windowed.store.missing(TOKENS, 32, 40, range(L), (0, H))

    worker = Worker(Directory(tmp_path))
    worker.load([0, 0, 5], 0, 40, worker.store.lookup(TOKENS), wait=True)
    assert torch.equal(worker.tokens([5], 8), source.tokens([5], 8))
    assert (worker.kv_caches[0][0].view(torch.int8) == SENTINEL).all()


class Slow(Directory):
    """Writes nothing before it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = threading.Event()

    def put(self, name: str, write: Callable[[BinaryIO], None], *, durable: bool = True) -> bool:
        assert name.endswith(".json") or self.go.wait(60)
        return super().put(name, write, durable=durable)


def test_what_waits_to_be_written_is_bounded(tmp_path: Path) -> None:
    blobs = Slow(tmp_path)
    worker = Worker(blobs, max_pending_bytes=1)
    worker.fill()
    worker.save([3, 1, 5])  # one chunk waits, and the next is too much
    assert worker.stats()["dropped_saves"] == 1
    blobs.go.set()
    worker.half.shutdown()
    assert worker.store.lookup(TOKENS).num_tokens == CHUNK
    assert worker.stats()["saved_bytes"] > 0


def test_what_a_step_copies_layer_by_layer_is_bounded(tmp_path: Path) -> None:
    """What other requests of the same step have copied counts, though it does not wait yet."""
    from kvx_adapters.vllm_plugin.steps import Save, StepPlan

    blobs = Slow(tmp_path)
    worker = Worker(blobs, max_pending_bytes=1)
    worker.fill()
    node, others = worker.store.nodes([])[0], [token + 1 for token in TOKENS]
    saves = [
        Save(name, Scope(), node, 0, np.array(tokens), (blocks,), False)
        for name, tokens, blocks in (("a", TOKENS, [3, 1, 5]), ("b", others, [2, 4, 6]))
    ]
    step = StepPlan(saves=saves)
    for layer in range(L):
        worker.half.save_layer(step, f"model.layers.{layer}")
    worker.half.save(step)
    assert worker.stats()["dropped_saves"] == 2
    blobs.go.set()
    worker.half.shutdown()
    assert worker.store.lookup(TOKENS).num_tokens == CHUNK
    assert worker.store.lookup(others).num_tokens == 0


class Full(Directory):
    def put(self, name: str, write: Callable[[BinaryIO], None], *, durable: bool = True) -> bool:
        raise StoreError(f"{name} cannot be written: no space left on device")


def test_a_full_disk_keeps_no_blocks(tmp_path: Path) -> None:
    """vLLM frees a finished request's blocks when it hears that they are saved, or not to be."""
    worker = Worker(Full(tmp_path))
    worker.fill()
    worker.save([3, 1, 5], final=True)
    worker.half.shutdown()
    assert worker.half.take_results() == ({"a"}, set(), set())
    assert worker.half.take_results() == (set(), set(), set())
    stats = worker.stats()
    assert stats["dropped_saves"] == 2
    assert "saved_bytes" not in stats


def test_blocks_that_are_not_there_fail_the_save_alone(tmp_path: Path) -> None:
    worker = Worker(Directory(tmp_path))
    worker.save([3, B], final=True)
    worker.half.shutdown()
    assert worker.half.take_results()[0] == {"a"}
    assert worker.stats() == {"dropped_saves": 1}
    worker.save([3, B], layerwise=True)
    assert worker.stats() == {"dropped_saves": 2}  # at the first layer, and at the end


def test_a_failed_load_names_its_blocks(tmp_path: Path) -> None:
    filled(tmp_path)
    worker = Worker(Directory(tmp_path))
    match = worker.store.lookup(TOKENS)
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    worker.load([4, 2, 6], 20, 40, match, wait=True)
    assert worker.half.take_failed_blocks() == {2, 6}
    assert worker.half.take_failed_blocks() == set()
    assert worker.stats()["load_failures"] == 1
    assert (worker.raw == SENTINEL).all()


@pytest.mark.parametrize("blocks", [[4, 2], [[]], [4, 2, B]], ids=["short", "nonsense", "outside"])
def test_a_load_beside_other_steps_is_always_over(blocks: Any, tmp_path: Path) -> None:
    """Whatever happens in its thread: vLLM keeps the request waiting until it hears of it."""
    filled(tmp_path)
    worker = Worker(Directory(tmp_path))
    worker.load(blocks, 0, 40, worker.store.lookup(TOKENS), wait=False)
    assert worker.half._loader._workers.wait(60)
    _, loaded, failed = worker.half.take_results()
    failed_blocks = worker.half.take_failed_blocks()
    if failed:  # there are no blocks that could be named
        assert (loaded, failed, failed_blocks) == ({"a"}, {"a"}, set())
    else:  # vLLM hears of them before the load counts as over
        assert loaded == set()
        assert set() < failed_blocks <= set(blocks)
        assert worker.half.take_results() == (set(), {"a"}, set())


@pytest.mark.parametrize("waits", [False, True], ids=["before-0.30", "since-0.30"])
def test_a_finished_request_is_saved_without_a_forward_pass(waits: bool, tmp_path: Path) -> None:
    """Before 0.30 vLLM calls start_load_kv alone then, and blocks wait to be freed."""
    from kvx_adapters.vllm_plugin.connector import KVXConnector
    from kvx_adapters.vllm_plugin.steps import Save, Scope, StepPlan

    worker = Worker(Directory(tmp_path))
    worker.fill()
    connector = object.__new__(KVXConnector)
    connector._worker, connector._boundary = worker.half, worker.half._boundary
    node = worker.store.nodes([])[0]
    save = Save("a", Scope(), node, 0, np.array(TOKENS), ([3, 1, 5],), final=True)
    connector.bind_connector_metadata(StepPlan(saves=[save], is_idle=True))
    connector.start_load_kv(None)
    if waits:
        connector.wait_for_save()
    assert worker.half.take_results()[0] == {"a"}
    worker.half.shutdown()
    assert worker.stats()["saved_tokens"] == len(TOKENS)
    assert worker.store.lookup(TOKENS).num_tokens == len(TOKENS)


class Strange(Directory):
    """Fails as nobody expects it to."""

    def put(self, name: str, write: Callable[[BinaryIO], None], *, durable: bool = True) -> bool:
        if name.endswith(".json"):
            return super().put(name, write, durable=durable)
        raise ZeroDivisionError

    def fetch(self, name: str, *rest: Any) -> OpenFile | None:
        if name.endswith(".json"):
            return super().fetch(name, *rest)
        raise ZeroDivisionError


@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("by_request", [True, False], ids=["by-request", "by-block"])
def test_whatever_fails_a_load_vllm_is_told(by_request: bool, wait: bool, tmp_path: Path) -> None:
    """Else it would take the blocks for loaded: before 0.30 it hears of nothing but blocks."""
    match = filled(tmp_path).store.lookup(TOKENS)
    worker = Worker(Strange(tmp_path), by_request=by_request)
    worker.load([4, 2, 6], 0, 40, match, wait=wait)
    assert worker.half._loader._workers.wait(60)
    over = set() if wait else {"a"}
    assert worker.half.take_results() == (set(), set(), set())
    assert worker.half.take_failed_blocks() == {4, 2, 6}
    assert worker.half.take_results() == (set(), over, set())
    assert worker.stats()["load_failures"] == 1


def test_whatever_fails_a_save_the_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(Strange(tmp_path))
    worker.fill()
    worker.save([3, 1, 5], final=True)  # its thread cannot write
    assert worker.half._saver._writer.threads.wait(60)
    assert worker.stats()["dropped_saves"] == 2

    def fails(*arguments: Any, **keywords: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(worker.store, "chunks", fails)
    worker.save([3, 1, 5], final=True)
    assert worker.half.take_results()[0] == {"a"}
    assert worker.stats() == {"dropped_saves": 1}
    worker.half.shutdown()


def test_a_step_without_a_forward_pass_gives_way_to_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with the first load that is over, long before its patience does."""
    from kvx_adapters.vllm_plugin import worker as module
    from kvx_adapters.vllm_plugin.steps import StepPlan

    filled(tmp_path)
    worker = Worker(Directory(tmp_path))
    monkeypatch.setattr(module, "_IDLE_STEP_SECONDS", 60)
    worker.half.load(StepPlan(is_idle=True))  # nothing to wait for
    worker.load([4, 2, 6], 0, 40, worker.store.lookup(TOKENS), wait=False)
    worker.half.load(StepPlan(is_idle=True))
    assert worker.half.take_results() == (set(), {"a"}, set())
    worker.half.load(StepPlan(is_idle=True))


# ---- which heads a rank has ----


@pytest.fixture
def of_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes this process a tensor-parallel rank, for vLLM's layers and for KVX."""
    from vllm.distributed import parallel_state
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    def become(rank: int, num_ranks: int) -> None:
        for module in (parallel_state, parameter, linear):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: num_ranks)

    return become


def heads_that_vllm_loads(total_kv_heads: int) -> list[int]:
    """Of a weight of K in which every head has its number, the numbers that this rank loads."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import QKVParallelLinear

    with set_current_vllm_config(VllmConfig()):
        layer = QKVParallelLinear(1, 1, 8, total_kv_heads, bias=False, params_dtype=torch.float32)
    layer.weight_loader(layer.weight, torch.arange(float(total_kv_heads))[:, None], "k")
    k = layer.weight[layer.num_heads : layer.num_heads + layer.num_kv_heads]
    return list(map(int, k.flatten().tolist()))


@pytest.mark.parametrize(
    ("num_ranks", "total"), [(1, 2), (2, 2), (2, 4), (4, 2), (8, 2), (8, 1), (2, 8)]
)
def test_a_rank_has_the_heads_whose_weights_vllm_loads(
    num_ranks: int, total: int, of_rank: Callable[[int, int], None]
) -> None:
    from kvx_adapters.vllm_plugin.connector import _facts

    model = SimpleNamespace(
        use_mla=False, get_total_num_kv_heads=lambda: total, dtype=torch.float32
    )
    parallel = SimpleNamespace(tensor_parallel_size=num_ranks)
    config = SimpleNamespace(model_config=model, parallel_config=parallel)
    for rank in range(num_ranks):
        of_rank(rank, num_ranks)
        loaded = heads_that_vllm_loads(total)
        assert _facts(config).first_kv_head == loaded[0]
        first, last = vllm.kv_heads_of(model, rank, num_ranks)
        assert list(range(first, last)) == loaded


def test_latents_have_one_head_on_every_rank(of_rank: Callable[[int, int], None]) -> None:
    from kvx_adapters.vllm_plugin.connector import _facts

    model = SimpleNamespace(use_mla=True, get_total_num_kv_heads=lambda: 128, dtype=torch.float32)
    parallel = SimpleNamespace(tensor_parallel_size=4)
    config = SimpleNamespace(model_config=model, parallel_config=parallel)
    assert vllm.total_kv_heads(model) == 1
    for rank in range(4):
        of_rank(rank, 4)
        facts = _facts(config)
        assert (facts.first_kv_head, facts.total_kv_heads) == (0, 1)
        assert vllm.kv_heads_of(model, rank, 4) == (0, 1)


def test_a_start_with_a_store_that_never_finds_what_it_stores(tmp_path: Path) -> None:
    from kvx_adapters.vllm_plugin.connector import _check_found

    worker = Worker(Directory(tmp_path), (0, 1))
    (part,) = worker.half._held
    sections = [Section(part.group.layers, part.view, None)]

    def check(num_ranks: int, total: int) -> None:
        model = SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: total)
        parallel = SimpleNamespace(tensor_parallel_size=num_ranks)
        config = SimpleNamespace(model_config=model, parallel_config=parallel)
        _check_found(worker.store, sections, config)

    check(num_ranks=2, total=2)
    check(num_ranks=4, total=2)
    with pytest.raises(UnsupportedError) as caught:
        check(num_ranks=1, total=1)  # another number than the store's
    assert str(caught.value) == (
        "KVXConnector would store what it never finds: nobody would store head 1 of layer 0: all "
        "ranks together have the KV heads 0 of 2, and an entry is found when it holds all"
    )
    assert not list(tmp_path.rglob("*.safetensors"))
