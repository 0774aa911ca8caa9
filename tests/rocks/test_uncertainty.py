"""The bootstrap equals a loop that really draws clusters again; tests take the prompt as their unit."""

import itertools
import json
from dataclasses import asdict

import numpy as np
import pytest
from sample_oracle import ONE, Occurrences, naive_rank, naive_score, random_occurrences
from scipy.sparse import csr_array
from scipy.stats import norm, wilcoxon

from rocktokens.errors import RocktokensError
from rocktokens.inference import bootstrap
from rocktokens.inference.bootstrap import (
    bootstrap_counts,
    mean_interval,
    ratio_interval,
    ratio_intervals,
    share_interval,
)
from rocktokens.rocks import uncertainty
from rocktokens.rocks.ranking import Rules, frequent_enough, rank_types, rankable, rankings
from rocktokens.rocks.selectors import SELECTORS, Sample, pooled_groups, summed_kl
from rocktokens.rocks.uncertainty import (
    candidates,
    paired_tests,
    score_uncertainty,
    share_intervals,
)

DRAWS = 40


@pytest.fixture(scope="module")
def occurrences():
    return random_occurrences(3)


@pytest.fixture(scope="module")
def sample(occurrences):
    return occurrences.sample()


@pytest.fixture(scope="module")
def drawn(occurrences):
    """Each replicate with seed 5 as occurrences."""
    return [occurrences.drawn(counts_C) for counts_C in bootstrap_counts(12, DRAWS, seed=5)]


# Scores


@pytest.mark.parametrize("rules", [Rules(4), Rules(3, min_freq=5), Rules(4, min_freq=3, exclude_top_freq=2)])
@pytest.mark.parametrize("name", SELECTORS)
def test_probability_of_the_top_k_equals_a_loop(sample, drawn, name, rules):
    inside = [0] * 15
    for replicate in drawn:
        for column in naive_rank(naive_score(replicate, name), replicate.freq, rules):
            inside[column] += 1
    found = score_uncertainty(sample, SELECTORS[name], rules, DRAWS, seed=5)
    assert found.p_in_top_k.tolist() == [count / DRAWS for count in inside]


def test_a_type_without_loss_is_in_no_top_k():
    """There are as many places as types, but one of them would only be there by its id."""
    kl = csr_array(np.array([[3, 0, 1], [2, 0, 4], [5, 0, 2]]) * ONE)
    sample = Sample(np.arange(3), freq=csr_array(np.full((3, 3), 2)), kl=kl, grad_norm=kl)
    assert score_uncertainty(sample, summed_kl, Rules(3), DRAWS).p_in_top_k.tolist() == [1, 0, 1]


def test_the_interval_is_of_summed_kl_whatever_ranks(sample):
    counts_BC = bootstrap_counts(12, DRAWS, seed=5)
    now, before = (ratio_intervals(matrix, None, counts_BC, 0.9) / ONE for matrix in (sample.kl, sample.kl_before))
    for name in ("freq x mean", "mean", "context"):
        found = score_uncertainty(sample, SELECTORS[name], Rules(4), DRAWS, seed=5, level=0.9)
        joint = score_uncertainty(sample, SELECTORS[name], Rules(4), DRAWS, seed=5, level=0.9, joint=True)
        for column in np.flatnonzero(sample.totals("freq")):
            assert found.interval(column) == tuple(now[:, column])
            assert joint.interval(column) == tuple(np.minimum(now, before)[:, column])


def test_many_prompts_are_pooled_before_replicates_rank_them(sample, monkeypatch):
    pooled = sample.pooled(5, seed=3)
    groups_C = pooled_groups(12, 5, seed=3)
    assert np.bincount(groups_C).tolist() == [3, 3, 2, 2, 2]
    for name in ("freq", "kl", "grad_norm", "kl_before", "kept"):
        whole_CU = getattr(sample, name).toarray()
        expected = [whole_CU[groups_C == group].sum(axis=0) for group in range(5)]
        assert np.array_equal(getattr(pooled, name).toarray(), expected)
    alone = score_uncertainty(pooled, SELECTORS["lower bound"], Rules(4), DRAWS, seed=3)
    monkeypatch.setattr(uncertainty, "MOST_DRAWN", 11)
    monkeypatch.setattr(uncertainty, "POOLED_CLUSTERS", 5)
    found = score_uncertainty(sample, SELECTORS["lower bound"], Rules(4), DRAWS, seed=3)
    for name, values in asdict(alone).items():
        assert np.array_equal(values, getattr(found, name), equal_nan=True)


