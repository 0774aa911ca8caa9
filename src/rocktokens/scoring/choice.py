"""The choice within classes of tokens at a few positions, and the loss without it (docs/method.md, section 10).

1. The ids of all classes of one size are one index (C, S): only these columns of the log-probabilities are gathered.
2. Class sums are logarithms of sums over the last axis, after the temperature.
3. The choice of the run's divergence is a sum over classes; ``formulas.py`` says of what.
4. What is minimised is divergence − (1 − λ) · choice, which is decision + λ · choice, and so is its gradient. Only the
   members' columns differ from the divergence's gradient by more than a multiple of p.
"""

from collections import defaultdict
from functools import lru_cache

import torch

from rocktokens.classes import TokenClasses
from rocktokens.config import Divergence
from rocktokens.scoring.formulas import CHOICES, Scored
from rocktokens.scoring.fused import sent

Members = tuple[torch.Tensor, ...]
"""Ids (C, S) of the classes of each size S."""
Slopes = list[tuple[torch.Tensor, torch.Tensor]]
"""For each size the ids (C · S,), and p_v times the derivative of the choice by p_v (n, C · S)."""


@lru_cache(maxsize=16)
def members(classes: TokenClasses, device: torch.device) -> Members:
    """The classes of two ids or more as indices on a device."""
    by_size: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
    for ids in classes.groups:
        by_size[len(ids)].append(ids)
    return tuple(sent(torch.tensor(by_size[size]), device) for size in sorted(by_size))


def choice(
    divergence: Divergence, log_p: torch.Tensor, log_q: torch.Tensor, members: Members
) -> tuple[torch.Tensor, Slopes]:
    """The choice (n,) in a divergence between two distributions (n, V), and its slopes at the members."""
    choice_n, slopes = log_p.new_zeros(len(log_p)), []
    for ids_CS in members:
        logs = [log[:, ids_CS] for log in (log_p, log_q)]
        sums = [log.logsumexp(dim=-1, keepdim=True) for log in logs]
        choice_nC, slopes_nCS = CHOICES[divergence](*logs, *sums)
        choice_n += choice_nC.sum(dim=-1)
        slopes.append((ids_CS.flatten(), slopes_nCS.flatten(1)))
    return choice_n.clamp_min_(0.0), slopes


def coarse(full: Scored, choice_n: torch.Tensor, slopes: Slopes, p: torch.Tensor, lam: float, scale: float) -> Scored:
    """A divergence less 1 − λ of its choice, with the gradient, which is changed in place.

    ``scale`` is the derivative of what the softmax is taken of by the logits: 1 over the temperature.
    """
    divergence_n, gradient_nV = full
    left_out = (1.0 - lam) * scale
    mean_n1 = torch.zeros_like(choice_n).unsqueeze(-1)
    for ids, slopes_nM in slopes:
        gradient_nV.index_add_(1, ids, slopes_nM, alpha=-left_out)
        mean_n1 += slopes_nM.sum(dim=-1, keepdim=True)
    return divergence_n - (1.0 - lam) * choice_n, gradient_nV.addcmul_(p, mean_n1, value=left_out)
