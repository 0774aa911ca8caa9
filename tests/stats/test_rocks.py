"""Rocks and their summary equal a row-by-row oracle; the file is the same bytes however it was computed."""

import json
from dataclasses import replace
from statistics import median

import numpy as np
import pyarrow as pa
import pytest
from trace_oracle import counted, large_trace, occurrences_of, random_trace, rescored, summed, with_column, write_trace

from rocktokens.errors import RocktokensError
from rocktokens.run_dir import RunDir
from rocktokens.stats.rocks import HELD_OUT, NOT_SPLIT, find_rocks, split_prompts, type_table
from rocktokens.traces.store import TraceStore
from rocktokens.types import RockSet

ONE = 2**24


def oracle_ranking(
    table, baseline=None, prompts=None, k=100, min_freq=2, exclude_top_freq=0
) -> list[tuple[int, int, int]]:
    """(id, freq, fixed-point score) in rank order."""
    rows = occurrences_of(table, prompts)
    freq, score = counted(rows), summed(rows)
    if baseline is not None:
        before = summed(occurrences_of(baseline, prompts))
        score = {v: min(score[v], before.get(v, 0)) for v in score}
    frequent = sorted(freq, key=lambda v: (-freq[v], v))[:exclude_top_freq]
    ranked = sorted((v for v in freq if freq[v] >= min_freq and v not in frequent), key=lambda v: (-score[v], v))
    return [(v, freq[v], score[v]) for v in ranked[:k]]


def ranking(rocks: RockSet) -> list[tuple[int, int, int]]:
    assert [token.rank for token in rocks.tokens] == list(range(1, len(rocks.tokens) + 1))
    return [(token.id, token.freq, round(token.score * ONE)) for token in rocks.tokens]


@pytest.fixture(scope="module")
def tables():
    late = random_trace(5, vocabulary=40)
    return {0: rescored(late, 1), 50: rescored(late, 2), 200: late}


@pytest.fixture(scope="module")
def store(tmp_path_factory, tables):
    return TraceStore(write_trace(tmp_path_factory.mktemp("run"), tables, rows_per_part=100))


# Selection


@pytest.mark.parametrize(
    "options", [{}, {"k": 3}, {"min_freq": 8}, {"exclude_top_freq": 4}, {"k": 6, "min_freq": 3, "exclude_top_freq": 2}]
)
def test_ranking_equals_the_oracle(store, tables, options):
    assert ranking(find_rocks(store, split=None, **options)) == oracle_ranking(tables[200], **options)
    joint = find_rocks(store, split=None, joint=True, **options)
    assert ranking(joint) == oracle_ranking(tables[200], baseline=tables[0], **options)
    assert ranking(joint) != ranking(find_rocks(store, split=None, **options))


def test_checkpoints_default_to_last_and_first_and_can_be_named(store, tables):
    assert find_rocks(store).criterion["reference"] == 200
    assert find_rocks(store).criterion["baseline"] == 0
    named = find_rocks(store, reference=50, split=1)
    assert ranking(named) == oracle_ranking(tables[50])


def test_mean_kl_and_score_are_two_views_of_one_sum(store):
    for token in find_rocks(store).tokens:
        assert token.freq * token.mean_kl == pytest.approx(token.score, rel=1e-15)


def test_ties_break_by_token_id(tmp_path):
    table = random_trace(0).slice(0, 8)
    for name, values in (("token_id", [9, 9, 2, 2, 5, 5, 7, 7]), ("kl", [1.0, 1, 1, 1, 1, 1, 2, 2])):
        table = with_column(table, name, values)
    rocks = find_rocks(TraceStore(write_trace(tmp_path, {0: table})), split=None)
    assert rocks.ids.tolist() == [7, 2, 5, 9]


# Split


def test_split_is_seeded_disjoint_and_complete():
    prompts = sorted(f"q{index}" for index in range(25))
    split = split_prompts(prompts, 0.4, seed=3)
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


def test_selection_never_sees_the_measured_prompts(store, tables):
    rocks = find_rocks(store, k=8, seed=1)
    split = split_prompts(sorted({row["prompt_id"] for row in occurrences_of(tables[200])}), 0.5, seed=1)
    assert ranking(rocks) == oracle_ranking(tables[200], prompts=set(split.selection), k=8)
    assert rocks.summary["measured_on"] == HELD_OUT
    assert_summary(rocks, tables[200], tables[0], set(split.measuring))


def test_without_a_split_the_summary_says_so(store, tables):
    rocks = find_rocks(store, k=8, split=None)
    assert rocks.summary["measured_on"] == NOT_SPLIT
    assert_summary(rocks, tables[200], tables[0], {f"p{index}" for index in range(12)})


