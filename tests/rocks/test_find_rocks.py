"""Rocks and their summary equal a row-by-row oracle; the file is the same bytes however it was computed."""

import json
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from trace_oracle import (
    ANY,
    CONTEXT,
    counted,
    large_trace,
    naive_quantile,
    naive_ranking,
    naive_split,
    occurrences_of,
    random_embeddings,
    random_trace,
    rescored,
    rollouts_of,
    shuffled,
    summed,
    with_column,
    with_kl,
    write_trace,
)

from replay_records import make_replay
from rocktokens.config import FindSection
from rocktokens.errors import RocktokensError
from rocktokens.inference.bootstrap import bootstrap_counts, ratio_interval, ratio_intervals, share_interval
from rocktokens.rocks.find import find_rocks, find_run, find_settings, type_table
from rocktokens.rocks.search import Criterion, search
from rocktokens.rocks.sums import HELD_OUT, NOT_SPLIT
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.traces.store import TraceStore
from rocktokens.types import RockSet

ONE = 2**24
MODELS = '[models]\nstudent = "pebbles-student"\nteacher = "pebbles-teacher"\n'
EMBEDDINGS = random_embeddings(0, 40)


def found(store: TraceStore, **options: Any) -> RockSet:
    """Rank every type, by contexts where there are embeddings."""
    return find_rocks(store, **{**(CONTEXT if "embeddings" in options else ANY), **options})


def oracle_ranking(
    table, baseline=None, prompts=None, k=100, min_freq=2, exclude_top_freq=0
) -> list[tuple[int, int, int]]:
    """(id, freq, fixed-point score) in rank order, without the context stage."""
    rows = occurrences_of(table, prompts)
    freq, score = counted(rows), summed(rows)
    if baseline is not None:
        before = summed(occurrences_of(baseline, prompts))
        score = {v: min(score[v], before.get(v, 0)) for v in score}
    return [(v, freq[v], score[v]) for v in naive_ranking(score, freq, min_freq, exclude_top_freq)[:k]]


def ranking(rocks: RockSet) -> list[tuple[int, int, int]]:
    assert [token.rank for token in rocks.tokens] == list(range(1, len(rocks.tokens) + 1))
    return [(token.id, token.freq, round(token.score * ONE)) for token in rocks.tokens]


@pytest.fixture(scope="module")
def tables():
    late = random_trace(5, vocabulary=40)
    return {0: rescored(late, 1), 50: rescored(late, 2), 200: late}


@pytest.fixture(scope="module")
def store(tmp_path_factory, tables):
    return TraceStore(write_trace(tmp_path_factory.mktemp("run"), tables, rows_per_part=100), threads=1)


# Selection by score (test_search has the context stage)


@pytest.mark.parametrize(
    "options", [{}, {"k": 3}, {"min_freq": 8}, {"exclude_top_freq": 4}, {"k": 6, "min_freq": 3, "exclude_top_freq": 2}]
)
def test_ranking_equals_the_oracle(store, tables, options):
    alone, joint = (found(store, stage="score", split=None, joint=joint, **options) for joint in (False, True))
    assert ranking(alone) == oracle_ranking(tables[200], **options)
    assert ranking(joint) == oracle_ranking(tables[200], baseline=tables[0], **options)
    assert ranking(joint) != ranking(alone)


def test_checkpoints_default_to_last_and_first_and_can_be_named(store, tables):
    rocks = found(store, stage="score")
    assert (rocks.criterion["reference"], rocks.criterion["baseline"]) == (200, 0)
    named = found(store, reference=50, stage="score", split=1)
    assert ranking(named) == oracle_ranking(tables[50])


def test_the_context_stage_ranks_by_score_and_consistency(store):
    rocks = found(store, embeddings=EMBEDDINGS, gamma=0.5, tau=0.3)
    assert rocks.criterion["stage"] == "context"
    assert rocks.ids.tolist() != found(store, stage="score").ids.tolist()
    assert rocks.tokens[0].ccr > 0
    for token in rocks.tokens:
        assert token.score_ctx == pytest.approx(token.score * token.ccr, rel=1e-12)
        assert 0 <= token.ccr <= token.n_persistent / token.freq


