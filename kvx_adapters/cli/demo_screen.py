"""What the demo prints: its steps, its checks and its tables, on a terminal or into a file."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kvx_adapters.cli.demo_packages import DemoError
from kvx_adapters.cli.demo_tables import WIDE
from kvx_adapters.cli.lines import BAD, GOOD, marked_line
from kvx_core import KvxError

_COLUMNS = 120  # of what goes to a file or a pipe


class Screen:
    """Prints the demo's lines.

    report: what the demo has found, for machines. "checks" are the lines so far: the name of each,
            whether it is good, its text, and of a step its seconds
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.report: dict[str, Any] = {"checks": []}

    @property
    def good(self) -> bool:
        """Whether every check so far is good."""
        return all(check["good"] for check in self.report["checks"])

    @property
    def wide(self) -> bool:
        """Whether tables have their wide form."""
        return self.console.width >= WIDE

    @contextmanager
    def step(self, name: str, doing: str = "") -> Iterator[Callable[[str], None]]:
        """Shows that step `name` is running, then its result and how long it took."""
        said: list[str] = []
        start = time.perf_counter()
        if doing and not self.console.is_terminal:
            self._line(" ", name, f"{doing} ...")
        try:
            with self._live(Spinner("dots", f"{name} {doing}"), turning=True):
                yield said.append
        except Exception:
            self._line(BAD, name, "failed")
            raise
        seconds = time.perf_counter() - start
        self._line(GOOD, name, f"{' '.join(said)} [dim]{seconds:.1f} s[/]")
        self._note(name, True, " ".join(said), seconds=seconds)

    def done(self, name: str, text: str) -> None:
        self.check(name, True, text)

    def check(self, name: str, good: bool, text: str) -> None:
        self._line(GOOD if good else BAD, name, text)
        self._note(name, good, text)

    def _note(self, name: str, good: bool, text: str, **more: float) -> None:
        plain = Text.from_markup(text).plain
        self.report["checks"].append({"name": name, "good": good, "text": plain, **more})

    def _line(self, mark: str, name: str, text: str) -> None:
        """Prints a line; where it is too long, the next one begins below its text."""
        self.console.print(marked_line(mark, name, text, width=8), highlight=False)

    def left_out(self, name: str, why: str, install: str) -> None:
        text = Text(f"{name} is left out: {why}")
        self.console.print(Padding(text, (0, 0, 0, 2)), highlight=False)
        # Not broken into lines, so that it can be copied.
        self.console.print(f"    {escape(install)}", highlight=False, soft_wrap=True)

    def print(self, table: Table) -> None:
        self.console.print(table)

    @contextmanager
    def growing(self, table: Table) -> Iterator[Callable[[], None]]:
        """Shows a table, on a terminal again at each call of what this yields, else at the end."""
        if not self.console.is_terminal:
            yield lambda: None
            self.print(table)
            return
        with self._live(table, turning=False) as shown:
            yield shown.refresh

    def _live(self, shown: RenderableType, *, turning: bool) -> Live:
        """Shows what changes: a spinner, which turns and goes, or a table, which stays.

        rich would replace sys.stdout by default, and print what engines send there, now and later.
        """
        return Live(
            shown,
            console=self.console,
            auto_refresh=turning,
            transient=turning,
            redirect_stdout=False,
            redirect_stderr=False,
        )


@contextmanager
def open_screen(*, to_stderr: bool = False) -> Iterator[Screen]:
    """Sends file descriptors 1 and 2, which the engines print to, to a file; yields the screen.

    The file is removed at the end, but kept if the demo fails; the traceback is its last lines.

    to_stderr: the screen is standard error, not standard output
    Raises DemoError, which names the file, for any exception.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    log = Path(tempfile.mkdtemp(prefix="kvx-log-")) / "engines.log"
    with (
        os.fdopen(os.dup(1), "w", encoding="utf-8") as out,
        os.fdopen(os.dup(2), "w", encoding="utf-8") as err,
    ):
        with log.open("w", encoding="utf-8") as sink:
            os.dup2(sink.fileno(), 1)
            os.dup2(sink.fileno(), 2)
        try:
            yield Screen(_console(err if to_stderr else out))
        except Exception as error:
            traceback.print_exc()
            raise DemoError(f"{_sentence(error)}. The log of the engines is {log}") from error
        except BaseException:
            shutil.rmtree(log.parent)
            raise
        else:
            shutil.rmtree(log.parent)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)


def _console(shown: TextIO) -> Console:
    """As wide as the terminal that `shown` is. rich would ask file descriptors 0 to 2."""
    try:
        columns, rows = os.get_terminal_size(shown.fileno())
    except OSError:
        columns, rows = _COLUMNS, 0
    return Console(file=shown, width=columns or 80, height=rows or 24)


def _sentence(error: Exception) -> str:
    """What KVX says; of another error its type and first line."""
    if isinstance(error, (DemoError, KvxError)):
        return str(error).rstrip(".")
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}".rstrip(".: ")
