"""Gradients by group against the gradient of every position, found one at a time in float64."""

import json
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import torch
from gradient_oracle import (
    flat,
    group_sums,
    make_rollouts,
    position_gradients,
    position_kls,
    tiny_gpt2,
    token_ids,
    trainable,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from peft import LoraConfig, get_peft_model

from rocktokens.errors import NonFiniteLossError, RocktokensError
from rocktokens.gradients.adam import AdamSettings
from rocktokens.gradients.backward import Objective, group_gradients
from rocktokens.gradients.blocks import trainable_blocks
from rocktokens.gradients.parameter_space import gradient_shares
from rocktokens.gradients.partition import Partition, prompt_batches, split_by_rollout
from rocktokens.scoring.packed import checkpointing_kwargs

ROLLOUTS = make_rollouts(6)
N_TOKENS = len(token_ids(ROLLOUTS))
SETS = {"rocks": {1, 4, 7, 20}, "control": {2, 3, 11, 12, 13}}


@pytest.fixture(scope="module")
def pair():
    return tiny_gpt2(8, 1), tiny_gpt2(12, 2)


@pytest.fixture(scope="module")
def rows_Tn(pair):
    return position_gradients(*pair, ROLLOUTS)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def sets_of(token_ids_T: np.ndarray) -> np.ndarray:
    """The groups of SETS, then the rest, by looking."""
    return np.array([0 if i in SETS["rocks"] else 1 if i in SETS["control"] else 2 for i in token_ids_T])


@settings(max_examples=15, deadline=None)
@given(group_T=arrays(np.int64, N_TOKENS, elements=st.integers(0, 3)), tokens_per_forward=st.integers(1, 80))
def test_groups_are_sums_of_positions_for_any_partition_and_split(pair, rows_Tn, group_T, tokens_per_forward):
    objective = Objective(*pair)
    found_An = flat(group_gradients(objective, ROLLOUTS, group_T, 4, tokens_per_forward), objective.trainable)
    torch.testing.assert_close(found_An, group_sums(rows_Tn, group_T, 4), rtol=1e-9, atol=1e-13)
    assert relative(found_An.sum(dim=0), rows_Tn.mean(dim=0)) < 1e-9


def test_finite_differences_of_a_group_s_loss(pair):
    student, teacher = tiny_gpt2(8, 1), pair[1]
    group_T = sets_of(token_ids(ROLLOUTS))
    gradients = group_gradients(Objective(student, teacher), ROLLOUTS, group_T, 3, 64)[0]

    @torch.no_grad()
    def loss() -> float:
        kls = list(position_kls(student, teacher, ROLLOUTS))
        return float(sum(kl for kl, group in zip(kls, group_T, strict=True) if group == 0)) / N_TOKENS

    rng, step = np.random.default_rng(3), 1e-5
    parameters = list(student.parameters())
    chosen = [*range(len(parameters)), *rng.integers(0, len(parameters), 6)]
    for index in chosen:
        element = int(rng.integers(parameters[index].numel()))
        value = parameters[index].data.view(-1)
        before = float(value[element])
        value[element] = before + step
        above = loss()
        value[element] = before - step
        below = loss()
        value[element] = before
        gradient = gradients[index]
        assert gradient is not None
        assert float(gradient.view(-1)[element]) == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-9)
    assert len(chosen) >= 20


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def measured(request):
    """A pair, rollouts two to a prompt, and what was measured on three batches."""
    student, teacher = tiny_gpt2(8, 1, tied=request.param), tiny_gpt2(12, 2)
    rollouts = make_rollouts(8, seed=5, per_prompt=2)
    return student, teacher, rollouts, gradient_shares(student, teacher, rollouts, SETS, batches=3)