def test_mean_kl_and_score_are_two_views_of_one_sum(store):
    for token in found(store, stage="score").tokens:
        assert token.freq * token.mean_kl == pytest.approx(token.score, rel=1e-15)


def test_a_least_score_cuts_the_ranking(store):
    rocks = found(store, stage="score", k=8)
    assert rocks.summary["n_score_zero"] == 0
    least = rocks.tokens[4].score
    cut = found(store, stage="score", k=8, min_score=least)
    assert cut.ids.tolist() == rocks.ids[:5].tolist()
    assert found(store, stage="score", k=2, min_score=least).ids.tolist() == rocks.ids[:2].tolist()
    none = found(store, stage="score", k=8, min_score=1e6)
    assert none.tokens == []
    assert none.summary["token_share"] == none.summary["kl_share"] == none.summary["token_share_median"] == 0
    assert none.summary["mean_kl_rocks"] is none.summary["intervals"]["mean_kl_rocks"] is None


def test_ties_break_by_token_id(tmp_path):
    table = random_trace(0).slice(0, 8)
    for name, values in (("token_id", [9, 9, 2, 2, 5, 5, 7, 7]), ("kl", [1.0, 1, 1, 1, 1, 1, 2, 2])):
        table = with_column(table, name, values)
    rocks = found(TraceStore(write_trace(tmp_path, {0: table})), stage="score", split=None)
    assert rocks.ids.tolist() == [7, 2, 5, 9]


# Measured on the other half


def test_selection_never_sees_the_measured_prompts(store, tables):
    rocks = found(store, stage="score", k=8, seed=1)
    selection, measuring = naive_split(tables[200], 0.5, seed=1)
    assert ranking(rocks) == oracle_ranking(tables[200], prompts=set(selection), k=8)
    assert rocks.summary["measured_on"] == HELD_OUT
    assert_summary(rocks, tables[200], tables[0], selection, measuring)


@pytest.mark.parametrize("k", [8, "auto"])
def test_after_the_context_stage_the_summary_is_of_the_held_out_half_too(store, tables, k):
    rocks = found(store, embeddings=EMBEDDINGS, gamma=0.5, tau=0.3, k=k, seed=1)
    assert rocks.tokens[0].ccr > 0
    assert_summary(rocks, tables[200], tables[0], *naive_split(tables[200], 0.5, seed=1))


def test_without_a_split_the_summary_says_so(store, tables):
    rocks = found(store, stage="score", k=8, split=None)
    assert rocks.summary["measured_on"] == NOT_SPLIT
    assert_summary(rocks, tables[200], tables[0], *naive_split(tables[200], None, 0))


