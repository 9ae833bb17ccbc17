"""docs/site, which `make docs` runs: the reference has every public name, and mkdocs builds a site
without broken links that fetches nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvx_core
from docs.site import c_reference, python_reference
from docs.site.links import HEADERS, rewritten, spaced
from docs.site.prose import Sections, markdown
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


def test_every_name_of_kvx_core_is_there() -> None:
    page = python_reference.page("kvx_core", ROOT, SECTIONS)
    entries = dict(entry.split("\n", 1) for entry in page.split("\n## ")[1:])
    assert [name.replace("\\", "") for name in entries] == list(kvx_core.__all__)
    for name, entry in entries.items():
        code = re.search(r"```python\n(.*?)\n```", entry, re.S)
        assert code is not None
        assert name.replace("\\", "") in code[1]


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
        "[d](source/examples/index.md) [e](source/examples/share_a_prefix.py.md) "
        "[f](https://example.org) `[g](docs/vllm.md)`",
        *text.split("\n")[2:],
    ]
    assert len(targets) == 5
    found, _ = rewritten("[a](../README.md) [b](../benchmarks/README.md)", "docs/blocks.md")
    assert found == "[a](index.md) [b](performance.md)"


def test_lists_and_tables_stand_apart() -> None:
    assert spaced("a\n- b\n- c\n\nd\n| e |") == "a\n\n- b\n- c\n\nd\n\n| e |"
    assert spaced("- a\n  - b\n```\nc\n- d\n```") == "- a\n  - b\n```\nc\n- d\n```"


@pytest.mark.slow
def test_the_site_is_built_and_fetches_nothing(tmp_path: Path) -> None:
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    pages = {str(page.relative_to(site)): page.read_text() for page in site.rglob("*.html")}
    assert {"index.html", "spec.html", "performance.html", "reference/c/kvx_abi.h.html"} <= set(
        pages
    )
    for name, page in pages.items():
        fetched = r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="?(?:https?:)?//'
        assert not re.search(fetched, page), name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", style.read_text()), style
