"""``rocktokens check``: what would go wrong in a run, and what it will need, before it starts."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rocktokens.cli.common import AsJson, ConfigPath, Overrides, output, print_json, terminal
from rocktokens.cli.tables import print_table
from rocktokens.config import Config, load_config
from rocktokens.display.table import Column, Table, text, verdict
from rocktokens.errors import RocktokensError
from rocktokens.preflight.findings import Finding, Level


def check(
    config: ConfigPath,
    plan: Annotated[
        bool, typer.Option("--plan", help="Count memory per GPU and step time from both config.json; load no weights.")
    ] = False,
    gpu_memory: Annotated[
        float | None,
        typer.Option("--gpu-memory", metavar="GB", help="Of one GPU, for --plan; default: of the one here, else 80."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Look for what would go wrong in a run, and estimate its memory and time, before it starts.

    Exits with 2 when something fails; warnings do not. With --plan nothing is loaded: it says on how many GPUs the run
    would fit, and exits with 0 whatever the answer.

    Example: [bold]rocktokens check run.toml --set models.student=my/student[/bold]
    """
    settings = load_config(config, overrides)
    if plan:
        return _plan(settings, gpu_memory, as_json=as_json)
    if gpu_memory is not None:
        raise RocktokensError(f"--gpu-memory is {gpu_memory:g}, which only --plan reads: add --plan")
    with terminal.status("loading"):
        from rocktokens.preflight.check import check as check_run
    result = check_run(settings, terminal)
    if as_json:
        print_json(asdict(result))
    else:
        print_table(finding_table(result.findings))
        output.print(_conclusion(result.level, config), soft_wrap=True, markup=False, highlight=False)
    if result.level == "fail":
        raise typer.Exit(2)


def _plan(settings: Config, gpu_memory: float | None, *, as_json: bool) -> None:
    with terminal.status("counting"):
        from rocktokens.cli.plan_tables import print_plan
        from rocktokens.preflight.plan import plan_run

        planned = plan_run(settings, gpu_memory)
    if as_json:
        print_json(asdict(planned))
    else:
        print_plan(planned)


def _conclusion(level: Level, config: Path) -> str:
    """Say in one line what to do next."""
    if level == "fail":
        return f"fix what failed, then: rocktokens check {config}"
    return f"{'nothing failed' if level == 'warn' else 'all is well'}; next: rocktokens run {config}"


def finding_table(findings: Sequence[Finding]) -> Table:
    """Make the table of findings: a row each, with what to do about it."""
    columns: list[Column[Finding]] = [
        Column("level", lambda own: verdict(own.level)),
        Column("check", lambda own: text(own.name)),
        Column("found", lambda own: text(own.value)),
        Column("what to do", lambda own: text(own.remedy)),
    ]
    return Table.of("preflight", columns, findings, "preflight")
