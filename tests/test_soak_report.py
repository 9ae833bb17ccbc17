"""The conditions under which a soak fails."""

from __future__ import annotations

import pytest

from tests.soak.report import MIB, Sample, report, trends

STATS = {
    f"vllm:{name}_total": 7
    for name in (
        *("external_prefix_cache_queries", "external_prefix_cache_hits", "num_preemptions"),
        *("kvx_loaded_tokens", "kvx_saved_tokens"),
    )
}


def samples(growth: float = 0, descriptors: float = 0) -> list[Sample]:
    """Of half an hour, one a second; what a second adds, after a beginning that fills caches."""
    return [
        Sample(t, int(MIB * (700 + min(t, 200) / 2 + t * growth)), int(60 + t * descriptors))
        for t in range(1800)
    ]


def test_a_good_soak() -> None:
    table, good = report({"requests": 9}, STATS, samples(), 1800)
    assert good
    assert "requests" in table
    assert "FAILED" not in table
    assert table.count("flat") == 2


@pytest.mark.parametrize("name", ["wrong tokens", "leaked blocks", "raises"])
def test_one_of_them_is_too_many(name: str) -> None:
    table, good = report({name: 1}, STATS, samples(), 1800)
    assert not good
    (line,) = (line for line in table.splitlines() if line.startswith(name))
    assert line.endswith("1  FAILED")


@pytest.mark.parametrize("missing", STATS)
def test_a_soak_in_which_nothing_happened(missing: str) -> None:
    """A store that is never hit is never wrong."""
    table, good = report({}, STATS | {missing: 0}, samples(), 1800)
    assert not good
    assert "FAILED: none" in table


def test_memory_that_grows_by_two_mebibytes_a_minute() -> None:
    table, good = report({}, STATS, samples(growth=2 / 60), 1800)
    assert not good
    assert table.count("FAILED: growing") == 1
    memory, descriptors = trends(samples(growth=2 / 60))
    assert not memory.is_flat
    assert descriptors.is_flat


def test_descriptors_that_grow_by_one_in_five_minutes() -> None:
    table, good = report({}, STATS, samples(descriptors=1 / 300), 1800)
    assert not good
    assert table.count("FAILED: growing") == 1


def test_a_steady_engine_that_ended_early() -> None:
    table, good = report({}, STATS, samples()[:100], 1800)
    assert not good
    assert "FAILED: 0 samples after 180 s, expected 8 or more" in table


def test_a_short_soak_is_not_judged_by_memory() -> None:
    table, good = report({}, STATS, samples(growth=1)[:120], 120)
    assert good
    assert "not judged in so short a time" in table
