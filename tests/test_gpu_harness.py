"""`make gpu` on a machine without a GPU: everything but the GPU's own lines runs."""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from benchmarks.gpu.steps import Step, run
from tests.calls import HOSTGRID

ROOT = Path(__file__).parents[1]


def python(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("memory", ["host", "device"])
def test_every_benchmark_copies_what_torch_does(memory: str, tmp_path: Path) -> None:
    library = {"KVX_LIBRARY": HOSTGRID.library()._name} if memory == "device" else {}
    rehearsal = ("-m", "benchmarks.gpu.bench", "--rehearse", memory, "--results", str(tmp_path))
    said = python(*rehearsal, **library)
    for name in ("== write ==", "== gather ==", "== migrate =="):
        assert name in said
    assert not list(tmp_path.iterdir()), "a rehearsal is no result"


def test_kvx_core_needs_pydantic_for_geometry_alone() -> None:
    said = python(
        "-c",
        "import sys; sys.modules['pydantic'] = None\n"
        "import kvx_core\n"
        "try: kvx_core.CacheGeometry\n"
        "except ImportError as error: print(error.name)\n"
        "try: kvx_core.no_such_name\n"
        "except AttributeError as error: print(error)\n",
    )
    assert said.splitlines() == [
        "pydantic",
        "module 'kvx_core' has no attribute 'no_such_name'",
    ]


@pytest.mark.parametrize(
    ("code", "verdict", "said"),
    [
        ("print('a'); print('b')", "passed", "b"),
        ("print('a'); raise SystemExit(3)", "failed", "a"),
        ("print('no such device'); raise SystemExit(3)", "not there", "no such device"),
        ("print('a', flush=True); import time; time.sleep(60)", "timed out", "a"),
    ],
)
def test_a_step(code: str, verdict: str, said: str) -> None:
    log = StringIO()
    step = Step("step", [sys.executable, "-c", code], seconds=3, absent="no such device")
    outcome = run(step, log)
    assert (outcome.verdict, outcome.said) == (verdict, said)
    assert said in log.getvalue()


def test_a_tool_that_is_not_installed_is_not_there() -> None:
    outcome = run(Step("step", ["no-such-tool"], 3), StringIO())
    assert outcome.verdict == "not there"
    assert not outcome.failed
