"""``rocktokens report``: one or several runs as one self-contained HTML file, opening with the answer."""

from pathlib import Path
from typing import Annotated

import typer

from rocktokens.cli.common import AsJson, notes, output, print_json, terminal
from rocktokens.display.text import for_terminal
from rocktokens.errors import RocktokensError
from rocktokens.run_dir import RunDir

RunPaths = Annotated[
    list[Path],
    typer.Argument(metavar="RUN", help="Folders of runs or studies, compared if several.", show_default=False),
]


def report(
    runs: RunPaths,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="The page to write; default RUN/report.html.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="DIR", help="Write every figure as PDF and its data as CSV.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one page: which tokens are rocks, how sure that is, whether they matter, what bypassing gains.

    The page is one file: it opens from a disk, loads nothing, and is the same for the same runs. For each part that was
    not run, it names the command that runs it.

    Example: [bold]rocktokens report runs/demo --figures figures[/bold]

    Several runs: [bold]rocktokens report runs/a runs/b -o both.html[/bold]
    """
    if out is None and len(runs) > 1:
        raise RocktokensError(f"a page of {len(runs)} runs belongs to none of them: say where it goes with -o FILE")
    for path in runs:
        RunDir(path).require()
    with notes.status("loading"):
        from rocktokens.report.build import build_report, build_run_report

    if out is None:
        summary = build_run_report(RunDir(runs[0]), figures, terminal)
    else:
        summary = build_report(runs, out, figures, terminal)
    if as_json:
        return print_json(summary.to_record())
    for own in summary.runs:
        output.rule(for_terminal(own.name), align="left")
        for answer in own.answers:
            output.print(f"[bold]{answer.question}[/bold]", highlight=False)
            output.print(answer.sentence, highlight=False, markup=False)
    output.print(f"report: {summary.report}", soft_wrap=True, markup=False)
    if figures is not None:
        output.print(f"figures: {figures}", soft_wrap=True, markup=False)
