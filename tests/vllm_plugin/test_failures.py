"""Files that are damaged, or gone by the time they are read: never a wrong token."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.vllm_plugin.conftest import Stock
from tests.vllm_plugin.engine import EngineProcess, connector, same_tokens
from tests.vllm_plugin.models import prompt

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")

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
        with safe_open(path, "np") as file:
            held = file.get_tensor("tokens").tolist()
        for start in (0, LENGTH - len(held)):
            if held == tokens[start : start + len(held)]:
                found[start] = path
    return [path for _, path in sorted(found.items())]


def damage(store: Path) -> None:
    files = [files_of(store, tokens) for tokens in DAMAGED]
    for i, (damage, (first, second)) in enumerate(zip(DAMAGES, files, strict=True)):
        damage(second if i % 2 else first)


@pytest.mark.parametrize("async_load", [False, True], ids=["sync", "async"])
def test_recompute(
    async_load: bool, store: Path, llama: Path, engines: EngineProcess, stock: Stock
) -> None:
    """Also of what is written meanwhile, nothing is wrong."""
    prompts = [*DAMAGED, SOUND, UNKNOWN]
    expected = stock(llama, prompts, NUM_NEW)
    damage(store)
    config = connector(store, "kv_both", "recompute", async_load=async_load)
    for block_size in (64, 32):
        with engines.engine(llama, block_size=block_size, kv_transfer_config=config) as engine:
            num_free_blocks = engine.num_free_blocks()
            outputs = engine.generate(prompts, max_tokens=NUM_NEW)
            same_tokens(outputs, expected)
            assert outputs[-2].num_cached_tokens == LENGTH - 1
            assert engine.num_free_blocks() == num_free_blocks


@pytest.mark.parametrize("async_load", [False, True], ids=["sync", "async"])
def test_fail(
    async_load: bool, store: Path, llama: Path, engines: EngineProcess, stock: Stock
) -> None:
    """A request fails, or its damage was noticed before it was promised anything."""
    prompts = [*DAMAGED, SOUND, UNKNOWN]
    expected = stock(llama, prompts, NUM_NEW)
    damage(store)
    config = connector(store, "kv_consumer", "fail", async_load=async_load)
    with engines.engine(llama, block_size=64, kv_transfer_config=config) as engine:
        num_free_blocks = engine.num_free_blocks()
        outputs = engine.generate(prompts, max_tokens=NUM_NEW)
        failed = [i for i, output in enumerate(outputs) if output.finish_reason == "error"]
        assert set(FLIPPED) <= set(failed) < set(range(len(DAMAGED)))
        good = [i for i in range(len(prompts)) if i not in failed]
        same_tokens([outputs[i] for i in good], [expected[i] for i in good])
        assert engine.num_free_blocks() == num_free_blocks
        same_tokens(engine.generate([UNKNOWN, SOUND], max_tokens=NUM_NEW), expected[:-3:-1])


@pytest.mark.parametrize("async_load", [False, True], ids=["sync", "async"])
def test_gone_between_lookup_and_load(
    async_load: bool,
    filled: Path,
    llama: Path,
    engines: EngineProcess,
    stock: Stock,
    tmp_path: Path,
) -> None:
    """Also for a request that has found the other's blocks, which are about to be loaded."""
    prompts = [SOUND, SOUND[:150] + UNKNOWN[:50]]
    expected = stock(llama, prompts, NUM_NEW)
    for policy in ("recompute", "fail"):
        store = tmp_path / policy
        shutil.copytree(filled, store)
        config = connector(store, "kv_consumer", policy, async_load=async_load)
        with engines.engine(llama, block_size=64, kv_transfer_config=config) as engine:
            num_free_blocks = engine.num_free_blocks()
            engine.call("on_next_load", delete=str(store))
            outputs = engine.generate(prompts, max_tokens=NUM_NEW)
            if policy == "fail":
                assert outputs[0].finish_reason == "error"
            good = [i for i, output in enumerate(outputs) if output.finish_reason != "error"]
            assert policy == "fail" or good == [0, 1]
            same_tokens([outputs[i] for i in good], [expected[i] for i in good])
            assert not list(store.rglob("*.safetensors"))
            assert engine.num_free_blocks() == num_free_blocks
            same_tokens(engine.generate(prompts, max_tokens=NUM_NEW), expected)
