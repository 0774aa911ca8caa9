"""Partners of rocks against every assignment there is, and random positions against the windows they copy."""

import re
from collections import Counter
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from trace_oracle import counted, occurrences_of, random_trace, rescored, with_column, write_trace

from rocktokens import ControlSet, match_controls
from rocktokens.errors import ControlMatchError, RocktokensError, TokenizerMismatchError
from rocktokens.rocks import controls as controls_module
from rocktokens.rocks.controls import (
    NO_PARTNER,
    Market,
    draw_partners,
    draw_set,
    make_market,
    match_type_sets,
    most_partners,
    random_positions,
)
from rocktokens.run_dir import RunDir
from rocktokens.traces.store import TraceStore
from rocktokens.types import RockSet, RockToken

STEP = 40


def rock_set(*ids: int, windows: dict | None = None) -> RockSet:
    tokens = [RockToken(i, f"\n{i}", rank, 2, 1.0, 2.0, None, None, "other") for rank, i in enumerate(ids, 1)]
    return RockSet("", {"reference": STEP}, {}, {}, tokens, windows)


def trace_of(freq: dict[int, int]) -> pa.Table:
    """A trace in which every type occurs as often as it should, in rollouts of 25 tokens and an odd last one."""
    tokens = np.random.default_rng(0).permutation(np.repeat(list(freq), list(freq.values())))
    rollout, position = np.divmod(np.arange(len(tokens)), 25)
    sample = random_trace(0).slice(0, 1)
    row = sample.take(np.zeros(len(tokens), np.int64))
    columns = {"rollout_id": rollout, "position": position, "token_id": tokens, "prompt_id": rollout.astype(str)}
    for name, values in columns.items():
        row = with_column(row, name, values)
    return row


def store_of(folder: Path, freq: dict[int, int]) -> TraceStore:
    return TraceStore(write_trace(folder, {STEP: trace_of(freq)}))


# The assignment


def market_of(rock_freq: list[int], candidate_freq: list[int], tolerance: float = 0.1) -> Market:
    freq = np.array([*rock_freq, *candidate_freq], dtype=np.int64)
    ids = np.arange(len(freq), dtype=np.int64)
    return make_market(ids, freq, ids[: len(rock_freq)], tolerance)


def assignments(market: Market) -> list[np.ndarray]:
    """Every way to give each rock a partner within 10 %."""
    every = permutations(range(len(market.freq)), len(market.rock_freq))
    within = (np.array(partners, dtype=np.int64) for partners in every)
    return [p for p in within if (10 * np.abs(market.freq[p] - market.rock_freq) <= market.rock_freq).all()]


def cost(market: Market, partners: np.ndarray) -> int:
    return int(np.abs(market.freq[partners] - market.rock_freq).sum())


def fits(market: Market, partners: np.ndarray) -> bool:
    return 50 * abs(int(market.freq[partners].sum() - market.rock_freq.sum())) <= market.rock_freq.sum()


@st.composite
def small_markets(draw) -> Market:
    """Up to four rocks and six candidates about as frequent, so that 10 % often but not always holds."""
    rock_freq = draw(st.lists(st.integers(30, 300), min_size=1, max_size=4))
    near = st.tuples(st.sampled_from(rock_freq), st.integers(-12, 12))
    candidates = draw(st.lists(near, max_size=6))
    return market_of(rock_freq, [freq + round(freq * off / 100) for freq, off in candidates])


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


@settings(deadline=None, max_examples=100)
@given(small_markets(), st.integers(0, 5))
def test_the_closest_match_is_the_best_of_all_assignments(market, seed):
    possible = assignments(market)
    assume(possible)
    partners = draw_partners(market, 0.0, generator(seed))
    assert partners.tolist() in [p.tolist() for p in possible]
    best = min(cost(market, p) for p in possible)
    fitting = [cost(market, p) for p in possible if fits(market, p)]
    assert fits(market, partners) == bool(fitting)
    if not fitting or all(fits(market, p) for p in possible if cost(market, p) == best):
        assert cost(market, partners) == best
    else:
        assert cost(market, partners) <= 1.01 * min(fitting) + 0.5


