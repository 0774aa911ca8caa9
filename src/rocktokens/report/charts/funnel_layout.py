"""What of the funnel is drawn, and where: the geometry that its chart and its text version share. No chart library.

1. ``drawable``: the types that have a place (occurrences ≥ 1, finite mean kl), rocks last so that they lie on top.
2. ``thin``: too many "other" types are thinned in proportion within each cell of a grid, seeded, at least one a cell:
   the cloud keeps its density and its outline. Rocks and high-mean-kl types are all kept.
3. ``equal_scores``: lines of freq · mean kl = constant, one a decade.
4. ``place_labels``: each label in the nearest free place around its point, first come first served.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import pandas as pd

ROCK, HIGH_KL, OTHER = "rock", "high mean kl", "other"
GROUPS: tuple[str, ...] = (OTHER, HIGH_KL, ROCK)
"""From the lowest layer to the topmost."""
MAX_OTHERS = 3_000
MAX_LINES = 4
LOWEST_LINE = 0.1
LINE_POINTS = 64
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
"""Right and left of a point, above and below it, and the corners."""
LABEL_DISTANCES = (0, 10, 22, 36, 52)
"""Pixels, nearest first."""
LEADER_STEPS = 16

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Points:
    """Types with a place in the funnel, as arrays (U,)."""

    token_id: np.ndarray
    text: np.ndarray
    category: np.ndarray
    freq: np.ndarray
    mean_kl: np.ndarray
    layer: np.ndarray
    """Index into ``GROUPS``."""
    rank: np.ndarray
    """NaN for types that are not rocks."""

    def __len__(self) -> int:
        return len(self.token_id)

    def take(self, chosen: np.ndarray) -> Self:
        """Return the types chosen by mask or index."""
        return type(self)(*(getattr(self, column.name)[chosen] for column in fields(self)))

    def of(self, group: str) -> Self:
        """Return the types of one group."""
        return self.take(self.layer == GROUPS.index(group))


def drawable(types: pd.DataFrame) -> Points:
    """Choose the types that have a place: others, then high-mean-kl types, then rocks with the first rank last."""
    if not len(types):
        return Points(*(np.array([]) for _ in fields(Points)))
    columns = ("freq", "mean_kl", "rank")
    freq, mean_kl, rank = (types[name].astype("Float64").to_numpy(float, na_value=np.nan) for name in columns)
    layers = {group: layer for layer, group in enumerate(GROUPS)}
    points = Points(
        token_id=np.asarray(types["token_id"]),
        text=np.asarray(types["text"], dtype=object),
        category=np.asarray(types["category"], dtype=object),
        freq=freq,
        mean_kl=mean_kl,
        layer=np.array([layers.get(group, 0) for group in types["group"]]),
        rank=rank,
    )
    placed = points.take(np.isfinite(freq) & (freq >= 1) & np.isfinite(mean_kl))
    last = np.where(np.isnan(placed.rank), np.inf, placed.rank)
    return placed.take(np.lexsort((placed.token_id, -last, placed.layer)))


@dataclass(frozen=True, slots=True)
class Frame:
    """The window of a funnel: log10 of occurrences from left to right, mean kl from bottom to top."""

    left: float
    right: float
    bottom: float
    top: float

    @classmethod
    def around(cls, points: Points, margin: float = 0.0) -> Self:
        """Fit a window to all types, wider by ``margin`` of its size; a decade around a single frequency."""
        x = np.log10(points.freq)
        left, right = float(x.min()), float(x.max())
        if left == right:
            left, right = left - 0.5, right + 0.5
        bottom = min(float(points.mean_kl.min()), 0.0)
        width, height = right - left, float(points.mean_kl.max()) - bottom or 1.0
        return cls(left - margin * width, right + margin * width, bottom, bottom + (1 + margin) * height)

    def place(self, freq: np.ndarray, mean_kl: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Place types in the window, as shares of its width and of its height from the bottom."""
        x = (np.log10(freq) - self.left) / (self.right - self.left)
        return x, (mean_kl - self.bottom) / (self.top - self.bottom)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the occurrences and mean kl of a place in the window: the inverse of ``place``."""
        return 10 ** (self.left + x * (self.right - self.left)), self.bottom + y * (self.top - self.bottom)


def thin(points: Points, limit: int = MAX_OTHERS, cells: int = 30, seed: int = 0) -> Points:
    """Keep about ``limit`` of the other types, with every rock and high-mean-kl type, in the order given."""
    is_other = points.layer == GROUPS.index(OTHER)
    others = np.flatnonzero(is_other)
    if len(others) <= limit:
        return points
    x, y = Frame.around(points).place(points.freq[others], points.mean_kl[others])
    column, row = (np.minimum((at * cells).astype(int), cells - 1) for at in (x, y))
    cell = column * cells + row
    shuffled = np.random.Generator(np.random.PCG64(seed)).permutation(len(others))
    by_cell = shuffled[np.argsort(cell[shuffled], kind="stable")]
    _, first, size = np.unique(cell[by_cell], return_index=True, return_counts=True)
    place_in_cell = np.arange(len(others)) - np.repeat(first, size)
    kept = by_cell[place_in_cell < np.repeat(np.ceil(size * limit / len(others)), size)]
    is_kept = ~is_other
    is_kept[others[kept]] = True
    return points.take(is_kept)


def equal_scores(points: Points, frame: Frame) -> dict[float, list[Point]]:
    """Trace lines of equal score, a power of ten each: points (freq, mean kl) from left to right.

    A line runs from where it enters the window, at the top or on the left, to where it leaves on the right; one that
    enters close to the bottom would tell nothing and is left out.
    """
    highest = float((points.freq * points.mean_kl).max())
    decade = math.floor(math.log10(highest)) if highest > 0 else 0
    lines = {}
    for score in (10.0**power for power in range(decade, decade - MAX_LINES, -1) if highest > 0):
        start = max(frame.left, math.log10(score / frame.top))
        if score / 10**start >= frame.at(0, LOWEST_LINE)[1]:
            lines[score] = [(float(freq), float(score / freq)) for freq in np.logspace(start, frame.right, LINE_POINTS)]
    return lines


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def centred(cls, point: Point, width: float, height: float) -> "Box":
        """Make the box of that size around a point."""
        x, y = point
        return cls(x - width / 2, x + width / 2, y - height / 2, y + height / 2)

    def touches(self, other: "Box") -> bool:
        """Whether the two share any area, rounding aside."""
        across = min(self.right, other.right) - max(self.left, other.left)
        return across > 1e-6 and min(self.high, other.high) - max(self.low, other.low) > 1e-6

    def holds(self, other: "Box") -> bool:
        """Whether the other lies inside."""
        across = self.left <= other.left and other.right <= self.right
        return across and self.low <= other.low and other.high <= self.high

    @property
    def centre(self) -> Point:
        """Its middle."""
        return (self.left + self.right) / 2, (self.low + self.high) / 2

    def nearest(self, point: Point) -> Point:
        """Return its point that is nearest to another."""
        return min(max(point[0], self.left), self.right), min(max(point[1], self.low), self.high)


def place_labels(
    points: Sequence[Point], sizes: Sequence[tuple[float, float]], plot: Box, gap: float
) -> list[Box | None]:
    """Place a box for each label, close to its point; None where every place tried would cover something.

    A label covers no point and no other label, and the line that leads to it passes none.

    Args:
        points: pixel positions; those beyond the labels are only kept free.
        sizes: width and height of the label of each of the first points.
        plot: where labels may lie.
        gap: pixels from a point's centre that are kept free.
    """
    dots = [Box.centred(point, 2 * gap, 2 * gap) for point in points]
    cores = [Box.centred(point, gap, gap) for point in points]
    written: list[Box] = []
    placed: list[Box | None] = []
    for index, (point, size) in enumerate(zip(points, sizes, strict=False)):
        away = [core for core in cores if not core.touches(cores[index])]
        tried = (_beside(point, size, side, gap + distance) for distance in LABEL_DISTANCES for side in SIDES)
        others = [*dots[:index], *dots[index + 1 :], *written]
        inside = (box for box in tried if plot.holds(box) and not _touch([box], others))
        placed.append(next((box for box in inside if not _touch(_leader(point, box, gap), [*away, *written])), None))
        written += [part for box in placed[-1:] if box for part in (box, *_leader(point, box, gap))]
    return placed


def _beside(point: Point, size: tuple[float, float], side: tuple[int, int], distance: float) -> Box:
    """Make the box of a label on one side of a point, its near edge at that distance."""
    x, y = (at + way * (distance + length / 2) for at, way, length in zip(point, side, size, strict=True))
    return Box.centred((x, y), *size)


def _leader(point: Point, box: Box, gap: float) -> list[Box]:
    """Make the line from the surroundings of a point to its label, as a chain of small boxes."""
    steps = np.linspace(point, box.nearest(point), LEADER_STEPS)[:-1].tolist()
    return [Box.centred((x, y), 2, 2) for x, y in steps if math.dist(point, (x, y)) > gap]


def _touch(some: list[Box], others: list[Box]) -> bool:
    return any(box.touches(other) for box in some for other in others)
