"""Two searches compared: a run agrees with itself, indices equal sets counted by hand, vocabularies must agree."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from trace_oracle import random_trace, rescored, with_column, write_trace

from rocktokens.errors import TokenizerMismatchError
from rocktokens.rocks.compare import _chance, compare_results
from rocktokens.rocks.search import Criterion, SearchResult, search
from rocktokens.run_dir import RunDir
from rocktokens.traces.store import TraceStore

CRITERION = Criterion(k=8, stage="score", require="any", min_prompts=1, split=None)


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> tuple[TraceStore, TraceStore]:
    late = random_trace(5, vocabulary=40)
    other = random_trace(6, prompts=20, vocabulary=40)
    tables = ({0: rescored(late, 1), 9: late}, {0: rescored(other, 2), 9: other})
    first, second = (write_trace(tmp_path_factory.mktemp("run"), table) for table in tables)
    return TraceStore(first), TraceStore(second)


def both(stores: tuple[TraceStore, TraceStore], criterion: Criterion = CRITERION) -> tuple[SearchResult, SearchResult]:
    first, second = (search(store, criterion, None) for store in stores)
    return first, second


def ids(result: SearchResult) -> list[int]:
    return result.sums.selection.token_ids[result.columns].tolist()


def test_a_run_agrees_with_itself(stores):
    store = stores[0]
    result = search(store, CRITERION, None)
    record = compare_results((store, store), (result, result))
    assert (record.jaccard, record.spearman) == (1.0, pytest.approx(1.0))
    assert record.only_a == record.only_b == []
    assert all(moved.kl_share_a == moved.kl_share_b for moved in record.moved)


def test_indices_and_moves_equal_what_is_counted_by_hand(stores):
    results = both(stores)
    record = compare_results(stores, results)
    one, two = map(ids, results)
    assert record.jaccard == len(set(one) & set(two)) / len(set(one) | set(two)) < 1
    assert record.only_a == sorted(set(one) - set(two)) and record.only_b == sorted(set(two) - set(one))
    assert {moved.id for moved in record.moved} == set(one) | set(two)
    for moved in record.moved:
        for side, result, rocks in zip("ab", results, (one, two), strict=True):
            sample = result.sums.selection
            at = np.flatnonzero(sample.token_ids == moved.id)
            assert getattr(moved, f"rank_{side}") == (rocks.index(moved.id) + 1 if moved.id in rocks else None)
            kl, freq = sample.totals("kl"), sample.totals("freq")
            assert getattr(moved, f"kl_share_{side}") == pytest.approx(kl[at].sum() / kl.sum(), rel=1e-12)
            assert getattr(moved, f"token_share_{side}") == pytest.approx(freq[at].sum() / freq.sum(), rel=1e-12)
    gaps = [abs(moved.kl_share_b - moved.kl_share_a) for moved in record.moved]
    assert gaps == sorted(gaps, reverse=True)


def test_exchanging_the_sides_exchanges_the_record(stores):
    first, second = both(stores)
    one, two = compare_results(stores, (first, second)), compare_results(stores[::-1], (second, first))
    assert one.jaccard == two.jaccard and one.spearman == two.spearman
    assert (one.only_a, one.jaccard_within) == (two.only_b, two.jaccard_within[::-1])


def test_two_halves_of_one_run_agree_as_well_as_they_do(stores, tmp_path):
    """One type that every prompt finds hard is found by any half; noise alone is not."""
    noise = compare_results(stores, both(stores)).jaccard_within
    assert all(value is not None and 0 < value < 1 for value in noise)
    table = random_trace(1, prompts=30, samples=1, vocabulary=4, length=40)
    store = TraceStore(write_trace(tmp_path, {0: with_column(table, "kl", (np.asarray(table["token_id"]) == 0) * 1.0)}))
    result = search(store, replace(CRITERION, k=1), None)
    assert compare_results((store, store), (result, result)).jaccard_within == [1.0, 1.0]


@pytest.mark.parametrize(("first", "second", "types"), [(1, 1, 3), (2, 2, 4), (2, 3, 5)])
def test_chance_is_near_the_mean_over_all_sets(first: int, second: int, types: int):
    """The index at the mean overlap; the mean of the index itself differs a little, as it is convex."""
    fixed = set(range(first))
    overlaps = [len(fixed & set(other)) for other in combinations(range(types), second)]
    mean = np.mean(overlaps)
    assert _chance(first, second, types) == pytest.approx(mean / (first + second - mean))


def test_chance_needs_enough_types():
    assert _chance(3, 3, 2) is None
    assert _chance(0, 0, 0) is None


def test_another_vocabulary_is_refused(stores, tmp_path):
    other = write_trace(tmp_path, {0: random_trace(1), 9: random_trace(1)})
    RunDir(other).update_manifest(tokenizer_sha256="f" * 64)
    store = TraceStore(other)
    results = search(stores[0], CRITERION, None), search(store, CRITERION, None)
    with pytest.raises(TokenizerMismatchError, match=r"have different tokenizers .* compare runs of one vocabulary"):
        compare_results((stores[0], store), results)
