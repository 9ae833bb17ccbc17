"""docs/site, which `make docs` runs: the reference has every public name, and mkdocs builds a site
without broken links that fetches nothing, has links that edit a page and searches no sources."""

from __future__ import annotations

import ast
import json
import logging
import re
import tomllib
from pathlib import Path

import griffe
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from docs.site import c_reference
from docs.site.hook import source_of
from docs.site.links import HEADERS, rewritten, spaced
from docs.site.prose import Sections, markdown
from docs.site.sources import Prose
from tests.native import ROOT

SECTIONS = Sections((ROOT / "docs/spec.md").read_text(), "spec.md")
HEADER_FILES = sorted(path for path in (ROOT / HEADERS).glob("*.h") if path.name != "kvx_ext.h")


@pytest.mark.parametrize("header", HEADER_FILES, ids=lambda path: path.name)
def test_every_declaration_of_a_header_is_there(header: Path) -> None:
    text, page = header.read_text(), c_reference.page(header, SECTIONS)
    functions = re.findall(r"^KVX_API [^(;]*?\b((?:kvx|kvbm_kernels)_\w+)\(", text, re.M)
    types = re.findall(r"^(?:\} |typedef [^{;]*?)\(?\*?(kvx_\w+_t)(?:;|\)\()", text, re.M)
    assert functions or types or header.name == "kvx_plane.h"
    headings = [line.replace("\\", "") for line in page.split("\n") if line.startswith("### ")]
    assert {*functions, *types} <= set(re.findall(r"\w+", " ".join(headings)))
    declared = [
        line for line in text.split("\n") if re.match(r"KVX_API |  KVX_\w+ = |  \w.*;", line)
    ]
    assert [line for line in declared if line not in page] == []


@pytest.fixture(scope="module")
def sources() -> griffe.Module:
    """kvx_core as mkdocstrings has it."""
    extensions = griffe.load_extensions("unpack_typeddict", "dataclasses", Prose)
    core = griffe.load("kvx_core", search_paths=[ROOT], extensions=extensions)
    assert isinstance(core, griffe.Module)
    return core


def test_fields_have_the_comments_beside_them(sources: griffe.Module) -> None:
    info = sources["BackendInfo"]
    assert info.docstring.value.split("\n") == [
        "What this libkvx and this machine offer.",
        "",
        "- **`version`** `str`: of libkvx",
        "",
        "- **`has_cuda`** `bool`: built with CUDA kernels",
        "",
        "- **`num_threads`** `int`: that a large call on HOST memory uses",
        "",
        '- **`cpu_isa`** `str`: "avx512vbmi", "avx512", "avx2" or "portable"',
        "",
        "- **`stream_bytes`** `int`: calls that move at least this many bytes store past the "
        "caches",
    ]
    axis = sources["types.Axis"].docstring.value
    assert "\n- **`DIM`** = `3`" in axis
    view = sources["desc.view.CacheView"].docstring.value
    asked = (
        "- **`outdated`** `Callable[[], str | None] | None`: Asked before each use: why the engine"
    )
    assert asked in view  # a comment above, of two lines and more
    assert "of F4\\_E2M1. Spec: [E.14](../../spec.md#e14-" in view
    assert "_held" not in view
    assert "**`read_only`**" not in view  # init=False


def test_methods_that_say_nothing_are_hidden(sources: griffe.Module) -> None:
    view = sources["desc.view.CacheView"]
    assert {"at", "__init__", "table_of"} <= set(view.members)
    assert not {"_held", "__post_init__", "_bytes"} & set(view.members)


def test_docstrings_are_lists_of_parameters(sources: griffe.Module) -> None:
    """Of a module the first line says what it is; of others it may be a parameter."""
    assert sources["ops.migrate"].docstring.value.startswith(
        "migrate: sequences from one engine's cache"
    )
    made = sources["stores.store_reader.StoreReader.__init__"].docstring.value
    assert made.strip().startswith("- **`secrets`**: the keys that files are signed and encrypted")
    parameters = [parameter.name for parameter in sources["ops.migrate.migrate"].parameters]
    assert parameters[:3] + parameters[-1:] == ["src", "dst", "seq_lens", "transfer"]
    text = sources["set_num_threads"].docstring.value
    assert "\n- **`num_threads`**: 1: the caller alone; 0: the default, $KVX" in text
    assert "\n\nRaises InvalidArgumentError." in text


def test_comments_become_markdown() -> None:
    text = """Writes new_tokens, see `a_b`.
No parameter: this is text.

key, value: (num_tokens, 3),
            any strides
slots:      [num_tokens]
Mutates a*b < c. Spec: 5.1
  - one
    thing
  - another

    write_kv(cache)

    more(cache)
"""
    found = markdown(text, SECTIONS, "python").split("\n")
    assert list(filter(None, found)) == [
        "Writes new\\_tokens, see `a_b`.",
        "No parameter: this is text.",
        "- **`key, value`**: (num\\_tokens, 3),",
        "  any strides",
        "- **`slots`**: \\[num\\_tokens\\]",
        "Mutates a\\*b &lt; c. Spec: [5.1](spec.md#51-block-table-formats)",
        "- one",
        "  thing",
        "- another",
        "```python",
        "write_kv(cache)",
        "more(cache)",
        "```",
    ]


