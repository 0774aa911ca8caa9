"""The commands on the embedded pair: what they write, what they say, and that they can be run again."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from command_line import FinishedRun, changed, require_sound, rocktokens, snapshot, succeed

from rocktokens.models import pebbles
from rocktokens.run_dir import RunDir

VERBS = ("demo", "check", "distill", "trace", "find", "evaluate")


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
    assert records["trace"]["tokens"] == sum(len(trace_rows(finished.path, step)) for step in (0, 2, 4))
    saved = json.loads((finished.path / "rocks.json").read_text(encoding="utf-8"))
    assert {"schema_version": saved["schema_version"], **records["find"]} == saved
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
    assert len(succeed("find", copy, "--set", "find.k=4", "--json").record["tokens"]) == 4


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


def test_checkpoints_of_another_run_are_traced_alike(finished: FinishedRun, tmp_path: Path):
    students = [str(finished.path / f"checkpoints/step-{step}") for step in (0, 4)]
    changes = (f"run.directory={tmp_path}/mine", f"trace.checkpoints={json.dumps(students)}")
    outcome = succeed("trace", finished.config, *changed(*changes), "--json")
    assert outcome.record["checkpoints"] == [0, 4]
    for step in (0, 4):
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


def test_demo_goes_from_nothing_to_an_answer_and_picks_up_what_is_there(tmp_path: Path):
    small = (
        "training.max_steps=2", "training.save_steps=1", "training.per_device_train_batch_size=4",
        "trace.num_prompts=4", "evaluation.num_prompts=4", "find.k=5", "models.device=cpu",
    )  # fmt: skip
    demo = ("demo", "--directory", tmp_path / "demo", *changed(*small))
    record = succeed(*demo, "--json").record
    assert [evaluation["name"] for evaluation in record["evaluations"]] == ["teacher", "step 0", "step 1", "step 2"]
    require_sound(tmp_path / "demo")
    before = snapshot(tmp_path / "demo")
    shown = succeed(*demo).stdout
    assert snapshot(tmp_path / "demo") == before
    assert "the student went from" in shown and str(tmp_path / "demo") in shown
