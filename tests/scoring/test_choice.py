"""The choice within classes of tokens, and the loss without it, against the divergence between summed distributions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_oracle import DIVERGENCES, T, V, example, heads, oracle_coarse, oracle_divergence, oracle_logits
from torch.utils._python_dispatch import TorchDispatchMode

from rocktokens.classes import TokenClasses
from rocktokens.errors import RocktokensError
from rocktokens.models.head import LMHead
from rocktokens.scoring.divergence import token_scores, weighted_kl

GROUPS = ((3, 17), (0, 28, 9), (5, 11), (7,))
CLASSES = TokenClasses(GROUPS)
WEIGHTS = torch.linspace(0.0, 2.0, T, dtype=torch.float64)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [(torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-6), (torch.bfloat16, 1e-5, 1e-6)],
)
def test_the_choice_is_what_summed_distributions_lack(divergence, temperature, dtype, rtol, atol):
    h_s, w_s, h_t, w_t, ids = example(dtype=dtype)
    scores = token_scores(h_s, w_s, h_t, w_t, ids, divergence, temperature, classes=CLASSES)
    z_s, z_t = oracle_logits(h_s, w_s), oracle_logits(h_t, w_t)
    full = oracle_divergence(z_s, z_t, divergence, temperature)
    decision = oracle_coarse(z_s, z_t, divergence, temperature, GROUPS)
    torch.testing.assert_close(scores.kl_choice.double(), full - decision, rtol=rtol, atol=atol)
    torch.testing.assert_close((scores.kl - scores.kl_choice).double(), decision, rtol=rtol, atol=atol)
    plain = token_scores(h_s, w_s, h_t, w_t, ids, divergence, temperature)
    assert plain.kl_choice is None
    assert all(torch.equal(own, getattr(plain, name)) for name, own in scores.items())


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("plain", [True, False])
def test_loss_and_gradients_are_those_of_the_definition(divergence, lam, plain):
    h_s, w_s, h_t, w_t, ids = example()
    student, teacher = (LMHead(w_s, torch.zeros(V, dtype=torch.float64)), LMHead(w_t)) if plain else heads(w_s, w_t)
    leaves = [leaf.clone().requires_grad_() for leaf in (h_s, student.weight_VD, student.bias_V)]

    def loss_of(h, weight, bias):
        head = LMHead(weight, bias, student.scale, student.softcap)
        arrays = (h, head, h_t, teacher, ids, WEIGHTS, 11.0, divergence, 1.7)
        return weighted_kl(*arrays, tokens_per_chunk=4, classes=CLASSES, lam=lam)[0]

    def naive(h, weight, bias):
        z_s, z_t = oracle_logits(h, LMHead(weight, bias, student.scale, student.softcap)), oracle_logits(h_t, teacher)
        full = oracle_divergence(z_s, z_t, divergence, 1.7)
        decision = oracle_coarse(z_s, z_t, divergence, 1.7, GROUPS)
        return ((decision + lam * (full - decision)) * WEIGHTS).sum() / 11.0

    torch.testing.assert_close(loss_of(*leaves), naive(*leaves), atol=1e-13, rtol=1e-12)
    ours, theirs = (torch.autograd.grad(3.0 * loss(*leaves), leaves) for loss in (loss_of, naive))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-10)
    assert torch.autograd.gradcheck(loss_of, leaves, fast_mode=True)


def test_the_gradient_is_the_closed_form_of_the_method():
    h_s, w_s, h_t, w_t, ids = example()
    log_p, log_q = (torch.log_softmax(h @ w.T / 1.7, -1) for h, w in ((h_s, w_s), (h_t, w_t)))
    b = log_p - log_q
    for group in map(list, GROUPS):
        of_class = log_p[:, group].logsumexp(-1, keepdim=True) - log_q[:, group].logsumexp(-1, keepdim=True)
        b[:, group] = 0.3 * b[:, group] + 0.7 * of_class
    bias = torch.zeros(V, dtype=torch.float64, requires_grad=True)
    for row in (0, 5):
        only = torch.zeros(T)
        only[row] = 1.0
        arrays = (h_s, LMHead(w_s, bias), h_t, w_t, ids, only, 1.0, "reverse", 1.7)
        loss, scores = weighted_kl(*arrays, classes=CLASSES, lam=0.3)
        term = scores.kl[row] - 0.7 * scores.kl_choice[row]
        expected = log_p[row].exp() * (b[row] - term) / 1.7
        torch.testing.assert_close(torch.autograd.grad(loss, bias)[0], expected, atol=1e-15, rtol=1e-10)


def loss_and_gradients(pair, dtype=torch.float64, **options):
    leaves = [x.clone().requires_grad_() for x in pair[:2]]
    loss, scores = weighted_kl(*leaves, *pair[2:], WEIGHTS.to(dtype), 5.0, **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves), *(column for _, column in scores.items())]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{"classes": CLASSES, "lam": 1.0}, {"classes": TokenClasses([[4], [6]])}, {"classes": TokenClasses([])}]
)
def test_lambda_one_and_classes_of_one_are_the_plain_loss_bit_for_bit(divergence, dtype, options):
    pair = example(dtype=dtype)
    plain = loss_and_gradients(pair, dtype, divergence=divergence)
    split = loss_and_gradients(pair, dtype, divergence=divergence, **options)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(plain, split, strict=True))


def test_the_scores_stay_those_of_the_divergence_and_frozen_rows_have_none():
    pair = example()
    _, scores = weighted_kl(*pair, WEIGHTS, 5.0, classes=CLASSES)
    expected = token_scores(*pair, classes=CLASSES)
    for name in (*(name for name, _ in scores.items()), "kl_choice"):
        own = getattr(scores, name)
        assert own[0].isnan()
        torch.testing.assert_close(own[1:], getattr(expected, name)[1:], atol=1e-14, rtol=1e-13)


@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_results_do_not_depend_on_chunks_order_or_micro_batches(lam):
    pair = example()
    options = {"classes": CLASSES, "lam": lam, "divergence": "jsd", "temperature": 1.2}
    whole = loss_and_gradients(pair, **options)
    reordered = TokenClasses([tuple(reversed(group)) for group in reversed(GROUPS)])
    for other in (
        *(loss_and_gradients(pair, **options, tokens_per_chunk=size) for size in (1, 4, 1000)),
        loss_and_gradients(pair, **(options | {"classes": reordered})),
    ):
        for a, b in zip(whole, other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-13, equal_nan=True)
    h_s, w_s, h_t, w_t, ids = pair
    parts = [
        weighted_kl(h_s[part], w_s, h_t[part], w_t, ids[part], WEIGHTS[part], 5.0, **options)[0]
        for part in (slice(0, 2), slice(2, 9), slice(9, T))
    ]
    torch.testing.assert_close(whole[0], torch.stack(parts).sum(), atol=1e-14, rtol=1e-13)


@pytest.mark.parametrize("shift", [-1, 1])
def test_classes_of_the_neighbouring_ids_are_other_classes(shift):
    pair = example()
    shifted = TokenClasses([[(v + shift) % V for v in group] for group in GROUPS])
    own, other = (token_scores(*pair, classes=classes).kl_choice for classes in (CLASSES, shifted))
    assert (own - other).abs().min() > 1e-6


def test_a_loss_without_the_choice_does_not_move_a_choice():
    """Swapping the teacher's logits within classes changes the choice alone, and the coarse loss not at all."""
    h_s, w_s, h_t, w_t, ids = example()
    swapped = w_t.clone()
    swapped[[3, 17]] = w_t[[17, 3]]
    swapped[[0, 28, 9]] = w_t[[28, 9, 0]]
    results = [loss_and_gradients((h_s, w_s, h_t, teacher, ids), classes=CLASSES)[:3] for teacher in (w_t, swapped)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-11)
    choices = [token_scores(h_s, w_s, h_t, teacher, ids, classes=CLASSES).kl_choice for teacher in (w_t, swapped)]
    assert (choices[0] - choices[1]).abs().max() > 0.1