def assert_summary(rocks: RockSet, late, early, selection: list[str], measuring: list[str]) -> None:
    rows, before = occurrences_of(late, set(measuring)), occurrences_of(early, set(measuring))
    ids, tau = set(rocks.ids.tolist()), rocks.criterion["tau"]
    hits = [row for row in rows if row["token_id"] in ids]
    total = sum(summed(rows).values())
    shares = [sum(row["token_id"] in ids for row in some) / len(some) for some in rollouts_of(rows).values()]

    def change(rock: bool) -> float:
        start, end = (
            sum(summed([row for row in side if (row["token_id"] in ids) is rock]).values()) for side in (before, rows)
        )
        return (end - start) / start

    expected = {
        "n_prompts": len(measuring),
        "n_prompts_selection": len(selection),
        "n_clusters": len(measuring),
        "n_occurrences": len(rows),
        "n_types": len(counted(rows)),
        "n_rock_occurrences": len(hits),
        "n_rock_types": len(counted(hits)),
        "token_share": len(hits) / len(rows),
        "token_share_median": median(shares),
        "vocab_share": len(counted(hits)) / len(counted(rows)),
        "kl_share": sum(summed(hits).values()) / total,
        "grad_share": sum(summed(hits, "grad_norm").values()) / sum(summed(rows, "grad_norm").values()),
        "mean_kl": total / ONE / len(rows),
        "mean_kl_rocks": sum(summed(hits).values()) / ONE / len(hits),
        "mean_kl_rest": (total - sum(summed(hits).values())) / ONE / (len(rows) - len(hits)),
        "paired": True,
        "kl_change_rocks": change(True),
        "kl_change_rest": change(False),
        "tau_pre_nats": naive_quantile(occurrences_of(early, set(selection)), tau),
        "tau_post_nats": naive_quantile(occurrences_of(late, set(selection)), tau),
    }
    assert rocks.summary.keys() == {"measured_on", "k", "n_score_zero", "intervals", *expected}
    assert {name: rocks.summary[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert_intervals(rocks, rows, before, measuring)
    for token in rocks.tokens:
        now, start = ([row for row in side if row["token_id"] == token.id] for side in (rows, before))
        assert (token.held_out_mean_kl is None) == (not now)
        if now:
            assert token.held_out_mean_kl == pytest.approx(summed(now)[token.id] / ONE / len(now), rel=1e-12)
            change_of_one = summed(now)[token.id] / summed(start)[token.id] - 1
            assert token.held_out_change == pytest.approx(change_of_one, rel=1e-9)


def assert_intervals(rocks: RockSet, rows: list[dict], before: list[dict], measuring: list[str]) -> None:
    """Intervals of sums by prompt, for a share, a mean and a change; the median's by a loop over the draws."""
    ids, found = set(rocks.ids.tolist()), rocks.summary["intervals"]
    counts = bootstrap_counts(len(measuring), seed=derive_seed(rocks.criterion["seed"], "bootstrap"))

    def by_prompt(side: list[dict], value: Any, only_rocks: bool) -> np.ndarray:
        sums = dict.fromkeys(measuring, 0.0)
        for row in side:
            sums[row["prompt_id"]] += value(row) * (not only_rocks or row["token_id"] in ids)
        return np.array([sums[prompt] for prompt in measuring])

    def kl(row: dict) -> float:
        return row["kl"]

    rock_freq, rock_kl = by_prompt(rows, lambda _: 1, True), by_prompt(rows, kl, True)
    kept = ratio_interval(rock_kl, by_prompt(before, kl, True), counts)
    expected = {
        "token_share": share_interval(rock_freq, by_prompt(rows, lambda _: 1, False) - rock_freq, counts),
        "kl_share": share_interval(rock_kl, by_prompt(rows, kl, False) - rock_kl, counts),
        "mean_kl_rocks": ratio_interval(rock_kl, rock_freq, counts),
        "kl_change_rocks": kept and (kept[0] - 1, kept[1] - 1),
    }
    for name, ends in expected.items():
        assert tuple(found[name]) == pytest.approx(ends, rel=1e-5, abs=1e-6), name
    shares = {prompt: [] for prompt in measuring}
    for some in rollouts_of(rows).values():
        shares[some[0]["prompt_id"]].append(sum(row["token_id"] in ids for row in some) / len(some))
    medians = [
        median(
            np.concatenate([np.repeat(shares[prompt], count) for prompt, count in zip(measuring, draw, strict=True)])
        )
        for draw in counts
    ]
    assert found["token_share_median"] == pytest.approx(np.quantile(medians, [0.025, 0.975]).tolist(), rel=1e-12)
    others = {"grad_share", "mean_kl", "mean_kl_rest", "kl_change_rest"}
    assert found.keys() == {*expected, *others, "token_share_median"}
    for name in others:
        assert found[name][0] <= rocks.summary[name] <= found[name][1], name


def test_a_rock_is_as_sure_as_the_selection_half_makes_it(store, tables):
    rocks = found(store, stage="score", k=4, seed=1)
    selection, _ = naive_split(tables[200], 0.5, seed=1)
    counts = bootstrap_counts(len(selection), seed=derive_seed(1, "bootstrap"))
    by_prompt = [occurrences_of(tables[200], {prompt}) for prompt in selection]
    ids = sorted({row["token_id"] for rows in by_prompt for row in rows})
    kl_PU, freq_PU = (
        np.array([[value(rows).get(v, 0) for v in ids] for rows in by_prompt]) for value in (summed, counted)
    )
    kl, freq = counts @ kl_PU, counts @ freq_PU
    ends = ratio_intervals(kl_PU, None, counts) / ONE
    replicas = [
        naive_ranking(dict(zip(ids, score, strict=True)), dict(zip(ids, number, strict=True)))[:4]
        for score, number in zip(kl.tolist(), freq.tolist(), strict=True)
    ]
    for token in rocks.tokens:
        assert token.n_prompts == sum(token.id in counted(rows) for rows in by_prompt)
        assert token.p_in_top_k == sum(token.id in first for first in replicas) / len(replicas)
        assert token.score_interval == pytest.approx(tuple(ends[:, ids.index(token.id)]), rel=1e-12)


def test_changes_are_null_when_checkpoints_saw_different_rollouts(tmp_path, tables):
    store = TraceStore(write_trace(tmp_path, {0: random_trace(77, vocabulary=40), 200: tables[200]}))
    rocks = found(store, stage="score")
    assert rocks.summary["paired"] is False
    for name in ("kl_change_rocks", "kl_change_rest"):
        assert rocks.summary[name] is rocks.summary["intervals"][name] is None
    assert {token.held_out_change for token in rocks.tokens} == {None}
    assert rocks.summary["kl_share"] > 0
    with pytest.raises(
        RocktokensError, match=r"^checkpoints 0 and 200 did not score the same tokens .* use stage='score'"
    ):
        found(store, embeddings=EMBEDDINGS)


def test_one_checkpoint_is_enough_but_has_no_change(tmp_path, tables):
    store = TraceStore(write_trace(tmp_path, {7: tables[200]}))
    for options in ({"stage": "score"}, {"embeddings": EMBEDDINGS, "gamma": 0.5}):
        rocks = found(store, **options)
        assert rocks.summary["kl_change_rocks"] is None
        assert rocks.summary["tau_pre_nats"] == rocks.summary["tau_post_nats"]
        with pytest.raises(RocktokensError, match="joint needs two checkpoints, both are 7: trace another or leave"):
            found(store, joint=True, **options)
    assert any(token.ccr for token in rocks.tokens)


# The file


@pytest.mark.parametrize("options", [{"joint": True}, {"stage": "score", "k": "auto"}])
def test_rocks_json_is_the_same_bytes_at_one_and_two_threads_and_for_any_parts(tmp_path, large, options):
    files: dict[tuple[str, int], str] = {}
    for folder in ("one", "many"):
        for threads in (1, 2):
            store = TraceStore(large / folder, threads=threads)
            rocks = found(store, **{"k": 50, "embeddings": random_embeddings(3, 5001, 16), "gamma": 0.6, **options})
            assert options.get("stage") or max(token.ccr for token in rocks.tokens) > 0
            rocks.save(tmp_path / "rocks.json")
            files[folder, threads] = (tmp_path / "rocks.json").read_text()
    assert files["one", 1] == files["one", 2]
    assert files["many", 1] == files["many", 2]
    assert _without_source(files["one", 1]) == _without_source(files["many", 1])


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """One trace twice: as it is, and in several parts with its rows in another order."""
    folder = tmp_path_factory.mktemp("large")
    late = large_trace(0, rollouts=2600)
    tables = {0: rescored(late, 1), 9: late}
    write_trace(folder / "one", tables)
    write_trace(folder / "many", {step: shuffled(table, step) for step, table in tables.items()}, rows_per_part=70_000)
    return folder


def _without_source(text: str) -> dict:
    record = json.loads(text)
    assert record["source"].pop("manifest_sha256")
    return record


@pytest.mark.parametrize(
    "options",
    [
        {"k": 5, "seed": 8, "split": 0.3, "exclude_top_freq": 1},
        {"split": None, "k": "auto", "gamma": 0.4, "eta": 0.3, "window": 2},
        {"stage": "score", "joint": True, "baseline": 50},
        {"tau_nats": (0.2, 0.4), "min_score": 0.01, "max_pairs": 300},
        {"k": np.int64(4), "gamma": np.float32(0.5), "seed": np.int32(3), "reference": np.int64(50)},
    ],
)
def test_criterion_and_source_reproduce_the_rocks(store, tmp_path, options):
    rocks = found(store, embeddings=EMBEDDINGS, **options)
    assert rocks.tokens
    assert found(store, embeddings=EMBEDDINGS, **rocks.criterion) == rocks
    assert rocks.source == {"manifest_sha256": store.manifest_sha256}
    rocks.save(tmp_path / "rocks.json")
    assert RockSet.load(tmp_path / "rocks.json") == replace(rocks)
    assert found(store, embeddings=EMBEDDINGS, **RockSet.load(tmp_path / "rocks.json").criterion) == rocks
    assert store.run.path.name not in (tmp_path / "rocks.json").read_text()


def test_every_parameter_is_on_record(store):
    rocks = found(store, embeddings=EMBEDDINGS, tau_nats=(0.2, 0.4), window=3)
    parameters = set(find_rocks.__annotations__) - {"store", "embeddings", "return"}
    assert rocks.criterion.keys() == parameters
    assert rocks.criterion["tau_nats"] == [0.2, 0.4]
    assert rocks.windows == {"max_each_side": 3, "min_kl": 0.4}


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


# The run's own settings


def test_what_is_not_given_comes_from_the_config_of_the_run(tmp_path, tables):
    run = write_trace(tmp_path, tables)
    find = {"k": 4, "stage": "score", "split": 0.25, "min_score": 0.5, "tau_nats": [0.25, 0.5], "encoder": "hidden"}
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in find.items())
    RunDir(run).commit_text("config.toml", f'[run]\ndirectory = "elsewhere"\nseed = 3\n{MODELS}[find]\n{lines}\n')
    store = TraceStore(run, threads=1)
    assert find.items() <= find_rocks(store).criterion.items()
    assert find_rocks(store).criterion["seed"] == derive_seed(3, "split")
    given = {"k": 2, "split": None, "min_score": 0.25, "tau_nats": None, "seed": 0, "encoder": "embeddings"}
    assert given.items() <= found(store, **given).criterion.items()
    by_quantile = found(store, tau=0.5, stage="context", embeddings=EMBEDDINGS).criterion
    assert (by_quantile["tau"], by_quantile["tau_nats"], by_quantile["encoder"]) == (0.5, None, "embeddings")


def test_without_a_config_the_defaults_are_those_of_its_section(store):
    criterion = find_rocks(store).criterion
    assert criterion.keys() == {*FindSection.model_fields, "reference", "baseline", "seed"}
    expected = {**FindSection().model_dump(), "min_score": 0.0, "seed": 0}
    assert (criterion["stage"], criterion["require"], criterion["min_prompts"]) == ("bound", "stopped", 5)
    assert {name: criterion[name] for name in expected} == expected


def test_the_command_and_the_call_write_the_same_bytes_without_a_config(tmp_path, tables):
    """A type without a loss fills up K for both; a config drops it for both."""
    learned = {
        step: with_kl(table, np.where(table["token_id"].to_numpy() == 0, 0, 1)) for step, table in tables.items()
    }
    run = RunDir(write_trace(tmp_path, learned))
    for has_config, zeros in ((False, 1), (True, 0)):
        if has_config:
            run.commit_text(run.config.name, f'[run]\ndirectory = "{run.path}"\n{MODELS}')
        find_run(run, *find_settings(run))
        find_rocks(TraceStore(run, threads=1)).save(tmp_path / "call.json")
        assert (tmp_path / "call.json").read_bytes() == run.rocks.read_bytes()
        assert RockSet.load(run.rocks).summary["n_score_zero"] == zeros


# Refusals


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"k": 0}, "k = 0 is not valid: give a whole number of at least 1"),
        ({"k": "all"}, "k = 'all' is not valid: give a whole number of at least 1"),
        ({"k": True}, "k = True is not valid: give a whole number of at least 1"),
        ({"min_freq": 0}, "min_freq = 0 is not valid: give a whole number of at least 1"),
        ({"exclude_top_freq": -1}, "exclude_top_freq = -1 is not valid: give a whole number of at least 0"),
        ({"window": 0}, "window = 0 is not valid: give a whole number of at least 1"),
        ({"window": 2.5}, "window = 2.5 is not valid: give a whole number of at least 1"),
        ({"max_pairs": 1}, "max_pairs = 1 is not valid: give a whole number of at least 2"),
        ({"seed": -1}, "seed = -1 is not valid: give a whole number of at least 0"),
        ({"joint": "no"}, "joint = 'no' is not valid: give True or False"),
        ({"gamma": 0}, "gamma = 0 is not valid: give a number above 0, up to 1"),
        ({"gamma": 1.01}, "gamma = 1.01 is not valid: give a number above 0, up to 1"),
        ({"gamma": float("nan")}, "gamma = nan is not valid: give a number above 0, up to 1"),
        ({"eta": 0.0}, "eta = 0.0 is not valid: give a number above 0, up to 1"),
        ({"eta": None}, "eta = None is not valid: give a number above 0, up to 1"),
        ({"tau": 1.5}, "tau = 1.5 is not valid: give a quantile from 0 to 1, or tau_nats in nats"),
        ({"tau": "0.8"}, "tau = '0.8' is not valid: give a quantile from 0 to 1, or tau_nats in nats"),
        ({"tau_nats": 0.5}, r"tau_nats = 0.5 is not valid: give two numbers, \(baseline, reference\)"),
        ({"tau_nats": (0.5,)}, r"tau_nats = \(0.5,\) is not valid: give two numbers, \(baseline, reference\)"),
        ({"tau_nats": (0.5, float("inf"))}, r"tau_nats = \(0.5, inf\) is not valid: give two numbers"),
        ({"min_score": float("nan")}, "min_score = nan is not valid: give a number of nats"),
        ({"split": 0.0}, "split = 0.0 is not valid: give a share above 0 and up to 1"),
        ({"split": 1.5}, "split = 1.5 is not valid: give a share above 0 and up to 1"),
        ({"stage": "late"}, "stage = 'late' is not known: use one of bound, score, context"),
        ({"require": "still"}, "require = 'still' is not known: use one of stopped, stuck, any"),
        ({"min_prompts": 0}, "min_prompts = 0 is not valid: give a whole number of at least 1"),
        ({"encoder": "last"}, "encoder = 'last' is not known: use 'embeddings' or 'hidden', or give hidden_encoder"),
        ({"encoder": None}, "stage = 'context' needs embeddings or an encoder: give one, or use stage='score'"),
        (
            {"embeddings": EMBEDDINGS[:3]},
            r"embeddings of shape \(3, 4\) have no row for token id \d+ of the trace: give",
        ),
        ({"embeddings": EMBEDDINGS[0]}, r"embeddings are float32 of shape \(4,\): give floats of shape \(vocab"),
        ({"reference": "200"}, "reference = '200' is not valid: give a whole number of at least 0"),
        ({"reference": 3}, "reference = 3 is not a traced checkpoint: available are 0, 50, 200"),
        ({"baseline": 3}, "baseline = 3 is not a traced checkpoint: available are 0, 50, 200"),
        ({"reference": 0, "baseline": 200}, "baseline = 200 is later than reference = 0: swap them"),
    ],
)
def test_bad_parameters_are_named(store, options, sentence):
    with pytest.raises(RocktokensError, match=f"^{sentence}") as caught:
        found(store, **{"embeddings": EMBEDDINGS, **options})
    assert "\n" not in str(caught.value)


