"""The divergence of likely tokens and a tail, against its definition in float64, and what cannot be had of it."""

import pytest
import torch
from pair_oracle import example, oracle_coarse, oracle_divergence, oracle_logits

from rocktokens.errors import RocktokensError
from rocktokens.models.head import LMHead
from rocktokens.models.likely_head import LikelyHead
from rocktokens.scoring.divergence import token_scores, top_overlap, weighted_kl
from rocktokens.scoring.score import PendingScores
from rocktokens.scoring.tail import reverse_with_tail
from rocktokens.scoring.top_tokens import named_tokens, top_tokens
from rocktokens.types import NO_TOKEN

V, EPS = 29, 1e-12


def rows_of(log_q_TV: torch.Tensor, ids_T: torch.Tensor, k: int) -> torch.Tensor:
    """What a teacher with these log-probabilities says: see ``LikelyHead``."""
    top = log_q_TV.topk(k, dim=-1)
    tail_T1 = log_q_TV.scatter(1, top.indices, -torch.inf).logsumexp(dim=-1, keepdim=True)
    written_T1 = log_q_TV.gather(1, ids_T.unsqueeze(-1))
    return torch.cat([top.indices.to(log_q_TV.dtype), top.values, tail_T1, written_T1], dim=1)


def tailed(k: int, seed: int = 0, sharper: float = 1.0):
    """A pair, the log-probabilities of both, and what a teacher says that names k tokens."""
    h_s, w_s, h_t, w_t, ids = example(seed)
    z_s, z_t = h_s @ w_s.T, sharper * (h_t @ w_t.T)
    return h_s, w_s, rows_of(z_t.log_softmax(-1), ids, k), LikelyHead(V, k), ids, z_s, z_t


def oracle(z_s: torch.Tensor, z_t: torch.Tensor, k: int) -> torch.Tensor:
    """Row by row: the divergence where the tail is one class."""
    named = z_t.topk(k, dim=-1).indices.tolist()
    tails = [[v for v in range(z_s.shape[1]) if v not in own] for own in named]
    return torch.stack(
        [
            oracle_coarse(z_s[t : t + 1], z_t[t : t + 1], "reverse", 1.0, [tail])[0]
            if tail
            else oracle_divergence(z_s[t : t + 1], z_t[t : t + 1], "reverse", 1.0)[0]
            for t, tail in enumerate(tails)
        ]
    )


@pytest.mark.parametrize("k", [1, 5, 20, V - 1, V])
@pytest.mark.parametrize("sharper", [1.0, 4.0])
def test_scores_are_those_of_the_definition(k: int, sharper: float):
    h_s, w_s, rows, head, ids, z_s, z_t = tailed(k, sharper=sharper)
    scores = token_scores(h_s, w_s, rows, head, ids, tokens_per_chunk=5)
    torch.testing.assert_close(scores.kl, oracle(z_s, z_t, k), rtol=0, atol=EPS)
    log_p, log_q = z_s.log_softmax(-1), z_t.log_softmax(-1)
    for found, log in ((scores.logp_student, log_p), (scores.logp_teacher, log_q)):
        torch.testing.assert_close(found, log.gather(1, ids.unsqueeze(-1)).squeeze(-1), rtol=0, atol=EPS)
    torch.testing.assert_close(scores.entropy_student, -(log_p.exp() * log_p).sum(-1), rtol=0, atol=EPS)
    assert scores.entropy_teacher.isnan().all(), "the tail hides it"


