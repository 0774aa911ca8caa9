"""Look at a set of rocks from all sides: the record that find.json holds (docs/method.md, sections 4.5 to 4.9).

Each part answers a question a referee would ask: where the rocks stand among all types (funnel), whether they moved
(persistence, trajectory), why this many (cut-off), whether other prompts or another selector would name them too
(sample size, selectors), what depends on the settings (sensitivity), what they are and where they sit (categories,
positions), whether there are types to compare them with (controls), and how much of the loss only chooses between
interchangeable tokens, where the traces say so (choice; docs/method.md, section 10). Claims about the set are measured
on prompts that did not select it, or say so.

Sensitivity: one setting at a time has another value. Always: the score without its bound, types that still move, or
only stuck ones, fewer and more prompts, the joint score, the five most frequent types left out. With the context stage
also w, γ, η and τ: γ and η are read off counts the search already has; another τ or w compares contexts again, each
within a sixteenth of the search's pairs.

Positions: a token starts a line where it is the first of its response or the token *before* it ends with a newline;
from there the tokens of the line are counted. Rows without a kl are not occurrences and fall in no bin, but they are
part of the text: they end lines and count in the length of a response.

Shape legend: U types, N rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa

from rocktokens.errors import RocktokensError
from rocktokens.rocks.categories import CATEGORIES, store_categories
from rocktokens.rocks.controls import match_controls
from rocktokens.rocks.cutoff import auto_k, compare_selectors, jaccard, sample_size_curve
from rocktokens.rocks.encoders import EmbeddingEncoder, Encoder
from rocktokens.rocks.persistence import (
    HIGH_KL,
    ROCK,
    Occurrences,
    Persistent,
    persistent_at_each,
    quantile_thresholds,
    type_groups,
)
from rocktokens.rocks.ranking import rank_types, rankable
from rocktokens.rocks.records import (
    CategoryShares,
    ChoiceShares,
    ControlMatch,
    Cutoff,
    FindRecord,
    FunnelColumns,
    GroupChange,
    GroupMean,
    PositionBin,
    PositionProfile,
    SensitivityRow,
)
from rocktokens.rocks.search import Criterion, SearchResult, compare_contexts, compares_all, score_types, with_kept
from rocktokens.rocks.selectors import Sample
from rocktokens.rocks.sums import HELD_OUT, NOT_SPLIT, PromptSums, checkpoint_samples
from rocktokens.rocks.uncertainty import choice_share, paired_tests, share_intervals
from rocktokens.run_dir import derive_seed
from rocktokens.traces.store import TraceStore
from rocktokens.types import ONE, Category, RockSet

OTHER = "other"
GroupColumns = dict[str, np.ndarray]
LINE_BINS = ("start of line", "elsewhere")
SINCE_NEWLINE_BINS = {"0": 0, "1": 1, "2–4": 2, "5–9": 5, "10+": 10}
"""Tokens between a token and the start of its line, by the least of each bin."""
DECILES = tuple(f"{10 * decile}–{10 * decile + 10} %" for decile in range(10))
AUTHORS_EXCLUDE = 5
GAMMA_STEPS = (-0.1, -0.05, 0.05, 0.1)
ETA_FACTORS = (0.25, 0.5, 2.0, 4.0)
TAU_STEPS = (-0.05, 0.05, 0.1)
SHARE_OF_PAIRS = 16
"""A sixteenth of the pairs is a quarter of the occurrences: looking those up is what takes time."""
WINDOW_FACTORS = (0.4, 2.0)

PROMPTS = (1, 10)
"""Least numbers of prompts to try."""
PARAMETERS = ("stage", "require", "min_prompts", "joint", "exclude_top_freq", "window", "gamma", "eta", "tau")
Row = tuple[str, Any, np.ndarray, bool]
"""Parameter, value, the rocks it gives as columns, and whether all contexts were compared."""


def analyse(store: TraceStore, result: SearchResult, rocks: RockSet) -> FindRecord:
    """Look at what a search found from all sides."""
    sums, criterion = result.sums, result.criterion
    selection, selector, rules = sums.selection, criterion.selector, criterion.rules(max(result.k, 1))
    seed = derive_seed(criterion.seed, "analysis")
    crossing = None
    with suppress(RocktokensError):  # where coverage meets stability is not always defined
        crossing = auto_k(result.curve)
    groups = type_groups(selection, result.columns, criterion.min_freq, seed)
    token_ids = selection.token_ids
    categories = store_categories(store, token_ids)
    return FindRecord(
        criterion=rocks.criterion,
        source=rocks.source,
        funnel=_funnel(store, result, groups, categories),
        persistence=persistence_report(sums, groups, result.persistent, seed),
        trajectory=_trajectory(store, result, groups, seed),
        cutoff=Cutoff(result.k, crossing, result.curve.points(result.k)),
        sample_size=sample_size_curve(selection, selector, rules, seed=seed),
        selectors=compare_selectors(selection, rules, seed=seed),
        sensitivity=sensitivity_table(store, result),
        categories=category_table(token_ids, categories, sums.measuring, result.is_rock),
        positions=position_profile(store, sums.reference, rocks.ids, sums.prompts.measuring, seed=seed),
        controls=_controls(store, rocks),
        choice=_choice(store, result, seed),
    )


def persistence_report(
    sums: PromptSums, groups: GroupColumns, persistent: Persistent | None, seed: int
) -> list[GroupChange]:
    """Measure by group and half how the kl changed over the same occurrences; nothing without paired checkpoints."""
    if not sums.paired:
        return []
    size = len(sums.selection.token_ids)
    counts = [] if persistent is None else [persistent.counts(size), persistent.held_out_counts]
    records = []
    for index, (half, sample) in enumerate(sums.halves.items()):
        for group, columns in groups.items():
            change = paired_tests(sample, np.isin(np.arange(size), columns), seed=seed)
            hard = int(counts[index][columns].sum()) if counts else 0
            records.append(
                GroupChange(
                    **asdict(change),
                    group=group,
                    half=half,
                    n_types=int(np.count_nonzero(sample.totals("freq")[columns])),
                    persistent_share=_ratio(hard, change.n_occurrences) if counts else None,
                )
            )
    return records


def other_gammas(gamma: float) -> tuple[float, ...]:
    """Return the cosines to try beside γ."""
    return tuple(value for step in GAMMA_STEPS if 0 < (value := round(gamma + step, 4)) <= 1)


def sensitivity_table(store: TraceStore, result: SearchResult) -> list[SensitivityRow]:
    """Say what each other setting does to the rocks, one row each.

    The search counted ``other_gammas`` too, where it has a context stage.
    """
    rows = [*_ranking_rows(result), *_consistency_rows(result), *_threshold_rows(store, result), *_window_rows(result)]
    ids, found = result.sums.selection.token_ids, result.columns
    records = [
        SensitivityRow(
            parameter=parameter,
            value=value,
            default=value == getattr(result.criterion, parameter),
            jaccard=jaccard(columns, found),
            entered=ids[np.setdiff1d(columns, found)].tolist(),
            left=ids[np.setdiff1d(found, columns)].tolist(),
            exact=exact,
        )
        for parameter, value, columns, exact in rows
    ]
    return sorted(records, key=lambda row: (PARAMETERS.index(row.parameter), row.value))


def category_table(
    token_ids_U: np.ndarray, categories: Sequence[Category], sample: Sample, is_rock_U: np.ndarray
) -> list[CategoryShares]:
    """Measure what each category holds of a sample, and what its rocks do, all as shares of the whole.

    The types, with ascending ids and their categories, are at least those of the sample.

    Returns:
        A record for each category that occurs, in the order of ``CATEGORIES``; types without an occurrence in the
        sample do not count, and a share of nothing is None.
    """
    if not np.isin(sample.token_ids, token_ids_U).all():
        raise ValueError("the sample has types that token_ids_U does not describe")
    column = np.searchsorted(token_ids_U, sample.token_ids)
    category = np.array(categories, dtype=object)[column]
    is_rock, occurs = np.asarray(is_rock_U, dtype=bool)[column], sample.totals("freq") > 0
    shares = {"token_share": "freq", "kl_share": "kl", "grad_share": "grad_norm"}
    return [
        CategoryShares(
            category=name,
            n_types=int(chosen.sum()),
            n_rock_types=int((chosen & is_rock).sum()),
            **{share: sample.share(of, chosen) for share, of in shares.items()},
            **{f"rock_{share}": sample.share(of, chosen & is_rock) for share, of in shares.items()},
        )
        for name in CATEGORIES
        if (chosen := occurs & (category == name)).any()
    ]


def position_profile(
    store: TraceStore,
    checkpoint: int,
    rock_ids: np.ndarray,
    prompt_ids: Sequence[str] | None = None,
    max_rollouts: int = 4096,
    seed: int = 0,
) -> PositionProfile:
    """Measure where rocks sit in the responses to some prompts, or all, beside where all tokens do.

    Of more than ``max_rollouts`` a random sample is read; ``checkpoint`` is the one whose kl is averaged.
    """
    if max_rollouts < 1:
        raise RocktokensError(f"max_rollouts = {max_rollouts} is not valid: give at least 1")
    text: ir.Table = store.table(checkpoint)  # all rows, scored or not
    if prompt_ids is not None:
        wanted = pa.table({"prompt_id": pa.array(prompt_ids, pa.string())})
        text = text.semi_join(ibis.memtable(wanted), "prompt_id")
    rollout_ids = text.select("rollout_id").distinct().order_by("rollout_id").to_pyarrow()["rollout_id"].to_numpy()
    chosen = rollout_ids
    if len(rollout_ids) > max_rollouts:
        chosen = np.random.Generator(np.random.PCG64(seed)).choice(rollout_ids, max_rollouts, replace=False)
        text = text.semi_join(ibis.memtable(pa.table({"rollout_id": pa.array(chosen, pa.int64())})), "rollout_id")
    columns = text.select("rollout_id", "position", "token_id", "kl").order_by("rollout_id", "position").to_pyarrow()
    rows = {name: columns[name].to_numpy() for name in ("rollout_id", "token_id", "kl")}

    types, type_of_row = np.unique(rows["token_id"], return_inverse=True)
    ends_line = np.array([text.endswith("\n") for text in store.token_texts(types)], dtype=bool)
    since_newline, decile = _places(rows["rollout_id"], ends_line[type_of_row])
    scored = ~np.isnan(rows["kl"])
    is_rock = np.isin(rows["token_id"], rock_ids)[scored]
    kl = np.floor(rows["kl"][scored].astype(np.float64) * ONE + 0.5).astype(np.int64)
    since_newline, decile = since_newline[scored], decile[scored]
    line_bin = np.searchsorted(list(SINCE_NEWLINE_BINS.values()), since_newline, side="right") - 1
    return PositionProfile(
        checkpoint=checkpoint,
        n_rollouts=len(chosen),
        n_rollouts_available=len(rollout_ids),
        n_occurrences=len(is_rock),
        n_rock_occurrences=int(is_rock.sum()),
        line_start=_bins(LINE_BINS, np.minimum(since_newline, 1), is_rock, kl),
        since_newline=_bins(tuple(SINCE_NEWLINE_BINS), line_bin, is_rock, kl),
        relative_position=_bins(DECILES, decile, is_rock, kl),
    )


def _funnel(store: TraceStore, result: SearchResult, groups: GroupColumns, categories: list[Category]) -> FunnelColumns:
    """List every type used in the selection half: frequency against mean kl, column by column."""
    sample = result.sums.selection
    used = np.flatnonzero(sample.totals("freq"))
    freq, kl = sample.totals("freq")[used], sample.totals("kl")[used]
    group_of = {column: name for name in (HIGH_KL, ROCK) for column in groups[name].tolist()}
    rank_of = {column: rank for rank, column in enumerate(result.columns.tolist(), start=1)}
    ccr = result.consistency[used]
    return FunnelColumns(
        token_id=sample.token_ids[used].tolist(),
        text=store.token_texts(sample.token_ids[used]),
        category=[categories[column] for column in used],
        freq=freq.tolist(),
        mean_kl=(kl / (freq * ONE)).tolist(),
        ccr=[None if np.isnan(value) else float(value) for value in ccr],
        group=[group_of.get(column, OTHER) for column in used.tolist()],
        rank=[rank_of.get(column) for column in used.tolist()],
    )


def _trajectory(store: TraceStore, result: SearchResult, groups: GroupColumns, seed: int) -> list[GroupMean]:
    """Measure the mean kl of each group at every checkpoint that scored the same occurrences, on both halves."""
    means = []
    for checkpoint in store.checkpoints:
        for half, sample in checkpoint_samples(store, result.sums, checkpoint).items():
            for group, columns in groups.items():
                chosen = np.isin(np.arange(len(sample.token_ids)), columns)
                ends = share_intervals(sample, chosen, paired=False, seed=seed)["mean_kl_rocks"] or (None, None)
                means.append(GroupMean(checkpoint, half, group, sample.mean_kl(chosen), *ends))
    return means


def _ranking_rows(result: SearchResult) -> Iterator[Row]:
    """Try other ways to rank over the same sums."""
    criterion, sample = result.criterion, result.sums.selection
    others: dict[str, tuple[Any, ...]] = {
        "stage": ("bound", "score"),
        "require": ("stopped", "stuck", "any") if sample.paired and sample.kl_before is not None else (),
        "min_prompts": PROMPTS,
        "joint": (False, True) if sample.kl_before is not None else (),
        "exclude_top_freq": (0, AUTHORS_EXCLUDE),
    }
    for name, values in others.items():
        own = getattr(criterion, name)
        if values:
            yield name, own, result.columns, result.is_exact
        for value in values:
            if value != own:
                yield name, value, *_ranked_otherwise(result, replace(criterion, **{name: value}))


def _ranked_otherwise(result: SearchResult, other: Criterion) -> tuple[np.ndarray, bool]:
    """Take the first types of another ranking; contexts are compared again where it lets more types in."""
    sample, size = result.sums.selection, len(result.score_U)
    before, now = (rankable(sample, criterion.rules(size))[0] for criterion in (result.criterion, other))
    if other.stage == "context" and result.persistent is not None and (now & ~before).any():
        return _compared(result, other, result.persistent, result.encoder)
    return _first(sample, other, result.k), result.is_exact


def _consistency_rows(result: SearchResult) -> Iterator[Row]:
    """Try other γ and η over the same counts of neighbours."""
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


def _threshold_rows(store: TraceStore, result: SearchResult) -> Iterator[Row]:
    """Try other τ: other persistent occurrences."""
    criterion = result.criterion
    if criterion.tau_nats is not None or result.encoder is None:
        return
    yield "tau", criterion.tau, result.columns, result.is_exact
    taus = [tau for step in TAU_STEPS if 0 <= (tau := round(criterion.tau + step, 4)) < 1]
    ladder = quantile_thresholds(store, result.sums, taus)
    for tau, persistent in zip(taus, persistent_at_each(store, result.sums, ladder), strict=True):
        yield "tau", tau, *_compared(result, criterion, persistent, result.encoder)


def _window_rows(result: SearchResult) -> Iterator[Row]:
    """Try contexts of other widths around the same occurrences."""
    encoder, width, persistent = result.encoder, result.criterion.window, result.persistent
    if not isinstance(encoder, EmbeddingEncoder) or persistent is None:
        return
    yield "window", width, result.columns, result.is_exact
    for other in sorted({max(1, round(width * factor)) for factor in WINDOW_FACTORS} - {width}):
        yield "window", other, *_compared(result, result.criterion, persistent, replace(encoder, window=other))


def _compared(
    result: SearchResult, criterion: Criterion, persistent: Occurrences, encoder: Encoder | None
) -> tuple[np.ndarray, bool]:
    """Take the first types with contexts compared again, within fewer pairs; and say whether all were compared."""
    assert encoder is not None, "there are persistent occurrences in stage context only, which has an encoder"
    criterion = replace(criterion, max_pairs=max(criterion.max_pairs // SHARE_OF_PAIRS, 2))
    sample = result.sums.selection
    context = compare_contexts(sample, persistent, criterion, result.k, encoder)
    kept = with_kept(sample, persistent, context, criterion.gamma, criterion.eta)
    return _first(kept, criterion, result.k), compares_all(sample, persistent, context, criterion)


def _first(sample: Sample, criterion: Criterion, k: int) -> np.ndarray:
    rules = criterion.rules(k)
    return rank_types(score_types(sample, criterion.selector), rankable(sample, rules)[0], rules)


def _choice(store: TraceStore, result: SearchResult, seed: int) -> ChoiceShares | None:
    """Measure how much of the loss is choice, of all types and of the rocks; None where the traces do not say."""
    sums, classes = result.sums, store.classes_sha256(result.sums.reference)
    if classes is None:
        return None
    everything = np.ones_like(result.is_rock)
    half = HELD_OUT if sums.is_split else NOT_SPLIT
    whole, rocks = (choice_share(sums.measuring, chosen, seed=seed) for chosen in (everything, result.is_rock))
    return ChoiceShares(classes, half, *whole, *rocks)


def _controls(store: TraceStore, rocks: RockSet) -> ControlMatch:
    """Say whether types of matching frequency exist, or which rocks have no partner."""
    if not rocks.tokens:
        return ControlMatch(matched=False, reason="there are no rocks to match")
    try:
        controls = match_controls(store, rocks, seed=rocks.criterion["seed"])
    except RocktokensError as error:
        return ControlMatch(matched=False, reason=str(error))
    gaps = [draw.total_gap for draw in controls]
    return ControlMatch(matched=True, draws=len(controls), distinct=controls.n_distinct, total_gaps=gaps)


def _places(rollout_ids_N: np.ndarray, ends_line_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 (N,) each: the tokens since the start of the line, and the decile of the response."""
    row = np.arange(len(rollout_ids_N))
    is_first = np.diff(rollout_ids_N, prepend=rollout_ids_N[:1] - 1) != 0
    starts_line = is_first | np.roll(ends_line_N, 1)
    since_newline = row - np.maximum.accumulate(np.where(starts_line, row, 0))
    start = np.flatnonzero(is_first)
    length = np.diff(start, append=len(row))
    position = row - np.repeat(start, length)
    # (position + 1/2) / length in tenths, without rounding
    return since_newline, 10 * (2 * position + 1) // (2 * np.repeat(length, length))


def _bins(names: Sequence[str], bin_N: np.ndarray, is_rock_N: np.ndarray, kl_N: np.ndarray) -> list[PositionBin]:
    tokens, rocks = (np.bincount(bin_N[chosen], minlength=len(names)) for chosen in (slice(None), is_rock_N))
    kl = [int(kl_N[is_rock_N & (bin_N == index)].sum()) for index in range(len(names))]
    return [
        PositionBin(
            bin=name,
            n_tokens=int(tokens[index]),
            n_rock_tokens=int(rocks[index]),
            share_of_tokens=_ratio(int(tokens[index]), len(bin_N)),
            share_of_rocks=_ratio(int(rocks[index]), int(rocks.sum())),
            rock_share=_ratio(int(rocks[index]), int(tokens[index])),
            mean_kl_rocks=_ratio(kl[index], int(rocks[index]) * ONE),
        )
        for index, name in enumerate(names)
    ]


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
