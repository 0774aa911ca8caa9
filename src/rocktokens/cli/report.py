"""``rocktokens report``: one or several runs as one self-contained HTML file, opening with the answer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from rocktokens.cli.common import AsJson, notes, output, print_json
from rocktokens.display.text import printable
from rocktokens.errors import RocktokensError
from rocktokens.run_dir import write_atomically

RunPaths = Annotated[
    list[Path],
    typer.Argument(metavar="RUN…", help="Folders of runs or studies, compared if several.", show_default=False),
]


def report(
    runs: RunPaths,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="DIR", help="Write every figure as PDF and its data as CSV.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one page: which tokens are rocks, how sure that is, whether they matter, what bypassing gains.

    The page is one file: it opens from a disk, asks nobody for anything, and is the same for the same runs. Parts that
    were not run are named with the command that runs them.

    Example: [bold]rocktokens report runs/demo -o report.html --figures figures[/bold]
    """
    record = write_report(runs, out, figures)
    if as_json:
        return print_json(record)
    for own in record["runs"]:
        output.rule(Text(printable(own["name"])), align="left")
        for answer in own["answers"]:
            output.print(f"[bold]{answer['question']}[/bold]", highlight=False)
            output.print(answer["sentence"], highlight=False, markup=False)
    output.print(f"report: {record['report']}", soft_wrap=True, markup=False)
    if figures is not None:
        output.print(f"figures: {figures}", soft_wrap=True, markup=False)


def write_report(paths: Sequence[Path], out: Path, figures: Path | None = None) -> dict[str, Any]:
    """Write the page, and the figures if wanted; what was written and what it answers."""
    from rocktokens.report.page.answers import five_answers
    from rocktokens.report.page.page import report_html, write_figures
    from rocktokens.report.views.run_view import RunView

    views = [RunView.open(path) for path in paths]
    with notes.status("drawing"):
        html = report_html(views).encode()
        _write("--out", out, lambda: write_atomically(out, lambda temporary: temporary.write_bytes(html)))
        written = [] if figures is None else _write("--figures", figures, lambda: write_figures(views, figures))
    return {
        "report": str(out),
        "bytes": len(html),
        "figures": [str(path) for path in written],
        "runs": [{"name": view.name, "answers": [_answer(own) for own in five_answers(view)]} for view in views],
    }


def _answer(own: Any) -> dict[str, Any]:
    return {"question": own.question, "sentence": own.sentence, "sources": list(own.sources)}


def _write(option: str, path: Path, write: Callable[[], Any]) -> Any:
    """What ``write`` returns; one sentence where the place cannot be written."""
    try:
        return write()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RocktokensError(f"{option} {path} cannot be written ({reason}): give another place") from None
