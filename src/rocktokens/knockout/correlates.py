"""Whether the effect of a ban is correlated with what the trace says of the type (docs/method.md, section 6).

1. ``type_columns`` reads, for each type, its mean student entropy, the log of its frequency and its mean kl off the
   occurrences of one checkpoint, by the exact sums of rocktokens.rocks.sums.
2. ``correlate`` gives Spearman's ρ of Δ with each column, over the types for which both are known. Ties share the mean
   of their ranks; most Δ are ties, at 0.
3. Its interval is the percentile interval of a bootstrap that draws types with replacement and ranks each resample
   again. A resample in which Δ or the column is constant shows no association and counts as ρ = 0. Leaving it out would
   make an association that depends on one type look certain.
4. Its p is that of a two-sided permutation test, exact under ties up to the number of permutations.

Every Δ is an estimate, and its noise pulls ρ towards 0: a ρ near 0 does not say by itself that nothing is there.

Shape legend: K types asked for, N types with both values, B resamples.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import ibis.expr.types as ir
import numpy as np

from rocktokens.inference.bootstrap import prompt_draws
from rocktokens.knockout.records import Correlation
from rocktokens.rocks.sums import ONE, TypeSums, occurrences, type_sums
from rocktokens.run_dir import derive_seed
from rocktokens.types import Interval

RESAMPLES = 10_000
CONFIDENCE = 0.95
FEWEST_TYPES = 4
"""An interval needs at least these: with three types a ninth of the resamples are of one type alone."""


def type_columns(rows: ir.Table, ids: Sequence[int]) -> dict[str, np.ndarray]:
    """Read what one checkpoint's trace, ``TraceStore.table(checkpoint)``, says of each type.

    Returns ``entropy``, ``log_freq`` and ``kl``, float64 (K,) in the order of the ids; NaN where a type does not occur.
    """
    scored: Any = occurrences(rows)
    # Both tests: engines disagree on whether a null is a NaN.
    known = scored.filter(scored.entropy_student.notnull() & ~scored.entropy_student.isnan())
    # Entropy in the place of kl, so that it is summed in the same exact way.
    sums, entropy_sums = type_sums(scored), type_sums(known.mutate(kl=known.entropy_student))
    return {
        "entropy": _by_id(entropy_sums, _mean_score(entropy_sums), ids),
        "log_freq": _by_id(sums, np.log(sums.freq), ids),
        "kl": _by_id(sums, _mean_score(sums), ids),
    }


def correlate(
    deltas_K: np.ndarray, columns: Mapping[str, np.ndarray], resamples: int = RESAMPLES, seed: int = 0
) -> list[Correlation]:
    """Compute Spearman's ρ of Δ with every column, float (K,) by name.

    A type whose Δ or value is NaN is left out of that correlation. All but ``name`` and ``n``, the number of types, are
    None where Δ or the column is constant, and the interval also with fewer than four types.
    """
    deltas_K = np.asarray(deltas_K, dtype=np.float64)
    return [
        _correlation(name, deltas_K, np.asarray(column_K, dtype=np.float64), resamples, seed)
        for name, column_K in columns.items()
    ]


def _correlation(name: str, x_K: np.ndarray, y_K: np.ndarray, resamples: int, seed: int) -> Correlation:
    known_K = np.isfinite(x_K) & np.isfinite(y_K)
    x_N, y_N = x_K[known_K], y_K[known_K]
    count = len(x_N)
    if min(len(np.unique(x_N)), len(np.unique(y_N))) < 2:
        return Correlation(name, rho=None, interval=None, p=None, n=count)
    return Correlation(
        name,
        rho=float(_spearman(x_N, y_N, np.ones((1, count)))[0]),
        interval=_interval(x_N, y_N, resamples, seed) if count >= FEWEST_TYPES else None,
        p=_permutation_p(x_N, y_N, resamples, seed),
        n=count,
    )


def _interval(x_N: np.ndarray, y_N: np.ndarray, resamples: int, seed: int) -> Interval:
    draws = prompt_draws(len(x_N), resamples, derive_seed(seed, "bootstrap"))  # here of types
    rho_B = np.concatenate([_spearman(x_N, y_N, counts_BN.astype(np.float64)) for counts_BN in draws])
    low, high = np.quantile(rho_B, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return low, high


def _permutation_p(x_N: np.ndarray, y_N: np.ndarray, permutations: int, seed: int) -> float:
    """Return the share of orders with at least as strong an association, the one observed included."""
    once = np.ones((1, len(x_N)))
    x_N, y_N = (_centred_ranks(values_N, once)[0] for values_N in (x_N, y_N))
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "permutation")))
    # Whole numbers: equal associations are equal, in whatever order they are summed.
    observed = abs(x_N @ y_N)
    as_strong = sum(abs(x_N @ rng.permutation(y_N)) >= observed for _ in range(permutations))
    return float((as_strong + 1) / (permutations + 1))


def _spearman(x_N: np.ndarray, y_N: np.ndarray, counts_BN: np.ndarray) -> np.ndarray:
    """Return ρ (B,) when each type occurs as often as its count says; 0 where one of both is constant."""
    x_BN, y_BN = (_centred_ranks(values_N, counts_BN) for values_N in (x_N, y_N))
    together_B, x_alone_B, y_alone_B = (
        (counts_BN * one_BN * two_BN).sum(axis=1) for one_BN, two_BN in ((x_BN, y_BN), (x_BN, x_BN), (y_BN, y_BN))
    )
    spread_B = np.sqrt(x_alone_B * y_alone_B)
    return np.divide(together_B, spread_B, out=np.zeros_like(spread_B), where=spread_B > 0)


def _centred_ranks(values_N: np.ndarray, counts_BN: np.ndarray) -> np.ndarray:
    """Return twice each type's mean rank, less twice the mean of all ranks: whole numbers (B, N), in float64."""
    _, group_N, sizes = np.unique(values_N, return_inverse=True, return_counts=True)
    upto_BN = np.cumsum(counts_BN[:, np.argsort(values_N)], axis=1)
    last_BG = upto_BN[:, np.cumsum(sizes) - 1]
    before_BG = np.pad(last_BG[:, :-1], ((0, 0), (1, 0)))
    # The ranks of a group run from before + 1 to last; those of all run from 1 to the last of all.
    return (before_BG + last_BG - last_BG[:, -1:])[:, group_N]


def _mean_score(sums: TypeSums) -> np.ndarray:
    return sums.kl / (sums.freq * ONE)


def _by_id(sums: TypeSums, values_U: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Return the values in the order of the ids, NaN where an id has none."""
    value_of = dict(zip(sums.token_id.tolist(), values_U.tolist(), strict=True))
    return np.array([value_of.get(token_id, np.nan) for token_id in ids], dtype=np.float64)