@settings(deadline=None, max_examples=100)
@given(small_markets(), st.integers(0, 5))
def test_varied_matches_keep_the_rules(market, seed):
    possible = assignments(market)
    assume(possible)
    partners = draw_partners(market, 1.0, generator(seed))
    assert partners.tolist() in [p.tolist() for p in possible]
    assert fits(market, partners) == any(fits(market, p) for p in possible)


@settings(deadline=None, max_examples=100)
@given(small_markets())
def test_as_many_rocks_as_possible_get_a_partner(market):
    partners = most_partners(market)
    matched = np.flatnonzero(partners != NO_PARTNER)
    assert len(set(partners[matched].tolist())) == len(matched)
    wanted = market.rock_freq[matched]
    assert (10 * np.abs(market.freq[partners[matched]] - wanted) <= wanted).all()
    assert len(matched) == max_matching(market)


def max_matching(market: Market) -> int:
    """The size of the largest matching, by augmenting paths."""
    owner: dict[int, int] = {}

    def seat(rock: int, seen: set[int]) -> bool:
        for candidate, freq in enumerate(market.freq.tolist()):
            near = 10 * abs(freq - int(market.rock_freq[rock])) <= int(market.rock_freq[rock])
            if near and candidate not in seen:
                seen.add(candidate)
                if candidate not in owner or seat(owner[candidate], seen):
                    owner[candidate] = rock
                    return True
        return False

    return sum(seat(rock, set()) for rock in range(len(market.rock_freq)))


def zipf_market(rocks: int, heavy: float = 0.0) -> Market:
    """A vocabulary of 8,000; with ``heavy`` one more rock holds that share of all, its only partners 9 % off."""
    freq = 3_000_000 // np.arange(10, 8010)
    chosen = np.random.default_rng(1).choice(np.arange(30, 1200), rocks, replace=False)
    rock_freq, others = freq[chosen].tolist(), np.delete(freq, chosen).tolist()
    if heavy:
        top = int(sum(rock_freq) * heavy / (1 - heavy))
        rock_freq, others = [top, *rock_freq], [round(0.91 * top), *others]
    return market_of(rock_freq, others)


def test_a_large_vocabulary_is_matched_closely_and_differently_each_time():
    market = zipf_market(rocks=300)
    closest = draw_partners(market, 0.0, generator(0))
    drawn = [draw_partners(market, 1.0, generator(seed)) for seed in range(1, 4)]
    for partners in (closest, *drawn):
        assert len(set(partners.tolist())) == 300
        assert (10 * np.abs(market.freq[partners] - market.rock_freq) <= market.rock_freq).all()
        assert fits(market, partners)
    assert all(cost(market, closest) < cost(market, partners) for partners in drawn)
    shared = [len(set(first.tolist()) & set(second.tolist())) for first, second in permutations(drawn, 2)]
    assert max(shared) < 240


def test_many_rocks_make_up_for_a_heavy_one_whose_partner_is_far_off():
    market = zipf_market(rocks=60, heavy=0.45)
    unconstrained = most_partners(market)
    assert not fits(market, unconstrained)
    for jitter in (0.0, 1.0):
        partners = draw_partners(market, jitter, generator(0))
        assert fits(market, partners)
        assert len(set(partners.tolist())) == 61
        assert (10 * np.abs(market.freq[partners] - market.rock_freq) <= market.rock_freq).all()


def test_tolerance_is_the_decimal_one():
    assert 0.29 * 100 < 29
    assert market_of([100], [129], tolerance=0.29).allowed_gap.tolist() == [29]


# Controls of a run


FREQ = {3: 200, 7: 90, 11: 60, 4: 190, 5: 215, 6: 95, 8: 84, 9: 62, 10: 57, 12: 61, 20: 5}
ROCKS = (7, 3, 11)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return store_of(tmp_path_factory.mktemp("run"), FREQ)


