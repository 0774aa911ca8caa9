"""Every row of the sensitivity table is what a search with that setting finds, whatever the trace is like."""

import json
from dataclasses import asdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sample_oracle import naive_jaccard
from trace_oracle import CONTEXT, random_embeddings, random_trace, rescored, with_column, write_trace

from rocktokens.rocks.analysis import ETA_FACTORS, PARAMETERS, other_gammas, sensitivity_table
from rocktokens.rocks.encoders import embedding_encoder
from rocktokens.rocks.find import find_rocks, search_traces
from rocktokens.rocks.records import SensitivityRow
from rocktokens.rocks.search import Criterion, SearchResult, search
from rocktokens.traces.store import TraceStore

EMBEDDINGS = random_embeddings(0, 25, 3)
SETTINGS = {**CONTEXT, "k": 6, "window": 2, "tau": 0.4, "gamma": 0.5, "eta": 0.2, "seed": 2}


@pytest.fixture(scope="module")
def tables():
    late = random_trace(41, prompts=24, vocabulary=25)
    return {0: rescored(late, 1), 9: late}


@pytest.fixture(scope="module")
def store(tmp_path_factory, tables):
    return TraceStore(write_trace(tmp_path_factory.mktemp("run"), tables), threads=1)


def table_of(store: TraceStore, **options: Any) -> tuple[SearchResult, list[SensitivityRow]]:
    criterion = Criterion(**options)
    result = search_traces(store, criterion, embeddings=EMBEDDINGS, gammas=other_gammas(criterion.gamma))
    records = sensitivity_table(store, result)
    json.dumps([asdict(record) for record in records], allow_nan=False)
    return result, records


def values_of(records: list[SensitivityRow]) -> dict[str, list[Any]]:
    """Values by parameter, in the order of the table."""
    values: dict[str, list[Any]] = {}
    for record in records:
        values.setdefault(record.parameter, []).append(record.value)
    return values


def assert_found_again(store: TraceStore, records: list[SensitivityRow], **options: Any) -> None:
    found = set(find_rocks(store, embeddings=EMBEDDINGS, **options).ids.tolist())
    for record in records:
        direct = find_rocks(store, embeddings=EMBEDDINGS, **{**options, record.parameter: record.value})
        ids = set(direct.ids.tolist())
        assert record.entered == sorted(ids - found), record
        assert record.left == sorted(found - ids), record
        assert record.jaccard == (naive_jaccard(list(ids), list(found)) if ids | found else None)
        assert record.exact is True


def test_every_row_is_a_search_with_that_setting(store):
    _, records = table_of(store, **SETTINGS)
    assert values_of(records) == {
        "stage": ["bound", "context", "score"],
        "require": ["any", "stopped", "stuck"],
        "min_prompts": [1, 10],
        "joint": [False, True],
        "exclude_top_freq": [0, 5],
        "window": [1, 2, 4],
        "gamma": [0.4, 0.45, 0.5, 0.55, 0.6],
        "eta": sorted([0.2, *(round(0.2 * factor, 4) for factor in ETA_FACTORS)]),
        "tau": [0.35, 0.4, 0.45, 0.5],
    }
    defaults = [record for record in records if record.default]
    assert [record.parameter for record in defaults] == list(PARAMETERS)
    assert {(record.jaccard, *record.entered, *record.left) for record in defaults} == {(1.0,)}
    assert len({record.jaccard for record in records}) > 3
    assert_found_again(store, [record for record in records if not record.default], **SETTINGS)


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({"exclude_top_freq": 4}, ("exclude_top_freq", "joint", "stage")),
        ({"min_score": 0.7}, ("gamma", "joint")),
        ({"joint": True, "split": None}, ("joint", "window")),
        ({"tau_nats": (0.1, 0.3)}, ("eta", "window")),
        ({"reference": 9, "baseline": 9}, ("tau", "stage")),
    ],
)
def test_the_other_parameters_stay_as_they_are(store, options, parameters):
    options = {**SETTINGS, **options}
    result, records = table_of(store, **options)
    for name, values in values_of(records).items():
        defaults = [record.value for record in records if record.parameter == name and record.default]
        assert defaults == [getattr(result.criterion, name)]
        assert len(set(values)) == len(values) > 1
    chosen = [record for record in records if record.parameter in parameters]
    assert_found_again(store, [record for record in chosen if not record.default], **options)


