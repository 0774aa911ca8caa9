"""What is measured between two distributions, position by position. The sign is written here.

With z the logits, p = softmax(z_student / τ), q = softmax(z_teacher / τ), natural logarithms, the whole vocabulary:

    reverse  Σ p (log p − log q)              ∂/∂z_v = p_v (a_v − Σ p a) / τ    with a = log p − log q
    forward  Σ q (log q − log p)                     = (p_v − q_v) / τ
    jsd      ½ Σ p log(p/m) + ½ Σ q log(q/m)         = p_v (a_v − Σ p a) / τ    with a = ½ log(p/m), m = (p + q) / 2

Every function takes p, log p, q and log q, all (n, V); the gradients here are with respect to z / τ. Where "likeliest"
tokens are counted, equal probabilities come in the order of their ids.

Between the sums of classes of tokens, P_c = Σ p and Q_c = Σ q over the members, each divergence is less by its choice
(docs/method.md, section 10), by the chain rule of the relative entropies that it is made of:

    reverse  Σ_c P_c KL(p(·|c) ‖ q(·|c))
    forward  Σ_c Q_c KL(q(·|c) ‖ p(·|c))
    jsd      ½ Σ_c P_c KL(p(·|c) ‖ m(·|c)) + ½ Σ_c Q_c KL(q(·|c) ‖ m(·|c))
"""

import math
from collections.abc import Callable, Collection

import torch

from rocktokens.config import Divergence
from rocktokens.errors import RocktokensError

Scored = tuple[torch.Tensor, torch.Tensor]
Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

STUDENT_TOP, TEACHER_TOP = 16, 5
"""Of the extra columns; their names say so too."""


# The divergence (n,) and its gradient (n, V)


def reverse(p: torch.Tensor, log_p: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor) -> Scored:
    """KL of the student from the teacher."""
    a = _log_ratio(log_p, log_q)
    return _relative_entropy(p, q, a), _centred(p, a)


def forward(p: torch.Tensor, log_p: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor) -> Scored:
    """KL of the teacher from the student."""
    return forward_kl(p, log_p, q, log_q), p - q


def jsd(p: torch.Tensor, log_p: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor) -> Scored:
    """The mean KL of both from their mean."""
    m = (p + q) / 2
    of_teacher = _relative_entropy(q, m, _log_ratio_to_mean(log_q, log_p))
    a = _log_ratio_to_mean(log_p, log_q)
    return (_relative_entropy(p, m, a) + of_teacher) / 2, _centred(p, a) / 2


DIVERGENCES: dict[Divergence, Callable[..., Scored]] = {"reverse": reverse, "forward": forward, "jsd": jsd}