def test_rows_shifted_by_one_are_other_scores():
    h_s, w_s, rows, head, ids, z_s, z_t = tailed(5)
    for by in (1, -1):
        shifted = token_scores(h_s, w_s, rows.roll(by, dims=0), head, ids).kl
        assert ((shifted - oracle(z_s, z_t, 5)).abs() > 0.05).sum() > len(ids) // 2


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_lower_bound_that_grows_with_k(seed: int):
    full = token_scores(*example(seed)).kl
    found = []
    for k in (1, 2, 5, 10, 20, V - 1):
        h_s, w_s, rows, head, ids, *_ = tailed(k, seed)
        found.append(token_scores(h_s, w_s, rows, head, ids).kl)
    ladder = torch.stack([torch.zeros_like(full), *found, full])
    assert (ladder.diff(dim=0) >= -EPS).all(), "a finer split of both distributions is further apart"
    torch.testing.assert_close(found[-1], full, rtol=0, atol=EPS)
    assert (full - found[0]).max() > 0.1


def test_it_is_the_whole_where_both_agree_within_the_tail():
    h_s, w_s, *_, ids = example()
    log_p = (h_s @ w_s.T).log_softmax(-1)
    named = log_p.topk(3, dim=-1).indices
    moved = log_p.scatter_add(1, named, torch.randn(named.shape, dtype=log_p.dtype)).log_softmax(-1)
    rows = torch.cat([named.double(), moved.gather(1, named)], dim=1)
    tail = moved.scatter(1, named, -torch.inf).logsumexp(-1, keepdim=True)
    written = moved.gather(1, ids.unsqueeze(-1))
    found = token_scores(h_s, w_s, torch.cat([rows, tail, written], dim=1), LikelyHead(V, 3), ids).kl
    torch.testing.assert_close(found, oracle_divergence(log_p, moved, "reverse", 1.0), rtol=0, atol=EPS)


@pytest.mark.parametrize("k", [1, 5, V - 1, V])
def test_the_gradient_is_that_of_the_definition(k: int):
    """By finite differences of the sum, and by autograd through the oracle."""
    h_s, w_s, rows, head, ids, _, z_t = tailed(k)
    weights = torch.rand(len(ids), dtype=torch.float64) + 0.1
    h, w = h_s.clone().requires_grad_(), w_s.clone().requires_grad_()

    def loss(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return weighted_kl(h, w, rows, head, ids, weights, 7.0, tokens_per_chunk=4)[0]

    assert torch.autograd.gradcheck(loss, (h, w), eps=1e-6, atol=1e-7)
    loss(h, w).backward()
    other = h_s.clone().requires_grad_()
    ((oracle(other @ w_s.T, z_t, k) * weights).sum() / 7.0).backward()
    torch.testing.assert_close(h.grad, other.grad, rtol=0, atol=1e-12)


def test_grad_norm_is_the_length_of_the_gradient_in_the_logits():
    h_s, w_s, rows, head, ids, z_s, z_t = tailed(5)
    z = z_s.clone().requires_grad_()
    oracle(z, z_t, 5).sum().backward()
    assert z.grad is not None
    torch.testing.assert_close(
        token_scores(h_s, w_s, rows, head, ids).grad_norm, z.grad.norm(dim=-1), rtol=0, atol=1e-12
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gives_what_a_cpu_gives(dtype: torch.dtype):
    h_s, w_s, rows, head, ids, *_ = tailed(5)
    found = []
    for device in ("cpu", "cuda"):
        h, w = (x.to(device, dtype).requires_grad_() for x in (h_s, w_s))
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16 and device == "cuda"):
            arguments = (h, w, rows.to(device, torch.float32), head, ids.to(device), torch.ones(len(ids)), 1.0)
            loss, scores = weighted_kl(*arguments, tokens_per_chunk=4, defer_checks=True)
        loss.backward()
        assert h.grad is not None and w.grad is not None
        found.append([own.detach().float().cpu() for own in (loss, scores.kl, scores.grad_norm, h.grad, w.grad)])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.05)


