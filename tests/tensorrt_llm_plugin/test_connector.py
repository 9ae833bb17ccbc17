"""The connector in a mock of TensorRT-LLM: one engine loads what another has saved.

Before each forward pass the mock compares every byte that counts as computed with what the model
would have computed.
"""

from __future__ import annotations

import errno
import sys
import threading
import time
from dataclasses import replace
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvx_core import InvalidArgumentError, OutOfRangeError, UnsupportedError
from kvx_core.snapshot import StoreError
from kvx_core.stores.loads import Progress
from kvx_core.stores.prefix import PrefixStore
from tests.calls import BACKENDS
from tests.fakes import tensorrt_llm_executor as fake
from tests.fakes.tensorrt_llm_executor import SENTINEL, Executor, LlmRequest
from tests.tensorrt_llm_plugin.conftest import SIZES, Factory
from tests.vllm_plugin.models import prompt


def saved(serve: Factory, tokens: list[int], **options: Any) -> Executor:
    """An engine that has served a prompt, and has written its files."""
    engine = serve(**options)
    engine.ask(tokens)
    engine.close()
    return engine


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("save_size", "load_size"), [(16, 64), (32, 8), (16, 16)])
def test_another_block_size(serve: Factory, save_size: int, load_size: int, seed: int) -> None:
    tokens = prompt(150, seed)
    saved(serve, tokens, block_size=save_size, seed=seed)
    second = serve(load_size, seed=seed + 1)
    request = second.ask(tokens)
    loaded = 149 // load_size * load_size
    assert request.computed == 150 - loaded
    (rank,) = second.ranks
    found = rank.raw.clone()
    rank.raw.fill_(SENTINEL)
    rank.write(request.block_ids, 0, fake.keys_and_values(tokens, SIZES))
    assert torch.equal(rank.raw, found)  # and nothing else has been written


@pytest.mark.parametrize("trtllm", ["1.2"], indirect=True)
def test_the_interface_of_1_2(serve: Factory, trtllm: ModuleType) -> None:
    tokens = prompt(100, 3)
    saved(serve, tokens)
    assert serve(32).ask(tokens).computed == 100 - 96


