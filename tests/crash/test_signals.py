"""SIGTERM and SIGINT to real processes: what is said, the exit code, and that the same command goes on."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from harness import committed, prepare, trace_rows
from safetensors.torch import load_file
from tiny_pair import tiny_toml, write_pair

from ranks import start_two_ranks
from rocktokens.config import load_config
from rocktokens.interrupts import Terminated, held_signals, obeying_terminate
from rocktokens.run_dir import RunDir
from rocktokens.training import loop
from rocktokens.training.loop import distill
from rocktokens.training.retention import STOPPED, retain
from warm_process import start_command

WORKER = Path(__file__).parents[1] / "training" / "distil_worker.py"
PATIENCE = 120
"""Seconds after which a process that should have done something is taken to hang."""
HELD_UP = """
import time
from pathlib import Path

def grade(response, prompt):
    if Path({held!r}).exists():
        Path({held!r}, str(len(list(Path({held!r}).iterdir())))).touch()
        while Path({held!r}, "12").exists():
            time.sleep(0.01)
    return "1" in response
"""
"""A grader that waits at the thirteenth answer for as long as a folder is there."""


def wait_until(is_so: Callable[[], bool], process: BaseProcess, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert process.is_alive() and time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


def ended(process: BaseProcess) -> int | None:
    process.join(PATIENCE)
    process.kill()
    process.join()
    return process.exitcode


def log_lines(run: Path) -> int:
    logs = run / "logs.jsonl"
    return len(logs.read_text().splitlines()) if logs.exists() else 0


def write_config(folder: Path, run: str, *changes: tuple[str, str]) -> Path:
    text = tiny_toml(folder / "pair", folder / run)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / f"{run}.toml").write_text(text)
    return folder / run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    write_pair(folder / "pair")
    return folder


ENDLESS = (("max_steps = 6", "max_steps = 100000"), ("save_steps = 2", "save_steps = 100000"))


@pytest.mark.parametrize(("number", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "int")])
def test_distill_finishes_the_step_and_keeps_it(folder: Path, number: signal.Signals, code: int, word: str):
    run = write_config(folder, f"stopped-{code}", *ENDLESS)
    log = folder / f"{code}.log"
    process = start_command(["distill", str(run.with_suffix(".toml"))], log)
    wait_until(lambda: log_lines(run) >= 3, process, log)
    assert RunDir(run).checkpoints() == [0]
    assert process.pid is not None
    os.kill(process.pid, number)
    assert ended(process) == code, log.read_text()
    steps = log_lines(run)
    assert RunDir(run).checkpoints() == [0, steps]
    said = log.read_text()
    assert "stopping after this step" in said and f"the checkpoint of step {steps} is written" in said
    assert said.splitlines()[-1].startswith(f"rocktokens: {word}") and "--resume" in said and "Traceback" not in said
    rows = sum(trace_rows(RunDir(run)).values())
    state = json.loads((run / f"checkpoints/step-{steps}/trainer_state.json").read_text())
    assert (state["step"], state["tokens_seen"]) == (steps, rows)


def test_a_stopped_run_ends_with_the_weights_rollouts_and_rows_of_one_that_was_not(folder: Path):
    """The checkpoint that the signal asked for is gone once the next regular one is there."""
    changes = (("max_steps = 6", "max_steps = 12"), ("save_steps = 2", "save_steps = 12"))
    whole, stopped = (write_config(folder, name, *changes) for name in ("whole", "stopped"))
    prepare(whole, ["distill"])

    def stop(made: int, _total: int, _record: dict) -> None:
        if made == 5:
            signal.raise_signal(signal.SIGTERM)

    with obeying_terminate(), pytest.raises(Terminated):
        distill(load_config(stopped.with_suffix(".toml")), on_step=stop)
    assert RunDir(stopped).checkpoints() == [0, 5]
    prepare(stopped, ["distill", "--resume"])
    run, other = RunDir(whole), RunDir(stopped)
    assert other.checkpoints() == run.checkpoints() == [0, 12]
    ours, theirs = committed(run), committed(other)
    compared = {path for path in ours if path.startswith(("checkpoints/", "rollouts/")) and "trainer_state" not in path}
    assert {path: ours[path] for path in compared} == {path: theirs[path] for path in compared} and compared
    assert trace_rows(run) == trace_rows(other)
    assert sorted(path.name for path in (stopped / "checkpoints").iterdir()) == ["step-0", "step-12"]


def test_ranks_stop_at_the_same_step_whichever_of_them_is_told(folder: Path):
    changes = (*ENDLESS, ("gradient_accumulation_steps = 2", "gradient_accumulation_steps = 1"))
    run = write_config(folder, "ranks", *changes)
    processes, logs = start_two_ranks(
        WORKER,
        [str(run.with_suffix(".toml"))],
        folder,
        ACCELERATE_USE_CPU="true",
    )
    wait_until(lambda: log_lines(run) >= 3, processes[1], logs[1])
    assert processes[1].pid is not None
    os.kill(processes[1].pid, signal.SIGTERM)
    assert [ended(process) for process in processes] == [-signal.SIGTERM] * 2, [log.read_text() for log in logs]
    steps = log_lines(run)
    assert RunDir(run).checkpoints() == [0, steps]
    assert load_file(run / f"checkpoints/step-{steps}/model.safetensors")


@pytest.fixture(scope="module")
def traced(folder: Path) -> Path:
    """A run with rocks whose evaluation is graded by a function that can be held up."""
    run = write_config(folder, "traced")
    (folder / "held_up.py").write_text(HELD_UP.format(held=str(folder / "held")))
    task = f'{{ name = "jsonl", path = "{folder}/pair/task.jsonl", grader = "held_up:grade" }}'
    sections = f"""