def test_controls_are_partners_by_rank_with_their_numbers(store):
    controls = match_controls(store, rock_set(*ROCKS), draws=6, seed=2)
    assert controls.rock_ids == list(ROCKS)
    assert controls.rock_freq == [90, 200, 60]
    assert len(controls) == 6
    assert controls.n_distinct == len({frozenset(draw.ids) for draw in controls}) > 1
    for draw in controls:
        assert draw.freq == [FREQ[token_id] for token_id in draw.ids]
        assert len(set(draw.ids)) == 3
        assert not set(draw.ids) & set(ROCKS)
        gaps = [abs(freq - rock) / rock for freq, rock in zip(draw.freq, controls.rock_freq, strict=True)]
        assert draw.max_gap == max(gaps) <= 0.1
        assert draw.total == sum(draw.freq)
        assert draw.total_gap == (draw.total - 350) / 350
        assert abs(draw.total_gap) <= 0.02


def test_the_first_draw_is_the_closest_and_ties_follow_the_seed(store):
    """12 is nearest to 11, by one; 6 is nearest to 7; of the two for 3, 4 is nearer."""
    for seed in range(3):
        assert match_controls(store, rock_set(*ROCKS), draws=1, seed=seed).draws[0].ids == [6, 4, 12]


def test_what_is_excluded_is_no_candidate_though_rocks_stay_rocks(store):
    """Without 4, nothing but 5 is as frequent as 3; with 5 the total only fits with rarer partners for the others."""
    controls = match_controls(store, rock_set(*ROCKS), draws=1, excluded=[4, *ROCKS])
    assert controls.rock_ids == list(ROCKS)
    assert controls.draws[0].ids == [8, 5, 10]
    assert controls.criterion["excluded"] == [3, 4, 7, 11]


def test_equally_frequent_candidates_take_turns(tmp_path):
    store = store_of(tmp_path, {1: 50, **dict.fromkeys(range(10, 20), 50)})
    first = {match_controls(store, rock_set(1), draws=1, seed=seed).draws[0].ids[0] for seed in range(12)}
    assert len(first) > 4
    assert match_controls(store, rock_set(1), draws=8, seed=0).n_distinct > 3


def test_the_same_seed_gives_the_same_draws_however_many(store, tmp_path):
    few, many = (match_controls(store, rock_set(*ROCKS), draws=draws, seed=5) for draws in (3, 6))
    assert many.draws[:3] == few.draws
    assert match_controls(store, rock_set(*ROCKS), draws=6, seed=5) == many
    assert match_controls(store, rock_set(*ROCKS), draws=6, seed=6).draws != many.draws
    many.save(tmp_path / "controls.json")
    assert ControlSet.load(tmp_path / "controls.json") == many
    assert many.criterion == {"reference": STEP, "tolerance": 0.1, "draws": 6, "seed": 5, "total_tolerance": 0.02}
    assert many.source == {"manifest_sha256": store.manifest_sha256}


def test_frequencies_are_those_of_scored_rows_at_the_reference_checkpoint(tmp_path):
    early, late = random_trace(1, prompts=40, vocabulary=7), random_trace(2, prompts=40, vocabulary=7)
    store = TraceStore(write_trace(tmp_path, {0: early, STEP: late}))
    freq = counted(occurrences_of(late))
    assert freq != counted(occurrences_of(early))
    controls = match_controls(store, rock_set(1, 2), tolerance=1.0, draws=3)
    assert controls.rock_freq == [freq[1], freq[2]]
    assert all(draw.freq == [freq[token_id] for token_id in draw.ids] for draw in controls)


