"""vLLM's own scheduler with the scheduler's half of KVXConnector: its plan for each step.

The test takes the place of the model: it gives the tokens that a step has sampled.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    Layout,
    ModelRecord,
    UnsupportedError,
    describe,
)
from tests.vllm_plugin.models import prompt
from tests.vllm_plugin.schedulers import BLOCK_SIZE, CHUNK, NEW, STORED, Steps
from tests.ways_out import WayOut, leads_out

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")

LAYERS, HEADS, DIM = 3, 2, 64


@pytest.fixture
def environment() -> Iterator[None]:
    """vLLM's configuration writes to os.environ, down to LD_PRELOAD."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def start(llama: Path, tmp_path: Path, environment: None) -> Any:
    """Makes Steps: extra settings of the connector, options of the engine."""

    def start(
        extra: Mapping[str, Any] | None = None,
        policy: str = "recompute",
        role: str = "kv_both",
        num_blocks: int = 64,
        **options: Any,
    ) -> Steps:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        transfer = KVTransferConfig(
            kv_connector="KVXConnector",
            kv_connector_module_path="kvx_adapters.vllm_plugin.connector",
            kv_role=role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config={
                "path": str(tmp_path / "store"),
                "chunk_tokens": CHUNK,
                "fingerprint": "f",
                **(extra or {}),
            },
        )
        config = EngineArgs(
            model=str(llama),
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            max_model_len=512,
            kv_transfer_config=transfer,
            **{
                "max_num_batched_tokens": 512,
                "max_num_seqs": 8,
                "enable_prefix_caching": False,  # with it, all loads are beside other steps
                **options,
            },
        ).create_engine_config()
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32
        )
        group = KVCacheGroupSpec([f"model.layers.{i}" for i in range(LAYERS)], spec)
        config.cache_config.num_gpu_blocks = num_blocks
        cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group])
        return Steps(
            Scheduler(
                vllm_config=config,
                kv_cache_config=cache,
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK_SIZE,
                hash_block_size=BLOCK_SIZE,
            )
        )

    return start


@pytest.fixture
def stored(tmp_path: Path) -> None:
    """STORED is in the store."""
    fill(tmp_path / "store", STORED)


# What the engines here serve.
RECORD = ModelRecord(
    files="f",
    architecture="llama",
    rope={"": {"rope_type": "default", "rope_theta": 10000.0}},
)


def fill(path: Path, tokens: list[int], salt: str = "") -> None:
    from kvx_core.snapshot import Precision, Section
    from kvx_core.stores.blobs import Directory
    from kvx_core.stores.prefix import PrefixStore

    store = PrefixStore(
        Directory(path),
        fingerprint=RECORD.fingerprint,
        num_layers=LAYERS,
        total_kv_heads=HEADS,
        precision=Precision.of("float32"),
        chunk_tokens=CHUNK,
        salt=salt,
    )
    tensors = [torch.randn(1, HEADS, len(tokens), DIM) for _ in range(2 * LAYERS)]
    descs = [describe(tensor, Layout.BLOCK_HND) for tensor in tensors]
    layers = tuple(map(CacheDesc.from_kv, descs[:LAYERS], descs[LAYERS:]))
    facts = CacheFacts(num_layers=LAYERS, total_kv_heads=HEADS, first_kv_head=0)
    view = CacheView(layers=layers, facts=facts, dense=True)
    section = Section(tuple(range(LAYERS)), view, None)
    for start, stop in store.spans(len(tokens), 0):
        snapshot = store.capture(tokens, start, stop, [section])
        assert snapshot is not None
        store.commit(snapshot)


def saves(plan: Any) -> list[tuple[str, int, int]]:
    return [(save.request_id, save.start, save.stop) for save in plan.saves]


def loads(plan: Any) -> list[tuple[str, int, int]]:
    return [(load.request_id, load.start, load.stop) for load in plan.loads]


# ---- what is loaded ----


def test_all_but_the_last_token_is_loaded(start: Any, stored: None) -> None:
    steps = start()
    steps.add("a", STORED[:101])
    plan = steps.plan()
    assert loads(plan) == [("a", 0, 100)]
    assert plan.loads[0].block_ids == (steps.blocks("a"),)
    assert len(steps.blocks("a")) == 4
    assert plan.loads[0].wait
    assert not plan.is_idle


