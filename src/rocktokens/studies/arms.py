"""What an arm led to by itself: its learning curve with intervals, over all its runs."""

from collections.abc import Sequence

import numpy as np

from rocktokens.inference.crossed import crossed_mean
from rocktokens.studies.curves import Seeds, all_runs, common_steps, table_at
from rocktokens.studies.records import Arm, Curve, CurvePoint, RunAccuracy


def summarise_arm(name: str, seeds: Seeds, alpha: float) -> Arm:
    """The arm at every checkpoint that all its runs have, its runs, and the means of what else they state."""
    curves = all_runs(seeds)
    return Arm(
        name=name,
        points=[_point(seeds, step, alpha) for step in common_steps(curves)],
        runs=[_run_accuracy(curve) for curve in curves],
        facts=_mean_facts(curves),
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


def _mean_facts(curves: Sequence[Curve]) -> dict[str, float]:
    names = dict.fromkeys(name for curve in curves for name in curve.facts)
    return {name: float(np.mean([curve.facts[name] for curve in curves if name in curve.facts])) for name in names}
