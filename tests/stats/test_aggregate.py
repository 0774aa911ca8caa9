"""Sums are exact integers, the same whatever the threads and parts, and never overflow unnoticed."""

import ibis
import ibis.expr.types as ir
import numpy as np
import pytest
from trace_oracle import counted, large_trace, occurrences_of, random_trace, rescored, summed, with_column, write_trace

from rocktokens.errors import RocktokensError
from rocktokens.stats.aggregate import ONE, occurrences, prompts_of, share_per_rollout, type_sums
from rocktokens.traces.schema import MAX_SCORE
from rocktokens.traces.store import TraceStore


def as_dict(sums, column: str) -> dict[int, int]:
    return dict(zip(sums.token_id.tolist(), getattr(sums, column).tolist(), strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_sums_equal_the_row_by_row_oracle(tmp_path, seed):
    table = random_trace(seed)
    rows = occurrences(TraceStore(write_trace(tmp_path, {0: table}, rows_per_part=50)).table(0))
    sums, expected = type_sums(rows), occurrences_of(table)
    assert as_dict(sums, "freq") == counted(expected)
    assert as_dict(sums, "kl") == summed(expected)
    assert as_dict(sums, "grad_norm") == summed(expected, "grad_norm")
    assert np.all(np.diff(sums.token_id) > 0)


def test_sums_over_chosen_prompts(tmp_path):
    table = random_trace(1)
    rows = TraceStore(write_trace(tmp_path, {0: table})).table(0)
    assert prompts_of(rows) == sorted(f"p{index}" for index in range(12))
    chosen = type_sums(occurrences(rows, ["p3", "p11", "absent"]))
    assert as_dict(chosen, "kl") == summed(occurrences_of(table, {"p3", "p11"}))


def test_halves_round_up_at_the_last_bit(tmp_path):
    """Engines disagree on round(); floor(x + 1/2) does not leave them the choice."""
    table = random_trace(0).slice(0, 6)
    values = np.array([0.5, 1.5, 2.5, 0.4999, -0.5, -1.5], np.float32) / ONE
    run = write_trace(tmp_path, {0: with_column(with_column(table, "kl", values), "token_id", np.arange(6))})
    assert type_sums(TraceStore(run).table(0)).kl.tolist() == [1, 2, 3, 0, 0, -1]


def test_threads_and_parts_do_not_change_a_bit(tmp_path):
    table = large_trace(0)
    one = write_trace(tmp_path / "one", {0: table})
    many = write_trace(tmp_path / "many", {0: table.take(np.random.default_rng(0).permutation(len(table)))}, 90_000)
    sums = [type_sums(TraceStore(run, threads=n).table(0)) for run in (one, many) for n in (1, 2)]
    for column in ("token_id", "freq", "kl", "grad_norm", "occurrence_key"):
        assert len({getattr(each, column).tobytes() for each in sums}) == 1, column


def test_share_per_rollout_counts_scored_rows_only(tmp_path):
    table = random_trace(2)
    shares = share_per_rollout(occurrences(TraceStore(write_trace(tmp_path, {0: table})).table(0)), np.array([0, 3]))
    by_rollout: dict[int, list[bool]] = {}
    for row in occurrences_of(table):
        by_rollout.setdefault(row["rollout_id"], []).append(row["token_id"] in (0, 3))
    assert shares.tolist() == [sum(hits) / len(hits) for _, hits in sorted(by_rollout.items())]


def test_the_same_occurrences_are_recognised_and_others_are_not(tmp_path):
    table = random_trace(3)
    swapped = table["token_id"].to_numpy().copy()
    scored = np.flatnonzero(table["kl"].is_valid().to_numpy())
    first = scored[0]
    other = next(index for index in scored if swapped[index] != swapped[first])
    swapped[[first, other]] = swapped[[other, first]]
    run = write_trace(
        tmp_path,
        {
            0: table,
            1: rescored(table, seed=9).take(list(reversed(range(len(table))))),
            2: with_column(table, "token_id", swapped),
            3: table.slice(0, len(table) - 1) if first != len(table) - 1 else table.slice(1),
            4: with_column(table, "rollout_id", table["rollout_id"].to_numpy() + 1),
        },
    )
    store = TraceStore(run)
    sums = [type_sums(occurrences(store.table(step))) for step in range(5)]
    assert [sums[0].same_occurrences(each) for each in sums] == [True, True, False, False, False]


def test_rollout_and_position_cannot_trade_places(tmp_path):
    table = with_column(random_trace(3).slice(0, 2), "token_id", [4, 4])
    table = with_column(table, "kl", [1.0, 1.0])
    given = with_column(with_column(table, "rollout_id", [2, 7]), "position", [5, 7])
    traded = with_column(with_column(table, "rollout_id", [5, 7]), "position", [2, 7])
    store = TraceStore(write_trace(tmp_path, {0: given, 1: traded}))
    assert not type_sums(store.table(0)).same_occurrences(type_sums(store.table(1)))


def test_a_sum_that_could_leave_int64_is_refused_and_one_that_cannot_is_exact(tmp_path):
    """2^24 tokens of 2^15 nats would: the bound is checked on rows × largest score, before anything is summed."""
    table = with_column(random_trace(0).slice(0, 1), "kl", [MAX_SCORE])
    row = TraceStore(write_trace(tmp_path, {0: table})).table(0)
    with pytest.raises(RocktokensError, match="16777216 rows with kl up to 32768 exceed what fixed-point sums hold"):
        type_sums(repeated(row, 1 << 24))
    assert type_sums(repeated(row, 1 << 20)).kl.tolist() == [2**20 * int(MAX_SCORE) * ONE]


def repeated(row: ir.Table, count: int) -> ir.Table:
    return row.cross_join(ibis.range(count).unnest().name("n").as_table())
