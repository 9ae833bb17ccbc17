"""Statistics of KVXConnector, for vLLM's log and Prometheus metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

# Sums since the last report, and their descriptions. A metric is vllm:kvx_<name>_total.
COUNTERS = {
    "saved_tokens": "Tokens copied out of the KV cache to be stored, per worker",
    "saved_bytes": "Bytes written to the KVX store",
    "spared_bytes": "Bytes that the store's format saved, against K and V as the cache has them",
    "save_seconds": "Seconds that steps spent copying tokens to be stored",
    "write_seconds": "Seconds that threads spent writing to the KVX store",
    "dropped_saves": "Saves dropped: too many bytes were waiting to be written, or an error",
    "loaded_tokens": "Tokens loaded from the KVX store, per worker",
    "loaded_bytes": "Bytes loaded from the KVX store",
    "load_seconds": "Seconds spent loading from the KVX store",
    "load_failures": "Loads that failed; vLLM treats them as kv_load_failure_policy says",
    "lookup_failures": "Lookups that failed; vLLM computed the tokens",
    "errors": "Other errors that were caught; the engine continued",
}


class KVXStats(KVConnectorStats):  # type: ignore[misc]
    """Sums by the names of COUNTERS."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=dict(data or {}))

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.data[name] = self.data.get(name, 0) + value

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"KVX {name.replace('_', ' ')}": round(n, 6) for name, n in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KVXPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter per name of COUNTERS and engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = {
            name: {
                engine: counter.labels(*values)
                for engine, values in self.per_engine_labelvalues.items()
            }
            for name, text in COUNTERS.items()
            for counter in (
                self._counter_cls(
                    name=f"vllm:kvx_{name}", documentation=text, labelnames=self._labelnames
                ),
            )
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(value)
