"""The `kvx` command: `kvx demo`, `doctor`, `info`, `--version`. The work is in the other files."""

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
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _facts():
        table.add_row(name, value)
    Console().print(table)


def _facts() -> list[tuple[str, str]]:
    backend = kvx_core.backend_info()
    return [
        ("kvx", kvx_core.__version__),
        ("libkvx", backend.version),
        ("instruction set", backend.cpu_isa),
        ("threads", str(backend.num_threads)),
        ("cuda", "built in" if backend.has_cuda else "not built"),
    ]


@app.command("doctor")
def _doctor(
    dtype: Annotated[str, typer.Option(help="Of the engine that is looked at.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="Of its KV cache.")] = "auto",
    attention_backend: Annotated[
        str, typer.Option(help="Of it, if not vLLM's choice; CUSTOM is KVX's, on CUDA.")
    ] = "",
) -> None:
    """Whether KVX works with the vLLM that is installed.

    Looks at versions and at the plugin, starts a small engine, and says which attention backend,
    instruction set and layout it resolves. As a self-test vLLM's own op writes a token that KVX
    reads back. Exits with 0 if all is well, else with 1.
    """
    from kvx_adapters.cli.doctor import examine

    options = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    if attention_backend:
        options["attention_backend"] = attention_backend
    console = Console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _facts():
        table.add_row("", name, value)
    good = True
    with console.status("starting an engine"):
        for finding in examine(**options):
            good = good and not finding.problem
            mark = "[red]✗[/]" if finding.problem else "[green]✓[/]"
            table.add_row(mark, finding.name, escape(finding.text))
            if finding.problem:
                table.add_row("", "", f"[red]{escape(finding.problem)}[/]")
    console.print(table)
    raise typer.Exit(0 if good else 1)


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
    """Prefill with real vLLM, migrate its cache hop by hop, continue with HF transformers.

    It goes through memory laid out as TensorRT-LLM's and as TGI's, which are not running.

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