def test_a_total_that_misses_is_mended_by_choosing_otherwise(tmp_path):
    """Nearest are 960 and 900, 40 too few of 1,900 and so 2.1 %; 960 and 920 are 20 too few."""
    store = store_of(tmp_path, {1: 1000, 2: 900, 10: 960, 11: 900, 12: 920, 13: 1090})
    for draw in match_controls(store, rock_set(1, 2), draws=4):
        assert abs(draw.total_gap) <= 0.02
    closest = match_controls(store, rock_set(1, 2), draws=1).draws[0]
    assert closest.ids == [10, 12]
    assert closest.total_gap == -20 / 1900


# Refusals


def refusal(folder: Path, freq: dict[int, int], *rocks: int) -> ControlMatchError:
    with pytest.raises(ControlMatchError) as caught:
        match_controls(store_of(folder, freq), rock_set(*rocks))
    return caught.value


def test_rocks_without_a_partner_are_named(tmp_path):
    error = refusal(tmp_path, {1: 100, 2: 300, 3: 50, 10: 95, 11: 260, 12: 20}, 2, 1, 3)
    assert error.unmatched == [2, 3]
    assert str(error) == (
        "2 of 3 rocks get no partner within ±10 % of their frequency ('\\n2' (id 2) occurs 300 times, the nearest type "
        "left 260; '\\n3' (id 3) occurs 50 times, the nearest type left 20): raise tolerance, take fewer rocks (k), or "
        "use the occurrence-matched control (random_positions), which is always possible"
    )


def test_two_rocks_cannot_share_a_partner(tmp_path):
    error = refusal(tmp_path, {1: 100, 2: 104, 10: 102, 11: 7}, 1, 2)
    assert len(error.unmatched) == 1
    assert "1 of 2 rocks get no partner within ±10 %" in str(error)
    assert "the nearest type left 7)" in str(error)
    nearer = refusal(tmp_path / "nearer", {1: 100, 2: 104, 10: 101}, 1, 2)
    assert nearer.unmatched == [2]
    assert "(id 2) occurs 104 times, no type is left)" in str(nearer)


def test_every_rock_without_partner_is_named(tmp_path):
    error = refusal(tmp_path, dict.fromkeys(range(5), 10), *range(5))
    assert error.unmatched == [0, 1, 2, 3, 4]
    assert re.search(r"; nor do '[^']+', '[^']+'\)", str(error))


def test_a_rock_that_does_not_occur_has_no_partner(tmp_path):
    error = refusal(tmp_path, {1: 100, 10: 100}, 1, 99)
    assert error.unmatched == [99]
    assert "(id 99) occurs 0 times" in str(error)


def test_a_total_that_cannot_be_met_says_by_how_much(tmp_path):
    error = refusal(tmp_path, {1: 100, 2: 200, 10: 95, 11: 191, 12: 230}, 1, 2)
    assert error.unmatched == []
    assert str(error).startswith(
        "the rocks occur 300 times and their closest partners 286 times, -4.7 %, and no others within ±10 % of each "
        "rock were found that come within 2 % in all: raise tolerance"
    ), str(error)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tolerance": -0.1}, r"tolerance = -0\.1 is not valid: give a share from 0 to 1"),
        ({"tolerance": float("nan")}, "tolerance = nan is not valid"),
        ({"tolerance": "0.1"}, r"tolerance = '0\.1' is not valid"),
        ({"draws": 0}, "draws = 0 is not valid: give a whole number of at least 1"),
        ({"seed": -1}, "seed = -1 is not valid: give a whole number of at least 0"),
    ],
)
def test_bad_parameters_are_named(store, options, sentence):
    with pytest.raises(RocktokensError, match=sentence):
        match_controls(store, rock_set(*ROCKS), **options)


