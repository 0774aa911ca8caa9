"""Look at a set of rocks from all sides: the record that find.json holds (docs/method.md, sections 4.5 to 4.9).

Each part answers a question a referee would ask: where the rocks stand among all types (funnel), whether they moved
(persistence, trajectory), why this many (cut-off), whether other prompts or another selector would name them too
(sample size, selectors), what depends on the settings (sensitivity), what they are and where they sit (categories,
positions), and whether there are types to compare them with (controls). Claims about the set are measured on prompts
that did not select it, or say so.

Positions: a token starts a line where it is the first of its response or the token *before* it ends with a newline;
from there the tokens of the line are counted. Rows without a kl are not occurrences and fall in no bin, but they are
part of the text: they end lines and count in the length of a response.

Shape legend: U types, N rows.
"""

from collections.abc import Sequence

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa

from rocktokens.errors import RocktokensError
from rocktokens.rocks.aggregate import ONE
from rocktokens.rocks.categories import CATEGORIES, store_categories
from rocktokens.rocks.controls import match_controls
from rocktokens.rocks.cutoff import auto_k, compare_selectors, sample_size_curve
from rocktokens.rocks.encoders import Encoders
from rocktokens.rocks.persistence import RARE, ROCK, persistence_report, type_groups
from rocktokens.rocks.records import (
    CategoryShares,
    ControlMatch,
    Crossing,
    Cutoff,
    FindRecord,
    FunnelColumns,
    GroupMean,
    PositionBin,
    PositionProfile,
)
from rocktokens.rocks.search import SearchResult
from rocktokens.rocks.selectors import Sample
from rocktokens.rocks.sensitivity import sensitivity_table
from rocktokens.rocks.split import checkpoint_samples
from rocktokens.rocks.uncertainty import share_intervals
from rocktokens.run_dir import derive_seed
from rocktokens.traces.store import TraceStore
from rocktokens.types import Category, RockSet

OTHER = "other"
Groups = dict[str, np.ndarray]
LINE_BINS = ("start of line", "elsewhere")
SINCE_NEWLINE_BINS = {"0": 0, "1": 1, "2–4": 2, "5–9": 5, "10+": 10}
"""Tokens between a token and the start of its line, by the least of each bin."""
DECILES = tuple(f"{10 * decile}–{10 * decile + 10} %" for decile in range(10))


def analyse(store: TraceStore, result: SearchResult, rocks: RockSet, encoders: Encoders) -> FindRecord:
    """Look at what a search found from all sides.

    Args:
        store: the traces of the search.
        result: the search.
        rocks: what was found.
        encoders: of contexts, as the search used them.
    """
    sums, criterion = result.sums, result.criterion
    selection, selector, rules = sums.selection, criterion.selector, criterion.rules(max(result.k, 1))
    seed = derive_seed(criterion.seed, "analysis")
    groups = type_groups(selection, result.columns, criterion.min_freq, seed)
    token_ids = selection.token_ids
    categories = store_categories(store, token_ids)
    return FindRecord(
        criterion=rocks.criterion,
        source=rocks.source,
        funnel=_funnel(store, result, groups, categories),
        persistence=persistence_report(sums, groups, result.persistent, seed),
        trajectory=_trajectory(store, result, groups, seed),
        cutoff=Cutoff(result.k, _crossing(result), result.curve.points(result.k)),
        sample_size=sample_size_curve(selection, selector, rules, seed=seed),
        selectors=compare_selectors(selection, rules, seed=seed),
        sensitivity=sensitivity_table(store, result, encoders),
        categories=category_table(token_ids, categories, sums.measuring, result.is_rock),
        positions=position_profile(store, sums.reference, rocks.ids, sums.prompts.measuring, seed=seed),
        controls=_controls(store, rocks),
    )


