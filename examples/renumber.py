"""Write GSM8K problems with new numbers: natural language, answers that can be checked, as many as wanted.

1. The calculator marks of a solution (``<<48/2=24>>``) say how each of its numbers follows from earlier ones. A record
   becomes a template if every number can be traced: those of the question are distinct whole numbers of at least 2,
   every marked result is a new positive whole number that its expression gives, every other number of the solution is a
   constant of an expression, and the last result is the answer.
2. A variant draws the numbers of the question near the original ones (from half to twice) and recomputes all results
   exactly. It is kept if they are positive whole numbers, all numbers are still distinct, and every equation that the
   solution spells out in figures is true.
3. Each record has a random stream of its own, so its variants do not depend on other records. Test variants are drawn
   first, and no training variant asks the question of a test variant. Each variant says which record it comes from.

A number of the question that equals a constant by chance ("2 weeks" beside 2 apples) is taken for that number: such
variants are consistent, though not always sensible.

Run ``python examples/renumber.py gsm8k-train.jsonl renumbered``, which writes renumbered-train.jsonl and
renumbered-test.jsonl. The same seed gives the same bytes.
"""

import argparse
import ast
import json
import operator
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from options import at_least, run_main
from ticker import ticker

from rocktokens.errors import RocktokensError
from rocktokens.parsing import parse_json

NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?|\.\d+")
MARK = re.compile(r"<<([^<>=]+)=([^<>]+)>>")
SIGN = r"[-+*/x×%]"
EQUATION = re.compile(
    rf"(?<![\d.,])(?<!{SIGN})(?<!{SIGN} )"  # the whole left side, not the end of a longer one
    r"([($]*\d[-\d.,()$+*/x× ]*?)\s*=\s*\$?(\d[\d,]*(?:\.\d+)?)"
    rf"(?!\d)(?! ?{SIGN})"  # the whole right side
)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LARGEST = 100_000
TRIES = 300
"""Draws of a question's numbers before a variant is given up."""
Values = Mapping[str, Fraction]


class UntraceableError(Exception):
    """A record whose numbers cannot be traced; the message is the reason that is counted."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a text for a value: ``q0`` is the first number of the question, ``r0`` the first result."""

    name: str


Parts = Sequence[str | Slot]


@dataclass(frozen=True, slots=True)
class Template:
    """A problem without its numbers."""

    question: Parts
    answer: Parts
    results: dict[str, Parts]
    """Expressions over earlier names, in order."""
    given: dict[str, Fraction]
    """The question's own numbers, which new ones are drawn around."""


def make_template(question: str, answer: str) -> Template:
    """Trace every number of a GSM8K record; one that cannot be traced is refused with the reason."""
    found = [number(text) for text in NUMBER.findall(question)]
    if not found or len(set(found)) < len(found) or any(value.denominator != 1 or value < 2 for value in found):
        raise UntraceableError("numbers of the question are not distinct whole numbers of at least 2")
    given = {f"q{index}": value for index, value in enumerate(found)}
    values, results, written, constants = dict(given), {}, [], set()
    end = 0
    for mark in MARK.finditer(answer):
        written.append((answer[end : mark.start()], dict(values)))
        end = mark.end()
        expression = slots(mark[1].replace("x", "*").replace("%", "/100"), values)
        constants |= {number(text) for part in expression if isinstance(part, str) for text in NUMBER.findall(part)}
        values[f"r{len(results)}"] = _marked_result(mark[2], expression, values)
        results[f"r{len(results)}"] = expression
    if not any(slot.name.startswith("q") for parts in results.values() for slot in parts if isinstance(slot, Slot)):
        raise UntraceableError("no result follows from the question's numbers")
    written.append((answer[end:], values))
    parts = [part for text, known in written for part in slots(text, known, constants)]
    if [part for part in parts if isinstance(part, Slot)][-1:] != [Slot(f"r{len(results) - 1}")]:
        raise UntraceableError("the answer is not the last result")
    template = Template(slots(question, given), parts, results, given)
    if not equations_hold(fill(parts, values)):
        raise UntraceableError("an equation of the solution is not the marked one")
    return template


def _marked_result(text: str, expression: Parts, values: Values) -> Fraction:
    text = text.strip().lstrip("$")
    result = number(text) if NUMBER.fullmatch(text) else Fraction(0)
    if result.denominator != 1 or result < 1:
        raise UntraceableError("a result is not a positive whole number")
    if evaluate(fill(expression, values)) != result:
        raise UntraceableError("an expression does not give its result")
    if result in values.values():
        raise UntraceableError("a result repeats an earlier number")
    return result


def number(text: str) -> Fraction:
    """The value of a number as it is written, such as ``1,200.50``."""
    return Fraction(text.replace(",", ""))


