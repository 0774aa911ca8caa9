"""What inner products say about groups of positions: norms, cosines, shares, rates, and their intervals over batches.

For one batch, with g_A the gradient of group A, g = Σ_A g_A, and all inner products taken over a block or over all:

    norm    ‖g_A‖
    cosine  ⟨g_A, g⟩ / (‖g_A‖ ‖g‖)
    share   ⟨g_A, g⟩ / ‖g‖²              signed; the groups' shares sum to 1
    rate    (‖u_A‖ / ‖g_A‖) / (‖u‖ / ‖g‖)   how far Adam moves the weights per unit of gradient, 1 for the whole

and the first three also for the parts u_A of Adam's next step, u = Σ_A u_A (``adam``).

1. A batch gives one value. Means and 95 % intervals are over batches, which share no prompt, by Student's t, since a
   bootstrap of so few values would be too narrow (with 4 batches it covers about 80 %). It assumes normal
   values, which ratios of inner products need not be. No interval for fewer than 2 batches.
2. Does Adam suppress a group? Its share in the update minus its share in the gradient, paired by batch: it does if the
   interval lies below 0 and an exact sign test over batches, which assumes nothing, agrees (p ≤ 0.05);
   amplifies if both lie above; otherwise it is inconclusive. With fewer than 6 batches no sign test reaches 0.05.

Compare the rate of a group with that of a control of as many tokens, not with 1: random groups have other rates
too. At the first step they are far above 1, since v̂ is then the square of the whole gradient, which is next to nothing
where the groups cancel.

Where a ratio is 0 / 0, as the cosine of a group that does not occur in a batch, the batch has no value.

Shape legend: N batches, B blocks, A groups, P = A + 2 parts of a step (the groups, momentum, weight decay).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy.stats import t as student_t

from rocktokens.display.numbers import with_interval
from rocktokens.errors import RocktokensError
from rocktokens.gradients.claims import ALPHA, sign_test
from rocktokens.gradients.estimates import ratio
from rocktokens.gradients.records import (
    INCONCLUSIVE,
    AdamEffect,
    AdamVerdict,
    BatchMean,
    Geometry,
    GradientGeometry,
    GroupGeometry,
    PartitionShares,
    SharesRecord,
    UpdateGeometry,
)

OTHER_PARTS = ("momentum", "weight decay")
"""Of a step, after the groups' own."""
LEVEL = 0.95
T = TypeVar("T")