def test_every_number_is_that_of_the_dense_gradients(measured):
    student, teacher, rollouts, found = measured
    blocks = trainable_blocks(student)
    block_n = np.concatenate([[blocks[name]] * p.numel() for name, p in trainable(student).items()])
    assert set(found.blocks) == set(block_n)
    for batch, indices in enumerate(prompt_batches(rollouts, 3)):
        own = [rollouts[index] for index in indices]
        rows = position_gradients(student, teacher, own)
        g_An = group_sums(rows, sets_of(token_ids(own)), 3).numpy()
        assert [tokens[batch] for tokens in found.summary().tokens.values()] == list(
            np.bincount(sets_of(token_ids(own)), minlength=3)
        )
        for block in (None, *found.blocks):
            part_An = g_An if block is None else g_An[:, block_n == block]
            whole_n = part_An.sum(axis=0)
            geometry = found.gradient(block)
            assert geometry.norm.values[batch] == pytest.approx(np.linalg.norm(whole_n), rel=1e-9)
            assert geometry.energy.values[batch] == pytest.approx(
                (whole_n @ whole_n) / np.sum(g_An.sum(axis=0) ** 2), rel=1e-9
            )
            for own_n, group in zip(part_An, geometry.groups.values(), strict=True):
                norm = np.linalg.norm(own_n)
                assert group.norm.values[batch] == pytest.approx(norm, rel=1e-9)
                assert group.share.values[batch] == pytest.approx(own_n @ whole_n / (whole_n @ whole_n), rel=1e-8)
                cosine = own_n @ whole_n / norm / np.linalg.norm(whole_n) if norm else None
                assert group.cosine.values[batch] == pytest.approx(cosine, rel=1e-8)
                assert group.rate is None
        cosine = g_An[0] @ g_An[2] / np.linalg.norm(g_An[0]) / np.linalg.norm(g_An[2])
        assert found.summary().gradient.cosines["rocks"]["rest"].values[batch] == pytest.approx(cosine, rel=1e-9)


def test_shares_sum_to_one_in_every_block_and_energies_over_blocks(measured):
    found = measured[3]
    for block in (None, *found.blocks):
        shares = np.array([group.share.values for group in found.gradient(block).groups.values()])
        np.testing.assert_allclose(shares.sum(axis=0), 1, atol=1e-9)
    energies = np.array([found.gradient(block).energy.values for block in found.blocks])
    np.testing.assert_allclose(energies.sum(axis=0), 1, atol=1e-9)


def test_the_record_is_json_and_holds_what_the_methods_give(measured):
    found = measured[3]
    record = json.loads(json.dumps(asdict(found.summary()), allow_nan=False))
    share = found.gradient("norms").groups["control"].share
    assert record["gradient"]["blocks"]["norms"]["groups"]["control"]["share"]["values"] == share.values
    assert record["n_batches"] == 3 and record["update"] is None and found.update() is None


def test_groups_are_keyed_by_the_predicted_token_and_not_by_its_neighbours(pair, rows_Tn):
    found = gradient_shares(*pair, ROLLOUTS, SETS, batches=1).gradient().groups["rocks"]

    def keyed_by(offset: int) -> float:
        groups = []
        for rollout in ROLLOUTS:
            ids = np.concatenate([rollout.prompt_ids, rollout.token_ids, [-1]])
            groups.append(sets_of(ids[len(rollout.prompt_ids) + offset :][: len(rollout.token_ids)]))
        g_An = group_sums(rows_Tn, np.concatenate(groups), 3)
        return float(g_An[0] @ g_An.sum(dim=0) / g_An.sum(dim=0).norm() ** 2)

    assert found.share.mean == pytest.approx(keyed_by(0), rel=1e-9)
    assert abs(found.share.mean - keyed_by(-1)) > 0.01
    assert abs(found.share.mean - keyed_by(+1)) > 0.01


def test_divergence_and_temperature_are_passed_on(pair):
    rows = position_gradients(*pair, ROLLOUTS, temperature=1.7)
    group_T = np.arange(N_TOKENS) % 2
    hot = gradient_shares(*pair, ROLLOUTS, Partition(("even", "odd"), group_T), batches=1, temperature=1.7)
    np.testing.assert_allclose(
        hot.gradient_gram_NBAA.sum(axis=(0, 1)), (g := group_sums(rows, group_T, 2)) @ g.T, rtol=1e-9
    )
    forward = gradient_shares(*pair, ROLLOUTS, SETS, batches=1, divergence="forward")
    assert forward.gradient().norm.mean != pytest.approx(hot.gradient().norm.mean, rel=0.01)


