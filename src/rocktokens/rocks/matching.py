"""One partner of about the same frequency for every rock, chosen among other types: the problem behind the controls.

1. A candidate can be the partner of a rock when their frequencies differ by at most ``tolerance`` of the rock's.
2. Partners are assigned one to one so that the absolute gaps, plus a random price on each candidate, are least in sum:
   an optimal assignment over the sparse pairs within tolerance.
3. The partners must occur as often as the rocks, all taken together, give or take 2 %. Where the optimal assignment
   misses that, the same problem is solved with the total as a constraint, a mixed-integer program.

Shape legend: K rocks, C candidates, E pairs of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from scipy.sparse.csgraph import min_weight_full_bipartite_matching

TOTAL_TOLERANCE = 0.02
PAIRS_OF_PROGRAM = 4000
"""Pairs in a mixed-integer program, shared out between the rocks: that is about a second of work."""
FEWEST_CHOICES = 8
"""Candidates of a rock in a program of many rocks: together, a few choices for each reach any total."""
PROGRAM_OPTIONS = {"mip_rel_gap": 0.01, "node_limit": 10_000}
"""No limit on time, which would make the result depend on the machine."""
NO_PARTNER = -1


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


@dataclass(frozen=True, slots=True)
class _Prices:
    """What a pair costs: the absolute gap, and a random price of the candidate."""

    market: Market
    noise_C: np.ndarray
    """0 to 1."""
    jitter: float
    """The highest price, as a share of the allowed gap; at 0 all prices together stay below one occurrence."""

    def __call__(self, rocks_E: Any, candidates_E: np.ndarray) -> np.ndarray:
        """Cost by pair, float64 (E,)."""
        highest = np.maximum(self.jitter * self.market.allowed_gap[rocks_E], 0.5 / len(self.market.rock_freq))
        return np.abs(self.market.gaps(rocks_E, candidates_E)) + highest * self.noise_C[candidates_E]


def make_market(token_ids: np.ndarray, freq: np.ndarray, rock_ids: np.ndarray, tolerance: float) -> Market:
    """The rocks and everything else that was counted; a rock that was not has frequency 0."""
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
    """Candidates (K,) that give as many rocks as possible a partner, the closest such; NO_PARTNER for the others."""
    prices = _Prices(market, np.zeros(len(market.freq)), jitter=0.0)
    rocks_E, candidates_E = _worth_considering(prices)
    costs_E = prices(rocks_E, candidates_E)
    count = len(market.rock_freq)
    no_one = len(market.freq) + np.arange(count)
    dear = np.full(count, (costs_E.max(initial=0.0) + 1) * (count + 1))
    partners_K = _cheapest(
        np.append(rocks_E, np.arange(count)), np.append(candidates_E, no_one), np.append(costs_E, dear)
    )
    return np.where(partners_K < len(market.freq), partners_K, NO_PARTNER)


def draw_partners(market: Market, jitter: float, rng: np.random.Generator) -> np.ndarray:
    """Candidates (K,), one for every rock: the cheapest whose total fits, or the cheapest of all where none is found.

    Args:
        market: one in which every rock can have a partner.
        jitter: highest price on a candidate, as a share of the allowed gap. With 0 the match is the closest there is
            and the prices decide nothing but ties.
        rng: of the prices.
    """
    prices = _Prices(market, rng.random(len(market.freq)), jitter)
    pairs = _worth_considering(prices)
    partners_K = _cheapest(*pairs, prices(*pairs))
    return partners_K if market.fits(partners_K) else _with_total(prices, partners_K, rng)


def _share_of(count: int, share: float) -> int:
    """The whole part of a share as it is written, in decimals: 0.29 of 100 is 29, in float64 it is a little less."""
    return math.floor(count * Fraction(str(share)))


def _worth_considering(prices: _Prices) -> tuple[np.ndarray, np.ndarray]:
    """Of K rocks none needs more than its K cheapest candidates: the others take at most K − 1 of them."""
    count = len(prices.market.rock_freq)

    def choose(rock: int, candidates: np.ndarray) -> np.ndarray:
        if len(candidates) <= count:
            return candidates
        return candidates[np.argpartition(prices(rock, candidates), count)[:count]]

    return prices.market.pairs(choose)


def _cheapest(rocks_E: np.ndarray, candidates_E: np.ndarray, costs_E: np.ndarray) -> np.ndarray:
    """The candidate of every rock in the assignment of all rocks that costs least (K,)."""
    # To the solver a zero is no pair. All rocks are assigned, so a constant on every cost changes nothing.
    weights = csr_array((costs_E + 1, (rocks_E, candidates_E)))
    return min_weight_full_bipartite_matching(weights)[1]


def _with_total(prices: _Prices, partners_K: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The cheapest partners (to 1 %) whose total fits, among some choices for each rock; those given if there are none.

    The choices of a rock are all its candidates or, where they are too many, the given partner and a random sample.
    """
    market = prices.market
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
