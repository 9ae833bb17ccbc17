"""Statistics of KVXConnector, for vLLM's log and Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

# Sums since the last report, with descriptions. Each is the metric vllm:kvx_<name>_total.
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
    "evictions": "Files of the KVX store deleted to make room, per worker",
    "evicted_bytes": "Bytes of the KVX store deleted to make room, per worker",
    "lookup_hits": "Lookups that found at least min_tokens tokens in the KVX store",
    "lookup_misses": "Lookups that found fewer, failed or took longer than lookup_seconds",
    "lookup_repeats": "Lookups that could have hit: their prompts begin as earlier ones did",
    "lookup_failures": "Lookups that failed; vLLM computed the tokens",
    "errors": "Other errors that were caught; the engine continued",
}

# Sums by reason, with descriptions. Each is the metric vllm:kvx_<name>_total with label "reason".
BY_REASON = {
    "unshared_requests": "Requests that are neither loaded nor saved, by what is not known of "
    "them: images, lora, embeddings, pooling, weights that change",
}
# Last values, with descriptions: the largest of all workers. Each is the metric vllm:kvx_<name>.
GAUGES = {
    "store_bytes": "Bytes of all files of the KVX store, as far as a worker that writes knows",
    "store_files": "Files of the KVX store, as far as a worker that writes knows",
}
# Lists of values since the last report, with descriptions. Each is the metric vllm:kvx_<name>.
HISTOGRAMS = {"lookup_seconds": "Seconds from a request's first lookup to its answer"}
_BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_MOST = 4096  # the most values of a histogram in one report; the oldest are dropped


class KVXStats(KVConnectorStats):  # type: ignore[misc]
    """Statistics by name: sums of COUNTERS and BY_REASON, values of GAUGES, lists of HISTOGRAMS."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=dict(data or {}))

    def add(self, **values: float | list[float]) -> None:
        for name, value in values.items():
            if isinstance(value, list):
                self.data[name] = [*self.data.get(name, ()), *value][-_MOST:]
            elif name in GAUGES:
                self.data[name] = max(self.data.get(name, 0), value)
            else:
                self.data[name] = self.data.get(name, 0) + value

    def add_by_reason(self, name: str, values: Mapping[str, int]) -> None:
        """Adds to a counter of BY_REASON, by reason."""
        self.add(**{f"{name}:{reason}": value for reason, value in values.items()})

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns sums and values as they are, and the mean and the maximum of each list."""
        reduced: dict[str, int | float] = {}
        for name, found in self.data.items():
            title = f"KVX {name.replace('_', ' ').replace(':', ', ')}"
            if name not in HISTOGRAMS:
                reduced[title] = round(found, 6)
            elif found:
                reduced[f"{title}, mean"] = round(sum(found) / len(found), 6)
                reduced[f"{title}, most"] = round(max(found), 6)
        return reduced

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KVXPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus metrics: a counter, gauge or histogram for each name and engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = {
            name: self._by_engine(self._counter_cls, name, text) for name, text in COUNTERS.items()
        }
        self._reasons: dict[str, Any] = {}
        self._gauges = {
            name: self._by_engine(self._gauge_cls, name, text, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        self._histograms = {
            name: self._by_engine(self._histogram_cls, name, text, buckets=_BUCKETS)
            for name, text in HISTOGRAMS.items()
        }

    def _by_reason(self, name: str, reason: str, engine: int) -> Any:
        if name not in self._reasons:
            self._reasons[name] = self._counter_cls(
                name=f"vllm:kvx_{name}",
                documentation=BY_REASON[name],
                labelnames=[*self._labelnames, "reason"],
            )
        return self._reasons[name].labels(*self.per_engine_labelvalues[engine], reason)

    def _by_engine(self, kind: Any, name: str, text: str, **options: Any) -> dict[int, Any]:
        metric = kind(
            name=f"vllm:kvx_{name}", documentation=text, labelnames=self._labelnames, **options
        )
        return {
            engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in HISTOGRAMS:
                for one in value:
                    self._histograms[name][engine_idx].observe(one)
            elif name in GAUGES:
                self._gauges[name][engine_idx].set(value)
            elif ":" in name:
                counter, _, reason = name.partition(":")
                self._by_reason(counter, reason, engine_idx).inc(value)
            else:
                self._counters[name][engine_idx].inc(value)