@pytest.mark.parametrize("least", [4, 6])
def test_pooled_clusters_are_as_many_prompts_as_they_hold(sample, least):
    """A draw that has a cluster has all its prompts, once."""
    rules, groups_C = Rules(4, min_freq=1, min_prompts=least), pooled_groups(12, 5, seed=3)
    for weights_G in (np.ones(5), np.array([2, 0, 1, 0, 3])):
        pooled, alone = (
            rankable(own, rules, weights[None])[0]
            for own, weights in ((sample.pooled(5, seed=3), weights_G), (sample, weights_G[groups_C]))
        )
        assert np.array_equal(pooled, alone) and 0 < alone.sum() < len(alone)
    twice = sample.pooled(8, seed=1).pooled(5, seed=3)
    assert np.array_equal(rankable(twice, rules), rankable(sample, rules))


def test_blocks_do_not_change_anything(sample, monkeypatch):
    whole = score_uncertainty(sample, SELECTORS["lower bound"], Rules(4), DRAWS)
    for cells in (1, 100):
        monkeypatch.setattr(bootstrap, "BLOCK_CELLS", cells)
        blocked = score_uncertainty(sample, SELECTORS["lower bound"], Rules(4), DRAWS)
        for name, values in asdict(whole).items():
            assert np.array_equal(values, getattr(blocked, name), equal_nan=True)


def many_types(seed: int, types: int = 400, clusters: int = 30) -> Sample:
    """Zipf frequencies; the five most frequent types have no kl at all."""
    rng = np.random.default_rng(seed)
    freq = rng.poisson(3000 / clusters / np.arange(1, types + 1) ** 0.9, (clusters, types))
    kl = np.floor(rng.gamma(np.maximum(freq, 1e-9), rng.exponential(0.5, types)) * ONE).astype(np.int64) * (freq > 0)
    kl[:, :5] = 0
    kept = rng.binomial(freq, rng.random(types))
    shuffled = rng.permutation(types)
    kl, freq, kept = (csr_array(matrix[:, shuffled]) for matrix in (kl, freq, kept))
    return Sample(np.arange(types), freq=freq, kl=kl, grad_norm=kl, kl_before=kl, kept=kept)


@pytest.mark.parametrize("rules", [Rules(5), Rules(3, min_freq=12, exclude_top_freq=4)])
@pytest.mark.parametrize("name", SELECTORS)
def test_types_that_are_no_candidates_hardly_ever_make_it(monkeypatch, name, rules):
    sample = many_types(2)
    inside = np.zeros(400)
    for _, first in rankings(sample, SELECTORS[name], rules, bootstrap_counts(30, 200, seed=0)):
        inside[first] += 1
    monkeypatch.setattr(uncertainty, "CANDIDATES", 20)
    chosen = candidates(sample, SELECTORS[name], rules)
    assert len(chosen) < 300
    found = score_uncertainty(sample, SELECTORS[name], rules, 200)
    # A mean over few occurrences moves most: one type or another is off by a replicate or two of the 200.
    assert np.abs(np.rint(found.p_in_top_k * 200) - inside).max() <= (2 if name == "mean" else 0)
    others = np.setdiff1d(np.arange(400), chosen)
    assert not found.p_in_top_k[others].any()
    assert [found.interval(column) for column in others] == [None] * len(others)
    assert all(found.interval(column) for column in chosen)


