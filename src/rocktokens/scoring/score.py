"""Replay: score finished rollouts under a student and a teacher, one forward of each.

1. Rollouts are grouped by length, so that little of a batch is padding.
2. Each group is forced through both models, and scored where they predict the response tokens.
3. The scores are put back in the order of the rollouts; they do not depend on the grouping.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rocktokens.config import Divergence
from rocktokens.errors import RocktokensError
from rocktokens.models.head import LMHead, lm_head
from rocktokens.models.load import LoadedModel
from rocktokens.scoring.batch import collate, response_states, split_by_tokens
from rocktokens.scoring.divergence import token_scores
from rocktokens.scoring.formulas import require_extras
from rocktokens.types import STANDARD_COLUMNS, Rollout, TokenScores

States = tuple[torch.Tensor, LMHead, torch.Tensor, LMHead, torch.Tensor]


@torch.inference_mode()
def score_rollouts(
    student: Any,
    teacher: Any,
    rollouts: Sequence[Rollout],
    *,
    divergence: Divergence = "reverse",
    temperature: float = 1.0,
    tokens_per_chunk: int = 1024,
    tokens_per_batch: int = 16384,
    on_done: Callable[[int], None] | None = None,
    extras: Collection[str] = (),
) -> TokenScores:
    """Score every response token of ``rollouts``.

    Args:
        student: A ``LoadedModel`` or a transformers causal LM.
        teacher: Likewise, over the same vocabulary and on the same device.
        rollouts: What the student wrote.
        divergence: What the column ``kl`` holds.
        temperature: Of both softmaxes.
        tokens_per_chunk: Positions whose logits are in memory at once.
        tokens_per_batch: Padded tokens of one forward.
        on_done: Called after each batch with the number of rollouts it scored.
        extras: Which of the optional columns of ``TokenScores`` to fill as well.

    Returns:
        Numpy columns of shape (T,), rollout after rollout in the given order.
    """
    names = (*STANDARD_COLUMNS, *require_extras(extras))
    scores_of: dict[int, np.ndarray] = {}
    for group, states in replayed(student, teacher, rollouts, tokens_per_batch):
        scores = token_scores(*states, divergence, temperature, tokens_per_chunk, extras)
        table_CT = torch.stack([getattr(scores, name) for name in names]).to("cpu", torch.float32).numpy()
        ends = np.cumsum([len(rollouts[index].token_ids) for index in group])[:-1]
        scores_of.update(zip(group, np.split(table_CT, ends, axis=1), strict=True))
        if on_done is not None:
            on_done(len(group))
    empty_CT = np.zeros((len(names), 0), dtype=np.float32)
    table_CT = np.concatenate([empty_CT, *(scores_of[i] for i in range(len(rollouts)))], axis=1)
    return TokenScores(**dict(zip(names, table_CT, strict=True)))


def replayed(
    student: Any, teacher: Any, rollouts: Sequence[Rollout], tokens_per_batch: int = 16384
) -> Iterator[tuple[list[int], States]]:
    """Force the rollouts through both models, group after group.

    Returns:
        Indices of the rollouts of a group, and the first arguments of ``token_scores`` for their response tokens: the
        student's states and head, the teacher's states and head, the tokens.
    """
    student, teacher = _model(student), _model(teacher)
    if student.device != teacher.device:
        raise RocktokensError(
            f"the student is on {student.device}, the teacher on {teacher.device}: load both on one device"
        )
    for group in split_by_tokens(rollouts, tokens_per_batch):
        batch = collate([rollouts[index] for index in group], pad_id=0, device=student.device)
        with torch.inference_mode():
            h_s_TD, h_t_TE = (response_states(model, batch) for model in (student, teacher))
        yield group, (h_s_TD, lm_head(student), h_t_TE, lm_head(teacher), batch.token_ids_T)


def _model(model: Any) -> Any:
    return model.model if isinstance(model, LoadedModel) else model
