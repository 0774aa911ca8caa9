"""Match controls to the rocks: types as frequent that are not rocks, so that a difference is not one of size.

See docs/method.md, section 7.

Type-matched, ``match_controls``:

1. Frequencies are counted at the rocks' reference checkpoint, over all prompts; every type that is not a rock is a
   candidate, unless it is excluded. A candidate can be the partner of a rock when their frequencies differ by at most
   ``tolerance`` of the rock's.
2. Partners are assigned one to one so that the absolute gaps, plus a random price on each candidate, are least in sum:
   an optimal assignment over the sparse pairs within tolerance. A poor match is refused, and the rocks without a
   partner are named.
3. The partners must occur as often as the rocks, all taken together, give or take 2 %. Where the optimal assignment
   misses that, the same problem is solved with the total as a constraint, a mixed-integer program.
4. The first draw is the closest match, ties decided by the seed. The others price candidates up to the tolerated gap,
   so that they differ where they can.

Matched as a whole, ``match_type_sets``:

1. Frequencies and summed kl are those at the rocks' reference checkpoint, over all prompts. A set of other types fits
   when its occurrences and its kl are both those of the rocks, give or take 2 %. It may have more types than the rocks,
   or fewer.
2. A draw gives every type a random price from −1 to 1 and takes the cheapest set that fits: a mixed-integer program
   with two constraints. Prices of either sign make draws differ in size as well as in what they hold.
3. Where no set fits, the match is refused: rocks that hold more than half of the kl cannot have one.

Occurrence-matched, ``random_positions``: in every rollout as many random positions as the rocks and their windows take,
in runs of the same lengths. That is always possible.

Shape legend: K rocks, C candidates, E pairs of them, A amounts that are matched (frequency, kl).
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from scipy.sparse.csgraph import min_weight_full_bipartite_matching

from rocktokens.errors import ControlMatchError, RocktokensError
from rocktokens.rocks.sums import occurrences, resolve_checkpoints, type_sums
from rocktokens.traces.store import TraceStore
from rocktokens.types import ControlDraw, ControlSet, RockSet
from rocktokens.windows import WindowRule, random_windows, rock_windows

TOTAL_TOLERANCE = 0.02
PAIRS_OF_PROGRAM = 4000
"""Pairs in a mixed-integer program, shared out between the rocks: that is about a second of work."""
FEWEST_CHOICES = 8
"""Candidates of a rock in a program of many rocks: together, a few choices for each reach any total."""
PROGRAM_OPTIONS = {"mip_rel_gap": 0.01, "node_limit": 10_000}
"""No limit on time, which would make the result depend on the machine."""
NO_PARTNER = -1
ROWS_PER_BLOCK = 2_000_000
"""Rows held at a time, about 100 MB with what is computed from them; rollouts are not cut."""
NAMED_ROCKS = 3
REMEDY = (
    "raise tolerance, take fewer rocks (k), or use the occurrence-matched control (random_positions), "
    "which is always possible"
)


@dataclass(frozen=True, slots=True)
class Market:
    """Rocks in their own order and the candidates for their partners by ascending frequency; all arrays are int64."""

    rock_freq: np.ndarray
    """(K,)"""
    allowed_gap: np.ndarray
    """(K,): how far the frequency of a partner may be off."""
    ids: np.ndarray
    """(C,)"""
    freq: np.ndarray
    """(C,)"""

    @property
    def allowed_excess(self) -> int:
        """How far the occurrences of all partners may be off those of all rocks."""
        return _share_of(int(self.rock_freq.sum()), TOTAL_TOLERANCE)

    def excess(self, partners_K: np.ndarray) -> int:
        """Occurrences of the partners beyond those of the rocks."""
        return int(self.freq[partners_K].sum() - self.rock_freq.sum())

    def fits(self, partners_K: np.ndarray) -> bool:
        """Whether the partners occur about as often as the rocks."""
        return abs(self.excess(partners_K)) <= self.allowed_excess

    def gaps(self, rocks_E: Any, candidates_E: np.ndarray) -> np.ndarray:
        """Frequency of the candidate less that of the rock, by pair."""
        return self.freq[candidates_E] - self.rock_freq[rocks_E]

    def pairs(self, choose: Callable[[int, np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Rocks and candidates (E,) of the pairs within tolerance that ``choose`` keeps of each rock's candidates."""
        firsts = np.searchsorted(self.freq, self.rock_freq - self.allowed_gap, side="left")
        lasts = np.searchsorted(self.freq, self.rock_freq + self.allowed_gap, side="right")
        chosen = [choose(rock, np.arange(*span)) for rock, span in enumerate(zip(firsts, lasts, strict=True))]
        return np.repeat(np.arange(len(chosen)), [len(part) for part in chosen]), np.concatenate(chosen)