def test_what_the_engine_has_is_not_loaded(start: Any, stored: None) -> None:
    steps = start(enable_prefix_caching=True)
    steps.add("a", STORED[:70])
    steps.plan()
    steps.run(finished_recving={"a"})
    steps.plan()
    steps.run()
    steps.add("b", STORED[:150])
    plan = steps.plan()
    assert loads(plan) == [("b", 64, 149)]
    assert not plan.loads[0].wait


def test_a_few_tokens_are_not_worth_a_load(start: Any, stored: None) -> None:
    steps = start()
    steps.add("a", STORED[:8])
    assert loads(steps.plan()) == []
    steps.run()
    steps.add("b", STORED[:9])
    assert loads(steps.plan()) == [("b", 0, 8)]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_roles(role: str, start: Any, stored: None) -> None:
    steps = start(role=role)
    steps.add("a", STORED[:150] + prompt(50, seed=2), max_tokens=2)
    plan = steps.plan()
    assert bool(plan.loads) == (role == "kv_consumer")
    steps.run()
    plans = [plan, steps.plan()]
    steps.run()
    plans.append(steps.plan())
    assert any(plan.saves for plan in plans) == (role == "kv_producer")


def test_beside_other_steps(start: Any, stored: None) -> None:
    """The request waits until its load is over, and runs a step later."""
    steps = start({"async_load": True})
    steps.add("a", STORED[:101])
    plan = steps.plan()
    assert loads(plan) == [("a", 0, 100)]
    assert not plan.loads[0].wait
    assert plan.is_idle
    steps.run()
    assert loads(steps.plan()) == []
    steps.run(finished_recving={"a"})
    steps.plan()
    assert steps.requests["a"].num_computed_tokens == 101
    steps.run()
    assert list(steps.requests["a"].output_token_ids) == [NEW]


# ---- what only vLLM can compute ----


def test_lora(start: Any, stored: None) -> None:
    from vllm.lora.request import LoRARequest

    steps = start()
    steps.add("a", STORED, max_tokens=1, lora_request=LoRARequest("adapter", 1, "/adapter"))
    for _ in range(2):
        plan = steps.plan()
        assert (plan.loads, plan.saves) == ([], [])
        steps.run()


def test_an_adapter_of_other_files(start: Any, stored: None) -> None:
    """vLLM may load the request's path in the step that computes it."""
    from vllm.lora.request import LoRARequest

    from kvx_adapters.vllm_plugin.identity import AdapterFiles
    from kvx_core.connector.adapters import Adapter, AdapterReport

    steps = start()
    half = steps.scheduler.connector._scheduler
    files = AdapterFiles("/adapter", "/nowhere", (), "")
    known = {1: Adapter(1, "digest")}
    half.adapters.take({0: AdapterReport(0, known, {1: files})})
    request = steps.add("a", STORED, lora_request=LoRARequest("adapter", 1, "/adapter"))
    assert half.loaded_adapter(request) == known[1]
    assert not half._has_adapters_files(request)  # there are none


def asked(steps: Any, request: Any) -> Any:
    """What the connector answers once the items of a request are digested."""
    end = time.monotonic() + 10
    while (answer := steps.ask(request))[0] is None and time.monotonic() < end:
        time.sleep(0.001)
    return answer


def test_images(start: Any, stored: None) -> None:
    """The text before an image is shared, if it is known what the image is."""
    steps = start()
    request = steps.add("a", STORED)
    for unknown in (image(60, 9), image(60, 3, data=1), image(60, 9, data=1, mm_hash="of LoRA")):
        request.request_id += "a"
        request.mm_features = [unknown]
        assert asked(steps, request) == (0, False)
    request.mm_features = []
    assert steps.ask(request) == (199, False)
    request.request_id += "a"
    request.mm_features = [image(60, 9, data=1)]
    assert asked(steps, request) == (60, False)


def test_two_images_of_one_name(start: Any, stored: None) -> None:
    """vLLM may take what it has encoded of one for the other."""
    steps = start()
    request = steps.add("a", STORED)
    for data, expected in ((1, 60), (1, 60), (2, 0), (1, 0)):
        request.request_id += "a"
        request.mm_features = [image(60, 9, data=data)]
        assert asked(steps, request) == (expected, False)


