"""SplitMix64, a counter-based generator of random numbers: https://doi.org/10.1145/2714064.2660195.

A number is a pure function of its key and counters, with no state to advance. ``rocktokens.rollouts.noise`` has the
same function over torch tensors, which must run on the device.
"""

import numpy as np

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def mix(words: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser over uint64, which wraps."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(MIX_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(MIX_2)
    return words ^ (words >> np.uint64(31))


def occurrence_uniforms(key: int, rollout_ids_T: np.ndarray, positions_T: np.ndarray) -> np.ndarray:
    """Draw one number for every occurrence, float64 (T,) in [0, 1), whatever rows stand beside it, in any order."""
    rows_T = np.uint64(key) + (rollout_ids_T.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA)
    bits_T = mix(mix(rows_T) + (positions_T.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA))
    return (bits_T >> np.uint64(11)) * 2.0**-53
