r"""Whether a response ends in the right answer.

1. The final answer of a text is, in this order: what follows the last ``####`` (GSM8K), the last ``\boxed{…}``, what
   follows the last "answer is", "answer:" or "answer =", the last number.
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
WORDS_ONLY = re.compile(r"(?:\s*[^\W\d_]{2,}[\s,:.]*)+|\s*")
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
        return _undecorated(hashes[-1])
    boxed = _last_boxed(text)
    return None if boxed is None else _undecorated(boxed)


def _last_boxed(text: str) -> str | None:
    r"""Return what the last complete ``\boxed{…}`` holds, braces within it included."""
    start = len(text)
    while (start := text.rfind(r"\boxed{", 0, start)) >= 0:
        depth = 0
        for end in range(start + len(r"\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + len(r"\boxed{") : end]
    return None


def _undecorated(answer: str) -> str:
    """Strip Markdown emphasis, LaTeX delimiters and the full stop."""
    answer = re.sub(r"^(?:\*+|\s|\\[(\[])+|(?:\*+|\s|\\[)\]]|[.,;:](?=\W*$))+$", "", answer)
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
    return Fraction(bare) if PLAIN_NUMBER.fullmatch(bare) else None


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