@pytest.mark.parametrize("look", [match_controls, random_positions])
def test_rocks_that_do_not_belong_to_the_store_are_refused(store, tmp_path, look):
    rocks = rock_set(*ROCKS)
    with pytest.raises(RocktokensError, match="rocks holds no tokens"):
        look(store, replace(rocks, tokens=[]))
    with pytest.raises(RocktokensError, match=r"rocks\.criterion names no reference checkpoint"):
        look(store, replace(rocks, criterion={}))
    with pytest.raises(RocktokensError, match="reference = 3 is not a traced checkpoint: available are 40"):
        look(store, replace(rocks, criterion={"reference": 3}))
    RunDir(write_trace(tmp_path, {STEP: trace_of(FREQ)})).update_manifest(tokenizer_sha256="0" * 64)
    with pytest.raises(TokenizerMismatchError, match="found with tokenizer ffffffffffff"):
        look(TraceStore(tmp_path), replace(rocks, tokenizer_sha256="f" * 64))
    assert look(TraceStore(tmp_path), replace(rocks, tokenizer_sha256="0" * 64))


# Random positions

WINDOWS = {"max_each_side": 2, "min_kl": 0.7}


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> tuple[TraceStore, pa.Table]:
    late = random_trace(5, prompts=15, vocabulary=6)
    shuffled = late.take(np.random.default_rng(0).permutation(len(late)))
    run = write_trace(tmp_path_factory.mktemp("run"), {0: rescored(late, 1), STEP: shuffled}, rows_per_part=100)
    return TraceStore(run), late


def runs_by_rollout(hits: list[tuple[int, int]]) -> dict[int, Counter]:
    """How many runs of each length the hit positions of a rollout make."""
    runs: dict[int, Counter] = {}
    chosen = set(hits)
    for rollout_id, position in sorted(chosen):
        if (rollout_id, position - 1) not in chosen:
            length = 1
            while (rollout_id, position + length) in chosen:
                length += 1
            runs.setdefault(rollout_id, Counter())[length] += 1
    return runs


def window_positions(table: pa.Table, rock_ids: set[int], windows: dict | None) -> list[tuple[int, int]]:
    """(rollout, position) of the rocks and their windows, by a walk from each."""
    rows = {(row["rollout_id"], row["position"]): row for row in table.to_pylist()}
    high = {at for at, row in rows.items() if windows and row["kl"] is not None and row["kl"] >= windows["min_kl"]}
    hits = {at for at, row in rows.items() if row["token_id"] in rock_ids}
    for rollout_id, position in list(hits):
        for direction in (-1, 1):
            distance = 0
            while windows and distance <= windows["max_each_side"]:
                at = (rollout_id, position + direction * distance)
                if at not in high:
                    break
                hits.add(at)
                distance += 1
    return sorted(hits)


@pytest.mark.parametrize("windows", [None, WINDOWS])
def test_random_positions_have_the_runs_of_the_rocks_in_every_rollout(scored, windows):
    store, table = scored
    wanted = window_positions(table, {1, 3}, windows)
    rows = {(row["rollout_id"], row["position"]): row for row in table.to_pylist()}
    drawn = random_positions(store, rock_set(1, 3, windows=windows), draws=3, seed=4)
    places = []
    for hits in drawn:
        assert hits.column_names == ["rollout_id", "position", "token_id", "kl"]
        at = list(zip(hits["rollout_id"].to_pylist(), hits["position"].to_pylist(), strict=True))
        assert at == sorted(set(at))
        assert hits["token_id"].to_pylist() == [rows[place]["token_id"] for place in at]
        assert hits["kl"].to_pylist() == [rows[place]["kl"] for place in at]
        assert runs_by_rollout(at) == runs_by_rollout(wanted)
        places.append(at)
    assert places[0] != wanted
    assert len({tuple(at) for at in places}) == 3


def test_windows_take_more_positions_than_the_rocks_alone(scored):
    _, table = scored
    alone, windows = (len(window_positions(table, {1, 3}, rule)) for rule in (None, WINDOWS))
    assert windows > 1.2 * alone