[trace]
num_prompts = 24
top_k = 0
[find]
k = 4
stage = "score"
min_prompts = 1
[evaluation]
num_prompts = 40
task = {task}
[knockout]
num_prompts = 10
"""
    with run.with_suffix(".toml").open("a") as file:
        file.write(sections)
    for command in ("distill", "trace", "find"):
        prepare(run, [command])
    return run


@pytest.mark.parametrize("command", ["evaluate", "knockout"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_other_commands_end_at_once_and_go_on(
    folder: Path, traced: Path, monkeypatch, command: str, number: signal.Signals, code: int
):
    """The grader holds the command up at an answer in the middle, so the signal comes there however slow all is."""
    run = shutil.copytree(traced, folder / f"{command}-{code}")
    whole = shutil.copytree(traced, folder / f"{command}-{code}-whole")
    options = ["--checkpoint", "student"] if command == "evaluate" else ["--top", "3"]
    monkeypatch.syspath_prepend(folder)
    held, log = folder / "held", folder / f"{command}-{code}.log"
    held.mkdir()
    process = start_command([command, str(run), *options], log)
    wait_until((held / "12").exists, process, log)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert ended(process) == code, log.read_text()
    shutil.rmtree(held)
    assert log.read_text().splitlines()[-1].startswith("rocktokens: ") and "Traceback" not in log.read_text()
    RunDir(run).verify_all(RunDir(run).files())
    for each in (run, whole):
        prepare(each, [command, *options])
    name = "evaluations.json" if command == "evaluate" else "knockout.json"
    assert json.loads((run / name).read_text()) == json.loads((whole / name).read_text())


# The module itself


def test_the_first_signal_waits_for_the_end_of_the_block_and_the_second_does_not():
    told, done = [], []
    with obeying_terminate():
        with pytest.raises(Terminated), held_signals(lambda: told.append(1)) as held:
            signal.raise_signal(signal.SIGTERM)
            done.append(held.number)
        with pytest.raises(KeyboardInterrupt), held_signals(lambda: told.append(2)):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            done.append("never")
    assert (told, done) == ([1, 2], [signal.SIGTERM])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_that_comes_while_ranks_agree_is_not_lost(monkeypatch):
    def gather(own: list[int | None]) -> list[int | None]:
        signal.raise_signal(signal.SIGTERM)
        return own

    monkeypatch.setattr(loop, "gather_object", gather)
    with obeying_terminate(), pytest.raises(Terminated), held_signals(lambda: None) as held:
        assert not loop._agree_to_stop(held)
        monkeypatch.undo()
        assert loop._agree_to_stop(held)


def test_a_handler_of_the_caller_stays():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    try:
        with obeying_terminate(), held_signals(lambda: None) as held:
            signal.raise_signal(signal.SIGTERM)
            assert held.number is None
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_a_signal_is_held_also_where_nobody_can_be_told():
    """Ctrl-C ends a `tee` behind the command too; what is printed then raises."""

    def say() -> None:
        raise SystemExit(1)

    finished = False
    with pytest.raises(KeyboardInterrupt), held_signals(say) as held:
        signal.raise_signal(signal.SIGINT)
        assert held.number == signal.SIGINT
        finished = True
    assert finished


def test_only_the_latest_checkpoint_of_a_stop_stays(tmp_path: Path):
    """Whatever a killed process did not come to: one that was to be dropped, one that was not written."""
    run = RunDir(tmp_path / "run")
    with run.lock():
        run.record_start("distill", student="s", teacher="t")
        for step in (0, 30, 50):
            run.commit_text(f"checkpoints/step-{step}/config.json", "{}")
        run.update_manifest(**{STOPPED: [30, 50, 70]})
        retain(run, 50, None)
        assert [own.path for own in run.files("checkpoints/")] == [f"checkpoints/step-{n}/config.json" for n in (0, 50)]
        assert run.manifest()[STOPPED] == [50] and not run.checkpoint(30).exists()
        run.commit_text("checkpoints/step-100/config.json", "{}")
        retain(run, 100, None)
        assert [own.path for own in run.files("checkpoints/")] == [
            f"checkpoints/step-{n}/config.json" for n in (0, 100)
        ]
        assert run.manifest().get(STOPPED) is None