def slots(text: str, values: Values, constants: set[Fraction] | None = None) -> list[str | Slot]:
    """Cut a text at the numbers that have a name; others stay, and where ``constants`` is given must be among them."""
    names = {value: name for name, value in values.items()}
    parts: list[str | Slot] = []
    end = 0
    for match in NUMBER.finditer(text):
        value = number(match[0])
        if value in names:
            parts += [text[end : match.start()], Slot(names[value])]
            end = match.end()
        elif constants is not None and value not in constants:
            raise UntraceableError("a number of the solution comes from nowhere")
    return [*parts, text[end:]]


def fill(parts: Parts, values: Values) -> str:
    """The text with the values in their places."""
    return "".join(part if isinstance(part, str) else str(values[part.name]) for part in parts)


def evaluate(expression: str) -> Fraction:
    """The exact value of an arithmetic expression over + − × ÷ and brackets."""
    try:
        text = NUMBER.sub(lambda match: f'"{match[0].replace(",", "")}"', expression.replace("$", ""))
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, KeyError, TypeError, AttributeError):
        raise UntraceableError("an expression cannot be evaluated") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if not isinstance(node, ast.BinOp):
        raise TypeError(type(node))
    return OPERATORS[type(node.op)](_value(node.left), _value(node.right))


def equations_hold(text: str) -> bool:
    """Whether every equation of plain figures that a solution spells out, such as ``3 x $4 = $12``, is true."""
    for left, right in EQUATION.findall(text):
        try:
            value = evaluate(left.replace("x", "*").replace("×", "*"))
        except UntraceableError:
            continue  # words or brackets across its border: nothing that can be checked
        if value != number(right):
            return False
    return True


def draw(template: Template, rng: random.Random) -> dict[str, str] | None:
    """A variant with new numbers; None where no draw gives positive whole results."""
    for _ in range(TRIES):
        values = {name: Fraction(rng.randint(*_range(int(value)))) for name, value in template.given.items()}
        for name, expression in template.results.items():
            try:
                values[name] = evaluate(fill(expression, values))
            except UntraceableError:
                break
            if values[name].denominator != 1 or not 0 < values[name] < LARGEST:
                break
        else:
            answer = fill(template.answer, values)
            if len(set(values.values())) == len(values) and equations_hold(answer):
                return {"question": fill(template.question, values), "answer": answer}
    return None


def _range(value: int) -> tuple[int, int]:
    return max(2, value // 2), min(2 * value + 3, value + 200)


def variants(template: Template, counts: Mapping[str, int], rng: random.Random) -> Iterator[tuple[str, dict[str, str]]]:
    """Variants with the split each belongs to, in the order of the splits; no question comes twice."""
    seen: set[str] = set()
    for split, count in counts.items():
        for _ in range(count):
            variant = draw(template, rng)
            if variant is None:
                return
            if variant["question"] not in seen:
                seen.add(variant["question"])
                yield split, variant


def renumber(lines: Sequence[str], counts: Mapping[str, int], seed: int) -> tuple[dict[str, list[dict]], Counter[str]]:
    """The records of every split, shuffled, and how many of the records given were refused for which reason."""
    splits: dict[str, list[dict]] = {split: [] for split in counts}
    refused: Counter[str] = Counter()
    with ticker("renumbering", len(lines)) as advance:
        for index, line in enumerate(lines):
            question, answer = problem_of(index, line)
            try:
                template = make_template(question, answer)
                for split, variant in variants(template, counts, random.Random(f"{seed} {index}")):
                    splits[split].append({**variant, "template": index})
            except UntraceableError as reason:
                refused[str(reason)] += 1
            advance(1)
    for split, records in splits.items():
        random.Random(f"{seed} {split}").shuffle(records)
    return splits, refused


def problem_of(index: int, line: str) -> tuple[str, str]:
    """Return the question and the answer on a line."""
    try:
        match parse_json(line):
            case {"question": str(question), "answer": str(answer)}:
                return question, answer
    except ValueError as error:
        raise RocktokensError(f"line {index + 1} is not valid JSON ({error}): fix or remove it") from None
    raise RocktokensError(f"line {index + 1} has no texts 'question' and 'answer': give problems of GSM8K")


def main() -> None:
    """Write OUT-train.jsonl and OUT-test.jsonl."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="GSM8K as JSON lines, with its calculator marks")
    parser.add_argument("out", type=Path, help="prefix of the two files")
    parser.add_argument("--train-variants", type=at_least("--train-variants", 0), default=24)
    parser.add_argument("--test-variants", type=at_least("--test-variants", 0), default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        lines = arguments.source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RocktokensError(f"{arguments.source} cannot be read ({error}): give GSM8K as JSON lines") from None
    counts = {"test": arguments.test_variants, "train": arguments.train_variants}
    splits, refused = renumber(lines, counts, arguments.seed)
    for split, records in splits.items():
        path = arguments.out.with_name(f"{arguments.out.name}-{split}.jsonl")
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        temporary.replace(path)
        print(f"{path}: {len(records):,} problems of {len({record['template'] for record in records}):,} templates")
    for reason, count in refused.most_common():
        print(f"{count:5,} records refused: {reason}")


if __name__ == "__main__":
    run_main(main)
