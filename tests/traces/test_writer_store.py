"""What was written is what is read, whatever the parts, and nothing half written counts."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_traces import sample_table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trace_oracle import large_trace, write_trace

from rocktokens.errors import RocktokensError, RunDirError
from rocktokens.run_dir import RunDir
from rocktokens.traces.store import TraceStore
from rocktokens.traces.writer import OF_FEW_VALUES, TraceWriter, write_loose

HERE = Path(__file__).parent


def write(run: Path, table: pa.Table, checkpoint: int = 0, **options) -> None:
    with TraceWriter(run, checkpoint=checkpoint, **options) as writer:
        writer.append(table)


def content(run: Path, checkpoint: int = 0) -> list[dict]:
    rows = TraceStore(run, threads=1).table(checkpoint)
    return rows.order_by("rollout_id", "position").to_pyarrow().to_pylist()


# Parts


def training_parts(run: Path) -> list[pa.Table]:
    return [pq.read_table(run / entry.path) for entry in RunDir(run).files("traces/training/")]


def test_parts_that_other_processes_wrote_are_adopted_in_order(tmp_path):
    """The rows of one writer, in its order, wherever the cuts are; rows that were waiting come first."""
    table = sample_table(60, seed=2)
    waiting, *blocks = (table.slice(first, 20) for first in (0, 20, 40))
    run = RunDir(tmp_path / "run")
    with TraceWriter(run, source="training") as writer:
        writer.append(waiting)
        loose = [part for block in blocks for part in write_loose(run, block, rows_per_part=12)]
        assert not run.files("traces/") and [part.rows for part in loose] == [12, 8, 12, 8]
        writer.adopt(loose)
        writer.append(table.slice(0, 5))
    parts = training_parts(run.path)
    assert [part.num_rows for part in parts] == [20, 12, 8, 12, 8, 5]
    assert pa.concat_tables(parts[:-1]).equals(table.cast(parts[0].schema))
    run.verify_all(run.files())
    assert len(list((run.path / "traces/training").iterdir())) == len(parts)


def test_what_was_not_adopted_does_not_exist_and_is_written_again(tmp_path, monkeypatch):
    """Killed after the rename and before the manifest, and before the rename: the rows are there once in the end."""
    run, table = RunDir(tmp_path / "run"), sample_table(9)
    monkeypatch.setattr(RunDir, "list_files", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt), TraceWriter(run, source="training") as writer:
        writer.adopt(write_loose(run, table))
    monkeypatch.undo()
    write_loose(run, table)
    assert not run.files("traces/") and len(list((run.path / "traces/training").iterdir())) == 2
    with TraceWriter(run, source="training") as writer:
        writer.drop_loose()
        writer.adopt(write_loose(run, table))
    assert [path.name for path in (run.path / "traces/training").iterdir()] == ["part-00000.parquet"]
    [part] = training_parts(run.path)
    assert part.equals(table.cast(part.schema))


def test_a_part_that_another_machine_keeps_to_itself_is_refused(tmp_path):
    run = RunDir(tmp_path / "run")
    [elsewhere] = write_loose(RunDir(tmp_path / "elsewhere"), sample_table(3))
    with pytest.raises(RunDirError, match="on a file system that all machines share"):  # noqa: SIM117
        with TraceWriter(run, source="training") as writer:
            writer.adopt([elsewhere])
    assert not run.files("traces/")


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    rows_per_part=st.integers(1, 70),
    flushes=st.sets(st.integers(0, 6)),
)
def test_any_division_into_appends_and_parts_reads_the_same(tmp_path_factory, rows, cuts, rows_per_part, flushes):
    table = sample_table(rows, seed=rows)
    run = tmp_path_factory.mktemp("run")
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    with TraceWriter(run, checkpoint=3, rows_per_part=rows_per_part) as writer:
        for index, (start, end) in enumerate(pairwise(edges)):
            writer.append(table.slice(start, end - start))
            if index in flushes:
                writer.flush()
    assert content(run, 3) == table.to_pylist()
    listed = RunDir(run).files("traces/")
    assert sum(part.rows for part in listed) == rows
    assert all(0 < part.rows <= rows_per_part for part in listed)
    assert all(RunDir(run).verify(part).exists() for part in listed)


def test_rows_become_a_part_as_soon_as_there_are_enough(tmp_path):
    table = sample_table(10)
    with TraceWriter(tmp_path, checkpoint=0, rows_per_part=5) as writer:
        for rows, parts in ((4, 0), (1, 1), (5, 2)):
            writer.append(table.slice(0, rows))
            assert writer.parts == parts


def test_bytes_depend_on_the_rows_alone(tmp_path):
    """Long prompt ids fill Parquet's dictionary page, whose end would otherwise follow the appends."""
    table = sample_table(30_000)
    table = table.set_column(1, table.schema.field(1), pa.array([f"{row:060d}" for row in range(30_000)]))
    write(tmp_path / "one", table)
    with TraceWriter(tmp_path / "two", checkpoint=0) as writer:
        for start in range(0, 30_000, 777):
            writer.append(table.slice(start, 777))
    shas = [[part.sha256 for part in RunDir(tmp_path / name).files("traces/")] for name in ("one", "two")]
    assert shas[0] == shas[1]


