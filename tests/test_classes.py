"""Classes of tokens: what they may hold, their file, and their identity."""

import json
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocktokens import TokenClasses
from rocktokens.classes import State, TokenClass, link_classes
from rocktokens.errors import RocktokensError, TokenizerMismatchError

VOCABULARY = {"###": 0, "**": 1, "So": 2, "Hence": 3}


class Words:
    """A tokenizer of whole words."""

    def get_vocab(self) -> dict[str, int]:
        return VOCABULARY

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [VOCABULARY[word] for word in text.split(" ")]


TESTED = TokenClasses(
    [
        TokenClass((0, 1), ("###", "**"), ("neutral", "undecided"), ("neutral", "neutral"), "pillar", safe=True),
        TokenClass((2, 3), ("So", "Hence"), safe=None),
        TokenClass((5, 4), safe=False),
    ],
    tokenizer_sha256="a" * 64,
    source={"manifest": "b"},
    criterion={"link": 0.1},
)


def test_a_file_holds_all_that_is_known(tmp_path):
    path = tmp_path / "classes.json"
    TESTED.save(path)
    loaded = TokenClasses.load(path)
    assert loaded.classes == TESTED.classes and loaded == TESTED
    assert (loaded.tokenizer_sha256, loaded.source, loaded.criterion) == ("a" * 64, {"manifest": "b"}, {"link": 0.1})
    record = json.loads(path.read_text())
    assert record["schema_version"] == 1 and record["classes"][1]["safe"] is None
    again = tmp_path / "again.json"
    loaded.save(again)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 9}, "classes.json has schema_version 9, this rocktokens reads 1"),
        ({"classes": [{"ids": [1, "2"]}]}, r"is no classes.json \(classes.0.ids.1"),
        ({"classes": [{"ids": [1], "extra": 1}]}, r"is no classes.json \(classes.0.extra"),
        ({"classes": [{"ids": [1, 2]}, {"ids": [2, 3]}]}, "classes.json: token id 2 is in the classes twice"),
        ({"classes": [{"ids": [1, 2], "texts": ["a"]}]}, r"the class \[1, 2\] has 1 texts or verdicts for 2 ids"),
        ({"classes": [{"ids": [1, 2], "safe": "yes"}]}, r"is no classes.json \(classes.0.safe"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, change, message):
    path = tmp_path / "classes.json"
    TESTED.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RocktokensError, match=message):
        TokenClasses.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RocktokensError, match="does not exist"):
        TokenClasses.load(tmp_path / "classes.json")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 2], [2]], "token id 2 is in the classes twice: keep it in one of them, once"),
        ([[1, 1]], "token id 1 is in the classes twice"),
        ([[-1, 1]], "classes hold the token id -1: give whole numbers of 0 or more"),
        ([[1.5, 2]], "classes hold 1.5, which is no token id"),
        ([[True, 2]], "classes hold True, which is no token id"),
        (["ab"], "classes hold 'a', which is no token id"),
    ],
)
def test_what_is_no_set_of_classes_is_refused(ids, message):
    with pytest.raises(RocktokensError, match=message):
        TokenClasses(ids)


def test_texts_are_one_token_each():
    classes = TokenClasses.from_texts(Words(), [["###", "**"], ["So", "Hence"]])
    assert classes == TokenClasses([[0, 1], [2, 3]]) and classes.classes[0].texts == ("###", "**")
    classes.require_tokenizer(classes.tokenizer_sha256)
    with pytest.raises(TokenizerMismatchError, match="this model's is 000000000000: token ids mean other things there"):
        classes.require_tokenizer("0" * 64)
    TokenClasses([[1, 2]]).require_tokenizer("0" * 64)
    with pytest.raises(RocktokensError, match="the text 'So Hence' of a class is 2 tokens, not one: give texts that"):
        TokenClasses.from_texts(Words(), [["###", "So Hence"]])
    with pytest.raises(RocktokensError, match="classes hold 3 where a text was expected"):
        TokenClasses.from_texts(Words(), [[3]])


@given(st.lists(st.integers(0, 2**40), unique=True, max_size=12), st.randoms())
def test_identity_is_what_the_members_are(ids, random):
    cut = [ids[first : first + 3] for first in range(0, len(ids), 3)]
    classes = TokenClasses(cut)
    shuffled = [random.sample(group, len(group)) for group in random.sample(cut, len(cut))]
    same = TokenClasses([*shuffled, [2**41]], tokenizer_sha256="c")  # a class of one changes nothing
    assert classes == same and hash(classes) == hash(same) and classes.sha256 == same.sha256
    if len(ids) > 3:
        other = TokenClasses([*cut[:-1], [*cut[-1], 2**41]])
        assert classes != other and classes.sha256 != other.sha256


def test_the_hash_is_the_same_tomorrow():
    expected = "71204ba93aa29e9d33790d6d19e220e8b53f8fd7b3331aa54bff6abb799b7f58"
    assert TokenClasses([[2, 1], [7, 9, 8], [4]]).sha256 == expected


