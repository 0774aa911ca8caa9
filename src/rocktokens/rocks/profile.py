"""What rocks are made of and where they sit: tables by category and by place in the response (METHOD 4.8, 4.9).

1. ``category_table``: how much of the tokens, the kl and the gradient norm each category holds, and its rocks alone.
2. ``position_profile``: the rows of up to ``max_rollouts`` rollouts in order. A token starts a line where it is the
   first of its response or the token *before* it ends with a newline; from there the tokens of the line are counted.
3. In every bin: the share of all tokens that lie there, the share of the rocks that do, how many of the tokens there
   are rocks, and the mean kl of those rocks.

Rows without a kl are not occurrences and fall in no bin, but they are part of the text: they end lines and count in the
length of a response.

Shape legend: U types, N rows.
"""

from collections.abc import Sequence

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa

from rocktokens.errors import RocktokensError
from rocktokens.rocks.aggregate import ONE
from rocktokens.rocks.categories import CATEGORIES
from rocktokens.rocks.records import CategoryShares, PositionBin, PositionProfile
from rocktokens.rocks.selectors import Sample
from rocktokens.traces.store import TraceStore
from rocktokens.types import Category

LINE_BINS = ("start of line", "elsewhere")
SINCE_NEWLINE_BINS = {"0": 0, "1": 1, "2–4": 2, "5–9": 5, "10+": 10}
"""Tokens between a token and the start of its line, by the least of each bin."""
DECILES = tuple(f"{10 * decile}–{10 * decile + 10} %" for decile in range(10))


def category_table(
    token_ids_U: np.ndarray, categories: Sequence[Category], sample: Sample, is_rock_U: np.ndarray
) -> list[CategoryShares]:
    """What each category holds of a sample, and what its rocks do, all as shares of the whole.

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
    """Where rocks sit in the responses, beside where all tokens do.

    Args:
        store: replay traces of a run.
        checkpoint: whose kl is averaged.
        rock_ids: the types that are rocks.
        prompt_ids: the prompts to look at; default all.
        max_rollouts: above this many, a random sample of so many rollouts is read.
        seed: of that sample.

    Returns:
        Counts of what was looked at, and a list of bins each under ``line_start``, ``since_newline`` and
        ``relative_position``; a share or mean of nothing is None.
    """
    if max_rollouts < 1:
        raise RocktokensError(f"max_rollouts = {max_rollouts} is not valid: give at least 1")
    text = _text_rows(store.table(checkpoint), prompt_ids)
    rollout_ids = text.select("rollout_id").distinct().order_by("rollout_id").to_pyarrow()["rollout_id"].to_numpy()
    chosen = _sample(rollout_ids, max_rollouts, seed)
    rows = _ordered_rows(text if len(chosen) == len(rollout_ids) else _of_rollouts(text, chosen))

    since_newline, decile = _places(rows["rollout_id"], _ends_line(store, rows["token_id"]))
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


def _shares(totals: dict[str, np.ndarray], chosen: np.ndarray, prefix: str) -> dict[str, float | None]:
    names = {"token_share": "freq", "kl_share": "kl", "grad_share": "grad_norm"}
    return {
        prefix + share: _ratio(int(totals[name][chosen].sum()), int(totals[name].sum()))
        for share, name in names.items()
    }


def _text_rows(rows: ir.Table, prompt_ids: Sequence[str] | None) -> ir.Table:
    """All rows of the prompts, scored or not."""
    if prompt_ids is None:
        return rows
    wanted = ibis.memtable(pa.table({"prompt_id": pa.array(prompt_ids, pa.string())}))
    return rows.semi_join(wanted, "prompt_id")


def _sample(rollout_ids: np.ndarray, size: int, seed: int) -> np.ndarray:
    if len(rollout_ids) <= size:
        return rollout_ids
    generator = np.random.Generator(np.random.PCG64(seed))
    return np.sort(generator.choice(rollout_ids, size, replace=False))


def _of_rollouts(rows: ir.Table, rollout_ids: np.ndarray) -> ir.Table:
    return rows.semi_join(ibis.memtable(pa.table({"rollout_id": pa.array(rollout_ids, pa.int64())})), "rollout_id")


def _ordered_rows(rows: ir.Table) -> dict[str, np.ndarray]:
    """Columns (N,) in order of rollout and position; a missing kl is NaN."""
    columns = rows.select("rollout_id", "position", "token_id", "kl").order_by("rollout_id", "position").to_pyarrow()
    return {name: columns[name].to_numpy() for name in ("rollout_id", "token_id", "kl")}


def _ends_line(store: TraceStore, token_ids_N: np.ndarray) -> np.ndarray:
    """Whether each row's token ends with a newline, bool (N,)."""
    types, type_of_row = np.unique(token_ids_N, return_inverse=True)
    return np.array([text.endswith("\n") for text in store.token_texts(types)], dtype=bool)[type_of_row]


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
