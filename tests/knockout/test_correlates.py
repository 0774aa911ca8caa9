"""Spearman's ρ with its interval and p: against scipy, against loops over the same draws, and on planted data."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from trace_oracle import counted, occurrences_of, random_trace, with_column, write_trace

from rocktokens.inference import bootstrap
from rocktokens.inference.bootstrap import bootstrap_counts
from rocktokens.knockout.correlates import correlate, type_columns
from rocktokens.knockout.records import Correlation
from rocktokens.run_dir import derive_seed
from rocktokens.traces.store import TraceStore

tied = st.integers(-3, 3).map(float)


def one(x, y, resamples: int = 20, seed: int = 0) -> Correlation:
    """The correlation of two lists."""
    return correlate(np.array(x, dtype=float), {"y": np.array(y, dtype=float)}, resamples, seed)[0]


def scipy_rho(x, y) -> float:
    result: Any = spearmanr(x, y)
    return result.statistic


def sample(seed: int, count: int, slope: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Δ in steps of a hundredth with many ties, and a column that goes with it as much as asked for."""
    rng = np.random.default_rng([seed, count])
    column = rng.standard_normal(count)
    return np.round(0.01 * (slope * column + rng.standard_normal(count)), 2), column


# ρ


@given(st.lists(st.tuples(tied, tied), min_size=2, max_size=30))
def test_rho_is_that_of_scipy_under_ties(pairs):
    x, y = zip(*pairs, strict=True)
    found = one(x, y)
    assert found.n == len(pairs)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert (found.rho, found.interval, found.p) == (None, None, None)
    else:
        assert found.rho == pytest.approx(scipy_rho(x, y), abs=1e-12)


def test_only_the_order_of_values_matters():
    x, y = sample(0, 40, slope=1.0)
    columns = {"as it is": y, "stretched": np.exp(3 * y), "upside down": -y}
    same, stretched, reversed_ = correlate(x, columns, resamples=500)
    assert replace(stretched, name="") == replace(same, name="")
    assert reversed_.rho == -same.rho
    assert reversed_.p == same.p
    assert reversed_.interval == pytest.approx([-same.interval[1], -same.interval[0]], abs=1e-12)


def test_a_type_without_a_value_is_left_out_of_that_correlation_alone():
    x, y = sample(1, 30, slope=1.0)
    gaps, no_delta = y.copy(), x.copy()
    gaps[[3, 7]], no_delta[5] = np.nan, np.nan
    full, some = correlate(no_delta, {"full": y, "gaps": gaps}, resamples=200, seed=4)
    known = np.setdiff1d(np.arange(30), [3, 5, 7])
    assert full.n == 29
    assert replace(some, name="y") == one(x[known], y[known], resamples=200, seed=4)
    assert some.n == 27


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_types_have_no_correlation(count):
    assert one([0.1] * count, [2.0] * count) == Correlation("y", rho=None, interval=None, p=None, n=count)


def test_three_types_have_a_rho_and_no_interval():
    assert one([1, 2, 3], [1, 2, 3]).rho == 1.0
    assert one([1, 2, 3], [1, 2, 3]).interval is None
    assert one([1, 2, 3, 4], [1, 2, 3, 4]).interval is not None


# Interval


