"""Spark gives the same bits as DuckDB, reads the same files, and is a good guest on the machine."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import ibis
import numpy as np
import pyarrow as pa
import pytest
from both_engines import needs_spark, on_both
from class_traces import probabilities, probability_trace, random_tops, split_trace
from sample_traces import sample_table
from trace_oracle import counted, occurrences_of, random_trace, rescored, summed, with_column, write_trace

from rocktokens.errors import RocktokensError, RunDirError
from rocktokens.rocks.classes import find_classes
from rocktokens.rocks.find import find_rocks
from rocktokens.rocks.sums import ONE, gather, occurrences, prompts_of, type_sums
from rocktokens.traces.engines import ENGINES
from rocktokens.traces.schema import KL_ROUNDING, MAX_SCORE
from rocktokens.traces.store import TraceStore
from rocktokens.traces.writer import TraceWriter

ODD_PROMPTS = ["", " ", "a", "a ", "A", "é", "e\u0301", "it's", 'a "b"', "x\\y", "%_", "l\nf", "\uffff", "\U00010000"]
"""They differ by case, normal form or a trailing space; UTF-16 would put the last before the last but one."""

THRESHOLDS = [each for value in (0.1, 1 / 3, 1.1e-5) for each in (value, float(np.float32(value)))]
"""A float32 and the float64 it is nearest to: as float32 they are equal, as float64 they are not."""


def odd_trace() -> pa.Table:
    """Odd prompts, rollout ids that no float64 holds, and kl at which rounding and thresholds are decided."""
    table = random_trace(5, prompts=len(ODD_PROMPTS), vocabulary=40)
    rollouts = table["rollout_id"].to_numpy()
    table = with_column(table, "prompt_id", [ODD_PROMPTS[index // 2] for index in rollouts])
    table = with_column(table, "rollout_id", np.where(rollouts % 2 == 0, 2**63 - 1 - rollouts, rollouts))
    halves = np.array([0.5, 1.5, -0.5, -1.5, 0.49]) / ONE
    edges = [*halves, 0.0, -0.0, 1e-45, -KL_ROUNDING, MAX_SCORE, MAX_SCORE - 2**-9, 2**-24, *THRESHOLDS]
    kl = [None if value is None else edges[place % len(edges)] for place, value in enumerate(table["kl"].to_pylist())]
    return with_column(table, "kl", kl)


@pytest.fixture(scope="module")
def tables() -> dict[int, pa.Table]:
    late = odd_trace()
    return {0: rescored(late, 1), 200: late}


@pytest.fixture(scope="module")
def run(tmp_path_factory, tables) -> Path:
    return write_trace(tmp_path_factory.mktemp("run"), tables, rows_per_part=150)


# The same bits


@needs_spark
@pytest.mark.parametrize(
    "options",
    [
        {"min_prompts": 1},
        {"stage": "score", "require": "any", "min_prompts": 1, "joint": True, "seed": 3},
        {"stage": "context", "require": "any", "min_prompts": 1, "k": 5, "eta": 0.1, "gamma": 0.2},
        {"stage": "context", "split": None, "exclude_top_freq": 2},
    ],
)
def test_rocks_json_is_the_same_bytes(run, tmp_path, options):
    embeddings = np.random.default_rng(0).normal(size=(40, 4))

    def rocks_json(store: TraceStore) -> bytes:
        find_rocks(store, embeddings=embeddings, **options).save(tmp_path / "rocks.json")
        return (tmp_path / "rocks.json").read_bytes()

    assert len(json.loads(on_both(run, rocks_json))["tokens"]) > 4


@needs_spark
def test_sums_equal_the_row_by_row_oracle(run, tables):
    prompts = ODD_PROMPTS[::2]

    def sums(store: TraceStore) -> dict[str, list[int]]:
        found = asdict(type_sums(occurrences(store.table(200), prompts)))
        return {name: column.tolist() for name, column in found.items() if column is not None}

    found, expected = on_both(run, sums), occurrences_of(tables[200], set(prompts))
    for name, oracle in (
        ("freq", counted(expected)),
        ("kl", summed(expected)),
        ("grad_norm", summed(expected, "grad_norm")),
    ):
        assert dict(zip(found["token_id"], found[name], strict=True)) == oracle


@needs_spark
def test_probabilities_and_classes_are_the_same_on_spark(tmp_path: Path):
    on_both(probability_trace(tmp_path / "p"), probabilities)
    run = write_trace(tmp_path / "run", {0: random_tops(1)}, rows_per_part=100)
    record = on_both(run, lambda store: json.dumps(find_classes(store, min_prompts=2).to_record()))
    assert json.loads(record)["source"]["links"]


@needs_spark
def test_engines_sum_the_choice_alike(tmp_path):
    def sums(store: TraceStore) -> list:
        return gather(store, None, None, 0.5, 0).measuring.kl_choice.toarray().tolist()

    assert np.sum(on_both(write_trace(tmp_path, split_trace(3), rows_per_part=300), sums)) > 0


@needs_spark
def test_prompts_are_told_apart(run):
    assert on_both(run, lambda store: prompts_of(store.table(200))) == sorted(ODD_PROMPTS)


@needs_spark
def test_the_same_occurrences_are_recognised_and_others_are_not(tmp_path, tables):
    table = tables[200]
    positions = table["position"].to_numpy()
    run = write_trace(
        tmp_path,
        {
            0: table,
            1: rescored(table, 9).take(list(reversed(range(len(table))))),
            2: with_column(table, "position", np.where(positions == 3, 2**31 - 1, positions)),
            3: with_column(table, "rollout_id", -1 - table["rollout_id"].to_numpy()),
        },
    )

    def same(store: TraceStore) -> list[bool]:
        sums = [type_sums(occurrences(store.table(step))) for step in store.checkpoints]
        return [sums[0].same_occurrences(each) for each in sums]

    assert on_both(run, same) == [True, True, False, False]


def clusters() -> ibis.Table:
    return ibis.memtable(pa.table({"prompt_id": ODD_PROMPTS[3:], "cluster": np.arange(len(ODD_PROMPTS) - 3) % 4}))


def ids(*values: int) -> ibis.Table:
    return ibis.memtable(pa.table({"token_id": pa.array(values, pa.int32())}))


def grouped(rows: ibis.Table) -> ibis.Table:
    joined = rows.inner_join(clusters(), "prompt_id")
    units = (joined.kl.cast("float64") * ONE + 0.5).floor().cast("int64")
    sums = joined.group_by("cluster", "token_id").agg(
        rows=joined.count(), scored=joined.kl.count(), kl=units.sum(), prompts=joined.prompt_id.nunique()
    )
    return sums.order_by("cluster", "token_id")


def every_rollout(rows: ibis.Table) -> ibis.Table:
    """A left join whose int64 are beyond what a float64 holds and stand beside nulls."""
    known = rows.filter(rows.rollout_id > 2**62).select("rollout_id").distinct().mutate(big=ibis._.rollout_id)
    return rows.select("rollout_id").distinct().left_join(known, "rollout_id").select("rollout_id", "big")


QUESTIONS = {
    "rows": lambda rows: rows.order_by("rollout_id", "position"),
    "filter": lambda rows: rows.filter(rows.kl >= 0.25, rows.position < 9).order_by("rollout_id", "position"),
    "nulls": lambda rows: rows.filter(rows.kl.isnull()).order_by("rollout_id", "position").select("position", "kl"),
    "prompts in order": lambda rows: rows.select("prompt_id").distinct().order_by(ibis.desc("prompt_id")),
    "semi join": lambda rows: rows.semi_join(ids(1, 5, 999), "token_id").order_by("rollout_id", "position"),
    "cluster sums": grouped,
    "left join": lambda rows: every_rollout(rows).order_by("rollout_id"),
    "distinct": lambda rows: rows.agg(prompts=rows.prompt_id.nunique(), rollouts=rows.rollout_id.nunique()),
    "bounds": lambda rows: rows.agg(least=rows.kl.min(), most=rows.kl.max(), scored=rows.kl.count()),
    "nothing": lambda rows: rows.filter(rows.token_id < 0).agg(rows=ibis._.count(), ids=ibis._.token_id.sum()),
    "no rows": lambda rows: rows.filter(rows.token_id < 0),
    "is in": lambda rows: (
        rows.group_by("token_id").agg(hits=rows.token_id.isin(ids(1, 5).token_id).sum()).order_by("token_id")
    ),
    "buckets": lambda rows: (
        rows.group_by(bucket=(rows.kl.cast("float64") / 2**-12).floor().cast("int64"))
        .agg(count=rows.count(), least=rows.kl.min())
        .order_by(ibis.asc("bucket", nulls_first=True))
    ),
    "division": lambda rows: rows.select(
        "rollout_id", "position", tenth=(rows.position - 7) // 10, rest=(rows.position + 7) % 10
    ).order_by("rollout_id", "position"),
    "cases": lambda rows: (
        rows.group_by(early=(rows.position < 5).ifelse("early", "late")).agg(count=rows.count()).order_by("early")
    ),
    "scalar": lambda rows: rows.position.cast("int64").sum(),
}


@needs_spark
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_has_one_answer(run, name):
    on_both(run, lambda store: QUESTIONS[name](store.table(200)))


@needs_spark
def test_thresholds_on_kl_are_compared_as_they_are_written(run, tables):
    """Without the cast DuckDB would round the threshold to the column's float32, and Spark would not."""
    rows = tables[200]["kl"].drop_null().to_numpy().astype(np.float64)

    def counts(store: TraceStore) -> list[int]:
        kl = store.table(200).kl.cast("float64")
        sums = {str(each): (kl >= each).sum() + 1000 * (kl <= each).sum() for each in THRESHOLDS}
        return list(store.table(200).agg(**sums).to_pyarrow().to_pylist()[0].values())

    assert on_both(run, counts) == [int((rows >= each).sum() + 1000 * (rows <= each).sum()) for each in THRESHOLDS]


