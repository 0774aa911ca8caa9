r"""What kind of text a token is: rocks are mostly structure, and this says which (METHOD 4.9).

1. The text is the token decoded alone; leading spaces do not matter, as some tokenizers decode them away.
2. The patterns below are tried in order and the first match names the category: special and undecodable tokens, LaTeX,
   Markdown and whitespace, operators, digits, punctuation.
3. What is left is a word, without its surrounding punctuation: by list a discourse marker or a function word, else
   content.

A lone ``-`` or ``*`` is a Markdown mark, not an operator: without its context a token cannot tell, and in worked
solutions it mostly is one.
"""

import re
from typing import Literal

Category = Literal[
    "latex_math",
    "markdown_whitespace",
    "discourse",
    "digit",
    "punctuation",
    "function_word",
    "content_word",
    "other",
]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DISCOURSE = _words(
    """
    so wait therefore then thus hence now first firstly secondly thirdly next however let let's lets but finally
    alternatively actually also again okay ok well hmm hm alright oh yes indeed since because although though instead
    meanwhile moreover furthermore additionally otherwise consequently similarly likewise overall lastly maybe perhaps
    suppose assume recall note notice remember
    """
)
FUNCTION_WORDS = _words(
    """
    a an the this that these those each every either neither some any all both no none not nor and or if as than when
    while where why how what which who whom whose whether until unless once
    i me my mine myself you your yours yourself he him his himself she her hers herself it its itself we us our ours
    ourselves they them their theirs themselves one ones there here
    am is are was were be been being do does did done doing have has had having will would shall should can could may
    might must ought
    of in on at by for from to into onto with without within about above below over under between among through during
    before after against along across around behind beside besides beyond near off out per toward towards up down
    upon via
    too very just only even still yet more most much many few less least other another such same own
    's 't 'd 'm 're 've 'll don't doesn't didn't isn't aren't wasn't won't can't it's i'm i'll i've we'll we're we've
    you're that's there's
    """
)

_PATTERNS: tuple[tuple[Category, re.Pattern[str]], ...] = (
    ("other", re.compile(r"^\Z|\ufffd|^<[^<>\s]*\w[^<>\s]*>\Z|^\[/?[A-Z]+\]\Z")),
    ("latex_math", re.compile(r"[\\${}^]")),
    ("markdown_whitespace", re.compile(r"^\s+\Z|^\W*(?:[\n\r\t#`|•◦]|\*\*)\W*\Z|^:?[-*]+:?\s*\Z")),
    ("latex_math", re.compile(r"^[-+*/=<>_~×÷·±∓−²³≤≥≠≈≡→⇒⇔∞∑∏∫√∂∈∉⊂⊆∪∩∀∃∧∨πθαβγδλμσω]+\s*\Z")),
    ("digit", re.compile(r"^[\W\d]*[\d½¼¾⅓⅔][\W\d]*(?:st|nd|rd|th)?\Z")),
    ("punctuation", re.compile(r"^[!-/:-@\[-`{-~¡¿«»§¶‐-‧‰-⁞、-〃〈-】，．：；？！（）\s]+\Z")),
)
_LETTER = re.compile(r"[^\W\d_]")
_EDGES = re.compile(r"^[^\w']+|[^\w']+$")


def categorise(text: str) -> Category:
    """The category of one decoded token."""
    bare = text.lstrip(" ") or text
    for category, pattern in _PATTERNS:
        if pattern.search(bare):
            return category
    word = _EDGES.sub("", bare.replace("’", "'")).lower()
    forms = {word, word.strip("'")}
    if forms & DISCOURSE:
        return "discourse"
    if forms & FUNCTION_WORDS:
        return "function_word"
    return "content_word" if _LETTER.search(word) else "other"