def test_a_head_with_bias_and_cap_has_its_gradient_too():
    h_s, w_s, rows, head, ids, *_ = tailed(5)
    bias = torch.randn(V, dtype=torch.float64)
    h = h_s.clone().requires_grad_()

    def loss(h: torch.Tensor) -> torch.Tensor:
        return weighted_kl(h, LMHead(w_s, bias, 0.7, 3.0), rows, head, ids, torch.ones(len(ids)), 3.0)[0]

    assert torch.autograd.gradcheck(loss, (h,), eps=1e-6, atol=1e-7)


def test_ids_that_the_student_does_not_have_are_left_to_the_tail():
    h_s, w_s, h_t, w_t, ids = example(v_teacher=V + 4)
    z_s, z_t = oracle_logits(h_s, w_s), oracle_logits(h_t, w_t)
    log_q = z_t.log_softmax(-1)
    rows = rows_of(log_q, ids, 12)
    assert (rows[:, :12] >= V).any()
    found = token_scores(h_s, w_s, rows, LikelyHead(V + 4, 12), ids).kl
    log_p = torch.cat([z_s.log_softmax(-1), z_s.new_full((len(ids), 4), -torch.inf)], dim=1)
    for t, kl in enumerate(found):
        own = rows[t, :12].long()
        named = own[own < V]
        rest = [v for v in range(V + 4) if v not in named.tolist()]
        p, q = (torch.cat([log[t, named], log[t, rest].logsumexp(0, keepdim=True)]) for log in (log_p, log_q))
        torch.testing.assert_close(kl, (p.exp() * (p - q)).sum(), rtol=0, atol=EPS)
    p = z_s.softmax(-1)
    whole = (p * (log_p - log_q)[:, :V]).sum(dim=1)
    assert (found <= whole + EPS).all(), "a lower bound of the divergence over all of the teacher's tokens"
    all_but_one = token_scores(h_s, w_s, rows_of(log_q, ids, V + 3), LikelyHead(V + 4, V + 3), ids).kl
    common = oracle_divergence(z_s, z_t, "reverse", 1.0)
    assert (all_but_one > common + 0.1).any(), "and not of that over the tokens of both models"


def test_the_likeliest_of_a_teacher_are_those_that_the_student_has():
    """In the order of their likelihood, with their log-probabilities, and fewer where fewer were named."""
    _, _, h_t, w_t, ids = example(v_teacher=V + 4)
    log_q = oracle_logits(h_t, w_t).log_softmax(-1)
    rows, head = rows_of(log_q, ids, 6), LikelyHead(V + 4, 6)
    assert (rows[:, :4] >= V).any() and torch.equal(named_tokens(rows, head, 4)[0], rows[:, :4].T.int())
    ids_KT, logp_KT = named_tokens(rows, head.cut(V), 4)
    for t, own in enumerate(rows[:, :6].long().tolist()):
        expected = [v for v in own if v < V][:4]
        found = ids_KT[:, t].tolist()
        assert found == expected + [NO_TOKEN] * (4 - len(expected))
        torch.testing.assert_close(logp_KT[: len(expected), t], log_q[t, expected].float())
    few = torch.tensor([[V, 3.0, V + 1, -1.0, -2.0, -3.0, -1.5, -2.0]])
    assert named_tokens(few, LikelyHead(V + 4, 3).cut(V), 2)[0].T.tolist() == [[3, NO_TOKEN]]


@pytest.mark.parametrize("gap", [1e-3, 1e-5, 1e-7])
def test_small_student_tails_keep_their_digits(gap: float):
    """Float32: a tail that is 1 less a sum would have none left."""
    p = torch.full((1, V), gap / (V - 1), dtype=torch.float64)
    p[0, 0] = 1 - gap
    rows = torch.tensor([[0.0, torch.tensor(0.5).log(), torch.tensor(0.5).log(), torch.tensor(0.5).log()]])
    expected = (1 - gap) * torch.tensor(2 * (1 - gap)).double().log() + gap * torch.tensor(2 * gap).double().log()
    likely = LikelyHead(V, 1).read(rows)
    kl, gradient = reverse_with_tail(p.log().float(), likely)
    torch.testing.assert_close(kl.double(), expected.reshape(1), rtol=1e-6, atol=1e-7)
    mean = expected
    torch.testing.assert_close(
        gradient[0, 1].double(), p[0, 1] * (torch.tensor(2 * gap).double().log() - mean), rtol=1e-4, atol=0
    )


