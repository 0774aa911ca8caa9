"""The likeliest tokens of both models, against their own logits in float64."""

import numpy as np
import pytest
import torch
from test_score import V, random_rollouts, student_and_teacher

from rocktokens.models.head import LMHead
from rocktokens.scoring.score import score_pass
from rocktokens.scoring.teacher_pass import TeacherPass
from rocktokens.scoring.top_tokens import TopTokens, likely_tokens, top_tokens

K = 5
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def tops_of(models, rollouts, *, k=K, temperature=1.0, tokens_per_batch=60, tokens_per_chunk=1024):
    teacher_pass = TeacherPass(models[1], rollouts, tokens_per_batch)
    tops = TopTokens(k, temperature, tokens_per_chunk)
    return score_pass(models[0], teacher_pass, temperature=temperature, tops=tops).wait_tops()


@torch.no_grad()
def oracle(model, rollouts, temperature):
    """Log-probabilities (T, V) where each response token is predicted, rollout by rollout, over the common width."""
    rows = []
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt_ids.tolist(), *rollout.token_ids.tolist()]])
        logp_TV = torch.log_softmax(model(ids).logits[0, :, :V] / temperature, -1)
        rows.append(logp_TV[len(rollout.prompt_ids) - 1 : -1])
    return torch.cat(rows).numpy()


@pytest.mark.parametrize("temperature", [1.0, 1.8])
def test_the_likeliest_are_those_of_the_models_own_logits(temperature):
    rollouts = random_rollouts()
    found = tops_of(student_and_teacher(), rollouts, temperature=temperature)
    models = dict(zip(("student_top", "teacher_top"), student_and_teacher(torch.float64), strict=True))
    assert found.keys() == models.keys()
    for name, model in models.items():
        ids_TK, logp_TK = found[name]
        assert (ids_TK.dtype, logp_TK.dtype) == (np.int32, np.float32)
        expected_TV = oracle(model, rollouts, temperature)
        np.testing.assert_array_equal(ids_TK, np.argsort(-expected_TV, axis=1)[:, :K])
        np.testing.assert_allclose(logp_TK, -np.sort(-expected_TV, axis=1)[:, :K], atol=2e-5)


@pytest.mark.parametrize(("temperature", "tokens_per_chunk"), [(1.0, 1024), (1.8, 7)])
def test_what_could_have_been_written_has_what_was_written_first(temperature, tokens_per_chunk):
    """Rows at some positions, the student's head wider than the teacher's; chunks that do not divide them."""
    torch.manual_seed(0)
    h_s_PD, h_t_PE, written_P = torch.randn(30, 6), torch.randn(30, 4), torch.randint(0, 11, (30,))
    student, teacher = LMHead(torch.randn(13, 6), bias_V=torch.randn(13)), LMHead(torch.randn(11, 4), softcap=3.0)
    found = likely_tokens(h_s_PD, student, h_t_PE, teacher, written_P, K, temperature, tokens_per_chunk)
    assert [(part.dtype, tuple(part.shape)) for part in found] == [
        (torch.int32, (30, 2, 1 + K)),
        (torch.float32, (30, 2, 1 + K)),
    ]
    for model, (h_PD, head) in enumerate(((h_s_PD, student), (h_t_PE, teacher))):
        logp_PV = torch.log_softmax(head.logits(h_PD)[:, :11].double() / temperature, -1)
        expected = torch.cat([written_P[:, None], logp_PV.argsort(dim=-1, descending=True)[:, :K]], dim=1)
        np.testing.assert_array_equal(found[0][:, model], expected)
        np.testing.assert_allclose(found[1][:, model], logp_PV.gather(1, expected), atol=2e-5)


def test_batching_and_chunking_change_nothing():
    models, rollouts = student_and_teacher(), random_rollouts()
    whole = tops_of(models, rollouts)
    for tokens_per_batch, tokens_per_chunk in ((1, 1024), (50, 3)):
        split = tops_of(models, rollouts, tokens_per_batch=tokens_per_batch, tokens_per_chunk=tokens_per_chunk)
        for name, (ids_TK, logp_TK) in whole.items():
            np.testing.assert_array_equal(split[name][0], ids_TK)
            np.testing.assert_allclose(split[name][1], logp_TK, atol=1e-5)


def test_scores_do_not_know_of_them():
    (student, teacher), rollouts = student_and_teacher(), random_rollouts()
    plain, beside = (
        score_pass(student, TeacherPass(teacher, rollouts, 60), tops=tops).wait() for tops in (None, TopTokens(K))
    )
    for (name, a), (_, b) in zip(plain.items(), beside.items(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_they_are_there_only_where_asked_for():
    student, teacher = student_and_teacher()
    assert score_pass(student, TeacherPass(teacher, random_rollouts(2))).wait_tops() == {}


def test_a_second_student_finds_the_teachers_as_they_were():
    """And its own, not those of the first."""
    (student, teacher), rollouts = student_and_teacher(), random_rollouts()
    teacher_pass, tops = TeacherPass(teacher, rollouts, 60), TopTokens(K)
    first = score_pass(student, teacher_pass, tops=tops).wait_tops()
    with torch.no_grad():
        student.lm_head.weight.neg_()
    second = score_pass(student, teacher_pass, tops=tops).wait_tops()
    np.testing.assert_array_equal(first["teacher_top"], second["teacher_top"])
    np.testing.assert_array_equal(second["student_top"], tops_of((student, teacher), rollouts)["student_top"])
    assert (first["student_top"][0] != second["student_top"][0]).any()


def test_equal_ones_come_by_id_and_a_small_vocabulary_gives_all_it_has():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]])
    head = LMHead(logits.T.contiguous())
    states = torch.eye(2)
    ids_KT, logp_KT = top_tokens(states, head, 4, temperature=1.0, tokens_per_chunk=1)
    assert ids_KT.T.tolist() == [[1, 3, 2, 4], [0, 1, 2, 3]]
    torch.testing.assert_close(logp_KT.T[1], torch.full((4,), -np.log(6), dtype=torch.float32))
    everything, _ = top_tokens(states, head, 64, temperature=1.0, tokens_per_chunk=8)
    assert everything.T.tolist() == [[1, 3, 2, 4, 5, 0], [0, 1, 2, 3, 4, 5]]


@GPU
def test_a_gpu_finds_the_same():
    rollouts = random_rollouts()
    on_cpu = tops_of(student_and_teacher(), rollouts)
    on_gpu = tops_of([model.cuda() for model in student_and_teacher()], rollouts)
    for name, (ids_TK, logp_TK) in on_cpu.items():
        np.testing.assert_array_equal(on_gpu[name][0], ids_TK)
        np.testing.assert_allclose(on_gpu[name][1], logp_TK, atol=1e-4)
