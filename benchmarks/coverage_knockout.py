"""How often the intervals of a knock-out cover and how often its verdicts are wrong (docs/method.md, section 6).

1. One answer per prompt: a sweep sees how many of n prompts a ban loses and gains, and the chances of all such tables
   are a trinomial distribution. Coverage of a true loss, the chance that a loss of the margin is called neutral and the
   chance of a call without an effect are sums over them, without simulation. Answers are lost only, or another 8 %
   change, as often either way. The percentile bootstrap over prompts stands beside, by simulation.
2. A class of tokens is called not interchangeable if one of the bans within it is a pillar or a stumbling block,
   without a correction for their number. How often that happens to members that are interchangeable is shown: exactly
   for independent bans, and as the most it can be however they depend on each other, the sum of their chances.
3. The same as 1 at the worst of many rates of loss and gain: shown, and nothing is asked of it. There the interval,
   which is asymptotic, falls short of both targets by a little.
4. Four answers per prompt by simulation: the chance of a loss, and of a gain, has a beta distribution over prompts with
   an intraclass correlation of 0, 0.2 or 0.5 (at 1 all answers of a prompt change together, which is the case above).
   Each row has the worst of the three. Beside it, with nothing asked, a design effect without the added prompt.
5. Curtailed and sequential sweeps by simulation: 70 % of the answers are right, 80 % hold the banned token. A curtailed
   verdict must be that of the whole sweep always; a sequential sweep must cover, keep α without an effect, and call a
   loss of the margin neutral no more often than allowed.

A simulated share of calls may exceed α by three standard errors before it counts as missed; exact shares may not.

``python benchmarks/coverage_knockout.py`` takes about two minutes on one core.
"""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.stats import binom

from printing import machine, print_table
from rocktokens.inference.paired import Discordance, score_interval
from rocktokens.knockout.designs import Complete, Curtailed, Design, Interim, Settled
from rocktokens.knockout.sequential import GroupSequential
from rocktokens.knockout.verdicts import EXACT, VerdictRule, verdict

RULE = VerdictRule()
PROMPTS = (100, 200, 500)
LOSSES = (0.002, 0.005, 0.01, 0.02, 0.03, 0.1)
SCATTERS = (0.0, 0.08)
"""Shares of the answers that change besides, either way alike."""
COVER = 0.93
NUM_SAMPLES, CORRELATIONS = 4, (0.0, 0.2, 0.5)
SAMPLES, DRAWS = 4000, 400
"""Samples behind a simulated share, and replicates of a bootstrap."""
SWEPT = 240
"""Bans of a simulated sweep."""
RIGHT, AFFECTED = 0.7, 0.8
CLASS_SIZES = (2, 4, 8, 16)
WORST_DISCORDANCE, WORST_DIRECTIONS = 80, 41
CALLS = ("pillar", "stumbling")
PACKAGES = ("rocktokens", "numpy", "scipy")
Row = dict[str, Any]


def knockout_coverage() -> list[Row]:
    """One row per number, setting and number of prompts.

    ``share`` is how often it happened, ``asked`` what it must reach or stay below, ``samples`` 0 where it is exact.
    """
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for n_prompts in PROMPTS:
        rows += exact_rows(n_prompts, rng)
        rows += clustered_rows(n_prompts, rng)
        rows += design_rows(n_prompts, rng)
    return sorted(rows, key=lambda row: (row["what"], row["setting"], row["prompts"]))


# One answer per prompt


class Tables:
    """Everything that a sweep of one ban can see, with its interval and verdict."""

    def __init__(self, n_prompts: int) -> None:
        lost, gained = np.meshgrid(*[np.arange(n_prompts + 1)] * 2, indexing="ij")
        possible = lost + gained <= n_prompts
        self.n_prompts, self.lost, self.gained = n_prompts, lost[possible], gained[possible]
        self.discordant = self.lost + self.gained
        self.low, self.high = score_interval(self.lost, self.gained, float(n_prompts), RULE.alpha)
        self.verdicts = verdicts_of((self.gained - self.lost) / n_prompts, self.low, self.high)

    def chance(self, event: np.ndarray, loss: float, gain: float) -> float:
        """Of an event over the tables, where answers are lost and gained at these rates."""
        of_discordant = binom.pmf(np.arange(self.n_prompts + 1), self.n_prompts, loss + gain)
        seen = np.flatnonzero(event & (of_discordant > 1e-9)[self.discordant])
        split = binom.pmf(self.lost[seen], self.discordant[seen], loss / (loss + gain))
        return float(of_discordant[self.discordant[seen]] @ split)

    def covers(self, delta: float) -> np.ndarray:
        """Whether the interval of each table holds this difference."""
        return (self.low <= delta) & (delta <= self.high)


