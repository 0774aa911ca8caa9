"""How often what a study prints holds, by simulation: intervals, shares of collapsed runs, detectable effects.

1. Made-up studies look like the published one (docs/results/pebbles-paper.csv): its number of prompts, the accuracies
   at the end of uniform weights and of the first other arm that never collapsed, and their spread between seeds. An
   answer is right where a normal number is above 0: the ease of the prompt, shared by all runs, plus noise shared by
   the arms of a seed, plus an effect of the arm on the prompt, one of the arm on the seed, and noise. So the true
   accuracies are known exactly. Five hundred prompts alone make seeds differ as much as they did, so the effect on the
   seed is tried at 0, 1, 2 and 5 times the spread that was seen.
2. Intervals: how often that of a difference, and of an arm's accuracy, holds the true one. An accuracy near 1 whose
   seeds differ much is skewed, which no interval of a mean of few seeds can know: beyond the published spread that row
   is shown, and nothing is asked of it.
3. Detectable effects, of one pair and of three: a shift of all answers moves the mean and nothing else, so the studies
   themselves say at which shift four of five would have been called. How often does the printed range hold it?
4. Collapse: every run of one arm collapses with chance 1/3. The chance that the interval of the share holds 1/3 is a
   sum over the number of runs that do, without simulation. Whole studies go through ``compare`` to see whether every
   one with a collapsed run marks its mean: in study.json, in its line and in both tables. Beside it, how often the
   interval of such a mean would have held: why it is marked.

``python benchmarks/coverage_studies.py`` takes about a minute on one core.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binom, norm
from scipy.stats import t as student

from printing import machine, print_table
from rocktokens.inference.crossed import CrossedMean, crossed_mean
from rocktokens.inference.power import POWER
from rocktokens.inference.proportions import clopper_pearson_interval
from rocktokens.report.tables import arm_table, comparison_table
from rocktokens.studies.comparison import compare
from rocktokens.studies.decisions import verdict_lines
from rocktokens.studies.records import Curve

PUBLISHED = Path(__file__).parents[1] / "docs/results/pebbles-paper.csv"
BASELINE, N_PROMPTS, ALPHA = "uniform", 500, 0.05
SEEDS = (2, 3, 5, 10)
SPREADS = (0.0, 1.0, 2.0, 5.0)
"""Effects of the arm on the seed, in standard deviations between the published runs."""
EASE, SHARED, ON_PROMPT, NOISE = 1.2, 1.0, 0.3, 0.7
"""Standard deviations behind an answer."""
COLLAPSING, BROKEN = 1 / 3, 0.1
"""The chance that a run collapses, and the accuracy of one that did."""
MARKED_STUDIES = 40
BATCH = 200
KEYS = ("what", "setting", "seeds", "share", "least", "studies")


class Published(NamedTuple):
    """What the published study looks like at its end."""

    start: float
    first: float
    second: float
    """Accuracies of another arm and of uniform weights."""
    spread: float
    """Standard deviation of accuracy between the runs of an arm."""


def study_coverage(studies: int = 1500, seed: int = 0) -> list[dict[str, Any]]:
    """One row for each number that a study prints, number of seeds and spread.

    A row has ``what``, ``seeds``, ``setting``, ``share`` (how often it held), ``least`` (what is asked for, None where
    nothing is), ``studies`` (0: exact) and ``reached`` (None where nothing is asked for).
    """
    published = read_published()
    rows: list[dict[str, Any]] = []
    for n_seeds in SEEDS:
        for spread in SPREADS:
            rng = np.random.default_rng([seed, n_seeds, round(10 * spread)])
            rows += simulated_rows(published, n_seeds, spread, studies, rng)
        rows += collapse_rows(published, n_seeds, studies, np.random.default_rng([seed, n_seeds]))
    return rows


def read_published() -> Published:
    """The end of the published runs, as far as no run of the arm collapsed."""
    runs: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            runs[row["arm"]][row["seed"], row["draw"]].append(float(row["accuracy"]))
    steady = {
        arm: np.array(list(of.values())) for arm, of in runs.items() if all(own[-1] >= own[0] for own in of.values())
    }
    other = next(arm for arm in steady if arm != BASELINE)
    ends = [steady[arm][:, -1] for arm in (other, BASELINE)]
    spread = math.sqrt(np.mean([own.var(ddof=1) for own in ends]))
    return Published(float(steady[BASELINE][0, 0]), float(ends[0].mean()), float(ends[1].mean()), spread)


def answers(
    published: Published, n_seeds: int, spread: float, studies: int, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Right answers of both arms, bool (studies, seeds, prompts) each, a batch at a time."""
    for begin in range(0, studies, BATCH):
        shape = (min(BATCH, studies - begin), n_seeds, N_PROMPTS)
        shared = normal(rng, EASE, (shape[0], 1, N_PROMPTS)) + normal(rng, SHARED, shape)
        yield tuple(
            shared + arm_effect(accuracy, published.spread * spread, shape, rng) > 0
            for accuracy in (published.first, published.second)
        )


