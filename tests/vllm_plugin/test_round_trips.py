"""Real engines continue from what others have stored; their tokens equal stock vLLM's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvx_core.snapshot import Snapshot
from tests.fakes.vllm import needs_cpu_op
from tests.store_files import entry_files, rewrite
from tests.vllm_plugin.conftest import Stock
from tests.vllm_plugin.engine import EngineProcess, Output, connector, same_tokens
from tests.vllm_plugin.models import prompt, same_keys_and_values
from tests.vllm_plugin.prefill import transformers_prefills

pytestmark = needs_cpu_op


# Lengths around the blocks of 32; the first five prompts begin alike.
PROMPTS = [*(prompt(n, seed=1) for n in (1, 31, 32, 33, 101)), prompt(257, seed=2)]
NUM_NEW = 16


def all_but_the_last_token(outputs: list[Output], prompts: list[list[int]]) -> None:
    """Asserts that nothing but the last token of each prompt was computed."""
    for output, one in zip(outputs, prompts, strict=True):
        num_loaded = len(one) - 1 if len(one) > 8 else 0  # a few tokens are not worth a load
        assert output.num_cached_tokens == num_loaded, f"prompt of {len(one)}"
        assert output.num_scheduled_tokens == len(one) - num_loaded + len(output.tokens) - 1


def write(engines: EngineProcess, model: Path, store: Path, prompts: list[list[int]]) -> None:
    """Fills a store by an engine with blocks of 32."""
    config = connector(store, "kv_producer")
    with engines.engine(model, block_size=32, kv_transfer_config=config) as engine:
        engine.generate(prompts, max_tokens=NUM_NEW)


def read(
    engines: EngineProcess, model: Path, config: object, prompts: list[list[int]]
) -> list[Output]:
    """What an engine with blocks of 64 makes of the prompts."""
    with engines.engine(model, block_size=64, kv_transfer_config=config) as engine:
        return engine.generate(prompts, max_tokens=NUM_NEW)


@pytest.fixture(scope="module")
def filled(llama: Path, engines: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with PROMPTS in it. Tests read from it."""
    store = tmp_path_factory.mktemp("store")
    write(engines, llama, store, PROMPTS)
    return store


# ---- any block size to any other ----


@pytest.mark.parametrize("block_size", [64, 128])
def test_blocks_of_32_to_larger_ones(
    block_size: int,
    filled: Path,
    llama: Path,
    engines: EngineProcess,
    stock: Stock,
    tmp_path: Path,
) -> None:
    expected = stock(llama, PROMPTS, NUM_NEW)
    before = sorted(filled.rglob("*"))
    config = connector(filled, "kv_consumer")
    with engines.engine(llama, block_size=block_size, kv_transfer_config=config) as engine:
        engine.call("keep_raw_loads", folder=str(tmp_path))
        outputs = [engine.generate([one], max_tokens=NUM_NEW)[0] for one in PROMPTS]
    same_tokens(outputs, expected)
    all_but_the_last_token(outputs, PROMPTS)
    assert sorted(filled.rglob("*")) == before  # a consumer writes nothing
    same_keys_and_values(llama, PROMPTS[-1:], tmp_path)  # each was the first of its call


