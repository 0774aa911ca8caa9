"""Texts of tokens as they stand inside a text: in every kind of vocabulary they join up to what is decoded."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from rocktokens.models import pebbles
from rocktokens.traces.token_text import Vocabulary

LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
SPACED = ["▁so", "so", "▁", "▁▁", "x", "▁the", "\n\n", "é", "7", "▁(", "<0x0A>", "<0xC3>"]
SPACED_TEXTS = [" so", "so", " ", "  ", "x", " the", "\n\n", "é", "7", " (", "\n", "\ufffd"]
BYTES = ["Ġso", "so", "Ġ", "ĠĠ", "x", "Ġthe", "ĊĊ", "Ã©", "7", "Ġ(", "Ċ", "Ã"]


def bpe(pieces: list[str], decoder: decoders.Decoder | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def unigram(pieces: list[str], decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoder
    return tokenizer


KINDS = {
    "byte-level": bpe(BYTES, decoders.ByteLevel()),
    "sentencepiece": bpe(SPACED, decoders.Metaspace()),
    "byte-fallback": bpe(SPACED, decoders.Sequence(LLAMA)),
    "unigram": unigram(SPACED, decoders.Metaspace(prepend_scheme="first")),
    "unigram with bytes": unigram(SPACED, decoders.Sequence(LLAMA)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_texts_in_every_kind_of_vocabulary(kind):
    vocabulary = Vocabulary(KINDS[kind])
    assert [vocabulary.text(index) for index in range(len(SPACED))] == SPACED_TEXTS
    assert [text in vocabulary for text in SPACED_TEXTS] == [True] * 11 + [False]  # a lone byte is no text
    assert [vocabulary.ids(text) for text in SPACED_TEXTS[:11]] == [[index] for index in range(11)]
    assert [text in vocabulary for text in ("the", " x", "   ", "", "<0x0A>", "▁so", "Ġso", "<7>")] == [False] * 8


WHOLE = st.lists(st.integers(0, 10), max_size=8)  # without the byte, whose neighbours would complete it


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "unigram with bytes"])
@given(ids=WHOLE)
def test_texts_join_to_what_the_tokenizer_decodes(kind, ids):
    tokenizer = KINDS[kind]
    joined = "".join(map(Vocabulary(tokenizer).text, [4, *ids]))
    assert joined == tokenizer.decode([4, *ids])


def test_texts_of_a_real_tokenizer_join_to_the_text():
    tokenizer = Tokenizer.from_file(str(Path(pebbles.__file__).parent / "student" / "tokenizer.json"))
    text = "So, the answer is $\\frac{1}{2}$.\n\n### Wait\n  Let's count 12 apples × 3!"
    joined = "".join(map(Vocabulary(tokenizer).text, tokenizer.encode(text).ids))
    assert joined.replace("\ufffd\ufffd", "×") == text  # in this vocabulary it is two bytes


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_are_their_literal_text(kind):
    tokenizer = Tokenizer.from_str(KINDS[kind].to_str())
    names = ["<｜end▁of▁sentence｜>", "<é>", "▁▁▁▁", "<tool>"]
    tokenizer.add_special_tokens(names[:2])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names[2:]])
    vocabulary = Vocabulary(tokenizer)
    assert [vocabulary.text(12 + index) for index in range(4)] == ["<｜end▁of▁sentence｜>", "<é>", "    ", "<tool>"]
    assert [vocabulary.is_special(index) for index in (0, 12, 13, 14, 15, 99)] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert [name in vocabulary for name in ("<é>", "    ", "<｜end of sentence｜>")] == [True, True, False]


def test_an_anchor_ends_in_a_whole_character():
    """Bytes beside each other are decoded together, so behind a byte another would not read as itself."""
    tokenizer = bpe(["<0x61>", "Ã", "▁so", "<0xC3>", "so"], decoders.Sequence(LLAMA))
    assert [Vocabulary(tokenizer).text(index) for index in range(5)] == ["a", "Ã", " so", "\ufffd", "so"]
    tokenizer = bpe(["Ã", "©", "Ġso", "so"], decoders.ByteLevel())
    assert [Vocabulary(tokenizer).text(index) for index in range(4)] == ["\ufffd", "\ufffd", " so", "so"]


def test_without_an_anchor_a_token_is_decoded_alone():
    tokenizer = bpe(["Ċ", "âĢĶ", "Ġ("], decoders.ByteLevel())
    assert [Vocabulary(tokenizer).text(index) for index in range(3)] == ["\n", "—", " ("]


def test_without_a_decoder_a_token_is_its_piece():
    vocabulary = Vocabulary(bpe(["a", "the", " "], None))
    assert [vocabulary.text(index) for index in range(3)] == ["a", "the", " "]
    assert " the" not in vocabulary


@pytest.mark.parametrize("kind", KINDS)
@given(token_id=st.integers(-(2**31), 2**31 - 1))
def test_an_id_outside_the_vocabulary_is_its_number(kind, token_id):
    text = Vocabulary(KINDS[kind]).text(token_id)
    assert text == (SPACED_TEXTS[token_id] if 0 <= token_id < 12 else f"<{token_id}>")


def test_no_text_is_empty():
    tokenizer = bpe(["x", "", "\u0300"], decoders.Sequence([decoders.Replace("\u0300", ""), decoders.Fuse()]))
    assert [Vocabulary(tokenizer).text(index) for index in range(3)] == ["x", "<1>", "\u0300"]


def test_without_a_tokenizer_there_are_only_numbers():
    vocabulary = Vocabulary(None)
    assert vocabulary.text(3) == "<3>"
    assert "<3>" not in vocabulary and not vocabulary.is_special(3)


def test_sequences_read_without_what_only_controls_the_model():
    tokenizer = bpe(BYTES, decoders.ByteLevel())
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.read([[4, 0, 5, len(BYTES)], [], [11, 4], [-1, 4, 999]]) == ["x so the", "", "\ufffdx", "x"]
    assert Vocabulary(None).read([[4, 0], []]) == ["<4><0>", ""]
