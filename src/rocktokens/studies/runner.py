"""A study from its jobs to its result.

1. The jobs that are not finished are (``pool``, ``worker``); what is on the disk already is not done again.
2. Their curves are compared in pairs (``comparison``), and the result goes into study.json.
"""

from collections.abc import Callable, Sequence

from rocktokens.run_dir import RunDir
from rocktokens.studies.comparison import compare
from rocktokens.studies.config import StudyConfig
from rocktokens.studies.plan import Job
from rocktokens.studies.pool import choose_places, run_jobs
from rocktokens.studies.read_runs import read_curves, require_paired
from rocktokens.studies.records import StudyResult
from rocktokens.studies.worker import is_complete

RESULT = "study.json"


def unfinished(jobs: Sequence[Job]) -> list[Job]:
    """The jobs that still have something to train or to evaluate."""
    return [job for job in jobs if not is_complete(job)]


def finish_jobs(
    study: StudyConfig, jobs: Sequence[Job], on_work: Callable[[int], None], on_done: Callable[[Job], None]
) -> None:
    """Train and evaluate what is left, in parallel; see ``run_jobs`` for the callbacks."""
    places = choose_places(study.study.processes, study.base.models.device, len(jobs))
    run_jobs(jobs, places, on_work, on_done)


def conclude(study: StudyConfig, run: RunDir, jobs: Sequence[Job]) -> StudyResult:
    """Compare the finished jobs and commit study.json."""
    section = study.study
    require_paired(jobs)
    result = compare(
        read_curves(jobs),
        study.pairs,
        alpha=section.alpha,
        margin=section.margin,
        target_accuracy=section.target_accuracy,
        baseline=section.baseline,
        denominator=study.arm[0].policy.denominator,
    )
    run.commit(RESULT, result.save)
    return result
