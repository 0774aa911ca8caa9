"""How long a run is: steps or epochs, and what happens where a run that is there gets another length.

1. Epochs are counted out in steps once the prompts are known. The manifest keeps the number (``max_steps``), the config
   what was asked for.
2. A run may be made longer or shorter at any checkpoint, but not shorter than it is. What was trained stays as it is;
   from there on the learning rate follows the schedule of the new length.
3. Under a schedule that gives the steps before the same rates at either length (a constant one, or a warm-up that lasts
   longer), the result is that of a run that had the new length from the start.
"""

import math
from fractions import Fraction
from pathlib import Path

from rocktokens.config import Config, dump_config, load_config
from rocktokens.errors import ConfigError, RunDirError
from rocktokens.run_dir import OPTIMIZER_FILE, RunDir
from rocktokens.tasks.base import Task
from rocktokens.training.optim import learning_rates

MAX_STEPS = "max_steps"
"""The manifest's entry with the steps of the whole run."""
LENGTHS = "lengths"
"""The manifest's entry with every change of the length, by the step at which it was made."""
LENGTH_KEYS = ("max_steps", "num_train_epochs")


def in_steps(config: Config, task: Task, prompts_per_step: int) -> Config:
    """Return the config with ``max_steps`` as what ``num_train_epochs`` comes to, rounded up, if that is given.

    The walk through the prompts does not stop at the end of an epoch, so only the last step is rounded. The number is
    taken as it was written: 1.1 epochs of 10 prompts are 11, not the 12 that the next float would make.
    """
    epochs = config.training.num_train_epochs
    if epochs is None:
        return config
    if task.size is None:
        raise ConfigError(
            f"training.num_train_epochs = {epochs}, but task.name = {task.name!r} makes prompts without end: set "
            "training.max_steps instead"
        )
    steps = math.ceil(Fraction(repr(epochs)) * task.size / prompts_per_step)
    return config.model_copy(update={"training": config.training.model_copy(update={"max_steps": steps})})


def recorded_steps(run: RunDir) -> int | None:
    """Return how long the run was to be until now, None if it has not begun.

    Runs of earlier versions say it in their config alone.
    """
    steps = run.manifest().get(MAX_STEPS)
    if steps is None and run.lists(run.config.name):
        return load_config(run.verified(run.config.name)).training.max_steps
    return steps


def require_not_passed(run: RunDir, config: Config, done: int) -> None:
    """Refuse fewer steps than are made, and more where the optimizer's state to go on with is gone."""
    steps, epochs = config.training.max_steps, config.training.num_train_epochs
    if steps < done:
        asked = f"max_steps = {steps}" if epochs is None else f"num_train_epochs = {epochs} ({steps} steps)"
        raise ConfigError(
            f"training.{asked}, but the run has made {done} steps: ask for at least as many, or give another "
            "run.directory"
        )
    if steps > done and not run.lists(f"checkpoints/step-{done}/{OPTIMIZER_FILE}"):
        raise RunDirError(
            f"{run.checkpoint(done)} has no {OPTIMIZER_FILE}, which finished runs of a study drop and only the latest "
            "checkpoint of others has, so it cannot be trained further: start again with another run.directory"
        )


def change_length(run: RunDir, config: Config, step: int) -> None:
    """Note another length in the run's config and manifest, from the checkpoint of ``step`` on.

    Stored rollouts of the steps after it go: their students followed the former schedule. The manifest comes last, so
    that a process killed before that is not the last to do all this.
    """
    former, training = recorded_steps(run), config.training
    stored = [entry.path for entry in run.files("rollouts/training/step-")]
    run.drop([path for path in stored if int(Path(path).stem.removeprefix("step-")) >= step])
    recorded = load_config(run.verified(run.config.name))
    lengths = {key: getattr(training, key) for key in LENGTH_KEYS}
    changed = recorded.model_copy(update={"training": recorded.training.model_copy(update=lengths)})
    run.commit_text(run.config.name, dump_config(changed))
    noted = {**run.manifest().get(LENGTHS, {}), str(step): {"from": former, "to": training.max_steps}}
    run.update_manifest(**{MAX_STEPS: training.max_steps, LENGTHS: noted})


def describe_change(config: Config, former: int, step: int) -> str:
    """Say in one sentence what a run becomes whose length changes from ``former`` steps after ``step`` of them."""
    now = config.training
    before = now.model_copy(update={"max_steps": former})
    what = f"goes on at step {step}, to {now.max_steps} steps instead of {former}"
    if learning_rates(before, step) == learning_rates(now, step):
        return f"{what}: the result is that of a run of {now.max_steps} steps from the start"
    rate = learning_rates(now, step + 1)[step]
    return (
        f"{what}: the learning rate follows the {now.lr_scheduler_type} schedule of {now.max_steps} steps from here on "
        f"({rate:.2g} now), so the result is not that of a run of {now.max_steps} steps from the start"
    )
