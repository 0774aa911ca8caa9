"""One update on a GPU: the numbers of the CPU, nothing waited for on the way, a teacher on a stream of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from tiny_pair import byte_tokenizer, tiny_config, tiny_llama

from rocktokens.scoring.batch import collate
from rocktokens.scoring.packed import packs
from rocktokens.tasks import make_task
from rocktokens.training.objective import teacher_states
from rocktokens.training.session import Session, make_accelerator, make_session
from rocktokens.training.step import accumulate_gradients, update_student, weigh

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def open_on(pair: Path, tmp_path: Path):
    """Make the session of the tiny task on a device, with models whose heads the packed attention has.

    The device is a state that all accelerators of a process share, so it is reset around each session.
    """
    for name, width, layers, seed in (("student", 32, 1, 1), ("teacher", 64, 2, 2)):
        tiny_llama(width, layers, seed).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)

    def open_with(device: str, *overrides: str) -> Session:
        AcceleratorState._reset_state(True)
        models = [f"models.{side}='{tmp_path / side}'" for side in ("student", "teacher")]
        config = tiny_config(pair, tmp_path / "run", f"models.device='{device}'", *models, *overrides)
        return make_session(config, make_task(config.task), make_accelerator(config), None, None)

    yield open_with
    AcceleratorState._reset_state(True)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any wait of the host for the GPU is an error in here."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("policy", ["uniform", "prefix_importance"])
@pytest.mark.parametrize("lora", ["false", "true"])
def test_an_update_on_a_gpu_is_that_of_the_cpu_up_to_bfloat16(open_on, rollouts, policy, lora):
    settings = (f"policy.name='{policy}'", f"lora.enabled={lora}")
    on_cpu = update_student(open_on("cpu", *settings), rollouts, 0)
    session = open_on("cuda", *settings)
    with session.accelerator.autocast():
        assert packs(session.student) and packs(session.teacher)
    on_gpu = update_student(session, rollouts, 0)
    assert on_gpu.loss == pytest.approx(on_cpu.loss, rel=0.05)
    assert on_gpu.grad_norm == pytest.approx(on_cpu.grad_norm, rel=0.1)
    scored = ~np.isnan(on_cpu.scores.kl)
    assert np.abs(on_gpu.scores.logp_student - on_cpu.scores.logp_student)[scored].mean() < 0.05


def test_gradients_are_queued_without_waiting(open_on, rollouts):
    session = open_on("cuda")
    update_student(session, rollouts, 0)  # compiles kernels and fills caches
    weighing = weigh(session, rollouts, 1)
    with no_waiting():
        outputs = accumulate_gradients(session, rollouts, weighing, 1)
    assert all(torch.isfinite(output.loss) for output in outputs)


def test_a_stream_of_its_own_changes_no_bit_of_the_teacher(open_on, rollouts):
    session = open_on("cuda")
    batch = collate(rollouts, session.pad_id, "cuda")
    with session.accelerator.autocast():
        here = teacher_states(session.teacher, batch, None).wait()
        beside = teacher_states(session.teacher, batch, session.teacher_stream)
        assert beside.stream is not None and torch.equal(beside.wait(), here)
