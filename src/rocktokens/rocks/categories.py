r"""Name the kind of text a token is: rocks are mostly structure, and this says which (docs/method.md, section 4.9).

1. The text is the token as it stands inside a text; its leading spaces say whether it starts a word, nothing else.
2. The text is reduced to its shape: ASCII as it is, any other character by what it is (a letter, a digit, a mark of
   mathematics, …) as one ASCII character. The patterns below are tried in order and the first match names the
   category: special and undecodable tokens, LaTeX, Markdown and whitespace, operators, digits, punctuation.
3. What is left is a word, without its surrounding punctuation: by list (English) a discourse marker or a function word,
   else content.
4. The vocabulary decides what a lone text cannot. Where it marks the start of a word by a space (" the" is a token), a
   token that begins with a letter continues a word: "the" is a piece of "other", "so" of "also", "IN" of "TRAINING",
   "a" a piece or a variable. They are content. A capitalised one ("So", "The", "I") starts a line and stays what it is.

5. The trace decides what depends on the neighbours, by the majority of a type's occurrences (``store_categories``):
   ``-`` and ``*`` are operators between digits, spaces aside, and else marks of Markdown; letters right after a
   backslash (``frac`` where the vocabulary splits the backslash off) are LaTeX. On a tie, and without a trace, the type
   alone decides.

Each occurrence of a mark is joined with its two neighbours on either side, each backslash with what follows it: two
joins whose one side is small, so the cost is two scans of three columns.

A brace, a caret or a backslash is LaTeX unless a quote beside it shows that it is code.
"""

import re
import unicodedata
from collections.abc import Container, Iterable
from functools import lru_cache
from typing import Any, get_args
from weakref import WeakKeyDictionary

import ibis
import pyarrow as pa

from rocktokens.traces.store import TraceStore
from rocktokens.types import Category

CATEGORIES: tuple[Category, ...] = get_args(Category)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DISCOURSE = _words(
    """
    so wait therefore then thus hence now first firstly secondly thirdly next however let let's lets but finally
    alternatively actually also again okay ok well hmm hm alright ah oh oops yes indeed since because although
    though instead meanwhile moreover furthermore additionally otherwise consequently accordingly subsequently similarly
    likewise conversely nevertheless nonetheless anyway overall lastly maybe perhaps suppose assume consider recall note
    notice remember
    """
)
FUNCTION_WORDS = _words(
    """
    a an the this that these those each every either neither some any all both several no none not nor and or if else as
    than when whenever while whereas where wherever why how what whatever which whichever who whom whose whether until
    unless once
    i me my mine myself you your yours yourself he him his himself she her hers herself it its itself we us our ours
    ourselves they them their theirs themselves one ones there here
    something anything everything nothing someone anyone everyone somebody anybody everybody nobody
    am is are was were be been being do does did done doing have has had having will would shall should can could may
    might must ought cannot
    of in on at by for from to into onto with without within about above below over under between among through
    throughout during before after against along across around behind beside besides beyond despite except near off out
    per toward towards up down upon via
    too very just only even still yet more most much many few less least other another such same own
    's 't 'd 'm 're 've 'll don't doesn't didn't isn't aren't wasn't won't can't it's i'm i'll i've we'll we're we've
    you're that's there's
    don doesn didn isn aren wasn weren hasn haven hadn couldn wouldn shouldn
    """
)
OTHER_WORDS = _words("US IT AM WHO HM OH i")
"""Spelled exactly like this they are not the listed words: abbreviations, and a variable."""

SYMBOL, LETTER, DIGIT, MATH, MARK, STOP = "\0", "a", "0", "^", "#", ","
"""The shapes of characters beyond ASCII; a symbol is what is none of the others, such as an emoji."""
_CONTROLS = {code: SYMBOL for code in (*range(32), 127) if chr(code) not in "\t\n\v\f\r"}
_SHAPES = {"L": LETTER, "M": LETTER, "N": DIGIT, "P": STOP, "Sc": STOP, "Sk": STOP, "Sm": MATH, "Z": " "}

