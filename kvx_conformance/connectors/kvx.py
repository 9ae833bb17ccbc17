"""KVXConnector in vLLM: `kvx_adapters.vllm_plugin`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from kvx_conformance.connector import Setup
from kvx_conformance.connectors.vllm import VllmConnector
from kvx_conformance.connectors.vllm_engine import VllmEngine, step_until_idle
from kvx_conformance.connectors.vllm_models import HYBRID


class Connector(VllmConnector):
    """A store of KVX in a directory."""

    def transfer(self, store: Path) -> dict[str, Any]:
        return {
            "kv_connector": "KVXConnector",
            "kv_connector_module_path": "kvx_adapters.vllm_plugin.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"path": str(store), "fresh_seconds": 0},
        }

    def settle(self, llm: Any, store: Path) -> None:
        """KVX knows when it has written all, if its worker half is in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            super().settle(llm, store)
            return
        step_until_idle(llm)
        group = get_kv_transfer_group()
        for connector in getattr(group, "sub_connectors", [group]):
            if hasattr(connector, "save_now"):  # KVX's
                connector._worker._saver._writer.threads.wait(60)


class Small(Connector):
    """For soaks: many small files, of which the oldest go; engines load and save in every way."""

    _has_states = False  # of a hybrid model: they are complete after a step alone

    def start(self, setup: Setup, store: Path | None, work: Path) -> VllmEngine:
        self._has_states = setup.family in HYBRID
        return super().start(setup, store, work)

    def transfer(self, store: Path) -> dict[str, Any]:
        found = super().transfer(store)
        found["kv_connector_extra_config"] |= {
            "chunk_tokens": 32,
            "max_bytes": (96 if self._has_states else 24) << 20,
            "layerwise": not self._has_states and random.random() < 0.3,
            "async_load": random.random() < 0.3,
            "state_every_tokens": random.choice([None, 20]) if self._has_states else None,
        }
        return found
