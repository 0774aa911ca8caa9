"""The scores of every token and the weighted loss, from hidden states and LM heads, a few positions at a time.

1. Heads padded to unequal widths are both cut to the common width: a column that one model lacks is in no softmax.
2. Logits of ``tokens_per_chunk`` positions are made at a time, so nothing of size (T, V) ever exists.
3. Everything after the LM heads' products is float32, whatever the dtype of the models (float64 stays float64).
4. ``weighted_kl`` drops positions of weight 0 before both heads, and finds its gradient with respect to the student's
   hidden states and head in the same pass, chunk by chunk, instead of keeping logits for a backward pass.
5. What is minimised at a position is its divergence, or with the term ``asymmetric`` the reverse KL where the teacher
   gives the sampled token more than the student does, and the forward KL elsewhere.
6. With classes of tokens the choice within them is a column beside the divergence, and what is minimised is the rest,
   the decision, and λ times the choice (``choice.py``).
7. A teacher of which only the likeliest tokens are known gives rows in the place of states, and a ``LikelyHead`` in
   that of its head: the divergence is then that of those tokens and one tail (``tail.py``), and its entropy NaN.

Where all is on a GPU, nothing is wider than float32, Triton is there, no extra column is asked for and the teacher has
no tail, ``fused.py`` does the same in fewer passes; the host then waits for the device once a call, and once more only
to look at weights that are on the device. The divergences themselves are in ``formulas.py``, what is refused in
``checks.py``. Every position is keyed by the token it predicts: row i of ``h_s_TD`` is the state *before*
``token_ids_T[i]``.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from rocktokens.classes import TokenClasses
from rocktokens.config import Divergence
from rocktokens.errors import NonFiniteLossError, RocktokensError
from rocktokens.models.head import LMHead, wide_matmul
from rocktokens.models.likely_head import Likely, LikelyHead, OutputHead
from rocktokens.scoring import fused, fused_choice
from rocktokens.scoring.checks import (
    ASYMMETRIC_REMEDY,
    FINITE_REMEDY,
    TAIL_REMEDY,
    broken,
    refuse,
    require_finite_divergence,
    require_ids,
    require_logits,
)
from rocktokens.scoring.choice import choice, coarse, members
from rocktokens.scoring.formulas import DIVERGENCES, EXTRAS, Scored, entropy, require_extras
from rocktokens.scoring.tail import extra_column, require_known, require_named, reverse_with_tail
from rocktokens.types import CHOICE, STANDARD_COLUMNS, TokenScores

Head = torch.Tensor | OutputHead
Columns = tuple[torch.Tensor, ...]
Term = Literal["asymmetric"]
ASYMMETRIC_PARTS: tuple[Divergence, Divergence] = ("reverse", "forward")
"""Where the teacher gives the sampled token more than the student does, and elsewhere."""
LOOKED_AT = (3, 4, 0, 6)
"""Columns of the fused table in the order that ``broken`` takes them."""


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A few positions, while their logits are in memory."""

    rows: slice
    """Which positions these are."""
    columns: Columns
    """The columns (n,) of ``TokenScores``: the standard ones in their order, then what was asked for."""
    gradient_nV: torch.Tensor
    """The divergence's gradient with respect to the student's logits, over the columns that both heads have."""
    logits_nV: torch.Tensor
    """The student's."""
    student: LMHead
    """The head they come from, cut to their width."""

    @torch.no_grad()
    def state_gradient(self) -> torch.Tensor:
        """The divergence's gradient (n, D) with respect to the student's hidden states."""
        product_gradient_nV = self.student.product_gradient(self.gradient_nV, self.logits_nV)
        return _through_weight(product_gradient_nV, self.student.weight_VD)


