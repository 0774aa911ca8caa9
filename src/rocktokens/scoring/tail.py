"""The reverse KL to a teacher of which K tokens and the mass of all others, the tail, are known.

Both distributions are summed to K + 1 outcomes: these tokens, and any other (docs/method.md, section 2).

    kl = Σ_{v in K} p_v (log p_v − log q_v) + P (log P − log Q),   P = Σ_{v not in K} p_v,  Q = 1 − Σ_{v in K} q_v

1. It is the decision of section 10 with one class, the tail. By the chain rule the whole divergence exceeds it by the
   choice within the tail, P · KL(p(·|tail) ‖ q(·|tail)) ≥ 0, which only the teacher knows.
2. log P is summed from the student's own log-probabilities: no difference of almost equal numbers. log Q comes with the
   teacher's row (``scoring/served_likely.py``).
3. The gradient with respect to the student's logits is p_v (b_v − kl) with b_v = log(p_v / q_v) for the K tokens, and
   log(P / Q) for all others.
"""

import torch

from rocktokens.errors import RocktokensError
from rocktokens.models.likely_head import Likely
from rocktokens.scoring.formulas import TEACHER_TOP, Scored, likeliest, reverse

WHAT = "a teacher of which only the likeliest tokens are known"
IN_TAIL = ("student_top1_in_teacher_top5",)
"""Extra columns that such a teacher can fill, if it names as many tokens."""


def reverse_with_tail(log_p_nV: torch.Tensor, likely: Likely) -> Scored:
    """Return the divergence (n,), and its gradient (n, V) with respect to what ``log_p_nV`` is the log-softmax of."""
    n, width = log_p_nV.shape
    beside = log_p_nV.new_zeros(n, width + 1)  # the last column is for ids that the student does not have
    is_named_nV = beside.scatter(1, likely.ids_NK, 1.0)[:, :width] > 0
    log_p_nK = torch.cat([log_p_nV, log_p_nV.new_full((n, 1), -torch.inf)], dim=1).gather(1, likely.ids_NK)
    tail_n1 = log_p_nV.masked_fill(is_named_nV, -torch.inf).logsumexp(dim=-1, keepdim=True)
    log_p_nC = torch.cat([log_p_nK, tail_n1], dim=1)
    log_q_nC = torch.cat([likely.logp_NK, likely.tail_N.unsqueeze(-1)], dim=1).to(log_p_nC)
    p_nC = log_p_nC.exp()
    kl_n, gradient_nC = reverse(p_nC, log_p_nC, log_q_nC.exp(), log_q_nC)
    within_tail_nV = (log_p_nV - tail_n1).exp().masked_fill(is_named_nV | tail_n1.isneginf(), 0.0)
    beside.scatter_(1, likely.ids_NK, gradient_nC[:, :-1])
    return kl_n, beside[:, :width].addcmul_(within_tail_nV, gradient_nC[:, -1:])


def extra_column(name: str, log_p_nV: torch.Tensor, likely: Likely) -> torch.Tensor:
    """Fill one of ``IN_TAIL``."""
    assert name in IN_TAIL
    return (likely.ids_NK[:, :TEACHER_TOP] == likeliest(log_p_nV, 1)).any(dim=-1).to(log_p_nV.dtype)


def require_known(k: int, *, divergence: str, temperature: float, extras: tuple[str, ...], other: str | None) -> None:
    """Refuse to score what such a teacher does not say; ``other`` names what else is asked for."""
    if divergence != "reverse":
        raise RocktokensError(f"divergence is {divergence!r}: {WHAT} has the reverse KL alone, use reverse")
    if temperature != 1:
        raise RocktokensError(f"scoring.temperature is {temperature}: {WHAT} cannot be tempered, use 1")
    unknown = next((name for name in extras if name not in IN_TAIL or k < TEACHER_TOP), other)
    if unknown is not None:
        raise RocktokensError(f"{unknown} is not known of {WHAT} (here {k}): leave it out, or score with its states")


def require_named(wanted: int, k: int) -> None:
    """Refuse to look at more of a teacher's likeliest tokens than it names."""
    if wanted > k:
        raise RocktokensError(
            f"the {wanted} likeliest tokens of the teacher are asked for, and it names {k}: ask for fewer, or raise "
            "teacher.top_k"
        )
