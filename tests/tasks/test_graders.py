"""Graders of one's own: functions and commands, what identifies them, and one sentence for every way to fail."""

import gc
import json
import os
import sys
import time
from pathlib import Path

import pytest

from rocktokens.config import JsonlTask
from rocktokens.errors import RocktokensError
from rocktokens.tasks.base import DatasetTask
from rocktokens.tasks.graders import CommandGrader, FunctionGrader, grader_files, grader_identity, make_grader
from rocktokens.types import Message, Prompt

PROMPT = Prompt("p1", "2 + 2?", ("4", "four"), (Message("system", "Be brief."), Message("user", "2 + 2?")))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and modules and paths as they were afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def section(grader: str | list[str], **fields: float) -> JsonlTask:
    return JsonlTask(name="jsonl", path="d.jsonl", grader=grader, **fields)  # pyright: ignore[reportArgumentType]


def command(path: Path, body: str, timeout: float = 20.0) -> CommandGrader:
    """A grader that runs ``body`` for each question ``q``, in a Python of its own."""
    loop = f"import json, os, sys, time\nfor line in sys.stdin:\n    q = json.loads(line)\n    {body}\n"
    path.write_text(loop, encoding="utf-8")
    return CommandGrader([sys.executable, str(path)], timeout)


def test_a_function_of_the_working_directory_gets_response_and_prompt(here: Path):
    (here / "ownfn.py").write_text("seen = []\ndef grade(response, prompt):\n    seen.append((response, prompt))\n"
                                   "    return response in prompt.answers\n")  # fmt: skip
    task = DatasetTask("t", [PROMPT], "math", make_grader(section("ownfn:grade")))
    task.require_grader()
    assert [task.grade(PROMPT, text) for text in ("four", "five")] == [True, False]
    assert sys.modules["ownfn"].seen == [("four", PROMPT), ("five", PROMPT)]
    assert task.answer("The answer is 4.") is None, "what a grader of one's own reads is not known"
    assert task.can_grade(Prompt("p2", "no answer")), "it may need none"


def test_what_numpy_calls_true_is_true(here: Path):
    (here / "ownnp.py").write_text("import numpy\ndef grade(response, prompt):\n    return numpy.float64(1) > 0\n")
    assert FunctionGrader("ownnp:grade").grade(PROMPT, "") is True


@pytest.mark.parametrize(
    ("source", "name", "sentence"),
    [
        (None, "ownmissing:grade", r"there is no module ownmissing in the working directory .* or fix the name"),
        (None, "ownmissing.inner:grade", r"there is no module ownmissing in the working directory"),
        ("import nosuchpackage", "owna:grade", r"cannot be imported \(ModuleNotFoundError: No module named 'nosuchp"),
        ("def grade(:", "owna:grade", r"cannot be imported \(SyntaxError: .*fix the module"),
        ("raise SystemExit(3)", "owna:grade", r"cannot be imported \(SystemExit: 3\)"),
        ("", "owna:grade", r"module owna \(.*owna\.py\) has no 'grade': name a function of it"),
        ("grade = 3", "owna:grade", r"has 'grade', which is no function"),
        ("def grade(response):\n    return True", "owna:grade", r"failed on a response to prompt 'p1' \(TypeError: "),
        ("def grade(r, p):\n    raise ValueError('one\\ntwo')", "owna:grade", r"\(ValueError: one\): fix the function"),
        ("def grade(r, p):\n    return 'yes'", "owna:grade", r"returned 'yes' for prompt 'p1': return True or False"),
        ("def grade(r, p):\n    return 1", "owna:grade", r"returned 1 for prompt 'p1'"),
    ],
)
def test_a_function_that_cannot_grade_is_one_sentence(here: Path, source: str | None, name: str, sentence: str):
    if source is not None:
        (here / "owna.py").write_text(source)
    with pytest.raises(RocktokensError, match=sentence) as refused:
        FunctionGrader(name).grade(PROMPT, "4")
    assert f"task.grader {name!r}" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_the_working_directory_hides_no_installed_module(here: Path):
    (here / "json.py").write_text("def grade(r, p):\n    return True\n")
    with pytest.raises(RocktokensError, match=r"module json \(.*json/__init__\.py\) has no 'grade'"):
        FunctionGrader("json:grade").require()


def test_a_command_is_asked_by_lines_and_started_once(tmp_path: Path):
    grader = command(tmp_path / "g.py", "print(json.dumps({'correct': q['response'] == str(os.getpid())}))")
    assert not grader.grade(PROMPT, "not the process")
    assert grader._child is not None
    assert grader.grade(PROMPT, str(grader._child._process.pid)), "the same process answers again"
    echo = command(tmp_path / "e.py", f"print(json.dumps(q == {json.loads(json.dumps(question('4')))!r}))")
    assert echo.grade(PROMPT, "4")


def question(response: str) -> dict:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    return {"id": "p1", "prompt": "2 + 2?", "messages": messages, "answers": ["4", "four"], "response": response}


