"""What a study reads that lies outside it, by content: data, model directories, rocks and controls that arms name.

All arms must see the same, also those that are trained another day.

1. Before anything is trained, the SHA-256 of every input goes into the study's manifest.
2. A later call that has something left to train compares: another content under an old key is refused.
3. Files that the study itself has committed must still be what its manifest lists.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from rocktokens.config import JsonlTask
from rocktokens.config.policies import files_of
from rocktokens.errors import ConfigError
from rocktokens.run_dir import RunDir, file_sha256
from rocktokens.studies.config import PLACEHOLDERS, StudyConfig
from rocktokens.studies.plan import study_files

INPUTS = "inputs"
"""Entry of the study's manifest."""
NO_PART_OF_A_MODEL = ("optimizer.safetensors", "*.md", ".*")
"""Files of a model directory that nothing depends on."""


def require_same_inputs(study: StudyConfig, run: RunDir) -> dict[str, str]:
    """The SHA-256 of every input by its key in study.toml; refused where one is not what it was."""
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
    """Key and path of every file and model directory."""
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
    """Of a file's bytes, or of the names and bytes of a model directory's files."""
    if not path.is_dir():
        return file_sha256(path)
    files = [file for file in sorted(path.iterdir()) if file.is_file() and not any(map(file.match, NO_PART_OF_A_MODEL))]
    lines = "".join(f"{file.name} {file_sha256(file)}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()
