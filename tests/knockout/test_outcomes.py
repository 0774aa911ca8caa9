"""What a ban changes, against walks through the tokens of both texts."""

from collections import Counter
from dataclasses import asdict
from statistics import mean, median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocktokens.knockout.outcomes import NOWHERE, Continuation, first_occurrences
from rocktokens.knockout.records import Ban
from rocktokens.knockout.summary import describe_changes
from rocktokens.types import Rollout

VOCABULARY = 8
SAMPLES = 2
tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9)
banned_ids = st.lists(st.integers(0, VOCABULARY + 1), min_size=1, max_size=3, unique=True).map(sorted)


def rollout_of(index: int, token_ids: list[int], finished: bool = True) -> Rollout:
    nothing = np.zeros(len(token_ids), dtype=np.float32)
    prompt_id, sample = f"p{index // SAMPLES}", index % SAMPLES
    prompt_ids, own = np.array([1, 2], dtype=np.int32), np.array(token_ids, dtype=np.int32)
    return Rollout(index, prompt_id, sample, prompt_ids, own, nothing, policy_step=0, finished=finished)


def ban_of(ids: list[int]) -> Ban:
    return Ban(tuple(ids), "some")


def naive_first(token_ids: list[int], ids: list[int]) -> int:
    return next((position for position, token in enumerate(token_ids) if token in ids), NOWHERE)


@given(st.lists(tokens, min_size=1, max_size=6), st.lists(banned_ids, max_size=4))
def test_first_occurrences_are_those_of_a_walk(responses, bans):
    free = [rollout_of(index, response) for index, response in enumerate(responses)]
    found = first_occurrences(free, [ban_of(ids) for ids in bans])
    assert found.tolist() == [[naive_first(response, ids) for response in responses] for ids in bans]


@st.composite
def sweeps(draw):
    """One ban of a sweep: free rollouts, whether each is right, and the continuations of some that hold the ban."""
    ids = draw(banned_ids)
    responses = draw(st.lists(st.tuples(tokens, st.booleans(), st.booleans()), min_size=1, max_size=6))
    free = [rollout_of(index, response, finished) for index, (response, finished, _) in enumerate(responses)]
    right = [right for _, _, right in responses]
    banned = {}
    for index, (response, _, _) in enumerate(responses):
        start = naive_first(response, ids)
        if start != NOWHERE and draw(st.booleans()):
            own = np.array(draw(tokens), dtype=np.int32)
            banned[index] = Continuation(start, own, draw(st.booleans()), draw(st.booleans()))
    return ids, free, right, dict(draw(st.permutations(list(banned.items()))))


def naive_changes(ids: list[int], free: list[Rollout], right: list[bool], banned: dict[int, Continuation]) -> dict:
    """From the whole texts under the ban, without a use of where they start to differ but that."""
    hold = [rollout for rollout in free if set(ids) & set(rollout.token_ids.tolist())]
    indices = sorted(banned)
    old = [free[i].token_ids.tolist() for i in indices]
    new = [old_ids[: banned[i].start] + banned[i].token_ids.tolist() for i, old_ids in zip(indices, old, strict=True)]
    first = [naive_first(text, ids) for text in old]
    taken = Counter(text[position] for text, position in zip(new, first, strict=True))
    ranked = sorted(taken.items(), key=lambda item: (-item[1], item[0]))[:5]
    lost = [i for i in indices if right[i] and not banned[i].right]
    gained = [i for i in indices if not right[i] and banned[i].right]
    cut = [int(not banned[i].finished) for i in indices], [int(not free[i].finished) for i in indices]
    return {
        "n_rollouts": len(hold),
        "n_prompts": len({rollout.prompt_id for rollout in hold}),
        "length": mean(map(len, new)) - mean(map(len, old)) if indices else None,
        "truncated": mean(cut[0]) - mean(cut[1]) if indices else None,
        "first_difference": median(first) if indices else None,
        "first_difference_share": median(a / len(b) for a, b in zip(first, old, strict=True)) if indices else None,
        "replacements": [(token, f"<{token}>", count / len(indices)) for token, count in ranked],
        "lost": [(f"p{i // SAMPLES}", i % SAMPLES) for i in lost],
        "gained": [(f"p{i // SAMPLES}", i % SAMPLES) for i in gained],
        "n_changed": sum(list(a) != list(b) for a, b in zip(new, old, strict=True)),
    }


def describe(ids: list[int], free: list[Rollout], right: list[bool], banned: dict[int, Continuation]) -> dict:
    first_R = first_occurrences(free, [ban_of([VOCABULARY]), ban_of(ids)])[1]
    return asdict(describe_changes(first_R, free, banned, np.array(right), lambda token_id: f"<{token_id}>"))


@given(sweeps())
def test_changes_are_those_of_the_whole_texts(sweep):
    found, expected = describe(*sweep), naive_changes(*sweep)
    for name in ("length", "truncated", "first_difference", "first_difference_share"):
        assert found.pop(name) == pytest.approx(expected.pop(name), abs=1e-12)
    assert found == expected


def test_a_worked_example():
    """Token 5 is banned: the first text differs after two tokens, the second at once, the third holds none."""
    free = [rollout_of(0, [1, 2, 5, 7]), rollout_of(1, [5, 7]), rollout_of(2, [1, 7])]
    banned = {1: Continuation(0, np.array([3, 3, 3]), False, True), 0: Continuation(2, np.array([3, 7]), True, False)}
    assert describe([5], free, [True, False, True], banned) == {
        "n_rollouts": 2,
        "n_prompts": 1,
        "length": 0.5,
        "truncated": 0.5,
        "first_difference": 1.0,
        "first_difference_share": 0.25,
        "replacements": [(3, "<3>", 1.0)],
        "lost": [("p0", 0)],
        "gained": [("p0", 1)],
        "n_changed": 2,
    }


def test_answers_are_listed_in_the_order_of_the_rollouts_in_whatever_order_they_were_decoded():
    free = [rollout_of(index, [5, 7]) for index in range(4)]
    banned = {index: Continuation(0, np.array([7]), True, index == 1) for index in (3, 1, 0, 2)}
    found = describe([5], free, [True, False, True, True], banned)
    assert found["lost"] == [("p0", 0), ("p1", 0), ("p1", 1)]
    assert found["gained"] == [("p0", 1)]


def test_what_was_not_decoded_is_counted_and_not_described():
    free = [rollout_of(index, [5, 7]) for index in range(3)]
    assert describe([5], free, [True] * 3, {}) == {
        "n_rollouts": 3,
        "n_prompts": 2,
        "length": None,
        "truncated": None,
        "first_difference": None,
        "first_difference_share": None,
        "replacements": [],
        "lost": [],
        "gained": [],
        "n_changed": 0,
    }


def test_the_five_commonest_replacements_are_listed_and_shares_are_of_all():
    taken = [4, 0, 0, 1, 1, 2, 3, 6, 7, 4]
    free = [rollout_of(index, [5]) for index in range(10)]
    banned = {index: Continuation(0, np.array([token]), True, True) for index, token in enumerate(taken)}
    found = describe([5], free, [True] * 10, banned)["replacements"]
    assert found == [(0, "<0>", 0.2), (1, "<1>", 0.2), (4, "<4>", 0.2), (2, "<2>", 0.1), (3, "<3>", 0.1)]
