"""The commands on the embedded pair: what they write, what they say, and that they can be run again."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from command_line import FinishedRun, changed, other_tokenizer, require_sound, rocktokens, snapshot, succeed

from rocktokens.cli.common import terminal
from rocktokens.config import load_config
from rocktokens.evaluation.evaluate import evaluate
from rocktokens.models import pebbles
from rocktokens.run_dir import RunDir
from rocktokens.traces.writer import TraceWriter

VERBS = ("demo", "check", "distill", "trace", "find", "evaluate", "gradients", "knockout", "study", "report", "explore")


@pytest.fixture
def copy(finished: FinishedRun, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    return shutil.copytree(finished.path, tmp_path / "copy")


def trace_rows(run: Path, checkpoint: int) -> list[dict[str, object]]:
    parts = RunDir(run).files(f"traces/checkpoint={checkpoint}/")
    return [row for part in parts for row in pq.ParquetFile(run / part.path).read().to_pylist()]


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_an_example(verb: str):
    shown = " ".join(succeed(verb, "--help").stdout.split())
    assert f"Example: rocktokens {verb}" in shown and "--json" in shown


def test_every_command_prints_one_json_object(finished: FinishedRun):
    records = {verb: outcome.record for verb, outcome in finished.outcomes.items()}
    logged = [json.loads(line) for line in (finished.path / "logs.jsonl").read_text().splitlines()]
    assert records["distill"]["steps"] == len(logged) == 4
    assert records["distill"]["checkpoint"] == str(finished.path / "checkpoints/step-4")
    assert records["distill"]["tokens_seen"] == sum(4 * line["response_length"] for line in logged)
    assert records["trace"]["checkpoints"] == [0, 2, 4] and records["trace"]["rollouts"] == 8
    assert [len(trace_rows(finished.path, step)) for step in (0, 2, 4)] == [records["trace"]["tokens"]] * 3
    saved = json.loads((finished.path / "rocks.json").read_text(encoding="utf-8"))
    found = {name: value for name, value in records["find"].items() if name != "analysis"}
    assert {"schema_version": saved["schema_version"], **found} == saved
    assert len(saved["tokens"]) == 10
    names = [record["name"] for record in records["evaluate"]["evaluations"]]
    assert names == ["step 0", "step 2", "step 4", "teacher"]


def test_the_manifest_lists_every_file_with_its_hash(finished: FinishedRun):
    require_sound(finished.path)
    written = snapshot(finished.path)
    assert {"config.toml", "rocks.json", "evaluations.json", "logs.jsonl", "tokenizer/tokenizer.json"} <= written.keys()
    assert {f"checkpoints/step-{step}/model.safetensors" for step in (0, 2, 4)} <= written.keys()


def test_the_config_of_a_run_replays_it_to_the_byte(finished: FinishedRun, replayed: Path):
    prefixes = ("checkpoints/", "rollouts/training/", "traces/training/", "tokenizer/")
    first, second = snapshot(finished.path), snapshot(replayed)
    expected = {path: sha for path, sha in first.items() if path.startswith(prefixes)}
    assert {path: sha for path, sha in second.items() if path.startswith(prefixes)} == expected
    assert first["checkpoints/step-0/model.safetensors"] != first["checkpoints/step-4/model.safetensors"]


def test_another_seed_gives_another_run(finished: FinishedRun, tmp_path: Path):
    changes = (f"run.directory={tmp_path}/run", "run.seed=2", "training.max_steps=1", "training.save_steps=1")
    succeed("distill", finished.config, *changed(*changes))
    rollouts = "rollouts/training/step-0.parquet"
    assert snapshot(tmp_path / "run")[rollouts] != snapshot(finished.path)[rollouts]


def test_a_finished_run_resumes_to_nothing(finished: FinishedRun):
    before = snapshot(finished.path)
    assert succeed("distill", finished.config, "--resume", "--json").record["already_complete"] is True
    assert snapshot(finished.path) == before


@pytest.mark.parametrize("threads", ["1", "2"])
def test_find_gives_the_same_bytes_every_time(finished: FinishedRun, threads: str):
    before = snapshot(finished.path)
    succeed("find", finished.path, "--threads", threads)
    assert snapshot(finished.path) == before


def test_find_takes_its_settings_from_the_command_line(copy: Path):
    assert len(succeed("find", copy, "--k", "3", "--json").record["tokens"]) == 3
    assert len(succeed("find", copy, "--set", "find.k=4", "--json").record["tokens"]) == 4
    assert succeed("find", copy, "--reference", "2", "--json").record["criterion"]["reference"] == 2


def test_find_takes_settings_where_there_are_only_traces(copy: Path):
    RunDir(copy).drop(["config.toml"])
    few = changed("find.k=4", "find.min_prompts=1")
    assert len(succeed("find", copy, *few, "--json").record["tokens"]) == 4


def test_a_second_trace_writes_nothing(finished: FinishedRun):
    files = [
        finished.path / entry.path
        for prefix in ("traces/", "rollouts/")
        for entry in RunDir(finished.path).files(prefix)
    ]
    before = [(path.stat().st_mtime_ns, path.stat().st_ino) for path in files]
    again = succeed("trace", finished.config, "--json")
    assert again.record == finished.outcomes["trace"].record
    assert [(path.stat().st_mtime_ns, path.stat().st_ino) for path in files] == before
    require_sound(finished.path)


def test_trace_with_other_settings_replaces_only_when_told(copy: Path):
    before = snapshot(copy)
    other = ("trace", copy / "config.toml", *changed(f"run.directory={copy}", "trace.num_prompts=3"))
    outcome = rocktokens(*other)
    assert outcome.code == 2 and "num_prompts = 8" in outcome.stderr and "--restart" in outcome.stderr
    outcome = rocktokens("trace", copy / "config.toml", *changed(f"run.directory={copy}", "models.dtype=bfloat16"))
    assert outcome.code == 2 and "dtype = 'float32'" in outcome.stderr
    assert snapshot(copy) == before
    assert succeed(*other, "--restart", "--json").record["rollouts"] == 3
    assert {row["rollout_id"] for row in trace_rows(copy, 4)} == {0, 1, 2}
    require_sound(copy)
    assert sum(token["freq"] for token in succeed("find", copy, "--json").record["tokens"]) > 0


def test_a_probe_of_other_settings_is_not_taken_up(copy: Path):
    """A replay that ended after writing its probe, before the first trace part."""
    run = RunDir(copy)
    run.drop([entry.path for entry in run.files("traces/checkpoint=")])
    other = ("trace", copy / "config.toml", *changed(f"run.directory={copy}", "trace.num_prompts=3"))
    assert rocktokens(*other).code == 2
    assert succeed(*other, "--restart", "--json").record["rollouts"] == 3


def test_a_resumed_replay_loses_no_rollout_however_long_they_are(
    finished: FinishedRun, copy: Path, monkeypatch: pytest.MonkeyPatch
):
    """A writer that cuts parts by rows would leave more of them than the replay has finished."""
    monkeypatch.setattr(TraceWriter.__init__, "__defaults__", (None, 50, "replay"))
    trace = ("trace", copy / "config.toml", *changed(f"run.directory={copy}"))
    succeed(*trace, "--restart")
    parts = RunDir(copy).files("traces/checkpoint=4/")
    RunDir(copy).drop([parts[-1].path])
    succeed(*trace)
    for step in (0, 2, 4):
        assert trace_rows(copy, step) == trace_rows(finished.path, step)


def test_trace_counts_what_was_replayed(finished: FinishedRun, tmp_path: Path):
    """Three prompts where eight were asked for; every checkpoint answers them itself."""
    lines = [json.dumps({"question": f"{n} + 1 = ?", "answer": str(n + 1)}) for n in range(3)]
    (tmp_path / "task.jsonl").write_text("\n".join(lines), encoding="utf-8")
    students = [str(finished.path / f"checkpoints/step-{step}") for step in (0, 4)]
    settings = ("task.name=jsonl", f"task.path={tmp_path}/task.jsonl", f"trace.checkpoints={json.dumps(students)}")
    for probe, writers in (("first", 1), ("each", 2)):
        run = tmp_path / probe
        outcome = succeed("trace", finished.config, *changed(*settings, f"run.directory={run}", f"trace.probe={probe}"),
                          "--json")  # fmt: skip
        rows = {(row["rollout_id"], row["position"]) for step in (0, 4) for row in trace_rows(run, step)}
        assert outcome.record["rollouts"] == len({rollout for rollout, _ in rows}) == 3 * writers
        assert outcome.record["tokens"] == len(rows)


def test_the_bar_of_a_replay_ends_where_it_should(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "task.jsonl").write_text('{"question": "1 + 1 = ?", "answer": "2"}', encoding="utf-8")
    bars: dict[str, list[int]] = {}

    @contextmanager
    def counted(label: str, total: int) -> Iterator[Callable[[int], None]]:
        bars[label] = [0, total]
        yield lambda steps: bars[label].__setitem__(0, bars[label][0] + steps)

    monkeypatch.setattr(terminal, "bar", counted)
    students = json.dumps([str(finished.path / f"checkpoints/step-{step}") for step in (0, 4)])
    settings = (f"run.directory={tmp_path}/run", "task.name=jsonl", f"task.path={tmp_path}/task.jsonl")
    succeed("trace", finished.config, *changed(*settings, f"trace.checkpoints={students}"))
    assert bars == {"writing the probe with checkpoint 4": [1, 1], "replaying": [2, 2]}


def test_a_student_that_was_trained_further_is_not_the_one_that_was_replayed(finished: FinishedRun, tmp_path: Path):
    student = shutil.copytree(finished.path / "checkpoints/step-0", tmp_path / "student")
    settings = (f"run.directory={tmp_path}/run", f"trace.checkpoints={json.dumps([str(student)])}")
    trace = ("trace", finished.config, *changed(*settings, "trace.num_prompts=2"))
    before = succeed(*trace, "--json")
    (student / "optimizer.safetensors").unlink()
    assert succeed(*trace, "--json").record == before.record
    moved = student.rename(tmp_path / "moved")
    elsewhere = changed(f"trace.checkpoints={json.dumps([str(moved)])}")
    assert succeed(*trace, *elsewhere, "--json").record == before.record
    shutil.copy(finished.path / "checkpoints/step-4/model.safetensors", moved)
    outcome = rocktokens(*trace, *elsewhere)
    assert outcome.code == 2 and "checkpoints.0 = " in outcome.stderr and "--restart" in outcome.stderr


def test_a_moved_run_is_traced_on(finished: FinishedRun, copy: Path):
    before = snapshot(copy)
    outcome = succeed("trace", copy / "config.toml", *changed(f"run.directory={copy}"), "--json")
    assert outcome.record == {**finished.outcomes["trace"].record, "directory": str(copy)}
    assert snapshot(copy) == before


def test_a_run_made_by_trace_describes_the_replay_it_holds(finished: FinishedRun, tmp_path: Path):
    run, other = tmp_path / "run", str(other_tokenizer(tmp_path / "other"))
    settings = (f"run.directory={run}", "trace.num_prompts=2")
    own = f"trace.checkpoints={json.dumps([str(finished.path / 'checkpoints/step-0')])}"
    succeed("trace", finished.config, *changed(*settings, own))
    assert RunDir(run).manifest()["tokenizer_sha256"] == RunDir(finished.path).manifest()["tokenizer_sha256"]
    new = changed(*settings, f"models.teacher={other}", f"trace.checkpoints={json.dumps([other])}")
    succeed("trace", finished.config, "--restart", *new)
    assert RunDir(run).manifest()["tokenizer_sha256"] != RunDir(finished.path).manifest()["tokenizer_sha256"]
    assert load_config(run / "config.toml").models.teacher == other
    assert (
        json.loads((run / "tokenizer/tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]["7"]
        == (json.loads((Path(other) / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]["7"])
    )
    require_sound(run)


def test_a_first_trace_that_failed_describes_nothing(finished: FinishedRun, tmp_path: Path):
    """The prompts of the first attempt are too long; the second has another limit, which its config says."""
    students = f"trace.checkpoints={json.dumps([str(finished.path / 'checkpoints/step-0')])}"
    trace = ("trace", finished.config, *changed(f"run.directory={tmp_path}/run", students, "trace.num_prompts=2"))
    assert rocktokens(*trace, *changed("rollouts.max_prompt_length=5")).code == 2
    succeed(*trace, *changed("rollouts.max_prompt_length=300"))
    assert load_config(tmp_path / "run/config.toml").rollouts.max_prompt_length == 300


def test_checkpoints_of_another_run_are_traced_alike(finished: FinishedRun, tmp_path: Path):
    students = [str(finished.path / f"checkpoints/step-{step}") for step in (0, 2, 4)]
    changes = (f"run.directory={tmp_path}/mine", f"trace.checkpoints={json.dumps(students)}")
    outcome = succeed("trace", finished.config, *changed(*changes), "--json")
    assert outcome.record["checkpoints"] == [0, 2, 4]
    for step in (0, 2, 4):
        assert trace_rows(tmp_path / "mine", step) == trace_rows(finished.path, step)
    require_sound(tmp_path / "mine")
    found = succeed("find", tmp_path / "mine", "--json").record
    assert found["tokens"] == finished.outcomes["find"].record["tokens"]


def test_any_directories_can_be_traced(finished: FinishedRun, tmp_path: Path):
    mine = shutil.copytree(pebbles.directory("student"), tmp_path / "before")
    students = [str(mine), str(finished.path / "checkpoints/step-2")]
    changes = (f"run.directory={tmp_path}/run", f"trace.checkpoints={json.dumps(students)}", "trace.num_prompts=2")
    outcome = succeed("trace", finished.config, *changed(*changes), "--json")
    assert outcome.record["checkpoints"] == [0, 1] and outcome.record["rollouts"] == 2
    rows = trace_rows(tmp_path / "run", 0), trace_rows(tmp_path / "run", 1)
    assert [row["token_id"] for row in rows[0]] == [row["token_id"] for row in rows[1]]
    assert [row["kl"] for row in rows[0]] != [row["kl"] for row in rows[1]]


def test_evaluate_reuses_what_it_measured(copy: Path):
    """The model is gone, its record is not."""
    (copy / "checkpoints/step-4/model.safetensors").unlink()
    before = snapshot(copy)
    [again] = succeed("evaluate", copy, "--json").record["evaluations"]
    kept = json.loads((copy / "evaluations.json").read_text(encoding="utf-8"))["evaluations"]
    assert again == next(record for record in kept if record["name"] == "step 4")
    assert snapshot(copy) == before
    assert rocktokens("evaluate", copy, "--set", "evaluation.num_prompts=5").code == 2


def test_evaluate_measures_again_what_the_settings_change(copy: Path):
    before = json.loads((copy / "evaluations.json").read_text(encoding="utf-8"))["evaluations"]
    teacher = ("evaluate", copy, "--checkpoint", "teacher", "--json")
    [fewer] = succeed(*teacher, "--set", "evaluation.num_prompts=5").record["evaluations"]
    [other] = succeed(*teacher, "--set", "models.teacher=pebbles-student").record["evaluations"]
    [same] = succeed(*teacher).record["evaluations"]
    after = json.loads((copy / "evaluations.json").read_text(encoding="utf-8"))["evaluations"]
    assert fewer["n_prompts"] == 5 and same in before
    assert other["mean_response_length"] == next(r for r in before if r["name"] == "step 0")["mean_response_length"]
    assert after == [*before, fewer, other]
    require_sound(copy)


def test_evaluate_measures_again_what_has_other_content(finished: FinishedRun, copy: Path, tmp_path: Path):
    model = shutil.copytree(finished.path / "checkpoints/step-0", tmp_path / "model")
    (tmp_path / "test.jsonl").write_text('{"question": "1 + 1 = ?", "answer": "2"}', encoding="utf-8")
    task = ("evaluation.task.name=jsonl", f"evaluation.task.path={tmp_path}/test.jsonl")
    evaluate = ("evaluate", copy, "--checkpoint", str(model), *changed(*task))

    def measured() -> int:
        succeed(*evaluate)
        return len(json.loads((copy / "evaluations.json").read_text(encoding="utf-8"))["evaluations"])

    first = measured()
    assert measured() == first
    shutil.copy(finished.path / "checkpoints/step-4/model.safetensors", model)
    assert measured() == first + 1
    (tmp_path / "test.jsonl").write_text('{"question": "2 + 1 = ?", "answer": "3"}', encoding="utf-8")
    assert measured() == first + 2
    assert "Accuracy on jsonl:test.jsonl" in succeed(*evaluate).stdout


@pytest.mark.parametrize("kind", [str, Path, RunDir])
def test_evaluate_as_a_library_call_reads_the_config_of_the_run(finished: FinishedRun, kind: Callable[[Path], object]):
    before = snapshot(finished.path)
    of_all = evaluate(kind(finished.path), models=["all", "teacher"])  # type: ignore[arg-type]
    of_last = evaluate(kind(finished.path))  # type: ignore[arg-type]
    printed = finished.outcomes["evaluate"].record["evaluations"]
    records = json.loads(json.dumps([record.to_record() for record in (*of_all, *of_last)]))
    assert records == [*printed, printed[2]]
    assert snapshot(finished.path) == before


def test_demo_goes_from_nothing_to_an_answer_and_picks_up_what_is_there(tmp_path: Path):
    small = (
        "training.max_steps=2", "training.save_steps=1", "training.per_device_train_batch_size=4",
        "trace.num_prompts=4", "evaluation.num_prompts=4", "find.k=5", "find.min_prompts=1", "models.device=cpu",
        "gradients.batches=2", "knockout.num_prompts=4",
    )  # fmt: skip
    demo = ("demo", "--directory", tmp_path / "demo", *changed(*small))
    record = succeed(*demo, "--json").record
    assert [evaluation["name"] for evaluation in record["evaluations"]] == ["teacher", "step 0", "step 1", "step 2"]
    require_sound(tmp_path / "demo")
    before = snapshot(tmp_path / "demo")
    shown = succeed(*demo).stdout
    assert snapshot(tmp_path / "demo") == before
    assert "the student went from" in shown and str(tmp_path / "demo") in shown
    assert record["gradients"]["claims"] and record["knockout"]["noise"]["differing"] == 0
    _, block = shown.split("\nThe paper's claims on this run:")
    printed = [line for line in block.split("\n\n")[0].splitlines() if line.startswith("· ")]
    claims = record["gradients"]["claims"]
    assert len(printed) == len(claims)
    assert all(line.startswith(f"· {claim['claim'][:40]}") for line, claim in zip(printed, claims, strict=True))


def test_a_demo_without_rocks_ends_before_its_study(tmp_path: Path):
    small = (
        "training.max_steps=2", "training.save_steps=1", "training.per_device_train_batch_size=4",
        "trace.num_prompts=4", "evaluation.num_prompts=4", "find.k=5", "models.device=cpu",
    )  # fmt: skip
    outcome = rocktokens("demo", "--directory", tmp_path / "demo", *changed(*small))
    last = outcome.stderr.splitlines()[-1]
    assert (outcome.code, outcome.stdout) == (2, "") and "Traceback" not in outcome.stderr
    assert last.startswith("rocktokens: the demo ends here, without rocks to ban or to bypass (4 prompts are "), last
    assert (
        "too few to find rocks: trace at least 40 (trace.num_prompts)" in last
        and str(tmp_path / "demo/report.html") in last
    )
    assert not (tmp_path / "demo/study").exists() and (tmp_path / "demo/report.html").exists()
