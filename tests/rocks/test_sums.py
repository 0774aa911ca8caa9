"""Sums are exact integers, the same whatever the threads and parts, and quantiles are numpy's, bit for bit."""

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_oracle import (
    counted,
    large_trace,
    occurrences_of,
    random_trace,
    rescored,
    rollouts_of,
    shuffled,
    summed,
    with_column,
    write_trace,
)

from rocktokens.errors import RocktokensError
from rocktokens.rocks import sums as sums_module
from rocktokens.rocks.sums import (
    ONE,
    cluster_keys,
    cluster_sums,
    kl_quantiles,
    occurrences,
    prompts_of,
    rollout_shares,
    type_sums,
)
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


def test_rollout_shares_count_scored_rows_and_carry_the_cluster(tmp_path):
    table = shuffled(random_trace(2, samples=3), seed=0)
    rows = occurrences(TraceStore(write_trace(tmp_path, {0: table}, rows_per_part=70)).table(0))
    clusters = {f"p{index}": index % 5 for index in range(12) if index != 4}
    shares, numbers = rollout_shares(rows, np.array([0, 3]), as_table(clusters))
    known = rollouts_of([row for row in occurrences_of(table) if row["prompt_id"] in clusters])
    assert shares.tolist() == [sum(row["token_id"] in (0, 3) for row in some) / len(some) for some in known.values()]
    assert numbers.tolist() == [clusters[some[0]["prompt_id"]] for some in known.values()]
    nothing, _ = rollout_shares(rows, np.array([], dtype=np.int64), as_table(clusters))
    assert nothing.tolist() == [0.0] * len(known)


@pytest.mark.parametrize("seed", range(2))
def test_sums_by_cluster_equal_the_row_by_row_oracle(tmp_path, seed):
    """Prompts that share a cluster are added up; a prompt without a cluster is left out."""
    table = random_trace(seed)
    rows = occurrences(TraceStore(write_trace(tmp_path, {0: table}, rows_per_part=50)).table(0))
    clusters = {f"p{index}": index % 5 for index in range(11)}
    cells = {(cell["cluster"], cell["token_id"]): cell for cell in cluster_sums(rows, as_table(clusters)).to_pylist()}
    for cluster in range(5):
        expected = occurrences_of(table, {prompt for prompt, number in clusters.items() if number == cluster})
        found = {token_id: cell for (number, token_id), cell in cells.items() if number == cluster}
        assert {v: cell["freq"] for v, cell in found.items()} == counted(expected)
        for column in ("kl", "grad_norm"):
            assert {v: cell[column] for v, cell in found.items()} == summed(expected, column)
    some = cluster_sums(rows, as_table(clusters), ["freq", "kl"])
    assert some.column_names == ["cluster", "token_id", "freq", "kl"]
    assert {(cell["cluster"], cell["token_id"]): cell["kl"] for cell in some.to_pylist()} == {
        place: cell["kl"] for place, cell in cells.items()
    }
    whole = type_sums(occurrences(rows, list(clusters)))
    for v, key in as_dict(whole, "occurrence_key").items():
        assert key == sum(cell["occurrence_key"] for (_, token_id), cell in cells.items() if token_id == v)


def as_table(clusters: dict[str, int]) -> pa.Table:
    return pa.table({"prompt_id": list(clusters), "cluster": pa.array(clusters.values(), pa.int32())})


# Quantiles

KL = st.one_of(
    st.floats(-0.0009765625, 32768.0, width=32),
    st.floats(0.0, 2.0**-100, width=32),
    st.sampled_from([0.0, -0.0, 0.5, np.float32(0.1), -(2.0**-20), 2.0**-149, 32768.0]),
)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(KL, min_size=1, max_size=40),
    copies=st.integers(1, 3),
    share=st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.5, 0.8, 1.0, 1 / 3])),
    at_once=st.sampled_from([1, 3, 1 << 20]),
)
def test_a_quantile_is_numpys(values, copies, share, at_once):
    """Bit for bit, whether or not a bucket has more values than are sorted in memory."""
    kl = np.repeat(np.array(values, np.float32), copies)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums_module, "MAX_VALUES", at_once)
        assert kl_quantile(kl_rows(kl), share) == np.quantile(kl.astype(np.float64), share)


@pytest.mark.parametrize("at_once", [50, 1 << 20])
def test_many_quantiles_of_many_values_are_numpys(at_once, monkeypatch):
    """Buckets are divided twice and more: half of the values lie within 2^-20 of each other."""
    monkeypatch.setattr(sums_module, "MAX_VALUES", at_once)
    rng = np.random.default_rng(3)
    close = np.float32(2.0**-8) + np.arange(2000, dtype=np.float32) * np.float32(2.0**-31)
    kl = rng.permutation(np.concatenate([rng.exponential(0.5, 2000).astype(np.float32), close]))
    assert len(np.unique(close)) == 2000
    shares = [0.0, 1.0, 0.8, *rng.random(12).tolist()]
    assert kl_quantiles(kl_rows(kl), shares) == np.quantile(kl.astype(np.float64), shares).tolist()


