"""Bans that should do nothing, to set beside those of the rocks (docs/method.md, section 6).

1. Frequencies are counted in the free rollouts of the sweep itself: that is what a ban acts on.
2. Matched: types that are no rocks, each as frequent as a rock, one to one for as many rocks as possible
   (rocktokens.rocks.controls). A rock without a partner is named, and the sweep goes on without its placebo.
3. Never: ids that no free rollout holds. Banning one changes nothing, so Δ is 0 without decoding. The sweep still
   continues some free rollouts under each of them: whatever then differs is noise of the engine.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from rocktokens.rocks.controls import NO_PARTNER, make_market, most_partners
from rocktokens.types import Rollout


@dataclass(frozen=True, slots=True)
class MatchedPlacebos:
    """Types as frequent as rocks that are none, in rank order of the rocks."""

    ids: list[int]
    rock_ids: list[int]
    """The rock each of them stands in for."""
    unmatched: list[int]
    """Rocks without a partner."""


def token_counts(rollouts: Sequence[Rollout], vocab_size: int) -> np.ndarray:
    """Count how often each id was sampled, int64 (V,)."""
    return np.bincount(np.concatenate([rollout.token_ids for rollout in rollouts]), minlength=vocab_size)


def matched_placebos(
    counts_V: np.ndarray, candidate_ids: Sequence[int], rock_ids: Sequence[int], tolerance: float, count: int
) -> MatchedPlacebos:
    """Match as many rocks as possible one to one, as closely as possible; the first ``count`` partners are taken.

    Args:
        counts_V: from ``token_counts``.
        candidate_ids: what may be banned. Rocks and ids that were never sampled are passed over.
        rock_ids: in rank order; one that was never sampled has no partner.
        tolerance: largest difference between the frequencies of a rock and its partner, as a share of the rock's.
        count: how many partners at most.
    """
    if not len(rock_ids):
        return MatchedPlacebos([], [], [])
    rocks_K = np.array(rock_ids, dtype=np.int64)
    candidates = np.array(candidate_ids, dtype=np.int64)
    counted = np.union1d(candidates[counts_V[candidates] > 0], rocks_K)
    market = make_market(counted, counts_V[counted], rocks_K, tolerance)
    partners_K = most_partners(market)
    matched = np.flatnonzero(partners_K != NO_PARTNER)
    return MatchedPlacebos(
        ids=market.ids[partners_K[matched]].tolist()[:count],
        rock_ids=rocks_K[matched].tolist()[:count],
        unmatched=rocks_K[partners_K == NO_PARTNER].tolist(),
    )


def never_emitted(counts_V: np.ndarray, excluded: Collection[int], count: int, seed: int) -> list[int]:
    """Choose at random among the ids never sampled that may be banned; the first are the same for any count."""
    allowed = np.setdiff1d(np.flatnonzero(counts_V == 0), list(excluded))
    return np.random.Generator(np.random.PCG64(seed)).permutation(allowed)[:count].tolist()
