"""Corrected p-values: small cases by hand, and the definition of a false discovery rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocktokens.inference.multiplicity import benjamini_hochberg, holm


def test_holm_steps_down():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0] == holm([0.6, 0.7])
    assert holm([]) == []


def test_q_never_falls_as_p_rises():
    """0.04 · 3/2 is 0.06, but whoever admits 0.041 admits 0.04 too."""
    assert benjamini_hochberg([0.01, 0.04, 0.041]) == pytest.approx([0.03, 0.041, 0.041])
    assert benjamini_hochberg([0.041, 0.01, 0.04]) == pytest.approx([0.041, 0.03, 0.041])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_q_is_the_least_share_of_false_claims_that_would_admit_p(p_values: list[float]):
    for p, q in zip(p_values, benjamini_hochberg(p_values), strict=True):
        admitting = [own for own in p_values if own >= p]
        shares = (own * len(p_values) / sum(other <= own for other in p_values) for own in admitting)
        assert q == pytest.approx(min(1.0, *shares))
