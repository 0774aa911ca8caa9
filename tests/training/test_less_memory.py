"""Weights in bfloat16 beside float32 master copies, and moments in 8 bits: exact resumes, and what is refused."""

import json
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_pair import tiny_config, tiny_llama

from rocktokens.config import TrainingSection, parse_config
from rocktokens.errors import ConfigError
from rocktokens.models.head import lm_head
from rocktokens.run_dir import RunDir
from rocktokens.training import loop
from rocktokens.training.layout import HalfWidthLayout, make_layout
from rocktokens.training.loop import distill
from rocktokens.training.objective import DistillationObjective
from rocktokens.training.optim import make_optimizer, moment_bytes
from rocktokens.training.session import make_accelerator
from rocktokens.training.step import accumulate_gradients, weigh

HALF, EIGHT = "models.student_dtype=bfloat16", "training.optim=adamw_8bit"
WIDE = "training.max_steps=4"
needs_bnb = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
KINDS = [
    pytest.param([HALF], id="half"),
    pytest.param([HALF, "lora.enabled=true", "lora.r=2", "lora.lora_dropout=0.5"], id="half, lora"),
    pytest.param([EIGHT], id="8 bits", marks=needs_bnb),
    pytest.param([HALF, EIGHT], id="half, 8 bits", marks=needs_bnb),
    pytest.param([EIGHT, "lora.enabled=true", "lora.r=2"], id="8 bits, lora", marks=needs_bnb),
]


class Interruption(BaseException):
    """Ends a run from outside."""


def stop_at(step: int):
    def on_step(done: int, *_: Any) -> None:
        if done == step:
            raise Interruption

    return on_step


