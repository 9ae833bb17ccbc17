"""Runs real vLLM for half an hour on a store that fails in many ways; no token may be wrong.

    python -m tests.soak --minutes 30 --keep DIRECTORY

Two engines share a store: one serves from the beginning to the end, the other is stopped or killed
and started again as a different one, of the same model or of one that differs in a layer, beside a
connector whose loads fail, or with a cache that is less precise. Requests begin alike, have LoRA
adapters, images, or embeddings in place of ids, are aborted and preempted; engines replace their
weights, sleep, and reset their caches; meanwhile the file system fails in phases, and files are
truncated, changed, exchanged and replaced by hostile ones. Every answer is compared with that of
an engine without a connector. Ends with a table, and with status 1 unless nothing was wrong,
leaked or raised, and memory and descriptors stayed flat.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.soak import vandal
from tests.soak.engines import Driver, SoakProcess
from tests.soak.report import MIB, report, total
from tests.soak.work import llamas, with_embeddings, with_images


def soak(directory: Path, seconds: float) -> bool:
    """Returns whether all is good."""
    print("making models, and asking vLLM alone ...", flush=True)
    store, flags = directory / "store", directory / "phases"
    alone = SoakProcess(directory / "alone.log")
    with_adapters = llamas(directory, alone)
    families = [
        with_adapters,
        with_embeddings(with_adapters, alone),
        with_images(directory, alone),
    ]
    alone.close()

    ended = threading.Event()
    phases = vandal.Phases(flags, seconds=min(20.0, seconds / 12))
    hands = vandal.Vandal(store, seed=2)
    variables = vandal.environment(store, flags)
    steady, restarted = (
        Driver(
            name,
            SoakProcess(directory / f"{name}.log", **variables),
            families,
            store,
            ended,
            n,
        )
        for n, name in enumerate(("steady", "restarted"))
    )
    threads = [
        threading.Thread(target=steady.run_steadily),
        threading.Thread(target=restarted.run_with_restarts),
        threading.Thread(target=hands.run, args=(ended,)),
        threading.Thread(target=phases.run, args=(ended,)),
    ]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    try:
        while (left := begin + seconds - time.monotonic()) > 0 and threads[0].is_alive():
            time.sleep(min(15, left))
            print(_progress(time.monotonic() - begin, steady, restarted, phases, hands), flush=True)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        for driver in (steady, restarted):
            driver.process.close()
    for problem in steady.found.problems + restarted.found.problems:
        print(problem)
    print(f"damage: {', '.join(f'{name} {n}' for name, n in sorted(hands.counts.items()))}\n")
    found = steady.found, restarted.found
    table, good = report(
        total(*(one.counts for one in found)),
        total(*(one.stats for one in found)),
        found[0].samples,
        seconds,
    )
    print(table)
    return good


def _progress(
    seconds: float, steady: Driver, restarted: Driver, phases: vandal.Phases, hands: vandal.Vandal
) -> str:
    counts = total(steady.found.counts, restarted.found.counts)
    parts = [f"[{int(seconds) // 60:2}:{int(seconds) % 60:02}] {phases.now:6}"]
    parts += [f"{counts[name]} {name}" for name in ("requests", "wrong tokens", "leaked blocks")]
    parts += [f"{counts[name]} {name}" for name in ("raises", "engines", "kills")]
    parts.append(f"{sum(hands.counts.values())} files damaged")
    if steady.found.samples:
        last = steady.found.samples[-1]
        parts.append(f"{last.memory / MIB:.0f} MiB, {last.descriptors} descriptors")
    return "; ".join(parts)


def main() -> int:
    arguments = argparse.ArgumentParser(prog="make soak ARGS=", description=__doc__.split("\n")[0])
    arguments.add_argument("--minutes", type=float, default=30)
    arguments.add_argument("--keep", type=Path, help="a new directory, for the store and the logs")
    given = arguments.parse_args()
    if given.keep is not None:
        given.keep.mkdir(parents=True)
        return 0 if soak(given.keep.resolve(), given.minutes * 60) else 1
    with tempfile.TemporaryDirectory(prefix="kvx-soak-") as directory:
        return 0 if soak(Path(directory), given.minutes * 60) else 1


if __name__ == "__main__":
    sys.exit(main())