def test_without_embeddings_or_a_student_to_take_them_from(store):
    with pytest.raises(
        RocktokensError, match=r"cannot be read from .*step-200 .*: give embeddings=, .* or stage='score'"
    ):
        found(store, stage="context")
    with pytest.raises(RocktokensError, match=r"^stage = 'context' needs embeddings or an encoder: give one, or use"):
        search(store, Criterion(stage="context"), None)


def test_a_run_without_replay_traces_says_what_to_do(tmp_path, tables):
    with pytest.raises(RocktokensError, match="no replay traces: run `rocktokens trace`"):
        found(TraceStore(write_trace(tmp_path, {0: tables[0].slice(0, 0)})), embeddings=EMBEDDINGS)


def replayed_store(run, tables, probe="last", checkpoints=(0, 50, 200)) -> TraceStore:
    """A run of which ``rocktokens trace`` has recorded that it replays these checkpoints."""
    RunDir(write_trace(run, tables)).update_manifest(
        replay=make_replay(probe=probe, checkpoints=dict.fromkeys(checkpoints, "")).to_manifest()
    )
    return TraceStore(run)


@pytest.mark.parametrize(
    ("rows", "missing"),
    [
        ({0: None}, "checkpoint 50 of 0, 50, 200 has no traces"),
        ({0: None, 50: None}, "checkpoint 200 of 0, 50, 200 has no traces"),
        ({0: None, 200: None}, "checkpoint 50 of 0, 50, 200 has no traces"),
        ({0: None, 50: 90, 200: None}, r"checkpoint 50 of 0, 50, 200 has 90 of \d+ rows"),
        ({0: None, 50: None, 200: 90}, r"checkpoint 200 of 0, 50, 200 has 90 of \d+ rows"),
    ],
)
def test_an_unfinished_replay_is_refused(tmp_path, tables, rows, missing):
    store = replayed_store(tmp_path, {step: tables[step].slice(0, count) for step, count in rows.items()})
    sentence = rf"^the replay is not finished \({missing}\): run `rocktokens trace` again$"
    for look in (found, lambda store: found(store, stage="score"), type_table):
        with pytest.raises(RocktokensError, match=sentence):
            look(store)


