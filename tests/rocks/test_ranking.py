"""The default ranking: lower bounds, prompts, labels and what was kept equal loops over rows, decided on each half."""

import math
from collections import defaultdict
from dataclasses import replace
from statistics import variance
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from sample_oracle import random_occurrences
from scipy.sparse import csr_array
from scipy.stats import t as student
from trace_oracle import fixed, naive_split, occurrences_of, random_trace, with_column, with_kl, write_trace

from rocktokens.errors import RocktokensError
from rocktokens.rocks.cutoff import split_half, subset_weights
from rocktokens.rocks.find import find_rocks
from rocktokens.rocks.movement import Kept, Movement, label_types, movement
from rocktokens.rocks.ranking import Rules, rank_types, rankable, rankings
from rocktokens.rocks.selectors import Sample, lower_bound
from rocktokens.rocks.sums import gather
from rocktokens.traces.store import TraceStore

Z = 1.6448536269514722
STEPS = (0, 20, 40, 70)
"""The middle is 40: nearest to half of 70, later than 20, which is as far from 0 … 40."""


class NaiveType(NamedTuple):
    """What one half of the prompts says of a type, from sums by prompt in nats."""

    freq: int
    prompts: int
    score: float
    bound: float
    kept: dict[int, tuple[float, float, float] | None]
    """Share and interval by earlier checkpoint; None where there was no loss."""

    @property
    def label(self) -> str:
        first, middle = self.kept[0], self.kept[40]
        if middle and middle[2] < 0.75:
            return "moving"
        if first and first[1] >= 0.75:
            return "stuck"
        if first and middle and first[2] < 0.75 and middle[1] >= 0.75:
            return "residual"
        return "unclear"


def naive_types(tables: dict[int, pa.Table], prompts: list[str]) -> dict[int, NaiveType]:
    sums: dict[int, dict[int, dict[str, float]]] = {step: defaultdict(lambda: defaultdict(float)) for step in tables}
    freq: dict[int, int] = defaultdict(int)
    for step, table in tables.items():
        for row in occurrences_of(table, set(prompts)):
            sums[step][row["token_id"]][row["prompt_id"]] += fixed(row["kl"]) / 2**24
            freq[row["token_id"]] += step == 70
    found = {}
    for v, now in sums[70].items():
        by_prompt = [now.get(prompt, 0.0) for prompt in prompts]
        total = sum(by_prompt)
        error = math.sqrt(len(prompts) * variance(by_prompt))
        bound = total * math.exp(-Z * error / total) if total else 0.0
        kept = {step: naive_kept(by_prompt, [sums[step][v].get(p, 0.0) for p in prompts], len(now)) for step in (0, 40)}
        found[v] = NaiveType(freq[v], len(now), total, bound, kept)
    return found


def naive_kept(after: list[float], before: list[float], present: int) -> tuple[float, float, float] | None:
    total, base, count = sum(after), sum(before), len(after)
    if not base:
        return None
    if not total:
        return 0.0, 0.0, 0.0
    if present < 2:
        return total / base, 0.0, math.inf
    moves = [a / total - b / base for a, b in zip(after, before, strict=True)]
    squares, fourths = (sum(move**power for move in moves) for power in (2, 4))
    freedom = max(0.75 * (squares**2 / fourths - 1), 1)
    factor = math.exp(student.ppf(0.975, freedom) * math.sqrt(count / (count - 1) * squares))
    return total / base, total / base / factor, total / base * factor


