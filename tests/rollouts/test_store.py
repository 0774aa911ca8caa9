"""Rollouts on disk: an exact round trip, and a file that is not what was committed is refused."""

import dataclasses
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rocktokens.errors import RunDirError
from rocktokens.rollouts.store import (
    bytes_rollouts,
    read_rollouts,
    rollouts_bytes,
    rollouts_table,
    table_rollouts,
    write_rollouts,
)
from rocktokens.run_dir import RunDir
from rocktokens.types import Rollout

ids = arrays.arrays(np.int32, st.integers(0, 12))
rollouts_lists = st.lists(
    st.builds(
        Rollout,
        rollout_id=st.integers(0, 2**63 - 1),
        prompt_id=st.text(st.characters(exclude_categories=["Cs"])),
        sample=st.integers(0, 2**31 - 1),
        prompt_ids=ids,
        token_ids=ids,
        logprobs=arrays.arrays(np.float32, st.integers(0, 12)),
        policy_step=st.integers(0, 2**31 - 1),
        finished=st.booleans(),
    ),
    max_size=6,
)


def assert_same(left: list[Rollout], right: list[Rollout]) -> None:
    """Equal to the last bit, NaNs included, and of the same types."""
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        for field in dataclasses.fields(Rollout):
            first, second = getattr(one, field.name), getattr(other, field.name)
            assert type(first) is type(second)
            if isinstance(first, np.ndarray):
                assert (first.dtype, first.tobytes()) == (second.dtype, second.tobytes())
                assert first.flags.writeable
            else:
                assert first == second


def some_rollouts(count: int) -> list[Rollout]:
    rng = np.random.default_rng(0)
    return [
        Rollout(
            index, f"p{index // 2}", index % 2, rng.integers(0, 90, 5).astype(np.int32),
            rng.integers(0, 90, index + 1).astype(np.int32), -rng.random(index + 1, np.float32), 3, index % 3 == 0,
        )
        for index in range(count)
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(rollouts_lists)
def test_the_round_trip_through_a_table_is_exact(rollouts):
    assert_same(table_rollouts(rollouts_table(rollouts)), rollouts)
    assert_same(bytes_rollouts(rollouts_bytes(rollouts)), rollouts)


@settings(max_examples=30, deadline=None)
@given(rollouts_lists, st.data())
def test_a_slice_of_a_table_is_a_slice_of_the_rollouts(rollouts, data):
    start = data.draw(st.integers(0, len(rollouts)))
    assert_same(table_rollouts(rollouts_table(rollouts).slice(start)), rollouts[start:])


def test_the_round_trip_through_a_run_is_exact_and_repeatable(tmp_path):
    rollouts = some_rollouts(9)
    run, other = RunDir(tmp_path / "a"), RunDir(tmp_path / "b")
    entry = write_rollouts(run, "rollouts/training/step-1.parquet", rollouts)
    assert entry.rows == 9
    assert_same(read_rollouts(run, "rollouts/training/step-1.parquet"), rollouts)
    assert write_rollouts(other, "rollouts/x.parquet", rollouts).sha256 == entry.sha256


def test_a_changed_missing_or_newer_file_is_refused(tmp_path):
    run = RunDir(tmp_path)
    write_rollouts(run, "rollouts/probe.parquet", some_rollouts(3))
    write_rollouts(run, "rollouts/newer.parquet", some_rollouts(3))
    with pytest.raises(RunDirError, match="rollouts/pro does not exist"):
        read_rollouts(run, "rollouts/pro")
    pq.write_table(rollouts_table(some_rollouts(2)), tmp_path / "rollouts/probe.parquet")
    with pytest.raises(RunDirError, match="SHA-256"):
        read_rollouts(run, "rollouts/probe.parquet")
    newer = rollouts_table(some_rollouts(2)).replace_schema_metadata({"rocktokens.rollouts.version": "2"})
    with pytest.raises(RunDirError, match="schema version 2, this rocktokens reads 1"):
        table_rollouts(newer)


def test_reading_rollouts_needs_no_torch():
    code = "import sys, rocktokens.rollouts.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
