"""Every outcome of every claim from numbers made by hand; votes by direction and sign tests against counting."""

from dataclasses import replace
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradient_records import (
    adam_effect,
    direction_test,
    high_kl_types,
    kl_change,
    make_gradients,
    over_batches,
    rock_columns,
    trace_group,
)
from rocktokens.gradients import claims
from rocktokens.gradients.claims import Judged, Tally, directions, judge, sign_test
from rocktokens.gradients.records import CONTRADICTED, INCONCLUSIVE, SUPPORTED, KeptKl, NormRatio


def says(finding: Judged, verdict: str, *parts: str) -> None:
    """Check a verdict, and what it is said to rest on."""
    because, found = finding
    assert found == verdict, because
    assert [part for part in parts if part not in because] == [], because


def test_a_sentence_gives_the_claim_and_the_verdict_first():
    record = make_gradients()
    found = {own.name: own for own in judge(record.trace, record.logit, record.parameter)}
    assert len(found) == 9
    for own in found.values():
        assert own.sentence == f"{own.claim}: {own.verdict}; {own.because}"
    assert found["total"].claim.endswith("more of the total than their share of the tokens")
    assert found["unmoved"].claim.startswith("as a set")
    assert found["parameters"].claim.endswith("the gradient in parameter space than their share of the tokens")


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ([0.5, 0.9], SUPPORTED),
        ([1.1, 2.0], CONTRADICTED),
        ([0.5, 1.1], INCONCLUSIVE),
        ([0.5, 1.0], INCONCLUSIVE),
        (None, INCONCLUSIVE),
    ],
)
def test_small_means_smaller_than_high_kl_types(interval: Any, verdict: str):
    says(claims.small(high_kl_types(interval)), verdict, "0.80 ×")


@pytest.mark.parametrize("interval", [[0.5, 0.9], [1.1, 2.0]])
def test_small_is_inconclusive_beside_types_of_lower_kl(interval: Any):
    lower = claims.small(high_kl_types(interval, kl=1.25))
    says(lower, INCONCLUSIVE, "no other type of as high a kl recurs: the 9 highest have 1.250 nats", "rocks 1.500")


def test_small_needs_high_kl_types():
    says(claims.small(high_kl_types(None, ratio=None)), INCONCLUSIVE, "no high-mean-kl type")


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [([1.1, 2.0], SUPPORTED), ([0.5, 0.9], CONTRADICTED), ([0.9, 1.2], INCONCLUSIVE), (None, INCONCLUSIVE)],
)
def test_the_total_is_measured_by_the_share_of_the_tokens(interval: Any, verdict: str):
    claim = claims.total(NormRatio(1.6, interval), trace_group(0.25, 0.4))
    says(claim, verdict, "25.0 % of the tokens", "40.0 % of Σ‖g‖")


def test_the_total_needs_a_gradient():
    says(claims.total(NormRatio(None, None), trace_group(None, None)), INCONCLUSIVE, "no gradient")


@pytest.mark.parametrize(
    ("test", "cosines", "verdict"),
    [
        (direction_test(0.8, 0.01), [0.5] * 10, SUPPORTED),
        (direction_test(0.2, 0.01), [0.5] * 10, CONTRADICTED),
        (direction_test(0.8, 0.01), [0.02] * 10, CONTRADICTED),
        (direction_test(0.8, 0.06), [0.5] * 10, INCONCLUSIVE),
        (direction_test(0.8, 0.01), [0.5] * 6 + [0.0] * 4 + [None], INCONCLUSIVE),
        (direction_test(0.6, None), [0.5] * 10, INCONCLUSIVE),
    ],
)
def test_a_direction_must_be_the_others_and_more_than_theirs(test: Any, cosines: Any, verdict: str):
    says(claims.direction(test, rock_columns(len(cosines), cos_others=cosines)), verdict)


@pytest.mark.parametrize("cosine", [0.5, 0.0])
def test_the_direction_of_one_type_is_not_global(cosine: float):
    found = claims.direction(direction_test(0.8, 0.01, largest=0.9), rock_columns(10, cos_others=[cosine] * 10))
    says(found, INCONCLUSIVE, "90.0 % of that sum is one type (token 7, occurrences: 1)")