@pytest.mark.parametrize("almost", [20, 40])
def test_types_too_rare_to_rank_do_not_crowd_out_the_others(monkeypatch, almost):
    """60 frequent types with the largest sums, 60 rare ones with the largest means, and two kinds between them."""
    rng = np.random.default_rng(0)
    total = np.repeat([900, 1, 30, 10], [60, 60, 20, almost])
    mean = np.repeat([0.1, 10.0, 1.0, 1.1], [60, 60, 20, almost]) + rng.random(len(total)) / 100
    freq = np.stack([rng.multinomial(count, np.full(30, 1 / 30)) for count in total], axis=1)
    kl = csr_array(np.rint(freq * mean * ONE).astype(np.int64))
    sample = Sample(np.arange(len(total)), freq=csr_array(freq), kl=kl, grad_norm=kl)
    rules, inside = Rules(3, min_freq=12), np.zeros(len(total))
    for _, first in rankings(sample, SELECTORS["mean"], rules, bootstrap_counts(30, 100)):
        inside[first] += 1
    monkeypatch.setattr(uncertainty, "CANDIDATES", 20)
    assert len(candidates(sample, SELECTORS["mean"], rules)) < len(total)
    found = score_uncertainty(sample, SELECTORS["mean"], rules, 100)
    assert np.array_equal(found.p_in_top_k, inside / 100)
    assert inside[140:].any()
    rocks = rank_types(mean, frequent_enough(total, rules), rules)
    assert set(rocks.tolist()) <= set(range(120, 140))
    assert all(found.interval(rock) for rock in rocks)


def test_intervals_cover_the_expected_score_in_more_than_nine_of_ten_samples():
    """Every type is a sample of its own."""
    rng = np.random.default_rng(11)
    clusters, mean_freq, mean_kl, types = 40, 3.0, 0.7, 600
    freq = rng.poisson(mean_freq, (clusters, types))
    kl = np.floor(rng.gamma(np.maximum(freq, 1e-9), mean_kl) * ONE).astype(np.int64) * (freq > 0)
    sample = Sample(np.arange(types), freq=csr_array(freq), kl=csr_array(kl), grad_norm=csr_array(kl))
    found = score_uncertainty(sample, summed_kl, Rules(1), 400)
    expected = clusters * mean_freq * mean_kl
    assert 0.93 <= np.mean((found.low <= expected) & (expected <= found.high)) <= 0.985


# Shares


