"""How often steps to accuracy are called different when they are not, with an arm that breaks down in some seeds."""

import numpy as np
import pytest

from rocktokens.studies import comparison
from rocktokens.studies.comparison import compare
from rocktokens.studies.records import Comparison, Curve

STEPS = np.array([0, 16, 32, 48, 64])
N_PROMPTS, TARGET = 200, 0.847
STEADY, FAST, BROKEN = (0.5, 0.71, 0.82, 0.87, 0.885), (0.5, 0.9, 0.92, 0.93, 0.93), (0.5, 0.3, 0.2, 0.2, 0.2)
FAST_SHARE = 0.47
"""With it the two arms need as many steps within 64 on average: (64 − 40)/(64 − 13)."""
STUDIES = 250


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only the kind of comparison that is looked at: the others take half of the time."""
    monkeypatch.setattr(comparison, "RESAMPLES", 60)
    monkeypatch.setattr(comparison, "KINDS", ("steps_to_accuracy",))


def run_of(arm: str, seed: int, accuracies: tuple[float, ...], rng: np.random.Generator) -> Curve:
    correct_EP = rng.random((len(STEPS), N_PROMPTS)) < np.array(accuracies)[:, None]
    ids = [f"p{number:03d}" for number in range(N_PROMPTS)]
    return Curve(arm, seed, 0, STEPS, STEPS * 100, STEPS * 1.0, correct_EP.astype(np.float64), ids)


def study(n_seeds: int, is_fast: list[bool], alpha: float, rng: np.random.Generator) -> Comparison:
    curves = [run_of("steady", seed, STEADY, rng) for seed in range(n_seeds)]
    curves += [run_of("bimodal", seed, FAST if is_fast[seed] else BROKEN, rng) for seed in range(n_seeds)]
    pairs = [("bimodal", "steady")]
    result = compare(curves, pairs, alpha=alpha, target_accuracy=TARGET, baseline="steady")
    return result.of_kind("steps_to_accuracy")[0]


@pytest.mark.parametrize(("n_seeds", "n_pairs"), [(3, 4), (5, 1), (5, 3)])
def test_an_arm_that_breaks_down_in_some_seeds_is_rarely_called(n_seeds: int, n_pairs: int):
    """No statistics can know that an arm breaks down if no seed shows it: those studies are allowed for."""
    rng = np.random.default_rng([n_seeds, n_pairs])
    verdicts = [
        study(n_seeds, (rng.random(n_seeds) < FAST_SHARE).tolist(), 0.05 / n_pairs, rng).verdict for _ in range(STUDIES)
    ]
    assert verdicts.count("worse") == 0
    unseen = FAST_SHARE**n_seeds if n_seeds > 3 else 0.0
    noise = 3 * np.sqrt(0.05 / STUDIES)
    assert verdicts.count("better") / STUDIES <= 0.05 / n_pairs + unseen + noise


@pytest.mark.parametrize(("n_seeds", "n_pairs"), [(3, 1), (3, 4), (5, 1)])
def test_arms_alike_are_called_different_no_more_often_than_claimed(n_seeds: int, n_pairs: int):
    rng = np.random.default_rng([7, n_seeds, n_pairs])
    called = 0
    for _ in range(STUDIES):
        shifts = rng.normal(0, 0.02, (2, n_seeds))
        curves = [
            run_of(arm, seed, tuple(np.clip(np.array(STEADY) + shifts[place, seed], 0, 1)), rng)
            for place, arm in enumerate(("one", "other"))
            for seed in range(n_seeds)
        ]
        result = compare(curves, [("one", "other")], alpha=0.05 / n_pairs, target_accuracy=TARGET, baseline="one")
        called += result.of_kind("steps_to_accuracy")[0].verdict in ("better", "worse")
    assert called / STUDIES <= 0.05 / n_pairs + 3 * np.sqrt(0.05 / STUDIES)


def test_an_arm_that_never_gets_there_is_not_judged():
    rng = np.random.default_rng(0)
    own = study(3, [False] * 3, 0.05, rng)
    assert own.verdict == "unreached" and own.never[0] == 3 and own.within == 64
    assert own.mean_steps is not None and own.mean_steps[0] == 64 > own.mean_steps[1]
    numbers = (
        own.difference,
        own.interval,
        own.standard_error,
        own.degrees_of_freedom,
        own.p,
        own.p_holm,
        own.detectable,
    )
    assert set(numbers) == {None}
    one_got_there = study(3, [True, False, False], 0.05, rng)
    assert one_got_there.verdict == "undecided" and one_got_there.never[0] == 2
    assert one_got_there.degrees_of_freedom is not None and one_got_there.degrees_of_freedom <= 2
