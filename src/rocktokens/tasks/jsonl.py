"""A dataset of JSON lines as a task: one object per line, fields named in the config."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rocktokens.config import JsonlTask
from rocktokens.errors import RocktokensError
from rocktokens.parsing import parse_json
from rocktokens.tasks.base import DatasetTask
from rocktokens.tasks.records import dataset_task


def load_jsonl(section: JsonlTask) -> DatasetTask:
    """Load a file as a task, read once."""
    return dataset_task(section, read_lines(Path(section.path)))


def read_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the records of a file, each with the words that name it in an error."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"line {number}", _parse(path, number, line)
    except FileNotFoundError:
        raise RocktokensError(f"task.path {str(path)!r} does not exist: give a file of JSON lines") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RocktokensError(f"task.path {str(path)!r} cannot be read ({error}): give a file of JSON lines") from None


def _parse(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise RocktokensError(f"{path}, line {number} is not valid JSON ({error}): fix or remove it") from None
    if not isinstance(record, dict):
        raise RocktokensError(f"{path}, line {number} is not a JSON object: every line must be one")
    if "\\u" in line and not _can_be_written(record):
        raise RocktokensError(
            f"{path}, line {number} has an escape of half a character (a lone surrogate, \\ud800 to \\udfff), which no "
            "tokenizer reads: fix or remove it"
        )
    return record


def _can_be_written(record: Any) -> bool:
    """Whether all texts of a record are made of characters: JSON can escape halves of surrogate pairs too."""
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
