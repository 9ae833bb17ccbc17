"""Hybrid models in real engines: requests that go on from stored states as if they had computed
them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.vllm import needs_cpu_op
from tests.vllm_plugin.engine import Engine, EngineError, Output, connector, same_tokens
from tests.vllm_plugin.hybrid_engine import HybridProcess
from tests.vllm_plugin.hybrids import ENGINE, hybrid

pytestmark = [
    needs_cpu_op,
    pytest.mark.skipif(
        torch.cpu._is_amx_tile_supported(),
        reason="keys in bfloat16 are AMX tiles there, which the connector refuses",
    ),
]

OTHERS = ["FalconH1", "GraniteMoeHybrid", "NemotronH", "Qwen3Next"]
FAMILIES = ["Lfm2", *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)]
CACHED = ["Lfm2", pytest.param("Qwen3Next", marks=pytest.mark.slow)]  # vLLM caches their prefixes
BLOCKS = {"Lfm2": 128, "Qwen3Next": 256}  # tokens, of these
NUM_NEW = 12
REST = 20  # tokens of a prompt behind those that are stored
USUAL: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 1024,
    "num_gpu_blocks_override": None,
    "skip_tokenizer_init": True,
}

Model = Callable[[str], Path]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HybridProcess]:
    process = HybridProcess(tmp_path_factory.mktemp("log") / "hybrids.log")
    yield process
    process.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    @cache
    def saved(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        hybrid(folder, family)
        return folder

    return saved


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, 256), k=count)


def one_by_one(engine: Engine, prompts: list[list[int]], max_tokens: int = NUM_NEW) -> list[Output]:
    """Requests that run together are summed in another order."""
    return [engine.generate([prompt], max_tokens=max_tokens)[0] for prompt in prompts]


class Runs:
    """Engines of one model, with a store."""

    def __init__(self, engines: HybridProcess, family: str, directory: Path, store: Path) -> None:
        self.engines, self.directory, self.store = engines, directory, store
        self.options = USUAL | ENGINE[family]

    def stock(
        self, prompts: list[list[int]], cuts: Sequence[int | list[int]], num_new: int = NUM_NEW
    ) -> list[list[int]]:
        """Answers of vLLM alone, which ends steps after so many tokens of each prompt."""
        options = self.options | {"enable_prefix_caching": False}
        with self.engines.engine(self.directory, **options) as engine:
            found = []
            for prompt, cut in zip(prompts, cuts, strict=True):
                engine.call("cut_steps", ends=[cut] if isinstance(cut, int) else cut)
                found.append(engine.generate([prompt], max_tokens=num_new)[0].tokens)
        return found

    def engine(self, role: str = "kv_both", policy: str = "fail", **options: Any) -> Any:
        extra = options.pop("extra", {})
        config = connector(self.store, role, policy, **extra)
        return self.engines.engine(
            self.directory, kv_transfer_config=config, **self.options | options
        )

    def save(self, prompts: list[list[int]], **options: Any) -> None:
        with self.engine("kv_producer", disable_log_stats=False, **options) as engine:
            before = engine.metrics().get("vllm:kvx_dropped_saves_total", 0)
            one_by_one(engine, prompts, max_tokens=2)
            assert engine.metrics().get("vllm:kvx_dropped_saves_total", 0) == before


@pytest.fixture
def runs(engines: HybridProcess, model: Model, tmp_path: Path) -> Callable[[str], Runs]:
    return lambda family: Runs(engines, family, model(family), tmp_path / "store")


def lengths(seed: int) -> list[int]:
    """Of a block or two, and at any place in one."""
    count = int(os.environ.get("KVX_HYBRID_LENGTHS", "5"))
    shortest = 16  # fewer tokens are found if no other prompt was stored before
    return [512, 600, 699, *random.Random(seed).sample(range(shortest, 700), count)]


def ends(family: str, count: int, *, is_cached: bool) -> list[int]:
    """Where steps end of a prompt of `count` tokens that is stored and of REST more: where vLLM
    caches states, at the last end of a block before a prompt's end, too.

    is_cached: vLLM caches states in the engine that goes on from the stored ones
    """
    size = BLOCKS.get(family, 1)
    found = {count // size * size, count}
    if is_cached:
        found.add((count + REST) // size * size)
    return sorted(end for end in found if 0 < end < count + REST)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_goes_on_from_any_of_its_tokens(family: str, runs: Callable[[str], Runs]) -> None:
    """In a pool full of NaN, with blocks of other sizes, and where vLLM caches nothing itself."""
    here, counts = runs(family), lengths(1)
    prompts = [tokens(count + REST, seed=count) for count in counts]
    expected = {
        is_cached: here.stock(prompts, [ends(family, n, is_cached=is_cached) for n in counts])
        for is_cached in (True, False)
    }
    here.save([prompt[:count] for prompt, count in zip(prompts, counts, strict=True)])
    for options in (
        {},
        {"block_size": 128},
        {"enable_prefix_caching": False},
    ):
        with here.engine("kv_consumer", **options) as engine:
            engine.call("scribble")
            found = one_by_one(engine, prompts)
            same_tokens(found, expected[options.get("enable_prefix_caching", True)])
            assert [one.num_cached_tokens for one in found] == counts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_description_of_states_is_refused_at_start(
    family: str, runs: Callable[[str], Runs]
) -> None:
    here = runs(family)
    with here.engine():
        assert "has not tested its description" not in here.engines.log.read_text()
    here.engines.call("misdescribe")
    sentence = r"the convolution of \w+: vLLM wrote"
    with pytest.raises(EngineError, match=sentence), here.engine():
        pass
    here.engines.kill()  # vLLM keeps the connector of an engine that did not start


@pytest.mark.slow
def test_one_rank_and_two_share_states(runs: Callable[[str], Runs], tmp_path: Path) -> None:
    """Both ways, in float32: ranks sum in another order than one alone."""
    here, counts = runs("GraniteMoeHybrid"), [512, 37, 222]
    here.options["dtype"] = "float32"
    prompts = [tokens(count + REST, seed=count) for count in counts]
    expected = here.stock(prompts, counts)
    here.save([prompts[0][:512], prompts[1][:37]])
    process = HybridProcess(tmp_path / "log", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    there = Runs(process, "GraniteMoeHybrid", here.directory, here.store)
    there.options["dtype"] = "float32"
    try:
        with there.engine(tensor_parallel_size=2) as engine:
            found = one_by_one(engine, prompts[:2])
            one_by_one(engine, [prompts[2][:222]], max_tokens=2)
    finally:
        process.close()
    with here.engine("kv_consumer") as engine:
        found += one_by_one(engine, prompts[2:])
    same_tokens(found, expected)
    assert [one.num_cached_tokens for one in found] == counts


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Lfm2", "Qwen3Next"])
def test_prompts_of_several_steps(family: str, runs: Callable[[str], Runs]) -> None:
    """Their beginnings are saved, too, though their states are those of later tokens by then."""
    here, counts = runs(family), [512, 600, 999]
    prompts = [tokens(count + REST, seed=count) for count in counts]
    expected = here.stock(prompts, counts)
    first = [prompt[:count] for prompt, count in zip(prompts, counts, strict=True)]
    here.save(first, max_num_batched_tokens=256)
    with here.engine("kv_consumer") as engine:
        found = one_by_one(engine, prompts)
        same_tokens(found, expected)
        assert [one.num_cached_tokens for one in found] == counts


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Lfm2", *OTHERS])
def test_another_state_gives_another_answer(
    family: str, runs: Callable[[str], Runs], tmp_path: Path
) -> None:
    """So the test above would notice one."""
    here, counts = runs(family), [190, 320, 600]
    prompts = [tokens(count + REST, seed=count) for count in counts]
    expected = here.stock(prompts, counts)
    here.save([prompt[:count] for prompt, count in zip(prompts, counts, strict=True)])
    folder = tmp_path / "states"
    folder.mkdir()
    elsewhere = Runs(here.engines, family, here.directory, tmp_path / "another store")
    with elsewhere.engine("kv_producer", enable_prefix_caching=False) as engine:
        engine.call("keep_states", folder=str(folder))
        for more in (-1, 1):
            one_by_one(engine, [p[: c + more] for p, c in zip(prompts, counts, strict=True)], 2)
    ways = ["zero", "backwards", *(["transposed"] if family == "Qwen3Next" else [])]
    with here.engine("kv_consumer", enable_prefix_caching=False) as engine:
        for way in [*ways, "-1", "1"]:
            kept = str(folder) if way in ("-1", "1") else ""
            engine.call("change_loaded_states", how=way, folder=kept)
            found = one_by_one(engine, prompts)
            assert [one.num_cached_tokens for one in found] == counts
            assert any(one.tokens != right for one, right in zip(found, expected, strict=True)), way


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Lfm2", "Qwen3Next"])
def test_many_requests_in_a_used_pool(family: str, runs: Callable[[str], Runs]) -> None:
    """Forty, four at a time: each goes on from what it finds, and is stored."""
    here = runs(family)
    stored = [tokens(64 * count, seed=count) for count in range(1, 11)]
    prompts = [each + tokens(9 + i, seed=99 + i) for i in range(4) for each in stored]
    expected = here.stock(prompts, [len(prompt) - 9 - i // 10 for i, prompt in enumerate(prompts)])
    here.save(stored)
    with here.engine() as engine:
        engine.call("scribble")
        found = engine.generate(prompts, max_tokens=NUM_NEW)
        same_tokens(found, expected)
        assert min(one.num_cached_tokens for one in found) >= 64


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Lfm2", "Qwen3Next"])
def test_the_same_prompt_again(family: str, runs: Callable[[str], Runs]) -> None:
    """Loaded, then from vLLM's own blocks: what a load has left there is right. Its last token is
    computed, so it goes on from the last boundary of a block.
    """
    here, prompts = runs(family), [tokens(count, seed=count) for count in (700, 600, 530)]
    size = BLOCKS[family]
    cuts = [(len(prompt) - 1) // size * size for prompt in prompts]
    expected = here.stock(prompts, cuts)
    here.save(prompts)
    with here.engine("kv_consumer") as engine:
        for _ in range(2):
            found = one_by_one(engine, prompts)
            same_tokens(found, expected)
            assert [one.num_cached_tokens for one in found] == cuts


@pytest.mark.slow
@pytest.mark.parametrize(("length", "stops"), [(300, False), (300, True), (347, False)])
def test_a_conversation(length: int, stops: bool, runs: Callable[[str], Runs]) -> None:
    """The next question finds the answer before, also where its last chunk has few tokens."""
    here, question = runs("Lfm2"), tokens(length, seed=1)
    (answer,) = here.stock([question], [1024], num_new=40)
    sampling = {"stop_token_ids": answer[25:26]} if stops else {}
    with here.engine("kv_producer") as engine:
        (first,) = engine.generate([question], max_tokens=40, sampling=sampling)
    assert len(first.tokens) == (answer.index(answer[25]) + 1 if stops else 40)
    talk = question + first.tokens + tokens(30, seed=2)
    held = length + len(first.tokens) - 1
    expected = here.stock([talk], [held])
    with here.engine("kv_consumer") as engine:
        found = engine.generate([talk], max_tokens=NUM_NEW)
        same_tokens(found, expected)
        assert found[0].num_cached_tokens == held


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Lfm2", "Qwen3Next"])
def test_prompts_that_share_a_beginning(family: str, runs: Callable[[str], Runs]) -> None:
    """vLLM ends a step where the second parts from the first: that state serves the third."""
    here, shared = runs(family), tokens(600, seed=1)
    prompts = [shared + tokens(100, seed=i) for i in (2, 3, 4)]
    expected = here.stock(prompts[2:], [512])
    here.save(prompts[:2])
    with here.engine("kv_consumer") as engine:
        found = engine.generate(prompts[2:], max_tokens=NUM_NEW)
        same_tokens(found, expected)
        assert found[0].num_cached_tokens == 512


@pytest.mark.slow
def test_states_every_so_many_tokens(runs: Callable[[str], Runs]) -> None:
    """Where steps end, in prompts and answers."""
    here, prompt = runs("Lfm2"), tokens(600, seed=1)
    options = {"max_num_batched_tokens": 256, "extra": {"state_every_tokens": 50}}
    with here.engine("kv_producer", **options) as engine:
        (first,) = engine.generate([prompt], max_tokens=120)
    other = tokens(100, seed=2)
    prompts = [prompt[:300] + other, [*prompt, *first.tokens[:80], *other]]
    expected = here.stock(prompts, [256, 650])
    with here.engine("kv_consumer") as engine:
        found = one_by_one(engine, prompts)
        same_tokens(found, expected)
        assert [one.num_cached_tokens for one in found] == [256, 650]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Lfm2", "Qwen3Next", "GraniteMoeHybrid"])
@pytest.mark.parametrize("lost", ["all", "states"])
def test_loads_that_fail(family: str, lost: str, runs: Callable[[str], Runs]) -> None:
    """The request is computed, and the engine goes on."""
    here, prompts = runs(family), [tokens(count + REST, seed=count) for count in (600, 333)]
    expected = here.stock(prompts, [1024, 1024])
    here.save([prompt[:-REST] for prompt in prompts])
    with here.engine("kv_consumer", "recompute") as engine:
        engine.call("scribble")
        engine.call("on_next_load", delete=str(here.store), pattern=pattern_of(here.store, lost))
        found = one_by_one(engine, prompts)
        same_tokens(found, expected)


def pattern_of(store: Path, lost: str) -> str:
    """Of the files that have states, or of all."""
    if lost == "all":
        return "*.safetensors"
    (kind,) = {p.stem for p in store.rglob("kinds/*.json") if b"conv_state" in p.read_bytes()}
    return f"*.{kind}.safetensors"


@pytest.mark.slow
def test_requests_that_lose_their_blocks(runs: Callable[[str], Runs]) -> None:
    """They are computed again, or loaded again."""
    here, prompts = runs("Lfm2"), [tokens(count, seed=count) for count in (600, 333, 90)]
    expected = here.stock(prompts, [1024] * 3)
    for _ in range(2):
        with here.engine("kv_both", "recompute") as engine:
            engine.call("scribble")
            found = engine.generate(prompts, max_tokens=NUM_NEW, reset_at=(2, 5, 9))
            same_tokens(found, expected)


@pytest.mark.slow
def test_states_of_another_precision_are_not_found(runs: Callable[[str], Runs]) -> None:
    here, prompt = runs("Qwen3Next"), tokens(600, seed=1)
    here.save([prompt[:512]], mamba_ssm_cache_dtype="bfloat16")
    for dtype, count in (("float32", 0), ("bfloat16", 512)):
        with here.engine("kv_consumer", mamba_ssm_cache_dtype=dtype) as engine:
            (found,) = engine.generate([prompt])
        assert found.num_cached_tokens == count


@pytest.mark.slow
def test_an_engine_that_is_refused(runs: Callable[[str], Runs]) -> None:
    """test_states_of_groups.py has the others."""
    sentence = "layerwise is True, expected False"
    options = {"extra": {"layerwise": True}}
    with pytest.raises(EngineError, match=sentence), runs("Lfm2").engine(**options):
        pass


@pytest.mark.slow
def test_an_engine_with_another_connector_is_refused(
    engines: HybridProcess, model: Model, tmp_path: Path
) -> None:
    both = [connector(tmp_path / name) for name in ("one", "two")]
    config = connector(tmp_path) | {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": both},
    }
    options = USUAL | ENGINE["Lfm2"] | {"kv_transfer_config": config}
    with (
        pytest.raises(EngineError, match="beside another connector, expected it alone"),
        engines.engine(model("Lfm2"), **options),
    ):
        pass