def test_quantiles_are_interpolated_to_the_last_bit():
    """From the nearer neighbour, as numpy does: from the other one, some of these would be off by a bit."""
    rng = np.random.default_rng(0)
    kl = rng.exponential(1.0, 30).astype(np.float32)
    shares = [*rng.random(300).tolist(), 0.5, 0.5]
    found = kl_quantiles(kl_rows(kl), shares)
    assert found == np.quantile(kl.astype(np.float64), shares).tolist()
    assert found == [kl_quantile(kl_rows(kl), share) for share in shares[:3]] + found[3:]


def test_a_quantile_of_more_equal_values_than_fit_in_memory(monkeypatch):
    monkeypatch.setattr(sums_module, "MAX_VALUES", 10)
    equal = np.full(100, np.float32(0.7))
    assert kl_quantile(kl_rows(equal), 0.8) == float(np.float32(0.7))
    assert kl_quantile(kl_rows(np.append(equal, np.float32(5))), 0.995) == np.quantile([*equal.astype(float), 5], 0.995)


def test_a_quantile_is_of_scored_rows_and_needs_one(tmp_path):
    table = random_trace(6)
    rows = TraceStore(write_trace(tmp_path, {0: shuffled(table, 0)}, rows_per_part=90)).table(0)
    kl = np.array([row["kl"] for row in occurrences_of(table)])
    for share in (0.05, 0.8):
        assert kl_quantile(occurrences(rows), share) == np.quantile(kl, share)
    with pytest.raises(RocktokensError, match="over no occurrences is not defined: choose prompts that were scored"):
        kl_quantile(occurrences(rows, ["absent"]), 0.8)


def kl_quantile(rows: ir.Table, share: float) -> float:
    return kl_quantiles(rows, [share])[0]


def kl_rows(kl: np.ndarray) -> ir.Table:
    return ibis.memtable(pa.table({"kl": pa.array(kl, pa.float32())}))


# Occurrences


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


def test_keys_of_clusters_tell_which_of_them_have_other_occurrences(tmp_path):
    """Tokens, positions or rollouts that changed places show; other scores and another order of rows do not."""
    table = random_trace(3)
    clusters = as_table({f"p{index}": index % 3 for index in range(12)})
    scored = [i for i, row in enumerate(table.to_pylist()) if row["kl"] is not None]
    first, number_of = scored[0], {row["prompt_id"]: row["cluster"] for row in clusters.to_pylist()}
    numbers = [number_of[prompt] for prompt in table["prompt_id"].to_pylist()]
    keys_of_rows = list(zip(*(table[name].to_pylist() for name in ("token_id", "rollout_id", "position")), strict=True))
    others = [i for i in scored if all(a != b for a, b in zip(keys_of_rows[i], keys_of_rows[first], strict=True))]
    inside, outside = (next(i for i in others if (numbers[i] == numbers[first]) is same) for same in (True, False))
    changed = {
        1: shuffled(rescored(table, seed=9), seed=1),
        2: exchanged(table, "token_id", first, inside),
        3: exchanged(table, "token_id", first, outside),
        4: exchanged(table, "position", first, inside),
        5: exchanged(table, "rollout_id", first, inside),
    }
    store = TraceStore(write_trace(tmp_path, {0: table, **changed}), threads=1)
    keys = [cluster_keys(occurrences(store.table(step)), clusters).tolist() for step in range(6)]
    assert len(keys[0]) == 3
    expected = {1: [], 2: [first], 3: [first, outside], 4: [first], 5: [first]}
    for step, where in expected.items():
        differs = {number for number in range(3) if keys[step][number] != keys[0][number]}
        assert differs == {numbers[i] for i in where}, step


def exchanged(table: pa.Table, column: str, first: int, second: int) -> pa.Table:
    values = table[column].to_pylist()
    values[first], values[second] = values[second], values[first]
    return with_column(table, column, values)


def test_rollout_and_position_cannot_trade_places(tmp_path):
    table = with_column(random_trace(3).slice(0, 2), "token_id", [4, 4])
    table = with_column(table, "kl", [1.0, 1.0])
    given = with_column(with_column(table, "rollout_id", [2, 7]), "position", [5, 7])
    traded = with_column(with_column(table, "rollout_id", [5, 7]), "position", [2, 7])
    store = TraceStore(write_trace(tmp_path, {0: given, 1: traded}))
    assert not type_sums(store.table(0)).same_occurrences(type_sums(store.table(1)))


def test_rollouts_that_add_up_alike_are_told_apart(tmp_path):
    """0 + 3 = 1 + 2, but they are other occurrences."""
    table = with_column(with_column(random_trace(3).slice(0, 2), "token_id", [0, 0]), "kl", [1.0, 1.0])
    outer, inner = (with_column(with_column(table, "rollout_id", ids), "position", [0, 0]) for ids in ([0, 3], [1, 2]))
    store = TraceStore(write_trace(tmp_path, {0: outer, 1: inner}))
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