def test_a_group_that_does_not_occur_has_share_zero_and_no_direction(pair):
    groups = {"never": {5}, "rocks": SETS["rocks"]}
    assert 5 not in token_ids(ROLLOUTS)
    found = gradient_shares(*pair, ROLLOUTS, groups, batches=2).gradient().groups["never"]
    assert found.share.values == [0.0, 0.0] and found.norm.values == [0.0, 0.0]
    assert found.cosine.values == [None, None] and found.cosine.mean is None and found.cosine.interval is None


def test_lora_measures_the_adapters_alone(pair):
    torch.manual_seed(0)
    adapters = {"r": 2, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "init_lora_weights": False}
    student = get_peft_model(tiny_gpt2(8, 1), LoraConfig(task_type="CAUSAL_LM", **adapters)).double().eval()
    rows = position_gradients(student, pair[1], ROLLOUTS)
    found = gradient_shares(student, pair[1], ROLLOUTS, SETS, batches=1)
    g_An = group_sums(rows, sets_of(token_ids(ROLLOUTS)), 3)
    np.testing.assert_allclose(found.gradient_gram_NBAA.sum(axis=(0, 1)), g_An @ g_An.T, rtol=1e-9)
    assert found.blocks == [f"layer {layer} {part}" for layer in (0, 1) for part in ("attention", "mlp")]
    assert all("lora_" in name for name in trainable(student))


@pytest.mark.parametrize(
    ("reentrant", "arguments"),
    [
        (False, lambda _: {"use_reentrant": False}),
        (False, checkpointing_kwargs),
        (True, lambda _: {"use_reentrant": True}),
    ],
    ids=["plain", "as in training", "reentrant"],
)
def test_gradient_checkpointing_runs_layers_again_and_changes_nothing(pair, rows_Tn, reentrant, arguments):
    student = tiny_gpt2(8, 1)
    student.gradient_checkpointing_enable(arguments(student))
    if reentrant:
        student.enable_input_require_grads()
    runs = Counter()
    student.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: runs.update(["mlp"]))
    student.transformer.register_forward_hook(lambda *_: runs.update(["trunk"]))
    found = gradient_shares(student, pair[1], ROLLOUTS, SETS, batches=1, tokens_per_forward=10_000)
    g_An = group_sums(rows_Tn, sets_of(token_ids(ROLLOUTS)), 3)
    np.testing.assert_allclose(found.gradient_gram_NBAA.sum(axis=(0, 1)), g_An @ g_An.T, rtol=1e-9)
    assert runs == ({"trunk": 3, "mlp": 6} if reentrant else {"trunk": 1, "mlp": 4})


@pytest.mark.parametrize("reentrant", [None, True])
def test_dropout_is_off_and_the_student_is_left_as_it_was(pair, rows_Tn, reentrant):
    student = tiny_gpt2(8, 1).train()
    if reentrant:
        student.gradient_checkpointing_enable({"use_reentrant": True})
        student.enable_input_require_grads()
    student.transformer.h[1].eval()
    modes = [module.training for module in student.modules()]
    weights = [parameter.detach().clone() for parameter in student.parameters()]
    for parameter in student.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    with torch.no_grad():
        found = gradient_shares(student, pair[1], ROLLOUTS, SETS, batches=1)
    g_An = group_sums(rows_Tn, sets_of(token_ids(ROLLOUTS)), 3)
    np.testing.assert_allclose(found.gradient_gram_NBAA.sum(axis=(0, 1)), g_An @ g_An.T, rtol=1e-9)
    assert [module.training for module in student.modules()] == modes
    for parameter, weight in zip(student.parameters(), weights, strict=True):
        assert torch.equal(parameter, weight)
        assert parameter.grad is not None and bool((parameter.grad == 7).all())


