"""The whole search equals METHOD 4 in loops over rows, finds planted rocks before decoys, and is not circular."""

import tempfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from sample_oracle import naive_jaccard
from trace_oracle import (
    ANY,
    CONTEXT,
    NaiveSearch,
    counted,
    naive_context_score,
    naive_coverage,
    naive_ranking,
    naive_score,
    naive_search,
    naive_split,
    occurrences_of,
    random_embeddings,
    random_trace,
    rescored,
    shuffled,
    summed,
    with_column,
    with_levels,
    write_trace,
)

from rocktokens.rocks import search as selection
from rocktokens.rocks.analysis import persistence_report
from rocktokens.rocks.cutoff import subset_weights
from rocktokens.rocks.encoders import embedding_encoder
from rocktokens.rocks.find import find_rocks, search_traces
from rocktokens.rocks.persistence import HIGH_KL, ROCK, Thresholds, type_groups
from rocktokens.rocks.search import Criterion, SearchResult
from rocktokens.rocks.sums import HELD_OUT, SELECTION
from rocktokens.run_dir import derive_seed
from rocktokens.traces.schema import validate_table
from rocktokens.traces.store import TraceStore
from rocktokens.types import RockSet

LEVELS = [None, [0.0, 0.5, 1.0], [-(2.0**-20), 0.0, 0.25, 0.5, 3.0]]
"""Other than None, few values of kl: scores tie, and thresholds are values that occur."""
CHECKPOINTS = [(None, None), (5, None), (None, 5), (9, 9)]


# Against the oracle


@st.composite
def traces(draw) -> dict[int, pa.Table]:
    """Three checkpoints of a small trace: several rollouts a prompt, unscored rows, rows in no order."""
    number = st.integers(0, 2**32 - 1)
    late = random_trace(
        draw(number),
        prompts=draw(st.integers(2, 14)),
        samples=draw(st.integers(1, 3)),
        vocabulary=draw(st.integers(1, 16)),
        length=draw(st.integers(2, 30)),
    )
    levels = draw(st.sampled_from(LEVELS))
    score = rescored if levels is None else lambda table, seed: with_levels(table, seed, levels)
    return {step: shuffled(score(late, draw(number)), draw(number)) for step in (0, 5, 9)}


@st.composite
def options(draw) -> dict[str, Any]:
    """Every parameter of a search but its data and ``k``."""
    reference, baseline = draw(st.sampled_from(CHECKPOINTS))
    share = st.floats(0.01, 1.0)
    nats = st.floats(0.0, 2.0)
    return {
        "reference": reference,
        "baseline": baseline,
        "stage": draw(st.sampled_from(["context", "context", "context", "score"])),
        "min_freq": draw(st.integers(1, 6)),
        "exclude_top_freq": draw(st.integers(0, 3)),
        "joint": reference != 9 and draw(st.booleans()),
        "window": draw(st.integers(1, 5)),
        "tau": draw(st.one_of(st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]), st.floats(0.0, 0.9))),
        "tau_nats": draw(st.one_of(st.none(), st.tuples(nats, nats))),
        "gamma": draw(st.floats(0.05, 0.999)),
        "eta": draw(st.one_of(st.sampled_from([0.1, 1 / 3, 0.5, 1.0]), share)),
        "min_score": draw(st.sampled_from([None, 0.0, 5e-324, 0.5])),
        "split": draw(st.one_of(st.none(), st.just(1), st.floats(0.1, 0.9))),
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=25, deadline=None, phases=[Phase.reuse, Phase.generate])  # shrinking would take minutes
@given(
    tables=traces(),
    chosen=options(),
    k=st.one_of(st.just("auto"), st.integers(1, 12)),
    width=st.integers(1, 6),
    rows_per_part=st.integers(9, 400),
)
def test_the_search_equals_the_oracle(tables, chosen, k, width, rows_per_part):
    assume(len(naive_split(tables[9], None, 0)[0]) > 1)
    embeddings = random_embeddings(chosen["seed"], 16, width)
    naive = naive_search(tables, embeddings, **chosen)
    assume(naive.least_doubt > 1e-9)
    expected = naive_auto_k(naive, chosen) if k == "auto" else k
    assume(expected)
    with tempfile.TemporaryDirectory() as run:
        store = TraceStore(write_trace(Path(run), tables, rows_per_part), threads=1)
        rocks = find_rocks(store, embeddings=embeddings, k=k, **ANY, **chosen)
        assert rocks.summary["k"] == expected
        assert_same_rocks(rocks, naive, chosen["stage"], expected)
        assert_same_evidence(store, find(store, embeddings, k=k, **chosen), naive, tables)


