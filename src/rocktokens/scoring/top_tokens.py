"""The likeliest tokens of both models at every response token: what else could have been written.

No score depends on them. People look at them, and classes of interchangeable tokens are found by them.

1. Logits are made again, ``tokens_per_chunk`` positions at a time, over the columns that both heads have.
2. The likeliest come first; of equal ones the smaller ids.
3. What the teacher finds likely does not depend on the student: it is found once for all students of a probe set, while
   there is room to keep it.

A policy that learns from them while training has ``likely_tokens``, for which the host never waits for a GPU.
"""

import torch

from rocktokens.errors import RocktokensError
from rocktokens.models.head import LMHead
from rocktokens.models.likely_head import LikelyHead, OutputHead
from rocktokens.scoring.formulas import likeliest
from rocktokens.scoring.tail import WHAT, require_named
from rocktokens.scoring.teacher_pass import StatesRoom
from rocktokens.types import NO_TOKEN

Top = tuple[torch.Tensor, torch.Tensor]
"""Ids, int32 (K, T), and log-probabilities, float32 (K, T)."""


class TopTokens:
    """Finds the likeliest tokens of the groups of one ``TeacherPass``, student after student.

    There are ``k``, or all where the vocabulary has fewer. ``room`` is where the teacher's are kept; None for a single
    student, for whom nothing is.
    """

    def __init__(
        self, k: int, temperature: float = 1.0, tokens_per_chunk: int = 1024, room: StatesRoom | None = None
    ) -> None:
        self._settings = (k, temperature, tokens_per_chunk)
        self._room = room
        self._teacher: dict[tuple[int, int], Top] = {}

    def of_group(
        self, number: int, h_s_TD: torch.Tensor, student: LMHead, h_t_TE: torch.Tensor, teacher: OutputHead
    ) -> dict[str, Top]:
        """By column of the trace, the likeliest tokens of a group; ``number`` is its place in the pass."""
        width = min(student.width, teacher.width)
        return {
            "student_top": top_tokens(h_s_TD, student.cut(width), *self._settings),
            "teacher_top": self._of_teacher((number, width), h_t_TE, teacher.cut(width)),
        }

    def _of_teacher(self, key: tuple[int, int], h_t_TE: torch.Tensor, head: OutputHead) -> Top:
        if isinstance(head, LikelyHead):
            return named_tokens(h_t_TE, head, self._settings[0])
        if key in self._teacher:
            ids_KT, logp_KT = (part.to(h_t_TE.device, non_blocking=True) for part in self._teacher[key])
            return ids_KT, logp_KT
        found = top_tokens(h_t_TE, head, *self._settings)
        if self._room is not None:
            ids_KT, logp_KT = (self._room.keep(part) for part in found)
            if ids_KT is not None and logp_KT is not None:
                self._teacher[key] = ids_KT, logp_KT
        return found


@torch.no_grad()
def likely_tokens(
    h_s_PD: torch.Tensor,
    student: LMHead,
    h_t_PE: torch.Tensor,
    teacher: OutputHead,
    token_ids_P: torch.Tensor,
    k: int,
    temperature: float,
    tokens_per_chunk: int,
) -> Top:
    """The token that was written and the ``k`` likeliest, of both models.

    Which of equally likely tokens is the ``k``-th is left to the device: to look for ties, the host would have to wait.

    Returns:
        ids, int32, and log-probabilities, float32, both (P, 2, 1 + k) with the student first.
    """
    width, models = min(student.width, teacher.width), []
    if isinstance(teacher, LikelyHead):
        raise RocktokensError(f"policies that look at likely tokens need a teacher that gives states, not {WHAT}")
    for h_PD, whole in ((h_s_PD, student), (h_t_PE, teacher)):
        head, chunks = whole.cut(width).cast_for(h_PD), []
        for h_nD, written_n in zip(h_PD.split(tokens_per_chunk), token_ids_P.split(tokens_per_chunk), strict=True):
            z_nV = head.logits(h_nD) / temperature
            ids_nK = torch.cat([written_n.unsqueeze(-1), z_nV.topk(min(k, width)).indices], dim=-1)
            logp_nK = z_nV.gather(-1, ids_nK) - z_nV.logsumexp(dim=-1, keepdim=True)
            chunks.append((ids_nK.to(torch.int32), logp_nK.to(torch.float32)))
        models.append([torch.cat(parts) for parts in zip(*chunks, strict=True)])
    ids_P2K, logp_P2K = (torch.stack(parts, dim=1) for parts in zip(*models, strict=True))
    return ids_P2K, logp_P2K


@torch.inference_mode()
def top_tokens(h_TD: torch.Tensor, head: LMHead, k: int, temperature: float, tokens_per_chunk: int) -> Top:
    """The ``k`` likeliest tokens at every position, of one model."""
    head = head.cast_for(h_TD)
    tops = [_top(head.logits(h_nD) / temperature, k) for h_nD in h_TD.split(tokens_per_chunk)]
    ids_TK, logp_TK = (torch.cat(parts) for parts in zip(*tops, strict=True))
    return ids_TK.T.contiguous(), logp_TK.T.contiguous()


def named_tokens(rows_TE: torch.Tensor, head: LikelyHead, k: int) -> Top:
    """The ``k`` likeliest tokens of a teacher that names some; ``NO_TOKEN`` where both models have fewer of these."""
    k = min(k, head.width)
    require_named(k, head.k)
    likely = head.read(rows_TE)
    ids_TK, logp_TK = likely.ids_NK[:, :k], likely.logp_NK[:, :k]
    ids_TK = ids_TK.masked_fill(ids_TK == head.width, NO_TOKEN)
    return ids_TK.T.to(torch.int32).contiguous(), logp_TK.T.to(torch.float32).contiguous()


def _top(z_nV: torch.Tensor, k: int) -> Top:
    ids_nK = likeliest(z_nV, k).sort(dim=-1).values
    z_nK, order_nK = z_nV.gather(-1, ids_nK).sort(dim=-1, descending=True, stable=True)
    logp_nK = z_nK - z_nV.logsumexp(dim=-1, keepdim=True)
    return ids_nK.gather(-1, order_nK).to(torch.int32), logp_nK.to(torch.float32)
