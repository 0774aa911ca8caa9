"""What is put together for gradients.json: the corrected cosine, and the cosine without a type's own part."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rocktokens.gradients.logit_summary import RELIABLE, Persistence, compare_with_others
from rocktokens.gradients.records import LargestPart
from rocktokens.gradients.type_gradients import SpaceSums, TypeGradients


def persistence_of(cross: list[float], before: list[float], after: list[float]) -> Persistence:
    return Persistence("vocabulary", np.arange(len(cross)), *map(np.array, (cross, before, after, cross)))


def test_the_corrected_cosine_is_that_of_the_signals():
    """Halves are a signal plus independent noise; the noise is what the correction takes out."""
    rng = np.random.default_rng(0)
    width, cosine = 20_000, 0.6
    signal = rng.standard_normal((2, width))
    before, after = signal[0], cosine * signal[0] + np.sqrt(1 - cosine**2) * signal[1]
    halves = {
        when: [vector + rng.standard_normal(width) for _ in range(2)]
        for when, vector in (("before", before), ("after", after))
    }

    def cos(x: np.ndarray, y: np.ndarray) -> float:
        return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))

    cross = (cos(halves["before"][0], halves["after"][1]) + cos(halves["after"][0], halves["before"][1])) / 2
    found = persistence_of([cross], [cos(*halves["before"])], [cos(*halves["after"])])
    assert cross < 0.35
    np.testing.assert_allclose(found.corrected, [cosine], atol=0.03)


def test_directions_that_halves_do_not_agree_on_have_no_cosine():
    just_below = RELIABLE - 1e-6
    found = persistence_of([0.1, 0.1, 0.1, np.nan], [0.5, just_below, -0.5, 0.5], [0.5, 0.5, -0.5, 0.5])
    np.testing.assert_allclose(found.corrected, [0.2, np.nan, np.nan, np.nan])


def gradients_of(means_UW: np.ndarray, freq_U: np.ndarray) -> TypeGradients:
    sums_UW, ones_U = means_UW * freq_U[:, None], np.ones(len(freq_U))
    space = SpaceSums(sums_UW, ones_U, ones_U)
    return TypeGradients(
        token_ids=np.arange(len(freq_U)),
        freq=freq_U,
        second_row=np.full(len(freq_U), -1),
        hidden=space,
        vocabulary=space,
        pooled_V=sums_UW.sum(0),
        balanced_V=means_UW.sum(0),
    )


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 4))
def test_the_cosine_with_the_others_against_plain_vectors(seed: int, n_others: int, n_rocks: int):
    rng = np.random.default_rng(seed)
    means_UW = rng.standard_normal((n_others + n_rocks, 12))
    is_rock_U = rng.permutation(np.arange(len(means_UW)) < n_rocks)
    others_UW = means_UW[~is_rock_U].sum(0) - np.where(is_rock_U[:, None], 0, means_UW)
    expected = np.einsum("uw,uw->u", means_UW, others_UW)
    expected /= np.linalg.norm(means_UW, axis=1) * np.linalg.norm(others_UW, axis=1)
    gradients = gradients_of(means_UW, rng.integers(1, 9, len(means_UW)))
    np.testing.assert_allclose(compare_with_others(gradients, "hidden", is_rock_U)[0], expected, atol=1e-6)


def test_the_largest_part_of_the_others_sum_is_a_signed_share():
    """Rocks have no part in it, however large, and parts of one sum add up to 1."""
    means_UW = np.array([[90.0, 0.0], [3.0, 4.0], [0.0, 5.0], [1.0, -1.0]])
    others_W = means_UW[1:].sum(0)
    shares = means_UW[1:] @ others_W / (others_W @ others_W)
    assert shares.sum() == 1
    _, found = compare_with_others(
        gradients_of(means_UW, np.array([2, 3, 5, 7])), "hidden", np.array([True, False, False, False])
    )
    assert (found.token_id, found.freq) == (1, 3) and shares.argmax() == 0
    np.testing.assert_allclose(found.share, shares[0])
    _, nothing = compare_with_others(gradients_of(means_UW, np.array([2, 3, 5, 7])), "hidden", np.ones(4, dtype=bool))
    assert nothing == LargestPart(token_id=None, freq=0, share=None)


def test_twins_among_the_rocks_do_not_make_a_direction():
    """Two rocks with one gradient, at right angles to everything else, point nowhere."""
    means_UW = np.eye(4)[[0, 0, 1, 2]]
    cosines, _ = compare_with_others(
        gradients_of(means_UW, np.arange(1, 5)), "hidden", np.array([True, True, False, False])
    )
    np.testing.assert_allclose(cosines, 0, atol=1e-12)


def test_the_only_type_that_is_no_rock_has_nothing_to_point_along():
    means_UW = np.array([[0.1, 0.2, 0.3], [0.7, 0.1, 0.1]])
    cosines, _ = compare_with_others(gradients_of(means_UW, np.array([3, 7])), "hidden", np.array([True, False]))
    assert np.isnan(cosines).tolist() == [False, True]
