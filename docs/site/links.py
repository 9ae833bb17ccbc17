"""Pages of the repository as pages of the site: where each file goes, and links between them."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from docs import notebook

ROOT = Path(__file__).resolve().parents[2]

# Pages outside docs/, and what they are called in the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
    "examples/walk_through.ipynb": "walk_through.md",
}
HEADERS = "csrc/include/kvx/"
_LANGUAGES = {".py": "python", ".h": "c", ".c": "c", ".cc": "cpp", ".cu": "cpp", ".sh": "bash"}


def site_path(path: str) -> str:
    """Where the site has a file or folder of the repository."""
    if path in PAGES:
        return PAGES[path]
    if (ROOT / path / "README.md").is_file():
        return site_path(f"{path}/README.md")
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    if path.startswith(HEADERS) and path.endswith(".h"):
        return f"reference/c/{posixpath.basename(path)}.md"
    return f"source/{path}.md" if Path(path).suffix in _LANGUAGES else f"source/{path}"


def rewritten(text: str, path: str) -> tuple[str, set[str]]:
    """The page `path` of the repository with the site's links, and the files that they lead to."""
    here, targets = posixpath.dirname(path), set()

    def link(found: re.Match[str]) -> str:
        target, sharp, anchor = found[1].partition("#")
        at = posixpath.normpath(posixpath.join(here, target))
        if not target or ":" in target or not (ROOT / at).exists():
            return found[0]
        targets.add(at)
        to = posixpath.relpath(site_path(at), posixpath.dirname(site_path(path)) or ".")
        return f"]({to}{sharp}{anchor})"

    lines = (
        line
        if code
        else "".join(
            part if part[:1] == "`" else re.sub(r"\]\(([^)\s]+)\)", link, part)
            for part in re.split(r"(`[^`]*`)", line)
        )
        for code, line in with_code(text)
    )
    return "\n".join(lines), targets


def spaced(text: str) -> str:
    """A page with an empty line before each list and table, which GitHub does not need."""
    out: list[str] = []
    for code, line in with_code(text):
        begins = re.match(r"(?:[-*] |\d+\. |\|)", line)
        before = out[-1] if out else ""
        if begins and not code and before and not re.match(r"(?:[-*] |\d+\. |\|| )", before):
            out.append("")
        out.append(line)
    return "\n".join(out)


def with_code(text: str) -> Iterator[tuple[bool, str]]:
    """Each line of a page, and whether it is in a fence."""
    inside = False
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        yield inside or fence, line
        inside ^= fence


def text_of(path: str) -> str:
    """The text of a page of the repository, or of a notebook."""
    text = (ROOT / path).read_text()
    return spaced(notebook.markdown(json.loads(text)) if path.endswith(".ipynb") else text)


def sources_in(folder: str) -> list[str]:
    """The names of a folder's files that are pages of the site."""
    return sorted(p.name for p in (ROOT / folder).iterdir() if p.suffix in _LANGUAGES)


def source_page(path: str) -> str:
    """A file as a page; a folder as a list of its files."""
    at = ROOT / path
    if at.is_dir():
        files = sources_in(path)
        return f"# {path}\n\n" + "\n".join(f"- [{name}]({name}.md)" for name in files) + "\n"
    return f"# {path}\n\n~~~~{_LANGUAGES[at.suffix]}\n{at.read_text()}~~~~\n"
