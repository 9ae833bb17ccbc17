"""The messages between the halves of KVXConnector: the plan of a step, and reports of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvx_core.connector.plan import Load, Plan, Save, Scope
from kvx_core.connector.weights import Report

__all__ = ["Load", "RankReports", "Save", "Scope", "StepPlan"]


@dataclass(slots=True)
class StepPlan(Plan, KVConnectorMetadata):  # type: ignore[misc]
    """The saves and loads of one step."""


@dataclass(slots=True)
class RankReports(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The reports of ranks about their weights, by rank."""

    reports: dict[int, Report]

    def aggregate(self, other: RankReports) -> RankReports:
        return RankReports(self.reports | other.reports)
