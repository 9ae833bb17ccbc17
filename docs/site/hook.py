"""What mkdocs builds besides the pages of docs/: the README and others as pages, the reference of C
and of Python, and the sources that pages link to; the version, and links that edit a page."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

from docs.site import c_reference
from docs.site.links import (
    HEADERS,
    PAGES,
    ROOT,
    rewritten,
    site_path,
    source_page,
    sources_in,
    text_of,
)
from docs.site.prose import Sections

NO_SEARCH = "---\nsearch: {exclude: true}\n---\n"
# Lists of everything, which any word finds.
_NOT_SEARCHED = ("docs/requirements.md", "CHANGELOG.md", "benchmarks/README.md")


def headers() -> list[str]:
    """Those that say something; kvx_ext.h includes the others."""
    found = sorted((ROOT / HEADERS).glob("*.h"))
    return [HEADERS + path.name for path in found if path.name != "kvx_ext.h"]


def modules() -> list[str]:
    """The modules of kvx_core that list their names, and the adapters."""
    core = [
        path.parent if path.stem == "__init__" else path.with_suffix("")
        for path in (ROOT / "kvx_core").glob("**/*.py")
        if re.search(r"^__all__ = ", path.read_text(), re.M)
    ]
    adapters = [
        path.with_suffix("")
        for path in (ROOT / "kvx_adapters").iterdir()
        if (path / "__init__.py").is_file() or path.suffix == ".py"
        if path.stem not in ("__init__", "cli")
    ]
    return [".".join(p.relative_to(ROOT).parts) for p in (*sorted(core), *sorted(adapters))]


def source_of(name: str) -> str:
    """The file of a module."""
    path = name.replace(".", "/")
    return f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"


def python_page(name: str) -> str:
    """A module's page, which mkdocstrings fills in."""
    lines = [f"::: {name}\n"]
    for one in shadowed(name):
        options = "{heading_level: 2, show_root_full_path: false}"
        lines.append(f"::: {one}\n    options: {options}\n")
    return "\n".join(lines)


def shadowed(name: str) -> list[str]:
    """The public names of a package that a module below it has, too, and is taken for."""
    tree = ast.parse((ROOT / source_of(name)).read_text())
    return [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module == f"{name}.{alias.name}"
    ]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills in the version and the navigation of the reference."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.site_name = f"{config.site_name} {project['version']}"
    if not config.repo_url:
        config.edit_uri = None
    (reference,) = [entry["Reference"] for entry in config.nav if "Reference" in entry]
    for entry in reference:
        if "C" in entry:
            entry["C"] = [{path.rpartition("/")[2]: site_path(path)} for path in headers()]
        if "Python" in entry:
            entry["Python"] = [{name: f"reference/python/{name}.md"} for name in modules()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds pages; gives all of them links of the site."""
    sections = Sections((ROOT / "docs/spec.md").read_text(), "../../spec.md")

    def add(path: str, uri: str, **options: Any) -> None:
        file = File.generated(config, uri, **options)
        file.edit_uri = None if (ROOT / path).is_dir() else path
        files.append(file)

    for path in headers():
        add(path, site_path(path), content=c_reference.page(ROOT / path, sections))
    for name in modules():
        add(source_of(name), f"reference/python/{name}.md", content=python_page(name))

    pages = [
        f"docs/{f.src_uri}" for f in files if f.is_documentation_page() and f.generated_by is None
    ]
    waiting, done = [*pages, *PAGES], set()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        if (ROOT / path / "README.md").is_file():
            waiting.append(f"{path}/README.md")
            continue
        uri, hidden = site_path(path), InclusionLevel.NOT_IN_NAV
        if path.endswith((".md", ".ipynb")):
            text, targets = rewritten(text_of(path), path)
            waiting += targets
            if files.get_file_from_path(uri):
                files.remove(files.get_file_from_path(uri))
            shown = uri in PAGES.values() or path.startswith("docs/")
            if path in _NOT_SEARCHED or not shown:
                text = NO_SEARCH + text
            add(path, uri, content=text, inclusion=InclusionLevel.UNDEFINED if shown else hidden)
        elif files.get_file_from_path(uri):
            continue
        elif (ROOT / path).is_dir() or uri.endswith(".md"):
            add(path, uri, content=NO_SEARCH + source_page(path), inclusion=hidden)
            if (ROOT / path).is_dir():
                waiting += [f"{path}/{name}" for name in sources_in(path)]
        else:
            add(path, uri, abs_src_path=str(ROOT / path))
    return files
