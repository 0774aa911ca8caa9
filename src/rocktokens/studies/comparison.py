"""Which arm is better, by how much, and how sure: all pairs in four ways.

1. For a pair, every seed and prompt has a difference: right answers of the first arm minus those of the second, as
   shares, the draws of an arm averaged within the seed. Prompts, their order and all random numbers are shared, so most
   of what makes prompts hard cancels.
2. *Equal steps*: at the last checkpoint that all runs of both arms have. *Equal tokens*, *equal seconds*: within each
   seed, where the run of both arms that spent least ended; the others are read there between their checkpoints.
   The mean of the seeds × prompts table, its standard error and degrees of freedom are those of ``inference.crossed``.
3. *Steps to accuracy*: where each run first reaches the target, averaged over draws. The target is fixed once from the
   point estimates, by default 90 % of what the baseline gains. A run that never reaches it, up to the last step all
   runs of the pair have, counts with that step: what is compared is the mean number of steps spent within that budget,
   for such an arm a lower bound. Where no run of an arm reaches it, nothing is estimated: all its runs have the same
   number, which says nothing of their spread.
   That is no mean over prompts, so prompts are resampled, the same for all runs (``inference.crossed``). Where a
   nearly flat curve crosses a line jumps as prompts change, so a jackknife would not do.
4. At most three pairs are primary, the rest is exploratory. With m pairs of a role, intervals are at 1 − α/m
   (Bonferroni): they hold together, and the verdict is read off the interval, so that the two never disagree. p is that
   of the pair alone, beside it corrected by Holm for the pairs of its role; both within one kind of comparison.
5. Runs that ended below their own start have collapsed. Where an arm has some, its mean is marked (``records``).

Shape legend: S seeds, R runs, E evaluated checkpoints of a run, P prompts, B resamples.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from rocktokens.errors import RocktokensError
from rocktokens.inference.bootstrap import prompt_draws
from rocktokens.inference.crossed import CrossedMean, crossed_mean, resampled_mean
from rocktokens.inference.multiplicity import holm
from rocktokens.studies.curves import (
    Axis,
    Runs,
    Seeds,
    all_runs,
    common_steps,
    last_common_step,
    mean_correct,
    ordered,
    steps_to,
    table_at,
)
from rocktokens.studies.decisions import DecisionRule, StudySize, decide, study_notes
from rocktokens.studies.records import (
    KINDS,
    MOST_PRIMARY,
    Arm,
    Comparison,
    Curve,
    CurvePoint,
    Denominator,
    Kind,
    PairRole,
    RunAccuracy,
    StudyResult,
)

GAIN_TO_REACH = 0.9
"""Of the baseline's gain, where no target is given."""
RESAMPLES = 2000
AXES: dict[Kind, Axis] = {"equal_steps": "steps", "equal_tokens": "tokens", "equal_seconds": "seconds"}


class Reading(NamedTuple):
    """A pair, read in one way."""

    at: float
    estimate: CrossedMean | None
    """None where all runs of an arm never got there."""
    largest: float
    """No difference can be larger."""
    never: tuple[int, int] = (0, 0)
    """Runs of each arm that never got there."""
    within: int | None = None
    mean_steps: tuple[float, float] | None = None


def compare(
    curves: Sequence[Curve],
    pairs: Sequence[tuple[str, str]],
    *,
    primary: Sequence[tuple[str, str]] | None = None,
    alpha: float = 0.05,
    target_accuracy: float | None = None,
    baseline: str,
    margin: float | None = None,
    denominator: Denominator = "all",
    teacher: str = "",
) -> StudyResult:
    """Compare arms pair by pair.

    Args:
        curves: every run of every arm; their order does not matter.
        pairs: the first of each is compared with the second.
        primary: those of the pairs that the study is about, three at most; default the first three.
        alpha: of all primary pairs together, and of all others, for each kind of comparison.
        target_accuracy: for steps to accuracy; default 90 % of the baseline's gain.
        baseline: the arm whose gain that is.
        margin: difference of accuracy, named before the study, within which arms are called equivalent.
        denominator: of the losses of all arms, for the record.
        teacher: label of the arms' teacher where it named its likeliest tokens alone, for the record.
    """
    runs = ordered(curves)
    _check_names(runs, pairs, baseline)
    families = _families(pairs, primary)
    target = _default_target(runs[baseline]) if target_accuracy is None else target_accuracy
    n_prompts = len(curves[0].prompt_ids)
    by_kind = [
        [
            comparison
            for role, own in families.items()
            for comparison in _compare_kind(
                kind, role, runs, own, target, DecisionRule(alpha / max(len(own), 1), margin, n_prompts)
            )
        ]
        for kind in KINDS
    ]
    result = StudyResult(
        baseline=baseline,
        alpha=alpha,
        margin=margin,
        target_accuracy=target,
        n_pairs=len(pairs),
        seeds=list(runs[baseline]),
        n_prompts=n_prompts,
        arms=[summarise_arm(name, seeds, alpha) for name, seeds in runs.items()],
        comparisons=[own for of_pair in zip(*filter(None, by_kind), strict=True) for own in of_pair],
        notes=study_notes(
            StudySize(len(runs[baseline]), len(families["primary"]), alpha),
            is_default=primary is None and len(pairs) > MOST_PRIMARY,
            no_target=baseline if target is None else None,
            is_retimed=any(curve.is_retimed for curve in curves),
        ),
        denominator=denominator,
        n_primary=len(families["primary"]),
        teacher=teacher,
    )
    return result.mark_collapsed()


