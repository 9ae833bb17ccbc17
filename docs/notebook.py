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


def run(source: str, names: dict[str, Any]) -> str:
    """What a cell prints, and the value of its last line if that is an expression.

    names: of the cells before; changed
    """
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            if value is not None:
                print(repr(value))
    return printed.getvalue()


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs that its cells have now."""
    names: dict[str, Any] = {}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            text = run("".join(cell["source"]), names)
            lines = text.splitlines(keepends=True)
            stream = {"name": "stdout", "output_type": "stream", "text": lines}
            cell = cell | {"execution_count": count, "outputs": [stream] if text else []}
        cells.append(cell)
    return notebook | {"cells": cells}


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
            out.append(f"```text\n{''.join(output['text'])}```")
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
