"""Runs of the TRL adapter that end early and go on: what they keep, and what they refuse to go on from."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from rocktokens.errors import ConfigError, RocktokensError, RunDirError
from rocktokens.policies import WeightPolicy
from rocktokens.run_dir import RunDir

pytest.importorskip("trl", reason="the extra [trl] is not installed")

from trl_case import ROCKS, make_trainer, training_rows

from rocktokens.integrations.trl import RockDistillationTrainer
from rocktokens.integrations.trl_run import CheckpointParts


class Counting(WeightPolicy):
    """Weighs the more, the more tokens it has seen scored; probes every frozen token."""

    name = "counting"

    def __init__(self) -> None:
        self.seen = np.zeros(1)
        self.calls: list[tuple[int, int]] = []

    def weigh(self, tokens: Any) -> np.ndarray:
        return np.where(tokens.token_ids % 2, 0.0, 1.0 + self.seen)

    def probe(self, weights_T: Any, *arrays: Any) -> Any:
        return weights_T == 0

    def observe(self, scores: Any, token_ids_T: np.ndarray, step: int) -> dict[str, Any]:
        self.calls.append((step, int(np.isfinite(scores.kl).sum())))
        self.seen = self.seen + len(token_ids_T) / 100
        return {"seen": float(self.seen[0]), "steps_seen": [step]}

    def state(self) -> dict[str, np.ndarray]:
        return {"seen": self.seen}

    def restore(self, state: Any) -> None:
        self.seen = state["seen"]


class StopAt(TrainerCallback):
    """What an interruption looks like from inside."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


SAVING = {"save_strategy": "steps", "save_steps": 2}


def test_an_interrupted_run_keeps_its_traces_and_goes_on_as_if_nothing_had_been(tokenizer: Any, tmp_path: Path):
    def trainer(name: str, **extra: Any) -> Any:
        return make_trainer(
            RockDistillationTrainer,
            tokenizer,
            tmp_path / name,
            2,
            steps=4,
            settings=SAVING,
            policy=Counting(),
            trace_dir=tmp_path / f"{name}-run",
            **extra,
        )

    whole = trainer("whole")
    whole.train()
    stopped = trainer("stopped", callbacks=[StopAt(3)])
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    policy_steps = training_rows(tmp_path / "stopped-run").column("policy_step").to_pylist()
    assert set(policy_steps) == {0, 1, 2}
    with pytest.raises(RunDirError, match="already holds a run"):
        trainer("stopped").train()
    resumed = trainer("stopped")
    resumed.train(resume_from_checkpoint=True)
    assert training_rows(tmp_path / "stopped-run").equals(training_rows(tmp_path / "whole-run"))
    logs = [(tmp_path / name / "logs.jsonl").read_text() for name in ("whole-run", "stopped-run")]
    assert logs[0] == logs[1] and json.loads(logs[0].splitlines()[3])["steps_seen"] == [3]
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))
    tokens = [json.loads(line)["seen"] for line in logs[0].splitlines()]
    assert [count for _, count in whole.policy.calls] == np.diff([0, *tokens] * np.array(100)).round().astype(
        int
    ).tolist()
    with pytest.raises(RunDirError, match=r"has no rocktokens\.json"):
        resumed.train(resume_from_checkpoint=str(tmp_path))


