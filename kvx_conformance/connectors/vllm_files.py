"""vLLM's ExampleConnector: a file per layer of each prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvx_conformance.connectors.vllm import VllmConnector


class Connector(VllmConnector):
    """It looks a prompt up as a whole, by its ids alone."""

    def transfer(self, store: Path) -> dict[str, Any]:
        return {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(store)},
        }