def test_bf16_weights_and_autocast_agree_with_full_precision(pair):
    student, teacher = tiny_gpt2(8, 1), tiny_gpt2(12, 2)
    exact = gradient_shares(student, teacher, ROLLOUTS, SETS, batches=1).gradient()
    dtypes = set()
    for model in (student, teacher):
        model.transformer.h[0].mlp.register_forward_hook(lambda _m, _i, output: dtypes.add(output.dtype))
    runs = {
        "weights": gradient_shares(student.bfloat16(), teacher.bfloat16(), ROLLOUTS, SETS, batches=1).gradient(),
        "autocast": gradient_shares(
            tiny_gpt2(8, 1).float(), teacher.float(), ROLLOUTS, SETS, batches=1, autocast_dtype=torch.bfloat16
        ).gradient(),
    }
    assert dtypes == {torch.bfloat16}
    for found in runs.values():
        assert found.norm.mean == pytest.approx(exact.norm.mean, rel=0.05)
        for name, group in found.groups.items():
            assert group.share.mean == pytest.approx(exact.groups[name].share.mean, abs=0.03)
        assert sum(group.share.mean for group in found.groups.values()) == pytest.approx(1, abs=1e-9)


def test_bf16_gradients_are_added_in_float32(pair):
    objective = Objective(tiny_gpt2(8, 1).bfloat16(), pair[1])
    gradients = group_gradients(objective, ROLLOUTS, np.zeros(N_TOKENS, dtype=np.int64), 1, 1)
    assert {gradient.dtype for gradient in gradients[0] if gradient is not None} == {torch.float32}


def test_batches_are_measured_one_by_one(pair):
    rollouts = make_rollouts(6, seed=8)
    together = gradient_shares(*pair, rollouts, SETS, batches=3)
    done = []
    for batch, indices in enumerate(prompt_batches(rollouts, 3)):
        alone = gradient_shares(*pair, [rollouts[i] for i in indices], SETS, batches=1, on_done=done.append)
        np.testing.assert_allclose(together.gradient_gram_NBAA[batch], alone.gradient_gram_NBAA[0], rtol=1e-9)
    assert done == [2, 2, 2]
    assert [len(own) for own in split_by_rollout(token_ids(rollouts), rollouts)] == [
        len(rollout.token_ids) for rollout in rollouts
    ]


def test_blocks_do_not_depend_on_the_size_of_a_slice(pair, monkeypatch):
    """Parameters here are far smaller than a slice, so it is made small enough to cut them all unevenly."""
    adam = AdamSettings(0.01, 0.9, 0.95, 1e-8, {"lm_head.weight": 0.2}, max_grad_norm=0.1)
    whole = gradient_shares(*pair, ROLLOUTS, SETS, batches=1, adam=adam)
    monkeypatch.setattr("rocktokens.gradients.blocks.SLICE", 7)
    sliced = gradient_shares(*pair, ROLLOUTS, SETS, batches=1, adam=adam)
    np.testing.assert_allclose(sliced.gradient_gram_NBAA, whole.gradient_gram_NBAA, rtol=1e-10, atol=1e-16)
    np.testing.assert_allclose(sliced.step_gram_NBPP, whole.step_gram_NBPP, rtol=1e-10, atol=1e-16)


def test_what_cannot_be_measured_is_refused_in_a_sentence(pair):
    student, teacher = pair
    with pytest.raises(RocktokensError, match="no parameter of the student requires a gradient"):
        gradient_shares(tiny_gpt2(8, 1).requires_grad_(False), teacher, ROLLOUTS, SETS)
    with pytest.raises(RocktokensError, match="optimizer_state is given without adam"):
        gradient_shares(student, teacher, ROLLOUTS, SETS, batches=1, optimizer_state={"x/step": torch.ones(())})
    with pytest.raises(RocktokensError, match="block 'layer 9 mlp' is none of the student's"):
        gradient_shares(student, teacher, ROLLOUTS, SETS, batches=1).gradient("layer 9 mlp")
    with pytest.raises(RocktokensError, match=r"the student is on cpu, the teacher on meta"):
        gradient_shares(student, tiny_gpt2(12, 2).to("meta"), ROLLOUTS, SETS, batches=1)


def test_a_gradient_that_is_not_finite_is_an_error_and_not_a_missing_value(pair):
    student = tiny_gpt2(8, 1)
    student.transformer.h[0].mlp.c_fc.weight.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(NonFiniteLossError, match="the squared norm of the gradient is nan"):
        gradient_shares(student, pair[1], ROLLOUTS, SETS, batches=1)
