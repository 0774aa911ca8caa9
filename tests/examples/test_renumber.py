import json
import random
import re
import sys

import pytest
import renumber
from options import run_main
from renumber import UntraceableError, draw, equations_hold, evaluate, fill, make_template, number, variants

from rocktokens.tasks.grading import is_correct

QUESTION = "Ann buys 3 boxes of 12 pens for $5 each. She sells every pen for $2. How much does she earn?"
ANSWER = (
    "The boxes cost 3*5=$<<3*5=15>>15.\nShe has 3 x 12 = <<3*12=36>>36 pens and takes 36 * $2 = $<<36*2=72>>72.\n"
    "So she earns $72 - $15 = $<<72-15=57>>57\n#### 57"
)
HALVES = (
    "Bo has 48 clips and sells half of them. How many are left?",
    "Bo sells 48/2 = <<48/2=24>>24 clips.\n#### 24",
)
SOURCE = [
    json.dumps({"question": QUESTION, "answer": ANSWER}),
    json.dumps({"question": HALVES[0], "answer": HALVES[1]}),
]


def test_a_template_gives_back_its_own_problem():
    template = make_template(QUESTION, ANSWER)
    values = dict(template.given)
    for name, expression in template.results.items():
        values[name] = evaluate(fill(expression, values))
    assert fill(template.question, values) == QUESTION
    assert fill(template.answer, values) == re.sub(r"<<[^>]*>>", "", ANSWER)


def test_new_answers_follow_from_the_new_numbers():
    template = make_template(QUESTION, ANSWER)
    rng = random.Random(0)
    for _ in range(50):
        variant = draw(template, rng)
        assert variant is not None
        boxes, pens, cost, price = (int(text) for text in re.findall(r"\d+", variant["question"]))
        assert variant["answer"].endswith(f"#### {boxes * pens * price - boxes * cost}")
        assert is_correct(variant["answer"], str(boxes * pens * price - boxes * cost), "math")
        assert equations_hold(variant["answer"])


def test_results_stay_positive_whole_numbers():
    template = make_template(*HALVES)
    rng = random.Random(1)
    drawn = [draw(template, rng) for _ in range(40)]
    given = [int(re.search(r"\d+", variant["question"])[0]) for variant in drawn if variant]  # pyright: ignore[reportOptionalSubscript]
    assert len(given) == 40 and all(value % 2 == 0 for value in given) and len(set(given)) > 5


@pytest.mark.parametrize(
    ("question", "answer", "reason"),
    [
        ("2 and 2 more?", "2+2=<<2+2=4>>4\n#### 4", "distinct"),
        ("3 and 4?", "3+4=<<3+4=8>>8\n#### 8", "does not give its result"),
        ("3 of 9?", "9-6=<<9-6=3>>3\n#### 3", "repeats"),
        ("6 and 9?", "In 30 days it is 6+9=<<6+9=15>>15\n#### 15", "nowhere"),
        ("6 and 9?", "6+9=<<6+9=15>>15\n#### 6", "last result"),
        ("6 and 9?", "9 + 9 = <<6+9=15>>15\n#### 15", "not the marked one"),
        ("6 and 9?", "6**9=<<6**9=10077696>>10077696\n#### 10077696", "cannot be evaluated"),
        ("6 and 9?", "it is __import__=<<__import__('os')=1>>1\n#### 1", "cannot be evaluated"),
    ],
)
def test_a_problem_whose_numbers_cannot_be_traced_is_refused(question: str, answer: str, reason: str):
    with pytest.raises(UntraceableError, match=reason):
        make_template(question, answer)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("3 x $4 = $12", True),
        ("3 x $4 = $13", False),
        ("(30/100)*$1,200 = $360", True),
        ("2 crayons + 3 = 5", True),  # what has words in it is not checked
        ("5 + 4 = 2 + 7", True),
        ("1.5*4=6 and 6-1=4", False),
    ],
)
def test_equations_in_figures_are_checked(text: str, holds: bool):
    assert equations_hold(text) == holds


def test_numbers_are_exact():
    assert evaluate("0.1+0.2") == number("0.3")
    assert evaluate("1,200/7*7") == 1200


def test_train_and_test_share_no_question_and_records_do_not_depend_on_each_other():
    both, _ = renumber.renumber(SOURCE, {"test": 2, "train": 6}, seed=3)
    alone, _ = renumber.renumber(SOURCE[:1], {"test": 2, "train": 6}, seed=3)
    questions = [record["question"] for records in both.values() for record in records]
    assert len(set(questions)) == len(questions) >= 12
    of_first = {record["question"] for records in both.values() for record in records if record["template"] == 0}
    assert of_first == {record["question"] for records in alone.values() for record in records}


def test_more_training_variants_leave_the_test_as_it_is():
    template = make_template(QUESTION, ANSWER)
    few, many = (list(variants(template, {"test": 2, "train": n}, random.Random(5))) for n in (2, 9))
    assert many[: len(few)] == few


def test_the_same_seed_gives_the_same_bytes(tmp_path, monkeypatch, capsys):
    source = tmp_path / "gsm8k.jsonl"
    source.write_text("\n".join([*SOURCE, json.dumps({"question": "none", "answer": "#### 1"})]) + "\n")
    written = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        monkeypatch.setattr(sys, "argv", ["renumber.py", str(source), str(tmp_path / name), "--seed", seed])
        renumber.main()
        written.append([(tmp_path / f"{name}-{split}.jsonl").read_bytes() for split in ("train", "test")])
    assert written[0] == written[1] != written[2]
    assert "1 records refused: numbers of the question" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        (None, (), r"source\.jsonl cannot be read \("),
        (b"\xff", (), r"source\.jsonl cannot be read \("),
        (b"{oops", (), r"line 1 is not valid JSON \("),
        (b"[" * 200_000, (), r"line 1 is not valid JSON \(it is nested too deep\): fix or remove it"),
        (b'{"question": 1}', (), r"line 1 has no texts 'question' and 'answer'"),
        (SOURCE[0].encode(), ("--train-variants", "-1"), r"--train-variants is '-1': give a whole number from 0 on"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch, capsys, content, options, sentence):
    source = tmp_path / "source.jsonl"
    if content is not None:
        source.write_bytes(content)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(sys, "argv", ["renumber.py", str(source), str(tmp_path / "out"), *options])
    with pytest.raises(SystemExit) as ended:
        run_main(renumber.main)
    assert ended.value.code == 2 and sorted(tmp_path.iterdir()) == before
    assert re.search(rf"^error: .*{sentence}.*\n\Z", capsys.readouterr().err, re.MULTILINE)