def test_links_lead_to_pages_of_the_site() -> None:
    text = """[a](docs/vllm.md#layouts) ![b](docs/hub.svg) [c](csrc/include/kvx/kvx_plan.h)
[d](examples) [e](examples/share_a_prefix.py) [f](https://example.org) `[g](docs/vllm.md)`
```
[h](docs/vllm.md)
```"""
    found, targets = rewritten(text, "README.md")
    assert found.split("\n") == [
        "[a](vllm.md#layouts) ![b](hub.svg) [c](reference/c/kvx_plan.h.md)",
        "[d](examples.md) [e](source/examples/share_a_prefix.py.md) "
        "[f](https://example.org) `[g](docs/vllm.md)`",
        *text.split("\n")[2:],
    ]
    assert len(targets) == 5
    found, _ = rewritten("[a](../README.md) [b](../benchmarks/README.md)", "docs/blocks.md")
    assert found == "[a](index.md) [b](benchmarks.md)"


def test_lists_and_tables_stand_apart() -> None:
    assert spaced("a\n- b\n- c\n\nd\n| e |") == "a\n\n- b\n- c\n\nd\n\n| e |"
    assert spaced("- a\n  - b\n```\nc\n- d\n```") == "- a\n  - b\n```\nc\n- d\n```"


def test_the_edit_link_waits_for_a_repository() -> None:
    config = load_config(str(ROOT / "mkdocs.yml"))
    assert (config.repo_url, config.edit_uri) == ("", "edit/main/")
    config.plugins.on_startup(command="build", dirty=False)
    assert config.plugins.on_config(config).edit_uri is None
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert config.site_name == f"KVX {version}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does it, in a repository that has an address."""
    path = tmp_path_factory.mktemp("site")
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mkdocs").addHandler(handler)
    config = load_config(
        str(ROOT / "mkdocs.yml"), site_dir=str(path), repo_url="https://github.com/someone/kvx"
    )
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    logging.getLogger("mkdocs").removeHandler(handler)
    assert warned == []
    return path


@pytest.mark.slow
def test_the_site_fetches_nothing(site: Path) -> None:
    pages = {str(page.relative_to(site)): page.read_text() for page in site.rglob("*.html")}
    assert {"index.html", "spec.html", "performance.html", "reference/c/kvx_abi.h.html"} <= set(
        pages
    )
    for name, page in pages.items():
        fetched = r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="?(?:https?:)?//'
        assert not re.search(fetched, page), name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", style.read_text()), style


@pytest.mark.slow
def test_every_public_name_has_an_entry(site: Path) -> None:
    """Of every module: also those of which a module below it has the name."""
    pages = sorted((site / "reference/python").glob("*.html"))
    assert len(pages) > 20
    for path in pages:
        entries = re.findall(r'<h2 id="([\w.]+)"', path.read_text())
        names = [entry.rpartition(".")[2] for entry in entries]
        source = (ROOT / source_of(path.stem)).read_text()
        public = re.search(r"^__all__ = (\[.*?\])", source, re.M | re.S)
        if public:
            assert sorted(names) == sorted(ast.literal_eval(public[1])), path.stem
        assert names, path.stem


@pytest.mark.slow
def test_parameters_are_a_list(site: Path) -> None:
    page = (site / "reference/python/kvx_core.html").read_text()
    migrate = page.partition('<h2 id="kvx_core.migrate"')[2].partition("<h2")[0]
    for parameter in ("src, dst", "seq_lens", "same_model", "hadamard_k, hadamard_v"):
        assert f"<strong><code>{parameter}</code></strong>: " in migrate, parameter


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "path"),
    [
        ("index", "README.md"),
        ("stores", "docs/stores.md"),
        ("benchmarks", "benchmarks/README.md"),
        ("reference/python/kvx_core.stores", "kvx_core/stores/__init__.py"),
        ("reference/c/kvx_abi.h", "csrc/include/kvx/kvx_abi.h"),
        ("source/examples/torch_caches.py", "examples/torch_caches.py"),
    ],
)
def test_a_page_can_be_edited(site: Path, page: str, path: str) -> None:
    text = (site / f"{page}.html").read_text()
    (link,) = re.findall(r'href="?(https://github.com/someone/kvx/edit/[^" >]+)', text)
    assert link == f"https://github.com/someone/kvx/edit/main/{path}"
    assert (ROOT / path).is_file()


@pytest.mark.slow
def test_the_search_finds_pages_and_no_sources(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"stores.html", "reference/c/kvx_abi.h.html", "performance.html"} <= found
    assert [page for page in found if page.startswith("source/")] == []
    assert not {"requirements.html", "changelog.html", "benchmarks.html"} & found
