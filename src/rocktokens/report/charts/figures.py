"""The figures of a run, from the records its commands left: those the commands draw, and shares and categories.

A command that makes a record also draws it (``draw_figures``). The manifest notes the SHA-256 of the record that was
drawn, so figures that a killed process left out, or that show an earlier record, are found (``are_drawn``).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from rocktokens.errors import RunDirError
from rocktokens.gradients.records import GradientsRecord
from rocktokens.report.charts.find_charts import find_charts
from rocktokens.report.charts.forest import knockout_charts
from rocktokens.report.charts.gradient_charts import gradient_charts
from rocktokens.report.charts.save import commit_charts
from rocktokens.report.charts.share_charts import category_charts, share_charts
from rocktokens.report.charts.study_charts import study_charts
from rocktokens.report.charts.theme import Figure
from rocktokens.report.views.run_view import RunView
from rocktokens.rocks.records import FindRecord
from rocktokens.run_dir import RunDir
from rocktokens.studies.records import StudyResult

FIGURES = "figures"
"""Entry of the manifest, by the name of a record: the SHA-256 of what was drawn, and the files of its figures."""
DRAWN: Mapping[str, Callable[[str, Path], dict[str, Figure]]] = {
    "find.json": lambda run, path: find_charts(run, FindRecord.load(path)),
    "gradients.json": lambda run, path: gradient_charts(GradientsRecord.load(path), run),
    "study.json": lambda run, path: study_charts(StudyResult.load(path), run),
}
"""The records that commands draw, each with what makes its figures."""


def run_figures(run: RunView) -> dict[str, Figure]:
    """Make every figure there is data for."""
    return {
        **(share_charts(run.rocks, run.name) if run.rocks else {}),
        **(find_charts(run.name, run.find) if run.find else {}),
        **(category_charts(run.find, run.name) if run.find else {}),
        **(gradient_charts(run.gradients, run.name) if run.gradients else {}),
        **(knockout_charts(run.knockout, run.name) if run.knockout else {}),
        **(study_charts(run.study, run.name) if run.study else {}),
    }


def draw_figures(run: RunDir, record: str) -> None:
    """Draw a record of ``DRAWN`` that the run has committed, under the run's lock, into ``figures/``."""
    with run.lock():
        path, sha256 = run.verified(record), run.manifest()["files"][record]["sha256"]
        figures = DRAWN[record](run.path.name, path)
        others = {name: drawn for name, drawn in run.manifest().get(FIGURES, {}).items() if name != record}
        run.update_manifest(**{FIGURES: others})  # until all of them are drawn, none counts
        paths = commit_charts(run, figures)
        run.update_manifest(**{FIGURES: {**others, record: {"sha256": sha256, "paths": paths}}})


def draw_stale(run: RunDir, record: str) -> bool:
    """Draw a record unless its figures are there as it is now; return whether they were drawn."""
    if are_drawn(run, record):
        return False
    draw_figures(run, record)
    return True


def are_drawn(run: RunDir, record: str) -> bool:
    """Return whether a run has the figures of a record as the record is now, none missing or changed."""
    manifest = run.manifest()
    files, drawn = manifest["files"], manifest.get(FIGURES, {}).get(record)
    if drawn is None or files.get(record, {}).get("sha256") != drawn["sha256"]:
        return False
    figures = [entry for entry in run.files("figures/") if entry.path in drawn["paths"]]
    try:
        return len(figures) == len(drawn["paths"]) and all(map(run.verify, figures))
    except RunDirError:
        return False
