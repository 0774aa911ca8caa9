"""The sections of a run's report: for each question a few sentences, figures and tables, or how to get them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rocktokens.display.numbers import counted, decimal, listed, percent, with_interval
from rocktokens.display.rocks import brief_rock_table, rock_table, why_none, with_teacher
from rocktokens.display.table import Table
from rocktokens.display.text import printable
from rocktokens.evaluation.records import accuracy_table
from rocktokens.gradients.records import CONTRADICTED, INCONCLUSIVE, SUPPORTED, Claim, claim_table
from rocktokens.knockout.records import KnockoutSweep
from rocktokens.report.charts.figures import run_figures
from rocktokens.report.charts.theme import Figure
from rocktokens.report.knockout_notes import gold_sentences, neutral_sentence, undecided_sentence
from rocktokens.report.page.answers import Answer, choice
from rocktokens.report.page.tiles import Tile
from rocktokens.report.tables import (
    arm_table,
    class_table,
    collapse_table,
    comparison_table,
    control_table,
    verdict_table,
)
from rocktokens.report.views.classes import class_views
from rocktokens.report.views.run_view import RunView
from rocktokens.rocks.records import FindRecord
from rocktokens.studies.records import StudyResult
from rocktokens.types import RockSet

LONGEST_NOTE = 1_000
"""Characters; a note may name tokens."""
NAMED_CATEGORIES = 3

EARLIER_TRACES = (
    "These rocks were found in traces that the run has replaced or extended since: run `rocktokens find` again."
)


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page."""

    key: str
    title: str
    conclusion: str
    """What its numbers say; empty where they are not there."""
    lead: str
    """What it shows, for a reader who has not read the paper."""
    verb: str
    """The command that makes its data."""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    details: str = ""
    """All that the answer to its question rests on."""
    more: Sequence[Table] = ()
    """Tables for those who look closer."""
    beside: bool = False
    """Whether figures and tables stand side by side on a wide screen."""

    @property
    def is_there(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.figures or self.tables or self.notes)


def sections(run: RunView, answers: Sequence[Answer], tiles: Sequence[Tile]) -> list[Section]:
    """Make all sections in the order of the page, those without data too."""
    drawn = run_figures(run)
    which, sure, moved, matter, gain = (
        (tile.conclusion, answer.sentence) for tile, answer in zip(tiles, answers, strict=True)
    )

    def figures(*names: str) -> list[Figure]:
        return [drawn[name] for name in names if name in drawn]

    gradients, study = run.gradients, run.study
    ungraded = [f"Left out: {printable(run.ungraded)}."] if run.ungraded else []
    whole = []
    if run.teacher_label:
        whole.append(f"Left out: gradients need the teacher's whole distribution, and it gave {run.teacher_label}.")
    made = [
        Section(
            "rocks",
            "The rocks",
            which[0],
            "A rock is a token type that occurs often and whose loss (the kl of the student to the teacher) stays high "
            "after training. In the figure, right is frequent and up is far from the teacher; what ranks a type is "
            "the product of the two. Choose a token, there or in the table, to see it everywhere on this page.",
            "find",
            figures("funnel"),
            tables=[_first_table(run.rocks)] if run.rocks else [],
            notes=[EARLIER_TRACES] if run.is_of_earlier_traces else [],
            details=which[1],
            more=[replace(rock_table(run.rocks), name="all-rocks")] if run.rocks else [],
            beside=True,
        ),
        Section(
            "shares",
            "How much of the run the rocks are",
            _shares_conclusion(run.rocks) if run.rocks else "",
            "Their shares of the types used, of the tokens, of the loss that is left and of the gradient.",
            "find",
            figures("shares"),
        ),
        Section(
            "categories",
            "Rocks by category",
            _categories_conclusion(run.find) if run.find else "",
            "Are rocks layout and discourse, or the content of the answer?",
            "find",
            figures("categories"),
        ),
        Section(
            "sureness",
            "How stable the set is",
            sure[0],
            "How many types are rocks, whether other prompts give the same ones, and which settings matter.",
            "find",
            figures("cutoff", "sensitivity"),
            details=sure[1],
        ),
        Section(
            "loss",
            "What training did",
            moved[0],
            "The same tokens, scored at every checkpoint: the loss of what is learned falls, the rest stays.",
            "find",
            figures("loss"),
            [accuracy_table(run.evaluations)] if run.evaluations else [],
            details=moved[1],
        ),
        Section(
            "gradients",
            "Where the gradient goes",
            _claims_conclusion(gradients.claims) if gradients else "",
            "Which types move the student: size and direction of the gradients of rocks and of other types.",
            "gradients",
            figures("gradient_norm", "gradient_alignment", "gradient_kl", "gradient_blocks"),
            [claim_table(gradients.claims)] if gradients else [],
            _printable(gradients.warnings) if gradients else whole,
        ),
        Section(
            "knockout",
            "Do the rocks matter",
            matter[0],
            "Each token is banned at every decoding step, with the same random numbers, and the answers are graded "
            "again. Pillar: the ban costs accuracy. Stumbling: it improves accuracy. Neutral: the change is shown to "
            "be within the margin. Undecided: there are too few prompts to say. Placebos are types that are not rocks.",
            "knockout",
            figures("knockout"),
            [verdict_table(run.knockout)] if run.knockout else [],
            _knockout_notes(run.knockout) if run.knockout else ungraded,
            details=matter[1],
        ),
        Section(
            "study",
            "What leaving them out gains",
            gain[0],
            "Arms differ only in the weights of their tokens. Each is trained on several seeds and compared in pairs.",
            "study",
            figures("study_curves", "study_comparisons"),
            _study_tables(study) if study else [],
            _printable(study.notes) if study else ungraded,
            details=gain[1],
        ),
    ]
    if run.classes is not None:
        made.insert(-1, _choice_section(run))
    return made if run.rocks is None or run.rocks.tokens else list(_without_rocks(made, why_none(run.rocks)))


