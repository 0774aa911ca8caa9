"""Show how far the rocks depend on settings without a right value: move one at a time and compare the sets.

See docs/method.md, section 4.6.

1. Around each of w, γ, η and τ other values are tried, the rest kept.
2. Beside them stand choices others have made: no context stage, the joint score, the five most frequent types left out.
3. Each row says how much of the rock set stays: the Jaccard index with the set found, who entered and who left.

γ and η are read off counts the search already has; another τ or w compares contexts again, each within a sixteenth of
the search's pairs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rocktokens.rocks.cutoff import jaccard
from rocktokens.rocks.encoders import Encoder, Encoders
from rocktokens.rocks.persistence import Occurrences, persistent_at_each, quantile_thresholds
from rocktokens.rocks.records import SensitivityRow
from rocktokens.rocks.search import Criterion, SearchResult, compare_contexts, compares_all, score_types, with_kept
from rocktokens.rocks.selectors import Sample, rank_types
from rocktokens.traces.store import TraceStore

AUTHORS_EXCLUDE = 5
GAMMA_STEPS = (-0.1, -0.05, 0.05, 0.1)
ETA_FACTORS = (0.25, 0.5, 2.0, 4.0)
TAU_STEPS = (-0.05, 0.05, 0.1)
SHARE_OF_PAIRS = 16
"""A sixteenth of the pairs is a quarter of the occurrences: looking those up is what takes time."""
WINDOW_FACTORS = (0.4, 2.0)

PARAMETERS = ("window", "gamma", "eta", "tau", "joint", "exclude_top_freq", "stage")
Row = tuple[str, Any, np.ndarray, bool]
"""Parameter, value, the rocks it gives as columns, and whether all contexts were compared."""


def other_gammas(gamma: float) -> tuple[float, ...]:
    """Cosines to try beside γ."""
    return tuple(value for step in GAMMA_STEPS if 0 < (value := round(gamma + step, 4)) <= 1)


def sensitivity_table(store: TraceStore, result: SearchResult, encoders: Encoders) -> list[SensitivityRow]:
    """Say what each other setting does to the rocks, one row each.

    Args:
        store: the traces of the search.
        result: a search that counted ``other_gammas`` too, where it has a context stage.
        encoders: of the search.
    """
    encoder = encoders.encoder
    rows = list(_ranking_rows(result, encoder))
    if encoder is not None:
        rows += _consistency_rows(result)
        rows += _threshold_rows(store, result, encoder)
        rows += _window_rows(result, encoders.with_window) if encoders.with_window is not None else []
    return sorted((_record(result, row) for row in rows), key=lambda row: (PARAMETERS.index(row.parameter), row.value))


def _ranking_rows(result: SearchResult, encoder: Encoder | None) -> Iterator[Row]:
    """Other ways to rank over the same sums."""
    criterion, sample = result.criterion, result.sums.selection
    others: dict[str, Any] = {"exclude_top_freq": 0 if criterion.exclude_top_freq else AUTHORS_EXCLUDE}
    if sample.kl_before is not None:
        others["joint"] = not criterion.joint
    if criterion.stage == "context":
        others["stage"] = "score"
    for name, value in others.items():
        yield name, getattr(criterion, name), result.columns, result.is_exact
        yield name, value, *_ranked(result, replace(criterion, **{name: value}), encoder)


def _consistency_rows(result: SearchResult) -> Iterator[Row]:
    """Other γ and η over the same counts of neighbours."""
    criterion, context, persistent = result.criterion, result.context, result.persistent
    if context is None or persistent is None:
        return
    settings = [("gamma", gamma, gamma, criterion.eta) for gamma in sorted({criterion.gamma, *context.gammas})]
    others = (round(min(criterion.eta * factor, 1.0), 4) for factor in ETA_FACTORS)
    etas = sorted({criterion.eta, *(eta for eta in others if eta > 0)})
    settings += [("eta", eta, criterion.gamma, eta) for eta in etas]
    for name, value, gamma, eta in settings:
        sample = with_kept(result.sums.selection, persistent, context, gamma, eta)
        yield name, value, _first(sample, criterion, result.k), result.is_exact


def _threshold_rows(store: TraceStore, result: SearchResult, encoder: Encoder) -> Iterator[Row]:
    """Other τ: other persistent occurrences."""
    criterion = result.criterion
    if criterion.tau_nats is not None:
        return
    yield "tau", criterion.tau, result.columns, result.is_exact
    taus = [tau for step in TAU_STEPS if 0 <= (tau := round(criterion.tau + step, 4)) < 1]
    ladder = quantile_thresholds(store, result.sums, taus)
    for tau, persistent in zip(taus, persistent_at_each(store, result.sums, ladder), strict=True):
        yield "tau", tau, *_compared(result, criterion, persistent, encoder)


def _window_rows(result: SearchResult, with_window: Callable[[int], Encoder]) -> Iterator[Row]:
    """Contexts of other widths around the same occurrences."""
    width, persistent = result.criterion.window, result.persistent
    if persistent is None:
        return
    yield "window", width, result.columns, result.is_exact
    for other in sorted({max(1, round(width * factor)) for factor in WINDOW_FACTORS} - {width}):
        yield "window", other, *_compared(result, result.criterion, persistent, with_window(other))


def _ranked(result: SearchResult, criterion: Criterion, encoder: Encoder | None) -> tuple[np.ndarray, bool]:
    """The first types by another rule; those the search had excluded from the start may have yet to be compared."""
    included = criterion.exclude_top_freq < result.criterion.exclude_top_freq
    if included and encoder is not None and result.persistent is not None:
        return _compared(result, criterion, result.persistent, encoder)
    return _first(result.sums.selection, criterion, result.k), result.is_exact


def _compared(
    result: SearchResult, criterion: Criterion, persistent: Occurrences, encoder: Encoder
) -> tuple[np.ndarray, bool]:
    criterion = replace(criterion, max_pairs=max(criterion.max_pairs // SHARE_OF_PAIRS, 2))
    sample = result.sums.selection
    context = compare_contexts(sample, persistent, criterion, result.k, encoder)
    kept = with_kept(sample, persistent, context, criterion.gamma, criterion.eta)
    return _first(kept, criterion, result.k), compares_all(sample, persistent, context, criterion)


def _first(sample: Sample, criterion: Criterion, k: int) -> np.ndarray:
    return rank_types(score_types(sample, criterion.selector), sample.totals("freq"), criterion.rules(k))


def _record(result: SearchResult, row: Row) -> SensitivityRow:
    parameter, value, columns, exact = row
    ids, found = result.sums.selection.token_ids, result.columns
    return SensitivityRow(
        parameter=parameter,
        value=value,
        default=value == getattr(result.criterion, parameter),
        jaccard=jaccard(columns, found),
        entered=ids[np.setdiff1d(columns, found)].tolist(),
        left=ids[np.setdiff1d(found, columns)].tolist(),
        exact=exact,
    )
