"""Intervals over batches and the verdict on Adam, from inner products made up to have a known answer."""

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_1samp

from rocktokens.gradients.shares import GradientShares, batch_mean


def test_interval_is_student_s_and_needs_two_batches():
    values = np.array([0.2, 0.5, 0.1, 0.4, np.nan])
    found = batch_mean(values)
    expected = ttest_1samp(values[:4], 0).confidence_interval(0.95)
    assert found.mean == pytest.approx(0.3) and found.interval == pytest.approx((expected.low, expected.high))
    assert found.values == [0.2, 0.5, 0.1, 0.4, None]
    assert batch_mean(values[:1]).interval is None and batch_mean(values[:1]).mean == 0.2
    assert batch_mean(values[4:]).mean is None


def made_up(update_shares: list[float], gradient_share: float = 0.5) -> GradientShares:
    """Two orthogonal groups whose squared norms are their shares."""
    update_N = np.array(update_shares)
    gradient_N = np.full(len(update_N), gradient_share)
    grams = [np.stack([np.diag([share, 1 - share]) for share in shares_N]) for shares_N in (gradient_N, update_N)]
    step = np.pad(grams[1], ((0, 0), (0, 2), (0, 2)))
    return GradientShares(["rocks", "rest"], ["all"], np.ones((len(update_N), 2)), grams[0][:, None], step[:, None])


@pytest.mark.parametrize(
    ("update_shares", "rocks", "rest"),
    [
        ([0.30, 0.32, 0.28, 0.31, 0.33, 0.29], "suppresses", "amplifies"),
        ([0.70, 0.72, 0.68, 0.71, 0.73, 0.69], "amplifies", "suppresses"),
        ([0.30, 0.72, 0.48, 0.51, 0.49, 0.52], "inconclusive", "inconclusive"),
        # the interval alone would tell, the signs do not: too few batches, or one on the other side
        ([0.30, 0.32, 0.28, 0.31, 0.33], "inconclusive", "inconclusive"),
        ([0.30, 0.32, 0.28, 0.31, 0.33, 0.51], "inconclusive", "inconclusive"),
        # the signs alone would tell, the interval does not
        ([0.01, 0.49, 0.49, 0.49, 0.49, 0.49], "inconclusive", "inconclusive"),
        ([0.30], "inconclusive", "inconclusive"),
    ],
)
def test_verdict_needs_the_interval_of_the_paired_difference_and_its_signs(update_shares, rocks, rest):
    effects = made_up(update_shares).summary().update.effects
    assert (effects["rocks"].verdict, effects["rest"].verdict) == (rocks, rest)
    assert effects["rocks"].difference.mean == pytest.approx(np.mean(update_shares) - 0.5)
    fewer, more = (int(np.sum(sign * (np.array(update_shares) - 0.5) > 0)) for sign in (-1, 1))
    assert (
        (effects["rocks"].below, effects["rocks"].above)
        == (fewer, more)
        == (effects["rest"].above, effects["rest"].below)
    )
    assert effects["rocks"].p == pytest.approx(binomtest(fewer, fewer + more).pvalue)


def test_a_rate_is_the_step_per_gradient_over_that_of_the_whole():
    """‖g‖ are 2 and 1, √5 for both; ‖u‖ are 2 and 2, √8 for both."""
    gradient, step = np.diag([4.0, 1.0])[None, None], np.diag([4.0, 4.0, 0.0, 0.0])[None, None]
    update = GradientShares(["rocks", "rest"], ["all"], np.ones((1, 2)), gradient, step).update()
    rates = [own.rate.mean for own in update.groups.values()]
    assert rates == pytest.approx([(2 / 2) / np.sqrt(8 / 5), (2 / 1) / np.sqrt(8 / 5)])


def test_differences_are_paired_by_batch():
    """Shares that scatter widely but fall by the same amount in every batch are told apart all the same."""
    shares = np.array([0.2, 0.3, 0.4, 0.6, 0.7, 0.8])
    steady = made_up((shares - 0.05).tolist())
    steady.gradient_gram_NBAA[:, 0] = np.stack([np.diag([share, 1 - share]) for share in shares])
    assert steady.summary().update.effects["rocks"].verdict == "suppresses"


def test_batches_that_cancel_leave_no_share():
    """Groups that point against each other may sum to nothing; then there is no whole to have a share of."""
    gram = np.array([[1.0, -1.0], [-1.0, 1.0]])[None, None]
    geometry = GradientShares(["a", "b"], ["all"], np.ones((1, 2)), gram, None).gradient()
    assert geometry.norm.values == [0.0] and geometry.groups["a"].norm.values == [1.0]
    assert geometry.groups["a"].share.values == [None] and geometry.groups["a"].cosine.mean is None
