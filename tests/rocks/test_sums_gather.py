"""PromptSums is the sums of the rows, prompt by prompt and half by half; pairs are told from strangers."""

from dataclasses import fields

import numpy as np
import pyarrow as pa
import pytest
from trace_oracle import (
    counted,
    naive_split,
    occurrences_of,
    random_trace,
    rescored,
    shuffled,
    summed,
    with_column,
    write_trace,
)

from rocktokens.rocks import sums as sums_module
from rocktokens.rocks.selectors import Sample
from rocktokens.rocks.sums import HELD_OUT, NOT_SPLIT, SELECTION, checkpoint_samples, gather, split_prompts
from rocktokens.traces.store import TraceStore


@pytest.fixture(scope="module")
def tables():
    late = random_trace(13, prompts=15, vocabulary=30)
    return {0: shuffled(rescored(late, 1), 1), 5: shuffled(rescored(late, 2), 2), 9: late}


@pytest.fixture(scope="module")
def store(tmp_path_factory, tables):
    return TraceStore(write_trace(tmp_path_factory.mktemp("run"), tables, rows_per_part=80), threads=1)


def assert_sums(sample: Sample, column: str, rows: list[dict], clusters: dict[str, int], score: str = "kl") -> None:
    """Every cell of a matrix is the sum over the rows of its prompts and type."""
    matrix = getattr(sample, column).toarray()
    for number in range(sample.n_clusters):
        some = [row for row in rows if clusters[row["prompt_id"]] == number]
        sums = counted(some) if column == "freq" else summed(some, score)
        assert dict(zip(sample.token_ids.tolist(), matrix[number].tolist(), strict=True)) == {
            v: sums.get(v, 0) for v in sample.token_ids.tolist()
        }


def in_order(prompts: list[str]) -> dict[str, int]:
    return {prompt: number for number, prompt in enumerate(prompts)}


# Sums


@pytest.mark.parametrize(("split", "seed"), [(None, 0), (1, 0), (0.5, 0), (0.2, 7)])
def test_every_cell_equals_the_rows(store, tables, split, seed):
    sums = gather(store, None, 0, split, seed)
    halves = dict(zip(("selection", "measuring"), naive_split(tables[9], split, seed), strict=True))
    assert sums.selection.token_ids.tolist() == sorted(counted(occurrences_of(tables[9])))
    for half, prompts in halves.items():
        sample, rows = getattr(sums, half), occurrences_of(tables[9], set(prompts))
        for column, score in (("freq", ""), ("kl", "kl"), ("grad_norm", "grad_norm")):
            assert_sums(sample, column, rows, in_order(prompts), score)
        assert_sums(sample, "kl_before", occurrences_of(tables[0], set(prompts)), in_order(prompts))
    assert (sums.reference, sums.baseline, sums.paired) == (9, 0, True)
    assert sums.prompts.n_measuring == len(halves["measuring"])
    assert sums.is_split == (split not in (None, 1))


def test_halves_are_called_what_they_are(store):
    split, whole = gather(store, None, None, 0.5, 0), gather(store, None, None, None, 0)
    assert split.halves == {SELECTION: split.selection, HELD_OUT: split.measuring}
    assert whole.halves == {NOT_SPLIT: whole.selection}


def test_one_checkpoint_is_no_pair(store):
    sums = gather(store, 9, 9, 0.5, 0)
    assert not sums.paired
    assert sums.selection.kl_before is None


# Clusters


def test_many_prompts_are_pooled_at_random_into_clusters_of_one_half(store, tables, monkeypatch):
    alone = gather(store, None, None, 0.6, 3)
    monkeypatch.setattr(sums_module, "MOST_PROMPTS", 5)
    monkeypatch.setattr(sums_module, "POOLED_CLUSTERS", 4)
    pooled = gather(store, None, None, 0.6, 3)
    selection, measuring = naive_split(tables[9], 0.6, 3)
    clusters = dict(zip(pooled.clusters["prompt_id"].to_pylist(), pooled.clusters["cluster"].to_pylist(), strict=True))
    assert {clusters[prompt] for prompt in selection} == {0, 1, 2, 3}
    assert {clusters[prompt] for prompt in measuring} == {4, 5, 6, 7}
    sizes = np.bincount(list(clusters.values()))
    assert sizes[:4].sum() == 9
    assert np.ptp(sizes[:4]) <= 1
    assert np.ptp(sizes[4:]) <= 1
    assert [clusters[prompt] for prompt in selection] != [number % 4 for number in range(9)]
    for half, prompts, first in (("selection", selection, 0), ("measuring", measuring, 4)):
        sample, rows = getattr(pooled, half), occurrences_of(tables[9], set(prompts))
        assert_sums(sample, "kl", rows, {prompt: clusters[prompt] - first for prompt in prompts})
        for name in ("freq", "kl", "kl_before", "grad_norm"):
            assert sample.totals(name).tolist() == getattr(alone, half).totals(name).tolist()
    again, other = gather(store, None, None, 0.6, 3), gather(store, None, None, 0.6, 4)
    assert again.clusters.equals(pooled.clusters)
    assert not other.clusters.equals(pooled.clusters)


