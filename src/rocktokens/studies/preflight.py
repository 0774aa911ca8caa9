"""What can be found out before anything is trained: hours of training must not end in a sentence that was due at once.

1. The data: training and evaluation prompts can be read, and at least two of the latter can be graded.
2. The layout of a step, which is the same for all runs.
3. The policies: every file is there, of the student's vocabulary, and names what the policy needs. Those that use what
   the scout has yet to find are built again once it has.
4. What lies outside the study (data, grader, model directories, rocks and controls that arms name) is the same for all
   arms, also for those that are trained another day. The SHA-256 of every input goes into the study's manifest; a later
   call that has something left to train refuses another content under an old key. Files that the study itself has
   committed must still be what its manifest lists.
5. Seeds too few to decide anything are a warning: the study can be run, and its curves may still be worth seeing.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rocktokens.config import Config, JsonlTask, evaluation_task
from rocktokens.config.policies import files_of, sections_in
from rocktokens.errors import ConfigError
from rocktokens.policies import policy_from_section
from rocktokens.run_dir import RunDir, file_sha256
from rocktokens.studies.config import CLASSES, ROCKS, StudyConfig
from rocktokens.studies.decisions import few_seeds
from rocktokens.studies.plan import Job, plan_jobs, scout_config, study_files

INPUTS = "inputs"
"""Entry of the study's manifest."""
NO_PART_OF_A_MODEL = ("optimizer.safetensors", "*.md", ".*")
"""Files of a model directory that nothing depends on."""


def require_ready(study: StudyConfig) -> None:
    """Refuse, in one sentence, a study that could not be finished as far as can be seen before its scout."""
    from rocktokens.training.session import global_batch

    config = plan_jobs(study)[0].config
    global_batch(config, 1)
    require_data(config)
    require_policies(_buildable_jobs(study), student_vocabulary(study), student_tokenizer(study))


def warnings(study: StudyConfig) -> list[str]:
    """Say in sentences what the study will not be able to show; it can be run nevertheless."""
    return [sentence for sentence in (few_seeds(len(study.study.seeds)),) if sentence is not None]


def require_data(config: Config) -> None:
    """Refuse data that cannot be read, or cannot be graded."""
    from rocktokens.tasks import make_task
    from rocktokens.tasks.base import prompts_to_grade

    make_task(config.task)
    prompts = prompts_to_grade(make_task(evaluation_task(config)), config.evaluation.num_prompts)
    if len(prompts) < 2:
        raise ConfigError(
            "base.evaluation.task has one prompt that can be graded, which leaves no spread to judge by: give it more"
        )


def require_policies(jobs: Sequence[Job], tokenizer_sha256: str, tokenizer: Any = None) -> None:
    """Build the policy of every job, so that one that cannot be built stops the study before it begins."""
    for job in jobs:
        policy_from_section(job.config.policy, tokenizer_sha256, job.seed, tokenizer)


def student_vocabulary(study: StudyConfig) -> str:
    """Return the student's vocabulary SHA-256, as a run of the study noted it or off the model; "" if not needed."""
    jobs = plan_jobs(study)
    if not any(files_of(job.config.policy) for job in jobs):
        return ""
    runs = [job.run for job in jobs] if study.scout is None else [RunDir(scout_config(study).run.directory)]
    if noted := next(filter(None, (run.manifest().get("tokenizer_sha256") for run in runs)), None):
        return noted
    from rocktokens.models.fingerprints import vocabulary_sha256

    return vocabulary_sha256(_load_tokenizer(study).get_vocab())


def student_tokenizer(study: StudyConfig) -> Any:
    """Return the student's tokenizer where an arm gives classes as texts, else None."""
    listed = (getattr(section, "classes", None) for arm in study.arm for section in sections_in(arm.policy))
    has_texts = any(isinstance(each, str) for own in listed if isinstance(own, list) for group in own for each in group)
    return _load_tokenizer(study) if has_texts else None


def _load_tokenizer(study: StudyConfig) -> Any:
    from rocktokens.models.load import load_model

    return load_model(study.base.models.student, study.base.models.dtype, "cpu").tokenizer


def _buildable_jobs(study: StudyConfig) -> list[Job]:
    """Return the jobs whose files are there; what the study names need not have been copied into it yet."""
    named = {ROCKS: study.study.rocks, CLASSES: study.study.classes}
    copies = study_files(study.study.directory, study.study.seeds[0])
    jobs = plan_jobs(study, {own: path for own, path in named.items() if path and not Path(copies[own]).exists()})
    return [job for job in jobs if all(Path(path).exists() for path in _own_files(study, job))]


def _own_files(study: StudyConfig, job: Job) -> set[str]:
    """Return the files of the study that the policy of a job reads."""
    return {*files_of(job.config.policy).values()} & {*study_files(study.study.directory, job.seed).values()}


def require_same_inputs(study: StudyConfig, run: RunDir) -> dict[str, str]:
    """Return the SHA-256 of every input by its key in study.toml; refuse one that is not what it was."""
    own = {Path(path).name for seed in study.study.seeds for path in study_files(run.path, seed).values()}
    for entry in run.files():
        if entry.path in own:
            run.verify(entry)
    known, found = run.manifest().get(INPUTS, {}), {}
    for key, path in _named(study):
        if not Path(path).exists():  # refused where it is loaded
            continue
        found[key] = _sha256(Path(path))
        if known.get(key, found[key]) != found[key]:
            raise ConfigError(
                f"{key} = {path!r} has another content than when the study was started: put it back as it was, or give "
                "another study.directory"
            )
    return known | found


def record_inputs(study: StudyConfig, run: RunDir) -> None:
    """Note the inputs in the study's manifest, after ``require_same_inputs``."""
    run.update_manifest(**{INPUTS: require_same_inputs(study, run)})


def _named(study: StudyConfig) -> Iterator[tuple[str, str]]:
    """Return key and path of every file and model directory."""
    from rocktokens.models.load import EMBEDDED
    from rocktokens.tasks.graders import grader_files

    base = study.base
    for key, task in (("base.task", base.task), ("base.evaluation.task", base.evaluation.task)):
        if isinstance(task, JsonlTask):
            yield f"{key}.path", task.path
    if base.evaluation.task is not None:
        for path in grader_files(base.evaluation.task):
            yield f"base.evaluation.task.grader ({path.name})", str(path)
    for key, name in (("student", base.models.student), ("teacher", base.models.teacher)):
        if name not in EMBEDDED:
            yield f"base.models.{key}", name
    for arm in study.arm:
        for key, path in files_of(arm.policy).items():
            if not path.startswith("@"):
                yield f"arm {arm.name!r}: {key}", path


def _sha256(path: Path) -> str:
    """Hash a file's bytes, or the names and bytes of a model directory's files."""
    if not path.is_dir():
        return file_sha256(path)
    files = [file for file in sorted(path.iterdir()) if file.is_file() and not any(map(file.match, NO_PART_OF_A_MODEL))]
    lines = "".join(f"{file.name} {file_sha256(file)}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()