def test_what_has_no_meaning_is_not_varied(store):
    options = {"stage": "score", "k": 5, "min_prompts": 4}
    _, records = table_of(store, **options)
    assert values_of(records) == {
        "stage": ["bound", "score"],
        "require": ["any", "stopped", "stuck"],
        "min_prompts": [1, 4, 10],
        "joint": [False, True],
        "exclude_top_freq": [0, 5],
    }
    assert_found_again(store, records, **options)
    assert "tau" not in values_of(table_of(store, **SETTINGS, tau_nats=(0.1, 0.3))[1])
    assert not {"joint", "require"} & values_of(table_of(store, **SETTINGS, reference=9, baseline=9)[1]).keys()
    own = embedding_encoder(store.table(9), EMBEDDINGS, 2)
    encoder = SimpleNamespace(at_once=own.at_once, look_up=own.look_up, encode=own.encode)
    fixed = values_of(sensitivity_table(store, search(store, Criterion(**SETTINGS), encoder)))
    assert "window" not in fixed
    assert fixed["gamma"] == [0.5]


def test_a_number_of_rocks_that_was_found_is_kept(store):
    options = {**SETTINGS, "k": "auto", "tau": 0.1, "gamma": 0.2}
    result, records = table_of(store, **options)
    chosen = [record for record in records if record.parameter in ("eta", "joint") and not record.default]
    assert_found_again(store, chosen, **{**options, "k": result.k})


def test_values_stay_within_their_ranges(store):
    _, records = table_of(store, **{**SETTINGS, "gamma": 0.97, "eta": 1e-4, "tau": 0.95, "window": 1})
    values = values_of(records)
    assert values["gamma"] == [0.87, 0.92, 0.97]
    assert min(values["eta"]) == 1e-4 < max(values["eta"])
    assert values["tau"] == [0.9, 0.95]
    assert values["window"] == [1, 2]
    _, records = table_of(store, **{**SETTINGS, "gamma": 0.05, "eta": 1.0, "tau": 0.0})
    values = values_of(records)
    assert values["gamma"] == [0.05, 0.1, 0.15]
    assert min(values["eta"]) < 1.0 == max(values["eta"])
    assert values["tau"] == [0.0, 0.05, 0.1]


def test_sampled_contexts_are_not_called_exact(store):
    result, records = table_of(store, **SETTINGS, max_pairs=300)
    assert result.context is not None
    assert not result.context.exact.all()
    assert {record.exact for record in records if record.parameter in ("gamma", "eta", "tau")} == {False}


# Degenerate traces


def zero_kl(tables: dict[int, pa.Table]) -> dict[int, pa.Table]:
    return {step: with_column(table, "kl", np.zeros(len(table))) for step, table in tables.items()}


def one_type(tables: dict[int, pa.Table]) -> dict[int, pa.Table]:
    return {step: with_column(table, "token_id", np.full(len(table), 7)) for step, table in tables.items()}


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (zero_kl, {}),
        (zero_kl, {"stage": "score"}),
        (one_type, {}),
        (lambda tables: {9: tables[9]}, {}),
        (lambda tables: {0: random_trace(77), 9: tables[9]}, {"stage": "score"}),
        (lambda tables: {step: table.slice(0, 9) for step, table in tables.items()}, {"split": None}),
        (lambda tables: tables, {"min_freq": 10_000}),
        (lambda tables: tables, {"min_score": 1e6}),
    ],
)
def test_degenerate_traces_have_a_table_too(tmp_path, tables, change, options):
    store = TraceStore(write_trace(tmp_path, change(tables)), threads=1)
    options = {**SETTINGS, **options}
    result, records = table_of(store, **options)
    places = [(PARAMETERS.index(record.parameter), record.value) for record in records]
    assert all(one < two for one, two in pairwise(places))
    for record in records:
        assert not record.default or record.jaccard == (1.0 if len(result.columns) else None)
    chosen = [record for record in records if record.parameter in ("exclude_top_freq", "joint", "tau")]
    assert_found_again(store, [record for record in chosen if not record.default][:2], **options)