def find(store: TraceStore, embeddings: np.ndarray, **chosen: Any) -> SearchResult:
    criterion = Criterion(**{**CONTEXT, **chosen})
    return search_traces(store, criterion, embeddings=embeddings)


def assert_same_rocks(rocks: RockSet, naive: NaiveSearch, stage: str, k: int) -> None:
    """The same types in the same order, and every number they were ranked by."""
    assert rocks.ids.tolist() == naive.ranking[:k]
    assert [token.rank for token in rocks.tokens] == list(range(1, len(rocks.tokens) + 1))
    for token in rocks.tokens:
        v = token.id
        assert token.freq == naive.freq[v]
        assert token.score == close_to(naive.score[v])
        if stage == "score":
            assert (token.n_persistent, token.ccr, token.score_ctx) == (None, None, None)
        else:
            assert token.n_persistent == len(naive.persistent.get(v, []))
            assert token.ccr == close_to(naive.ccr(v))
            assert token.score_ctx == close_to(naive.ranks_by[v])
            assert token.ccr_interval is None


def close_to(exact: Fraction) -> Any:
    return pytest.approx(float(exact), rel=1e-9, abs=0)


def assert_same_evidence(
    store: TraceStore, result: SearchResult, naive: NaiveSearch, tables: dict[int, pa.Table]
) -> None:
    """Thresholds, coverage, and after the context stage O_PH, windows, ρ and what was kept, one by one."""
    assert result.thresholds == Thresholds(*naive.thresholds)
    positive = [v for v in naive.ranking if naive.ranks_by[v] > 0]
    assert result.curve.coverage.tolist() == list(naive_coverage(positive, naive.rows))
    if naive.measuring != naive.selection:
        measured = occurrences_of(tables[result.criterion.reference], set(naive.measuring))
        held_out = np.array(list(naive_coverage(positive, measured)))
        np.testing.assert_array_equal(result.curve.coverage_held_out, held_out, strict=True)
    persistent, context, ids = result.persistent, result.context, result.sums.selection.token_ids
    if persistent is None or context is None:
        return
    found = list(zip(ids[persistent.columns], persistent.rollout_ids, persistent.positions, strict=True))
    assert found == [(v, *place) for v, places in sorted(naive.persistent.items()) for place in places]
    rows = store.table(result.criterion.reference)
    encoder = embedding_encoder(rows, random_embeddings(0, 16), result.criterion.window)
    assert encoder is not None
    windows = encoder.look_up(persistent.rollout_ids, persistent.positions)
    assert windows.tolist() == [naive.windows[place] for place in ((r, t) for _, r, t in found)]
    judged = [found[index] for index in context.occurrences]
    criterion, gamma, eta = result.criterion, result.criterion.gamma, result.criterion.eta
    on_fewer_prompts = [v for v, freq in naive.freq.items() if freq >= criterion.min_freq]
    assert {v for v, _, _ in judged} == naive.similar.keys() & set(on_fewer_prompts)
    expected = [naive.similar[v][r, t] / (len(naive.similar[v]) - 1) for v, r, t in judged]
    assert context.rho(gamma).tolist() == expected
    assert context.kept(gamma, eta).tolist() == [(r, t) in naive.kept[v] for v, r, t in judged]