def test_only_columns_of_few_values_have_a_dictionary(tmp_path):
    write(tmp_path, sample_table(1000))
    (part,) = RunDir(tmp_path).files("traces/")
    group = pq.ParquetFile(tmp_path / part.path).metadata.row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    assert {c.path_in_schema for c in columns if c.has_dictionary_page} == set(OF_FEW_VALUES)
    assert {c.compression for c in columns} == {"ZSTD"}


def test_parts_are_counted_numbered_and_continued(tmp_path):
    with TraceWriter(tmp_path, checkpoint=5) as writer:
        for seed in range(11):
            writer.append(sample_table(2, seed))
            writer.flush()
        writer.flush()
        assert writer.parts == 11
    with TraceWriter(tmp_path, checkpoint=5) as writer:
        assert writer.parts == 11
        writer.append(sample_table(2, 11))
    paths = [part.path for part in RunDir(tmp_path).files("traces/")]
    assert paths == [f"traces/checkpoint=5/part-{index:05d}.parquet" for index in range(12)]


def test_a_store_says_what_it_holds(tmp_path):
    for checkpoint in (5, 20):
        with TraceWriter(tmp_path, checkpoint=checkpoint) as writer:
            writer.append(sample_table(2, 0))
    store = TraceStore(tmp_path)
    assert repr(store) == f"TraceStore({str(tmp_path)!r}, checkpoints 5, 20, {2 * store.rows(5)} rows)"
    assert store._repr_html_().count("<tr>") == 3


def test_optional_columns_may_be_in_some_parts_only(tmp_path):
    plain = sample_table(4)
    top = pa.array([[{"id": 1, "logp": -0.5}]] * 4, pa.list_(pa.struct([("id", pa.int32()), ("logp", pa.float32())])))
    with TraceWriter(tmp_path, checkpoint=0) as writer:
        for table in (plain, plain.append_column("teacher_top", top), plain):
            writer.append(table)
            writer.flush()
    first, _, last = RunDir(tmp_path).files("traces/")
    assert first.sha256 == last.sha256
    assert TraceStore(tmp_path).table(0).to_pyarrow()["teacher_top"].null_count == 8


def test_an_exception_drops_what_is_buffered_and_keeps_what_is_committed(tmp_path):
    table = sample_table(10)
    with pytest.raises(ZeroDivisionError), TraceWriter(tmp_path, checkpoint=0) as writer:
        writer.append(table)
        writer.flush()
        writer.append(sample_table(10, seed=1))
        raise ZeroDivisionError
    assert content(tmp_path) == table.to_pylist()


def test_an_opened_writer_makes_a_run_of_a_bare_folder(tmp_path):
    with TraceWriter(tmp_path / "new", checkpoint=0):
        pass
    assert TraceStore(tmp_path / "new").checkpoints == []


def test_writers_of_one_process_may_be_open_together(tmp_path):
    with TraceWriter(tmp_path, checkpoint=0) as one, TraceWriter(tmp_path, checkpoint=1) as other:
        one.append(sample_table(3))
        other.append(sample_table(4))
    assert [len(content(tmp_path, checkpoint)) for checkpoint in TraceStore(tmp_path).checkpoints] == [3, 4]


def test_a_run_that_holds_its_lock_lends_it(tmp_path):
    run = RunDir(tmp_path)
    with run.lock(), TraceWriter(run, checkpoint=0) as writer:
        writer.append(sample_table(3))
    assert len(content(tmp_path)) == 3


def test_misuse_is_refused_in_words(tmp_path):
    with pytest.raises(RunDirError, match="use it in a `with` block"):
        TraceWriter(tmp_path, checkpoint=0).append(sample_table(1))
    with pytest.raises(RunDirError, match="checkpoint = None is not valid"):
        TraceWriter(tmp_path)
    with pytest.raises(RunDirError, match="checkpoint = 3 is not valid for training"):
        TraceWriter(tmp_path, checkpoint=3, source="training")
    with pytest.raises(RunDirError, match="rows_per_part = 0"):
        TraceWriter(tmp_path, checkpoint=0, rows_per_part=0)