def test_rocks_of_one_direction_have_one_vote():
    """Ten rocks that all point along: told apart as ten directions, not as five."""
    pairs = [number // 2 for number in range(10)]
    for tested, needed in (
        (lambda rocks: claims.direction(direction_test(0.8, 0.01), rocks), {"cos_others": [0.5] * 10}),
        (lambda rocks: claims.cancels(rocks, 0.5), {"alignment": [0.1] * 10, "coherence": [0.1] * 10}),
        (lambda rocks: claims.persists([0.9] * 10, rocks), {}),
        (lambda rocks: claims.kept(KeptKl(list(range(10)), [0.9] * 10), rocks), {}),
    ):
        says(
            tested(rock_columns(10, **needed)),
            SUPPORTED,
            "10 of 10" if needed else "10",
            "10 rocks, 10 directions: 10 for it",
        )
        says(tested(rock_columns(10, pairs, **needed)), INCONCLUSIVE, "10 rocks, 5 directions: 5 for it, 0 against")


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ([0.9] * 10, SUPPORTED),
        ([0.9, None, *[0.9] * 9], SUPPORTED),
        ([0.7] * 10, CONTRADICTED),
        ([0.75] * 10, CONTRADICTED),
        ([0.9] * 6 + [0.1] * 4, INCONCLUSIVE),
        ([None], INCONCLUSIVE),
    ],
)
def test_each_rock_keeps_three_quarters(shares: Any, verdict: str):
    says(claims.kept(KeptKl(list(range(len(shares))), shares), rock_columns(len(shares))), verdict)


def test_kept_shares_are_matched_to_rocks_by_token():
    """Rock 5 did not occur where directions were measured; 7 and 8 are one direction."""
    kept = KeptKl([5, 7, 8, 9], [None, 0.9, 0.8, 0.1])
    found = claims.kept(kept, replace(rock_columns(3, [0, 0, 1]), token_id=[7, 8, 9]))
    says(found, INCONCLUSIVE, "2 of 3 rocks kept more than 75 %", "3 rocks, 2 directions: 1 for it, 1 against")


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [([-0.2, 0.1], SUPPORTED), ([-0.5, -0.3], CONTRADICTED), ([-0.4, -0.1], INCONCLUSIVE), (None, INCONCLUSIVE)],
)
def test_unmoved_means_three_quarters_kept(interval: Any, verdict: str):
    says(claims.unmoved(kl_change(-0.25, interval)), verdict, "from 2.000 to 1.500 nats", "-25.0 %")


def test_movement_needs_the_same_tokens_twice():
    for nothing in (claims.unmoved(None), claims.unmoved(kl_change(None, None)), claims.kept(None, rock_columns(3))):
        says(nothing, INCONCLUSIVE, "no other checkpoint scored the same tokens")


@pytest.mark.parametrize(
    ("excess", "verdict"),
    [
        (over_batches(0.2), SUPPORTED),
        (over_batches(-0.2), CONTRADICTED),
        (over_batches(0.2, half=0.3), INCONCLUSIVE),
        (over_batches(0.2, count=3), INCONCLUSIVE),
        (over_batches(None), INCONCLUSIVE),
    ],
)
def test_parameters_are_judged_by_batches(excess: Any, verdict: str):
    says(claims.parameters(excess, over_batches(0.4)), verdict)


@pytest.mark.parametrize(
    ("own", "verdict"),
    [
        (adam_effect(-0.2, "suppresses"), SUPPORTED),
        (adam_effect(0.2, "amplifies"), CONTRADICTED),
        (adam_effect(-0.2, "inconclusive"), INCONCLUSIVE),
        (adam_effect(None, "inconclusive"), INCONCLUSIVE),
    ],
)
def test_adam_suppresses_what_has_less_of_the_step(own: Any, verdict: str):
    says(claims.adam({"rocks": own}), verdict)


def test_adam_is_said_with_its_batches_and_beside_the_control():
    own = adam_effect(-0.2, "inconclusive")
    found = claims.adam({"rocks": own, "control": adam_effect(0.1, "inconclusive")})
    says(
        found,
        INCONCLUSIVE,
        "-20.0 points [-21.0, -19.0]",
        "in 7 of 8 batches (sign test p 0.070)",
        "control by +10.0 points",
    )
    says(claims.adam({"rocks": own}), INCONCLUSIVE, "there is no control")


