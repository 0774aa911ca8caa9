"""The embedded word problems: what they say, what their solutions say, and that the splits stay apart."""

import hashlib
import random
import re
from collections import Counter
from fractions import Fraction

import pytest

from rocktokens.run_dir import derive_seed
from rocktokens.tasks import wordmath
from rocktokens.tasks.wordmath import Problem, Wordmath, make_problem, split_of, stated_answer, write_solution
from rocktokens.types import Prompt

TEMPLATES = {
    "start": wordmath.OPENERS,
    **wordmath.EVENTS,
    "distractor": wordmath.DISTRACTORS,
    "question": wordmath.QUESTIONS,
}
PLACEHOLDERS = {r"\{n\}": r"(\d+)", r"\{name\}": r"[A-Z]\w+", r"\{other\}": r"[A-Z]\w+", r"\{items\}": r"\w+"}
RICH_STEP = re.compile(
    r"(?P<heading>### Step (?:\d)|\*\*Step (?:\d):\*\*)\n(?P<marker>\w+), (?P<opening>\\\(|\$)"
    r"(?P<left>\d+)(?P<operator>\+|-|\\times |\\div )(?P<right>\d+)=(?P<result>\d+)(?P<closing>\\\)|\$)\."
    r"(?P<line_break>\n+)"
)
RICH_ENDING = re.compile(r"(?P<closer>\w+), the answer is \$(?P<emphasis>\\\w+)\{(?P<answer>\d+)\}\$\.$")
SIGNS = {"+": "+", "-": "-", "\\times ": "*", "\\div ": "/"}

SPLITS: tuple[wordmath.Split, ...] = ("train", "test")
STYLES: tuple[wordmath.Style, ...] = ("rich", "plain", "terse")
WRITERS: tuple[wordmath.Writer, ...] = ("follow", "random")

TRAIN = [make_problem("train", 5, index) for index in range(3000)]
TEST = [make_problem("test", 5, index) for index in range(3000)]


def sentence_pattern(template: str) -> re.Pattern[str]:
    pattern = re.escape(template)
    for placeholder, expression in {**PLACEHOLDERS, r"\{place\}": r"\w+"}.items():
        pattern = pattern.replace(placeholder, expression)
    return re.compile(pattern)


SENTENCES = [(kind, text, sentence_pattern(text)) for kind, texts in TEMPLATES.items() for text in texts]


def read_sentence(sentence: str) -> tuple[str, str, int | None]:
    """The kind and template of a sentence and the number it tells."""
    found = [(kind, text, match) for kind, text, pattern in SENTENCES if (match := pattern.fullmatch(sentence))]
    assert len(found) == 1, sentence
    kind, text, match = found[0]
    return kind, text, int(match.group(1)) if match.groups() else None


def read_story(text: str) -> list[tuple[str, str, int | None]]:
    return [read_sentence(sentence) for sentence in re.split(r"(?<=[.?]) ", text)]


def evaluate(start: int, events: list[tuple[str, int]]) -> Fraction:
    amount = Fraction(start)
    for operator, number in events:
        match operator:
            case "+":
                amount += number
            case "-":
                amount -= number
            case "*":
                amount *= number
            case "/":
                amount /= number
    return amount


def chain(problem: Problem) -> str:
    return f"{problem.steps[0].left}" + "".join(f"{step.operator}{step.right}" for step in problem.steps)


def test_the_generator_writes_what_the_embedded_models_were_trained_on():
    total = hashlib.sha256()
    for split in SPLITS:
        for index in range(300):
            problem, rng = make_problem(split, 0, index), random.Random(index)
            texts = [write_solution(problem, style, writer, rng) for style in STYLES for writer in WRITERS]
            total.update("\0".join([problem.id, problem.text, *texts]).encode())
    assert total.hexdigest() == "4a0d4350403b87566523dbb79cdb45ea03d980c697a847d2d5e50b7010a8d5f8"


def test_the_same_arguments_give_the_same_problem_and_others_another():
    again = [make_problem("train", 5, index) for index in range(3000)]
    assert again == TRAIN
    assert len({problem.text for problem in TRAIN}) == len(TRAIN)
    other_seed = {make_problem("train", 6, index).text for index in range(3000)}
    assert other_seed.isdisjoint(problem.text for problem in TRAIN)