def token_scores(
    h_s_TD: torch.Tensor,
    w_s_VD: Head,
    h_t_TE: torch.Tensor,
    w_t_VE: Head,
    token_ids_T: torch.Tensor,
    divergence: Divergence = "reverse",
    temperature: float = 1.0,
    tokens_per_chunk: int = 1024,
    extras: Collection[str] = (),
    *,
    classes: TokenClasses | None = None,
    round_logits: bool = False,
    defer_checks: bool = False,
) -> TokenScores:
    """Score every position, without gradient.

    Args:
        h_s_TD: The student's last hidden states, each the one that predicts its token.
        w_s_VD: The student's LM head: its weight, or an ``LMHead`` where there is more to it.
        h_t_TE: The teacher's hidden states at the same positions.
        w_t_VE: The teacher's LM head, or a ``LikelyHead``, whose rows then are the teacher's states.
        token_ids_T: The sampled tokens.
        divergence: What the column ``kl`` holds.
        temperature: Of both softmaxes; every column is at this temperature.
        tokens_per_chunk: Positions whose logits are in memory at once; the result does not depend on it. The fused path
            of a GPU goes by bytes instead (``fused.SCORING_BYTES``) and does not look at it.
        extras: Which of the optional columns to fill as well.
        classes: Fill ``kl_choice`` as well, the part of ``kl`` that is a choice within these classes.
        round_logits: On a GPU, keep logits in the dtype of the models, not in float32 (without extras).
        defer_checks: On a GPU, do not wait to refuse what is not finite, nor ids outside the vocabulary: the caller
            knows the ids, and will give the scores to ``require_sound_scores``.

    Returns:
        Columns of shape (T,). ``grad_norm`` is the norm of the divergence's gradient with respect to the logits.
    """
    pair = _Pair.of(w_s_VD, w_t_VE, divergence, temperature, extras, classes=classes, round_logits=round_logits)
    if pair.is_fused(h_s_TD, h_t_TE):
        token_ids_T = pair.checked_ids(h_s_TD, h_t_TE, token_ids_T, deferred=True)
        table_CT = pair.fused_table(h_s_TD, h_t_TE, token_ids_T)
        if not defer_checks:
            pair.require_sound(table_CT, None, token_ids_T)
        return TokenScores(**dict(zip(pair.columns, _columns(table_CT), strict=True)))
    chunks = pair.chunks(h_s_TD, h_t_TE, token_ids_T, tokens_per_chunk)
    # map lets go of a chunk before it asks for the next: two of them are never in memory
    columns = _concatenate(list(map(attrgetter("columns"), chunks)), h_s_TD, len(pair.columns))
    return TokenScores(**dict(zip(pair.columns, columns, strict=True)))


def scored_chunks(
    h_s_TD: torch.Tensor,
    w_s_VD: Head,
    h_t_TE: torch.Tensor,
    w_t_VE: Head,
    token_ids_T: torch.Tensor,
    divergence: Divergence = "reverse",
    temperature: float = 1.0,
    tokens_per_chunk: int = 1024,
    extras: Collection[str] = (),
) -> Iterator[ScoredChunk]:
    """The scores a few positions at a time, with the gradients whose length is ``grad_norm``.

    Takes what ``token_scores`` takes. A chunk is as large as its logits: let go of it before asking for the next.
    """
    pair = _Pair.of(w_s_VD, w_t_VE, divergence, temperature, extras)
    yield from pair.chunks(h_s_TD, h_t_TE, token_ids_T, tokens_per_chunk)


