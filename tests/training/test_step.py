"""Identities of one update: any split, any order of ranks, weights keyed by the predicted token."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tiny_pair import tiny_config
from update_oracle import gradients, largest_difference, naive_gradients, per_rollout

from rocktokens.errors import NonFiniteLossError, TrainingStoppedError
from rocktokens.policies import make_policy
from rocktokens.run_dir import derive_seed
from rocktokens.scoring.batch import collate
from rocktokens.tasks import make_task
from rocktokens.training import step
from rocktokens.training.objective import LIKELY_K, response_states
from rocktokens.training.optim import make_optimizer
from rocktokens.training.session import make_session
from rocktokens.training.step import (
    accumulate_gradients,
    micro_batches,
    require_weight,
    sampled_positions,
    token_arrays,
    token_weights,
    update_student,
    weigh,
)
from rocktokens.types import Rollout, TokenWeights


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_gradient_does_not_depend_on_the_split_into_micro_batches(open_session, rollouts, size, denominator):
    session = open_session(f"training.per_device_train_batch_size={size}")
    weights = token_weights(make_policy("rocks", rocks=[62, 65], lam=0.25), None, rollouts, denominator, 0)
    loss, found = gradients(session, rollouts, weights)
    naive_loss, naive = naive_gradients(session, rollouts, per_rollout(weights.weights, rollouts), weights.denominator)
    assert loss == pytest.approx(naive_loss, abs=1e-6)
    assert largest_difference(found, naive) <= 1e-6


def test_weights_are_keyed_by_the_predicted_token_and_not_by_its_neighbours(open_session, rollouts):
    session, rock = open_session(), 64
    weights = token_weights(make_policy("rocks", rocks=[rock], lam=0.0), None, rollouts, "all", 0)
    _, found = gradients(session, rollouts, weights)

    def keyed_by(offset: int) -> dict[str, torch.Tensor]:
        keyed = []
        for rollout in rollouts:
            ids = np.concatenate([rollout.prompt_ids, rollout.token_ids, [-1]])
            shifted = ids[len(rollout.prompt_ids) + offset :][: len(rollout.token_ids)]
            keyed.append((shifted != rock).astype(float))
        return naive_gradients(session, rollouts, keyed, weights.denominator)[1]

    assert largest_difference(found, keyed_by(0)) <= 1e-6
    assert largest_difference(found, keyed_by(-1)) > 1e-3
    assert largest_difference(found, keyed_by(+1)) > 1e-3


def test_positions_of_weight_zero_get_exactly_no_gradient(open_session, rollouts):
    """Training with all but one token frozen is training on that token alone."""
    session = open_session("training.per_device_train_batch_size=8")
    count = sum(len(rollout.token_ids) for rollout in rollouts)
    last = len(rollouts[0].token_ids) - 1
    only = np.zeros(count, dtype=np.float32)
    only[last] = 1.0
    seen: dict[str, torch.Tensor] = {}

    def keep_gradient(_module, _inputs, output):
        output.last_hidden_state.register_hook(lambda grad: seen.update(h=grad))

    handle = session.student.model.register_forward_hook(keep_gradient)
    gradients(session, rollouts, TokenWeights(only, 7.0))
    handle.remove()
    predicting = (0, len(rollouts[0].prompt_ids) + last - 1)
    assert seen["h"][predicting].abs().max() > 0
    seen["h"][predicting] = 0
    assert torch.count_nonzero(seen["h"]) == 0


def test_denominator_all_ignores_lambda_and_kept_is_the_sum_of_weights(rollouts):
    tokens = np.concatenate([rollout.token_ids for rollout in rollouts])
    for lam in (0.0, 0.5, 1.0, 2.0):
        policy = make_policy("rocks", rocks=[61, 63], lam=lam)
        assert token_weights(policy, None, rollouts, "all", 0).denominator == len(tokens)
        expected = sum(lam if token in (61, 63) else 1.0 for token in tokens)
        assert token_weights(policy, None, rollouts, "kept", 0).denominator == expected


def test_micro_batches_of_ranks_are_the_slices_of_one_process(rollouts):
    def spans(rank: int, ranks: int, size: int) -> list[tuple[int, int, list[int]]]:
        return [
            (micro.tokens.start, micro.tokens.stop, [rollout.rollout_id for rollout in micro.rollouts])
            for micro in micro_batches(rollouts, size, rank, ranks)
        ]

    assert spans(0, 2, 2) + spans(1, 2, 2) == spans(0, 1, 2)
    assert [micro.last for micro in micro_batches(rollouts, 3, 0, 1)] == [False, False, True]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    assert spans(1, 2, 4) == [(sum(lengths[:4]), sum(lengths), [4, 5, 6, 7])]


def test_sampled_positions_are_distinct_seeded_and_bounded():
    assert sampled_positions(10, 256, 0).tolist() == list(range(10))
    chosen, again, other = (sampled_positions(5000, 256, seed) for seed in (1, 1, 2))
    assert len(set(chosen.tolist())) == 256 and chosen.max() < 5000
    assert np.array_equal(chosen, again) and not np.array_equal(chosen, other)


def test_overlap_and_scores_belong_to_their_positions(open_session, rollouts):
    """The gathered columns lie in the order of the rollouts whatever the micro-batches."""
    one = update_student(open_session("training.per_device_train_batch_size=8"), rollouts, 0)
    many = update_student(open_session("training.per_device_train_batch_size=3"), rollouts, 0)
    for (name, a), (_, b) in zip(one.scores.items(), many.scores.items(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(one.overlap, many.overlap, atol=1e-6)
    assert one.loss == pytest.approx(float(np.mean(one.scores.kl)), rel=1e-5)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)


def test_two_updates_are_two_textbook_steps(open_session, rollouts):
    """Each of the gradient of its own rollouts alone, clipped, at the learning rate that the schedule has come to."""
    session = open_session("training.max_grad_norm=0.05")
    naive = replace(session, student=deepcopy(session.student))
    optimizer = make_optimizer(naive.student, session.config.training)
    for number, own in enumerate((rollouts[:4], rollouts[4:])):
        weights = [np.ones(len(rollout.token_ids)) for rollout in own]
        _, gradient = naive_gradients(naive, own, weights, sum(map(len, weights)))
        norm = torch.stack([grad.double().norm() for grad in gradient.values()]).norm()
        for name, parameter in naive.student.named_parameters():
            parameter.grad = (gradient[name] * min(1.0, 0.05 / float(norm))).float()
        for group in optimizer.param_groups:
            group["lr"] = 0.005 * (number + 1)  # warm-up over two steps to 0.01
        optimizer.step()
        update = update_student(session, own, number)
        assert update.learning_rate == pytest.approx(0.005 * (number + 1))
        assert update.grad_norm == pytest.approx(float(norm), rel=1e-5) and float(norm) > 0.05
        for name, parameter in naive.student.named_parameters():
            torch.testing.assert_close(session.student.get_parameter(name), parameter, atol=2e-5, rtol=0)


@pytest.mark.parametrize("most", [4096, 9])
def test_a_policy_sees_what_both_models_could_have_written(open_session, rollouts, monkeypatch, most):
    """At every position, whatever its weight and the micro-batches, or at a choice of them."""
    monkeypatch.setattr(step, "LIKELY_POSITIONS", most)
    parts = '[{name="online_coarse"}, {name="rocks", rocks=[60, 61, 62, 63]}]'
    sessions = [
        open_session("policy.name=product", f"policy.policies={parts}", f"training.per_device_train_batch_size={size}")
        for size in (8, 3)
    ]
    models = [deepcopy(model).double() for model in (sessions[0].student, sessions[0].teacher)]  # before the update
    likely, split = (update_student(session, rollouts, 0).likely for session in sessions)
    tokens_T, _, rollouts_T = token_arrays(rollouts)
    chosen_P = sampled_positions(len(tokens_T), most, derive_seed(3, "likely", 0))
    assert len(chosen_P) == min(most, len(tokens_T)) and (tokens_T[chosen_P] < 64).any()
    np.testing.assert_array_equal(likely.rollout_ids, rollouts_T[chosen_P])
    for found, again in ((likely.ids, split.ids), (likely.rollout_ids, split.rollout_ids)):
        np.testing.assert_array_equal(found, again)
    np.testing.assert_allclose(likely.logp, split.logp, atol=1e-5)
    for index, model in enumerate(models):
        logp_TV = np.concatenate([log_probabilities(model, rollout) for rollout in rollouts])[chosen_P]
        expected = np.column_stack([tokens_T[chosen_P], np.argsort(-logp_TV, axis=1)[:, :LIKELY_K]])
        np.testing.assert_array_equal(likely.ids[:, index], expected)
        np.testing.assert_allclose(likely.logp[:, index], np.take_along_axis(logp_TV, expected, 1), atol=1e-4)


@torch.no_grad()
def log_probabilities(model: torch.nn.Module, rollout: Rollout) -> np.ndarray:
    """Where each response token is predicted, from the model's own logits."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.token_ids])).long()[None]
    return model(input_ids=ids).logits[0].log_softmax(-1)[len(rollout.prompt_ids) - 1 : -1].numpy()


