"""Persistent occurrences, groups of types and their paired changes equal loops over rows, on each half by itself."""

import json
from dataclasses import asdict, fields

import numpy as np
import pyarrow as pa
import pytest
from trace_oracle import (
    counted,
    fixed,
    naive_persistent,
    naive_quantile,
    naive_ranking,
    naive_split,
    occurrences_of,
    random_trace,
    rescored,
    shuffled,
    summed,
    with_column,
    with_levels,
    write_trace,
)

from rocktokens.errors import RocktokensError
from rocktokens.rocks.analysis import persistence_report
from rocktokens.rocks.persistence import (
    HIGH_KL,
    RANDOM,
    ROCK,
    Persistent,
    Thresholds,
    find_thresholds,
    paired_occurrences,
    persistent_at_each,
    persistent_occurrences,
    quantile_thresholds,
    type_groups,
)
from rocktokens.rocks.records import GroupChange
from rocktokens.rocks.sums import HELD_OUT, SELECTION, PromptSums, gather
from rocktokens.traces.store import TraceStore

ONE = 2**24


@pytest.fixture(scope="module")
def tables():
    late = random_trace(31, prompts=18, vocabulary=90)
    return {0: shuffled(rescored(late, 1), 1), 9: late}


@pytest.fixture(scope="module")
def store(tmp_path_factory, tables):
    return TraceStore(write_trace(tmp_path_factory.mktemp("run"), tables, rows_per_part=110), threads=1)


@pytest.fixture(scope="module")
def sums(store):
    return gather(store, None, None, 0.5, 0)


def halves_of(tables: dict[int, pa.Table], split: float | None = 0.5) -> list[tuple[list[dict], list[dict]]]:
    """(rows at the reference, rows at the baseline) of the selection half and of the measuring half."""
    first, last = min(tables), max(tables)
    return [
        (occurrences_of(tables[last], set(half)), occurrences_of(tables[first], set(half)))
        for half in naive_split(tables[last], split, 0)
    ]


def found_by_type(sums: PromptSums, persistent: Persistent) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    ids = sums.selection.token_ids[persistent.columns].tolist()
    places = zip(persistent.rollout_ids.tolist(), persistent.positions.tolist(), strict=True)
    for v, place in zip(ids, places, strict=True):
        found.setdefault(v, []).append(place)
    return found


# Thresholds and occurrences


@pytest.mark.parametrize("split", [None, 0.5])
@pytest.mark.parametrize("tau", [0.0, 0.5, 0.8, 1.0])
def test_thresholds_are_quantiles_of_the_selection_half(store, tables, split, tau):
    now, before = halves_of(tables, split)[0]
    thresholds = find_thresholds(store, gather(store, None, None, split, 0), tau, None)
    assert (thresholds.pre, thresholds.post) == (naive_quantile(before, tau), naive_quantile(now, tau))


def test_thresholds_in_nats_are_taken_as_given(store, sums):
    assert find_thresholds(store, sums, 0.8, (0.25, 1.5)) == Thresholds(0.25, 1.5)


@pytest.mark.parametrize("split", [None, 0.5])
@pytest.mark.parametrize("nats", [(0.2, 0.4), (0.9, 0.0), (-1.0, -1.0), (9.0, 99.0)])
def test_persistent_occurrences_equal_the_oracle(store, tables, split, nats):
    sums = gather(store, None, None, split, 0)
    persistent = persistent_occurrences(store, sums, Thresholds(*nats))
    (now, before), (now_held_out, before_held_out) = halves_of(tables, split)
    expected = naive_persistent(now, before, *nats)
    assert found_by_type(sums, persistent) == expected
    assert np.all(np.diff(persistent.columns) >= 0)
    prompt_at = {(row["rollout_id"], row["position"]): row["prompt_id"] for row in now}
    selection = naive_split(tables[9], split, 0)[0]
    places = zip(persistent.rollout_ids.tolist(), persistent.positions.tolist(), strict=True)
    assert persistent.clusters.tolist() == [selection.index(prompt_at[place]) for place in places]
    held_out = naive_persistent(now_held_out, before_held_out, *nats)
    ids = sums.selection.token_ids.tolist()
    assert persistent.held_out_counts.tolist() == [len(held_out.get(v, [])) for v in ids]


