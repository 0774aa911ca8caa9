"""SplitMix64 as its authors publish it, and one number per occurrence, by plain integers."""

import numpy as np

from rocktokens.splitmix import GAMMA, MIX_1, MIX_2, mix, occurrence_uniforms

WORD = 2**64


def naive_mix(word: int) -> int:
    word = (word ^ (word >> 30)) * MIX_1 % WORD
    word = (word ^ (word >> 27)) * MIX_2 % WORD
    return word ^ (word >> 31)


def test_the_first_outputs_of_seed_0_are_the_published_ones():
    found = mix(np.array([GAMMA, 2 * GAMMA % WORD, 3 * GAMMA % WORD], dtype=np.uint64))
    assert found.tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_a_number_depends_on_key_rollout_and_position_and_on_nothing_beside_it():
    rollouts, positions = np.array([(rollout, place) for rollout in (0, 1, 10**12) for place in range(4)]).T
    found = occurrence_uniforms(5, rollouts, positions)
    for value, rollout, position in zip(found.tolist(), rollouts.tolist(), positions.tolist(), strict=True):
        row = naive_mix((5 + (rollout + 1) * GAMMA) % WORD)
        assert value == (naive_mix((row + (position + 1) * GAMMA) % WORD) >> 11) * 2.0**-53
    order = np.random.default_rng(0).permutation(len(found))
    np.testing.assert_array_equal(occurrence_uniforms(5, rollouts[order], positions[order]), found[order])
    assert len(set(found.tolist())) == len(found)
