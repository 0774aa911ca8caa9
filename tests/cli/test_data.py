"""Data and graders as people have them, through every command: conversations, prompts without answers, own graders."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import changed, refuse, require_sound, rocktokens, snapshot, succeed
from small_study import write_study
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from rocktokens.config import JsonlTask, load_config
from rocktokens.evaluation.records import Ledger
from rocktokens.knockout.knockout import is_current
from rocktokens.knockout.records import KnockoutSweep
from rocktokens.report.explorer.server import make_app
from rocktokens.report.explorer.shelf import Shelf
from rocktokens.report.page.answers import five_answers
from rocktokens.report.page.render import report_html
from rocktokens.report.views.grades import Grades
from rocktokens.report.views.run_view import RunView
from rocktokens.rollouts.store import read_rollouts
from rocktokens.run_dir import RunDir
from rocktokens.studies.config import load_study
from rocktokens.studies.preflight import _named
from rocktokens.tasks import make_task
from training.tiny_pair import byte_tokenizer, tiny_llama

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GRADE = """import json, sys
for line in sys.stdin:
    question = json.loads(line)
    open("asked.txt", "a").write("x")
    print(json.dumps({"correct": len(question["response"]) % 2 == RIGHT}))
"""
N_RECORDS = 24


def write_models(folder: Path) -> None:
    for name, seed in (("early", 1), ("late", 3), ("teacher", 2)):
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = CHATML
        tiny_llama(16, 1, seed).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def turns(n: int) -> list[dict[str, str]]:
    texts = (f"{n}?", str(n), f"{n}+1?", f"#### {n + 1}")
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=True)]


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def config_text(task: str, evaluation: str) -> str:
    return f"""