# Crashes


WRITE_FOREVER = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from itertools import count
from sample_traces import sample_table
from rocktokens.traces.writer import TraceWriter
with TraceWriter(sys.argv[1], checkpoint=0, rows_per_part=500) as writer:
    for seed in count():
        writer.append(sample_table(500, seed))
"""


def test_a_killed_writer_leaves_a_readable_store_to_go_on_with(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while len(RunDir(tmp_path).files("traces/")) < 5 and time.monotonic() < deadline:
            time.sleep(0.003)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    committed = RunDir(tmp_path).files("traces/")
    assert len(committed) >= 5
    expected = pa.concat_tables([sample_table(500, seed) for seed in range(len(committed))])
    order = [(name, "ascending") for name in ("rollout_id", "position", "kl")]
    rows = TraceStore(tmp_path).table(0)
    assert rows.to_pyarrow().sort_by(order).to_pylist() == expected.sort_by(order).to_pylist()
    write(tmp_path, sample_table(500, len(committed)))
    assert rows.count().to_pyarrow().as_py() + 500 == TraceStore(tmp_path).table(0).count().to_pyarrow().as_py()
    assert not list((tmp_path / "traces").rglob(".*.tmp"))


FILL_THE_DISK = f"""
import resource, sys
sys.path.insert(0, {str(HERE)!r})
from sample_traces import sample_table
from rocktokens.traces.writer import TraceWriter
with TraceWriter(sys.argv[1], checkpoint=0) as writer:
    writer.append(sample_table(100))
    writer.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
    writer.append(sample_table(50_000))
    try:
        writer.flush()
    except OSError:
        sys.exit(7)
"""


def test_a_full_disk_keeps_committed_parts_and_leaves_no_temporary_file(tmp_path):
    finished = subprocess.run([sys.executable, "-c", FILL_THE_DISK, str(tmp_path)], check=False)
    assert finished.returncode == 7
    assert content(tmp_path) == sample_table(100).to_pylist()
    assert [path.name for path in (tmp_path / "traces" / "checkpoint=0").iterdir()] == ["part-00000.parquet"]


# Store


def test_stray_files_do_not_exist_and_missing_or_damaged_ones_are_named(tmp_path):
    write(tmp_path, sample_table(5))
    folder = tmp_path / "traces" / "checkpoint=0"
    pq.write_table(sample_table(5, seed=1), folder / "part-00001.parquet")
    (tmp_path / "traces" / "checkpoint=9").mkdir()
    assert TraceStore(tmp_path).checkpoints == [0]
    assert len(content(tmp_path)) == 5

    part = folder / "part-00000.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunDirError, match=r"part-00000\.parquet is not the file that .*manifest\.json lists"):
        content(tmp_path)
    RunDir(tmp_path).commit(
        "traces/checkpoint=0/part-00000.parquet", lambda path: pq.write_table(sample_table(4), path), rows=5
    )
    with pytest.raises(RunDirError, match="has 4 rows, its manifest lists 5"):
        content(tmp_path)
    part.unlink()
    with pytest.raises(RunDirError, match="listed in the manifest but missing"):
        content(tmp_path)


@pytest.mark.parametrize("version", [b"2", b"none"])
def test_another_schema_version_is_refused(tmp_path, version):
    table = sample_table(5).replace_schema_metadata({b"rocktokens_schema_version": version})
    RunDir(tmp_path).commit("traces/checkpoint=0/part-00000.parquet", lambda path: pq.write_table(table, path), rows=5)
    with pytest.raises(RunDirError, match=f"rocktokens_schema_version {version.decode()}, this rocktokens reads 1"):
        content(tmp_path)


def test_training_rows_and_replays_do_not_mix(tmp_path):
    write(tmp_path, sample_table(5), checkpoint=10)
    write(tmp_path, sample_table(6, seed=1), checkpoint=2)
    write(tmp_path, sample_table(7, seed=2), checkpoint=None, source="training")
    replay, training = TraceStore(tmp_path), TraceStore(tmp_path, source="training")
    assert replay.checkpoints == [2, 10]
    assert [replay.table(step).count().to_pyarrow().as_py() for step in (2, 10)] == [6, 5]
    assert training.checkpoints == []
    assert training.table().count().to_pyarrow().as_py() == 7
    with pytest.raises(RocktokensError, match=r"checkpoint 3 has no traces in .*: available are 2, 10"):
        replay.table(3)


def test_a_store_shows_the_run_as_it_was_when_opened(tmp_path):
    write(tmp_path, sample_table(5))
    store = TraceStore(tmp_path)
    before = store.manifest_sha256
    RunDir(tmp_path).update_manifest(command="something else")
    assert TraceStore(tmp_path).manifest_sha256 == before
    write(tmp_path, sample_table(5, seed=1))
    assert store.manifest_sha256 == before
    assert store.table(0).count().to_pyarrow().as_py() == 5
    assert TraceStore(tmp_path).manifest_sha256 != before


def test_a_rollout_comes_in_order_of_position(tmp_path):
    table = sample_table(40)
    write(tmp_path, table.take(list(reversed(range(40)))), rows_per_part=7)
    store = TraceStore(tmp_path)
    wanted = table.filter(pa.compute.equal(table["rollout_id"], 3))
    rollout = store.rollout(3, 0)
    assert rollout.to_pylist() == wanted.to_pylist()
    assert (len(rollout), rollout.num_rows) == (wanted.num_rows, wanted.num_rows)
    assert rollout["kl"] == rollout.column("kl") == rollout.table["kl"]
    assert pa.table(rollout).equals(rollout.table)
    assert rollout._repr_html_().count("<span") == wanted.num_rows
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = rollout.nothing_like_it
    with pytest.raises(RocktokensError, match="rollout 999 is not in the traces of checkpoint 0"):
        store.rollout(999, 0)


def test_folder_names_are_names_not_patterns(tmp_path):
    run = tmp_path / "it's [a] run*?"
    write(run, sample_table(5))
    write(tmp_path / "it's a runs", sample_table(9))
    assert len(content(run)) == 5


def test_unknown_engine_and_missing_run_are_refused(tmp_path):
    with pytest.raises(RunDirError, match="is not a run directory"):
        TraceStore(tmp_path / "nowhere")
    write(tmp_path, sample_table(1))
    with pytest.raises(RocktokensError, match="engine = 'pandas' is not known: use one of duckdb, spark"):
        TraceStore(tmp_path, engine="pandas")
    with pytest.raises(RocktokensError, match="threads = 0 is not valid: give at least 1"):
        TraceStore(tmp_path, threads=0)


# Memory


@pytest.fixture(scope="module")
def large_run(tmp_path_factory) -> Path:
    return write_trace(tmp_path_factory.mktemp("large"), {0: large_trace(0)})


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The system's temporary folder, for a test that looks into it from another working directory."""
    (folder := tmp_path / "temporary").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.chdir(elsewhere)
    return folder


