"""The asymmetric term: reverse KL at tokens the student underrates, forward KL elsewhere."""

import math

import pytest
import torch
from pair_oracle import DIVERGENCES, T, V, example, heads, oracle_divergence, oracle_logits

from rocktokens.errors import NonFiniteLossError, RocktokensError
from rocktokens.models.head import LMHead
from rocktokens.scoring.divergence import token_scores, weighted_kl

WEIGHTS = torch.linspace(0.0, 2.0, T, dtype=torch.float64)


def naive_terms(z_s: torch.Tensor, z_t: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """One row after the other, by the definition; which KL is taken is no part of the gradient."""
    terms = []
    for row_s, row_t, token in zip(z_s, z_t, ids.tolist(), strict=True):
        p, q = torch.softmax(row_s / temperature, -1), torch.softmax(row_t / temperature, -1)
        terms.append(oracle_divergence(row_s, row_t, "reverse" if q[token] > p[token] else "forward", temperature))
    return torch.stack(terms)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_loss_and_gradients_are_those_of_the_definition(divergence, temperature):
    h_s, w_s, h_t, w_t, ids = example()
    student, teacher = heads(w_s, w_t)
    leaves = [leaf.clone().requires_grad_() for leaf in (h_s, student.weight_VD, student.bias_V)]

    def loss_of(h, weight, bias):
        head = LMHead(weight, bias, student.scale, student.softcap)
        arrays = (h, head, h_t, teacher, ids, WEIGHTS, 11.0)
        return weighted_kl(*arrays, divergence, temperature, tokens_per_chunk=4, term="asymmetric")[0]

    def naive(h, weight, bias):
        z_s = oracle_logits(h, LMHead(weight, bias, student.scale, student.softcap))
        return (naive_terms(z_s, oracle_logits(h_t, teacher), ids, temperature) * WEIGHTS).sum() / 11.0

    torch.testing.assert_close(loss_of(*leaves), naive(*leaves), atol=1e-13, rtol=1e-12)
    ours, theirs = (torch.autograd.grad(3.0 * loss(*leaves), leaves) for loss in (loss_of, naive))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-10)
    assert torch.autograd.gradcheck(loss_of, leaves, fast_mode=True)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_scores_stay_those_of_the_divergence(divergence):
    pair = example()
    _, scores = weighted_kl(*pair, torch.ones(T), 1.0, divergence, term="asymmetric")
    expected = token_scores(*pair, divergence)
    for (name, ours), (_, theirs) in zip(scores.items(), expected.items(), strict=True):
        assert torch.equal(ours, theirs), name


def test_both_parts_occur_and_each_row_follows_its_own_sampled_token():
    h_s, w_s, h_t, w_t, ids = example()
    scores = token_scores(h_s, w_s, h_t, w_t, ids, extras=["forward_kl"])
    underrated = scores.logp_teacher > scores.logp_student
    assert 0 < underrated.sum() < T
    for row in range(T):
        only = torch.zeros(T)
        only[row] = 1.0
        loss, _ = weighted_kl(h_s, w_s, h_t, w_t, ids, only, 1.0, term="asymmetric")
        torch.testing.assert_close(loss, (scores.kl if underrated[row] else scores.forward_kl)[row])


def test_a_token_that_both_models_rate_alike_has_the_forward_kl():
    z_s, z_t = (torch.log(torch.tensor([row], dtype=torch.float64)) for row in ([8, 4, 4], [8, 7, 1]))
    eye, first = torch.eye(3, dtype=torch.float64), torch.tensor([0])
    loss, scores = weighted_kl(z_s, eye, z_t, eye, first, torch.ones(1), 1.0, term="asymmetric")
    assert scores.logp_student == scores.logp_teacher
    torch.testing.assert_close(loss, oracle_divergence(z_s[0], z_t[0], "forward", 1.0))
    assert (loss - scores.kl).abs() > 0.04  # which is the reverse KL


def test_equal_models_have_no_loss():
    h_s, w_s, _, _, ids = example()
    loss, _ = weighted_kl(h_s.requires_grad_(), w_s, h_s.detach(), w_s, ids, torch.ones(T), 1.0, term="asymmetric")
    loss.backward()
    assert loss == 0 and h_s.grad is not None and h_s.grad.abs().max() == 0


def test_an_infinite_forward_kl_stops_only_where_it_is_taken():
    h_s, w_s, h_t, w_t, ids = example()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[0] = -math.inf
    arrays = (h_s.requires_grad_(), LMHead(w_s, bias), h_t, w_t, ids.clamp(min=1))
    scores = token_scores(*arrays)
    underrated = (scores.logp_teacher > scores.logp_student).double()
    loss, _ = weighted_kl(*arrays, underrated, 1.0, term="asymmetric")
    loss.backward()
    torch.testing.assert_close(loss, (scores.kl * underrated).sum())
    assert h_s.grad is not None and h_s.grad.isfinite().all()
    with pytest.raises(NonFiniteLossError, match=r"is infinite, .*: use another policy than asymmetric"):
        weighted_kl(*arrays, 1 - underrated, 1.0, term="asymmetric")


def test_an_unknown_term_is_refused():
    with pytest.raises(RocktokensError, match="term is 'symmetric': use asymmetric or None"):
        weighted_kl(*example(), torch.ones(T), 1.0, term="symmetric")  # type: ignore[arg-type]
