"""Write a report: one page of one or several runs, and their figures as PDF with the data as CSV."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rocktokens.display.table import csv_text
from rocktokens.errors import RocktokensError
from rocktokens.progress import SILENT, Progress
from rocktokens.report.charts.figures import run_figures
from rocktokens.report.charts.save import save_chart
from rocktokens.report.charts.theme import finite
from rocktokens.report.page.answers import Answer, five_answers
from rocktokens.report.page.parts import file_name
from rocktokens.report.page.render import report_html
from rocktokens.report.views.run_view import RunView
from rocktokens.run_dir import RunDir, write_atomically

Written = TypeVar("Written")


@dataclass(frozen=True, slots=True)
class RunAnswers:
    """What the report says of one run."""

    name: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class ReportSummary:
    """What was written, and what it answers."""

    report: Path
    bytes: int
    figures: tuple[Path, ...]
    runs: tuple[RunAnswers, ...]

    def to_record(self) -> dict[str, Any]:
        """Return plain values, as ``rocktokens report --json`` prints them."""
        return {**asdict(self), "report": str(self.report), "figures": [str(path) for path in self.figures]}


def build_report(
    runs: Sequence[str | Path], out: str | Path, figures: str | Path | None = None, progress: Progress = SILENT
) -> ReportSummary:
    """Write the page, and the figures if wanted.

    Args:
        runs: folders of runs or studies; several are compared.
        out: the page to write.
        figures: a folder for every figure as PDF and its data as CSV; None writes none.
        progress: where to report what is going on.

    Example: ``build_report(["runs/demo"], "report.html").runs[0].answers[0].sentence``.
    """
    out, views = Path(out), [_without_earlier_rocks(RunView.open(path)) for path in runs]
    with progress.status("drawing"):
        html = report_html(views).encode()
        _write("report", out, lambda: write_atomically(out, lambda temporary: temporary.write_bytes(html)))
        folder = None if figures is None else Path(figures)
        written = () if folder is None else _write("figures", folder, lambda: tuple(_figures(views, folder)))
    answered = tuple(RunAnswers(view.name, five_answers(view)) for view in views)
    return ReportSummary(out, len(html), written, answered)


def build_run_report(run: RunDir, figures: str | Path | None = None, progress: Progress = SILENT) -> ReportSummary:
    """Write the page of one run into the run, as a file that the run lists."""
    with run.require().lock():
        summary = build_report([run.path], run.report, figures, progress)
        run.adopt([run.report.name])
    return summary


def _without_earlier_rocks(view: RunView) -> RunView:
    """Take out what was measured of other rocks than rocks.json holds now: it would be read as theirs.

    A knock-out stays true of the types it banned. Only where there are no rocks at all, one of rocks is taken out.
    """
    rocks, knockout = view.rocks, view.manifest.get("knockout_inputs", {})
    if rocks is not None and view.gradients is not None and not view.gradients.is_of(rocks):
        view.gradients = None
    if rocks is not None and not rocks.tokens and knockout.get("of_rocks", True):
        view.knockout = None
    return view


def _figures(views: Sequence[RunView], directory: Path) -> Iterator[Path]:
    """Write every figure as PDF with its data as CSV; of several runs, a folder each."""
    for number, view in enumerate(views, start=1):
        folder = directory if len(views) == 1 else directory / f"{number}-{file_name(view.name)}"
        for figure in run_figures(view).values():
            chart, data = (folder / f"{figure.name}.{ending}" for ending in ("pdf", "csv"))
            save_chart(figure.chart, chart)
            content = csv_text(finite(figure.records)).encode()
            write_atomically(data, lambda temporary, content=content: temporary.write_bytes(content))
            yield from (chart, data)


def _write(what: str, path: Path, write: Callable[[], Written]) -> Written:
    """Return what ``write`` returns; one sentence where the place cannot be written."""
    try:
        return write()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RocktokensError(f"the {what} cannot be written to {path} ({reason}): give another place") from None
