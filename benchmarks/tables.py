"""Tables of results, as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks import call_overhead, report

VERSUS = {
    "memcpy": "memcpy",
    "copy": "plain copy",
    "stream": "streaming copy",
    "blocks": "streaming copy of blocks",
    "torch": "torch",
    "rows": "memcpy per row",
    "lmcache": "LMCache",
    "vllm": "vLLM",
    "hf": "DynamicCache",
    "numpy": "numpy",
    "bulk": "all at once",
    "list": "lists of tensors",
    "gguf": "gguf-py",
    "ggml": "ggml",
    "backend": "ggml's CPU backend",
    "2 GB/s": "2 GB/s",
    "0.3 ms": "0.3 ms",
    "1k": "the same at 1024 tokens",
    "decode": "decoding, then attention",
    "migrate": "one migration",
    "plain": "plain files",
    "calls": "its calls alone",
}


def of(name: str, result: dict[str, Any]) -> str:
    """The table of one run."""
    return _TABLES.get(name, _ratios)(result)


def _ratios(result: dict[str, Any]) -> str:
    rows = result["results"]
    versus = [v for v in VERSUS if any(v in row["kvx_speedup"] for row in rows)]
    head = ["case", "threads", "us", "GB/s", *(f"x {VERSUS[v]}" for v in versus), "goals"]
    lines = [head, ["---", *["--:"] * (len(head) - 2), "---"]]
    for row in rows:
        speedups = row["kvx_speedup"]
        us = row["median_us"]["kvx"]
        lines.append(
            [
                row["case"].replace("|", "\\|"),
                str(row["threads"]),
                f"{us:.0f}" if us >= 100 else f"{us:.2f}",
                f"{report.gb_per_s(row):.1f}",
                *(f"{speedups[v]:.2f}" if v in speedups else "" for v in versus),
                ", ".join(_goal(goal) for goal in row["goals"]),
            ]
        )
    return _table(lines)


def _goal(goal: dict[str, Any]) -> str:
    verdict = "met" if goal["met"] else "**not met**"
    return f"{VERSUS[goal['versus']]} >= {goal['at_least']:g} {verdict}"


def _calls(result: dict[str, Any]) -> str:
    lines = [["call", "us", "x floor", "goal"], ["---", "--:", "--:", "---"]]
    for row in result["results"]:
        goal = call_overhead.goal_text(row).replace("NOT MET", "**not met**").replace("-", "", 1)
        lines.append([row["call"], f"{row['median_us']:.2f}", f"{row['times_floor']:.1f}", goal])
    return _table(lines)


def _engines(result: dict[str, Any]) -> str:
    decode, *prompts = result["results"]
    lines = [
        [
            *("prompt", "MB", "computed", "and saved", "on a disk", "loaded instead"),
            *("x faster", "x memcpy"),
        ],
        ["---", *["--:"] * 7],
    ]
    for row in prompts:
        calls = "compute", "compute and save", "compute and save on a disk", "load instead"
        found = row["median_us"]
        ms = [f"{found[what] / 1e3:.0f} ms" if what in found else "" for what in calls]
        memcpy = "save {save:.2f}, load {load:.2f}".format(**row["times_memcpy"])
        lines.append(
            [row["case"], f"{row['bytes'] / 1e6:.1f}", *ms, f"{row['speedup']:.1f}", memcpy]
        )
    us = decode["median_us"]
    return (
        f"A {decode['case']}: {us['vllm']:.0f} us, with KVXConnector {us['kvx']:.0f} us, "
        f"{decode['times_vllm']:.3f} times as long; {decode['inside_us_per_request']:.0f} us of a "
        f"request in KVXConnector, copies included.\n\n{_table(lines)}"
    )


def _hybrids(result: dict[str, Any]) -> str:
    decode, *talks = result["results"]
    ways = ("computed", "computed"), ("vllm", "vLLM's own cache"), ("kvx", "the store")
    lines = [
        [
            "a question after",
            "stored",
            *(f"{of}: {what}" for _, of in ways for what in ("tokens", "ms")),
        ],
        ["---", *["--:"] * 7],
    ]
    for row in talks:
        cells = [
            cell
            for way, _ in ways
            for cell in (f"{row['reused'][way]:,}", f"{row['median_us'][way] / 1e3:.0f}")
        ]
        lines.append([row["case"], f"{row['saved'] / 1e6:.1f} MB", *cells])
    us = decode["median_us"]
    return (
        f"A {decode['case']}: {us['vllm']:.0f} us, with KVXConnector {us['kvx']:.0f} us, "
        f"{decode['times_vllm']:.3f} times as long. The time to the first token of the answer to a "
        f"second question, and the tokens that were not computed:\n\n{_table(lines)}"
    )


def _decode_steps(result: dict[str, Any]) -> str:
    lines = [
        ["a decode step while", "vLLM p50", "p99", "with KVX p50", "p99", "p50, x as long", "p99"],
        ["---", *["--:"] * 6],
    ]
    for row in result["results"]:
        ms, times = row["ms"], row["times_vllm"]
        both = [f"{ms[name][p]:.2f} ms" for name in ("vllm", "kvx") for p in ("p50", "p99")]
        lines.append([row["case"], *both, f"{times['p50']:.3f}", f"{times['p99']:.3f}"])
    return _table(lines)


def _live(result: dict[str, Any]) -> str:
    lines = [
        ["from, to", "migrations", "pause p50", "p99", "a step of the first", "p50 below a step"],
        ["---", *["--:"] * 4, "---"],
    ]
    for row in result["results"]:
        ms = [f"{row[name]:.2f} ms" for name in ("pause_p50_ms", "pause_p99_ms", "step_of_a_ms")]
        met = "met" if row["goal_met"] else "**not met**"
        lines.append([row["case"], str(row["migrations"]), *ms, met])
    return _table(lines)


def _connector(result: dict[str, Any]) -> str:
    (found,) = result["results"]
    lines = [["CPU time of", "p50", "p99", "longest"], ["---", *["--:"] * 3]]
    rows = found["calls"] | {
        "a lookup's thread between two pauses": found["stretches"],
        "a collection of garbage in it": found["collections"],
        "the calls of a step": found["step"],
        "the same, store frozen": found["frozen_step"],
        "time until a miss is answered, one in 0.3 s": found["miss"],
        "the same, one after another": found["quick_miss"],
    }
    for name, row in rows.items():
        lines.append([name, *(f"{row[key]:.3f} ms" for key in ("p50", "p99", "max"))])
    goals = [
        f"`{name}` <= {goal:g} {'met' if found['met'][name] else '**not met**'}"
        for name, goal in found["goals"].items()
    ]
    return f"{_table(lines)}\n\nGoals: {', '.join(goals)}."


def _store_names(result: dict[str, Any]) -> str:
    lines = [
        [
            *("CPU time", "save p50", "p99", "x 100", "lookup p50", "p99", "x 100"),
            *("nothing p50", "p99", "tokens lost", "most", "goals"),
        ],
        ["---", *["--:"] * 10, "---"],
    ]
    for row in result["results"]:
        cells = []
        for name in ("save", "lookup", "nothing"):
            cells += [f"{row['us'][name][p]:.0f} us" for p in ("p50", "p99")]
            if name != "nothing":
                cells.append(f"{row['times_100'][name]['p50']:.2f}")
        loss = row["tokens_lost"]
        missed = ", ".join(f"**{name} not met**" for name, met in row["met"].items() if not met)
        lines.append(
            [row["case"], *cells, f"{loss['mean']:.2f}", str(loss["most"]), missed or "met"]
        )
    return _table(lines)


def _peers(result: dict[str, Any]) -> str:
    computed, *rows = result["results"]
    prompts = list(computed["first_token_ms"])
    cases = list(rows[0]["cases"])
    lines = [
        ["prefixes kept by", *(f"{n} tokens" for n in prompts), *cases],
        ["---", *["--:"] * len(prompts), *["---"] * len(cases)],
        ["nobody", *(f"{computed['first_token_ms'][n]:.0f} ms" for n in prompts)]
        + [""] * len(cases),
    ]
    for row in rows:
        cells = [f"{row['first_token_ms'][n]:.0f} ms" for n in prompts]
        cells += [_reused(row["cases"].get(case)) for case in cases]
        lines.append([row["case"], *cells])
    return (
        "Time to the first token of a stored prompt; of 1,000 stored tokens those that were "
        "reused, and whether the tokens after them were right. Another dtype: an FP8 cache; "
        "another engine: transformers. They go on with a text that the model has learnt.\n\n"
        + _table(lines)
    )


def _tiers(result: dict[str, Any]) -> str:
    computed, *rows = result["results"]
    prompts = list(computed["first_token_ms"])
    more = [
        "same",
        "flipped bytes",
        "a new prompt",
        "the server freezes: the first",
        "others",
        "most",
    ]
    lines = [
        ["prefixes come from", *(f"{n} tokens" for n in prompts), *more],
        ["---", *["--:"] * len(prompts), "---", "---", *["--:"] * 4],
        ["nowhere", *(f"{computed['first_token_ms'][n]:.0f} ms" for n in prompts), *[""] * 6],
    ]
    keys = ("new_prompt", "first_after_freeze", "median_after_freeze", "most_after_first")
    for row in rows:
        cells = [f"{row['first_token_ms'][n]:.0f} ms" for n in prompts]
        cells.append(_reused({"reused": row["reused"], "right": row["right"]}))
        flipped = {"reused": row["reused_after_flips"], "right": row["right_after_flips"]}
        cells.append(_reused(flipped))
        cells += [f"{row[f'{key}_ms']:.0f} ms" if f"{key}_ms" in row else "" for key in keys]
        lines.append([row["case"], *cells])
    return (
        "Time to the first token of a stored prompt; of 1,000 stored tokens those that were "
        "reused, and whether the tokens after them were right, also when bits of all files were "
        "flipped. New prompts have 512 tokens.\n\n" + _table(lines)
    )


def _reused(found: dict[str, Any] | None) -> str:
    if found is None:
        return "cannot read it"
    if found.get("ended"):
        return "**the engine ends**"
    of = f" of {found['of']}" if "of" in found else ""
    return f"{found['reused']}{of}, {'right' if found['right'] else '**wrong**'}"


_TABLES = {
    "call_overhead": _calls,
    "connector": _connector,
    "decode_steps": _decode_steps,
    "live": _live,
    "peers": _peers,
    "store_names": _store_names,
    "tiers": _tiers,
    "vllm_connector": _engines,
    "vllm_hybrids": _hybrids,
}


def _table(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
