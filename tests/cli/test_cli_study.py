"""``rocktokens study``: what its runs share, that interruptions and parallelism do not show, and what it refuses."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import changed, refuse, require_sound, snapshot, succeed, write_config
from small_study import without_seconds, write_rocks, write_study

from rocktokens.config import load_config
from rocktokens.errors import RunDirError
from rocktokens.evaluation.evaluate import evaluate, kept_evaluation
from rocktokens.report.charts import figures
from rocktokens.run_dir import RunDir
from rocktokens.studies.records import StudyResult
from rocktokens.studies.study import run_study
from rocktokens.studies.worker import EVALUATION_SEED
from warm_process import start_command

RUNS = ("uniform/seed-0", "rock-freeze/seed-0", "uniform/seed-1", "rock-freeze/seed-1")
FIRST_CHECKPOINT = "checkpoints/step-1/trainer_state.json"


def wait_for(ready: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def is_free(run: Path) -> bool:
    """Whether no process holds the lock of a run."""
    try:
        with RunDir(run).lock():
            return True
    except RunDirError:
        return False


def kill_the_worker() -> None:
    wait_for(lambda: bool(multiprocessing.active_children()))
    multiprocessing.active_children()[0].kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studies")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A study of two seeds, two runs at a time."""
    succeed("study", write_study(folder, "whole"))
    return folder / "whole"


@pytest.fixture(scope="module")
def broken(folder: Path) -> Path:
    """The same study, one run at a time: begun with one seed and interrupted, killed, moved, and left to finish."""
    path, study = write_study(folder, "broken"), folder / "broken"
    command, log = ["study", str(path), *changed("study.processes=1")], folder / "broken.log"
    process = start_command([*command, *changed("study.seeds=[0]")], log)
    wait_for((study / "arms" / RUNS[0] / FIRST_CHECKPOINT).exists)
    os.killpg(process.pid, signal.SIGINT)
    process.join()
    *warning, last = log.read_text().splitlines()
    assert " ".join(warning).startswith("warning: one seed cannot decide") and len(warning) <= 2, warning
    assert process.exitcode == 130 and "interrupted" in last, last
    assert all(is_free(study / "arms" / run) for run in RUNS)
    process = start_command(command, log)
    wait_for((study / "arms" / RUNS[1] / FIRST_CHECKPOINT).exists)
    process.kill()
    process.join()
    wait_for(lambda: is_free(study / "arms" / RUNS[1]))
    assert not (study / "study.json").exists()
    moved = study.rename(folder / "moved")
    succeed(*command, *changed(f"study.directory={moved}"))
    return moved


def test_neither_interruptions_nor_parallelism_nor_later_seeds_show_in_the_result(whole: Path, broken: Path):
    assert without_seconds(whole) == without_seconds(broken)
    for run in RUNS:
        first, second = (snapshot(study / "arms" / run) for study in (whole, broken))
        kept = [path for path in first if path.startswith(("rollouts/", "checkpoints/")) or path == "evaluations.json"]
        assert {path: second[path] for path in kept} == {path: first[path] for path in kept} != {}


def test_a_library_call_takes_the_path_of_a_study_and_draws_nothing(whole: Path, monkeypatch: pytest.MonkeyPatch):
    kept = StudyResult.load(whole / "study.json")
    monkeypatch.setattr(figures, "draw_figures", None)
    assert run_study(whole.with_suffix(".toml")) == kept


def test_arms_share_everything_but_their_weights(whole: Path):
    rollouts = {run: snapshot(whole / "arms" / run / "rollouts/training") for run in RUNS}
    starts = {run: snapshot(whole / "arms" / run / "checkpoints/step-0") for run in RUNS}
    first, frozen, other_seed, _ = RUNS
    assert rollouts[first]["step-0.parquet"] == rollouts[frozen]["step-0.parquet"]
    assert rollouts[first]["step-0.parquet"] != rollouts[other_seed]["step-0.parquet"]
    assert rollouts[first]["step-1.parquet"] != rollouts[frozen]["step-1.parquet"]
    assert all(start["model.safetensors"] == starts[first]["model.safetensors"] for start in starts.values())