def test_a_cluster_of_one_prompt_each_up_to_the_limit(store, monkeypatch):
    monkeypatch.setattr(sums_module, "POOLED_CLUSTERS", 4)
    for most, clusters in ((15, 15), (14, 4)):
        monkeypatch.setattr(sums_module, "MOST_PROMPTS", most)
        numbers = gather(store, None, None, None, 0).clusters["cluster"].to_pylist()
        assert sorted(set(numbers)) == list(range(clusters))


# Pairs


def one_swap(table: pa.Table, column: str, across_prompts: bool) -> pa.Table:
    """Two scored rows of different tokens exchange a value."""
    rows = table.to_pylist()
    first = next(i for i, row in enumerate(rows) if row["kl"] is not None)
    second = next(
        i
        for i, row in enumerate(rows)
        if row["kl"] is not None
        and row["token_id"] != rows[first]["token_id"]
        and (row["prompt_id"] != rows[first]["prompt_id"]) is across_prompts
    )
    values = table[column].to_pylist()
    values[first], values[second] = values[second], values[first]
    return with_column(table, column, values)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: one_swap(table, "token_id", across_prompts=True),
        lambda table: one_swap(table, "token_id", across_prompts=False),
        lambda table: one_swap(table, "position", across_prompts=False),
        lambda table: table.slice(3),
        lambda table: with_column(table, "rollout_id", table["rollout_id"].to_numpy() + 1),
        lambda table: random_trace(77, prompts=15, vocabulary=40),
    ],
)
def test_other_occurrences_are_no_pair(tmp_path, tables, change):
    """In the same number of rows or not, and whether or not they add up to the same per type."""
    other = change(tables[9])
    sums = gather(TraceStore(write_trace(tmp_path, {0: other, 9: tables[9]}), threads=1), None, None, 0.5, 0)
    assert not sums.paired
    selection, _ = naive_split(tables[9], 0.5, 0)
    assert_sums(sums.selection, "kl_before", occurrences_of(other, set(selection)), in_order(selection))


# Other checkpoints


@pytest.mark.parametrize("split", [None, 0.4])
def test_another_checkpoint_has_its_own_kl_over_the_same_occurrences(store, tables, split):
    sums = gather(store, None, None, split, 2)
    samples = checkpoint_samples(store, sums, 5)
    direct = gather(store, 5, 5, split, 2)
    assert samples.keys() == sums.halves.keys()
    for half, sample in samples.items():
        for field in fields(Sample):
            found, expected = (getattr(each, field.name) for each in (sample, direct.halves[half]))
            assert (found is None) == (expected is None), field.name
            if found is not None and field.name not in ("token_ids", "paired"):
                assert abs(found - expected).sum() == 0, field.name
    assert checkpoint_samples(store, sums, 9) == sums.halves


def test_a_checkpoint_that_scored_other_occurrences_has_no_samples(tmp_path, tables):
    others = {0: tables[0], 3: tables[5].slice(0, 200), 4: random_trace(77, prompts=15), 9: tables[9]}
    store = TraceStore(write_trace(tmp_path, others), threads=1)
    sums = gather(store, None, None, 0.5, 0)
    assert {step: bool(checkpoint_samples(store, sums, step)) for step in others} == {
        0: True,
        3: False,
        4: False,
        9: True,
    }


# Split


def test_split_is_seeded_disjoint_and_complete():
    prompts = sorted(f"q{index}" for index in range(25))
    split = split_prompts(prompts, 0.4, seed=3)
    assert split.selection is not None
    assert split.measuring is not None
    assert len(split.selection) == 10
    assert split.n_measuring == len(split.measuring) == 15
    assert sorted([*split.selection, *split.measuring]) == prompts
    assert split == split_prompts(prompts, 0.4, seed=3)
    assert split != split_prompts(prompts, 0.4, seed=4)
    order = np.random.Generator(np.random.PCG64(3)).permutation(25)
    assert split.selection == sorted(prompts[index] for index in order[:10])


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_neither_side_of_a_split_is_empty(share):
    split = split_prompts(["a", "b", "c"], share, seed=0)
    assert split.selection
    assert split.measuring
