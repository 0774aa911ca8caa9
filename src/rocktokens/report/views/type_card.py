"""One type of a run: what is known of it, and where it stands.

1. ``type_card``: its rock record, what banning it did, its class and how much of its loss is a choice within classes,
   its mean kl at every checkpoint, and its first occurrences at the reference with the text around them.
2. ``history``: the kl of every occurrence of a rollout at every checkpoint that scored it.

Values from outside are compared with arrays or bound to expressions; none becomes part of a query's text.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from rocktokens.display.text import legible
from rocktokens.report.views.classes import ClassView, class_of, mean_choice
from rocktokens.report.views.knockout_pairs import KnockoutRow, knockouts
from rocktokens.report.views.run_view import RunView
from rocktokens.report.views.strips import shortest
from rocktokens.report.views.token_index import TokenIndex
from rocktokens.traces.store import TraceStore
from rocktokens.types import RockToken

MAX_OCCURRENCES = 50
CONTEXT = 12
"""Tokens shown on each side of an occurrence."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A token where it stands."""

    rollout_id: int
    position: int
    kl: float | None
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class TypeCard:
    """A vocabulary type in a run."""

    token_id: int
    text: str
    category: str | None
    checkpoint: int
    """The reference, where the occurrences are counted."""
    n_occurrences: int
    n_rollouts: int
    rock: RockToken | None
    knockout: KnockoutRow | None
    """What banning it alone did."""
    token_class: ClassView | None
    """The tokens it may stand for, and they for it."""
    mean_choice: float | None
    """Of its mean kl at the reference, the part that is choice, in nats; None where the traces do not say."""
    losses: tuple[tuple[int, float | None, int], ...]
    """Checkpoint, mean kl and occurrences."""
    occurrences: tuple[Occurrence, ...]
    """The first ones."""


def history(run: RunView, rollout_id: int) -> dict[int, list[tuple[int, float | None]]]:
    """List checkpoint and kl of each token of a rollout, by position; the checkpoints that scored it, oldest first."""
    found = defaultdict(list)
    for step in run.checkpoints:
        rows = _rows(run, step, "rollout_id", rollout_id)
        for position, kl in zip(rows["position"].to_pylist(), rows["kl"].to_pylist(), strict=True):
            found[position].append((step, shortest(kl)))
    return dict(sorted(found.items()))


def type_card(run: RunView, token_id: int, among: Collection[int] | None = None) -> TypeCard:
    """Collect all that is known of a type; occurrences are listed from the rollouts ``among``, by default from all."""
    index = run.index()
    places_T = np.flatnonzero(index.token_ids_T == token_id)
    rollouts_T = index.rollout_ids_R[_places_of(index, places_T)]
    listed_T = places_T if among is None else places_T[np.isin(rollouts_T, list(among))]
    rocks = run.rocks.tokens if run.rocks else []
    text = run.text_of(token_id)
    return TypeCard(
        token_id=token_id,
        text=text,
        category=run.categories_of([token_id]).get(token_id),
        checkpoint=index.checkpoint,
        n_occurrences=len(places_T),
        n_rollouts=len(np.unique(rollouts_T)),
        rock=next((replace(token, text=text) for token in rocks if token.id == token_id), None),
        knockout=next((row for row in knockouts(run) if row.ids == (token_id,)), None),
        token_class=class_of(run, token_id),
        mean_choice=mean_choice(run, token_id),
        losses=tuple((step, *_mean_kl(run, step, token_id)) for step in run.checkpoints),
        occurrences=tuple(_occurrences(run, index, listed_T[:MAX_OCCURRENCES])),
    )


def _places_of(index: TokenIndex, places_T: np.ndarray) -> np.ndarray:
    """Find the places of the rollouts that tokens belong to."""
    return np.searchsorted(index.starts_R, places_T, side="right") - 1


def _mean_kl(run: RunView, step: int, token_id: int) -> tuple[float | None, int]:
    """Average over the scored occurrences, and count all occurrences; the same on any number of threads."""
    kl = _rows(run, step, "token_id", token_id)["kl"]
    scored = kl.drop_null().to_numpy()
    return math.fsum(scored) / len(scored) if len(scored) else None, len(kl)


def _rows(run: RunView, step: int, column: str, value: int) -> pa.Table:
    """Read position and kl of the tokens of a checkpoint that have this value in a column."""

    def ask(store: TraceStore) -> pa.Table:
        rows = store.table(step)
        return rows.filter(rows[column] == value).select("position", "kl").to_pyarrow()

    return run.query(ask)


def _occurrences(run: RunView, index: TokenIndex, places_T: np.ndarray) -> Iterable[Occurrence]:
    for place_T, place in zip(places_T.tolist(), _places_of(index, places_T).tolist(), strict=True):
        start, response = int(index.starts_R[place]), index.tokens(place)
        at = place_T - start
        before, after = run.read([response[max(at - CONTEXT, 0) : at], response[at + 1 : at + 1 + CONTEXT]])
        yield Occurrence(
            rollout_id=int(index.rollout_ids_R[place]),
            position=int(index.positions_T[place_T]),
            kl=shortest(index.kl_T[place_T].item()),
            before=legible(before),
            after=legible(after),
        )
