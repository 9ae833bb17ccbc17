"""KVXConnector on hostile files: nothing raises, nothing wrong is loaded, failures are reported."""

from __future__ import annotations

import logging
import random
import time
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvx_core.connector.boundary import Boundary
from kvx_core.connector.lookups import Lookups
from kvx_core.connector.plan import Scope
from kvx_core.stores.blobs import Directory
from tests.fakes.vllm import SENTINEL, needs_cpu_op
from tests.hostile_entries import hostile_entries
from tests.store_files import entry_files, tokens_of
from tests.vllm_plugin.conftest import Stock
from tests.vllm_plugin.engine import EngineProcess, connector, same_tokens
from tests.vllm_plugin.models import prompt
from tests.vllm_plugin.workers import CHUNK, TOKENS, Worker, filled

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")

BLOCKS = [4, 2, 6]
SHARED = 28  # tokens that another prompt begins with
MAX_SECONDS = 20  # for one file, on a busy machine; a lookup that hangs takes for ever


def request(name: str) -> Any:
    """What the scheduler's half reads of vLLM's Request."""
    return SimpleNamespace(
        request_id=name,
        sampling_params=SimpleNamespace(prompt_logprobs=None),
        prompt_token_ids=[*TOKENS, 1],
        all_token_ids=[*TOKENS, 1],
        num_tokens=len(TOKENS) + 1,
        num_prompt_tokens=len(TOKENS) + 1,
        num_computed_tokens=0,
        prompt_embeds=None,
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        status=SimpleNamespace(name="FINISHED_STOPPED"),
    )


def connected(path: Path) -> tuple[Any, Worker]:
    """Both halves of a connector, over a store and a cache of sentinels."""
    from kvx_adapters.vllm_plugin.connector import KVXConnector
    from kvx_adapters.vllm_plugin.scheduler import SchedulerHalf
    from kvx_adapters.vllm_plugin.settings import Settings

    worker = Worker(Directory(path))
    both = object.__new__(KVXConnector)
    both._boundary = Boundary(logging.getLogger("kvx").warning)
    both._worker, both._settings = worker.half, Settings(path=path)
    both._scheduler = SchedulerHalf(
        stores={Scope(): worker.store},  # type: ignore[arg-type]
        boundary=both._boundary,
        lookups=Lookups(both._boundary),
        chunk_tokens=CHUNK,
        produces=True,
        consumes=True,
        asynchronous=False,
        window=0,
    )
    return both, worker