@pytest.mark.parametrize("lora", ["false", "true"])
def test_gradient_checkpointing_changes_no_gradient(open_session, rollouts, lora):
    weights = token_weights(make_policy("uniform"), None, rollouts, "all", 0)
    _, plain = gradients(open_session(f"lora.enabled={lora}"), rollouts, weights)
    session = open_session(f"lora.enabled={lora}", "training.gradient_checkpointing=true")
    _, checkpointed = gradients(session, rollouts, weights)
    assert largest_difference(plain, checkpointed) == 0
    assert all(("lora_" in name) == (lora == "true") for name in plain) and plain


@pytest.fixture
def bf16_accelerator():
    """A real one; precision is a state that all accelerators of a process share, so it is reset around the test."""
    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(True)


def test_both_forwards_run_under_the_same_autocast(bf16_accelerator, pair, tmp_path, rollouts):
    config = tiny_config(pair, tmp_path / "run")
    session = make_session(config, make_task(config.task), bf16_accelerator, None, None)
    dtypes: dict[str, set[torch.dtype]] = {"student": set(), "teacher": set()}
    for name, model in (("student", session.student), ("teacher", session.teacher)):
        model.model.layers[0].self_attn.q_proj.register_forward_hook(
            lambda _module, _inputs, output, name=name: dtypes[name].add(output.dtype)
        )
    outputs = accumulate_gradients(session, rollouts, weigh(session, rollouts, 0), 0)
    assert dtypes == {"student": {torch.bfloat16}, "teacher": {torch.bfloat16}}
    assert {column.dtype for output in outputs for _, column in output.scores.items()} == {torch.float32}
    assert {parameter.dtype for parameter in session.student.parameters()} == {torch.float32}


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(open_session, rollouts):
    session = open_session()
    before = {name: parameter.detach().clone() for name, parameter in session.student.named_parameters()}
    session.student.model.layers[0].mlp.down_proj.register_full_backward_hook(
        lambda _module, grad_input, _grad_output: tuple(grad * float("nan") for grad in grad_input)
    )
    with pytest.raises(NonFiniteLossError, match="step 17: the gradient norm is nan"):
        update_student(session, rollouts, 17)
    for name, parameter in session.student.named_parameters():
        assert torch.equal(parameter, before[name])


