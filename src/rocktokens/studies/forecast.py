"""``rocktokens study --plan``: the runs of a study, what is left of each, what that will take, and what it can tell.

1. What cannot work is refused as it would be without ``--plan``, as far as can be seen before the scout.
2. Time and disk are estimated as by ``rocktokens check``: the student answers a few prompts and the teacher scores
   them, on one thread like the runs themselves. It is an estimate of uniform weights; policies that score before they
   weigh take longer.
3. How wide intervals get with so few seeds and so many pairs.
"""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from rocktokens.cli.check import run_check
from rocktokens.cli.common import notes, output
from rocktokens.config import Config
from rocktokens.preflight.findings import byte_size
from rocktokens.run_dir import RunDir
from rocktokens.studies.config import StudyConfig
from rocktokens.studies.plan import Job, plan_jobs, require_unchanged, rollouts_per_step

Record = dict[str, Any]


def describe_plan(study: StudyConfig) -> Record:
    """The runs, how many at a time, and the seconds and bytes they need: None where that could not be estimated."""
    with notes.status("loading"):
        from rocktokens.studies.decisions import Sample
        from rocktokens.studies.inputs import require_same_inputs
        from rocktokens.studies.pool import choose_places
        from rocktokens.studies.preflight import require_ready

    jobs = plan_jobs(study)
    require_unchanged(study, jobs)
    runs = [_describe(job) for job in jobs]
    places = choose_places(study.study.processes, study.base.models.device, len(jobs))
    steps, answers = (sum(run[name] for run in runs) for name in ("steps_left", "answers_left"))
    seconds, disk = 0.0, None
    if steps or answers:
        require_ready(study)
        require_same_inputs(study, RunDir(study.study.directory))
        findings = _findings(jobs[0].config)
        seconds = _seconds(jobs[0].config, findings, steps, answers)
        disk = _disk(study, findings, len(jobs), len(places))
    sample = Sample(len(study.study.seeds), len(study.pairs), study.study.alpha)
    return {
        "directory": study.study.directory,
        "runs": runs,
        "steps_left": steps,
        "answers_left": answers,
        "processes": len(places),
        "seconds_left": None if seconds is None else seconds / len(places),
        "disk_bytes": disk,
        "interval_standard_errors": None if sample.n_seeds == 1 else sample.multiplier,
        "interval_width": "one seed: intervals are over prompts only" if sample.n_seeds == 1 else sample.width,
        "scout_left": study.scout is not None and not RunDir(study.study.directory).files("rocks.json"),
    }


def print_plan(record: Record) -> None:
    """A row a run, and the sum."""
    output.print(_plan_table(record["runs"]))
    output.print(record["interval_width"], highlight=False, soft_wrap=True)
    if not record["steps_left"] and not record["answers_left"]:
        return output.print("nothing is left to train or to evaluate")
    seconds = record["seconds_left"]
    time = "how long that takes, rocktokens check may tell" if seconds is None else f"about {_duration(seconds)}"
    scout = ", after the scout" if record["scout_left"] else ""
    output.print(
        f"left: {record['steps_left']:,} steps and {record['answers_left']:,} evaluation answers{scout}; {time}, "
        f"{record['processes']} runs at a time"
    )
    if record["disk_bytes"] is not None:
        output.print(f"on the disk the whole study takes at most {byte_size(record['disk_bytes'])}")


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


def _findings(config: Config) -> dict[str, Record]:
    """What ``rocktokens check`` measures of a run with uniform weights, on one thread."""
    import torch

    torch.set_num_threads(1)
    uniform = config.model_copy(update={"policy": Config.model_fields["policy"].default})
    return {finding["name"]: finding["measured"] for finding in run_check(uniform)["findings"]}


def _disk(study: StudyConfig, findings: dict[str, Record], n_runs: int, n_places: int) -> int:
    """Bytes: a run that is finished keeps a third of its checkpoints' bytes, without the optimizer's two moments."""
    checkpoints, traces = findings["disk"]["checkpoints"], findings["disk"]["traces"]
    arms = n_runs * checkpoints // 3 + n_places * checkpoints * 2 // 3 + n_runs * traces * study.base.training.trace
    return arms + (checkpoints + traces) * (study.scout is not None)


def _seconds(config: Config, findings: dict[str, Record], steps: int, answers: int) -> float | None:
    """So many steps and answers, one after the other."""
    if "time" not in findings:
        return None
    measured = findings["time"]
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
