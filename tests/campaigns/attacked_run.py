"""A run and a study with a file of every kind, small enough to be made in seconds, and the commands that make them."""

import shutil
from pathlib import Path

from command_line import Outcome, rocktokens
from tiny_pair import tiny_toml, write_pair

SETTINGS = """
[trace]
num_prompts = 12
rollouts_per_part = 8
top_k = 4
[find]
k = 20
stage = "score"
min_prompts = 1
[gradients]
batches = 2
[evaluation]
num_prompts = 8
task = {{ name = "jsonl", path = "{pair}/task.jsonl" }}
[knockout]
num_prompts = 8
num_samples = 2
"""
STUDY = """
[study]
directory = "{study}"
rocks = "{run}/rocks.json"
seeds = [0, 1]
evaluate_every = 1
processes = 1
target_accuracy = 0.5
[base.models]
student = "{pair}/student"
teacher = "{pair}/teacher"
device = "cpu"
[base.task]
name = "jsonl"
path = "{pair}/task.jsonl"
[base.rollouts]
max_completion_length = 10
[base.training]
max_steps = 2
per_device_train_batch_size = 4
learning_rate = 1e-2
warmup_steps = 0
max_truncated_share = 1.0
trace = false
[base.evaluation]
num_prompts = 6
num_samples = 2
task = {{ name = "jsonl", path = "{pair}/task.jsonl" }}
[[arm]]
name = "uniform"
policy = {{ name = "uniform" }}
[[arm]]
name = "rock freeze"
policy = {{ name = "rocks", rocks = "@rocks", lam = 0.0 }}
"""
OPTIONS = {
    "distill": ["--resume"],
    "trace": [],
    "find": [],
    "classes": ["--classes"],
    "gradients": [],
    "evaluate": ["--checkpoint", "all"],
    "knockout": ["--top", "4"],
    "class-bans": ["--classes"],
    "study": [],
}
"""What each command is given besides the run, in the order in which a run is made.

"classes" is a search with classes, "class-bans" bans within them.
"""
WORK = "work"
"""Name of the folder that a run is made in, and of every copy that is worked on: paths in configs stay true."""


def command_line(stage: str, folder: Path) -> list[str]:
    """The arguments that make one stage of the run, or the study, in a folder."""
    command = {"classes": "find", "class-bans": "knockout"}.get(stage, stage)
    target = {"distill": "run.toml", "trace": "run.toml", "study": "study.toml"}.get(command, "run")
    return [command, str(folder / target), *OPTIONS[stage]]


def write_configs(folder: Path, pair: Path) -> None:
    """Write the configs of a run and a study in a folder, on a pair that is there."""
    folder.mkdir(parents=True, exist_ok=True)
    run, study = folder / "run", folder / "study"
    text = tiny_toml(pair, run).replace("max_steps = 6", "max_steps = 4") + SETTINGS.format(pair=pair)
    (folder / "run.toml").write_text(text, encoding="utf-8")
    (folder / "study.toml").write_text(STUDY.format(study=study, run=run, pair=pair), encoding="utf-8")


def make(stage: str, folder: Path) -> Outcome:
    """Make one stage in this process."""
    outcome = rocktokens(*command_line(stage, folder))
    if outcome.code:
        raise AssertionError(f"{stage}: {outcome.stderr[-2000:]}")
    return outcome


def finished(folder: Path) -> Path:
    """The folder with the run and the study finished; made once, by whoever comes first."""
    made, work = folder / "finished", folder / WORK
    if not made.exists():
        shutil.rmtree(work, ignore_errors=True)
        if not (folder / "pair").exists():
            write_pair(folder / "pair")
        write_configs(work, folder / "pair")
        for stage in OPTIONS:
            make(stage, work)
        work.rename(made)
    return made
