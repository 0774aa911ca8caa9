import itertools
import math

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_oracle import DIVERGENCES, D, T, V, example, heads, oracle_divergence, oracle_logits
from torch.utils._python_dispatch import TorchDispatchMode

from rocktokens.errors import NonFiniteLossError, RocktokensError
from rocktokens.models.head import LMHead
from rocktokens.scoring.divergence import token_scores, top_overlap, weighted_kl

COLUMNS = ("kl", "logp_student", "logp_teacher", "entropy_student", "entropy_teacher", "grad_norm")


def oracle(h_s, w_s, h_t, w_t, ids, divergence="reverse", temperature=1.0):
    """Every column by its definition, the gradient by autograd through it."""
    z_s, z_t = oracle_logits(h_s, w_s).detach().requires_grad_(), oracle_logits(h_t, w_t).detach()
    kl = oracle_divergence(z_s, z_t, divergence, temperature)
    (gradient,) = torch.autograd.grad(kl.sum(), z_s)
    width = min(z_s.shape[-1], z_t.shape[-1])
    p, q = (torch.softmax(z[..., :width] / temperature, -1).detach() for z in (z_s, z_t))
    rows = torch.arange(len(ids))
    return dict(
        zip(
            COLUMNS,
            (
                kl.detach(),
                p[rows, ids].log(),
                q[rows, ids].log(),
                -(p * p.log()).sum(-1),
                -(q * q.log()).sum(-1),
                gradient.norm(dim=-1),
            ),
            strict=True,
        )
    )


def assert_columns(scores, expected, **tolerance):
    for name, column in scores.items():
        torch.testing.assert_close(column.double(), expected[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)]
)
def test_every_column_is_its_definition(divergence, temperature, dtype, tolerance):
    pair = example(dtype=dtype)
    scores = token_scores(*pair, divergence=divergence, temperature=temperature)
    assert_columns(scores, oracle(*pair, divergence, temperature), atol=tolerance, rtol=tolerance)
    assert scores.kl.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_bias_scale_and_softcap_are_part_of_the_logits(divergence):
    h_s, w_s, h_t, w_t, ids = example()
    head_s, head_t = heads(w_s, w_t)
    for student, teacher in itertools.permutations([head_s, LMHead(head_t.weight_VD.new_ones(V, D), softcap=2.0)], 2):
        scores = token_scores(h_s, student, h_s, teacher, ids, divergence, 1.3)
        assert_columns(scores, oracle(h_s, student, h_s, teacher, ids, divergence, 1.3), atol=1e-12, rtol=1e-12)
    scores = token_scores(h_s, head_s, h_t, head_t, ids, divergence)
    assert_columns(scores, oracle(h_s, head_s, h_t, head_t, ids, divergence), atol=1e-12, rtol=1e-12)


def test_grad_norm_is_the_formula_of_the_method():
    h_s, w_s, h_t, w_t, ids = example()
    log_p, log_q = (torch.log_softmax(h @ w.T, -1) for h, w in ((h_s, w_s), (h_t, w_t)))
    scores = token_scores(h_s, w_s, h_t, w_t, ids)
    g = log_p.exp() * (log_p - log_q - scores.kl[:, None])
    torch.testing.assert_close(scores.grad_norm, g.norm(dim=-1), atol=1e-13, rtol=0)


def test_log_probabilities_belong_to_the_predicted_token():
    pair = example(seed=3)
    scores = token_scores(*pair)
    for shift in (-1, 1):
        shifted = oracle(*pair[:4], torch.roll(pair[4], shift))
        with pytest.raises(AssertionError):
            assert_columns(scores, shifted, atol=1e-2, rtol=1e-2)


def scores_of_logits(z_s, z_t, divergence):
    """Scores of a pair with exactly these logits, in their dtype: the states are the rows of the identity."""
    rows = torch.eye(len(z_s), dtype=z_s.dtype)
    return token_scores(rows, z_s.T, rows, z_t.T, torch.zeros(len(z_s), dtype=torch.long), divergence)


