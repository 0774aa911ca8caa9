"""What could pass for a rock and is none: types without a score, of one prompt, or passed over by the search."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from sample_oracle import random_occurrences
from trace_oracle import CONTEXT, random_embeddings, random_trace, rescored, with_column, write_trace

from rocktokens.config import POSITIVE
from rocktokens.rocks import search as selection
from rocktokens.rocks.analysis import sensitivity_table
from rocktokens.rocks.find import find_rocks, rock_set, search_traces
from rocktokens.rocks.ranking import Rules, rank_types
from rocktokens.rocks.search import Criterion, SearchResult
from rocktokens.rocks.selectors import summed_kl
from rocktokens.rocks.sums import checkpoint_samples, gather
from rocktokens.rocks.uncertainty import score_uncertainty
from rocktokens.traces.store import TraceStore

EMBEDDINGS = random_embeddings(0, 60, 2)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TraceStore:
    late = random_trace(5, prompts=20, vocabulary=60, length=40)
    tables = {0: rescored(late, 1), 4: rescored(late, 2), 9: late}
    return TraceStore(write_trace(tmp_path_factory.mktemp("run"), tables))


def found(store: TraceStore, **options) -> SearchResult:
    criterion = Criterion(**{**CONTEXT, "tau": 0.2, "gamma": 0.3, "eta": 0.1, "window": 2, "split": None, **options})
    return search_traces(store, criterion, embeddings=EMBEDDINGS)


def test_a_score_below_the_least_is_not_ranked():
    score, freq = np.array([0.0, 3.0, 1.0, 0.0]), np.array([9, 9, 9, 9])
    assert rank_types(score, freq > 1, Rules(4)).tolist() == [1, 2, 0, 3]
    assert rank_types(score, freq > 1, Rules(4, min_score=POSITIVE)).tolist() == [1, 2]
    assert rank_types(score, freq > 1, Rules(4, min_score=1.5)).tolist() == [1]


def test_types_without_a_score_fill_up_k_but_are_never_sure(store):
    options = {"tau": 0.95, "gamma": 0.999, "eta": 1.0, "k": 20}
    whole = rock_set(store, found(store, **options))
    empty = [token for token in whole.tokens if token.score_ctx == 0]
    assert empty and whole.summary["n_score_zero"] == len(empty)
    assert {token.p_in_top_k for token in empty} == {0.0}
    scored = rock_set(store, found(store, **options, min_score=POSITIVE))
    assert scored.tokens == [token for token in whole.tokens if token.score_ctx]
    assert scored.summary["n_score_zero"] == 0


@pytest.mark.parametrize("least", [0.0, None])
def test_what_rounding_took_below_zero_does_not_fill_up_k(tmp_path, least):
    late = random_trace(5, prompts=20, vocabulary=8, length=40)
    ids = late["token_id"].to_numpy()
    tiny = np.where(ids == 3, -(2.0**-20), np.where(ids == 4, 0.0, 1.0)).astype(np.float32)
    table = with_column(late, "kl", pa.array(tiny, mask=late["kl"].is_null().to_numpy()))
    result = found(TraceStore(write_trace(tmp_path, {9: table})), stage="score", k=99, min_freq=1, min_score=least)
    assert result.sums.selection.token_ids[result.columns][-1] == 4
    assert set(result.sums.selection.token_ids) - set(result.sums.selection.token_ids[result.columns]) == {3}


def test_a_score_of_zero_in_a_replicate_is_not_in_the_top():
    sample = random_occurrences(3).sample()
    silent = replace(sample, kl=sample.kl * 0)
    assert not score_uncertainty(silent, summed_kl, Rules(4), 20).p_in_top_k.any()
    assert score_uncertainty(sample, summed_kl, Rules(4), 20).p_in_top_k.sum() == pytest.approx(4)


def test_the_interval_is_of_the_score_that_is_given(store):
    for token in find_rocks(store, stage="score", joint=True, split=None, k=12).tokens:
        low, high = token.score_interval or (0, 0)
        assert low <= token.score <= high


def test_rocks_know_in_how_many_prompts_they_occur(store):
    rocks = find_rocks(store, stage="score", split=None, k=60)
    rows = store.table(9).to_pyarrow().to_pylist()
    for token in rocks.tokens:
        prompts = {row["prompt_id"] for row in rows if row["token_id"] == token.id and row["kl"] is not None}
        assert token.n_prompts == len(prompts)


@pytest.fixture
def few_at_a_time(monkeypatch) -> None:
    """The search compares four types at first where there are too many pairs."""
    monkeypatch.setattr(selection, "MANY", 4)
    monkeypatch.setattr(selection, "PER_ROCK", 2)


def pairs_of_the_first(result: SearchResult, count: int) -> int:
    number = np.sort(result.n_persistent)[::-1][:count]
    return int((number * (number - 1)).sum())


def test_auto_k_goes_on_until_all_it_takes_were_compared(store, monkeypatch):
    """One type is compared at first; the crossing lies beyond what that leaves."""
    whole = found(store, k="auto")
    asked: list[int] = []
    compare = selection.compare_contexts
    monkeypatch.setattr(selection, "MANY", 1)
    monkeypatch.setattr(selection, "PER_ROCK", 1)
    monkeypatch.setattr(selection, "compare_contexts", lambda *given: asked.append(given[3]) or compare(*given))
    limited = found(store, k="auto", max_pairs=pairs_of_the_first(whole, 60) - 1)
    assert asked[0] == 1 < limited.k
    assert asked[-1] >= limited.k or limited.is_exact


@pytest.mark.usefixtures("few_at_a_time")
def test_after_types_were_passed_over_no_row_claims_to_be_exact(store):
    whole = found(store, k=2)
    part = found(store, k=2, max_pairs=pairs_of_the_first(whole, 60) - 1)
    assert np.isnan(part.consistency).any() and not part.is_exact and whole.is_exact
    assert part.columns.tolist() == whole.columns.tolist()
    assert not any(row.exact for row in sensitivity_table(store, part) if row.parameter == "stage")
    assert all(row.exact for row in sensitivity_table(store, whole) if row.parameter == "stage")


def test_a_checkpoint_that_exchanged_positions_is_not_the_same(tmp_path):
    """As many occurrences of every type in every prompt, but not the same ones."""
    late = random_trace(5, prompts=6, samples=2, vocabulary=3, length=20)
    whole = late.filter(pa.compute.is_valid(late["kl"]))
    moved = with_column(whole, "position", np.asarray(whole["position"]) + 100)
    store = TraceStore(write_trace(tmp_path, {0: whole, 5: moved, 9: whole}))
    sums = gather(store, None, None, 0.5, 0)
    assert sums.paired
    assert checkpoint_samples(store, sums, 0) and not checkpoint_samples(store, sums, 5)
