import json
from dataclasses import asdict
from itertools import combinations

import numpy as np
import pytest
import torch

from rocktokens.errors import RocktokensError
from rocktokens.gradients.logit_space import TypeRows
from rocktokens.gradients.logit_summary import (
    compare_groups,
    describe_checkpoint,
    describe_groups,
    describe_persistence,
    persistence,
)
from rocktokens.gradients.sketch import count_sketch
from rocktokens.gradients.type_gradients import (
    BLOCK_ROWS,
    COLUMNS,
    SpaceSums,
    TypeGradients,
    describe_types,
    describe_whole,
    half_cosine,
)

WIDTH = 40


def summed(gradients_TW, token_ids_T, halves_T=None, sketch=None, sha="a"):
    """What a pass over positions with these gradients finds; both spaces are the same."""
    halves_T = np.arange(len(token_ids_T)) % 2 == 1 if halves_T is None else halves_T
    rows = TypeRows.of(token_ids_T, halves_T, max_split=len(token_ids_T))
    types_T, rows_T = rows.locate(token_ids_T, halves_T)
    vectors_TW = gradients_TW if sketch is None else sketch(torch.from_numpy(gradients_TW)).numpy()
    vectors_RW = np.zeros((rows.n_rows, vectors_TW.shape[1]))
    np.add.at(vectors_RW, rows_T, vectors_TW)
    lengths_T = np.linalg.norm(gradients_TW, axis=1)
    norms = [np.bincount(types_T, weights) for weights in (lengths_T, lengths_T**2)]
    exact = np.zeros((len(rows.freq_U), gradients_TW.shape[1]))
    np.add.at(exact, types_T, gradients_TW)
    return TypeGradients(
        token_ids=rows.token_ids_U,
        freq=rows.freq_U,
        second_row=rows.second_row_U,
        hidden=SpaceSums(vectors_RW, *norms),
        vocabulary=SpaceSums(vectors_RW, *norms, sketch=None if sketch is None else (sketch.width, sketch.seed)),
        pooled_V=exact.sum(axis=0),
        balanced_V=(exact / rows.freq_U[:, None]).sum(axis=0),
        rollouts_sha256=sha,
    )


def random_gradients(n=3000, n_types=50, seed=0, drift=0.0):
    """Gradients with a direction by type, and noise; types 0, 2, 4 …"""
    generator = np.random.default_rng(seed)
    token_ids = 2 * generator.integers(n_types, size=n)
    direction = generator.normal(size=(2 * n_types, WIDTH))
    return direction[token_ids] * drift + generator.normal(size=(n, WIDTH)), token_ids


def test_identical_gradients_do_not_cancel():
    gradient = np.random.default_rng(0).normal(size=WIDTH)
    table = describe_types(summed(np.tile(gradient, (9, 1)), np.repeat([3, 8], [7, 2])), "hidden")
    for name in ("alignment", "coherence", "cos_pooled", "cos_balanced"):
        np.testing.assert_allclose(table.value(name), 1, atol=1e-12)
    np.testing.assert_allclose(table.norm.value, np.linalg.norm(gradient))
    np.testing.assert_allclose(table.contribution.value, np.linalg.norm(gradient) * np.array([7, 2]))


@pytest.mark.parametrize("lengths", [[1.0, 1.0, 1.0], [1.0, 0.001, 40.0], [3.0, 0.0, 2.0]])
def test_coherence_is_of_directions_and_not_of_lengths(lengths):
    lengths_n1 = np.array(lengths)[:, None]
    parallel, orthogonal = lengths_n1 * np.eye(WIDTH)[[0] * 3], lengths_n1 * np.eye(WIDTH)[:3]
    found = describe_types(summed(np.vstack([parallel, orthogonal]), np.repeat([1, 2], 3)), "hidden")
    np.testing.assert_allclose(found.coherence.value, [1, 0], atol=1e-12)


def test_without_a_pair_there_is_no_coherence():
    """One occurrence with a gradient, beside others that have none, is no pair."""
    gradients = np.random.default_rng(0).normal(size=(3, WIDTH)) * np.array([[1.0], [1.0], [0.0]])
    found = describe_types(summed(gradients, np.array([1, 2, 2])), "hidden")
    assert np.isnan(found.coherence.value).all()


def test_opposite_gradients_cancel():
    gradient = np.random.default_rng(0).normal(size=WIDTH)
    table = describe_types(summed(np.stack([gradient, -gradient, gradient]), np.array([1, 1, 2])), "hidden")
    np.testing.assert_allclose(table.alignment.value, [0, 1], atol=1e-12)
    np.testing.assert_allclose(table.coherence.value, [-1, np.nan], atol=1e-12)


@pytest.mark.parametrize("n", [4, 100])
def test_random_gradients_cancel_as_a_random_walk_does(n):
    generator = np.random.default_rng(1)
    gradients = generator.normal(size=(200 * n, 300))
    table = describe_types(summed(gradients, np.repeat(np.arange(200), n)), "hidden")
    assert table.alignment.value.mean() == pytest.approx(1 / np.sqrt(n), rel=0.02)
    assert abs(table.coherence.value.mean()) < 0.01