@pytest.fixture(scope="module")
def saved(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of two steps with a checkpoint: two with traces, one without."""
    folder = tmp_path_factory.mktemp("saved")
    for name, extra in {"one": {}, "two": {}, "untraced": {"trace_dir": None}}.items():
        going_on(tokenizer, folder, name, **{"trace_dir": folder / f"{name}-run", "steps": 2, **extra}).train()
    return folder


def going_on(tokenizer: Any, folder: Path, name: str, **extra: Any) -> Any:
    settings = {"policy": Counting(), "steps": 4, **extra}
    return make_trainer(RockDistillationTrainer, tokenizer, folder / name, 2, settings=SAVING, **settings)


def contents(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize(
    ("name", "trace_dir", "sentence"),
    [
        ("two", "one-run", "does not hold the traces that the checkpoint of step 2 was saved with"),
        ("two", "new-run", "does not hold the traces .* a run traced in part would look whole"),
        ("untraced", "one-run", "trace_dir is given, but the checkpoint of step 2 was saved without one"),
        ("untraced", "new-run", "trace_dir is given, .* a run traced in part would look whole: leave it out"),
        ("two", None, "trace_dir is not given, .* saved with one, .* give the folder of that run"),
    ],
)
def test_a_checkpoint_goes_on_with_the_traces_it_was_saved_with_or_not_at_all(
    tokenizer: Any, saved: Path, name: str, trace_dir: str | None, sentence: str
):
    before = {run: contents(saved / run) for run in ("one-run", "two-run", "new-run")}
    assert sum("traces/training" in path for path in before["one-run"]) == 1 and not before["new-run"]
    trainer = going_on(tokenizer, saved, name, trace_dir=saved / trace_dir if trace_dir else None)
    with pytest.raises(RunDirError, match=sentence):
        trainer.train(resume_from_checkpoint=True)
    assert {run: contents(saved / run) for run in before} == before


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"policy": "uniform"}, "policy = 'uniform', but the checkpoint of step 2 was trained with 'counting'"),
        ({"policy": {"name": "rocks", "rocks": ROCKS}}, "policy = 'rocks', but"),
        ({"denominator": "kept"}, "denominator = 'kept', but the checkpoint of step 2 was trained with 'all'"),
    ],
)
def test_another_loss_than_before_is_refused(tokenizer: Any, saved: Path, extra: dict[str, Any], sentence: str):
    trainer = going_on(tokenizer, saved, "one", trace_dir=saved / "one-run", **extra)
    with pytest.raises(ConfigError, match=sentence):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("policy.safetensors", None, r"no policy\.safetensors, without which policy counting would start from nothing"),
        ("rocktokens.json", None, "has no rocktokens.json: .* delete it and resume from the one before"),
        ("rocktokens.json", '{"step": 2, "tra', "has a broken .* saving it was interrupted: delete it and resume"),
        ("rocktokens.json", '{"step": 2}', "has a broken rocktokens.json"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(
    tokenizer: Any, saved: Path, tmp_path: Path, file: str, content: str | None, sentence: str
):
    checkpoint = shutil.copytree(saved / "one" / "checkpoint-2", tmp_path / "checkpoint-2")
    (checkpoint / file).unlink()
    if content is not None:
        (checkpoint / file).write_text(content)
    before = contents(saved / "one-run")
    trainer = going_on(tokenizer, saved, "one", trace_dir=saved / "one-run")
    with pytest.raises(RocktokensError, match=sentence):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert contents(saved / "one-run") == before


def test_a_folder_that_holds_a_run_is_not_begun_again(tokenizer: Any, tmp_path: Path):
    run = RunDir(tmp_path / "run")
    run.commit_text("logs.jsonl", '{"step": 0}\n')
    before = contents(run.path)
    with pytest.raises(RunDirError, match="already holds a run: resume from a checkpoint of that run, or give another"):
        going_on(tokenizer, tmp_path, "trl", trace_dir=run.path).train()
    assert contents(run.path) == before


def test_without_a_checkpoint_nothing_is_begun(tokenizer: Any, tmp_path: Path):
    trainer = going_on(tokenizer, tmp_path, "trl", trace_dir=tmp_path / "run")
    with pytest.raises(RunDirError, match="holds no checkpoint: leave it out to start a new run"):
        trainer.train(resume_from_checkpoint=True)
    assert not (tmp_path / "run").exists()


def test_the_log_is_cut_by_step_not_by_line(tokenizer: Any, tmp_path: Path):
    run = tmp_path / "run"
    going_on(tokenizer, tmp_path, "trl", trace_dir=run).train()
    lines = (run / "logs.jsonl").read_text().splitlines(keepends=True)
    (run / "logs.jsonl").write_text("".join(lines[1:]))
    going_on(tokenizer, tmp_path, "trl", trace_dir=run).train(str(tmp_path / "trl" / "checkpoint-2"))
    assert [json.loads(line)["step"] for line in (run / "logs.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_our_part_of_a_checkpoint_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    parts = CheckpointParts(2, "counting", "all", "0f", 3, {"seen": np.ones(2)})

    def disk_is_full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk_is_full)
        with pytest.raises(OSError, match="No space left"):
            parts.save(tmp_path)
    assert not contents(tmp_path)
    parts.save(tmp_path)
    found = CheckpointParts.load(tmp_path)
    assert (found.step, found.policy, found.denominator) == (2, "counting", "all")
    assert (found.run_id, found.trace_parts) == ("0f", 3)
    assert np.array_equal(found.policy_state["seen"], np.ones(2))