def weighted_kl(
    h_s_TD: torch.Tensor,
    w_s_VD: Head,
    h_t_TE: torch.Tensor,
    w_t_VE: Head,
    token_ids_T: torch.Tensor,
    weights_T: torch.Tensor,
    denominator: float,
    divergence: Divergence = "reverse",
    temperature: float = 1.0,
    tokens_per_chunk: int = 1024,
    term: Term | None = None,
    *,
    classes: TokenClasses | None = None,
    lam: float = 0.0,
    round_logits: bool = False,
    defer_checks: bool = False,
) -> tuple[torch.Tensor, TokenScores]:
    """Compute Σ weight · divergence / denominator (docs/method.md, section 7), differentiable in the student.

    Takes what ``token_scores`` takes, and

    - ``weights_T``: the weight of each position, taken as a constant. Weights and ids are best left on the CPU, where
      looking at them never waits for a GPU. The teacher's states and head never get a gradient.
    - ``denominator``: of the whole update (all micro-batches, all ranks), so that its parts add up.
    - ``term``: None minimises ``divergence``; ``asymmetric`` the reverse KL where the teacher's probability of the
      sampled token is greater than the student's, the forward KL elsewhere. The scores stay those of ``divergence``.
    - ``lam``: with ``classes``, how much of the choice within them is minimised beside the decision: 0 leaves it out, 1
      is the loss without classes, bit for bit. The scores stay those of ``divergence``, with ``kl_choice``.
    - ``defer_checks``: where a divergence is not finite, the loss is not finite either, and the caller is about to read
      it. Ids on a GPU are not looked at either: the caller knows them.

    Returns:
        The loss, and the scores, NaN at positions of weight 0. With every weight 0 the loss is 0 and its gradients are
        zeros, not missing.
    """
    pair = _Pair.of(
        w_s_VD, w_t_VE, divergence, temperature, term=term, classes=classes, lam=lam, round_logits=round_logits
    )
    is_fused, device = pair.is_fused(h_s_TD, h_t_TE), h_s_TD.device
    token_ids_T = pair.checked_ids(h_s_TD, h_t_TE, token_ids_T, deferred=is_fused)
    checked_T = _checked_weights(weights_T, denominator, h_s_TD)
    rows_N = None if checked_T.all() else fused.sent(np.flatnonzero(checked_T), device)
    weights_N = torch.from_numpy(checked_T[checked_T != 0])  # a copy: it is sent when the caller may have gone on
    arrays_T = (h_s_TD, h_t_TE, token_ids_T)
    if is_fused:
        total, table_CN = pair.fused_sum(*arrays_T, weights_N, rows_N)
        if not defer_checks:
            pair.require_sound(table_CN, rows_N, token_ids_T)
        columns = _columns(table_CN)
    else:
        rows_T = torch.arange(len(h_s_TD), device=device)
        h_s_ND, *arrays_N, names_N = (_kept(array_T, rows_N) for array_T in (*arrays_T, rows_T))
        head, arrays_N = (pair.student.weight_VD, pair.student.bias_V), (*arrays_N, weights_N.to(device), names_N)
        total, *columns = _WeightedSum.apply(h_s_ND, *head, *arrays_N, pair, tokens_per_chunk)
    loss = total / denominator if len(weights_N) else total
    spread = (_spread(column_N, rows_N, len(h_s_TD)) for column_N in columns)
    return loss, TokenScores(**dict(zip(pair.columns, spread, strict=True)))


