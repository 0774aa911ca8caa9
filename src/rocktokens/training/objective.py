"""The loss of one micro-batch (docs/method.md, section 7) as a module: forwards that DDP and FSDP can hook.

1. On a GPU the teacher runs on a stream of its own, starting where the training stream stands, so the two forwards
   share the GPU. ``TeacherStates.wait`` joins the streams just before the loss; the host waits for neither. On a CPU
   the teacher's states are computed at once.
2. The student's hidden states that predict each response token are picked from one forward.
3. The loss is Σ w·kl / D over these tokens, or has the policy's term in the place of kl. D is the same number on every
   micro-batch and rank of the update; tokens of weight 0 reach no head.
4. The scores of the trace, those of watched tokens of weight 0, the top-16 overlap at a few positions, and what else
   both models could have written where the policy wants to know it, come from the same forward. A teacher that names
   fewer than 16 tokens has no such overlap.

A policy that needs scores has them from a forward of its own, ``score``, without gradient. Either forward gathers the
teacher's head once where that lies in shards, whatever the batch, so that all processes gather as often.

The teacher's states are marked as read by the stream that waits, so their memory is not reused too early. Where the
student's graph leaves no room for both forwards, the allocator takes the teacher's scratch memory back, and they run
one after the other. Nothing here makes the host wait for a GPU: which tokens have weight 0 is known on the host.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rocktokens.config import Divergence, ScoringSection
from rocktokens.models.head import LMHead, lm_head
from rocktokens.models.likely_head import LikelyHead, OutputHead
from rocktokens.policies import Term, term_arguments, term_classes
from rocktokens.scoring.batch import RolloutBatch, response_states
from rocktokens.scoring.divergence import token_scores, top_overlap, weighted_kl
from rocktokens.scoring.top_tokens import Top, likely_tokens
from rocktokens.types import TokenScores

OVERLAP_K = 16
LIKELY_K = 8
"""As many as a trace has by default."""


@dataclass(frozen=True, slots=True)
class TeacherStates:
    """The teacher's states (T, E) of a micro-batch, which may still be on their way."""

    h_TE: torch.Tensor
    """Not to be read before ``wait``; those of a served teacher are on the CPU until they are used."""
    stream: torch.cuda.Stream | None = None
    """Where they are computed, if that is not where they are read."""

    def wait(self) -> torch.Tensor:
        """Return the states, for work that is queued from here on."""
        if self.stream is not None:
            reader = torch.cuda.current_stream(self.h_TE.device)
            reader.wait_stream(self.stream)
            self.h_TE.record_stream(reader)
        return self.h_TE


@torch.no_grad()
def teacher_states(teacher: Any, batch: RolloutBatch, stream: torch.cuda.Stream | None) -> TeacherStates:
    """Compute what the teacher predicts the response tokens from, on ``stream`` if there is one.

    The batch must live until the states have been waited for.
    """
    if stream is None:
        return TeacherStates(response_states(teacher, batch))
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        return TeacherStates(response_states(teacher, batch), stream)


class ObjectiveOutput(NamedTuple):
    """What one micro-batch contributes to the update."""

    loss: torch.Tensor
    """Scalar: this micro-batch's part of the update's loss; the parts add up to the whole."""
    scores: TokenScores
    overlap: torch.Tensor
    """(P,): overlap@16 at the positions asked for."""
    likely: Top | None
    """``likely_tokens`` at the positions asked for; None where there are none."""


class DistillationObjective(nn.Module):
    """Holds the student; the teacher's head, which may lie in shards, rides along outside the module's parameters."""

    def __init__(self, student: nn.Module, teacher_head: OutputHead, section: ScoringSection) -> None:
        super().__init__()
        self.student = student
        self._teacher_head = teacher_head
        self._section = section

    def forward(
        self,
        batch: RolloutBatch,
        teacher: TeacherStates,
        weights_T: np.ndarray,
        denominator: float,
        term: Term | None,
        watched_N: torch.Tensor,
        overlap_P: torch.Tensor,
        likely_P: torch.Tensor,
    ) -> ObjectiveOutput:
        """Compute the loss and the scores of the batch's response tokens.

        The teacher's states are waited for when the student's are there. Weights are numpy, since DDP would move a
        tensor to the GPU; the denominator is that of ``weighted_kl``, the term the policy's. Tokens ``watched_N`` have
        weight 0 and are scored without gradient; the overlap is measured at ``overlap_P``, the likeliest tokens are
        found at ``likely_P``.
        """
        student_head, teacher_head, settings = lm_head(self.student), self._teacher_head.whole(), self._settings
        h_s_TD, ids_T = response_states(self.student, batch), batch.token_ids_T
        h_t_TE = teacher.wait().to(h_s_TD.device)
        loss, scores = weighted_kl(
            h_s_TD,
            student_head,
            h_t_TE,
            teacher_head,
            ids_T,
            torch.as_tensor(weights_T),
            denominator,
            *settings,
            **term_arguments(term),
            round_logits=self._section.round_logits,
            defer_checks=True,
        )

        def states_at(rows: torch.Tensor) -> tuple[torch.Tensor, LMHead, torch.Tensor, OutputHead]:
            return h_s_TD[rows], student_head, h_t_TE[rows], teacher_head

        with torch.no_grad():
            if len(watched_N):
                classes = term_classes(term)
                watched = token_scores(*states_at(watched_N), ids_T[watched_N], *settings, classes=classes)
                for (_, column_T), (_, column_N) in zip(scores.present(), watched.present(), strict=True):
                    column_T[watched_N] = column_N
            if isinstance(teacher_head, LikelyHead) and teacher_head.k < OVERLAP_K:
                overlap_P = overlap_P[:0]
            overlap_share_P, _ = top_overlap(*states_at(overlap_P), k=OVERLAP_K)
            likely = None
            if len(likely_P):
                likely = likely_tokens(*states_at(likely_P), ids_T[likely_P], LIKELY_K, *settings[1:])
        return ObjectiveOutput(loss, scores, overlap_share_P, likely)

    @torch.no_grad()
    def score(
        self, batch: RolloutBatch, teacher: TeacherStates, term: Term | None, extras: Collection[str]
    ) -> TokenScores:
        """Score the batch's response tokens, with the optional columns ``extras``."""
        heads = lm_head(self.student), self._teacher_head.whole()
        h_s_TD = response_states(self.student, batch)
        states = (h_s_TD, heads[0], teacher.wait().to(h_s_TD.device), heads[1], batch.token_ids_T)
        return token_scores(*states, *self._settings, extras, classes=term_classes(term))

    @property
    def _settings(self) -> tuple[Divergence, float, int]:
        """What scores and loss are computed with."""
        return self._section.divergence, self._section.temperature, self._section.tokens_per_chunk
