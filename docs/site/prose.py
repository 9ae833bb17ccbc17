"""Comments of headers and docstrings as Markdown.

Both are plain text: paragraphs, lists with "- ", indented examples, and parameters as "name: text"
with its lines indented.
"""

from __future__ import annotations

import re
import textwrap

_PARAMETER = re.compile(r"(\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*): +(.+)")
_CODE = re.compile(r"\w\(")
_OF_ITS_OWN = re.compile(r"(?:Mutates|Raises|Returns|Spec:|Source:)(?= )")
_SECTION = re.compile(r"(?<![\w.])(?:E\.\d+|\d+(?:\.\d+)*)(?![\w.]*\d)")


class Sections:
    """Where sections of the specification are: links to them."""

    def __init__(self, spec: str, page: str) -> None:
        """spec: the text of docs/spec.md. page: its address, relative to the pages that link."""
        self._links = {}
        for heading in re.findall(r"^#+ ((?:E\.)?\d+(?:\.\d+)*\.? .+)$", spec, re.M):
            anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            self._links[heading.split()[0].rstrip(".")] = f"{page}#{anchor}"

    def link(self, text: str) -> str:
        """The numbers of sections in "Spec: 6.2, E.3" as links."""

        def linked(found: re.Match[str]) -> str:
            link = self._links.get(found[0])
            return f"[{found[0]}]({link})" if link else found[0]

        before, spec, numbers = text.partition("Spec:")
        return before + spec + _SECTION.sub(linked, numbers)


def escaped(text: str) -> str:
    """Text whose signs mean nothing in Markdown, but for `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([\\*_\[\]#])", r"\\\1", parts[i]).replace("<", "&lt;")
    return "".join(parts)


def markdown(text: str, sections: Sections, language: str) -> str:
    """text: dedented. language: of indented examples that are code."""
    out: list[str] = []
    example: list[str] = []
    kind = ""  # of the last line: "text", "item", "example" or, at an empty line, ""
    for line in text.strip("\n").split("\n"):
        words = line.strip()
        indent = len(line) - len(line.lstrip())
        if kind == "example":
            if indent >= 2 or not words:
                example.append(line)
                continue
            out += _fenced(example, language)
            kind = ""
        parameter = _PARAMETER.fullmatch(line) if kind in ("", "item") else None
        if words.startswith("- ") or parameter:
            if kind != "item":
                out.append("")
            name = f"**`{parameter[1]}`**: " if parameter else ""
            words = parameter[2] if parameter else words[2:]
            out.append(f"- {name}{sections.link(escaped(words))}")
            kind = "item"
        elif kind == "item" and indent:
            out.append("  " + sections.link(escaped(words)))
        elif indent >= 2:
            example = [line]
            kind = "example"
        else:
            if kind == "item" or _OF_ITS_OWN.match(words):
                out.append("")
            out.append(sections.link(escaped(words)))
            kind = "text" if words else ""
    if kind == "example":
        out += _fenced(example, language)
    return "\n".join(out) + "\n"


def _fenced(example: list[str], language: str) -> list[str]:
    text = textwrap.dedent("\n".join(example)).rstrip()
    return ["", f"```{language if _CODE.search(text) else 'text'}", text, "```", ""]
