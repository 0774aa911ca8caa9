"""The sections of a run's report: for each question a few sentences, figures and tables, or how to get them."""

from collections.abc import Sequence
from dataclasses import dataclass

from rocktokens.display.numbers import decimal, with_interval
from rocktokens.display.rocks import rock_table
from rocktokens.display.table import Table
from rocktokens.display.text import printable
from rocktokens.evaluation.records import accuracy_table
from rocktokens.report.charts import figures
from rocktokens.report.charts.figures import Figure
from rocktokens.report.tables import arm_table, claim_table, comparison_table, verdict_table
from rocktokens.report.views.run_view import RunView

LONGEST_NOTE = 1_000
"""Characters; a note may name tokens."""


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page."""

    key: str
    title: str
    lead: str
    """What it shows, for a reader who has not read the paper."""
    verb: str
    """The command that makes its data."""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()

    @property
    def is_there(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.figures or self.tables)


def _shares(run: RunView) -> Section:
    lead = (
        "A rock is a token type that occurs often and whose loss (the kl of the student to the teacher) stays high "
        "after training. These are the rocks' shares of the run."
    )
    return Section("shares", "How much of the run the rocks are", lead, "find", figures.share_figures(run))


def _funnel(run: RunView) -> Section:
    lead = "Right is frequent, up is far from the teacher. Rocks hold the most loss: the product of the two."
    return Section("funnel", "Where the loss is left", lead, "find", figures.funnel_figures(run))


def _categories(run: RunView) -> Section:
    lead = "Are rocks layout and discourse, or the content of the answer?"
    return Section("categories", "Rocks by category", lead, "find", figures.category_figures(run))


def _rocks(run: RunView) -> Section:
    lead = "Sort by a column's title; search by text, category or verdict."
    tables = [rock_table(run.rocks)] if run.rocks else []
    return Section("rocks", "The rocks", lead, "find", tables=tables)


def _sureness(run: RunView) -> Section:
    lead = "How many types are rocks, whether other prompts give the same ones, and which settings matter."
    return Section("sureness", "How stable the set is", lead, "find", figures.sureness_figures(run))


def _loss(run: RunView) -> Section:
    lead = "The same tokens, scored at every checkpoint: the loss of what is learned falls, the rest stays."
    tables = [accuracy_table(run.evaluations)] if run.evaluations else []
    return Section("loss", "What training did", lead, "find", figures.loss_figures(run), tables)


def _gradients(run: RunView) -> Section:
    lead = "Which types move the student: size and direction of the gradients of rocks and of other types."
    tables = [claim_table(run.gradients.claims)] if run.gradients else []
    notes = _printable(run.gradients.warnings) if run.gradients else ()
    return Section(
        "gradients", "Where the gradient goes", lead, "gradients", figures.gradient_figures(run), tables, notes
    )


def _knockout(run: RunView) -> Section:
    lead = (
        "Each token is banned at every decoding step, with the same random numbers, and the answers are graded again. "
        "Pillar: the ban costs accuracy. Stumbling: it improves accuracy. Neutral: the change is within the margin. "
        "Placebos are types that are not rocks."
    )
    if run.knockout is None:
        return Section("knockout", "Do the rocks matter", lead, "knockout")
    baseline, smallest = run.knockout.baseline, run.knockout.detectable["single"]
    right = with_interval(baseline["accuracy"], baseline["interval"])
    power = (
        f"Smallest effect this sweep could detect (80 % power): {decimal(100 * smallest, 1)} points, for a ban that "
        "only turns right answers wrong."
        if smallest < 1
        else "There are too few prompts to detect any loss."
    )
    notes = [f"Without a ban, {right} of the answers are right. {power}", *_printable(run.knockout.warnings)]
    tables = [verdict_table(run.knockout)]
    return Section("knockout", "Do the rocks matter", lead, "knockout", figures.knockout_figures(run), tables, notes)


def _study(run: RunView) -> Section:
    lead = "Arms differ only in the weights of their tokens. Each is trained on several seeds and compared in pairs."
    tables = [arm_table(run.study), comparison_table(run.study)] if run.study else []
    notes = _printable(run.study.notes) if run.study else ()
    return Section("study", "What leaving them out gains", lead, "study", figures.study_figures(run), tables, notes)


def _printable(notes: Sequence[str]) -> list[str]:
    return [printable(note[:LONGEST_NOTE]) for note in notes]


def sections(run: RunView) -> list[Section]:
    """Make all sections in the order of the page, those without data too."""
    makers = (_shares, _funnel, _categories, _rocks, _sureness, _loss, _gradients, _knockout, _study)
    return [make(run) for make in makers]
