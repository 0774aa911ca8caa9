"""``kl_choice`` is a part of ``kl``, of one set of classes per checkpoint, and adding it changes nothing else."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_traces import rollout, sample_table, scores

from killed_writer import add_choice_and_die
from rocktokens.classes import TokenClass, TokenClasses
from rocktokens.errors import RunDirError
from rocktokens.run_dir import RunDir
from rocktokens.traces.schema import CLASSES_KEY, KL_ROUNDING, TraceError, trace_table, validate_table, with_choice
from rocktokens.traces.store import TraceStore
from rocktokens.traces.writer import CHOICE_ADDED, TraceWriter, add_choice, parts_folder
from rocktokens.types import TokenScores

CLASSES, OTHERS = TokenClasses([[3, 4], [7, 8, 9]]), TokenClasses([[3, 5]])


def choice_of(table: pa.Table, seed: int = 0) -> np.ndarray:
    return (table["kl"].to_numpy() * np.random.default_rng(seed).random(len(table))).astype(np.float32)


def write(run: Path, *tables: pa.Table, source: str = "replay", rows_per_part: int = 1000) -> None:
    place = {"source": "training"} if source == "training" else {"checkpoint": 5}
    with TraceWriter(run, rows_per_part=rows_per_part, **place) as writer:
        for table in tables:
            writer.append(table)


def rows_of(run: Path) -> list[dict]:
    rows = TraceStore(run, threads=1).table(5).order_by("rollout_id", "position")
    return rows.to_pyarrow().to_pylist()


@settings(max_examples=6, deadline=None)
@given(rows=st.integers(1, 40), cut=st.integers(0, 40), rows_per_part=st.integers(1, 50))
def test_what_was_written_is_read_with_and_without_the_column(tmp_path_factory, rows, cut, rows_per_part):
    plain = sample_table(rows, seed=rows)
    table = with_choice(plain, choice_of(plain, rows), CLASSES)
    edges = [0, min(cut, rows), rows]
    for written, classes in ((table, CLASSES.sha256), (plain, None)):
        run = tmp_path_factory.mktemp("run")
        write(run, *(written.slice(a, b - a) for a, b in pairwise(edges)), rows_per_part=rows_per_part)
        assert rows_of(run) == written.to_pylist()
        assert TraceStore(run).classes_sha256(5) == classes
        for part in RunDir(run).files("traces/"):
            metadata = pq.read_schema(run / part.path).metadata
            assert metadata.get(CLASSES_KEY) == (classes and classes.encode())


def test_scored_rollouts_become_rows_with_their_choice():
    """Also where a position was never scored; the order of classes and what is known of them do not count."""
    own = scores(5)
    for name, column in own.present():
        column[3] = np.nan
        assert name != "kl_choice"
    known = TokenScores(**dict(own.present()), kl_choice=own.kl / 2)
    rollouts = [rollout(0, [3, 9, 1]), rollout(1, [4, 8])]
    table = trace_table(rollouts, known, classes=CLASSES)
    assert table["kl_choice"].to_pylist() == [None if np.isnan(value) else value for value in own.kl / 2]
    assert table.drop(["kl_choice"]).equals(trace_table(rollouts, own))
    assert validate_table(table).equals(table, check_metadata=True)
    again = TokenClasses([TokenClass((9, 7, 8), safe=True), TokenClass((4, 3)), TokenClass((11,))])
    assert trace_table(rollouts, known, classes=again).equals(table, check_metadata=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda choice, _kl: choice * np.nan, "nulls at other rows than column kl"),
        (lambda choice, _kl: choice - 1.0, "column kl_choice holds -"),
        (lambda choice, kl: np.maximum(np.roll(kl, 1), kl + 0.1), "the choice is a part of the kl"),
        (lambda choice, kl: 1.01 * kl, "the choice is a part of the kl"),
        (lambda choice, _kl: choice[1:], "19 values for 20 rows"),
    ],
)
def test_a_choice_that_is_no_part_of_the_kl_is_refused(change, sentence):
    table = sample_table(20)
    with pytest.raises(TraceError, match=sentence) as caught:
        with_choice(table, change(choice_of(table), table["kl"].to_numpy()), CLASSES)
    assert "\n" not in str(caught.value)


def test_rounding_beyond_the_kl_is_accepted():
    table = sample_table(20)
    for choice in (table["kl"].to_numpy() + KL_ROUNDING / 2, np.full(20, -KL_ROUNDING / 2)):
        assert with_choice(table, choice, CLASSES)["kl_choice"].to_pylist() == choice.astype(np.float32).tolist()


def test_a_choice_among_nobody_knows_what_is_refused():
    table = with_choice(sample_table(4), np.zeros(4), CLASSES).replace_schema_metadata(None)
    with pytest.raises(TraceError, match=r"without rocktokens_classes_sha256 .* set it to TokenClasses\.sha256"):
        validate_table(table)


def test_a_checkpoint_has_one_set_of_classes(tmp_path):
    plain = sample_table(6)
    own, other = (with_choice(plain, choice_of(plain), classes) for classes in (CLASSES, OTHERS))
    for number, (first, second) in enumerate([(own, other), (own, plain), (plain, own)]):
        for rows_per_part in (6, 1000):  # the rows before are a part, or waiting to be one
            run = tmp_path / f"{number}-{rows_per_part}"
            with pytest.raises(RunDirError, match=r"these rows have .*kl_choice.*, those before them in .* have"):
                write(run, first, second, rows_per_part=rows_per_part)
        write(run, first)
        with pytest.raises(RunDirError, match="the same classes, or none"):
            write(run, second)
        assert rows_of(run) == first.to_pylist()


def test_while_training_a_part_ends_where_the_classes_change(tmp_path):
    plain = sample_table(6)
    own, other = (with_choice(plain, choice_of(plain), classes) for classes in (CLASSES, OTHERS))
    write(tmp_path, own, own, other, plain, source="training")
    parts = [pq.read_table(tmp_path / part.path) for part in RunDir(tmp_path).files("traces/training/")]
    assert [part.num_rows for part in parts] == [12, 6, 6]
    assert [part.schema.metadata.get(CLASSES_KEY) for part in parts] == [
        CLASSES.sha256.encode(),
        OTHERS.sha256.encode(),
        None,
    ]
    with pytest.raises(RunDirError, match=r"has kl_choice by different classes \(.* and .*\): run `rocktokens trace"):
        TraceStore(tmp_path, source="training").classes_sha256()
    assert TraceStore(tmp_path, source="training").table().count().to_pyarrow().as_py() == 24


def test_adding_the_choice_changes_no_other_column_and_not_the_name_of_the_data(tmp_path):
    table = sample_table(30)
    write(tmp_path, table, rows_per_part=10)
    run, named = RunDir(tmp_path), TraceStore(tmp_path).manifest_sha256
    folder, choice = parts_folder("replay", 5), choice_of(table)
    for number, part in enumerate(run.files(folder)):
        add_choice(run, part.path, choice[10 * number : 10 * number + 10], CLASSES)
        expected = CLASSES.sha256 if number == 2 else None  # only once all parts have it
        assert TraceStore(tmp_path).classes_sha256(5) == expected
    assert rows_of(tmp_path) == with_choice(table, choice, CLASSES).to_pylist()
    assert TraceStore(tmp_path).manifest_sha256 == named
    before = [part.sha256 for part in run.files(folder)]
    for part in run.files(folder):  # other classes take the place of these
        add_choice(run, part.path, np.zeros(10), OTHERS)
    assert TraceStore(tmp_path).classes_sha256(5) == OTHERS.sha256
    assert TraceStore(tmp_path).manifest_sha256 == named
    for number, part in enumerate(run.files(folder)):
        add_choice(run, part.path, choice[10 * number : 10 * number + 10], CLASSES)
    assert [part.sha256 for part in run.files(folder)] == before
    other = tmp_path / "other"
    write(other, sample_table(30, seed=1), rows_per_part=10)
    assert TraceStore(other).manifest_sha256 != named


def test_data_has_the_same_name_whether_the_choice_came_at_once_later_or_never(tmp_path):
    """Of training rows no record is made: there the parts keep their own."""
    table, names = sample_table(30), set()
    write(tmp_path / "never", table, rows_per_part=10)
    for classes in (CLASSES, OTHERS):
        run = tmp_path / f"at-once-{len(classes)}"
        write(run, with_choice(table, choice_of(table), classes), rows_per_part=10)
        names.add(TraceStore(run).manifest_sha256)
        add_choice(RunDir(run), RunDir(run).files("traces/")[0].path, np.zeros(10), TokenClasses([[1, 2]]))
        names.add(TraceStore(run).manifest_sha256)
    assert names == {TraceStore(tmp_path / "never").manifest_sha256}
    write(tmp_path / "training", with_choice(table, choice_of(table), CLASSES), source="training")
    assert CHOICE_ADDED not in RunDir(tmp_path / "training").manifest()


def test_a_kill_between_a_part_and_its_listing_leaves_the_part_that_is_listed(tmp_path):
    """As it was before; then the choice can be added."""
    table = sample_table(10)
    write(tmp_path, table)
    run, named = RunDir(tmp_path), TraceStore(tmp_path).manifest_sha256
    (part,) = run.files("traces/")
    add_choice_and_die(run, part.path, choice_of(table), CLASSES)
    assert "kl_choice" in pq.read_schema(tmp_path / part.path).names and run.files("traces/") == [part]
    assert rows_of(tmp_path) == table.to_pylist()
    assert (TraceStore(tmp_path).classes_sha256(5), TraceStore(tmp_path).manifest_sha256) == (None, named)
    add_choice(run, part.path, choice_of(table), CLASSES)
    assert rows_of(tmp_path) == with_choice(table, choice_of(table), CLASSES).to_pylist()
    assert (TraceStore(tmp_path).classes_sha256(5), TraceStore(tmp_path).manifest_sha256) == (CLASSES.sha256, named)


def test_a_part_whose_choice_could_not_be_written_is_as_it_was(tmp_path, monkeypatch):
    table = sample_table(10)
    write(tmp_path, table)
    run, named = RunDir(tmp_path), TraceStore(tmp_path).manifest_sha256
    (part,) = run.files("traces/")
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        add_choice(run, part.path, choice_of(table), CLASSES)
    assert run.files("traces/") == [part] and run.verify(part).exists()
    assert rows_of(tmp_path) == table.to_pylist() and TraceStore(tmp_path).manifest_sha256 == named
