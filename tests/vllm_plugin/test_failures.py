"""Files that are damaged, or gone by the time they are read: never a wrong token."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vllm import needs_cpu_op
from tests.store_files import change_facts, tokens_of
from tests.vllm_plugin.conftest import Stock
from tests.vllm_plugin.engine import EngineProcess, connector, same_tokens
from tests.vllm_plugin.models import prompt

pytestmark = needs_cpu_op

LENGTH = 200  # a full chunk and a part of one, so each prompt has two files
NUM_NEW = 16


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def bit_flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def missing(path: Path) -> None:
    path.unlink()


# Each damage hits the first file of one prompt and the second file of another.
DAMAGES = [damage for damage in (truncated, empty, bit_flipped, garbage, missing) for _ in "12"]
DAMAGED = [prompt(LENGTH, seed=100 + i) for i in range(len(DAMAGES))]
SOUND, UNKNOWN = prompt(LENGTH, seed=200), prompt(LENGTH, seed=201)
FLIPPED = [i for i, damage in enumerate(DAMAGES) if damage is bit_flipped]

# Where vLLM shares blocks between requests, KVXConnector loads beside other requests' steps.
LOADS = pytest.mark.parametrize("prefix_caching", [False, True], ids=["sync", "async"])


@pytest.fixture(scope="module")
def filled(llama: Path, engines: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    config = connector(root, "kv_producer", save_generated=False)
    with engines.engine(llama, block_size=32, kv_transfer_config=config) as engine:
        engine.generate([*DAMAGED, SOUND], max_tokens=1)
    return root


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> Path:
    """A copy of the filled store, to be damaged."""
    return Path(shutil.copytree(filled, tmp_path / "store"))


def files_of(store: Path, tokens: list[int]) -> list[Path]:
    """The files of a prompt, in the order of its tokens."""
    found = {}
    for path in store.rglob("*.safetensors"):
        held = tokens_of(path)
        for start in (0, LENGTH - len(held)):
            if held == tokens[start : start + len(held)]:
                found[start] = path
    return [path for _, path in sorted(found.items())]


def damage(store: Path) -> None:
    files = [files_of(store, tokens) for tokens in DAMAGED]
    for i, (damage, (first, second)) in enumerate(zip(DAMAGES, files, strict=True)):
        damage(second if i % 2 else first)


@LOADS
def test_fail(
    prefix_caching: bool, store: Path, llama: Path, engines: EngineProcess, stock: Stock
) -> None:
    """A request fails, or its damage was noticed before it was promised anything."""
    prompts = [*DAMAGED, SOUND, UNKNOWN]
    expected = stock(llama, prompts, NUM_NEW)
    damage(store)
    config = connector(store, "kv_consumer", "fail")
    with engines.engine(
        llama, block_size=64, enable_prefix_caching=prefix_caching, kv_transfer_config=config
    ) as engine:
        num_free_blocks = engine.num_free_blocks()
        outputs = engine.generate(prompts, max_tokens=NUM_NEW)
        failed = [i for i, output in enumerate(outputs) if output.finish_reason == "error"]
        assert set(FLIPPED) <= set(failed) < set(range(len(DAMAGED)))
        good = [i for i in range(len(prompts)) if i not in failed]
        same_tokens([outputs[i] for i in good], [expected[i] for i in good])
        assert engine.num_free_blocks() == num_free_blocks
        same_tokens(engine.generate([UNKNOWN, SOUND], max_tokens=NUM_NEW), expected[:-3:-1])


@LOADS
def test_the_same_model_with_other_facts(
    prefix_caching: bool, store: Path, llama: Path, engines: EngineProcess, stock: Stock
) -> None:
    """Rows of the right shape and model that mean something else: computed, and said in the log."""
    others: list[dict[str, Any]] = [
        {"rotary": "interleaved"},
        {"rotary_dim": 32},
        {"rope_applied": False},
        {"window": 48},
        {"window": None},
    ]
    prompts = [*DAMAGED[: len(others)], SOUND]
    expected = stock(llama, prompts, NUM_NEW)
    for tokens, facts in zip(prompts, others, strict=False):
        for path in files_of(store, tokens):
            change_facts(path, **facts)
    files = sorted(store.rglob("*.safetensors"))
    said = engines.log.stat().st_size
    with engines.engine(
        llama,
        block_size=64,
        enable_prefix_caching=prefix_caching,
        kv_transfer_config=connector(store, "kv_consumer", "recompute"),
    ) as engine:
        outputs = engine.generate(prompts, max_tokens=NUM_NEW)
    same_tokens(outputs, expected)
    for output in outputs[:-1]:
        assert output.num_scheduled_tokens >= LENGTH + NUM_NEW - 1
    assert outputs[-1].num_scheduled_tokens == NUM_NEW
    assert sorted(store.rglob("*.safetensors")) == files  # of use to somebody else
    log = engines.log.read_text()[said:]
    assert log.count("KVX could not load request") == len(others)
    for sentence in (
        "rotary is 'interleaved' at the source",
        "rotary_dim is 32 at the source",
        "rope_applied is False at the source",
        "window is 48 at the source",
        "window is 0 at the destination",
    ):
        assert re.search(rf"^.*WARNING.*KVX could not load request .*: {sentence} ", log, re.M)


@LOADS
def test_aborted_after_its_load_has_failed(
    prefix_caching: bool,
    filled: Path,
    llama: Path,
    engines: EngineProcess,
    stock: Stock,
    tmp_path: Path,
) -> None:
    """Nobody may find its blocks in vLLM's prefix cache: they were never written."""
    expected = stock(llama, [SOUND], NUM_NEW)
    store = tmp_path / "store"
    shutil.copytree(filled, store)
    config = connector(store, "kv_consumer", "recompute")
    with engines.engine(
        llama, block_size=64, enable_prefix_caching=prefix_caching, kv_transfer_config=config
    ) as engine:
        engine.call("on_next_load", delete=str(store))
        (output,) = engine.generate([SOUND], abort_at={0: 1})
        assert output.finish_reason == "abort"
        same_tokens(engine.generate([SOUND], max_tokens=NUM_NEW), expected)
