"""Coverage, stability and their crossing equal loops over sets; records are ready for JSON."""

import json
from dataclasses import asdict
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_oracle import Occurrences, naive_jaccard, naive_rank, naive_score, random_occurrences
from scipy.stats import spearmanr

from rocktokens.errors import RocktokensError
from rocktokens.rocks.cutoff import (
    CutoffCurve,
    auto_k,
    compare_selectors,
    coverage,
    cutoff_curve,
    cutoff_grid,
    jaccard,
    sample_size_curve,
    spearman,
    subset_weights,
)
from rocktokens.rocks.ranking import Rules
from rocktokens.rocks.selectors import SELECTORS, summed_kl

RULES = [Rules(4), Rules(3, min_freq=4), Rules(5, min_freq=2, exclude_top_freq=2)]


@pytest.fixture(scope="module")
def occurrences():
    return random_occurrences(8)


@pytest.fixture(scope="module")
def sample(occurrences):
    return occurrences.sample()


def ranking(occurrences: Occurrences, name: str, rules: Rules, k: int) -> list[int]:
    found = naive_rank(
        naive_score(occurrences, name), occurrences.freq, Rules(99, rules.min_freq, rules.exclude_top_freq)
    )
    return found[:k]


def same_everywhere(clusters: int) -> Occurrences:
    """Every cluster has the same occurrences, so every subset ranks alike."""
    once = random_occurrences(1, clusters=2, per_cluster=120)
    return once.drawn(np.array([clusters, 0]))


# Coverage


@given(kl=st.lists(st.integers(0, 2**40), min_size=1, max_size=30), data=st.data())
def test_coverage_is_the_exact_share_of_all_types(kl, data):
    order = data.draw(st.permutations(range(len(kl))))[: data.draw(st.integers(0, len(kl)))]
    found = coverage(np.array(order, dtype=np.int64), np.array(kl))
    assert found.shape == (len(order),)
    if not sum(kl):
        assert np.isnan(found).all()
        return
    exact = [Fraction(sum(kl[column] for column in order[: k + 1]), sum(kl)) for k in range(len(order))]
    assert found.tolist() == [float(share) for share in exact]
    assert (np.diff(found) >= 0).all()
    assert found.max(initial=0) <= 1


# Sets and ranks


@given(first=st.sets(st.integers(0, 9)), second=st.sets(st.integers(0, 9)))
def test_jaccard_is_that_of_sets(first, second):
    found = jaccard(np.array(sorted(first), dtype=int), np.array(sorted(second), dtype=int))
    assert found == (naive_jaccard(list(first), list(second)) if first | second else None)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=25))
def test_spearman_is_scipys_ties_included(pairs):
    first, second = (np.array([float(pair[side]) for pair in pairs]) for side in (0, 1))
    if len(pairs) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        assert spearman(first, second) is None
    else:
        assert spearman(first, second) == pytest.approx(spearmanr(first, second).statistic, abs=1e-12)


def test_spearman_of_the_same_order_is_one():
    values = np.random.default_rng(0).random(1000)
    assert spearman(values, np.exp(values)) == 1
    assert spearman(values, -values) == -1


# Subsets


@pytest.mark.parametrize(
    ("clusters", "fraction", "size"), [(10, 0.5, 5), (9, 0.5, 5), (10, 0.01, 1), (10, 0.99, 9), (2, 0.5, 1)]
)
def test_a_subset_has_its_size_and_is_never_empty_or_everything(clusters, fraction, size):
    weights_BC = subset_weights(clusters, fraction, 30, seed=4)
    assert set(np.unique(weights_BC)) == {0, 1}
    assert (weights_BC.sum(axis=1) == size).all()
    assert len({tuple(row) for row in weights_BC.tolist()}) > 1
    assert np.array_equal(weights_BC, subset_weights(clusters, fraction, 30, seed=4))


def test_smaller_subsets_lie_within_larger_ones():
    small, large = (subset_weights(20, fraction, 10, seed=0) for fraction in (0.25, 0.75))
    assert (small <= large).all()


def test_one_cluster_has_no_subsets():
    assert subset_weights(1, 0.5, 10, seed=0).shape == (0, 1)


# Stability


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", SELECTORS)
def test_stability_equals_a_loop_over_subsets(occurrences, sample, name, rules):
    subsets = [occurrences.drawn(chosen) for chosen in subset_weights(12, 0.4, 20, seed=6)]
    curve = cutoff_curve(sample, None, SELECTORS[name], rules, fraction=0.4, draws=20, seed=6)
    assert len(curve.stability) > 5
    for k in range(1, len(curve.stability) + 1):
        whole = ranking(occurrences, name, rules, k)
        overlaps = [naive_jaccard(ranking(subset, name, rules, k), whole) for subset in subsets]
        expected = (np.mean(overlaps), *np.quantile(overlaps, [0.05, 0.95]))
        bands = (curve.stability[k - 1], curve.stability_low[k - 1], curve.stability_high[k - 1])
        assert bands == pytest.approx(expected, rel=1e-12)


