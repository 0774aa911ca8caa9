"""A study from its config to its result: arms × seeds over one base config, trained, evaluated and compared.

1. The plan: one ordinary run for every arm, seed and draw, under STUDY/arms (``plan``).
2. What can be refused is refused before anything is trained (``preflight``).
3. The rocks the arms use (``scout``), then the runs, several at a time, each resumed where it was (``pool``,
   ``worker``); what is on the disk already is not done again.
4. Their curves are compared in pairs (``comparison``), and the result goes into study.json.

docs/method.md, section 7.
"""

from collections.abc import Sequence
from pathlib import Path

from rocktokens.progress import SILENT, Progress
from rocktokens.provenance import Meter
from rocktokens.run_dir import RunDir
from rocktokens.studies.comparison import compare
from rocktokens.studies.config import StudyConfig, dump_study, load_study
from rocktokens.studies.plan import Job, plan_jobs, require_unchanged
from rocktokens.studies.pool import choose_places, run_jobs
from rocktokens.studies.preflight import (
    record_inputs,
    require_policies,
    require_ready,
    student_tokenizer,
    student_vocabulary,
    warnings,
)
from rocktokens.studies.read_runs import read_curves, require_paired
from rocktokens.studies.records import StudyResult
from rocktokens.studies.scout import Draw, prepare_files
from rocktokens.studies.worker import is_complete

RESULT = "study.json"


def run_study(study: StudyConfig | str | Path, progress: Progress = SILENT, draw: Draw | None = None) -> StudyResult:
    """Train and evaluate what is left of a study, compare its arms, and commit study.toml and study.json.

    Interrupted, the same call continues where it was; a study that is finished is only read and compared.

    Args:
        study: the study, or the path of its TOML file (or the name of a recipe).
        progress: shows what is going on.
        draw: told, under the lock, of the scout's find.json before any arm is trained, and of study.json.

    Example: ``run_study("study.toml").comparisons``.
    """
    config = study if isinstance(study, StudyConfig) else load_study(study)
    run, jobs = RunDir(config.study.directory), plan_jobs(config)
    run.require_new()
    require_unchanged(config, jobs)
    left = [job for job in jobs if not is_complete(job)]
    if left:
        with progress.status("looking at data, models and policies"):
            require_ready(config)
        for sentence in warnings(config):
            progress.note(f"warning: {sentence}")
    with run.lock():
        if left:
            record_inputs(config, run)
        prepare_files(config, run, progress, draw)
        if left:
            require_policies(jobs, student_vocabulary(config), student_tokenizer(config))
        run.commit_text("study.toml", dump_study(config))
        meter = Meter(by_others=True)
        _finish_jobs(config, left, len(jobs), progress)
        if left:
            meter.keep(run, "arms")
        result = _conclude(config, run, jobs)
        if draw is not None:
            with progress.status("drawing"):
                draw(run, RESULT)
    return result


def _finish_jobs(config: StudyConfig, left: Sequence[Job], total: int, progress: Progress) -> None:
    """Train and evaluate what is left, in parallel, under one bar over all of it."""
    is_served = config.base.rollouts.engine == "vllm"  # a server has the weights of one run
    processes = 1 if is_served else config.study.processes
    places = choose_places(processes, config.base.models.device, len(left))
    done = total - len(left)

    def count(job: Job) -> None:
        nonlocal done
        done += 1
        progress.note(f"{job.label}: done, {done} of {total} runs")

    with progress.bar(f"training and evaluating {len(left)} of {total} runs", sum(job.work for job in left)) as advance:
        run_jobs(left, places, advance, count)


def _conclude(config: StudyConfig, run: RunDir, jobs: Sequence[Job]) -> StudyResult:
    """Compare the finished jobs and commit study.json."""
    require_paired(jobs)
    teacher = config.base.teacher
    result = compare(
        read_curves(jobs),
        config.pairs,
        primary=config.study.primary,
        alpha=config.study.alpha,
        margin=config.study.margin,
        target_accuracy=config.study.target_accuracy,
        baseline=config.study.baseline,
        denominator=config.arm[0].policy.denominator,
        teacher=teacher.label if teacher.is_top_k else "",
    )
    run.commit(RESULT, result.save)
    return result
