"""Replay: score finished rollouts under a student and a teacher, one forward of each.

1. Rollouts are grouped by length and forced through the teacher (``TeacherPass``), once for all students.
2. Each group is forced through the student, and scored where both predict the response tokens.
3. Scores leave a GPU without the host waiting for them; the caller that needs them waits, in another thread if it
   likes, and only then sees whether they are finite. So the host can run ahead of the GPU, unless extra columns or the
   likeliest tokens are asked for.
4. They are put back in the order of the rollouts; they do not depend on the grouping.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rocktokens.classes import TokenClasses
from rocktokens.config import Divergence
from rocktokens.errors import RocktokensError
from rocktokens.models.head import LMHead, lm_head, output_head
from rocktokens.models.likely_head import OutputHead
from rocktokens.scoring.batch import response_states
from rocktokens.scoring.checks import require_ids, require_sound_scores
from rocktokens.scoring.divergence import token_scores
from rocktokens.scoring.formulas import require_extras
from rocktokens.scoring.teacher_pass import TeacherPass, bare_model, to_host
from rocktokens.scoring.top_tokens import TopTokens
from rocktokens.types import CHOICE, STANDARD_COLUMNS, Rollout, TokenScores

States = tuple[torch.Tensor, LMHead, torch.Tensor, OutputHead, torch.Tensor]
Tables = list[tuple[list[int], torch.Tensor]]
"""Of each group: which rollouts, and in host memory something (C, T) about their tokens."""


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Scores of rollouts that may still be on their way from the GPU."""

    names: tuple[str, ...]
    """The columns of ``TokenScores`` that are filled."""
    lengths: list[int]
    """Response tokens of each rollout."""
    tables_CT: Tables
    """The columns."""
    tops: dict[str, tuple[Tables, Tables]]
    """By column of the trace, ids (K, T) and log-probabilities (K, T) of the likeliest tokens, where asked for."""
    arrived: torch.cuda.Event | None
    """After the last copy; None where nothing was copied."""
    has_entropies: bool = True
    """Whether the teacher's are known."""

    def wait(self) -> TokenScores:
        """The scores in numpy, rollout after rollout in the given order; may be called in any thread.

        Refuses scores that are not finite.
        """
        empty_CT = np.zeros((len(self.names), 0), dtype=np.float32)
        table_CT = self._in_order(self.tables_CT) if self.lengths else empty_CT
        scores = TokenScores(**dict(zip(self.names, table_CT, strict=True)))
        require_sound_scores(scores, has_entropies=self.has_entropies)
        return scores

    def wait_tops(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Ids (T, K) and log-probabilities (T, K) of the likeliest tokens, in the same order; none if not asked for."""
        return {
            name: (self._in_order(ids_KT).T, self._in_order(logp_KT).T) for name, (ids_KT, logp_KT) in self.tops.items()
        }

    def _in_order(self, tables_CT: Tables) -> np.ndarray:
        if self.arrived is not None:
            self.arrived.synchronize()
        found: dict[int, np.ndarray] = {}
        for group, table_CT in tables_CT:
            ends = np.cumsum([self.lengths[index] for index in group])[:-1]
            found.update(zip(group, np.split(table_CT.numpy(), ends, axis=1), strict=True))
        return np.concatenate([found[index] for index in range(len(self.lengths))], axis=1)


def score_rollouts(
    student: Any, teacher: Any, rollouts: Sequence[Rollout], *, tokens_per_batch: int = 16384, **settings: Any
) -> TokenScores:
    """Score every response token of ``rollouts`` once; ``settings`` are those of ``score_pass``.

    Returns:
        Numpy columns of shape (T,), rollout after rollout in the given order.
    """
    return score_pass(student, TeacherPass(teacher, rollouts, tokens_per_batch), **settings).wait()


@torch.inference_mode()
def score_pass(
    student: Any,
    teacher_pass: TeacherPass,
    *,
    divergence: Divergence = "reverse",
    temperature: float = 1.0,
    tokens_per_chunk: int = 1024,
    on_done: Callable[[int], None] | None = None,
    extras: Collection[str] = (),
    tops: TopTokens | None = None,
    classes: TokenClasses | None = None,
) -> PendingScores:
    """Score the rollouts of a ``TeacherPass`` under a student.

    Args:
        student: A ``LoadedModel`` or a transformers causal LM, of the teacher's vocabulary and on its device.
        teacher_pass: What the student wrote, and the teacher's half.
        divergence: What the column ``kl`` holds.
        temperature: Of both softmaxes.
        tokens_per_chunk: Positions whose logits are in memory at once.
        on_done: Called after each batch with the number of rollouts it scored.
        extras: Which of the optional columns of ``TokenScores`` to fill as well.
        tops: Made for this pass, finds the likeliest tokens as well; no score depends on it.
        classes: Fill ``kl_choice`` as well, the part of ``kl`` that is a choice within these classes.
    """
    names = (*STANDARD_COLUMNS, *require_extras(extras), *([] if classes is None else [CHOICE]))
    tables_CT: Tables = []
    found: dict[str, tuple[Tables, Tables]] = defaultdict(lambda: ([], []))
    teacher_head = output_head(teacher_pass.teacher)
    width = min(lm_head(bare_model(student)).width, teacher_head.width)
    for rollout in teacher_pass.rollouts:
        require_ids(rollout.token_ids, width)
    for number, (group, states) in enumerate(replayed(student, teacher_pass)):
        settings = (divergence, temperature, tokens_per_chunk, extras)
        scores = token_scores(*states, *settings, classes=classes, defer_checks=True)
        table_CT = torch.stack([getattr(scores, name) for name in names]).to(torch.float32)
        tables_CT.append((group, to_host(table_CT)))
        for name, top in (tops.of_group(number, *states[:4]) if tops else {}).items():
            for tables_KT, values_KT in zip(found[name], top, strict=True):
                tables_KT.append((group, to_host(values_KT)))
        if on_done is not None:
            on_done(len(group))
    lengths = [len(rollout.token_ids) for rollout in teacher_pass.rollouts]
    arrived, has_entropies = _mark(teacher_pass.teacher.device), isinstance(teacher_head, LMHead)
    return PendingScores(names, lengths, tables_CT, found, arrived, has_entropies)


def replayed(student: Any, teacher_pass: TeacherPass) -> Iterator[tuple[list[int], States]]:
    """Force the rollouts of a pass through both models, group after group.

    Yields indices of the rollouts of a group, and the first arguments of ``token_scores`` for their response tokens:
    the student's states and head, the teacher's states and head, the tokens.
    """
    student, teacher = bare_model(student), teacher_pass.teacher
    if student.device != teacher.device:
        raise RocktokensError(
            f"the student is on {student.device}, the teacher on {teacher.device}: load both on one device"
        )
    heads = lm_head(student), output_head(teacher)
    for group in teacher_pass:
        with torch.inference_mode():
            h_s_TD = response_states(student, group.batch)
        yield group.indices, (h_s_TD, heads[0], group.h_t_TE, heads[1], group.batch.token_ids_T)


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """Record an event after everything that was queued on the GPU so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