def test_images_after_new_weights(start: Any, stored: None) -> None:
    """What encoders have made of images with the old weights may still be there."""
    steps = start()
    request = steps.add("a", STORED)
    request.mm_features = [image(60, 9, data=1)]
    weights = steps.scheduler.connector._weights
    weights.encoders = -1
    assert asked(steps, request) == (0, False)
    weights.encoders = weights.generation
    assert asked(steps, request) == (60, False)


def test_embeddings(start: Any, stored: None) -> None:
    steps = start()
    request = steps.add("a", STORED)
    request.prompt_embeds = torch.zeros(200, 256)
    assert asked(steps, request) == (0, False)


def test_prompt_logprobs(start: Any, stored: None) -> None:
    """They need the logits of every token of the prompt; its cache is as good as any."""
    steps = start()
    steps.add("a", STORED[:100] + prompt(28, seed=3), sampling={"prompt_logprobs": 1})
    plan = steps.plan()
    assert loads(plan) == []
    steps.run()
    assert saves(steps.plan()) == [("a", 0, 64)]  # a decode step saves one chunk
    steps.run()
    assert saves(steps.plan()) == [("a", 64, 128)]


def test_salt(start: Any, stored: None, tmp_path: Path) -> None:
    steps = start()
    steps.add("a", STORED, cache_salt="secret")
    assert loads(steps.plan()) == []
    fill(tmp_path / "store", STORED, salt="secret")
    steps = start()
    steps.add("a", STORED, cache_salt="secret")
    assert loads(steps.plan()) == [("a", 0, 199)]


# ---- what is saved ----


def test_chunks_as_they_complete_and_the_prompt_to_its_end(start: Any) -> None:
    steps = start(role="kv_producer", max_num_batched_tokens=100)
    steps.add("a", prompt(230, seed=4), max_tokens=40)
    found = []
    for _ in range(3 + 39):
        found.append(saves(steps.plan()))
        steps.run()
    assert [plan for plan in found if plan] == [
        [("a", 0, 64)],  # 100 tokens computed
        [("a", 64, 192)],  # 200
        [("a", 192, 230)],  # the prompt
        [("a", 192, 256)],  # and its chunk is full
    ]
    assert found[0]
    assert found[1]
    assert found[2]
    # Ended with 230 + 40 tokens, of which the last was never computed.
    plan = steps.plan()
    assert saves(plan) == [("a", 256, 269)]
    assert plan.saves[0].final


def test_only_prompts(start: Any) -> None:
    steps = start({"save_generated": False}, role="kv_producer")
    steps.add("a", prompt(60, seed=4), max_tokens=20)
    found = []
    for _ in range(21):
        found += saves(steps.plan())
        steps.run()
    assert found == [("a", 0, 60)]


def test_a_start_tells_where_prefixes_go(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvx_adapters.vllm_plugin import connector

    told: list[str] = []
    monkeypatch.setattr(connector.logger, "info", lambda text, *args: told.append(text % args))
    start()
    (line,) = told
    assert line.startswith(f"KVX keeps prefixes in {tmp_path}/store: model ")
    assert re.search(rf", chunks of {CHUNK} tokens, at most [\d.]+ GB, free there: ", line)


def test_a_start_warns_of_a_store_without_a_limit(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvx_adapters.vllm_plugin import connector

    (tmp_path / "store").mkdir()
    config = f'{{"format": 3, "chunk_tokens": {CHUNK}}}'  # as earlier versions made it
    (tmp_path / "store/kvx-store.json").write_text(config)
    warned: list[str] = []
    monkeypatch.setattr(connector.logger, "warning", lambda text, *args: warned.append(text % args))
    start()
    (line,) = warned
    assert line.startswith(f"The KVX store {tmp_path}/store has no limit")


def test_blocks_stay_until_the_end_is_saved(start: Any) -> None:
    steps = start(role="kv_producer")
    num_free_blocks = steps.num_free_blocks()
    steps.add("a", prompt(60, seed=4), max_tokens=20)
    for _ in range(20):
        steps.plan()
        steps.run()
    assert steps.requests["a"].is_finished()
    assert steps.num_free_blocks() == num_free_blocks - 3
    plan = steps.plan()
    assert saves(plan) == [("a", 64, 79)]
    assert plan.is_idle
    steps.run(finished_sending={"a"})
    assert steps.num_free_blocks() == num_free_blocks
    assert not steps.scheduler.has_requests()


def test_rejected_drafts_are_not_saved(start: Any) -> None:
    """Tokens are the key of what is saved: a draft under its own name would be a wrong token."""
    from vllm.v1.outputs import DraftTokenIds

    steps = start(
        role="kv_producer",
        speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2},
    )
    request = steps.add("a", prompt(60, seed=4), max_tokens=20)
    saved = []
    while not request.is_finished():
        saved += steps.plan().saves
        drafts = len(request.spec_token_ids)
        steps.run({"a": [NEW, NEW] if drafts else [NEW]})  # one draft is accepted, three are not
        steps.scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[NEW, 9, 9, 9]]))
    saved += steps.plan().saves
    assert len(saved) == 3
    for save in saved:
        assert save.tokens.tolist() == list(request.all_token_ids)[save.start : save.stop]
    assert [save.stop for save in saved] == [60, 64, 79]