# Any logits at all

SHAPES = ("random", "near", "one-hot", "ties", "huge", "ruled out")


def rows_of(shape, seed, n, width):
    """float32 logits of both models."""
    generator = torch.Generator().manual_seed(seed)
    z_s, z_t = (3 * torch.randn(n, width, generator=generator) for _ in range(2))
    if shape == "near":
        z_t = z_s + 10.0 ** -torch.arange(n)[:, None] * z_t
    if shape == "one-hot":
        z_s[:, seed % width] += 60
    if shape == "ties":
        z_s, z_t = z_s.round(), z_t.round()
    if shape == "huge":
        z_s, z_t = 30 * z_s, 30 * z_t
    if shape == "ruled out" and width > 2:
        z_s[:, seed % width] = z_t[:, seed % width] = -torch.inf
    return z_s, z_t


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=4),
    others=st.integers(0, 40),
    divergence=st.sampled_from(DIVERGENCES),
    shape=st.sampled_from(SHAPES),
)
def test_choice_and_decision_make_up_any_divergence(seed, sizes, others, divergence, shape):
    width = sum(sizes) + others
    order = torch.randperm(width, generator=torch.Generator().manual_seed(seed)).tolist()
    groups = [[order.pop() for _ in range(size)] for size in sizes]
    z_s, z_t = rows_of(shape, seed, 4, width)
    for dtype, rtol, atol in ((torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-6)):
        rows, ids = torch.eye(4, dtype=dtype), torch.zeros(4, dtype=torch.long)
        weights = [z.to(dtype).T.nan_to_num(neginf=0.0) for z in (z_s, z_t)]
        biases = [torch.where(z[0].isinf(), z[0], 0.0).to(dtype) for z in (z_s, z_t)]
        student, teacher = (LMHead(w, b) for w, b in zip(weights, biases, strict=True))
        scores = token_scores(rows, student, rows, teacher, ids, divergence, classes=TokenClasses(groups))
        alive = [v for v in range(width) if z_s[0, v].isfinite()]
        kept = [[alive.index(v) for v in group if v in alive] for group in groups]
        logits = (z_s.double()[:, alive], z_t.double()[:, alive], divergence, 1.0)
        full, decision = oracle_divergence(*logits), oracle_coarse(*logits, [group for group in kept if group])
        if full.isnan().any():  # the oracle's logarithm of a mean that underflows
            return
        assert (scores.kl_choice >= 0).all() and (scores.kl_choice <= scores.kl).all()
        scale = rtol * full.abs() + atol
        assert ((scores.kl_choice.double() - (full - decision)).abs() <= scale).all()
        assert ((scores.kl - scores.kl_choice).double() - decision).abs().le(scale).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("distance", [1e-4, 1e-2])
