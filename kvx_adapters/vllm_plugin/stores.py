"""Opens the stores of an engine: they depend on its model and on what its caches hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvx_adapters.vllm import total_kv_heads
from kvx_adapters.vllm_plugin.identity import StartFiles, model_record
from kvx_adapters.vllm_plugin.settings import Settings, precisions
from kvx_adapters.vllm_plugin.states import States
from kvx_core import ModelRecord
from kvx_core.connector.scoped import Scoped
from kvx_core.stores.config import MIN_CHUNK_TOKENS


class Stores(Scoped):
    """The stores of an engine's model, by cache_salt and weights."""

    def __init__(
        self,
        vllm_config: Any,
        settings: Settings,
        window: int,
        reach: Mapping[int, int],
        states: States,
    ) -> None:
        """window: the shortest sliding window of a cache group; 0: there is none
        reach:  by layer, for how many tokens before the end of a prefix vLLM has blocks; a layer
                that is not in it has blocks for all tokens
        """
        model = vllm_config.model_config
        record = model_record(vllm_config, settings)
        self.fingerprint = record.fingerprint
        self._precisions = precisions(model, vllm_config.cache_config)
        self.files = StartFiles(vllm_config, settings, self.fingerprint)
        num_layers = len(self._precisions)
        store = settings.store(
            fingerprint=record,
            num_layers=num_layers,
            total_kv_heads=[
                total_kv_heads(model, layer) if states.has_kv(layer) else 0
                for layer in range(num_layers)
            ],
            new_chunk_tokens=_new_chunk_tokens(window),
            precision=self._precisions,
            windows=[reach.get(layer, 0) for layer in range(num_layers)],
            planes=states.planes,
            state_heads=[
                states.heads if layer in states.layers else 0 for layer in range(num_layers)
            ]
            if states
            else None,
        )
        super().__init__(store, record)

    def record_of(self, weights: str) -> ModelRecord | None:
        return self.files.records.get(weights) or super().record_of(weights)

    @property
    def said_of_layers(self) -> str:
        """A line for the log if the layers differ in precision, else ""."""
        found = sorted({one.name for one in self._precisions})
        if len(found) == 1:
            return ""
        return (
            f"KVX: layers are kept in {' and '.join(found)}. With accept 'same' this engine loads "
            "entries in which each layer is as precise as it is here"
        )


def _new_chunk_tokens(window: int) -> int:
    """Returns the chunk size of a new store: a full chunk still lies within the window."""
    largest = 1 << (window.bit_length() - 1) if window else 128
    return max(MIN_CHUNK_TOKENS, min(128, largest))