def by_occurrence(rows) -> pa.Table:
    """As many groups as rows."""
    sums = rows.group_by("rollout_id", "position").agg(rows=rows.count(), kl=(rows.kl.cast("float64") * 2**24).sum())
    return sums.order_by("rollout_id", "position").to_pyarrow()


def test_a_query_beyond_the_memory_spills_into_the_temporary_folder_and_changes_no_bit(large_run, temporary):
    files = sorted(large_run.rglob("*"))
    expected = by_occurrence(TraceStore(large_run).table(0))
    assert not list(temporary.glob("*/*"))

    rows = TraceStore(large_run, memory="20MiB", threads=1).table(0)
    assert by_occurrence(rows).equals(expected)
    assert list(temporary.glob("*/*")), "20 MiB held all of it: the test needs more rows"
    assert sorted(large_run.rglob("*")) == files
    assert not list(Path.cwd().iterdir())
    del rows
    gc.collect()
    assert not list(temporary.iterdir())


def test_a_store_goes_with_its_last_reference_and_so_does_its_engine(tmp_path, temporary):
    """Nothing waits for cycles to be collected; the engine removes its temporary folder when it goes."""
    write(tmp_path / "run", sample_table(10, seed=0))
    gc.disable()
    try:
        store = TraceStore(tmp_path / "run", threads=1)
        assert store.table(0).count().to_pyarrow().as_py() == 10
        seen = weakref.ref(store)
        assert list(temporary.iterdir())
        del store
        assert seen() is None and not list(temporary.iterdir())
    finally:
        gc.enable()


def test_memory_that_is_no_size_or_too_little_is_refused(large_run):
    with pytest.raises(
        RocktokensError, match="memory = 'much' is not a size: give a number and a unit, such as '1GiB'"
    ):
        TraceStore(large_run, memory="much")
    with pytest.raises(RocktokensError, match="memory = '1MiB' is too little for any query: give at least 16MiB"):
        TraceStore(large_run, memory="1MiB")
    # Threads that a busy machine runs one after the other need less at once: with so few as 4 the query may succeed.
    rows = TraceStore(large_run, memory="16MiB", threads=32).table(0)
    with pytest.raises(RocktokensError, match=r"memory = 16\.0MiB is too little for this query: give more, or fewer"):
        by_occurrence(rows)