def test_all_runs_answer_the_same_prompts_and_the_start_answers_once(whole: Path):
    files = {run: (whole / "arms" / run / "evaluations.json").read_text() for run in RUNS}
    evaluated = {run: json.loads(text)["evaluations"] for run, text in files.items()}
    names = {run: [record["name"] for record in records] for run, records in evaluated.items()}
    assert names == {run: ["step 1", "step 2"] for run in RUNS} | {RUNS[0]: ["step 0", "step 1", "step 2"]}
    records = [record for own in evaluated.values() for record in own]
    assert all(record["prompt_ids"] == records[0]["prompt_ids"] for record in records)
    assert len({record["seed"] for record in records}) == 1
    result = StudyResult.load(whole / "study.json")
    assert {arm.start.accuracy for arm in result.arms} == {sum(records[0]["correct"]) / 12}


def test_the_same_weights_answer_alike_in_every_arm(whole: Path):
    """The noise is the study's, not the run's: a copy of one arm's student in another run gives the same answers."""
    first, last = (RunDir(whole / "arms" / run) for run in (RUNS[0], RUNS[3]))
    config = load_config(last.config)
    copy = RunDir(whole.parent / "copy")
    [again] = evaluate(copy, config, {"step 2": str(first.checkpoint(2))}, seed=EVALUATION_SEED)
    kept = kept_evaluation(first, load_config(first.config), "step 2", str(first.checkpoint(2)), seed=EVALUATION_SEED)
    assert kept is not None and again.answers == kept.answers


def test_curves_count_what_the_runs_logged(whole: Path):
    result = StudyResult.load(whole / "study.json")
    for arm, slug in (("uniform", "uniform"), ("rock freeze", "rock-freeze")):
        for run in result.arm(arm).runs:
            lines = (whole / f"arms/{slug}/seed-{run.seed}/logs.jsonl").read_text().splitlines()
            log = [json.loads(line) for line in lines]
            assert run.steps == [0, 1, 2]
            assert run.tokens == [0, *(round(sum(line["response_length"] for line in log[:n]) * 4) for n in (1, 2))]
            seconds = [sum(line["seconds_sample"] + line["seconds_update"] for line in log[:n]) for n in range(3)]
            assert run.seconds == pytest.approx(seconds)
    dropped = [result.arm(arm).facts["weight_dropped_share"] for arm in ("uniform", "rock freeze")]
    assert dropped[0] == 0 < dropped[1]


def test_a_finished_study_only_reads(whole: Path):
    before = snapshot(whole)
    config = whole.parent / "whole.toml"
    shown = succeed("study", config).stdout
    record = succeed("study", config, "--json").record
    assert snapshot(whole) == before
    assert {key: record[key] for key in ("seeds", "baseline")} == {"seeds": [0, 1], "baseline": "uniform"}
    assert "rock freeze vs uniform" in shown and str(whole / "figures") in shown
    require_sound(whole)


def test_other_analysis_settings_need_no_training(whole: Path, tmp_path: Path):
    study = shutil.copytree(whole, tmp_path / "moved")
    settings = changed(f"study.directory={study}", "study.alpha=0.2", "study.seeds=[0]", "study.baseline=rock freeze")
    record = succeed("study", whole.parent / "whole.toml", *settings, "--json").record
    assert record["alpha"] == 0.2 and record["seeds"] == [0] and record["comparisons"][0]["first"] == "uniform"
    assert snapshot(study / "arms") == snapshot(whole / "arms")


def test_a_study_without_its_manifest_is_refused(whole: Path, tmp_path: Path):
    """Which knows what the arms were trained with: others might be added that use other rocks."""
    study = shutil.copytree(whole, tmp_path / "moved")
    (study / "manifest.json").unlink()
    before = snapshot(study)
    command = ("study", whole.parent / "whole.toml", *changed(f"study.directory={study}"))
    refuse(*command, naming=(str(study), "arms", "no manifest.json", "restore the manifest from a copy"))
    refuse(*command, *changed("study.seeds=[0,1,2]"), naming=("no manifest.json",))
    assert snapshot(study) == before


def test_a_log_that_is_no_text_does_not_stop_the_plan(whole: Path, tmp_path: Path):
    study = shutil.copytree(whole, tmp_path / "moved")
    log = study / "arms" / RUNS[0] / "logs.jsonl"
    log.write_bytes(b"\xff\xfe" + log.read_bytes())
    record = succeed(
        "study", whole.parent / "whole.toml", "--plan", "--json", *changed(f"study.directory={study}")
    ).record
    assert [run["steps_left"] for run in record["runs"]] == [0] * 4