@pytest.mark.slow
def test_bfloat16_and_from_there_to_other_dtypes(
    engines: EngineProcess, stock: Stock, tmp_path: Path
) -> None:
    """On a model that knows what it says: near a tie a rounded value may fall either way."""
    from transformers import AutoTokenizer

    from kvx_adapters.cli.demo import PASSAGES, make_model

    model = tmp_path / "model"
    make_model(model, "bfloat16", 0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    passages = [tokenizer(passage.replace("|", ""))["input_ids"] for passage in PASSAGES[:3]]
    prompts = [passages[0][:n] for n in (1, 31, 32, 33, 91)]
    prompts += [passage[: len(passage) // 2] for passage in passages[1:]]
    expected = stock(model, prompts, NUM_NEW, dtype="bfloat16")
    assert tokenizer.decode(expected[4]) in PASSAGES[0].replace("|", "")

    store = tmp_path / "store"
    others = [{"block_size": 64}, {"block_size": 128}, {"block_size": 64, "dtype": "float32"}]
    if torch.cpu._is_avx512_supported():  # what vLLM's FP8 cache on CPU needs
        others.append({"block_size": 64, "kv_cache_dtype": "fp8"})
    for options in ({"block_size": 32}, *others):
        with engines.engine(
            model,
            **{"dtype": "bfloat16"} | options,
            kv_transfer_config=connector(store, accept="lossy"),
        ) as engine:
            outputs = engine.generate(prompts, max_tokens=NUM_NEW)
        same_tokens(outputs, expected)
        if options in others:
            all_but_the_last_token(outputs, prompts)


# ---- caches of other models ----


@pytest.mark.slow
def test_latents(deepseek: Path, engines: EngineProcess, tmp_path: Path) -> None:
    """One latent per token, whatever the number of KV heads in the config. The second engine takes
    the first one's answers over in their middle: both compute the rest token by token, from the
    same latents. (On CPU, stock vLLM itself continues otherwise if it gets a DeepSeek's answer as a
    part of the prompt, or several prompts at once.)
    """
    prompts = [prompt(n, seed=n) for n in (9, 90, 150)]

    def ask(prompts: list[list[int]], num_new: int) -> list[Output]:
        with engines.engine(deepseek, kv_transfer_config=connector(tmp_path)) as engine:
            return [engine.generate([one], max_tokens=num_new)[0] for one in prompts]

    expected = [output.tokens for output in ask(prompts, NUM_NEW)]
    begun = [one + tokens[:6] for one, tokens in zip(prompts, expected, strict=True)]
    outputs = ask(begun, NUM_NEW - 6)
    same_tokens(outputs, [tokens[6:] for tokens in expected])
    all_but_the_last_token(outputs, begun)
    assert len({tuple(tokens[6:]) for tokens in expected}) == 3


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's FP8 on CPU needs AVX-512")
def test_layers_of_several_precisions(llama: Path, engines: EngineProcess, tmp_path: Path) -> None:
    """Layers are compared one by one: an engine whose first layer is not in FP8 takes no entry
    whose first layer is, and one with all layers in FP8 takes what is more precise.
    """
    prompts = [prompt(n, seed=n) for n in (33, 70, 150)]

    def ask(*skipped: str, **options: object) -> list[Output]:
        quantized = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "block_size": 32}
        with engines.engine(
            llama,
            **quantized | {"kv_cache_dtype_skip_layers": list(skipped)} | options,
            kv_transfer_config=connector(tmp_path / "store"),
        ) as engine:
            return engine.generate(prompts, max_tokens=NUM_NEW)

    def loaded(outputs: list[Output]) -> list[int | None]:
        return [output.num_cached_tokens for output in outputs]

    none, all_but_one = [0, 0, 0], [len(one) - 1 for one in prompts]
    own = ask("0")
    assert loaded(own) == none
    again = ask("0", block_size=64)  # the same layers are in FP8, wherever the entries come from
    assert loaded(again) == all_but_one
    same_tokens(again, [output.tokens for output in own])
    assert loaded(ask("1")) == none
    assert loaded(ask()) == all_but_one


# ---- part of a prompt ----


def test_as_much_of_a_prompt_as_is_stored(
    filled: Path, llama: Path, engines: EngineProcess, stock: Stock
) -> None:
    longer = PROMPTS[4] + prompt(50, seed=3)
    other = PROMPTS[5][:150] + prompt(20, seed=4)  # leaves what is stored inside a chunk
    unknown = prompt(60, seed=5)
    shorter = PROMPTS[5][:77]
    prompts = [longer, other, unknown, shorter]
    outputs = read(engines, llama, connector(filled, "kv_consumer"), prompts)
    same_tokens(outputs, stock(llama, prompts, NUM_NEW))
    assert [output.num_cached_tokens for output in outputs] == [101, 150, 0, 76]


# ---- ways to load and save ----


def test_layers_are_saved_one_by_one_and_loaded_beside_other_steps(
    llama: Path, engines: EngineProcess, stock: Stock, tmp_path: Path
) -> None:
    expected = stock(llama, PROMPTS, NUM_NEW)
    config = connector(tmp_path, "kv_producer", layerwise=True)
    with engines.engine(llama, block_size=32, kv_transfer_config=config) as engine:
        same_tokens(engine.generate(PROMPTS, max_tokens=NUM_NEW), expected)
    outputs = read(engines, llama, connector(tmp_path, "kv_consumer", async_load=True), PROMPTS)
    same_tokens(outputs, expected)
    all_but_the_last_token(outputs, PROMPTS)


# ---- it is the store's keys and values that count ----


def zero_keys(store: Path) -> None:
    """Rewrites every file, checks and all."""

    def zero(snapshot: Snapshot) -> None:
        for layer in snapshot.header.layers:
            assert snapshot.array(f"layers.{layer}.k").any()
            snapshot.array(f"layers.{layer}.k")[:] = 0

    for path in entry_files(store):
        rewrite(path, zero)


def test_zeroed_keys_change_the_tokens(
    llama: Path, engines: EngineProcess, stock: Stock, tmp_path: Path
) -> None:
    """The negative control: were the prompt computed again, nobody would notice."""
    one = PROMPTS[5]
    write(engines, llama, tmp_path, [one])
    zero_keys(tmp_path)
    (output,) = read(engines, llama, connector(tmp_path, "kv_consumer"), [one])
    assert output.num_cached_tokens == len(one) - 1
    assert output.tokens != stock(llama, [one], NUM_NEW)[0]


# ---- what another adapter computed ----


def test_transformers_prefills_and_vllm_decodes(
    llama: Path, engines: EngineProcess, stock: Stock, tmp_path: Path
) -> None:
    one = PROMPTS[5]
    transformers_prefills(llama, tmp_path, one)
    outputs = read(engines, llama, connector(tmp_path, "kv_consumer"), [one])
    same_tokens(outputs, stock(llama, [one], NUM_NEW))
    all_but_the_last_token(outputs, [one])