def assert_summary(rocks: RockSet, late, early, prompts: set[str]) -> None:
    rows, before = occurrences_of(late, prompts), occurrences_of(early, prompts)
    ids = set(rocks.ids.tolist())
    hits = [row for row in rows if row["token_id"] in ids]
    total = sum(summed(rows).values())
    by_rollout: dict[int, list[bool]] = {}
    for row in rows:
        by_rollout.setdefault(row["rollout_id"], []).append(row["token_id"] in ids)

    def change(rock: bool) -> float:
        start, end = (
            sum(summed([row for row in side if (row["token_id"] in ids) is rock]).values()) for side in (before, rows)
        )
        return (end - start) / start

    expected = {
        "n_prompts": len(prompts),
        "n_occurrences": len(rows),
        "n_types": len(counted(rows)),
        "n_rock_occurrences": len(hits),
        "n_rock_types": len(counted(hits)),
        "token_share": len(hits) / len(rows),
        "token_share_median": median(sum(flags) / len(flags) for flags in by_rollout.values()),
        "vocab_share": len(counted(hits)) / len(counted(rows)),
        "kl_share": sum(summed(hits).values()) / total,
        "grad_share": sum(summed(hits, "grad_norm").values()) / sum(summed(rows, "grad_norm").values()),
        "mean_kl": total / ONE / len(rows),
        "mean_kl_rocks": sum(summed(hits).values()) / ONE / len(hits),
        "mean_kl_rest": (total - sum(summed(hits).values())) / ONE / (len(rows) - len(hits)),
        "paired": True,
        "kl_change_rocks": change(True),
        "kl_change_rest": change(False),
    }
    assert rocks.summary.keys() == {"measured_on", *expected}
    assert {name: rocks.summary[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_changes_are_null_when_checkpoints_saw_different_rollouts(tmp_path, tables):
    run = write_trace(tmp_path, {0: random_trace(77, vocabulary=40), 200: tables[200]})
    summary = find_rocks(TraceStore(run)).summary
    assert summary["paired"] is False
    assert summary["kl_change_rocks"] is None
    assert summary["kl_change_rest"] is None
    assert summary["kl_share"] > 0


def test_one_checkpoint_is_enough_but_has_no_change(tmp_path, tables):
    store = TraceStore(write_trace(tmp_path, {7: tables[200]}))
    assert find_rocks(store).summary["kl_change_rocks"] is None
    with pytest.raises(RocktokensError, match="joint needs two checkpoints, both are 7"):
        find_rocks(store, joint=True)


# The file


def test_rocks_json_is_the_same_bytes_at_one_and_two_threads_and_for_any_parts(tmp_path):
    late = large_trace(0)
    tables = {0: rescored(late, 1), 9: late}
    shuffled = {step: table.take(np.random.default_rng(step).permutation(len(late))) for step, table in tables.items()}
    write_trace(tmp_path / "one", tables)
    write_trace(tmp_path / "many", shuffled, rows_per_part=70_000)
    files: dict[tuple[str, int], str] = {}
    for folder in ("one", "many"):
        for threads in (1, 2):
            rocks = find_rocks(TraceStore(tmp_path / folder, threads=threads), joint=True, k=50)
            rocks.save(tmp_path / "rocks.json")
            files[folder, threads] = (tmp_path / "rocks.json").read_text()
    assert files["one", 1] == files["one", 2]
    assert files["many", 1] == files["many", 2]
    assert _without_source(files["one", 1]) == _without_source(files["many", 1])


def _without_source(text: str) -> dict:
    record = json.loads(text)
    assert record["source"].pop("manifest_sha256")
    return record


def test_criterion_and_source_reproduce_the_rocks(store, tmp_path):
    rocks = find_rocks(store, k=5, seed=8, split=0.3, exclude_top_freq=1)
    assert find_rocks(store, **rocks.criterion) == rocks
    assert rocks.source == {"manifest_sha256": store.manifest_sha256}
    unsplit = find_rocks(store, split=None)
    assert unsplit.criterion["split"] is None
    assert find_rocks(store, **unsplit.criterion) == unsplit
    rocks.save(tmp_path / "rocks.json")
    assert RockSet.load(tmp_path / "rocks.json") == replace(rocks)
    assert store.run.path.name not in (tmp_path / "rocks.json").read_text()


# Types


def test_type_table_pairs_the_means_by_occurrence(store, tables):
    frame = type_table(store)
    rows, before = occurrences_of(tables[200]), occurrences_of(tables[0])
    freq, late, early = counted(rows), summed(rows), summed(before)
    assert frame["token_id"].tolist() == sorted(freq, key=lambda v: (-late[v], v))
    for row in frame.itertuples():
        assert row.freq == freq[row.token_id]
        assert row.mean_kl == pytest.approx(late[row.token_id] / ONE / row.freq, rel=1e-12)
        assert row.mean_kl_baseline == pytest.approx(early[row.token_id] / ONE / row.freq, rel=1e-12)
        assert (row.text, row.category) == (f"<{row.token_id}>", "other")


def test_type_table_of_some_prompts(store, tables):
    prompts = ["p2", "p7", "p9"]
    frame = type_table(store, prompt_ids=prompts)
    rows, before = (occurrences_of(tables[step], set(prompts)) for step in (200, 0))
    assert dict(zip(frame["token_id"], frame["freq"], strict=True)) == counted(rows)
    for column, side in (("mean_kl", rows), ("mean_kl_baseline", before)):
        sums = (frame["freq"] * frame[column] * ONE).round().astype(int)
        assert dict(zip(frame["token_id"], sums, strict=True)) == summed(side)


def test_type_table_of_unpaired_checkpoints_has_no_baseline(tmp_path, tables):
    run = write_trace(tmp_path, {0: random_trace(77, vocabulary=40), 200: tables[200]})
    assert type_table(TraceStore(run))["mean_kl_baseline"].isna().all()


# Refusals


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"k": 0}, "k = 0 is not valid: give a whole number of at least 1"),
        ({"k": "auto"}, "k = 'auto' is not available yet: give a whole number, such as k=100"),
        ({"k": "all"}, "k = 'all' is not valid"),
        ({"min_freq": 0}, "min_freq = 0 is not valid"),
        ({"exclude_top_freq": -1}, "exclude_top_freq = -1 is not valid"),
        ({"split": 0.0}, "split = 0.0 is not valid"),
        ({"split": 1.5}, "split = 1.5 is not valid"),
        ({"stage": "context"}, "stage = 'context' is not available yet: use stage='score'"),
        ({"stage": "late"}, "stage = 'late' is not known: use 'score'"),
        ({"reference": 3}, "reference = 3 is not a traced checkpoint: available are 0, 50, 200"),
        ({"baseline": 3}, "baseline = 3 is not a traced checkpoint: available are 0, 50, 200"),
        ({"reference": 0, "baseline": 200}, "baseline = 200 is later than reference = 0: swap them"),
    ],
)
def test_bad_parameters_are_named(store, options, sentence):
    with pytest.raises(RocktokensError, match=sentence):
        find_rocks(store, **options)