def _families(
    pairs: Sequence[tuple[str, str]], primary: Sequence[tuple[str, str]] | None
) -> dict[PairRole, list[tuple[str, str]]]:
    """Split the pairs by what they are corrected with."""
    chosen = list(pairs[:MOST_PRIMARY] if primary is None else primary)
    if len(chosen) > MOST_PRIMARY:
        raise RocktokensError(f"{len(chosen)} pairs are named as primary: name {MOST_PRIMARY} at most")
    if unknown := [pair for pair in chosen if pair not in pairs]:
        raise RocktokensError(f"the primary pair {unknown[0]} is not among the pairs that are compared: add it there")
    return {"primary": chosen, "exploratory": [pair for pair in pairs if pair not in chosen]}


def summarise_arm(name: str, seeds: Seeds, alpha: float) -> Arm:
    """Describe an arm at every checkpoint that all its runs have, its runs, and the means of what else they state."""
    curves = all_runs(seeds)
    names = dict.fromkeys(name for curve in curves for name in curve.facts)
    return Arm(
        name=name,
        points=[_point(seeds, step, alpha) for step in common_steps(curves)],
        runs=[_run_accuracy(curve) for curve in curves],
        facts={of: float(np.mean([curve.facts[of] for curve in curves if of in curve.facts])) for of in names},
    )


def _point(seeds: Seeds, step: int, alpha: float) -> CurvePoint:
    estimate = crossed_mean(table_at(seeds, step))
    low, high = estimate.interval(alpha)
    places = [(curve, int(np.searchsorted(curve.steps, step))) for curve in all_runs(seeds)]
    return CurvePoint(
        step=step,
        tokens=float(np.mean([curve.tokens[place] for curve, place in places])),
        seconds=float(np.mean([curve.seconds[place] for curve, place in places])),
        accuracy=estimate.mean,
        interval=(max(low, 0.0), min(high, 1.0)),
    )


def _run_accuracy(curve: Curve) -> RunAccuracy:
    return RunAccuracy(
        seed=curve.seed,
        draw=curve.draw,
        steps=curve.steps.tolist(),
        tokens=curve.tokens.tolist(),
        seconds=curve.seconds.tolist(),
        accuracy=curve.correct_EP.mean(axis=1).tolist(),
    )


def _compare_kind(
    kind: Kind,
    role: PairRole,
    runs: Runs,
    pairs: Sequence[tuple[str, str]],
    target: float | None,
    rule: DecisionRule,
) -> list[Comparison]:
    """Compare all pairs of a role in one way; none where there is no accuracy to reach."""
    if kind != "steps_to_accuracy":
        read = partial(_accuracy_difference, AXES[kind])
    elif target is not None:
        read = partial(_steps_difference, target)
    else:
        return []
    readings = [read(runs[first], runs[second]) for first, second in pairs]
    # A pair that cannot be judged still counts among the pairs.
    corrected = holm([1.0 if reading.estimate is None else reading.estimate.p for reading in readings])
    return [
        replace(_comparison(kind, pair, reading, p_holm, rule), role=role)
        for pair, reading, p_holm in zip(pairs, readings, corrected, strict=True)
    ]


