"""A dataset of JSON lines as a task: one object per line, fields named in the config."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rocktokens.config import HubTask, JsonlTask
from rocktokens.errors import RocktokensError
from rocktokens.tasks.base import DatasetTask
from rocktokens.types import Prompt


def load_jsonl(section: JsonlTask) -> DatasetTask:
    """Load a file as a task, read once."""
    return dataset_task(section, _read_lines(Path(section.path)))


def dataset_task(section: JsonlTask | HubTask, records: Iterable[tuple[str, Mapping[str, Any]]]) -> DatasetTask:
    """Make a task over records, each with the words that name it in an error, such as "line 3"."""
    if "{prompt}" not in section.template:
        raise RocktokensError(
            f"task.template is {section.template!r}, which has no {{prompt}}: every prompt would be the same text"
        )
    items: list[Prompt] = []
    for where, record in records:
        if section.limit is not None and len(items) == section.limit:
            break
        items.append(_prompt(section, len(items), f"{section.path}, {where}", record))
    if not items:
        raise RocktokensError(f"task.path {section.path!r} holds no records: give a dataset with at least one")
    # Ids name the noise and group the statistics: two prompts may not share one.
    [(most_common, count)] = Counter(prompt.id for prompt in items).most_common(1)
    if count > 1:
        raise RocktokensError(
            f"{section.path} has the id {most_common!r} twice: set task.id_field to another field or leave it out"
        )
    return DatasetTask(name=f"{section.name}:{Path(section.path).name}", items=items, grading=section.grading)


def _read_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"line {number}", _parse(path, number, line)
    except FileNotFoundError:
        raise RocktokensError(f"task.path {str(path)!r} does not exist: give a file of JSON lines") from None
    except (IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
        raise RocktokensError(f"task.path {str(path)!r} cannot be read ({error}): give a file of JSON lines") from None


def _parse(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise RocktokensError(f"{path}, line {number} is not valid JSON ({error}): fix or remove it") from None
    if not isinstance(record, dict):
        raise RocktokensError(f"{path}, line {number} is not a JSON object: every line must be one")
    return record


def _prompt(section: JsonlTask | HubTask, index: int, where: str, record: Mapping[str, Any]) -> Prompt:
    text = _field(section, "prompt_field", where, record)
    answer = _field(section, "answer_field", where, record) if section.answer_field else None
    identifier = _field(section, "id_field", where, record) if section.id_field else f"{section.name}-{index}"
    return Prompt(id=identifier, text=section.template.replace("{prompt}", text), answer=answer)


def _field(section: JsonlTask | HubTask, key: str, where: str, record: Mapping[str, Any]) -> str:
    name = getattr(section, key)
    if record.get(name) is None:
        raise RocktokensError(
            f"{where} has no {name!r} (it has {', '.join(map(repr, record)) or 'no fields'}): set task.{key}"
        )
    return str(record[name])
