"""What requests have besides tokens: images, adapters, embeddings in place of ids."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from kvx_conformance.connectors.vllm_models import IMAGE_SIZE


def request(
    prompt: list[int],
    adapter: dict[str, Any] | None = None,
    image: int | None = None,
    embeddings: str | None = None,
    name: str | None = None,
    sound: int | None = None,
) -> tuple[dict[str, Any], Any]:
    """What vLLM takes of one prompt, and its LoRARequest.

    adapter:    the fields of a LoRARequest that are not the default: at least lora_path
    image:      the seed of its random pixels
    embeddings: the directory of the model, whose embeddings are given in place of ids
    name:       the name that its user gives the image
    sound:      the seed of a second of noise
    """
    asked: dict[str, Any] = {"prompt_token_ids": prompt}
    if image is not None:
        asked["multi_modal_data"] = {"image": _image(image)}
    if sound is not None:
        noise = np.random.default_rng(sound).standard_normal(16000).astype(np.float32)
        asked["multi_modal_data"] = {"audio": (noise, 16000)}
    if name is not None:
        asked["multi_modal_uuids"] = {"image": [name]}
    if embeddings is not None:
        asked = {"prompt_embeds": _table(embeddings)[torch.tensor(prompt)]}
    return asked, adapter and lora(**adapter)


def _image(seed: int) -> Any:
    """Random pixels, as PIL has them."""
    from PIL import Image

    shape = (IMAGE_SIZE, IMAGE_SIZE, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def lora(**fields: Any) -> Any:
    """vLLM's request for an adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(**{"lora_name": "adapter", "lora_int_id": 1} | fields)


@cache
def _table(model: str) -> torch.Tensor:
    """(vocabulary, hidden size): what the first layer sees of ids."""
    return load_file(Path(model) / "model.safetensors")["model.embed_tokens.weight"]