@needs_spark
def test_an_overflow_is_an_error_on_both(run):
    for engine in ("duckdb", "spark"):
        rows = TraceStore(run, engine=engine).table(0)
        with pytest.raises(Exception, match=r"(?i)overflow|out of range"):
            rows.agg(total=(rows.rollout_id.abs() + rows.rollout_id.abs()).max()).to_pyarrow()


# The same files


@needs_spark
@pytest.mark.parametrize("name", ["it's [a] *? {b,c}", "back\\slash %20 #é:", "_a=1, b"])
def test_folder_names_are_names_not_patterns(tmp_path, monkeypatch, name):
    write_trace(tmp_path / name, {0: sample_table(20)}, rows_per_part=9)
    write_trace(tmp_path / "it's a runs b", {0: sample_table(30)})
    monkeypatch.chdir(tmp_path)
    rows = on_both(Path(name), lambda store: store.table(0).order_by("rollout_id", "position"))
    assert rows.to_pylist() == sample_table(20).to_pylist()


@needs_spark
def test_optional_columns_may_be_in_some_parts_only(tmp_path):
    top = pa.list_(pa.struct([("id", pa.int32()), ("logp", pa.float32())]))
    with TraceWriter(tmp_path, checkpoint=7) as writer:
        for seed, name in enumerate((None, "teacher_top", "student_top")):
            part = with_column(sample_table(4), "rollout_id", [seed] * 4)
            writer.append(part.append_column(name, pa.array([[{"id": 1, "logp": -0.5}]] * 4, top)) if name else part)
            writer.flush()
    (tmp_path / "traces" / "checkpoint=7" / "part-00003.parquet").write_bytes(b"a stray file does not exist")
    rows = on_both(
        tmp_path, lambda store: store.table(7).select("student_top", "teacher_top", "rollout_id").order_by("rollout_id")
    )
    assert rows["teacher_top"].null_count == rows["student_top"].null_count == 8


