"""Datasets as tasks: fields, order of prompts, and errors that name the line."""

import json
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocktokens.config import HubTask, JsonlTask, WordmathTask
from rocktokens.errors import RocktokensError
from rocktokens.tasks import make_task
from rocktokens.tasks.base import DatasetTask
from rocktokens.types import Prompt

RECORDS = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "key": f"k{n}"} for n in range(10)]


def task_of(path, records=RECORDS, **fields) -> DatasetTask:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return make_task(JsonlTask(name="jsonl", path=str(path), **fields))  # pyright: ignore[reportReturnType]


def numbered_task(count: int) -> DatasetTask:
    return DatasetTask("numbers", [Prompt(str(n), f"text {n}", str(n)) for n in range(count)], "exact")


def test_fields_template_and_limit(tmp_path):
    task = task_of(tmp_path / "d.jsonl", template="Q: {prompt} {x}", id_field="key", limit=4)
    assert sorted(task.prompts(99), key=lambda prompt: prompt.id) == [
        Prompt(f"k{n}", f"Q: What is {n} + 1? {{x}}", str(n + 1)) for n in range(4)
    ]
    assert task.name == "jsonl:d.jsonl"


def test_numbers_and_blank_lines_and_unicode_are_read(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"q": "Größe?", "a": 12, "id": 7}\n\n  \n{"q": "x", "a": 0, "id": 8}\n', encoding="utf-8")
    task = make_task(JsonlTask(name="jsonl", path=str(path), prompt_field="q", answer_field="a", id_field="id"))
    assert {(p.id, p.text, p.answer) for p in task.prompts(5)} == {("7", "Größe?", "12"), ("8", "x", "0")}


def test_grading_follows_the_section(tmp_path):
    math, exact = (task_of(tmp_path / f"{kind}.jsonl", grading=kind) for kind in ("math", "exact"))
    prompt = Prompt("p", "?", "0.5")
    assert math.grade(prompt, "The answer is 1/2.")
    assert not exact.grade(prompt, "The answer is 1/2.")
    assert exact.grade(prompt, "The answer is 0.5.")


def test_data_without_answers_can_be_sampled_but_not_graded(tmp_path):
    task = task_of(tmp_path / "d.jsonl", answer_field="")
    [prompt] = task.prompts(1)
    assert prompt.answer is None
    with pytest.raises(RocktokensError, match="no answer to grade against"):
        task.grade(prompt, "5")


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 5))
def test_prompts_are_distinct_and_seeded(size, count, seed):
    task = numbered_task(size)
    drawn = [prompt.id for prompt in task.prompts(count, seed)]
    assert len(drawn) == len(set(drawn)) == min(size, count)
    assert drawn == [prompt.id for prompt in task.prompts(size, seed)][:count]


def test_another_seed_is_another_order():
    task = numbered_task(40)
    assert task.prompts(40, 0) != task.prompts(40, 1)
    assert task.batch(0, 40, 0) != task.batch(0, 40, 1)
    assert task.batch(0, 40, 0) != task.batch(1, 40, 0)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 8), st.integers(0, 3))
def test_training_batches_are_epochs_in_which_no_prompt_repeats(size, batch_size, steps, seed):
    task = numbered_task(size)
    walk = [prompt.id for step in range(steps) for prompt in task.batch(step, batch_size, seed)]
    assert len(walk) == steps * batch_size
    for start in range(0, len(walk) - size + 1, size):
        assert set(Counter(walk[start : start + size]).values()) == {1}
    assert len(walk[-(len(walk) % size) :]) == len(set(walk[-(len(walk) % size) :])) or len(walk) % size == 0
    whole = [prompt.id for prompt in task.batch(0, steps * batch_size, seed)]
    assert walk == whole


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "a", "answer": "1"}\n{oops\n', r"line 2 is not valid JSON"),
        ('{"question": "a", "answer": "1"}\n\n[1]\n', r"line 3 is not a JSON object"),
        ('{"question": "a", "answer": 1}\n{"prompt": "b"}\n', r"line 2 has no 'question' \(it has 'prompt'\): set"),
        ('{"question": "a", "answer": null}\n', r"line 1 has no 'answer'.*task.answer_field"),
        ("{}\n", r"line 1 has no 'question' \(it has no fields\)"),
        ("\n", "holds no records"),
        ("", "holds no records"),
    ],
)  # fmt: skip
def test_bad_data_is_named(tmp_path, text, message):
    path = tmp_path / "d.jsonl"
    path.write_text(text)
    with pytest.raises(RocktokensError, match=message):
        make_task(JsonlTask(name="jsonl", path=str(path)))


def test_bad_paths_ids_and_templates_are_named(tmp_path):
    with pytest.raises(RocktokensError, match=r"none.jsonl' does not exist"):
        make_task(JsonlTask(name="jsonl", path=str(tmp_path / "none.jsonl")))
    with pytest.raises(RocktokensError, match="cannot be read"):
        make_task(JsonlTask(name="jsonl", path=str(tmp_path)))
    with pytest.raises(RocktokensError, match="id '2' twice"):
        task_of(tmp_path / "d.jsonl", [*RECORDS, {"question": "?", "answer": "2", "key": "k"}], id_field="answer")
    with pytest.raises(RocktokensError, match=r"task.template is 'Solve it', which has no \{prompt\}"):
        task_of(tmp_path / "d.jsonl", template="Solve it")


def test_the_embedded_task_is_made_from_its_section():
    task = make_task(WordmathTask(split="test"))
    [prompt] = task.prompts(1)
    assert task.grade(prompt, f"The answer is {prompt.answer}.")
    assert not task.grade(prompt, f"The answer is {prompt.answer}1.")


def test_a_directory_of_parquet_is_read_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "data" / "train.parquet")
    task = make_task(HubTask(name="hub", path=str(tmp_path / "data"), id_field="key", limit=6))
    assert {(p.id, p.answer) for p in task.prompts(20)} == {(f"k{n}", str(n + 1)) for n in range(6)}
    with pytest.raises(RocktokensError, match="row 0 has no 'text'"):
        make_task(HubTask(name="hub", path=str(tmp_path / "data"), prompt_field="text"))
    with pytest.raises(RocktokensError, match=r"split 'nothing'.* cannot be loaded"):
        make_task(HubTask(name="hub", path=str(tmp_path / "data"), split="nothing"))


def test_without_the_extra_the_hub_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RocktokensError, match=r"pip install 'rocktokens\[hub\]'"):
        make_task(HubTask(name="hub", path="org/name"))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[" * 200_000, "it is nested too deep"),
        ('{"question": ' + "9" * 6000 + "}", "it has a number of more digits than can be read"),
    ],
)
def test_a_line_that_no_parser_takes_is_named(tmp_path, line, problem):
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"question": "1 + 1?", "answer": "2"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(RocktokensError, match=rf"data\.jsonl, line 2 is not valid JSON \({problem}\)"):
        make_task(JsonlTask(name="jsonl", path=str(path)))


@pytest.mark.parametrize("field", ["question", "answer"])
def test_half_a_character_is_named(tmp_path, field):
    path = tmp_path / "data.jsonl"
    records = [{"question": "\U0001f600?", "answer": "2"}, {"question": "1 + 1?", "answer": "2", field: "x\ud800"}]
    path.write_text("".join(json.dumps(own) + "\n" for own in records), encoding="utf-8")
    assert "\\ud83d" in path.read_text(encoding="utf-8"), "a whole pair is a character"
    with pytest.raises(RocktokensError, match=r"data\.jsonl, line 2 has an escape of half a character"):
        make_task(JsonlTask(name="jsonl", path=str(path)))
