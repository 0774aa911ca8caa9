"""The figures of a run, each with the data it is drawn from, out of the records the commands left.

The same charts that the commands draw, and those only the report has: shares, categories, knock-outs.
"""

from dataclasses import asdict, dataclass

from rocktokens.display.numbers import counted, level, percent
from rocktokens.display.text import visible
from rocktokens.report.charts.find_charts import (
    SAME_TOKENS,
    SELECTED,
    cutoff_chart,
    loss_chart,
    sensitivity_chart,
    sensitivity_records,
    type_frame,
)
from rocktokens.report.charts.forest import forest_chart, forest_records
from rocktokens.report.charts.funnel import funnel
from rocktokens.report.charts.gradient_charts import (
    ALIGNMENT_PANELS,
    NORM_PANELS,
    block_records,
    gradient_charts,
    kl_records,
    type_records,
)
from rocktokens.report.charts.share_charts import categories_chart, category_records, share_records, shares_chart
from rocktokens.report.charts.study_charts import comparison_records, curve_records, study_charts
from rocktokens.report.charts.theme import Chart, Records, plain
from rocktokens.report.views.run_view import RunView


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure and its data."""

    name: str
    """Of its files, without the ending."""
    shows: str
    """What there is to see, for those who do not see it."""
    chart: Chart
    records: Records


def share_figures(run: RunView) -> list[Figure]:
    """Show how much of everything the rocks are."""
    if run.rocks is None:
        return []
    records = share_records(run.rocks.summary)
    where = f"{_at_reference(run)}, {run.rocks.summary['measured_on']}"
    shown = ", ".join(f"{percent(own['share'])} of the {own['of']}" for own in records if own["share"] is not None)
    return [Figure("shares", f"Bars of the rocks' shares: {shown}.", shares_chart(records, where), records)]


def funnel_figures(run: RunView) -> list[Figure]:
    """Show where the loss is left."""
    if run.find is None:
        return []
    types = asdict(run.find.funnel)
    rows = zip(*types.values(), strict=True)
    records = [{**own, "text": visible(own["text"])} for own in (dict(zip(types, row, strict=True)) for row in rows)]
    shows = f"Scatter of {counted(len(records), 'token type')} by occurrences and mean kl; rocks lie top right."
    chart = funnel(type_frame(run.find), f"{_at_reference(run)}, {SELECTED}")
    return [Figure("funnel", shows, chart, records)]


def category_figures(run: RunView) -> list[Figure]:
    """Show what kind of tokens the rocks are."""
    if run.find is None:
        return []
    records = category_records(run.find.categories)
    shows = (
        "Bars by category of token: share of the tokens, of the kl and of the gradient norm, rocks and others stacked."
    )
    return [Figure("categories", shows, categories_chart(records, _at_reference(run)), records)]


def sureness_figures(run: RunView) -> list[Figure]:
    """Show how far the set depends on K, on the prompts and on the settings."""
    if run.find is None:
        return []
    cutoff, where = run.find.cutoff, _at_reference(run)
    curve, moved = plain(cutoff.curve), sensitivity_records(run.find)
    return [
        Figure(
            "cutoff",
            f"Lines over K: share of the kl in the top K, and how well the set repeats. K = {cutoff.k} is taken.",
            cutoff_chart(curve, cutoff.k, where),
            curve,
        ),
        Figure(
            "sensitivity",
            "Lines, a panel per setting: Jaccard of the rock set with the one found, as the setting moves.",
            sensitivity_chart(moved, f"{where}, {SELECTED}"),
            moved,
        ),
    ]


def loss_figures(run: RunView) -> list[Figure]:
    """Show the loss of rocks, rare high-kl types and random types over the checkpoints."""
    if run.find is None:
        return []
    shows = "Lines over the checkpoints: mean kl of rocks, rare high-kl types and random types, with bands."
    records = plain(run.find.trajectory)
    return [Figure("loss", shows, loss_chart(records, f"{run.name}, {SAME_TOKENS}"), records)]


def gradient_figures(run: RunView) -> list[Figure]:
    """Show size and direction of the gradients, kl before and after, and shares by block of the student."""
    if run.gradients is None:
        return []
    charts = gradient_charts(run.gradients, run.name)
    own: dict[str, tuple[str, Records]] = {
        "gradient_norm": (
            "Strips of token types by group: how large their gradients are.",
            type_records(run.gradients, NORM_PANELS),
        ),
        "gradient_alignment": (
            "Strips of token types by group: whether their gradients agree with each other and over training.",
            type_records(run.gradients, ALIGNMENT_PANELS),
        ),
        "gradient_kl": (
            "Scatter of token types: mean kl at the baseline against that at the reference.",
            kl_records(run.gradients),
        ),
        "gradient_blocks": (
            "Bars by block of the student: the rocks' signed share of the gradient and of Adam's step.",
            block_records(run.gradients),
        ),
    }
    return [Figure(name, shows, charts[name], records) for name, (shows, records) in own.items()]


def knockout_figures(run: RunView) -> list[Figure]:
    """Show what bans and placebos did to accuracy."""
    if run.knockout is None:
        return []
    settings, baseline = run.knockout.settings, run.knockout.baseline
    records = forest_records(run.knockout.knockouts)
    where = f"{run.name}, {settings['model']} on {settings['task']}, {counted(baseline['n_prompts'], 'prompt')}"
    chart = forest_chart(records, 100 * settings["margin"], where, level(settings["alpha"]))
    shows = f"Forest plot of {counted(len(records), 'ban')}: change of accuracy with its interval, and the verdict."
    return [Figure("knockout", shows, chart, records)]


def study_figures(run: RunView) -> list[Figure]:
    """Show the accuracy of the arms over training, and the differences of all pairs."""
    if run.study is None:
        return []
    charts = study_charts(run.study, run.name)
    means, runs = curve_records(run.study)
    curves = [*({**point, "run": None} for point in means), *runs]
    return [
        Figure(
            "study_curves",
            "Lines over training steps: accuracy of each arm beside the baseline, with bands.",
            charts["study_curves"],
            curves,
        ),
        Figure(
            "study_comparisons",
            "Differences of all pairs of arms with their intervals, a panel for each way to compare.",
            charts["study_comparisons"],
            comparison_records(run.study),
        ),
    ]


def all_figures(run: RunView) -> list[Figure]:
    """Make every figure there is data for, in the order of the page."""
    makers = (
        *(share_figures, funnel_figures, category_figures, sureness_figures, loss_figures, gradient_figures),
        *(knockout_figures, study_figures),
    )
    return [figure for make in makers for figure in make(run)]


def _at_reference(run: RunView) -> str:
    criterion = run.find.criterion if run.find else run.rocks.criterion if run.rocks else {}
    return f"{run.name}, checkpoint {criterion['reference']}"
