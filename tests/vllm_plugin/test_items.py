"""Images and prompt embeddings in real vLLM: requests share what the same items have computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vllm import needs_cpu_op
from tests.vllm_plugin import models
from tests.vllm_plugin.engine import (
    Engine,
    EngineProcess,
    Output,
    check_reuse,
    connector,
)

pytestmark = needs_cpu_op

LENGTH = 150
PROMPT = models.prompt(LENGTH, seed=920)
IMAGE = 4  # tokens of an image, in front of the prompt
SOUND = 25  # tokens of a sound
OPTIONS = {"block_size": 32, "limit_mm_per_prompt": {"image": 1}, "max_model_len": 512}

Expected = Callable[[int | None], list[int]]


@pytest.fixture(scope="module")
def blip2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.blip2(tmp_path_factory.mktemp("blip2"))


@pytest.fixture(scope="module")
def alone(blip2: Path, engines: EngineProcess) -> Expected:
    """The answers of a vLLM without the connector to PROMPT, behind images and behind none."""
    found = {}
    with engines.engine(blip2, **OPTIONS, enable_prefix_caching=False) as engine:
        for image in (None, 1, 2):
            found[image] = ask(engine, image).tokens
    assert len({tuple(tokens) for tokens in found.values()}) == 3
    return found.__getitem__


def ask(engine: Engine, image: int | None, prompt: Sequence[int] = PROMPT) -> Output:
    (output,) = engine.generate([prompt], besides=[{"image": image}])
    return output


def options(path: Path, **settings: Any) -> dict[str, Any]:
    config = connector(path, "kv_both", save_generated=False, fresh_seconds=0, **settings)
    return OPTIONS | {"kv_transfer_config": config}


def check(engine: Engine, image: int | None, expected: list[int], num_cached: int) -> None:
    check_reuse(engine, PROMPT, {"image": image}, expected, num_cached)


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["beside", "in-step"])
def test_images(
    prefix_caching: bool, blip2: Path, engines: EngineProcess, alone: Expected, tmp_path: Path
) -> None:
    all_tokens = LENGTH + IMAGE - 1
    caching = {"enable_prefix_caching": prefix_caching}
    with engines.engine(blip2, **options(tmp_path), **caching) as engine:
        for image in (1, 2):
            check(engine, image, alone(image), 0)
            check(engine, image, alone(image), all_tokens)
        check(engine, None, alone(None), 0)
    with engines.engine(blip2, **options(tmp_path) | {"block_size": 64}, **caching) as engine:
        for image in (2, 1):
            check(engine, image, alone(image), all_tokens)
        check(engine, None, alone(None), LENGTH - 1)


def test_sounds_in_the_middle(engines: EngineProcess, tmp_path: Path) -> None:
    """Text before a sound is shared with every other request; what follows, behind this sound only.
    Ids that stand for a sound are no sound.
    """
    model = models.qwen2_audio(tmp_path)
    before, after = models.prompt(100, seed=930), models.prompt(40, seed=931)
    with_sound = [*before, models.PLACEHOLDER, *after]
    length = 100 + SOUND + 40
    literal = [*before, *[models.PLACEHOLDER] * SOUND, *after]
    longer = [*with_sound, *models.prompt(30, seed=932)]
    there = {"block_size": 32, "max_model_len": 512, "limit_mm_per_prompt": {"audio": 1}}
    asked = [(with_sound, 1), (with_sound, 2), (literal, None), (longer, 1)]
    besides = [{"sound": sound} for _, sound in asked]
    prompts = [prompt for prompt, _ in asked]
    with engines.engine(model, **there, enable_prefix_caching=False) as engine:
        alone = [
            engine.generate([p], besides=[b])[0].tokens
            for p, b in zip(prompts, besides, strict=True)
        ]
    config = connector(tmp_path / "store", "kv_both", save_generated=False, fresh_seconds=0)
    for num_cached in ([0, 100, 100, length], [length - 1, length - 1, length - 1, length + 29]):
        with engines.engine(model, **there, kv_transfer_config=config) as engine:
            for i in range(4):
                check_reuse(engine, prompts[i], besides[i], alone[i], num_cached[i])


def test_other_images_of_one_name(
    blip2: Path, engines: EngineProcess, alone: Expected, tmp_path: Path
) -> None:
    """A user names images. vLLM takes the one that it has encoded for another of the same name."""
    with engines.engine(blip2, **options(tmp_path), mm_processor_cache_gb=0) as engine:
        for image in (1, 2):
            engine.call("reset_prefix_cache")
            engine.generate([PROMPT], besides=[{"image": image, "name": "theirs"}])
            assert engine.call("wait_until_saved")
    with engines.engine(blip2, **options(tmp_path)) as engine:
        check(engine, 1, alone(1), LENGTH + IMAGE - 1)  # whatever its name is
        check(engine, 2, alone(2), 0)


def test_weights_that_are_replaced(
    blip2: Path, engines: EngineProcess, alone: Expected, tmp_path: Path
) -> None:
    """vLLM keeps what encoders have made of images, until its user drops it."""
    with engines.engine(blip2, **options(tmp_path)) as engine:
        check(engine, 1, alone(1), 0)
        engine.call("change_weights", how="nothing")
        for _ in range(2):
            check(engine, 1, alone(1), 0)
        engine.call("reset_encoder_cache")
        check(engine, 1, alone(1), 0)
        check(engine, 1, alone(1), LENGTH + IMAGE - 1)


@pytest.mark.parametrize("shares", [True, False])
def test_embeddings(shares: bool, llama: Path, engines: EngineProcess, tmp_path: Path) -> None:
    """Requests share whole blocks of 64 embeddings, and what follows the last one."""
    config = connector(tmp_path, "kv_both", fresh_seconds=0, share_embeddings=shares)
    there = {"block_size": 32, "enable_prompt_embeds": True, "max_model_len": 512}
    other = [*PROMPT[:100], *models.prompt(50, seed=921)]
    longer = [*PROMPT, *models.prompt(90, seed=922)]
    with engines.engine(llama, **there) as engine:
        as_ids = [output.tokens for output in engine.generate([PROMPT, other, longer])]
    for num_cached in ([0, 64, 128], [LENGTH - 1, LENGTH - 1, len(longer) - 1]):
        with engines.engine(llama, **there, kv_transfer_config=config) as engine:
            for prompt, expected, num in zip(
                (PROMPT, other, longer), as_ids, num_cached, strict=True
            ):
                beside = {"embeddings": str(llama)}
                check_reuse(engine, prompt, beside, expected, num if shares else 0)
