"""A pseudo-terminal: runs a program as a person runs it, and reads what is on the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Session:
    """A program that has ended.

    output: what it sent to the terminal, with control sequences
    """

    returncode: int
    output: str

    @property
    def lines(self) -> list[str]:
        """What stays on the terminal, without the spaces at the ends of lines.

        Understands what rich sends: carriage return, cursor up, erase line, colours. A line that is
        wider than the terminal stays one line here.
        """
        screen = [""]
        row = 0
        for text, code, end in re.findall(
            r"([^\x1b\r\n]+)|\x1b\[([\d;?]*[A-Za-z])|([\r\n])", self.output
        ):
            if text:
                screen[row] += text
            elif end == "\n":
                row += 1
                screen += [""] * (row == len(screen))
            elif code == "2K":
                screen[row] = ""
            elif code.endswith("A"):
                row = max(0, row - int(code[:-1] or 1))
        return [line.rstrip() for line in screen]


def run_on_terminal(
    command: Sequence[str | Path],
    *,
    columns: int,
    rows: int = 50,
    seconds: float = 300,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Session:
    """Runs a command whose standard input, output and error are a new terminal.

    columns, rows: of the terminal
    environment:   in addition to this one, without COLUMNS and LINES
    Raises TimeoutError, with what the command has printed, after `seconds`; the command and what it
    started are killed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    names = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env=inherited | {"TERM": "xterm-256color"} | dict(environment or {}),
        start_new_session=True,
    )
    os.close(theirs)
    try:
        printed = _read(ours, time.monotonic() + seconds)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        os.close(ours)
        returncode = process.wait()
    return Session(returncode, printed)


def _read(terminal: int, deadline: float) -> str:
    """All that is printed until nobody has the terminal open."""
    printed = b""
    while True:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(
                f"still running, and has printed:\n{printed.decode(errors='replace')}"
            )
        try:
            more = os.read(terminal, 1 << 16)
        except OSError:  # Linux: the last one has closed it
            more = b""
        if not more:
            return printed.decode(errors="replace")
        printed += more
