"""What can be found out before anything is trained: hours of training must not end in a sentence that was due at once.

1. The data: training and evaluation prompts can be read, and the latter are at least two, with answers.
2. The layout of a step, which is the same for all runs.
3. The policies: every file is there, of the student's vocabulary, and names what the policy needs. Those that use what
   the scout has yet to find are built again once it has.
"""

from collections.abc import Sequence
from pathlib import Path

from rocktokens.config import Config, evaluation_task
from rocktokens.config.policies import files_of
from rocktokens.errors import ConfigError
from rocktokens.policies import policy_from_section
from rocktokens.run_dir import RunDir
from rocktokens.studies.config import ROCKS, StudyConfig, arms_with
from rocktokens.studies.plan import Job, plan_jobs, scout_config, study_files


def require_ready(study: StudyConfig) -> None:
    """Refuse, in one sentence, a study that could not be finished as far as can be seen before its scout."""
    from rocktokens.training.session import global_batch

    config = plan_jobs(study)[0].config
    global_batch(config, 1)
    require_data(config)
    require_policies(_buildable_jobs(study), student_vocabulary(study))


def require_data(config: Config) -> None:
    """Refuse data that cannot be read, or cannot be graded."""
    from rocktokens.tasks import make_task

    make_task(config.task)
    prompts = make_task(evaluation_task(config)).prompts(config.evaluation.num_prompts)
    if len(prompts) < 2:
        raise ConfigError("base.evaluation.task has one prompt, which leaves no spread to judge by: give it more")
    if unanswered := [prompt.id for prompt in prompts if prompt.answer is None]:
        raise ConfigError(
            f"evaluation prompt {unanswered[0]!r} has no answer to grade against: set base.evaluation.task.answer_field"
        )


def require_policies(jobs: Sequence[Job], tokenizer_sha256: str) -> None:
    """Build the policy of every job, so that one that cannot be built stops the study before it begins."""
    for job in jobs:
        policy_from_section(job.config.policy, tokenizer_sha256, job.seed)


def student_vocabulary(study: StudyConfig) -> str:
    """SHA-256 of the student's vocabulary, as a run of the study noted it or off the model; "" if no arm needs it."""
    jobs = plan_jobs(study)
    if not any(files_of(job.config.policy) for job in jobs):
        return ""
    runs = [job.run for job in jobs] if study.scout is None else [RunDir(scout_config(study).run.directory)]
    if noted := next(filter(None, (run.manifest().get("tokenizer_sha256") for run in runs)), None):
        return noted
    from rocktokens.models.fingerprints import vocabulary_sha256
    from rocktokens.models.load import load_model

    loaded = load_model(study.base.models.student, study.base.models.dtype, "cpu")
    return vocabulary_sha256(loaded.tokenizer.get_vocab())


def _buildable_jobs(study: StudyConfig) -> list[Job]:
    """The jobs whose files are there; rocks that are given need not have been copied into the study yet."""
    files = study_files(study.study.directory)
    if study.study.rocks is not None and not Path(files[ROCKS]).exists():
        files[ROCKS] = study.study.rocks
    missing = [name for name, path in files.items() if path != study.study.rocks and not Path(path).exists()]
    waiting = {arm.name for name in missing for arm in arms_with(study, name)}
    return [job for job in plan_jobs(study, files) if job.arm not in waiting]
