r"""Answers: what is extracted, and which pairs are the same quantity."""

import re
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocktokens.tasks.grading import WORDS_ONLY, _last_boxed, _undecorated, extract_answer, is_correct

WORDS = re.compile(r"(?:\s*[^\W\d_]{2,}[\s,:.]*)+|\s*")
DECORATION = re.compile(r"^(?:\*|\s|\\[(\[])+|(?:\*|\s|\\[)\]]|[.,;:])+$")
"""What is to be matched, said simply; these take exponential or quadratic time on long texts."""


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 5\nNo, wait.\n#### 1,234", "1,234"),
        ("#### -18\n", "-18"),
        (r"So \boxed{3}. Then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed{4} and \boxed{un", "4"),
        (r"\boxed{9} is wrong" + "\n#### 8", "8"),
        (r"#### In all there are \(\boxed{1050}\) marbles in 2 bowls.", "1050"),
        (r"#### \boxed{} 6", r"\boxed{} 6"),
        ("The answer is 12.", "12"),
        ("the Answer is: 3.5. That is because 7/2 = 3.5", "3.5"),
        ("Answer: **42**", "42"),
        ("The final answer is $18$.", "18"),
        (r"The answer is \(x = 5\).", "x = 5"),
        ("The answer is 12 apples, since 3 * 4 = 12", "12 apples"),
        ("The answer is 4.\nHmm. The answer is 5.", "5"),
        ("First 10-5 leaves 5, then 3 more: 8 apples.", "8"),
        ("It loses -4 degrees", "-4"),
        ("That costs $1,234.50", "$1,234.50"),
        ("about 25%", "25%"),
        ("half, i.e. .5", ".5"),
        ("model2 says nothing", None),
        ("no idea", None),
        ("", None),
    ],
)
def test_the_final_answer(text, answer):
    assert extract_answer(text) == answer


RIGHT = [
    ("#### 72", "Natalia sold 48/2 = 24 clips in May.\n#### 72"),
    ("He has 5 + 3 = 8\n#### 8", "The answer is 8."),
    ("1234", "The answer is 1,234."),
    ("1,234", "#### 1234"),
    ("1234567", "#### 1,234,567"),
    ("18", "#### $18"),
    ("$18.00", "The answer is 18"),
    ("18", "The answer is 18 dollars."),
    ("18 dollars", r"\boxed{18}"),
    ("18", "The answer is the number of eggs: 18"),
    ("-3", "The answer is −3"),
    ("-3", r"\boxed{-3}"),
    ("3", "The answer is 3.0"),
    ("2.50", "#### 2.5"),
    ("1/2", "The answer is 0.5"),
    ("1/2", r"\boxed{\frac{1}{2}}"),
    (r"\frac{1}{2}", r"\boxed{\frac12}"),
    ("0.75", r"The answer is \(\frac{3}{4}\)."),
    (r"\frac{3}{4}", "So it is 6/8"),
    ("50%", r"\boxed{50\%}"),
    ("0.5", "The answer is 50%"),
    ("12", r"\boxed{12\text{ cm}}"),
    (r"2\sqrt{2}", r"\boxed{\sqrt{8}}"),
    (r"\frac{\pi}{4}", r"\boxed{\pi/4}"),
    ("(1, 2)", r"\boxed{(1,2)}"),
    ("5", r"\boxed{x = 5}"),
    (r"x^2 + 2x + 1", r"\boxed{(x+1)^2}"),
    (r"\{1, 2\}", r"\boxed{\{2, 1\}}"),
    (r"2\frac{1}{2}", r"\boxed{2.5}"),
    ("1000000", r"\boxed{10^6}"),
    ("7", "So she has 3 + 4 = 7 left"),
    ("Paris", "Paris"),
    ("0", "#### 0"),
    ("15", r"#### Each of the other statues weighs \(\boxed{15}\) pounds"),
]
WRONG = [
    ("72", "#### 27"),
    ("72", ""),
    ("72", "I do not know"),
    ("1234", "The answer is 1,2345"),
    ("8", "8 and then 9"),
    ("3", "The answer is -3"),
    ("1/2", r"\boxed{\frac{1}{3}}"),
    ("2", r"\boxed{2\sqrt{2}}"),
    ("12", "The answer is 12 million"),
    ("(1, 2)", r"\boxed{(2,1)}"),
    ("x^2", r"\boxed{x^3}"),
    ("0.333", r"\boxed{\frac{1}{3}}"),
    ("5", "5 is not it.\n#### 6"),
    ("12", "The answer is 12 apples and 3 pears"),
]