@needs_spark
@pytest.mark.parametrize("engine", ENGINES)
def test_one_flipped_bit_is_refused_before_an_engine_reads_it(tmp_path, engine):
    write_trace(tmp_path, {0: sample_table(40), 7: sample_table(40)}, rows_per_part=15)
    part = tmp_path / "traces/checkpoint=7/part-00001.parquet"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    store = TraceStore(tmp_path, engine=engine)
    assert store.table(0).count().to_pyarrow().as_py() == 40
    with pytest.raises(RunDirError, match=r"checkpoint=7/part-00001\.parquet is not the file that"):
        store.table(7)


# A good guest


@needs_spark
def test_the_session_there_is_stays_as_it_was(run):
    on_both(run, lambda store: store.rows(0))
    from pyspark.sql import SparkSession

    mine = SparkSession.active()
    mine.conf.set("spark.sql.ansi.enabled", "false")
    mine.range(3).createOrReplaceTempView("mine")
    try:
        rows = TraceStore(run, engine="spark", threads=1).table(0)
        assert occurrences(rows, ["a"]).count().to_pyarrow().as_py()
        assert SparkSession.active() is mine
        assert mine.conf.get("spark.sql.ansi.enabled") == "false"
        assert [table.name for table in mine.catalog.listTables()] == ["mine"]
    finally:
        mine.catalog.dropTempView("mine")
        mine.conf.unset("spark.sql.ansi.enabled")


