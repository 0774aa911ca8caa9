"""Each part of an analysis equals loops over rows or the direct call; degenerate traces give JSON too."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from trace_oracle import (
    CONTEXT,
    counted,
    naive_coverage,
    naive_search,
    naive_split,
    occurrences_of,
    random_embeddings,
    random_trace,
    rescored,
    rollouts_of,
    summed,
    with_column,
    write_trace,
)

from rocktokens.errors import ControlMatchError
from rocktokens.rocks.analysis import OTHER, analyse, other_gammas, sensitivity_table
from rocktokens.rocks.controls import match_controls
from rocktokens.rocks.find import find_rocks, rock_set, search_traces
from rocktokens.rocks.persistence import HIGH_KL, RANDOM, ROCK
from rocktokens.rocks.records import FindRecord
from rocktokens.rocks.search import Criterion
from rocktokens.rocks.sums import HELD_OUT, SELECTION
from rocktokens.traces.store import TraceStore

ONE = 2**24
EMBEDDINGS = random_embeddings(0, 40, 3)
SETTINGS = {**CONTEXT, "k": 6, "window": 2, "tau": 0.4, "gamma": 0.5, "eta": 0.2, "seed": 2}
PARTS = {
    "schema_version",
    "criterion",
    "source",
    "funnel",
    "persistence",
    "trajectory",
    "cutoff",
    "sample_size",
    "selectors",
    "sensitivity",
    "categories",
    "positions",
    "controls",
}


def analysis_of(store: TraceStore, **options: Any) -> FindRecord:
    criterion = Criterion(**options)
    result = search_traces(store, criterion, embeddings=EMBEDDINGS, gammas=other_gammas(criterion.gamma))
    found = analyse(store, result, rock_set(store, result))
    assert found.to_record().keys() == PARTS
    with TemporaryDirectory() as folder:
        path = Path(folder) / "find.json"
        found.save(path)
        assert path.read_text() == json.dumps(found.to_record(), sort_keys=True, ensure_ascii=False) + "\n"
        assert FindRecord.load(path) == found
    return found


@pytest.fixture(scope="module")
def tables():
    late = random_trace(51, prompts=24, vocabulary=40)
    return {0: rescored(late, 1), 4: random_trace(77), 5: rescored(late, 2), 9: late}


@pytest.fixture(scope="module")
def store(tmp_path_factory, tables):
    return TraceStore(write_trace(tmp_path_factory.mktemp("run"), tables), threads=1)


@pytest.fixture(scope="module")
def rocks(store):
    return find_rocks(store, embeddings=EMBEDDINGS, **SETTINGS)


@pytest.fixture(scope="module")
def naive(tables):
    options = {name: value for name, value in SETTINGS.items() if name != "k"}
    return naive_search(tables, EMBEDDINGS, **options)


@pytest.fixture(scope="module")
def analysis(store):
    return analysis_of(store, **SETTINGS)


@pytest.fixture(scope="module")
def groups(analysis, naive):
    """Ids by group, as far as the funnel shows them."""
    funnel = analysis.funnel
    pairs = list(zip(funnel.token_id, funnel.group, strict=True))
    return {name: [v for v, group in pairs if group == name] for name in (ROCK, HIGH_KL, OTHER)}


def halves_of(tables: dict[int, pa.Table], step: int) -> dict[str, list[dict]]:
    selection, measuring = naive_split(tables[9], 0.5, SETTINGS["seed"])
    return {
        SELECTION: occurrences_of(tables[step], set(selection)),
        HELD_OUT: occurrences_of(tables[step], set(measuring)),
    }


# Parts


def test_an_analysis_says_what_it_is_of(analysis, rocks):
    assert (analysis.criterion, analysis.source) == (rocks.criterion, rocks.source)


def test_the_funnel_shows_every_type_of_the_selection_half(analysis, naive, rocks):
    funnel = analysis.funnel
    assert funnel.token_id == sorted(naive.freq)
    assert funnel.freq == [naive.freq[v] for v in sorted(naive.freq)]
    assert funnel.mean_kl == pytest.approx(
        [float(naive.score[v] / naive.freq[v]) for v in sorted(naive.freq)], rel=1e-12
    )
    assert funnel.text == [f"<{v}>" for v in funnel.token_id]
    assert set(funnel.category) == {"other"}
    rank_of = {token.id: token.rank for token in rocks.tokens}
    assert funnel.rank == [rank_of.get(v) for v in funnel.token_id]
    for v, ccr in zip(funnel.token_id, funnel.ccr, strict=True):
        assert ccr == pytest.approx(float(naive.ccr(v)), rel=1e-12)
    assert max(funnel.ccr) > 0


def test_contexts_that_were_not_compared_have_no_ccr(store):
    options = {**SETTINGS, "min_freq": 6}
    funnel = analysis_of(store, **options).funnel
    ccr_of = dict(zip(funnel.token_id, funnel.ccr, strict=True))
    naive_options = {name: value for name, value in options.items() if name != "k"}
    naive = naive_search({step: store.table(step).to_pyarrow() for step in (0, 9)}, EMBEDDINGS, **naive_options)
    unknown = {v for v in naive.freq if v not in naive.ranking and len(naive.persistent.get(v, [])) > 1}
    assert unknown
    assert {v for v, ccr in ccr_of.items() if ccr is None} == unknown


def test_groups_are_rocks_and_as_many_others_with_the_highest_mean(groups, naive, rocks):
    assert groups[ROCK] == sorted(rocks.ids.tolist())
    others = sorted(set(groups[HIGH_KL]) | set(groups[OTHER]), key=lambda v: (-naive.score[v] / naive.freq[v], v))
    assert groups[HIGH_KL] == sorted([v for v in others if naive.freq[v] >= 2][:6])


def test_the_trajectory_follows_each_group_over_the_checkpoints_that_scored_the_same(analysis, tables, groups):
    records = analysis.trajectory
    assert {record.checkpoint for record in records} == {0, 5, 9}, "4 replayed other rollouts"
    assert len(records) == 3 * 2 * 3
    assert {record.group for record in records} == {ROCK, HIGH_KL, RANDOM}
    for record in records:
        if record.group == RANDOM:
            continue
        rows = halves_of(tables, record.checkpoint)[record.half]
        hits = [row for row in rows if row["token_id"] in groups[record.group]]
        assert record.mean_kl == pytest.approx(sum(summed(hits).values()) / ONE / len(hits), rel=1e-12)
        assert record.low < record.mean_kl < record.high


def test_persistence_and_trajectory_agree_on_both_ends(analysis):
    ends = {(each.checkpoint, each.half, each.group): each.mean_kl for each in analysis.trajectory}
    assert len(analysis.persistence) == 6
    for record in analysis.persistence:
        place = record.half, record.group
        assert (record.kl_before, record.kl_after) == (ends[0, *place], ends[9, *place])


def test_the_cut_off_is_that_of_the_search(analysis, store, naive):
    cutoff = analysis.cutoff
    positive = [v for v in naive.ranking if naive.ranks_by[v] > 0]
    assert [record.k for record in cutoff.curve] == list(range(1, len(positive) + 1))
    assert [record.coverage for record in cutoff.curve] == list(naive_coverage(positive, naive.rows))
    assert cutoff.k == 6
    automatic = find_rocks(store, embeddings=EMBEDDINGS, **{**SETTINGS, "k": "auto"})
    at = cutoff.curve[automatic.summary["k"] - 1]
    assert (cutoff.auto.k, cutoff.auto.coverage, cutoff.auto.stability) == (at.k, at.coverage, at.stability)


def test_categories_and_positions_are_measured_on_the_held_out_half(analysis, tables, rocks):
    rows = halves_of(tables, 9)[HELD_OUT]
    hits = [row for row in rows if row["token_id"] in rocks.ids]
    (category,) = analysis.categories
    assert (category.n_types, category.n_rock_types) == (len(counted(rows)), len(counted(hits)))
    assert category.rock_token_share == rocks.summary["token_share"]
    assert category.rock_kl_share == rocks.summary["kl_share"]
    positions = analysis.positions
    assert (positions.n_occurrences, positions.n_rock_occurrences) == (len(rows), len(hits))
    assert positions.n_rollouts >= len(rollouts_of(rows))


def test_sensitivity_and_selectors_are_of_the_same_search(analysis, store):
    criterion = Criterion(**SETTINGS)
    result = search_traces(store, criterion, embeddings=EMBEDDINGS, gammas=other_gammas(criterion.gamma))
    table = sensitivity_table(store, result)
    assert analysis.sensitivity == table
    selectors = {record.selector: record for record in analysis.selectors}
    assert selectors.keys() == {"freq x mean", "mean", "joint", "lower bound", "context"}
    by_stage = {record.value: record.jaccard for record in table if record.parameter == "stage"}
    assert selectors["context"].jaccard_with["freq x mean"] == by_stage["score"]
    assert [record.fraction for record in analysis.sample_size] == [0.1, 0.25, 0.5, 0.75, 0.9]


def test_controls_are_matched_or_the_reason_is_given(analysis, store, rocks, tmp_path):
    assert analysis.controls.matched is False
    with pytest.raises(ControlMatchError) as refusal:
        match_controls(store, rocks, seed=SETTINGS["seed"])
    assert analysis.controls.reason == str(refusal.value)
    even = with_column(random_trace(3), "token_id", np.arange(random_trace(3).num_rows) % 20)
    twins = TraceStore(write_trace(tmp_path, {0: rescored(even, 1), 9: even}), threads=1)
    options = {"stage": "score", "k": 4, "seed": 1}
    controls = match_controls(twins, find_rocks(twins, **options), seed=1)
    assert analysis_of(twins, **options).to_record()["controls"] == {
        "matched": True,
        "draws": len(controls),
        "distinct": controls.n_distinct,
        "total_gaps": [draw.total_gap for draw in controls],
    }
    nothing = analysis_of(twins, **options, min_score=1e6).to_record()["controls"]
    assert nothing == {"matched": False, "reason": "there are no rocks to match"}


# Degenerate traces


def changed(tables: dict[int, pa.Table], column: str, value: float) -> dict[int, pa.Table]:
    return {step: with_column(table, column, np.full(len(table), value)) for step, table in tables.items()}


PAIR = {step: random_trace(5, prompts=6) for step in (0, 9)}


@pytest.mark.parametrize(
    ("tables", "options"),
    [
        (changed(PAIR, "kl", 0.0), {}),
        (changed(PAIR, "kl", 0.0), {"stage": "score"}),
        (changed(PAIR, "kl", -(2.0**-20)), {}),
        (changed(PAIR, "token_id", 7), {"gamma": 0.1}),
        (PAIR, {"split": None}),
        ({9: PAIR[9]}, {}),
        ({9: PAIR[9]}, {"stage": "score", "k": "auto"}),
        ({0: random_trace(77, prompts=9), 9: PAIR[9]}, {"stage": "score"}),
        ({0: random_trace(77, prompts=9), 9: PAIR[9]}, {"stage": "score", "joint": True}),
        ({step: table.slice(0, 9) for step, table in PAIR.items()}, {"split": None}),
        ({step: table.slice(0, 1) for step, table in PAIR.items()}, {"split": None, "min_freq": 1}),
        (PAIR, {"min_freq": 10_000}),
        (PAIR, {"exclude_top_freq": 10_000}),
        (PAIR, {"max_pairs": 2}),
    ],
)
def test_degenerate_traces_give_json(tmp_path, tables, options):
    store = TraceStore(write_trace(tmp_path, tables), threads=1)
    options = {"k": 3, **options}
    found = analysis_of(store, **options)
    paired = len(tables) == 2 and tables[0].num_rows == tables[9].num_rows
    assert bool(found.persistence) == paired
    assert {record.checkpoint for record in found.trajectory} == ({0, 9} if paired else {9})
    rocks = find_rocks(store, embeddings=EMBEDDINGS, **options)
    assert [v for v in found.funnel.rank if v is not None] == [
        rank for _, rank in sorted((token.id, token.rank) for token in rocks.tokens)
    ]


@settings(max_examples=6, deadline=None, phases=[Phase.reuse, Phase.generate])  # shrinking would take minutes
@given(
    seed=st.integers(0, 2**32 - 1),
    prompts=st.integers(2, 9),
    vocabulary=st.integers(1, 12),
    length=st.integers(4, 15),
    k=st.integers(1, 8),
    split=st.sampled_from([None, 0.5, 0.9]),
    gamma=st.floats(0.05, 1.0),
)
def test_any_trace_gives_json(tmp_path_factory, seed, prompts, vocabulary, length, k, split, gamma):
    late = random_trace(seed, prompts=prompts, vocabulary=vocabulary, length=length)
    assume(len(naive_split(late, None, 0)[0]) > 1)
    tables = {0: rescored(late, seed), 9: late}
    store = TraceStore(write_trace(tmp_path_factory.mktemp("run"), tables), threads=1)
    found = analysis_of(store, k=k, split=split, gamma=gamma, tau=0.3, window=1)
    rows = occurrences_of(late, set(naive_split(late, split, 0)[0]))
    assert found.funnel.freq == [count for _, count in sorted(counted(rows).items())]
