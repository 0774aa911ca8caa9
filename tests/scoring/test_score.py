import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rocktokens.errors import NonFiniteLossError, RocktokensError
from rocktokens.models.load import LoadedModel
from rocktokens.scoring.score import score_pass, score_rollouts
from rocktokens.scoring.teacher_pass import TeacherPass
from rocktokens.types import EXTRA_COLUMNS, Rollout

V = 37


def student_and_teacher(dtype=torch.float32):
    """A Llama and a GPT-2 with a wider, padded head: different widths, different trunks, one vocabulary."""
    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    gpt2 = GPT2Config(vocab_size=V + 3, n_embd=24, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    return LlamaForCausalLM(llama).eval().to(dtype), GPT2LMHeadModel(gpt2).eval().to(dtype)


def random_rollouts(n=9):
    generator = np.random.default_rng(1)
    rollouts = []
    for i in range(n):
        prompt, response = (generator.integers(V, size=generator.integers(1, 14)).astype(np.int32) for _ in range(2))
        logprobs = np.zeros(len(response), np.float32)
        rollouts.append(Rollout(i, f"p{i}", 0, prompt, response, logprobs, 0, finished=True))
    return rollouts


@torch.no_grad()
def oracle(student, teacher, rollouts, temperature):
    """kl, both log-probabilities and both entropies in float64 from each model's own logits, one rollout at a time."""
    rows = []
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt_ids.tolist(), *rollout.token_ids.tolist()]])
        p_TV, q_TV = (torch.softmax(model(ids).logits[0, :, :V] / temperature, -1) for model in (student, teacher))
        for t, token in enumerate(rollout.token_ids.tolist(), start=len(rollout.prompt_ids) - 1):
            p, q = p_TV[t], q_TV[t]
            entropies = [-(x * x.log()).sum() for x in (p, q)]
            rows.append([(p * (p / q).log()).sum(), p[token].log(), q[token].log(), *entropies])
    return np.array(rows).T


@pytest.mark.parametrize("temperature", [1.0, 1.8])
def test_scores_are_those_of_the_models_own_logits(temperature):
    rollouts = random_rollouts()
    scores = score_rollouts(*student_and_teacher(), rollouts, temperature=temperature, tokens_per_batch=60)
    columns = [column for _, column in scores.items()]
    assert all(column.dtype == np.float32 for column in columns)
    expected = oracle(*student_and_teacher(torch.float64), rollouts, temperature)
    np.testing.assert_allclose(columns[:5], expected, atol=2e-5)


def test_extra_columns_belong_to_their_tokens():
    rollouts = random_rollouts()
    scores = score_rollouts(*student_and_teacher(), rollouts, tokens_per_batch=60, extras=EXTRA_COLUMNS)
    rows = iter(range(len(scores.kl)))
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt_ids.tolist(), *rollout.token_ids.tolist()]])
        with torch.no_grad():
            p_TV, q_TV = (
                torch.softmax(model(ids).logits[0, :, :V], -1) for model in student_and_teacher(torch.float64)
            )
        for t in range(len(rollout.prompt_ids) - 1, ids.shape[1] - 1):
            p, q, row = p_TV[t], q_TV[t], next(rows)
            assert scores.teacher_mass_top16[row] == pytest.approx(q[p.argsort()[-16:]].sum().item(), abs=1e-5)
            assert scores.student_top1_in_teacher_top5[row] == (p.argmax() in q.argsort()[-5:])
            assert scores.forward_kl[row] == pytest.approx((q * (q / p).log()).sum().item(), abs=2e-5)
    assert score_rollouts(*student_and_teacher(), [], extras=["forward_kl"]).forward_kl.shape == (0,)


def test_batching_and_chunking_change_nothing():
    student, teacher = student_and_teacher()
    rollouts = random_rollouts()
    whole = score_rollouts(student, teacher, rollouts, divergence="jsd")
    for tokens_per_batch, tokens_per_chunk in ((1, 1024), (50, 3), (100, 1)):
        done = []
        split = score_rollouts(
            student,
            teacher,
            rollouts,
            divergence="jsd",
            tokens_per_batch=tokens_per_batch,
            tokens_per_chunk=tokens_per_chunk,
            on_done=done.append,
        )
        assert sum(done) == len(rollouts) and len(done) > 1
        for (name, a), (_, b) in zip(whole.items(), split.items(), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)


def test_scores_follow_the_order_of_the_rollouts():
    student, teacher = student_and_teacher()
    rollouts = random_rollouts()
    forwards = score_rollouts(student, teacher, rollouts, tokens_per_batch=40)
    backwards = score_rollouts(student, teacher, rollouts[::-1], tokens_per_batch=40)
    ends = np.cumsum([len(rollout.token_ids) for rollout in rollouts])[:-1]
    for (_, a), (_, b) in zip(forwards.items(), backwards.items(), strict=True):
        np.testing.assert_allclose(np.concatenate(np.split(a, ends)[::-1]), b, atol=1e-5)


def test_loaded_models_and_bare_ones_score_alike_and_nothing_scores_as_nothing():
    student, teacher = student_and_teacher()
    rollouts = random_rollouts(3)
    loaded = [LoadedModel(model, None, "tiny", frozenset()) for model in (student, teacher)]
    np.testing.assert_array_equal(score_rollouts(*loaded, rollouts).kl, score_rollouts(student, teacher, rollouts).kl)
    assert score_rollouts(student, teacher, []).kl.shape == (0,)


@pytest.mark.parametrize("bad", [-1, V])
def test_a_token_that_one_model_lacks_is_named_before_anything_is_scored(bad):
    student, teacher = student_and_teacher()
    rollouts = random_rollouts()
    rollouts[4].token_ids[0] = bad
    done = []
    with pytest.raises(RocktokensError, match=rf"token id {bad} is outside the {V} logits"):
        score_rollouts(student, teacher, rollouts, on_done=done.append)
    assert not done


def test_scores_that_arrive_broken_are_refused_with_their_row():
    student, teacher = student_and_teacher()
    pending = score_pass(student, TeacherPass(teacher, random_rollouts()))
    pending.wait()
    table_CT = pending.tables_CT[0][1]
    row = sum(pending.lengths[: pending.tables_CT[0][0][0]])
    for column, value, message in ((4, np.nan, "the teacher's logits"), (0, np.inf, "the divergence")):
        table_CT.numpy()[column, 0] = value
        with pytest.raises(NonFiniteLossError, match=f"{message} at row {row} "):
            pending.wait()
        table_CT.numpy()[column, 0] = 0.0
