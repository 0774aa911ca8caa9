"""How all verbs print: headings, plain tables, and numbers with a dash where there is none."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from rocktokens.cli.common import output

WIDE = 96
"""Columns of a screen that has room for everything."""


def heading(title: str, explanation: str) -> None:
    """An empty line and a title."""
    output.print()
    output.print(f"[bold]{title}[/bold]{': ' + explanation if explanation else ''}", highlight=False)


def plain_table(columns: Sequence[str], left: Sequence[str], title: str | None = None) -> Table:
    """A table without a frame; all columns but those in ``left`` hold numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name not in left)
    return table


def decimal(value: float | None, digits: int) -> str:
    """A number with so many decimals."""
    return "—" if value is None else f"{value:.{digits}f}"


def p_value(value: float | None) -> str:
    """A p-value, as far as it says anything."""
    if value is None:
        return "—"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