def naive_auto_k(naive: NaiveSearch, chosen: dict[str, Any]) -> int | None:
    """The smallest K whose coverage is at least its stability over random halves of the prompts; None: not defined."""
    positive = [v for v in naive.ranking if naive.ranks_by[v] > 0]
    if len(naive.selection) < 2 or not positive or sum(summed(naive.rows).values()) <= 0:
        return None
    curves = zip(naive_coverage(positive, naive.rows), naive_stability(naive, chosen, len(positive)), strict=True)
    return next((k for k, (coverage, stable) in enumerate(curves, start=1) if coverage >= stable), len(positive))


def naive_stability(naive: NaiveSearch, chosen: dict[str, Any], count: int) -> list[float]:
    """The mean Jaccard index of the first K of all prompts and of random halves, for K = 1 … count."""
    rankings = []
    for weights in subset_weights(len(naive.selection), 0.5, 50, derive_seed(chosen["seed"], "cutoff")):
        prompts = {prompt for prompt, weight in zip(naive.selection, weights, strict=True) if weight}
        now, before = ([row for row in rows if row["prompt_id"] in prompts] for rows in (naive.rows, naive.rows_before))
        score = naive_score(now, before if chosen["joint"] else None)
        score = score if chosen["stage"] == "score" else naive_context_score(now, score, naive.kept)
        rules = (chosen[name] for name in ("min_freq", "exclude_top_freq", "min_score"))
        rankings.append(naive_ranking(score, counted(now), *rules))
    return [
        float(np.mean([naive_jaccard(naive.ranking[:k], ranking[:k]) for ranking in rankings]))
        for k in range(1, count + 1)
    ]


@pytest.mark.parametrize("stage", ["score", "context"])
def test_half_of_the_prompts_may_leave_out_other_frequent_types(tmp_path, stage):
    """Types are about as frequent as each other, so that which are excluded is chance."""
    late = random_trace(3, prompts=12, vocabulary=12)
    tables = {0: rescored(late, 1), 9: late}
    chosen = {**AUTO, "exclude_top_freq": 4, "stage": stage, "seed": 3}
    naive = naive_search(tables, random_embeddings(0, 12, 3), **chosen)
    store = TraceStore(write_trace(tmp_path, tables), threads=1)
    curve = find(store, random_embeddings(0, 12, 3), **chosen, k=3).curve
    np.testing.assert_allclose(curve.stability, naive_stability(naive, chosen, len(curve.stability)), rtol=1e-12)
    assert len(curve.stability) > 3


@pytest.mark.parametrize("stage", ["score", "context"])
def test_the_number_of_rocks_is_where_coverage_meets_stability(tmp_path, stage):
    """On traces whose types differ more and more in how hard they are, so that the crossing moves."""
    found = []
    for slope in (0, 3, 9):
        late = random_trace(slope, prompts=24, vocabulary=30)
        hardness = np.array([0.01, *np.exp(-slope * np.arange(29) / 29)])  # every other token is of type 0
        tables = {
            step: with_column(table, "kl", scaled(table, hardness))
            for step, table in {0: rescored(late, 1), 9: late}.items()
        }
        chosen = {**AUTO, "stage": stage, "seed": slope}
        naive = naive_search(tables, random_embeddings(0, 30, 3), **chosen)
        store = TraceStore(write_trace(tmp_path / str(slope), tables), threads=1)
        found.append(find(store, random_embeddings(0, 30, 3), **chosen, k="auto"))
        assert found[-1].k == naive_auto_k(naive, chosen)
        assert found[-1].sums.selection.token_ids[found[-1].columns].tolist() == naive.ranking[: found[-1].k]
    assert len({result.k for result in found}) > 1


AUTO = {"joint": False, "min_freq": 2, "exclude_top_freq": 0, "min_score": None, "tau": 0.2, "gamma": 0.4, "eta": 0.1}


def scaled(table: pa.Table, hardness: np.ndarray) -> list[float | None]:
    """Every kl times the hardness of its type."""
    return [None if row["kl"] is None else row["kl"] * hardness[row["token_id"]] for row in table.to_pylist()]


