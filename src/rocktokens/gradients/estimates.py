"""Norms, cosines and projections from inner products, exact or of count-sketches, with their standard errors.

With x and y sketched to width m and c their cosine, to first order in 1/√m:

                  estimate                       error
    norm          ‖s(x)‖ (1 + 1/4m)              ‖x‖ / √(2m)              the root of an unbiased square is low by 1/4m
    cosine        ⟨s(x), s(y)⟩ / ‖s(x)‖ ‖s(y)‖   (1 − c²) / √m            the norms err along with the product
    projection    ⟨s(x), s(y)⟩ / ‖s(y)‖          ‖x‖ √((1 − c²/2) / m)
    signed share  ⟨s(x), s(y)⟩ / ‖s(y)‖²         ‖x‖/‖y‖ √((1 − c²) / m)
    coherence     (‖s(x)‖² − Σ‖g‖²) / P          ‖x‖² √(2/m) / P          x = Σ g, P = (Σ‖g‖)² − Σ‖g‖², exact

The error of such an estimate is a sum over pairs of colliding ids, Σ_{i≠j} M_ij sign_i sign_j, whose variance is 2/m
times Σ_{i≠j} M_ij². A sketch does not show the diagonal of M, so it is counted in: the errors are upper bounds,
attained where no single id dominates. An exact space has infinite m: the same formulas, errors 0.
"""

from typing import Any, NamedTuple

import numpy as np

from rocktokens.gradients.records import Column, WithError

ROUNDING = 1e-9
"""What is below this share of what it was subtracted from is rounding."""


class Estimate(NamedTuple):
    """Numbers, or arrays of them, and their standard errors: 0 where they are exact, NaN where they are undefined."""

    value: Any
    error: Any

    def scaled(self, factor: Any) -> "Estimate":
        """Multiply by a number that is known exactly."""
        return Estimate(self.value * factor, self.error * np.abs(factor))

    def to_record(self) -> WithError:
        """Return the estimate of a single number as it is written."""
        return WithError(defined(self.value), defined(self.error))


def norm(square: Any, width: float) -> Estimate:
    """Estimate ‖x‖ from ‖s(x)‖²."""
    length = np.sqrt(square)
    return Estimate(length * (1 + 1 / (4 * width)), length / np.sqrt(2 * width))


def cosine(product: Any, square_x: Any, square_y: Any, width: float) -> Estimate:
    """Estimate cos(x, y) from ⟨s(x), s(y)⟩ and both squares."""
    value = ratio(product, np.sqrt(square_x * square_y))
    return Estimate(value, (1 - value**2) / np.sqrt(width))


def projection(product: Any, square_x: Any, square_y: Any, width: float) -> Estimate:
    """Estimate ‖x‖ cos(x, y), the length of x along y."""
    c = ratio(product, np.sqrt(square_x * square_y))
    return Estimate(ratio(product, np.sqrt(square_y)), np.sqrt(square_x * (1 - c**2 / 2) / width))


def signed_share(product: Any, square_x: Any, square_y: Any, width: float) -> Estimate:
    """Estimate ⟨x, y⟩ / ‖y‖², the part of y that its summand x makes up."""
    c = ratio(product, np.sqrt(square_x * square_y))
    return Estimate(ratio(product, square_y), np.sqrt(ratio(square_x, square_y) * (1 - c**2).clip(0) / width))


def coherence(square: Any, squares: Any, length: Any, width: float) -> Estimate:
    """Estimate (‖Σ g‖² − Σ‖g‖²) / ((Σ‖g‖)² − Σ‖g‖²), the mean cosine of two vectors weighted by ‖g_i‖ ‖g_j‖.

    Args:
        square: ‖s(Σ g)‖², the only part that is sketched.
        squares: Σ‖g‖².
        length: Σ‖g‖. Where no two of the vectors have a length, there is no pair, and no coherence.
        width: m.
    """
    pairs = length**2 - squares
    scale = ratio(1.0, np.where(pairs > ROUNDING * squares, pairs, 0.0))
    return Estimate((square - squares) * scale, np.sqrt(2 / width) * square * scale)


def ratio(numerator: Any, denominator: Any) -> np.ndarray:
    """Divide in float64; NaN where the denominator is 0."""
    numerator, denominator = np.broadcast_arrays(np.float64(numerator), np.float64(denominator))
    return np.divide(numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator != 0)


def median(values: np.ndarray) -> float | None:
    """Return the median of the numbers that are defined; None if none is."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def defined(value: Any) -> float | None:
    """Return a number as it is written: None for NaN."""
    return None if np.isnan(value) else float(value)


def column(values: np.ndarray) -> Column:
    """Return numbers as they are written: None for NaN."""
    return [None if np.isnan(value) else value for value in values.tolist()]