def test_a_tail_that_the_student_rules_out_has_no_gradient():
    """Its head gives minus infinity to all that the teacher does not name."""
    h_s, w_s, rows, head, _, _, z_t = tailed(5)
    rows, named = rows[:1], rows[0, :5].long()
    bias = torch.full((V,), -torch.inf, dtype=torch.float64).index_fill(0, named, 0.0)
    h = h_s[:1].clone().requires_grad_()
    loss, scores = weighted_kl(h, LMHead(w_s, bias), rows, head, named[:1], torch.ones(1), 1.0)
    loss.backward()
    other = h_s[:1].clone().requires_grad_()
    log_p = (other @ w_s[named].T).log_softmax(-1)
    expected = (log_p.exp() * (log_p - z_t.log_softmax(-1)[:1, named])).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=EPS)
    torch.testing.assert_close(h.grad, other.grad, rtol=0, atol=EPS)
    assert scores.grad_norm.isfinite().all()


def test_what_is_not_known_is_refused():
    h_s, w_s, rows, head, ids, *_ = tailed(4)
    for arguments, sentence in (
        ({"divergence": "jsd"}, "has the reverse KL alone"),
        ({"temperature": 2.0}, "cannot be tempered, use 1"),
        ({"extras": ("teacher_mass_top16",)}, "teacher_mass_top16 is not known"),
        ({"extras": ("forward_kl",)}, "forward_kl is not known"),
        ({"extras": ("student_top1_in_teacher_top5",)}, r"is not known of .* \(here 4\)"),
    ):
        with pytest.raises(RocktokensError, match=sentence):
            token_scores(h_s, w_s, rows, head, ids, **arguments)
    with pytest.raises(RocktokensError, match="term asymmetric is not known"):
        weighted_kl(h_s, w_s, rows, head, ids, torch.ones(len(ids)), 1.0, term="asymmetric")
    with pytest.raises(RocktokensError, match="16 likeliest tokens of the teacher are asked for, and it names 4"):
        top_overlap(h_s, w_s, rows, head)


def test_what_k_tokens_tell_is_that_of_the_whole():
    h_s, w_s, h_t, w_t, ids = example()
    rows, head = tailed(16)[2:4]
    for found, expected in zip(top_overlap(h_s, w_s, rows, head), top_overlap(h_s, w_s, h_t, w_t), strict=True):
        torch.testing.assert_close(found, expected)
    name = "student_top1_in_teacher_top5"
    found, expected = (
        getattr(token_scores(h_s, w_s, *teacher, ids, extras=[name]), name) for teacher in ((rows, head), (h_t, w_t))
    )
    assert torch.equal(found, expected) and 0 < found.sum() < len(ids)
    named, whole = named_tokens(rows, head, 8), top_tokens(h_t, LMHead(w_t), 8, 1.0, 1024)
    assert torch.equal(named[0], whole[0])
    torch.testing.assert_close(named[1], whole[1])


def test_scores_without_entropies_are_sound_where_that_is_known():
    h_s, w_s, rows, head, ids, *_ = tailed(5)
    scores = token_scores(h_s, w_s, rows, head, ids)
    names = tuple(name for name, _ in scores.items())
    table = torch.stack([own.float() for _, own in scores.items()])
    pending = [PendingScores(names, [len(ids)], [([0], table)], {}, None, known) for known in (True, False)]
    with pytest.raises(RocktokensError, match="the teacher's logits at row 0 are NaN"):
        pending[0].wait()
    assert len(pending[1].wait().kl) == len(ids)