def nearby_logits(seed, n, width, distance):
    """float32 logits of a student, and of a teacher as far away as that."""
    generator = torch.Generator().manual_seed(seed)
    z_s = 3 * torch.randn(n, width, generator=generator)
    return z_s, z_s + distance * torch.randn(n, width, generator=generator)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_equal_models_have_no_divergence(divergence):
    z, _ = nearby_logits(seed=0, n=3, width=50_000, distance=0.0)
    scores = scores_of_logits(z, z, divergence)
    assert (scores.kl >= 0).all() and (scores.kl <= 1e-12).all()
    assert (scores.grad_norm <= 1e-7).all()
    if divergence != "jsd":
        assert (scores.kl == 0).all() and (scores.grad_norm == 0).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("distance", [1e-6, 1e-5, 1e-4, 1e-3])
def test_the_divergence_of_nearly_equal_models_keeps_its_digits(divergence, distance):
    z_s, z_t = nearby_logits(seed=1, n=3, width=50_000, distance=distance)
    kl = scores_of_logits(z_s, z_t, divergence).kl
    expected = oracle_divergence(z_s.double(), z_t.double(), divergence, 1.0)
    assert (kl >= 0).all()
    torch.testing.assert_close(kl.double(), expected, atol=1e-10, rtol=0)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    width=st.integers(1, 300),
    distance=st.floats(-8, 2).map(lambda exponent: 10**exponent),
    divergence=st.sampled_from(DIVERGENCES),
)
@hypothesis.example(seed=27, width=232, distance=100.0, divergence="reverse")
def test_no_divergence_is_negative_at_any_distance(seed, width, distance, divergence):
    z_s, z_t = nearby_logits(seed, 4, width, distance)
    kl = scores_of_logits(z_s, z_t, divergence).kl
    assert (kl >= 0).all()
    expected = oracle_divergence(z_s.double(), z_t.double(), divergence, 1.0)
    torch.testing.assert_close(kl.double(), expected, atol=1e-10 + 1e-6 * min(distance, 1), rtol=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("widths", [(V, V + 6), (V + 6, V)])
def test_columns_that_one_head_lacks_are_in_no_softmax(divergence, widths):
    h_s, w_s, h_t, w_t, ids = example(v_student=widths[0], v_teacher=widths[1])
    ids = ids.clamp(max=V - 1)
    w_s.requires_grad_()
    weights = torch.rand(T, dtype=torch.float64)
    loss, scores = weighted_kl(h_s, w_s, h_t, w_t, ids, weights, 9.0, divergence)
    expected = oracle(h_s, w_s[:V], h_t, w_t[:V], ids, divergence)
    assert_columns(scores, expected, atol=1e-12, rtol=1e-12)
    loss.backward()
    assert w_s.grad is not None and (w_s.grad[V:] == 0).all() and (w_s.grad[:V] != 0).all()


def test_results_do_not_depend_on_the_chunk_size():
    h_s, w_s, h_t, w_t, ids = example()
    weights = torch.rand(T, dtype=torch.float64)
    results = []
    for size in (1, 4, T, 1000):
        leaves = [h_s.clone().requires_grad_(), w_s.clone().requires_grad_()]
        loss, scores = weighted_kl(*leaves, h_t, w_t, ids, weights, 5.0, "jsd", 1.2, tokens_per_chunk=size)
        loss.backward()
        alone = token_scores(h_s, w_s, h_t, w_t, ids, "jsd", 1.2, tokens_per_chunk=size)
        results.append(
            [loss, *(leaf.grad for leaf in leaves), *(c for _, c in scores.items()), *(c for _, c in alone.items())]
        )
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("plain", [True, False])
def test_gradients_are_those_of_the_definition(divergence, plain):
    h_s, w_s, h_t, w_t, ids = example()
    student, teacher = (LMHead(w_s, torch.zeros(V, dtype=torch.float64)), LMHead(w_t)) if plain else heads(w_s, w_t)
    weights = torch.linspace(0.1, 2.0, T, dtype=torch.float64)
    leaves = [leaf.clone().requires_grad_() for leaf in (h_s, student.weight_VD, student.bias_V)]

    def loss_of(h, weight, bias):
        head = LMHead(weight, bias, student.scale, student.softcap)
        return weighted_kl(h, head, h_t, teacher, ids, weights, 11.0, divergence, 1.7, tokens_per_chunk=4)[0]

    def naive(h, weight, bias):
        z_s = oracle_logits(h, LMHead(weight, bias, student.scale, student.softcap))
        return (oracle_divergence(z_s, oracle_logits(h_t, teacher), divergence, 1.7) * weights).sum() / 11.0

    torch.testing.assert_close(loss_of(*leaves), naive(*leaves), atol=1e-13, rtol=1e-12)
    ours = torch.autograd.grad(3.0 * loss_of(*leaves), leaves)
    theirs = torch.autograd.grad(3.0 * naive(*leaves), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-10)
    assert torch.autograd.gradcheck(loss_of, leaves, fast_mode=True)


def test_bfloat16_gradients_match_the_widened_ones():
    h_s, w_s, h_t, w_t, ids = example(dtype=torch.bfloat16)
    weights = torch.rand(T)
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [leaf.detach().to(dtype).clone().requires_grad_() for leaf in (h_s, w_s)]
        loss, _ = weighted_kl(*leaves, h_t.to(dtype), w_t.to(dtype), ids, weights, 4.0)
        loss.backward()
        gradients.append([leaf.grad for leaf in leaves])
    for narrow, wide in zip(*gradients, strict=True):
        assert narrow.dtype == torch.bfloat16
        torch.testing.assert_close(narrow.double(), wide, atol=1e-5, rtol=2**-7)


def test_autocast_does_not_narrow_the_logits_on_cpu():
    pair = example(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = token_scores(*pair)
    assert_columns(scores, oracle(*pair), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("autocast", [False, True])
def test_half_width_on_a_gpu_agrees_with_the_definition(autocast):
    pair = example(dtype=torch.bfloat16, n=64)
    h_s, w_s, h_t, w_t = (x.to("cuda", torch.float32 if autocast else torch.bfloat16) for x in pair[:4])
    leaves = [h_s.requires_grad_(), w_s.requires_grad_()]
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss, scores = weighted_kl(h_s, w_s, h_t, w_t, pair[4].cuda(), torch.ones(64), 1.0, tokens_per_chunk=16)
    cpu = {name: column.cpu() for name, column in scores.items()}
    assert_columns(type(scores)(**cpu), oracle(*pair), atol=1e-4, rtol=1e-4)
    naive_leaves = [x.double().cpu().detach().requires_grad_() for x in leaves]
    naive = oracle_divergence(naive_leaves[0] @ naive_leaves[1].T, oracle_logits(*pair[2:4]), "reverse", 1.0).sum()
    ours, theirs = torch.autograd.grad(loss, leaves), torch.autograd.grad(naive, naive_leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double().cpu(), b, atol=2**-7 * b.abs().max().item(), rtol=2**-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_rows_of_weight_zero_get_exactly_nothing_and_change_nothing(divergence):
    h_s, w_s, h_t, w_t, ids = example()
    kept = torch.arange(T) % 3 != 0
    weights = torch.where(kept, torch.linspace(0.5, 1.5, T, dtype=torch.float64), 0.0)
    leaves = [h_s.requires_grad_(), w_s.requires_grad_()]
    loss, scores = weighted_kl(h_s, w_s, h_t, w_t, ids, weights, float(T), divergence)
    naive = (oracle_divergence(h_s @ w_s.T, h_t @ w_t.T, divergence, 1.0) * weights).sum() / T
    torch.testing.assert_close(loss, naive, atol=1e-13, rtol=1e-12)
    ours, theirs = torch.autograd.grad(loss, leaves), torch.autograd.grad(naive, leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-10)
    assert (ours[0][~kept] == 0).all() and (ours[0][kept] != 0).any(dim=-1).all()
    for _, column in scores.items():
        assert column[~kept].isnan().all() and column[kept].isfinite().all()


def test_rows_of_weight_zero_never_reach_a_head():
    h_s, w_s, h_t, w_t, ids = example()
    h_s[4], h_t[5] = torch.nan, torch.nan
    weights = torch.ones(T, dtype=torch.float64)
    weights[4:6] = 0
    loss, _ = weighted_kl(h_s.requires_grad_(), w_s, h_t, w_t, ids, weights, 2.0)
    loss.backward()
    assert loss.isfinite() and h_s.grad is not None and (h_s.grad[4:6] == 0).all()


@pytest.mark.parametrize("denominator", [0.0, 7.0])
def test_all_weights_zero_is_a_zero_that_still_has_gradients(denominator):
    h_s, w_s, h_t, w_t, ids = example(dtype=torch.float32)
    loss, scores = weighted_kl(h_s.requires_grad_(), w_s.requires_grad_(), h_t, w_t, ids, torch.zeros(T), denominator)
    loss.backward()
    assert loss.item() == 0.0
    assert h_s.grad is not None and (h_s.grad == 0).all() and w_s.grad is not None and (w_s.grad == 0).all()
    assert scores.kl.isnan().all()


def test_micro_batches_of_one_update_add_up():
    h_s, w_s, h_t, w_t, ids = example()
    weights = torch.linspace(0, 1, T, dtype=torch.float64)
    w_s.requires_grad_()
    whole, _ = weighted_kl(h_s, w_s, h_t, w_t, ids, weights, float(T))
    parts = [
        weighted_kl(h_s[part], w_s, h_t[part], w_t, ids[part], weights[part], float(T))[0]
        for part in (slice(0, 2), slice(2, 9), slice(9, T))
    ]
    torch.testing.assert_close(whole, torch.stack(parts).sum(), atol=1e-14, rtol=1e-13)
    gradients = [torch.autograd.grad(loss, w_s)[0] for loss in (whole, torch.stack(parts).sum())]
    torch.testing.assert_close(*gradients, atol=1e-14, rtol=1e-12)


def test_only_the_student_gets_a_gradient():
    h_s, w_s, h_t, w_t, ids = example()
    weights = torch.ones(T, dtype=torch.float64, requires_grad=True)
    for leaf in (h_s, h_t, w_t):
        leaf.requires_grad_()
    loss, scores = weighted_kl(h_s, w_s, h_t, w_t, ids, weights, 1.0)
    loss.backward()
    assert h_s.grad is not None
    assert w_s.grad is None and h_t.grad is None and w_t.grad is None and weights.grad is None
    assert not any(column.requires_grad for _, column in scores.items())


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_the_logits_of_all_positions_never_exist_at_once():
    h_s, w_s, h_t, w_t, ids = example(n=200, v_student=500, v_teacher=500)
    h_s.requires_grad_(), w_s.requires_grad_()
    with LargestTensor() as largest:
        loss, _ = weighted_kl(h_s, w_s, h_t, w_t, ids, torch.ones(200), 200.0, tokens_per_chunk=8)
        loss.backward()
        token_scores(h_s, w_s, h_t, w_t, ids, tokens_per_chunk=8)
        top_overlap(h_s, w_s, h_t, w_t, tokens_per_chunk=8)
    assert largest.elements == 8 * 500
    with LargestTensor() as largest:
        token_scores(h_s, w_s, h_t, w_t, ids)
    assert largest.elements == 200 * 500


def test_a_token_outside_the_common_width_is_named():
    h_s, w_s, h_t, w_t, ids = example(v_teacher=V + 4)
    for bad in (V, -1):
        ids[6] = bad
        with pytest.raises(RocktokensError, match=rf"token id {bad} is outside the {V} logits"):
            token_scores(h_s, w_s, h_t, w_t, ids)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_narrow_ids_are_those_of_a_wide_vocabulary(dtype):
    h_s, w_s, h_t, w_t, ids = example(v_student=300, v_teacher=300)
    narrow = token_scores(h_s, w_s, h_t, w_t, ids.clamp(max=255).to(dtype))
    wide = token_scores(h_s, w_s, h_t, w_t, ids.clamp(max=255))
    assert torch.equal(narrow.logp_student, wide.logp_student)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_model_is_named_with_its_row(value):
    for model, broken in (("student", 0), ("teacher", 2)):
        pair = example()
        pair[broken][9, 0] = value
        with pytest.raises(NonFiniteLossError, match=f"the {model}'s logits at row 9"):
            token_scores(*pair, tokens_per_chunk=4)
        weights = torch.ones(T)
        weights[:5] = 0
        with pytest.raises(NonFiniteLossError, match=f"the {model}'s logits at row 9"):
            weighted_kl(*pair, weights, 1.0)


def with_bias(weight, index, value):
    bias = torch.zeros(len(weight), dtype=weight.dtype)
    bias[index] = value
    return LMHead(weight, bias)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_token_that_both_models_rule_out_counts_for_nothing(divergence):
    h_s, w_s, h_t, w_t, ids = example()
    ids = ids.clamp(min=1)
    weights = torch.ones(T, dtype=torch.float64)
    student, teacher = with_bias(w_s, 0, -math.inf), with_bias(w_t, 0, -math.inf)
    h_s.requires_grad_()
    loss, scores = weighted_kl(h_s, student, h_t, teacher, ids, weights, 1.0, divergence)
    assert_columns(scores, oracle(h_s, w_s[1:], h_t, w_t[1:], ids - 1, divergence), atol=1e-12, rtol=1e-12)
    loss.backward()
    assert h_s.grad is not None and h_s.grad.isfinite().all()


def test_a_model_that_rules_out_every_token_is_named():
    h_s, w_s, h_t, w_t, ids = example()
    with pytest.raises(NonFiniteLossError, match="the teacher's logits at row 0"):
        token_scores(h_s, w_s, h_t, with_bias(w_t, slice(None), -math.inf), ids)


def test_an_infinite_divergence_is_an_error_except_for_jsd():
    h_s, w_s, h_t, w_t, ids = example()
    ids = ids.clamp(min=1)
    ruled_out = with_bias(w_s, 0, -math.inf), with_bias(w_t, 0, -math.inf)
    with pytest.raises(NonFiniteLossError, match="row 0 is infinite"):
        token_scores(h_s, w_s, h_t, ruled_out[1], ids, "reverse")
    with pytest.raises(NonFiniteLossError, match="row 0 is infinite"):
        token_scores(h_s, ruled_out[0], h_t, w_t, ids, "forward")
    for pair in ((h_s, w_s, h_t, ruled_out[1]), (h_s, ruled_out[0], h_t, w_t)):
        kl = token_scores(*pair, ids, "jsd").kl
        assert (kl > 0).all() and (kl <= math.log(2)).all()
    assert token_scores(h_s, ruled_out[0], h_t, w_t, ids, "reverse").kl.isfinite().all()


def test_a_vanishing_student_probability_still_makes_the_divergence_infinite():
    h_s, w_s, h_t, w_t, ids = example(dtype=torch.float32)
    with pytest.raises(NonFiniteLossError, match="infinite"):
        token_scores(h_s, with_bias(w_s, 0, -500.0), h_t, with_bias(w_t, 0, -math.inf), ids.clamp(min=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"divergence": "kl"}, "divergence is 'kl'"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"weights_T": torch.ones(T - 1)}, f"weights_T has {T - 1} entries for {T}"),
        ({"weights_T": torch.full((T,), math.nan)}, "NaN or infinite weights"),
        ({"denominator": 0.0}, "denominator is 0.0"),
        ({"token_ids_T": torch.zeros(3, dtype=torch.long)}, "token_ids_T 3"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change, message):
    names = ("h_s_TD", "w_s_VD", "h_t_TE", "w_t_VE", "token_ids_T")
    arguments = dict(zip(names, example(), strict=True)) | {"weights_T": torch.ones(T), "denominator": 1.0}
    with pytest.raises(RocktokensError, match=message):
        weighted_kl(**(arguments | change))


def test_top_overlap_counts_shared_candidates_and_their_mass():
    h_s, w_s, h_t, w_t, _ = example()
    for k in (1, 4, V + 10):
        share, mass = top_overlap(h_s, w_s, h_t, w_t, k=k, tokens_per_chunk=5)
        p, q = torch.softmax(h_s @ w_s.T, -1), torch.softmax(h_t @ w_t.T, -1)
        for t in range(T):
            shared = set(p[t].argsort(descending=True)[:k].tolist()) & set(q[t].argsort(descending=True)[:k].tolist())
            assert share[t].item() == pytest.approx(len(shared) / min(k, V))
            assert mass[t].item() == pytest.approx(sum(p[t, v].item() for v in shared), abs=1e-12)
    assert [x.shape for x in top_overlap(h_s[:0], w_s, h_t[:0], w_t)] == [(0,), (0,)]
