"""How every command prints: headings, and tables with their notes."""

from rocktokens.cli.common import output
from rocktokens.display.table import Table


def heading(title: str, explanation: str = "") -> None:
    """Print an empty line and a title."""
    output.print()
    colon = "" if title.endswith("?") or not explanation else ":"
    output.print(f"[bold]{title}[/bold]{colon} {explanation}".rstrip(), highlight=False)


def print_lines(*lines: str) -> None:
    """Print sentences as they are, never as markup."""
    for line in lines:
        output.print(line, highlight=False, markup=False)


def print_table(table: Table) -> None:
    """Print a table, as wide as there is room for, and what its columns mean."""
    output.print(table.to_rich(output.width))
    print_lines(*table.notes)
