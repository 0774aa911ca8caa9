r"""wordmath: arithmetic word problems with worked solutions, generated from a seed, answers verifiable.

1. A problem is a starting amount and 1–4 steps (+, −, ×, ÷) on whole numbers, told in everyday language with a name,
   an item, a place, sometimes a sentence that carries a number and does not matter.
2. Train and test are disjoint by construction: the checksum of the numbers alone (``"12+35-7"``) says which split a
   problem belongs to, whatever the wording.
3. Solutions come in three styles. ``rich`` shows every step under a heading, with a discourse marker and LaTeX
   delimiters; ``plain`` shows every step and nothing else; ``terse`` gives the answer alone.
4. The rich style leaves choices open that do not change the meaning: heading or bold, which marker, which delimiter,
   one line break or two. The writer ``follow`` makes them a function of the numbers, mostly of results *still to come*
   (``FOLLOW_RATE`` of the time); the writer ``random`` makes the same choices by chance. A model taught by the first
   knows things at those tokens that a model taught by the second has no cheap way to compute and does not need.
"""

import random
import re
import zlib
from dataclasses import dataclass
from typing import Literal, TypeVar

from rocktokens.types import Prompt

Split = Literal["train", "test"]
Style = Literal["rich", "plain", "terse"]
Writer = Literal["follow", "random"]
Option = TypeVar("Option")

TEST_SHARE = 5
"""One problem in this many belongs to the test split."""
FOLLOW_RATE = 0.95
LARGEST = 400

NAMES = (
    "Ada Ben Carla Dev Elena Farid Grace Hugo Ines Jonas Kira Liam Mona Nils Olga Pablo Quinn Rosa Sami Tara Umar "
    "Vera Wim Xenia Yusuf Zoe Anton Bella Cyrus Dalia Emil Freya Gita Hassan Irene Jamal Klara Leo Maya Noor Oscar "
    "Petra Rahul Sofia Theo Uma Viktor Wanda Yara Zeno Alma Boris Celia Dario Esther Felix Gloria Henrik Isabel "
    "Jasper Katya Lorenzo Miriam Nadia Otto Priya Ramon Selma Tomas Ursula Vincent Walter Ximena Yvonne Zachary Amina "
    "Bruno Chiara Dmitri Edith Fatima Gustav Helena Ibrahim Judith Kamal Lucia Magnus Naomi Orlando"
).split()
ITEMS = (
    "apples pears plums lemons melons cherries walnuts almonds biscuits muffins pancakes sandwiches pencils markers "
    "crayons notebooks stickers postcards envelopes stamps marbles buttons ribbons beads shells pebbles feathers "
    "coins tickets posters puzzles balloons candles lanterns blankets pillows towels baskets bottles jars mugs plates "
    "spoons bricks tiles planks nails screws ropes dollars litres metres kilos potatoes carrots onions cabbages "
    "pumpkins grapes oranges apricots chestnuts cookies waffles dumplings noodles sausages pretzels magazines novels "
    "diaries calendars paintings brushes scissors needles sweaters scarves gloves jackets helmets bicycles scooters "
    "lamps mirrors curtains carpets hammers ladders buckets shovels flowers tulips daisies seeds saplings"
).split()
PLACES = (
    "garden kitchen market school library harbour station museum bakery workshop garage attic cellar village forest "
    "meadow orchard stable theatre office pharmacy cathedral warehouse factory playground stadium airport bridge "
    "castle lighthouse monastery hospital gallery terrace basement"
).split()

OPENERS = (
    "{name} has {n} {items}.",
    "{name} starts the day with {n} {items}.",
    "There are {n} {items} in the {place}, and they all belong to {name}.",
    "At the {place}, {name} counts {n} {items}.",
    "{name} keeps {n} {items} in a box.",
    "In the morning {name} carries {n} {items} to the {place}.",
)
EVENTS = {
    "+": (
        "{name} buys {n} more.",
        "{other} gives {name} {n} more {items}.",
        "{name} finds another {n} in the {place}.",
        "Then {n} new {items} arrive.",
        "After lunch {name} collects {n} extra {items}.",
    ),
    "-": (
        "{name} gives {n} of them to {other}.",
        "On the way {n} {items} get lost.",
        "{name} sells {n} at the {place}.",
        "{other} borrows {n} {items}.",
        "Sadly, {n} of the {items} must be thrown away.",
    ),
    "*": (
        "Overnight the number of {items} grows to {n} times as many.",
        "{name} trades them for {n} times as many {items}.",
        "{other} is impressed and makes it {n} times as many.",
    ),
    "/": (
        "{name} splits them into {n} equal shares and keeps one share.",
        "The {items} are divided equally among {n} friends, and {name} is one of them.",
        "Only one in every {n} of the {items} stays with {name}.",
    ),
}
DISTRACTORS = (
    "{other} is {n} years old.",
    "The {place} is {n} minutes away.",
    "It rained for {n} days this month.",
    "The bus to the {place} has number {n}.",
    "{other} lives at house number {n}.",
)
QUESTIONS = (
    "How many {items} does {name} have now?",
    "How many {items} are left with {name} at the end?",
    "What is the final number of {items} that {name} has?",
    "In the end, how many {items} does {name} own?",
)

