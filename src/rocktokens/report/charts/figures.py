"""The figures of a run, from the records its commands left: those the commands draw, and shares and categories."""

from rocktokens.report.charts.find_charts import find_figures
from rocktokens.report.charts.forest import knockout_figures
from rocktokens.report.charts.gradient_charts import gradient_figures
from rocktokens.report.charts.share_charts import category_figures, share_figures
from rocktokens.report.charts.study_charts import study_figures
from rocktokens.report.charts.theme import Figure
from rocktokens.report.views.run_view import RunView


def run_figures(run: RunView) -> dict[str, Figure]:
    """Make every figure there is data for."""
    return {
        **(share_figures(run.name, run.rocks) if run.rocks else {}),
        **(find_figures(run.name, run.find) if run.find else {}),
        **(category_figures(run.name, run.find) if run.find else {}),
        **(gradient_figures(run.name, run.gradients) if run.gradients else {}),
        **(knockout_figures(run.name, run.knockout) if run.knockout else {}),
        **(study_figures(run.name, run.study) if run.study else {}),
    }
