r"""Whether a response ends in the right answer.

1. The final answer of a text is, in this order: what follows the last ``####`` (GSM8K), of which the last ``\boxed{…}``
   if there is one; the last ``\boxed{…}``; what follows the last "answer is", "answer:" or "answer ="; the last number.
2. A gold answer is what its ``####`` or ``\boxed{…}`` marks, otherwise all of it.
3. ``exact``: the two are the same string.
4. ``math``: plain numbers are compared as numbers; anything else goes to math-verify, which knows LaTeX, fractions,
   percentages, roots, tuples and so on (https://github.com/huggingface/Math-Verify).
"""

import re
import threading
from fractions import Fraction
from typing import Literal

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
STATED = re.compile(r"\banswer(?:\s+is|\s*[:=])[:=]?\s*(\S[^\n]*)", re.IGNORECASE)
CLAUSE_END = re.compile(r"[.;](?=\s|$)|,\s+(?=[A-Za-z])")
NUMBER = re.compile(rf"(?<![\w.])[-+−]?\$?(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:/\d+)?%?")
PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)")
WORDS_ONLY = re.compile(r"\s*(?:[^\W\d_]{2,}(?:[\s,:.]+[^\W\d_]{2,})*[\s,:.]*)?")
LEADING_DECORATION = re.compile(r"(?:[*\s]|\\[(\[])+")
TRAILING_DECORATION_REVERSED = re.compile(r"(?:[*\s.,;:]|[)\]]\\)+")
BOXED, BRACE = r"\boxed{", re.compile(r"\\boxed\{|[{}]")
MATH_WORDS = re.compile(r"\b(?:pi|sqrt|log|ln|sin|cos|tan|thousand|million|billion|dozen)\b", re.IGNORECASE)
TOO_LARGE = re.compile(r"\d{3,}!|\)!|!!|(?:\^|\*\*)[\s{(]*\d{4}|(?:\^|\*\*)\s*[{(][^})]*(?:\^|\*\*)|\*\*\s*\w+\s*\*\*")
"""Powers and factorials that take longer to work out than any grading is worth."""
LONGEST_EXPRESSION = 256
TIMEOUT_SECONDS = 5


def extract_answer(text: str) -> str | None:
    """Return the final answer a text gives, without decoration; None if it gives none."""
    marked = _marked_answer(text)
    if marked is not None:
        return marked
    if stated := STATED.findall(text):
        return _undecorated(CLAUSE_END.split(stated[-1], maxsplit=1)[0])
    numbers = NUMBER.findall(text)
    return _undecorated(numbers[-1]) if numbers else None


def is_correct(text: str, gold: str, grading: Literal["math", "exact"]) -> bool:
    """Return whether the final answer of ``text`` is ``gold``: the same string, or the same quantity."""
    target = _marked_answer(gold) or gold.strip()
    answer = extract_answer(text)
    if target in (answer, text.strip()):
        return True
    return grading == "math" and answer is not None and _same_quantity(target, answer)


def _marked_answer(text: str) -> str | None:
    if hashes := HASHES.findall(text):
        return _undecorated(_last_boxed(hashes[-1]) or hashes[-1])
    boxed = _last_boxed(text)
    return None if boxed is None else _undecorated(boxed)


def _last_boxed(text: str) -> str | None:
    r"""Return what the last complete ``\boxed{…}`` holds, braces within it included."""
    last: slice | None = None
    open_braces: list[re.Match[str]] = []
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            open_braces.append(brace)
        elif open_braces:
            opened = open_braces.pop()
            if opened[0] == BOXED and (last is None or opened.end() > last.start):
                last = slice(opened.end(), brace.start())
    return None if last is None else text[last]


def _undecorated(answer: str) -> str:
    """Strip Markdown emphasis, LaTeX delimiters and the full stop."""
    if leading := LEADING_DECORATION.match(answer):
        answer = answer[leading.end() :]
    if trailing := TRAILING_DECORATION_REVERSED.match(answer[::-1]):
        answer = answer[: -trailing.end()]
    inner = re.fullmatch(r"\$+([^$]+)\$+", answer)
    return inner.group(1).strip() if inner else answer


def _same_quantity(gold: str, answer: str) -> bool:
    gold, answer = _without_unit(gold), _without_unit(answer)
    gold_number, answer_number = _plain_number(gold), _plain_number(answer)
    if gold_number is not None and answer_number is not None:
        return gold_number == answer_number
    return _equivalent(gold, answer)


def _without_unit(answer: str) -> str:
    """Return the number of an answer that is one number among words, such as "18 dollars"; others unchanged."""
    numbers = NUMBER.findall(answer)
    if len(numbers) == 1 and WORDS_ONLY.fullmatch(NUMBER.sub("", answer)) and not MATH_WORDS.search(answer):
        return numbers[0]
    return answer


def _plain_number(text: str) -> Fraction | None:
    bare = text.replace("−", "-").replace(r"\$", "").replace("$", "").replace(" ", "")
    if re.fullmatch(rf"[-+]?{_DIGITS}(?:\.\d+)?", bare):
        bare = bare.replace(",", "")
    try:
        return Fraction(bare) if PLAIN_NUMBER.fullmatch(bare) else None
    except ValueError:  # more digits than Python converts
        return None


def _equivalent(gold: str, answer: str) -> bool:
    """Ask math-verify. Its time limit is a signal, which only the main thread can have."""
    from math_verify import parse, verify

    if any(len(side) > LONGEST_EXPRESSION or TOO_LARGE.search(side) for side in (gold, answer)):
        return False
    seconds = TIMEOUT_SECONDS if threading.current_thread() is threading.main_thread() else None
    parsed_gold, parsed_answer = (
        parse(f"${side.replace('−', '-')}$", parsing_timeout=seconds)  # pyright: ignore[reportArgumentType]
        for side in (gold, answer)
    )
    return verify(parsed_gold, parsed_answer, timeout_seconds=seconds)
