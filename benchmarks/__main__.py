"""`python -m benchmarks`, which `make bench` runs: benchmarks, printed and saved as JSON."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

try:
    import torch  # noqa: F401
except ModuleNotFoundError:
    sys.exit(f"benchmarks need torch, which {sys.executable} does not have: run `make bench`")

from benchmarks import machine, report
from benchmarks.pools import Shape

_ROOT = Path(__file__).resolve().parent.parent
_DEFAULT = ("cpu_copy", "in_cache", "call_overhead")
_QUIET_CORES = 0.1  # that others may use without a remark
_ALL = (
    *_DEFAULT,
    "layer_writes",
    "blocks",
    "formats",
    "packed",
    "encodings",
    "compression",
    "kv_store",
    "hybrid",
    "states",
    "vllm_cpu_write",
    "vllm_connector",
    "vllm_hybrids",
    "peers",
    "tiers",
    "decode_steps",
    "connector",
    "snapshots",
    "durable",
    "chunk_files",
    "store_names",
    "live",
    "migrate_vs_lmcache",
)
_PACKAGES = {  # they need
    "packed": ["transformers", "numpy"],
    "encodings": ["gguf", "numpy"],
    "vllm_cpu_write": ["vllm-cpu"],
    "vllm_connector": ["vllm-cpu"],
    "vllm_hybrids": ["vllm-cpu"],
    "peers": ["vllm-cpu"],
    "tiers": ["vllm-cpu", "obstore", "valkey", "moto"],
    "decode_steps": ["vllm-cpu"],
    "live": ["transformers"],
    "migrate_vs_lmcache": ["lmcache"],
}


def main() -> None:
    options = _options()
    for name in options.benchmarks or _DEFAULT:
        print(f"\n== {name} ==")
        disturbance = machine.Disturbance()
        rows = _run(name, options)
        meanwhile = disturbance.so_far()
        others = sum(meanwhile.values())
        if others > _QUIET_CORES:
            print(f"\nothers used {others:.2f} cores meanwhile: expect noise, most with 2 threads")
        result = {
            "benchmark": name,
            **machine.facts(*_PACKAGES.get(name, [])),
            "settings": _settings(options),
            "disturbance": meanwhile,
            "results": rows,
        }
        report.save(options.results, name, result)


def _run(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    threads, rounds = options.threads, options.rounds
    shape = Shape(num_tokens=options.tokens)
    if name == "cpu_copy":
        from benchmarks import cpu_copy

        return cpu_copy.run(shape, threads, rounds, options.only)
    if name == "in_cache":
        from benchmarks import in_cache

        return in_cache.run(shape, threads, rounds, options.only)
    if name == "call_overhead":
        from benchmarks import call_overhead

        return call_overhead.run(rounds)
    if name == "layer_writes":
        from benchmarks import layer_writes

        return layer_writes.run(rounds)
    if name == "blocks":
        from benchmarks import blocks

        return blocks.run(threads, rounds, options.only, quick=options.quick)
    if name == "formats":
        from benchmarks import formats

        return formats.run(rounds, options.only, quick=options.quick)
    if name == "packed":
        from benchmarks import packed

        return packed.run(threads, rounds, options.only)
    if name == "encodings":
        from benchmarks import encodings

        return encodings.run(threads, rounds, options.only)
    if name == "compression":
        from benchmarks import compression

        return compression.run(rounds, options.only, quick=options.quick)
    if name == "kv_store":
        from benchmarks import kv_store

        return kv_store.run(threads, rounds, options.only)
    if name == "hybrid":
        from benchmarks import hybrid

        return hybrid.run(threads, rounds, options.only)
    if name == "states":
        from benchmarks import states

        return states.run(threads, rounds, options.only, quick=options.quick)
    if name == "vllm_cpu_write":
        from benchmarks import vllm_cpu_write

        return vllm_cpu_write.run(shape, threads, rounds, options.only)
    if name == "peers":
        from benchmarks import peers

        return peers.run(rounds, options.only, quick=options.quick)
    if name == "tiers":
        from benchmarks import tiers

        return tiers.run(rounds, options.only, quick=options.quick)
    if name == "vllm_connector":
        from benchmarks import vllm_connector

        return vllm_connector.run(rounds, quick=options.quick)
    if name == "vllm_hybrids":
        from benchmarks import vllm_hybrids

        return vllm_hybrids.run(rounds, quick=options.quick)
    if name == "decode_steps":
        from benchmarks import decode_steps

        return decode_steps.run(rounds, options.only, quick=options.quick)
    if name == "connector":
        from benchmarks import connector

        return [connector.run()]
    if name == "chunk_files":
        from benchmarks import chunk_files

        return chunk_files.run(threads, rounds, options.only, quick=options.quick)
    if name == "snapshots":
        from benchmarks import snapshots

        return snapshots.run(threads, rounds, options.only, quick=options.quick)
    if name == "durable":
        from benchmarks import durable

        return durable.run(rounds, options.only, quick=options.quick)
    if name == "store_names":
        from benchmarks import store_names

        return store_names.run(options.only, quick=options.quick)
    if name == "live":
        from benchmarks import live

        return live.run(quick=options.quick)
    from benchmarks import migrate_vs_lmcache  # needs lmcache: an environment of its own

    return migrate_vs_lmcache.run(threads, rounds, num_layers=4 if options.quick else 32)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    shape = Shape(num_tokens=options.tokens)
    return {
        "quick": options.quick,
        "rounds": options.rounds,
        "threads": options.threads,
        "only": options.only,
        "num_tokens": shape.num_tokens,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "block_size": shape.block_size,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "benchmarks",
        nargs="*",
        metavar="BENCHMARK",
        help=f"{', '.join(_ALL)}; default: {', '.join(_DEFAULT)}, which need no engine",
    )
    parser.add_argument("--rounds", type=int, help="timings per contestant (21; quick: 3)")
    parser.add_argument("--threads", type=int, nargs="+", metavar="N", help="default: 1 2")
    parser.add_argument("--tokens", type=int, help="of cpu_copy (32768; quick: 4096)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--quick", action="store_true", help="small and rough, to see it run")
    parser.add_argument(
        "--results",
        type=Path,
        default=_ROOT / "build" / "benchmarks",
        metavar="DIR",
        help="where the JSON goes (build/benchmarks)",
    )
    options = parser.parse_args()
    for name in options.benchmarks:
        if name not in _ALL:
            parser.error(f"benchmark is {name!r}, expected one of {', '.join(_ALL)}")
    options.rounds = options.rounds or (3 if options.quick else 21)
    options.tokens = options.tokens or (4096 if options.quick else 32768)
    options.threads = options.threads or [n for n in (1, 2) if n <= machine.cores()]
    if min(options.rounds, options.tokens, *options.threads) < 1:
        parser.error("--rounds, --tokens and --threads are expected to be at least 1")
    if options.tokens % Shape().block_size:
        parser.error(f"--tokens is {options.tokens}, expected a multiple of {Shape().block_size}")
    return options


if __name__ == "__main__":
    main()
