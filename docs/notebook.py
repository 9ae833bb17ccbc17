"""Runs a notebook in this process and keeps what its cells print.

    python -m docs.notebook examples/walk_through.ipynb

Jupyter opens the file as any other; neither this nor the tests need it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run(source: str, names: dict[str, Any]) -> tuple[str, str]:
    """What a cell prints, and its value: that of its last line if that is an expression, or "".

    names: of the cells before; changed
    """
    value = None
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return printed.getvalue(), "" if value is None else repr(value)


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs that its cells have now."""
    names: dict[str, Any] = {}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            printed, value = run("".join(cell["source"]), names)
            cell = cell | {"execution_count": count, "outputs": _outputs(printed, value, count)}
        cells.append(cell)
    return notebook | {"cells": cells}


def _outputs(printed: str, value: str, count: int) -> list[dict[str, Any]]:
    """The outputs of a cell as Jupyter keeps them.

    Source: nbformat 5.11 v4/nbformat.v4.5.schema.json, stream, execute_result
    """
    found: list[dict[str, Any]] = []
    if printed:
        lines = printed.splitlines(keepends=True)
        found.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value:
        data = {"text/plain": value.splitlines(keepends=True)}
        kind = {"output_type": "execute_result", "execution_count": count}
        found.append({"data": data, **kind, "metadata": {}})
    return found


def markdown(notebook: dict[str, Any]) -> str:
    """The notebook as a page."""
    out = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            out.append(source)
            continue
        out.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            lines = output["text"] if "text" in output else output["data"]["text/plain"]
            out.append(f"```text\n{''.join(lines).rstrip()}\n```")
    return "\n\n".join(out) + "\n"


def text_of(notebook: dict[str, Any]) -> str:
    """The text of the file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Runs the notebooks of the command line and writes them."""
    for path in map(Path, sys.argv[1:]):
        path.write_text(text_of(executed(json.loads(path.read_text()))))


if __name__ == "__main__":
    main()
