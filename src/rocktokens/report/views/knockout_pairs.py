"""Knock-outs to look at: what each ban did, and answers with and without it side by side.

1. ``knockouts`` are the bans of knockout.json, in its order.
2. A rollout without a banned token is the same under the ban and was never decoded, so a pair is a rollout that holds
   one.
3. Both answers are the same up to the first difference.
"""

from dataclasses import dataclass

import numpy as np

from rocktokens.display.text import legible
from rocktokens.errors import RocktokensError
from rocktokens.knockout.records import BanKey, Knockout
from rocktokens.report.views.rollout_list import PAGE_SIZE, page_of
from rocktokens.report.views.run_view import MAX_TOKEN_TEXT, KnockoutAnswers, RunView


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
    """List the bans of the last sweep, in its order; none where there was no sweep."""
    return [_row(own) for own in (run.knockout.knockouts if run.knockout else ())]


def knockout_pairs(run: RunView, token_id: int, page: int = 0, size: int = PAGE_SIZE) -> KnockoutPage:
    """Show answers without and with the ban of a type; where it was banned in a set only, of the first such set."""
    holding = [own for own in (run.knockout.knockouts if run.knockout else ()) if token_id in own.ban.ids]
    if not holding:
        raise RocktokensError(
            f"token {token_id} was not banned in {run.path}: run `rocktokens knockout --id {token_id}`"
        )
    own = min(holding, key=lambda own: not own.ban.is_one_type)
    row, answers = _row(own), run.knockout_answers
    if answers is None:
        return KnockoutPage(row, 0, page, size, ())
    switched = {*own.changes.lost, *own.changes.gained}
    places = [place for ban, place in answers.decoded if ban == own.ban.key]
    places.sort(key=lambda place: ((answers.free[place].prompt_id, answers.free[place].sample) not in switched, place))
    pairs = tuple(_pair(run, answers, own.ban.key, place) for place in page_of(places, page, size))
    return KnockoutPage(row, len(places), page, size, pairs)


def _row(own: Knockout) -> KnockoutRow:
    return KnockoutRow(
        ids=own.ban.ids,
        name=legible(own.ban.name, MAX_TOKEN_TEXT),
        role=own.ban.role,
        category=own.ban.category,
        verdict=own.verdict,
        delta=own.delta,
        interval=own.interval,
        q=own.q,
        n_rollouts=own.changes.n_rollouts,
        n_lost=len(own.changes.lost),
        n_gained=len(own.changes.gained),
    )


def _pair(run: RunView, answers: KnockoutAnswers, ban: BanKey, place: int) -> KnockoutPair:
    free, decoded = answers.free[place], answers.decoded[ban, place]
    under_ban = np.concatenate([free.token_ids[: decoded.start], decoded.token_ids])
    prompt_text, free_text, banned_text = run.read([free.prompt_ids, free.token_ids, under_ban])
    return KnockoutPair(
        prompt_id=free.prompt_id,
        sample=free.sample,
        prompt_text=legible(prompt_text),
        free=_tokens(run, free.token_ids, ban.ids),
        banned=_tokens(run, under_ban, ban.ids),
        first_difference=_first_difference(free.token_ids, under_ban),
        free_correct=answers.grades.is_right(free.prompt_id, prompt_text, free_text),
        banned_correct=answers.grades.is_right(free.prompt_id, prompt_text, banned_text),
        free_finished=free.finished,
        banned_finished=decoded.finished,
    )


def _tokens(run: RunView, token_ids: np.ndarray, banned: tuple[int, ...]) -> tuple[KnockoutToken, ...]:
    return tuple(KnockoutToken(token_id, run.text_of(token_id), token_id in banned) for token_id in token_ids.tolist())


def _first_difference(first: np.ndarray, second: np.ndarray) -> int | None:
    """Find where two sequences part; the end of the shorter one where it starts the other; None where equal."""
    shared = min(len(first), len(second))
    differing = np.flatnonzero(first[:shared] != second[:shared])
    if differing.size:
        return int(differing[0])
    return None if len(first) == len(second) else shared
