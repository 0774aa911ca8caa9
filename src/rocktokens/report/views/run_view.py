"""One run as the pages see it: its records, the texts of its tokens, and its rollouts; read-only, without a model.

1. ``RunView.open`` reads the records that are there. A part that was not run is None or empty; one that is damaged,
   that the manifest does not list or that is of another run is refused by name.
2. Traces, rollouts and grades are read when they are first asked for. Several threads may ask.
3. ``to_json`` turns any view into JSON that is safe inside a script element.
"""

import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from rocktokens.classes import TokenClasses
from rocktokens.config import run_checkpoint_names
from rocktokens.display.text import legible
from rocktokens.errors import RocktokensError
from rocktokens.evaluation.records import EvaluationRecord, Ledger
from rocktokens.gradients.records import GradientsRecord
from rocktokens.knockout.journal import Decoded, Key, RunJournal
from rocktokens.knockout.records import KnockoutSweep
from rocktokens.report.next_steps import why_ungraded
from rocktokens.report.views.grades import Grades
from rocktokens.report.views.log_tail import LogLine, LogTail
from rocktokens.report.views.token_index import TokenIndex
from rocktokens.rocks.categories import store_categories
from rocktokens.rocks.records import FindRecord
from rocktokens.rocks.sums import TypeSums, occurrences, type_sums
from rocktokens.rollouts.store import read_rollouts
from rocktokens.run_dir import RunDir
from rocktokens.studies.records import StudyResult
from rocktokens.traces.store import TraceStore
from rocktokens.types import ReplayRecord, RockSet, Rollout, has_tail

MAX_TOKEN_TEXT = 64
"""Characters of a token that a page shows."""
MAX_CHECKPOINT_NAME = 64
"""And of the name of a checkpoint."""


@dataclass(frozen=True, slots=True)
class KnockoutAnswers:
    """Answers with and without bans, kept in ``knockout/<digest of the conditions in knockout.json>/``."""

    free: list[Rollout]
    decoded: Mapping[Key, Decoded]
    """By what was banned and the place of the free rollout it continues."""
    grades: Grades