Prices = Callable[[Any, np.ndarray], np.ndarray]
"""What pairs of rocks and candidates (E,) cost, float64 (E,)."""


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
        rocks: their criterion names the checkpoint whose frequencies count.
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
    drawn = _draws(market, tolerance, draws, seed)
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
        draws=[
            ControlDraw(
                ids=market.ids[partners_K].tolist(),
                freq=market.freq[partners_K].tolist(),
                total=int(market.freq[partners_K].sum()),
                total_gap=market.excess(partners_K) / int(market.rock_freq.sum()),
                max_gap=float((np.abs(market.freq[partners_K] - market.rock_freq) / market.rock_freq).max()),
            )
            for partners_K in drawn
        ],
    )


def match_type_sets(store: TraceStore, rocks: RockSet, draws: int = 5, seed: int = 0) -> ControlSet:
    """Draw sets of other types that, as a whole, occur as often as the rocks and have as much kl.

    Args:
        store: the replay traces the rocks were found in.
        rocks: their criterion names the checkpoint whose frequencies and kl count.
        draws: how many sets.
        seed: of the draws; draw i is the same however many there are.

    Raises:
        ControlMatchError: no set fits.
    """
    _require_draws(draws, seed)
    reference = _reference(store, rocks)
    sums = type_sums(occurrences(store.table(reference)))
    is_rock_U, amounts_AU = np.isin(sums.token_id, rocks.ids), np.stack([sums.freq, sums.kl])
    wanted_A, amounts_AC = amounts_AU[:, is_rock_U].sum(axis=1), amounts_AU[:, ~is_rock_U]
    ids_C, count_of = sums.token_id[~is_rock_U], dict(zip(sums.token_id.tolist(), sums.freq.tolist(), strict=True))
    chosen = [draw_set(amounts_AC, wanted_A, np.random.Generator(np.random.PCG64([seed, i]))) for i in range(draws)]
    drawn = [chosen_C for chosen_C in chosen if chosen_C is not None]
    if len(drawn) < draws:
        tokens, kl = (100 * wanted_A / amounts_AU.sum(axis=1)).tolist()
        raise ControlMatchError(
            f"no set of other types occurs as often as the rocks ({tokens:.1f} % of the tokens) and has as much kl "
            f"({kl:.1f} % of it), within {100 * TOTAL_TOLERANCE:g} % of both: match positions instead (loss_control), "
            "which is always possible, or take fewer rocks (k)"
        )
    gaps = [(amounts_AC[:, chosen_C].sum(axis=1) - wanted_A) / wanted_A for chosen_C in drawn]
    return ControlSet(
        tokenizer_sha256=store.tokenizer_sha256,
        criterion={
            "reference": reference,
            "draws": int(draws),
            "seed": int(seed),
            "total_tolerance": TOTAL_TOLERANCE,
            "matched": ["freq", "kl"],
        },
        source={"manifest_sha256": store.manifest_sha256},
        rock_ids=rocks.ids.tolist(),
        rock_freq=[count_of.get(token_id, 0) for token_id in rocks.ids.tolist()],
        draws=[
            ControlDraw(
                ids=ids_C[chosen_C].tolist(),
                freq=amounts_AC[0, chosen_C].tolist(),
                total=int(amounts_AC[0, chosen_C].sum()),
                total_gap=float(freq_gap),
                max_gap=None,
                kl_gap=float(kl_gap),
            )
            for chosen_C, (freq_gap, kl_gap) in zip(drawn, gaps, strict=True)
        ],
    )


