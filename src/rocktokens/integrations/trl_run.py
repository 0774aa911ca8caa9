"""What a TRL run leaves in our formats: training traces and a log in a run directory, and the policy in checkpoints.

1. Rows of an update are buffered when it is done, and committed at every checkpoint and however training ends, short of
   a kill, which loses what was buffered.
2. A checkpoint of TRL gets two files more: ``rocktokens.json`` (step and trace parts so far) and, where the policy has
   a state, ``policy.safetensors``.
3. A run that resumes from a checkpoint drops the parts and log lines of the steps it makes again.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerBase

from rocktokens.errors import RunDirError
from rocktokens.integrations.trl_update import Update
from rocktokens.run_dir import RunDir
from rocktokens.traces.schema import trace_table
from rocktokens.traces.writer import TraceWriter, parts_folder
from rocktokens.training.record import append_log, cut_log
from rocktokens.types import TokenScores

STATE_FILE = "rocktokens.json"
POLICY_FILE = "policy.safetensors"


@dataclass(frozen=True, slots=True)
class CheckpointParts:
    """Our part of a checkpoint of TRL."""

    step: int
    trace_parts: int
    """Training trace parts committed up to here."""
    policy: dict[str, np.ndarray] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        """Add it to a checkpoint's directory."""
        if self.policy:
            save_file(self.policy, directory / POLICY_FILE)
        record = {"step": self.step, "trace_parts": self.trace_parts}
        (directory / STATE_FILE).write_text(json.dumps(record) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> "CheckpointParts":
        """Read it; a checkpoint of another trainer has none."""
        try:
            record = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunDirError(
                f"{directory} has no {STATE_FILE}, so it is not a checkpoint of RockDistillationTrainer: give it as "
                "`model` and start a new run"
            ) from None
        path = directory / POLICY_FILE
        return cls(**record, policy=load_file(path) if path.exists() else {})


class TrlRun:
    """The run directory beside a TRL run; one process writes it.

    Args:
        path: Of the run directory.
        tokenizer: Of both models; saved with the traces, which are read by it.
        facts: What else the manifest is to say of the run.
    """

    def __init__(self, path: str | Path, tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any]) -> None:
        self._run = RunDir(path)
        self._tokenizer = tokenizer
        self._facts = facts
        self._writer: TraceWriter | None = None

    @contextmanager
    def writing(self, resumed: CheckpointParts | None) -> Iterator[None]:
        """Hold the run from its first update, or from the checkpoint it resumes, to the end of training."""
        with TraceWriter(self._run, source="training") as self._writer:
            if resumed is None:
                self._begin()
            else:
                self._rewind(resumed)
            try:
                yield
            finally:
                self._writer.flush()

    def append(self, update: Update, scores: TokenScores, record: dict[str, Any]) -> None:
        """Add the rows and the log line of one update."""
        assert self._writer is not None
        self._writer.append(trace_table(update.rollouts, scores, update.weights.weights))
        append_log(self._run, record)

    def flush(self) -> int:
        """Commit the rows so far; how many parts that makes."""
        assert self._writer is not None
        self._writer.flush()
        return self._writer.parts

    def _begin(self) -> None:
        if self._run.files(parts_folder("training", None)):
            raise RunDirError(
                f"trace_dir = {str(self._run.path)!r} already holds training traces: resume from a checkpoint of that "
                "run, or give another folder"
            )
        folder = self._run.path / "tokenizer"
        self._tokenizer.save_pretrained(folder)
        self._run.adopt([path.relative_to(self._run.path).as_posix() for path in sorted(folder.iterdir())])
        self._run.record_start(command="trl", **self._facts)

    def _rewind(self, checkpoint: CheckpointParts) -> None:
        parts = self._run.files(parts_folder("training", None))
        if len(parts) < checkpoint.trace_parts:
            raise RunDirError(
                f"trace_dir = {str(self._run.path)!r} holds {len(parts)} parts of training traces, the checkpoint of "
                f"step {checkpoint.step} was saved with {checkpoint.trace_parts}: give the folder of the run it is from"
            )
        self._run.drop([part.path for part in parts[checkpoint.trace_parts :]])
        cut_log(self._run, checkpoint.step)
