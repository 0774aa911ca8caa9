"""The classes of interchangeable tokens of a run (docs/method.md, section 10): verdicts, and the split of their loss.

1. Shares are over all scored tokens of the reference checkpoint, in fixed point: of its tokens, and of its kl.
2. What share of the kl at its tokens is choice is known where the traces split the loss by these very classes, less
   those that bans have refuted.
"""

from dataclasses import dataclass

import numpy as np

from rocktokens.classes import State, TokenClass
from rocktokens.display.text import legible
from rocktokens.report.views.run_view import MAX_TOKEN_TEXT, RunView
from rocktokens.types import ONE, Verdict


@dataclass(frozen=True, slots=True)
class ClassView:
    """One class as the pages show it; lists are in the order of the ids, or empty."""

    number: int
    """Its place in classes.json, from 1."""
    ids: tuple[int, ...]
    texts: tuple[str, ...]
    state: State
    """Whether its members are interchangeable, as far as bans have shown."""
    banned: tuple[Verdict, ...]
    """Of each member, banned where another one is likely."""
    forced: tuple[Verdict, ...]
    """Of each member, all others banned there."""
    verdict: Verdict
    """Of the whole class banned everywhere."""
    token_share: float | None
    """None without traces, as the next."""
    kl_share: float | None
    choice_share: float | None
    """Of the kl at its tokens; None where the traces do not say."""


def class_views(run: RunView) -> list[ClassView]:
    """Describe the classes of classes.json in its order; none where the run has none."""
    return [_view(run, number, own) for number, own in enumerate(run.classes or (), start=1)]


def class_of(run: RunView, token_id: int) -> ClassView | None:
    """Describe the class that a token is in; None where it is in none, or alone."""
    for number, own in enumerate(run.classes or (), start=1):
        if token_id in own.ids and len(own.ids) > 1:
            return _view(run, number, own)
    return None


def mean_choice(run: RunView, token_id: int) -> float | None:
    """The mean choice at the occurrences of a type at the reference, in nats; None where the traces do not say."""
    sums = run.type_sums
    if sums is None or sums.kl_choice is None or not run.splits_by_its_classes:
        return None
    at = np.flatnonzero(sums.token_id == token_id)
    return int(sums.kl_choice[at[0]]) / (int(sums.freq[at[0]]) * ONE) if len(at) else None


def _view(run: RunView, number: int, own: TokenClass) -> ClassView:
    texts = [legible(text, MAX_TOKEN_TEXT) for text in own.texts] or [run.text_of(token_id) for token_id in own.ids]
    sums, token_share, kl_share, choice_share = run.type_sums, None, None, None
    if sums is not None:
        inside = np.isin(sums.token_id, own.ids)
        token_share, kl_share = _share(sums.freq[inside], sums.freq), _share(sums.kl[inside], sums.kl)
        if sums.kl_choice is not None and run.splits_by_its_classes:
            choice_share = _share(sums.kl_choice[inside], sums.kl[inside])
    return ClassView(
        number=number,
        ids=own.ids,
        texts=tuple(texts),
        state=own.state,
        banned=own.banned,
        forced=own.forced,
        verdict=own.verdict,
        token_share=token_share,
        kl_share=kl_share,
        choice_share=choice_share,
    )


def _share(part_U: np.ndarray, whole_U: np.ndarray) -> float | None:
    whole = int(whole_U.sum())
    return int(part_U.sum()) / whole if whole else None