@pytest.mark.parametrize(
    ("window", "expected"),
    [(0, 128), (1, 16), (15, 16), (16, 16), (48, 32), (128, 128), (4096, 128)],
)
def test_chunks_of_a_new_store(window: int, expected: int) -> None:
    """At most the window, so that a full chunk is still there; never less than a store may say."""
    from kvx_adapters.vllm_plugin.stores import _new_chunk_tokens

    assert _new_chunk_tokens(window) == expected


@pytest.mark.parametrize(
    ("role", "window", "hybrid", "by_request", "expected"),
    [
        ("kv_both", 0, False, True, []),
        ("kv_both", CHUNK, True, True, []),
        ("kv_both", CHUNK - 1, False, True, [f"chunk_tokens is {CHUNK}, expected at most the"]),
        ("kv_producer", 1, True, False, [f"chunk_tokens is {CHUNK}, expected at most the"]),
        ("kv_consumer", CHUNK - 1, False, False, []),
        ("kv_consumer", 0, True, False, ["KVX loads nothing: with several KV cache groups"]),
        ("kv_both", 0, True, False, ["KVX loads nothing: with several KV cache groups"]),
    ],
)
def test_what_an_engine_with_windows_and_groups_is_told(
    role: str,
    window: int,
    hybrid: bool,
    by_request: bool,
    expected: list[str],
    start: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """by_request: vLLM, since 0.30, can be told which request's load has failed."""
    from kvx_adapters.vllm_plugin import connector

    warned: list[str] = []
    steps = start(role=role)
    monkeypatch.setattr(connector.logger, "warning", lambda text, *args: warned.append(text % args))
    monkeypatch.setattr(connector, "_BY_REQUEST", by_request)
    half = steps.scheduler.connector._new_scheduler(hybrid, window)
    half.lookups.shutdown()
    assert len(warned) == len(expected)
    assert all(map(str.startswith, warned, expected))
    assert half.produces == (role != "kv_consumer")
    assert half.consumes == (role != "kv_producer" and (by_request or not hybrid))
    assert half.asynchronous == (hybrid or window > 0)
    assert half.window == window


# ---- requests that end early, or start again ----


def test_preempted_requests_start_again_with_other_blocks(start: Any, stored: None) -> None:
    steps = start(enable_prefix_caching=True)
    steps.add("a", STORED[:100])
    steps.plan()
    steps.run(finished_recving={"a"})
    for _ in range(2):
        steps.plan()
        steps.run()
    steps.scheduler.reset_prefix_cache(reset_running_requests=True)
    steps.add("b", prompt(64, seed=6))  # may take blocks that were a's
    plan = steps.plan()
    assert loads(plan) == [("a", 0, 100)]  # with what it has said so far, it is longer than that
    assert plan.loads[0].block_ids == (steps.blocks("a"),)
    held = steps.blocks("a") + steps.blocks("b")
    assert len(set(held)) == len(held)
    steps.run(finished_recving={"a"})
    # What is saved from now on lies in the new blocks.
    while not (found := [save for save in steps.plan().saves if save.request_id == "a"]):
        steps.run()
    assert found[0].block_ids == (steps.blocks("a"),)


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_STOPPED"])
def test_nothing_of_an_aborted_request_is_saved(status: str, start: Any) -> None:
    """Of one that has stopped, the tokens after its prompt and the last full chunk are."""
    from vllm.v1.request import RequestStatus

    steps = start(role="kv_producer")
    num_free_blocks = steps.num_free_blocks()
    steps.add("a", prompt(60, seed=4))
    saved = []
    for _ in range(25):
        saved += saves(steps.plan())
        steps.run()
    assert saved == [("a", 0, 60), ("a", 0, 64)]
    steps.scheduler.finish_requests(["a"], RequestStatus[status])
    aborted = status == "FINISHED_ABORTED"
    assert (steps.num_free_blocks() == num_free_blocks) == aborted
    assert saves(steps.plan()) == ([] if aborted else [("a", 64, 84)])


def test_aborted_while_it_loads(start: Any, stored: None) -> None:
    """The load writes to its blocks until it is over, so nobody else may have them."""
    from vllm.v1.request import RequestStatus

    steps = start({"async_load": True})
    num_free_blocks = steps.num_free_blocks()
    steps.add("a", STORED)
    steps.plan()
    steps.run()
    steps.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert steps.num_free_blocks() == num_free_blocks - 7
    steps.plan()
    steps.run(finished_recving={"a"})
    assert steps.num_free_blocks() == num_free_blocks
    assert not steps.scheduler.has_requests()


# ---- loads that fail ----


def test_nothing_is_saved_of_a_step_whose_load_failed(start: Any, stored: None) -> None:
    """Its forward pass has read what was not loaded. What is computed again is saved, and so is
    what could not be loaded; whose blocks it lay in is not known, so it may be there.
    """
    steps = start()
    unknown = prompt(100, seed=5)
    steps.add("a", STORED[:130] + unknown)
    steps.add("b", STORED[:130] + unknown[::-1])
    plan = steps.plan()
    assert loads(plan) == [("a", 0, 130), ("b", 0, 130)]
    assert saves(plan) == []
    steps.run(invalid_block_ids={steps.blocks("a")[0]})
    plan = steps.plan()
    assert loads(plan) == []
    assert saves(plan) == [("b", 0, 230)]  # as many tokens as the step computes of "a"
    for span in ((0, 64), (64, 128), (128, 192), (192, 230)):
        steps.run()
        assert saves(steps.plan()) == [("a", *span)]


def test_a_load_that_failed_is_not_tried_again(start: Any, stored: None) -> None:
    steps = start({"async_load": True})
    request = steps.add("a", STORED)
    assert loads(steps.plan()) == [("a", 0, 199)]
    steps.run()
    steps.plan()
    steps.run(finished_recving={"a"}, failed_recving={"a"})
    assert loads(steps.plan()) == []
    assert request.num_computed_tokens == 200
    steps.run()
    assert list(request.output_token_ids) == [NEW]
    # Another request may try: the file may be whole again.
    steps.add("b", STORED)
    assert loads(steps.plan()) == [("b", 0, 199)]


@pytest.mark.parametrize("async_load", [False, True], ids=["sync", "async"])
def test_a_request_that_failed_leaves_nothing(async_load: bool, start: Any, stored: None) -> None:
    steps = start({"async_load": async_load}, policy="fail")
    num_free_blocks = steps.num_free_blocks()
    request = steps.add("a", STORED)
    plan = steps.plan()
    if async_load:
        steps.run(finished_recving={"a"}, failed_recving={"a"})
    else:
        steps.run(invalid_block_ids=set(plan.loads[0].block_ids[0]))
    assert request.status.name == "FINISHED_ERROR"
    plan = steps.plan()
    assert (saves(plan), loads(plan)) == ([], [])
    steps.run()
    assert steps.num_free_blocks() == num_free_blocks
    assert not steps.scheduler.has_requests()


def test_aborted_before_its_load_has_failed(start: Any, stored: None) -> None:
    """A request of that name may come again, and nothing is remembered of this one."""
    from vllm.v1.request import RequestStatus

    steps = start({"async_load": True})
    steps.add("a", STORED)
    steps.plan()
    steps.run()
    steps.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    steps.plan()
    steps.run(finished_recving={"a"}, failed_recving={"a"})
    steps.add("a", STORED)
    assert loads(steps.plan()) == [("a", 0, 199)]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_a_store_that_appears_and_is_another_one(role: str, start: Any, tmp_path: Path) -> None:
    """Requests are computed, and the engine goes on."""
    root = tmp_path / "disk"
    (root / "store").mkdir(parents=True)
    (root / "store/.tmp").touch()  # not a folder: nothing can be put there yet
    steps = start({"path": str(root / "store"), "chunk_tokens": 32}, role=role)
    (root / "store/.tmp").unlink()
    fill(root / "store", STORED)  # chunks of 64 tokens
    steps.add("a", STORED, max_tokens=20)
    assert loads(steps.plan()) == []
    for _ in range(20):
        steps.run()
        steps.plan()
    assert steps.requests["a"].is_finished()


# ---- the engine changes ----


def reports(steps: Steps) -> dict[str, Any]:
    """What the only rank says after a step."""
    from kvx_adapters.vllm_plugin.steps import RankReports
    from kvx_core.connector.weights import Report

    weights = steps.scheduler.connector._weights
    seen = steps._output.kv_connector_metadata.generation
    report = Report(seen, weights.generation, weights.is_changing, weights.origin)
    return {"kv_connector_worker_meta": RankReports({0: report})}


def test_a_reset_keeps_what_is_stored(start: Any, stored: None) -> None:
    steps = start(enable_prefix_caching=True)
    assert steps.scheduler.reset_prefix_cache(reset_connector=True)
    steps.add("a", STORED)
    assert loads(steps.plan()) == [("a", 0, 199)]


def test_a_reset_counts_if_no_request_has_blocks(start: Any) -> None:
    """Else vLLM keeps blocks, of the weights before."""
    from vllm.v1.request import RequestStatus

    steps = start(enable_prefix_caching=True)
    weights = steps.scheduler.connector._weights
    steps.add("a", prompt(60, seed=4))
    steps.plan()
    assert not steps.scheduler.reset_prefix_cache()
    assert weights.num_resets == 0
    steps.run()
    steps.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert steps.scheduler.reset_prefix_cache()
    assert weights.num_resets == 1


def test_new_weights_share_nothing_with_what_was_stored(start: Any, stored: None) -> None:
    steps = start(enable_prefix_caching=True)
    with steps.scheduler.connector._weights.change():
        pass
    assert steps.scheduler.reset_prefix_cache()
    steps.add("a", STORED)
    plan = steps.plan()  # asks again until lookup_seconds are over: no rank has reported
    assert (plan.stamp, loads(plan), saves(plan)) == (None, [], [])
    steps.run(**reports(steps))
    steps.add("b", STORED)
    plan = steps.plan()
    assert plan.stamp is not None
    assert loads(plan) == []
    assert {save.request_id for save in plan.saves} <= {"b"}  # "a" began with unknown weights


def test_what_was_half_computed_with_other_weights_is_not_saved(start: Any) -> None:
    steps = start(role="kv_producer")
    steps.add("a", prompt(60, seed=4), max_tokens=20)
    assert saves(steps.plan()) == [("a", 0, 60)]
    steps.run()
    with steps.scheduler.connector._weights.change():
        pass
    num_free_blocks = steps.num_free_blocks()
    for _ in range(19):
        assert saves(steps.plan()) == []
        steps.run(**reports(steps))
    assert steps.requests["a"].is_finished()
    assert steps.num_free_blocks() > num_free_blocks  # nothing is waited for
    steps.add("b", prompt(60, seed=4), max_tokens=2)
    (save,) = steps.plan().saves
    assert save.scope.weights.startswith("random:")  # apart from what others find


def image(offset: int, num_tokens: int, data: int | None = None, mm_hash: str | None = None) -> Any:
    """data: the number of bytes that the model takes; None: vLLM does not hold them"""
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    taken = MultiModalKwargsItem.dummy(data or 1)
    taken["dummy"].data.zero_()
    return MultiModalFeatureSpec(
        data=None if data is None else taken,
        modality="image",
        identifier="an image",
        mm_position=PlaceholderRange(offset=offset, length=num_tokens),
        mm_hash=mm_hash,
    )


@pytest.mark.parametrize(
    ("has_image", "data"),
    [(False, None), (True, 1), (True, None)],
    ids=["text", "image", "unknown image"],
)
def test_a_session_that_gets_an_image(has_image: bool, data: int | None, start: Any) -> None:
    """The same ids with an image have other keys and values. Text goes on being saved, and so do
    images that are known.
    """
    steps = start(role="kv_producer", enable_prefix_caching=True)
    first, second = prompt(60, seed=4), prompt(100, seed=5)
    request = steps.add("s", first, max_tokens=1, resumable=True)
    saved = saves(steps.plan())
    assert saved == [("s", 0, 60)]
    steps.run()
    assert request.status.name == "WAITING_FOR_STREAMING_REQ"
    # What the image's tokens stand for has been computed by an encoder, which is not there.
    steps.scheduler.encoder_cache_manager.can_allocate = lambda *arguments: True
    steps.scheduler.encoder_cache_manager.check_and_update_cache = lambda *arguments: True
    features = [image(0, 32, data)] if has_image else []
    is_unknown = has_image and data is None
    more = steps.request("s", second, max_tokens=2, resumable=True, mm_features=features)
    steps.scheduler.add_request(more)
    end = time.monotonic() + 10
    while request.num_computed_tokens < 160 and time.monotonic() < end:
        plan = steps.plan()
        for save in plan.saves:
            items = save.tokens[max(0, 60 - save.start) : max(0, 92 - save.start)] < 0
            assert items.all() == has_image or not items.size
        saved += saves(plan)
        steps.run()
    assert request.num_computed_tokens >= 160
    assert (saved == [("s", 0, 60)]) == is_unknown
    connector = steps.scheduler.connector
    assert ("s" in connector._scheduler._told) == is_unknown  # counted as not shared
    assert (connector.to_hand_over(request) is None) == is_unknown
    assert connector.request_finished(request, steps.blocks("s"))[0] in (False, not is_unknown)


def test_a_request_that_reads_no_cache_loads_nothing(start: Any, stored: None) -> None:
    steps = start()
    request = steps.add("a", STORED, sampling={"skip_reading_prefix_cache": True})
    assert steps.scheduler.connector.get_num_new_matched_tokens(request, 0) == (0, False)


def test_requests_that_are_not_shared_are_counted_by_reason(start: Any) -> None:
    from types import SimpleNamespace

    from kvx_adapters.vllm_plugin.scheduler import _computes_all

    steps = start(enable_prefix_caching=True)
    half = steps.scheduler.connector._scheduler
    plain = {
        "mm_features": [],
        "lora_request": None,
        "prompt_embeds": None,
        "prompt_token_ids": [1],
        "sampling_params": SimpleNamespace(prompt_logprobs=None),
        "all_token_ids": [1],
        "num_prompt_tokens": 1,
        "cache_salt": None,
    }
    changes: list[dict[str, Any]] = [
        {},
        {"mm_features": [image(0, 1)]},
        {"lora_request": SimpleNamespace(lora_int_id=1, lora_name="adapter")},
        {"prompt_embeds": torch.zeros(1, 8)},
        {"prompt_token_ids": None},
        {"sampling_params": None},
    ]
    for number, change in enumerate(changes):
        request = SimpleNamespace(request_id=str(number), **plain | change)
        for _ in range(2):  # a request is counted once
            half.blocks_allocated(request, ([1],), 0)
    assert half.take_unshared() == {"images": 1, "lora": 1, "embeddings": 2, "pooling": 1}
    logits = SimpleNamespace(prompt_logprobs=1)
    for skips, change in ((None, {"sampling_params": logits}), (True, {}), (False, {})):
        request = SimpleNamespace(request_id="s", **plain | change)
        if skips is not None:  # not every version has the field
            request.skip_reading_prefix_cache = skips
        assert _computes_all(request) is (skips is not False)
    with half.epochs.weights.change():
        half.blocks_allocated(SimpleNamespace(request_id="w", **plain), ([1],), 0)
    assert half.take_unshared() == {"weights": 1}


def test_a_store_that_the_group_may_read(start: Any, tmp_path: Path) -> None:
    start(extra={"group": "read"})
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o2750
    assert stat.S_IMODE((tmp_path / "store" / "kvx-store.json").stat().st_mode) == 0o640


def test_layers_are_not_copied_where_they_are_computed_in_parts(start: Any) -> None:
    from types import SimpleNamespace

    from kvx_adapters.vllm_plugin.settings import Settings, check_engine

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_dbo=True),
        cache_config=SimpleNamespace(),
        attention_config=SimpleNamespace(),
    )
    plain = Settings(path="store")
    assert not plain.layerwise
    assert not plain.async_load
    check_engine(config, plain)
    with pytest.raises(UnsupportedError, match=r"layerwise is True with enable_dbo or ubatch_size"):
        check_engine(config, Settings(path="store", layerwise=True))