def test_the_plan_lists_runs_and_writes_nothing(whole: Path, folder: Path):
    config = folder / "whole.toml"
    before = snapshot(whole)
    assert "nothing is left" in succeed("study", config, "--plan").stdout
    record = succeed("study", config, "--plan", "--json", *changed("study.seeds=[0,1,2]")).record
    assert [(run["arm"], run["seed"], run["steps_left"]) for run in record["runs"][3:]] == [
        ("rock freeze", 1, 0), ("uniform", 2, 2), ("rock freeze", 2, 2)
    ]  # fmt: skip
    assert record["answers_left"] == 2 * 2 * 12 and record["seconds_left"] > 0
    student = (whole / "arms" / RUNS[0] / "checkpoints/step-0/model.safetensors").stat().st_size
    assert 6 * 3 * student < record["disk_bytes"] < 6 * 3 * 3 * student
    assert record["interval_standard_errors"] == pytest.approx(4.303, abs=1e-3)
    shown = succeed("study", config, "--plan", *changed("study.seeds=[0,1,2]")).stdout
    assert "with 3 seeds and one pair an interval is up to ± 4.3 standard errors" in shown and "on the disk" in shown
    assert "primary pairs (the first of study.compare), corrected together: rock freeze vs uniform\n" in shown
    assert "\nwarning: 3 seeds cannot decide which arm is better" in shown and len(record["warnings"]) == 1
    assert snapshot(whole) == before


@pytest.mark.parametrize(
    ("setting", "naming"),
    [
        ("base.training.learning_rate=0.5", ("base.training.learning_rate = 0.5", "0.01")),
        ("base.training.max_steps=3", ("base.training.max_steps = 3",)),
        ("study.evaluate_every=2", ("study.evaluate_every = 2",)),
        ("base.evaluation.num_prompts=7", ("base.evaluation.num_prompts = 7",)),
    ],
)
def test_a_base_that_changed_is_refused(whole: Path, setting: str, naming: tuple[str, ...]):
    before = snapshot(whole)
    refuse("study", whole.parent / "whole.toml", *changed(setting), naming=(*naming, "study.directory"))
    assert snapshot(whole) == before


def test_a_policy_that_changed_is_refused(whole: Path):
    config = whole.parent / "whole.toml"
    other = config.with_name("other.toml")
    other.write_text(config.read_text().replace("lam = 0.0", "lam = 0.5"))
    refuse("study", other, naming=("arm 'rock freeze'", "policy.lam = 0.5", "0.0"))


def test_rocks_that_changed_are_refused(whole: Path):
    rocks = f"study.rocks={write_rocks(whole.parent / 'others.json', '01')}"
    refuse("study", whole.parent / "whole.toml", *changed(rocks), naming=("others.json", "study.rocks"))


def test_a_job_that_fails_stops_the_study_with_its_sentence(tmp_path: Path):
    settings = changed("base.rollouts.max_prompt_length=5", "study.processes=1", "study.seeds=[4,5,6,7,8,9]")
    process = start_command(["study", str(write_study(tmp_path, "failing")), *settings], tmp_path / "log")
    process.join()
    said = (tmp_path / "log").read_text()
    assert process.exitcode == 2 and len(said.splitlines()) == 1, said
    assert ", seed 4: " in said and "max_prompt_length" in said


def test_finished_runs_keep_no_optimizer(whole: Path):
    for run in RUNS:
        kept = {path.name for path in (whole / "arms" / run / "checkpoints").glob("step-*/*")}
        assert "model.safetensors" in kept and "optimizer.safetensors" not in kept


def test_steps_that_read_back_rollouts_make_time_an_indication(whole: Path, tmp_path: Path):
    study = shutil.copytree(whole, tmp_path / "study")
    logs = study / "arms" / RUNS[1] / "logs.jsonl"
    first, second = logs.read_text().splitlines()
    logs.write_text(f"{first}\n{json.dumps(json.loads(second) | {'rollouts_reused': True})}\n")
    record = succeed("study", whole.parent / "whole.toml", *changed(f"study.directory={study}"), "--json").record
    assert "some runs were interrupted, so equal time is an indication only" in record["notes"]


@pytest.mark.parametrize("line", ["[]", '{"x": 1}', '{"response_length": null}', "{"])
def test_a_damaged_line_of_a_log_is_refused(whole: Path, tmp_path: Path, line: str):
    study = shutil.copytree(whole, tmp_path / "study")
    logs = study / "arms" / RUNS[1] / "logs.jsonl"
    logs.write_text(f"{logs.read_text().splitlines()[0]}\n{line}\n")
    command = ("study", whole.parent / "whole.toml", *changed(f"study.directory={study}"))
    refuse(*command, naming=(f"{logs} has a damaged line (", "restore it from a copy of the run"))


