"""Why scores are refused: ids that a model has no logit for, logits that are broken, divergences that are infinite.

1. A model's logits at a position are broken (NaN, infinite, or every token ruled out) where its entropy is NaN.
2. A divergence is infinite where one model rules out a token that the other does not.
3. What is refused is named with its row and a remedy.
"""

from typing import Any

import torch

from rocktokens.errors import NonFiniteLossError, RocktokensError
from rocktokens.types import TokenScores

FINITE_REMEDY = 'use scoring.divergence = "jsd", which is always finite'
TAIL_REMEDY = "serve a teacher that rules out no token"
ASYMMETRIC_REMEDY = "use another policy than asymmetric"


def require_ids(token_ids_T: Any, width: int) -> None:
    """Refuse ids, numpy or torch, that are not among the ``width`` logits of both models."""
    outside = token_ids_T[(token_ids_T < 0) | (token_ids_T >= width)]
    if len(outside):
        raise RocktokensError(
            f"token id {int(outside[0])} is outside the {width} logits that student and teacher share: use rollouts "
            "that were made with their tokenizer"
        )


def broken(
    entropy_s_N: torch.Tensor, entropy_t_N: torch.Tensor, divergence_N: torch.Tensor, term_N: torch.Tensor
) -> torch.Tensor:
    """Which positions (4, N) show that something is wrong: with either model, the divergence, what is minimised."""
    return torch.stack([entropy_s_N.isnan(), entropy_t_N.isnan(), ~divergence_N.isfinite(), ~term_N.isfinite()])


def refuse(broken_4N: torch.Tensor, rows_N: torch.Tensor) -> None:
    """Raise for the first thing that is wrong; ``rows_N`` are the positions' names, on the same device."""
    require_logits(broken_4N[0], "student", rows_N)
    require_logits(broken_4N[1], "teacher", rows_N)
    require_finite_divergence(broken_4N[2], rows_N, FINITE_REMEDY)
    require_finite_divergence(broken_4N[3], rows_N, ASYMMETRIC_REMEDY)


def require_sound_scores(scores: TokenScores, *, has_entropies: bool = True) -> None:
    """Refuse what ``token_scores`` refuses, of scores whose checks were deferred; rows are counted from the first.

    A teacher of which only the likeliest tokens are known has no entropies.
    """
    of_teacher = scores.entropy_teacher if has_entropies else scores.logp_teacher
    columns = (scores.entropy_student, of_teacher, scores.kl, scores.kl)
    broken_4T = broken(*map(torch.as_tensor, columns))
    refuse(broken_4T, torch.arange(broken_4T.shape[1], device=broken_4T.device))


def require_logits(bad_n: torch.Tensor, model: str, rows_n: torch.Tensor) -> None:
    """Refuse logits of a model, naming the first row where they are bad."""
    if bad_n.any():
        raise NonFiniteLossError(
            f"the {model}'s logits at row {int(rows_n[bad_n][0])} are NaN or infinite: check the weights of the "
            f"{model}, or load the models in float32 (models.dtype)"
        )


def require_finite_divergence(bad_n: torch.Tensor, rows_n: torch.Tensor, remedy: str) -> None:
    """Refuse divergences, naming the first row where they are bad."""
    if bad_n.any():
        raise NonFiniteLossError(
            f"the divergence at row {int(rows_n[bad_n][0])} is infinite, since one model rules out a token that the "
            f"other does not: {remedy}"
        )