@torch.no_grad()
def top_overlap(
    h_s_TD: torch.Tensor, w_s_VD: Head, h_t_TE: torch.Tensor, w_t_VE: Head, k: int = 16, tokens_per_chunk: int = 1024
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far the two models agree on what may come next, at temperature 1.

    Returns:
        The share (T,) of the student's ``k`` likeliest tokens that are among the teacher's ``k`` likeliest, and the
        probability (T,) the student gives to those shared ones.
    """
    pair = _Pair.of(w_s_VD, w_t_VE, "reverse", 1.0).cast_for(h_s_TD, h_t_TE)
    k = min(k, pair.student.width)
    empty = h_s_TD.new_zeros(0, dtype=_wide(h_s_TD))
    shares, masses = [empty], [empty]
    for here in fused.slices(0, len(h_s_TD), tokens_per_chunk):
        top_s = torch.log_softmax(pair.student.logits(h_s_TD[here]), dim=-1).topk(k)
        top_t = pair.teacher_top(h_t_TE[here], k)
        shared = (top_s.indices.unsqueeze(-1) == top_t.unsqueeze(-2)).any(dim=-1)
        shares.append(shared.to(top_s.values.dtype).mean(dim=-1))
        masses.append((top_s.values.exp() * shared).sum(dim=-1))
    return torch.cat(shares), torch.cat(masses)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two heads of one width and what is computed between them."""

    student: LMHead
    teacher: OutputHead
    divergence: Divergence
    temperature: float
    extras: tuple[str, ...] = ()
    term: Term | None = None
    round_logits: bool = False
    classes: TokenClasses | None = None
    lam: float = 1.0

    @classmethod
    def of(
        cls,
        student: Head,
        teacher: Head,
        divergence: Divergence,
        temperature: float,
        extras: Collection[str] = (),
        term: Term | None = None,
        round_logits: bool = False,
        classes: TokenClasses | None = None,
        lam: float = 1.0,
    ) -> "_Pair":
        if divergence not in DIVERGENCES:
            raise RocktokensError(f"divergence is {divergence!r}: use one of {', '.join(DIVERGENCES)}")
        if not temperature > 0:
            raise RocktokensError(f"scoring.temperature is {temperature}: it must be greater than 0")
        if term is not None and term not in get_args(Term):
            raise RocktokensError(f"term is {term!r}: use {', '.join(get_args(Term))} or None")
        heads = [(LMHead(head) if isinstance(head, torch.Tensor) else head).whole() for head in (student, teacher)]
        width = min(head.width for head in heads)
        if isinstance(heads[0], LikelyHead):
            raise RocktokensError("the student has no LM head: give that of a causal LM")
        if classes is not None:
            classes.require_width(width)
            _require_coarse(term, lam)
        settings = (divergence, temperature, require_extras(extras), term, round_logits, classes, lam)
        if isinstance(heads[1], LikelyHead):
            other = CHOICE if classes is not None else None if term is None else f"term {term}"
            require_known(heads[1].k, divergence=divergence, temperature=temperature, extras=settings[2], other=other)
        return cls(heads[0].cut(width), heads[1].cut(width), *settings)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that ``score`` fills."""
        return (*STANDARD_COLUMNS, *self.extras, *([] if self.classes is None else [CHOICE]))

    def cast_for(self, h_s_TD: torch.Tensor, h_t_TE: torch.Tensor) -> "_Pair":
        """Convert both weights once, not once a chunk."""
        return replace(self, student=self.student.cast_for(h_s_TD), teacher=self.teacher.cast_for(h_t_TE))

    def checked_ids(
        self, h_s_TD: torch.Tensor, h_t_TE: torch.Tensor, token_ids_T: torch.Tensor, deferred: bool = False
    ) -> torch.Tensor:
        """The ids beside the states; refuses arrays of unequal length, and ids outside the common width.

        With ``deferred``, ids that are on a GPU are left to ``require_sound``.
        """
        if not len(h_s_TD) == len(h_t_TE) == len(token_ids_T):
            raise RocktokensError(
                f"h_s_TD has {len(h_s_TD)} rows, h_t_TE {len(h_t_TE)} and token_ids_T {len(token_ids_T)}: "
                "give one of each per position"
            )
        token_ids_T = token_ids_T.long()  # a narrow id cannot be compared with a wide vocabulary
        if not (deferred and token_ids_T.is_cuda):
            require_ids(token_ids_T, self.student.width)
        return fused.sent(token_ids_T, h_s_TD.device).contiguous()

    def is_fused(self, h_s_TD: torch.Tensor, h_t_TE: torch.Tensor) -> bool:
        """Whether ``fused.py`` computes this."""
        if self.classes is not None and (self.divergence != "reverse" or not fused_choice.takes(self.classes)):
            return False
        if isinstance(self.teacher, LikelyHead):
            return False
        return not self.extras and fused.takes(h_s_TD, self.student, h_t_TE, self.teacher)

    @torch.no_grad()
    def fused_table(self, h_s_ND: torch.Tensor, h_t_NE: torch.Tensor, token_ids_N: torch.Tensor) -> torch.Tensor:
        """The table of ``fused.scored``."""
        cast = self.cast_for(h_s_ND, h_t_NE)
        assert isinstance(cast.teacher, LMHead)  # by ``is_fused``
        arrays = (h_s_ND, cast.student, h_t_NE, cast.teacher, token_ids_N)
        options = {"choice": self.fused_choice(h_s_ND.device), "round_logits": self.round_logits}
        return fused.scored(*arrays, self.divergence, self.temperature, **options)

    def fused_choice(self, device: torch.device) -> fused_choice.FusedChoice | None:
        """The classes as the kernels take them."""
        return None if self.classes is None else fused_choice.FusedChoice(self.classes, self.lam, device)

    def fused_sum(
        self,
        h_s_TD: torch.Tensor,
        h_t_TE: torch.Tensor,
        token_ids_T: torch.Tensor,
        weights_N: torch.Tensor,
        rows_N: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Σ weight · term over some positions, differentiable, and the same table of those."""
        with torch.no_grad():
            cast = self.cast_for(h_s_TD, h_t_TE)
        assert isinstance(cast.teacher, LMHead)  # by ``is_fused``
        head = (self.student.weight_VD, self.student.bias_V, cast.student)
        arrays = (h_s_TD, *head, h_t_TE, cast.teacher, token_ids_T, weights_N)
        settings = (self.divergence, self.temperature, self.term == "asymmetric")
        options = {"choice": self.fused_choice(h_s_TD.device), "round_logits": self.round_logits}
        return fused.weighted_sum(*arrays, *settings, rows_N=rows_N, **options)

    def require_sound(self, table_CN: torch.Tensor, rows_N: torch.Tensor | None, token_ids_T: torch.Tensor) -> None:
        """Refuse what the torch path refuses; all of it is looked at together, so that the host waits once."""
        broken_4N = broken(*(table_CN[column] for column in LOOKED_AT))
        is_outside_T = (token_ids_T < 0) | (token_ids_T >= self.student.width)
        if not (broken_4N.any() | is_outside_T.any()).item():
            return
        require_ids(token_ids_T, self.student.width)
        refuse(broken_4N, _kept(torch.arange(len(token_ids_T), device=token_ids_T.device), rows_N))

    def chunks(
        self, h_s_TD: torch.Tensor, h_t_TE: torch.Tensor, token_ids_T: torch.Tensor, tokens_per_chunk: int
    ) -> Iterator[ScoredChunk]:
        """The scores of all positions, a few at a time, as records."""
        token_ids_T = self.checked_ids(h_s_TD, h_t_TE, token_ids_T)
        with torch.no_grad():
            cast = self.cast_for(h_s_TD, h_t_TE)
        rows_T = torch.arange(len(token_ids_T), device=token_ids_T.device)
        for here in fused.slices(0, len(rows_T), tokens_per_chunk):
            with torch.no_grad():
                arrays_n = (h_s_TD[here], h_t_TE[here], token_ids_T[here], rows_T[here])
                columns, (_, gradient_nV), logits_nV = cast.score(*arrays_n)
            yield ScoredChunk(here, columns, gradient_nV, logits_nV, cast.student)

    def score(
        self, h_s_nD: torch.Tensor, h_t_nE: torch.Tensor, token_ids_n: torch.Tensor, rows_n: torch.Tensor
    ) -> tuple[Columns, Scored, torch.Tensor]:
        """The columns (n,) of a few positions, what is minimised there with its gradient (n, V), and the logits.

        The gradient is with respect to the student's logits. ``rows_n`` are the positions' names in error messages.
        """
        z_nV = self.student.logits(h_s_nD)
        log_p = _log_softmax(z_nV, self.temperature, "student", rows_n)
        if isinstance(self.teacher, LikelyHead):
            return *self._score_likely(log_p, self.teacher.read(h_t_nE), token_ids_n, rows_n), z_nV
        log_q = _log_softmax(self.teacher.logits(h_t_nE), self.temperature, "teacher", rows_n)
        distributions = (log_p.exp(), log_p, log_q.exp(), log_q)
        scored = self._scored(self.divergence, distributions)
        require_finite_divergence(~scored[0].isfinite(), rows_n, FINITE_REMEDY)
        ids = token_ids_n.unsqueeze(-1)
        logp_s_n, logp_t_n = (log.gather(-1, ids).squeeze(-1) for log in (log_p, log_q))
        entropies = entropy(*distributions[:2]), entropy(*distributions[2:])
        extras = (EXTRAS[name](*distributions) for name in self.extras)
        columns = (scored[0], logp_s_n, logp_t_n, *entropies, scored[1].norm(dim=-1), *extras)
        if self.classes is not None:
            choice_n, slopes = choice(self.divergence, log_p, log_q, members(self.classes, log_p.device))
            choice_n = torch.minimum(choice_n, scored[0])
            columns = (*columns, choice_n)
            if self.lam != 1.0:
                scored = coarse(scored, choice_n, slopes, distributions[0], self.lam, 1.0 / self.temperature)
        if self.term == "asymmetric":
            scored = self._asymmetric(scored, distributions, logp_t_n > logp_s_n)
            require_finite_divergence(~scored[0].isfinite(), rows_n, ASYMMETRIC_REMEDY)
        return columns, scored, z_nV

    def _score_likely(
        self, log_p: torch.Tensor, likely: Likely, token_ids_n: torch.Tensor, rows_n: torch.Tensor
    ) -> tuple[Columns, Scored]:
        """The same of a teacher of which only the likeliest tokens are known; its entropy is not (NaN)."""
        scored = reverse_with_tail(log_p, likely)
        require_finite_divergence(~scored[0].isfinite(), rows_n, TAIL_REMEDY)
        logp_s_n = log_p.gather(-1, token_ids_n.unsqueeze(-1)).squeeze(-1)
        entropies = entropy(log_p.exp(), log_p), torch.full_like(logp_s_n, torch.nan)
        extras = (extra_column(name, log_p, likely) for name in self.extras)
        columns = (scored[0], logp_s_n, likely.written_N.to(logp_s_n), *entropies, scored[1].norm(dim=-1), *extras)
        return columns, scored

    def teacher_top(self, h_t_nE: torch.Tensor, k: int) -> torch.Tensor:
        """The ids (n, k) of the tokens that the teacher finds likeliest."""
        if isinstance(self.teacher, LMHead):
            return self.teacher.logits(h_t_nE).topk(k).indices
        require_named(k, self.teacher.k)
        return self.teacher.read(h_t_nE).ids_NK[:, :k]

    def _scored(self, divergence: Divergence, distributions: Columns) -> Scored:
        """A divergence (n,) and its gradient (n, V) with respect to the logits."""
        divergence_n, gradient_nV = DIVERGENCES[divergence](*distributions)
        return divergence_n, gradient_nV / self.temperature

    def _asymmetric(self, own: Scored, distributions: Columns, underrated_n: torch.Tensor) -> Scored:
        """The reverse KL at tokens the student underrates, the forward KL elsewhere; ``own`` is not computed again."""
        reverse, forward = (
            own if part == self.divergence else self._scored(part, distributions) for part in ASYMMETRIC_PARTS
        )
        term_n = torch.where(underrated_n, reverse[0], forward[0])
        return term_n, torch.where(underrated_n.unsqueeze(-1), reverse[1], forward[1])


class _WeightedSum(torch.autograd.Function):
    """Σ weight · term, whose gradient is found in the forward pass and only scaled in the backward pass."""

    @staticmethod
    def forward(ctx, h_s_ND, weight_VD, bias_V, h_t_NE, token_ids_N, weights_N, rows_N, pair, tokens_per_chunk):
        pair = pair.cast_for(h_s_ND, h_t_NE)
        inputs = (h_s_ND, weight_VD, bias_V)
        wanted = ctx.needs_input_grad[:3]
        gradients = [
            torch.zeros_like(x, dtype=_wide(x)) if needed else None for x, needed in zip(inputs, wanted, strict=True)
        ]
        arrays = (h_s_ND, h_t_NE, token_ids_N, rows_N)
        chunks = [
            _add_chunk(gradients, here, weights_N[here], pair, *(array_N[here] for array_N in arrays))
            for here in fused.slices(0, len(rows_N), tokens_per_chunk)
        ]
        term_N, *columns = _concatenate(chunks, h_s_ND, 1 + len(pair.columns))
        ctx.gradients = [None if g is None else (g, x.dtype) for g, x in zip(gradients, inputs, strict=True)]
        ctx.mark_non_differentiable(*columns)
        return ((term_N * weights_N).sum(), *columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        scaled = [g and (g[0] * grad_outputs[0]).to(g[1]) for g in ctx.gradients]
        return (*scaled, *[None] * 6)


def _add_chunk(
    gradients: list[torch.Tensor | None],
    here: slice,
    weights_n: torch.Tensor,
    pair: _Pair,
    h_nD: torch.Tensor,
    *arrays_n: torch.Tensor,
) -> Columns:
    """What is minimised at a few positions, then their columns; adds to the gradients of h, W and b that are wanted."""
    columns, (term_n, gradient_nV), z_nV = pair.score(h_nD, *arrays_n)
    gradient_nV = pair.student.product_gradient(gradient_nV, z_nV) * weights_n.unsqueeze(-1)
    h_grad, weight_grad, bias_grad = gradients
    if bias_grad is not None:
        bias_grad += gradient_nV.sum(dim=0)
    weight_VD = pair.student.weight_VD
    gradient_nV = gradient_nV.to(weight_VD.dtype)
    if h_grad is not None:
        h_grad[here] = _through_weight(gradient_nV, weight_VD)
    if weight_grad is not None:
        weight_grad += _through_weight(gradient_nV.T, h_nD.to(weight_VD.dtype))
    return term_n, *columns


def _require_coarse(term: Term | None, lam: float) -> None:
    if term is not None:
        raise RocktokensError(
            f"term is {term!r} and classes are given, but choice and decision are parts of one divergence and "
            f"{term} has two: leave out one of them"
        )
    if not 0 <= lam < math.inf:
        raise RocktokensError(f"lam is {lam}: it must be 0, which leaves the choice out, or a positive number")


def _through_weight(gradient_nV: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """The product of a gradient with a matrix, in the matrix's dtype and summed in float32 at least."""
    with torch.autocast(weight_VD.device.type, enabled=False):
        return wide_matmul(gradient_nV.to(weight_VD.dtype), weight_VD)


def _log_softmax(logits_nV: torch.Tensor, temperature: float, model: str, rows_n: torch.Tensor) -> torch.Tensor:
    """Log-probabilities; a row that holds NaN or +inf, or rules out every token, is named in the error."""
    log_p = torch.log_softmax(logits_nV / temperature, dim=-1)
    require_logits(log_p.sum(dim=-1).isnan(), model, rows_n)
    return log_p


def _checked_weights(weights_T: torch.Tensor, denominator: float, h_TD: torch.Tensor) -> np.ndarray:
    """The weights as constants in the dtype of the loss.

    In numpy: to select among a few thousand numbers torch may wake all its threads, which can take milliseconds.
    """
    checked_T = torch.as_tensor(weights_T, dtype=_wide(h_TD), device="cpu").detach().numpy()
    if len(checked_T) != len(h_TD):
        raise RocktokensError(f"weights_T has {len(checked_T)} entries for {len(h_TD)} positions: give one of each")
    if not np.isfinite(checked_T).all():
        raise NonFiniteLossError("weights_T holds NaN or infinite weights: fix the weight policy that made them")
    if checked_T.any() and not 0 < denominator < math.inf:
        raise RocktokensError(f"the loss's denominator is {denominator}: it must be a positive number of tokens")
    return checked_T


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _columns(table_CN: torch.Tensor) -> Columns:
    """The columns of a fused table without what is minimised."""
    return (*table_CN[: fused.TERM], *table_CN[fused.TERM + 1 :])


def _concatenate(chunks: list[Columns], h_TD: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The columns of all chunks; ``count`` empty ones when there is no row."""
    if not chunks:
        return [h_TD.new_zeros(0, dtype=_wide(h_TD)) for _ in range(count)]
    return [torch.cat(column) for column in zip(*chunks, strict=True)]


def _kept(array_T: torch.Tensor, rows_N: torch.Tensor | None) -> torch.Tensor:
    """Some of the rows; without ``rows_N`` all of them."""
    return array_T if rows_N is None else array_T[rows_N]


def _spread(column_N: torch.Tensor, rows_N: torch.Tensor | None, n_rows: int) -> torch.Tensor:
    """Put the kept rows back among all rows; the dropped ones are NaN."""
    if rows_N is None:
        return column_N
    spread_T = column_N.new_full((n_rows,), torch.nan)
    spread_T[rows_N] = column_N
    return spread_T
