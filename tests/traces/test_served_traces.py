"""How a teacher's values came travels with every part, and is never mixed."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sample_traces import rollout, scores

from rocktokens.classes import TokenClasses
from rocktokens.errors import RunDirError
from rocktokens.run_dir import RunDir
from rocktokens.traces.schema import served_of, trace_table, validate_table, with_choice, without_choice
from rocktokens.traces.writer import TraceWriter


def table(served: str = "") -> pa.Table:
    return trace_table([rollout(0, [5, 6, 7])], scores(3), served=served)


def test_it_survives_every_change_of_a_table():
    classes = TokenClasses([[5, 6]])
    chosen = with_choice(table("states bfloat16"), np.zeros(3, np.float32), classes)
    for own in (validate_table(table("states bfloat16")), chosen, without_choice(chosen)):
        assert served_of(own.schema) == "states bfloat16"
    assert without_choice(chosen).schema.equals(table("states bfloat16").schema, check_metadata=True)
    assert served_of(table().schema) == "" and b"rocktokens_teacher" not in table().schema.metadata


@pytest.mark.parametrize("source", ["replay", "training"])
@pytest.mark.parametrize("before", ["", "states float32"])
def test_rows_of_two_kinds_of_teacher_are_not_mixed(tmp_path: Path, before: str, source: str):
    """Neither in one part nor in the parts of a folder."""
    place = {"checkpoint": 4} if source == "replay" else {"source": "training"}
    with TraceWriter(tmp_path, **place) as writer:
        writer.append(table(before))
        with pytest.raises(RunDirError, match=r"was served \(states bfloat16\)"):
            writer.append(table("states bfloat16"))
    with TraceWriter(tmp_path, **place) as writer, pytest.raises(RunDirError, match="keep them apart, in two runs"):
        writer.append(table("states bfloat16"))
    [part] = RunDir(tmp_path).files("traces/")
    assert served_of(pq.read_schema(tmp_path / part.path)) == before
