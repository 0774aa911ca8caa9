"""Options of `rocktokens trace` in the place of a config file: your own checkpoints, a teacher, and a file of prompts.

1. Checkpoints come in the order of the last numbers in their names if each has one of its own, else as given: a shell
   lists step-1000 before step-200.
2. The run goes to runs/NAME, after the folder that the checkpoints are in.
3. Prompts that have answers are what accuracy is measured on, too. Without answers there are still traces, rocks and
   gradients.

The result is a list of overrides, as ``--set`` takes them, and notes on what was decided.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocktokens.config.tasks import JsonlTask, ends_with_reply
from rocktokens.errors import ConfigError
from rocktokens.parsing import parse_json

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What the command line says of a replay; what is None or empty is left to the config."""

    checkpoints: Sequence[str] = ()
    teacher: str | None = None
    data: str | None = None
    directory: str | None = None
    prompt_field: str | None = None
    answer_field: str | None = None

    def overrides(self) -> tuple[list[str], list[str]]:
        """Return ``section.key=value`` for each option, and a sentence for each choice that was made."""
        settings: dict[str, Any] = {"models.teacher": self.teacher, "run.directory": self.directory}
        notes: list[str] = []
        if self.checkpoints:
            settings["trace.checkpoints"], because = in_order(self.checkpoints)
            notes.append(f"order of the checkpoints, {because}: {', '.join(settings['trace.checkpoints'])}")
        if self.data is not None:
            task, note = self._task(self.data)
            settings |= task
            notes.append(note)
        elif self.prompt_field is not None or self.answer_field is not None:
            raise ConfigError("--prompt-field and --answer-field name fields of --data: give that too, or use --set")
        given = {key: value for key, value in settings.items() if value is not None}
        return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()], notes

    def complete(self) -> "TraceOptions":
        """Return options that need no config file, with the folder of the run; refused where one is missing."""
        needed = {"--student-checkpoints": self.checkpoints, "--teacher": self.teacher, "--data": self.data}
        if missing := [name for name, value in needed.items() if not value]:
            raise ConfigError(
                f"without a RUN.TOML {' and '.join(missing)} must be given: name students, teacher and prompts, or a "
                "config file"
            )
        directory = self.directory or f"runs/{_folder_name(self.checkpoints)}"
        return TraceOptions(self.checkpoints, self.teacher, self.data, directory, self.prompt_field, self.answer_field)

    def _task(self, data: str) -> tuple[dict[str, Any], str]:
        """Return the settings of the task and of the evaluation on the same prompts, and what that means."""
        answer_field, default = self.answer_field, JsonlTask.model_fields["answer_field"].default
        note = f"accuracy is measured on {data} too: for other prompts set evaluation.task.path"
        prompt_field = self.prompt_field or JsonlTask.model_fields["prompt_field"].default
        if answer_field is None and not _has_answer(Path(data), prompt_field, default):
            note = f"{data} has no field {default!r}, so accuracy cannot be measured: name it with --answer-field"
            answer_field = ""
        task = {"name": "jsonl", "path": data, "prompt_field": self.prompt_field, "answer_field": answer_field}
        sections = ("task",) if answer_field == "" else ("task", "evaluation.task")
        return {f"{section}.{key}": value for section in sections for key, value in task.items()}, note


def in_order(checkpoints: Sequence[str]) -> tuple[list[str], str]:
    """Return the checkpoints oldest first, and what says so: the last number in each name, or who named them."""
    numbers = [_NUMBER.findall(_last_part(name)) for name in checkpoints]
    steps = [int(found[-1]) for found in numbers if found]
    if len(set(steps)) < len(checkpoints):
        return list(checkpoints), "as given"
    by_number = sorted(zip(steps, checkpoints, strict=True))
    return [name for _, name in by_number], "by the numbers in their names"


def _folder_name(checkpoints: Sequence[str]) -> str:
    """Return the name of the folder that all checkpoints are in, else that of the last one."""
    parents = {Path(name).parent for name in checkpoints}
    common = parents.pop().name if len(parents) == 1 else ""
    return common or _last_part(checkpoints[-1])


def _last_part(name: str) -> str:
    return Path(name).name


def _has_answer(path: Path, prompt_field: str, answer_field: str) -> bool:
    """Return whether the first record has an answer, in its field or as the last message of a conversation.

    A file that cannot be read is left to who reads the task.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            record = parse_json(next(line for line in lines if line.strip()))
    except (OSError, ValueError, StopIteration):
        return True
    if not isinstance(record, dict):
        return True
    return record.get(answer_field) is not None or ends_with_reply(record.get(prompt_field))
