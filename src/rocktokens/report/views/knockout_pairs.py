"""Knock-outs to look at: what each ban did, and answers with and without it side by side.

1. ``knockouts`` are the bans of knockout.json, in its order.
2. What was decoded is in ``knockout/<digest of the conditions>/``. A rollout without a banned token is the same under
   the ban and was never decoded, so a pair is a rollout that holds one.
3. Both answers are the same up to the first difference.
"""

from dataclasses import dataclass

import numpy as np

from rocktokens.display.text import legible
from rocktokens.errors import RocktokensError
from rocktokens.report.views.knockout_answers import Sweep
from rocktokens.report.views.paging import PAGE_SIZE, page_of
from rocktokens.report.views.run_view import Record, RunView
from rocktokens.report.views.strips import MAX_TOKEN_TEXT
from rocktokens.types import Rollout


@dataclass(frozen=True, slots=True)
class KnockoutRow:
    """One ban and what it did."""

    ids: tuple[int, ...]
    name: str
    role: str
    """"tested", "matched" or "never"."""
    category: str
    verdict: str
    delta: float | None
    interval: tuple[float, float] | None
    q: float | None
    n_rollouts: int
    """Free rollouts that hold a banned token."""
    n_lost: int
    """Answers that were right and are wrong under the ban."""
    n_gained: int


@dataclass(frozen=True, slots=True)
class KnockoutToken:
    """A token of an answer."""

    token_id: int
    text: str
    is_banned: bool
    """Whether it is what the ban takes away; never in the answer under the ban."""


@dataclass(frozen=True, slots=True)
class KnockoutPair:
    """One answer without and with a ban."""

    prompt_id: str
    sample: int
    prompt_text: str
    free: tuple[KnockoutToken, ...]
    banned: tuple[KnockoutToken, ...]
    first_difference: int | None
    """Position of the first token that differs; None where the answers are the same."""
    free_correct: bool | None
    banned_correct: bool | None
    free_finished: bool
    banned_finished: bool


@dataclass(frozen=True, slots=True)
class KnockoutPage:
    """Some of the pairs of a ban: answers that changed sides first."""

    knockout: KnockoutRow
    total: int
    page: int
    size: int
    pairs: tuple[KnockoutPair, ...]


def knockouts(run: RunView) -> list[KnockoutRow]:
    """The bans of the last sweep, in its order; none where there was no sweep."""
    return [_row(record) for record in _records(run)]


def banned_ids(run: RunView) -> np.ndarray:
    """int64: every type that was banned because it was asked for, alone or in a set; placebos are not."""
    tested = {token_id for row in knockouts(run) if row.role == "tested" for token_id in row.ids}
    return np.array(sorted(tested), dtype=np.int64)


def knockout_pairs(run: RunView, token_id: int, page: int = 0, size: int = PAGE_SIZE) -> KnockoutPage:
    """Answers without and with the ban of a type; where it was banned in a set only, of the first such set."""
    holding = [record for record in _records(run) if token_id in record["ban"]["ids"]]
    if not holding:
        raise RocktokensError(
            f"token {token_id} was not banned in {run.path}: run `rocktokens knockout --id {token_id}`"
        )
    record = min(holding, key=lambda record: len(record["ban"]["ids"]) > 1)
    row, sweep = _row(record), run.sweep
    if sweep is None:
        return KnockoutPage(row, 0, page, size, ())
    switched = {tuple(answer) for answer in (*record["changes"]["lost"], *record["changes"]["gained"])}
    places = [place for banned, place in sweep.decoded if banned == row.ids]
    places.sort(key=lambda place: (_answer(sweep.free[place]) not in switched, place))
    pairs = tuple(_pair(run, sweep, row.ids, place) for place in page_of(places, page, size))
    return KnockoutPage(row, len(places), page, size, pairs)


def _records(run: RunView) -> list[Record]:
    return (run.knockout or {}).get("knockouts", [])


def _row(record: Record) -> KnockoutRow:
    ban, changes = record["ban"], record["changes"]
    return KnockoutRow(
        ids=tuple(ban["ids"]),
        name=legible(ban["name"], MAX_TOKEN_TEXT),
        role=ban["role"],
        category=ban["category"],
        verdict=record["verdict"],
        delta=record["delta"],
        interval=record["interval"] and tuple(record["interval"]),
        q=record["q"],
        n_rollouts=changes["n_rollouts"],
        n_lost=len(changes["lost"]),
        n_gained=len(changes["gained"]),
    )


def _answer(rollout: Rollout) -> tuple[str, int]:
    return rollout.prompt_id, rollout.sample


def _pair(run: RunView, sweep: Sweep, ids: tuple[int, ...], place: int) -> KnockoutPair:
    free, decoded = sweep.free[place], sweep.decoded[ids, place]
    under_ban = np.concatenate([free.token_ids[: decoded.start], decoded.token_ids])
    prompt_text, free_text, banned_text = run.read([free.prompt_ids, free.token_ids, under_ban])
    return KnockoutPair(
        prompt_id=free.prompt_id,
        sample=free.sample,
        prompt_text=legible(prompt_text),
        free=_tokens(run, free.token_ids, ids),
        banned=_tokens(run, under_ban, ids),
        first_difference=_first_difference(free.token_ids, under_ban),
        free_correct=sweep.grades.is_right(free.prompt_id, prompt_text, free_text),
        banned_correct=sweep.grades.is_right(free.prompt_id, prompt_text, banned_text),
        free_finished=free.finished,
        banned_finished=decoded.finished,
    )


def _tokens(run: RunView, token_ids: np.ndarray, banned: tuple[int, ...]) -> tuple[KnockoutToken, ...]:
    return tuple(
        KnockoutToken(token_id, legible(run.text_of(token_id), MAX_TOKEN_TEXT), token_id in banned)
        for token_id in token_ids.tolist()
    )


def _first_difference(first: np.ndarray, second: np.ndarray) -> int | None:
    """Where two sequences part; the end of the shorter one where it is the start of the other; None where equal."""
    shared = min(len(first), len(second))
    differing = np.flatnonzero(first[:shared] != second[:shared])
    if differing.size:
        return int(differing[0])
    return None if len(first) == len(second) else shared