def test_what_an_unfinished_replay_has_finished_can_be_named(tmp_path, tables):
    store = replayed_store(tmp_path, {0: tables[0], 50: tables[50], 200: tables[200].slice(0, 90)})
    rocks = found(store, reference=50, baseline=0, stage="score", split=None)
    assert ranking(rocks) == oracle_ranking(tables[50])
    for named in ({"reference": 200, "baseline": 0}, {"reference": 50}, {"baseline": 0}):
        with pytest.raises(RocktokensError, match="checkpoint 200 of 0, 50, 200 has 90 of"):
            found(store, stage="score", **named)


def test_checkpoints_that_each_wrote_their_own_probe_differ_in_rows(tmp_path, tables):
    parts = {0: tables[0], 50: tables[50].slice(0, 90)}
    assert found(replayed_store(tmp_path / "done", parts, "each", (0, 50)), stage="score").tokens
    with pytest.raises(RocktokensError, match="checkpoint 200 of 0, 50, 200 has no traces"):
        found(replayed_store(tmp_path / "halfway", parts, "each"), stage="score")


@pytest.mark.parametrize("options", [{"stage": "score"}, {"embeddings": EMBEDDINGS, "gamma": 0.1, "tau": 0.3}])
def test_one_prompt_cannot_be_split_but_can_be_searched(tmp_path, options):
    late = random_trace(0, prompts=1, samples=4)
    store = TraceStore(write_trace(tmp_path, {0: rescored(late, 1), 9: late}))
    with pytest.raises(
        RocktokensError, match=r"^split = 0.5 needs prompts for both halves, the trace has 1: trace at least 40 "
    ):
        found(store, **options)
    for split in (None, 1):
        rocks = found(store, split=split, min_freq=1, **options)
        assert {token.id for token in rocks.tokens} == counted(occurrences_of(late)).keys()
        assert (rocks.summary["n_prompts"], rocks.summary["measured_on"]) == (1, NOT_SPLIT)
    with pytest.raises(RocktokensError, match=r"^k = 'auto' needs at least 2 prompts .*, or give a whole number"):
        found(store, k="auto", split=None, **options)