def category_table(
    token_ids_U: np.ndarray, categories: Sequence[Category], sample: Sample, is_rock_U: np.ndarray
) -> list[CategoryShares]:
    """Measure what each category holds of a sample, and what its rocks do, all as shares of the whole.

    Args:
        token_ids_U: ascending ids of the types that are described; every type of the sample is one of them.
        categories: their categories.
        sample: the prompts the table speaks of.
        is_rock_U: which of the types are rocks.

    Returns:
        A record for each category that occurs, in the order of ``CATEGORIES``; types without an occurrence in the
        sample do not count, and a share of nothing is None.
    """
    if not np.isin(sample.token_ids, token_ids_U).all():
        raise ValueError("the sample has types that token_ids_U does not describe")
    column = np.searchsorted(token_ids_U, sample.token_ids)
    category = np.array([CATEGORIES.index(name) for name in categories], dtype=np.int64)[column]
    is_rock = np.asarray(is_rock_U, dtype=bool)[column]
    totals = {name: sample.totals(name) for name in ("freq", "kl", "grad_norm")}
    occurs = totals["freq"] > 0
    return [
        CategoryShares(
            category=CATEGORIES[index],
            n_types=int(chosen.sum()),
            n_rock_types=int((chosen & is_rock).sum()),
            **_shares(totals, chosen, ""),
            **_shares(totals, chosen & is_rock, "rock_"),
        )
        for index in range(len(CATEGORIES))
        if (chosen := occurs & (category == index)).any()
    ]


def position_profile(
    store: TraceStore,
    checkpoint: int,
    rock_ids: np.ndarray,
    prompt_ids: Sequence[str] | None = None,
    max_rollouts: int = 4096,
    seed: int = 0,
) -> PositionProfile:
    """Measure where rocks sit in the responses, beside where all tokens do.

    Args:
        store: replay traces of a run.
        checkpoint: whose kl is averaged.
        rock_ids: the types that are rocks.
        prompt_ids: the prompts to look at; default all.
        max_rollouts: above this many, a random sample of that many rollouts is read.
        seed: of that sample.

    Returns:
        Counts of what was looked at, and a list of bins each under ``line_start``, ``since_newline`` and
        ``relative_position``; a share or mean of nothing is None.
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


def _funnel(store: TraceStore, result: SearchResult, groups: Groups, categories: list[Category]) -> FunnelColumns:
    """List every type used in the selection half: frequency against mean kl, column by column."""
    sample = result.sums.selection
    used = np.flatnonzero(sample.totals("freq"))
    freq, kl = sample.totals("freq")[used], sample.totals("kl")[used]
    group_of = {column: name for name in (RARE, ROCK) for column in groups[name].tolist()}
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


def _trajectory(store: TraceStore, result: SearchResult, groups: Groups, seed: int) -> list[GroupMean]:
    """Measure the mean kl of each group at every checkpoint that scored the same occurrences, on both halves."""
    return [
        GroupMean(checkpoint, half, group, *_mean_with_interval(sample, columns, seed))
        for checkpoint in store.checkpoints
        for half, sample in checkpoint_samples(store, result.sums, checkpoint).items()
        for group, columns in groups.items()
    ]


def _mean_with_interval(
    sample: Sample, columns: np.ndarray, seed: int
) -> tuple[float | None, float | None, float | None]:
    chosen = np.isin(np.arange(len(sample.token_ids)), columns)
    freq, kl = (int(sample.totals(name)[chosen].sum()) for name in ("freq", "kl"))
    interval = share_intervals(sample, chosen, paired=False, seed=seed)["mean_kl_rocks"]
    low, high = interval or (None, None)
    return kl / (freq * ONE) if freq else None, low, high


def _crossing(result: SearchResult) -> Crossing | None:
    """Return where coverage meets stability; None where that is not defined."""
    try:
        return auto_k(result.curve)
    except RocktokensError:
        return None


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


def _shares(totals: dict[str, np.ndarray], chosen: np.ndarray, prefix: str) -> dict[str, float | None]:
    names = {"token_share": "freq", "kl_share": "kl", "grad_share": "grad_norm"}
    return {
        prefix + share: _ratio(int(totals[name][chosen].sum()), int(totals[name].sum()))
        for share, name in names.items()
    }


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
