"""Checkpoints are written while training goes on, and those that are to stay do, whatever is killed when."""

import json
import threading
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tiny_pair import tiny_config, tiny_llama

from rocktokens.config import TrainingSection
from rocktokens.run_dir import RunDir
from rocktokens.training import loop
from rocktokens.training.layout import Layout
from rocktokens.training.loop import distill
from rocktokens.training.optim import make_optimizer
from rocktokens.training.retention import STOPPED, beyond, note_stop, retain


def checkpoint_files(run: RunDir) -> dict[int, set[str]]:
    """Names of the files of every checkpoint, listed and on the disk."""
    listed = {
        step: {Path(entry.path).name for entry in run.files(f"checkpoints/step-{step}/")} for step in run.checkpoints()
    }
    there = {folder.name: {path.name for path in folder.iterdir()} for folder in (run.path / "checkpoints").iterdir()}
    assert there == {f"step-{step}": names for step, names in listed.items()}
    return listed


def test_only_the_latest_checkpoint_has_the_state_of_the_optimizer(pair, tmp_path):
    distill(tiny_config(pair, tmp_path / "run"))
    found = checkpoint_files(RunDir(tmp_path / "run"))
    assert list(found) == [0, 2, 4, 6]
    assert [step for step, names in found.items() if "optimizer.safetensors" in names] == [0, 6]
    assert not load_file(tmp_path / "run/checkpoints/step-0/optimizer.safetensors")
    assert all("model.safetensors" in names for names in found.values())


@pytest.mark.parametrize(("limit", "kept"), [(1, [0, 6]), (2, [0, 4, 6]), (9, [0, 2, 4, 6])])
def test_the_first_checkpoint_and_the_latest_of_the_others_stay(pair, tmp_path, limit, kept):
    whole, limited = (RunDir(tmp_path / name) for name in ("whole", "limited"))
    distill(tiny_config(pair, whole.path))
    distill(tiny_config(pair, limited.path, f"training.save_total_limit={limit}"))
    assert list(checkpoint_files(limited)) == kept
    for step in kept:
        assert limited.files(f"checkpoints/step-{step}/") == whole.files(f"checkpoints/step-{step}/")


def test_the_limit_may_change_at_a_resume(pair, tmp_path):
    run = RunDir(tmp_path / "run")
    distill(tiny_config(pair, run.path))
    assert distill(tiny_config(pair, run.path, "training.save_total_limit=1"), resume=True).already_complete
    assert list(checkpoint_files(run)) == [0, 6]


def test_beyond_the_limit_are_the_oldest():
    assert beyond([0, 10, 2, 4], None) == []
    assert beyond([0, 10, 2, 4], 2) == [2]
    assert beyond([0, 10, 2, 4], 3) == beyond([0], 1) == []


def fake_checkpoint(run: RunDir, step: int) -> None:
    for name in ("trainer_state.json", "optimizer.safetensors"):
        run.commit_text(f"checkpoints/step-{step}/{name}", json.dumps(step))


def test_a_checkpoint_of_a_stop_does_not_take_the_place_of_a_regular_one(tmp_path):
    """Two regular ones stay, and the latest: nothing that would not be there had the run not been stopped is missed."""
    run = RunDir(tmp_path / "run")
    with run.lock():
        for step, is_due in ((0, True), (4, True), (8, True), (9, False), (10, False)):
            note_stop(run, step, is_due=is_due)
            fake_checkpoint(run, step)
            retain(run, step, 2)
        assert run.checkpoints() == [0, 8, 10] and run.manifest()[STOPPED] == [10]
        note_stop(run, 12, is_due=True)
        fake_checkpoint(run, 12)
        retain(run, 12, 2)
    assert run.checkpoints() == [0, 8, 12] and run.manifest()[STOPPED] is None


def test_what_a_killed_process_left_to_drop_is_dropped(tmp_path):
    """Files that left the manifest and are still there, a temporary folder; what is no checkpoint stays."""
    run = RunDir(tmp_path / "run")
    with run.lock():
        for step in (0, 2, 4):
            fake_checkpoint(run, step)
        for name in ("step-1", ".step-6.tmp", "mine"):
            (run.path / "checkpoints" / name).mkdir()
        retain(run, 4, 1)
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == ["mine", "step-0", "step-4"]
    states = [entry.path for entry in run.files("checkpoints/") if "optimizer" in entry.path]
    assert states == [f"checkpoints/step-{step}/optimizer.safetensors" for step in (0, 4)]


