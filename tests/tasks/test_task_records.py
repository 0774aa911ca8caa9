"""Records in the shapes people have them: conversations, several answers, some without; errors that name the line."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocktokens.config import HubTask, JsonlTask, parse_config
from rocktokens.errors import RocktokensError
from rocktokens.evaluation.evaluate import _settings
from rocktokens.knockout.knockout import _inputs_digest, _sampling, _task_and_prompts
from rocktokens.knockout.records import Conditions, digest
from rocktokens.run_dir import RunDir
from rocktokens.tasks import make_task
from rocktokens.tasks.base import DatasetTask, prompts_to_grade, require_answers, ungraded_note
from rocktokens.tasks.graders import make_grader
from rocktokens.tasks.grading import is_correct
from rocktokens.tasks.records import dataset_task
from rocktokens.types import Message, Prompt

USER, ASSISTANT, SYSTEM = ({"role": role, "content": f"says {role}"} for role in ("user", "assistant", "system"))


def task_of(*records: dict[str, Any], **fields: Any) -> DatasetTask:
    section = JsonlTask(name="jsonl", path="d.jsonl", **fields)
    return dataset_task(section, ((f"line {number}", own) for number, own in enumerate(records, start=1)))


def prompt_of(record: dict[str, Any], **fields: Any) -> Prompt:
    [prompt] = task_of(record, prompt_field="messages", **fields).items
    return prompt


texts = st.text(max_size=12)
conversations = st.builds(
    lambda system, pairs, last: [
        *([("system", system)] if system is not None else []),
        *(turn for asked, replied in pairs for turn in (("user", asked), ("assistant", replied))),
        *last,
    ],
    st.none() | texts,
    st.lists(st.tuples(texts, texts), max_size=3),
    st.builds(lambda asked, reply: [("user", asked), *([("assistant", reply)] if reply is not None else [])],
              texts, st.none() | texts),
)  # fmt: skip


def openai(turns: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in turns]


def in_parts(turns: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": [{"type": "text", "text": own} for own in text]} for role, text in turns]


def sharegpt(turns: list[tuple[str, str]]) -> list[dict[str, Any]]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[role], "value": text} for role, text in turns]


@settings(max_examples=60, deadline=None)
@given(conversations, st.none() | texts)
def test_every_shape_of_a_conversation_is_one_prompt(turns, answer):
    """The prompt is all but a last message of the assistant, which answers unless a field does."""
    replied = turns[-1][0] == "assistant"
    asked = turns[:-1] if replied else turns
    expected_answer = answer if answer is not None else turns[-1][1] if replied else None
    for shape in (openai, in_parts, sharegpt):
        record = {"messages": shape(turns), "answer": answer}
        prompt = task_of(record, {"messages": [USER], "answer": "1"}, prompt_field="messages").items[0]
        assert (prompt.text, prompt.answer) == (asked[-1][1], expected_answer)
        seen = [(own.role, own.content) for own in prompt.messages] or [("user", prompt.text)]
        assert seen == asked
        assert bool(prompt.messages) == (len(asked) > 1), "a single turn is what a plain question is"


def test_a_conversation_of_one_turn_is_the_plain_question():
    plain = task_of({"question": "1 + 1?", "answer": "2"}).items
    assert task_of({"question": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}).items == plain


def test_template_and_system_prompt_go_around_the_turns():
    prompt = prompt_of(
        {"messages": [USER, ASSISTANT, USER]}, answer_field="", template="<{prompt}>", system_prompt="Be."
    )
    assert prompt.messages == (
        Message("system", "Be."), Message("user", "says user"), Message("assistant", "says assistant"),
        Message("user", "<says user>"),
    )  # fmt: skip
    assert prompt.text == "<says user>"
    [plain] = task_of({"question": "q", "answer": "a"}, system_prompt="Be.").items
    assert plain.messages == (Message("system", "Be."), Message("user", "q"))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (["4", "four"], ("4", "four")),
        (["4"], "4"),
        ([4, 4.5, "4"], ("4", "4.5")),
        ([{"role": "assistant", "content": "#### 4"}], "#### 4"),
    ],
)
def test_answers_may_be_several(answer, expected):
    assert task_of({"question": "q", "answer": answer}).items[0].answer == expected


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 6).map(str), min_size=1, max_size=4), st.integers(0, 6), st.sampled_from(["math", "exact"])
)
def test_a_response_is_right_if_any_of_the_answers_is(answers, given_answer, grading):
    task = task_of({"question": "q", "answer": answers}, grading=grading)
    response = f"So it is {given_answer}"
    assert task.grade(task.items[0], response) == any(is_correct(response, own, grading) for own in answers)


def test_an_object_is_for_a_grader_alone():
    record = {"question": "q", "answer": {"tests": ["a", "b"]}}
    with pytest.raises(RocktokensError, match=r"d.jsonl, line 1, 'answer' is neither text nor number .*task.grader"):
        task_of(record)
    [prompt] = task_of(record, grader="module:function").items
    assert isinstance(prompt.answer, str) and json.loads(prompt.answer) == {"tests": ["a", "b"]}


def test_records_without_an_answer_are_probed_but_not_graded():
    records = [{"question": f"q{n}", **({"answer": str(n)} if n % 3 else {})} for n in range(12)]
    task = task_of(*records)
    everything, graded = task.prompts(12, seed=4), task.prompts(12, seed=4, gradable=True)
    assert len(everything) == 12
    assert graded == [prompt for prompt in everything if prompt.answer is not None], "the order is the same"
    assert prompts_to_grade(task, 5, seed=4) == graded[:5]
    assert ungraded_note(task) == "4 of 12 prompts of jsonl:d.jsonl have no answer: accuracy is that on the others"
    assert ungraded_note(task_of({"question": "q", "answer": "1"})) == ""
    with pytest.raises(RocktokensError, match="has no answer, so nothing can be graded"):
        require_answers(task, everything)
    with pytest.raises(RocktokensError, match=r"has no answer, so nothing can be graded: set evaluation.task.answer_f"):
        prompts_to_grade(task_of(*records, answer_field=""), 5)
    with pytest.raises(RocktokensError, match=r"line 1 has no 'answer'.*task.answer_field, or leave it empty"):
        task_of(*({"question": "q"} for _ in range(3)))


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "has no message: a prompt ends with a message of the user"),
        ([ASSISTANT], "has no message before the assistant's answer"),
        ([USER, ASSISTANT, ASSISTANT], "ends with a message of 'assistant' before the assistant's answer"),
        ([USER, SYSTEM], "ends with a message of 'system'"),
        ([USER, "hello"], "message 2 is no object with role and content"),
        ([{"role": "user"}], "message 1 is no object with role and content"),
        ([{"role": "user", "content": None}], "message 1 holds something other than text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 1 holds something other than text"),
        ([USER, {**ASSISTANT, "tool_calls": [{}]}], "message 2 holds something other than text, such as a tool call"),
        (
            [{"from": "alien", "value": "x"}],
            "message 1 is from 'alien': use one of human, user, gpt, assistant, system",
        ),
    ],
)
def test_a_malformed_conversation_is_named_by_file_line_and_message(messages, sentence):
    with pytest.raises(RocktokensError) as refused:
        task_of({"messages": [USER], "answer": "1"}, {"messages": messages}, prompt_field="messages")
    assert str(refused.value).startswith("d.jsonl, line 2, 'messages'")
    assert sentence in str(refused.value)


def test_two_system_messages_are_refused():
    with pytest.raises(RocktokensError, match=r"line 1, 'messages' begins with a system message of its own"):
        prompt_of({"messages": [SYSTEM, USER]}, answer_field="", system_prompt="Be brief.")


def test_a_folder_of_parquet_has_the_same_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "chat").mkdir()
    rows = [{"chat": [USER, ASSISTANT, USER], "gold": [str(n), "same"], "key": f"k{n}"} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat" / "test.parquet")
    fields = {"prompt_field": "chat", "answer_field": "gold", "id_field": "key", "system_prompt": "Be."}
    section = HubTask(name="hub", path=str(tmp_path / "chat"), split="test", **fields)
    task = make_task(section)
    assert isinstance(task, DatasetTask)
    assert task.items == task_of(*rows, **fields).items
    assert task.revision is None, "what is not of the Hub has no commit"
    with pytest.raises(RocktokensError, match=r"task.revision is 'main', but task.path .* is on this disk"):
        make_task(section.model_copy(update={"revision": "main"}))


def test_what_results_of_plain_tasks_are_filed_under_has_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Digests from before conversations and graders existed: evaluations, knock-outs and journals stay valid."""
    monkeypatch.chdir(tmp_path)
    lines = (json.dumps({"question": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(10))
    Path("d.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    task = 'name = "jsonl"\npath = "d.jsonl"\n'
    models = 'student = "s"\nteacher = "t"\n'
    text = f'[run]\ndirectory = "r"\n[models]\n{models}[task]\n{task}[evaluation.task]\n{task}'
    config = parse_config(text)
    _, prompts = _task_and_prompts(config)
    inputs = _inputs_digest(config, "m", prompts, _sampling(config))
    assert inputs == "6630bd49ec35df1c1f1cbb6941625192e559023ffbb58de3b87c18407daca7e3"
    filed = digest(_settings(RunDir("r"), config, "pebbles-student", 0))
    assert filed == "5381d994f73c72718b89eccf95aaa709d6fcebf749fa7c93d53ab9f154599f2d"
    conditions = Conditions(
        model="m", tokenizer_sha256="t", config_sha256="c", eos_ids=[1], versions={"torch": "2"}, dtype="float32",
        device="cpu", task=config.task.model_dump(mode="json"), prompts_sha256="p", num_prompts=3, num_samples=1,
        temperature=1.0, max_new_tokens=9, batch_size=4, seed=0,
    )  # fmt: skip
    assert conditions.digest == "0b2d0ad69567d32fa94bd6f38dd38d63d5d0f03344905f2d5709e65fc2a3f9ad"


def test_what_comes_before_the_last_message_is_part_of_what_a_knockout_is_filed_under():
    config = parse_config('[run]\ndirectory = "r"\n[models]\nstudent = "s"\nteacher = "t"\n')
    conversations = [(), *((Message("system", own), Message("user", "text")) for own in "ab")]
    prompts = [Prompt("p", "text", "1", messages) for messages in conversations]
    assert len({_inputs_digest(config, "m", [prompt], _sampling(config)) for prompt in prompts}) == 3


PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("lines", "toml"), re.findall(r"```jsonl\n(.*?)```\s+```toml\n(.*?)```", PAGE, re.S))
def test_the_examples_of_the_page_are_read_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines, toml):
    monkeypatch.chdir(tmp_path)
    config = parse_config(f'[run]\ndirectory = "r"\n[models]\nstudent = "s"\nteacher = "t"\n{toml}')
    assert isinstance(config.task, JsonlTask)
    Path(config.task.path).write_text(lines, encoding="utf-8")
    task = make_task(config.task)
    assert isinstance(task, DatasetTask) and len(task.items) == len(lines.splitlines())
    for prompt in task.prompts(9, gradable=True):
        assert all(task.grade(prompt, answer) for answer in prompt.answers)


@pytest.mark.parametrize(("code", "toml"), re.findall(r"```python\n(.*?)```\s+```toml\n(.*?)```", PAGE, re.S))
def test_the_graders_of_the_page_grade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code, toml):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    Path(code.splitlines()[0].removeprefix("# ")).write_text(code, encoding="utf-8")
    section = JsonlTask.model_validate(tomllib.loads(toml)["evaluation"]["task"])
    grader, prompt = make_grader(section), Prompt("p", "Who?", ("Goethe", "Johann Wolfgang von Goethe"))
    assert grader is not None
    assert [grader.grade(prompt, text) for text in ("It was Goethe.", "It was Schiller.")] == [True, False]
