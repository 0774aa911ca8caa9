"""What inner products say about groups of positions: norms, cosines, shares, rates, and their intervals over batches.

For one batch, with g_A the gradient of group A, g = Σ_A g_A, and all inner products taken over a block or over all:

    norm    ‖g_A‖
    cosine  ⟨g_A, g⟩ / (‖g_A‖ ‖g‖)
    share   ⟨g_A, g⟩ / ‖g‖²              signed; the groups' shares sum to 1
    rate    (‖u_A‖ / ‖g_A‖) / (‖u‖ / ‖g‖)   how far Adam moves the weights per unit of gradient, 1 for the whole

and the first three also for the parts u_A of Adam's next step, u = Σ_A u_A (``adam``).

1. A batch gives one value. Means and 95 % intervals are over batches, which share no prompt, by Student's t, since a
   bootstrap of so few values would be too narrow (with 4 batches it covers about 80 %). It takes the values for normal,
   which a ratio of inner products need not be. No interval below 2 batches.
2. Does Adam suppress a group? Its share in the update minus its share in the gradient, paired by batch: it does if the
   interval lies below 0 and an exact sign test over batches, which takes nothing for normal, agrees (p ≤ 0.05);
   amplifies if both lie above; otherwise it cannot be told. Below 6 batches no sign test comes out at 0.05.

Compare the rate of a group with that of a control of as many tokens, not with 1: random groups have other rates
too. At the first step they are far above 1, since v̂ is then the square of the whole gradient, which is next to nothing
where the groups cancel.

Where a ratio is 0 / 0, as the cosine of a group that does not occur in a batch, the batch has no value.

Shape legend: N batches, B blocks, A groups, P = A + 2 parts of a step (the groups, momentum, weight decay).
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy.stats import t as student_t

from rocktokens.errors import RocktokensError
from rocktokens.gradients.estimates import ratio
from rocktokens.gradients.verdicts import ALPHA, sign_test

OTHER_PARTS = ("momentum", "weight decay")
"""Of a step, after the groups' own."""
LEVEL = 0.95
Interval = tuple[float, float]
AdamVerdict = Literal["suppresses", "amplifies", "cannot be told"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over batches; None where there is nothing to take it over."""

    mean: float | None
    interval: Interval | None
    values: list[float | None]
    """By batch."""


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One group's vector beside the sum of all."""

    norm: Estimate
    cosine: Estimate
    share: Estimate
    rate: Estimate | None = None
    """Of the update; None for a gradient."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """All groups' vectors in one block, or in all of them."""

    norm: Estimate
    """Of the sum of all groups."""
    energy: Estimate
    """Which share of the squared norm of that sum lies in this block."""
    groups: dict[str, GroupGeometry]


@dataclass(frozen=True, slots=True)
class AdamEffect:
    """What Adam does to a group's share."""

    difference: Estimate
    """Share in the update minus share in the gradient."""
    below: int
    """Batches in which the difference is below 0."""
    above: int
    p: float
    """Of the sign test."""
    verdict: AdamVerdict


@dataclass(frozen=True, slots=True)
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
        """The groups' gradients in a block; in all of them by default."""
        return _geometry(self.groups, *self._in(self.gradient_gram_NBAA, block))

    def update(self, block: str | None = None) -> Geometry | None:
        """The groups' parts of Adam's next step, likewise; their sum is what this batch contributes to it."""
        if self._update_gram is None:
            return None
        gradient_gram_NAA, _ = self._in(self.gradient_gram_NBAA, block)
        return _geometry(self.groups, *self._in(self._update_gram, block), gradient_gram_NAA)

    def gradient_cosines(self) -> dict[str, dict[str, Estimate]]:
        """The cosine between the gradients of any two groups, over all blocks."""
        return _cosine_matrix(self.groups, self.gradient_gram_NBAA.sum(axis=1))

    def update_cosines(self) -> dict[str, dict[str, Estimate]] | None:
        """The cosine between any two groups' parts of the step, over all blocks."""
        gram = self._update_gram
        return None if gram is None else _cosine_matrix(self.groups, gram.sum(axis=1))

    def step_shares(self) -> dict[str, Estimate] | None:
        """Signed shares of the whole next step: of each group, of momentum and of weight decay. They sum to 1."""
        if self.step_gram_NBPP is None:
            return None
        shares_NP = _shares(self.step_gram_NBPP.sum(axis=1))
        return dict(zip([*self.groups, *OTHER_PARTS], _estimates(shares_NP), strict=True))

    def adam_effects(self) -> dict[str, AdamEffect] | None:
        """Whether Adam suppresses or amplifies each group's share."""
        if self._update_gram is None:
            return None
        update_NA, gradient_NA = (_shares(gram.sum(axis=1)) for gram in (self._update_gram, self.gradient_gram_NBAA))
        differences = _estimates(update_NA - gradient_NA)
        return {name: _effect(difference) for name, difference in zip(self.groups, differences, strict=True)}

    def to_record(self) -> dict[str, Any]:
        """Everything above as JSON: every number with its mean, its interval and its values by batch."""
        effects = self.adam_effects()
        return {
            "groups": self.groups,
            "blocks": self.blocks,
            "n_batches": len(self.tokens_NA),
            "tokens": {name: own.tolist() for name, own in zip(self.groups, self.tokens_NA.T, strict=True)},
            "gradient": {**self._by_block(self.gradient), "cosines": _records(self.gradient_cosines())},
            "update": None
            if effects is None
            else {
                **self._by_block(self.update),
                "cosines": _records(self.update_cosines()),
                "step_shares": _records(self.step_shares()),
                "effects": _records(effects),
            },
        }

    @property
    def _update_gram(self) -> np.ndarray | None:
        n_groups = len(self.groups)
        return None if self.step_gram_NBPP is None else self.step_gram_NBPP[:, :, :n_groups, :n_groups]

    def _in(self, gram_NBAA: np.ndarray, block: str | None) -> tuple[np.ndarray, np.ndarray]:
        """The inner products (N, A, A) of a block or of all, and those of all."""
        if block is not None and block not in self.blocks:
            raise RocktokensError(f"block {block!r} is none of the student's trainable ones: use one of {self.blocks}")
        all_NAA = gram_NBAA.sum(axis=1)
        return (all_NAA if block is None else gram_NBAA[:, self.blocks.index(block)]), all_NAA

    def _by_block(self, view: Any) -> dict[str, Any]:
        return {"all": asdict(view()), "blocks": {block: asdict(view(block)) for block in self.blocks}}


def estimate(values_N: np.ndarray) -> Estimate:
    """The mean over batches and its 95 % interval by Student's t, over the batches that have a value."""
    defined = values_N[np.isfinite(values_N)]
    values = [float(value) if np.isfinite(value) else None for value in values_N]
    if not len(defined):
        return Estimate(None, None, values)
    mean = float(defined.mean())
    if len(defined) < 2:
        return Estimate(mean, None, values)
    half = float(student_t.ppf((1 + LEVEL) / 2, len(defined) - 1) * defined.std(ddof=1) / np.sqrt(len(defined)))
    return Estimate(mean, (mean - half, mean + half), values)


def _geometry(
    groups: list[str], gram_NAA: np.ndarray, all_NAA: np.ndarray, gradient_gram_NAA: np.ndarray | None = None
) -> Geometry:
    norms_NA, whole_N = _norms(gram_NAA)
    cosines_NA = ratio(gram_NAA.sum(axis=-1), norms_NA * whole_N[:, None])
    columns = zip(_estimates(norms_NA), _estimates(cosines_NA), _estimates(_shares(gram_NAA)), strict=True)
    rates = [None] * len(groups) if gradient_gram_NAA is None else _estimates(_rates(gram_NAA, gradient_gram_NAA))
    return Geometry(
        norm=estimate(whole_N),
        energy=estimate(ratio(whole_N**2, _norms(all_NAA)[1] ** 2)),
        groups={name: GroupGeometry(*own, rate) for name, own, rate in zip(groups, columns, rates, strict=True)},
    )


def _norms(gram_NAA: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of every group (N, A), and of the sum of all (N,); rounding may leave a square just below 0."""
    squares_NA = np.diagonal(gram_NAA, axis1=-2, axis2=-1)
    return np.sqrt(squares_NA.clip(min=0)), np.sqrt(gram_NAA.sum(axis=(-2, -1)).clip(min=0))


def _shares(gram_NAA: np.ndarray) -> np.ndarray:
    dots_NA = gram_NAA.sum(axis=-1)
    return ratio(dots_NA, dots_NA.sum(axis=-1, keepdims=True).clip(min=0))


def _rates(update_gram_NAA: np.ndarray, gradient_gram_NAA: np.ndarray) -> np.ndarray:
    (update_NA, update_N), (gradient_NA, gradient_N) = _norms(update_gram_NAA), _norms(gradient_gram_NAA)
    return ratio(ratio(update_NA, gradient_NA), ratio(update_N, gradient_N)[:, None])


def _cosine_matrix(groups: list[str], gram_NAA: np.ndarray) -> dict[str, dict[str, Estimate]]:
    norms_NA, _ = _norms(gram_NAA)
    cosines_NAA = ratio(gram_NAA, norms_NA[:, :, None] * norms_NA[:, None, :])
    return {name: dict(zip(groups, _estimates(cosines_NAA[:, row]), strict=True)) for row, name in enumerate(groups)}


def _estimates(values_NA: np.ndarray) -> list[Estimate]:
    return [estimate(values_N) for values_N in values_NA.T]


def _effect(difference: Estimate) -> AdamEffect:
    defined = [value for value in difference.values if value is not None]
    below, above = sum(value < 0 for value in defined), sum(value > 0 for value in defined)
    p = sign_test(above, below)
    verdict: AdamVerdict = "cannot be told"
    if difference.interval is not None and p <= ALPHA:
        low, high = difference.interval
        verdict = "suppresses" if high < 0 and below > above else "amplifies" if low > 0 and above > below else verdict
    return AdamEffect(difference, below, above, p, verdict)


def _records(estimates: Any) -> Any:
    """Records within dictionaries as plain dictionaries."""
    return {
        key: _records(value) if isinstance(value, dict) else asdict(value) for key, value in (estimates or {}).items()
    }
