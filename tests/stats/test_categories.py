"""Every kind of token that worked solutions are made of, and the same answer from both kinds of tokenizer."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from trace_oracle import random_trace, write_trace

from rocktokens.stats.categories import DISCOURSE, FUNCTION_WORDS, categorise
from rocktokens.traces.store import TraceStore

EXAMPLES = {
    "latex_math": [
        *(
            "\\(",
            "\\)",
            " \\[",
            "\\]\n",
            "$",
            "$$",
            " $",
            "\\boxed",
            "\\boxed{",
            "\\times",
            " \\frac",
            "\\",
            "^{",
            "}{",
        ),
        *("}", "{", "^", "=", " =", " = ", "+", " +", "×", "/", "<", ">=", "≤", "→", "_{", "\\text", "²", "_"),
    ],
    "markdown_whitespace": [
        *(
            "\n",
            "\n\n",
            " ",
            "   ",
            "\t",
            " \n",
            "#",
            "###",
            " ##",
            "*",
            "**",
            " **",
            ":**",
            "**:",
            "**\n\n",
            "-",
            " -",
        ),
        *("---", "- ", "|", "`", "```", "•", "|---|", ":---", ".\n\n", "\r\n", ":\n"),
    ],
    "discourse": [
        *(
            "So",
            " so",
            "Wait",
            "wait",
            " Therefore",
            "Then",
            "Thus",
            "Hence",
            "Now",
            "First",
            " Next",
            "However",
            "Let",
        ),
        *(" But", "Finally", "Alternatively", "So,", " Wait,", "Let's", "Let’s", "**So", "Hmm"),
    ],
    "digit": ["0", " 7", "42", "3.14", "1,000", "1.", "(3", "5)", "1st", "7th", "½", "50%", "12:"],
    "punctuation": [
        ".",
        ",",
        " ,",
        ":",
        "?",
        "!",
        ";",
        "(",
        ")",
        " (",
        '"',
        "'",
        "...",
        "…",
        "),",
        "“",
        "。",
        "%",
        "&",
    ],
    "function_word": [
        "the",
        " the",
        "The",
        " of",
        "is",
        "and",
        "'s",
        "’s",
        "it",
        "we",
        "(the",
        "to,",
        "don't",
        " each",
    ],
    "content_word": [" apples", "total", "Ann", "ing", "x", " three", "résumé", "苹果", "price.", "step2", "print("],
    "other": [
        "",
        "�",
        " �",
        "<|im_end|>",
        "</s>",
        "<pad>",
        "[PAD]",
        "[/INST]",
        "<123>",
        "<｜end▁of▁sentence｜>",
        "\x00",
        "😀",
    ],
}


@pytest.mark.parametrize(
    ("text", "category"), [(text, category) for category, texts in EXAMPLES.items() for text in texts], ids=repr
)
def test_examples(text, category):
    assert categorise(text) == category


# The same texts as the pieces of a byte-level and of a sentencepiece vocabulary.
PIECES = [
    ("Ġthe", "▁the", "function_word"),
    ("So", "So", "discourse"),
    ("Ċ", "<0x0A>", "markdown_whitespace"),
    ("ĊĊ", "\n\n", "markdown_whitespace"),
    ("ĉ", "<0x09>", "markdown_whitespace"),
    ("Ġ\\(", "▁\\(", "latex_math"),
    ("ĠÃĹ", "▁×", "latex_math"),
    ("ĠâĢľ", "▁“", "punctuation"),
    ("7", "7", "digit"),
    ("Ġ", "▁", "markdown_whitespace"),
    ("Ã", "<0xC3>", "other"),
    ("Ġ**", "▁**", "markdown_whitespace"),
]


def decoded_categories(run: Path, pieces: list[str], decoder: decoders.Decoder) -> list[str]:
    """The categories of a vocabulary as a run that has its tokenizer sees them."""
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoder
    (write_trace(run, {0: random_trace(0)}) / "tokenizer").mkdir()
    tokenizer.save(str(run / "tokenizer" / "tokenizer.json"))
    return [categorise(text) for text in TraceStore(run).token_texts(range(len(pieces)))]


def test_both_kinds_of_tokenizer_get_the_same_answer(tmp_path):
    byte_level, sentencepiece, expected = map(list, zip(*PIECES, strict=True))
    byte_fallback = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    assert decoded_categories(tmp_path / "a", byte_level, decoders.ByteLevel()) == expected
    assert decoded_categories(tmp_path / "b", sentencepiece, byte_fallback) == expected


def test_word_lists_do_not_overlap():
    assert not DISCOURSE & FUNCTION_WORDS