[run]
directory = "run"
[models]
teacher = "teacher"
device = "cpu"
[task]
name = "jsonl"
{task}
[rollouts]
max_completion_length = 6
temperature = 0.5
[trace]
checkpoints = ["early", "late"]
num_prompts = {N_RECORDS}
top_k = 0
[find]
k = 2
require = "any"
min_prompts = 1
[gradients]
batches = 2
[knockout]
num_prompts = 4
top = 1
matched = 0
never = 1
[evaluation]
num_prompts = 5
{evaluation}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with a chat template, and data in several shapes."""
    folder = tmp_path_factory.mktemp("data")
    write_models(folder)
    numbers = range(N_RECORDS)
    write_lines(folder / "chat.jsonl", [{"messages": turns(n)} for n in numbers])
    write_lines(folder / "prompts.jsonl", [{"prompt": turns(n)[:1]} for n in numbers])
    write_lines(
        folder / "mixed.jsonl", [{"question": f"{n}?", "answer": [f"{n}", "x"] if n % 2 else None} for n in numbers]
    )
    write_lines(
        folder / "sharegpt.jsonl",
        [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "long " * 40}]}],
    )
    (folder / "odd.py").write_text("def no(response, prompt):\n    return 'no'\n")
    return folder


@pytest.fixture(scope="module")
def chatted(folder: Path) -> Path:
    """A run on conversations with a system prompt, graded by a command."""
    task = 'path = "chat.jsonl"\nprompt_field = "messages"\nsystem_prompt = "Add."\n'
    evaluation = f'[evaluation.task]\nname = "jsonl"\n{task}grader = [{json.dumps(sys.executable)}, "grade.py"]\n'
    (folder / "chat.toml").write_text(config_text(task, evaluation), encoding="utf-8")
    (folder / "grade.py").write_text(GRADE.replace("RIGHT", "0"), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in (("trace", "chat.toml"), ("find", "run"), ("knockout", "run"), ("evaluate", "run")):
            succeed(*command)
    return folder / "run"


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])


def asked() -> int:
    """How often the grader has been asked."""
    return len(Path("asked.txt").read_text())


def test_a_run_on_conversations_answers_what_the_template_renders(chatted: Path):
    require_sound(chatted)
    tokenizer = AutoTokenizer.from_pretrained("late")
    rollouts = read_rollouts(RunDir(chatted), "rollouts/probe/checkpoint=1.parquet")
    assert len(rollouts) == N_RECORDS
    for rollout in rollouts:
        number = int(rollout.prompt_id.removeprefix("jsonl-"))
        messages = [{"role": "system", "content": "Add."}, *turns(number)[:-1]]
        seen = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert np.array_equal(rollout.prompt_ids, seen)


def test_a_changed_grader_makes_evaluation_and_knockout_stale_but_decodes_nothing_again(chatted: Path):
    run, config = RunDir(chatted), load_config("chat.toml")

    def accuracies() -> tuple[list[float], float]:
        evaluations = [own.accuracy for own in Ledger.load(chatted / "evaluations.json")]
        return evaluations, KnockoutSweep.load(chatted / "knockout.json").baseline.accuracy

    def decoded() -> dict[str, str]:
        return {path: sha for path, sha in snapshot(chatted).items() if path.startswith("knockout/")}

    (evaluated, free), kept, calls = accuracies(), decoded(), asked()
    assert kept, "answers are in the journal"
    assert is_current(run, config)
    succeed("evaluate", "run")
    assert (accuracies(), asked()) == ((evaluated, free), calls), "nothing is graded twice"
    Path("grade.py").write_text(GRADE.replace("RIGHT", "1"), encoding="utf-8")
    assert not is_current(run, config)
    succeed("knockout", "run")
    succeed("evaluate", "run")
    assert is_current(run, config) and decoded() == kept
    assert accuracies() == (pytest.approx([*evaluated, 1 - evaluated[-1]]), pytest.approx(1 - free))


def test_a_page_never_runs_the_grader_and_says_so(chatted: Path):
    calls, view = asked(), RunView.open(chatted)
    report_html([view])
    with TestClient(make_app(Shelf([chatted]), "t"), base_url="http://localhost") as client:
        bans = client.get("/t/api/runs/0/knockouts").json()["bans"]
        chosen = next(own for own in bans if own["n_rollouts"])
        pairs = client.get(f"/t/api/runs/0/knockouts/{chosen['ids'][0]}").json()["pairs"]
    assert {(own["free_correct"], own["banned_correct"]) for own in pairs} == {(None, None)}
    assert asked() == calls
    assert view.replay is not None
    named = replace(view.replay, task={**view.replay.task, "grader": ["touch", "owned"]})
    rollout = read_rollouts(view.run, "rollouts/probe/checkpoint=1.parquet")[0]
    for recorded, right in ((named, {None}), (view.replay, {True, False})):
        grades = Grades(recorded, "probe prompts")
        assert grades.is_right(rollout.prompt_id, view.prompt_text(rollout), "#### 1") in right
        assert bool(grades.unknown_because) == (recorded is named)
    assert not Path("owned").exists()


def test_prompts_without_answers_give_everything_but_accuracy(folder: Path):
    task = 'path = "prompts.jsonl"\nprompt_field = "prompt"\nanswer_field = ""\n'
    text = config_text(task, f'[evaluation.task]\nname = "jsonl"\n{task}').replace('"run"', '"silent"')
    Path("silent.toml").write_text(text, encoding="utf-8")
    result = succeed("run", "silent.toml", "--json").record
    why = "evaluation.task.answer_field is empty, so there are no answers to measure accuracy by"
    assert {"trace", "find", "gradients", "report"} == set(result["made"])
    assert list(result["skipped"]) == ["knockout"] and result["skipped"]["knockout"].startswith(why)
    page = Path("silent/report.html").read_text(encoding="utf-8")
    assert (
        f"Left out: {why}" in page and "Answers are not marked as right or wrong: the prompts have no answers." in page
    )
    assert "run <code>rocktokens knockout" not in page and "(<code>rocktokens study</code>)" not in page
    found = succeed("find", "silent").stdout
    assert f"left out: evaluate and knockout; {why}" in found and "rocktokens knockout" not in found
    overview = RunView.open("silent")
    unknown = [own.sentence.startswith(f"Not known: {why}") for own in five_answers(overview)]
    assert unknown == [False, False, False, True, True]
    assert overview.ungraded.startswith(why) and overview.unmarked == "the prompts have no answers"
    with TestClient(make_app(Shelf([Path("silent")]), "t"), base_url="http://localhost") as client:
        assert client.get("/t/api/runs/0").json()["ungraded"].startswith(why)
    for verb in ("evaluate", "knockout"):
        refuse(verb, "silent", naming=("has no answer, so nothing can be graded", "evaluation.task.answer_field"))
    checked = {own["name"]: own for own in rocktokens("check", "silent.toml", "--json").record["findings"]}
    assert checked["evaluation"]["level"] == "warn" and checked["evaluation"]["remedy"].startswith(why)
    assert "grader" not in checked


def test_of_mixed_data_only_prompts_with_an_answer_are_graded(chatted: Path):
    text = Path("chat.toml").read_text().split("[evaluation.task]")[0]
    Path("mixed.toml").write_text(text + '[evaluation.task]\nname = "jsonl"\npath = "mixed.jsonl"\n', encoding="utf-8")
    checked = {own["name"]: own for own in rocktokens("check", "mixed.toml", "--json").record["findings"]}
    note = (
        f"{N_RECORDS // 2} of {N_RECORDS} prompts of jsonl:mixed.jsonl have no answer: accuracy is that on the others"
    )
    assert checked["evaluation"]["remedy"] == note
    assert checked["evaluation"]["measured"] == {"asked": 5, "available": 5, "answered": 5}
    measured = {"answered": 5, "shortest": 1, "longest": 2, "is_right": True}
    assert (checked["grader"]["level"], checked["grader"]["measured"]) == ("ok", measured)
    options = changed("evaluation.task.name=wordmath", "evaluation.task.name=jsonl", "evaluation.task.path=mixed.jsonl")
    outcome = succeed(
        "evaluate", "run", "--checkpoint", "late", *changed("evaluation.num_prompts=99"), *options, "--json"
    )
    [record] = outcome.record["evaluations"]
    assert note in outcome.stderr and record["n_prompts"] == N_RECORDS // 2
    assert all(int(name.removeprefix("jsonl-")) % 2 for name in record["prompt_ids"])


@pytest.mark.parametrize(
    ("settings", "naming"),
    [
        (("grader=nowhere:grade",), ("'nowhere:grade'", "no module nowhere")),
        (("grader=odd:yes",), ("'odd:yes'", "odd.py) has no 'yes'")),
        (("grader=odd:no",), ("'odd:no'", "returned 'no'", "return True or False")),
        (("grader=odd",), ("evaluation.task.grader = 'odd'", "module:function")),
        (("grader=odd:no", "grading=exact"), ("grading = 'exact' and grader are both set",)),
        (('grader=["no-such-program"]',), ("no-such-program", "install it")),
        (('grader=["cat"]',), ("task.grader `cat` answered", "true, false")),
        (('grader=["sleep", "9"]', "grader_timeout=0.2"), ("has not answered within 0.2 seconds", "grader_timeout")),
        (("prompt_field=question",), ("chat.jsonl, line 1 has no 'question' (it has 'messages')", "task.prompt_field")),
        (("messages_field=x",), ("messages_field is not a known key", "task.prompt_field")),
    ],
)
def test_what_cannot_grade_is_refused_and_nothing_is_written(chatted: Path, settings: tuple, naming: tuple):
    before = snapshot(chatted)
    options = changed("evaluation.num_prompts=4", *(f"evaluation.task.{own}" for own in settings))
    outcome = rocktokens("evaluate", "run", *options)
    [sentence] = [line for line in outcome.stderr.splitlines() if line.startswith("rocktokens: ")]
    assert outcome.code == 2 and [name for name in naming if name not in sentence] == [], outcome.stderr
    assert snapshot(chatted) == before


def test_messages_that_no_template_renders_are_refused_before_a_run_begins():
    """The template of the embedded pair takes every message that is not the user's for the assistant's."""
    models = ("models.student=pebbles-student", "models.teacher=pebbles-teacher", "run.directory=new")
    for verb, more in (("distill", ["trace.checkpoints=[]"]), ("trace", ['trace.checkpoints=["pebbles-student"]'])):
        naming = ("takes the system message for the assistant's", "task.system_prompt")
        refuse(verb, "chat.toml", *changed(*models, *more), naming=naming)
        assert snapshot(Path("new")) == {}


def test_a_study_without_answers_is_refused_and_its_grader_may_not_change(tmp_path: Path):
    study = write_study(tmp_path, "study")
    text = study.read_text().replace(
        "[base.models]", '[base.task]\nname = "jsonl"\npath = "mixed.jsonl"\n[base.models]'
    )
    task = '[base.evaluation.task]\nname = "jsonl"\npath = "mixed.jsonl"\n'
    study.write_text(text + task + 'answer_field = ""\n', encoding="utf-8")
    refuse("study", study, naming=("base.evaluation.task.answer_field is empty", "no arm be compared", "grader"))
    study.write_text(text + task + 'grader = "nowhere:grade"\n', encoding="utf-8")
    refuse("study", study, naming=("'nowhere:grade'", "no module nowhere"))
    (tmp_path / "ownstudy.py").write_text("def grade(response, prompt):\n    return True\n")
    named = dict(
        _named(load_study(study, [f"base.evaluation.task.grader={json.dumps(['python', f'{tmp_path}/ownstudy.py'])}"]))
    )
    assert named["base.evaluation.task.grader (ownstudy.py)"] == f"{tmp_path}/ownstudy.py"


@pytest.mark.parametrize(
    ("data", "fields", "comment"),
    [
        ("chat.jsonl", ("messages", "answer", "math"), "the assistant's last message is the answer"),
        ("prompts.jsonl", ("prompt", "", "math"), "no answers found"),
        ("mixed.jsonl", ("question", "answer", "math"), "graded against it"),
        ("sharegpt.jsonl", ("conversations", "", "math"), "the answers are prose"),
    ],
)
def test_init_recognises_the_shape_of_the_data(tmp_path: Path, data: str, fields: tuple, comment: str):
    text = succeed("init", tmp_path / "r.toml", "--student", "late", "--teacher", "teacher", "--data", data, "--json")
    task = load_config(tmp_path / "r.toml").task
    assert isinstance(task, JsonlTask) and comment in text.record["text"]
    assert (task.prompt_field, task.answer_field, task.grading) == fields
    assert make_task(task).prompts(1)
