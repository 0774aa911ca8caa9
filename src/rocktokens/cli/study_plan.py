"""``rocktokens study --plan``: the runs of a study, what is left of each, and how long that will take.

The estimate is that of ``rocktokens check``: the student answers a few prompts and the teacher scores them, on one
thread like the runs themselves. It is one of uniform weights; policies that score before they weigh take longer.
"""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from rocktokens.cli.check import run_check
from rocktokens.cli.common import notes, output
from rocktokens.config import Config
from rocktokens.run_dir import RunDir
from rocktokens.studies.config import StudyConfig
from rocktokens.studies.plan import Job, plan_jobs, require_unchanged, rollouts_per_step

Record = dict[str, Any]


def describe_plan(study: StudyConfig) -> Record:
    """The runs, how many at a time, and the seconds left: None where the probe could not be made."""
    with notes.status("loading"):
        from rocktokens.studies.pool import choose_places

    jobs = plan_jobs(study)
    require_unchanged(study, jobs)
    runs = [_describe(job) for job in jobs]
    places = choose_places(study.study.processes, study.base.models.device, len(jobs))
    steps, answers = (sum(run[name] for run in runs) for name in ("steps_left", "answers_left"))
    seconds = _seconds(jobs[0].config, steps, answers) if steps or answers else 0.0
    return {
        "directory": study.study.directory,
        "runs": runs,
        "steps_left": steps,
        "answers_left": answers,
        "processes": len(places),
        "seconds_left": None if seconds is None else seconds / len(places),
        "scout_left": study.scout is not None and not RunDir(study.study.directory).files("rocks.json"),
    }


def print_plan(record: Record) -> None:
    """A row a run, and the sum."""
    output.print(_plan_table(record["runs"]))
    if not record["steps_left"] and not record["answers_left"]:
        return output.print("nothing is left to train or to evaluate")
    seconds = record["seconds_left"]
    time = "how long that takes, rocktokens check may tell" if seconds is None else f"about {_duration(seconds)}"
    scout = ", after the scout" if record["scout_left"] else ""
    output.print(
        f"left: {record['steps_left']:,} steps and {record['answers_left']:,} evaluation answers{scout}; {time}, "
        f"{record['processes']} runs at a time"
    )


def _describe(job: Job) -> Record:
    from rocktokens.studies.worker import evaluation

    steps = job.config.training.max_steps
    made = len(job.run.logs.read_text(encoding="utf-8").splitlines()) if job.run.logs.exists() else 0
    evaluated = sum(evaluation(job, step) is not None for step in job.evaluated)
    return {
        "arm": job.arm,
        "seed": job.seed,
        "draw": job.draw,
        "directory": job.config.run.directory,
        "steps": steps,
        "steps_left": max(steps - made, 0),
        "evaluations": len(job.evaluated),
        "answers_left": (len(job.evaluated) - evaluated) * job.evaluation_work,
    }


def _seconds(config: Config, steps: int, answers: int) -> float | None:
    """So many steps and answers, one after the other."""
    import torch

    torch.set_num_threads(1)
    uniform = config.model_copy(update={"policy": Config.model_fields["policy"].default})
    found = [finding for finding in run_check(uniform)["findings"] if finding["name"] == "time"]
    if not found:
        return None
    measured = found[0]["measured"]
    answer = measured["sampling"] / rollouts_per_step(config)
    return steps * (measured["sampling"] + measured["update"]) + answers * answer


def _plan_table(runs: Sequence[Record]) -> Table:
    table = Table(title="runs of the study", title_justify="left")
    for name in ("arm", "seed", "draw", "steps", "left", "evaluations"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for run in runs:
        numbers = (run["seed"], run["draw"], run["steps"], run["steps_left"], run["evaluations"])
        table.add_row(Text(run["arm"]), *map(str, numbers))
    return table


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
