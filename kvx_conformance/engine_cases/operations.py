"""A cache in the middle of an operation is refused, or read as it will be after it."""

from __future__ import annotations

import numpy as np

from kvx_conformance import memory
from kvx_conformance.case import Wrong
from kvx_conformance.engine_probe import REFUSALS, Probe, engine_case
from kvx_conformance.plain import Plain
from kvx_core import migrate


@engine_case("docs/openvino.md: start_async; docs/mlx.md: prepare; docs/llama_cpp.md: seq_add")
def the_middle_is_refused(probe: Probe) -> None:
    """While an operation is under way a move is refused or gives the tokens as they are after it,
    by a span made before it or in it."""
    probe.part("operation")
    for when in ("before", "in"):
        one = probe.another()
        one.filled()
        kept = one.span() if when == "before" else None
        plain, held, moved = one.plain(), one.held(), False
        with one.engine.operation():
            held = held if kept else one.held()
            try:
                migrate(kept or one.span(), plain.span, held)
                moved = True
            except REFUSALS:
                pass
        del kept
        if moved:
            _require_as_after(one, plain, held, when)


@engine_case("docs/mlx.md: finalize() moves the tokens of a batch")
def the_end_is_right(probe: Probe) -> None:
    """After the operation the cache is described again, and each token stands where it says."""
    probe.part("operation")
    probe.filled()
    with probe.engine.operation():
        pass
    probe.require_as_described()
    plain, held = probe.plain(), probe.held()
    migrate(probe.span(), plain.span, held)
    _require_as_after(probe, plain, held, "after")


@engine_case("docs/openvino.md: a request that runs writes into the pools")
def the_middle_is_not_written(probe: Probe) -> None:
    """While an operation is under way a move into the cache is refused, or its tokens are there
    after it."""
    probe.part("operation")
    probe.filled()
    plain, held = probe.plain(), probe.held()
    migrate(probe.span(), plain.span, held)
    for tensor in memory.tensors(plain.view).values():
        found = memory.elements(tensor)
        if len(found.shape) == 5:
            found[...] = np.array(found)[..., ::-1, :]
    with probe.engine.operation():
        try:
            migrate(plain.span, probe.span(), held)
        except REFUSALS:
            return
    _require_as_after(probe, plain, held, "in")


def _require_as_after(probe: Probe, plain: Plain, held: list[int], when: str) -> None:
    for row, sequence in enumerate(probe.ids):
        first = plain.firsts[row]
        for i in range(held[row]):
            key, _ = plain.token(row, i)
            now = probe.read(sequence, first + i)[0]
            if (np.abs(key - now) > probe.rounding() * np.abs(now).max()).any():
                raise Wrong(
                    f"a move {when} an operation was taken, and K of sequence {sequence}, position "
                    f"{first + i} is not that of the engine after it"
                )
