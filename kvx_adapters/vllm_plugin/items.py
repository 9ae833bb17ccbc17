"""The items of vLLM's requests: images, sounds and videos as the model takes them, and embeddings.

vLLM names an item by a hash, which its user may have chosen: a request's uuid, or an ImageID in the
file. So what the model takes is digested, whatever it is called.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from typing import Any

from vllm.version import __version__ as vllm_version

from kvx_adapters.vllm_plugin.settings import Settings
from kvx_core.connector.items import Item, RequestItems, TokensWithItems
from kvx_core.model.config_values import changed, values
from kvx_core.model.items import MIN_ITEM_TOKENS, item_digest

_BLOCK = 64  # rows of embeddings with a digest of their own: requests share whole ones
_MOST_NAMES = 1 << 16

# They choose items, hashes, kernels and where something is kept, or change what the model takes,
# which is digested. Source: vllm 0.32 config/multimodal.py
_IGNORED = (
    "enable_mm_embeds",
    "interleave_mm_strings",
    "language_model_only",
    "limit_per_prompt",
    "media_io_kwargs",
    "mm_encoder_attn_backend",
    "mm_encoder_fp8_scale_save_margin",
    "mm_encoder_fp8_scale_save_path",
    "mm_encoder_only",
    "mm_encoder_tp_mode",
    "mm_hasher_algorithm",
    "mm_processor_cache_gb",
    "mm_processor_cache_type",
    "mm_shm_cache_max_object_size_mb",
    "mm_tensor_ipc",
    "skip_mm_profiling",
)


class VllmItems:
    """The items of the requests of one engine."""

    def __init__(self, vllm_config: Any, settings: Settings) -> None:
        self._settings = _settings(vllm_config.model_config.multimodal_config)
        # Encoders of other processes find their items by vLLM's hash.
        self._are_encoded_elsewhere = bool(getattr(vllm_config, "ec_transfer_config", None))
        self._embeddings = settings.share_embeddings
        self._requests = RequestItems(settings.lookup_seconds)
        # By vLLM's hash: what the model takes, None if vLLM has called other items the same: it
        # keeps the outputs of its encoders by this name.
        self._names: dict[str, bytes | None] = {}

    def of(self, request: Any) -> TokensWithItems | None:
        """Returns the tokens and items of a request; None: some item is not known, or not yet."""
        count = len(request.mm_features) + (request.prompt_embeds is not None)
        return self._requests.of(request, count, partial(self._items, request))

    def are_pending(self, request: Any) -> bool:
        """True if the items of a request may soon be known."""
        return self._requests.are_pending(request.request_id)

    def forget(self, request_id: Any) -> None:
        self._requests.forget(request_id)

    def shutdown(self) -> None:
        """Ends the thread without waiting for it."""
        self._requests.shutdown()

    def _items(self, request: Any) -> list[Item]:
        found = []
        tokens = list(request.all_token_ids)
        for feature in request.mm_features:
            at = feature.mm_position
            ids = tokens[at.offset : at.offset + at.length]
            found.append(Item(at.offset, at.length, partial(self._digest, feature, ids)))
        if request.prompt_embeds is not None:
            found += self._blocks(request, tokens)
        return found

    def _digest(self, feature: Any, ids: list[int]) -> bytes | None:
        """Runs in a thread. Returns None if vLLM does not hold what the model takes, or may take
        the encoder's output of something else for it.
        """
        mm_hash = getattr(feature, "mm_hash", None)  # not every version has the field
        has_adapter = mm_hash is not None and feature.identifier != mm_hash  # of its encoder
        if feature.data is None or has_adapter or self._are_encoded_elsewhere:
            return None
        data = {name: element.data for name, element in feature.data.items()}
        if any(value is None for value in data.values()):
            return None
        taken = item_digest(feature.modality, data)
        if len(self._names) >= _MOST_NAMES:
            del self._names[next(iter(self._names))]
        if self._names.setdefault(feature.identifier, taken) != taken:
            self._names[feature.identifier] = None
            return None
        about = {"ids": ids, "mask": feature.mm_position.is_embed, "settings": self._settings}
        return item_digest("at", {"taken": taken, **about})

    def _blocks(self, request: Any, tokens: list[int]) -> list[Item]:
        rows, are_ids = request.prompt_embeds, getattr(request, "prompt_is_token_ids", None)
        if not self._embeddings or request.mm_features:  # vLLM takes no prompt with both
            return [Item(0, len(rows), lambda: None)]
        cuts = [*range(0, len(rows), _BLOCK), len(rows)]
        if len(cuts) > 2 and cuts[-1] - cuts[-2] < MIN_ITEM_TOKENS:
            del cuts[-2]
        found = []
        for start, stop in pairwise(cuts):
            ids = tokens[start:stop], are_ids and list(are_ids[start:stop])
            data = {"rows": rows[start:stop], "ids": ids}
            found.append(Item(start, stop - start, partial(item_digest, "embeddings", data)))
        return found


def _settings(config: Any) -> str:
    """Returns settings that may change what becomes of an item, "" if they are the default.

    config: vllm's MultiModalConfig; None: the model takes tokens only
    """
    if config is None:
        return ""
    names = [name for name in values(config) if name not in _IGNORED]
    found = changed(config, names)
    return f"vllm {vllm_version} {json.dumps(found, sort_keys=True)}" if found else ""
