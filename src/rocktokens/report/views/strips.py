"""Token strips: one rollout with everything a checkpoint says of each of its tokens.

Texts are legible (``display.text``): spaces, tabs and line ends as they are, every other character that
cannot be seen written as its code point, long ones cut. Scores are the float32 numbers of the trace in their shortest
form; a token that was not scored has None.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pyarrow as pa

from rocktokens.config import checkpoint_label
from rocktokens.display.strip import Piece, strip_html
from rocktokens.display.text import legible, visible
from rocktokens.errors import RocktokensError
from rocktokens.report.views.run_view import RunView
from rocktokens.types import of_teacher

SCORES = ("kl", "logp_student", "logp_teacher", "entropy_student", "entropy_teacher", "grad_norm", "weight")
Likely = tuple[int, str, float | None]
"""Id, text and log-probability."""


@dataclass(frozen=True, slots=True)
class StripToken:
    """One response token as a checkpoint scores it."""

    position: int
    token_id: int
    text: str
    kl: float | None
    logp_student: float | None
    logp_teacher: float | None
    entropy_student: float | None
    entropy_teacher: float | None
    grad_norm: float | None
    weight: float | None
    kl_choice: float | None
    """The part of kl that is a choice within classes; None where the trace does not have it."""
    rock_rank: int | None
    """None where it is no rock."""
    category: str | None
    student_top: tuple[Likely, ...] | None
    """What the student would rather write, the likeliest first; None where the trace does not have it."""
    teacher_top: tuple[Likely, ...] | None


@dataclass(frozen=True, slots=True)
class Strip:
    """One rollout as a checkpoint scores it."""

    run: str
    rollout_id: int
    prompt_id: str
    checkpoint: int
    checkpoint_label: str
    """Its number, and beside it the name it has, and the label of a teacher that did not say all."""
    prompt_text: str
    """Empty where the rollout was not stored."""
    response_text: str
    finished: bool | None
    """None where the rollout was not stored."""
    correct: bool | None
    """None where it is not known."""
    tokens: tuple[StripToken, ...]
    more: int = 0
    """Tokens after these that were left out."""

    def first(self, count: int) -> "Strip":
        """Return the strip with its first tokens only."""
        kept = self.tokens[:count]
        return replace(self, tokens=kept, more=self.more + len(self.tokens) - len(kept))

    def _repr_html_(self) -> str:
        """Show the strip in a notebook, coloured by kl."""
        grade = {True: ", right", False: ", wrong", None: ""}[self.correct]
        title = (
            f"{visible(self.run)}: rollout {self.rollout_id}, checkpoint {self.checkpoint_label}{grade}; coloured by kl"
        )
        return strip_html(title, [Piece(own.token_id, own.text, own.kl, own.rock_rank) for own in self.tokens])


def rollout_strip(run: RunView, rollout_id: int, checkpoint: int | None = None) -> Strip:
    """Make the strip of a rollout, by default at the reference checkpoint, or the last that scored it."""
    step = run.checkpoint(checkpoint) if checkpoint is not None else _scoring_checkpoint(run, rollout_id)
    index = run.index(step)
    place = index.place(rollout_id)
    rows = run.query(lambda store: store.rollout(rollout_id, step).table)
    own = run.rollout(rollout_id)
    return Strip(
        run=run.name,
        rollout_id=rollout_id,
        prompt_id=index.prompt_ids_R[place],
        checkpoint=step,
        checkpoint_label=checkpoint_label(step, run.checkpoint_names) + of_teacher(run.teacher_label),
        prompt_text=legible(run.prompt_text(own)) if own else "",
        response_text=legible(run.response_texts(index, [place])[0]),
        finished=own.finished if own else None,
        correct=run.correct(index, place),
        tokens=_tokens(run, rows),
    )


def shortest(value: float | None) -> float | None:
    """Return the shortest number that is the same float32; None where there is none, or NaN."""
    return None if value is None or math.isnan(value) else float(str(np.float32(value)))


def interesting_rollouts(run: RunView, count: int) -> list[int]:
    """Choose rollouts that show much: right and wrong in turn, of either kind the longer half, richest in rocks first.

    Where no rocks were found, those of the highest mean kl come first.
    """
    if run.reference is None:
        return []
    index = run.index()
    places_of: dict[bool | None, list[int]] = {True: [], False: [], None: []}
    for place in range(len(index.rollout_ids_R)):
        places_of[run.correct(index, place)].append(place)
    richness_R = index.n_rocks_R / index.lengths_R if run.rocks else np.nan_to_num(index.mean_kl_R)
    ranked = []
    for places in filter(None, places_of.values()):
        median = np.median(index.lengths_R[places])
        longer = [place for place in places if index.lengths_R[place] >= median]
        ranked.append(sorted(longer, key=lambda place: (-richness_R[place], place)))
    in_turn = chain.from_iterable(zip_longest(*ranked))
    chosen = [place for place in in_turn if place is not None][:count]
    return index.rollout_ids_R[chosen].tolist()


def _scoring_checkpoint(run: RunView, rollout_id: int) -> int:
    """Return the reference, or the last checkpoint with this rollout where each checkpoint wrote its own."""
    for step in (run.checkpoint(None), *reversed(run.checkpoints)):
        if rollout_id in run.index(step).rollout_ids_R:
            return step
    raise RocktokensError(f"rollout {rollout_id} is not in the traces of {run.path}: it is in none of its checkpoints")


def _tokens(run: RunView, rows: pa.Table) -> tuple[StripToken, ...]:
    text_of = cache(run.text_of)
    categories = run.categories_of(rows["token_id"].to_pylist())

    def likely(top: list[dict[str, Any]] | None) -> tuple[Likely, ...] | None:
        return None if top is None else tuple((own["id"], text_of(own["id"]), shortest(own["logp"])) for own in top)

    return tuple(
        StripToken(
            position=row["position"],
            token_id=row["token_id"],
            text=text_of(row["token_id"]),
            rock_rank=run.rock_ranks.get(row["token_id"]),
            category=categories.get(row["token_id"]),
            kl_choice=shortest(row.get("kl_choice")),
            student_top=likely(row.get("student_top")),
            teacher_top=likely(row.get("teacher_top")),
            **{name: shortest(row[name]) for name in SCORES},
        )
        for row in rows.to_pylist()
    )