_SPECIAL = re.compile(r"<[^<>\s]*\w[^<>\s]*>|\[/?[A-Z]{3,}\]")
_OPERATORS = "×÷±∓−·⋅∗∕≤≥≠≈≡→⇒⟹←⇐↔⇔"
_GREEK_LETTER = re.compile("[\u0391-\u03a9\u03b1-\u03c1\u03c3-\u03c9\u03d1\u03d5\u03f5]")
_PATTERNS: tuple[tuple[Category, re.Pattern[str]], ...] = (
    ("other", re.compile(r"|.*\0.*", re.DOTALL)),
    ("latex_math", re.compile(r"[^'\"]*[\\${}^][^'\"]*")),
    (
        "markdown_whitespace",
        re.compile(
            r"""
            \s+ | [^A-Za-z0-9]* [\n\r\t] [^A-Za-z0-9]*                   # blanks and line ends, with what they follow
            | [^A-Za-z0-9'"]* (?: [#`|] | \*\* ) [^A-Za-z0-9'"]*         # headings, code, tables, bold
            | :? [-*]+ :? \s* | (?: __ | ~~ | ([-+*/=<>_~]) \1\1+ ) \s*  # bullets, emphasis, rules
            """,
            re.VERBOSE,
        ),
    ),
    ("latex_math", re.compile(r"[()\[\]]*[~_][()\[\]]*\s*")),
    (
        "operator",
        re.compile(
            r"""
            [()\[\]]*
            (?: [+/<>] | [-+*/!:<>~]?==? | \+\+ | \+/?- | =- | << | >> | <?[-=]+> | <[-=]+ )
            [()\[\]]* \s*
            """,
            re.VERBOSE,
        ),
    ),
    ("digit", re.compile(r"[^A-Za-z]*[0-9][^A-Za-z]*(?:st|nd|rd|th)?")),
    ("punctuation", re.compile(r"[^A-Za-z0-9]+")),
)
_MARKS = ("-", "*")
_LETTERS = re.compile("[A-Za-z]+")
_ENDS_IN_BACKSLASH = re.compile(r"(?:.*[^\\])?(?:\\\\)*\\", re.DOTALL)  # an even number of them is a line break
_EDGES = re.compile(r"^[^\w']+|[^\w']+$")


def categorise(text: str) -> Category:
    """Return the category of a text that is one token."""
    bare = text.lstrip(" ") or text
    if _SPECIAL.fullmatch(bare):
        return "other"
    if _GREEK_LETTER.fullmatch(bare):
        return "latex_math"
    shape = bare.translate(_CONTROLS)
    if not shape.isascii():
        shape = "".join(char if char.isascii() else _shape_of(char) for char in shape)
    for category, pattern in _PATTERNS:
        if pattern.fullmatch(shape):
            return category
    return _kind_of_word(bare)


def categorise_all(texts: Iterable[str], vocabulary: Container[str]) -> list[Category]:
    """Return the categories of tokens, given the texts of the whole vocabulary."""
    marks_word_starts = any(f" {word}" in vocabulary for word in FUNCTION_WORDS | DISCOURSE)
    categories: list[Category] = []
    for text in texts:
        category, continues_a_word = categorise(text), text[:1].isalpha() and text != text.capitalize()
        is_piece = marks_word_starts and continues_a_word and category in ("discourse", "function_word")
        categories.append("content_word" if is_piece else category)
    return categories


def store_categories(store: TraceStore, token_ids: Iterable[int]) -> list[Category]:
    """Return the categories of types of a run, by its tokenizer and by what stands beside them in its last replay."""
    ids = [int(token_id) for token_id in token_ids]
    if store not in _IN_CONTEXT:
        _IN_CONTEXT[store] = _categories_in_context(store)
    in_context = _IN_CONTEXT[store]
    alone = categorise_all(store.token_texts(ids), store.vocabulary)
    return [
        "other" if store.vocabulary.is_special(token_id) else in_context.get(token_id, category)
        for token_id, category in zip(ids, alone, strict=True)
    ]


_IN_CONTEXT: WeakKeyDictionary[TraceStore, dict[int, Category]] = WeakKeyDictionary()
"""Of each open store, which is a fixed view of its run: the types whose neighbours decide otherwise than their text."""


def _categories_in_context(store: TraceStore) -> dict[int, Category]:
    """Types whose neighbours name a category in most of their occurrences."""
    if not store.checkpoints or store.vocab_size is None:
        return {}
    rows: Any = store.table(store.checkpoints[-1])
    counts = _counted(rows.group_by("token_id").agg(n=rows.count()))
    texts = dict(zip(counts, store.token_texts(counts), strict=True))
    found: dict[int, Category] = {}
    for token_id, n in _between_digits(rows, texts).items():
        if 2 * n > counts[token_id]:
            found[token_id] = "operator"
    for token_id, n in _after_backslash(rows, texts).items():
        if 2 * n > counts[token_id]:
            found[token_id] = "latex_math"
    return found


