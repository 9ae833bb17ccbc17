"""`python -m benchmarks.publish`: takes the last runs into the repository.

Copies the JSON of full, undisturbed runs from build/benchmarks to benchmarks/results, draws
ratios.png from all that is there, and rewrites the tables of README.md.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from benchmarks import tables
from benchmarks.tables import VERSUS

_ROOT = Path(__file__).resolve().parent.parent
_RUNS = _ROOT / "build" / "benchmarks"
_RESULTS = _ROOT / "benchmarks" / "results"
_README = _ROOT / "benchmarks" / "README.md"
_NAMES = (
    "cpu_copy",
    "in_cache",
    "call_overhead",
    "migrate_vs_lmcache",
    "blocks",
    "packed",
    "formats",
    "encodings",
    "compression",
    "kv_store",
    "snapshots",
    "durable",
    "hybrid",
    "vllm_cpu_write",
    "vllm_connector",
    "peers",
    "decode_steps",
    "connector",
    "live",
)
_MAX_OTHERS_CORES = 0.2
_NUMBER_INCHES = 0.36  # that a number takes, at most
_COLORS = {1: "#1f5f8b", 2: "#f2a541"}  # by threads


def main() -> None:
    for path in map(_run_of, _NAMES):
        if path.exists():
            _refuse_unfit(path)
            _RESULTS.mkdir(exist_ok=True)
            shutil.copy(path, _RESULTS / path.name)
    found = {
        name: json.loads((_RESULTS / f"{name}.json").read_text())
        for name in _NAMES
        if (_RESULTS / f"{name}.json").exists()
    }
    if not found:
        raise SystemExit(f"no results in {_RUNS} or {_RESULTS}. Run `make bench` first")
    _draw(found, _RESULTS / "ratios.png")
    text = "\n".join(_section(name, result) for name, result in found.items())
    begin, end = "<!-- results -->\n", "<!-- end of results -->"
    readme = _README.read_text()
    _README.write_text(
        re.sub(f"{begin}.*{end}", lambda _: f"{begin}{text}{end}", readme, flags=re.S)
    )
    print(f"wrote {', '.join(found)}, ratios.png and the tables of README.md")


def _run_of(name: str) -> Path:
    return _RUNS / f"{name}.json"


def _refuse_unfit(path: Path) -> None:
    result = json.loads(path.read_text())
    settings, others = result["settings"], sum(result["disturbance"].values())
    if others > _MAX_OTHERS_CORES:
        raise SystemExit(
            f"{path}: others used {others:.2f} cores meanwhile, expected at most "
            f"{_MAX_OTHERS_CORES}. Run it again on a quiet machine"
        )
    if settings["quick"] or settings["only"]:
        raise SystemExit(
            f"{path} is a run with --quick or --only, expected a full one. Run it again without"
        )


def _section(name: str, result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    packages = ", ".join(f"{k} {v}" for k, v in versions.items() if k not in ("kvx", "libkvx"))
    modified = " with changes" if result["git_modified"] else ""
    return f"""### {name}

{machine["cpu"]}; {machine["cores"]} cores, last-level cache \
{machine["last_level_cache_bytes"] >> 20} MiB; libkvx {machine["kvx_isa"]}; {packages}. \
{result["date"]}, commit {result["git_commit"][:12]}{modified}, `{result["command"]}`, \
{result["settings"]["rounds"]} rounds; others used \
{sum(result["disturbance"].values()):.2f} cores meanwhile.

{tables.of(name, result)}
"""


# ---- The drawing ----


def _draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Bars of how many times as fast KVX is; a tick where a goal lies."""
    large = found.get("cpu_copy", {"results": []})["results"]
    migrations = found.get("migrate_vs_lmcache", {"results": []})["results"]
    small = found.get("in_cache", {"results": []})["results"]
    panels = [(large, v) for v in ("memcpy", "stream", "torch")]
    panels += [(migrations, v) for v in ("lmcache", "torch", "memcpy")]
    panels += [(small, "rows")]
    figure = plt.figure(figsize=(15, 16), layout="constrained")
    grid = figure.add_gridspec(3, 3, height_ratios=[17, 3, 17])
    places = [grid[0, 0], grid[0, 1], grid[0, 2], grid[1, 0], grid[1, 1], grid[1, 2], grid[2, :]]
    for (rows, versus), place in zip(panels, places, strict=True):
        if rows:
            first = place.colspan.start == 0
            _bars(figure.add_subplot(place), rows, versus, names=first)
    cpu = next(iter(found.values()))["machine"]["cpu"]
    figure.suptitle(f"How many times as fast KVX is; a black tick is the goal. {cpu}")
    handles = [Patch(color=color) for color in _COLORS.values()]
    words = [f"{threads} thread{'s' if threads > 1 else ''}" for threads in _COLORS]
    figure.legend(handles, words, loc="outside lower center", ncols=len(words))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axes: Any, rows: list[dict[str, Any]], versus: str, *, names: bool) -> None:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    threads = sorted({row["threads"] for row in rows})
    height = 0.8 / len(threads)
    numbers = []  # (value, y, goals)
    for row in rows:
        if versus not in row["kvx_speedup"]:
            continue
        i = threads.index(row["threads"])
        y = cases.index(row["case"]) + (i - (len(threads) - 1) / 2) * height
        value = row["kvx_speedup"][versus]
        axes.barh(y, value, height, color=_COLORS.get(row["threads"], "#777777"))
        goals = [goal["at_least"] for goal in row["goals"] if goal["versus"] == versus]
        for x in goals:
            axes.plot([x, x], [y - height / 2, y + height / 2], color="black", linewidth=2)
        numbers.append((value, y, goals))
    axes.margins(x=0.15)
    _write_numbers(axes, numbers)
    axes.axvline(1, color="#999999", linewidth=0.8)
    axes.set_yticks(range(len(cases)), cases if names else [""] * len(cases), fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"x {VERSUS[versus]}", fontsize=10)


def _write_numbers(axes: Any, numbers: list[tuple[float, float, list[float]]]) -> None:
    """Writes each value behind its bar, or behind the tick or the line at 1 that would cross it.

    numbers: value, y, goals
    """
    left, right = axes.get_xlim()
    inches = axes.get_position().width * axes.figure.get_figwidth()
    text_width = (right - left) * _NUMBER_INCHES / inches
    for value, y, goals in numbers:
        x = value
        for mark in sorted({*goals, 1.0}):
            if x <= mark < x + text_width:
                x = mark
        axes.text(x, y, f" {value:.2f}", va="center", fontsize=7)


if __name__ == "__main__":
    main()
