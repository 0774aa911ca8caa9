"""Kill a command at random moments, resume it until it is done, and compare the result with an uninterrupted run.

1. The command runs once, undisturbed: the reference, which also tells how long the working phase takes.
2. It runs again in a fresh directory and is sent SIGKILL: in turns as soon as it has committed a number of parts of its
   work, up to half of them all, and at a moment drawn uniformly over the working phase, which begins when the process
   takes the lock of the run (imports, which take longest, are not worth killing).
3. It is started again, and killed again, until it finishes; then the run is compared, and 2 begins again until the
   wanted number of kills has been made. The last run of all is left to finish. At least one kill must have come when
   some of the work was committed and some was still to be done, or nothing has been shown about going on.
4. Compared are the SHA-256 of every checkpoint, rollout and trace file, of rocks and of knock-outs, on disk and in the
   manifest, and the trace rows: each (part's folder, rollout, position) exactly once, as many as in the reference.

    python tests/crash/harness.py distill --kills 20 --seed 1
    python tests/crash/harness.py extend --kills 20
    python tests/crash/harness.py trace --kills 20
    python tests/crash/harness.py knockout --kills 20
"""

import argparse
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from multiprocessing.process import BaseProcess
from pathlib import Path, PurePosixPath

import pyarrow.parquet as pq
from typer.testing import CliRunner

from rocktokens.cli.main import app
from rocktokens.run_dir import RunDir, file_sha256

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from tiny_pair import tiny_toml, write_pair

from warm_process import start_command

COMPARED = ("checkpoints/", "rollouts/", "traces/", "rocks.json", "knockout.json")
SETTINGS = """
[trace]
num_prompts = 24
rollouts_per_part = 4
top_k = 0
[find]
k = 60
stage = "score"
min_prompts = 1
[evaluation]
task = {{ name = "jsonl", path = "{pair}/task.jsonl" }}
[knockout]
num_samples = 40
"""
MANY_BANS = list(chain.from_iterable(("--id", str(token)) for token in range(64, 112)))
"""Besides the rocks, so that decoding takes seconds."""
COMMANDS = {
    "distill": ["distill", "--resume"],
    "begin": ["distill", "--resume", "--set", "training.max_steps=5"],
    "extend": ["distill", "--resume"],
    "trace": ["trace"],
    "find": ["find"],
    "knockout": ["knockout", "--top", "60", *MANY_BANS],
}
PARTS = {
    "distill": "checkpoints/*/model.safetensors",
    "extend": "checkpoints/*/model.safetensors",
    "trace": "traces/checkpoint=*/part-*",
    "knockout": "knockout/*/part-*",
}
"""What a command commits as it works."""
BEFORE = {"distill": [], "extend": ["begin"], "trace": ["distill"], "knockout": ["distill", "trace", "find"]}
"""What can be tested, and which commands must have run by then."""
OF_A_RUN = ("find", "evaluate", "knockout")
"""Commands that take the folder of a run, not its config."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When to kill a process: so long after it takes the lock, or as soon as it has committed so many parts."""

    seconds: float = math.inf
    parts: float = math.inf


NEVER = Moment()


@dataclass(frozen=True, slots=True)
class Ending:
    """How one process ended."""

    killed: bool
    worked: float
    """Seconds between taking the lock and ending."""
    parts: int
    """That the run had by then, whichever process had committed them."""