def test_a_run_without_replay_traces_says_what_to_do(tmp_path, tables):
    with pytest.raises(RocktokensError, match="no replay traces: run `rocktokens trace`"):
        find_rocks(TraceStore(write_trace(tmp_path, {0: tables[0].slice(0, 0)})))


def replayed_store(run, tables, probe="last", checkpoints=(0, 50, 200)) -> TraceStore:
    """A run of which ``rocktokens trace`` has recorded that it replays these checkpoints."""
    RunDir(write_trace(run, tables)).update_manifest(
        replay={"probe": probe, "checkpoints": {str(step): "" for step in checkpoints}}
    )
    return TraceStore(run)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ({0: None}, "checkpoint 50 of 0, 50, 200 has no traces"),
        ({0: None, 50: None}, "checkpoint 200 of 0, 50, 200 has no traces"),
        ({0: None, 200: None}, "checkpoint 50 of 0, 50, 200 has no traces"),
        ({0: None, 50: 90, 200: None}, r"checkpoint 50 of 0, 50, 200 has 90 of \d+ rows"),
        ({0: None, 50: None, 200: 90}, r"checkpoint 200 of 0, 50, 200 has 90 of \d+ rows"),
    ],
)
def test_an_unfinished_replay_is_refused(tmp_path, tables, rows, found):
    store = replayed_store(tmp_path, {step: tables[step].slice(0, count) for step, count in rows.items()})
    for look in (find_rocks, type_table):
        with pytest.raises(RocktokensError, match=rf"^the replay is not finished \({found}\): run `rocktokens trace`"):
            look(store)


def test_what_an_unfinished_replay_has_finished_can_be_named(tmp_path, tables):
    store = replayed_store(tmp_path, {0: tables[0], 50: tables[50], 200: tables[200].slice(0, 90)})
    assert ranking(find_rocks(store, reference=50, baseline=0, split=None)) == oracle_ranking(tables[50])
    for named in ({"reference": 200, "baseline": 0}, {"reference": 50}, {"baseline": 0}):
        with pytest.raises(RocktokensError, match="checkpoint 200 of 0, 50, 200 has 90 of"):
            find_rocks(store, **named)


def test_checkpoints_that_each_wrote_their_own_probe_differ_in_rows(tmp_path, tables):
    parts = {0: tables[0], 50: tables[50].slice(0, 90)}
    assert find_rocks(replayed_store(tmp_path / "done", parts, "each", (0, 50))).tokens
    with pytest.raises(RocktokensError, match="checkpoint 200 of 0, 50, 200 has no traces"):
        find_rocks(replayed_store(tmp_path / "halfway", parts, "each"))


def test_one_prompt_cannot_be_split(tmp_path):
    table = random_trace(0, prompts=1)
    store = TraceStore(write_trace(tmp_path, {0: table}))
    with pytest.raises(RocktokensError, match="needs at least 2 prompts, the trace has 1: give split = 1"):
        find_rocks(store)
    assert find_rocks(store, split=1, min_freq=1).tokens


def test_a_trace_without_scores_is_refused(tmp_path):
    table = random_trace(0)
    table = with_column(table, "kl", pa.nulls(len(table)))
    with pytest.raises(RocktokensError, match="no row of the trace has a kl"):
        find_rocks(TraceStore(write_trace(tmp_path, {0: table})), split=None)
