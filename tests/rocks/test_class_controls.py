"""Controls of classes against every assignment there is, and against what may be in none of them."""

import math
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_controls import STEP, generator, rock_set, store_of
from tokenizers import Tokenizer, models

from rocktokens.classes import TokenClasses
from rocktokens.errors import ControlMatchError
from rocktokens.rocks.class_controls import MATCHED_TO, ClassControls, nearest_partners
from rocktokens.run_dir import RunDir
from rocktokens.traces.store import TraceStore

CLASSES = TokenClasses([[0, 1], [4, 3, 2], [9]])
"""The last changes nothing and has no control."""
MEMBERS = {0, 1, 2, 3, 4}
ROCKS = (0, 1, 10, 11)
FREQ = {0: 40, 1: 35, 2: 20, 3: 10, 4: 5, 9: 8} | {10: 42, 11: 33, 12: 30, 13: 22, 14: 18, 15: 9, 16: 9, 17: 8, 18: 4}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TraceStore:
    return store_of(tmp_path_factory.mktemp("types"), FREQ)


@pytest.fixture
def controls(store: TraceStore) -> ClassControls:
    return ClassControls(store, CLASSES, rock_set(*ROCKS), excluded=[9, 16])


def distance(members: Sequence[int], partners: Sequence[int]) -> float:
    return sum(abs(math.log(partner / max(member, 1))) for member, partner in zip(members, partners, strict=True))


frequencies = st.integers(1, 60)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=4), st.lists(frequencies, min_size=4, max_size=6))
def test_partners_are_the_cheapest_of_all_assignments(members: list[int], candidates: list[int]):
    chosen = nearest_partners(np.array(members), np.array(candidates), generator(3)).tolist()
    prices = generator(3).random((len(members), len(candidates))).tolist()

    def cost(partners: Sequence[int]) -> float:
        drawn = sum(prices[member][partner] for member, partner in enumerate(partners))
        return distance(members, [candidates[index] for index in partners]) + math.log(1.1) * drawn

    every = list(permutations(range(len(candidates)), len(members)))
    assert cost(chosen) == pytest.approx(min(map(cost, every)), abs=1e-12)
    closest = min(distance(members, [candidates[index] for index in partners]) for partners in every)
    off = distance(members, [candidates[index] for index in chosen]) - closest
    assert off <= len(members) * math.log(1.1) + 1e-12


def test_random_classes_have_the_sizes_and_about_the_frequencies_of_the_classes(controls: ClassControls):
    made = controls.match(0)
    assert [len(ids) for ids in (own.ids for own in made)] == [len(ids) for ids in CLASSES.groups]
    partners = [token_id for own in made for token_id in own.ids]
    assert len(set(partners)) == len(partners) and not set(partners) & (MEMBERS | {9, 16})
    ratios = [FREQ[partner] / FREQ[member] for member, partner in zip([0, 1, 2, 3, 4], partners, strict=True)]
    assert made.criterion["members"] == [0, 1, 2, 3, 4]
    assert made.criterion["freq_ratios"] == pytest.approx(ratios) and max(ratios) < 2
    totals = [sum(FREQ[token_id] for token_id in ids) for ids in (partners, MEMBERS)]
    assert made.criterion["total_ratio"] == pytest.approx(totals[0] / totals[1])
    assert made.criterion[MATCHED_TO] == CLASSES.sha256 and made.criterion["reference"] == STEP
    assert {own.safe for own in made} == {None}
    assert set(partners) & set(ROCKS), "rocks that are in no class may be partners"


def test_classes_of_non_rocks_hold_no_rock_and_nothing_rare(controls: ClassControls):
    made = controls.draw(0, min_freq=5, min_prompts=2)
    drawn = {token_id for own in made for token_id in own.ids}
    assert drawn == {12, 13, 14, 15, 17}, "all that are left"
    assert [len(own.ids) for own in made] == [2, 3]
    with pytest.raises(ControlMatchError, match="5 members and the trace has 4 types that are no rocks, in no class"):
        controls.draw(0, min_freq=9, min_prompts=2)


def test_types_of_too_few_prompts_are_passed_over(store: TraceStore):
    """Rollouts have 25 tokens and a prompt each, so that even the most frequent type is in no more than these."""
    prompts = math.ceil(sum(FREQ.values()) / 25)
    with pytest.raises(ControlMatchError, match="has 0 types"):
        ClassControls(store, CLASSES, rock_set(*ROCKS)).draw(0, min_freq=1, min_prompts=prompts + 1)


def test_twins_are_one_member_of_each_class(controls: ClassControls):
    few, many = controls.twins(7, 2), controls.twins(7, 6)
    assert many.draws[:2] == few.draws and many.n_distinct > 1
    for own in many:
        assert [token_id in ids for token_id, ids in zip(own.ids, CLASSES.groups, strict=True)] == [True, True]
        assert own.freq == [FREQ[token_id] for token_id in own.ids] and own.total == sum(own.freq)
        assert own.total_gap == pytest.approx(own.total / sum(FREQ[token_id] for token_id in ROCKS) - 1)


def test_a_draw_depends_on_its_seed_alone(store: TraceStore, controls: ClassControls):
    again = ClassControls(store, CLASSES, rock_set(*ROCKS), excluded=[16, 9])
    for draw in (
        lambda own, seed: own.match(seed),
        lambda own, seed: own.draw(seed, 2, 1),
        lambda own, seed: own.twins(seed, 1).draws[0].ids,
    ):
        assert draw(controls, 3) == draw(again, 3)
        drawn = [draw(controls, seed) for seed in range(8)]
        assert any(own != drawn[0] for own in drawn)


def test_special_tokens_are_in_no_control(tmp_path: Path):
    """The end of a response is as frequent as the member, and nothing else is."""
    store_of(tmp_path, {0: 20, 1: 20, 2: 20, 3: 15, 4: 12})
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(5) if index != 2}, "t0"))
    tokenizer.add_special_tokens(["<|end|>"])
    end = tokenizer.token_to_id("<|end|>")
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer/tokenizer.json"))
    RunDir(tmp_path).adopt(["tokenizer/tokenizer.json"])
    made = ClassControls(TraceStore(tmp_path), TokenClasses([[0, 1]]), rock_set(0)).match(0)
    assert {token_id for own in made for token_id in own.ids} == {2, 3, 4} - {end} and end in {2, 3, 4}


def test_what_cannot_be_matched_is_refused_in_one_sentence(tmp_path: Path, store: TraceStore):
    classes = TokenClasses([list(range(5)), list(range(10, 16))])
    with pytest.raises(
        ControlMatchError, match="11 members and the trace has 4 types that are in no class: trace more"
    ):
        ClassControls(store, classes, rock_set(0)).match(0)
    rare = store_of(tmp_path, {0: 40, 1: 40, 2: 3, 3: 36})
    with pytest.raises(ControlMatchError, match=r"0\.49 times as often as the classes, .* a factor of 2: trace more"):
        ClassControls(rare, TokenClasses([[0, 1]]), rock_set(0)).match(0)
