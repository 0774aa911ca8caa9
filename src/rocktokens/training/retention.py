"""Which checkpoints of a run stay, once another is committed.

1. The one before the first update stays: movement is measured from it.
2. One that a signal asked for goes when the next is there, so that later stages do not depend on where a run happened
   to be stopped.
3. Of the others the latest ``training.save_total_limit`` stay.
4. Only the latest has the state of the optimizer, twice the size of the weights: a run resumes from no other. That of
   the first, which is empty, stays.

Files leave the manifest before they are deleted. What a killed process did not come to is done when the run goes on.
"""

import re
import shutil
from pathlib import Path

from rocktokens.run_dir import OPTIMIZER_FILE, RunDir

STOPPED = "stopped"
"""The manifest's entry with the steps of checkpoints that signals asked for, and the next one replaces."""
_FOLDER = re.compile(r"step-\d+|\.step-\d+\.tmp")


def note_stop(run: RunDir, step: int, *, is_due: bool) -> None:
    """Note, before a checkpoint is written, whether the next one replaces it: it does unless this one was due."""
    stopped = [own for own in run.manifest().get(STOPPED) or [] if own != step]
    if stopped or not is_due:
        run.update_manifest(**{STOPPED: stopped if is_due else [*stopped, step]})


def retain(run: RunDir, latest: int, limit: int | None) -> None:
    """Drop the checkpoints, and the states of optimizers, that do not stay beside the ``latest`` checkpoint."""
    stopped = run.manifest().get(STOPPED) or []
    _drop(run, [own for own in stopped if own != latest])
    if stopped and stopped != [latest]:
        run.update_manifest(**{STOPPED: [latest] if latest in stopped else None})
    _drop(run, beyond(run.checkpoints(), limit))
    states = [entry.path for entry in run.files("checkpoints/") if Path(entry.path).name == OPTIMIZER_FILE]
    run.drop([path for path in states if Path(path).parent.name not in ("step-0", f"step-{latest}")])
    _delete_unlisted(run)


def beyond(steps: list[int], limit: int | None) -> list[int]:
    """Return the oldest of some checkpoints, which are more than may stay; step 0 is not counted."""
    trained = [step for step in sorted(steps) if step > 0]
    return [] if limit is None else trained[:-limit]


def _drop(run: RunDir, steps: list[int]) -> None:
    run.drop([entry.path for step in steps for entry in run.files(f"checkpoints/step-{step}/")])


def _delete_unlisted(run: RunDir) -> None:
    """Delete the folders of checkpoints that the manifest lists nothing of."""
    listed = {Path(entry.path).parts[1] for entry in run.files("checkpoints/")}
    for folder in (run.path / "checkpoints").iterdir():
        if _FOLDER.fullmatch(folder.name) and folder.name not in listed:
            shutil.rmtree(folder, ignore_errors=True)