def test_equal_scores_tie_although_floats_would_not(tmp_path):
    """22 · (15/22) is less than 15 in float64: a score must not be rounded twice before it is compared."""
    rng = np.random.default_rng(0)
    tokens = rng.permutation([3] * 22 + [8] * 15)
    late = one_in_three(tokens, np.ones(37))
    was_hard = np.where(np.cumsum(tokens == 3) > 15, 0.0, 1.0) * (tokens == 3) + (tokens == 8)
    tables = {0: one_in_three(tokens, was_hard), 9: late}
    store = TraceStore(write_trace(tmp_path, tables), threads=1)
    options = {"embeddings": random_embeddings(0, 9), "window": 1, "tau_nats": (0.5, 0.5), "split": None, "k": 2}
    rocks = find_rocks(store, **CONTEXT, **options)
    assert rocks.ids.tolist() == [3, 8]
    assert [token.score_ctx for token in rocks.tokens] == [15, 15]


def one_in_three(tokens: np.ndarray, kl: np.ndarray) -> pa.Table:
    """One rollout for each token, in the middle of two others that are easy."""
    count = len(tokens)
    middle = np.tile([0, 1, 0], count)
    tokens, kl = np.repeat(tokens, 3), np.repeat(kl, 3)
    return trace_of(np.repeat(np.arange(count), 3), np.where(middle, tokens, 1), middle * kl)


@pytest.mark.parametrize("by", [0, 1, -1])
def test_kl_of_a_neighbouring_token_fails_the_oracle(tmp_path, by):
    late = random_trace(4, vocabulary=12)
    tables = {0: rescored(late, 1), 9: late}
    naive = naive_search(tables, random_embeddings(0, 12), gamma=0.5)
    run = write_trace(tmp_path, {step: keyed_by_another_token(table, by) for step, table in tables.items()})
    rocks = find_rocks(TraceStore(run, threads=1), embeddings=random_embeddings(0, 12), gamma=0.5, **CONTEXT)
    if by == 0:
        return assert_same_rocks(rocks, naive, "context", 100)
    with pytest.raises(AssertionError):
        assert_same_rocks(rocks, naive, "context", 100)
    return None


def keyed_by_another_token(table: pa.Table, by: int) -> pa.Table:
    """Every token with the kl of the one ``by`` positions further on; those without one are not scored."""
    kl_at = {(row["rollout_id"], row["position"]): row["kl"] for row in table.to_pylist()}
    return with_column(table, "kl", [kl_at.get((row["rollout_id"], row["position"] + by)) for row in table.to_pylist()])


# More pairs of contexts than may be compared


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """Thirty types, each with persistent occurrences; and how many pairs of contexts they have."""
    late = random_trace(17, prompts=30, vocabulary=30)
    run = write_trace(tmp_path_factory.mktemp("crowded"), {0: rescored(late, 1), 9: late})
    store = TraceStore(run, threads=1)
    persistent = find(store, CROWDED, **IN_A_CROWD).persistent
    assert persistent is not None
    number = np.bincount(persistent.columns)
    return store, int((number * (number - 1)).sum())


CROWDED = random_embeddings(0, 30, 2)
IN_A_CROWD = {**CONTEXT, "tau": 0.3, "gamma": 0.9, "eta": 0.05, "window": 1, "split": None, "k": 3}


@pytest.mark.parametrize("k", [2, 5])
def test_types_that_cannot_be_rocks_are_passed_over(crowded, monkeypatch, k):
    """Only as many types as rocks are compared at first, which is too few to be sure."""
    store, pairs = crowded
    monkeypatch.setattr(selection, "MANY", 1)
    monkeypatch.setattr(selection, "PER_ROCK", 1)
    options = {**IN_A_CROWD, "k": k, "gamma": 0.99, "eta": 0.2}
    whole, part = (find(store, CROWDED, **options, max_pairs=limit) for limit in (pairs, pairs - 1))
    assert whole.context is not None
    assert part.context is not None
    assert part.context.exact.all(), "what was compared was compared in full"
    assert part.columns.tolist() == whole.columns.tolist()
    assert part.ranking_U[part.columns].tolist() == whole.ranking_U[whole.columns].tolist()
    passed_over = np.isnan(part.consistency)
    assert passed_over.any()
    assert not np.isnan(whole.consistency).any()
    assert not passed_over[part.columns].any()
    assert part.consistency[~passed_over].tolist() == whole.consistency[~passed_over].tolist()