def test_the_choice_of_nearly_equal_models_keeps_its_digits(divergence, distance):
    generator = torch.Generator().manual_seed(1)
    z_s = 3 * torch.randn(3, 5000, generator=generator)
    z_t = z_s + distance * torch.randn(3, 5000, generator=generator)
    groups = torch.randperm(5000, generator=generator)[:64].view(8, 8).tolist()
    rows, ids = torch.eye(3), torch.zeros(3, dtype=torch.long)
    found = token_scores(rows, z_s.T, rows, z_t.T, ids, divergence, classes=TokenClasses(groups)).kl_choice
    wide = (z_s.double(), z_t.double(), divergence, 1.0)
    expected = oracle_divergence(*wide) - oracle_coarse(*wide, groups)
    torch.testing.assert_close(found.double(), expected, atol=0, rtol=5e-3)
    assert (found >= 0).all()


def test_equal_models_have_no_choice():
    h_s, w_s, _, _, ids = example(dtype=torch.float32)
    scores = token_scores(h_s, w_s, h_s, w_s, ids, classes=CLASSES)
    assert (scores.kl_choice == 0).all()


def test_a_class_that_both_models_rule_out_counts_for_nothing():
    h_s, w_s, h_t, w_t, _ = example()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[[3, 17, 9]] = -torch.inf
    arrays = (h_s.requires_grad_(), LMHead(w_s, bias), h_t, LMHead(w_t, bias), torch.full((T,), 1))
    loss, scores = weighted_kl(*arrays, torch.ones(T), 1.0, classes=CLASSES)
    loss.backward()
    fewer = token_scores(*arrays, classes=TokenClasses([[0, 28], [5, 11]]))
    torch.testing.assert_close(scores.kl_choice, fewer.kl_choice, atol=1e-14, rtol=1e-12)
    assert h_s.grad is not None and h_s.grad.isfinite().all()


def test_scores_without_autograd_leave_nothing_behind_that_training_cannot_use():
    pair, classes = example(seed=8), TokenClasses([[1, 2, 3], [20, 4]])
    with torch.inference_mode():
        alone = token_scores(*pair, classes=classes).kl_choice
    loss, scores = weighted_kl(pair[0].requires_grad_(), *pair[1:], torch.ones(T), 1.0, classes=classes)
    loss.backward()
    assert torch.equal(scores.kl_choice, alone.clone())


def test_autocast_does_not_narrow_the_choice():
    pair = example(dtype=torch.float32)
    plain = loss_and_gradients(pair, torch.float32, classes=CLASSES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = loss_and_gradients(pair, torch.float32, classes=CLASSES)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(plain, cast, strict=True))


class LargestTensor(TorchDispatchMode):
    """Counts tensors as large as the logits of a chunk."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.count, self.larger = elements, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and not any(tensor is each for each in args):
                self.count += tensor.numel() == self.elements
                self.larger += tensor.numel() > self.elements
        return result


def test_classes_make_no_other_tensor_as_large_as_the_logits():
    h_s, w_s, h_t, w_t, ids = example(n=40, v_student=500, v_teacher=500)
    counts = []
    for options in ({}, {"classes": TokenClasses([range(10, 18), range(30, 38)])}):
        leaves = [x.clone().requires_grad_() for x in (h_s, w_s)]
        with LargestTensor(8 * 500) as seen:
            weighted_kl(*leaves, h_t, w_t, ids, torch.ones(40), 40.0, tokens_per_chunk=8, **options)[0].backward()
        assert not seen.larger
        counts.append(seen.count)
    assert counts[0] == counts[1]


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": TokenClasses([[1, V]])}, rf"token id {V} of the classes is outside the {V} logits"),
        ({"classes": CLASSES, "lam": -0.5}, "lam is -0.5: it must be 0, which leaves the choice out, or a positive"),
        ({"classes": CLASSES, "lam": float("nan")}, "lam is nan"),
        ({"classes": CLASSES, "term": "asymmetric"}, "term is 'asymmetric' and classes are given.*leave out one"),
    ],
)
def test_what_has_no_meaning_is_refused(options, message):
    with pytest.raises(RocktokensError, match=message):
        weighted_kl(*example(), torch.ones(T), 1.0, **options)


def test_the_common_width_bounds_the_ids():
    pair = example(v_teacher=V + 6)
    with pytest.raises(RocktokensError, match=rf"token id {V + 2} of the classes is outside the {V} logits"):
        token_scores(*pair, classes=TokenClasses([[1, V + 2]]))
