"""`python -m benchmarks.publish`: takes the last runs into the repository.

Copies the JSON of full, undisturbed runs from build/benchmarks to benchmarks/results, draws the
plots of docs/performance.md from all that is there, and rewrites the tables of README.md.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from benchmarks import plots, tables

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
    "store_names",
    "hybrid",
    "vllm_cpu_write",
    "vllm_connector",
    "vllm_hybrids",
    "peers",
    "tiers",
    "decode_steps",
    "connector",
    "live",
)
_MAX_OTHERS_CORES = 0.2


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
    plots.draw(plots.FOLDER)
    text = "\n".join(_section(name, result) for name, result in found.items())
    begin, end = "<!-- results -->\n", "<!-- end of results -->"
    readme = _README.read_text()
    _README.write_text(
        re.sub(f"{begin}.*{end}", lambda _: f"{begin}{text}{end}", readme, flags=re.S)
    )
    print(f"wrote {', '.join(found)}, the plots of docs/performance and the tables of README.md")


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

<details markdown="1"><summary>The figures</summary>

{tables.of(name, result)}

</details>
"""


if __name__ == "__main__":
    main()