def _after_backslash(rows: Any, texts: dict[int, str]) -> dict[int, int]:
    """How many occurrences of each type of letters alone follow a token that ends in a backslash."""
    ends = [token_id for token_id, text in texts.items() if _ENDS_IN_BACKSLASH.fullmatch(text)]
    if not ends:
        return {}
    slashes = rows.filter(rows.token_id.isin(ends))
    places = slashes.select("rollout_id", position=(slashes.position + 1).cast("int64"))
    names = _places(rows).inner_join(places, ["rollout_id", "position"])
    followers = _counted(names.group_by("token_id").agg(n=names.count()))
    return {token_id: n for token_id, n in followers.items() if _LETTERS.fullmatch(texts[token_id])}


def _between_digits(rows: Any, texts: dict[int, str]) -> dict[int, int]:
    """How many occurrences of each mark stand between digits, with at most one token of spaces on either side."""
    marks = [token_id for token_id, text in texts.items() if text.strip(" ") in _MARKS]
    if not marks:
        return {}
    found = rows.filter(rows.token_id.isin(marks))
    steps = ibis.memtable(pa.table({"step": pa.array([-2, -1, 1, 2], pa.int64())}))
    near: Any = found.select("rollout_id", mark=found.token_id, at=found.position.cast("int64")).cross_join(steps)
    near = near.mutate(position=near.at + near.step).inner_join(_places(rows), ["rollout_id", "position"])
    near = near.inner_join(ibis.memtable(_neighbours(texts)), "token_id")

    def is_there(step: int, kind: str) -> Any:
        return ((near.step == step) & near[kind]).cast("int8").max() == 1

    sides = near.group_by("rollout_id", "at", "mark").agg(
        before=is_there(-1, "ends") | (is_there(-1, "blank") & is_there(-2, "ends")),
        after=is_there(1, "starts") | (is_there(1, "blank") & is_there(2, "starts")),
    )
    both = sides.filter(sides.before & sides.after)
    return _counted(both.group_by(token_id=both.mark).agg(n=both.count()))


def _neighbours(texts: dict[int, str]) -> pa.Table:
    """The types that say something of a mark beside them: which end or start with a digit, or are spaces."""
    kinds = {
        token_id: (text.rstrip(" ")[-1:].isdecimal(), text.lstrip(" ")[:1].isdecimal(), not text.strip(" "))
        for token_id, text in texts.items()
    }
    said = {token_id: kind for token_id, kind in kinds.items() if any(kind)}
    columns = zip(*said.values(), strict=True) if said else ((), (), ())
    ends, starts, blank = (pa.array(column, pa.bool_()) for column in columns)
    return pa.table({"token_id": pa.array(said, pa.int32()), "ends": ends, "starts": starts, "blank": blank})


def _places(rows: Any) -> Any:
    return rows.select("rollout_id", "token_id", position=rows.position.cast("int64"))


def _counted(counts: Any) -> dict[int, int]:
    """Columns token_id and n, in order of token id."""
    table = counts.order_by("token_id").to_pyarrow()
    return dict(zip(table["token_id"].to_pylist(), table["n"].to_pylist(), strict=True))


def _kind_of_word(text: str) -> Category:
    spelled = _EDGES.sub("", text.replace("’", "'"))
    forms = {spelled.lower(), spelled.lower().strip("'")}
    if spelled in OTHER_WORDS or spelled not in (spelled.lower(), spelled.capitalize(), spelled.upper()):
        return "content_word"
    if forms & DISCOURSE:
        return "discourse"
    return "function_word" if forms & FUNCTION_WORDS else "content_word"


@lru_cache(maxsize=4096)
def _shape_of(char: str) -> str:
    kind = unicodedata.category(char)
    raised = kind == "No" and unicodedata.decomposition(char).startswith(("<super>", "<sub>"))
    if char in _OPERATORS:
        return "+"
    if raised or char in "°′″" or "\U0001d400" <= char <= "\U0001d7ff":  # the last are letters of formulas
        return MATH
    if char in "•◦●○▪■‣" or "\u2500" <= char <= "\u259f":  # box drawing
        return MARK
    if "\ufe00" <= char <= "\ufe0f" or (kind == "Sk" and char > "\uffff"):  # what emoji are modified by
        return SYMBOL
    return _SHAPES.get(kind) or _SHAPES.get(kind[0]) or SYMBOL