@pytest.mark.parametrize(("gold", "text"), RIGHT)
def test_equal_quantities_are_right(gold, text):
    assert is_correct(text, gold, "math")


@pytest.mark.parametrize(("gold", "text"), WRONG)
def test_other_quantities_are_wrong(gold, text):
    assert not is_correct(text, gold, "math")


@pytest.mark.parametrize(
    ("gold", "text", "verdict"),
    [
        ("12", "The answer is 12.", True),
        (" 12 ", "#### 12", True),
        ("#### 12", r"\boxed{12}", True),
        ("Paris", " Paris\n", True),
        ("Paris", "The answer is Paris.", True),
        ("12", "The answer is 12.0", False),
        ("1/2", "The answer is 0.5", False),
        ("Paris", "The answer is London.", False),
    ],
)
def test_exact_compares_strings(gold, text, verdict):
    assert is_correct(text, gold, "exact") is verdict


@pytest.mark.parametrize(
    "text", [r"\boxed{9^{9^{9^9}}}", r"\boxed{2^{1000000000}}", r"\boxed{(20!)!}", "#### 9**9**9**9"]
)
def test_monstrous_answers_are_wrong_at_once(text):
    started = time.process_time()
    assert not is_correct(text, "7", "math")
    assert time.process_time() - started < 3


ENDLESS = (
    r"'#### The weight of each of the remaining statues that Hammond carved weighed ( 19 ) pounds'",
    r"'#### ' + 'marbles ' * 2000 + '19 (!)'",
    r"'#### 7' + '.' * 200_000 + 'x'",
    r"'\\boxed{' * 50_000",
    r"'\\boxed{' * 50_000 + '}' * 49_999",
)


@pytest.mark.parametrize("text", ENDLESS)
def test_no_answer_takes_forever(text):
    """In a process of its own: a search of a regular expression cannot be interrupted."""
    code = f"from rocktokens.tasks.grading import is_correct; assert not is_correct({text}, '7', 'math')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@given(st.text("ab1 .,:_(é", max_size=12))
def test_words_are_told_from_other_text(text):
    assert (WORDS_ONLY.fullmatch(text) is None) == (WORDS.fullmatch(text) is None)


@given(st.lists(st.sampled_from([r"\boxed{", "{", "}", "x", "\\"]), max_size=14).map("".join))
def test_the_last_complete_box_is_found(text):
    complete = {}
    for start in (found.end() for found in re.finditer(r"\\boxed\{", text)):
        depths = [
            text[start : end + 1].count("{") - text[start : end + 1].count("}") for end in range(start, len(text))
        ]
        if -1 in depths:
            complete[start] = text[start : start + depths.index(-1)]
    assert _last_boxed(text) == (complete[max(complete)] if complete else None)


@given(st.text("*() []\\.,;:a", max_size=12))
def test_decoration_is_stripped(text):
    assert _undecorated(text) == DECORATION.sub("", text)


@pytest.mark.parametrize("text", ["#### " + "1" * 5000, "The answer is $0." + "3" * 5000, "So it is " + "12" * 2500])
def test_numbers_of_more_digits_than_python_converts_are_wrong(text):
    assert not is_correct(text, "7", "math")
    assert is_correct(text, extract_answer(text) or "", "math")


def test_grading_works_off_the_main_thread():
    verdicts: list[bool] = []

    def grade() -> None:
        verdicts.append(is_correct(r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", "math"))
        verdicts.append(is_correct(r"\boxed{\frac{3}{4}}", r"\frac{1}{2}", "math"))

    thread = threading.Thread(target=grade)
    thread.start()
    thread.join()
    assert verdicts == [True, False]


def test_plain_numbers_are_graded_quickly():
    started = time.process_time()
    for number in range(2000):
        assert is_correct(f"so it is\n#### {number}", str(number), "math")
        assert not is_correct(f"so it is\n#### {number}", str(number + 1), "math")
    assert time.process_time() - started < 2
