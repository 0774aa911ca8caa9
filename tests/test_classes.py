"""Classes of tokens: what they may hold, their file, and their identity."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocktokens import TokenClasses
from rocktokens.classes import TokenClass
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


def test_without_some_ids_a_class_is_another_one():
    less = TESTED.without(np.array([1, 7]))
    assert [each.ids for each in less] == [(0,), (2, 3), (5, 4)] and less.groups == [(2, 3), (4, 5)]
    assert less.classes[0].safe is None and less.classes[1] == TESTED.classes[1]


def test_ids_beyond_the_logits_are_refused():
    TESTED.require_width(6)
    with pytest.raises(RocktokensError, match="token id 5 of the classes is outside the 5 logits"):
        TESTED.require_width(5)
    TokenClasses([]).require_width(0)