def test_runs_that_began_differently_are_no_pair(whole: Path, tmp_path: Path):
    study = shutil.copytree(whole, tmp_path / "study")
    other, name = RunDir(study / "arms" / RUNS[3]), "rollouts/training/step-0.parquet"
    rows = other.listed(name).rows
    RunDir(study / "arms" / RUNS[1]).commit(name, lambda path: shutil.copy(other.path / name, path), rows)
    command = ("study", whole.parent / "whole.toml", *changed(f"study.directory={study}"))
    refuse(*command, naming=("rock freeze, seed 0: its first rollouts are not those of uniform, seed 0", "no pair"))


def test_answers_to_other_prompts_are_refused(whole: Path, tmp_path: Path):
    study = shutil.copytree(whole, tmp_path / "study")
    path = study / "arms" / RUNS[1] / "evaluations.json"
    record = json.loads(path.read_text())
    record["evaluations"][1]["prompt_ids"] = [f"other-{number}" for number in range(6)]
    RunDir(path.parent).commit_text(path.name, json.dumps(record))
    command = ("study", whole.parent / "whole.toml", *changed(f"study.directory={study}"))
    refuse(*command, naming=(str(path), "step 2 answered other prompts"))


def test_the_verb_for_a_single_run_names_the_one_for_a_study_and_the_other_way_round(tmp_path: Path):
    refuse("distill", write_study(tmp_path, "study"), naming=("[study]", "`rocktokens study`"))
    refuse("study", write_config(tmp_path / "run.toml", tmp_path / "run"), naming=("[study]", "`rocktokens distill`"))


def test_a_worker_that_is_killed_ends_the_study_with_a_sentence(tmp_path: Path):
    config = write_study(tmp_path, "killed")
    thread = threading.Thread(target=kill_the_worker, daemon=True)
    thread.start()
    settings = changed("study.processes=1", "study.seeds=[0,1,2,3,4,5]")  # fewer seeds are warned of first
    refuse("study", config, *settings, naming=("uniform, seed 0", "code -9", "study.processes=1"))
    thread.join()


@pytest.mark.parametrize(
    ("setting", "naming"),
    [
        ("study.evaluate_evry=2", ("study.evaluate_evry", "did you mean study.evaluate_every?")),
        ("study.seeds=[0,0]", ("study.seeds", "each once")),
        ("study.processes=0", ("study.processes = 0", "auto")),
        ("study.baseline=unifrom", ("study.baseline", "'unifrom'", "'uniform'")),
        ('study.compare=[["rocks","uniform"]]', ("study.compare", "'rocks'", "'rock freeze'")),
        ("base.training.max_step=3", ("base.training.max_step", "did you mean base.training.max_steps?")),
        ("base.training.num_train_epochs=2", ("num_train_epochs = 2", "set base.training.max_steps instead")),
        ("base.policy.name=rocks", ("base.policy",)),
        ("scout.seed=9", ("study.rocks", "[scout]")),
        ("study.rocks=nowhere.json", ("nowhere.json", "does not exist")),
        ("base.rollouts.num_generations=3", ("rollouts.num_generations = 3", "does not divide")),
    ],
)
def test_bad_studies(tmp_path: Path, setting: str, naming: tuple[str, ...]):
    for plan in ([], ["--plan"]):
        refuse("study", write_study(tmp_path, "bad"), *changed(setting), *plan, naming=naming)
    assert not (tmp_path / "bad").exists()


def test_pillars_of_untested_rocks_are_refused_before_training(tmp_path: Path):
    config = write_study(tmp_path, "bad")
    config.write_text(config.read_text().replace("lam = 0.0", 'lam = 0.0, protect = "@rocks"'))
    refuse("study", config, naming=("protect", "knockout"))
    assert not (tmp_path / "bad/arms").exists()


@pytest.mark.parametrize(
    ("classes", "naming"),
    [
        ('"@classes"', ("arm 'rock freeze' uses @classes", "scout.stages", "study.classes")),
        ('"@rocks"', ("policy.classes = '@rocks'", "@classes, @random_classes or @other_classes")),
        ('[["###", "no token"]]', ("policy.classes", "'no token'", "tokens, not one")),
    ],
)
def test_bad_classes(tmp_path: Path, classes: str, naming: tuple[str, ...]):
    config = write_study(tmp_path, "bad")
    config.write_text(config.read_text().replace('"rocks", rocks = "@rocks"', f'"coarse", classes = {classes}'))
    for plan in ([], ["--plan"]):
        refuse("study", config, *plan, naming=naming)
    assert not (tmp_path / "bad").exists()
