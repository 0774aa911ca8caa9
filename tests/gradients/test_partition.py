"""Partitions of positions and batches of prompts."""

import numpy as np
import pytest
from gradient_oracle import make_rollouts, token_ids
from hypothesis import given
from hypothesis import strategies as st

from rocktokens.errors import RocktokensError
from rocktokens.gradients.partition import Partition, by_edges, by_type, prompt_batches, split_by_rollout

ROLLOUTS = make_rollouts(7, per_prompt=2)


def test_types_get_their_set_and_the_others_the_rest():
    sets = {"a": [3, 11], "b": {0}}
    partition = by_type(ROLLOUTS, sets)
    assert partition.names == ("a", "b", "rest")
    expected = [{3: "a", 11: "a", 0: "b"}.get(int(token), "rest") for token in token_ids(ROLLOUTS)]
    assert [partition.names[group] for group in partition.group_T] == expected
    assert set(expected) == {"a", "b", "rest"}
    partition.require_fit(ROLLOUTS)


def test_sets_that_hold_every_token_leave_no_rest():
    everyone = np.unique(token_ids(ROLLOUTS)).tolist()
    partition = by_type(ROLLOUTS, {"a": everyone[:3], "b": everyone[3:]})
    assert partition.names == ("a", "b")
    np.testing.assert_array_equal(partition.group_T, np.isin(token_ids(ROLLOUTS), everyone[3:]))


@given(
    values=st.lists(st.floats(-5, 5), min_size=1),
    edges=st.lists(st.integers(-4, 4), min_size=1, max_size=4, unique=True).map(sorted),
)
def test_edges_cut_at_the_edge_itself(values, edges):
    partition = by_edges(np.array(values), edges, "kl")
    for value, group in zip(values, partition.group_T, strict=True):
        assert group == sum(edge <= value for edge in edges)
    assert len(partition.names) == len(edges) + 1


def test_edges_are_named():
    assert by_edges(np.array([0.0]), [0.1, 1], "kl").names == ("kl < 0.1", "0.1 ≤ kl < 1", "1 ≤ kl")


@given(count=st.integers(1, 12), per_prompt=st.integers(1, 3), batches=st.integers(1, 12))
def test_batches_hold_every_rollout_once_and_no_prompt_twice(count, per_prompt, batches):
    rollouts = make_rollouts(count, per_prompt=per_prompt)
    n_prompts = len({rollout.prompt_id for rollout in rollouts})
    if batches > n_prompts:
        with pytest.raises(RocktokensError, match=f"batches is {batches} for rollouts of {n_prompts} prompts"):
            prompt_batches(rollouts, batches)
        return
    found = prompt_batches(rollouts, batches)
    assert [index for batch in found for index in batch] == list(range(count))
    prompts = [{rollouts[index].prompt_id for index in batch} for batch in found]
    assert sum(len(own) for own in prompts) == n_prompts
    assert max(map(len, prompts)) - min(map(len, prompts)) <= 1


def test_split_gives_each_rollout_its_own_tokens():
    for rollout, own in zip(ROLLOUTS, split_by_rollout(token_ids(ROLLOUTS), ROLLOUTS), strict=True):
        assert np.array_equal(rollout.token_ids, own)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: by_type(ROLLOUTS, {"a": {1}, "b": {1}}), "token id 1 is in the groups 'a' and 'b'"),
        (lambda: by_type(ROLLOUTS, {"rest": {1}}), "a set called 'rest'"),
        (lambda: by_edges(np.ones(2), [1, 1], "kl"), "kl cannot be cut at"),
        (lambda: by_edges(np.array([np.nan]), [1], "kl"), "values without NaN"),
        (lambda: Partition(("a",), np.zeros(2, int)).require_fit(ROLLOUTS), "one group per token"),
        (lambda: Partition(("a",), np.ones(len(token_ids(ROLLOUTS)), int)).require_fit(ROLLOUTS), "there are 1 groups"),
        (lambda: Partition(("a", "a"), np.zeros(len(token_ids(ROLLOUTS)), int)).require_fit(ROLLOUTS), "own name"),
    ],
)
def test_a_partition_that_is_none_is_refused(make, message):
    with pytest.raises(RocktokensError, match=message):
        make()
