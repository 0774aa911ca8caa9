"""What a replay spends: one model for all checkpoints, one look of the teacher, and writes that hold nobody up."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import FinishedRun, changed, require_sound, rocktokens, snapshot, succeed
from safetensors.torch import load_file, save_file

from rocktokens.errors import NonFiniteLossError
from rocktokens.models import load as loading
from rocktokens.replay import replay as replaying
from rocktokens.run_dir import RunDir
from rocktokens.scoring import divergence, score, teachers
from rocktokens.traces import writer as trace_writer
from rocktokens.types import TokenScores


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models that are loaded from here on."""
    names: list[str] = []
    load_model = loading.load_model

    def noted(name: str, *options: Any) -> loading.LoadedModel:
        names.append(Path(name).name)
        return load_model(name, *options)

    for module in (replaying, teachers):
        monkeypatch.setattr(module, "load_model", noted)
    return names


def replay_of(finished: FinishedRun, run: Path, *settings: str) -> tuple[str | Path, ...]:
    students = json.dumps([str(finished.path / f"checkpoints/step-{step}") for step in (0, 2, 4)])
    return ("trace", finished.config, *changed(f"run.directory={run}", f"trace.checkpoints={students}", *settings))


def traces(run: Path) -> dict[str, str]:
    return {path: sha for path, sha in snapshot(run).items() if path.startswith("traces/checkpoint=")}


@pytest.mark.parametrize("probe", ["last", "first", "each"])
def test_checkpoints_go_through_one_model(finished: FinishedRun, tmp_path: Path, loaded: list[str], probe: str):
    """Byte for byte what one fresh process after another writes, each with one checkpoint to score."""
    together, apart = tmp_path / "together", tmp_path / "apart"
    succeed(*replay_of(finished, together, f"trace.probe={probe}"))
    assert loaded == ["pebbles-teacher", "step-4" if probe == "last" else "step-0"]
    whole = traces(together)
    assert {Path(path).parent.name for path in whole} == {f"checkpoint={step}" for step in (0, 2, 4)}
    for step in (0, 2, 4):
        shutil.copytree(together, apart)
        RunDir(apart).drop([path for path in whole if f"checkpoint={step}/" in path])
        loaded.clear()
        succeed(*replay_of(finished, apart, f"trace.probe={probe}"))
        assert loaded == ["pebbles-teacher", f"step-{step}"]
        assert traces(apart) == whole
        shutil.rmtree(apart)


def test_the_teacher_sees_a_probe_set_once(finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows: list[int] = []
    load_model = loading.load_model

    def watched(name: str, *options: Any) -> loading.LoadedModel:
        loaded = load_model(name, *options)
        if name == "pebbles-teacher":
            loaded.model.model.register_forward_hook(
                lambda _module, _args, given, _out: rows.append(len(given["input_ids"])), with_kwargs=True
            )
        return loaded

    monkeypatch.setattr(teachers, "load_model", watched)
    succeed(*replay_of(finished, tmp_path / "run"))
    assert sum(rows) == 8
    assert traces(tmp_path / "run") == traces(finished.path)


def broken_checkpoint(finished: FinishedRun, folder: Path) -> Path:
    """The run's step 2 with a final norm of NaN."""
    shutil.copytree(finished.path / "checkpoints/step-2", folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("unseen", [False, True])
def test_a_checkpoint_whose_scores_are_not_finite_is_named(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unseen: bool
):
    """Whether that shows when they are computed or, as on a GPU, when they arrive; what came before is there."""
    if unseen:
        monkeypatch.setattr(divergence, "require_logits", lambda *_: None)
        monkeypatch.setattr(divergence, "require_finite_divergence", lambda *_: None)
        monkeypatch.setattr(score, "require_sound_scores", refuse_nan)
    run = tmp_path / "run"
    students = [str(finished.path / "checkpoints/step-0"), str(broken_checkpoint(finished, tmp_path / "step-2"))]
    settings = (f"run.directory={run}", f"trace.checkpoints={json.dumps(students)}", "trace.probe=first")
    outcome = rocktokens("trace", finished.config, *changed(*settings))
    assert outcome.code == 2 and "Traceback" not in outcome.stderr
    assert "checkpoint 2, rollouts 0 to " in outcome.stderr
    assert {Path(path).parent.name for path in traces(run)} == {"checkpoint=0"}


def refuse_nan(scores: TokenScores, **_: object) -> None:
    if np.isnan(scores.kl).any():
        raise NonFiniteLossError("kl is NaN")


def test_a_part_that_cannot_be_written_stops_the_replay(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The fourth of six parts finds the disk full; the three before it are there, and the same command goes on."""
    run = tmp_path / "run"
    write = trace_writer.write_parquet
    calls: list[Path] = []

    def full(table: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        write(table, path)

    with monkeypatch.context() as patch:
        patch.setattr(trace_writer, "write_parquet", full)
        outcome = rocktokens(*replay_of(finished, run))
    assert outcome.code == 2 and "no space left on device" in outcome.stderr.lower()
    assert "Traceback" not in outcome.stderr
    assert len(calls) == 4 and len(traces(run)) == 3
    succeed(*replay_of(finished, run))
    require_sound(run)
    assert traces(run) == traces(finished.path)


def test_scores_that_are_not_finite_lose_no_part_before_them(finished: FinishedRun, tmp_path: Path):
    """The second of three checkpoints is all NaN: what the first one scored is committed."""
    checkpoints = shutil.copytree(finished.path / "checkpoints", tmp_path / "checkpoints")
    weights = load_file(checkpoints / "step-2/model.safetensors")
    spoiled = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
    save_file(spoiled, checkpoints / "step-2/model.safetensors", metadata={"format": "pt"})
    students = json.dumps([str(checkpoints / f"step-{step}") for step in (0, 2, 4)])
    outcome = rocktokens(*replay_of(finished, tmp_path / "run", f"trace.checkpoints={students}"))
    assert outcome.code == 2 and "NaN or infinite" in outcome.stderr and "Traceback" not in outcome.stderr
    committed = traces(tmp_path / "run")
    assert len(committed) == 2 and committed.items() < traces(finished.path).items()
