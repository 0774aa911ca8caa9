"""Random numbers that belong to an occurrence: the same whatever rows stand beside it, and in whatever order.

SplitMix64 (https://doi.org/10.1145/2714064.2660195) over (key, rollout, position).
"""

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(key: int, rollout_ids_T: np.ndarray, positions_T: np.ndarray) -> np.ndarray:
    """float64 (T,) in [0, 1), one number for every occurrence."""
    rows_T = np.uint64(key) + (rollout_ids_T.astype(np.uint64) + np.uint64(1)) * _GAMMA
    bits_T = _mix(_mix(rows_T) + (positions_T.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits_T >> np.uint64(11)) * 2.0**-53


def _mix(words: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser; integers wrap."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
