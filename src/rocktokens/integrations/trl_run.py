"""What a TRL run leaves in our formats: training traces and a log in a run directory, and the policy in checkpoints.

1. Rows of an update are buffered when it is done, and committed at every checkpoint and however training ends, short of
   a kill, which loses what was buffered.
2. A checkpoint of TRL gets two files more: ``policy.safetensors``, where the policy has a state, and then
   ``rocktokens.json``: step, policy, denominator, trace parts so far, and the run whose parts these are.
3. A run that resumes from a checkpoint drops the parts and log lines of the steps it makes again, if the folder is the
   one that the checkpoint was saved with: both hold a random id, drawn when the run begins.
"""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from rocktokens.errors import ConfigError, RunDirError
from rocktokens.integrations.trl_step import TrlStep
from rocktokens.models.describe_run import save_tokenizer
from rocktokens.policies import WeightPolicy
from rocktokens.run_dir import RunDir, write_atomically
from rocktokens.traces.schema import trace_table
from rocktokens.traces.writer import TraceWriter, parts_folder
from rocktokens.training.checkpoint import POLICY_FILE, load_policy_state
from rocktokens.training.log import append_log, cut_log
from rocktokens.training.step import Denominator
from rocktokens.types import TokenScores

STATE_FILE = "rocktokens.json"
STATE = ("step", "policy", "denominator", "run_id", "trace_parts")
RUN_ID = "trl_run_id"
"""The manifest's entry with the identity of the run."""


@dataclass(frozen=True, slots=True)
class CheckpointParts:
    """Our part of a checkpoint of TRL."""

    step: int
    policy: str
    denominator: Denominator
    run_id: str | None
    """Of the traces; None where there was no ``trace_dir``."""
    trace_parts: int
    """Committed by then; later ones belong to steps that will be made again."""
    policy_state: dict[str, np.ndarray]

    def save(self, directory: Path) -> None:
        """Add it to a checkpoint's directory, ``rocktokens.json`` last: where it is, nothing is missing."""
        if self.policy_state:
            write_atomically(directory / POLICY_FILE, lambda path: save_file(self.policy_state, path))
        record = {name: getattr(self, name) for name in STATE}
        write_atomically(directory / STATE_FILE, lambda path: path.write_text(json.dumps(record) + "\n", "utf-8"))

    @classmethod
    def load(cls, directory: Path) -> "CheckpointParts":
        """Read it; a checkpoint of another trainer has none."""
        try:
            record = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
            known = {name: record[name] for name in STATE}
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            state = f"has no {STATE_FILE}" if isinstance(error, FileNotFoundError) else f"has a broken {STATE_FILE}"
            raise RunDirError(
                f"{directory} {state}: it is not a checkpoint of RockDistillationTrainer (give it as `model` and start "
                "a new run), or saving it was interrupted: delete it and resume from the one before"
            ) from None
        return cls(**known, policy_state=load_policy_state(directory))

    def require_same(self, policy: WeightPolicy, denominator: Denominator, *, traced: bool) -> None:
        """Refuse to continue with a loss other than that of the steps before, or with traces of a part of the run."""
        losses = {"policy": (self.policy, policy.name), "denominator": (self.denominator, denominator)}
        for name, (before, now) in losses.items():
            if before != now:
                raise ConfigError(
                    f"{name} = {now!r}, but the checkpoint of step {self.step} was trained with {before!r}: resume "
                    "with that, or give the checkpoint as `model` and start a new run"
                )
        if policy.state() and not self.policy_state:
            raise RunDirError(
                f"the checkpoint of step {self.step} has no {POLICY_FILE}, without which policy {policy.name} would "
                "start from nothing: put it back, or resume from another checkpoint"
            )
        if traced != (self.run_id is not None):
            raise RunDirError(
                f"trace_dir is {'' if traced else 'not '}given, but the checkpoint of step {self.step} was saved "
                f"{'without' if traced else 'with'} one, and a run traced in part would look whole: "
                f"{'leave it out' if traced else 'give the folder of that run'}, or start a new run"
            )


class TrlRun:
    """The run directory beside a TRL run; one process writes it.

    The tokenizer is saved with the traces, which are read by it; ``facts`` go into the manifest.
    """

    def __init__(self, path: str | Path, tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any]) -> None:
        self._run = RunDir(path)
        self._tokenizer = tokenizer
        self._facts = facts
        self._writer: TraceWriter | None = None

    @contextmanager
    def writing(self, resumed: CheckpointParts | None) -> Iterator[None]:
        """Hold the run from its first update, or from the checkpoint it resumes, to the end of training."""
        with self._run.lock():
            self._begin() if resumed is None else self._rewind(resumed)
            with TraceWriter(self._run, source="training") as self._writer:
                try:
                    yield
                finally:
                    self._writer.flush()

    def append(self, update: TrlStep, scores: TokenScores, record: dict[str, Any]) -> None:
        """Add the rows and the log line of one update."""
        assert self._writer is not None
        self._writer.append(trace_table(update.rollouts, scores, update.weights.weights))
        append_log(self._run, record)

    def flush(self) -> tuple[str, int]:
        """Commit the rows so far; return which run they are of, and how many parts they make."""
        assert self._writer is not None
        self._writer.flush()
        return self._run.manifest()[RUN_ID], self._writer.parts

    def _begin(self) -> None:
        if self._run.exists():
            raise RunDirError(
                f"trace_dir = {str(self._run.path)!r} already holds a run: resume from a checkpoint of that run, or "
                "give another folder"
            )
        save_tokenizer(self._run, self._tokenizer)
        self._run.record_start(command="trl", **{RUN_ID: secrets.token_hex(16)}, **self._facts)

    def _rewind(self, checkpoint: CheckpointParts) -> None:
        """Drop what came after a checkpoint of this very run; nothing of any other."""
        parts = self._run.files(parts_folder("training", None))
        run_id, kept = checkpoint.run_id, checkpoint.trace_parts
        if run_id is None or self._run.manifest().get(RUN_ID) != run_id or len(parts) < kept:
            raise RunDirError(
                f"trace_dir = {str(self._run.path)!r} does not hold the traces that the checkpoint of step "
                f"{checkpoint.step} was saved with, and a run traced in part would look whole: give the folder of the "
                "run it is from"
            )
        self._run.drop([part.path for part in parts[kept:]])
        cut_log(self._run, checkpoint.step)