@pytest.fixture(scope="module")
def tables():
    """Types 0–3 keep their loss, 4–7 fall early, 8–11 still fall, 12–15 have no loss at first, the rest is noise."""
    late = random_trace(3, prompts=60, samples=2, vocabulary=24, length=60)
    kinds = np.minimum(late["token_id"].to_numpy() // 4, 5)
    left = {0: [1, 8, 8, 0, 1, 1], 20: [1, 2, 6, 0, 1, 1], 40: [1, 1, 4, 0, 1, 1]}
    kl = late["kl"].to_numpy(zero_copy_only=False)
    made = {70: late}
    for step, factors in left.items():
        noise = np.random.default_rng(step).uniform(0.8, 1.2, late.num_rows)
        noise = np.where(kinds < 4, noise, noise**9)
        made[step] = with_kl(late, kl * np.array(factors, float)[kinds] * noise)
    return dict(sorted(made.items()))


@pytest.fixture(scope="module")
def store(tmp_path_factory, tables):
    return TraceStore(write_trace(tmp_path_factory.mktemp("run"), tables, rows_per_part=300), threads=1)


def expected_order(types: dict[int, NaiveType], allowed: tuple[str, ...], min_prompts: int = 5) -> list[int]:
    may = [v for v, own in types.items() if own.freq >= 2 and own.prompts >= min_prompts and own.label in allowed]
    return sorted(may, key=lambda v: (-types[v].bound, v))


LABELS = ("stuck", "residual", "moving", "unclear")


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, ("stuck", "residual", "unclear")),
        ({"require": "stuck"}, ("stuck",)),
        ({"require": "any", "min_prompts": 20}, LABELS),
    ],
)
def test_rocks_are_the_best_bounds_among_the_types_that_may_be_ranked(store, tables, options, allowed):
    selection, measuring = naive_split(tables[70], 0.5, 0)
    types, others = (naive_types(tables, half) for half in (selection, measuring))
    rocks = find_rocks(store, k=9, **options)
    order = expected_order(types, allowed, options.get("min_prompts", 5))
    assert rocks.ids.tolist() == order[:9]
    behind = expected_order(types, LABELS, options.get("min_prompts", 5))
    assert [own.id for own in rocks.ranked] == [v for v in behind if v not in order[:9]][:20]
    for token in [*rocks.tokens, *rocks.ranked]:
        own = types[token.id]
        assert (token.freq, token.n_prompts, token.label) == (own.freq, own.prompts, own.label)
        assert (token.score, token.bound) == pytest.approx((own.score, own.bound), rel=1e-12)
        for found, interval, step in (
            (token.kept_first, token.kept_first_interval, 0),
            (token.kept_middle, token.kept_middle_interval, 40),
        ):
            expected = own.kept[step]
            if expected is None or math.isinf(expected[2]):
                assert interval is None
            else:
                assert interval == pytest.approx(expected[1:], rel=1e-7)
            assert found == (None if expected is None else pytest.approx(expected[0], rel=1e-12))
    assert [token.held_out_label for token in rocks.tokens] == [others[v].label for v in order[:9]]
    assert [token.never_learned for token in rocks.tokens] == [
        types[v].label == others[v].label == "stuck" for v in order[:9]
    ]


def test_every_label_occurs_where_it_was_planted(tables):
    types = naive_types(tables, naive_split(tables[70], None, 0)[0])
    assert {types[v].label for v in range(4)} == {"stuck"}
    assert {types[v].label for v in range(4, 8)} == {"residual"}
    assert {types[v].label for v in range(8, 12)} == {"moving"}
    assert {types[v].label for v in range(12, 16)} == {"unclear"}, "without a loss at first nothing can be kept"


def test_a_type_of_one_prompt_is_that_prompt(tmp_path, tables):
    """In one prompt it holds more loss than all others together, and is neither ranked nor listed."""
    late = tables[70]
    mine = np.array([prompt == "p7" for prompt in late["prompt_id"].to_pylist()])
    planted = {}
    for step, table in tables.items():
        moved = with_column(table, "token_id", np.where(mine, 99, table["token_id"].to_numpy()))
        planted[step] = with_kl(moved, np.where(mine, 500.0, moved["kl"].to_numpy(zero_copy_only=False)))
    store = TraceStore(write_trace(tmp_path, planted), threads=1)
    assert find_rocks(store, k=1, stage="score", require="any", min_prompts=1, split=None).ids.tolist() == [99]
    rocks = find_rocks(store, k=30, split=None)
    assert 99 not in [own.id for own in (*rocks.tokens, *rocks.ranked)]


