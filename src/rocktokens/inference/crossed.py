"""Estimate the mean of a table of seeds × prompts, and how sure it is when both are samples of more.

All seeds answer the same prompts, so values[s, p] = μ + seed_s + prompt_p + rest_sp: seeds and prompts are crossed
random effects. A claim about other seeds *and* other prompts needs the spread of both.

1. Mean squares: MS_s = P Σ(row mean − mean)² / (S − 1), MS_p = S Σ(column mean − mean)² / (P − 1), and MS_sp of what
   remains, with (S − 1)(P − 1) degrees of freedom. E MS_s = P σ_s² + σ_sp², E MS_p = S σ_p² + σ_sp², E MS_sp = σ_sp².
2. Var(mean) = σ_s²/S + σ_p²/P + σ_sp²/(SP), so (MS_s + MS_p − MS_sp)/(SP) estimates it without bias.
3. MS_s and MS_p are below MS_sp by chance only, so each counts for at least MS_sp. The variance is then never below
   max(MS_s, MS_p)/(SP): a seed effect cannot be estimated as less than none and be taken off what the prompts show.
4. Degrees of freedom by Satterthwaite, from the three terms as they are used. The seeds' term always keeps its S − 1:
   with few seeds a small MS_s is luck as often as not. (Dropping it then, with its degrees of freedom, makes 12 of 100
   calls wrong with 2 seeds and 8 with 3 where seeds differ much, instead of 5.)
5. Interval and p are those of Student's t.
6. The detectable effect is the true mean μ whose interval leaves 0 out, on its own side, with 80 % power. With ν
   degrees of freedom and the true standard error σ that is P(T_ν(μ/σ) > t_{1−α/2,ν}) = 0.8, T noncentral. Of σ only an
   estimate s is known: νs²/σ² is χ²_ν, so σ lies in [s √(ν/χ²_{0.985,ν}), s √(ν/χ²_{0.015,ν})] with 97 %, and the
   effect is a range. Since ν is estimated too, the range holds the true effect somewhat less often: in 92 % or more of
   simulated studies from three seeds on (benchmarks/coverage_studies.py), in 90 % with a σ at 95 %.
   (The sum of two quantiles of t times s promises 80 % power and gives 54 to 65 % with two seeds.)
7. One row only: nothing is known of other seeds, and the spread is that over prompts.

A statistic θ_s of a seed that is no mean over prompts has no table. Prompts are resampled instead, the same for all
seeds: Var(θ_s)/S over seeds stands for MS_s/(SP), the variance over resamples of the mean of the seeds for MS_p/(SP),
and (mean of the seeds' own variances over resamples − that of their mean)/(S − 1) for MS_sp/(SP). For means over
prompts these are the same numbers, but for the noise of resampling and a factor (P − 1)/P. The degrees of freedom are
at most the seeds' S − 1: such a statistic may jump (a run that breaks down never gets there), and seeds that all fell
on one side look as if they agreed.

Shape legend: S seeds, P prompts, B resamples. Satterthwaite: https://doi.org/10.2307/3002019
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.optimize import root_scalar
from scipy.special import chdtri, nctdtr
from scipy.stats import norm
from scipy.stats import t as student

from rocktokens.inference.power import POWER

ERROR_CONFIDENCE = 0.97
"""Of the interval of the true standard error, behind the range of a detectable effect."""
LARGE = 1000.0
"""Standard errors against which the noise of the mean itself, about one, no longer shows."""


class CrossedMean(NamedTuple):
    """A mean, its standard error, and how well that is known."""

    mean: float
    standard_error: float
    degrees_of_freedom: float

    def interval(self, alpha: float) -> tuple[float, float]:
        """At 1 − α."""
        half = self._quantile(1 - alpha / 2) * self.standard_error
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float:
        """Two-sided, of a true mean of 0: below α where the interval at 1 − α leaves 0 out."""
        if not self.standard_error:
            return 0.0 if self.mean else 1.0
        return float(2 * student.sf(abs(self.mean) / self.standard_error, self.degrees_of_freedom))

    def detectable(self, alpha: float) -> tuple[float, float]:
        """The smallest true mean, either way, whose interval at 1 − α leaves 0 out with 80 % power: a range."""
        freedom = self.degrees_of_freedom
        effect = detectable_errors(freedom, alpha) * self.standard_error
        tail = (1 - ERROR_CONFIDENCE) / 2
        low, high = (effect * math.sqrt(freedom / _chi2_quantile(share, freedom)) for share in (1 - tail, tail))
        return low, high

    def _quantile(self, share: float) -> float:
        return float(student.ppf(share, self.degrees_of_freedom))


def detectable_errors(degrees_of_freedom: float, alpha: float) -> float:
    """Return the true standard errors that a true mean must be away from 0 to be called at α with 80 % power."""
    critical = float(student.ppf(1 - alpha / 2, degrees_of_freedom))

    def threshold(share: float) -> float:
        """Return what the critical value times estimated over true error stays below with this chance."""
        return critical * math.sqrt(_chi2_quantile(share, degrees_of_freedom) / degrees_of_freedom)

    if critical > LARGE:
        return threshold(POWER)
    enough = (1 + POWER) / 2  # each of two ways to miss has half of the chance that is left
    found = root_scalar(
        lambda effect: 1 - POWER - float(nctdtr(degrees_of_freedom, effect, critical)),
        bracket=(0.0, threshold(enough) + norm.ppf(enough)),
    )
    return float(found.root)


def _chi2_quantile(share: float, degrees_of_freedom: float) -> float:
    return float(chdtri(degrees_of_freedom, 1 - share))


class Spread(NamedTuple):
    """Mean squares of a table over its number of cells: each is a part of the variance of its mean."""

    seeds: float
    prompts: float
    rest: float


def crossed_mean(values_SP: np.ndarray) -> CrossedMean:
    """Estimate the mean over seeds and prompts, as a claim about others of both; about prompts alone for one seed.

    Args:
        values_SP: a value for each seed and prompt; two prompts at least.
    """
    n_seeds, n_prompts = values_SP.shape
    mean = float(values_SP.mean())
    if n_seeds == 1:
        return CrossedMean(mean, math.sqrt(values_SP.var(ddof=1) / n_prompts), n_prompts - 1)
    return _estimate(mean, table_spread(values_SP), n_seeds, n_prompts)


def resampled_mean(values_S: np.ndarray, resampled_BS: np.ndarray, n_prompts: int) -> CrossedMean:
    """Estimate the mean over seeds of any statistic of the answers to the prompts, as ``crossed_mean`` does.

    Args:
        values_S: the statistic of each seed, over all prompts.
        resampled_BS: the same over each resample of the prompts, drawn with replacement and shared by the seeds.
        n_prompts: how many prompts there are.
    """
    n_seeds = len(values_S)
    mean, prompts = float(values_S.mean()), float(resampled_BS.mean(axis=1).var())
    if n_seeds == 1:
        return CrossedMean(mean, math.sqrt(prompts), n_prompts - 1)
    rest = max(float(resampled_BS.var(axis=0).mean()) - prompts, 0.0) / (n_seeds - 1)
    spread = Spread(float(values_S.var(ddof=1)) / n_seeds, prompts, rest)
    estimate = _estimate(mean, spread, n_seeds, n_prompts)
    return estimate._replace(degrees_of_freedom=min(estimate.degrees_of_freedom, float(n_seeds - 1)))


def seeds_multiplier(n_seeds: int, alpha: float) -> float:
    """Return the standard errors to either side of the mean at 1 − α, where all spread is that of the seeds.

    That is about as wide as intervals get: ± 20 for 3 seeds at α = 0.05/20, ± 4.6 for 5 seeds at α = 0.01.
    """
    return float(student.ppf(1 - alpha / 2, n_seeds - 1))


def table_spread(values_SP: np.ndarray) -> Spread:
    """Split the variance between seeds, prompts and what neither explains; there are at least two of both."""
    n_seeds, n_prompts = values_SP.shape
    mean = values_SP.mean()
    seeds_S1 = values_SP.mean(axis=1, keepdims=True) - mean
    prompts_1P = values_SP.mean(axis=0, keepdims=True) - mean
    rest_SP = values_SP - mean - seeds_S1 - prompts_1P
    return Spread(
        seeds=float((seeds_S1**2).sum() / (n_seeds * (n_seeds - 1))),
        prompts=float((prompts_1P**2).sum() / (n_prompts * (n_prompts - 1))),
        rest=float((rest_SP**2).sum() / (values_SP.size * (n_seeds - 1) * (n_prompts - 1))),
    )


def _estimate(mean: float, spread: Spread, n_seeds: int, n_prompts: int) -> CrossedMean:
    rest = spread.rest
    terms = np.array([max(spread.seeds, rest), max(spread.prompts, rest), -rest])
    freedom = np.array([n_seeds - 1, n_prompts - 1, (n_seeds - 1) * (n_prompts - 1)])
    variance = float(terms.sum())
    if not variance:
        return CrossedMean(mean, 0.0, float(freedom.min()))
    # Shares of the variance, whose squares cannot underflow.
    return CrossedMean(mean, math.sqrt(variance), 1 / float(((terms / variance) ** 2 / freedom).sum()))
