"""The results of a soak as a table, and whether it passed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIB = 1 << 20
# Caches of vLLM, torch and KVX fill meanwhile. A soak that is over before says nothing of memory.
WARM_UP_SECONDS, WARM_UP_SHARE = 180, 0.25
# Memory may grow by as much as this between the first and the last quarter of what follows: pages
# that an allocator keeps. At 1 MiB a minute, which ends a server in weeks, half an hour shows.
MEMORY_SHARE, MEMORY_BYTES = 0.02, 16 * MIB
DESCRIPTORS = 2  # a file that is being written when the engine is idle


@dataclass(frozen=True)
class Sample:
    """What a process held at a time."""

    seconds: float
    memory: int  # bytes
    descriptors: int


@dataclass(frozen=True)
class Trend:
    """At the start, in the middle, at the end: the middle value of a quarter of the samples."""

    start: float
    middle: float
    end: float
    tolerance: float

    @property
    def is_flat(self) -> bool:
        return self.end - self.start <= self.tolerance


def trends(samples: Sequence[Sample]) -> tuple[Trend, Trend]:
    """Of memory and descriptors after the warm-up. Raises ValueError if there are not 8 samples."""
    last = samples[-1].seconds if samples else 0
    begin = max(WARM_UP_SECONDS, WARM_UP_SHARE * last)
    warm = [sample for sample in samples if sample.seconds >= begin]
    if len(warm) < 8:
        raise ValueError(f"{len(warm)} samples after {begin:.0f} s, expected 8 or more")
    count = len(warm) // 4
    at = (warm[:count], warm[(len(warm) - count) // 2 :][:count], warm[-count:])
    memory = [_middle([sample.memory for sample in part]) for part in at]
    descriptors = [_middle([sample.descriptors for sample in part]) for part in at]
    tolerance = max(MEMORY_BYTES, MEMORY_SHARE * memory[0])
    return Trend(*memory, tolerance), Trend(*descriptors, DESCRIPTORS)


def report(
    counts: Mapping[str, int],
    stats: Mapping[str, float],
    samples: Sequence[Sample],
    seconds: float,
) -> tuple[str, bool]:
    """The table, and whether nothing is wrong, leaked, raised or growing, and all was tried.

    seconds: of the soak; one of less than twice the warm-up is not judged by memory
    """
    rows: list[tuple[str, str, str]] = []
    names = ("requests", "with adapter", "with image", "with embeddings", "of less precise caches")
    names += ("aborted", "failed by policy", "engines", "kills", "new weights", "sleeps")
    for name in names:
        rows.append((name, f"{counts.get(name, 0):,}", ""))
    good = True
    for name in ("wrong tokens", "leaked blocks", "raises"):
        number = counts.get(name, 0)
        good = good and number == 0
        rows.append((name, f"{number:,}", "ok" if number == 0 else "FAILED"))
    for name, metric, is_needed in (
        ("prompt tokens looked up", "external_prefix_cache_queries", True),
        ("of them found", "external_prefix_cache_hits", True),
        ("tokens loaded", "kvx_loaded_tokens", True),
        ("tokens saved", "kvx_saved_tokens", True),
        ("preemptions", "num_preemptions", True),
        ("loads that failed", "kvx_load_failures", False),
        ("lookups that failed", "kvx_lookup_failures", False),
        ("saves dropped", "kvx_dropped_saves", False),
        ("other errors caught", "kvx_errors", False),
    ):
        number = round(stats.get(f"vllm:{metric}_total", 0))
        good = good and (number > 0 or not is_needed)
        rows.append((name, f"{number:,}", "FAILED: none" if is_needed and not number else ""))
    try:
        memory, descriptors = trends(samples)
    except ValueError as error:
        is_short = seconds < 2 * WARM_UP_SECONDS
        verdict = "not judged in so short a time" if is_short else f"FAILED: {error}"
        rows.append(("memory, descriptors", "", verdict))
        good = good and is_short
    else:
        for name, trend, unit, scale in (
            ("memory", memory, " MiB", MIB),
            ("descriptors", descriptors, "", 1),
        ):
            values = (trend.start, trend.middle, trend.end)
            text = ", ".join(f"{value / scale:.0f}" for value in values) + unit
            verdict = "flat" if trend.is_flat else "FAILED: growing"
            rows.append((name, text, f"{verdict} (within {trend.tolerance / scale:.0f}{unit})"))
            good = good and trend.is_flat
    width = max(len(name) for name, _, _ in rows), max(len(value) for _, value, _ in rows)
    lines = [f"{n:<{width[0]}}  {v:>{width[1]}}  {verdict}".rstrip() for n, v, verdict in rows]
    return "\n".join(lines), good


def total(*parts: Counter[str]) -> Counter[str]:
    """The sum of counts."""
    return sum(parts, Counter())


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