def test_random_positions_depend_on_nothing_but_the_seed(scored, monkeypatch):
    store, _ = scored
    rocks = rock_set(1, 3, windows=WINDOWS)
    at_once = random_positions(store, rocks, draws=2, seed=4)
    monkeypatch.setattr(controls_module, "ROWS_PER_BLOCK", 37)
    assert random_positions(store, rocks, draws=2, seed=4) == at_once
    assert random_positions(store, rocks, draws=1, seed=4) == at_once[:1]
    assert random_positions(store, rocks, draws=1, seed=5) != at_once[:1]


# Sets of whole types


def fitting_sets(amounts: np.ndarray, wanted: np.ndarray) -> set[tuple[int, ...]]:
    """Every set of candidates within 2 % of both amounts, in exact arithmetic."""
    found, columns = set(), range(amounts.shape[1])
    for size in columns:
        for chosen in combinations(columns, size + 1):
            totals = [sum(int(amounts[row, column]) for column in chosen) for row in range(2)]
            if all(50 * abs(total - int(want)) <= int(want) for total, want in zip(totals, wanted, strict=True)):
                found.add(chosen)
    return found


@given(seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_a_set_is_drawn_exactly_where_there_is_one(seed: int):
    rng = np.random.default_rng(seed)
    amounts = np.stack([rng.integers(1, 60, 8), rng.integers(1, 10**9, 8)])
    wanted = np.stack([rng.integers(20, 120), rng.integers(10**8, 3 * 10**9)])
    if seed % 2:  # half of the cases have a set that fits
        wanted = amounts[:, rng.random(8) < 0.5].sum(axis=1)
    every = fitting_sets(amounts, wanted)
    drawn = draw_set(amounts, wanted, rng)
    assert (drawn is None) == (not every)
    assert drawn is None or tuple(np.flatnonzero(drawn)) in every


def test_type_sets_match_the_total_and_the_kl_of_the_rocks(tmp_path: Path):
    rng = np.random.default_rng(3)
    rows = trace_of({token_id: int(count) for token_id, count in enumerate(rng.integers(20, 90, 24))})
    rows = with_column(rows, "kl", rng.gamma(0.5, 1.0, len(rows)).astype(np.float32))
    store, rocks = TraceStore(write_trace(tmp_path / "run", {STEP: rows})), rock_set(3, 7, 11)
    controls = match_type_sets(store, rocks, draws=4, seed=2)
    ids, kl = rows["token_id"].to_numpy(), rows["kl"].to_numpy().astype(np.float64)
    of_rocks = np.isin(ids, rocks.ids)
    for draw in controls:
        inside = np.isin(ids, draw.ids)
        assert not set(draw.ids) & set(rocks.ids.tolist()) and draw.total == inside.sum() == sum(draw.freq)
        assert draw.total_gap == pytest.approx(inside.sum() / of_rocks.sum() - 1, abs=1e-9) and draw.max_gap is None
        assert draw.kl_gap == pytest.approx(kl[inside].sum() / kl[of_rocks].sum() - 1, abs=1e-6)
        assert abs(draw.total_gap) <= 0.02 and abs(draw.kl_gap) <= 0.02
    assert controls.n_distinct > 1 and match_type_sets(store, rocks, draws=2, seed=2).draws == controls.draws[:2]
    controls.save(tmp_path / "type_sets.json")
    assert ControlSet.load(tmp_path / "type_sets.json") == controls


def test_rocks_that_hold_most_of_the_kl_have_no_set(tmp_path: Path):
    rows = trace_of({1: 10, 2: 20, 3: 30})
    rows = with_column(rows, "kl", np.where(rows["token_id"].to_numpy() == 2, 3.0, 0.5).astype(np.float32))
    store = TraceStore(write_trace(tmp_path, {STEP: rows}))
    sentence = (
        r"^no set of other types occurs as often as the rocks \(33\.3 % of the tokens\) and has as much kl \(75\.0 % "
        r"of it\), within 2 % of both: match positions instead \(loss_control\), which is always possible, or"
    )
    with pytest.raises(ControlMatchError, match=sentence):
        match_type_sets(store, rock_set(2), draws=1)