# Texts


def test_without_a_tokenizer_a_token_is_its_number(tmp_path):
    write(tmp_path, sample_table(1))
    store = TraceStore(tmp_path)
    assert store.token_texts([5, 0]) == ["<5>", "<0>"]
    assert (store.tokenizer_sha256, store.vocab_size) == ("", None)


def save_tokenizer(run: Path, tokenizer: Tokenizer) -> None:
    (run / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(run / "tokenizer" / "tokenizer.json"))
    RunDir(run).adopt(["tokenizer/tokenizer.json"])


def test_byte_level_texts(tmp_path):
    write(tmp_path, sample_table(1))
    tokenizer = Tokenizer(models.BPE(vocab={"Ġthe": 0, "Ċ": 1, "Ã": 2}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    save_tokenizer(tmp_path, tokenizer)
    RunDir(tmp_path).update_manifest(tokenizer_sha256="abc")
    store = TraceStore(tmp_path)
    assert store.token_texts([0, 1, 2, 3, 4]) == [" the", "\n", "�", "<|end|>", "<4>"]
    assert (store.tokenizer_sha256, store.vocab_size) == ("abc", 4)


def test_sentencepiece_texts(tmp_path):
    write(tmp_path, sample_table(1))
    tokenizer = Tokenizer(models.BPE(vocab={"▁the": 0, "▁": 1, "<0x0A>": 2}, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    save_tokenizer(tmp_path, tokenizer)
    assert TraceStore(tmp_path).token_texts([0, 1, 2]) == [" the", " ", "\n"]


def test_reading_needs_no_torch(tmp_path):
    write(tmp_path, sample_table(3))
    script = (
        "import sys; from rocktokens.traces.store import TraceStore; from rocktokens.rocks.find import find_rocks\n"
        "import rocktokens.policies, rocktokens.config\n"
        "find_rocks(TraceStore(sys.argv[1]), stage='score', split=None)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=os.environ)


# A store that stays open while another command writes


@pytest.mark.parametrize("change", ["replaced", "dropped"])
def test_a_part_that_changes_after_it_was_read_is_refused_in_one_sentence(tmp_path, change):
    write(tmp_path, sample_table(20, seed=1))
    rows = TraceStore(tmp_path, threads=1).table(0)
    assert rows.count().to_pyarrow().as_py() == 20
    run = RunDir(tmp_path)
    [part] = [entry.path for entry in run.files("traces/")]
    if change == "dropped":
        run.drop([part])
    else:
        other = tmp_path / "other"
        write(other, sample_table(20, seed=2))
        content = next(other.glob("traces/*/*.parquet")).read_bytes()
        run.commit(part, lambda path: path.write_bytes(content), rows=20)
    with pytest.raises(RunDirError, match="was replaced or removed by another command after this one opened the run"):
        rows.count().to_pyarrow()


def test_another_name_of_a_part_is_no_change(tmp_path):
    """As a writer makes one to keep the content that it is about to replace."""
    write(tmp_path, sample_table(20, seed=1))
    rows = TraceStore(tmp_path, threads=1).table(0)
    [part] = tmp_path.glob("traces/*/*.parquet")
    os.link(part, tmp_path / "kept")
    assert rows.count().to_pyarrow().as_py() == 20


def test_a_footer_that_only_the_engine_stumbles_over_is_one_sentence(tmp_path, monkeypatch):
    write(tmp_path, sample_table(20, seed=1))
    store = TraceStore(tmp_path, threads=1)
    monkeypatch.setattr(store, "_fitting_schema", lambda part, path: sample_table(1, seed=1).schema)
    [part] = tmp_path.glob("traces/*/*.parquet")
    content = part.read_bytes()
    RunDir(tmp_path).commit(
        part.relative_to(tmp_path).as_posix(),
        lambda path: path.write_bytes(content[:-40] + b"\xff" * 28 + content[-12:]),
        20,
    )
    store = TraceStore(tmp_path, threads=1)
    monkeypatch.setattr(store, "_fitting_schema", lambda part, path: sample_table(1, seed=1).schema)
    with pytest.raises(RunDirError, match="cannot be read") as refused:
        store.table(0).to_pyarrow()
    assert len(str(refused.value).splitlines()) == 1
