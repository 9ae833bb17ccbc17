"""First calls of others' kernels in `python3 -m benchmarks.gpu`, which may compile for minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.gpu import families, peers, schedule, warm
from benchmarks.gpu.cases import Case, Named
from benchmarks.gpu.places import Rehearsal
from benchmarks.gpu.schedule import Request
from kvx_core import Memory

PLACE = Rehearsal(Memory.HOST)


def cases(**ways: Callable[[], None]) -> Iterator[Named]:
    """Two; each way's first call of several counts."""
    for name in ("one", "two"):
        calls = {way: [call, lambda: pytest.fail("a second call")] for way, call in ways.items()}
        yield Named(name, lambda calls=calls: Case(calls, (), 1, families.BESIDE))  # type: ignore[misc]


def test_each_peer_is_called_once_in_each_case(tmp_path: Path) -> None:
    called: list[str] = []
    ways = {name: (lambda name=name: called.append(name)) for name in ("kvx", "a", "b")}
    warm.call(PLACE, cases(**ways), {"a", "b"}, tmp_path)  # type: ignore[arg-type]
    assert called == ["a", "b", "a", "b"]


def test_a_call_that_does_not_end_leaves_its_name(tmp_path: Path) -> None:
    """A time limit may kill the process at any time."""
    during: list[set[str]] = []

    def look() -> None:
        during.append(warm.unfinished(tmp_path))

    assert warm.unfinished(tmp_path) == set()
    warm.call(PLACE, cases(quick=lambda: None, slow=look), {"quick", "slow"}, tmp_path)
    assert during == [{"slow"}, {"slow"}]
    assert warm.unfinished(tmp_path) == set()


def test_what_fails_is_left_to_the_benchmark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ValueError("no such architecture")

    warm.call(PLACE, cases(a=fail), {"a"}, tmp_path)
    assert "one, a: ValueError: no such architecture" in capsys.readouterr().out
    assert warm.unfinished(tmp_path) == set()


def test_a_peer_that_did_not_end_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_vllm", "_flashinfer"):
        monkeypatch.setattr(peers, name, lambda: "a writer")
    found = peers.find(PLACE, "write", {"flashinfer"})
    assert found.absent == {"flashinfer": "its first call did not end"}
    assert list(found.writers) == ["vllm"]


def test_peers_compile_before_anything_is_measured(tmp_path: Path) -> None:
    steps = list(schedule.steps(Request(tmp_path)))
    names = [step.name for step in steps]
    at = names.index("peers")
    assert names[at + 1] == "write"
    assert "--warm" in steps[at].command
    assert steps[at].seconds > steps[at + 1].seconds
