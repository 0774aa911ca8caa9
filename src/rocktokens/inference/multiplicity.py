"""Correct p-values for their number: Holm bounds the chance of any false claim, Benjamini–Hochberg their share."""

from collections.abc import Sequence

from scipy.stats import false_discovery_control


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct each p by Holm's step-down procedure, in the order given."""
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = highest
    return corrected


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Return q for each p, in the order given: the share of false claims among those with a q at most as high."""
    return false_discovery_control(p_values).tolist()
