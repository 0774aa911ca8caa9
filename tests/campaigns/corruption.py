"""Damage every kind of file of a run, and see that no command measures it: ``verify`` names it, readers refuse it.

1. A run and a study are made, with a file of every kind (``attacked_run``).
2. A case copies them (by hard links; the damaged file is a new one) and damages one file: a bit, a stretch of zeros or
   noise, a cut, a longer end, the content of another file of its kind, a folder in its place, or nothing there at all.
3. ``rocktokens verify`` must end with 2 and name the file. A command that reads the file must end with 2, one sentence
   and an unchanged folder, or, where it makes the file again, with what was there before. A traceback breaks it.
4. Two files are not listed and can only be judged by what they are. Of the manifest, damage that leaves every listed
   file as it was may pass. Damaged lines of the log are left out and counted.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attacked_run import WORK, finished
from command_line import Outcome, changed, rocktokens, snapshot
from frame import BrokenPromiseError, Campaign, Judge, chance
from mutations import DAMAGES

NAME = "corruption"
KINDS = {
    "manifest": "run/manifest.json",
    "config": "run/config.toml",
    "log": "run/logs.jsonl",
    "rocks": "run/rocks.json",
    "find": "run/find.json",
    "classes": "run/classes.json",
    "gradients": "run/gradients.json",
    "knockout": "run/knockout.json",
    "class-bans": "run/knockout-classes.json",
    "evaluations": "run/evaluations.json",
    "figures": "run/figures/*",
    "tokenizer": "run/tokenizer/*",
    "weights": "run/checkpoints/*/model.safetensors",
    "optimizer": "run/checkpoints/*/optimizer.safetensors",
    "checkpoint-json": "run/checkpoints/*/*.json",
    "rollouts": "run/rollouts/*/*.parquet",
    "traces": "run/traces/*/*.parquet",
    "bans": "run/knockout/*/*.parquet",
    "study": "study/study.*",
    "arms": "study/arms/*/*/**/*.*",
}
"""Files by kind, as globs below the folder."""
NEW_QUESTION = changed("evaluation.num_prompts=3")
"""What the run has not answered yet, so that the model must be read."""
READERS: dict[str, Callable[[Path, Path], list[str]]] = {
    **dict.fromkeys(
        ("rocks", "find", "classes", "gradients", "knockout"),
        lambda folder, _file: ["report", str(folder / "run"), "-o", str(folder / "page.html")],
    ),
    **dict.fromkeys(("config", "evaluations"), lambda folder, _file: ["evaluate", str(folder / "run")]),
    **dict.fromkeys(("tokenizer", "traces"), lambda folder, _file: ["find", str(folder / "run")]),
    "weights": lambda folder, file: ["evaluate", str(folder / "run"), "--checkpoint", str(file.parent), *NEW_QUESTION],
    "bans": lambda folder, _file: ["knockout", str(folder / "run"), "--top", "4"],
    "study": lambda folder, _file: ["report", str(folder / "study"), "-o", str(folder / "page.html")],
}
"""A command that must not take a damaged file of this kind for a whole one."""
CHANGES = (*DAMAGES, "gone", "swapped", "folder")
UNREAD = {"traces": "/training/", "tokenizer": "tokenizer_config.json", "study": "study.toml"}
"""Files of a kind that its reader has no use for, by what their path holds."""


@contextmanager
def opened(folder: Path) -> Iterator[Judge]:
    """Judge cases on copies of one finished run."""
    source = finished(folder)

    def judge(kind: str, number: int) -> str:
        copy = folder / WORK
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy, copy_function=os.link)
        return judge_damage(copy, source, kind, chance(NAME, kind, number))

    yield judge


def judge_damage(folder: Path, source: Path, kind: str, rng: random.Random) -> str:
    """Damage one file of a copy and see what is said about it."""
    files = sorted(own for own in folder.glob(KINDS[kind]) if own.is_file() and own.name != ".lock")
    file, change = rng.choice(files), rng.choice(CHANGES)
    if not damage(file, change, files, rng):
        return "unchanged"
    relative = file.relative_to(folder).as_posix()
    top = folder / relative.split("/")[0]
    if kind == "log":
        return _judge_log(top)
    verified = rocktokens("verify", top)
    _require_sentences(f"verify, {relative} {change}", verified)
    if kind == "manifest" or relative.endswith("/manifest.json"):
        return _judge_manifest(file, source / relative, verified, relative, change)
    if relative.endswith("/logs.jsonl"):
        return "log"
    said = "".join((verified.stdout + verified.stderr).split())  # a long path is wrapped
    if verified.code != 2 or file.name not in said:
        raise BrokenPromiseError(f"silent: {relative} {change}, and verify says {verified}")
    if kind in READERS and UNREAD.get(kind, "\0") not in relative:
        return _judge_reader(folder, READERS[kind](folder, file), relative, change)
    return "verified"


def damage(file: Path, change: str, files: list[Path], rng: random.Random) -> bool:
    """Change a file, never in place, since it has other names; whether its bytes are others than before."""
    before = file.read_bytes()
    others = [own for own in files if own.suffix == file.suffix and own.read_bytes() != before]
    if change == "swapped" and not others:
        change = "garbled"
    after = rng.choice(others).read_bytes() if change == "swapped" else None
    if change in DAMAGES or change == "garbled":
        after = DAMAGES[change](rng, before)
    file.unlink()
    if change == "folder":
        file.mkdir()
    if after is not None:
        file.write_bytes(after)
    return after != before


def _judge_log(run: Path) -> str:
    """Readers of the log leave out what is damaged."""
    outcome = rocktokens("report", run, "-o", run.parent / "page.html")
    _require_sentences("report of a damaged log", outcome)
    return "refused" if outcome.code else "left out"


def _judge_manifest(file: Path, source: Path, verified: Outcome, relative: str, change: str) -> str:
    if verified.code == 2:
        return "refused"
    if not file.is_file():
        raise BrokenPromiseError(f"silent: {relative} {change}, and verify says {verified.stdout}")
    before, after = (json.loads(own.read_text(encoding="utf-8")).get("files", {}) for own in (source, file))
    # Rows are those of parts; of other files the number says nothing.
    stripped = ({path: own["sha256"] for path, own in files.items()} for files in (before, after))
    if len({json.dumps(own, sort_keys=True) for own in stripped}) > 1:
        raise BrokenPromiseError(f"silent: {relative} {change} lists other files, and verify says {verified.stdout}")
    return "no file"


def _judge_reader(folder: Path, command: list[str], relative: str, change: str) -> str:
    before = snapshot(folder)
    outcome = rocktokens(*command)
    _require_sentences(f"{command[0]}, {relative} {change}", outcome)
    if outcome.code == 0 and f"{relative} is listed in manifest.json and gone" in outcome.stderr:
        return "made again"
    if outcome.code == 0:
        raise BrokenPromiseError(f"silent: {relative} {change}, and {command[0]} ends with 0: {outcome.stderr[-500:]}")
    if snapshot(folder) != before:
        raise BrokenPromiseError(f"{command[0]} refused {relative} {change}, and changed files")
    return "refused"


def _require_sentences(what: str, outcome: Outcome) -> None:
    """Refuse an ending other than 0 or 2, and anything but sentences with 2."""
    said = outcome.stdout + outcome.stderr
    if outcome.code not in (0, 2) or "Traceback" in said:
        raise BrokenPromiseError(f"{what}: code {outcome.code}, {said[-1200:]}")
    if outcome.code == 2 and outcome.stdout == "" and len(outcome.stderr.splitlines()) != 1:
        raise BrokenPromiseError(f"{what}: more than one sentence: {outcome.stderr[-800:]}")


FULL = dict.fromkeys(KINDS, 100)
SAMPLE = dict.fromkeys(("manifest", "config", "log", "rocks", "evaluations", "weights", "traces", "bans", "arms"), 1)
CAMPAIGN = Campaign(NAME, FULL, SAMPLE, limit=60.0, opened=opened)