def test_contributions_add_up_to_the_pooled_gradient_along_the_balanced():
    gradients = summed(*random_gradients(drift=0.2))
    expected = gradients.pooled_V @ gradients.balanced_V / np.linalg.norm(gradients.balanced_V)
    assert describe_types(gradients, "hidden").contribution.value.sum() == pytest.approx(expected)
    whole = describe_whole(gradients, "hidden")
    assert whole.pooled_norm * whole.cosine == pytest.approx(expected)


def test_more_types_than_a_block_are_all_described():
    vectors, token_ids = random_gradients(n=6000, n_types=3 * BLOCK_ROWS // 2 + 7)
    table = describe_types(summed(vectors, token_ids), "hidden")
    assert len(table.token_ids) > BLOCK_ROWS
    sums = {token: vectors[token_ids == token].sum(axis=0) for token in table.token_ids}
    expected = [np.linalg.norm(sums[token]) / np.sum(token_ids == token) for token in table.token_ids]
    np.testing.assert_allclose(table.norm.value, expected, rtol=1e-12)
    pooled = vectors.sum(axis=0)
    cosines = [x @ pooled / np.linalg.norm(x) / np.linalg.norm(pooled) for x in sums.values()]
    np.testing.assert_allclose(table.cos_pooled.value, cosines, rtol=1e-10)


@pytest.mark.parametrize("split", [2, 5])
def test_shares_of_a_partition_add_up_to_one(split):
    gradients = summed(*random_gradients(drift=0.3), sketch=count_sketch(WIDTH, 16, 0))
    table = describe_types(gradients, "vocabulary")
    ids = gradients.token_ids
    groups = {f"group {rest}": ids[ids % split == rest] for rest in dict.fromkeys((ids % split).tolist())}
    described = describe_groups(gradients, table, groups).values()
    assert sum(group.n_types for group in described) == len(gradients.token_ids)
    for name in ("token_share", "norm_share"):
        assert sum(getattr(group, name) for group in described) == pytest.approx(1)
    assert sum(group.signed_share.value for group in described) == pytest.approx(1)
    for group in described:
        chosen = table.token_ids % split == int(group.name[-1])
        assert group.medians["alignment"] == np.median(table.alignment.value[chosen])


def test_estimates_from_a_sketch_are_within_their_errors():
    """Over many seeds, of many types at once: all columns cover the truth."""
    generator = np.random.default_rng(3)
    vectors, token_ids = generator.normal(size=(200, 400)), generator.integers(20, size=200)
    vectors += 0.5 * generator.normal(size=400)
    truth = describe_types(summed(vectors, token_ids), "vocabulary")
    covered = {name: [] for name in COLUMNS if name not in ("mean_norm", "share")}
    for seed in range(100):
        table = describe_types(summed(vectors, token_ids, sketch=count_sketch(400, 128, seed)), "vocabulary")
        for name, hits in covered.items():
            estimate = getattr(table, name)
            hits.append(np.abs(estimate.value - truth.value(name)) <= 1.96 * estimate.error)
    for name, hits in covered.items():
        assert 0.93 <= np.mean(hits) <= 0.98, (name, np.mean(hits))


def test_groups_are_compared_by_ranks():
    gradients = summed(*random_gradients(n=150, n_types=9))
    table = describe_types(gradients, "hidden")
    groups = {"a": table.token_ids[:4], "b": [*table.token_ids[4:], 999], "none": [1]}
    tests = compare_groups(table, groups, columns=["alignment"])
    assert [(test.first, test.second) for test in tests] == [("a", "b"), ("a", "none"), ("b", "none")]
    values = table.alignment.value
    a, b = values[:4], values[4:]

    def superiority(first, second):
        return np.mean(first[:, None] > second)

    every = [superiority(values[list(four)], np.delete(values, four)) for four in combinations(range(9), 4)]
    observed = superiority(a, b)
    p = np.mean(np.abs(np.array(every) - 0.5) >= abs(observed - 0.5) - 1e-12)
    test = tests[0]
    assert (test.n_first, test.n_second) == (4, 5)
    assert test.superiority == pytest.approx(observed) and test.p == pytest.approx(p)
    assert (test.median_first, test.median_second) == (np.median(a), np.median(b))
    assert tests[1].n_second == 0 and tests[1].p is None


def test_types_without_the_number_are_left_out_of_the_test():
    vectors, token_ids = random_gradients(n=100, n_types=8)
    token_ids[0] = 1  # occurs once: no coherence
    table = describe_types(summed(vectors, token_ids), "hidden")
    (test,) = compare_groups(table, {"odd": [1, 2, 4], "even": [6, 8]}, columns=["coherence"])
    assert (test.n_first, test.n_second) == (2, 2)


def test_a_direction_that_stays_has_cosine_one_and_a_reversed_one_minus_one():
    vectors, token_ids = random_gradients()
    before = summed(vectors, token_ids)
    for factor in (2.0, -3.0):
        found = persistence(before, summed(factor * vectors, token_ids), "hidden")
        np.testing.assert_allclose(found.cosine, np.sign(factor))
        np.testing.assert_allclose(found.cross_half, np.sign(factor) * found.split_half_before)
        np.testing.assert_allclose(found.split_half_after, found.split_half_before)


def test_persistence_is_judged_against_what_chance_alone_does():
    """New noise, same directions: the cosine is far below 1, but the cross half is no lower than the split halves."""
    vectors, token_ids = random_gradients(drift=0.2)
    noise = np.random.default_rng(9).normal(size=vectors.shape)
    same = persistence(summed(vectors, token_ids), summed(vectors + noise, token_ids), "hidden")
    row = describe_persistence(same, {"all": np.unique(token_ids)})["all"]
    assert row.n_types == row.n_split == 50
    assert row.split_half_after < row.split_half_before < 0.8
    assert row.cross_half == pytest.approx(np.sqrt(row.split_half_before * row.split_half_after), abs=0.05)
    turned = np.roll(vectors, 1, axis=1)
    other = persistence(summed(vectors, token_ids), summed(turned, token_ids), "hidden")
    row = describe_persistence(other, {"all": np.unique(token_ids)})["all"]
    assert row.split_half_after > 0.4 and abs(row.cross_half) < 0.1


def test_halves_pair_the_first_then_with_the_second_now():
    vectors, token_ids = random_gradients(n=400, n_types=6)
    later = np.roll(vectors, 3, axis=0)
    halves = np.random.default_rng(2).random(400) < 0.4
    found = persistence(summed(vectors, token_ids, halves), summed(later, token_ids, halves), "vocabulary")

    def cosine(x, y):
        return x @ y / np.linalg.norm(x) / np.linalg.norm(y)

    for index, token in enumerate(found.token_ids):
        first, second = (token_ids == token) & ~halves, (token_ids == token) & halves
        sums = [[part[rows].sum(axis=0) for rows in (first, second)] for part in (vectors, later)]
        cross = (cosine(sums[0][0], sums[1][1]) + cosine(sums[1][0], sums[0][1])) / 2
        assert found.cross_half[index] == pytest.approx(cross)
        assert found.split_half_after[index] == pytest.approx(cosine(*sums[1]))
        assert found.cosine[index] == pytest.approx(cosine(sum(sums[0]), sum(sums[1])))


def test_persistence_needs_the_same_rollouts_and_the_same_sketch():
    vectors, token_ids = random_gradients(n=100)
    before = summed(vectors, token_ids)
    with pytest.raises(RocktokensError, match="different rollouts"):
        persistence(before, summed(vectors, token_ids, sha="b"), "hidden")
    with pytest.raises(RocktokensError, match="different rollouts"):
        persistence(before, summed(vectors, token_ids + 1), "hidden")
    seeds = [summed(vectors, token_ids, sketch=count_sketch(WIDTH, 16, seed)) for seed in (0, 1)]
    with pytest.raises(RocktokensError, match=r"sketch \(16, 0\) and \(16, 1\)"):
        persistence(*seeds, "vocabulary")
    with pytest.raises(RocktokensError, match="different ways"):
        persistence(before, summed(vectors, token_ids, halves_T=token_ids > 40), "hidden")


def test_the_frame_holds_every_number_with_its_error():
    gradients = summed(*random_gradients(n=60), sketch=count_sketch(WIDTH, 16, 0))
    table = describe_types(gradients, "vocabulary")
    frame = table.to_frame()
    assert frame["token_id"].tolist() == gradients.token_ids.tolist()
    np.testing.assert_array_equal(frame["cos_pooled_error"], table.cos_pooled.error)
    np.testing.assert_array_equal(frame["share"], table.share)


def test_a_half_needs_both_rows():
    vectors, token_ids = random_gradients(n=60, n_types=5)
    gradients = summed(vectors, token_ids, halves_T=token_ids >= 4)
    assert np.isnan(half_cosine(gradients, gradients, "hidden")).all()


def test_records_are_json_with_none_for_what_is_not_defined():
    vectors, token_ids = random_gradients(n=60, n_types=5)
    token_ids[0] = 1  # occurs once: no coherence, no halves
    gradients = summed(vectors, token_ids)
    table = describe_types(gradients, "hidden")
    found = describe_checkpoint(gradients, {"rocks": [1], "none": []}, {}).hidden
    record = json.loads(json.dumps(asdict(found), allow_nan=False))
    assert record["types"]["token_id"] == gradients.token_ids.tolist()
    assert record["types"]["coherence"][1] is None and record["types"]["coherence_error"][0] == 0
    assert record["types"]["norm"] == table.norm.value.tolist()
    once, none = record["groups"].values()
    assert (
        once["cos_pooled"] == {"value": found.groups["rocks"].cos_pooled.value, "error": 0.0} and once["n_types"] == 1
    )
    assert none["norm_share"] == 0 and none["mean_norm"] is None and none["medians"]["alignment"] is None
