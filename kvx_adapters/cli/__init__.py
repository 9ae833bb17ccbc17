"""The `kvx` command. Its packages come with the extra `cli`; without them it says so."""

from __future__ import annotations

import sys

from kvx_adapters.cli.extras import pip_install

_PACKAGES = ("typer", "rich")


def main() -> None:
    """Entry point of the `kvx` command."""
    try:
        from kvx_adapters.cli.commands import app
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        sys.exit(f"kvx: {error.name} is not installed. The command needs: {pip_install('cli')}")
    app(prog_name="kvx")