def draw_set(amounts_AC: np.ndarray, wanted_A: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
    """Choose candidates, bool (C,), whose amounts add up to those wanted within 2 %; None if there are none."""
    prices_C = rng.uniform(-1.0, 1.0, amounts_AC.shape[1])
    allowed = TOTAL_TOLERANCE * (1 - 1e-4)  # the solver keeps a bound to 1e-6
    if not wanted_A.all() or (amounts_AC.sum(axis=1) < (1 - TOTAL_TOLERANCE) * wanted_A).any():
        return None
    solution = milp(
        prices_C,
        constraints=LinearConstraint(amounts_AC / wanted_A[:, None], 1 - allowed, 1 + allowed),
        integrality=np.ones(len(prices_C)),
        bounds=Bounds(0, 1),
        options=PROGRAM_OPTIONS,
    )
    if solution.x is None:
        return None
    chosen_C = solution.x > 0.5
    off_A = np.abs(amounts_AC[:, chosen_C].sum(axis=1) - wanted_A)
    return chosen_C if (off_A <= TOTAL_TOLERANCE * wanted_A).all() else None


def random_positions(store: TraceStore, rocks: RockSet, draws: int = 1, seed: int = 0) -> list[pa.Table]:
    """Draw random positions like those of the rocks and their windows, rollout by rollout.

    Without a window rule the occurrences of the rocks alone are counted. Draw i is the same however many there are.

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
    """Return the checkpoint the rocks were found at, if they belong to this store and there are any."""
    rocks.require_tokenizer(store.tokenizer_sha256)
    if not rocks.tokens:
        raise RocktokensError("rocks holds no tokens, so there is nothing to match: find rocks with a k of at least 1")
    if "reference" not in rocks.criterion:
        raise RocktokensError("rocks.criterion names no reference checkpoint: find the rocks with `rocktokens find`")
    reference = rocks.criterion["reference"]
    return resolve_checkpoints(store, reference, reference)[0]


def _draws(market: Market, tolerance: float, draws: int, seed: int) -> list[np.ndarray]:
    """Draw partners (K,) several times; one for which no fitting total is found falls back on the closest match."""

    def drawn(draw: int) -> np.ndarray:
        return draw_partners(market, float(draw > 0), np.random.Generator(np.random.PCG64([seed, draw])))

    closest = drawn(0)
    if not market.fits(closest):
        total, excess = int(market.rock_freq.sum()), market.excess(closest)
        raise ControlMatchError(
            f"the rocks occur {total} times and their closest partners {total + excess} times, "
            f"{100 * excess / total:+.2g} %, and no others within ±{100 * tolerance:g} % of each rock were found "
            f"that come within {100 * TOTAL_TOLERANCE:g} % in all: {REMEDY}"
        )
    others = map(drawn, range(1, draws))
    return [closest, *(partners_K if market.fits(partners_K) else closest for partners_K in others)]


def _require_partners(market: Market, rocks: RockSet, tolerance: float) -> None:
    """Refuse when not every rock can have a partner; the named ones are the fewest that can be left without."""
    partners_K = most_partners(market)
    unmatched = np.flatnonzero(partners_K == NO_PARTNER).tolist()
    if not unmatched:
        return
    left_over = np.delete(market.freq, partners_K[partners_K != NO_PARTNER])
    named = []
    for rock in unmatched[:NAMED_ROCKS]:
        own, freq = rocks.tokens[rock], market.rock_freq[rock]
        nearest = left_over[np.abs(left_over - freq).argmin()] if left_over.size else None
        left = "no type is left" if nearest is None else f"the nearest type left {nearest}"
        named.append(f"{own.text!r} (id {own.id}) occurs {freq} times, {left}")
    if others := unmatched[NAMED_ROCKS:]:
        named.append("nor do " + ", ".join(f"{rocks.tokens[rock].text!r}" for rock in others))
    raise ControlMatchError(
        f"{len(unmatched)} of {len(partners_K)} rocks get no partner within ±{100 * tolerance:g} % of their frequency "
        f"({'; '.join(named)}): {REMEDY}",
        unmatched=rocks.ids[unmatched].tolist(),
    )


def _blocks_of_rollouts(rows: ir.Table) -> Iterator[pa.Table]:
    """Yield the rows in order of rollout and position, some whole rollouts at a time."""
    rollout_id: Any = rows.rollout_id
    counts = rows.group_by("rollout_id").agg(rows=rows.count()).order_by("rollout_id").to_pyarrow()
    block_R = np.cumsum(counts["rows"].to_numpy()) // ROWS_PER_BLOCK
    for ids in np.split(counts["rollout_id"].to_numpy(), 1 + np.flatnonzero(np.diff(block_R))):
        inside = (rollout_id >= int(ids[0])) & (rollout_id <= int(ids[-1]))
        block = rows.filter(inside).select("rollout_id", "position", "token_id", "kl")
        yield block.order_by("rollout_id", "position").to_pyarrow()


def make_market(token_ids: np.ndarray, freq: np.ndarray, rock_ids: np.ndarray, tolerance: float) -> Market:
    """Set the rocks beside everything else that was counted; a rock that was not has frequency 0."""
    count_of = dict(zip(token_ids.tolist(), freq.tolist(), strict=True))
    rock_freq = [count_of.get(token_id, 0) for token_id in rock_ids.tolist()]
    candidates = np.flatnonzero(~np.isin(token_ids, rock_ids))
    candidates = candidates[np.argsort(freq[candidates], kind="stable")]
    return Market(
        rock_freq=np.array(rock_freq, dtype=np.int64),
        allowed_gap=np.array([_share_of(count, tolerance) for count in rock_freq], dtype=np.int64),
        ids=token_ids[candidates],
        freq=freq[candidates],
    )


def most_partners(market: Market) -> np.ndarray:
    """Give as many rocks as possible a partner, candidates (K,), the closest such; NO_PARTNER for the others."""
    prices = _prices(market, np.zeros(len(market.freq)), jitter=0.0)
    rocks_E, candidates_E = _worth_considering(market, prices)
    costs_E = prices(rocks_E, candidates_E)
    count = len(market.rock_freq)
    no_one = len(market.freq) + np.arange(count)
    dear = np.full(count, (costs_E.max(initial=0.0) + 1) * (count + 1))
    partners_K = _cheapest(
        np.append(rocks_E, np.arange(count)), np.append(candidates_E, no_one), np.append(costs_E, dear)
    )
    return np.where(partners_K < len(market.freq), partners_K, NO_PARTNER)


def draw_partners(market: Market, jitter: float, rng: np.random.Generator) -> np.ndarray:
    """Choose a candidate for every rock (K,): the cheapest whose total fits, or the cheapest of all if none is found.

    Every rock can have a partner. With ``jitter`` 0 the match is the closest there is and prices only decide ties.
    """
    prices = _prices(market, rng.random(len(market.freq)), jitter)
    pairs = _worth_considering(market, prices)
    partners_K = _cheapest(*pairs, prices(*pairs))
    return partners_K if market.fits(partners_K) else _with_total(market, prices, partners_K, rng)


def _share_of(count: int, share: float) -> int:
    """The whole part of a share as it is written, in decimals: 0.29 of 100 is 29, in float64 it is a little less."""
    return math.floor(count * Fraction(str(share)))


def _prices(market: Market, noise_C: np.ndarray, jitter: float) -> Prices:
    """Price a pair by its absolute gap and a random price of the candidate: noise from 0 to 1 times the highest price.

    That is ``jitter`` as a share of the allowed gap; at 0 all prices together stay below one occurrence.
    """

    def prices(rocks_E: Any, candidates_E: np.ndarray) -> np.ndarray:
        highest = np.maximum(jitter * market.allowed_gap[rocks_E], 0.5 / len(market.rock_freq))
        return np.abs(market.gaps(rocks_E, candidates_E)) + highest * noise_C[candidates_E]

    return prices


def _worth_considering(market: Market, prices: Prices) -> tuple[np.ndarray, np.ndarray]:
    """Keep the K cheapest candidates of each of K rocks: the other rocks take at most K − 1 of them."""
    count = len(market.rock_freq)

    def choose(rock: int, candidates: np.ndarray) -> np.ndarray:
        if len(candidates) <= count:
            return candidates
        return candidates[np.argpartition(prices(rock, candidates), count)[:count]]

    return market.pairs(choose)


def _cheapest(rocks_E: np.ndarray, candidates_E: np.ndarray, costs_E: np.ndarray) -> np.ndarray:
    """Assign a candidate to every rock (K,) so that the whole costs least."""
    # To the solver a zero is no pair. All rocks are assigned, so a constant on every cost changes nothing.
    weights = csr_array((costs_E + 1, (rocks_E, candidates_E)))
    return min_weight_full_bipartite_matching(weights)[1]


def _with_total(market: Market, prices: Prices, partners_K: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The cheapest partners (to 1 %) whose total fits, among some choices for each rock; those given if there are none.

    The choices of a rock are all its candidates or, where they are too many, the given partner and a random sample.
    """
    choices = max(FEWEST_CHOICES, PAIRS_OF_PROGRAM // len(partners_K))

    def choose(rock: int, candidates: np.ndarray) -> np.ndarray:
        if len(candidates) <= choices:
            return candidates
        return np.union1d(partners_K[rock], rng.choice(candidates, choices, replace=False))

    rocks_E, candidates_E = market.pairs(choose)
    pair, ones = np.arange(len(rocks_E)), np.ones(len(rocks_E))
    # The solver keeps a bound of 1 to 1e-6: an excess beyond 50,000 is held a little lower, a smaller one exactly.
    bound = market.allowed_excess * (1 - 1e-5) + 0.5
    solution = milp(
        prices(rocks_E, candidates_E) / bound,
        constraints=[
            LinearConstraint(csr_array((ones, (rocks_E, pair))), 1, 1),
            LinearConstraint(csr_array((ones, (candidates_E, pair))), 0, 1),
            LinearConstraint(market.gaps(rocks_E, candidates_E)[None, :] / bound, -1, 1),
        ],
        integrality=ones,
        bounds=Bounds(0, 1),
        options=PROGRAM_OPTIONS,
    )
    return partners_K if solution.x is None else candidates_E[solution.x > 0.5]
