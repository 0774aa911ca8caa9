"""What can be found out before anything is trained: hours of training must not end in a sentence that was due at once.

1. The data: training and evaluation prompts can be read, and the latter are at least two, with answers.
2. The layout of a step, which is the same for all runs.
3. The policies: every file is there, of the student's vocabulary, and names what the policy needs. Those that use what
   the scout has yet to find are built again once it has.
4. What lies outside the study (data, model directories, rocks and controls that arms name) is the same for all arms,
   also for those that are trained another day. The SHA-256 of every input goes into the study's manifest; a later call
   that has something left to train refuses another content under an old key. Files that the study itself has committed
   must still be what its manifest lists.
5. Seeds too few to decide anything are a warning: the study can be run, and its curves may still be worth seeing.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from rocktokens.config import Config, JsonlTask, evaluation_task
from rocktokens.config.policies import files_of
from rocktokens.errors import ConfigError
from rocktokens.policies import policy_from_section
from rocktokens.run_dir import RunDir, file_sha256
from rocktokens.studies.config import PLACEHOLDERS, ROCKS, StudyConfig, arms_with
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
    require_policies(_buildable_jobs(study), student_vocabulary(study))


def warnings(study: StudyConfig) -> list[str]:
    """Say in sentences what the study will not be able to show; it can be run nevertheless."""
    return [sentence for sentence in (few_seeds(len(study.study.seeds)),) if sentence is not None]


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
    """Return the student's vocabulary SHA-256, as a run of the study noted it or off the model; "" if not needed."""
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
    """Return the jobs whose files are there; rocks that are given need not have been copied into the study yet."""
    files = study_files(study.study.directory)
    if study.study.rocks is not None and not Path(files[ROCKS]).exists():
        files[ROCKS] = study.study.rocks
    missing = [name for name, path in files.items() if path != study.study.rocks and not Path(path).exists()]
    waiting = {arm.name for name in missing for arm in arms_with(study, name)}
    return [job for job in plan_jobs(study, files) if job.arm not in waiting]


def require_same_inputs(study: StudyConfig, run: RunDir) -> dict[str, str]:
    """Return the SHA-256 of every input by its key in study.toml; refuse one that is not what it was."""
    for path in study_files(run.path).values():
        for entry in run.files(Path(path).name):
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

    base = study.base
    for key, task in (("base.task", base.task), ("base.evaluation.task", base.evaluation.task)):
        if isinstance(task, JsonlTask):
            yield f"{key}.path", task.path
    for key, name in (("student", base.models.student), ("teacher", base.models.teacher)):
        if name not in EMBEDDED:
            yield f"base.models.{key}", name
    for arm in study.arm:
        for key, path in files_of(arm.policy).items():
            if path not in PLACEHOLDERS:
                yield f"arm {arm.name!r}: {key}", path


def _sha256(path: Path) -> str:
    """Hash a file's bytes, or the names and bytes of a model directory's files."""
    if not path.is_dir():
        return file_sha256(path)
    files = [file for file in sorted(path.iterdir()) if file.is_file() and not any(map(file.match, NO_PART_OF_A_MODEL))]
    lines = "".join(f"{file.name} {file_sha256(file)}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()
