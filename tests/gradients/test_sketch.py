import math

import numpy as np
import pytest
import torch

from rocktokens.errors import RocktokensError
from rocktokens.gradients import estimates
from rocktokens.gradients.sketch import count_sketch

V = 600


def spread_pair(seed=0):
    """Two vectors with many numbers of like size, cosine about 0.5."""
    x, noise = np.random.default_rng(seed).normal(size=(2, V))
    return x, 0.5 * x + 0.85 * noise


def peaked_pair(seed=0):
    """Two gradients as logits have them: p − q of distributions that put most of their mass on a few ids."""
    generator = np.random.default_rng(seed)
    z = 3 * generator.normal(size=(4, V)) + 3 * generator.normal(size=V)
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    return p[0] - p[1], p[0] - 0.5 * p[1] - 0.5 * p[2]


def sketches(rows, width, seeds):
    """float64 (seeds, n, width)."""
    rows = torch.from_numpy(np.stack(rows))
    return np.stack([count_sketch(V, width, seed)(rows).numpy() for seed in range(seeds)])


def test_the_sketch_is_its_definition():
    x = torch.randn(3, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sketch = count_sketch(V, 50, seed=4)
    expected = torch.zeros(3, 50, dtype=torch.float64)
    for v in range(V):
        expected[:, sketch.buckets_V[v]] += sketch.signs_V[v] * x[:, v]
    torch.testing.assert_close(sketch(x), expected, atol=1e-13, rtol=0)
    assert set(sketch.signs_V.tolist()) == {-1.0, 1.0}
    assert sketch(x.float()).dtype == torch.float32


def test_the_sketch_of_a_sum_is_the_sum_of_sketches():
    x, y = (torch.from_numpy(vector)[None] for vector in spread_pair())
    sketch = count_sketch(V, 64, seed=1)
    torch.testing.assert_close(sketch(2 * x - 3 * y), 2 * sketch(x) - 3 * sketch(y), atol=1e-12, rtol=0)


def test_buckets_and_signs_belong_to_the_seed_and_the_id():
    sketch, wider = count_sketch(V, 64, seed=1), count_sketch(2 * V, 64, seed=1)
    assert torch.equal(wider.buckets_V[:V], sketch.buckets_V) and torch.equal(wider.signs_V[:V], sketch.signs_V)
    other = count_sketch(V, 64, seed=2)
    assert (other.buckets_V == sketch.buckets_V).float().mean() < 0.1
    assert abs((other.signs_V * sketch.signs_V).mean()) < 0.2


def test_buckets_and_signs_are_even():
    sketch = count_sketch(100_000, 100, seed=0)
    counts = torch.bincount(sketch.buckets_V, minlength=100).numpy()
    assert 60 < ((counts - 1000) ** 2 / 1000).sum() < 150  # χ² with 99 degrees of freedom
    assert abs(sketch.signs_V.mean()) < 4 / math.sqrt(100_000)


@pytest.mark.parametrize("pair", [spread_pair, peaked_pair])
def test_inner_products_have_the_mean_and_the_variance_of_the_formula(pair):
    x, y = pair()
    products = np.einsum("sw,sw->s", *np.moveaxis(sketches((x, y), 16, 4000), 1, 0))
    variance = ((x @ x) * (y @ y) + (x @ y) ** 2 - 2 * (x**2 @ y**2)) / 16
    assert abs(products.mean() - x @ y) < 4 * math.sqrt(variance / 4000)
    assert products.var() == pytest.approx(variance, rel=0.2)


def test_the_norm_is_right_on_average_and_its_root_alone_is_not():
    x, _ = spread_pair()
    squares = (sketches((x,), 8, 4000)[:, 0] ** 2).sum(-1)
    truth, error_of_mean = np.linalg.norm(x), np.linalg.norm(x) / math.sqrt(2 * 8 * 4000)
    assert abs(estimates.norm(squares, 8).value.mean() - truth) < 3 * error_of_mean
    assert np.sqrt(squares).mean() < truth - 3 * error_of_mean


def numbers(x, y, width):
    """Every kind of estimate, the last as if x were the sum of 5 vectors."""
    products = np.vecdot(x, y), np.vecdot(x, x), np.vecdot(y, y), width
    return {
        "norm": estimates.norm(products[1], width),
        "cosine": estimates.cosine(*products),
        "projection": estimates.projection(*products),
        "signed share": estimates.signed_share(*products),
        "coherence": estimates.coherence(products[1], 3.0, 3.5, width),
    }


@pytest.mark.parametrize("pair", [spread_pair, peaked_pair])
def test_intervals_cover_the_truth_as_often_as_they_say(pair):
    x, y = pair()
    truth = numbers(x, y, math.inf)
    found = numbers(*np.moveaxis(sketches((x, y), 128, 1000), 1, 0), 128)
    for name, (value, error) in found.items():
        covered = (np.abs(value - truth[name].value) <= 1.96 * error).mean()
        assert covered >= 0.93, (name, covered)
        if pair is spread_pair:  # the errors are bounds, but no wider than they must be here
            assert covered <= 0.975, (name, covered)


def test_an_exact_space_has_no_error():
    x, y = spread_pair()
    for name, (value, error) in numbers(x, y, math.inf).items():
        assert np.isfinite(value) and error == 0, name
    assert estimates.norm(x @ x, math.inf).value == np.linalg.norm(x)


def test_what_is_not_defined_is_nan():
    with np.errstate(all="raise"):
        assert np.isnan(estimates.cosine(0.0, 0.0, 1.0, 64).value)
        assert np.isnan(estimates.coherence(np.ones(1), np.ones(1), np.ones(1), math.inf).value)


def test_a_sketch_of_no_width_is_refused():
    with pytest.raises(RocktokensError, match="sketch_width = 0"):
        count_sketch(V, 0, seed=0)
