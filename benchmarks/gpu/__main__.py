"""`python -m benchmarks.gpu`, which `make gpu` runs: all that needs a GPU, in a few minutes.

Builds libkvx for this machine's GPU, runs the tests on it, looks for bad memory accesses and races,
and measures. Needs nvcc, cmake and a Python with torch, numpy and pytest; installs nothing. A step
that fails or takes too long does not keep the next from running.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import report
from benchmarks.gpu.bench import BENCHMARKS
from benchmarks.gpu.facts import ROOT, facts
from benchmarks.gpu.steps import Outcome, Step, run

_BUILD = ROOT / "build" / "cuda"
_GRAPH_TESTS = "tests/test_cuda_graph.py"

# Tests that no GPU runs in, and what importing them takes.
_ELSEWHERE = {
    "tests/adapters": "vllm",
    "tests/test_demo.py": "vllm",
    "tests/test_engine_matrix.py": "transformers",
    "tests/test_layouts_doc.py": "transformers",
    "tests/core/test_geometry.py": "pydantic",
}

# Odd sizes, where what is out of bounds is not hidden by what is next to it.
_SANITIZED = "cuda and (odd or many_layers or head_ranges or token_ranges)"


def main() -> None:
    options = _options()
    if not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} sees no GPU. Without one, rehearse the benchmarks: "
            "python -m benchmarks.gpu.bench --rehearse"
        )
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in BENCHMARKS:
        _result_of(out, name).unlink(missing_ok=True)
    _set_environment()
    steps = list(_steps(out, options))
    outcomes = []
    with (out / "log.txt").open("w") as log:
        for i, step in enumerate(steps, 1):
            print(f"[{i}/{len(steps)}] {step.name}, at most {step.seconds} s ...", flush=True)
            outcomes.append(run(step, log))
            print(f"      {outcomes[-1]}", flush=True)
    found = facts("benchmarks.gpu", options.commit)
    results = _results(out)
    text = json.dumps({**found, "steps": [vars(o) for o in outcomes]}, indent=1)
    (out / "steps.json").write_text(text + "\n")
    (out / "summary.md").write_text(_summary(found, outcomes, results))
    print(f"\n{_short(outcomes, results)}\nwrote {out}/summary.md")
    raise SystemExit(1 if any(o.failed for o in outcomes) else 0)


def _set_environment() -> None:
    """For the steps: this tree's packages, the library that is built here, Python's own tools."""
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    tools = [str(Path(sys.executable).parent), os.environ["PATH"], "/usr/local/cuda/bin"]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["PATH"] = os.pathsep.join(tools)
    os.environ["KVX_LIBRARY"] = str(_BUILD / "libkvx.so")
    os.environ["PYTHONUNBUFFERED"] = "1"


def _steps(out: Path, options: argparse.Namespace) -> Iterator[Step]:
    configure = ["cmake", "-S", ".", "-B", str(_BUILD), "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DKVX_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"]
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    yield Step("configure", configure, 30)
    yield Step("build", ["cmake", "--build", str(_BUILD), "--parallel"], 90)

    tests = ["tests/test_conformance.py"] if options.quick else ["tests"]
    ignored = [path for path, module in _ELSEWHERE.items() if not _is_there(module)]
    together = ["-n", "8"] if _is_there("xdist") else []
    yield Step(
        "tests",
        [
            *_pytest(*tests, *together, "-k", "cuda"),
            *(f"--ignore={path}" for path in (*ignored, _GRAPH_TESTS)),
        ],
        90,
    )
    for tool in ("memcheck", "racecheck"):
        sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        some = _pytest("tests/test_write_gather.py", "tests/test_migrate.py", "-k", _SANITIZED)
        yield Step(tool, [*sanitizer, *some], 40, absent="Device not supported")
    yield Step("graphs", _pytest(_GRAPH_TESTS), 20)

    passed_on = ["--quick"] * options.quick
    passed_on += ["--commit", options.commit] if options.commit else []
    for name, seconds in (("write", 90), ("gather", 40), ("migrate", 40)):
        bench = [sys.executable, "-m", "benchmarks.gpu.bench", name, "--results", str(out)]
        yield Step(name, [*bench, *passed_on], seconds)


def _pytest(*arguments: str) -> list[str]:
    options = ["-q", "-o", "minversion=8", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _result_of(out: Path, name: str) -> Path:
    return out / f"{name}.json"


def _results(out: Path) -> list[dict[str, Any]]:
    paths = [_result_of(out, name) for name in BENCHMARKS]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


# ---- What is said in the end ----


def _summary(
    found: dict[str, Any], outcomes: Sequence[Outcome], results: Sequence[dict[str, Any]]
) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    commit = f"commit {found['git_commit']}{' with changes' if found['git_modified'] else ''}"
    lines = [
        f"# {found['gpu']['name']}",
        f"{versions}. {found['date']}, {commit}, `{found['command']}`.",
    ]
    lines += ["\n".join(["| step | | s |", "| --- | --- | --: |", *(o.row for o in outcomes)])]
    for result in results:
        lines += [f"## {result['benchmark']}", report.table(result["results"])]
        lines += [f"{name} is not there: {why}" for name, why in result["absent"].items()]
    return "\n\n".join(lines) + "\n"


def _short(outcomes: Sequence[Outcome], results: Sequence[dict[str, Any]]) -> str:
    lines = [f"{o.name:12} {o.verdict} in {o.seconds:.0f} s" for o in outcomes]
    for result in results:
        rows = result["results"]
        lines.append(f"{result['benchmark']}: {report.tally(rows)}")
        lines += [f"  {row['case']}: {report.missed(row)}" for row in rows if report.missed(row)]
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="where results go")
    parser.add_argument("--quick", action="store_true", help="small and rough, to see it run")
    parser.add_argument("--commit", help="of this tree, where it has no repository")
    return parser.parse_args()


main()
