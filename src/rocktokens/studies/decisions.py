"""What a comparison is called, and how it reads in one line.

1. *better*: the whole interval lies on the good side of 0 (higher accuracy, fewer steps); *worse*: on the other.
2. *equivalent*: only for accuracy, only where a margin was named in advance. The whole interval lies within it, and
   enough prompts were asked that a difference of that size cannot have passed unseen: if a share q of all prompts
   differs, none of P sampled ones does with chance (1 − q)^P, which is below α from q = −ln(α)/P on.
3. *undecided*: everything else. It says what could have been seen: the range of the smallest true difference that such
   a sample calls with 80 % power, or that there can be none.
4. *unreached*: no run of one of the arms came to the accuracy, so there are no steps to compare.

A line whose arms have collapsed runs says so before its verdict: the mean and its interval are unreliable. A pair that
was not named as primary reads "exploratory".

An end of an interval that lies beyond what is possible is no estimate: it reads as a bound, "≤ −100".
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from scipy.stats import norm

from rocktokens.display.numbers import counted, extent, signed
from rocktokens.inference.crossed import seeds_multiplier
from rocktokens.studies.records import MOST_PRIMARY, Comparison, Kind, StudyResult, StudyVerdict
from rocktokens.types import Interval

WIDE = 4.0
"""Standard errors on either side from which on intervals decide little, however many prompts there are."""
EXACT_SEEDS = 6
"""The fewest seeds an exact test can decide by: the sign-flip p of S seeds that all agree is 2^(1 − S)."""


class DecisionRule(NamedTuple):
    """What verdicts of one kind of comparison depend on."""

    alpha: float
    """For one pair: that of the study over the number of pairs of its role."""
    margin: float | None
    n_prompts: int


class StudySize(NamedTuple):
    """What the width of intervals depends on, besides the spread."""

    n_seeds: int
    n_pairs: int
    """Those corrected together."""
    alpha: float
    """Of these pairs together."""

    @property
    def multiplier(self) -> float:
        """Standard errors on either side of an interval whose spread is that of the seeds; two of them at least."""
        return seeds_multiplier(self.n_seeds, self.alpha / max(self.n_pairs, 1))

    @property
    def words(self) -> str:
        """Seeds and pairs in words."""
        return f"{_count(self.n_seeds, 'seed')} and {_count(self.n_pairs, 'pair')}"

    @property
    def width(self) -> str:
        """What seeds and pairs make of an interval, in words."""
        many = norm.ppf(1 - self.alpha / max(self.n_pairs, 1) / 2)
        widest = f"up to ± {self.multiplier:.2g} standard errors (± {many:.2g} with many seeds)"
        return f"with {self.words} an interval is {widest}"


def decide(kind: Kind, interval: Interval, rule: DecisionRule) -> StudyVerdict:
    """Judge what the first arm is by the interval alone."""
    is_count = kind == "steps_to_accuracy"
    low, high = (-interval[1], -interval[0]) if is_count else interval
    if low > 0:
        return "better"
    if high < 0:
        return "worse"
    if is_count or rule.margin is None:
        return "undecided"
    unseen = -math.log(rule.alpha) / rule.n_prompts
    return "equivalent" if -rule.margin <= low and high <= rule.margin and unseen <= rule.margin else "undecided"


def verdict_lines(result: StudyResult) -> list[str]:
    """Say for every pair its verdict at equal steps, and indented below it the other ways to compare."""
    return [_line(result, own) for own in result.comparisons]


def _line(result: StudyResult, own: Comparison) -> str:
    role = " (exploratory)" if own.role == "exploratory" else ""
    start = f"{own.first} vs {own.second}{role}: " if own.kind == "equal_steps" else "  "
    if own.difference is None or own.interval is None:
        return start + _unreached(result, own)
    unit, scale, digits = _unit(own)
    middle, low, high = (signed(scale * value, digits) for value in (own.difference, *own.interval))
    below, above = ("≤ " if own.cut[0] else ""), ("≥ " if own.cut[1] else "")
    size = f"{middle} {unit} [{below}{low}, {above}{high}]"
    return f"{start}{size} {_where(own)}; {'; '.join(_judgement(result, own))}"


def _unit(own: Comparison) -> tuple[str, float, int]:
    """Return what differences are shown in, how many of it make 1, and decimals."""
    return ("steps", 1.0, 0) if own.kind == "steps_to_accuracy" else ("points", 100.0, 1)


def _unreached(result: StudyResult, own: Comparison) -> str:
    """Say who reached the accuracy and who did not, where steps cannot be compared."""
    counts = [len(result.arm(name).runs) for name in (own.first, own.second)]
    arms = list(zip((own.first, own.second), counts, own.never, own.mean_steps or (0.0, 0.0), strict=True))
    none = [f"none of {counted(count, 'run')} of {name}" for name, count, never, _ in arms if never == count]
    some = [
        f"by {count - never} of {counted(count, 'run')} of {name}"
        if never
        else f"by {name} after {steps:,.0f} on average"
        for name, count, never, steps in arms
        if never < count
    ]
    reached = f"reached by {' and '.join(none)} within {own.within} steps"
    return f"steps to {100 * own.at:.1f} %: {'; '.join((reached, *some))}"


def _where(own: Comparison) -> str:
    match own.kind:
        case "equal_steps":
            return "at equal steps"
        case "equal_tokens":
            return f"at equal tokens ({own.at:,.0f})"
        case "equal_seconds":
            return f"in equal time ({own.at:,.0f} s)"
        case "steps_to_accuracy":
            return f"to {100 * own.at:.1f} % accuracy"


def _judgement(result: StudyResult, own: Comparison) -> Iterator[str]:
    if own.unreliable:
        collapsed = [(name, result.arm(name).collapsed) for name in (own.first, own.second)]
        runs = [f"{of.count} of {counted(of.n_runs, 'run')} of {name}" for name, of in collapsed if of and of.count]
        yield f"unreliable mean, {' and '.join(runs)} collapsed"
    if own.verdict == "equivalent" and result.margin is not None:
        yield f"equivalent within ±{100 * result.margin:.1f}"
    elif own.verdict != "undecided":
        yield own.verdict
    elif not own.standard_error:
        same = "run differs" if own.kind == "steps_to_accuracy" else "answer is right in one arm and wrong in the other"
        yield f"undecided: no {same}"
    elif own.detectable is None:
        yield own.verdict
    elif own.could_be_called:
        unit, scale, digits = _unit(own)
        low, high = own.detectable
        shown = extent(scale * low, scale * high, scale * own.largest, digits, unit)
        yield f"undecided; smallest effect this study could detect: {shown}"
    else:
        size = StudySize(len(result.seeds), result.n_together(own.role), result.alpha).words
        yield f"undecided: with {size} no difference could have been called"
    never = [
        f"{count} of {counted(len(result.arm(name).runs), 'run')} of {name}"
        for name, count in zip((own.first, own.second), own.never, strict=True)
        if count
    ]
    if never:
        bound = "a lower bound for that arm" if len(never) == 1 else "a lower bound for either arm"
        yield f"not reached by {' and '.join(never)}, which count with the last step: {bound}"
    if len(result.seeds) == 1:
        yield "one seed: over prompts only"


def few_seeds(n_seeds: int) -> str | None:
    """Say before a study that its seeds are too few to decide anything; None where they are not."""
    if n_seeds >= EXACT_SEEDS:
        return None
    return (
        f"{_count(n_seeds, 'seed')} cannot decide which arm is better: exact tests over seeds need at least "
        f"{EXACT_SEEDS} (study.seeds)"
    )


def study_notes(
    size: StudySize, *, is_default: bool = False, no_target: str | None = None, is_retimed: bool = False
) -> list[str]:
    """Say in sentences what the study cannot say.

    Args:
        size: seeds, primary pairs and α.
        is_default: whether there are other pairs and nobody named the primary ones.
        no_target: the baseline, where it gained nothing and no accuracy to reach was given.
        is_retimed: whether seconds of some run lack what an interrupted attempt had done.
    """
    notes = []
    if size.n_seeds == 1:
        notes.append("one seed: the intervals are over prompts only and say nothing of other seeds")
    elif size.n_pairs and size.multiplier > WIDE:
        notes.append(f"{size.width}: run more seeds, or name fewer pairs in study.primary")
    if is_default:
        notes.append(
            f"the first {MOST_PRIMARY} pairs are taken as primary, the others are exploratory: name yours in "
            "study.primary before the study"
        )
    if no_target is not None:
        notes.append(
            f"{no_target} gained nothing from step 0 to its end, so there is no accuracy to reach: name one in "
            "study.target_accuracy to compare steps"
        )
    if is_retimed:
        notes.append("some runs were interrupted, so equal time is an indication only")
    return notes


def _count(number: int, what: str) -> str:
    return f"one {what}" if number == 1 else f"{number} {what}s"