def naive_rhos(x: np.ndarray, y: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Every resample written out and ranked by scipy; NaN where nothing varies."""
    drawn = []
    for counts in bootstrap_counts(len(x), resamples, derive_seed(seed, "bootstrap")):
        chosen = np.repeat(np.arange(len(x)), counts)
        constant = len(set(x[chosen])) == 1 or len(set(y[chosen])) == 1
        drawn.append(np.nan if constant else scipy_rho(x[chosen], y[chosen]))
    return np.array(drawn)


def naive_interval(x: np.ndarray, y: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    return np.quantile(np.nan_to_num(naive_rhos(x, y, resamples, seed), nan=0.0), [0.025, 0.975])


@pytest.mark.parametrize(("count", "slope"), [(4, 0.0), (7, 1.0), (40, 0.5)])
def test_the_interval_is_that_of_a_loop_over_the_same_draws(count, slope):
    x, y = sample(2, count, slope)
    found = one(x, y, resamples=300, seed=6).interval
    assert found == pytest.approx(naive_interval(x, y, 300, 6), abs=1e-12)


def test_resamples_in_which_nothing_varies_count_as_no_association():
    """One Δ differs, and a third of the resamples miss it; ρ is positive in all others."""
    x, y = np.zeros(12), np.arange(12.0)
    x[-1] = -0.5
    found, rhos = one(x, -y, resamples=400, seed=1), naive_rhos(x, -y, 400, 1)
    assert np.isnan(rhos).mean() > 0.2
    assert np.nanmin(rhos) > 0
    assert found.interval == pytest.approx(naive_interval(x, -y, 400, 1), abs=1e-12)
    assert found.interval[0] == 0.0


def test_nothing_depends_on_blocks_and_everything_on_the_seed(monkeypatch):
    x, y = sample(3, 25, slope=0.5)
    whole = one(x, y, resamples=200, seed=3)
    other = one(x, y, resamples=200, seed=4)
    assert whole.rho == other.rho
    assert whole.interval != other.interval
    assert whole.p != other.p
    monkeypatch.setattr(bootstrap, "BLOCK_CELLS", 60)
    assert one(x, y, resamples=200, seed=3) == whole


def test_the_interval_holds_the_true_rho_about_as_often_as_it_says():
    """Normal pairs with correlation r have ρ = 6/π · asin(r/2)."""
    r, trials = 0.5, 200
    truth = 6 / math.pi * math.asin(r / 2)
    rng, held = np.random.default_rng(0), 0
    for seed in range(trials):
        x, noise = rng.standard_normal((2, 60))
        low, high = one(x, r * x + math.sqrt(1 - r * r) * noise, resamples=200, seed=seed).interval
        held += low <= truth <= high
    assert 0.88 <= held / trials <= 0.99


# p


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(tied, tied), min_size=3, max_size=6))
def test_p_is_the_share_of_all_orders_with_as_strong_a_rho(pairs):
    x, y = zip(*pairs, strict=True)
    if len(set(x)) == 1 or len(set(y)) == 1:
        return
    strengths = [abs(scipy_rho(x, order)) for order in permutations(y)]
    exact = np.mean(np.array(strengths) >= strengths[0] - 1e-9)
    assert one(x, y, resamples=2000).p == pytest.approx(exact, abs=0.06)


def test_p_is_close_to_that_of_scipy_where_there_are_many_types():
    for seed in range(4):
        x, y = sample(seed, 150, slope=0.1 * seed)
        test: Any = spearmanr(x, y)
        assert one(x, y, resamples=4000).p == pytest.approx(test.pvalue, abs=0.03)


def test_p_is_never_0():
    assert one(range(50), range(50), resamples=99).p == 0.01


def test_what_is_planted_is_found_and_chance_is_not():
    found = [one(*sample(seed, 100, slope=-1.0), resamples=400) for seed in range(10)]
    assert all(result.rho < -0.4 and result.interval[1] < 0 and result.p < 0.01 for result in found)
    chance = [one(*sample(seed, 100), resamples=400) for seed in range(200)]
    assert np.mean([result.p <= 0.05 for result in chance]) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)
    outside = [result.interval[0] > 0 or result.interval[1] < 0 for result in chance]
    assert np.mean(outside) <= 0.06 + 3 * math.sqrt(0.06 * 0.94 / 200)


# Columns of the trace


def without_entropy(table: pa.Table, missing: Mapping[int, float | None]) -> pa.Table:
    """The same rows with null or NaN for the entropy of some of them."""
    values = table["entropy_student"].to_pylist()
    for row, value in missing.items():
        values[row] = value
    return with_column(table, "entropy_student", values)


def test_columns_are_means_over_the_occurrences_of_a_type(tmp_path):
    scored = [row for row, kl in enumerate(random_trace(3)["kl"].to_pylist()) if kl is not None]
    table = without_entropy(random_trace(3), {scored[0]: None, scored[1]: math.nan, scored[2]: None})
    store = TraceStore(write_trace(tmp_path, {0: random_trace(4), 40: table}, rows_per_part=60))
    rows = occurrences_of(table)
    ids = [5, 0, 99, *sorted(set(counted(rows)) - {0, 5})]
    found = type_columns(store.table(40), ids)
    assert list(found) == ["entropy", "log_freq", "kl"]
    for index, token_id in enumerate(ids):
        own = [row for row in rows if row["token_id"] == token_id]
        known = [row["entropy_student"] for row in own if row["entropy_student"] is not None]
        known = [value for value in known if not math.isnan(value)]
        expected = (np.mean(known), math.log(len(own)), np.mean([row["kl"] for row in own])) if own else [np.nan] * 3
        assert [found[name][index] for name in found] == pytest.approx(expected, abs=1e-7, nan_ok=True)
    assert np.isnan(found["kl"]).tolist() == [token_id == 99 for token_id in ids]


def test_rows_that_were_not_scored_count_nowhere_even_with_an_entropy(tmp_path):
    table = random_trace(3)
    unscored = [row for row, kl in enumerate(table["kl"].to_pylist()) if kl is None]
    store = TraceStore(write_trace(tmp_path, {0: table, 1: without_entropy(table, dict.fromkeys(unscored, 100.0))}))
    without, with_ = (type_columns(store.table(step), range(9)) for step in (0, 1))
    assert unscored
    np.testing.assert_equal(with_, without)


def test_a_type_whose_entropy_is_nowhere_known_still_has_the_rest(tmp_path):
    table = random_trace(3)
    own = {row: None for row, token in enumerate(table["token_id"].to_pylist()) if token == 2}
    store = TraceStore(write_trace(tmp_path, {0: without_entropy(table, own)}))
    found = type_columns(store.table(0), [2, 3])
    assert np.isnan(found["entropy"]).tolist() == [True, False]
    assert not np.isnan(found["kl"]).any()
