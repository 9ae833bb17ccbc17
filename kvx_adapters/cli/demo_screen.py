"""What the demo prints: its steps and checks, and two tables."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvx_adapters.cli.demo_hops import TIMED_CALLS, Hop, Stop
from kvx_adapters.cli.demo_model import PROMPTS, QUESTION
from kvx_adapters.cli.demo_route import Leg
from kvx_core import Layout, TensorDesc


def hops_table(stops: Sequence[Stop], hops: Sequence[Hop]) -> Table:
    """A table of the caches, with the migration into each of them."""
    table = Table(
        title="The prompts' keys and values, from cache to cache",
        title_justify="left",
        caption="K and V in a block: H heads, T tokens, D dims, as their bytes follow each other. "
        f"again: median of {TIMED_CALLS} calls.\n* memory laid out and addressed as that engine's; "
        "the engine itself is not running",
        caption_justify="left",
    )
    for name in ("cache of", "K in a block", "V in a block"):
        table.add_column(name)
    table.add_column("tokens", justify="right")
    table.add_column("found by")
    for name in ("MB", "first ms", "again ms", "GB/s"):
        table.add_column(name, justify="right")
    table.add_column("verify")
    for stop, hop in zip(stops, (None, *hops), strict=True):
        layer = stop.span.view.layers[0]
        cells = [
            stop.cache_of,
            *(escape(_in_memory(half)) for half in layer.tensors.values()),
            str(layer.block_size),
            stop.found_by,
        ]
        if hop is None:
            cells += ["", "", "", "", "source"]
        else:
            cells += [
                f"{hop.num_bytes / 1e6:.2f}",
                f"{hop.first * 1e3:.2f}",
                f"{hop.again * 1e3:.2f}",
                f"{hop.num_bytes / hop.again / 1e9:.1f}",
                "[green]equal[/]" if hop.arrived.ok else "[red]differs[/]",
            ]
        table.add_row(*cells)
    return table


def _in_memory(half: TensorDesc) -> str:
    """The axes of a block of K or V, the one with the longest step first."""
    axes = ["T", "H", "D"] if half.layout is Layout.BLOCK_NHD else ["H", "T", "D"]
    if half.ndim == 5:
        axes = ["H", f"D/{half.shape[4]}", "T", str(half.shape[4])]
    steps = sorted(zip(half.stride[1:], axes, strict=True), key=lambda step: -step[0])
    return f"[{', '.join(axis for _, axis in steps)}]"


def prompts_table(
    text: Callable[[list[int]], str],
    prompt_lens: list[int],
    from_vllm: list[list[int]],
    from_hf: list[list[int]],
    num_bytes: int,
) -> Table:
    """A table of how the prompts go on.

    text: of tokens
    """
    table = Table(title="Prompts, and how they go on", title_justify="left")
    table.add_column("prompt ends")
    table.add_column("tokens", justify="right")
    table.add_column("kB moved", justify="right")
    table.add_column("vLLM goes on")
    table.add_column("HF goes on from the migrated cache")
    table.add_column("equal")
    for prompt, length, ours, theirs in zip(PROMPTS, prompt_lens, from_vllm, from_hf, strict=True):
        table.add_row(
            escape(prompt if len(prompt) <= 16 else f"…{prompt[-15:]}"),
            str(length),
            f"{num_bytes * length / sum(prompt_lens) / 1e3:.1f}",
            escape(text(ours)),
            escape(text(theirs)),
            "[green]yes[/]" if ours == theirs else "[red]no[/]",
        )
    return table


def route_table(num_engines: int) -> Table:
    """An empty table of the route, for `add_leg`."""
    table = Table(
        title=f"One conversation through {num_engines} engines. {escape(QUESTION)}",
        title_justify="left",
        caption="words ms: the engine says its words, vLLM behind its prefill. room ms: the engine "
        "makes room for the cache. KVX ms: both caches are described, their facts compared, all "
        f"tokens before the words copied in one call. again: median of {TIMED_CALLS} calls.",
        caption_justify="left",
    )
    table.add_column("engine", no_wrap=True)
    table.add_column("says")
    for name in ("tokens", "words ms", "room ms", "KVX ms", "again ms", "kB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verify", no_wrap=True)
    return table


def add_leg(table: Table, leg: Leg, text: str) -> None:
    """Adds what an engine has said to the table.

    text: of its tokens
    """
    arrival = leg.arrival
    cells = ["", "", "", "", "start"]
    if arrival is not None:
        cells = [
            f"{arrival.room * 1e3:.2f}",
            f"{arrival.moved * 1e3:.2f}",
            f"{arrival.again * 1e3:.2f}",
            f"{arrival.num_bytes / 1e3:.1f}",
            "[green]equal[/]" if arrival.verification.ok else "[red]differs[/]",
        ]
    spoke = f"{leg.spoke * 1e3:.1f}"
    table.add_row(leg.title, escape(text.strip()), str(len(leg.tokens)), spoke, *cells)


class Screen:
    """Prints the demo's lines. What engines print goes to `log`, which is shown if they fail.

    report: what the demo has found, for machines. "checks" are the lines so far: the name of each,
            whether it is good, its text, and of a step its seconds
    """

    def __init__(self, console: Console, log: Path) -> None:
        self.console = console
        self.log = log
        self.report: dict[str, Any] = {"checks": []}

    @property
    def good(self) -> bool:
        """Whether every check so far is good."""
        return all(check["good"] for check in self.report["checks"])

    @contextmanager
    def step(self, name: str, doing: str = "") -> Iterator[Callable[[str], None]]:
        """Shows that step `name` is running, then its result and how long it took."""
        said: list[str] = []
        start = time.perf_counter()
        if doing and not self.console.is_terminal:
            self.console.print(f"  {name:<8} {doing} ...", highlight=False)
        try:
            with self.console.status(f"{name} {doing}"):
                yield said.append
        except Exception:
            self.console.print(f"[red]✗[/] {name:<8} failed. The engines' last words:")
            self.console.print(escape("\n".join(self.log.read_text().splitlines()[-30:])))
            raise
        seconds = time.perf_counter() - start
        self._line(name, True, f"{' '.join(said)} [dim]{seconds:.1f} s[/]")
        self._note(name, True, " ".join(said), seconds=seconds)

    def done(self, name: str, text: str) -> None:
        self.check(name, True, text)

    def check(self, name: str, good: bool, text: str) -> None:
        self._line(name, good, text)
        self._note(name, good, text)

    def _note(self, name: str, good: bool, text: str, **more: float) -> None:
        plain = Text.from_markup(text).plain
        self.report["checks"].append({"name": name, "good": good, "text": plain, **more})

    def _line(self, name: str, good: bool, text: str) -> None:
        mark = "[green]✓[/]" if good else "[red]✗[/]"
        self.console.print(f"{mark} {name:<8} {text}", highlight=False)

    def left_out(self, name: str, why: str, install: str) -> None:
        self.console.print(f"  {escape(name)} is left out: {escape(why)}", highlight=False)
        self.console.print(f"    {escape(install)}", highlight=False)

    def print(self, table: Table) -> None:
        self.console.print(table)

    @contextmanager
    def growing(self, table: Table) -> Iterator[Callable[[], None]]:
        """Shows a table, on a terminal again at each call of what this yields, else at the end."""
        if not self.console.is_terminal:
            yield lambda: None
            self.print(table)
            return
        with Live(
            table,
            console=self.console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as shown:
            yield shown.refresh


@contextmanager
def open_screen(*, to_stderr: bool = False) -> Iterator[Screen]:
    """Sends file descriptors 1 and 2, which the engines print to, to a file; yields the screen.

    to_stderr: the screen is standard error, not standard output
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with (
        tempfile.TemporaryDirectory(prefix="kvx-log-") as directory,
        os.fdopen(os.dup(1), "w", encoding="utf-8") as out,
        os.fdopen(os.dup(2), "w", encoding="utf-8") as err,
    ):
        log = Path(directory) / "engines.log"
        shown = err if to_stderr else out
        console = Console(file=shown)
        with log.open("w", encoding="utf-8") as sink:
            os.dup2(sink.fileno(), 1)
            os.dup2(sink.fileno(), 2)
            try:
                yield Screen(
                    console if console.is_terminal else Console(file=shown, width=120), log
                )
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
