"""Forecast a study (``rocktokens study --plan``): its runs, what is left of each, what that takes, what it can show.

1. What cannot work is refused as ``run_study`` would, as far as can be seen before the scout.
2. Time and disk are estimated as by ``rocktokens check``: the student answers a few prompts and the teacher scores
   them, on one thread like the runs themselves. It is an estimate for uniform weights; policies that score before they
   weigh take longer.
3. Which pairs are primary, how wide their intervals get with these seeds, and a warning where seeds are too few to
   decide anything.
"""

from dataclasses import dataclass

from rocktokens.config import Config
from rocktokens.preflight.findings import Preflight
from rocktokens.progress import SILENT, Progress
from rocktokens.run_dir import RunDir
from rocktokens.studies.config import StudyConfig
from rocktokens.studies.decisions import StudySize
from rocktokens.studies.plan import Job, plan_jobs, require_unchanged
from rocktokens.studies.pool import choose_places
from rocktokens.studies.preflight import require_ready, require_same_inputs, warnings
from rocktokens.studies.worker import evaluation


@dataclass(frozen=True, slots=True)
class RunForecast:
    """One run of the study, and what is left of it."""

    arm: str
    seed: int
    draw: int
    directory: str
    steps: int
    steps_left: int
    evaluations: int
    answers_left: int

    @classmethod
    def of(cls, job: Job) -> "RunForecast":
        """Read off what the job has left on the disk."""
        steps = job.config.training.max_steps
        made = len(job.run.logs.read_bytes().splitlines()) if job.run.logs.exists() else 0
        evaluated = sum(evaluation(job, step) is not None for step in job.evaluated)
        return cls(
            arm=job.arm,
            seed=job.seed,
            draw=job.draw,
            directory=job.config.run.directory,
            steps=steps,
            steps_left=max(steps - made, 0),
            evaluations=len(job.evaluated),
            answers_left=(len(job.evaluated) - evaluated) * job.evaluation_work,
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a study will take and what it can show."""

    directory: str
    runs: list[RunForecast]
    steps_left: int
    answers_left: int
    """Answers to evaluation prompts."""
    processes: int
    """Runs at a time."""
    seconds_left: float | None
    """None where time could not be estimated."""
    disk_bytes: int | None
    """At most, for the whole study; None where nothing is left."""
    interval_standard_errors: float | None
    """On either side of an interval; None for one seed, whose intervals are over prompts only."""
    interval_width: str
    scout_left: bool
    primary: list[tuple[str, str]]
    """The pairs that are corrected together; all others are exploratory."""
    primary_is_default: bool
    """Whether they are the first pairs of the study because nobody named them."""
    warnings: list[str]
    """What the study will not be able to show."""


def forecast(study: StudyConfig, progress: Progress = SILENT) -> Forecast:
    """Say which runs a study has, how many at a time, and the seconds and bytes they need."""
    jobs, run = plan_jobs(study), RunDir(study.study.directory)
    require_unchanged(study, jobs)
    runs = [RunForecast.of(job) for job in jobs]
    places = choose_places(study.study.processes, study.base.models.device, len(jobs))
    steps, answers = sum(run.steps_left for run in runs), sum(run.answers_left for run in runs)
    seconds, disk = 0.0, None
    if steps or answers:
        require_ready(study)
        require_same_inputs(study, run)
        findings = _check_uniform(jobs[0].config, progress)
        seconds = _seconds(jobs[0].config, findings, steps, answers)
        disk = _disk(study, findings, len(jobs), len(places))
    size = StudySize(len(study.study.seeds), len(study.primary), study.study.alpha)
    return Forecast(
        directory=study.study.directory,
        runs=runs,
        steps_left=steps,
        answers_left=answers,
        processes=len(places),
        seconds_left=None if seconds is None else seconds / len(places),
        disk_bytes=disk,
        interval_standard_errors=None if size.n_seeds == 1 else size.multiplier,
        interval_width="one seed: intervals are over prompts only" if size.n_seeds == 1 else size.width,
        scout_left=study.scout is not None and not run.files("rocks.json"),
        primary=study.primary,
        primary_is_default=study.study.primary is None,
        warnings=warnings(study),
    )


def _check_uniform(config: Config, progress: Progress) -> Preflight:
    """Measure a run with uniform weights as ``rocktokens check`` does, on one thread."""
    import torch

    from rocktokens.preflight.check import check

    torch.set_num_threads(1)
    return check(config.model_copy(update={"policy": Config.model_fields["policy"].default}), progress)


def _disk(study: StudyConfig, findings: Preflight, n_runs: int, n_places: int) -> int | None:
    """Count bytes: a run that is trained has its optimizer's states, a finished one has none."""
    measured = findings.measured("disk")
    if measured is None:
        return None
    need = measured["in_all"]
    checkpoints, optimizer, traces = need["checkpoints"], need["optimizer"], need["traces"]
    arms = n_runs * checkpoints + n_places * optimizer + n_runs * traces * study.base.training.trace
    return arms + (checkpoints + optimizer + traces) * (study.scout is not None)


def _seconds(config: Config, findings: Preflight, steps: int, answers: int) -> float | None:
    """Estimate the time of this many steps and answers, one after the other."""
    measured = findings.measured("time")
    if measured is None:
        return None
    answer = measured["sampling"] / config.training.rollouts_per_step
    return steps * (measured["sampling"] + measured["update"]) + answers * answer
