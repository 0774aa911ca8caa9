"""Numbers as people read them: signs, dashes, units."""

import pytest

from rocktokens.display.numbers import (
    about,
    byte_size,
    count,
    counted,
    decimal,
    duration,
    extent,
    interval,
    level,
    listed,
    p_value,
    percent,
    points,
    signed,
    signed_percent,
    significant,
    with_interval,
)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (percent(0.25), "25.0 %"),
        (percent(-0.5, 0), "−50 %"),
        (signed_percent(0.125), "+12.5 %"),
        (points(-0.0004), "0.0"),
        (percent(-0.0004), "0.0 %"),
        (decimal(-0.001, 2), "0.00"),
        (points(-0.025), "−2.5"),
        (decimal(1234.5, 1), "1,234.5"),
        (signed(12.0, 0), "+12"),
        (count(184320.0), "184,320"),
        (about(1241), "1,300"),
        (about(1300), "1,300"),
        (about(7), "7"),
        (extent(1.2, 4.5, 100.0, 1, "points"), "1.2 to 4.5 points"),
        (extent(1.2, 100.0, 100.0, 1, "points"), "1.2 points or more"),
        (p_value(0.0004), "< 0.001"),
        (p_value(0.0312), "0.031"),
        (interval((0.25, 0.5)), "[25.0, 50.0]"),
        (interval((-0.25, 0.5), points), "[−25.0, +50.0]"),
        (interval(None), ""),
        (with_interval(0.25, (0.125, 0.5)), "25.0 % [12.5, 50.0]"),
        (with_interval(0.25, None), "25.0 %"),
        (level(0.05), "95 %"),
        (level(0.025), "97.5 %"),
        (byte_size(1_500_000_000), "1.5 GB"),
        (duration(90), "90 s"),
        (duration(900), "15 min"),
        (duration(9000), "2.5 h"),
        (listed(["a", "b", "c"]), "a, b and c"),
        (counted(1, "rock"), "1 rock"),
        (counted(1800, "rock"), "1,800 rocks"),
    ],
)
def test_known_numbers(shown: str, text: str):
    assert shown == text


@pytest.mark.parametrize("show", [percent, signed_percent, points, count, significant, p_value])
def test_what_is_not_known_is_a_dash(show):
    assert show(None) == "—"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.000"), (12345.6, "12,346"), (12.34, "12.3"), (-1.234, "−1.23"), (0.5, "0.500"), (0.00012, "0.00012")],
)
def test_three_significant_digits(value: float, text: str):
    assert significant(value) == text
