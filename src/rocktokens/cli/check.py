"""``rocktokens check``: what would go wrong in a run, and what it will need, before it starts."""

from collections.abc import Sequence

import typer
from rich.markup import escape
from rich.table import Table

from rocktokens.cli.common import AsJson, ConfigPath, Overrides, output, print_json, terminal
from rocktokens.config import load_config
from rocktokens.preflight.findings import Finding


def check(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Look for what would go wrong in a run, and estimate its memory and time, before it starts.

    Exits with 2 when something fails; warnings do not.

    Example: [bold]rocktokens check run.toml --set models.student=my/student[/bold]
    """
    settings = load_config(config, overrides)
    with terminal.status("loading"):
        from rocktokens.preflight.check import check as check_run
    result = check_run(settings, terminal)
    if as_json:
        print_json(result.to_record())
    else:
        output.print(finding_table(result.findings))
    if result.level == "fail":
        raise typer.Exit(2)


def finding_table(findings: Sequence[Finding]) -> Table:
    """One row per finding; the remedy stands under the value."""
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table(title="preflight", title_justify="left", show_lines=True)
    for name in ("level", "check", "found"):
        table.add_column(name)
    for finding in findings:
        colour = colours[finding.level]
        remedy = f"\n[{colour}]{escape(finding.remedy)}[/]" if finding.remedy else ""
        table.add_row(f"[{colour}]{finding.level}[/]", finding.name, escape(finding.value) + remedy)
    return table
