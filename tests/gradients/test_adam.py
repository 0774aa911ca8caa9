"""The parts of Adam's step against the optimizer itself, and what is reported of them against dense vectors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gradient_oracle import flat, group_sums, make_rollouts, position_gradients, tiny_gpt2, token_ids, trainable

from rocktokens.config import TrainingSection
from rocktokens.errors import RocktokensError
from rocktokens.gradients.adam import AdamSettings, Moments, clip_factor, moments_of, step_parts
from rocktokens.gradients.backward import Objective, group_gradients
from rocktokens.gradients.blocks import trainable_blocks
from rocktokens.gradients.parameter_space import gradient_shares
from rocktokens.training.checkpoint import optimizer_tensors
from rocktokens.training.optim import make_optimizer

SETS = {"rocks": {1, 4, 7, 20}, "control": {2, 3, 11, 12, 13}}
ROLLOUTS = make_rollouts(6)
GROUP_T = np.array([0 if i in SETS["rocks"] else 1 if i in SETS["control"] else 2 for i in token_ids(ROLLOUTS)])


def started(steps: int, max_grad_norm: float, **section):
    """A student after some steps on random gradients, with its optimizer."""
    student = tiny_gpt2(8, 1)
    optimizer = make_optimizer(student, TrainingSection(learning_rate=0.01, adam_beta2=0.95, **section))
    generator = torch.Generator().manual_seed(4)
    for _ in range(steps):
        for parameter in student.parameters():
            parameter.grad = 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        optimizer.step()
        optimizer.zero_grad()
    return student, optimizer, AdamSettings.of(optimizer, student, max_grad_norm)


def dense_parts(student, optimizer, settings, gradients) -> torch.Tensor:
    """(A + 2, n): the parts over all parameters, one after the other."""
    saved = dict(optimizer_tensors(student, optimizer))
    g_An = flat(gradients, student.parameters())
    clip = clip_factor(float(g_An.sum(dim=0).norm()), settings.max_grad_norm)
    parts, start = [], 0
    for name, parameter in student.named_parameters():
        own_An = g_An[:, start : start + parameter.numel()]
        start += parameter.numel()
        state = moments_of(saved, name, parameter)
        state = state and Moments(state.exp_avg.flatten(), state.exp_avg_sq.flatten(), state.step)
        decay = settings.weight_decay.get(name, 0.0)
        parts.append(step_parts(own_An, parameter.detach().flatten(), state, settings, decay, clip))
    return torch.cat(parts, dim=1)


def take_real_step(student, optimizer, whole_n, max_grad_norm) -> torch.Tensor:
    """What the optimizer itself adds to the parameters."""
    parameters = list(student.parameters())
    before_n = torch.cat([parameter.detach().flatten() for parameter in parameters])
    split = whole_n.split([parameter.numel() for parameter in parameters])
    for parameter, gradient in zip(parameters, split, strict=True):
        parameter.grad = gradient.view_as(parameter).clone()
    torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters]) - before_n


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e6], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("section", [{}, {"weight_decay": 0.3, "adam_beta1": 0.7}, {"adam_epsilon": 0.1}])
def test_parts_add_up_to_the_optimizer_s_own_step(steps, max_grad_norm, section):
    student, optimizer, settings = started(steps, max_grad_norm, **section)
    gradients = group_gradients(Objective(student, tiny_gpt2(12, 2)), ROLLOUTS, GROUP_T, 3, 64)
    parts_Pn = dense_parts(student, optimizer, settings, gradients)
    whole_n = flat(gradients, student.parameters()).sum(dim=0)
    change_n = take_real_step(student, optimizer, whole_n, max_grad_norm)
    assert float((parts_Pn.sum(dim=0) - change_n).norm() / change_n.norm()) < 1e-9
    torch.testing.assert_close(parts_Pn.sum(dim=0), change_n, rtol=1e-6, atol=1e-12)
    assert (float(parts_Pn[-2].norm()) > 0) == (steps > 0)
    assert (float(parts_Pn[-1].norm()) > 0) == ("weight_decay" in section)


@pytest.fixture(scope="module")
def measured():
    """A student mid-training, and what was measured on two batches, with the dense parts of the first."""
    student, optimizer, settings = started(4, 0.05, weight_decay=0.1)
    teacher = tiny_gpt2(12, 2)
    state = dict(optimizer_tensors(student, optimizer))
    found = gradient_shares(student, teacher, ROLLOUTS, SETS, batches=2, adam=settings, optimizer_state=state)
    first = ROLLOUTS[:3]
    group_T = GROUP_T[: len(token_ids(first))]
    g_An = group_sums(position_gradients(student, teacher, first), group_T, 3)
    sizes = [parameter.numel() for parameter in student.parameters()]
    shaped = [
        [piece.view_as(p) for piece, p in zip(row.split(sizes), student.parameters(), strict=True)] for row in g_An
    ]
    return student, optimizer, settings, found, g_An.numpy(), dense_parts(student, optimizer, settings, shaped).numpy()


def test_every_number_of_the_update_is_that_of_the_dense_parts(measured):
    student, _, _, found, g_An, parts_Pn = measured
    blocks = trainable_blocks(student)
    block_n = np.concatenate([[blocks[name]] * p.numel() for name, p in trainable(student).items()])
    for block in (None, *found.blocks):
        here = np.ones(len(block_n), dtype=bool) if block is None else block_n == block
        u_An, own_g_An = parts_Pn[:3, here], g_An[:, here]
        u_n = u_An.sum(axis=0)
        rate = np.linalg.norm(u_n) / np.linalg.norm(own_g_An.sum(axis=0))
        geometry = found.update(block)
        assert geometry.norm.values[0] == pytest.approx(np.linalg.norm(u_n), rel=1e-8)
        for group, (name, each) in enumerate(geometry.groups.items()):
            norm, g_norm = np.linalg.norm(u_An[group]), np.linalg.norm(own_g_An[group])
            assert each.norm.values[0] == pytest.approx(norm, rel=1e-8), name
            assert each.share.values[0] == pytest.approx(u_An[group] @ u_n / (u_n @ u_n), rel=1e-7)
            assert each.cosine.values[0] == pytest.approx(u_An[group] @ u_n / norm / np.linalg.norm(u_n), rel=1e-7)
            assert each.rate.values[0] == pytest.approx(norm / g_norm / rate, rel=1e-8)


def test_shares_of_the_whole_step_include_momentum_and_decay_and_sum_to_one(measured):
    *_, found, _, parts_Pn = measured
    step_n = parts_Pn.sum(axis=0)
    shares = found.summary().update.step_shares
    assert list(shares) == ["rocks", "control", "rest", "momentum", "weight decay"]
    for part_n, share in zip(parts_Pn, shares.values(), strict=True):
        assert share.values[0] == pytest.approx(part_n @ step_n / (step_n @ step_n), rel=1e-7)
    assert sum(share.mean for share in shares.values()) == pytest.approx(1, abs=1e-12)


def test_shares_are_also_those_of_the_gradient_over_root_v(measured):
    """The method's u_A = g_A / (√v̂ + ε) differs from the optimizer's part by a constant, which no share sees."""
    student, optimizer, settings, found, g_An, _ = measured
    state = dict(optimizer_tensors(student, optimizer))
    v_n = torch.cat([state[f"{name}/exp_avg_sq"].flatten() for name in trainable(student)]).numpy()
    clip = clip_factor(float(np.linalg.norm(g_An.sum(axis=0))), settings.max_grad_norm)
    assert clip < 0.9
    second_n = settings.beta2 * v_n + (1 - settings.beta2) * (clip * g_An.sum(axis=0)) ** 2
    u_An = g_An / (np.sqrt(second_n / (1 - settings.beta2**5)) + settings.epsilon)
    u_n = u_An.sum(axis=0)
    shares = [group.share.values[0] for group in found.update().groups.values()]
    np.testing.assert_allclose(shares, u_An @ u_n / (u_n @ u_n), rtol=1e-7)


def test_effect_is_the_paired_difference_of_shares(measured):
    found = measured[3]
    effects = found.summary().update.effects
    for name, effect in effects.items():
        update, gradient = (view.groups[name].share.values for view in (found.update(), found.gradient()))
        np.testing.assert_allclose(effect.difference.values, np.subtract(update, gradient), atol=1e-12)
        assert effect.verdict == "inconclusive"
    assert sum(effect.difference.mean for effect in effects.values()) == pytest.approx(0, abs=1e-9)


def test_a_constant_preconditioner_leaves_every_share_as_it_is():
    """With ε far above √v̂ Adam is gradient descent with momentum: no share moves and every rate is 1."""
    student, optimizer, settings = started(2, 1e6)
    flat_settings = replace(settings, epsilon=1e8)
    found = gradient_shares(
        student,
        tiny_gpt2(12, 2),
        ROLLOUTS,
        SETS,
        batches=2,
        adam=flat_settings,
        optimizer_state=dict(optimizer_tensors(student, optimizer)),
    )
    for name, group in found.update().groups.items():
        np.testing.assert_allclose(group.share.values, found.gradient().groups[name].share.values, atol=1e-7)
        np.testing.assert_allclose(group.rate.values, 1, atol=1e-6)


def test_before_the_first_step_no_state_and_an_empty_one_are_the_same():
    student, optimizer, settings = started(0, 1.0)
    assert not dict(optimizer_tensors(student, optimizer))
    none, empty = (
        gradient_shares(
            student, tiny_gpt2(12, 2), ROLLOUTS, SETS, batches=1, adam=settings, optimizer_state=state
        ).step_gram_NBPP
        for state in (None, {})
    )
    np.testing.assert_array_equal(none, empty)
    assert np.all(none[..., -2, :] == 0)


def test_a_parameter_without_a_gradient_needs_no_state():
    """An optimizer never steps on it, so its state is in no checkpoint."""
    student, optimizer, settings = started(2, 1.0)
    state = dict(optimizer_tensors(student, optimizer))

    def measure():
        return gradient_shares(
            student, tiny_gpt2(12, 2), ROLLOUTS, SETS, batches=1, adam=settings, optimizer_state=state
        ).update()

    without = measure()
    student.transformer.h[0].register_parameter("unused", torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))
    assert measure() == without


def test_settings_are_read_from_the_optimizer():
    student, _, settings = started(1, 0.5, weight_decay=0.2)
    assert (settings.learning_rate, settings.beta1, settings.beta2, settings.max_grad_norm) == (0.01, 0.9, 0.95, 0.5)
    decayed = {name for name, decay in settings.weight_decay.items() if decay}
    assert "lm_head.weight" in decayed and "transformer.wte.weight" not in decayed
    assert settings.weight_decay.keys() == trainable(student).keys()


def test_another_optimizer_or_another_model_s_state_is_refused():
    student, optimizer, settings = started(1, 1.0)
    parameters = list(student.parameters())
    for other in (
        torch.optim.SGD(parameters, lr=0.1),
        torch.optim.AdamW(parameters, amsgrad=True),
        torch.optim.AdamW([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.2}]),
    ):
        with pytest.raises(RocktokensError, match=r"is not known here: use a torch.optim.AdamW"):
            AdamSettings.of(other, student, None)
    state = dict(optimizer_tensors(student, optimizer))
    del state["lm_head.weight/exp_avg_sq"]
    with pytest.raises(RocktokensError, match=r"no exp_avg, exp_avg_sq and step of parameter 'lm_head.weight'"):
        gradient_shares(student, student, ROLLOUTS, SETS, batches=1, adam=settings, optimizer_state=state)
    wider = {
        f"{name}/{key}": torch.zeros(3) for name in trainable(student) for key in ("exp_avg", "exp_avg_sq", "step")
    }
    with pytest.raises(RocktokensError, match=r"moments of shape \(3,\) for parameter 'transformer.wte.weight'"):
        gradient_shares(student, student, ROLLOUTS, SETS, batches=1, adam=settings, optimizer_state=wider)
