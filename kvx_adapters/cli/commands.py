"""The commands of `kvx`: demo, doctor, store, info, --version. The other files do the work."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import kvx_core
from kvx_adapters.cli import store, store_copies, store_explain, store_places

app = typer.Typer(
    help="KVX: one description and one copy engine for paged KV caches.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
store_copies.add_to(store.app)
store_explain.add_to(store.app)
store_places.add_to(store.app)
app.add_typer(store.app, name="store")


class ModelDType(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class EngineDType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


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
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command("info")
def _info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the version, instruction set, threads and CUDA support of this build."""
    if as_json:
        print(json.dumps(dict(_facts()), indent=1))
        return
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
    dtype: Annotated[EngineDType, typer.Option(help="dtype of the test engine.")] = (
        EngineDType.auto
    ),
    kv_cache_dtype: Annotated[str, typer.Option(help="dtype of its KV cache.")] = "auto",
    attention_backend: Annotated[
        str,
        typer.Option(help="Attention backend (default: vLLM's choice); CUSTOM: KVX's, on CUDA."),
    ] = "",
    store: Annotated[
        Path | None,
        typer.Option("--store", help="Check this store, `path` of the connector, and no engine."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Say what KVX does with this model, and start no engine."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object; the lines go to standard error."),
    ] = False,
) -> None:
    """Check that KVX works with the installed vLLM, with a store, with a model.

    Checks versions and the plugin, starts a small test engine, and shows the attention backend,
    instruction set and layout that it chooses. As a self-test, vLLM's own op writes a token and KVX
    reads it back; then the same with the state of a hybrid model. The last lines tell which other
    engines with an adapter are installed.

    With --store or --model it checks only these: whether engines can use the directory, and what
    it holds; what the model's caches hold, and which engines' adapters take them.

    Exits with 0 if every check passes, else with 1. A vLLM that is not installed fails no check
    unless an option is for its test engine.
    """
    from kvx_adapters.cli.doctor_report import Report

    report = Report(as_json=as_json)
    for name, value in _facts():
        report.fact(name, value)
    if store is not None:
        from kvx_adapters.cli.doctor_store import check_store

        report.add_all(check_store(store))
    if model is not None:
        from kvx_adapters.cli.doctor_model import check_model

        report.add_all(check_model(model))
    if store is None and model is None:
        from kvx_adapters.cli.doctor import run_checks
        from kvx_adapters.cli.doctor_engines import engines

        options = {"dtype": dtype.value, "kv_cache_dtype": kv_cache_dtype}
        if attention_backend:
            options["attention_backend"] = attention_backend
        report.add_all(
            run_checks(
                lambda: report.waiting("engine", "a test engine starts"),
                needs_vllm=set(options.values()) != {"auto"},
                **options,
            )
        )
        for name, text in engines():
            report.fact(name, text)
    report.end()
    raise typer.Exit(0 if report.good else 1)


@app.command("demo")
def _demo(
    dtype: Annotated[ModelDType, typer.Option(help="dtype of the model and both caches.")] = (
        ModelDType.float32
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the model's weights.")] = 0,
    max_new_tokens: Annotated[
        int, typer.Option(min=2, max=128, help="Tokens to generate for each prompt.")
    ] = 24,
    corrupt: Annotated[
        bool,
        typer.Option("--corrupt", help="Flip one bit after the migration; verify must find it."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object; the lines go to standard error."),
    ] = False,
) -> None:
    """Prefill with real vLLM, migrate its cache hop by hop, continue with HF transformers.

    On the way the cache goes through memory laid out as TensorRT-LLM's and TGI's; neither runs.
    Then one conversation goes from vLLM through llama.cpp, OpenVINO, MLX and ONNX Runtime to
    transformers, each of which says some words; those that are not installed are left out.

    Exits with 0 if all engines say the same tokens as vLLM alone and every byte arrived (with
    --corrupt: if verify found the flipped bit), else with 1.
    """
    from kvx_adapters.cli.demo_packages import DemoError, check_packages

    try:
        check_packages()
        from kvx_adapters.cli.demo import run

        found = run(
            dtype=dtype.value,
            seed=seed,
            max_new_tokens=max_new_tokens,
            corrupt=corrupt,
            to_stderr=as_json,
        )
    except DemoError as error:
        if as_json:
            print(json.dumps({"kvx": kvx_core.__version__, "good": False, "error": str(error)}))
        Console(stderr=True).print(f"[red]kvx demo:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    if as_json:
        given = {"dtype": dtype.value, "seed": seed, "corrupt": corrupt}
        print(json.dumps({"kvx": kvx_core.__version__} | given | found))
    raise typer.Exit(0 if found["good"] else 1)
