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
    makers = (
        (share_figures, run.rocks),
        (find_figures, run.find),
        (category_figures, run.find),
        (gradient_figures, run.gradients),
        (knockout_figures, run.knockout),
        (study_figures, run.study),
    )
    drawn = [make(run.name, record) for make, record in makers if record is not None]
    return {name: figure for figures in drawn for name, figure in figures.items()}
