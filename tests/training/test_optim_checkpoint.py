"""Optimizer, schedule and checkpoints on their own: exact continuation, and nothing half written ever counts."""

from pathlib import Path

import pytest
import torch
from tiny_pair import byte_tokenizer, tiny_llama

from disk_order import inode, recorded
from rocktokens.config import ModelsSection, TrainingSection
from rocktokens.errors import LengthExplosionError, NonFiniteLossError, RunDirError
from rocktokens.run_dir import RunDir
from rocktokens.training.checkpoint import (
    FullState,
    TrainerState,
    begin_checkpoint,
    finish_checkpoint,
    load_trainer_state,
    optimizer_tensors,
    restore_optimizer,
)
from rocktokens.training.log import LengthWatch, append_log, cut_log, naming_step
from rocktokens.training.optim import make_optimizer, make_scheduler, restore_scheduler
from rocktokens.training.step import require_finite

PAIR = ModelsSection(student="a", teacher="b")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


def train(model, optimizer, scheduler, steps: range) -> None:
    for step in steps:
        ids = torch.arange(5, device=model.device)[None] + step
        model(input_ids=ids).logits.square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def save_checkpoint(run: RunDir, state: TrainerState, model, optimizer: dict[str, torch.Tensor]) -> None:
    begin_checkpoint(run, state, byte_tokenizer(), {})
    held = ({name: tensor.cpu() for name, tensor in own.items()} for own in (model.state_dict(), optimizer))
    finish_checkpoint(run, state.step, model, FullState(*held))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_restored_optimizer_goes_on_to_the_last_bit(tmp_path: Path, schedule: str, device: str):
    section = TrainingSection(max_steps=8, warmup_steps=3, weight_decay=0.1, lr_scheduler_type=schedule)  # type: ignore[arg-type]
    run = RunDir(tmp_path)
    whole = tiny_llama(16, 1, seed=0).to(device)
    optimizer = make_optimizer(whole, section)
    assert bool(optimizer.defaults["fused"]) == (device == "cuda")
    scheduler = make_scheduler(optimizer, section)
    train(whole, optimizer, scheduler, range(4))
    state = TrainerState(4, 0, 0, 0, scheduler.state_dict())
    save_checkpoint(run, state, whole, dict(optimizer_tensors(whole, optimizer)))
    train(whole, optimizer, scheduler, range(4, 8))

    directory = run.verified_checkpoint(4)
    resumed = type(whole).from_pretrained(directory).to(device)
    again = make_optimizer(resumed, section)
    schedule_again = make_scheduler(again, section)
    restore_optimizer(directory, resumed, again)
    restore_scheduler(schedule_again, load_trainer_state(directory).scheduler)
    assert load_trainer_state(directory) == state
    assert again.param_groups[0]["lr"] == schedule_again.get_last_lr()[0] != 0
    train(resumed, again, schedule_again, range(4, 8))
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_decay_leaves_out_norms_biases_and_embeddings():
    model = tiny_llama(16, 1, seed=0, attention_bias=True)
    optimizer = make_optimizer(model, TrainingSection(weight_decay=0.5))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decay = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay.keys() == set(names.values())
    for name, value in decay.items():
        undecayed = "norm" in name or name.endswith("bias") or "embed" in name
        assert value == (0.0 if undecayed else 0.5), name


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("linear", 2, [1 / 2, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5]),
        ("linear", 1, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("linear", 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("linear", 6, [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1]),
        ("cosine", 3, [1 / 3, 2 / 3, 1, (2 + 2**0.5) / 4, 1 / 2, (2 - 2**0.5) / 4]),
        ("cosine", 0, [1, (2 + 3**0.5) / 4, 3 / 4, 1 / 2, 1 / 4, (2 - 3**0.5) / 4]),
        ("constant", 3, [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("constant", 0, [1, 1, 1, 1, 1, 1]),
    ],
)
@pytest.mark.filterwarnings("error")
def test_warm_up_from_the_first_update_then_decay_to_the_end(schedule: str, warmup: int, expected: list[float]):
    section = TrainingSection(max_steps=6, warmup_steps=warmup, learning_rate=1.0, lr_scheduler_type=schedule)  # type: ignore[arg-type]
    optimizer = make_optimizer(tiny_llama(16, 1, seed=0), section)
    scheduler = make_scheduler(optimizer, section)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(expected)


@pytest.fixture
def saved(tmp_path: Path):
    """A run with checkpoint 0, and a function that saves others."""
    run, model = RunDir(tmp_path), tiny_llama(16, 1, seed=0)

    def save(step: int) -> None:
        save_checkpoint(run, TrainerState(step, 0, 0, 0, {}), model, {})

    save(0)
    return run, save


def test_every_file_of_a_checkpoint_is_flushed_before_its_folder_gets_its_name(saved, monkeypatch):
    run, save = saved
    with recorded(monkeypatch) as order:
        save(2)
    assert order.renamed == [run.checkpoint(2), run.path / "manifest.json"]
    assert not order.unflushed and not order.waiting


def test_a_checkpoint_the_manifest_does_not_list_does_not_exist_and_is_written_over(saved, monkeypatch):
    run, save = saved
    monkeypatch.setattr(RunDir, "adopt", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        save(10)
    monkeypatch.undo()
    assert run.checkpoint(10).exists()
    (run.checkpoint(10) / "stray").write_text("left by a killed process")
    assert run.checkpoints() == [0] and max(run.checkpoints(), default=None) == 0
    with pytest.raises(RunDirError, match=r"no checkpoint of step 10: there are \[0\]"):
        run.verified_checkpoint(10)
    save(10)
    assert run.checkpoints() == [0, 10] and not (run.checkpoint(10) / "stray").exists()
    assert run.verified_checkpoint(10) == run.checkpoint(10)


def test_checkpoints_are_ordered_by_number_and_verified(saved):
    run, save = saved
    for step in (2, 10, 100):
        save(step)
    assert run.checkpoints() == [0, 2, 10, 100]
    weights = run.checkpoint(10) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(RunDirError, match="SHA-256"):
        run.verified_checkpoint(10)
    assert run.verified_checkpoint(100) == run.checkpoint(100)


@pytest.mark.parametrize("name", ["adapter_config.json", "policy.safetensors"])
def test_a_file_that_would_be_read_with_a_checkpoint_must_be_listed(saved, name):
    run, _ = saved
    (run.checkpoint(0) / "optimizer.safetensors").touch()  # left by a process that was killed while it dropped it
    assert run.verified_checkpoint(0, optimizer=False) == run.checkpoint(0)
    (run.checkpoint(0) / name).write_text("{}")
    with pytest.raises(RunDirError, match=f"{name} is not listed in .*: remove it"):
        run.verified_checkpoint(0, optimizer=False)


def test_no_checkpoint_at_all(tmp_path: Path):
    assert RunDir(tmp_path).checkpoints() == []


def test_log_lines_after_the_checkpoint_are_cut_torn_ones_included(tmp_path: Path):
    run = RunDir(tmp_path)
    cut_log(run, 3)
    assert not run.logs.exists()
    for step in range(5):
        append_log(run, {"step": step})
    with run.logs.open("a") as file:
        file.write('{"step": 5, "kl"')
    cut_log(run, 3)
    append_log(run, {"step": 3})
    assert run.logs.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_log_line_is_on_the_disk_when_it_is_written(tmp_path: Path, monkeypatch):
    run = RunDir(tmp_path)
    with recorded(monkeypatch) as order:
        append_log(run, {"step": 0})
    assert order.flushed == {inode(run.logs)}


def test_length_watch_needs_three_bad_steps_in_a_row():
    watch = LengthWatch(limit=0.5)
    for step, share in enumerate([0.6, 0.7, 0.5, 0.9, 0.9]):
        watch.observe(step, share)
    with pytest.raises(LengthExplosionError, match=r"step 5: 100% .*training.max_truncated_share = 0.5"):
        watch.observe(5, 1.0)


@pytest.mark.parametrize(
    ("loss", "norm", "named"), [(float("nan"), 1.0, "loss is nan"), (1.0, float("inf"), "norm is inf")]
)
def test_what_is_not_finite_is_named_with_its_step(loss: float, norm: float, named: str):
    with pytest.raises(NonFiniteLossError, match=f"step 4: .*{named}.*learning_rate"):
        require_finite(4, loss, norm)
    require_finite(4, 1.0, 0.0)


def test_errors_from_below_get_the_step():
    with (
        pytest.raises(NonFiniteLossError, match=r"^step 9: the teacher's logits .*learning_rate"),
        naming_step(9, PAIR),
    ):
        raise NonFiniteLossError("the teacher's logits at row 3 are NaN")
    with pytest.raises(NonFiniteLossError, match=r"^step 9: the loss is nan: .*\)$"), naming_step(9, PAIR):
        require_finite(9, float("nan"), 1.0)


def test_what_is_not_finite_before_the_first_update_is_the_models_and_not_the_learning_rate():
    for raising in (lambda: require_finite(0, float("nan"), 1.0), lambda: require_finite(0, 1.0, float("inf"))):
        with pytest.raises(NonFiniteLossError) as refused, naming_step(0, PAIR):
            raising()
        said = str(refused.value)
        assert said.startswith("step 0: the ") and "models.student = 'a' and models.teacher = 'b'" in said
        assert "learning_rate" not in said and said.count("step 0") == 1