def load(path: Path, expected: torch.Tensor, name: str = "") -> int:
    """A request comes, loads and goes. Returns how many tokens it has taken from the store."""
    both, worker = connected(path)
    one = request("a")
    while (answer := both.get_num_new_matched_tokens(one, 0))[0] is None:
        both._scheduler.lookups.wait(60)
    count, is_async = answer
    assert 0 <= count <= len(TOKENS)
    assert not is_async
    allocated = SimpleNamespace(get_block_ids=lambda: (list(BLOCKS),))
    both.update_state_after_alloc(one, allocated, count)
    output = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[]),
        num_scheduled_tokens={"a": len(TOKENS) + 1 - count},
    )
    plan = both.build_connector_meta(output)
    assert [(one.start, one.stop) for one in plan.loads] == ([(0, count)] if count else [])
    both.bind_connector_metadata(plan)
    both.start_load_kv(None)
    both.wait_for_save()
    failed = both.get_block_ids_with_load_errors()
    results = both.get_transfer_results(set())
    assert not results.finished_sending | results.finished_recving | results.failed_recving
    both.update_connector_output(
        SimpleNamespace(failed_recving=None, finished_recving=None, invalid_block_ids=failed)
    )
    assert failed <= set(BLOCKS[: -(-count // 16)])
    loaded = 0 if failed else count
    if not name.startswith("forged"):  # those are right in every way: only a key tells
        found = worker.tokens(BLOCKS, 48)
        assert torch.equal(found[:, :, :loaded], expected[:, :, :loaded]), name
        assert loaded or not count or failed
    both.request_finished(one, list(BLOCKS))
    both._scheduler.lookups.shutdown()
    half = both._scheduler
    assert (half._tracked, half._lookups, half._given_up, half._loading) == ({}, {}, set(), {})
    both.shutdown()
    return loaded


@pytest.fixture
def store(tmp_path: Path) -> tuple[Path, Path, bytes, torch.Tensor]:
    """A store of TOKENS, its first file and what is in it, and what is loaded from it."""
    worker = filled(tmp_path)
    match = worker.store.lookup(TOKENS)
    first = tmp_path / match.spans[0].names[0]
    return tmp_path, first, first.read_bytes(), worker.tokens([3, 1, 5], len(TOKENS)).clone()


@pytest.mark.slow
def test_in_place_of_a_good_file(store: tuple[Path, Path, bytes, torch.Tensor]) -> None:
    root, path, good, expected = store
    assert load(root, expected) == len(TOKENS)
    slow = []
    for name, data in hostile_entries(good):
        path.write_bytes(data)
        begin = time.monotonic()
        loaded = load(root, expected, name)
        if time.monotonic() - begin > MAX_SECONDS:
            slow.append(name)
        assert loaded in (0, CHUNK, len(TOKENS)), name
        # Whoever computes the tokens can store them again, or they are there.
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)  # a folder that is empty goes with it
            path.write_bytes(good)
        assert path.is_file(), name
    assert slow == []
    path.write_bytes(good)
    assert load(root, expected) == len(TOKENS)


@pytest.mark.slow
def test_beside_a_good_file(store: tuple[Path, Path, bytes, torch.Tensor]) -> None:
    """As an entry that begins like the prompt: its mark leads there, and a lookup opens it."""
    root, path, _, expected = store
    other = Worker(Directory(root))
    other.fill()
    other.save([3, 1, 5], tokens=[*TOKENS[:SHARED], *prompt(40 - SHARED, seed=2)])
    other.half.shutdown()
    alike = {file for file in entry_files(root) if tokens_of(file)[:SHARED] == TOKENS[:SHARED]}
    (beside,) = alike - {path}
    good, marks = beside.read_bytes(), {file: file.read_bytes() for file in root.rglob("*.mark")}
    for with_good in (True, False):
        if not with_good:
            path.unlink()
        for name, data in chain(hostile_entries(good, mutations=100), [("good", good)]):
            beside.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(data)
            for file, raw in marks.items():  # those that lead nowhere are deleted
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(raw)
            loaded = load(root, expected, name)
            assert loaded == len(TOKENS) if with_good else loaded in (0, SHARED), name
        assert loaded == (len(TOKENS) if with_good else SHARED)


@pytest.mark.parametrize("sort", ["mark", "json"])
def test_hostile_records(sort: str, store: tuple[Path, Path, bytes, torch.Tensor]) -> None:
    """Marks, and records of kinds and of the space."""
    root, _, _, expected = store
    files = {path: path.read_bytes() for path in root.rglob(f"*/*.{sort}")}
    assert len(files) == 2
    for path, good in files.items():
        dice = random.Random(1)
        mutated = [bytearray(good) for _ in range(20)]
        for data in mutated:
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        cut = [good[:n] for n in (0, 1, len(good) // 2, len(good) - 1)]
        for data in (*mutated, *cut, good + b" ", good * 2, b"[" * 5000, bytes(len(good))):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            assert load(root, expected) in (0, CHUNK, len(TOKENS))
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(good)
    assert load(root, expected) == len(TOKENS)


@needs_cpu_op
def test_an_engine_over_a_store_full_of_them(
    llama: Path, engines: EngineProcess, stock: Stock, tmp_path: Path
) -> None:
    """It starts, answers right, and stores what it has computed."""
    prompts = [prompt(n, seed=60 + n) for n in (40, 100, 170)]
    expected = stock(llama, prompts, 8)
    config = connector(tmp_path, "kv_both", "recompute", chunk_tokens=32)
    options: dict[str, Any] = {"block_size": 32, "kv_transfer_config": config}
    with engines.engine(llama, **options) as engine:
        engine.generate(prompts, max_tokens=8)
    files = entry_files(tmp_path)
    assert len(files) >= 9
    good = files[0].read_bytes()
    hostile = [(n, d) for n, d in hostile_entries(good) if not n.startswith("forged")]
    for number, (_, data) in enumerate(hostile):
        path = files[number % len(files)]
        if number >= len(files):
            path = path.with_name(f"{number:064x}{path.name[64:]}")
        path.write_bytes(data)
    for number, path in enumerate(tmp_path.rglob("*.mark")):
        if number % 2:
            path.write_bytes(hostile[number][1])
    for prefix_caching in (True, False):
        with engines.engine(llama, enable_prefix_caching=prefix_caching, **options) as engine:
            num_free_blocks = engine.num_free_blocks()
            for _ in range(3):
                same_tokens(engine.generate(prompts, max_tokens=8), expected)
                engine.call("reset_prefix_cache")
            assert engine.num_free_blocks() == num_free_blocks
    for path in tmp_path.rglob("*.safetensors"):  # what is left is good, or was never opened
        if path.read_bytes() in {data for _, data in hostile}:
            path.unlink()
    config = connector(tmp_path, "kv_consumer", "fail")
    with engines.engine(llama, block_size=64, kv_transfer_config=config) as engine:
        outputs = engine.generate(prompts, max_tokens=8)
    same_tokens(outputs, expected)
    assert [output.num_cached_tokens for output in outputs] == [len(one) - 1 for one in prompts]


def test_the_sentinel_tells_what_was_written(tmp_path: Path) -> None:
    """The comparison above can fail: nothing that was loaded looks like a cache that was not."""
    _, worker = connected(tmp_path)
    assert (worker.raw == SENTINEL).all()
    source = Worker(Directory(tmp_path))
    source.fill()
    assert not torch.equal(source.tokens([3, 1, 5], 40), worker.tokens(BLOCKS, 40))
