"""How every command prints: headings, and tables with their notes."""

from rocktokens.cli.common import output
from rocktokens.display.table import Table


def heading(title: str, explanation: str = "") -> None:
    """Print an empty line and a title."""
    output.print()
    colon = "" if title.endswith("?") or not explanation else ":"
    output.print(f"[bold]{title}[/bold]{colon} {explanation}".rstrip(), highlight=False)


def print_lines(*lines: str, width: int | None = None) -> None:
    """Print sentences as they are, never as markup; in ``width`` columns at most."""
    for line in lines:
        output.print(line, highlight=False, markup=False, width=width)


def print_table(table: Table, width: int | None = None) -> None:
    """Print a table, as wide as there is room for or as ``width``, and what its columns mean."""
    room = min(output.width, width or output.width)
    output.print(table.to_rich(room), width=room)
    print_lines(*table.notes, width=width)
