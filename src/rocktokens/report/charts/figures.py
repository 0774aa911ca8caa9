"""The figures of a run, from the records its commands left: those the commands draw, and shares and categories."""

from rocktokens.report.charts.find_charts import find_charts
from rocktokens.report.charts.forest import knockout_charts
from rocktokens.report.charts.gradient_charts import gradient_charts
from rocktokens.report.charts.share_charts import category_charts, share_charts
from rocktokens.report.charts.study_charts import study_charts
from rocktokens.report.charts.theme import Figure
from rocktokens.report.views.run_view import RunView


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