def exact_rows(n_prompts: int, rng: np.random.Generator) -> Iterator[Row]:
    """Sums over all tables; the bootstrap beside them is simulated."""
    tables = Tables(n_prompts)
    is_neutral, is_called = tables.verdicts == "neutral", np.isin(tables.verdicts, CALLS)
    for scatter in SCATTERS:
        how = setting(scatter)
        for loss in LOSSES:
            rates = loss + scatter / 2, scatter / 2
            percentile = percentile_shares(n_prompts, *rates, rng)
            covered = tables.chance(tables.covers(-loss), *rates)
            yield at_least(covers(loss), how, n_prompts, covered, percentile=percentile[0])
            if loss == RULE.margin:
                neutral = tables.chance(is_neutral, *rates)
                yield at_most("loss of the margin called neutral", how, n_prompts, neutral, percentile=percentile[1])
    yield at_most("called without an effect", setting(0.08), n_prompts, tables.chance(is_called, 0.04, 0.04))
    yield from class_rows(tables, is_called)
    yield from worst_rows(tables, is_called)


def class_rows(tables: Tables, is_called: np.ndarray) -> Iterator[Row]:
    """How often members that are interchangeable are called something else, by size of their class."""
    one = tables.chance(is_called, 0.04, 0.04)
    for members in CLASS_SIZES:
        bans = 2 if members == 2 else 2 * members  # of two, forcing one is banning the other
        what = f"interchangeable class of {members:2} ({bans} bans) called not so"
        yield make_row(what, f"{setting(0.08)}; independent bans", tables.n_prompts, 1 - (1 - one) ** bans, None, None)
        yield make_row(what, f"{setting(0.08)}; any bans, at most", tables.n_prompts, min(bans * one, 1.0), None, None)


def worst_rows(tables: Tables, is_called: np.ndarray) -> Iterator[Row]:
    """The least coverage and the most calls without an effect over many rates of change."""
    discordance = np.geomspace(0.002, 0.6, WORST_DISCORDANCE)
    lost_shares = np.linspace(0.5, 1, WORST_DIRECTIONS)
    covered = [
        tables.chance(tables.covers(rate * (1 - 2 * share)), rate * share, rate * (1 - share))
        for rate in discordance
        for share in lost_shares
    ]
    called = [tables.chance(is_called, rate / 2, rate / 2) for rate in discordance]
    how = "worst of many rates"
    yield make_row("covers any loss", how, tables.n_prompts, min(covered), None, None)
    yield make_row("called without an effect", how, tables.n_prompts, max(called), None, None)