def losses(run: RunDir) -> list[float]:
    return [json.loads(line)["loss"] for line in run.logs.read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_ends_byte_for_byte_like_an_uninterrupted_one(pair, tmp_path, kind):
    runs = [tiny_config(pair, tmp_path / name, WIDE, *kind) for name in ("whole", "stopped")]
    distill(runs[0])
    with pytest.raises(Interruption):
        distill(runs[1], on_step=stop_at(3))
    distill(runs[1], resume=True)
    parts = ("checkpoints/", "traces/", "rollouts/")
    one, other = (
        {entry.path: entry.sha256 for part in parts for entry in RunDir(config.run.directory).files(part)}
        for config in runs
    )
    assert one == other and "checkpoints/step-4/optimizer.safetensors" in one


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_nearly_as_float32_does(pair, tmp_path, kind):
    lora = [own for own in kind if own.startswith("lora")]
    for name, settings in {"less": kind, "float32": lora}.items():
        distill(tiny_config(pair, tmp_path / name, WIDE, *settings))
    less, float32 = (losses(RunDir(tmp_path / name)) for name in ("less", "float32"))
    assert less == pytest.approx(float32, rel=0.1) and less != float32


def test_a_checkpoint_holds_the_master_copies_and_the_student_is_what_they_round_to(pair, tmp_path, monkeypatch):
    sessions, own = [], loop.make_session
    monkeypatch.setattr(loop, "make_session", lambda *given: sessions.append(own(*given)) or sessions[-1])
    result = distill(tiny_config(pair, tmp_path / "run", WIDE, HALF))
    saved = load_file(result.checkpoint / "model.safetensors")
    trained = dict(sessions[0].student.named_parameters())
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    for name, tensor in saved.items():
        assert trained[name].dtype == torch.bfloat16 and torch.equal(trained[name], tensor.to(torch.bfloat16)), name
    assert any(not torch.equal(tensor, tensor.to(torch.bfloat16).float()) for tensor in saved.values())
    first = load_file(RunDir(tmp_path / "run").checkpoint(0) / "model.safetensors")
    assert all(
        torch.equal(tensor, first[name]) for name, tensor in load_file(pair / "student/model.safetensors").items()
    )


def test_gradients_of_micro_batches_are_added_up_in_float32(open_session, rollouts):
    """Each is rounded once, as it comes; their sum is not."""
    session = open_session(HALF, "training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=8")
    head = lm_head(session.student).weight_VD
    came: list[torch.Tensor] = []
    head.register_hook(lambda gradient: came.append(gradient.clone()))
    accumulate_gradients(session, rollouts, weigh(session, rollouts, 0), 0)
    assert len(came) == 8 and {own.dtype for own in came} == {torch.bfloat16} and head.grad is None
    summed = session.layout.masters[head].grad
    assert torch.equal(summed, sum(own.float() for own in came))
    assert not torch.equal(summed, summed.to(torch.bfloat16).float())


def test_updates_too_small_for_bfloat16_are_not_lost():
    """A hundred of them move the master copy, and with it, in the end, the weight."""
    student = tiny_llama(16, 1, seed=0)
    layout = HalfWidthLayout(make_accelerator_on_cpu())
    layout.place(DistillationObjective(student, lm_head(student), SimpleNamespace()))  # type: ignore[arg-type]
    section = TrainingSection(learning_rate=1e-5, warmup_steps=0)
    optimizer = make_optimizer(student, section, layout.masters)
    weight = student.model.norm.weight
    before = weight.detach().clone()
    for step in range(400):
        layout.masters[weight].grad = torch.ones(16)
        optimizer.step()
        layout.follow_masters()
        if step == 0:
            assert torch.equal(weight, before) and not torch.equal(layout.masters[weight], before.float())
    assert (layout.masters[weight] - before.float()).abs().min() > 0.003
    assert not torch.equal(weight, before)


def make_accelerator_on_cpu():
    text = '[run]\ndirectory = "unused"\n[models]\nstudent = "s"\nteacher = "t"\ndevice = "cpu"\n'
    return make_accelerator(parse_config(text))


@needs_bnb
def test_moments_are_in_8_bits_but_those_of_embeddings_and_small_parameters():
    student = tiny_llama(64, 1, seed=0)
    optimizer = make_optimizer(student, TrainingSection(optim="adamw_8bit"))
    student(input_ids=torch.arange(5)[None]).logits.square().mean().backward()
    optimizer.step()
    held = 0
    for name, parameter in student.named_parameters():
        state = optimizer.state[parameter]
        in_full = "embed" in name or parameter.numel() < 4096
        assert (state["state1"].dtype == torch.uint8) != in_full, name
        held += sum(state[key].nbytes for key in ("state1", "state2", "absmax1", "absmax2") if key in state)
    small = sum(own.numel() for own in student.parameters() if own.numel() < 4096)
    count, embeddings = sum(own.numel() for own in student.parameters()), student.model.embed_tokens.weight.numel()
    expected = moment_bytes(TrainingSection(optim="adamw_8bit"), count, embeddings + small)
    assert held == pytest.approx(expected, rel=1e-4)  # a last block may not be full


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_without_the_library_its_name_and_how_to_install_it_are_said(pair, tmp_path):
    with pytest.raises(
        ConfigError, match=r"optim = 'adamw_8bit' needs bitsandbytes, .*pip install 'rocktokens\[bnb\]'"
    ):
        distill(tiny_config(pair, tmp_path / "run", EIGHT))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            [HALF, "training.shard=false"],
            "student_dtype = 'bfloat16' and training.shard = false: several processes",
        ),
        (
            [EIGHT, "training.shard=true"],
            "training.optim = 'adamw_8bit' and a sharded run: moments in 8 bits",
        ),
        ([EIGHT, HALF], "training.optim = 'adamw_8bit' and a sharded run"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(pair, tmp_path, overrides, sentence):
    config = tiny_config(pair, tmp_path / "run", *overrides)
    two: Any = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
    student = tiny_llama(16, 1, seed=0)
    with pytest.raises(ConfigError, match=sentence):
        make_layout(config, two, student, student)