def test_adam_needs_its_state():
    says(claims.adam(None), INCONCLUSIVE, "no optimizer state")


@pytest.mark.parametrize(
    ("alignment", "verdict"),
    [
        ([0.4] * 10, SUPPORTED),
        ([0.6] * 10, CONTRADICTED),
        ([0.4] * 5, INCONCLUSIVE),
        ([0.4] * 6 + [0.6] * 6, INCONCLUSIVE),
    ],
)
def test_pushes_cancel_when_less_than_half_is_left(alignment: Any, verdict: str):
    rocks = rock_columns(len(alignment), alignment=alignment, coherence=[0.3] * len(alignment))
    says(claims.cancels(rocks, 0.5), verdict)


def test_a_rock_that_occurs_once_cannot_cancel():
    once = rock_columns(11, alignment=[0.4] * 10 + [1.0], coherence=[0.3] * 10 + [None])
    says(claims.cancels(once, 0.5), SUPPORTED, "10 of 10 rocks")
    says(claims.cancels(rock_columns(1, alignment=[1.0], coherence=[None]), 0.5), INCONCLUSIVE, "no rock occurs twice")


def test_cancelling_is_said_beside_that_of_other_types():
    rocks = rock_columns(10, alignment=[0.4] * 10, coherence=[0.1] * 10)
    says(claims.cancels(rocks, 0.5), SUPPORTED, "10 of 10 rocks", "of a rock is 0.10, that of another type 0.50")
    says(claims.cancels(rocks, None), SUPPORTED, "another type not defined")


@pytest.mark.parametrize(
    ("corrected", "verdict"),
    [
        ([0.8] * 10, SUPPORTED),
        ([0.6] * 10, CONTRADICTED),
        ([0.8] * 4, INCONCLUSIVE),
        ([None], INCONCLUSIVE),
        (None, INCONCLUSIVE),
    ],
)
def test_a_direction_persists_within_45_degrees(corrected: Any, verdict: str):
    says(claims.persists(corrected, rock_columns(len(corrected or []))), verdict)


def test_rocks_without_a_direction_are_counted():
    found = claims.persists([0.9] * 6 + [None] * 3, rock_columns(9))
    says(found, SUPPORTED, "of the 6 of 9 rocks", "6 turned by less than 45°")


# Votes


def at(*degrees: float) -> np.ndarray:
    angles = np.deg2rad(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.arange(1, len(degrees) + 1)[:, None]


@pytest.mark.parametrize(
    ("vectors", "expected"),
    [
        (at(0, 25, 90), [0, 0, 1]),  # cos 25° = 0.906
        (at(0, 26, 90), [0, 1, 2]),  # cos 26° = 0.899
        (at(0, 20, 40, 90), [0, 0, 0, 1]),  # a chain
        (at(0, 180, 90), [0, 0, 1]),  # one line, pulled both ways
        (np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]), [0, 1, 2]),  # nothing points nowhere
        (np.zeros((0, 2)), []),
    ],
)
def test_what_lies_along_one_line_is_one_direction(vectors, expected):
    assert directions(vectors).tolist() == expected


def test_a_direction_votes_as_most_of_its_rocks_and_a_divided_one_does_not():
    answers = [True, True, False, True, False, None, False, None]
    tally = Tally.of(answers, [0, 0, 0, 1, 1, 1, 2, 3])
    assert tally == Tally(yes=3, known=6, directions_for=1, directions_against=1, directions=3)


@given(st.integers(0, 30), st.integers(0, 30))
def test_the_sign_test_is_both_tails_of_fair_coins(above, below):
    count, fewer = above + below, min(above, below)
    tail = sum(comb(count, wins) for wins in range(fewer + 1)) / 2**count
    assert sign_test(above, below) == pytest.approx(min(1.0, 2 * tail))


@pytest.mark.parametrize(
    ("yes", "no", "verdict"),
    [(6, 0, SUPPORTED), (5, 0, INCONCLUSIVE), (0, 6, CONTRADICTED), (8, 2, INCONCLUSIVE)],
)
def test_most_must_be_more_than_chance(yes, no, verdict):
    tally = Tally.of([True] * yes + [False] * no, range(yes + no))
    assert tally.verdict == verdict
    assert f"{yes + no} directions: {yes} for it, {no} against" in tally.text