# Labels


def since(*values: float) -> Kept:
    return Kept(*(np.array([[value]]) for value in values))


NAN = float("nan")


@pytest.mark.parametrize(
    ("first", "middle", "label"),
    [
        ((1.0, 0.75, 1.2), (1.0, 0.9, 1.1), "stuck"),
        ((1.0, 0.7499, 1.2), (1.0, 0.9, 1.1), "unclear"),
        ((0.2, 0.1, 0.7499), (1.0, 0.75, 1.1), "residual"),
        ((0.2, 0.1, 0.75), (1.0, 0.9, 1.1), "unclear"),
        ((0.2, 0.1, 0.3), (0.8, 0.7, 0.9), "unclear"),
        ((0.2, 0.1, 0.3), (0.6, 0.5, 0.7499), "moving"),
        ((1.0, 0.9, 1.1), (0.6, 0.5, 0.7), "moving"),
        ((NAN, NAN, NAN), (1.0, 0.9, 1.1), "unclear"),
        ((1.0, 0.9, 1.1), (NAN, NAN, NAN), "stuck"),
        ((1.0, 0.9, 1.1), None, "stuck"),
        ((0.3, 0.2, 0.7), None, "moved"),
        ((0.8, 0.7, 0.9), None, "unclear"),
        ((NAN, NAN, NAN), None, "unclear"),
    ],
)
def test_labels_follow_the_intervals_in_their_order(first, middle, label):
    found = Movement(since(*first), None if middle is None else since(*middle)).labels()
    assert found.tolist() == [[label]]


@pytest.mark.parametrize(
    ("steps", "middle"), [((0, 20, 40, 70), 40), ((0, 30, 40, 70), 30), ((0, 70), None), ((40, 69, 70), 69)]
)
def test_the_middle_is_nearest_to_half_the_reference_step(tmp_path, tables, steps, middle):
    run = write_trace(tmp_path, {step: tables.get(step, tables[40]) for step in steps})
    assert gather(TraceStore(run, threads=1), None, None, 0.5, 0).middle == middle


def test_a_checkpoint_of_other_occurrences_is_no_middle(tmp_path, tables):
    run = write_trace(tmp_path, {0: tables[0], 20: tables[20], 35: tables[40].slice(0, 900), 70: tables[70]})
    store = TraceStore(run, threads=1)
    assert gather(store, None, None, 0.5, 0).middle == 20
    each = TraceStore(write_trace(tmp_path / "each", {0: tables[0].slice(9), 70: tables[70]}), threads=1)
    unpaired = gather(each, None, None, 0.5, 0)
    assert set(label_types(unpaired.selection).ravel()) == {"unclear"}
    assert rankable(unpaired.selection, Rules(9, require="stopped")).any()


def test_stuck_types_need_an_earlier_checkpoint_of_the_same_tokens(tmp_path, tables):
    alone = TraceStore(write_trace(tmp_path / "alone", {70: tables[70]}), threads=1)
    with pytest.raises(RocktokensError, match=r"^require = 'stuck' needs an earlier .* there is none: trace one"):
        find_rocks(alone, require="stuck")
    assert {own.label for own in find_rocks(alone, k=3).tokens} == {"unclear"}
    other = TraceStore(write_trace(tmp_path / "other", {0: tables[0].slice(9), 70: tables[70]}), threads=1)
    with pytest.raises(RocktokensError, match=r"as 70, and 0 did not: trace one, or use require = 'stopped'$"):
        find_rocks(other, require="stuck")


def test_without_any_loss_nothing_is_nan(tmp_path, tables):
    silent = {step: with_column(table, "kl", np.zeros(table.num_rows)) for step, table in tables.items()}
    rocks = find_rocks(TraceStore(write_trace(tmp_path, silent), threads=1), k=5)
    assert {(own.label, own.kept_first, own.kept_middle) for own in rocks.tokens} == {("unclear", None, None)}
    assert {own.bound for own in rocks.tokens} == {0.0}
    rocks.save(tmp_path / "rocks.json")


