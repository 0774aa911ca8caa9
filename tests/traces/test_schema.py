"""Rows carry what was sampled and scored, and nothing ill-formed gets in."""

import numpy as np
import pyarrow as pa
import pytest
from sample_traces import SCORES, rollout, sample_table, scores

from rocktokens.traces.schema import MAX_SCORE, TraceError, trace_table, validate_table
from rocktokens.types import NO_TOKEN


def test_rows_are_the_rollouts_in_order_keyed_by_the_predicted_token():
    rollouts = [rollout(4, [7, 8, 9], "a", policy_step=2), rollout(5, [], "b"), rollout(9, [3, 7], "c", policy_step=6)]
    table = trace_table(rollouts, scores(5), np.array([1, 0, 0.5, 1, 0], np.float32))
    rows = table.to_pylist()
    assert [row["rollout_id"] for row in rows] == [4, 4, 4, 9, 9]
    assert [row["prompt_id"] for row in rows] == ["a", "a", "a", "c", "c"]
    assert [row["position"] for row in rows] == [0, 1, 2, 0, 1]
    assert [row["token_id"] for row in rows] == [7, 8, 9, 3, 7]
    assert [row["policy_step"] for row in rows] == [2, 2, 2, 6, 6]
    assert [row["weight"] for row in rows] == [1, 0, 0.5, 1, 0]
    for name in SCORES:
        np.testing.assert_array_equal(table[name].to_numpy(), getattr(scores(5), name))


def test_a_trace_table_is_valid_as_it_is_and_weighs_one_by_default():
    table = sample_table(20)
    assert validate_table(table).equals(table, check_metadata=True)
    assert table["weight"].to_pylist() == [1.0] * 20


def test_no_rollouts_give_an_empty_valid_table():
    assert validate_table(trace_table([], scores(0), None)).num_rows == 0


def test_frozen_positions_become_nulls():
    given = scores(3)
    for name in SCORES:
        getattr(given, name)[1] = np.nan
    table = validate_table(trace_table([rollout(0, [1, 2, 3])], given, None))
    assert all(table[name].is_null().to_pylist() == [False, True, False] for name in SCORES)


def test_scores_of_another_length_are_refused():
    with pytest.raises(TraceError, match=r"kl has shape \(4,\) but the rollouts have 3 response tokens"):
        trace_table([rollout(0, [1, 2, 3])], scores(4), None)


def test_the_likeliest_tokens_stand_beside_their_rows():
    ids_TK, logp_TK = np.arange(6, dtype=np.int32).reshape(3, 2), -np.arange(6, dtype=np.float32).reshape(3, 2)
    rollouts = [rollout(0, [7, 8]), rollout(1, [9])]
    for order in (np.ascontiguousarray, np.asfortranarray):
        tops = {"teacher_top": (order(ids_TK), order(logp_TK))}
        table = trace_table(rollouts, scores(3), tops=tops)
        assert validate_table(table).equals(table, check_metadata=True)
        assert table.drop(["teacher_top"]).equals(trace_table(rollouts, scores(3)))
        assert table["teacher_top"].to_pylist() == [
            [{"id": 0, "logp": 0.0}, {"id": 1, "logp": -1.0}],
            [{"id": 2, "logp": -2.0}, {"id": 3, "logp": -3.0}],
            [{"id": 4, "logp": -4.0}, {"id": 5, "logp": -5.0}],
        ]


def test_where_fewer_tokens_are_known_the_list_is_shorter():
    ids_TK = np.array([[4, 2], [NO_TOKEN, NO_TOKEN], [7, NO_TOKEN]], dtype=np.int32)
    logp_TK = np.array([[-1.0, -2.0], [-np.inf, -np.inf], [-np.inf, -np.inf]], dtype=np.float32)
    table = trace_table([rollout(0, [1, 2, 3])], scores(3), tops={"teacher_top": (ids_TK, logp_TK)})
    assert [[own["id"] for own in row] for row in table["teacher_top"].to_pylist()] == [[4, 2], [], [7]]


