"""What the scheduler's half of KVXConnector tells the workers' halves to do in one step."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvx_core.connector.plan import Load, Plan, Save

__all__ = ["Load", "Save", "StepPlan"]


@dataclass(slots=True)
class StepPlan(Plan, KVConnectorMetadata):  # type: ignore[misc]
    """The saves and loads of one step."""