def test_a_crossing_beyond_what_was_compared_is_looked_for_there(tmp_path, monkeypatch):
    late = random_trace(17, prompts=30, vocabulary=30)
    hardness = np.array([0.01, *np.ones(29)])
    tables = {0: rescored(late, 1), 9: late}
    tables = {step: with_column(table, "kl", scaled(table, hardness)) for step, table in tables.items()}
    store = TraceStore(write_trace(tmp_path, tables), threads=1)
    options = {**IN_A_CROWD, "k": "auto", "gamma": 0.99, "eta": 0.2}
    whole = find(store, CROWDED, **options)
    pairs = int((whole.n_persistent * (whole.n_persistent - 1)).sum())
    monkeypatch.setattr(selection, "MANY", 2)
    monkeypatch.setattr(selection, "PER_ROCK", 1)
    part = find(store, CROWDED, **options, max_pairs=pairs - 1)
    assert part.k == whole.k > 2
    assert set(part.columns.tolist()) == set(whole.columns.tolist())


def test_types_that_are_sampled_say_how_sure_their_ccr_is(crowded):
    store, pairs = crowded
    exact = {token.id: token for token in find_rocks(store, embeddings=CROWDED, **{**IN_A_CROWD, "k": 30}).tokens}
    sampled = find_rocks(store, embeddings=CROWDED, **{**IN_A_CROWD, "k": 30}, max_pairs=pairs // 3).tokens
    assert {token.id for token in sampled} == exact.keys()
    estimated = [token for token in sampled if token.ccr_interval is not None]
    assert 0 < len(estimated) < len(sampled)
    for token in sampled:
        assert token.n_persistent == exact[token.id].n_persistent
        if token.ccr_interval is None:
            assert (token.ccr, token.score_ctx) == (exact[token.id].ccr, exact[token.id].score_ctx)
        else:
            assert token.ccr_interval[0] <= token.ccr <= token.ccr_interval[1]
            assert token.score_ctx == pytest.approx(token.score * token.ccr, rel=1e-12)
    inside = [token.ccr_interval[0] <= exact[token.id].ccr <= token.ccr_interval[1] for token in estimated]
    assert np.mean(inside) >= 0.9


# Planted rocks

ROCKS = range(6)
DECOYS = {"isolated": range(10, 14), "rare": range(20, 25), "learned": range(30, 34)}
ORDINARY = np.arange(40, 240)


def planted_trace(seed: int) -> dict[int, pa.Table]:
    """160 rollouts in which each kind of type is hard in its own way, and ordinary types make the text around them.

    - A rock occurs once a rollout, in one of two phrases, with high kl before and after.
    - An isolated type is twice as frequent, hard before and after every other time, never in the same context.
    - A rare type occurs a few times, with extreme kl before and after.
    - A learned type is frequent, in recurring phrases, hard before; what is left adds up to more than a rock's.
    """
    rng = np.random.default_rng(seed)
    phrases = {v: rng.choice(ORDINARY, (2, 10)) for v in (*ROCKS, *DECOYS["learned"])}
    rare_in = {v: set(rng.choice(160, 8, replace=False)) for v in DECOYS["rare"]}
    rollouts, tokens, before, after = [], [], [], []
    for rollout in range(160):
        places = [(v, 1.2, 1.2) for v in ROCKS]
        places += [(v, hard, hard) for v in DECOYS["isolated"] for hard in (1.8, 0.1)]
        places += [(v, 50.0, 50.0) for v in DECOYS["rare"] if rollout in rare_in[v]]
        places += [(v, 3.0, 0.35) for v in DECOYS["learned"] for _ in range(4)]
        for index in rng.permutation(len(places)):
            v, pre, post = places[index]
            around = rng.choice(phrases[v]) if v in phrases else rng.choice(ORDINARY, 10)
            easy_pre, easy_post = rng.exponential(0.3, (2, 10))
            noise = rng.uniform(0.9, 1.1)
            rollouts += [rollout] * 11
            tokens += [*around[:5], v, *around[5:]]
            before += [*easy_pre[:5], pre * noise, *easy_pre[5:]]
            after += [*easy_post[:5], post * noise, *easy_post[5:]]
    return {0: trace_of(rollouts, tokens, before), 100: trace_of(rollouts, tokens, after)}


def trace_of(rollouts: Any, tokens: Any, kl: Any) -> pa.Table:
    """Rows in order, two rollouts a prompt."""
    rollouts = np.asarray(rollouts)
    _, starts, lengths = np.unique(rollouts, return_index=True, return_counts=True)
    count, ones = len(rollouts), np.ones(len(rollouts))
    others = ("logp_student", "logp_teacher", "entropy_student", "entropy_teacher")
    return validate_table(
        pa.table(
            {
                "rollout_id": pa.array(rollouts, pa.int64()),
                "prompt_id": pa.array([f"p{rollout // 2:03}" for rollout in rollouts]),
                "position": pa.array(np.arange(count) - np.repeat(starts, lengths), pa.int32()),
                "token_id": pa.array(np.asarray(tokens), pa.int32()),
                **{name: pa.array(ones, pa.float32()) for name in ("grad_norm", "weight", *others)},
                "kl": pa.array(np.asarray(kl), pa.float32()),
                "policy_step": pa.array(np.zeros(count, dtype=int), pa.int32()),
            }
        )
    )


@pytest.fixture(scope="module", params=[0, 1, 2])
def planted(request, tmp_path_factory):
    tables = planted_trace(request.param)
    return TraceStore(write_trace(tmp_path_factory.mktemp("planted"), tables), threads=1)


def test_planted_rocks_rank_before_every_decoy(planted):
    rank_of = ranks(find_rocks(planted, embeddings=random_embeddings(1, 240, 32), **CONTEXT))
    assert sorted(rank_of(v) for v in ROCKS) == [1, 2, 3, 4, 5, 6]
    for kind, types in DECOYS.items():
        assert max(rank_of(v) for v in ROCKS) < min(rank_of(v) for v in types), kind


def test_without_contexts_every_kind_of_decoy_beats_a_planted_rock(planted):
    rank_of = ranks(find_rocks(planted, stage="score", **ANY))
    for kind, types in DECOYS.items():
        assert min(rank_of(v) for v in types) < max(rank_of(v) for v in ROCKS), kind


@pytest.mark.parametrize("by", [1, -1])
def test_planted_rocks_are_lost_when_kl_is_keyed_by_a_neighbour(tmp_path, by):
    tables = {step: keyed_by_another_token(table, by) for step, table in planted_trace(0).items()}
    store = TraceStore(write_trace(tmp_path, tables), threads=1)
    rank_of = ranks(find_rocks(store, embeddings=random_embeddings(1, 240, 32), **CONTEXT))
    assert min(rank_of(v) for v in ROCKS) > len(ROCKS)


def ranks(rocks: RockSet) -> Any:
    """The rank of a type; beyond all ranks where it has none."""
    found = {token.id: token.rank for token in rocks.tokens}
    return lambda v: found.get(v, 10**6)


# No circularity


@pytest.fixture(scope="module")
def noise():
    """Many types, none harder than another: whatever is found in it is chance."""
    rng = np.random.default_rng(11)
    rollouts = np.repeat(np.arange(120), 40)
    tokens = rng.integers(0, 600, len(rollouts))
    return {step: trace_of(rollouts, tokens, rng.exponential(1.0, len(rollouts))) for step in (0, 9)}


def test_the_half_that_selects_flatters_and_the_held_out_half_does_not(tmp_path, noise):
    store = TraceStore(write_trace(tmp_path, noise), threads=1)
    result = find(store, random_embeddings(2, 600), k=50, stage="score")
    groups = type_groups(result.sums.selection, result.columns, min_freq=2, seed=0)
    records = {(each.group, each.half): each for each in persistence_report(result.sums, groups, None, 0)}
    for group in (ROCK, HIGH_KL):
        seen, held_out = records[group, SELECTION], records[group, HELD_OUT]
        assert seen.kl_after > 1.3, group
        assert held_out.kl_after < 1.1, group
        assert seen.delta_interval[0] > 0, "on its own half, chance reads as a loss that rose"
        assert held_out.delta_interval[0] < 0 < held_out.delta_interval[1], group
    rocks = find_rocks(store, k=50, stage="score", **ANY)
    assert np.mean([token.mean_kl for token in rocks.tokens]) > 1.3 > rocks.summary["mean_kl_rocks"]
    assert rocks.summary["mean_kl_rocks"] == records[ROCK, HELD_OUT].kl_after


@pytest.mark.parametrize("k", [7, "auto"])
def test_held_out_prompts_have_no_say_in_the_selection(tmp_path, k):
    tables = varied_trace()
    _, measuring = naive_split(tables[9], 0.5, seed=3)
    rocks = rocks_of(tmp_path / "given", tables, k)
    for seed in (5, 6):
        others = {step: with_kl_changed(table, measuring, lambda kl, s=seed: s * kl) for step, table in tables.items()}
        again = rocks_of(tmp_path / f"other{seed}", others, k)
        assert chosen_by_selection(again) == chosen_by_selection(rocks)
        assert again.summary["mean_kl"] == pytest.approx(seed * rocks.summary["mean_kl"], rel=1e-6)


def test_the_selection_half_has_no_say_in_the_summary_of_a_set(tmp_path):
    """Twice the kl leaves the ranking and the persistent occurrences as they were, and so the set."""
    tables = varied_trace()
    selection, _ = naive_split(tables[9], 0.5, seed=3)
    doubled = {step: with_kl_changed(table, selection, lambda kl: 2 * kl) for step, table in tables.items()}
    rocks, again = rocks_of(tmp_path / "given", tables), rocks_of(tmp_path / "doubled", doubled)
    assert again.ids.tolist() == rocks.ids.tolist()
    assert [token.score for token in again.tokens] == [2 * token.score for token in rocks.tokens]
    assert [token.held_out_mean_kl for token in again.tokens] == [token.held_out_mean_kl for token in rocks.tokens]
    assert measured(again) == measured(rocks)
    assert again.summary["tau_post_nats"] == 2 * rocks.summary["tau_post_nats"]


def varied_trace() -> dict[int, pa.Table]:
    late = random_trace(21, prompts=20, vocabulary=30)
    # Multiples of 2^-12 stay multiples of 2^-24 when doubled: the sums have nothing to round.
    late, early = (with_levels(late, seed, [level / 4096 for level in range(9000)]) for seed in (1, 2))
    return {0: early, 9: late}


def with_kl_changed(table: pa.Table, prompts: list[str], change: Any) -> pa.Table:
    rows = table.select(["prompt_id", "kl"]).to_pylist()
    return with_column(
        table,
        "kl",
        [change(row["kl"]) if row["kl"] is not None and row["prompt_id"] in prompts else row["kl"] for row in rows],
    )


def rocks_of(run: Path, tables: dict[int, pa.Table], k: Any = 7) -> RockSet:
    store = TraceStore(write_trace(run, tables), threads=1)
    return find_rocks(store, embeddings=random_embeddings(0, 30, 3), k=k, gamma=0.6, tau=0.5, seed=3, **CONTEXT)


def chosen_by_selection(rocks: RockSet) -> list[Any]:
    """Everything about the rocks that the selection half decides."""
    tokens = [replace(token, held_out_mean_kl=None, held_out_change=None) for token in rocks.tokens]
    return [tokens, rocks.windows, rocks.criterion, *(rocks.summary[name] for name in ("k", *FROM_SELECTION))]


def measured(rocks: RockSet) -> dict[str, Any]:
    """Everything about the rocks that the held-out half decides."""
    return {name: value for name, value in rocks.summary.items() if name not in FROM_SELECTION}


FROM_SELECTION = ("tau_pre_nats", "tau_post_nats")
