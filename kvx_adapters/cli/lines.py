"""A line of `kvx demo` and `kvx doctor`: a mark, a name, a text that is wrapped below itself."""

from __future__ import annotations

from rich.table import Table

GOOD, BAD = "[green]✓[/]", "[red]✗[/]"


def marked_line(mark: str, name: str, text: str, *, width: int, gap: int = 1) -> Table:
    """The line.

    mark, text: rich's markup
    width:      of the name's column
    gap:        spaces behind the mark and the name
    """
    line = Table.grid(padding=(0, gap, 0, 0))
    line.add_column(min_width=1)
    line.add_column(min_width=width, no_wrap=True)
    line.add_column(overflow="fold")
    line.add_row(mark, name, text)
    return line