def entropy(p: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """−Σ p log p (n,); where p is exactly 0, p log p is NaN and counts for nothing."""
    return -(p * log_p).nansum(dim=-1)


# The choice (n, C) within classes of S members, and its slopes (n, C, S): p_v times its derivative by p_v. Functions
# take log p and log q of the members, and log P and log Q (n, C, 1). The gradient of all choice is the slope less p_v
# times the sum of all slopes; for tokens of no class the slope is 0.


def reverse_choice(log_p: torch.Tensor, log_q: torch.Tensor, log_P: torch.Tensor, log_Q: torch.Tensor) -> Scored:
    """What is left of the reverse KL within classes."""
    p, a = log_p.exp(), _log_ratio(log_p, log_q) - _log_ratio(log_P, log_Q)
    return _relative_entropy(p, _moved(log_q, log_Q, log_P), a), p * a


def forward_choice(log_p: torch.Tensor, log_q: torch.Tensor, log_P: torch.Tensor, log_Q: torch.Tensor) -> Scored:
    """What is left of the forward KL within classes."""
    q, p_moved = log_q.exp(), _moved(log_p, log_P, log_Q)
    a = _log_ratio(log_q, log_p) - _log_ratio(log_Q, log_P)
    return _relative_entropy(q, p_moved, a), p_moved - q


def jsd_choice(log_p: torch.Tensor, log_q: torch.Tensor, log_P: torch.Tensor, log_Q: torch.Tensor) -> Scored:
    """What is left of the Jensen-Shannon divergence within classes."""
    log_2m, log_2M = torch.logaddexp(log_p, log_q), torch.logaddexp(log_P, log_Q)
    a_p = _log_ratio_to_mean(log_p, log_q) - _log_ratio_to_mean(log_P, log_Q)
    a_q = _log_ratio_to_mean(log_q, log_p) - _log_ratio_to_mean(log_Q, log_P)
    p, q = log_p.exp(), log_q.exp()
    of_teacher = _relative_entropy(q, _moved(log_2m, log_2M, log_Q), a_q)
    return (_relative_entropy(p, _moved(log_2m, log_2M, log_P), a_p) + of_teacher) / 2, p * a_p / 2


CHOICES: dict[Divergence, Callable[..., Scored]] = {
    "reverse": reverse_choice,
    "forward": forward_choice,
    "jsd": jsd_choice,
}


# The extra columns (n,)


def teacher_mass_top16(p: torch.Tensor, log_p: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """The teacher's probability on the student's 16 likeliest tokens (arXiv 2605.26844)."""
    return q.gather(-1, likeliest(log_p, STUDENT_TOP)).sum(dim=-1)


def student_top1_in_teacher_top5(
    p: torch.Tensor, log_p: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor
) -> torch.Tensor:
    """1 where the student's likeliest token is among the teacher's 5 likeliest, else 0 (arXiv 2510.24021)."""
    return (likeliest(log_q, TEACHER_TOP) == likeliest(log_p, 1)).any(dim=-1).to(p.dtype)


def forward_kl(p: torch.Tensor, log_p: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Σ q (log q − log p), infinite where the student rules out a token that the teacher does not."""
    return _relative_entropy(q, p, _log_ratio(log_q, log_p))


EXTRAS: dict[str, Formula] = {
    formula.__name__: formula for formula in (teacher_mass_top16, student_top1_in_teacher_top5, forward_kl)
}
"""By their column of ``TokenScores``."""


def require_extras(names: Collection[str]) -> tuple[str, ...]:
    """The names, each once and in the order of the columns; one that is not an extra column is refused."""
    for name in names:
        if name not in EXTRAS:
            raise RocktokensError(f"extras names {name!r}, which is no extra column: use some of {', '.join(EXTRAS)}")
    return tuple(name for name in EXTRAS if name in names)


def likeliest(log_p: torch.Tensor, k: int) -> torch.Tensor:
    """The ids (n, k) of the largest entries, in no order, all if there are fewer; of equal ones the smaller ids."""
    values, ids = log_p.topk(min(k + 1, log_p.shape[-1]))
    tied_n = values[:, k - 1 : k] == values[:, k : k + 1]
    if tied_n.any():  # which of equal values ``topk`` leaves out is not defined
        rows = tied_n.flatten()
        ids[rows] = log_p[rows].sort(dim=-1, descending=True, stable=True).indices[:, : k + 1]
    return ids[:, :k]


def _relative_entropy(p: torch.Tensor, q: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Σ p a with a = log(p / q), summed as p a + (q − p): the same, as p and q both sum to 1, but no term is negative.

    A rounding error of a then counts p − q times instead of p times, which is next to nothing where the models agree.
    There q − p is p (exp(−a) − 1), which keeps its digits; what q exceeds e · p by is added apart, lest exp overflow.
    """
    change = a.clamp_min(-1.0).neg_().expm1_().mul_(p)
    change += torch.sub(q, p, alpha=math.e).relu_()
    return change.addcmul_(p, a).sum(dim=-1)


def _moved(log_x: torch.Tensor, log_X: torch.Tensor, log_Y: torch.Tensor) -> torch.Tensor:
    """Members' shares of their class under one distribution, times the class's sum under another; 0 where x is."""
    return (log_x - log_X + log_Y).exp().nan_to_num_(nan=0.0)


def _centred(p: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """The gradient p (a − Σ p a); the mean is of a as it was rounded, so that an error all of a shares cancels."""
    return p * (a - (p * a).sum(dim=-1, keepdim=True))


def _log_ratio(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """The logarithm of a / b, finite where a is exactly 0, since it is only ever multiplied by a."""
    return _finite_below(log_a - log_b)


def _log_ratio_to_mean(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """The logarithm of a / m with m = (a + b) / 2, which is 2 · sigmoid(log(a / b)); finite where a is exactly 0."""
    return _finite_below(torch.nn.functional.logsigmoid(log_a - log_b).add_(math.log(2)))


def _finite_below(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-1.0)
