"""The teacher sees a probe set once, and no score can tell."""

import numpy as np
import pytest
import torch
from test_score import random_rollouts, student_and_teacher

from rocktokens.scoring import teacher_pass as passes
from rocktokens.scoring.batch import split_by_tokens
from rocktokens.scoring.packed import packs
from rocktokens.scoring.score import PendingScores, score_pass, score_rollouts
from rocktokens.scoring.teacher_pass import StatesRoom, TeacherPass, free_on_gpu
from rocktokens.types import EXTRA_COLUMNS, Rollout

BUDGET = 40
PLENTY = 1 << 30
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Calls:
    """Counts the forwards of a model's trunk."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        model.base_model.register_forward_hook(self._add)  # pyright: ignore[reportCallIssue]

    def _add(self, *_arguments: object) -> None:
        self.count += 1


def same_scores(a, b) -> bool:
    return all(np.array_equal(x, y) for (_, x), (_, y) in zip(a.items(), b.items(), strict=True))


def states_of(teacher_pass: TeacherPass) -> list[torch.Tensor]:
    return [group.h_t_TE for group in teacher_pass]


def first_state_bytes(teacher, rollouts) -> int:
    return states_of(TeacherPass(teacher, rollouts, BUDGET))[0].nbytes


@pytest.mark.parametrize("room", ["all", "first group", "nothing"])
def test_kept_and_recomputed_states_are_the_same_bits(room: str):
    student, teacher = student_and_teacher()
    rollouts = random_rollouts()
    groups = len(split_by_tokens(rollouts, BUDGET))
    expected = score_rollouts(student, teacher, rollouts, tokens_per_batch=BUDGET)
    bytes_kept = {"all": PLENTY, "first group": first_state_bytes(teacher, rollouts), "nothing": 0}[room]
    forwards = Calls(teacher)
    teacher_pass = TeacherPass(teacher, rollouts, BUDGET, StatesRoom(on_host=bytes_kept))
    for _ in range(3):
        assert same_scores(score_pass(student, teacher_pass).wait(), expected)
    assert groups > 3
    assert forwards.count == {"all": groups, "first group": groups + 2 * (groups - 1), "nothing": 3 * groups}[room]


def test_a_student_that_pads_after_a_teacher_that_does_not(monkeypatch):
    """The teacher's groups are then fuller, and the student's forwards are no larger than they may be."""
    student, teacher = student_and_teacher()
    rollouts, budget = random_rollouts(24), 3 * BUDGET
    expected = score_rollouts(student, teacher, rollouts, tokens_per_batch=budget)
    monkeypatch.setattr(passes, "packs", lambda _teacher: True)
    teacher_pass = TeacherPass(teacher, rollouts, budget)
    groups = [group.batch.groups for group in teacher_pass]
    assert len(groups) == len(split_by_tokens(rollouts, budget, packed=True)) < len(split_by_tokens(rollouts, budget))
    assert all(ids_RL.numel() <= budget or len(ids_RL) == 1 for group in groups for ids_RL in group)
    found = score_pass(student, teacher_pass).wait()
    for (_, ours_T), (_, theirs_T) in zip(found.items(), expected.items(), strict=True):
        np.testing.assert_allclose(ours_T, theirs_T, rtol=1e-5, atol=1e-6)


def test_one_pass_serves_every_student():
    students = [student_and_teacher()[0] for _ in range(3)]
    for index, student in enumerate(students):
        torch.manual_seed(index)
        for parameter in student.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    teacher, rollouts = student_and_teacher()[1], random_rollouts()
    teacher_pass = TeacherPass(teacher, rollouts, BUDGET, StatesRoom())
    for student in students:
        expected = score_rollouts(student, teacher, rollouts, tokens_per_batch=BUDGET, extras=EXTRA_COLUMNS)
        found = score_pass(student, teacher_pass, extras=EXTRA_COLUMNS).wait()
        assert same_scores(found, expected)
        assert all(np.array_equal(getattr(found, name), getattr(expected, name)) for name in EXTRA_COLUMNS)


def test_states_are_kept_at_response_tokens_alone():
    """Of one token after a prompt of thirteen, one state; and the memory behind it is no larger than that."""
    prompt, response = np.arange(13, dtype=np.int32), np.array([5], np.int32)
    rollout = Rollout(0, "p", 0, prompt, response, np.zeros(1, np.float32), 0, finished=True)
    teacher_pass = TeacherPass(student_and_teacher()[1], [rollout], room=StatesRoom(on_host=24 * 4))
    first, again = states_of(teacher_pass)[0], states_of(teacher_pass)[0]
    assert first is again and first.shape == (1, 24)
    assert first.untyped_storage().nbytes() == 24 * 4


def test_passes_share_the_room():
    teacher, rollouts = student_and_teacher()[1], random_rollouts(2)
    sizes = [sum(len(rollout.token_ids) for rollout in half) * 24 * 4 for half in (rollouts[:1], rollouts[1:])]
    room = StatesRoom(on_host=sum(sizes) - 1)
    forwards = Calls(teacher)
    passes = [TeacherPass(teacher, half, room=room) for half in (rollouts[:1], rollouts[1:])]
    for _ in range(2):
        for teacher_pass in passes:
            states_of(teacher_pass)
    assert forwards.count == 3


def test_without_room_nothing_outlives_a_walk():
    teacher_pass = TeacherPass(student_and_teacher()[1], random_rollouts(2))
    assert states_of(teacher_pass)[0] is not states_of(teacher_pass)[0]


# GPU


@pytest.fixture
def on_gpu():
    return tuple(model.to("cuda", torch.bfloat16) for model in student_and_teacher())


@GPU
@pytest.mark.parametrize(("on_device", "on_host", "kept"), [(PLENTY, 0, "cuda"), (0, PLENTY, "cpu"), (0, 0, None)])
def test_gpu_states_come_back_as_they_were(on_gpu, on_device: int, on_host: int, kept: str | None):
    student, teacher = on_gpu
    rollouts = random_rollouts()
    expected = score_rollouts(student, teacher, rollouts, tokens_per_batch=BUDGET)
    room = StatesRoom(on_device, on_host)
    forwards = Calls(teacher)
    teacher_pass = TeacherPass(teacher, rollouts, BUDGET, room)
    for _ in range(3):
        assert same_scores(score_pass(student, teacher_pass).wait(), expected)
    groups = len(split_by_tokens(rollouts, BUDGET, packed=packs(teacher)))
    assert forwards.count == (groups if kept else 3 * groups)
    assert all(h_TE.is_cuda for h_TE in states_of(teacher_pass))
    stays = room.keep(states_of(teacher_pass)[0])
    assert stays is None if kept is None else stays.device.type == kept and stays.is_pinned() == (kept == "cpu")


@GPU
def test_gpu_room_is_a_share_of_what_is_free(on_gpu):
    device = on_gpu[1].device
    before = free_on_gpu(device)
    held = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    assert before - free_on_gpu(device) >= held.nbytes
    del held
    assert free_on_gpu(device) >= before - (1 << 26)
    assert StatesRoom().keep(torch.zeros(4, 4, device=device)).is_cuda


@GPU
@pytest.mark.parametrize("on_device", [PLENTY, 0])
def test_gpu_walks_over_kept_states_never_wait(on_gpu, on_device: int):
    teacher_pass = TeacherPass(on_gpu[1], random_rollouts(), BUDGET, StatesRoom(on_device, PLENTY))
    states_of(teacher_pass)
    torch.cuda.set_sync_debug_mode("error")
    try:
        states_of(teacher_pass)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@GPU
def test_gpu_scoring_never_waits(on_gpu):
    student, teacher = on_gpu
    teacher_pass = TeacherPass(teacher, random_rollouts(), BUDGET, StatesRoom(PLENTY, 0))
    score_pass(student, teacher_pass)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = score_pass(student, teacher_pass)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(pending, PendingScores)
