"""Every kind of token that worked solutions are made of, and the same answer from every kind of tokenizer."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from trace_oracle import random_trace, shuffled, token_trace, write_trace

from rocktokens.rocks.categories import (
    CATEGORIES,
    DISCOURSE,
    FUNCTION_WORDS,
    OTHER_WORDS,
    categorise,
    categorise_all,
    store_categories,
)
from rocktokens.traces.store import TraceStore


def texts(words: str, *others: str) -> list[str]:
    """Tokens without spaces in one string, those with spaces one by one."""
    return [*words.split(), *others]


EXAMPLES = {
    "latex_math": texts(
        r"\( \) \[ \boxed \boxed{ \times \text \frac \ \\ \; $ $$ $. }$ { } {} }{ }, ^ ^{ _ _{ x^2 ~ "
        "∑ ∈ ¬ ² ¹ ₂ ° ′ °C α π Δ 𝑥",
        *(" \\[", "\\]\n", " $", " \\frac", " α"),
    ),
    "operator": texts(
        "= == + ++ / < <= >= != := -> => <-> =( )= ± × ÷ · − ⋅ ≤ ≠ ≈ → ⇒", *(" =", " = ", " +", " ×", "÷ ")
    ),
    "markdown_whitespace": texts(
        "# ### * ** *** :** **: **. - -- --- | |---| :--- ` ``` `, __ ~~ === ____ >>> • ● ◦ ── █",
        *("\n", "\n\n", " ", "   ", "\t", " \n", "\r\n", "\n    ", ".\n\n", ":\n", '."\n', "\xa0", "\u3000"),
        *(" ##", " **", "**\n\n", " -", "- "),
    ),
    "discourse": texts(
        "So Wait wait Therefore Then Thus Hence Now First Next However Let Finally Alternatively Hmm Okay OK "
        "So, Let's Let’s **So Note Suppose Consider Nevertheless",
        *(" so", " Therefore", " But", " Wait,", "\nSo", " SO"),
    ),
    "digit": texts("0 42 3.14 1,000 1. (3 5) 1st 21st 7th ½ ¾ ① 50% 12: ３ Ⅳ _1", " 7", "1.\n"),
    "punctuation": texts(
        """. , : ? ! ; ( ) [ " ' ’ ... … ), “ 。 ， 、 % & @ // </ /> {" '} "\\ |' € £ ¿ « – — ´ †""",
        *(" ,", " (", " %", " €"),
    ),
    "function_word": texts(
        "the The THE of is and 's ’s 't it It we I A a I'm (the 'the to, don't don’t cannot don", " the", " each", " I"
    ),
    "content_word": texts(
        "Ann ing x i US IT total résumé 苹果 的 λόγος ς ा price. step2 print( Step iT théorème",
        *(" apples", " three", " i", " US", " AM"),
    ),
    "other": texts(
        "\ufffd <|im_end|> </s> <pad> <think> [PAD] [/INST] <123> <｜end▁of▁sentence｜> 😀 👍🏻 ™ \ufe0f",
        *("", "\x00", "\x1f", "\x7f", " \ufffd", "caf\ufffd", "\u200b", "\ufeff", " 😀"),
    ),
}


@pytest.mark.parametrize(
    ("text", "category"), [(text, category) for category, group in EXAMPLES.items() for text in group], ids=repr
)
def test_examples(text, category):
    assert categorise(text) == category


@given(st.text(max_size=8))
def test_every_text_has_one_category_and_leading_spaces_do_not_matter(text):
    assert categorise(text) in CATEGORIES
    if text.strip(" "):
        assert categorise(f"  {text}") == categorise(text)


def test_word_lists_do_not_overlap_and_exceptions_are_needed():
    assert not DISCOURSE & FUNCTION_WORDS
    assert {word.lower() for word in OTHER_WORDS} <= DISCOURSE | FUNCTION_WORDS


# What the vocabulary tells


SPACED = {"the", " the", "so", "a", "her", "IN", "So", "The", "I", "A", " so", " a"}


@pytest.mark.parametrize(
    ("text", "alone", "beside_spaced_words"),
    [
        ("the", "function_word", "content_word"),
        ("so", "discourse", "content_word"),
        ("a", "function_word", "content_word"),
        ("her", "function_word", "content_word"),  # " her" is no token, but a word would have begun with its space
        ("IN", "function_word", "content_word"),
        *(
            (text, categorise(text), categorise(text))
            for text in (" the", " The", " so", " a", "So", "The", "I", "A", "Let's")
        ),
        *((text, categorise(text), categorise(text)) for text in ("'s", "(the", "x^2", "1st", "\n", "caf\ufffd", "α")),
    ],
)
def test_without_its_space_a_word_is_a_piece_where_words_begin_with_one(text, alone, beside_spaced_words):
    assert categorise_all([text], SPACED) == [beside_spaced_words]
    unspaced = {text.strip(" ") for text in SPACED}
    assert categorise_all([text], unspaced) == [alone]


# The same corpus in every kind of tokenizer

WORDS = texts("the and is so other brother also mother gathers apples answer So The Wait However $ = ** ### \\( {")
CORPUS = [f"{word} {word}, {word}. {word}: {word}; {word}15\n" for word in WORDS] * 10
SURFACE = {
    " the": "function_word",
    " and": "function_word",
    " is": "function_word",
    " so": "discourse",
    "the": "content_word",
    "so": "content_word",
    "The": "function_word",
    "So": "discourse",
    "Wait": "discourse",
    "However": "discourse",
    " answer": "content_word",
    " apples": "content_word",
    "gathers": "content_word",
    "1": "digit",
    "5": "digit",
    ",": "punctuation",
    ".": "punctuation",
    ":": "punctuation",
    "**": "markdown_whitespace",
    "###": "markdown_whitespace",
    "\n": "markdown_whitespace",
    " ": "markdown_whitespace",
    "\\": "latex_math",
    "{": "latex_math",
    " $": "latex_math",
    " =": "operator",
    "</s>": "other",
    "[stop]": "other",
}
SPECIAL = ["</s>", "[stop]", "<unk>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece(model: models.Model, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("▁", "merged_with_next"),
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    return sentencepiece(models.BPE(unk_token="<unk>"), trainer)


def byte_fallback() -> Tokenizer:
    """As sentencepiece exports it: a newline is a byte, and so is whatever else the vocabulary lacks."""
    content = json.loads(metaspace().to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary["<0x0A>"] = vocabulary.pop("\n")
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    content["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", max_piece_length=12, show_progress=False
    )
    return sentencepiece(models.Unigram(), trainer)


def opened(run: Path, tokenizer: Tokenizer) -> TraceStore:
    """A run whose tokenizer this is."""
    (write_trace(run, {0: random_trace(0)}) / "tokenizer").mkdir()
    tokenizer.save(str(run / "tokenizer" / "tokenizer.json"))
    return TraceStore(run)


def categories_by_text(store: TraceStore) -> dict[str, str]:
    ids = range(store.vocab_size or 0)
    return dict(zip(store.token_texts(ids), store_categories(store, ids), strict=True))


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory):
    kinds = (byte_level, metaspace, byte_fallback, unigram)
    return {kind.__name__: categories_by_text(opened(tmp_path_factory.mktemp(kind.__name__), kind())) for kind in kinds}


def test_a_text_has_the_same_category_in_every_kind_of_tokenizer(vocabularies):
    for kind, categories in vocabularies.items():
        assert {text: categories.get(text) for text in SURFACE} == SURFACE, kind
    for one, other in combinations(vocabularies.values(), 2):
        shared = one.keys() & other.keys()
        assert {text: one[text] for text in shared} == {text: other[text] for text in shared}


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_lone_byte_of_a_character_is_other(vocabularies, kind):
    assert vocabularies[kind]["\ufffd"] == "other"


def test_a_character_level_vocabulary_marks_no_words(tmp_path):
    pieces = ["a", "I", " ", "\n", "so", "the"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    assert categories_by_text(opened(tmp_path, tokenizer)) == {piece: categorise(piece) for piece in pieces}


def test_without_a_tokenizer_no_token_has_a_category(tmp_path):
    assert store_categories(TraceStore(write_trace(tmp_path, {0: random_trace(0)})), [0, 7]) == ["other", "other"]


# What the trace tells

PIECES = ["1", " 2", "-", " -", " ", "\\", "frac", " so", "\n", "*", "{", "\\\\", "x"]


def byte_spelled() -> Tokenizer:
    vocabulary = {piece.replace(" ", "Ġ").replace("\n", "Ċ"): index for index, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_spelled() -> Tokenizer:
    vocabulary = {piece.replace(" ", "▁"): index for index, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return tokenizer


def in_context(run: Path, tokenizer: Tokenizer, *lines: list[str]) -> dict[str, str]:
    """Categories of the pieces where the rollouts of the last checkpoint are these; the first has other tokens."""
    sequences = [[PIECES.index(piece) for piece in line] for line in lines]
    other = token_trace([[0, index, 0] for index in range(len(PIECES))])
    (write_trace(run, {0: other, 3: shuffled(token_trace(sequences), 1)}) / "tokenizer").mkdir()
    tokenizer.save(str(run / "tokenizer" / "tokenizer.json"))
    return categories_by_text(TraceStore(run))


@pytest.fixture(params=[byte_spelled, sentencepiece_spelled], ids=["byte level", "sentencepiece"])
def spelled(request):
    return request.param()


MARKDOWN = "markdown_whitespace"
BESIDE: dict[str, tuple[list[list[str]], dict[str, str]]] = {
    "told by its neighbours": (
        [["1", "-", "1"], ["1", " -", " 2"], ["1", " ", "*", " ", "1"], ["\\", "frac", "{"], ["{", "\\", "x"]],
        {"-": "operator", " -": "operator", "*": "operator", "frac": "latex_math", "x": "latex_math"},
    ),
    "not between digits, not after a backslash": (
        [
            ["\n", "-", " 2"],
            ["1", "\n", " -", " 2"],
            ["1", "*", " so"],
            ["\\\\", "frac"],
            ["\\", " ", "x"],
            ["\\", "1"],
        ],
        {"-": MARKDOWN, " -": MARKDOWN, "*": MARKDOWN, "frac": "content_word", "x": "content_word", "1": "digit"},
    ),
    "at the end and at the start of a rollout": (
        [["1", "-"], ["-", "1"], ["1", " -"], ["1", "*"], ["\\"], ["frac", "\\"], ["x"]],
        {"-": MARKDOWN, " -": MARKDOWN, "*": MARKDOWN, "frac": "content_word", "x": "content_word"},
    ),
    "a tie, and a majority": (
        [["1", "-", "1", "\n", "-", " so"], ["1", "*", "1", "*", "1", "\n", "*"], ["\\", "frac", " so", "frac"]],
        {"-": MARKDOWN, "*": "operator", "frac": "content_word"},
    ),
}


@pytest.mark.parametrize("case", BESIDE)
def test_neighbours_decide_what_the_text_does_not(tmp_path, spelled, case):
    lines, expected = BESIDE[case]
    found = in_context(tmp_path, spelled, *lines)
    assert {piece: found[piece] for piece in expected} == expected


def naive_in_context(line: list[str], at: int) -> str | None:
    """What one occurrence is by its neighbours."""
    if line[at].isalpha():
        return "latex_math" if at and line[at - 1] == "\\" else None
    before, after = line[max(at - 2, 0) : at][::-1], line[at + 1 : at + 3]
    sides = [side[1:] if side[:1] == [" "] else side for side in (before, after)]
    between = all(side and side[0].strip(" ").isdigit() for side in sides)
    return "operator" if line[at].strip(" ") in ("-", "*") and between else None


def test_the_majority_equals_a_loop_over_the_occurrences(tmp_path, spelled):
    rng = np.random.default_rng(4)
    lines = [[PIECES[index] for index in rng.choice(len(PIECES), 12, p=CHANCES)] for _ in range(80)]
    said: dict[str, list[str | None]] = {piece: [] for piece in PIECES}
    for line in lines:
        for at, piece in enumerate(line):
            said[piece].append(naive_in_context(line, at))
    expected = dict(zip(PIECES, categorise_all(PIECES, set(PIECES)), strict=True))
    for piece, kinds in said.items():
        for kind in {kind for kind in kinds if kind and 2 * kinds.count(kind) > len(kinds)}:
            expected[piece] = kind
    assert in_context(tmp_path, spelled, *lines) == expected
    assert "operator" in expected.values()


CHANCES = np.array([20, 20, 1, 1, 6, 1, 1, 0.1, 0.1, 1, 0.1, 0.1, 0.5]) / 51.9