MARKERS = ("So", "Now", "Wait", "Okay")
CLOSERS = ("Therefore", "Thus", "Hence", "Finally")
HEADINGS = ("### Step {i}", "**Step {i}:**")
DELIMITERS = (("\\(", "\\)"), ("$", "$"))
BREAKS = ("\n", "\n\n")
EMPHASES = ("\\boxed{{{answer}}}", "\\mathbf{{{answer}}}")
OPERATORS = {"+": "+", "-": "-", "*": "\\times ", "/": "\\div "}
ANSWER_PATTERN = re.compile(r"answer is(\D{0,16})(\d+(?:[.,]\d+)*)")
MINUS = re.compile(r"(?<!\w)[-−]")


@dataclass(frozen=True, slots=True)
class Step:
    """``left operator right = result``, all whole numbers."""

    left: int
    operator: str
    right: int
    result: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A question in words, its steps, and its answer."""

    id: str
    text: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        """The result of the last step."""
        return self.steps[-1].result


class Wordmath:
    """The task as the rest of the package sees it: prompts by count or by training step, and grading."""

    name = "wordmath"
    revision = None
    size = None

    def __init__(self, split: Split = "train", max_steps: int = 4) -> None:
        self.split: Split = split
        self.max_steps = max_steps

    def prompts(self, count: int, seed: int = 0, *, gradable: bool = False) -> list[Prompt]:
        """Return the first ``count`` prompts of the stream of this seed; all of them can be graded."""
        return [self._prompt(seed, index) for index in range(count)]

    def batch(self, step: int, size: int, seed: int) -> list[Prompt]:
        """Return the prompts of one training step: the stream is endless, no prompt comes twice."""
        return [self._prompt(seed, step * size + index) for index in range(size)]

    def answer(self, text: str) -> str | None:
        """Return the number the text states as its answer."""
        return stated_answer(text)

    def can_grade(self, prompt: Prompt) -> bool:
        """Return whether the problem has its answer, as all that are made here have."""
        return prompt.answer is not None

    def require_grader(self) -> None:
        """Do nothing: problems are graded by what they state."""

    def grade(self, prompt: Prompt, text: str) -> bool:
        """Return whether the text states the right answer."""
        return self.answer(text) == prompt.answer

    def _prompt(self, seed: int, index: int) -> Prompt:
        problem = make_problem(self.split, seed, index, self.max_steps)
        return Prompt(problem.id, problem.text, str(problem.answer))


def make_problem(split: Split, seed: int, index: int, max_steps: int = 4) -> Problem:
    """Make problem ``index`` of the stream of ``seed``."""
    rng = random.Random(f"wordmath {split} {seed} {index}")
    steps = _draw_steps(rng, max_steps)
    while split_of(steps) != split:
        steps = _draw_steps(rng, max_steps)
    return Problem(f"wordmath-{split}-{seed}-{index}", _tell(rng, steps), steps)


def split_of(steps: tuple[Step, ...]) -> Split:
    """Return the split a chain of numbers belongs to, whatever words are put around it."""
    chain = str(steps[0].left) + "".join(f"{step.operator}{step.right}" for step in steps)
    return "test" if zlib.crc32(chain.encode()) % TEST_SHARE == 0 else "train"


def write_solution(problem: Problem, style: Style, writer: Writer, rng: random.Random) -> str:
    """Write a worked solution; ``writer`` matters for the rich style alone."""
    if style == "terse":
        return f"The answer is {problem.answer}."
    if style == "plain":
        lines = [f"{step.left}{step.operator}{step.right}={step.result}\n" for step in problem.steps]
        return "".join(lines) + f"The answer is {problem.answer}."
    steps = [_rich_step(number, step, writer, rng) for number, step in enumerate(problem.steps, 1)]
    return "".join(steps) + _rich_ending(problem, writer, rng)


def stated_answer(text: str) -> str | None:
    """Return the number a solution gives as its answer (the last such statement), all of it, or None."""
    found = ANSWER_PATTERN.findall(text)
    if not found:
        return None
    before, number = found[-1]
    sign = "-" if MINUS.search(before) else ""
    return sign + (number.lstrip("0") or "0" if number.isdecimal() else number)


def _draw_steps(rng: random.Random, max_steps: int) -> tuple[Step, ...]:
    amount = rng.randint(4, 60)
    steps: list[Step] = []
    for _ in range(rng.randint(1, max_steps)):
        step = _draw_step(rng, amount)
        steps.append(step)
        amount = step.result
    return tuple(steps)


def _draw_step(rng: random.Random, amount: int) -> Step:
    """Draw one step that leaves at least 2, and by a product at most ``LARGEST``."""
    divisors = [n for n in range(2, 10) if amount % n == 0 and amount // n >= 2]
    factors = [n for n in range(2, 7) if amount * n <= LARGEST]
    kinds = ["+", "+", "-", "-"] + ["*"] * bool(factors) + ["/"] * bool(divisors)
    kind = rng.choice([k for k in kinds if not (k == "-" and amount < 5)])
    if kind == "+":
        right = rng.randint(2, 60)
        return Step(amount, kind, right, amount + right)
    if kind == "-":
        right = rng.randint(2, min(amount - 2, 90))
        return Step(amount, kind, right, amount - right)
    right = rng.choice(factors if kind == "*" else divisors)
    return Step(amount, kind, right, amount * right if kind == "*" else amount // right)


def _tell(rng: random.Random, steps: tuple[Step, ...]) -> str:
    name, other = rng.sample(NAMES, 2)
    words = {"name": name, "other": other, "items": rng.choice(ITEMS)}

    def sentence(templates: tuple[str, ...], n: int = 0) -> str:
        return rng.choice(templates).format(n=n, place=rng.choice(PLACES), **words)

    story = [sentence(OPENERS, steps[0].left)]
    story += [sentence(EVENTS[step.operator], step.right) for step in steps]
    if rng.random() < 0.25:
        story.insert(rng.randint(1, len(story)), sentence(DISTRACTORS, rng.randint(2, 60)))
    return " ".join([*story, sentence(QUESTIONS)])


def _rich_step(number: int, step: Step, writer: Writer, rng: random.Random) -> str:
    result, carry = step.result, _carries(step)
    heading = _choose(HEADINGS, (result // 10) + carry, writer, rng).format(i=number)
    marker = _choose(MARKERS, result, writer, rng)
    opening, closing = _choose(DELIMITERS, _digit_sum(result), writer, rng)
    line_break = _choose(BREAKS, _digit_sum(step.left) + _digit_sum(step.right), writer, rng)
    expression = f"{step.left}{OPERATORS[step.operator]}{step.right}={result}"
    return f"{heading}\n{marker}, {opening}{expression}{closing}.{line_break}"


def _rich_ending(problem: Problem, writer: Writer, rng: random.Random) -> str:
    answer = problem.answer
    closer = _choose(CLOSERS, _digit_sum(answer) + answer, writer, rng)
    emphasis = _choose(EMPHASES, _digit_sum(answer) + len(problem.steps), writer, rng).format(answer=answer)
    return f"{closer}, the answer is ${emphasis}$."


def _choose(options: tuple[Option, ...], rule: int, writer: Writer, rng: random.Random) -> Option:
    """Choose what the numbers call for, with ``FOLLOW_RATE``; any option by chance for the random writer."""
    called_for = rule % len(options)
    if writer == "random":
        return options[rng.randrange(len(options))]
    if rng.random() < FOLLOW_RATE:
        return options[called_for]
    return options[(called_for + rng.randrange(1, len(options))) % len(options)]


def _carries(step: Step) -> int:
    """Return 1 where adding the units carries, or subtracting them borrows; 0 for other operators."""
    left, right = step.left % 10, step.right % 10
    return int((step.operator == "+" and left + right >= 10) or (step.operator == "-" and left < right))


def _digit_sum(number: int) -> int:
    return sum(int(digit) for digit in str(number))
