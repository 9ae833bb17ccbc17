"""First calls of others' kernels, which may compile for minutes: in a step of their own.

A compiler keeps what it made on the disk, for the steps that follow. Which peer came how far is in
a file, so that one whose call never ends costs the measurements of no other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from benchmarks.gpu.cases import Named
from benchmarks.gpu.places import Place

FILE = "peers.json"
CALLED, READY = "called", "ready"


def unfinished(results: Path) -> set[str]:
    """Peers whose first call has not returned."""
    path = results / FILE
    states = json.loads(path.read_text()) if path.exists() else {}
    return {name for name, state in states.items() if state == CALLED}


def call(place: Place, cases: Iterable[Named], peers: Collection[str], results: Path) -> None:
    """Calls each peer once in each case. One that raises is ready, too: measurements say why."""
    path, states = results / FILE, dict.fromkeys(peers, READY)
    for named in cases if peers else ():
        try:
            ways = named.build().ways
        except Exception as error:  # the benchmark's to report
            print(f"{named.name}: {type(error).__name__}: {error}")
            continue
        for name in (name for name in ways if name in states):
            _save(path, states | {name: CALLED})
            begin = time.monotonic()
            try:
                ways[name][0]()
                place.settle()
            except Exception as error:
                print(f"{named.name}, {name}: {type(error).__name__}: {error}")
            _save(path, states)
            print(f"{named.name}, {name}: {time.monotonic() - begin:.1f} s", flush=True)


def _save(path: Path, states: dict[str, str]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(states) + "\n")
    new.replace(path)
