"""The C reference: a page for each header, which is its own manual."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from docs.site.prose import Sections, escaped, markdown

# A struct or enum, a type of functions, another type, a function; else a macro.
_NAME = re.compile(
    r"^typedef (?:struct|enum) (\w+)|^typedef [^;]*?\(\*(\w+)\)|^typedef \w+ (\w+);"
    r"|^KVX_API [^;]*?((?:kvx|kvbm_kernels)_\w+)\(",
    re.M,
)
_MACRO = re.compile(r"^#define (\w+)", re.M)
# Of the file, not of what it declares: guards, includes, C++'s braces, how functions are exported.
_FRAME = re.compile(
    r"^#ifdef __cplusplus\n.*?^#endif\n|^#if defined\(_WIN32\)\n.*?^#endif\n"
    r"|^#(?:include|ifndef|endif)\b[^\n]*\n|^#define KVX_\w+_H_\n",
    re.M | re.S,
)


def page(header: Path, sections: Sections) -> str:
    """A header as Markdown: what it says first, then each declaration with its comment."""
    out = [f"# {header.name}\n"]
    for comment, code in _declarations(header.read_text()):
        section = re.fullmatch(r"-{4} (.+?) -{4}", comment.strip())
        if section:
            out.append(f"## {section[1]}\n")
            continue
        names = ["".join(found) for found in _NAME.findall(code)] or _MACRO.findall(code)[:1]
        if names:
            out.append(f"### {escaped(', '.join(names))}\n")
        out.append(markdown(comment, sections, "c"))
        if code:
            out.append(f"```c\n{code}\n```\n")
    return "\n".join(out)


def _declarations(text: str) -> Iterator[tuple[str, str]]:
    """Each comment with the code below it, up to an empty line outside braces."""
    for part in re.split(r"\n{2,}(?![^{}]*\n\})", _FRAME.sub("", text).strip()):
        found = re.match(r"/\*(.*?)\*/\n?", part + "\n", re.S)
        yield (_text(found[1]), part[found.end() :].strip("\n")) if found else ("", part)


def _text(comment: str) -> str:
    """A comment without its stars."""
    lines = [re.sub(r"^ \* ?", "", line) for line in comment.strip().split("\n")]
    return "\n".join(line.rstrip() for line in lines).strip()