ALONE = """
import signal, sys
from rocktokens.errors import RocktokensError
from rocktokens.traces.store import TraceStore
try:
    TraceStore(sys.argv[1], engine="spark", memory="100MiB")
except RocktokensError as error:
    print(error)
store = TraceStore(sys.argv[1], engine="spark", threads=1, memory="512MiB")
print(store.table(0).count().to_pyarrow())
from pyspark.sql import SparkSession
context = SparkSession.active().sparkContext
print(context.master, context.getConf().get("spark.driver.memory"), context.getConf().get("spark.driver.host"))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def alone(run: Path, cwd: Path, *command: str, **environment: str) -> tuple[list[str], str]:
    """What a process of its own says when it opens a store on Spark: its output by line, and its errors."""
    (script := cwd / "alone.py").write_text(ALONE)
    done = subprocess.run(
        [*(command or (sys.executable,)), str(script), str(run)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.stdout.splitlines(), done.stderr


@needs_spark
def test_a_local_spark_is_silent_bounded_and_leaves_nothing_behind(run, tmp_path):
    (temporary := tmp_path / "tmp").mkdir()
    said, complained = alone(run, tmp_path, TMPDIR=str(temporary))
    assert said == [
        "memory = 100.0MiB is too little for engine = 'spark': give at least 512MiB",
        str(TraceStore(run).rows(0)),
        "local[1] 512m 127.0.0.1",
        "True",
    ]
    assert complained == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.py", "tmp"]
    deadline = time.monotonic() + 60
    while any(temporary.iterdir()) and time.monotonic() < deadline:  # Java tidies up after Python has left
        time.sleep(0.1)
    assert not list(temporary.iterdir())


@needs_spark
def test_an_interrupted_question_does_not_go_on_in_spark(run, monkeypatch):
    from pyspark import SparkContext

    from rocktokens.traces.spark import _ArrowSpark

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    cancelled = []
    rows = TraceStore(run, engine="spark", threads=1).table(0)
    monkeypatch.setattr(_ArrowSpark, "raw_sql", interrupt)
    monkeypatch.setattr(SparkContext, "cancelAllJobs", lambda *_: cancelled.append(1))
    with pytest.raises(KeyboardInterrupt):
        rows.count().to_pyarrow()
    assert cancelled == [1]


@needs_spark
def test_without_java_one_sentence_says_so(run, tmp_path):
    said, complained = alone(run, tmp_path, JAVA_HOME="/nowhere")
    assert said == ["memory = 100.0MiB is too little for engine = 'spark': give at least 512MiB"]
    assert complained.splitlines()[-1].startswith("rocktokens.errors.RocktokensError: engine = 'spark' did not start (")
    assert "/nowhere/bin/java" in complained
    assert complained.endswith("it needs Java 17 or newer, on the PATH or where JAVA_HOME points\n")


def test_without_pyspark_one_sentence_says_so(run, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "pyspark"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "rocktokens.traces.spark", raising=False)
    monkeypatch.delitem(sys.modules, "ibis.backends.pyspark", raising=False)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(RocktokensError) as refused:
        TraceStore(run, engine="spark")
    assert str(refused.value) == (
        "engine = 'spark' needs pyspark, which is not installed: pip install 'rocktokens[spark]', with Java 17 or newer"
    )
