"""The prompts of the engines, and stock vLLM's answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.soak.engines import SoakProcess
from tests.vllm_plugin.models import prompt

NUM_PROMPTS = 120
NUM_NEW = 12
MAX_MODEL_LEN = 192


@dataclass(frozen=True)
class Work:
    """Prompts that begin alike in many ways, and the greedy tokens after each, of each model."""

    prompts: list[list[int]]
    answers: dict[Path, list[list[int]]]

    @classmethod
    def of(cls, models: Sequence[Path], process: SoakProcess) -> Work:
        """Asks engines without a connector."""
        chance = random.Random(0)
        prompts = [
            prompt(chance.randrange(1, 90), seed=chance.randrange(12))
            + prompt(chance.randrange(0, 88), seed=chance.randrange(30))
            for _ in range(NUM_PROMPTS)
        ]
        answers = {}
        for model in models:
            with process.engine(model, block_size=32, max_model_len=MAX_MODEL_LEN) as engine:
                outputs = engine.generate(prompts, max_tokens=NUM_NEW)
            answers[model] = [output.tokens for output in outputs]
        return cls(prompts, answers)
