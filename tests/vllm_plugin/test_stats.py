"""KVXConnector's statistics, as vLLM reports them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests.fakes.vllm import needs_cpu_op
from tests.vllm_plugin.engine import EngineProcess, connector
from tests.vllm_plugin.models import prompt

pytestmark = needs_cpu_op

LENGTHS = (33, 257)
TOKEN_BYTES = 3 * 2 * 2 * 64 * 4  # layers, K and V, heads, dims, float32


def test_metrics(llama: Path, engines: EngineProcess, tmp_path: Path) -> None:
    prompts = [prompt(n, seed=30 + n) for n in LENGTHS]
    num_tokens = sum(LENGTHS)
    options = {
        "disable_log_stats": False,
        "kv_transfer_config": connector(tmp_path, save_generated=False),
    }
    with engines.engine(llama, block_size=32, **options) as engine:
        engine.generate(prompts)
        found = engine.metrics()
        engine.generate(prompts)  # the engine has them itself
        again = engine.metrics()
    assert found["vllm:kvx_saved_tokens_total"] == num_tokens, found
    assert found["vllm:kvx_save_seconds_total"] > 0
    assert found["vllm:kvx_loaded_tokens_total"] == found["vllm:kvx_dropped_saves_total"] == 0
    assert found["vllm:kvx_lookup_hits_total"] == 0
    assert found["vllm:kvx_lookup_misses_total"] == len(prompts)
    assert found["vllm:kvx_lookup_repeats_total"] == 0
    assert again["vllm:kvx_lookup_repeats_total"] == len(prompts)
    assert found["vllm:kvx_lookup_seconds_count"] == len(prompts)
    assert 0 < found["vllm:kvx_lookup_seconds_sum"] < len(prompts)
    assert again["vllm:kvx_lookup_seconds_count"] == 2 * len(prompts)
    assert again["vllm:kvx_saved_tokens_total"] == num_tokens
    # Threads write while vLLM goes on, so it may hear of the last file a step later.
    num_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert num_tokens * TOKEN_BYTES < num_bytes < 1.1 * num_tokens * TOKEN_BYTES + 10_000
    assert again["vllm:kvx_saved_bytes_total"] == num_bytes

    with engines.engine(llama, block_size=64, **options) as engine:
        engine.generate(prompts)
        found = engine.metrics()
    assert found["vllm:kvx_loaded_tokens_total"] == num_tokens - len(prompts)
    assert found["vllm:kvx_loaded_bytes_total"] == (num_tokens - len(prompts)) * TOKEN_BYTES
    assert found["vllm:kvx_load_seconds_total"] > 0
    assert found["vllm:kvx_lookup_hits_total"] == len(prompts)
    assert found["vllm:kvx_lookup_misses_total"] == found["vllm:kvx_evictions_total"] == 0
    assert found["vllm:kvx_load_failures_total"] == found["vllm:kvx_saved_tokens_total"] == 0
    # vLLM's own count of prompt tokens that it did not have to compute.
    assert found["vllm:external_prefix_cache_hits_total"] == num_tokens - len(prompts)


def test_metrics_of_evictions(llama: Path, engines: EngineProcess, tmp_path: Path) -> None:
    """A store of 800 KB, and six prompts of 256 tokens, 786 KB each."""
    options = {
        "disable_log_stats": False,
        "kv_transfer_config": connector(tmp_path, save_generated=False, max_bytes="800KB"),
    }
    with engines.engine(llama, block_size=32, **options) as engine:
        for seed in range(6):
            engine.generate([prompt(256, seed=60 + seed)])
        found = engine.metrics()
    evictions, num_bytes = (
        found[f"vllm:kvx_{name}_total"] for name in ("evictions", "evicted_bytes")
    )
    assert 1 <= evictions <= 12  # files, of 128 tokens each
    assert num_bytes >= evictions * 128 * TOKEN_BYTES
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert 0 < found["vllm:kvx_store_files"] <= len(paths) + 2  # of the last report
    assert 0 < found["vllm:kvx_store_bytes"] <= 800_000 + 2 * 450_000


def test_requests_that_are_not_shared_have_a_label() -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    from kvx_adapters.vllm_plugin.stats import KVXPromMetrics

    kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=object())
    metrics = KVXPromMetrics(config, kinds, ["model_name", "engine"], {3: ["tiny", "3"]})
    for value in (2, 5):
        metrics.observe({"unshared_requests:lora": value, "unshared_requests:images": 1}, 3)
        metrics.observe({"errors": value, "store_files": value, "lookup_seconds": [value, 1]}, 3)
    labels = {"model_name": "tiny", "engine": "3"}
    counts = {"errors_total": 7, "store_files": 5}
    counts |= {"lookup_seconds_count": 4, "lookup_seconds_sum": 9}
    for name, expected in counts.items():
        assert REGISTRY.get_sample_value(f"vllm:kvx_{name}", labels) == expected
    for reason, expected in (("lora", 7), ("images", 2)):
        name = "vllm:kvx_unshared_requests_total"
        assert REGISTRY.get_sample_value(name, labels | {"reason": reason}) == expected


def test_what_workers_know_of_a_store_is_not_added() -> None:
    """They have the same one; what each has done is added."""
    from kvx_adapters.vllm_plugin.stats import KVXStats

    one = KVXStats({"store_bytes": 700, "saved_tokens": 3})
    for other in ({"store_bytes": 900, "saved_tokens": 4}, {"store_bytes": 800, "errors": 1}):
        one.aggregate(KVXStats(other))
    assert one.data == {"store_bytes": 900, "saved_tokens": 7, "errors": 1}


def test_what_a_log_line_says() -> None:
    from kvx_adapters.vllm_plugin.stats import KVXStats

    assert KVXStats().is_empty()
    assert KVXStats({"saved_tokens": 0, "lookup_seconds": []}).is_empty()
    stats = KVXStats({"save_seconds": 0.12345678, "lookup_seconds": [0.25, 0.5, 3.0]})
    stats.add_by_reason("unshared_requests", {"lora": 2})
    assert not stats.is_empty()
    assert stats.reduce() == {
        "KVX save seconds": 0.123457,
        "KVX lookup seconds, mean": 1.25,
        "KVX lookup seconds, most": 3.0,
        "KVX unshared requests, lora": 2,
    }
    assert KVXStats({"lookup_seconds": []}).reduce() == {}
    stats.reset()
    assert (stats.data, stats.is_empty()) == ({}, True)


def test_the_last_values_of_a_histogram_are_reported() -> None:
    from kvx_adapters.vllm_plugin.stats import KVXStats

    stats = KVXStats()
    stats.add(lookup_seconds=[9.0])
    stats.add(lookup_seconds=[1.0] * 4095)
    assert stats.data["lookup_seconds"] == [9.0] + [1.0] * 4095
    stats.add(lookup_seconds=[2.0])
    assert stats.data["lookup_seconds"] == [1.0] * 4095 + [2.0]
