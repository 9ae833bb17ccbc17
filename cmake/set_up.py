"""Runs the set-up of the Makefile: its output goes to a file, its steps go to the screen.

    python cmake/set_up.py LOG COMMAND ...

Of what the command prints, lines such as "[2/4] torch" are shown, and on a terminal how long it has
been running and the last line. A failure shows the lines before it and the path of the file. Exits
with the command's status. Uses only the standard library.
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

_SHOWN = 20  # lines of the log, after a failure


def _run(log: Path, command: list[str]) -> int:
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process,
    ):
        assert process.stdout is not None
        try:
            _follow(process.stdout, file)
        except KeyboardInterrupt:  # the command has got it, too
            _erase()
            return process.wait() or 130
    if process.returncode:
        _tell(log)
    return process.returncode


def _follow(output: BinaryIO, log: BinaryIO) -> None:
    """Copies the output to the log, and shows what is for the screen."""
    start = time.monotonic()
    rest, last = b"", ""
    with selectors.DefaultSelector() as waiting:
        waiting.register(output, selectors.EVENT_READ)
        while True:
            if waiting.select(timeout=1 if sys.stdout.isatty() else None):
                printed = os.read(output.fileno(), 1 << 16)
                if not printed:
                    break
                log.write(printed)
                log.flush()
                *lines, rest = (rest + printed).split(b"\n")
                for line in (raw.decode(errors="replace").strip() for raw in lines):
                    if re.match(r"\[\d/\d\] ", line):
                        _erase()
                        print(line, flush=True)
                    else:
                        last = line or last
            _progress(int(time.monotonic() - start), last)
    _erase()


def _progress(seconds: int, last: str) -> None:
    """Rewrites the last line of a terminal."""
    if sys.stdout.isatty():
        line = f"      {seconds // 60}:{seconds % 60:02}  {last}".expandtabs()
        columns = os.get_terminal_size(sys.stdout.fileno()).columns or 80
        print(f"\r\x1b[2K{line[: columns - 1]}", end="", flush=True)


def _erase() -> None:
    if sys.stdout.isatty():
        print("\r\x1b[2K", end="", flush=True)


def _tell(log: Path) -> None:
    """Shows the end of the step that failed. make goes on until the other one has ended."""
    lines = log.read_text(errors="replace").splitlines()
    failed = next((i for i, line in enumerate(lines) if "*** " in line), len(lines) - 1)
    print("\nSet-up has failed. The last lines of the step:", file=sys.stderr)
    for line in lines[max(0, failed + 1 - _SHOWN) : failed + 1]:
        print(f"    {line}", file=sys.stderr)
    print(f"The whole log: {log.resolve()}. The next make repeats the step.", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(_run(Path(sys.argv[1]), sys.argv[2:]))