def test_a_shift_by_one_token_changes_the_labels(tmp_path, tables):
    def shifted(table: pa.Table) -> pa.Table:
        kl = table["kl"].to_numpy(zero_copy_only=False)
        return with_kl(table, np.where(np.isnan(kl), np.nan, np.roll(np.nan_to_num(kl), 1)))

    run = write_trace(tmp_path, {step: shifted(table) for step, table in tables.items()})
    labels = {own.id: own.label for own in find_rocks(TraceStore(run, threads=1), k=24, require="any").tokens}
    assert {labels[v] for v in range(8, 12)} != {"moving"}


# Decided again under other weights


@pytest.fixture(scope="module")
def sample(store) -> Sample:
    return gather(store, None, None, 0.5, 0).selection


def test_weights_are_copies_of_prompts(sample):
    """Labels, prompts and bounds of a replicate are those of the sample with every cluster as often as it was drawn."""
    counts_BC = np.random.default_rng(0).multinomial(sample.n_clusters, [1 / sample.n_clusters] * sample.n_clusters, 6)
    rules = Rules(9, min_freq=3, exclude_top_freq=1, min_prompts=6, require="stopped")
    drawn = list(rankings(sample, lower_bound, rules, counts_BC))
    for counts_C, (score_U, order) in zip(counts_BC, drawn, strict=True):
        copied = sample.rows(np.repeat(np.arange(sample.n_clusters), counts_C))
        distinct = sample.rows(np.flatnonzero(counts_C))
        assert score_U == pytest.approx(lower_bound(copied, np.ones((1, copied.n_clusters)))[0], rel=1e-12)
        prompts = np.diff(distinct.freq.tocsc().indptr)
        kept = movement(copied).middle
        assert kept is not None
        freq = copied.totals("freq")
        frequent = np.argsort(-freq, kind="stable")[:1]
        may = (freq >= 3) & (prompts >= 6) & ~(kept.high[0] < 0.75)
        may[frequent] = False
        assert order.tolist() == rank_types(score_U, may, rules).tolist()


def test_halves_of_the_prompts_decide_everything_again(sample):
    rules = Rules(6, min_prompts=4, require="stopped")
    half_BC = subset_weights(sample.n_clusters, 0.5, 8, seed=5)
    overlaps = []
    for weights_C in half_BC:
        one, other = (sample.rows(np.flatnonzero(side)) for side in (weights_C, 1 - weights_C))
        tops = []
        for half in (one, other):
            may = rankable(half, rules)[0]
            tops.append(set(rank_types(lower_bound(half, np.ones((1, half.n_clusters)))[0], may, rules).tolist()))
        overlaps.append(len(tops[0] & tops[1]) / len(tops[0] | tops[1]))
    found = split_half(sample, lower_bound, rules, draws=8, seed=5)
    assert found["jaccard_halves"] == pytest.approx(np.mean(overlaps), rel=1e-12)


def test_one_prompt_alone_says_nothing_of_others():
    kl = csr_array(np.array([[5], [0], [0]]))
    alone = Sample(np.array([0]), freq=csr_array(np.array([[2], [0], [0]])), kl=kl, grad_norm=kl, kl_before=kl)
    kept = movement(alone).first
    assert kept is not None
    assert (kept.share[0, 0], kept.low[0, 0], kept.high[0, 0]) == (1.0, 0.0, math.inf)
    assert kept.of(0) == (1.0, None)
    assert label_types(alone).tolist() == [["unclear"]]


def test_bounds_are_positive_and_below_the_score():
    occurrences = random_occurrences(4)
    sample = occurrences.sample()
    bound = lower_bound(sample, np.ones((1, 12)))[0]
    score = sample.totals("kl") / 2**24
    assert ((bound < score) | (score == 0)).all()
    assert ((bound > 0) == (score > 0)).all()
    once = replace(sample, kl=sample.kl * 2)
    assert lower_bound(once, np.ones((1, 12)))[0] == pytest.approx(2 * bound, rel=1e-12)
