"""Match controls to the rocks: types as frequent that are not rocks, so that a difference is not one of size.

See docs/method.md, section 7.

Type-matched, ``match_controls``:

1. Frequencies are counted at the rocks' reference checkpoint, over all prompts; every type that is not a rock is a
   candidate, unless it is excluded.
2. Each rock gets a partner of its own within ``tolerance`` of its frequency, all together within 2 % of the rocks'
   occurrences (rocktokens.rocks.matching). A poor match is refused, and the rocks without a partner are named.
3. The first draw is the closest match, ties decided by the seed. The others put a random price on every candidate, up
   to the tolerated gap, so that they differ where they can.

Occurrence-matched, ``random_positions``: in every rollout as many random positions as the rocks and their windows take,
in runs of the same lengths. That is always possible.
"""

from collections.abc import Collection, Iterator
from typing import Any

import ibis.expr.types as ir
import numpy as np
import pyarrow as pa

from rocktokens.errors import ControlMatchError, RocktokensError
from rocktokens.rocks.aggregate import occurrences, type_sums
from rocktokens.rocks.matching import NO_PARTNER, TOTAL_TOLERANCE, Market, draw_partners, make_market, most_partners
from rocktokens.rocks.split import resolve_checkpoints
from rocktokens.traces.store import TraceStore
from rocktokens.types import ControlDraw, ControlSet, RockSet
from rocktokens.windows import WindowRule, random_windows, rock_windows

ROWS_PER_BLOCK = 2_000_000
"""Rows held at a time, about 100 MB with what is computed from them; rollouts are not cut."""
NAMED_ROCKS = 3
REMEDY = (
    "raise tolerance, take fewer rocks (k), or use the occurrence-matched control (random_positions), "
    "which is always possible"
)


def match_controls(
    store: TraceStore,
    rocks: RockSet,
    tolerance: float = 0.1,
    draws: int = 5,
    seed: int = 0,
    excluded: Collection[int] = (),
) -> ControlSet:
    """Give every rock a partner that occurs as often and is not a rock, several times over.

    Args:
        store: the replay traces the rocks were found in.
        rocks: the rocks; their criterion names the checkpoint whose frequencies count.
        tolerance: largest difference between the frequencies of a rock and its partner, as a share of the rock's.
        draws: how many sets of partners; the first is the closest, the others vary.
        seed: of the draws; draw i is the same however many there are.
        excluded: further types that may not be partners, such as rocks that are left out, or what ends a response.

    Raises:
        ControlMatchError: no partner within the tolerance for some rocks, or no partners whose total fits.
    """
    if not isinstance(tolerance, int | float | np.number) or not 0 <= tolerance <= 1:
        raise RocktokensError(f"tolerance = {tolerance!r} is not valid: give a share from 0 to 1, such as 0.1")
    _require_draws(draws, seed)
    reference = _reference(store, rocks)
    sums = type_sums(occurrences(store.table(reference)))
    allowed_U = np.isin(sums.token_id, rocks.ids) | ~np.isin(sums.token_id, list(excluded))
    market = make_market(sums.token_id[allowed_U], sums.freq[allowed_U], rocks.ids, tolerance)
    _require_partners(market, rocks, tolerance)
    return ControlSet(
        tokenizer_sha256=store.tokenizer_sha256,
        criterion={
            "reference": reference,
            "tolerance": float(tolerance),
            "draws": int(draws),
            "seed": int(seed),
            "total_tolerance": TOTAL_TOLERANCE,
            **({"excluded": sorted(excluded)} if excluded else {}),
        },
        source={"manifest_sha256": store.manifest_sha256},
        rock_ids=rocks.ids.tolist(),
        rock_freq=market.rock_freq.tolist(),
        draws=[_control_draw(market, partners_K) for partners_K in _draws(market, tolerance, draws, seed)],
    )


def random_positions(store: TraceStore, rocks: RockSet, draws: int = 1, seed: int = 0) -> list[pa.Table]:
    """Draw random positions like those of the rocks and their windows, rollout by rollout.

    Args:
        store: the replay traces the rocks were found in.
        rocks: the rocks; without a window rule their occurrences alone are counted.
        draws: how many times to draw.
        seed: of the draws; draw i is the same however many there are.

    Returns:
        For each draw the trace rows it hit at the rocks' reference checkpoint: rollout_id, position, token_id and kl,
        in order of rollout and position.
    """
    _require_draws(draws, seed)
    rule = WindowRule(0, 0.0) if rocks.windows is None else WindowRule.from_dict(rocks.windows)
    drawn: list[list[pa.Table]] = [[] for _ in range(draws)]
    for block in _blocks_of_rollouts(store.table(_reference(store, rocks))):
        ids_T, positions_T, tokens_T, kl_T = (column.to_numpy() for column in block.columns)
        marked_T = rock_windows(np.isin(tokens_T, rocks.ids), kl_T, ids_T, positions_T, rule)
        for draw, tables in enumerate(drawn):
            tables.append(block.filter(pa.array(random_windows(marked_T, ids_T, (seed, draw)))))
    return [pa.concat_tables(tables) for tables in drawn]


