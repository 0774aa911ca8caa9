"""The accuracies a run has measured, as records: no torch, no behaviour beyond reading and writing evaluations.json.

1. An accuracy is filed under a name and its settings: the content of model and data, how answers are sampled, and the
   seed of prompts and noise. Where they lie and what they are called does not matter.
2. The ledger keeps every accuracy in the order of measurement. It is only ever added to.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rocktokens.display.numbers import percent, with_interval
from rocktokens.display.table import Column, Table, ends, flat, number, text
from rocktokens.display.text import printable
from rocktokens.errors import RunDirError
from rocktokens.parsing import parse_json
from rocktokens.run_dir import as_listed
from rocktokens.types import Interval, Record, as_record

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Accuracy(Record):
    """How a model did on a list of prompts."""

    task: str
    accuracy: float
    n_prompts: int
    num_samples: int
    """Answers per prompt."""
    n_samples: int
    """Answers in all."""
    wilson_interval: Interval
    bootstrap_interval: Interval | None
    """Over prompts; None with one answer per prompt, where the Wilson interval is the right one."""
    mean_response_length: float
    truncated_share: float
    temperature: float
    seed: int
    prompt_ids: list[str]
    correct: list[int]
    """Right answers per prompt, in the order of ``prompt_ids``."""
    answers: list[list[str | None]]
    """The final answers per prompt, as the task reads them; None where there was none, or a grader of your own."""

    @property
    def interval(self) -> Interval:
        """The 95 % interval that fits the number of answers per prompt."""
        return self.bootstrap_interval or self.wilson_interval


@dataclass(frozen=True, slots=True, repr=False)
class EvaluationRecord(Accuracy):
    """One entry of evaluations.json: which model, under which settings, and its accuracy.

    Example: ``EvaluationRecord('step 64': 81.0 % [78.1, 83.7] on wordmath, 1000 prompts)``.
    """

    name: str
    """What the model was called when it was measured: "teacher", "step 64", or what was given."""
    settings: dict[str, Any]
    """Everything the accuracy depends on."""

    def to_record(self) -> dict[str, Any]:
        """Return plain lists, numbers and strings, for JSON."""
        record = asdict(self)
        return {"name": record.pop("name"), "settings": record.pop("settings"), **record}

    def __repr__(self) -> str:
        return f"EvaluationRecord({self.name!r}: {_summary(self)} on {self.task}, {self.n_prompts} prompts)"

    def _repr_html_(self) -> str:
        return Ledger([self])._repr_html_()


@dataclass(frozen=True, slots=True)
class _LedgerRecord(Record):
    """The JSON object of evaluations.json."""

    schema_version: int
    evaluations: list[EvaluationRecord]


@dataclass(frozen=True, slots=True, repr=False)
class Ledger:
    """Everything in evaluations.json, in the order of measurement.

    Example: ``Ledger('teacher': 99.2 % [98.4, 99.6], 'step 64': 81.0 % [78.1, 83.7])``.
    """

    evaluations: list[EvaluationRecord] = field(default_factory=list)

    def find(self, name: str, settings: dict[str, Any]) -> EvaluationRecord | None:
        """Return the evaluation of this name under these settings, None if there is none."""
        return next((own for own in self.evaluations if (own.name, own.settings) == (name, settings)), None)

    def save(self, path: str | Path) -> None:
        """Write evaluations.json."""
        record = {"schema_version": SCHEMA_VERSION, "evaluations": [own.to_record() for own in self.evaluations]}
        Path(path).write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read evaluations.json; a run that has none has measured nothing, and a damaged file is refused by name."""
        if not Path(path).exists():
            return cls()
        path = as_listed(path)
        try:
            record = {"schema_version": SCHEMA_VERSION, **parse_json(path.read_bytes())}
        except (ValueError, TypeError) as error:
            raise _damaged(path, f"is not valid JSON ({error})") from None
        if record["schema_version"] != SCHEMA_VERSION:
            raise RunDirError(
                f"{path} has schema_version {record['schema_version']!r}, this rocktokens reads {SCHEMA_VERSION}: "
                "use the version that wrote it"
            )
        try:
            return cls(as_record(_LedgerRecord, record).evaluations)
        except ValueError as error:
            raise _damaged(path, f"lacks fields of evaluations.json or has others ({error})") from None

    def __len__(self) -> int:
        return len(self.evaluations)

    def __iter__(self) -> Iterator[EvaluationRecord]:
        return iter(self.evaluations)

    def __repr__(self) -> str:
        return f"Ledger({', '.join(f'{own.name!r}: {_summary(own)}' for own in self.evaluations)})"

    def _repr_html_(self) -> str:
        return accuracy_table(self.evaluations).to_html()


def accuracy_table(evaluations: Sequence[EvaluationRecord]) -> Table:
    """Make the accuracy table: a row per model, with its interval, the length of its answers, and how many were cut."""
    tasks = list(dict.fromkeys(own.task for own in evaluations))
    columns: list[Column[EvaluationRecord]] = [
        Column("model", lambda own: text(own.name)),
        *([Column("task", lambda own: text(own.task))] if len(tasks) > 1 else []),
        Column("accuracy", lambda own: number(own.accuracy, percent)),
        Column("95 %", lambda own: ends(own.interval, percent)),
        Column("prompts", lambda own: number(own.n_prompts)),
        Column("tokens per answer", lambda own: number(own.mean_response_length)),
        Column("cut off", lambda own: number(own.truncated_share, percent)),
    ]
    measured = (
        "accuracy",
        "wilson_interval",
        "bootstrap_interval",
        "n_prompts",
        "mean_response_length",
        "truncated_share",
    )
    records = [flat({name: getattr(own, name) for name in ("name", "task", *measured)}) for own in evaluations]
    where = f" on {printable(tasks[0])}" if len(tasks) == 1 else ""
    return Table.of("accuracy", columns, evaluations, f"Accuracy{where}, with 95 % intervals.", records=records)


def _damaged(path: Path, reason: str) -> RunDirError:
    return RunDirError(
        f"{path} {reason}, it is damaged: restore it from a copy of the run, or remove it to measure again"
    )


def _summary(own: Accuracy) -> str:
    return with_interval(own.accuracy, own.interval)