def test_what_every_prompt_says_is_stable():
    curve = cutoff_curve(same_everywhere(6).sample(), None, summed_kl, Rules(1))
    assert len(curve.stability) and set(curve.stability_low) == {1.0}


# Curve and crossing


@pytest.fixture(scope="module")
def halves(occurrences):
    chosen = np.arange(12) % 2 == 0
    return occurrences.drawn(chosen.astype(int)), occurrences.drawn((~chosen).astype(int))


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", ["freq x mean", "lower bound", "context"])
def test_the_curve_is_coverage_on_both_halves_and_stability(halves, name, rules):
    selection, measuring = halves
    curve = cutoff_curve(selection.sample(), measuring.sample(), SELECTORS[name], rules, draws=10, seed=1)
    score = naive_score(selection, name)
    order = [column for column in ranking(selection, name, rules, 99) if score[column] > 0]
    records = curve.points()
    assert [record.k for record in records] == list(range(1, len(order) + 1))
    for half, key in ((selection, "coverage"), (measuring, "coverage_held_out")):
        kl = [sum(half.of(column, "kl")) for column in range(15)]
        expected = [sum(kl[column] for column in order[:k]) / sum(kl) for k in range(1, len(order) + 1)]
        assert [getattr(record, key) for record in records] == pytest.approx(expected, rel=1e-12)
    for key in ("stability", "stability_low", "stability_high"):
        assert [getattr(record, key) for record in records] == getattr(curve, key).tolist()


@pytest.mark.parametrize("rules", RULES)
def test_auto_k_is_the_first_k_that_a_loop_finds(halves, rules):
    selection, _ = halves
    curve = cutoff_curve(selection.sample(), None, summed_kl, rules, draws=10, seed=1)
    found = auto_k(curve)
    subsets = [selection.drawn(chosen) for chosen in subset_weights(6, 0.5, 10, seed=1)]
    kl = [sum(selection.of(column, "kl")) for column in range(15)]
    for k in range(1, len(curve.coverage) + 1):
        whole = ranking(selection, "freq x mean", rules, k)
        covered = sum(kl[column] for column in whole) / sum(kl)
        stable = np.mean([naive_jaccard(ranking(subset, "freq x mean", rules, k), whole) for subset in subsets])
        if covered >= stable:
            break
    assert found.k == k
    assert found.crossed == (covered >= stable)
    assert (found.coverage, found.stability) == pytest.approx((covered, stable), rel=1e-12)


def curve_of(covered: list[float], stable: list[float]) -> CutoffCurve:
    flat = np.array(stable)
    return CutoffCurve(np.array(covered), np.full(len(covered), np.nan), flat, flat, flat)


def test_auto_k_looks_between_the_points_of_the_grid():
    ks = np.arange(1, 1001)
    curve = curve_of(ks / 1000, np.where(ks < 517, 0.9, 0.5))
    assert auto_k(curve).k == 517
    assert 517 not in {record.k for record in curve.points()}
    assert [record.coverage for record in curve.points(517) if record.k == 517] == [0.517]
    assert curve.points(5000) == curve.points()


def test_equal_is_crossed():
    assert auto_k(curve_of([0.25, 0.5, 0.75], [1, 0.5, 0.25])).k == 2


def test_without_a_crossing_all_types_are_taken_and_it_says_so():
    found = auto_k(curve_of([0.1, 0.2, 0.3], [0.9, 0.8, 0.7]))
    assert (found.k, found.coverage, found.stability, found.crossed) == (3, 0.3, 0.7, False)


def test_the_curves_meet_at_the_last_type_when_all_are_ranked_everywhere():
    curve = cutoff_curve(same_everywhere(6).sample(), None, summed_kl, Rules(1, min_freq=1))
    assert (curve.coverage[-1], curve.stability[-1]) == (1, 1)
    assert auto_k(curve).k == len(curve.coverage)


def test_nothing_to_rank_is_refused(sample):
    empty = cutoff_curve(sample, None, summed_kl, Rules(1, min_freq=10_000))
    assert empty.points() == []
    with pytest.raises(RocktokensError, match="k = 'auto' finds nothing to rank"):
        auto_k(empty)


def test_one_prompt_has_coverage_but_no_stability():
    alone = random_occurrences(0, clusters=2).drawn(np.array([1, 0])).sample()
    curve = cutoff_curve(alone, None, summed_kl, Rules(3))
    assert {record.stability for record in curve.points()} == {None}
    assert curve.points()[0].coverage > 0
    with pytest.raises(RocktokensError, match="k = 'auto' needs at least 2 prompts"):
        auto_k(curve)
    assert {record.jaccard for record in sample_size_curve(alone, summed_kl, Rules(3))} == {None}
    for record in compare_selectors(alone, Rules(3)):
        assert record.jaccard_halves is record.jaccard_full is record.spearman_halves is None
        assert record.coverage > 0


