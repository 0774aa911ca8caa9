"""``trace.top_k``: the likeliest tokens stand beside the scores, and change none of them."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import FinishedRun, changed, refuse, require_sound, snapshot, succeed

from rocktokens.run_dir import RunDir
from rocktokens.traces.schema import OPTIONAL_FIELDS, REQUIRED_FIELDS
from rocktokens.traces.store import TraceStore

K = 3
STANDARD = [field.name for field in REQUIRED_FIELDS]
TOPS = [field.name for field in OPTIONAL_FIELDS if field.name.endswith("_top")]


def traces(run: Path) -> dict[str, pa.Table]:
    return {path.relative_to(run).as_posix(): pq.read_table(path) for path in run.glob("traces/checkpoint=*/*")}


def replay(finished: FinishedRun, run: Path, *settings: str) -> tuple[str | Path, ...]:
    students = f'["{finished.path}/checkpoints/step-0", "{finished.path}/checkpoints/step-4"]'
    return ("trace", finished.config, *changed(f"run.directory={run}", f"trace.checkpoints={students}", *settings))


@pytest.fixture(scope="module")
def with_tops(finished: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("tops") / "run"
    succeed(*replay(finished, run, f"trace.top_k={K}"))
    return run


def test_scores_are_the_same_bits_and_training_has_no_tops(finished: FinishedRun, with_tops: Path):
    plain, tops = traces(finished.path), traces(with_tops)
    assert tops and tops.keys() <= plain.keys()
    for path, table in tops.items():
        assert table.column_names == [*STANDARD, *TOPS] and plain[path].column_names == STANDARD
        assert table.select(STANDARD).equals(plain[path])
    training = [pq.read_schema(path).names for path in (finished.path / "traces/training").iterdir()]
    assert training and all(names == STANDARD for names in training)


def test_rows_agree_with_their_own_scores(with_tops: Path):
    """Where the sampled token is among the likeliest, its log-probability is the one in its own column."""
    rows = [row for table in traces(with_tops).values() for row in table.to_pylist()]
    for name in ("student", "teacher"):
        found = 0
        for row in rows:
            logps = [one["logp"] for one in row[f"{name}_top"]]
            assert len(logps) == K and logps == sorted(logps, reverse=True)
            for one in row[f"{name}_top"]:
                if one["id"] == row["token_id"]:
                    found += 1
                    assert one["logp"] == pytest.approx(row[f"logp_{name}"], abs=1e-5)
        assert found > len(rows) / 4


def test_the_teachers_are_the_same_at_every_checkpoint(with_tops: Path):
    tables = traces(with_tops)
    for path, table in tables.items():
        other = tables[path.replace("checkpoint=0", "checkpoint=4")]
        assert table["teacher_top"].equals(other["teacher_top"])
    assert len(tables) == 4


def test_a_resumed_replay_has_the_same_bytes(finished: FinishedRun, with_tops: Path, tmp_path: Path):
    copy = shutil.copytree(with_tops, tmp_path / "copy")
    RunDir(copy).drop(["traces/checkpoint=0/part-00001.parquet", "traces/checkpoint=4/part-00000.parquet"])
    RunDir(copy).drop(["traces/checkpoint=4/part-00001.parquet"])
    succeed(*replay(finished, copy, f"trace.top_k={K}"))
    require_sound(copy)
    names = traces(with_tops).keys()
    assert {name: snapshot(copy)[name] for name in names} == {name: snapshot(with_tops)[name] for name in names}


def test_a_replay_does_not_go_on_with_another_k(finished: FinishedRun, with_tops: Path):
    refuse(*replay(finished, with_tops, "trace.top_k=2"), naming=("top_k = 3", "now it is 2", "--restart"))
    refuse(*replay(finished, with_tops, "trace.top_k=-1"), naming=("trace.top_k", "-1"))


def test_statistics_do_not_see_them(finished: FinishedRun, with_tops: Path, tmp_path: Path):
    plain = shutil.copytree(finished.path, tmp_path / "plain")
    RunDir(plain).drop([entry.path for entry in RunDir(plain).files("traces/checkpoint=2/")])
    ends = ("--reference", "4", "--baseline", "0", "--json")
    tokens, without = (succeed("find", run, *ends).record["tokens"] for run in (with_tops, plain))
    assert tokens and tokens == without
    assert TraceStore(with_tops).rollout(0, 4).column_names == [*STANDARD, *TOPS]
