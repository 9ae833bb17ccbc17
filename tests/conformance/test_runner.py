"""kvx_conformance.runner and the command: engines that end, hang, print or do not start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvx_conformance import report, runner
from kvx_conformance.__main__ import main
from kvx_conformance.case import Outcome
from kvx_conformance.subjects import cases_of

ENGINE = """
import os, signal, time
print("an engine's log")

class Engine:
    write = read = table = facts = None
    def describe(self): {body}
"""
NAMES = ("descriptors.odd_lengths", "facts.facts_are_complete", "descriptors.each_step")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("body", "outcome", "why"),
    [
        ("os._exit(3)", Outcome.CRASH, "the process ended with 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", Outcome.CRASH, "ended by SIGSEGV"),
        ("time.sleep(60)", Outcome.HANG, "no end within its limit"),
        ("raise ZeroDivisionError('of its own')", Outcome.REFUSED, "ZeroDivisionError: of its own"),
    ],
)
def test_what_ends_a_case_ends_no_other(
    folder: Path, body: str, outcome: Outcome, why: str
) -> None:
    """The next case has a new process, and the engine's own words are no results."""
    (folder / "mine.py").write_text(ENGINE.format(body=body))
    known = {case.name: case for case in cases_of("engine")}
    cases = [replace(known[name], seconds=3.0) for name in NAMES]
    found = list(runner.run("engine", "mine:Engine", cases))
    assert [result.case.name for result in found] == list(NAMES)
    assert [result.outcome for result in found] == [outcome] * 3
    assert all(why in result.why for result in found)
    assert report.failed(found) == found
    (rows,) = json.loads(report.as_json({"mine": found})).values()
    assert [row["outcome"] for row in rows] == [outcome] * 3
    assert f"| `{NAMES[0]}` | {cases[0].says} | {outcome} |" in report.as_page({"mine": found})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine", "mine", "-k", "no_such_case"], "names no case; --list shows all"),
        (["engine"], "no SUBJECT; expected MODULE or MODULE:NAME"),
        (["stores", "mine"], "invalid choice: 'stores'"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "subject", "message"),
    [
        ("engine", "nobody", "no module 'nobody'; expected MODULE or MODULE:NAME"),
        (
            "engine",
            "json",
            "json has no describe(); expected MODULE:NAME of a subject of kind engine, w",
        ),
        ("store", "json:nothing", "json has no 'nothing'"),
        (
            "store",
            "json:JSONDecoder",
            "json:JSONDecoder has no match(); expected MODULE:NAME of a subject of kind s",
        ),
        (
            "connector",
            "json",
            "json has no start(); expected MODULE:NAME of a subject of kind connector",
        ),
    ],
)
def test_a_subject_that_is_none(
    kind: str, subject: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=f"{subject} does not start: see above"):
        list(runner.run(kind, subject, cases_of(kind)[:1]))
    assert capfd.readouterr().err.startswith(message)


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--list", "-k", "odd_lengths facts_are"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        *("descriptors.odd_lengths", "facts.facts_are_complete", "facts.facts_are_stable")
    ]
