"""Classes of tokens on the fused path, on a GPU or, with TRITON_INTERPRET=1, on the CPU; run by test_fused.py."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fused_cases import assert_all_close, chunks_of, fused_path, on_device, on_gpu  # noqa: F401
from pair_oracle import T, V, example, heads, oracle_coarse, oracle_divergence
from row_cases import DEVICE, HALVES, WIDTH, adversarial, assert_gradient, logits

from rocktokens.classes import TokenClasses
from rocktokens.models.head import LMHead
from rocktokens.scoring import fused, fused_choice
from rocktokens.scoring.divergence import token_scores, weighted_kl

GROUPS = ((3, 17), (0, 28, 9), (5, 11), (7,), (12, 13, 14, 15, 16))
CLASSES = TokenClasses(GROUPS)


def loss_and_gradients(pair, head, teacher, weights, temperature=1.7, **options):
    h_s, _, h_t, _, ids = pair
    leaves = [x.detach().clone().requires_grad_() for x in (h_s, head.weight_VD, head.bias_V) if x is not None]
    student = replace(head, weight_VD=leaves[1], bias_V=leaves[2] if len(leaves) > 2 else None)
    loss, scores = weighted_kl(leaves[0], student, h_t, teacher, ids, weights, 11.0, "reverse", temperature, **options)
    return [loss, *torch.autograd.grad(3.0 * loss, leaves), *(column for _, column in scores.present())]


def wide_of(head):
    bias_V = None if head.bias_V is None else head.bias_V.double().cpu()
    return replace(head, weight_VD=head.weight_VD.double().cpu(), bias_V=bias_V)


@pytest.mark.parametrize(
    ("lam", "plain", "widths"),
    [(0.0, True, (V, V)), (0.0, False, (V, V)), (0.3, True, (V + 6, V)), (0.3, False, (V, V)), (1.0, False, (V, V))],
)
def test_the_public_functions_agree_with_the_torch_path(fused_path, monkeypatch, lam, plain, widths):  # noqa: F811
    pair, wide = on_device(example(v_student=widths[0], v_teacher=widths[1]))
    weights = torch.linspace(0, 2, T).where(torch.arange(T) % 3 > 0, 0.0)
    chunks_of(monkeypatch, 4, V)
    head_s, head_t = (LMHead(pair[1]), LMHead(pair[3])) if plain else heads(pair[1], pair[3])
    if not plain:
        head_s, head_t = (replace(head, bias_V=head.bias_V.to(DEVICE)) for head in (head_s, head_t))
    options = {"classes": CLASSES, "lam": lam}
    ours = loss_and_gradients(pair, head_s, head_t, weights, **options)
    alone = token_scores(pair[0], head_s, pair[2], head_t, pair[4], "reverse", 1.7, classes=CLASSES)
    monkeypatch.setattr(fused, "takes", lambda *_: False)
    theirs = loss_and_gradients(wide, wide_of(head_s), wide_of(head_t), weights, **options)
    assert_all_close(ours, theirs, rtol=2e-5, atol=2e-6)
    reference = token_scores(
        wide[0], wide_of(head_s), wide[2], wide_of(head_t), wide[4], temperature=1.7, classes=CLASSES
    )
    assert_all_close((c for _, c in alone.present()), (c for _, c in reference.present()), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("classes", [CLASSES, TokenClasses([[4], [6]]), TokenClasses([])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lambda_one_and_classes_of_one_are_the_plain_loss_bit_for_bit(fused_path, classes, dtype):  # noqa: F811
    pair, _ = on_device(example(), dtype)
    heads_ = LMHead(pair[1]), LMHead(pair[3])
    plain = loss_and_gradients(pair, *heads_, torch.ones(T))
    split = loss_and_gradients(pair, *heads_, torch.ones(T), classes=classes, lam=1.0 if classes is CLASSES else 0.0)
    assert all(torch.equal(a, b) for a, b in zip(plain, split[: len(plain)], strict=True))
    assert (split[-1] > 0).all() == (classes is CLASSES)


def test_results_do_not_depend_on_the_chunks(fused_path, monkeypatch):  # noqa: F811
    pair, _ = on_device(example())
    results = []
    for rows in (1, 4, 1000):
        chunks_of(monkeypatch, rows, V)
        results.append(loss_and_gradients(pair, LMHead(pair[1]), LMHead(pair[3]), torch.ones(T), classes=CLASSES))
    for other in results[1:]:
        assert_all_close(results[0], other, rtol=1e-5, atol=1e-7)


# Rows, against float64 on the same logits


def scored(z_s, z_t, ids, classes, lam, temperature=1.0, round_logits=True):
    """kl, choice, what is minimised and its gradient (n, V) of exactly these logits, in float64 on the CPU."""
    eye = torch.eye(len(z_s), dtype=z_s.dtype, device=DEVICE)
    weight = z_s.T.contiguous().to(DEVICE).requires_grad_()
    teacher = LMHead(z_t.T.contiguous().to(DEVICE))
    choice = fused_choice.FusedChoice(classes, lam, torch.device(DEVICE))
    arrays = (eye, weight, None, LMHead(weight), eye, teacher, ids.to(DEVICE), torch.ones(len(z_s), device=DEVICE))
    options = {"choice": choice, "round_logits": round_logits}
    total, table = fused.weighted_sum(*arrays, "reverse", temperature, **options)
    (gradient,) = torch.autograd.grad(total, weight)
    alone = fused.scored(eye, LMHead(weight), eye, teacher, ids.to(DEVICE), "reverse", temperature, **options)
    assert torch.equal(alone, table)
    table = table.double().cpu()
    return table[0], table[7], table[fused.TERM], gradient.T.double().cpu()


def expected(z_s, z_t, groups, lam, temperature=1.0):
    z = z_s.double().requires_grad_()
    full = oracle_divergence(z, z_t.double(), "reverse", temperature)
    decision = oracle_coarse(z, z_t.double(), "reverse", temperature, groups)
    term = decision + lam * (full - decision)
    (gradient,) = torch.autograd.grad(term.sum(), z)
    return full.detach(), (full - decision).detach(), term.detach(), gradient


def groups_of(seed, sizes, width=WIDTH):
    order = torch.randperm(width, generator=torch.Generator().manual_seed(seed)).tolist()
    return [[order.pop() for _ in range(size)] for size in sizes]


@pytest.mark.parametrize(("dtype", "lam"), [(torch.float32, 0.0), *((half, 0.3) for half in HALVES)])
@pytest.mark.parametrize("sizes", [(8,) * 64, (1, 2, 3, 5, 16, 70)])
def test_choice_and_gradient_on_the_same_logits(dtype, lam, sizes):
    z_s, z_t, ids = logits(0, 3)
    z_s, z_t, groups = z_s.to(dtype), z_t.to(dtype), groups_of(1, sizes)
    ids[0] = groups[-1][1]  # the sampled token is a member
    wanted = expected(z_s, z_t, groups, lam, 1.3)
    for round_logits in (True, False):
        found = scored(z_s, z_t, ids, TokenClasses(groups), lam, 1.3, round_logits)
        for ours, theirs in zip(found[:3], wanted[:3], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert_gradient(found[3], wanted[3], dtype)


def test_adversarial_rows():
    rows = adversarial()
    z_s, z_t = (torch.stack([row[side] for row in rows.values()]) for side in (0, 1))
    ids = torch.tensor([row[2] for row in rows.values()])
    likely = [sorted({int(v) for z in (z_s, z_t) for v in z[index].topk(3).indices}) for index in (0, 4, 5)]
    groups, taken = [], set()
    for group in (*likely, [7, 8, 9], *groups_of(2, (4,) * 20)):
        groups.append([v for v in group if v not in taken])
        taken |= set(group)
    groups = [group for group in groups if group]
    for lam in (0.0, 0.3):
        found, wanted = scored(z_s, z_t, ids, TokenClasses(groups), lam), expected(z_s, z_t, groups, lam)
        for index, name in enumerate(rows):
            kl, choice = (float(part[index]) for part in wanted[:2])
            assert 0 <= found[1][index] <= found[0][index], name
            assert abs(float(found[1][index]) - choice) <= 1e-5 * kl + 1e-6, name
            assert abs(float(found[2][index] - wanted[2][index])) <= 1e-5 * kl + 1e-6, name
            gap, largest = (found[3][index] - wanted[3][index]).abs().max(), wanted[3][index].abs().max()
            # where λ is not 0, two log-ratios as large as kl cancel, each rounded once
            assert gap <= 1e-5 * largest + (2e-7 * (1 + kl) if lam else 1e-7), name


@pytest.mark.parametrize("distance", [1e-4, 1e-2])
@pytest.mark.parametrize("shift", [0.0, 7.0])
def test_the_choice_of_nearly_equal_models_keeps_its_digits(distance, shift):
    z_s, z_t, ids = logits(3, 4)
    z_t = z_s + distance * z_t + shift
    groups = groups_of(4, (8,) * 16)
    found, wanted = scored(z_s, z_t, ids, TokenClasses(groups), 0.0), expected(z_s, z_t, groups, 0.0)
    assert (found[1] >= 0).all()
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-13)
    largest = wanted[3].abs().amax(-1, keepdim=True)
    assert ((found[3] - wanted[3]).abs() <= 1e-4 * largest + 1e-9).all()


def test_members_that_are_ruled_out():
    z_s, z_t, ids = logits(5, 4)
    groups = [[10, 11, 12], [20, 21], [30, 31, 32, 33]]
    ids = ids.clamp(min=100)
    z_s[:, [10, 20, 21]], z_t[:, [10, 20, 21]] = -torch.inf, -torch.inf
    z_s[:, 30] = -torch.inf  # by the student alone
    alive = [v for v in range(WIDTH) if v not in (10, 20, 21)]
    index = {v: place for place, v in enumerate(alive)}
    kept = [[index[v] for v in group if v in index] for group in groups if any(v in index for v in group)]
    bias = torch.zeros(WIDTH, device=DEVICE)
    bias[[10, 20, 21]] = -torch.inf
    student_bias = bias.clone()
    student_bias[30] = -torch.inf
    eye = torch.eye(4, device=DEVICE)
    weights = [z.T.nan_to_num(neginf=0.0).contiguous().to(DEVICE) for z in (z_s, z_t)]
    student, teacher = LMHead(weights[0].requires_grad_(), student_bias), LMHead(weights[1], bias)
    choice = fused_choice.FusedChoice(TokenClasses(groups), 0.0, torch.device(DEVICE))
    arrays = (eye, weights[0], None, student, eye, teacher, ids.to(DEVICE), torch.ones(4, device=DEVICE))
    total, table = fused.weighted_sum(*arrays, "reverse", 1.0, choice=choice)
    (gradient,) = torch.autograd.grad(total, weights[0])
    very_low = z_s[:, alive].double().nan_to_num(neginf=-700.0)
    wanted = expected(very_low, z_t[:, alive], kept, 0.0)
    torch.testing.assert_close(table[7].double().cpu(), wanted[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.T[:, alive].double().cpu(), wanted[3], rtol=1e-4, atol=1e-6)


def test_a_class_too_large_for_a_program_is_left_to_the_torch_path(fused_path):  # noqa: F811
    width = fused_choice.LARGEST + 60
    pair, wide = on_device(example(n=3, v_student=width, v_teacher=width))
    classes = TokenClasses([range(fused_choice.LARGEST + 1)])
    assert not fused_choice.takes(classes) and fused_choice.takes(TokenClasses([range(fused_choice.LARGEST)]))
    found, reference = (token_scores(*own, classes=classes).kl_choice for own in (pair, wide))
    torch.testing.assert_close(found.double().cpu(), reference, rtol=1e-5, atol=1e-6)


def test_the_benchmark_measures_what_it_says(fused_path, monkeypatch):  # noqa: F811
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    kernel = importlib.import_module("kernel")
    assert kernel.random_classes(151_936).groups == sorted(kernel.random_classes(151_936).groups)
    assert [len(group) for group in kernel.random_classes(151_936).groups] == [8] * 64
    (h_s, w_s, h_t, w_t, ids), _ = on_device(example())
    problem = kernel.Problem(h_s.requires_grad_(), w_s.requires_grad_(), h_t, w_t, ids, torch.ones(T))
    classes = kernel.random_classes(V, 3, 4)
    plain, split = (kernel.ours(problem, torch.ones(T), False, own) for own in (None, classes))
    reference, _ = weighted_kl(h_s, w_s, h_t, w_t, ids, torch.ones(T), float(T), classes=classes)
    for own, other, expected_ in zip(split, plain, torch.autograd.grad(reference, (h_s, w_s)), strict=True):
        assert torch.equal(own, expected_) and not torch.allclose(own, other)
    monkeypatch.setattr(kernel, "random_classes", lambda width: classes)
    for side in kernel.class_sides(problem):
        side.make()()


@on_gpu
def test_classes_do_not_make_the_host_wait():
    pair, _ = on_device(example(), torch.bfloat16)
    leaves = [x.requires_grad_() for x in pair[:2]]
    arrays = (*leaves, *pair[2:4], pair[4].cpu(), torch.ones(T), 3.0)
    options = {"classes": CLASSES, "defer_checks": True}
    weighted_kl(*arrays, **options)[0].backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        weighted_kl(*arrays, **options)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
