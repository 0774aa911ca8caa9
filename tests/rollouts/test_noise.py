"""The noise: bits against a reference in Python integers, the law of the draws, independence between keys."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rocktokens.rollouts.noise import gumbel_noise, gumbel_of_bits, noise_bits, stream_key

MASK = (1 << 64) - 1


def reference_mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def reference_bits(key: int, position: int, token: int) -> int:
    row_key = reference_mix((key + (position + 1) * 0x9E3779B97F4A7C15) & MASK)
    return reference_mix((row_key + (token + 1) * 0xD1B54A32D192ED03) & MASK) >> 12


def uniforms(keys: list[int], positions: list[int], vocab_size: int) -> np.ndarray:
    """Back from Gumbel to (0, 1)."""
    noise = gumbel_noise(torch.tensor(keys), torch.tensor(positions), vocab_size)
    return np.exp(-np.exp(-noise.numpy()))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31)), min_size=1, max_size=4))
def test_bits_are_those_of_the_reference(rows):
    keys, positions = zip(*rows, strict=True)
    bits = noise_bits(torch.tensor(keys), torch.tensor(positions), 23)
    expected = [[reference_bits(key, position, token) for token in range(23)] for key, position in rows]
    assert bits.tolist() == expected


def test_mix_is_splitmix64():
    """First outputs of SplitMix64 seeded with 1234567, as published with its reference implementation."""
    gamma, state, outputs = 0x9E3779B97F4A7C15, 1234567, []
    for _ in range(3):
        state = (state + gamma) & MASK
        outputs.append(reference_mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_noise_is_the_gumbel_transform_of_the_bits():
    keys, positions = torch.tensor([stream_key(5, "a", 0), stream_key(5, "b", 1)]), torch.tensor([0, 9])
    noise = gumbel_noise(keys, positions, 50)
    bits = noise_bits(keys, positions, 50)
    for value, word in zip(noise.flatten().tolist(), bits.flatten().tolist(), strict=True):
        assert value == pytest.approx(-math.log(-math.log((word + 0.5) * 2.0**-52)), rel=1e-13)


def test_extreme_bits_stay_finite():
    lowest, highest = gumbel_of_bits(torch.tensor([0, (1 << 52) - 1])).tolist()
    assert lowest == pytest.approx(-math.log(53 * math.log(2)))
    assert highest == pytest.approx(53 * math.log(2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_same_bits():
    keys, positions = torch.tensor([stream_key(0, f"p{n}", n) for n in range(50)]), torch.arange(50)
    assert torch.equal(noise_bits(keys.cuda(), positions.cuda(), 5000).cpu(), noise_bits(keys, positions, 5000))


def test_stream_keys_differ_in_every_component():
    keys = {
        stream_key(seed, prompt, sample) for seed in range(20) for prompt in ("a", "b", "a1") for sample in range(20)
    }
    assert len(keys) == 20 * 3 * 20
    assert stream_key(1, "2", 3) == stream_key(1, "2", 3)
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_uniform_over_tokens_positions_and_streams():
    keys = [stream_key(seed, prompt, sample) for seed in (0, 1) for prompt in ("a", "b") for sample in range(25)]
    values = uniforms(keys, list(range(100)), 2000)
    assert stats.kstest(values.ravel(), "uniform").pvalue > 1e-3
    assert stats.kstest(values[:, 0], "uniform").pvalue > 1e-3
    assert stats.kstest(values[0], "uniform").pvalue > 1e-3


@pytest.mark.parametrize("component", ["seed", "prompt", "sample", "position", "token"])
def test_neighbouring_keys_are_independent(component):
    """Pairs that differ by one in one component fill a 8 × 8 table evenly and do not correlate."""
    cells = [
        (seed, prompt, sample, position)
        for seed in range(3)
        for prompt in range(3)
        for sample in range(3)
        for position in range(3)
    ]

    def draw(shift: dict[str, int]) -> np.ndarray:
        keys = [
            stream_key(
                seed + shift.get("seed", 0), f"p{prompt + shift.get('prompt', 0)}", sample + shift.get("sample", 0)
            )
            for seed, prompt, sample, _ in cells
        ]
        positions = [position + shift.get("position", 0) for *_, position in cells]
        start = shift.get("token", 0)
        return uniforms(keys, positions, 1001)[:, start : start + 1000].ravel()

    left, right = draw({}), draw({component: 1})
    table, _, _ = np.histogram2d(left, right, bins=8, range=[[0, 1], [0, 1]])
    assert stats.chisquare(table.ravel()).pvalue > 1e-3
    assert abs(np.corrcoef(left, right)[0, 1]) < 4 / math.sqrt(left.size)


def test_argmax_draws_from_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0], dtype=torch.float64)
    keys = torch.tensor([stream_key(0, f"p{index}", 0) for index in range(200)]).repeat_interleave(100)
    positions = torch.arange(100).repeat(200)
    chosen = (gumbel_noise(keys, positions, 6) + logits).argmax(dim=1)
    observed = torch.bincount(chosen, minlength=6).numpy()
    expected = torch.softmax(logits, 0).numpy() * len(chosen)
    assert stats.chisquare(observed, expected).pvalue > 1e-3
