"""The demo on a pseudo-terminal: no line of an engine's log, no line wider than the terminal."""

from __future__ import annotations

import io
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from kvx_adapters.cli.demo_hops import Hop, Stop, tgi_cache, trtllm_pool
from kvx_adapters.cli.demo_route import Arrival, Flip, Leg
from kvx_adapters.cli.demo_tables import WIDE, add_leg, hops_table, prompts_table, route_table
from kvx_core import CacheDesc, CacheView, describe, verify
from tests.cli.test_demo import KVX, TITLES, lines_of, needs_engines
from tests.facts import SAME_MODEL
from tests.native import ROOT
from tests.terminal import Session, run_on_terminal

# An engine that prints in every way, as vLLM's logger does: to the sys.stdout of its first import.
PROGRAM = """
import logging, os, sys, time
from kvx_adapters.cli.demo_screen import open_screen

with open_screen() as screen:
    with screen.step("engine", "starting") as say:
        logging.basicConfig(stream=sys.stdout, level=logging.INFO)
        logging.info("through the logger")
        print("by Python")
        print("to standard error", file=sys.stderr)
        os.system("echo by another program")
        time.sleep(0.3)  # the spinner turns
        say("started " * 12)
    with screen.step("decode") as say:
        logging.info("through the logger, later")
        say("done")
    screen.left_out("an engine", "not installed", "pip install " + 9 * "something ")
    %s
"""


def screen_of(last: str, columns: int, **environment: str) -> Session:
    return run_on_terminal(
        [sys.executable, "-c", PROGRAM % last],
        columns=columns,
        cwd=ROOT,
        environment={"PYTHONPATH": str(ROOT), **environment},
    )


def test_what_an_engine_prints_stays_off_the_terminal() -> None:
    done = screen_of("", columns=60, COLUMNS="200")
    assert done.returncode == 0, done.output
    assert [re.sub(r"\d+\.\d s", "0.0 s", line) for line in done.lines] == [
        "✓ engine   started started started started started started",
        "           started started started started started started",
        "           0.0 s",
        "✓ decode   done 0.0 s",
        "  an engine is left out: not installed",
        "    pip install " + " ".join(9 * ["something"]),
        "",
    ]
    assert "engine starting" in done.output  # beside the spinner


def test_a_failure_names_the_log(tmp_path: Path) -> None:
    raising = "raise RuntimeError('no memory\\nfor the engine')"
    # From 3.13 on Python has colours of its own for tracebacks.
    done = screen_of(raising, 100, TMPDIR=str(tmp_path), PYTHON_COLORS="0")
    assert done.returncode == 1
    (log,) = tmp_path.glob("kvx-log-*/engines.log")
    text = " ".join(done.output.split())
    assert text.endswith(f"DemoError: RuntimeError: no memory. The log of the engines is {log}")
    kept = log.read_text()
    for printed in ("through the logger", "by Python", "to standard error", "by another program"):
        assert printed in kept
    assert kept.endswith("RuntimeError: no memory\nfor the engine\n")


@pytest.mark.parametrize("columns", [WIDE, WIDE - 1, 80, 60])
def test_tables_fit(columns: int) -> None:
    """Also at the width at which they change their form: nothing is cut off."""
    lengths = [70, 1, 17]
    k, v = torch.randn(2, 3, 70, 2, 64)
    layer = CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))
    view = CacheView(layers=(layer,), facts=SAME_MODEL, dense=True)
    chance = random.Random(0)
    stops = [Stop("HF transformers", "block table", view.at())]
    stops += [make(view, lengths, chance) for make in (trtllm_pool, tgi_cache)]
    arrived = verify(stops[0].span, stops[0].span, lengths)
    hops = [Hop(12_340_000, 0.01234, 0.01234, arrived)] * 2
    flip = Flip(0, "K", arrived, arrived)
    arrival = Arrival(110, 450_600, 0.01234, 0.01234, 0.01234, arrived, flip)
    wide = columns >= WIDE
    route = route_table(6, wide=wide)
    add_leg(route, Leg("HF transformers", [1] * 22, 0.1105, arrival, []), "a word", wide=wide)
    console = Console(file=io.StringIO(), width=columns)
    with console.capture() as shown:
        console.print(hops_table(stops, hops, wide=wide))
        console.print(
            prompts_table(
                lambda _: "a word", [91, 39, 29, 9, 1], [[1]] * 5, [[1]] * 5, 692_000, wide=wide
            )
        )
        console.print(route)
    text = shown.get()
    assert max(map(len, text.splitlines())) <= columns
    assert re.search(r"(?<!│ )…", text) is None  # only the prompts' ends begin so
    for word in ("HF transformers", "TensorRT-LLM *", "[H, D/4, T, 4]", "KV_OFFSETS", "12.34"):
        assert word in text
    assert text.count("equal") >= 3


def test_doctor_fits(tmp_path: Path) -> None:
    code = [
        "-c",
        KVX,
        "doctor",
        "--store",
        tmp_path / "a-store-that-is-not-there-and-has-a-long-name",
    ]
    done = run_on_terminal([sys.executable, *code], columns=60, cwd=ROOT)
    assert done.returncode == 0, done.output
    shown = done.lines
    assert max(map(len, shown)) <= 60
    start = next(i for i, line in enumerate(shown) if line.startswith("✓  store            /"))
    assert all(line.startswith(" " * 20) for line in shown[start + 1 :] if line)
    joined = "".join(line.strip() for line in shown[start:])
    assert "a-store-that-is-not-there-and-has-a-long-name" in joined.replace(" ", "")


@needs_engines
@pytest.mark.slow
def test_the_demo_fits(tmp_path: Path) -> None:
    """In few columns; test_demo.py has it without a terminal."""
    done = run_on_terminal(
        [sys.executable, "-c", KVX, "demo"],
        columns=60,
        rows=24,
        cwd=ROOT,
        environment={"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.output
    assert list(tmp_path.glob("kvx-*")) == []
    for sign in ("INFO", "WARNING", "it/s", "Loading", "vllm.", "%|"):
        assert sign not in done.output
    shown = done.lines
    assert max(map(len, shown)) <= 60
    text = "\n".join(shown)
    lines = lines_of(text)
    assert list(lines) == [
        *("model", "vLLM", "prefill", "HF", "describe", "verify", "decode", "tokens", "control"),
        *("engines", "arrived", "flipped", "answer", "zeros"),
    ]
    assert all(line.startswith("✓") for line in lines.values())

    tables = re.findall(r"^┏.*?^└[^\n]*", text, re.M | re.S)
    assert len(tables) == 3
    for table in tables:  # all borders are straight
        assert len({len(line) for line in table.splitlines()}) == 1
        assert (
            len(
                {
                    tuple(m.start() for m in re.finditer("[│┃]", line))
                    for line in table.splitlines()
                    if line[0] in "│┃"
                }
            )
            == 1
        )
    first_cells = [re.findall(r"^│ (.*?) +│", table, re.M) for table in tables]
    for name in ("vLLM", "TensorRT-LLM *", "TGI *", "HF transformers"):
        assert name in first_cells[0]
    assert tables[0].count("equal") == 3
    assert len(re.findall(r" yes +│", tables[1])) == 5
    assert [cell for cell in first_cells[2] if cell in TITLES] == TITLES
    assert tables[2].count("equal") == 5
    assert tables[2].count("kB") == 5
