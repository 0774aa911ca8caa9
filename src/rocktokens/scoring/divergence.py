"""The divergence of student and teacher at every token, its gradient, and the weighted loss. The sign is written here.

With z the logits, p = softmax(z_student / τ), q = softmax(z_teacher / τ), natural logarithms, the whole vocabulary:

    reverse  Σ p (log p − log q)              ∂/∂z_v = p_v (a_v − Σ p a) / τ    with a = log p − log q
    forward  Σ q (log q − log p)                     = (p_v − q_v) / τ
    jsd      ½ Σ p log(p/m) + ½ Σ q log(q/m)         = p_v (a_v − Σ p a) / τ    with a = ½ log(p/m), m = (p + q) / 2

1. Heads padded to unequal widths are both cut to the common width: a column that one model lacks is in no softmax.
2. Logits of ``tokens_per_chunk`` positions are made at a time, so nothing of size (T, V) ever exists.
3. Everything after the LM heads' products is float32, whatever the dtype of the models (float64 stays float64).
4. ``weighted_kl`` drops positions of weight 0 before both heads, and finds its gradient with respect to the student's
   hidden states and head in the same pass, chunk by chunk, instead of keeping logits for a backward pass.

Every position is keyed by the token it predicts: row i of ``h_s_TD`` is the state *before* ``token_ids_T[i]``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rocktokens.config import Divergence
from rocktokens.errors import NonFiniteLossError, RocktokensError
from rocktokens.models.head import LMHead, wide_matmul
from rocktokens.types import TokenScores

Head = torch.Tensor | LMHead
Columns = tuple[torch.Tensor, ...]
Scored = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A few positions, while their logits are in memory."""

    rows: slice
    """Which positions these are."""
    columns: Columns
    """The columns (n,) of ``TokenScores``, in their order."""
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
) -> TokenScores:
    """Score every position, without gradient.

    Args:
        h_s_TD: The student's last hidden states, each the one that predicts its token.
        w_s_VD: The student's LM head: its weight, or an ``LMHead`` where there is more to it.
        h_t_TE: The teacher's hidden states at the same positions.
        w_t_VE: The teacher's LM head.
        token_ids_T: The sampled tokens.
        divergence: What the column ``kl`` holds.
        temperature: Of both softmaxes; every column is at this temperature.
        tokens_per_chunk: Positions whose logits are in memory at once; the result does not depend on it.

    Returns:
        Columns of shape (T,). ``grad_norm`` is the norm of the divergence's gradient with respect to the logits.
    """
    chunks = scored_chunks(h_s_TD, w_s_VD, h_t_TE, w_t_VE, token_ids_T, divergence, temperature, tokens_per_chunk)
    # map lets go of a chunk before it asks for the next: two of them are never in memory
    return TokenScores(*_concatenate(list(map(attrgetter("columns"), chunks)), h_s_TD))


