"""The requests of the engines, and stock vLLM's answers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from tests.vllm_plugin import models
from tests.vllm_plugin.engine import EngineProcess
from tests.vllm_plugin.models import prompt

NUM_PROMPTS = 120
NUM_NEW = 12
MAX_MODEL_LEN = 192
# Of the llamas' prompts so many are asked with an adapter, or as embeddings, too; those of the
# model with images have one of three images, or none.
NUM_WITH_ADAPTER, NUM_AS_EMBEDDINGS, NUM_IMAGES = 30, 12, 3


@dataclass(frozen=True)
class Request:
    """Ids, and what tests.vllm_plugin.besides.request takes besides them."""

    prompt: list[int]
    beside: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Family:
    """Models that differ in a layer, and the greedy tokens of each after each request.

    batches: requests, by index, that run together
    """

    requests: list[Request]
    batches: list[range]
    options: Mapping[str, Any]  # of their engines
    answers: dict[Path, list[list[int]]]

    @classmethod
    def of(
        cls,
        names: list[Path],
        parts: list[list[Request]],
        process: EngineProcess,
        **options: Any,
    ) -> Family:
        """Asks engines without a connector; the requests of a part run together."""
        requests = [request for part in parts for request in part]
        ends = list(accumulate(len(part) for part in parts))
        batches = [range(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
        answers: dict[Path, list[list[int]]] = {}
        for model in names:
            with process.engine(
                model, block_size=32, max_model_len=MAX_MODEL_LEN, **options
            ) as engine:
                outputs = [
                    engine.generate(
                        [request.prompt for request in part],
                        max_tokens=NUM_NEW,
                        besides=[request.beside for request in part],
                    )
                    for part in parts
                ]
            answers[model] = [output.tokens for part in outputs for output in part]
        return cls(requests, batches, options, answers)

    @property
    def models(self) -> list[Path]:
        return list(self.answers)


def llamas(directory: Path, process: EngineProcess) -> Family:
    """Two that differ in one layer's o_proj; some requests have an adapter, and run apart from
    the others: in batches of both, vLLM's LoRA on CPU is wrong without any connector.
    """
    one = models.llama(directory / "model")
    other = models.with_another_layer(one, directory / "other")
    adapter = models.adapter(directory / "adapter")
    chance = random.Random(0)
    prompts = _prompts(chance)
    plain = [Request(ids) for ids in prompts]
    adapted = [
        Request(ids, {"adapter": str(adapter)}) for ids in chance.sample(prompts, NUM_WITH_ADAPTER)
    ]
    return Family.of([one, other], [plain, adapted], process, enable_lora=True, max_lora_rank=8)


def with_embeddings(family: Family, process: EngineProcess) -> Family:
    """The first model and half the prompts of llamas; some are embeddings. On CPU, vLLM's engines
    with adapters cannot take them.
    """
    model = family.models[0]
    prompts = [request.prompt for request in family.requests[: NUM_PROMPTS // 2]]
    requests = [Request(ids) for ids in prompts]
    requests += [Request(ids, {"embeddings": str(model)}) for ids in prompts[:NUM_AS_EMBEDDINGS]]
    return Family.of([model], [requests], process, enable_prompt_embeds=True)


def with_images(directory: Path, process: EngineProcess) -> Family:
    """A model with images: the same ids stand behind each of them."""
    model = models.blip2(directory / "with_images")
    chance = random.Random(1)
    requests = []
    for ids in _prompts(chance)[: NUM_PROMPTS // 2]:
        ids = [min(token, models.VOCAB_SIZE - 2) for token in ids]  # the last one is the image's
        requests.append(Request(ids))
        requests.append(Request(ids, {"image": chance.randrange(NUM_IMAGES)}))
    return Family.of([model], [requests], process)


def _prompts(chance: random.Random) -> list[list[int]]:
    """They begin alike in many ways."""
    return [
        prompt(chance.randrange(1, 90), seed=chance.randrange(12))
        + prompt(chance.randrange(0, 84), seed=chance.randrange(30))
        for _ in range(NUM_PROMPTS)
    ]