def test_likeliest_tokens_of_another_length_are_refused():
    ids_TK, logp_TK = np.zeros((2, 4), np.int32), np.zeros((2, 4), np.float32)
    with pytest.raises(TraceError, match=r"student_top has ids of shape \(2, 4\) .* have 3 response tokens"):
        trace_table([rollout(0, [1, 2, 3])], scores(3), tops={"student_top": (ids_TK, logp_TK)})
    with pytest.raises(TraceError, match=r"log-probabilities of shape \(2, 3\)"):
        trace_table([rollout(0, [1, 2])], scores(2), tops={"student_top": (ids_TK, logp_TK[:, :3])})


def replaced(name: str, values: pa.Array) -> pa.Table:
    table = sample_table(3)
    return table.set_column(table.column_names.index(name), name, values)


def test_lossless_casts_are_made():
    table = sample_table(3)
    wide = table.cast(
        pa.schema(
            [
                pa.field(field.name, {pa.int32(): pa.int64(), pa.float32(): pa.float64()}.get(field.type, field.type))
                for field in table.schema
            ]
        )
    )
    wide = wide.set_column(1, "prompt_id", wide["prompt_id"].dictionary_encode())
    shuffled = wide.select(list(reversed(wide.column_names)))
    assert validate_table(shuffled).equals(table, check_metadata=True)


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("token_id", pa.array([1, 2, 2**31], pa.int64()), "column token_id is int64 and does not fit int32"),
        ("kl", pa.array([0, 1, 2]), "column kl is int64 and does not fit float"),
        ("kl", pa.array([0, 1e300, 1], pa.float64()), "column kl holds inf"),
        ("position", pa.array(["0", "1", "2"]), "column position is string and does not fit int32"),
        ("position", pa.array([0.0, 1.0, 2.0]), "column position is double and does not fit int32"),
        ("prompt_id", pa.array([1, 2, 3]), "column prompt_id is int64 and does not fit string"),
        ("prompt_id", pa.array(["a", None, "b"]), "column prompt_id has nulls"),
        ("weight", pa.array([1, None, 1], pa.float32()), "column weight has nulls"),
        ("kl", pa.array([0, np.nan, 1], pa.float32()), "column kl holds nan"),
        ("kl", pa.array([0, np.inf, 1], pa.float32()), "column kl holds inf"),
        ("kl", pa.array([0, -0.01, 1], pa.float32()), "column kl holds -0.01"),
        ("kl", pa.array([0, MAX_SCORE * 1.01, 1], pa.float32()), "it must lie between -0.001 and 32768"),
        ("grad_norm", pa.array([0, -0.01, 1], pa.float32()), "column grad_norm holds -0.01"),
    ],
)
def test_ill_formed_columns_are_refused_in_one_sentence(name: str, values: pa.Array, sentence: str):
    with pytest.raises(TraceError, match=sentence) as caught:
        validate_table(replaced(name, values))
    assert "\n" not in str(caught.value)


def test_rounding_below_zero_and_nulls_are_accepted():
    values = pa.array([-1e-7, None, MAX_SCORE], pa.float32())
    assert validate_table(replaced("kl", values))["kl"].combine_chunks().equals(values)


def test_scores_of_a_notebook_are_rounded_to_float32():
    values = [0.1, None, 1 / 3]
    valid = validate_table(replaced("kl", pa.array(values, pa.float64())))
    assert valid["kl"].to_pylist() == [np.float32(0.1), None, np.float32(1 / 3)]


def test_missing_unknown_and_doubled_columns_are_named():
    table = sample_table(3)
    with pytest.raises(TraceError, match="lacks column kl"):
        validate_table(table.drop_columns(["kl"]))
    with pytest.raises(TraceError, match="column surprise is not part of a trace"):
        validate_table(table.append_column("surprise", table["kl"]))
    with pytest.raises(TraceError, match="column kl appears twice"):
        validate_table(table.append_column("kl", table["kl"]))


def test_top_columns_are_optional_and_typed():
    top = [[{"id": 3, "logp": -0.5}, {"id": 4, "logp": -1.0}], [], None]
    table = sample_table(3).append_column("student_top", pa.array(top))
    valid = validate_table(table)
    assert valid.schema.field("student_top").type == pa.list_(pa.struct([("id", pa.int32()), ("logp", pa.float32())]))
    assert valid["student_top"].to_pylist() == top
    with pytest.raises(TraceError, match="column student_top"):
        validate_table(sample_table(3).append_column("student_top", pa.array([1, 2, 3])))