def test_an_update_without_any_weight_is_refused(rollouts):
    policy = make_policy("rocks", rocks=range(60, 70), lam=0.0)
    with pytest.raises(TrainingStoppedError, match=r"step 2: .*weight 0 .*, or raise policy.lam, policy.rho or p"):
        require_weight(2, token_weights(policy, None, rollouts, "all", 2))


def test_response_states_are_those_before_the_token(open_session, rollouts):
    """Changing a response token changes no state that predicts it or an earlier one."""
    session = open_session()
    rollout = max(rollouts, key=lambda rollout: len(rollout.token_ids))
    changed_ids = rollout.token_ids.copy()
    changed_ids[3] += 1
    with torch.no_grad():
        before, after = (
            response_states(session.student, collate([each], session.pad_id, "cpu"))
            for each in (rollout, replace(rollout, token_ids=changed_ids))
        )
    unchanged = (before == after).all(-1).tolist()
    assert unchanged[:4] == [True] * 4 and not any(unchanged[4:])


def test_an_update_shows_in_the_versions_of_the_weights(open_session, rollouts):
    """A fused optimizer, as on a GPU, leaves them; a sampler over a server sends weights of another version."""
    session = open_session()
    fused = torch.optim.AdamW(session.trainable, lr=1e-3, fused=True)
    before = [parameter._version for parameter in session.trainable]
    update_student(replace(session, optimizer=fused), rollouts, 0)
    assert all(own._version > version for own, version in zip(session.trainable, before, strict=True))