@pytest.mark.parametrize("baseline", [0, 9])
@pytest.mark.parametrize("split", [None, 0.5])
def test_several_thresholds_at_once_are_each_as_one_alone(store, tables, split, baseline):
    sums = gather(store, 9, baseline, split, 0)
    ladder = quantile_thresholds(store, sums, [0.1, 0.4, 0.4, 0.95])
    assert ladder == [find_thresholds(store, sums, tau, None) for tau in (0.1, 0.4, 0.4, 0.95)]
    steps = list(persistent_at_each(store, sums, ladder))
    assert len(steps) == 4
    for thresholds, found in zip(ladder, steps, strict=True):
        alone = persistent_occurrences(store, sums, thresholds)
        for field in fields(found):
            assert getattr(found, field.name).tolist() == getattr(alone, field.name).tolist(), field.name


def test_a_kl_that_equals_its_threshold_reaches_it(tmp_path):
    """Thresholds are compared in float64: the next number above a float32 kl is out of its reach."""
    late = with_levels(random_trace(2), 0, [0.1, 0.3, 0.7])
    store = TraceStore(write_trace(tmp_path, {0: with_levels(late, 1, [0.1, 0.3, 0.7]), 9: late}), threads=1)
    sums = gather(store, None, None, None, 0)
    at = float(np.float32(0.3))
    above = float(np.nextafter(at, 1))
    now, before = ({(r["rollout_id"], r["position"]): r["kl"] for r in side} for side in rows_of(store))
    for pre, post in ((at, at), (above, at), (at, above)):
        count = sum(now[place] >= post and before[place] >= pre for place in now)
        assert len(persistent_occurrences(store, sums, Thresholds(pre, post)).columns) == count
    whole = find_thresholds(store, sums, 0.5, None)
    assert whole == Thresholds(at, at)


def rows_of(store: TraceStore) -> list[list[dict]]:
    return [occurrences_of(store.table(step).to_pyarrow()) for step in (9, 0)]


@pytest.mark.parametrize("nats", [(0.5, 0.5), (1.0, 0.2), (0.2, 1.0)])
def test_with_one_checkpoint_both_thresholds_hold_for_its_kl(store, tables, nats):
    sums = gather(store, 9, 9, None, 0)
    (now, _), _ = halves_of({9: tables[9]}, None)
    found = found_by_type(sums, persistent_occurrences(store, sums, Thresholds(*nats)))
    assert found == naive_persistent(now, now, *nats)
    quantile = find_thresholds(store, sums, 0.7, None)
    assert quantile.pre == quantile.post == naive_quantile(now, 0.7)


def test_checkpoints_of_different_rollouts_are_refused(tmp_path, tables):
    store = TraceStore(write_trace(tmp_path, {0: random_trace(77), 9: tables[9]}), threads=1)
    sums = gather(store, None, None, 0.5, 0)
    with pytest.raises(
        RocktokensError,
        match=r"^checkpoints 0 and 9 did not score the same tokens of the same rollouts, so no token can be followed: "
        r"trace both with probe = 'last' or 'first', or use stage='score'$",
    ):
        persistent_occurrences(store, sums, Thresholds(0.5, 0.5))


def test_paired_occurrences_hold_both_losses_and_their_difference(tmp_path, tables):
    """Keyed by rollout and position; an occurrence that one checkpoint did not score is no pair."""
    early = shuffled(tables[0].slice(0, 250), 3)
    store = TraceStore(write_trace(tmp_path, {0: early, 9: tables[9]}), threads=1)
    before = {(row["rollout_id"], row["position"]): row["kl"] for row in occurrences_of(early)}
    expected = {
        (row["rollout_id"], row["position"]): (row["prompt_id"], row["token_id"], row["kl"])
        for row in occurrences_of(tables[9])
        if (row["rollout_id"], row["position"]) in before
    }
    found = paired_occurrences(store, 9, 0).to_pyarrow().to_pylist()
    assert 0 < len(found) == len(expected) < len(occurrences_of(tables[9]))
    for row in found:
        place = row["rollout_id"], row["position"]
        assert (row["prompt_id"], row["token_id"], row["kl"]) == expected[place]
        assert row["kl_before"] == before[place]
        assert row["delta"] == row["kl"] - row["kl_before"]


# Groups