@pytest.mark.parametrize("options", [{"stage": "score"}, {"embeddings": EMBEDDINGS}])
def test_a_trace_without_scores_is_refused(tmp_path, options):
    table = random_trace(0)
    table = with_column(table, "kl", pa.nulls(len(table)))
    store = TraceStore(write_trace(tmp_path, {0: table}))
    for k in (5, "auto"):
        with pytest.raises(RocktokensError, match=r"^no row of the trace has a kl: trace again"):
            found(store, k=k, split=None, **options)


@pytest.mark.parametrize("options", [{"stage": "score"}, {"embeddings": EMBEDDINGS}])
def test_where_student_and_teacher_agree_there_is_nothing_to_cut_at(tmp_path, options):
    table = random_trace(0)
    table = with_column(table, "kl", np.zeros(len(table)))
    store = TraceStore(write_trace(tmp_path, {0: table, 9: table}))
    none = found(store, k="auto", **options)
    assert (none.tokens, none.summary["k"]) == ([], 0)
    rocks = found(store, k=5, **options)
    assert {token.score for token in rocks.tokens} == {0.0}
    assert {token.p_in_top_k for token in rocks.tokens} == {0.0}, "they are there by their ids alone"
    assert rocks.summary["n_score_zero"] == 5
    assert rocks.summary["kl_share"] is rocks.summary["kl_change_rocks"] is None
    rocks.save(tmp_path / "rocks.json")
