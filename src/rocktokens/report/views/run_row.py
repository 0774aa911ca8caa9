"""A run in a list of runs: what it is, how far it got and what came out, from its small files; traces stay closed.

1. ``run_version`` names what the views show of a run: the hash of its manifest, less the files that training adds at
   every step, which no view reads.
2. ``run_row`` reads manifest, config, the end of the log, rocks.json and evaluations.json. A file that cannot be read
   becomes a sentence in the row, so that one damaged run does not hide the others.
3. Whether a run still trains is told by its log, which a step of training extends; without a clock (``now`` is None) a
   run that has steps left is unfinished.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocktokens.display.numbers import count, percent
from rocktokens.display.table import Cell, Column, Table, number, text
from rocktokens.errors import RocktokensError
from rocktokens.evaluation.records import EvaluationRecord, Ledger
from rocktokens.parsing import parse_toml
from rocktokens.report.views.log_tail import last_line
from rocktokens.run_dir import RunDir
from rocktokens.studies.records import StudyResult
from rocktokens.types import RockSet

NOT_VIEWED = ("traces/training/", "rollouts/training/", "checkpoints/")
QUIET = 600
"""Seconds without a step after which a run is called stopped."""
STAGES = {
    "checkpoints": "checkpoints/",
    "traces": "traces/checkpoint=",
    "rocks": "rocks.json",
    "classes": "classes.json",
    "gradients": "gradients.json",
    "knock-out": "knockout.json",
    "evaluations": "evaluations.json",
    "study": "study.json",
    "report": "report.html",
}
"""How the paths begin that a stage leaves, in the order of the pipeline."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in a list."""

    name: str
    student: str
    teacher: str
    task: str
    step: int | None
    """Finished training steps; None without a log."""
    max_steps: int | None
    state: str
    stages: tuple[str, ...]
    started: str
    """Day and time, UTC; empty where the run did not note it."""
    n_rocks: int | None
    accuracy: tuple[float, ...]
    """Of the first and the last checkpoint that was evaluated; one number where they are the same."""
    problem: str = ""
    """What cannot be read, in one sentence."""


def run_version(run: RunDir) -> str:
    """Name what the views show of a run: another name, other content."""
    manifest = run.require().manifest()
    viewed = {path: entry for path, entry in manifest["files"].items() if not path.startswith(NOT_VIEWED)}
    content = json.dumps({**manifest, "files": viewed}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def run_row(path: Path, name: str, now: float | None = None) -> RunRow:
    """Describe the run in a folder."""
    run = RunDir(path)
    try:
        return _row(run, name, now)
    except (RocktokensError, OSError) as error:
        return RunRow(name, "", "", "", None, None, "damaged", (), "", None, (), str(error))


def log_state(run: RunDir, now: float | None) -> tuple[int, int, bool]:
    """Tell size and time of the log, and whether it grew lately: what a row takes from it changes only with these."""
    if not run.logs.exists():
        return (0, 0, False)
    status = run.logs.stat()
    return (status.st_size, status.st_mtime_ns, now is not None and now - status.st_mtime < QUIET)


def max_steps(manifest: Mapping[str, Any], config_text: str) -> int | None:
    """Read how many steps a run is to make; None where neither says.

    The manifest has epochs counted out; runs of earlier versions say it in their config alone.
    """
    if isinstance(steps := manifest.get("max_steps"), int):
        return steps
    try:
        return int(_configured(config_text, "training", "max_steps"))
    except ValueError:
        return None


def run_list_table(rows: Sequence[RunRow]) -> Table:
    """Make the table of a list of runs."""
    columns: list[Column[RunRow]] = [
        Column("run", lambda own: text(own.name)),
        Column("state", lambda own: text(own.state)),
        Column("steps", _steps),
        Column("rocks", lambda own: number(own.n_rocks)),
        Column("accuracy, first → last", _accuracy),
        Column("student", lambda own: text(own.student)),
        Column("teacher", lambda own: text(own.teacher)),
        Column("task", lambda own: text(own.task)),
        Column("started (UTC)", lambda own: text(own.started)),
        Column("stages", lambda own: text(own.problem or ", ".join(own.stages))),
    ]
    return Table.of("runs", columns, rows)


def _row(run: RunDir, name: str, now: float | None) -> RunRow:
    manifest, config = run.require().manifest(), _config_text(run)
    stages = tuple(stage for stage, start in STAGES.items() if any(own.startswith(start) for own in manifest["files"]))
    step, goal = _finished_steps(run), max_steps(manifest, config)
    study = StudyResult.load(run.verified("study.json")) if run.lists("study.json") else None
    evaluations = Ledger.load(run.verified("evaluations.json")).evaluations if run.lists("evaluations.json") else []
    return RunRow(
        name=name,
        student=str(manifest.get("student") or _configured(config, "models", "student")),
        teacher=str(manifest.get("teacher") or _configured(config, "models", "teacher")),
        task=_configured(config, "task", "name"),
        step=step,
        max_steps=goal,
        state=f"study of {len(study.arms)} arms" if study else _state(run, step, goal, now),
        stages=stages,
        started=str(manifest.get("started", ""))[:16].replace("T", " "),
        n_rocks=len(RockSet.load(run.verified("rocks.json")).tokens) if run.lists("rocks.json") else None,
        accuracy=_first_and_last(evaluations),
    )


def _config_text(run: RunDir) -> str:
    return run.verified("config.toml").read_text(encoding="utf-8") if run.lists("config.toml") else ""


def _configured(config_text: str, section: str, key: str) -> str:
    """Read one value of a config; empty where it is not there."""
    try:
        return str(parse_toml(config_text)[section][key])
    except (ValueError, KeyError, TypeError):
        return ""


def _finished_steps(run: RunDir) -> int | None:
    last: dict[str, Any] = last_line(run.logs) or {}
    return last["step"] + 1 if isinstance(last.get("step"), int) else None


def _state(run: RunDir, step: int | None, goal: int | None, now: float | None) -> str:
    if step is None:
        return "not trained here"
    if goal is not None and step >= goal:
        return "finished"
    if now is None:
        return "unfinished"
    *_, grew_lately = log_state(run, now)
    return "training" if grew_lately else "stopped"


def _first_and_last(evaluations: Sequence[EvaluationRecord]) -> tuple[float, ...]:
    """Find the accuracy of the first and of the last checkpoint, of those measured on the task of the last record."""
    of_task = [own for own in evaluations if own.task == evaluations[-1].task]
    named = ((re.match(r"(?:step|checkpoint) (\d+)", own.name), own.accuracy) for own in of_task)
    found = {int(step[1]): accuracy for step, accuracy in named if step}
    return tuple(found[step] for step in sorted({min(found), max(found)})) if found else ()


def _steps(own: RunRow) -> Cell:
    shown = count(own.step) if own.max_steps is None else f"{count(own.step or 0)} of {count(own.max_steps)}"
    return number(own.step, lambda _: shown)


def _accuracy(own: RunRow) -> Cell:
    *first, last = own.accuracy or (None,)
    return number(last, lambda _: " → ".join([*(percent(own).removesuffix(" %") for own in first), percent(last)]))