@pytest.mark.parametrize("problems", [TRAIN, TEST], ids=["train", "test"])
def test_a_story_tells_the_steps_and_nothing_else(problems: list[Problem]):
    for problem in problems:
        story = read_story(problem.text)
        (opening, _, start), *middle, (question, _, _) = story
        told = [(kind, number) for kind, _, number in middle if kind != "distractor"]
        assert (opening, question) == ("start", "question")
        assert len(middle) - len(told) <= 1
        assert (start, told) == (problem.steps[0].left, [(step.operator, step.right) for step in problem.steps])


@pytest.mark.parametrize("problems", [TRAIN, TEST], ids=["train", "test"])
def test_answers_are_those_of_an_independent_evaluation_of_the_story(problems: list[Problem]):
    for problem in problems:
        (_, _, start), *middle, _ = read_story(problem.text)
        events = [(kind, number) for kind, _, number in middle if kind != "distractor" and number is not None]
        amounts = [evaluate(start or 0, events[:count]) for count in range(1, len(events) + 1)]
        assert amounts == [step.result for step in problem.steps]
        assert problem.answer == amounts[-1]
        assert min(amounts) >= 2


@pytest.mark.parametrize("problems", [TRAIN, TEST], ids=["train", "test"])
def test_every_phrasing_and_every_length_occurs(problems: list[Problem]):
    used = Counter(template for problem in problems for _, template, _ in read_story(problem.text))
    every = {text for texts in TEMPLATES.values() for text in texts}
    assert used.keys() == every and len(every) >= 12
    lengths = Counter(len(problem.steps) for problem in problems)
    assert set(lengths) == {1, 2, 3, 4} and min(lengths.values()) > 0.2 * len(problems)
    distracted = sum(used[text] for text in wordmath.DISTRACTORS)
    assert distracted / len(problems) == pytest.approx(0.25, abs=0.03)


def test_splits_share_no_chain_of_numbers():
    assert {chain(problem) for problem in TRAIN}.isdisjoint(chain(problem) for problem in TEST)
    assert {split_of(problem.steps) for problem in TRAIN} == {"train"}
    assert {split_of(problem.steps) for problem in TEST} == {"test"}


def test_one_chain_in_five_is_a_test_chain():
    chains = [(wordmath.Step(left, "+", right, left + right),) for left in range(4, 61) for right in range(2, 61)]
    share = sum(split_of(steps) == "test" for steps in chains) / len(chains)
    assert share == pytest.approx(1 / wordmath.TEST_SHARE, abs=0.03)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("writer", WRITERS)
def test_solutions_state_the_right_answer(style: wordmath.Style, writer: wordmath.Writer):
    rng = random.Random(1)
    for problem in TRAIN[:500]:
        assert stated_answer(write_solution(problem, style, writer, rng)) == str(problem.answer)