def arm_effect(accuracy: float, seed_sd: float, shape: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
    """What an arm adds to the ease of an answer, so that this accuracy is the true one."""
    apart = EASE**2 + SHARED**2 + ON_PROMPT**2 + NOISE**2
    quantile = norm.ppf(accuracy)
    # An effect of one seed of this size on the normal numbers moves accuracy by the spread that is asked for.
    on_seed = seed_sd * math.sqrt(apart) / norm.pdf(quantile)
    studies, n_seeds, n_prompts = shape
    own = normal(rng, on_seed, (studies, n_seeds, 1)) + normal(rng, ON_PROMPT, (studies, 1, n_prompts))
    return np.float32(quantile * math.sqrt(apart + on_seed**2)) + own + normal(rng, NOISE, shape)


def normal(rng: np.random.Generator, sd: float, shape: tuple[int, ...]) -> np.ndarray:
    return np.float32(sd) * rng.standard_normal(shape, dtype=np.float32)


def simulated_rows(
    published: Published, n_seeds: int, spread: float, studies: int, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Intervals and detectable effects without collapse."""
    differences, accuracies = [], []
    for first, second in answers(published, n_seeds, spread, studies, rng):
        differences += [crossed_mean(table_SP) for table_SP in first.astype(np.float64) - second]
        accuracies += [crossed_mean(table_SP) for table_SP in second.astype(np.float64)]
    setting, true = f"seeds differ by {100 * spread * published.spread:.1f} points", published.first - published.second
    held = {
        "interval of a difference": (covered(differences, true), 0.93),
        "interval of an accuracy": (covered(accuracies, published.second), 0.93 if spread <= 1 else None),
        **{
            f"detectable effect, {pairs}": (detectable_held(differences, true, alpha), 0.9 if n_seeds > 2 else None)
            for pairs, alpha in {"one pair": ALPHA, "three pairs": ALPHA / 3}.items()
        },
    }
    return [make_row(what, n_seeds, setting, share, least, studies) for what, (share, least) in held.items()]


def covered(estimates: list[CrossedMean], true: float) -> float:
    """The share of intervals that hold the true mean."""
    intervals = [estimate.interval(ALPHA) for estimate in estimates]
    return float(np.mean([low <= true <= high for low, high in intervals]))


def detectable_held(estimates: list[CrossedMean], true: float, alpha: float) -> float:
    """The share of printed ranges that hold the shift at which four of five of these studies are called."""
    mean, error, freedom = np.array(estimates).T
    half = student.ppf(1 - alpha / 2, freedom) * error
    # Called upwards once shift + mean − true > half; the mean of both directions, which differ by chance only.
    effect = np.mean([np.quantile(half - sign * (mean - true), POWER) for sign in (-1, 1)])
    ranges = [estimate.detectable(alpha) for estimate in estimates]
    return float(np.mean([low <= effect <= high for low, high in ranges]))


def collapse_rows(published: Published, n_seeds: int, studies: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """One run in three of the first arm collapses."""
    setting = "one run in three collapses"
    counts = np.arange(n_seeds + 1)
    ends = np.array([clopper_pearson_interval(int(count), n_seeds, ALPHA) for count in counts])
    holds = (ends[:, 0] <= COLLAPSING) & (ends[:, 1] >= COLLAPSING)
    share = float(binom.pmf(counts, n_seeds, COLLAPSING) @ holds)
    means, marked = [], []
    for first, second in answers(published, n_seeds, 1.0, studies, rng):
        broken = rng.random((len(first), n_seeds, 1)) < COLLAPSING
        right = np.where(broken, rng.random(first.shape) < BROKEN, first)
        means += [crossed_mean(table_SP) for table_SP in right.astype(np.float64) - second]
        tables = [(own, other) for own, other, some in zip(right, second, broken.any(axis=(1, 2)), strict=True) if some]
        marked += [is_marked(published, *own) for own in tables[: MARKED_STUDIES - len(marked)]]
    true = (1 - COLLAPSING) * published.first + COLLAPSING * BROKEN - published.second
    return [
        make_row("interval of the collapsed share", n_seeds, setting, share, 0.95, 0),
        make_row("mean marked as unreliable", n_seeds, setting, float(np.mean(marked)), 1.0, len(marked)),
        make_row("interval of that mean", n_seeds, setting, covered(means, true), None, studies),
    ]


def is_marked(published: Published, first_SP: np.ndarray, second_SP: np.ndarray) -> bool:
    """Whether a whole study marks its mean wherever it prints it."""
    start_P = (np.arange(N_PROMPTS) < published.start * N_PROMPTS).astype(np.float64)
    ids = [f"{prompt:03d}" for prompt in range(N_PROMPTS)]
    steps = np.array([0, 64])
    curves = [
        Curve(arm, seed, 0, steps, steps, steps.astype(np.float64), np.array([start_P, end_P]), ids)
        for arm, answers_SP in (("first", first_SP), (BASELINE, second_SP))
        for seed, end_P in enumerate(answers_SP.astype(np.float64))
    ]
    # An accuracy that all have at once leaves no steps to resample, which would take most of the time.
    result = compare(curves, [("first", BASELINE)], baseline=BASELINE, target_accuracy=published.start / 2)
    arms = arm_table(result)
    return (
        all(own.unreliable for own in result.comparisons)
        and all("unreliable mean" in line for line in verdict_lines(result))
        and all("(unreliable)" in row[2].text for row in comparison_table(result).rows)
        and result.collapsed_arms == [result.arm("first")]
        and "(unreliable)" in arms.rows[0][arms.titles.index("end")].text
    )


def make_row(what: str, n_seeds: int, setting: str, share: float, least: float | None, studies: int) -> dict[str, Any]:
    return {
        "what": what,
        "seeds": n_seeds,
        "setting": setting,
        "share": share,
        "least": least,
        "studies": studies,
        "reached": None if least is None else share >= least,
    }


def main() -> None:
    print(f"{machine(('numpy', 'scipy'), cores=1)}\n")
    rows = study_coverage()
    header = ("what", "setting", "seeds", "held", "asked for", "studies")
    ordered = sorted(rows, key=lambda row: (row["what"], row["setting"], row["seeds"]))
    print_table(header, [tuple(map(shown, (row[key] for key in KEYS))) for row in ordered])
    short = [row for row in rows if row["reached"] is False]
    print(f"{len(short)} of {len(rows)} below what is asked for")


def shown(value: object) -> str:
    if value is None:
        return "—"
    return f"{100 * value:.1f} %" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