class CrashTest:
    """One command, its reference run and as many killed ones as wanted."""

    def __init__(self, command: str, directory: Path, seed: int = 0, steps: int = 15) -> None:
        self.directory = directory
        self._arguments = COMMANDS[command]
        self._pattern = PARTS[command]
        self._random = random.Random(seed)
        self._before = directory / "before"
        write_pair(directory / "pair")
        self._write_config(self._before, steps)
        for earlier in BEFORE[command]:
            prepare(self._before, COMMANDS[earlier])

    def run(self, kills: int) -> list[Ending]:
        """Make the kills, check every finished run; the endings of all killed runs in order."""
        reference = self._fresh("reference")
        whole = self._execute(reference, NEVER)
        endings: list[Ending] = []
        while count_kills(endings) < kills:
            run = self._fresh(f"killed-{len(endings)}")
            for ending in self._interrupted(run, whole, kills - count_kills(endings)):
                endings.append(ending)
                print(describe(ending, whole), flush=True)
            require_same(reference, run)
        if not count_midway(endings):
            raise AssertionError(f"no kill came between the first part and the last: {endings}")
        return endings

    def _interrupted(self, run: Path, whole: Ending, kills: int) -> Iterator[Ending]:
        for number in range(kills):
            ending = self._execute(run, self._moment(number, whole))
            yield ending
            if not ending.killed:
                return
        yield self._execute(run, NEVER)

    def _moment(self, number: int, whole: Ending) -> Moment:
        if number % 2:
            return Moment(seconds=self._random.uniform(0, whole.worked))
        return Moment(parts=self._random.randint(1, max(1, whole.parts // 2)))

    def _execute(self, run: Path, moment: Moment) -> Ending:
        before = self._parts(run)
        log = run.parent / f"{run.name}.log"
        process = start_command(command_line(run, self._arguments), log)
        began = wait_for_work(process, run)
        while process.is_alive() and not self._is_due(moment, began, before, run):
            time.sleep(0.005)
        process.kill()
        process.join(timeout=300)
        code = process.exitcode
        if code not in (0, -signal.SIGKILL):
            raise AssertionError(f"exit code {code}:\n{log.read_text()[-3000:]}")
        return Ending(code != 0, time.monotonic() - began, self._parts(run))

    def _is_due(self, moment: Moment, began: float, before: int, run: Path) -> bool:
        late = time.monotonic() - began >= moment.seconds
        return late or (math.isfinite(moment.parts) and self._parts(run) - before >= moment.parts)

    def _parts(self, run: Path) -> int:
        return sum(PurePosixPath(entry.path).match(self._pattern) for entry in RunDir(run).files())

    def _fresh(self, name: str) -> Path:
        run = self.directory / name
        if self._before.exists():
            shutil.copytree(self._before, run)
        config = self._before.with_suffix(".toml").read_text().replace(str(self._before), str(run))
        run.with_suffix(".toml").write_text(config)
        return run

    def _write_config(self, run: Path, steps: int) -> None:
        text = tiny_toml(self.directory / "pair", run).replace("max_steps = 6", f"max_steps = {steps}")
        run.with_suffix(".toml").write_text(text + SETTINGS.format(pair=self.directory / "pair"))


def prepare(run: Path, arguments: list[str]) -> None:
    """Run a command in this process, to its end."""
    result = CliRunner().invoke(app, command_line(run, arguments), catch_exceptions=False)
    if result.exit_code:
        raise AssertionError(f"{arguments[0]}: exit code {result.exit_code}:\n{result.output[-3000:]}")


def command_line(run: Path, arguments: list[str]) -> list[str]:
    """The arguments with the run, or its config, that they are for."""
    command, *options = arguments
    return [command, str(run if command in OF_A_RUN else run.with_suffix(".toml")), *options]


def wait_for_work(process: BaseProcess, run: Path) -> float:
    """The moment at which the process holds the lock of the run (or has already ended)."""
    lock = run / ".lock"
    while process.is_alive() and not (lock.exists() and lock.read_text().strip() == str(process.pid)):
        time.sleep(0.005)
    return time.monotonic()


def require_same(reference: Path, run: Path) -> None:
    """Refuse a run that differs from the reference in a file or a trace row."""
    expected, found = committed(RunDir(reference)), committed(RunDir(run))
    differing = sorted(path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path))
    if differing:
        raise AssertionError(f"{run} differs from {reference} in {differing}")
    rows = trace_rows(RunDir(run))
    doubled = [row for row, count in rows.items() if count > 1]
    if doubled or rows != trace_rows(RunDir(reference)):
        raise AssertionError(f"{run} lost or doubled trace rows: {doubled[:3]}, {rows.total()} in all")


def committed(run: RunDir) -> dict[str, str]:
    """SHA-256 of the bytes on disk of every compared file, after checking them against the manifest."""
    entries = [entry for prefix in COMPARED for entry in run.files(prefix)]
    return {entry.path: file_sha256(run.verify(entry)) for entry in entries}


def trace_rows(run: RunDir) -> Counter[tuple[str, int, int]]:
    """How often each (folder, rollout, position) occurs."""
    rows: Counter[tuple[str, int, int]] = Counter()
    for entry in run.files("traces/"):
        table = pq.read_table(run.path / entry.path, columns=["rollout_id", "position"], partitioning=None)
        folder = str(Path(entry.path).parent)
        keys = zip(table["rollout_id"].to_pylist(), table["position"].to_pylist(), strict=True)
        rows.update((folder, rollout, position) for rollout, position in keys)
        if entry.rows != table.num_rows:
            raise AssertionError(f"{entry.path} has {table.num_rows} rows, its manifest says {entry.rows}")
    return rows


def describe(ending: Ending, whole: Ending) -> str:
    """One line about how a process ended."""
    how = "killed" if ending.killed else "finished"
    return f"{how} after {ending.worked:.2f} of {whole.worked:.2f} s of work, {ending.parts} parts committed"


def count_kills(endings: list[Ending]) -> int:
    """How many processes were killed."""
    return sum(ending.killed for ending in endings)


def count_midway(endings: list[Ending]) -> int:
    """How many were killed when parts were committed, and jobs left that a later process committed as further parts."""
    midway, last = 0, 0
    for ending in reversed(endings):
        last = last if ending.killed else ending.parts
        midway += ending.killed and 0 < ending.parts < last
    return midway


def main() -> None:
    """Run from the command line; any difference ends it with an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=sorted(BEFORE))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        endings = CrashTest(options.command, Path(directory), options.seed).run(options.kills)
    kills = count_kills(endings)
    print(f"{kills} kills, {count_midway(endings)} of them between two parts of the work")
    print(f"{len(endings) - kills} finished runs, all equal to the reference")


if __name__ == "__main__":
    main()