@dataclass(frozen=True, slots=True, repr=False)
class GradientShares:
    """Inner products of groups' gradients, and of the parts of Adam's next step, on several batches."""

    groups: list[str]
    blocks: list[str]
    tokens_NA: np.ndarray
    """Response tokens of each group."""
    gradient_gram_NBAA: np.ndarray
    step_gram_NBPP: np.ndarray | None
    """None when no optimizer was given."""

    def gradient(self, block: str | None = None) -> Geometry:
        """Describe the groups' gradients in a block; in all of them by default."""
        return self._geometry(self.gradient_gram_NBAA, block)

    def update(self, block: str | None = None) -> Geometry | None:
        """Describe the groups' parts of Adam's next step; their sum is what this batch contributes to it."""
        gram_NBAA = self._update_gram
        return None if gram_NBAA is None else self._geometry(gram_NBAA, block, self.gradient_gram_NBAA)

    def summary(self) -> SharesRecord:
        """Collect every number with its mean, its interval and its values by batch."""
        return SharesRecord(
            groups=self.groups,
            blocks=self.blocks,
            n_batches=len(self.tokens_NA),
            tokens=self._by_group(own.tolist() for own in self.tokens_NA.T),
            gradient=GradientGeometry(
                all=self.gradient(),
                blocks={block: self.gradient(block) for block in self.blocks},
                cosines=self._cosines(self.gradient_gram_NBAA),
            ),
            update=self._update_summary(),
        )

    def compared_with_tokens(self) -> PartitionShares:
        """Add to the summary each group's share of the gradient minus its share of the tokens, paired by batch."""
        token_share_NA = self.tokens_NA / self.tokens_NA.sum(axis=1, keepdims=True)
        excess_NA = _shares(self.gradient_gram_NBAA.sum(axis=1)) - token_share_NA
        token_share_A = self.tokens_NA.sum(axis=0) / self.tokens_NA.sum()
        return PartitionShares(
            shares=self.summary(),
            token_share=self._by_group(token_share_A.tolist()),
            excess=self._by_group(_batch_means(excess_NA)),
        )

    def __repr__(self) -> str:
        shares = ", ".join(
            f"{name} {with_interval(own.share.mean, own.share.interval)}"
            for name, own in self.gradient().groups.items()
        )
        return f"GradientShares(of the gradient: {shares}; {len(self.tokens_NA)} batches, {len(self.blocks)} blocks)"

    @property
    def _update_gram(self) -> np.ndarray | None:
        n_groups = len(self.groups)
        return None if self.step_gram_NBPP is None else self.step_gram_NBPP[:, :, :n_groups, :n_groups]

    def _update_summary(self) -> UpdateGeometry | None:
        whole, gram_NBAA = self.update(), self._update_gram
        if whole is None or gram_NBAA is None or self.step_gram_NBPP is None:
            return None
        update_NA, gradient_NA = (_shares(gram.sum(axis=1)) for gram in (gram_NBAA, self.gradient_gram_NBAA))
        step_shares = _batch_means(_shares(self.step_gram_NBPP.sum(axis=1)))
        return UpdateGeometry(
            all=whole,
            blocks={block: own for block in self.blocks if (own := self.update(block)) is not None},
            cosines=self._cosines(gram_NBAA),
            step_shares=dict(zip([*self.groups, *OTHER_PARTS], step_shares, strict=True)),
            effects=self._by_group(map(_effect, _batch_means(update_NA - gradient_NA))),
        )

    def _geometry(
        self, gram_NBAA: np.ndarray, block: str | None, gradient_gram_NBAA: np.ndarray | None = None
    ) -> Geometry:
        """Describe the groups' vectors in a block or in all; rates where the gradients behind a step are given."""
        if block is not None and block not in self.blocks:
            raise RocktokensError(f"block {block!r} is none of the student's trainable ones: use one of {self.blocks}")

        def within(whole_NBAA: np.ndarray) -> np.ndarray:
            return whole_NBAA.sum(axis=1) if block is None else whole_NBAA[:, self.blocks.index(block)]

        gram_NAA = within(gram_NBAA)
        norms_NA, whole_N = _norms(gram_NAA)
        cosines_NA = ratio(gram_NAA.sum(axis=-1), norms_NA * whole_N[:, None])
        rates: list[BatchMean | None] = [None] * len(self.groups)
        if gradient_gram_NBAA is not None:
            gradient_NA, gradient_N = _norms(within(gradient_gram_NBAA))
            rates = [*_batch_means(ratio(ratio(norms_NA, gradient_NA), ratio(whole_N, gradient_N)[:, None]))]
        columns = *map(_batch_means, (norms_NA, cosines_NA, _shares(gram_NAA))), rates
        return Geometry(
            norm=batch_mean(whole_N),
            energy=batch_mean(ratio(whole_N**2, _norms(gram_NBAA.sum(axis=1))[1] ** 2)),
            groups=self._by_group(GroupGeometry(*own) for own in zip(*columns, strict=True)),
        )

    def _cosines(self, gram_NBAA: np.ndarray) -> dict[str, dict[str, BatchMean]]:
        """Return the cosine between any two groups' vectors, over all blocks."""
        gram_NAA = gram_NBAA.sum(axis=1)
        norms_NA, _ = _norms(gram_NAA)
        cosines_NAA = ratio(gram_NAA, norms_NA[:, :, None] * norms_NA[:, None, :])
        return self._by_group(self._by_group(_batch_means(cosines_NA)) for cosines_NA in cosines_NAA.swapaxes(0, 1))

    def _by_group(self, values: Iterable[T]) -> dict[str, T]:
        return dict(zip(self.groups, values, strict=True))


def batch_mean(values_N: np.ndarray) -> BatchMean:
    """Take the mean over batches and its 95 % interval by Student's t, over the batches that have a value."""
    defined = values_N[np.isfinite(values_N)]
    values = [float(value) if np.isfinite(value) else None for value in values_N]
    if not len(defined):
        return BatchMean(None, None, values)
    mean = float(defined.mean())
    if len(defined) < 2:
        return BatchMean(mean, None, values)
    half = float(student_t.ppf((1 + LEVEL) / 2, len(defined) - 1) * defined.std(ddof=1) / np.sqrt(len(defined)))
    return BatchMean(mean, (mean - half, mean + half), values)


def _norms(gram_NAA: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the norm of every group (N, A), and of the sum of all (N,); rounding may leave a square just below 0."""
    squares_NA = np.diagonal(gram_NAA, axis1=-2, axis2=-1)
    return np.sqrt(squares_NA.clip(min=0)), np.sqrt(gram_NAA.sum(axis=(-2, -1)).clip(min=0))


def _shares(gram_NAA: np.ndarray) -> np.ndarray:
    dots_NA = gram_NAA.sum(axis=-1)
    return ratio(dots_NA, dots_NA.sum(axis=-1, keepdims=True).clip(min=0))


def _batch_means(values_NA: np.ndarray) -> list[BatchMean]:
    return [batch_mean(values_N) for values_N in values_NA.T]


def _effect(difference: BatchMean) -> AdamEffect:
    defined = [value for value in difference.values if value is not None]
    below, above = sum(value < 0 for value in defined), sum(value > 0 for value in defined)
    p = sign_test(above, below)
    verdict: AdamVerdict = INCONCLUSIVE
    if difference.interval is not None and p <= ALPHA:
        low, high = difference.interval
        verdict = "suppresses" if high < 0 and below > above else "amplifies" if low > 0 and above > below else verdict
    return AdamEffect(difference, below, above, p, verdict)