def _comparison(kind: Kind, pair: tuple[str, str], reading: Reading, p_holm: float, rule: DecisionRule) -> Comparison:
    estimate, largest = reading.estimate, reading.largest
    steps = {name: getattr(reading, name) for name in ("never", "within", "mean_steps")}
    compared = partial(Comparison, *pair, kind, reading.at, **steps)
    if estimate is None:
        numbers = ("difference", "interval", "standard_error", "degrees_of_freedom", "p", "p_holm", "detectable")
        return compared(**dict.fromkeys(numbers), verdict="unreached")
    low, high = estimate.interval(rule.alpha)
    interval = max(low, -largest), min(high, largest)
    return compared(
        difference=estimate.mean,
        interval=interval,
        standard_error=estimate.standard_error,
        degrees_of_freedom=estimate.degrees_of_freedom,
        p=estimate.p,
        p_holm=p_holm,
        detectable=estimate.detectable(rule.alpha),
        verdict=decide(kind, interval, rule),
        cut=(low < -largest, high > largest),
    )


def _accuracy_difference(axis: Axis, first: Seeds, second: Seeds) -> Reading:
    """Compare at equal steps, tokens or seconds."""
    last_step = last_common_step([*all_runs(first), *all_runs(second)])
    at_S, differences_SP = [], []
    for seed, own in first.items():
        other = second[seed]
        at = last_step if axis == "steps" else min(float(getattr(curve, axis)[-1]) for curve in (*own, *other))
        at_S.append(at)
        differences_SP.append(mean_correct(own, axis, at) - mean_correct(other, axis, at))
    return Reading(float(np.mean(at_S)), crossed_mean(np.array(differences_SP)), largest=1.0)


def _steps_difference(target: float, first: Seeds, second: Seeds) -> Reading:
    """Compare the steps until the target accuracy."""
    curves = [*all_runs(first), *all_runs(second)]
    budget, n_prompts = last_common_step(curves), len(curves[0].prompt_ids)
    # The first row is the prompts as they are.
    weights_BP = np.vstack([np.ones(n_prompts, dtype=np.int64), *prompt_draws(n_prompts, RESAMPLES, seed=0)])
    own_BS, never = _steps_by_seed(target, budget, first, weights_BP)
    other_BS, other_never = _steps_by_seed(target, budget, second, weights_BP)
    difference_BS = own_BS - other_BS
    is_reached = never < len(all_runs(first)) and other_never < len(all_runs(second))
    return Reading(
        at=target,
        estimate=resampled_mean(difference_BS[0], difference_BS[1:], n_prompts) if is_reached else None,
        largest=float(budget),
        never=(never, other_never),
        within=budget,
        mean_steps=(float(own_BS[0].mean()), float(other_BS[0].mean())),
    )


def _steps_by_seed(target: float, budget: int, seeds: Seeds, weights_BP: np.ndarray) -> tuple[np.ndarray, int]:
    """Return float64 (B, S), steps to the target under each row of weights, and how many runs never get there.

    Those count with the budget; how many they are is read off the first row.
    """

    def steps_of(curve: Curve) -> np.ndarray:
        kept = int(np.searchsorted(curve.steps, budget)) + 1
        accuracy_BE = weights_BP @ curve.correct_EP[:kept].T / len(curve.prompt_ids)
        return steps_to(target, curve.steps[:kept], accuracy_BE)

    steps_SRB = [[steps_of(curve) for curve in runs] for runs in seeds.values()]
    never = sum(bool(np.isnan(steps_B[0])) for steps_RB in steps_SRB for steps_B in steps_RB)
    return np.array([np.nan_to_num(steps_RB, nan=budget).mean(axis=0) for steps_RB in steps_SRB]).T, never


def _default_target(baseline: Seeds) -> float | None:
    """Return what the baseline has after 90 % of its gain; None where it gained nothing."""
    last = last_common_step(all_runs(baseline))
    start, end = (float(table_at(baseline, step).mean()) for step in (0, last))
    return start + GAIN_TO_REACH * (end - start) if end > start else None


def _check_names(runs: Runs, pairs: Sequence[tuple[str, str]], baseline: str) -> None:
    for name in (baseline, *(name for pair in pairs for name in pair)):
        if name not in runs:
            raise RocktokensError(f"there are no runs of arm {name!r}: the study has {', '.join(map(repr, runs))}")
    for first, second in pairs:
        if first == second:
            raise RocktokensError(f"arm {first!r} is compared with itself: name two arms in study.compare")
