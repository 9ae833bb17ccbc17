"""What `kvx doctor` prints: a line for each check when it is done, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner

import kvx_core
from kvx_adapters.cli.doctor import Check
from kvx_adapters.cli.lines import BAD, GOOD, marked_line
from kvx_core.errors import printable

_NAMES = 15  # columns
_PIPED = 5000  # columns of what goes to a file or a pipe


class Report:
    """Prints lines, to standard error where JSON follows, and remembers them."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._checks: list[dict[str, Any]] = []
        console = Console(stderr=as_json)
        self._console = console if console.is_terminal else Console(stderr=as_json, width=_PIPED)

    @property
    def good(self) -> bool:
        """Whether no check has failed."""
        return not any(check["problem"] for check in self._checks)

    def fact(self, name: str, text: str) -> None:
        """Prints what is no check."""
        self.add(Check(name, text, is_fact=True))

    def add(self, check: Check) -> None:
        """Prints a check."""
        mark = " " if check.is_fact else BAD if check.problem else GOOD
        self._print(mark, check.name, _shown(check.text))
        for line in check.problem.split("\n"):
            if line:
                self._print("", "", f"[red]{_shown(line)}[/]")
        self._checks.append(
            {
                "name": check.name,
                "good": None if check.is_fact else not check.problem,
                "text": check.text,
                "problem": check.problem,
            }
        )

    def add_all(self, checks: Iterable[Check]) -> None:
        """Prints checks, each when it is done; on a terminal a spinner turns meanwhile."""
        with Live(
            Spinner("dots", "checking"),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ):
            for check in checks:
                self.add(check)

    def waiting(self, name: str, text: str) -> None:
        """Says in a pipe what takes time; on a terminal a spinner shows it."""
        if not self._console.is_terminal:
            self._print(" ", name, f"{_shown(text)} ...")

    def end(self) -> None:
        """Prints the JSON object."""
        if self._as_json:
            found = {"kvx": kvx_core.__version__, "good": self.good, "checks": self._checks}
            print(json.dumps(found, indent=1))

    def _print(self, mark: str, name: str, text: str) -> None:
        line = marked_line(mark, name, text, width=_NAMES, gap=2)
        self._console.print(line, highlight=False)


def _shown(text: str) -> str:
    """Text that may quote files, as a line of markup."""
    return escape(printable(text))