def test_long_and_odd_responses_arrive_whole(tmp_path: Path):
    grader = command(
        tmp_path / "g.py", "print(json.dumps(len(q['response']) == 1_000_003 and q['response'][1] == '\\n'))"
    )
    assert grader.grade(PROMPT, "é\n\u2028" + "x" * 1_000_000)
    assert not grader.grade(PROMPT, "short")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("sys.exit('no more')", r"ended with exit code 1 before it had answered, saying 'no more' \(prompt 'p1'\)"),
        ("os.kill(os.getpid(), 9)", r"ended with exit code -9 before it had answered"),
        ("print('True')", r"answered 'True' for prompt 'p1': answer true, false or"),
        ("print(1)", r"answered '1' for prompt 'p1'"),
        ("print()", r"answered '' for prompt 'p1'"),
        ("print('{\"correct\": null}')", r"for prompt 'p1': answer true, false or"),
        ("print('[' * 100_000)", r"for prompt 'p1': answer true, false or"),
        ("os.write(1, b'true\\ntrue\\n')", r"answered by more than one line"),
        ("os.close(0); os.close(1); time.sleep(9)", r"closed its output before it had answered"),
        ("os.write(1, b'x' * 2_000_000)", r"answered by a line without end"),
        ("os.write(1, b'\\xff\\xfe\\n')", r"for prompt 'p1': answer true, false or"),
    ],
)
def test_a_command_that_dies_or_answers_nonsense_is_one_sentence(tmp_path: Path, body: str, sentence: str):
    grader = command(tmp_path / "g.py", body)
    with pytest.raises(RocktokensError, match=sentence) as refused:
        grader.grade(PROMPT, "4")
    assert str(refused.value).startswith(f"task.grader `{sys.executable} {tmp_path / 'g.py'}` ")
    assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 600
    assert grader._child is None, "nothing is left of it"


def test_a_line_that_nobody_asked_for_is_noticed(tmp_path: Path):
    """It is written after the answer was read, and before the next question: two files tell each side when."""
    read, written = tmp_path / "read", tmp_path / "written"
    wait = f"while not os.path.exists({str(read)!r}): time.sleep(0.01)"
    body = f"print('true', flush=True)\n    {wait}\n    print('true', flush=True); open({str(written)!r}, 'w').close()"
    grader = command(tmp_path / "g.py", body)
    assert grader.grade(PROMPT, "4")
    read.touch()
    while not written.exists():
        time.sleep(0.01)
    with pytest.raises(RocktokensError, match="wrote a line that was not asked for"):
        grader.grade(PROMPT, "4")


@pytest.mark.parametrize(
    "script",
    [
        "import time\ntime.sleep(60)",
        "for line in open(0):\n    pass",
        "import os, time\nos.close(0)\ntime.sleep(60)",
        "import os, time\nos.read(0, 1)\nwhile True:\n    print('.', end='')\n    time.sleep(0.05)",
    ],
)
def test_a_command_that_does_not_answer_is_ended(tmp_path: Path, script: str):
    """Also where it does not read what is more than a pipe holds."""
    (tmp_path / "g.py").write_text(script)
    grader, began = CommandGrader([sys.executable, str(tmp_path / "g.py")], 0.3), time.monotonic()
    with pytest.raises(RocktokensError, match=r"has not answered within 0.3 seconds .* raise task.grader_timeout"):
        grader.grade(PROMPT, "x" * 300_000)
    assert time.monotonic() - began < 10 and grader._child is None


def test_a_program_that_is_not_there_is_named_before_anything_is_answered(tmp_path: Path):
    with pytest.raises(RocktokensError, match=r"`no-such-program --flag` cannot be started: there is no program 'no-s"):
        CommandGrader(["no-such-program", "--flag"], 1.0).require()
    (tmp_path / "broken").write_text("#!/no/such/interpreter\n")
    (tmp_path / "broken").chmod(0o755)
    with pytest.raises(RocktokensError, match="cannot be started"):
        CommandGrader([str(tmp_path / "broken")], 1.0).grade(PROMPT, "4")


def test_the_child_ends_with_its_grader(tmp_path: Path):
    grader = command(tmp_path / "g.py", "print('true')")
    assert grader.grade(PROMPT, "4") and grader._child is not None
    process = grader._child._process
    assert process.poll() is None
    del grader
    gc.collect()
    assert process.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_the_identity_is_name_and_content(here: Path):
    (here / "ownid.py").write_text("def grade(r, p):\n    return True\n")
    function, script = section("ownid:grade"), section(["python", "ownid.py", "--strict"])
    assert grader_files(function) == [here / "ownid.py"] and grader_files(script) == [Path("ownid.py")]
    first = [
        grader_identity(own) for own in (function, script, section("ownid:other"), section(["python", "ownid.py"]))
    ]
    assert len({json.dumps(own) for own in first}) == 4
    (here / "ownid.py").write_text("def grade(r, p):\n    return False\n")
    assert grader_identity(function) != first[0] and grader_identity(script) != first[1]
    (here / "ownid.py").write_text("def grade(r, p):\n    return True\n")
    assert [grader_identity(own) for own in (function, script)] == first[:2]
    assert grader_identity(section("ownnowhere:grade")).keys() == {"grader_sha256"}
    assert grader_identity(JsonlTask(name="jsonl", path="d.jsonl")) == {}, "built-in gradings are in the config"
