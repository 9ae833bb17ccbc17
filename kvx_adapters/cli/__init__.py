"""The `kvx` command: `kvx demo`, `kvx info`, `kvx --version`. The work is in the other files."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import kvx_core

app = typer.Typer(
    help="KVX: one description and one copy engine for paged KV caches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


class ModelDType(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def _print_version(wanted: bool) -> None:
    if wanted:
        info = kvx_core.backend_info()
        print(f"kvx {kvx_core.__version__} (libkvx {info.version})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print it and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command("info")
def _info() -> None:
    """What this build and this machine offer: version, instruction set, threads, CUDA."""
    backend = kvx_core.backend_info()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in (
        ("kvx", kvx_core.__version__),
        ("libkvx", backend.version),
        ("instruction set", backend.cpu_isa),
        ("threads", str(backend.num_threads)),
        ("cuda", "built in" if backend.has_cuda else "not built"),
    ):
        table.add_row(name, value)
    Console().print(table)


@app.command("demo")
def _demo(
    dtype: Annotated[ModelDType, typer.Option(help="Of the model and both caches.")] = (
        ModelDType.float32
    ),
    seed: Annotated[int, typer.Option(min=0, help="Of the model's weights.")] = 0,
    max_new_tokens: Annotated[
        int, typer.Option(min=2, max=128, help="Tokens that each prompt is continued by.")
    ] = 24,
    corrupt: Annotated[
        bool, typer.Option("--corrupt", help="Flip one bit after migrating; verify must find it.")
    ] = False,
) -> None:
    """Prefill with real vLLM, migrate its cache in one call, continue with HF transformers.

    Exits with 0 if the tokens are the ones that vLLM itself continues with and every byte arrived
    (with --corrupt: if verify found the flipped bit), else with 1.
    """
    from kvx_adapters.cli.demo import DemoError, run

    try:
        good = run(dtype=dtype.value, seed=seed, max_new_tokens=max_new_tokens, corrupt=corrupt)
    except (DemoError, kvx_core.KvxError) as error:
        Console(stderr=True).print(f"[red]kvx demo:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    raise typer.Exit(0 if good else 1)


def main() -> None:
    """Entry point of the `kvx` command."""
    app(prog_name="kvx")