def scored_chunks(
    h_s_TD: torch.Tensor,
    w_s_VD: Head,
    h_t_TE: torch.Tensor,
    w_t_VE: Head,
    token_ids_T: torch.Tensor,
    divergence: Divergence = "reverse",
    temperature: float = 1.0,
    tokens_per_chunk: int = 1024,
) -> Iterator[ScoredChunk]:
    """The scores a few positions at a time, with the gradients whose length is ``grad_norm``.

    Takes what ``token_scores`` takes. A chunk is as large as its logits: let go of it before asking for the next.
    """
    pair = _Pair.of(w_s_VD, w_t_VE, divergence, temperature)
    pair.require_rows(h_s_TD, h_t_TE, token_ids_T)
    with torch.no_grad():
        pair = pair.cast_for(h_s_TD, h_t_TE)
    rows_T = torch.arange(len(token_ids_T), device=token_ids_T.device)
    for here in _slices(len(rows_T), tokens_per_chunk):
        yield pair.scored_chunk(here, h_s_TD[here], h_t_TE[here], token_ids_T[here], rows_T[here])


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
) -> tuple[torch.Tensor, TokenScores]:
    """The loss Σ weight · divergence / denominator of METHOD 7, differentiable in the student's states and head.

    Args:
        h_s_TD: The student's last hidden states, each the one that predicts its token.
        w_s_VD: The student's LM head: its weight, or an ``LMHead`` where there is more to it.
        h_t_TE: The teacher's hidden states at the same positions; never get a gradient, nor does its head.
        w_t_VE: The teacher's LM head.
        token_ids_T: The sampled tokens.
        weights_T: The weight of each position, taken as a constant.
        denominator: Of the whole update (all micro-batches, all ranks), so that its parts add up.
        divergence: What is minimised.
        temperature: Of both softmaxes.
        tokens_per_chunk: Positions whose logits are in memory at once; the result does not depend on it.

    Returns:
        The loss, and the scores, NaN at positions of weight 0. With every weight 0 the loss is 0 and its gradients are
        zeros, not missing.
    """
    pair = _Pair.of(w_s_VD, w_t_VE, divergence, temperature)
    pair.require_rows(h_s_TD, h_t_TE, token_ids_T)
    weights_T = _checked_weights(weights_T, denominator, h_s_TD)
    rows_N = torch.nonzero(weights_T).flatten()
    total, *columns = _WeightedSum.apply(
        h_s_TD[rows_N],
        pair.student.weight_VD,
        pair.student.bias_V,
        h_t_TE[rows_N],
        token_ids_T[rows_N],
        weights_T[rows_N],
        rows_N,
        pair,
        tokens_per_chunk,
    )
    loss = total / denominator if len(rows_N) else total
    return loss, TokenScores(*(_spread(column_N, rows_N, len(weights_T)) for column_N in columns))


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
    for here in _slices(len(h_s_TD), tokens_per_chunk):
        top_s = torch.log_softmax(pair.student.logits(h_s_TD[here]), dim=-1).topk(k)
        top_t = pair.teacher.logits(h_t_TE[here]).topk(k)
        shared = (top_s.indices.unsqueeze(-1) == top_t.indices.unsqueeze(-2)).any(dim=-1)
        shares.append(shared.to(top_s.values.dtype).mean(dim=-1))
        masses.append((top_s.values.exp() * shared).sum(dim=-1))
    return torch.cat(shares), torch.cat(masses)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two heads of one width and what is computed between them."""

    student: LMHead
    teacher: LMHead
    divergence: Divergence
    temperature: float

    @classmethod
    def of(cls, student: Head, teacher: Head, divergence: Divergence, temperature: float) -> "_Pair":
        if divergence not in _DIVERGENCES:
            raise RocktokensError(f"divergence is {divergence!r}: use one of {', '.join(_DIVERGENCES)}")
        if not temperature > 0:
            raise RocktokensError(f"scoring.temperature is {temperature}: it must be greater than 0")
        heads = [head if isinstance(head, LMHead) else LMHead(head) for head in (student, teacher)]
        width = min(head.width for head in heads)
        return cls(heads[0].cut(width), heads[1].cut(width), divergence, temperature)

    def cast_for(self, h_s_TD: torch.Tensor, h_t_TE: torch.Tensor) -> "_Pair":
        """Convert both weights once, not once a chunk."""
        return replace(self, student=self.student.cast_for(h_s_TD), teacher=self.teacher.cast_for(h_t_TE))

    def require_rows(self, h_s_TD: torch.Tensor, h_t_TE: torch.Tensor, token_ids_T: torch.Tensor) -> None:
        """Refuse arrays of unequal length, and ids outside the common width."""
        if not len(h_s_TD) == len(h_t_TE) == len(token_ids_T):
            raise RocktokensError(
                f"h_s_TD has {len(h_s_TD)} rows, h_t_TE {len(h_t_TE)} and token_ids_T {len(token_ids_T)}: "
                "give one of each per position"
            )
        width = self.student.width
        outside = token_ids_T[(token_ids_T < 0) | (token_ids_T >= width)]
        if len(outside):
            raise RocktokensError(
                f"token id {int(outside[0])} is outside the {width} logits that student and teacher share: "
                "use rollouts that were made with their tokenizer"
            )

    @torch.no_grad()
    def scored_chunk(self, here: slice, *arrays_n: torch.Tensor) -> ScoredChunk:
        """What ``logit_gradient`` says of a few positions, as a record."""
        return ScoredChunk(here, *self.logit_gradient(*arrays_n), self.student)

    def score(
        self, h_s_nD: torch.Tensor, h_t_nE: torch.Tensor, token_ids_n: torch.Tensor, rows_n: torch.Tensor
    ) -> tuple[Columns, torch.Tensor]:
        """The columns (n,) of a few positions, and their divergences' gradients (n, V) with respect to W h + b."""
        columns, gradient_nV, z_nV = self.logit_gradient(h_s_nD, h_t_nE, token_ids_n, rows_n)
        return columns, self.student.product_gradient(gradient_nV, z_nV)

    def logit_gradient(
        self, h_s_nD: torch.Tensor, h_t_nE: torch.Tensor, token_ids_n: torch.Tensor, rows_n: torch.Tensor
    ) -> tuple[Columns, torch.Tensor, torch.Tensor]:
        """The columns (n,) of a few positions, their gradients (n, V) with respect to the logits, and the logits.

        ``rows_n`` are the positions' names in error messages.
        """
        z_nV = self.student.logits(h_s_nD)
        log_p = _log_softmax(z_nV, self.temperature, "student", rows_n)
        log_q = _log_softmax(self.teacher.logits(h_t_nE), self.temperature, "teacher", rows_n)
        p, q = log_p.exp(), log_q.exp()
        kl_n, gradient_nV = _DIVERGENCES[self.divergence](p, log_p, q, log_q)
        _require_finite(kl_n, rows_n)
        gradient_nV = gradient_nV / self.temperature
        ids = token_ids_n.long().unsqueeze(-1)
        logp_s_n, logp_t_n = (log.gather(-1, ids).squeeze(-1) for log in (log_p, log_q))
        columns = (kl_n, logp_s_n, logp_t_n, _entropy(p, log_p), _entropy(q, log_q), gradient_nV.norm(dim=-1))
        return columns, gradient_nV, z_nV


