"""`python -m benchmarks.gpu.ceilings`: what this GPU can do at best, and a call's host time.

Copies by the runtime and by a kernel, the time of a launch that waits for the one before it and of
kernels that must read before they know where to write, writes of few tokens beside that, and the
host's time of eager calls. Saved after each line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

from benchmarks.gpu import ROOT, caches, calls
from benchmarks.gpu.cases import FULL, REHEARSAL, PlainCopy
from benchmarks.gpu.places import Call, Gpu, PinnedHost, Place, Rehearsal
from kvx_core import Memory

FILE = "ceilings.json"

Line = tuple[str, float, str]  # what it is, how much, the unit
_ROUNDS = 15
_LAUNCHES = 256


def table(out: Path) -> str:
    """What was found there, in Markdown; "" if nothing was."""
    path = out / FILE
    found = json.loads(path.read_text()) if path.exists() else {}
    lines = [f"| {name} | {number} | {unit} |" for name, (number, unit) in found.items()]
    return "\n".join(["| | | |", "| --- | --: | --- |", *lines]) if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "gpu", metavar="DIR")
    parser.add_argument("--rehearse", choices=("host", "device"))
    options = parser.parse_args()
    place = Rehearsal(Memory[options.rehearse.upper()]) if options.rehearse else Gpu()
    options.results.mkdir(parents=True, exist_ok=True)
    found: dict[str, tuple[float, str]] = {}
    failed = False
    for part in _parts(place, tiny=options.rehearse is not None):
        try:
            for name, number, unit in part():
                print(f"{name:60} {number:10.3f} {unit}", flush=True)
                found[name] = round(number, 3), unit
                new = options.results / f"{FILE}.new"
                new.write_text(json.dumps(found, indent=1) + "\n")
                new.replace(options.results / FILE)
        except Exception as error:  # the next one may fare better
            failed = True
            print(f"failed: {type(error).__name__}: {error}", flush=True)
    raise SystemExit(1 if failed else 0)


def _parts(place: Place, *, tiny: bool) -> Iterator[Callable[[], Iterator[Line]]]:
    for mib in (1,) if tiny else (64, 256, 1024):
        yield partial(_within, place, mib)
    yield partial(_pinned, place, 1 if tiny else 256)
    yield partial(_launch, place)
    yield partial(_chains, place)
    for tokens in (1, 64):
        yield partial(_writes, place, tokens, tiny)


def _seconds(place: Place, ways: Sequence[Call], rounds: int = _ROUNDS) -> float:
    """Of the calls together, in the median round."""
    run, samples = place.contestant(ways, 1), []
    for _ in range(rounds):
        place.flush("")
        samples.append(run())
    return median(samples)


def _within(place: Place, mib: int) -> Iterator[Line]:
    num_bytes = mib << 20
    for name, copies in PlainCopy(place).ways(num_bytes, 1).items():
        rate = 2 * num_bytes / _seconds(place, copies) / 1e9
        yield f"{name} of {mib} MiB, read + written", rate, "GB/s"


def _pinned(place: Place, mib: int) -> Iterator[Line]:
    sizes = (mib << 20,)
    host, here = PinnedHost(place).empty(sizes, torch.uint8), place.empty(sizes, torch.uint8)
    for name, dst, src in (("pinned to GPU", here, host), ("GPU to pinned", host, here)):
        copy = partial(dst.copy_, src, non_blocking=True)
        yield f"memcpy {name}, {mib} MiB", sizes[0] / _seconds(place, [copy], 5) / 1e9, "GB/s"


def _launch(place: Place) -> Iterator[Line]:
    one = torch.zeros(1, device=place.device)
    seconds = _seconds(place, [partial(one.add_, 1)] * _LAUNCHES)
    yield "a kernel of one thread in a graph, after another", seconds / _LAUNCHES * 1e6, "us"


def _chains(place: Place) -> Iterator[Line]:
    """Where there are a GPU and Triton."""
    if place.device == "cpu" or find_spec("triton") is None:
        return
    from benchmarks.gpu.chain import chains

    for num_tokens in (1, 16, 64, 256):
        for name, ways in chains(num_tokens, FULL.num_layers).items():
            seconds = _seconds(place, ways) / len(ways)
            yield f"{num_tokens} rows to where {name} says", seconds * 1e6, "us"


def _writes(place: Place, num_tokens: int, tiny: bool) -> Iterator[Line]:
    """Into the layers of a model, one call each and all in one; in a graph, and eager."""
    size = REHEARSAL if tiny else FULL
    count, shape = size.num_layers, caches.BASE
    cache = caches.new("LBNHC", shape, count, max(size.min_blocks, 8), place)
    rows = cache.layers[0].k.shape[0] * shape.block_size
    slots = torch.randperm(rows)[:num_tokens].to(place.device)
    sizes = (2, count, num_tokens, shape.num_kv_heads, shape.head_dim)
    keys, values = torch.randn(sizes, dtype=torch.bfloat16, device=place.device)
    each = [
        calls.write(place, layer, keys[i], values[i], slots) for i, layer in enumerate(cache.layers)
    ]
    plan = calls.write_layers(place, cache.layers, keys, values, slots)
    what = f"{num_tokens} tokens"
    yield f"write_kv in a graph, a layer, {what}", _seconds(place, each) / count * 1e6, "us"
    seconds = _seconds(place, [plan])
    yield f"WriteLayersPlan in a graph, {count} layers, {what}", seconds * 1e6, "us"
    copy = partial(torch.empty_like(keys[0]).copy_, keys[0])
    times = 10 if tiny else 1000
    for name, call in (
        ("write_kv, a layer", each[0]),
        (f"WriteLayersPlan, {count} layers", plan),
        ("tensor.copy_", copy),
    ):
        yield f"host: eager {name}, {what}", _host_seconds(place, call, times) * 1e6, "us"


def _host_seconds(place: Place, call: Call, times: int) -> float:
    """Until a call returns, which does not wait for the GPU."""
    call()
    place.settle()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    spent = time.perf_counter() - begin
    place.settle()
    return spent / times


if __name__ == "__main__":
    main()
