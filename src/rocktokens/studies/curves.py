"""The runs of a study, brought to one order and read where arms can be compared.

1. ``ordered`` checks that all arms have the same seeds, draws for every seed, and the same prompts, and sorts: nothing
   that follows depends on the order of runs or prompts.
2. ``correct_at`` reads a run at a number of steps, tokens or seconds: between two evaluated checkpoints each prompt's
   share of right answers runs straight from one to the other.
3. ``steps_to`` reads where the straight lines between accuracies first reach a target.

Shape legend: S seeds, E evaluated checkpoints of a run, P prompts, B resamples.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from rocktokens.errors import RocktokensError
from rocktokens.studies.records import Curve

Axis = Literal["steps", "tokens", "seconds"]
Seeds = Mapping[int, Sequence[Curve]]
"""The runs of an arm by seed, one for each draw, both ascending."""
Runs = Mapping[str, Seeds]
"""The runs by arm, in the order the arms came in."""


def ordered(curves: Sequence[Curve]) -> Runs:
    """Sort the runs by arm and seed, prompts by their ids; refuse, in one sentence, runs that do not match."""
    if not curves:
        raise RocktokensError("the study has no runs to compare: train at least one arm")
    for curve in curves:
        _check_curve(curve, curves[0])
    runs: dict[str, dict[int, list[Curve]]] = {}
    for curve in sorted(curves, key=lambda curve: (curve.seed, curve.draw)):
        order = sorted(range(len(curve.prompt_ids)), key=curve.prompt_ids.__getitem__)
        own = replace(curve, correct_EP=curve.correct_EP[:, order], prompt_ids=[curve.prompt_ids[at] for at in order])
        runs.setdefault(curve.arm, {}).setdefault(curve.seed, []).append(own)
    names = dict.fromkeys(curve.arm for curve in curves)
    _check_grid(runs)
    return {name: runs[name] for name in names}


def all_runs(seeds: Seeds) -> list[Curve]:
    """Return every run of an arm."""
    return [curve for runs in seeds.values() for curve in runs]


def common_steps(curves: Iterable[Curve]) -> list[int]:
    """Return the steps at which all these runs were evaluated, ascending."""
    return sorted(set.intersection(*(set(curve.steps.tolist()) for curve in curves)))


def last_common_step(curves: Sequence[Curve]) -> int:
    """Return the last step at which all these runs were evaluated; refuse 0."""
    last = common_steps(curves)[-1]
    if last == 0:
        arms = " and ".join(dict.fromkeys(repr(curve.arm) for curve in curves))
        raise RocktokensError(f"the runs of {arms} share no step after 0: evaluate them at the same steps")
    return last


def table_at(seeds: Seeds, step: int) -> np.ndarray:
    """Return float64 (S, P): an arm's share of right answers at a step, by seed, draws averaged."""
    return np.array([mean_correct(curves, "steps", step) for curves in seeds.values()])


def mean_correct(curves: Sequence[Curve], axis: Axis, value: float) -> np.ndarray:
    """Return float64 (P,): ``correct_at``, averaged over runs."""
    return np.mean([correct_at(curve, axis, value) for curve in curves], axis=0)


def correct_at(curve: Curve, axis: Axis, value: float) -> np.ndarray:
    """Return float64 (P,): the share of right answers by prompt once this much was spent; the run's end beyond it."""
    spent_E = np.asarray(getattr(curve, axis), dtype=np.float64)
    last = len(spent_E) - 1
    before = int(np.searchsorted(spent_E, value, side="right")) - 1
    if before >= last:
        return curve.correct_EP[last].astype(np.float64)
    along = (value - spent_E[before]) / (spent_E[before + 1] - spent_E[before])
    return (1 - along) * curve.correct_EP[before] + along * curve.correct_EP[before + 1]


def steps_to(target: float, steps_E: np.ndarray, accuracy_BE: np.ndarray) -> np.ndarray:
    """Return float64 (B,): where accuracy, straight between evaluations, first reaches the target; NaN if never."""
    reached_BE = accuracy_BE >= target
    first_B = reached_BE.argmax(axis=1)
    before_B = np.maximum(first_B - 1, 0)
    rows = np.arange(len(accuracy_BE))
    low_B, high_B = accuracy_BE[rows, before_B], accuracy_BE[rows, first_B]
    rises_B = high_B > low_B
    along_B = np.where(rises_B, (target - low_B) / np.where(rises_B, high_B - low_B, 1.0), 0.0)
    steps_B = steps_E[before_B] + along_B * (steps_E[first_B] - steps_E[before_B])
    return np.where(reached_BE.any(axis=1), steps_B, np.nan)


def _check_curve(curve: Curve, other: Curve) -> None:
    """Refuse a run that is not a learning curve, or was not evaluated on the prompts of the other."""
    where = f"arm {curve.arm!r}, seed {curve.seed}, draw {curve.draw}"
    n_evaluations, n_prompts = len(curve.steps), len(curve.prompt_ids)
    if curve.correct_EP.shape != (n_evaluations, n_prompts) or not (
        len(curve.tokens) == len(curve.seconds) == n_evaluations
    ):
        raise RocktokensError(f"{where}: steps, tokens, seconds and answers differ in length: evaluate the run again")
    if n_evaluations < 2 or curve.steps[0] != 0 or np.any(np.diff(curve.steps) <= 0):
        raise RocktokensError(
            f"{where}: evaluated at the steps {curve.steps.tolist()}, which do not ascend from 0: evaluate step 0 and "
            "at least one checkpoint after it"
        )
    if n_prompts < 2:
        raise RocktokensError(f"{where}: {n_prompts} prompt leaves no spread to judge by: raise evaluation.num_prompts")
    if len(set(curve.prompt_ids)) < n_prompts or set(curve.prompt_ids) != set(other.prompt_ids):
        raise RocktokensError(
            f"{where}: answered other prompts than arm {other.arm!r}, seed {other.seed}: evaluate all runs with one "
            "evaluation section"
        )


def _check_grid(runs: Runs) -> None:
    """Refuse arms that lack a seed or a draw, or have one twice."""
    first, by_seed = next(iter(runs.items()))
    for arm, own in runs.items():
        if list(own) != list(by_seed):
            raise RocktokensError(
                f"arm {arm!r} has the seeds {list(own)}, arm {first!r} {list(by_seed)}: run every arm with all seeds"
            )
        draws = [[curve.draw for curve in curves] for curves in own.values()]
        if any(len(set(of_seed)) < len(of_seed) or of_seed != draws[0] for of_seed in draws):
            raise RocktokensError(f"arm {arm!r} has the draws {draws} by seed: run every draw once with every seed")