@pytest.mark.skipif(
    "cuda" not in [backend.name for backend in BACKENDS],
    reason="needs a GPU, and a libkvx that was built with nvcc",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_pool_on_a_device(serve: Factory, dtype: torch.dtype) -> None:
    is_fp8 = dtype is torch.float8_e4m3fn
    serve.set(kv_scaling_factor=0.5 if is_fp8 else 1.0)
    args = {"kv_cache_config": {"dtype": "fp8" if is_fp8 else "auto"}}
    options: dict[str, Any] = {"device": "cuda", "sizes": replace(SIZES, dtype=dtype)}
    tokens = prompt(100, 33)
    saved(serve, tokens, args=args | {"tensor_parallel_size": 2}, **options)
    assert serve(32, args=args, **options).ask(tokens, max_new_tokens=30).computed == 4 + 29


def test_the_order_of_calls(serve: Factory) -> None:
    engine = serve()
    engine.ask(prompt(20, 0), max_new_tokens=2)
    step = ["build_connector_meta", "start_load_kv", "wait_for_save"]
    assert engine.calls == [
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        *step,
        "get_finished",
        *step,
        "request_finished",
        "get_finished",
    ]


@pytest.mark.parametrize(("ranks", "others"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_tensor_parallel_ranks(serve: Factory, ranks: int, others: int) -> None:
    """Two heads over one, two or four ranks, which share a head."""
    tokens = prompt(100, 4)
    saved(serve, tokens, args={"tensor_parallel_size": ranks})
    engine = serve(8, args={"tensor_parallel_size": others})
    assert engine.ask(tokens).computed == 4


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_in_chunks_and_answers(serve: Factory, overlap: bool) -> None:
    tokens = prompt(150, 5)
    engine = serve(chunk=40, overlap=overlap)
    request = engine.ask(tokens, max_new_tokens=60)
    engine.close()
    continued = tokens + request.answer + prompt(3, 6)
    other = serve(8).ask(continued)
    # 150 + 59 tokens were computed; those of the last chunk that is not full are not stored, and
    # in the overlapping loop one token less is known when the last step is planned.
    full = (150 + 59 - overlap) // 24 * 24
    assert len(continued) - other.computed == full // 8 * 8


def test_only_prompts(serve: Factory) -> None:
    serve.set(save_generated=False)
    tokens = prompt(30, 7)
    engine = serve()
    request = engine.ask(tokens, max_new_tokens=60)
    engine.close()
    continued = tokens + request.answer
    serve.set(min_tokens=30)
    assert serve(2, num_blocks=50).ask(continued).computed == 90 - 30


def test_beside_blocks_that_the_engine_has_itself(serve: Factory) -> None:
    tokens = prompt(150, 8)
    saved(serve, tokens)
    engine = serve(16, reuse=True)
    begin = engine.ask(tokens[:60])  # of which 48 come from the store, and are kept
    assert begin.computed == 12
    request = engine.ask(tokens)
    assert request.computed == 150 - 144
    assert request.block_ids[:3] == begin.block_ids[:3]
    again = engine.ask(tokens)
    assert again.computed == 150 - 144
    assert engine.scheduler._requests == {}


def test_what_comes_from_the_store_is_not_written_again(serve: Factory) -> None:
    tokens = prompt(150, 9)
    saved(serve, tokens)
    files = {path: path.stat().st_mtime_ns for path in serve.store.rglob("*.safetensors")}
    assert len(files) == 7  # 150 tokens in chunks of 24
    engine = serve(32)
    engine.ask(tokens + prompt(30, 10))
    engine.close()
    now = {path: path.stat().st_mtime_ns for path in serve.store.rglob("*.safetensors")}
    kept = [path for path in files if path in now]
    assert len(kept) == 7
    assert len(now) == 9  # 180 tokens: the seventh chunk is full now, and an eighth


def test_the_last_token_of_a_prompt_is_computed(serve: Factory) -> None:
    """Also if the store has it and it ends a block: its logits choose the next one."""
    tokens = prompt(150, 8)
    saved(serve, tokens)
    assert serve(16).ask(tokens[:96]).computed == 16
    assert serve(16).ask(tokens[:97]).computed == 1


@pytest.mark.parametrize("honours", [0, 1, 3])
def test_a_promise_of_which_a_part_is_taken(serve: Factory, honours: int) -> None:
    """And nothing is saved before it has been computed, in chunks."""
    tokens = prompt(150, 11)
    saved(serve, tokens[:100])
    engine = serve(16, honours=honours, chunk=32)
    assert engine.ask(tokens).computed == 150 - honours * 16
    engine.close()
    assert serve(16).ask(tokens).computed == 150 - 144


def test_a_promise_whose_beginning_is_not_taken(serve: Factory, trtllm: ModuleType) -> None:
    tokens = prompt(100, 12)
    saved(serve, tokens)
    scheduler = serve(16).scheduler
    request = LlmRequest(7, tokens)
    assert scheduler.get_num_new_matched_tokens(request, 16) == (80, False)
    scheduler.cancel_load(request, 16, 48)
    data = fake.RequestDataOfMain(7, tokens, list(range(10, 17)), 48, 4)
    plan = scheduler.build_connector_meta(fake.SchedulerOutput([data]))
    (load,), (save,) = plan.loads, plan.saves
    assert load.block_ids == [13, 14, 15]
    assert save.start == 96  # what is before is in the store
    values = fake.keys_and_values(tokens, SIZES)[..., 48:96, :]
    expected = values.unflatten(3, (3, 16)).permute(3, 0, 1, 2, 4, 5).flatten(3)
    assert torch.equal(torch.from_numpy(load.blocks), fake.as_bytes(expected))


@pytest.mark.parametrize(
    ("start", "end", "loaded"),
    [
        (0, 16, range(1, 6)),  # tokens before the promise
        (96, 100, range(1, 6)),  # after it
        (16, 20, range(1, 6)),  # the rest of the first block is not computed
        (16, 31, range(1, 6)),
        (16, 32, range(2, 6)),
        (10, 40, range(2, 6)),
        (17, 96, range(1, 2)),  # the first token of its only block is not computed
        (50, 96, range(1, 4)),
        (48, 96, range(1, 3)),
        (80, 81, range(1, 6)),  # a gap: all is loaded
        (81, 120, range(1, 6)),
        (16, 96, range(0)),
        (0, 500, range(0)),
    ],
)
def test_a_promise_of_which_tokens_are_computed(
    start: int, end: int, loaded: range, serve: Factory
) -> None:
    """Of blocks 1 to 5: a block is loaded if TensorRT-LLM does not compute all of its tokens."""
    tokens = prompt(100, 12)
    saved(serve, tokens)
    scheduler = serve(16).scheduler
    request = LlmRequest(7, tokens)
    assert scheduler.get_num_new_matched_tokens(request, 16) == (80, False)
    scheduler.cancel_load(request, start, end)
    first = loaded.start * 16 if loaded else 96
    data = fake.RequestDataOfMain(7, tokens, list(range(10, 17)), first, 4)
    loads = scheduler.build_connector_meta(fake.SchedulerOutput([data])).loads
    assert [load.block_ids for load in loads] == ([[10 + i for i in loaded]] if loaded else [])
    if loaded:
        values = fake.keys_and_values(tokens, SIZES)[..., first : loaded.stop * 16, :]
        expected = values.unflatten(3, (len(loaded), 16)).permute(3, 0, 1, 2, 4, 5).flatten(3)
        assert torch.equal(torch.from_numpy(loads[0].blocks), fake.as_bytes(expected))


def test_the_first_versions_counted_promised_tokens(serve: Factory) -> None:
    tokens = prompt(150, 13)
    saved(serve, tokens)
    engine = serve(16, counts_promised=True)
    request = engine.ask(tokens, max_new_tokens=30)
    engine.close()
    assert request.computed == 6 + 29
    assert serve(8).ask(tokens + request.answer[:20]).computed == 170 - 168


def test_a_position_that_no_version_reports_is_not_believed(serve: Factory) -> None:
    """Loaded it is, since TensorRT-LLM may count on it; saved it is not."""
    tokens = prompt(100, 14)
    saved(serve, tokens)
    scheduler = serve(16).scheduler
    scheduler.get_num_new_matched_tokens(LlmRequest(7, tokens), 0)
    data = fake.RequestDataOfMain(7, tokens, list(range(7)), -96, 100)
    plan = scheduler.build_connector_meta(fake.SchedulerOutput([data]))
    assert [load.block_ids for load in plan.loads] == [list(range(6))]
    assert plan.saves == []
    assert scheduler._requests == {}


def test_a_block_that_tensorrt_llm_has_begun(serve: Factory, trtllm: ModuleType) -> None:
    """It may still be being copied from another request's."""
    tokens = prompt(100, 31)
    saved(serve, tokens)
    scheduler = serve(16).scheduler
    assert scheduler.get_num_new_matched_tokens(LlmRequest(7, tokens), 20) == (0, False)
    assert [line for line in trtllm.logger.lines if "keeps prefixes" not in line] == []
    assert scheduler.get_num_new_matched_tokens(LlmRequest(7, tokens), 32) == (64, False)


def test_tokens_that_are_not_known_yet(serve: Factory) -> None:
    """Main schedules drafts beside them."""
    tokens = prompt(30, 32)
    scheduler = serve(16).scheduler
    scheduler.get_num_new_matched_tokens(LlmRequest(7, tokens), 0)
    data = fake.RequestDataOfMain(7, tokens, [3, 4, 5], 29, 20)
    (save,) = scheduler.build_connector_meta(fake.SchedulerOutput([data])).saves
    assert (save.tokens.tolist(), save.block_ids) == (tokens, ([3, 4, 5],))


def test_two_requests_in_one_step(serve: Factory) -> None:
    first, second = prompt(100, 15), prompt(120, 16)
    engine = serve()
    engine.run(LlmRequest(1, first), LlmRequest(2, second, max_new_tokens=3))
    engine.close()
    a, b = serve(32).run(LlmRequest(1, second), LlmRequest(2, first))
    assert (a.computed, b.computed) == (120 - 96, 100 - 96)


def test_a_bound_on_what_is_read(serve: Factory) -> None:
    tokens = prompt(150, 17)
    saved(serve, tokens)
    block_bytes = 3 * 2 * 2 * 16 * 10 * 4
    serve.set(max_load_bytes=5 * block_bytes)
    a, b = serve(16).run(LlmRequest(1, tokens), LlmRequest(2, tokens))
    assert (a.computed, b.computed) == (150 - 80, 150)


def test_salts_share_nothing(serve: Factory) -> None:
    class Salted(LlmRequest):
        cache_salt: str | None = None

    def salted(salt: str | None) -> LlmRequest:
        request = Salted(1, tokens, cache_salt_id=None if salt is None else 5)
        request.cache_salt = salt
        return request

    tokens = prompt(100, 18)
    engine = serve()
    engine.run(salted("a"))
    engine.close()
    for salt, computed in (("b", 100), (None, 100), ("a", 4)):
        (request,) = serve(16).run(salted(salt))
        assert request.computed == computed


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_task_id": 3},
        {"prompt_embedding_table": object()},
        {"multimodal_embedding": object()},
        {"multimodal_hashes": [[1]]},
        {"multimodal_positions": [4]},
        {"mrope_rotary_cos_sin": object()},
        {"cache_salt_id": 7},  # and no cache_salt that could be read
        {"is_dummy_request": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_requests_left_to_tensorrt_llm(serve: Factory, fields: dict[str, Any]) -> None:
    tokens = prompt(100, 19)
    engine = serve()
    engine.ask(tokens, **fields)
    engine.close()
    assert not list(serve.store.rglob("*.safetensors"))
    saved(serve, tokens)
    assert serve().ask(tokens, **fields).computed == 100


def test_prompts_whose_logits_are_asked_for_are_saved_and_not_loaded(serve: Factory) -> None:
    tokens = prompt(100, 20)
    for _ in range(2):
        engine = serve()
        assert engine.ask(tokens, return_context_logits=True).computed == 100
        engine.close()
    assert serve().ask(tokens).computed == 4


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
@pytest.mark.parametrize("at", [0, 3, 5])
def test_a_file_that_is_not_good_is_computed(
    serve: Factory, trtllm: ModuleType, damage: str, at: int
) -> None:
    tokens = prompt(150, 21)
    saved(serve, tokens)
    engine = serve(8)
    match = engine.scheduler._store.lookup(tokens)
    path = serve.store / match.spans[at].names[0]
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[-100] ^= 1
        path.write_bytes(content)
    request = engine.ask(tokens)
    loaded = at * 24 // 8 * 8
    assert request.computed == 150 - (loaded if loaded >= 32 else 0)
    engine.close()
    if damage == "changed":
        (warning,) = trtllm.logger.warnings()
        assert warning.startswith("warning: KVX computes tokens that it found: ")
    assert serve(8).ask(tokens).computed == 150 - 144  # it has been stored again


def test_a_disk_that_does_not_give_files_is_told(serve: Factory, trtllm: ModuleType) -> None:
    tokens = prompt(100, 36)
    saved(serve, tokens)
    engine = serve()
    blobs = engine.scheduler._store._blobs
    fetch = blobs.fetch

    def dying(name: str, *rest: Any) -> Any:
        if not name.endswith(".safetensors"):
            return fetch(name, *rest)
        error = OSError(errno.EIO, "Input/output error")
        raise blobs._failure(name, "read", error) from error

    engine.scheduler._store.index.fresh_seconds = 0
    blobs.fetch = dying
    assert engine.ask(tokens).computed == 100
    (warning,) = trtllm.logger.warnings()
    assert warning.startswith("warning: KVX did not read what a prompt may begin with: ")
    blobs.fetch = fetch
    assert engine.ask(tokens).computed == 4


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_read_that_nobody_waits_for_has_not_failed(
    is_cancelled: bool, serve: Factory, trtllm: ModuleType
) -> None:
    def load(*_: Any, progress: Progress) -> int:
        progress.stop = 24
        raise StoreError("as a test says")

    progress, store = Progress(is_cancelled=is_cancelled), SimpleNamespace(load=load)
    found = serve().scheduler._fill(store, None, 8, 96, None, progress)
    assert found == (8 if is_cancelled else 24)  # up to where it came
    assert len(trtllm.logger.warnings()) == (not is_cancelled)


def test_a_store_that_does_not_answer(serve: Factory) -> None:
    """Its first requests wait a little for it, the next ones not at all."""
    tokens = prompt(100, 34)
    saved(serve, tokens)
    serve.set(chunk_seconds=0.05)
    engine, answers = serve(), threading.Event()
    blobs = engine.scheduler._store._blobs
    fetch = blobs.fetch
    blobs.fetch = lambda *given: fetch(*given) if answers.wait(60) else None
    begin = time.monotonic()
    for _ in range(10):
        assert engine.ask(tokens).computed == 100
    assert time.monotonic() - begin < 30
    filled: list[Any] = []
    engine.scheduler._fill = lambda *arguments: filled.append(arguments)
    answers.set()
    assert engine.scheduler._reader.wait(60)
    assert filled == []  # nobody waits for it any more


def test_a_store_that_is_slow_and_answers(serve: Factory) -> None:
    """The scheduler waits as long as chunk after chunk is found and read."""
    tokens = prompt(100, 35)
    saved(serve, tokens)
    serve.set(chunk_seconds=1)
    engine = serve()
    blobs = engine.scheduler._store._blobs
    fetch = blobs.fetch

    def slowly(*given: Any) -> Any:
        time.sleep(0.15)
        return fetch(*given)

    blobs.fetch = slowly
    begin = time.monotonic()
    assert engine.ask(tokens).computed == 4
    assert time.monotonic() - begin > 1


def test_a_file_that_goes_after_the_promise(serve: Factory) -> None:
    """What has been promised has been read."""
    tokens = prompt(100, 22)
    saved(serve, tokens)
    engine = serve()
    promise = engine.scheduler.get_num_new_matched_tokens

    def promise_and_delete(request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        answer: tuple[int, bool] = promise(request, num_computed_tokens)
        for path in serve.store.rglob("*.safetensors"):
            path.unlink()
        return answer

    engine.scheduler.get_num_new_matched_tokens = promise_and_delete
    assert engine.ask(tokens).computed == 4


def test_a_store_of_another_meaning_is_computed(serve: Factory, trtllm: ModuleType) -> None:
    tokens = prompt(100, 23)
    saved(serve, tokens)
    serve.set(is_neox=False)
    assert serve().ask(tokens).computed == 100
    (warning,) = trtllm.logger.warnings()
    assert (
        "rotary is 'half' at the source and 'interleaved' at the destination (tensorrt_llm main "
        "(double))" in warning
    )


def test_a_store_that_cannot_be_written(serve: Factory, trtllm: ModuleType) -> None:
    serve.store.mkdir()
    (serve.store / ".tmp").write_text("no directory")
    engine = serve()
    engine.ask(prompt(30, 24))
    engine.close()
    (warning, *_) = trtllm.logger.warnings()
    assert warning.startswith("warning: KVX could not write to its store: ")


def test_a_start_says_where_its_store_is(serve: Factory, trtllm: ModuleType) -> None:
    serve()
    (line,) = (line for line in trtllm.logger.lines if "keeps prefixes in" in line)
    assert line.startswith(f"info: KVX keeps prefixes in {serve.store}: model ")
    assert ", chunks of 24 tokens, " in line


def test_a_store_that_is_a_file(serve: Factory) -> None:
    serve.store.write_text("no directory")
    with pytest.raises(InvalidArgumentError, match=r"root is .*, a file, expected a directory"):
        serve()


def test_a_bound_on_what_waits_to_be_written(serve: Factory, trtllm: ModuleType) -> None:
    serve.set(max_pending_bytes=1)
    engine = serve()
    worker = engine.ranks[0].worker
    worker._saver._writer._pending_bytes = 2
    engine.ask(prompt(100, 25))
    engine.close()
    assert trtllm.logger.warnings() == [
        "warning: KVX did not save request 1: 2 bytes wait to be written, expected at most 1, as "
        "max_pending_bytes says"
    ]


def test_a_plan_that_stays_bound_is_done_once(serve: Factory) -> None:
    """Main leaves the last one bound in a step that builds none."""
    tokens = prompt(100, 26)
    saved(serve, tokens)
    engine = serve()
    engine.ask(tokens + prompt(30, 30))
    assert engine.ranks[0].worker._saver._writer.threads.wait(60)  # all files are there
    for path in serve.store.rglob("*.safetensors"):
        path.unlink()
    (rank,) = engine.ranks
    assert rank.worker._metadata.saves == rank.worker._metadata.loads == []
    rank.raw.fill_(SENTINEL)  # the blocks are another request's
    rank.worker.start_load_kv(None)
    rank.worker.wait_for_save(None)
    engine.close()
    assert (rank.raw == SENTINEL).all()
    assert not list(serve.store.rglob("*.safetensors"))


def test_a_pool_whose_entries_no_lookup_would_find(
    serve: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvx_adapters.tensorrt_llm_plugin.model import Model

    monkeypatch.setattr(Model, "heads_of", lambda self, rank: (0, 1))  # of two ranks
    with pytest.raises(UnsupportedError, match="would store what it never finds: nobody would"):
        serve(args={"tensor_parallel_size": 2})
    assert not list(serve.store.rglob("*.safetensors"))


def test_a_step_before_any_plan(serve: Factory) -> None:
    """Warm-up."""
    worker = serve().ranks[0].worker
    worker.start_load_kv(None)
    worker.wait_for_save(None)


def test_a_request_that_starts_anew(serve: Factory) -> None:
    tokens = prompt(100, 27)
    saved(serve, tokens)
    scheduler = serve().scheduler
    request = LlmRequest(7, tokens)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (96, False)
    scheduler.request_reset(request)
    data = fake.RequestDataOfMain(7, tokens, list(range(7)), 0, 100)
    plan = scheduler.build_connector_meta(fake.SchedulerOutput([data]))
    assert (plan.loads, plan.saves) == ([], [])
    assert scheduler.get_num_new_matched_tokens(request, 0) == (96, False)


def test_blocks_that_a_promise_does_not_have(serve: Factory) -> None:
    tokens = prompt(100, 28)
    saved(serve, tokens)
    scheduler = serve().scheduler
    scheduler.get_num_new_matched_tokens(LlmRequest(7, tokens), 0)
    data = fake.RequestDataOfMain(7, tokens, [1, 2, 3], 0, 4)
    with pytest.raises(
        InvalidArgumentError,
        match="request 7 has 3 blocks, expected at least 6 for the 96 tokens that it was promised",
    ):
        scheduler.build_connector_meta(fake.SchedulerOutput([data]))


def test_blocks_that_the_pool_does_not_have(serve: Factory) -> None:
    from kvx_adapters.tensorrt_llm_plugin.steps import Load, StepPlan

    worker = serve().ranks[0].worker
    for wrong in (-1, 40):
        blocks = np.zeros((2, 3, 2, 2 * 16 * 10 * 4), np.uint8)
        worker.bind_connector_meta(StepPlan(loads=[Load(blocks, [3, wrong])]))
        with pytest.raises(
            OutOfRangeError, match=f"block_ids has {wrong}, expected one of the pool's 40 blocks"
        ):
            worker.start_load_kv(None)


def layout_of(engine: Executor, **changes: Any) -> fake.KvCacheLayout:
    """The pool of a rank as KVCacheManagerV2 describes it."""
    (rank,) = engine.ranks
    roles = ("key", "value")
    block_bytes = len(rank.raw) // engine.num_blocks
    buffers = [fake.KvCacheBufferRef(layer, role) for layer in range(3) for role in roles]
    region = fake.KvCacheRegion(
        rank.raw,
        block_bytes,
        block_bytes,
        engine.num_blocks,
        tuple(changes.get("buffers", buffers)),
    )
    group = fake.KvCacheLayerGroupLayout(
        0, (0, 1, 2), changes.get("window"), (region,), changes.get("replicated", ())
    )
    return fake.KvCacheLayout(16, (group,) * changes.get("groups", 1))


def test_the_layout_of_kv_cache_manager_v2(serve: Factory) -> None:
    tokens = prompt(100, 29)
    saved(serve, tokens)
    engine = serve()
    worker = engine.ranks[0].worker
    del worker._view, worker._blocks
    worker.register_kv_cache_layout(layout_of(engine))
    assert engine.ask(tokens).computed == 4


def test_a_pool_that_is_registered_again(serve: Factory) -> None:
    """The new pool is saved, by the threads that write what was copied from the old one."""
    tokens, engine = prompt(100, 30), serve()
    (rank,) = engine.ranks
    saver = rank.worker._saver
    rank.raw = rank.raw.clone()
    rank.pool = rank.raw.view(rank.pool.dtype).view(rank.pool.shape)
    rank.worker.register_kv_caches(rank.pool)
    assert rank.worker._saver is saver
    engine.ask(tokens)
    engine.close()
    assert serve().ask(tokens).computed == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 64},
        {"groups": 2},
        {"buffers": []},
        {
            "buffers": [
                fake.KvCacheBufferRef(layer, role)
                for role in ("key", "value")
                for layer in range(3)
            ]
        },
        {"replicated": (SimpleNamespace(buffers=()),)},
    ],
    ids=["window", "groups", "empty", "order", "replicated"],
)
def test_layouts_that_are_refused(serve: Factory, changes: dict[str, Any]) -> None:
    engine = serve()
    with pytest.raises(
        UnsupportedError,
        match=r"expected one region without a window, key and value of each of 3 layers\. Set "
        r"kv_cache_config\.use_kv_cache_manager_v2 to False",
    ):
        engine.ranks[0].worker.register_kv_cache_layout(layout_of(engine, **changes))


def test_weights_that_are_updated(serve: Factory, trtllm: ModuleType) -> None:
    """Nothing that others have stored is loaded any more, and nothing is stored for them."""
    tokens, more = prompt(100, 61), prompt(100, 62)
    saved(serve, tokens)
    engine = serve()
    half = engine.ask(prompt(100, 63), max_new_tokens=2)
    assert half.computed == 101
    loader = sys.modules["tensorrt_llm._torch.pyexecutor.model_loader"].ModelLoader()
    loader.reload(None, {}, allow_partial_loading=True)
    assert engine.ask(tokens).computed == 100
    assert engine.ask(more).computed == 100
    engine.close()
    assert any("the weights have changed" in line for line in trtllm.logger.warnings())
    assert serve().ask(more).computed == 100


def test_updates_of_weights_that_cannot_be_seen(
    serve: Factory, trtllm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that updates them elsewhere is told so, and shares; after an error nothing is."""
    place = sys.modules["tensorrt_llm._torch.pyexecutor.model_loader"]
    monkeypatch.delattr(place, "ModelLoader")
    tokens = prompt(100, 64)
    saved(serve, tokens)
    engine = serve()
    assert engine.ask(tokens).computed == 4
    assert {line for line in trtllm.logger.warnings() if "how TensorRT-LLM" in line} == {
        f"warning: KVX does not know how TensorRT-LLM {trtllm.__version__} updates weights. Start "
        "it anew if they change: what it has stored is of those that it has started with"
    }
    import_module(f"{fake.PLUGIN}.witness")._give_up(ValueError("as a test says"))
    assert engine.ask(tokens).computed == 100
    assert "warning: KVX shares nothing until the next start: as a test says" in (
        trtllm.logger.warnings()
    )


@pytest.mark.parametrize("when", ["promise", "plan", "lookup"])
def test_weights_that_are_updated_after_a_promise(
    serve: Factory, trtllm: ModuleType, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that the old weights have computed are not written: results would be wrong."""
    tokens = prompt(100, 61)
    saved(serve, tokens)
    engine = serve()
    loader = sys.modules["tensorrt_llm._torch.pyexecutor.model_loader"].ModelLoader()
    pool = engine.ranks[0].blocks.clone()
    if when == "lookup":  # while the scheduler reads what it will promise
        before = PrefixStore.load

        def load(*args: Any, **options: Any) -> int:
            loader.reload(None, {})
            return before(*args, **options)

        monkeypatch.setattr(PrefixStore, "load", load)
        assert engine.ask(tokens).computed == 100
        return
    name, owner, what = {
        "promise": ("build_connector_meta", engine.scheduler, r"request \d+"),
        "plan": ("start_load_kv", engine.ranks[0].worker, "the loads of this step"),
    }[when]
    call = getattr(owner, name)

    def late(*args: Any) -> Any:
        loader.reload(None, {})
        return call(*args)

    monkeypatch.setattr(owner, name, late)
    with pytest.raises(InvalidArgumentError, match=f"^{what}: the weights have changed since"):
        engine.ask(tokens)
    assert torch.equal(engine.ranks[0].blocks, pool)


def test_a_step_during_which_weights_are_updated_is_not_stored(
    serve: Factory, trtllm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens = serve(), prompt(100, 61)
    loader = sys.modules["tensorrt_llm._torch.pyexecutor.model_loader"].ModelLoader()
    worker = engine.ranks[0].worker
    call = worker.wait_for_save

    def late(*args: Any) -> Any:
        loader.reload(None, {})
        return call(*args)

    monkeypatch.setattr(worker, "wait_for_save", late)
    assert engine.ask(tokens).computed == 100
    engine.close()
    assert not list(serve.store.rglob("*.safetensors"))
