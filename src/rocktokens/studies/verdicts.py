"""What a comparison is called, and how it reads in one line.

1. *better*: the whole interval lies on the good side of 0 (higher accuracy, fewer steps); *worse*: on the other.
2. *equivalent*: only for accuracy, only where a margin was named in advance. The whole interval lies within it, and so
   many prompts were asked that a difference of that size cannot have passed unseen: if a share q of all prompts
   differs, none of P sampled ones does with chance (1 − q)^P, which is below α from q = −ln(α)/P on.
3. *undecided*: everything else. It always says what could have been seen: the smallest true difference that this sample
   calls with 80 % power.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from rocktokens.studies.records import Comparison, Interval, Kind, StudyResult, StudyVerdict

FEW_SEEDS = 3
"""With fewer, intervals are so wide that hardly anything is decided."""


class Rule(NamedTuple):
    """What verdicts of one kind of comparison depend on."""

    alpha: float
    """For one pair: that of the study over the number of pairs."""
    margin: float | None
    n_prompts: int


def decide(kind: Kind, interval: Interval, rule: Rule) -> StudyVerdict:
    """What the first arm is, judged by the interval alone."""
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
    """For every pair its verdict at equal steps, and indented below it the other ways to compare."""
    return [_line(result, own) for own in result.comparisons]


def _line(result: StudyResult, own: Comparison) -> str:
    start = f"{own.first} vs {own.second}: " if own.kind == "equal_steps" else "  "
    return f"{start}{_size(own)} {_where(own)}; {'; '.join(_judgement(result, own))}"


def _size(own: Comparison) -> str:
    if own.kind == "steps_to_accuracy":
        unit, scale, digits = " steps", 1.0, 0
    else:
        unit, scale, digits = " points", 100.0, 1
    difference, low, high = (signed(scale * value, digits) for value in (own.difference, *own.interval))
    return f"{difference}{unit} [{low}, {high}]"


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
    if own.verdict == "equivalent" and result.margin is not None:
        yield f"equivalent within ±{100 * result.margin:.1f}"
    elif own.verdict != "undecided":
        yield own.verdict
    elif own.standard_error:
        scale, digits = (1, 0) if own.kind == "steps_to_accuracy" else (100, 1)
        yield f"undecided at this sample: ±{scale * own.detectable:,.{digits}f} detectable"
    else:
        yield (
            "undecided: not one run differs" if own.kind == "steps_to_accuracy" else "undecided: not one answer differs"
        )
    never = [
        f"{count} of {len(result.arm(name).runs)} runs of {name}"
        for name, count in zip((own.first, own.second), own.never, strict=True)
        if count
    ]
    if never:
        yield f"not reached by {' and '.join(never)}, counted with the last step"
    if len(result.seeds) == 1:
        yield "one seed: over prompts only"


def study_notes(n_seeds: int, baseline: str, target: float | None) -> list[str]:
    """What the study cannot say, in sentences."""
    notes = []
    if n_seeds == 1:
        notes.append("one seed: the intervals are over prompts only and say nothing of other seeds")
    elif n_seeds < FEW_SEEDS:
        notes.append(
            f"{n_seeds} seeds hardly show how much seeds differ, so the intervals are very wide: use 3 or more"
        )
    if target is None:
        notes.append(
            f"{baseline} gained nothing from step 0 to its end, so there is no accuracy to reach: name one in "
            "study.target_accuracy to compare steps"
        )
    return notes


def signed(value: float, digits: int) -> str:
    """A number with its sign, the minus as wide as the plus; plain where it is 0."""
    return f"{value:+,.{digits}f}".replace("-", "−") if value else f"{0:.{digits}f}"