@pytest.mark.parametrize("name", ["diffusion_config", "use_non_causal"])
def test_tokens_that_see_those_after_them_are_refused(name: str) -> None:
    from types import SimpleNamespace

    from kvx_adapters.vllm_plugin.settings import Settings, check_engine

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(),
        attention_config=SimpleNamespace(use_non_causal=name == "use_non_causal"),
        diffusion_config="a canvas" if name == "diffusion_config" else None,
    )
    with pytest.raises(
        UnsupportedError, match=f"{name} is .*the keys and values of a prefix depend"
    ):
        check_engine(config, Settings(path="store"))


@pytest.mark.parametrize("name", ["calculate_kv_scales", "kv_sharing_fast_prefill"])
def test_caches_that_are_not_what_they_are_called_are_refused(name: str) -> None:
    """vLLM computes scales in the first pass until 0.31."""
    from types import SimpleNamespace

    from kvx_adapters.vllm_plugin.settings import Settings, check_engine

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(**{name: True}),
        attention_config=SimpleNamespace(),
    )
    with pytest.raises(UnsupportedError, match=f"{name} is True, expected False"):
        check_engine(config, Settings(path="store"))
    setattr(config.cache_config, name, False)
    check_engine(config, Settings(path="store"))


@pytest.mark.parametrize("size", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_ranks_that_share_out_the_tokens_of_a_block_are_refused(size: str) -> None:
    from types import SimpleNamespace

    from kvx_adapters.vllm_plugin.settings import Settings, check_engine

    def config(ranks: int) -> Any:
        parallel = SimpleNamespace(**{size: ranks})
        return SimpleNamespace(
            parallel_config=parallel,
            cache_config=SimpleNamespace(),
            attention_config=SimpleNamespace(use_non_causal=False),
            diffusion_config=None,
        )

    check_engine(config(1), Settings(path="store"))
    with pytest.raises(UnsupportedError) as raised:
        check_engine(config(2), Settings(path="store"))
    assert str(raised.value) == (
        f"{size} is 2, expected 1: its ranks share out the tokens of a block, which KVXConnector "
        "does not put together again"
    )


def test_a_path_is_all_that_settings_need() -> None:
    from types import SimpleNamespace

    from kvx_adapters.vllm_plugin.settings import Settings

    def read(**extra: str) -> Settings:
        return Settings.read(SimpleNamespace(kv_connector_extra_config=extra))

    leads_out(
        WayOut(
            "kv_connector_extra_config.tiers: ... KVXConnector needs at least {'path': "
            "'/the/stores/directory'}",
            read,
            lambda: read(path="/the/stores/directory"),
        )
    )


@pytest.mark.parametrize("ends", ["is aborted", "is preempted", "goes on"])
def test_blocks_that_another_connector_left_spoilt(
    ends: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM finds them in its prefix cache, where the request that loaded them has not computed them
    again. It answers wrongly then; what it has computed from them is not stored.
    """
    from vllm.v1.request import RequestStatus

    steps, tokens = start(enable_prefix_caching=True), prompt(150, seed=4)
    connector = steps.scheduler.connector
    connector._scheduler.others_fill = True

    def promise(request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 2 * BLOCK_SIZE, False

    ask, take = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
    monkeypatch.setattr(connector, "get_num_new_matched_tokens", promise)
    monkeypatch.setattr(connector, "update_state_after_alloc", lambda r, b, n: take(r, b, 0))
    a = steps.add("a", tokens)
    assert not steps.plan().saves
    steps.run(invalid_block_ids=set(steps.blocks("a")[:2]))
    assert a.num_computed_tokens == 0
    monkeypatch.setattr(connector, "get_num_new_matched_tokens", ask)
    if ends == "is aborted":
        steps.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
        del steps.requests["a"]
    elif ends == "is preempted":
        steps.scheduler.running.remove(a)
        steps.scheduler._preempt_request(a, 0.0)
    name = "a" if ends != "is aborted" else "b"
    request = a if name == "a" else steps.add("b", tokens)
    saves = []
    for _ in range(4):
        saves += steps.plan().saves
        steps.run()
    assert request.num_computed_tokens > len(tokens)
    assert bool(saves) is (ends == "goes on")
    c = steps.add("c", prompt(150, seed=5))
    saves = []
    for _ in range(4):
        saves += [save for save in steps.plan().saves if save.request_id == "c"]
        steps.run()
    assert saves, c.num_computed_tokens