def less_one(ends: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if ends is None else (ends[0] - 1, ends[1] - 1)


def by_cluster(occurrences: Occurrences, name: str, chosen: np.ndarray) -> np.ndarray:
    """A sum per cluster over the chosen occurrences, one at a time; ``freq`` counts them."""
    sums = [0] * 12
    for cluster, value in zip(occurrences.cluster[chosen], getattr(occurrences, name)[chosen].tolist(), strict=True):
        sums[cluster] += 1 if name == "column" else value
    return np.array(sums)


@pytest.mark.parametrize("columns", [[0, 2, 3], [8], [13, 14]])
def test_shares_are_those_of_sums_by_cluster(occurrences, sample, columns):
    rock = np.isin(occurrences.column, columns)
    counts_BC = bootstrap_counts(12, DRAWS, seed=5)
    names = {"freq": "column", "kl": "kl", "grad": "grad_norm", "before": "kl_before"}
    rocks, rest, whole = (
        {short: by_cluster(occurrences, name, chosen) for short, name in names.items()}
        for chosen in (rock, ~rock, np.ones_like(rock))
    )
    expected = {
        "token_share": share_interval(rocks["freq"], rest["freq"], counts_BC),
        "kl_share": share_interval(rocks["kl"], rest["kl"], counts_BC),
        "grad_share": share_interval(rocks["grad"], rest["grad"], counts_BC),
        "mean_kl": ratio_interval(whole["kl"] / ONE, whole["freq"], counts_BC),
        "mean_kl_rocks": ratio_interval(rocks["kl"] / ONE, rocks["freq"], counts_BC),
        "mean_kl_rest": ratio_interval(rest["kl"] / ONE, rest["freq"], counts_BC),
        "kl_change_rocks": less_one(ratio_interval(rocks["kl"], rocks["before"], counts_BC)),
        "kl_change_rest": less_one(ratio_interval(rest["kl"], rest["before"], counts_BC)),
    }
    found = share_intervals(sample, np.isin(np.arange(15), columns), paired=True, draws=DRAWS, seed=5)
    assert found.keys() == expected.keys()
    for name, ends in expected.items():
        assert found[name] == pytest.approx(ends, rel=1e-12), name


def test_rocks_in_one_prompt_have_a_share_but_no_interval_of_their_mean():
    lonely = random_occurrences(3, clusters=3)
    lonely.column[:] = np.where(lonely.cluster == 0, 0, 1)
    found = share_intervals(lonely.sample(), np.arange(15) == 0, paired=True, draws=200)
    low, high = found["token_share"]
    assert 0 < low < np.mean(lonely.column == 0) < high < 1
    assert found["mean_kl_rocks"] is found["kl_change_rocks"] is None


def test_what_is_not_defined_has_no_interval(occurrences, sample):
    nothing = share_intervals(sample, np.zeros(15, dtype=bool), paired=True, draws=DRAWS)
    assert nothing["mean_kl_rocks"] is None
    assert nothing["kl_change_rocks"] is None
    assert nothing["kl_share"] == (0, 0)
    for found in (
        share_intervals(sample, np.arange(15) < 4, paired=False, draws=DRAWS),
        share_intervals(occurrences.sample(without=("kl_before",)), np.arange(15) < 4, paired=True, draws=DRAWS),
    ):
        assert found["kl_change_rocks"] is found["kl_change_rest"] is None
        assert found["kl_share"] is not None


# Paired changes


def paired_sample(freq_C: list[int], delta_C: list[float], before: float = 2.0) -> Sample:
    """One type; the mean kl of a cluster's occurrences moves from ``before`` by its delta."""
    freq = np.array(freq_C)[:, None]
    after = np.rint(freq * (before + np.array(delta_C)[:, None]) * ONE).astype(np.int64)
    kl, kl_before = csr_array(after), csr_array(np.rint(freq * before * ONE).astype(np.int64))
    return Sample(np.array([7]), freq=csr_array(freq), kl=kl, grad_norm=kl, kl_before=kl_before)


ALL = np.array([True])
DELTAS = [-0.5, -0.25, 0.125, -1.0, -0.75, -0.0625, 0.375, -1.5]


def test_wilcoxon_is_over_prompts():
    found = paired_tests(paired_sample([4, 1, 2, 8, 1, 2, 4, 1], DELTAS), ALL)
    assert found.n_clusters == 8
    assert found.n_occurrences == 23
    assert found.wilcoxon_p == wilcoxon(DELTAS).pvalue
    assert found.rank_biserial == pytest.approx((2 + 4 - (5 + 3 + 7 + 6 + 1 + 8)) / 36, rel=1e-12)


@pytest.mark.parametrize("times", [[100] * 8, [1, 1000, 3, 1, 7, 2, 1, 50]])
def test_more_occurrences_of_the_same_prompt_do_not_make_it_more_certain(times):
    freq = [4, 1, 2, 8, 1, 2, 4, 1]
    once = paired_tests(paired_sample(freq, DELTAS), ALL)
    often = paired_tests(paired_sample([f * t for f, t in zip(freq, times, strict=True)], DELTAS), ALL)
    assert (often.wilcoxon_p, often.rank_biserial) == (once.wilcoxon_p, once.rank_biserial)
    assert often.n_occurrences > once.n_occurrences


def test_prompts_without_change_count_as_evidence_of_none():
    deltas = [*DELTAS, 0, 0, 0]
    found = paired_tests(paired_sample([1] * 11, deltas), ALL)
    ranks = np.array([0, 0, 0, 4, 5, 6, 7, 8, 9, 10, 11])[np.argsort(np.argsort(np.abs(deltas), kind="stable"))]
    observed = (ranks * np.sign(deltas)).sum()
    flips = [sum(map(lambda r, s: r * s, ranks[:8], signs)) for signs in itertools.product((-1, 1), repeat=8)]
    assert found.wilcoxon_p == pytest.approx(np.mean(np.abs(flips) >= abs(observed)), rel=1e-12)
    assert found.wilcoxon_p > 0
    assert found.rank_biserial == pytest.approx(observed / 66, rel=1e-12)
    assert abs(found.rank_biserial) < abs(paired_tests(paired_sample([1] * 8, DELTAS), ALL).rank_biserial or 0)


def test_prompts_without_change_add_nothing_to_the_variance():
    deltas = np.concatenate([np.arange(1, 21) / 16, np.zeros(10)])
    deltas[[1, 4, 7, 8, 12, 14]] *= -1
    ranks = np.arange(11, 31)
    z = (ranks * np.sign(deltas[:20])).sum() / np.sqrt((ranks**2).sum())
    found = paired_tests(paired_sample([1] * 30, deltas.tolist()), ALL)
    assert found.wilcoxon_p == pytest.approx(2 * norm.sf(abs(z)), rel=1e-12)


@pytest.mark.parametrize(("sign", "effect"), [(1, 1.0), (-1, -1.0), (0, 0.0)])
def test_the_effect_has_the_sign_of_the_change(sign, effect):
    found = paired_tests(paired_sample([1] * 7, [sign * (1 + c / 8) for c in range(7)]), ALL)
    assert found.rank_biserial == effect
    assert found.wilcoxon_p == (None if sign == 0 else 2 / 2**7)


def test_five_changes_cannot_be_tested():
    assert paired_tests(paired_sample([1] * 9, [1, 2, 3, 4, 5, 0, 0, 0, 0]), ALL).wilcoxon_p is None
    assert paired_tests(paired_sample([1] * 9, [1, 2, 3, 4, 5, 6, 0, 0, 0]), ALL).wilcoxon_p is not None


def test_means_and_intervals_are_those_of_sums_by_cluster(occurrences, sample):
    columns = [1, 4, 5]
    in_group_U = np.isin(np.arange(15), columns)

    def means(of: Occurrences) -> tuple[float, float, float]:
        chosen = np.isin(of.column, columns)
        after, before = (sum(getattr(of, name)[chosen].tolist()) / ONE for name in ("kl", "kl_before"))
        return before, after, int(chosen.sum())

    found = paired_tests(sample, in_group_U, DRAWS, seed=5, level=0.8)
    before, after, count = means(occurrences)
    assert found.n_occurrences == count
    assert found.n_clusters == len(set(occurrences.cluster[np.isin(occurrences.column, columns)].tolist())) < 12
    expected = (before / count, after / count, (after - before) / count, (after - before) / before)
    assert (found.kl_before, found.kl_after, found.delta, found.relative) == pytest.approx(expected, rel=1e-12)
    chosen, counts_BC = np.isin(occurrences.column, columns), bootstrap_counts(12, DRAWS, seed=5)
    freq_C, after_C, before_C = (by_cluster(occurrences, name, chosen) for name in ("column", "kl", "kl_before"))
    expected = mean_interval((after_C - before_C) / ONE, freq_C, counts_BC, 0.8)
    assert found.delta_interval == pytest.approx(expected, rel=1e-12)
    expected = less_one(ratio_interval(after_C, before_C, counts_BC, 0.8))
    assert found.relative_interval == pytest.approx(expected, rel=1e-12)
    json.dumps(asdict(found), allow_nan=False)


def test_an_empty_group_says_nothing(sample):
    found = asdict(paired_tests(sample, np.zeros(15, dtype=bool), DRAWS))
    assert found.pop("n_occurrences") == found.pop("n_clusters") == 0
    assert set(found.values()) == {None}


def test_one_checkpoint_cannot_be_paired(occurrences):
    with pytest.raises(RocktokensError, match="a paired test needs two checkpoints, the sample has only one"):
        paired_tests(occurrences.sample(without=("kl_before",)), np.ones(15, dtype=bool))