def test_groups_are_chosen_on_the_selection_half(sums, tables):
    now, _ = halves_of(tables)[0]
    freq, total = counted(now), summed(now)
    ids = sums.selection.token_ids
    rocks = [sorted(freq)[index] for index in (7, 2, 11, 5)]
    columns = np.searchsorted(ids, rocks)
    groups = {name: ids[some].tolist() for name, some in type_groups(sums.selection, columns, 4, seed=0).items()}
    others = {v: freq[v] for v in freq if v not in rocks}
    mean = {v: total[v] / freq[v] for v in others}
    assert groups[ROCK] == sorted(rocks)
    assert groups[HIGH_KL] == sorted(naive_ranking(mean, others, min_freq=2)[:4])
    assert groups[HIGH_KL] != sorted(naive_ranking(mean, others, min_freq=1)[:4]), "some type occurs but once"
    assert len(set(groups[RANDOM])) == 4
    assert set(groups[RANDOM]) <= {v for v in others if freq[v] >= 4}
    again = type_groups(sums.selection, columns, 4, seed=0)
    assert ids[again[RANDOM]].tolist() == groups[RANDOM]
    drawn = {tuple(type_groups(sums.selection, columns, 4, seed=seed)[RANDOM]) for seed in range(8)}
    assert len(drawn) > 1


def test_groups_are_as_large_as_the_types_allow(sums, tables):
    count = len(sums.selection.token_ids)
    all_types = type_groups(sums.selection, np.arange(count), 2, seed=0)
    assert [len(all_types[name]) for name in (ROCK, HIGH_KL, RANDOM)] == [count, 0, 0]
    none = type_groups(sums.selection, np.array([], dtype=np.int64), 2, seed=0)
    assert [len(none[name]) for name in (ROCK, HIGH_KL, RANDOM)] == [0, 0, 0]


# Report


@pytest.mark.parametrize("split", [None, 0.5])
def test_changes_equal_loops_over_paired_rows(store, tables, split):
    sums = gather(store, None, None, split, 0)
    thresholds = find_thresholds(store, sums, 0.6, None)
    persistent = persistent_occurrences(store, sums, thresholds)
    groups = type_groups(sums.selection, np.array([3, 1, 8, 12, 20]), 2, seed=4)
    records = persistence_report(sums, groups, persistent, seed=4)
    json.dumps([asdict(record) for record in records], allow_nan=False)
    halves = dict(zip(sums.halves, halves_of(tables, split), strict=False))
    assert [(each.half, each.group) for each in records] == [(half, group) for half in halves for group in groups]
    for record in records:
        now, before = halves[record.half]
        ids = set(sums.selection.token_ids[groups[record.group]].tolist())
        assert_change(record, [[row for row in side if row["token_id"] in ids] for side in (now, before)], thresholds)


def assert_change(record: GroupChange, sides: list[list[dict]], thresholds: Thresholds) -> None:
    now, before = sides
    after, start = (sum(fixed(row["kl"]) for row in side) / ONE for side in sides)
    hard = naive_persistent(now, before, thresholds.pre, thresholds.post)
    assert record.n_occurrences == len(now)
    assert record.n_types == len(counted(now))
    assert record.n_clusters == len({row["prompt_id"] for row in now})
    assert record.kl_before == pytest.approx(start / len(now), rel=1e-12)
    assert record.kl_after == pytest.approx(after / len(now), rel=1e-12)
    assert record.delta == pytest.approx((after - start) / len(now), rel=1e-9)
    assert record.relative == pytest.approx((after - start) / start, rel=1e-9)
    assert record.persistent_share == sum(map(len, hard.values())) / len(now)
    assert record.delta_interval[0] <= record.delta <= record.delta_interval[1]


def test_a_group_that_is_absent_has_no_change(sums, store):
    groups = {ROCK: np.array([], dtype=np.int64)}
    persistent = persistent_occurrences(store, sums, Thresholds(0.5, 0.5))
    for record in persistence_report(sums, groups, persistent, seed=0):
        assert record.n_occurrences == record.n_types == 0
        assert record.delta is record.persistent_share is record.wilcoxon_p is None


def test_without_persistent_occurrences_there_is_no_share_of_them(sums):
    records = persistence_report(sums, {ROCK: np.array([1, 2])}, None, seed=0)
    assert [(each.half, each.persistent_share) for each in records] == [(SELECTION, None), (HELD_OUT, None)]
    assert all(each.delta is not None for each in records)


def test_without_paired_checkpoints_there_is_no_report(tmp_path, tables):
    swapped = with_column(tables[9], "rollout_id", tables[9]["rollout_id"].to_numpy() + 1)
    for run, others in (("one", {}), ("unpaired", {0: swapped})):
        store = TraceStore(write_trace(tmp_path / run, {**others, 9: tables[9]}), threads=1)
        assert persistence_report(gather(store, None, None, 0.5, 0), {ROCK: np.array([1])}, None, seed=0) == []