def test_training_goes_on_while_a_checkpoint_is_written_and_waits_at_the_next(pair, tmp_path, monkeypatch):
    """The thread is held up in the checkpoint of step 2: steps 2 and 3 are made, the next checkpoint is not begun."""
    gate, held, own = threading.Event(), threading.Event(), loop.finish_checkpoint
    made, threads = [], set()

    def finish(run: RunDir, step: int, *rest) -> None:
        threads.add(threading.current_thread())
        if step == 2:
            held.set()
            assert gate.wait(60)
        own(run, step, *rest)

    def open_gate() -> None:
        assert held.wait(60)
        for _ in range(600):
            if len(made) == 4 and not (tmp_path / "held/checkpoints/.step-4.tmp").exists():
                break
            gate.wait(0.1)
        gate.set()

    monkeypatch.setattr(loop, "finish_checkpoint", finish)
    opener = threading.Thread(target=open_gate)
    opener.start()
    distill(tiny_config(pair, tmp_path / "held"), on_step=lambda done, *_: made.append((done, gate.is_set())))
    opener.join()
    monkeypatch.undo()
    assert [is_open for _, is_open in made] == [False] * 4 + [True] * 2
    assert threading.current_thread() not in threads
    distill(tiny_config(pair, tmp_path / "free"))
    one, other = (
        {entry.path: entry.sha256 for entry in RunDir(tmp_path / name).files() if not entry.path.endswith(".toml")}
        for name in ("held", "free")
    )
    assert one == other


def test_a_write_that_fails_stops_the_run_at_the_next_step_with_its_error(pair, tmp_path, monkeypatch):
    failed, made = threading.Event(), []

    def finish(_run, step, *_rest) -> None:
        if step == 4:
            failed.set()
            raise OSError(28, "no space left")

    monkeypatch.setattr(loop, "finish_checkpoint", finish)
    monkeypatch.setattr(loop, "retain", lambda *_: None)

    def on_step(done, *_) -> None:
        made.append(done)
        if done == 5:
            assert failed.wait(60)

    with pytest.raises(OSError, match="no space left"):
        distill(tiny_config(pair, tmp_path / "run", "training.save_steps=4", "training.max_steps=20"), on_step=on_step)
    assert made[-1] in (5, 6)  # the error is there a moment after the event
    assert RunDir(tmp_path / "run").checkpoints() == []


def test_a_checkpoint_holds_copies_and_tied_weights_once(tmp_path):
    student = tiny_llama(16, 1, seed=0, tie_word_embeddings=True)
    optimizer = make_optimizer(student, TrainingSection())
    student(input_ids=torch.arange(5)[None]).logits.square().mean().backward()
    optimizer.step()
    layout = Layout(Accelerator(cpu=True))
    full = layout.full_state(student, optimizer)
    assert full is not None
    before = {name: tensor.clone() for name, tensor in (full.weights | full.optimizer).items()}
    assert full.weights["lm_head.weight"] is full.weights["model.embed_tokens.weight"]
    optimizer.step()
    for name, tensor in (full.weights | full.optimizer).items():
        assert torch.equal(tensor, before[name]), name
    again = layout.full_state(student, optimizer)
    assert again is not None and not torch.equal(again.weights["lm_head.weight"], before["lm_head.weight"])
    assert again.weights["lm_head.weight"] is full.weights["lm_head.weight"], "the copies stay in their place"


@pytest.mark.parametrize("is_tied", [True, False])
def test_room_for_a_checkpoint_is_what_it_needs(is_tied):
    student = tiny_llama(16, 1, seed=0, tie_word_embeddings=is_tied)
    optimizer = make_optimizer(student, TrainingSection())
    student(input_ids=torch.arange(5)[None]).logits.square().mean().backward()
    optimizer.step()
    layout = Layout(Accelerator(cpu=True))
    layout.room_for_full_state(student, optimizer)()
    room = dict(layout._host_copies._copies)
    full = layout.full_state(student, optimizer)
    assert full is not None and ("lm_head.weight" in room) is not is_tied
    assert {id(own) for own in room.values()} == {id(own) for own in (full.weights | full.optimizer).values()}


def test_room_for_a_checkpoint_is_made_while_training_goes_on(pair, tmp_path, monkeypatch):
    """At a resume too, where no checkpoint was written before; of step 0, there is no time to make it before."""
    full_state, not_there = Layout.full_state, []

    def watched(self, student, optimizer):
        before = len(self._host_copies._copies)
        full = full_state(self, student, optimizer)
        not_there.append(len(self._host_copies._copies) - before)
        return full

    monkeypatch.setattr(Layout, "full_state", watched)
    with pytest.raises(KeyboardInterrupt):
        distill(tiny_config(pair, tmp_path / "run"), on_step=interrupt_after(3))
    distill(tiny_config(pair, tmp_path / "run"), resume=True)
    assert not_there[0] > 0 and not_there[1:] == [0, 0, 0]


def interrupt_after(step: int):
    def on_step(done: int, *_) -> None:
        if done == step:
            raise KeyboardInterrupt

    return on_step


def test_the_last_checkpoint_is_written_when_training_returns(pair, tmp_path):
    result = distill(tiny_config(pair, tmp_path / "run", "training.max_steps=1"))
    assert load_file(result.checkpoint / "model.safetensors")
