"""Which tokens a sweep bans: every type once, in rank order, by the name it has; and what cannot be one."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from trace_oracle import random_trace, with_column, write_trace

from rocktokens.errors import RocktokensError
from rocktokens.knockout.bans import Tokens, Wanted, choose_bans, control_ban
from rocktokens.knockout.records import Ban
from rocktokens.models import pebbles
from rocktokens.traces.store import TraceStore
from rocktokens.traces.token_text import Vocabulary
from rocktokens.types import RockSet, RockToken


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    tokenizer = Tokenizer.from_file(str(pebbles.directory("student") / "tokenizer.json"))
    return Tokens(Vocabulary(tokenizer), lambda text: tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def rocks(tokens: Tokens) -> RockSet:
    found = [
        ("So", "discourse"),
        ("7", "digit"),
        ("Wait", "discourse"),
        ("8", "digit"),
        ("\n\n", "markdown_whitespace"),
    ]
    ranked = [
        RockToken(tokens.vocabulary.ids(text)[0], text, rank, 9, 1.0, 9.0, None, None, category)
        for rank, (text, category) in enumerate(found, start=1)
    ]
    return RockSet("", {"reference": 4}, {}, {}, ranked)


def names(bans: list[Ban]) -> list[str]:
    return [ban.name for ban in bans]


# One by one


def test_rocks_come_in_rank_order_with_text_and_category(rocks: RockSet, tokens: Tokens):
    bans = choose_bans(rocks, Wanted(top=3), tokens)
    assert bans == [Ban((token.id,), token.text, "tested", token.category) for token in rocks.tokens[:3]]


def test_the_first_so_many_are_taken_of_the_wanted_categories(rocks: RockSet, tokens: Tokens):
    assert names(choose_bans(rocks, Wanted(top=1, categories=["digit"]), tokens)) == ["7"]
    assert names(choose_bans(rocks, Wanted(top=9, categories=["digit", "discourse"]), tokens)) == [
        "So",
        "7",
        "Wait",
        "8",
    ]


def test_labels_choose_among_the_rocks(rocks: RockSet, tokens: Tokens):
    labels = ["stuck", "residual", "unclear", "stuck", "stuck"]
    labelled = replace(
        rocks, tokens=[replace(own, label=label) for own, label in zip(rocks.tokens, labels, strict=True)]
    )
    stuck = Wanted(top=2, labels=["stuck"])
    assert names(choose_bans(labelled, stuck, tokens)) == ["So", "8"]
    assert names(choose_bans(labelled, replace(stuck, categories=["digit"]), tokens)) == ["8"]
    assert names(choose_bans(labelled, replace(stuck, top=9, together=True), tokens)) == ["3 stuck rocks"]
    assert names(choose_bans(labelled, Wanted(top=9, labels=["residual", "moved"]), tokens)) == ["7"]
    with pytest.raises(
        RocktokensError, match=r"knockout.labels = \['moving'\] leaves no rock: give some of residual, "
    ):
        choose_bans(labelled, Wanted(top=9, labels=["moving"]), tokens)
    with pytest.raises(RocktokensError, match=r"knockout.labels needs rocks with labels .* `rocktokens find`"):
        choose_bans(rocks, stuck, tokens)


def test_named_types_are_banned_alone_unless_rocks_are_asked_for_too(rocks: RockSet, tokens: Tokens):
    seven, the = tokens.vocabulary.ids("7")[0], tokens.vocabulary.ids(" the")[0]
    assert names(choose_bans(rocks, Wanted(top=2, ids=[the], texts=["Wait"]), tokens)) == [" the", "Wait"]
    wanted = Wanted(top=2, ids=[the, seven], texts=["7"], rocks_too=True)
    assert names(choose_bans(rocks, wanted, tokens)) == ["So", "7", " the"]


def test_a_named_type_is_called_what_find_would_call_it(rocks: RockSet, tokens: Tokens):
    wanted = Wanted(top=1, ids=[1], texts=[" the", "7"])
    assert [ban.category for ban in choose_bans(rocks, wanted, tokens)] == ["other", "function_word", "digit"]


def test_named_types_need_no_rocks(rocks: RockSet, tokens: Tokens):
    none = replace(rocks, tokens=[])
    assert names(choose_bans(none, Wanted(top=5, texts=["So"]), tokens)) == ["So"]
    with pytest.raises(RocktokensError, match=r"holds no rocks .*`rocktokens find`.*by id or text \(--id, --text\)"):
        choose_bans(none, Wanted(top=5), tokens)
    few = replace(none, summary={"n_prompts": 6, "n_prompts_selection": 6}, criterion={"split": 0.5})
    with pytest.raises(RocktokensError, match=r"12 prompts are too few to find rocks: trace at least 40 \(trace.num"):
        choose_bans(few, Wanted(top=5), tokens)


# All at once


@pytest.mark.parametrize(
    ("wanted", "members", "name", "category"),
    [
        (Wanted(top=9), ["So", "7", "Wait", "8", "\n\n"], "5 rocks", ""),
        (Wanted(top=9, categories=["digit"]), ["7", "8"], "2 rocks of category digit", "digit"),
        (Wanted(top=9, texts=["So", " the"]), ["So", " the"], "So + ·the", ""),
        (Wanted(top=9, texts=["1", "2", "3", "4"]), ["1", "2", "3", "4"], "4 types", "digit"),
        (Wanted(top=1, texts=["7", "So"], rocks_too=True), ["So", "7"], "1 rock and 7", ""),
    ],
)
def test_a_set_says_what_it_is(
    rocks: RockSet, tokens: Tokens, wanted: Wanted, members: list[str], name: str, category: str
):
    [ban] = choose_bans(rocks, replace(wanted, together=True), tokens)
    assert ban.ids == tuple(sorted(tokens.vocabulary.ids(text)[0] for text in members))
    assert (ban.name, ban.category) == (name, category)


def test_a_set_of_one_is_that_type(rocks: RockSet, tokens: Tokens):
    assert choose_bans(rocks, Wanted(top=1, together=True), tokens) == choose_bans(rocks, Wanted(top=1), tokens)


# What is no token


def test_a_text_that_is_no_token_says_how_it_splits(rocks: RockSet, tokens: Tokens):
    so, w = tokens.split("So what")[:2]
    with pytest.raises(RocktokensError) as caught:
        choose_bans(rocks, Wanted(top=1, texts=["So what"]), tokens)
    assert f"'So what' is not one token, it splits into 'So' (id {so}), ' w' (id {w})" in str(caught.value)
    with pytest.raises(RocktokensError, match="the text '' holds no token"):
        choose_bans(rocks, Wanted(top=1, texts=[""]), tokens)


def test_a_text_of_two_tokens_is_not_guessed(rocks: RockSet):
    """A line break as a piece and as a byte, as sentencepiece vocabularies with byte fallback may have it."""
    vocab = [("<unk>", 0.0), ("<0x0A>", 0.0), ("\n", -1.0), ("▁so", -1.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    with pytest.raises(RocktokensError, match=r"'\\n' is that of 2 tokens, 1 and 2: give one by its id"):
        choose_bans(rocks, Wanted(top=1, texts=["\n"]), Tokens(Vocabulary(tokenizer), lambda _: []))


@pytest.mark.parametrize("category", ["latex_math", "digits"])
def test_a_category_that_no_rock_is_of_is_named(rocks: RockSet, tokens: Tokens, category: str):
    with pytest.raises(RocktokensError, match=rf"category '{category}': .* digit, discourse, markdown_whitespace"):
        choose_bans(rocks, Wanted(top=1, categories=["digit", category]), tokens)


# Controls


@pytest.fixture
def traced(tmp_path: Path, rocks: RockSet) -> TraceStore:
    """Rocks 100 times each, types 600 to 604 as often, 605 half as often."""
    freq = {token.id: 100 for token in rocks.tokens} | dict.fromkeys(range(600, 605), 100) | {605: 50}
    tokens = [token_id for token_id, count in freq.items() for _ in range(count)]
    table = random_trace(0).slice(0, 1).take([0] * len(tokens))
    columns = {"rollout_id": range(len(tokens)), "position": [0] * len(tokens), "token_id": tokens}
    for name, values in columns.items():
        table = with_column(table, name, list(values))
    return TraceStore(write_trace(tmp_path, {4: table}))


def test_controls_are_as_frequent_and_neither_rocks_nor_ends(traced: TraceStore, rocks: RockSet, tokens: Tokens):
    """The other rocks would be the closest partners by id, and one that is as frequent ends answers."""
    [ban] = choose_bans(rocks, Wanted(top=9, categories=["digit", "discourse"], together=True), tokens)
    controls = control_ban(traced, rocks, ban, frozenset({602}), 0.1, seed=0)
    assert controls == Ban((600, 601, 603, 604), "controls of 4 rocks of category digit, discourse", "matched")


def test_controls_that_cannot_be_are_refused(traced: TraceStore, rocks: RockSet, tokens: Tokens):
    [every] = choose_bans(rocks, Wanted(top=9, together=True), tokens)
    with pytest.raises(RocktokensError) as refused:
        control_ban(traced, rocks, every, frozenset({602}), 0.1, seed=0)
    sentence = str(refused.value)
    assert sentence.startswith("controls: ") and sentence.count("\n") == 0
    assert "within knockout.tolerance = 0.1 each" in sentence and "(none is for 'So')" in sentence
    assert "raise knockout.tolerance, take fewer rocks (knockout.top, --top), or leave out the controls" in sentence
    [named] = choose_bans(rocks, Wanted(top=9, texts=["So", " the"], together=True), tokens)
    with pytest.raises(RocktokensError, match=r"controls are found for rocks alone: leave out .* \(--id, --text\)"):
        control_ban(traced, rocks, named, frozenset(), 0.1, seed=0)
