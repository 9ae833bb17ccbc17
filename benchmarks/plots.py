"""The plots of docs/performance.md, from benchmarks/results: `python -m benchmarks.plots`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import chart
from benchmarks.chart import BLUE, GREEN, GREY, ORANGE, Bar
from benchmarks.tables import VERSUS

_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"
FOLDER = _ROOT / "docs" / "performance"
_BY_THREADS = {"1 thread": BLUE, "2 threads": ORANGE}
_TICK = "; a tick is the goal"
_FASTER = "Right of the line KVX is faster"

Result = dict[str, Any]


def result_of(name: str) -> Result:
    """The committed run of a benchmark."""
    found: Result = json.loads((_RESULTS / f"{name}.json").read_text())
    return found


def note(result: Result) -> str:
    """Where figures are from."""
    machine = result["machine"]
    return (
        f"benchmarks/results/{result['benchmark']}.json: {result['date'][:10]}, commit "
        f"{result['git_commit'][:12]}, {machine['cpu']}, {machine['cores']} cores"
    )


def prompts(path: Path) -> None:
    """Time to the first token."""
    result = result_of("peers")
    computed, *stored = result["results"]
    colours = {"KVX": BLUE, "ExampleConnector": ORANGE}
    rows = {}
    for tokens, ms in computed["first_token_ms"].items():
        bars = [Bar(ms, f"{ms:.0f} ms, computed", GREY)]
        for row in stored:
            loaded = row["first_token_ms"][tokens]
            words = f"{loaded:.0f} ms, {ms / loaded:.1f} times as fast"
            bars.append(Bar(loaded, words, colours[row["case"]]))
        rows[f"{int(tokens):,} tokens"] = [bars]
    chart.bars(
        path,
        "Time to the first token of a prompt that another vLLM has stored",
        [note(result)],
        rows,
        ["milliseconds"],
        legend={"vLLM alone": GREY, "KVX": BLUE, "vLLM's ExampleConnector": ORANGE},
    )


def decode_steps(path: Path) -> None:
    """Decode steps with KVX, in those without."""
    result = result_of("decode_steps")
    rows = {
        row["case"]: [
            [Bar(row["times_vllm"][p], f"{row['times_vllm'][p]:.3f}", colour)]
            for p, colour in (("p50", BLUE), ("p99", ORANGE))
        ]
        for row in result["results"]
    }
    chart.bars(
        path,
        "A decode step of vLLM with KVX: how many times as long as without",
        [note(result)],
        rows,
        ["median", "99th percentile"],
    )


def migration(path: Path) -> None:
    """A whole cache from one engine's blocks to another's."""
    result = result_of("migrate_vs_lmcache")
    names = {"memcpy": GREY, "kvx": BLUE, "torch": GREEN, "lmcache": ORANGE}
    words = {"memcpy": "plain copy", "kvx": "KVX", "torch": "torch", "lmcache": "LMCache"}
    found = {r["threads"]: r["median_us"] for r in result["results"] if "KV_OFFSETS" in r["case"]}
    rows = {
        words[name]: [
            [Bar(us[name] / 1e3, f"{us[name] / 1e3:.0f} ms", colour)] for us in found.values()
        ]
        for name, colour in names.items()
    }
    chart.bars(
        path,
        "268 MB, 32 layers, from vLLM's blocks of 16 to TensorRT-LLM's of 32",
        [note(result)],
        rows,
        [f"milliseconds, {n} thread{'s' if n > 1 else ''}" for n in found],
    )


def writes(path: Path) -> None:
    """New tokens into a cache of vLLM on a CPU."""
    result = result_of("vllm_cpu_write")
    dtypes = ["fp32", "bf16", "fp8"]
    rows: dict[str, list[list[Bar]]] = {}
    for row in result["results"]:
        dtype, kind, tokens = row["case"].split()
        name = f"{kind}, {int(tokens):,} token{'s' if tokens != '1' else ''}"
        rows.setdefault(name, [[] for _ in dtypes])[dtypes.index(dtype)].append(_ratio(row, "vllm"))
    title = "Writes into vLLM's cache on a CPU: how many times as fast as vLLM's own op"
    notes = [_FASTER + _TICK, note(result)]
    chart.bars(path, title, notes, rows, dtypes, legend=_BY_THREADS, base=1.0)


def ratios(
    title: str,
    name: str,
    versus: Sequence[str],
    *,
    chosen: Callable[[Result], bool] = lambda row: True,
) -> Callable[[Path], None]:
    """A plot of how many times as fast KVX is in the cases of a benchmark."""

    def draw(path: Path) -> None:
        result = result_of(name)
        rows: dict[str, list[list[Bar]]] = {}
        cases = [row for row in result["results"] if chosen(row)]
        for row in cases:
            members = rows.setdefault(row["case"], [[] for _ in versus])
            for bars, v in zip(members, versus, strict=True):
                if v in row["kvx_speedup"]:
                    bars.append(_ratio(row, v))
        rows = {case: members for case, members in rows.items() if any(members)}
        bars = [bar for members in rows.values() for one in members for bar in one]
        notes = [_FASTER + _TICK * any(bar.goals for bar in bars), note(result)]
        panels = [f"x {VERSUS[v]}" for v in versus]
        legend = _BY_THREADS if {row["threads"] for row in cases} == {1, 2} else {}
        chart.bars(path, title, notes, rows, panels, legend=legend, base=1.0)

    return draw


def _ratio(row: Result, versus: str) -> Bar:
    value = row["kvx_speedup"][versus]
    goals = tuple(goal["at_least"] for goal in row["goals"] if goal["versus"] == versus)
    return Bar(value, f"{value:.2f}", (BLUE, ORANGE)[row["threads"] - 1], goals)


def calls(path: Path) -> None:
    """What a call of one token costs."""
    result = result_of("call_overhead")
    rows = {}
    for row in result["results"]:
        goal = row["goal"] or {}
        ticks = (goal["at_most_us"],) if "at_most_us" in goal else ()
        colour = GREY if row["call"].startswith(("torch:", "5 x")) else BLUE
        rows[row["call"]] = [[Bar(row["median_us"], f"{row['median_us']:.2f} us", colour, ticks)]]
    chart.bars(
        path,
        "A call that copies one token, from Python unless it says C",
        [note(result) + _TICK],
        rows,
        ["microseconds, logarithmic"],
        legend={"KVX": BLUE, "for comparison": GREY},
        base=0.1,
    )


def live(path: Path) -> None:
    """How long a conversation pauses that moves."""
    result = result_of("live")
    rows = {}
    for row in result["results"]:
        pause, step = row["pause_p50_ms"], row["step_of_a_ms"]
        bars = [Bar(pause, f"{pause:.1f} ms", BLUE), Bar(step, f"{step:.1f} ms", GREY)]
        rows[row["case"].replace("_", ".")] = [bars]
    legend = {"pause, median of 100 moves": BLUE, "a decode step of the first engine": GREY}
    title = "A running conversation moves to another engine"
    chart.bars(path, title, [note(result)], rows, ["milliseconds"], legend=legend)


def _one_thread(row: Result) -> bool:
    return bool(row["threads"] == 1)


PLOTS: Mapping[str, Callable[[Path], None]] = {
    "prompts": prompts,
    "decode_steps": decode_steps,
    "migration": migration,
    "copies": ratios(
        "Large copies of K and V: how many times as fast KVX is", "cpu_copy", ("memcpy", "torch")
    ),
    "in_cache": ratios(
        "Copies inside the processor's caches: how many times as fast KVX is",
        "in_cache",
        ("rows",),
        chosen=_one_thread,
    ),
    "writes": writes,
    "calls": calls,
    "snapshots": ratios(
        "Chunks of a prompt to files and back: how many times as fast KVX is",
        "snapshots",
        ("migrate", "plain"),
    ),
    "formats": ratios(
        "Conversion to and from ggml's formats, one core: how many times as fast KVX is",
        "formats",
        ("memcpy", "gguf"),
        chosen=lambda row: row["case"].endswith("float32"),
    ),
    "packed": ratios(
        "A token appended to a packed cache: how many times as fast KVX is",
        "packed",
        ("torch", "hf"),
        chosen=_one_thread,
    ),
    "live": live,
}


def draw(folder: Path) -> None:
    """Draws all plots."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawn in PLOTS.items():
        drawn(folder / f"{name}.svg")


if __name__ == "__main__":
    draw(FOLDER)
