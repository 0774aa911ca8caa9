"""Every kind of token that worked solutions are made of, and the same answer from both kinds of tokenizer."""

import pytest

from rocktokens.stats.categories import DISCOURSE, FUNCTION_WORDS, categorise, normalise_piece

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


@pytest.mark.parametrize(
    ("byte_level", "sentencepiece", "text"),
    [
        ("Ġthe", "▁the", " the"),
        ("So", "So", "So"),
        ("Ċ", "<0x0A>", "\n"),
        ("ĊĊ", "\n\n", "\n\n"),
        ("Ġ\\(", "▁\\(", " \\("),
        ("ĠÃĹ", "▁×", " ×"),
        ("ĠâĢľ", "▁“", " “"),
        ("7", "7", "7"),
        ("Ġ", "▁", " "),
        ("Ã", "<0xC3>", "�"),
        ("Ġ**", "▁**", " **"),
    ],
)
def test_both_tokenizers_pieces_mean_the_same(byte_level, sentencepiece, text):
    assert normalise_piece(byte_level) == normalise_piece(sentencepiece) == text
    assert categorise(normalise_piece(byte_level)) == categorise(normalise_piece(sentencepiece)) == categorise(text)


def test_word_lists_do_not_overlap():
    assert not DISCOURSE & FUNCTION_WORDS