class RunView:
    """What is known of a run; make one with ``RunView.open``.

    Example: ``RunView.open("runs/demo").checkpoints == [0, 16, 32, 48, 64]``.
    """

    def __init__(self, path: Path) -> None:
        run = RunDir(path).require()
        self.run, self.path = run, path
        self.name = path.resolve().name
        self.manifest: dict[str, Any] = run.manifest()
        self.config_text = _read(run, "config.toml", lambda file: file.read_text(encoding="utf-8")) or ""
        self.rocks: RockSet | None = _read(run, "rocks.json", RockSet.load)
        self.find: FindRecord | None = _read(run, "find.json", FindRecord.load)
        self.classes: TokenClasses | None = _read(run, "classes.json", TokenClasses.load)
        self.gradients: GradientsRecord | None = _read(run, "gradients.json", GradientsRecord.load)
        self.knockout: KnockoutSweep | None = _read(run, "knockout.json", KnockoutSweep.load)
        ledger: Ledger | None = _read(run, "evaluations.json", Ledger.load)
        self.evaluations: list[EvaluationRecord] = ledger.evaluations if ledger else []
        studies = (_read(own, "study.json", StudyResult.load) for own in (run, RunDir(path / "study")))
        self.study: StudyResult | None = next(filter(None, studies), None)
        self._traces = TraceStore(run)
        self._require_own()
        self.rocks = self._judged()
        self._log = LogTail(run.logs)
        self._lock = threading.RLock()
        self._indices: dict[int, TokenIndex] = {}
        self._texts: dict[int, str] = {}
        self._categories: dict[int, str] = {}
        self._correct: dict[int, bool | None] = {}

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the run in a folder; a study's folder, which has a study.json and no traces, works too."""
        return cls(Path(path))

    # Records

    @property
    def logs(self) -> list[LogLine]:
        """The log lines there are now, one per training step."""
        with self._lock:
            return self._log.lines()

    @property
    def is_of_earlier_traces(self) -> bool:
        """Whether the rocks were found in traces that the run had before those of now."""
        return bool(self.rocks and self.checkpoints and not self._traces.made(self.rocks.source, "rocks.json"))

    def _require_own(self) -> None:
        """Refuse records that were made from the traces, or with the tokenizer, of another run."""
        records = {
            "rocks.json": self.rocks,
            "find.json": self.find,
            "classes.json": self.classes,
            "gradients.json": self.gradients,
            "knockout.json": self.knockout,
        }
        for name, record in records.items():
            if record is not None:
                self._traces.require_own(name, record)

    def _judged(self) -> RockSet | None:
        """Return the rocks, with the verdicts of knockout.json where rocks.json has none.

        They are verdicts on these rocks only if a student of the replay wrote the answers.
        """
        conditions = self.knockout.settings.conditions if self.knockout else None
        students = self.replay.checkpoints.values() if self.replay else ()
        if self.rocks is None or self.knockout is None or conditions is None or conditions.model not in students:
            return self.rocks
        alone = {own.ban.ids[0]: own for own in self.knockout.of_role("tested") if own.ban.is_one_type}
        tokens = [
            replace(token, verdict=own.verdict, delta=own.delta, delta_interval=own.interval)
            if token.verdict == "untested" and (own := alone.get(token.id))
            else token
            for token in self.rocks.tokens
        ]
        return replace(self.rocks, tokens=tokens)

    @cached_property
    def rock_ranks(self) -> dict[int, int]:
        """Ranks of the rocks by id."""
        return {token.id: token.rank for token in self.rocks.tokens} if self.rocks else {}

    # Traces

    @cached_property
    def checkpoints(self) -> list[int]:
        """Steps of the replayed checkpoints, oldest first."""
        return self._traces.checkpoints

    @cached_property
    def checkpoint_names(self) -> dict[int, str]:
        """Names of students of your own, by step, made safe to show."""
        names = run_checkpoint_names(self.run)
        return {step: legible(name, MAX_CHECKPOINT_NAME) for step, name in names.items()}

    @property
    def reference(self) -> int | None:
        """The checkpoint the rocks were found at, else the last one; None without traces."""
        found_at = self.rocks.criterion.get("reference") if self.rocks else None
        return found_at if found_at in self.checkpoints else next(reversed(self.checkpoints), None)

    def checkpoint(self, step: int | None) -> int:
        """Return a replayed checkpoint, by default the reference."""
        chosen = self.reference if step is None else step
        if chosen is None:
            raise RocktokensError(f"{self.path} has no replay traces: run `rocktokens trace`")
        if chosen not in self.checkpoints:
            available = ", ".join(map(str, self.checkpoints))
            raise RocktokensError(f"checkpoint {chosen} has no traces in {self.path}: available are {available}")
        return chosen

    def query(self, ask: Callable[[TraceStore], pa.Table]) -> pa.Table:
        """Query the traces; the engine answers one query at a time."""
        with self._lock:
            return ask(self._traces)

    @cached_property
    def traced_classes(self) -> str | None:
        """Hash of the classes by which the traces of the reference split the loss; None where they do not."""
        with self._lock:
            return None if self.reference is None else self._traces.classes_sha256(self.reference)

    @property
    def splits_by_its_classes(self) -> bool:
        """Whether the traces of the reference split the loss by the classes of classes.json that are not refuted."""
        return self.classes is not None and self.traced_classes == self.classes.unrefuted.sha256

    @cached_property
    def type_sums(self) -> TypeSums | None:
        """Sums of every type over the scored tokens of the reference; None without traces."""
        with self._lock:
            if self.reference is None:
                return None
            rows = occurrences(self._traces.table(self.reference))
            return type_sums(rows, with_choice=self.traced_classes is not None)

    def index(self, step: int | None = None) -> TokenIndex:
        """Return the tokens of a checkpoint, by default the reference."""
        chosen = self.checkpoint(step)
        with self._lock:
            if chosen not in self._indices:
                rock_ids = np.array(list(self.rock_ranks), dtype=np.int64)
                self._indices[chosen] = TokenIndex.read(self._traces, chosen, rock_ids)
            return self._indices[chosen]

    # Texts

    def text_of(self, token_id: int) -> str:
        """Return the text of a token, made safe to show and cut where it is long."""
        return legible(self._traces.vocabulary.text(token_id), MAX_TOKEN_TEXT)

    def categories_of(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Return categories by id; empty where there is no tokenizer."""
        if self._traces.vocab_size is None:
            return {}
        wanted = list(dict.fromkeys(map(int, token_ids)))
        with self._lock:
            new = [token_id for token_id in wanted if token_id not in self._categories]
            if new:
                self._categories |= zip(new, store_categories(self._traces, new), strict=True)
            return {token_id: self._categories[token_id] for token_id in wanted}

    def read(self, sequences: Iterable[Iterable[int]]) -> list[str]:
        """Return the text of each sequence of tokens, without tokens that only control the model."""
        return self._traces.vocabulary.read([list(ids) for ids in sequences])

    def response_texts(self, index: TokenIndex, places: Iterable[int]) -> list[str]:
        """Return the texts of the rollouts at these places of an index."""
        wanted = [int(place) for place in places]
        ids = index.rollout_ids_R[wanted].tolist()
        # Without the lock: who wants one page need not wait for who reads them all, and both read the same.
        new = [place for place, own in zip(wanted, ids, strict=True) if own not in self._texts]
        texts = self.read(index.tokens(place).tolist() for place in new)
        self._texts |= zip(index.rollout_ids_R[new].tolist(), texts, strict=True)
        return [self._texts[own] for own in ids]

    @cached_property
    def ungraded(self) -> str:
        """Why accuracy cannot be measured, in one sentence; empty where it can, or the run has no config."""
        return why_ungraded(self.run)

    @property
    def unmarked(self) -> str:
        """Why no rollout is marked as right or wrong; empty where they are."""
        return self._grades.unknown_because

    # Rollouts

    def rollout(self, rollout_id: int) -> Rollout | None:
        """Return a rollout of the probe as it was sampled; None where it was not stored."""
        with self._lock:
            return self._probe.get(rollout_id)

    def correct(self, index: TokenIndex, place: int) -> bool | None:
        """Tell whether the rollout at a place of an index ends in the right answer; None where that is not known."""
        rollout_id = int(index.rollout_ids_R[place])
        if rollout_id not in self._correct:
            own = self.rollout(rollout_id)
            self._correct[rollout_id] = own and self._grades.is_right(
                own.prompt_id, self.prompt_text(own), self.response_texts(index, [place])[0]
            )
        return self._correct[rollout_id]

    def prompt_text(self, rollout: Rollout) -> str:
        """Return the prompt of a rollout, template included."""
        return self.read([rollout.prompt_ids.tolist()])[0]

    @cached_property
    def banned_ids(self) -> np.ndarray:
        """int64: every type that was banned because it was asked for, alone or in a set; placebos are not."""
        tested = self.knockout.of_role("tested") if self.knockout else []
        return np.array(sorted({token_id for own in tested for token_id in own.ban.ids}), dtype=np.int64)

    @property
    def replay(self) -> ReplayRecord | None:
        """What ``rocktokens trace`` recorded of the replay."""
        return self._traces.replay

    @property
    def teacher_label(self) -> str:
        """How the teacher's values came, where it named its likeliest tokens alone: top-20 + tail; else ""."""
        of_study = self.study.teacher if self.study and not self.checkpoints else ""
        served = self.replay.served if self.replay else of_study
        return served if has_tail(served) else ""

    @cached_property
    def knockout_answers(self) -> KnockoutAnswers | None:
        """The answers of the last knock-out; None where there was none, or its answers are not kept."""
        conditions = self.knockout.settings.conditions if self.knockout else None
        if conditions is None:
            return None
        journal = RunJournal(self.run, conditions.digest)
        free = journal.free()
        grades = Grades(conditions, "evaluation prompts", gradable=True)
        return None if free is None else KnockoutAnswers(free, journal.finished, grades)

    @cached_property
    def _probe(self) -> dict[int, Rollout]:
        files = self.run.files("rollouts/probe/")
        return {own.rollout_id: own for file in files for own in read_rollouts(self.run, file.path)}

    @cached_property
    def _grades(self) -> Grades:
        return Grades(self.replay, "probe prompts")


def to_json(view: Any) -> str:
    """Write a view as JSON: no NaN, only plain values, and nothing that could end a script element."""
    return json.dumps(_plain(view), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _read(run: RunDir, name: str, load: Callable[[Path], Any]) -> Any:
    """Read a file of a run, verified; None where the run has none. A file that is no part of it is refused."""
    return load(run.verified(name)) if run.lists(name) or run.holds_unlisted(name) else None