def percentile_shares(n_prompts: int, loss: float, gain: float, rng: np.random.Generator) -> tuple[float, float]:
    """How often the percentile bootstrap over prompts covers, and how often it calls the ban neutral."""
    drawn = rng.multinomial(n_prompts, [loss, gain, 1 - loss - gain], SAMPLES // 2)
    seen, times = np.unique(drawn, axis=0, return_counts=True)
    replicates = rng.multinomial(n_prompts, seen[:, None] / n_prompts, (len(seen), DRAWS))
    changes = (replicates[..., 1] - replicates[..., 0]) / n_prompts
    low, high = np.quantile(changes, [RULE.alpha / 2, 1 - RULE.alpha / 2], axis=1)
    weights = times / times.sum()
    held = (low <= gain - loss) & (gain - loss <= high)
    return float(weights @ held), float(weights @ (verdicts_of(np.zeros(len(low)), low, high) == "neutral"))


# Four answers per prompt


def clustered_rows(n_prompts: int, rng: np.random.Generator) -> Iterator[Row]:
    """The worst of several correlations between the answers to one prompt."""
    for scatter in SCATTERS:
        how = f"{setting(scatter)}; {NUM_SAMPLES} answers"
        for loss in LOSSES:
            found = [
                clustered(n_prompts, loss + scatter / 2, scatter / 2, correlation, rng) for correlation in CORRELATIONS
            ]
            held, held_without = (
                min(share((low <= -loss) & (-loss <= high)) for low, high in ends)
                for ends in ([own.interval(RULE.alpha) for own in found], map(without_added_prompt, found))
            )
            yield at_least(covers(loss), how, n_prompts, held, SAMPLES)
            if not scatter:
                other = f"{how}, no added prompt"
                yield make_row(covers(loss), other, n_prompts, held_without, None, None, SAMPLES)
            if loss == RULE.margin:
                neutral = max(share(judged(own) == "neutral") for own in found)
                yield at_most("loss of the margin called neutral", how, n_prompts, neutral, SAMPLES)
    nothing = [clustered(n_prompts, 0.04, 0.04, correlation, rng) for correlation in CORRELATIONS]
    called = max(share(np.isin(judged(own), CALLS)) for own in nothing)
    how = f"{setting(0.08)}; {NUM_SAMPLES} answers"
    yield at_most("called without an effect", how, n_prompts, called, SAMPLES, give_or_take=True)


def clustered(n_prompts: int, loss: float, gain: float, correlation: float, rng: np.random.Generator) -> Discordance:
    """Many samples whose answers to one prompt are alike."""
    lost = rng.binomial(NUM_SAMPLES, beta_rates(loss, correlation, n_prompts, rng))
    gained = rng.binomial(NUM_SAMPLES - lost, beta_rates(gain / (1 - loss), correlation, n_prompts, rng))
    squares = ((gained - lost) ** 2).sum(axis=1)
    return Discordance(lost.sum(axis=1), gained.sum(axis=1), squares, n_prompts, NUM_SAMPLES)


def judged(found: Discordance) -> np.ndarray:
    return verdicts_of(found.deltas, *found.interval(RULE.alpha))


def without_added_prompt(found: Discordance) -> tuple[np.ndarray, np.ndarray]:
    """Ends with the plain ratio of variances; n is the number of prompts where there is none."""
    total = (found.gained_K - found.lost_K) ** 2
    between = found.squares_K - total / found.n_prompts
    independent = found.lost_K + found.gained_K - total / found.answers
    ratio = np.divide(between, independent, out=np.full(len(between), float(NUM_SAMPLES)), where=independent > 0)
    effect = np.maximum(ratio, 1.0)
    return score_interval(found.lost_K / effect, found.gained_K / effect, found.answers / effect, RULE.alpha)


def beta_rates(mean: float, correlation: float, n_prompts: int, rng: np.random.Generator) -> np.ndarray:
    if mean == 0 or correlation == 0:
        return np.full((SAMPLES, n_prompts), mean)
    strength = 1 / correlation - 1
    return rng.beta(mean * strength, (1 - mean) * strength, (SAMPLES, n_prompts))


# Sweeps that stop early


def design_rows(n_prompts: int, rng: np.random.Generator) -> Iterator[Row]:
    """Whole sweeps by both designs, with 8 % of the answers changing either way besides the loss."""
    for loss in (0.0, 0.01, RULE.margin):
        changes_KN, affected_KN, right_N = planted(n_prompts, loss, 0.08, rng)
        whole, curtailed, sequential = (
            swept(design(n_prompts, RULE), changes_KN, affected_KN, right_N)
            for design in (Complete, Curtailed, GroupSequential)
        )
        verdicts = {
            name: np.array([own.verdict for own in found])
            for name, found in {"curtailed": curtailed, "sequential": sequential}.items()
        }
        same = share(verdicts["curtailed"] == np.array([own.verdict for own in whole]))
        yield make_row(
            "curtailed verdict is that of the whole sweep", points(loss), n_prompts, same, 1.0, same == 1, SWEPT
        )
        held = share(np.array([own.interval[0] <= -loss <= own.interval[1] for own in sequential if own.interval]))
        yield at_least(f"sequential interval {covers(loss)}", setting(0.08), n_prompts, held, SWEPT)
        for name, found in verdicts.items():
            if loss == 0:
                called = share(np.isin(found, CALLS))
                what = f"called without an effect, {name}"
                yield at_most(what, setting(0.08), n_prompts, called, SWEPT, give_or_take=True)
            elif loss == RULE.margin:
                what = f"loss of the margin called neutral, {name}"
                yield at_most(what, setting(0.08), n_prompts, share(found == "neutral"), SWEPT, give_or_take=True)


def planted(
    n_prompts: int, loss: float, scatter: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What each ban changes, which answers hold its token, and which are right: lost and gained at these rates."""
    right_N = rng.permutation(np.arange(n_prompts) < RIGHT * n_prompts)
    affected_KN = rng.random((SWEPT, n_prompts)) < AFFECTED
    rates = (loss + scatter / 2) / (RIGHT * AFFECTED), scatter / 2 / ((1 - RIGHT) * AFFECTED)
    lost_KN, gained_KN = (rng.random((SWEPT, n_prompts)) < rate for rate in rates)
    return np.where(right_N, -1 * lost_KN, gained_KN) * affected_KN, affected_KN, right_N


def swept(design: Design, changes_KN: np.ndarray, affected_KN: np.ndarray, right_N: np.ndarray) -> list[Settled]:
    """Run a design over its blocks, as a sweep does."""
    found: dict[int, Settled] = {}
    for number, block in enumerate(design.blocks):
        still_open = [ban for ban in range(SWEPT) if ban not in found]
        hidden_KN = affected_KN & (np.arange(len(right_N)) >= block.stop)
        lowest_KN, highest_KN = (np.where(hidden_KN, end_N, changes_KN) for end_N in (-1 * right_N, 1 * ~right_N))
        interim = Interim(lowest_KN, highest_KN, affected_KN, right_N, 1, block.stop).of(still_open)
        judged = zip(still_open, design.judge(interim, number, EXACT), strict=True)
        found |= {ban: settled for ban, settled in judged if settled is not None}
    return [found[ban] for ban in range(SWEPT)]


# Rows


def verdicts_of(delta: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    ends = zip(delta.tolist(), low.tolist(), high.tolist(), strict=True)
    return np.array([verdict(own, (start, end), RULE) for own, start, end in ends])


def share(events: np.ndarray) -> float:
    return float(np.mean(events))


def covers(loss: float) -> str:
    return f"covers a loss of {points(loss)}"


def points(loss: float) -> str:
    return f"{100 * loss:4.1f} points"


def setting(scatter: float) -> str:
    return f"{100 * scatter:g} % change besides" if scatter else "answers are lost only"


def at_least(
    what: str, how: str, n_prompts: int, found: float, samples: int = 0, percentile: float | None = None
) -> Row:
    return make_row(what, how, n_prompts, found, COVER, found >= COVER, samples, percentile)


def at_most(
    what: str,
    how: str,
    n_prompts: int,
    found: float,
    samples: int = 0,
    percentile: float | None = None,
    *,
    give_or_take: bool = False,
) -> Row:
    """Ask for at most α; of a simulated share for no more than chance explains, three standard errors."""
    allowed = RULE.alpha + (3 * (RULE.alpha * (1 - RULE.alpha) / samples) ** 0.5 if give_or_take else 0)
    return make_row(what, how, n_prompts, found, RULE.alpha, found <= allowed, samples, percentile)


def make_row(
    what: str,
    how: str,
    n_prompts: int,
    found: float,
    asked: float | None,
    reached: bool | None,
    samples: int = 0,
    percentile: float | None = None,
) -> Row:
    return {
        "what": what,
        "setting": how,
        "prompts": n_prompts,
        "percentile": percentile,
        "share": found,
        "asked": asked,
        "samples": samples,
        "reached": reached,
    }


def main() -> None:
    print(machine(PACKAGES, cores=1), end="\n\n", flush=True)
    rows = knockout_coverage()
    header = ("", "setting", "prompts", "percentile", "ours", "asked", "samples", "reached")
    print_table(header, [tuple(shown(value) for value in row.values()) for row in rows])
    sys.exit(0 if all(row["reached"] is not False for row in rows) else 1)


def shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{100 * value:.1f} %" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
