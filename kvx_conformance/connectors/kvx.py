"""KVXConnector in vLLM: `kvx_adapters.vllm_plugin`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from kvx_conformance.connectors.vllm import VllmConnector
from kvx_conformance.connectors.vllm_engine import step_until_idle


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

    def transfer(self, store: Path) -> dict[str, Any]:
        found = super().transfer(store)
        found["kv_connector_extra_config"] |= {
            "chunk_tokens": 32,
            "max_bytes": 24 << 20,
            "layerwise": random.random() < 0.3,
            "async_load": random.random() < 0.3,
        }
        return found