def test_halves_with_other_columns_are_refused(sample):
    with pytest.raises(ValueError, match="same columns"):
        cutoff_curve(sample, sample.columns(np.arange(3)), summed_kl, Rules(2))


@given(st.integers(0, 300_000))
def test_the_grid_has_every_small_k_and_the_last(last):
    grid = sorted(cutoff_grid(last))
    assert grid[:50] == list(range(1, min(last, 50) + 1))
    assert not last or grid[-1] == last
    assert all(b <= max(1.15 * a, a + 1) for a, b in pairwise(grid))
    assert len(grid) < 160


# Sample size


def test_the_sample_size_curve_equals_a_loop(occurrences, sample):
    rules = Rules(4, min_freq=3)
    found = sample_size_curve(sample, SELECTORS["context"], rules, (0.25, 0.75), draws=8, seed=2)
    for record, fraction, size in zip(found, (0.25, 0.75), (3, 9), strict=True):
        overlaps, correlations = [], []
        for chosen in subset_weights(12, fraction, 8, seed=2):
            overlap, correlation = naive_agreement(occurrences, occurrences.drawn(chosen), "context", rules)
            overlaps.append(overlap)
            correlations.append(correlation)
        assert asdict(record) == pytest.approx(
            {
                "fraction": fraction,
                "n_clusters": size,
                "jaccard": np.mean(overlaps),
                "spearman": np.mean([value for value in correlations if value is not None]),
            },
            rel=1e-12,
        )


def naive_agreement(first: Occurrences, second: Occurrences, name: str, rules: Rules) -> tuple[float, float | None]:
    orders = [ranking(side, name, rules, 99) for side in (first, second)]
    shared = sorted(set(orders[0]) & set(orders[1]))
    scores = [[naive_score(side, name)[column] for column in shared] for side in (first, second)]
    defined = len(shared) >= 3 and all(len(set(side)) > 1 for side in scores)
    correlation = float(spearmanr(*scores).statistic) if defined else None
    return naive_jaccard(orders[0][: rules.k], orders[1][: rules.k]), correlation


def test_more_prompts_come_closer():
    curve = sample_size_curve(random_occurrences(5, 60, 40, 40).sample(), summed_kl, Rules(8))
    assert curve[0].jaccard < curve[2].jaccard < curve[4].jaccard
    assert curve[0].spearman < curve[2].spearman < curve[4].spearman


# Selectors


@pytest.mark.parametrize("rules", RULES)
def test_the_comparison_equals_a_loop(occurrences, sample, rules):
    found = {record.selector: record for record in compare_selectors(sample, rules, draws=6, seed=3)}
    assert list(found) == list(SELECTORS)
    weights_BC = subset_weights(12, 0.5, 6, seed=3)
    kl = [sum(occurrences.of(column, "kl")) for column in range(15)]
    for name, record in found.items():
        pairs = [(occurrences.drawn(chosen), occurrences.drawn(1 - chosen)) for chosen in weights_BC]
        agreements = [naive_agreement(*pair, name, rules) for pair in pairs]
        top = ranking(occurrences, name, rules, rules.k)
        assert record.jaccard_halves == pytest.approx(np.mean([overlap for overlap, _ in agreements]), rel=1e-12)
        correlations = [value for _, value in agreements if value is not None]
        assert record.spearman_halves == pytest.approx(np.mean(correlations), rel=1e-12)
        whole = [naive_jaccard(ranking(half, name, rules, rules.k), top) for half, _ in pairs]
        assert record.jaccard_full == pytest.approx(np.mean(whole), rel=1e-12)
        assert record.coverage == pytest.approx(sum(kl[column] for column in top) / sum(kl), rel=1e-12)
        others = {other: ranking(occurrences, other, rules, rules.k) for other in SELECTORS if other != name}
        assert record.jaccard_with == {other: naive_jaccard(top, columns) for other, columns in others.items()}
    json.dumps({name: asdict(record) for name, record in found.items()}, allow_nan=False)


def test_only_selectors_with_their_evidence_are_compared(occurrences):
    names = [record.selector for record in compare_selectors(occurrences.sample(("kl_before", "kept")), Rules(3))]
    assert names == ["lower bound", "freq x mean", "mean"]


def test_no_type_to_rank_gives_records_without_numbers(sample):
    for record in compare_selectors(sample, Rules(3, min_freq=10_000), draws=3):
        numbers = [getattr(record, key) for key in ("jaccard_halves", "jaccard_full", "spearman_halves", "coverage")]
        assert numbers == [None] * 4
        assert set(record.jaccard_with.values()) == {None}
