"""The rollouts of a run: those that match filters, sorted, a page at a time.

A filter on tokens (rock, token, category, kl) is met by a rollout that holds one token which meets all of them.
Values from outside are compared with arrays; none becomes part of a query.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rocktokens.display.text import legible
from rocktokens.errors import RocktokensError
from rocktokens.report.views.run_view import RunView
from rocktokens.report.views.strips import shortest
from rocktokens.report.views.token_index import TokenIndex
from rocktokens.rocks.categories import CATEGORIES

SORTS = ("rollout_id", "mean_kl", "max_kl", "n_rocks", "length")
PREVIEW = 160
PAGE_SIZE, MAX_PAGE_SIZE = 100, 1000
WARMED_AT_ONCE = 1024
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Filters:
    """Which rollouts to list and in what order; None does not filter."""

    checkpoint: int | None = None
    """Default: the reference."""
    rock: bool | None = None
    """True: a token that is a rock. False: rollouts without any rock."""
    token_id: int | None = None
    category: str | None = None
    kl_low: float | None = None
    kl_high: float | None = None
    text: str | None = None
    """Somewhere in the response, in upper or lower case."""
    correct: bool | None = None
    banned: bool | None = None
    """True: rollouts that hold a type the knock-out banned. False: those that hold none."""
    sort: str = "rollout_id"
    """One of ``SORTS``; descending with a minus before it."""
    among: Collection[int] | None = None
    """Rollouts to choose from; default: all."""


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A rollout in a list."""

    rollout_id: int
    prompt_id: str
    length: int
    mean_kl: float | None
    max_kl: float | None
    n_rocks: int
    correct: bool | None
    finished: bool | None
    preview: str
    """The start of the response."""


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """Some of the rollouts that match."""

    checkpoint: int
    total: int
    """All that match."""
    page: int
    """Counted from 0."""
    size: int
    rows: tuple[RolloutRow, ...]


def page_of(items: list[Item], page: int, size: int) -> list[Item]:
    """Return one page of items, counted from 0; nothing beyond the last."""
    if page < 0:
        raise RocktokensError(f"page = {page} is not valid: pages are counted from 0")
    if not 1 <= size <= MAX_PAGE_SIZE:
        raise RocktokensError(f"size = {size} is not valid: give 1 to {MAX_PAGE_SIZE} rows per page")
    return items[page * size : (page + 1) * size]


def rollouts(run: RunView, filters: Filters, page: int = 0, size: int = PAGE_SIZE) -> RolloutPage:
    """List one page of the rollouts that match."""
    _require_sensible(filters)
    index = run.index(filters.checkpoint)
    matching = _matching(run, index, filters)
    shown = page_of(_sorted(index, matching, filters.sort).tolist(), page, size)
    texts = run.response_texts(index, shown)
    rows = tuple(_row(run, index, place, text) for place, text in zip(shown, texts, strict=True))
    return RolloutPage(index.checkpoint, len(matching), page, size, rows)


def warm(run: RunView, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Read and grade what lists and searches need, so that the first comes as fast as the next.

    For a thread of its own: it holds no lock for long, and ends soon after ``is_wanted`` returns False.
    """
    if run.reference is None:
        return
    index = run.index()
    run.categories_of(index.types)
    places = range(len(index.rollout_ids_R))
    for first in places[::WARMED_AT_ONCE]:
        if is_wanted():
            run.response_texts(index, places[first : first + WARMED_AT_ONCE])
    for place in places:
        if is_wanted():
            run.correct(index, place)


def _require_sensible(filters: Filters) -> None:
    if filters.sort.removeprefix("-") not in SORTS:
        raise RocktokensError(f"sort = {filters.sort!r} is not known: use one of {', '.join(SORTS)}, or -{SORTS[1]}")
    if filters.category is not None and filters.category not in CATEGORIES:
        raise RocktokensError(f"category = {filters.category!r} is not known: use one of {', '.join(CATEGORIES)}")
    if filters.kl_low is not None and filters.kl_high is not None and not filters.kl_low <= filters.kl_high:
        raise RocktokensError(f"kl_low = {filters.kl_low:g} is above kl_high = {filters.kl_high:g}: swap them")


def _matching(run: RunView, index: TokenIndex, filters: Filters) -> np.ndarray:
    """Find the places of the rollouts that match; the costliest filters come last, on those that are left."""
    matches_R = index.count(_chosen_tokens(run, index, filters)) > 0
    if filters.rock is False:
        matches_R &= index.n_rocks_R == 0
    if filters.banned is not None:
        matches_R &= (index.count(np.isin(index.token_ids_T, run.banned_ids)) > 0) == filters.banned
    if filters.among is not None:
        matches_R &= np.isin(index.rollout_ids_R, list(filters.among))
    places = np.flatnonzero(matches_R)
    if filters.text:
        wanted = filters.text.casefold()
        texts = run.response_texts(index, places)
        places = places[[wanted in text.casefold() for text in texts]]
    if filters.correct is not None:
        places = places[[run.correct(index, place) is filters.correct for place in places.tolist()]]
    return places


def _chosen_tokens(run: RunView, index: TokenIndex, filters: Filters) -> np.ndarray:
    """Find the tokens that meet every filter on tokens, bool (T,)."""
    chosen_T = index.is_rock_T.copy() if filters.rock else np.ones(len(index.token_ids_T), dtype=bool)
    if filters.token_id is not None:
        chosen_T &= index.token_ids_T == filters.token_id
    if filters.category is not None:
        categories = run.categories_of(index.types)
        ids = [token_id for token_id, category in categories.items() if category == filters.category]
        chosen_T &= np.isin(index.token_ids_T, ids)
    if filters.kl_low is not None:
        chosen_T &= index.kl_T >= filters.kl_low
    if filters.kl_high is not None:
        chosen_T &= index.kl_T <= filters.kl_high
    return chosen_T


def _sorted(index: TokenIndex, places: np.ndarray, sort: str) -> np.ndarray:
    """Sort the places; equal ones by rollout id, rollouts without a kl last."""
    columns_R = {
        "rollout_id": index.rollout_ids_R,
        "mean_kl": index.mean_kl_R,
        "max_kl": index.max_kl_R,
        "n_rocks": index.n_rocks_R,
        "length": index.lengths_R,
    }
    values = columns_R[sort.removeprefix("-")][places]
    return places[np.argsort(-values if sort.startswith("-") else values, kind="stable")]


def _row(run: RunView, index: TokenIndex, place: int, text: str) -> RolloutRow:
    own = run.rollout(int(index.rollout_ids_R[place]))
    return RolloutRow(
        rollout_id=int(index.rollout_ids_R[place]),
        prompt_id=index.prompt_ids_R[place],
        length=int(index.lengths_R[place]),
        mean_kl=None if math.isnan(index.mean_kl_R[place]) else float(index.mean_kl_R[place]),
        max_kl=shortest(index.max_kl_R[place]),
        n_rocks=int(index.n_rocks_R[place]),
        correct=run.correct(index, place),
        finished=own.finished if own else None,
        preview=legible(text, PREVIEW),
    )