def test_plain_solutions_work_out_every_step():
    for problem in TEST[:500]:
        *lines, _ = write_solution(problem, "plain", "random", random.Random(0)).split("\n")
        shown = [re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", line) for line in lines]
        assert [match and match.groups() for match in shown] == [
            (str(step.left), step.operator, str(step.right), str(step.result)) for step in problem.steps
        ]


def digit_sum(text: str) -> int:
    return sum(map(int, text))


def carries(step: re.Match[str]) -> int:
    left, right = int(step["left"]) % 10, int(step["right"]) % 10
    return int(left + right > 9) if step["operator"] == "+" else int(step["operator"] == "-" and left < right)


def choices(problem: Problem, text: str) -> dict[str, list[bool]]:
    """Whether each open choice of a rich solution is the one its numbers call for; the numbers are checked too."""
    steps, ending = list(RICH_STEP.finditer(text)), RICH_ENDING.search(text)
    assert ending is not None and "".join(step[0] for step in steps) + ending[0] == text
    assert [(int(s["left"]), SIGNS[s["operator"]], int(s["right"]), int(s["result"])) for s in steps] == [
        (step.left, step.operator, step.right, step.result) for step in problem.steps
    ]
    assert all((step["opening"] == "$") == (step["closing"] == "$") for step in steps)
    answer, count = ending["answer"], len(steps)
    closers, markers = ("Therefore", "Thus", "Hence", "Finally"), ("So", "Now", "Wait", "Okay")
    return {
        "heading": [s["heading"].startswith("**") == bool((int(s["result"]) // 10 + carries(s)) % 2) for s in steps],
        "marker": [s["marker"] == markers[int(s["result"]) % 4] for s in steps],
        "delimiter": [(s["opening"] == "$") == bool(digit_sum(s["result"]) % 2) for s in steps],
        "line_break": [len(s["line_break"]) == 1 + digit_sum(s["left"] + s["right"]) % 2 for s in steps],
        "closer": [ending["closer"] == closers[(digit_sum(answer) + int(answer)) % 4]],
        "emphasis": [ending["emphasis"] == ("\\boxed", "\\mathbf")[(digit_sum(answer) + count) % 2]],
    }


@pytest.mark.parametrize(
    ("writer", "two_ways", "four_ways"), [("follow", 0.95, 0.95), ("random", 0.5, 0.25)], ids=["follow", "random"]
)
def test_open_choices_follow_the_numbers_for_one_writer_only(
    writer: wordmath.Writer, two_ways: float, four_ways: float
):
    rng = random.Random(2)
    called_for: dict[str, list[bool]] = {}
    for problem in TRAIN:
        for name, agree in choices(problem, write_solution(problem, "rich", writer, rng)).items():
            called_for.setdefault(name, []).extend(agree)
    rates = {name: sum(agree) / len(agree) for name, agree in called_for.items()}
    expected = {name: four_ways if name in ("marker", "closer") else two_ways for name in rates}
    assert rates == pytest.approx(expected, abs=0.03)


def test_batches_walk_through_one_stream_without_repeating():
    task, seed = Wordmath("train"), derive_seed(0, "prompts")
    walked = [prompt for step in range(60) for prompt in task.batch(step, 32, seed)]
    assert walked == task.prompts(60 * 32, seed)
    assert len({prompt.id for prompt in walked}) == len({prompt.text for prompt in walked}) == len(walked)
    assert task.batch(7, 32, seed) == walked[7 * 32 : 8 * 32]


def test_training_and_evaluation_prompts_differ():
    trained = {prompt.text for step in range(60) for prompt in Wordmath("train").batch(step, 32, 9)}
    for task, seed in ((Wordmath("test"), 9), (Wordmath("train"), derive_seed(0, "evaluation prompts"))):
        assert trained.isdisjoint(prompt.text for prompt in task.prompts(500, seed))


@pytest.mark.parametrize("most", [1, 2, 3])
def test_max_steps_is_the_longest_chain(most: int):
    lengths = {len(make_problem("train", 3, index, most).steps) for index in range(300)}
    assert lengths == set(range(1, most + 1))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Therefore, the answer is $\\boxed{42}$.", True),
        ("The answer is 42.", True),
        ("The answer is 7. No: the answer is $\\mathbf{42}$.", True),
        ("The answer is 042.", True),
        ("The answer is 42. No: the answer is 7.", False),
        ("The answer is 420.", False),
        ("The answer is 4 2.", False),
        ("The answer is forty-two (42).", True),
        ("The answer is $\\boxed{-42}$.", False),
        ("The answer is $-\\mathbf{42}$.", False),
        ("The answer is −42.", False),
        ("The answer is 42.5.", False),
        ("The answer is 42,000.", False),
        ("The answer is 42. No: the answer is -42.", False),
        ("42", False),
        ("", False),
    ],
)
def test_grading(text: str, right: bool):
    assert Wordmath().grade(Prompt("p", "…", "42"), text) is right


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 7, no: the answer is $\\boxed{042}$.", "42"),
        ("The answer is 000.", "0"),
        ("The answer is \\(-12\\).", "-12"),
        ("The answer is 12.5.", "12.5"),
        ("The answer is 1,200, I think.", "1,200"),
        ("It is 12.", None),
    ],
)
def test_the_answer_is_the_number_as_stated(text: str, answer: str | None):
    assert Wordmath().answer(text) == answer
