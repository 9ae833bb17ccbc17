"""Documents: the snippets of a page of docs/, run as they stand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvx_core._c import abi
from tests.native import CC, ROOT, compile_program, run


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    language: str  # "": indented, without one
    text: str
    line: int  # of its first line, or of the fence above it


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page in Markdown, fenced and indented."""
    found: list[Block] = []
    lines = page.read_text().split("\n")
    at = 0
    while at < len(lines):
        begin = at
        fence = re.fullmatch(r"```(\w*)", lines[at])
        if fence:
            at = lines.index("```", at + 1)
            found.append(Block(fence[1], "\n".join(lines[begin + 1 : at]) + "\n", begin + 1))
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1]):
            while at + 1 < len(lines) and re.match("    |$", lines[at + 1]):
                at += 1
            text = "\n".join(line[4:] for line in lines[begin : at + 1]).rstrip("\n")
            found.append(Block("", f"{text}\n", begin + 1))
        at += 1
    return found


class Document:
    """A page of docs/.

    name: of its file
    """

    def __init__(self, name: str) -> None:
        self.name = f"docs/{name}"
        self.text = (ROOT / self.name).read_text()

    def snippets(self, language: str = "python") -> list[str]:
        """The code blocks of this language, in order."""
        return re.findall(rf"^```{language}\n(.*?)^```", self.text, re.M | re.S)

    def run(self, names: dict[str, Any], *snippets: str) -> dict[str, Any]:
        """Runs Python snippets one after the other; without any, all of the page.

        names: what they use, and are given; changed by them and returned
        """
        for snippet in snippets or self.snippets():
            exec(compile(snippet, self.name, "exec"), names)
        return names

    def prints(self) -> list[str]:
        """What the comment behind each print of its snippets says that it prints."""
        text = "".join(self.snippets())
        return re.findall(r"^ *print\(.*\)  # (.+)$", text, re.M)

    def run_c(self, program: str, folder: Path) -> str:
        """Runs the page's one C snippet within `program`, whose "%s" it replaces.

        Returns what it printed.
        """
        (snippet,) = self.snippets("c")
        source = folder / "snippet.c"
        source.write_text(program % snippet)
        library = Path(abi.library_path())
        built = compile_program(
            [CC, "-std=c11", "-Wall", "-Werror"],
            source,
            folder / "snippet",
            include=ROOT / "csrc/include",
            library=library,
        )
        return run([built], env={"LD_LIBRARY_PATH": str(library.parent)})