def _first_table(rocks: RockSet) -> Table:
    """Make the table beside the funnel; its file has all columns."""
    return replace(brief_rock_table(rocks, len(rocks.tokens)), records=rock_table(rocks).records)


def _shares_conclusion(rocks: RockSet) -> str:
    summary, intervals = rocks.summary, rocks.summary.get("intervals") or {}
    said = {"tokens": "token_share", "loss that is left": "kl_share", "logit-gradient norm": "grad_share"}
    shares = [
        f"{with_interval(summary[name], intervals.get(name))} of the {what}"
        for what, name in said.items()
        if summary.get(name) is not None
    ]
    return f"Rocks are {percent(summary.get('vocab_share'))} of the types used, and {listed(shares)}." if shares else ""


def _categories_conclusion(found: FindRecord) -> str:
    """Name the categories that hold most of the rocks' loss."""
    shares = {own.category.replace("_", " "): own.rock_kl_share or 0.0 for own in found.categories}
    whole, first = sum(shares.values()), sorted(shares, key=lambda name: -shares[name])[:NAMED_CATEGORIES]
    named = [f"{name} ({percent(shares[name] / whole, 0)})" for name in first if whole and shares[name]]
    return f"Most of the rocks' loss is in {listed(named)}." if named else ""


def _claims_conclusion(claims: Sequence[Claim]) -> str:
    count = Counter(own.verdict for own in claims)
    said = [f"{count[state]} {state}" for state in (SUPPORTED, CONTRADICTED, INCONCLUSIVE) if count[state]]
    return f"Of {counted(len(claims), 'claim')} about gradients: {listed(said)}." if said else ""


def _choice_section(run: RunView) -> Section:
    views = class_views(run)
    return Section(
        "choice",
        "Choice and decision",
        choice(run, views) if views else "",
        "The decision must be learned; the choice matters only where members are not interchangeable.",
        "find --classes",
        tables=[with_teacher(class_table(views), run.teacher_label)] if views else [],
        notes=[] if views else ["No tokens were found that may stand for each other."],
    )


def _without_rocks(made: Sequence[Section], why: str) -> Iterator[Section]:
    """Leave out what would be empty without rocks, and say why there are none where their table would be."""
    for section in made:
        if section.key == "rocks":
            yield replace(section, tables=(), more=(), notes=[f"There are none: {why}."])
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
