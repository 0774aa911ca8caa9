"""Runs of made-up arms that answer the same prompts, part of the noise shared."""

import numpy as np

from rocktokens.studies.records import Curve

STEPS = np.array([0, 10, 20, 40])
N_PROMPTS = 30
PROMPT_IDS = [f"wordmath-test-{number}" for number in range(N_PROMPTS)]


def make_curve(arm: str, seed: int, draw: int = 0, gain: float = 1.0, steps: np.ndarray = STEPS) -> Curve:
    """A run whose accuracy rises by about ``gain`` standard deviations of how hard prompts are."""
    ease_P = np.random.default_rng(0).normal(0, 1, N_PROMPTS)
    shared_EP = np.random.default_rng([1, seed]).normal(0, 0.5, (len(steps), N_PROMPTS))
    own = np.random.default_rng([2, seed, draw, *arm.encode()])
    correct_EP = ease_P + shared_EP + own.normal(0, 0.5, shared_EP.shape) + gain * steps[:, None] / steps[-1] > 0
    correct_EP[0] = ease_P > 0
    return Curve(
        arm=arm,
        seed=seed,
        draw=draw,
        steps=steps,
        tokens=np.cumsum([0, *own.integers(900, 1100, len(steps) - 1)]),
        seconds=np.cumsum([0.0, *own.uniform(5, 8, len(steps) - 1)]),
        correct_EP=correct_EP.astype(np.float64),
        prompt_ids=list(PROMPT_IDS),
        facts={"head_compute_saved": 0.1 * draw},
    )


def make_study(n_seeds: int = 3, draws: int = 2) -> list[Curve]:
    """Three arms: uniform, a freeze that learns less, and a control of several draws."""
    return [
        curve
        for seed in range(n_seeds)
        for curve in (
            make_curve("uniform", seed),
            make_curve("freeze", seed, gain=0.3),
            *(make_curve("control", seed, draw, gain=0.6) for draw in range(draws)),
        )
    ]