def test_safe_ones_alone_or_with_untested_ones():
    assert [each.ids for each in TESTED.only((True,))] == [(0, 1)]
    assert [each.ids for each in TESTED.only((True, None))] == [(0, 1), (2, 3)]
    assert TESTED.only((True,)).tokenizer_sha256 == "a" * 64
    assert TESTED.unrefuted == TESTED.only((True, None))


def test_links_leave_with_their_ids_and_those_of_no_class_stay():
    """A test starts from the links: what was left out by hand would come back with them."""
    links = [[0, 1, 0.9], [1, 2, 0.8], [2, 3, 0.7], [4, 5, 0.6], [3, 8, 0.5], [8, 9, 0.4]]
    found = TokenClasses(TESTED.classes, source={"links": links, "n_prompts": 8})
    assert found.unrefuted.source == {"links": [*links[:3], *links[4:]], "n_prompts": 8}
    assert found.without([2]).source["links"] == [links[0], *links[3:]]
    assert found.without([]).source == found.source and found.source["links"] == links
    for junk in (5, [7], [[[1], 2, 0.5]]):
        assert TokenClasses(TESTED.classes, source={"links": junk}).unrefuted.source == {"links": junk}


@pytest.mark.parametrize(
    ("known", "state"),
    [
        ({"safe": True, "verdict": "pillar"}, "interchangeable"),
        ({"safe": False, "banned": ("neutral", "pillar")}, "not interchangeable"),
        ({"banned": ("neutral", "untested")}, "undecided"),
        ({"forced": ("undecided", "neutral")}, "undecided"),
        ({"verdict": "neutral"}, "undecided"),
        ({"banned": ("untested", "untested")}, "untested"),
        ({}, "untested"),
    ],
)
def test_the_state_of_a_class_is_what_bans_have_shown(known: dict, state: State):
    assert TokenClass((0, 1), **known).state == state


def test_without_some_ids_a_class_is_another_one():
    less = TESTED.without(np.array([1, 7]))
    assert [each.ids for each in less] == [(0,), (2, 3), (5, 4)] and less.groups == [(2, 3), (4, 5)]
    assert less.classes[0].safe is None and less.classes[1] == TESTED.classes[1]


def test_ids_beyond_the_logits_are_refused():
    TESTED.require_width(6)
    with pytest.raises(RocktokensError, match="token id 5 of the classes is outside the 5 logits"):
        TESTED.require_width(5)
    TokenClasses([]).require_width(0)


# Linkage


def naive_linkage(links: dict[tuple[int, int], float], max_members: int) -> list[tuple[int, ...]]:
    """Join the two classes whose weakest link is the strongest, looking at all of them again every time."""
    known = {tuple(sorted(pair)): strength for pair, strength in links.items()}
    classes = [(each,) for each in sorted({each for pair in links for each in pair})]
    while True:
        joined = {}
        for a, b in combinations(sorted(classes), 2):
            strengths = [known.get(tuple(sorted(pair))) for pair in product(a, b)]
            if None not in strengths and len(a) + len(b) <= max_members:
                joined[-min(strengths), a[0], b[0]] = (a, b)
        if not joined:
            return [ids for ids in sorted(classes) if len(ids) > 1]
        a, b = joined[min(joined)]
        classes = [ids for ids in classes if ids not in (a, b)] + [tuple(sorted(a + b))]


pairs = st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] != pair[1])


@given(
    links=st.dictionaries(pairs.map(lambda pair: tuple(sorted(pair))), st.integers(0, 6), max_size=22),
    turned=st.booleans(),
    max_members=st.integers(2, 5),
)
def test_linkage_is_that_of_looking_at_all_classes_every_time(links, turned, max_members):
    given_links = {pair[::-1] if turned else pair: strength / 6 for pair, strength in links.items()}
    assert link_classes(given_links, max_members) == naive_linkage(given_links, max_members)


def test_every_two_members_of_a_class_are_linked():
    """1 and 3 are both twins of 2, but not of each other: the stronger link wins."""
    assert link_classes({(1, 2): 0.4, (2, 3): 0.5}) == [(2, 3)]
    assert link_classes({(1, 2): 0.4, (2, 3): 0.5, (3, 1): 0.1}) == [(1, 2, 3)]
    assert link_classes({}) == []


def test_a_class_has_sixteen_members_at_most():
    [first, second] = link_classes(dict.fromkeys(combinations(range(18), 2), 1.0))
    assert (len(first), len(second)) == (16, 2)


def test_two_classes_are_as_close_as_their_farthest_members():
    links = {(1, 2): 0.9, (3, 4): 0.8, (2, 3): 0.7, (2, 4): 0.2, (1, 3): 0.2, (1, 4): 0.2, (1, 5): 0.5, (2, 5): 0.6}
    assert link_classes(links) == [(1, 2, 5), (3, 4)]
    del links[2, 5]
    assert link_classes(links) == [(1, 2, 3, 4)]
    assert link_classes(links, max_members=3) == [(1, 2), (3, 4)]
    del links[2, 4]
    assert link_classes(links) == [(1, 2), (3, 4)]
