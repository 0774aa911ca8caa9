"""A disk without room and a user without patience: one sentence, nothing lost, and the same command goes on."""

import json
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import FinishedRun, Outcome, changed, require_sound, rocktokens, snapshot, succeed

from rocktokens.run_dir import RunDir

MEGABYTE = 1_000_000


def stopped_for(outcome: Outcome, reason: str) -> bool:
    """Whether a command ended with one sentence about room, below whatever it had to tell before."""
    *progress, last = outcome.stderr.splitlines()
    quiet = not any(word in line for line in progress for word in ("Traceback", "Error", "rocktokens: "))
    return outcome.code == 2 and quiet and last.startswith("rocktokens: ") and reason in last


def committed_is_sound(run: Path) -> bool:
    """Whether everything the manifest lists is there as listed; unlisted leftovers do not exist."""
    directory = RunDir(run)
    return all(directory.verify(entry) for entry in directory.files())


def trained(run: Path) -> dict[str, str]:
    """SHA-256 of the checkpoints, rollouts and traces of training."""
    folders = ("checkpoints/", "rollouts/training/", "traces/training/")
    return {path: sha for path, sha in snapshot(run).items() if path.startswith(folders)}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process may grow beyond this size; needs no privilege."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """A file system of 100 kB and a function that gives it another size."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=100000", "tmpfs", str(disk)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")

    def resize(size: int) -> None:
        subprocess.run([mount, "-o", f"remount,size={size}", str(disk)], check=True)

    yield disk, resize
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_stops_distill_until_there_is_room(
    finished: FinishedRun, small_disk: tuple[Path, Callable[[int], None]]
):
    """The disk grows a little after every failure, so that one kind of file after another finds it full."""
    disk, resize = small_disk
    run = disk / "run"
    distill = ("distill", finished.config, "--resume", *changed(f"run.directory={run}"))
    failures = 0
    for size in (0.1, 0.3, 1, 4.3, 5, 9, 13, 17, 22, 30, 64):
        resize(int(size * MEGABYTE))
        outcome = rocktokens(*distill)
        assert committed_is_sound(run)
        if outcome.code == 0:
            break
        assert stopped_for(outcome, "no space left on device"), outcome.stderr
        failures += 1
    assert failures >= 5 and outcome.code == 0
    require_sound(run)
    assert trained(run) == trained(finished.path)


def test_a_full_disk_stops_trace_find_and_evaluate(
    finished: FinishedRun, small_disk: tuple[Path, Callable[[int], None]]
):
    disk, resize = small_disk
    run = disk / "run"
    students = json.dumps([str(finished.path / f"checkpoints/step-{step}") for step in (0, 2, 4)])
    trace = ("trace", finished.config, *changed(f"run.directory={run}", f"trace.checkpoints={students}"))
    assert stopped_for(rocktokens(*trace), "no space left on device")
    resize(MEGABYTE)
    succeed(*trace)
    with (disk / "ballast").open("wb", buffering=0) as ballast, pytest.raises(OSError, match="No space left"):
        while True:
            ballast.write(bytes(4096))
    before = snapshot(run)
    assert stopped_for(rocktokens("find", run), "no space left on device")
    assert stopped_for(rocktokens("evaluate", run, "--checkpoint", "student"), "no space left on device")
    assert snapshot(run) == before
    (disk / "ballast").unlink()
    resize(4 * MEGABYTE)
    found = succeed("find", run, "--json").record
    assert found["tokens"] == finished.outcomes["find"].record["tokens"]
    succeed("evaluate", run, "--checkpoint", "student")
    require_sound(run)


def test_a_limit_on_file_size_is_no_traceback_either(finished: FinishedRun, tmp_path: Path):
    run = tmp_path / "run"
    distill = ("distill", finished.config, "--resume", *changed(f"run.directory={run}"))
    for size in (20_000, 2 * MEGABYTE, 6 * MEGABYTE):
        with largest_file(size):
            outcome = rocktokens(*distill)
        assert stopped_for(outcome, "file too large"), outcome.stderr
        assert committed_is_sound(run)
    succeed(*distill)
    require_sound(run)
    assert trained(run) == trained(finished.path)


def test_a_limit_on_file_size_stops_knockout_and_costs_nothing(finished: FinishedRun, tmp_path: Path):
    """The first free answers do not fit, then all that is decoded does and the result does not."""
    run = shutil.copytree(finished.path, tmp_path / "run")
    knockout = ("knockout", run, "--prompts", "4", "--top", "3")
    for size in (3_000, 12_000):
        with largest_file(size):
            outcome = rocktokens(*knockout)
        assert stopped_for(outcome, "file too large"), outcome.stderr
        assert committed_is_sound(run)
        assert (run / "rocks.json").read_bytes() == (finished.path / "rocks.json").read_bytes()
    decoded = RunDir(run).files("knockout/")
    succeed(*knockout)
    assert RunDir(run).files("knockout/") == decoded != []
    require_sound(run)


def test_an_interrupt_is_130_and_says_how_to_go_on(finished: FinishedRun, tmp_path: Path):
    run = tmp_path / "run"

    def interrupt_when_it_trains() -> None:
        while not (run / "logs.jsonl").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_it_trains, daemon=True)
    thread.start()
    settings = changed(f"run.directory={run}", "training.max_steps=200", "training.save_steps=1")
    outcome = rocktokens("distill", finished.config, *settings)
    thread.join()
    last = outcome.stderr.splitlines()[-1]
    assert outcome.code == 130 and last.startswith("rocktokens: interrupted") and "--resume" in last
    assert "Traceback" not in outcome.stderr
    assert committed_is_sound(run)