class _WeightedSum(torch.autograd.Function):
    """Σ weight · divergence, whose gradient is found in the forward pass and only scaled in the backward pass."""

    @staticmethod
    def forward(ctx, h_s_ND, weight_VD, bias_V, h_t_NE, token_ids_N, weights_N, rows_N, pair, tokens_per_chunk):
        pair = pair.cast_for(h_s_ND, h_t_NE)
        inputs = (h_s_ND, weight_VD, bias_V)
        wanted = ctx.needs_input_grad[:3]
        gradients = [_wide_zeros(x) if needed else None for x, needed in zip(inputs, wanted, strict=True)]
        chunks = []
        for here in _slices(len(rows_N), tokens_per_chunk):
            columns, gradient_nV = pair.score(h_s_ND[here], h_t_NE[here], token_ids_N[here], rows_N[here])
            chunks.append(columns)
            _accumulate(gradients, here, gradient_nV * weights_N[here].unsqueeze(-1), h_s_ND, pair.student.weight_VD)
        columns = _concatenate(chunks, h_s_ND)
        ctx.gradients = [None if g is None else (g, x.dtype) for g, x in zip(gradients, inputs, strict=True)]
        ctx.mark_non_differentiable(*columns)
        return ((columns[0] * weights_N).sum(), *columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        scaled = [g and (g[0] * grad_outputs[0]).to(g[1]) for g in ctx.gradients]
        return (*scaled, *[None] * 6)


def _accumulate(
    gradients: list[torch.Tensor | None],
    here: slice,
    gradient_nV: torch.Tensor,
    h_ND: torch.Tensor,
    weight_VD: torch.Tensor,
) -> None:
    """Carry a chunk's gradient with respect to W h + b on to h, W and b, those that are wanted."""
    h_grad, weight_grad, bias_grad = gradients
    if bias_grad is not None:
        bias_grad += gradient_nV.sum(dim=0)
    gradient_nV = gradient_nV.to(weight_VD.dtype)
    if h_grad is not None:
        h_grad[here] = _through_weight(gradient_nV, weight_VD)
    if weight_grad is not None:
        weight_grad += _through_weight(gradient_nV.T, h_ND[here].to(weight_VD.dtype))


def _through_weight(gradient_nV: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """The product of a gradient with a matrix, in the matrix's dtype and summed in float32 at least."""
    with torch.autocast(weight_VD.device.type, enabled=False):
        return wide_matmul(gradient_nV.to(weight_VD.dtype), weight_VD)


# The divergences: p, log p, q, log q, all (n, V) → the divergence (n,) and its gradient (n, V) with respect to z / τ.


def _reverse(p: torch.Tensor, log_p: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor) -> Scored:
    a = _log_ratio(log_p, log_q)
    return _relative_entropy(p, q, a), _centred(p, a)


def _forward(p: torch.Tensor, log_p: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor) -> Scored:
    return _relative_entropy(q, p, _log_ratio(log_q, log_p)), p - q


def _jsd(p: torch.Tensor, log_p: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor) -> Scored:
    m = (p + q) / 2
    a, b = _log_ratio_to_mean(log_p, log_q), _log_ratio_to_mean(log_q, log_p)
    return (_relative_entropy(p, m, a) + _relative_entropy(q, m, b)) / 2, _centred(p, a) / 2


_DIVERGENCES = {"reverse": _reverse, "forward": _forward, "jsd": _jsd}


def _relative_entropy(p: torch.Tensor, q: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Σ p a with a = log(p / q), summed as p a + (q − p): the same, as p and q both sum to 1, but no term is negative.

    A rounding error of a then counts p − q times instead of p times, which is next to nothing where the models agree.
    There q − p is p (exp(−a) − 1), which keeps its digits; what q exceeds e · p by is added apart, lest exp overflow.
    """
    change = a.clamp_min(-1.0).neg_().expm1_().mul_(p)
    change += torch.sub(q, p, alpha=math.e).relu_()
    return change.addcmul_(p, a).sum(dim=-1)


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


def _entropy(p: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """Where p is exactly 0, p log p is NaN and counts for nothing."""
    return -(p * log_p).nansum(dim=-1)


def _log_softmax(logits_nV: torch.Tensor, temperature: float, model: str, rows_n: torch.Tensor) -> torch.Tensor:
    """Log-probabilities; a row that holds NaN or +inf, or rules out every token, is named in the error."""
    log_p = torch.log_softmax(logits_nV / temperature, dim=-1)
    bad_n = log_p.sum(dim=-1).isnan()
    if bad_n.any():
        raise NonFiniteLossError(
            f"the {model}'s logits at row {int(rows_n[bad_n][0])} are NaN or infinite: "
            "lower training.learning_rate, or load the models in float32 (models.dtype)"
        )
    return log_p


def _require_finite(kl_n: torch.Tensor, rows_n: torch.Tensor) -> None:
    bad_n = ~kl_n.isfinite()
    if bad_n.any():
        raise NonFiniteLossError(
            f"the divergence at row {int(rows_n[bad_n][0])} is infinite, since one model rules out a token that the "
            'other does not: use scoring.divergence = "jsd", which is always finite'
        )


def _checked_weights(weights_T: torch.Tensor, denominator: float, h_TD: torch.Tensor) -> torch.Tensor:
    """The weights as constants in the dtype of the loss."""
    weights_T = torch.as_tensor(weights_T, dtype=_wide(h_TD), device=h_TD.device).detach()
    if len(weights_T) != len(h_TD):
        raise RocktokensError(f"weights_T has {len(weights_T)} entries for {len(h_TD)} positions: give one of each")
    if not weights_T.isfinite().all():
        raise NonFiniteLossError("weights_T holds NaN or infinite weights: mend the weight policy that made them")
    if weights_T.any() and not 0 < denominator < math.inf:
        raise RocktokensError(f"the loss's denominator is {denominator}: it must be a positive number of tokens")
    return weights_T


def _slices(n_rows: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, n_rows, size)]


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide_zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, dtype=_wide(x))


def _concatenate(chunks: list[Columns], h_TD: torch.Tensor) -> list[torch.Tensor]:
    """The six columns of all chunks; empty ones when there is no row."""
    if not chunks:
        return [h_TD.new_zeros(0, dtype=_wide(h_TD)) for _ in fields(TokenScores)]
    return [torch.cat(column) for column in zip(*chunks, strict=True)]


def _spread(column_N: torch.Tensor, rows_N: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Put the kept rows back among all rows; the dropped ones are NaN."""
    spread_T = column_N.new_full((n_rows,), torch.nan)
    spread_T[rows_N] = column_N
    return spread_T