def _require_draws(draws: int, seed: int) -> None:
    for name, value, least in (("draws", draws, 1), ("seed", seed, 0)):
        if not isinstance(value, int | np.integer) or value < least:
            raise RocktokensError(f"{name} = {value!r} is not valid: give a whole number of at least {least}")


def _reference(store: TraceStore, rocks: RockSet) -> int:
    """The checkpoint the rocks were found at, if they belong to this store and there are any."""
    rocks.require_tokenizer(store.tokenizer_sha256)
    if not rocks.tokens:
        raise RocktokensError("rocks holds no tokens, so there is nothing to match: find rocks with a k of at least 1")
    if "reference" not in rocks.criterion:
        raise RocktokensError("rocks.criterion names no reference checkpoint: find the rocks with `rocktokens find`")
    reference = rocks.criterion["reference"]
    return resolve_checkpoints(store, reference, reference)[0]


def _draws(market: Market, tolerance: float, draws: int, seed: int) -> Iterator[np.ndarray]:
    """Partners (K,) by draw; one for which no fitting total is found falls back on the closest match."""

    def draw_at(jitter: float, draw: int) -> np.ndarray:
        return draw_partners(market, jitter, np.random.Generator(np.random.PCG64([seed, draw])))

    closest = draw_at(0.0, 0)
    _require_fit(market, closest, tolerance)
    yield closest
    for draw in range(1, draws):
        partners_K = draw_at(1.0, draw)
        yield partners_K if market.fits(partners_K) else closest


def _control_draw(market: Market, partners_K: np.ndarray) -> ControlDraw:
    freq, total = market.freq[partners_K], int(market.rock_freq.sum())
    return ControlDraw(
        ids=market.ids[partners_K].tolist(),
        freq=freq.tolist(),
        total=int(freq.sum()),
        total_gap=market.excess(partners_K) / total,
        max_gap=float((np.abs(freq - market.rock_freq) / market.rock_freq).max()),
    )


def _require_partners(market: Market, rocks: RockSet, tolerance: float) -> None:
    """Refuse when not every rock can have a partner; the named ones are the fewest that can be left without."""
    partners_K = most_partners(market)
    unmatched = np.flatnonzero(partners_K == NO_PARTNER).tolist()
    if not unmatched:
        return
    left_over = np.delete(market.freq, partners_K[partners_K != NO_PARTNER])
    named = [
        f"{rocks.tokens[rock].text!r} (id {rocks.tokens[rock].id}) occurs {market.rock_freq[rock]} times, "
        + _nearest(int(market.rock_freq[rock]), left_over)
        for rock in unmatched[:NAMED_ROCKS]
    ]
    if others := unmatched[NAMED_ROCKS:]:
        named.append("nor do " + ", ".join(f"{rocks.tokens[rock].text!r}" for rock in others))
    raise ControlMatchError(
        f"{len(unmatched)} of {len(partners_K)} rocks get no partner within ±{100 * tolerance:g} % of their frequency "
        f"({'; '.join(named)}): {REMEDY}",
        unmatched=rocks.ids[unmatched].tolist(),
    )


def _nearest(freq: int, left_over: np.ndarray) -> str:
    if not left_over.size:
        return "no type is left"
    return f"the nearest type left {left_over[np.abs(left_over - freq).argmin()]}"


def _require_fit(market: Market, closest: np.ndarray, tolerance: float) -> None:
    if market.fits(closest):
        return
    total, excess = int(market.rock_freq.sum()), market.excess(closest)
    raise ControlMatchError(
        f"the rocks occur {total} times and their closest partners {total + excess} times, "
        f"{100 * excess / total:+.2g} %, and no others within ±{100 * tolerance:g} % of each rock were found "
        f"that come within {100 * TOTAL_TOLERANCE:g} % in all: {REMEDY}"
    )


def _blocks_of_rollouts(rows: ir.Table) -> Iterator[pa.Table]:
    """The rows in order of rollout and position, some whole rollouts at a time."""
    rollout_id: Any = rows.rollout_id
    counts = rows.group_by("rollout_id").agg(rows=rows.count()).order_by("rollout_id").to_pyarrow()
    block_R = np.cumsum(counts["rows"].to_numpy()) // ROWS_PER_BLOCK
    for ids in np.split(counts["rollout_id"].to_numpy(), 1 + np.flatnonzero(np.diff(block_R))):
        inside = (rollout_id >= int(ids[0])) & (rollout_id <= int(ids[-1]))
        block = rows.filter(inside).select("rollout_id", "position", "token_id", "kl")
        yield block.order_by("rollout_id", "position").to_pyarrow()
