"""The sections of a run's report: for each question a few sentences, figures and tables, or how to get them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rocktokens.display.numbers import decimal, with_interval
from rocktokens.display.rocks import rock_table, why_none
from rocktokens.display.table import Table
from rocktokens.display.text import printable
from rocktokens.evaluation.records import accuracy_table
from rocktokens.gradients.records import claim_table
from rocktokens.knockout.records import KnockoutSweep
from rocktokens.report.charts.figures import run_figures
from rocktokens.report.charts.theme import Figure
from rocktokens.report.knockout_notes import gold_sentences, neutral_sentence, undecided_sentence
from rocktokens.report.tables import arm_table, collapse_table, comparison_table, control_table, verdict_table
from rocktokens.report.views.run_view import RunView
from rocktokens.studies.records import StudyResult

LONGEST_NOTE = 1_000
"""Characters; a note may name tokens."""

EARLIER_TRACES = (
    "These rocks were found in traces that the run has replaced or extended since: run `rocktokens find` again."
)


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
        return bool(self.figures or self.tables or self.notes)


def sections(run: RunView) -> list[Section]:
    """Make all sections in the order of the page, those without data too."""
    drawn = run_figures(run)

    def figures(*names: str) -> list[Figure]:
        return [drawn[name] for name in names if name in drawn]

    gradients, study = run.gradients, run.study
    made = [
        Section(
            "shares",
            "How much of the run the rocks are",
            "A rock is a token type that occurs often and whose loss (the kl of the student to the teacher) stays high "
            "after training. These are the rocks' shares of the run.",
            "find",
            figures("shares"),
        ),
        Section(
            "funnel",
            "Where the loss is left",
            "Right is frequent, up is far from the teacher. Rocks hold the most loss: the product of the two.",
            "find",
            figures("funnel"),
        ),
        Section(
            "categories",
            "Rocks by category",
            "Are rocks layout and discourse, or the content of the answer?",
            "find",
            figures("categories"),
        ),
        Section(
            "rocks",
            "The rocks",
            "Sort by a column's title; search by text, category or verdict.",
            "find",
            tables=[rock_table(run.rocks)] if run.rocks else [],
            notes=[EARLIER_TRACES] if run.is_of_earlier_traces else [],
        ),
        Section(
            "sureness",
            "How stable the set is",
            "How many types are rocks, whether other prompts give the same ones, and which settings matter.",
            "find",
            figures("cutoff", "sensitivity"),
        ),
        Section(
            "loss",
            "What training did",
            "The same tokens, scored at every checkpoint: the loss of what is learned falls, the rest stays.",
            "find",
            figures("loss"),
            [accuracy_table(run.evaluations)] if run.evaluations else [],
        ),
        Section(
            "gradients",
            "Where the gradient goes",
            "Which types move the student: size and direction of the gradients of rocks and of other types.",
            "gradients",
            figures("gradient_norm", "gradient_alignment", "gradient_kl", "gradient_blocks"),
            [claim_table(gradients.claims)] if gradients else [],
            _printable(gradients.warnings) if gradients else [],
        ),
        Section(
            "knockout",
            "Do the rocks matter",
            "Each token is banned at every decoding step, with the same random numbers, and the answers are graded "
            "again. Pillar: the ban costs accuracy. Stumbling: it improves accuracy. Neutral: the change is shown to "
            "be within the margin. Undecided: there are too few prompts to say. Placebos are types that are not rocks.",
            "knockout",
            figures("knockout"),
            [verdict_table(run.knockout)] if run.knockout else [],
            _knockout_notes(run.knockout) if run.knockout else [],
        ),
        Section(
            "study",
            "What leaving them out gains",
            "Arms differ only in the weights of their tokens. Each is trained on several seeds and compared in pairs.",
            "study",
            figures("study_curves", "study_comparisons"),
            _study_tables(study) if study else [],
            _printable(study.notes) if study else [],
        ),
    ]
    return made if run.rocks is None or run.rocks.tokens else list(_without_rocks(made, why_none(run.rocks)))


def _without_rocks(made: Sequence[Section], why: str) -> Iterator[Section]:
    """Leave out what would be empty without rocks, and say why there are none where their table would be."""
    for section in made:
        if section.key == "rocks":
            yield replace(section, tables=(), notes=[f"There are none: {why}."])
        elif section.key not in ("shares", "categories", "sureness"):
            yield section


def _knockout_notes(sweep: KnockoutSweep) -> list[str]:
    smallest = sweep.detectable.single
    right = with_interval(sweep.baseline.accuracy, sweep.baseline.interval)
    power = (
        f"Smallest effect this sweep could detect (80 % power): {decimal(100 * smallest, 1)} points, for a ban that "
        "only turns right answers wrong."
        if smallest < 1
        else "There are too few prompts to detect any loss."
    )
    said = [f"Without a ban, {right} of the answers are right. {power}", *gold_sentences(sweep)]
    needs = [sentence for sentence in (undecided_sentence(sweep), neutral_sentence(sweep)) if sentence]
    return [*said, *needs, *_printable(sweep.warnings)]


def _study_tables(study: StudyResult) -> list[Table]:
    collapsed = collapse_table(study) if study.collapsed_arms else None
    return [*filter(None, (collapsed, arm_table(study), control_table(study))), comparison_table(study)]


def _printable(notes: Sequence[str]) -> list[str]:
    return [printable(note[:LONGEST_NOTE]) for note in notes]
