"""The `kvx` command in environments that lack what its extras bring: a sentence, and no traceback.

An environment's site-packages hold links to the distributions that it has, as in tests/bare.py.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest

from kvx_adapters.cli.extras import pip_install
from tests.bare import closure, top_level_paths
from tests.native import ROOT

NEEDED = ("numpy", "pydantic", "safetensors", "xxhash")  # dependencies of the package itself
CLI = ("typer", "rich")
CODE = "import sys; from kvx_adapters.cli import main; sys.argv[0] = 'kvx'; main()"


def python_with(folder: Path, *distributions: str) -> Path:
    """The Python of a new environment that has these, and what they require."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in closure(distributions):
        for path in top_level_paths(name):
            if not (site / path.name).exists():
                (site / path.name).symlink_to(path)
    return folder / "bin" / "python"


def kvx(python: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [python, "-c", CODE, *map(str, arguments)],
        env={"PYTHONPATH": str(ROOT), "PATH": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_with(tmp_path_factory.mktemp("bare"), *NEEDED)


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_with(tmp_path_factory.mktemp("cli"), *NEEDED, *CLI)


@pytest.mark.parametrize("arguments", [(), ("demo",), ("doctor",), ("store", "ls", ".")])
def test_without_the_extra_cli(arguments: tuple[str, ...], bare: Path) -> None:
    done = kvx(bare, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "kvx: typer is not installed. The command needs: pip install 'typer>=0.16' 'rich>=14'\n"
    )


def test_the_extra_cli_is_enough_for_help_and_stores(cli: Path, tmp_path: Path) -> None:
    assert "Commands" in kvx(cli).stdout
    assert kvx(cli, "--version").returncode == 0
    assert kvx(cli, "info").returncode == 0
    (tmp_path / "kvx-store.json").write_text('{"format": 3, "chunk_tokens": 128}')
    done = kvx(cli, "store", "ls", tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path} holds no entries.\n")


def test_the_demo_names_what_is_missing(cli: Path) -> None:
    done = kvx(cli, "demo")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvx demo: torch is not installed, and the demo runs the real ")
    assert "`make demo` in a clone of KVX sets them up" in done.stderr


def test_doctor_says_what_to_install(cli: Path) -> None:
    done = kvx(cli, "doctor")
    assert done.returncode == 0  # other engines may be what is wanted
    assert "pip install 'vllm>=0.26,<0.34'; without a GPU `make setup`" in done.stdout


def test_doctor_says_what_reads_a_model(cli: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = kvx(cli, "doctor", "--model", tmp_path)
    assert done.returncode == 1
    assert "pip install 'torch>=2.13' 'transformers>=5.16,<6'" in done.stdout


def test_doctor_needs_no_engine_for_a_store(cli: Path, tmp_path: Path) -> None:
    (tmp_path / "kvx-store.json").write_text('{"format": 3, "chunk_tokens": 128}')
    done = kvx(cli, "doctor", "--store", tmp_path)
    assert done.returncode == 0, done.stdout
    assert "0 entries" in done.stdout


EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("kvx_is_there", [True, False])
def test_an_example_says_what_to_install(path: Path, kvx_is_there: bool, bare: Path) -> None:
    done = subprocess.run(
        [bare, path, *(("model", "prompt") if path.stem == "vllm_to_transformers" else ())],
        env={"PYTHONPATH": str(ROOT)} if kvx_is_there else {},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if path.stem == "needed":
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        return
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert re.match(
        rf"{path.name} needs (torch|vllm), which is not installed\. `make setup` in the clone", line
    )
    assert f"then: .venv/bin/python {path}. " in line
    (extra,) = re.findall(r"pip install '\.\[(\w+)\]'$", line)
    assert (
        extra
        in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )


TORCH = "pip install 'torch>=2.13'"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "from kvx_core import *",
            f"kvx_core.CachedAttention needs torch, which is not installed: {TORCH}",
        ),
        ("from kvx_core import migrate, PrefixStore, Snapshot", ""),
        *(
            (
                f"import kvx_adapters.{name}",
                f"this adapter of KVX needs torch, which is not installed: {TORCH}",
            )
            for name in ("flashinfer", "sglang", "tensorrt_llm", "tgi", "transformers", "vllm")
        ),
        *(
            (f"import kvx_adapters.{name}", "")
            for name in ("kvbm", "llama_cpp", "mlx", "onnxruntime", "openvino")
        ),
    ],
)
def test_imports_without_torch(line: str, sentence: str, bare: Path) -> None:
    done = subprocess.run(
        [bare, "-c", line],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    last = done.stderr.splitlines()[-1:]
    assert last == ([f"ModuleNotFoundError: {sentence}"] if sentence else []), done.stderr


@pytest.mark.parametrize("module", ["benchmarks", "benchmarks.gpu"])
def test_benchmarks_say_that_torch_is_missing(module: str, bare: Path) -> None:
    done = subprocess.run(
        [bare, "-m", module, "out"],
        cwd=ROOT,
        env={},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{module} need")
    assert f" torch, which {bare} does not have" in line


@pytest.mark.parametrize(
    "extra", ["cli", "vllm", "transformers", "openvino", "mlx", "onnxruntime", "sglang"]
)
def test_the_lines_name_what_the_extras_bring(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    words = shlex.split(pip_install(extra))
    assert words == ["pip", "install", *project["optional-dependencies"][extra]]
