"""What ``rocktokens study`` prints: the arms with what they reached and cost, and a verdict for every pair.

Accuracies are in percent, differences in points (hundredths); a dash stands for what is not known.
"""

from collections.abc import Callable

from rich.table import Table
from rich.text import Text

from rocktokens.cli.common import output, percent, percent_interval
from rocktokens.cli.tables import WIDE, decimal, heading, plain_table
from rocktokens.display.text import printable
from rocktokens.studies.decisions import verdict_lines
from rocktokens.studies.records import Arm, StudyResult

COLUMNS: dict[str, Callable[[Arm], str]] = {
    "runs": lambda arm: str(len(arm.runs)),
    "start": lambda arm: percent(arm.start.accuracy),
    "end": lambda arm: percent(arm.end.accuracy),
    "interval": lambda arm: percent_interval(arm.end.interval),
    "tokens": lambda arm: f"{arm.end.tokens:,.0f}",
    "seconds": lambda arm: f"{arm.end.seconds:,.0f}",
    "length": lambda arm: decimal(arm.facts.get("mean_response_length"), 0),
    "not trained": lambda arm: percent(arm.facts.get("weight_dropped_share")),
    "head saved": lambda arm: percent(arm.facts.get("head_compute_saved")),
}
NOT_NARROW = ("runs", "length", "not trained")
"""Columns of the arms that only a wide screen has room for."""


def print_study(result: StudyResult) -> None:
    """The arms, then what is called better, in the order of the pairs."""
    heading("Arms", _conditions(result))
    output.print(arm_table(result))
    heading("Verdicts", _confidence(result))
    for line in verdict_lines(result):
        output.print(printable(line), highlight=False, markup=False, soft_wrap=True)
    for note in result.notes:
        output.print(printable(note), highlight=False, markup=False, soft_wrap=True)


def arm_table(result: StudyResult) -> Table:
    """One row an arm: accuracy before and after with the interval of the latter, and what training took."""
    columns = [name for name in COLUMNS if output.width >= WIDE or name not in NOT_NARROW]
    table = plain_table(["arm", *columns], ("arm",))
    for arm in result.arms:
        table.add_row(Text(printable(arm.name)), *(COLUMNS[name](arm) for name in columns))
    return table


def _conditions(result: StudyResult) -> str:
    last = max(arm.end.step for arm in result.arms)
    seeds = "1 seed" if len(result.seeds) == 1 else f"{len(result.seeds)} seeds"
    return (
        f"accuracy after {last} steps on {result.n_prompts} prompts, means over {seeds} with {_level(result.alpha)} "
        f"intervals; tokens and seconds of training a run; denominator {result.denominator}"
    )


def _confidence(result: StudyResult) -> str:
    pairs = "one pair" if result.n_pairs == 1 else f"the {result.n_pairs} pairs together"
    return f"{_level(result.alpha)} intervals for {pairs}, within each way to compare; denominator {result.denominator}"


def _level(alpha: float) -> str:
    return f"{100 * (1 - alpha):g} %"
