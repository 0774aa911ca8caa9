"""Every mistake a user can make ends with code 2 and one sentence that names it, and costs nothing that was there."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from command_line import FinishedRun, changed, other_tokenizer, refuse, require_sound, rocktokens, snapshot
from safetensors.torch import load_file, save_file

from rocktokens.classes import TokenClasses
from rocktokens.models import pebbles
from rocktokens.run_dir import RunDir
from rocktokens.types import RockSet, RockToken


@pytest.fixture(scope="module")
def before(finished: FinishedRun) -> dict[str, str]:
    """What the finished run holds before any of these mistakes."""
    return snapshot(finished.path.parent)


@pytest.fixture(autouse=True)
def _nothing_is_lost(finished: FinishedRun, before: dict[str, str]) -> Iterator[None]:
    yield
    after = snapshot(finished.path.parent)
    assert {path: after.get(path) for path in before} == before


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """The directory of a run that does not exist yet."""
    return tmp_path / "new"


def broken_student(directory: Path) -> Path:
    """The embedded student with one weight that is not a number."""
    shutil.copytree(pebbles.directory("student"), directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


# The config


@pytest.mark.parametrize("verb", ["check", "distill", "trace"])
def test_missing_config(verb: str, tmp_path: Path):
    refuse(verb, tmp_path / "no.toml", naming=("no.toml", "does not exist"))


def test_a_run_where_a_config_is_wanted(finished: FinishedRun):
    refuse("trace", finished.path, naming=(f"config file {finished.path} is a folder", "its config.toml"))


def test_toml_syntax(tmp_path: Path):
    (tmp_path / "bad.toml").write_text("[run]\ndirectory = \n")
    refuse("distill", tmp_path / "bad.toml", naming=("bad.toml", "not valid TOML", "line 2"))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[run]\ndirectory = 'a'\x00"], ids=["not text", "null byte"])
def test_a_config_that_is_no_text(tmp_path: Path, content: bytes):
    (tmp_path / "bad.toml").write_bytes(content)
    refuse("distill", tmp_path / "bad.toml", naming=("bad.toml",))


@pytest.mark.parametrize(
    ("setting", "naming"),
    [
        ("training.max_step=3", ("training.max_step", "did you mean training.max_steps?")),
        ("trainig.max_steps=3", ("trainig", "did you mean training")),
        ("training.max_steps=zero", ("training.max_steps", "'zero'")),
        ("training.max_steps=0", ("training.max_steps", "0")),
        ("training.learning_rate=nan", ("training.learning_rate",)),
        ("task.name=wordmaths", ("task.name", "'wordmaths'", "jsonl")),
        ("policy.name=rocks", ("policy.rocks",)),
        ("nonsense", ("nonsense", "section.key=value")),
        ("run=1", ("run=1", "section.key=value")),
        ("run.directory.x=1", ("run.directory.x=1",)),
        ("models.device=tpu:9:9", ("models.device", "tpu:9:9")),
        ("models.student=/no/where", ("/no/where",)),
        ("rollouts.num_generations=3", ("rollouts.num_generations", "3")),
        ("policy.name=rocks --set policy.rocks=no.json", ("no.json", "rocktokens find")),
        ("policy.name=rocks --set policy.rocks=/", ("/ cannot be read (Is a directory)", "rocktokens find")),
        ("run.directory=''", ("run.directory = ''",)),
        ("run.directory=/proc/x/y", ("/proc/x/y cannot be created", "run.directory")),
    ],
)
def test_bad_settings(finished: FinishedRun, new: Path, setting: str, naming: tuple[str, ...]):
    settings = setting.split(" --set ")
    refuse("distill", finished.config, *changed(f"run.directory={new}", *settings), naming=naming)
    assert snapshot(new) == {}


def test_a_run_directory_that_is_a_file(finished: FinishedRun, new: Path):
    new.write_text("mine")
    refuse("distill", finished.config, *changed(f"run.directory={new}"), naming=(str(new), "is a file"))
    assert new.read_text() == "mine"


def test_a_run_directory_without_permission(finished: FinishedRun, tmp_path: Path):
    run = shutil.copytree(finished.path, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    for folder in (run, tmp_path):
        folder.chmod(0o500)
    try:
        if os.access(run, os.W_OK):
            pytest.skip("this user may write everywhere")
        elsewhere = changed(f"run.directory={tmp_path}/new")
        refuse("distill", finished.config, *elsewhere, naming=(f"{tmp_path}/new", "permission denied"))
        refuse("find", run, naming=("cannot be written (permission denied)", "make it readable and writable"))
    finally:
        for folder in (tmp_path, run):
            folder.chmod(0o700)


# Models and data


def test_another_tokenizer(finished: FinishedRun, new: Path, tmp_path: Path):
    teacher = other_tokenizer(tmp_path / "teacher")
    settings = changed(f"run.directory={new}", f"models.teacher={teacher}")
    refuse("distill", finished.config, *settings, naming=("vocabularies", "'7'", "'8'"))
    assert snapshot(new) == {}
    students = json.dumps([str(finished.path / "checkpoints/step-0")])
    refuse("trace", finished.config, *settings, *changed(f"trace.checkpoints={students}"), naming=("vocabularies",))


def test_rocks_of_another_tokenizer(finished: FinishedRun, new: Path, tmp_path: Path):
    rocks = json.loads((finished.path / "rocks.json").read_text(encoding="utf-8"))
    (tmp_path / "rocks.json").write_text(json.dumps({**rocks, "tokenizer_sha256": "f" * 64}))
    settings = changed(f"run.directory={new}", "policy.name=rocks", f"policy.rocks={tmp_path}/rocks.json")
    refuse("distill", finished.config, *settings, naming=("ffffffffffff", "rocktokens find"))


@pytest.mark.parametrize("content", ["[]", '{"schema_version": 1}'])
def test_rocks_that_are_none(finished: FinishedRun, new: Path, tmp_path: Path, content: str):
    (tmp_path / "rocks.json").write_text(content)
    settings = changed(f"run.directory={new}", "policy.name=rocks", f"policy.rocks={tmp_path}/rocks.json")
    refuse("distill", finished.config, *settings, naming=("rocks.json", "rocktokens find"))


def test_truncated_weights(finished: FinishedRun, new: Path, tmp_path: Path):
    student = broken_student(tmp_path / "student")
    with (student / "model.safetensors").open("r+b") as weights:
        weights.truncate(1000)
    settings = changed(f"run.directory={new}", f"models.student={student}")
    refuse("distill", finished.config, *settings, naming=(str(student), "cannot be loaded"))


@pytest.mark.parametrize(
    ("line", "naming"),
    [
        ("", ("task.jsonl", "no records")),
        ("\n\n", ("task.jsonl", "no records")),
        ("{'question': 1}", ("task.jsonl", "line 1", "JSON")),
        ('["question"]', ("task.jsonl", "line 1", "object")),
        ('{"prompt": "?", "answer": "1"}', ("line 1", "'question'", "task.prompt_field")),
        ('{"question": "?"}', ("line 1", "'answer'", "task.answer_field")),
    ],
    ids=["empty", "blank", "not JSON", "no object", "no question", "no answer"],
)
def test_bad_data(finished: FinishedRun, new: Path, tmp_path: Path, line: str, naming: tuple[str, ...]):
    (tmp_path / "task.jsonl").write_text(line, encoding="utf-8")
    settings = changed(f"run.directory={new}", "task.name=jsonl", f"task.path={tmp_path}/task.jsonl")
    refuse("distill", finished.config, *settings, naming=naming)
    assert snapshot(new) == {}


@pytest.mark.parametrize(
    ("setting", "naming"),
    [
        ("rollouts.max_prompt_length=5", ("wordmath-train-", "rollouts.max_prompt_length is 5")),
        ("rollouts.max_completion_length=380", ("wordmath-train-", "380", "384", "rollouts.max_completion_length")),
    ],
)
def test_prompts_that_do_not_fit(finished: FinishedRun, new: Path, setting: str, naming: tuple[str, ...]):
    refuse("distill", finished.config, *changed(f"run.directory={new}", setting), naming=naming)
    assert snapshot(new) == {}, "so that the remedy can be followed in the same folder"


def test_a_teacher_that_sees_less_than_the_student(finished: FinishedRun, new: Path, tmp_path: Path):
    teacher = shutil.copytree(pebbles.directory("teacher"), tmp_path / "teacher")
    settings = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 64}))
    students = json.dumps([str(finished.path / "checkpoints/step-0")])
    replay = changed(f"run.directory={new}", f"models.teacher={teacher}", f"trace.checkpoints={students}")
    refuse("trace", finished.config, *replay, naming=("wordmath-train-", "the teacher sees only 64"))


def test_a_policy_that_leaves_nothing_to_learn(finished: FinishedRun, new: Path, tmp_path: Path):
    every = [RockToken(token, "", token, 1, 1.0, 1.0, None, None, "other") for token in range(1301)]
    sha256 = RunDir(finished.path).manifest()["tokenizer_sha256"]
    RockSet(sha256, {}, {}, {}, every).save(tmp_path / "every.json")
    settings = (f"run.directory={new}", "policy.name=rocks", f"policy.rocks={tmp_path}/every.json", "policy.lam=0")
    refuse("distill", finished.config, *changed(*settings), naming=("step 0", "weight 0", "policy.lam"))
    require_sound(new)


def test_logits_that_are_not_numbers(finished: FinishedRun, new: Path, tmp_path: Path):
    student = broken_student(tmp_path / "student")
    settings = changed(f"run.directory={new}", f"models.student={student}")
    refuse("distill", finished.config, *settings, naming=("step 0", "NaN", f"models.student = '{student}'"))
    require_sound(new)
    refuse("evaluate", finished.path, "--checkpoint", str(student), naming=("NaN",))
    require_sound(finished.path)


# Runs


def test_a_run_that_is_there(finished: FinishedRun):
    refuse("distill", finished.config, naming=(str(finished.path), "--resume"))


def test_resuming_with_another_config(finished: FinishedRun):
    settings = changed("training.learning_rate=0.1")
    refuse("distill", finished.config, "--resume", *settings, naming=("training.learning_rate = 0.1", "0.0005"))


@contextmanager
def locked_by_another_process(run: Path) -> Iterator[None]:
    program = "import sys; from rocktokens.run_dir import RunDir\nwith RunDir(sys.argv[1]).lock(): print(), input()"
    command = [sys.executable, "-c", program, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "\n"
        try:
            yield
        finally:
            holder.communicate("\n")


def test_a_run_in_use(finished: FinishedRun):
    with locked_by_another_process(finished.path):
        for command in (
            ("distill", finished.config, "--resume"),
            ("trace", finished.config),
            ("find", finished.path),
            ("evaluate", finished.path),
            ("knockout", finished.path),
        ):
            refuse(*command, naming=(str(finished.path), "in use", "pid"))


@pytest.mark.parametrize("verb", ["find", "evaluate", "knockout"])
def test_a_folder_that_is_no_run(verb: str, tmp_path: Path):
    refuse(verb, tmp_path, naming=(str(tmp_path), "not a run directory"))
    refuse(verb, tmp_path / "nowhere", naming=("nowhere", "not a run directory"))
    assert list(tmp_path.iterdir()) == []


def test_find_without_traces(replayed: Path):
    refuse("find", replayed, naming=(str(replayed), "rocktokens trace"))


@pytest.mark.parametrize(
    ("options", "naming"),
    [
        (("--reference", "3"), ("reference = 3", "0, 2, 4")),
        (("--baseline", "7"), ("baseline = 7", "0, 2, 4")),
        (("--k", "0"), ("find.k", "0")),
        (("--set", "find.kk=3"), ("find.kk", "did you mean find.k?")),
    ],
)
def test_find_with_bad_options(finished: FinishedRun, options: tuple[str, ...], naming: tuple[str, ...]):
    refuse("find", finished.path, *options, naming=naming)


def test_trace_without_checkpoints(finished: FinishedRun, new: Path):
    refuse("trace", finished.config, *changed(f"run.directory={new}"), naming=("no checkpoints", "trace.checkpoints"))
    order = json.dumps(["a/step-4", "a/step-2"])
    settings = changed(f"run.directory={new}", f"trace.checkpoints={order}")
    refuse("trace", finished.config, *settings, naming=("trace.checkpoints", "[4, 2]", "oldest first"))
    assert not new.exists()


@pytest.mark.parametrize("setting", ["models.teacher=/no/where", 'trace.checkpoints=["/no/where"]'])
def test_trace_of_what_does_not_load_leaves_nothing(finished: FinishedRun, new: Path, setting: str):
    students = f"trace.checkpoints={json.dumps([str(finished.path / 'checkpoints/step-0')])}"
    settings = changed(f"run.directory={new}", students, setting)
    refuse("trace", finished.config, *settings, naming=("/no/where",))
    assert not new.exists()
    refuse("trace", finished.config, "--restart", *changed(setting), naming=("/no/where",))


def test_prompts_that_cannot_be_used_cost_nothing(finished: FinishedRun):
    """Neither where they cannot be read, which is known before a model loads, nor where one is too long for it."""
    missing = changed("task.name=jsonl", "task.path=/no/where.jsonl", "models.teacher=/never/read")
    refuse("trace", finished.config, "--restart", *missing, naming=("task.path '/no/where.jsonl' does not exist",))
    outcome = rocktokens("trace", finished.config, "--restart", *changed("rollouts.max_prompt_length=3"))
    assert outcome.code == 2 and "rollouts.max_prompt_length is 3" in outcome.stderr


def test_a_run_in_the_place_of_a_file(finished: FinishedRun, tmp_path: Path):
    (tmp_path / "file").write_text("")
    students = json.dumps([str(finished.path / "checkpoints/step-0")])
    settings = changed(f"run.directory={tmp_path / 'file'}", f"trace.checkpoints={students}")
    refuse("trace", finished.config, *settings, naming=("file is a file, not a folder", "run.directory"))


def test_trace_with_a_teacher_of_another_vocabulary(finished: FinishedRun, tmp_path: Path):
    """The students would do: they are of that vocabulary too, which is not the run's."""
    other = str(other_tokenizer(tmp_path / "other"))
    settings = changed(f"models.teacher={other}", f"trace.checkpoints={json.dumps([other])}")
    refuse("trace", finished.config, "--restart", *settings, naming=("models.teacher", other, "vocabulary"))


def test_trace_over_traces_of_another_origin(finished: FinishedRun, tmp_path: Path):
    run = shutil.copytree(finished.path, tmp_path / "run")
    RunDir(run).update_manifest(replay=None)
    refuse("trace", finished.config, *changed(f"run.directory={run}"), naming=(str(run), "--restart"))


@pytest.mark.parametrize("restart", [(), ("--restart",)], ids=["", "restart"])
def test_trace_with_a_teacher_that_does_not_load(finished: FinishedRun, restart: tuple[str, ...]):
    refuse("trace", finished.config, *restart, *changed("models.teacher=/no/where"), naming=("/no/where",))
    require_sound(finished.path)


@pytest.mark.parametrize(
    ("checkpoint", "naming"),
    [
        ("99", ("'99'", "[0, 2, 4]")),
        ("²", ("²",)),
        ("/no/where", ("/no/where",)),
        ("no-such-model", ("no-such-model",)),
    ],
)
def test_evaluate_with_an_unknown_checkpoint(finished: FinishedRun, checkpoint: str, naming: tuple[str, ...]):
    refuse("evaluate", finished.path, "--checkpoint", checkpoint, naming=naming)


@pytest.mark.parametrize("content", ["{", "[]", '{"evaluations": [1]}', '{"evaluations": [{}]}', "{}"])
def test_damaged_evaluations(finished: FinishedRun, tmp_path: Path, content: str):
    run = shutil.copytree(finished.path, tmp_path / "run")
    RunDir(run).commit_text("evaluations.json", content)
    refuse("evaluate", run, naming=("evaluations.json", "damaged", "remove it"))
    (run / "evaluations.json").unlink()
    assert rocktokens("evaluate", run).code == 0


def test_a_run_whose_task_has_no_test_problems(finished: FinishedRun, tmp_path: Path):
    run = shutil.copytree(finished.path, tmp_path / "run")
    wordmath = '[task]\nname = "wordmath"\nsplit = "train"\nmax_steps = 4\n'
    config = (run / "config.toml").read_text(encoding="utf-8")
    assert wordmath in config
    changed_task = config.replace(wordmath, '[task]\nname = "jsonl"\npath = "train.jsonl"\n')
    RunDir(run).commit_text("config.toml", changed_task)
    refuse("evaluate", run, naming=("evaluation.task is not set", "jsonl", "set [evaluation.task]"))


def test_a_task_without_answers(finished: FinishedRun, tmp_path: Path):
    (tmp_path / "task.jsonl").write_text('{"question": "How many?"}\n')
    task = f'{{name = "jsonl", path = "{tmp_path}/task.jsonl", answer_field = ""}}'
    refuse(
        "evaluate",
        finished.path,
        *changed(f"evaluation.task={task}"),
        naming=("task.jsonl", "no answer", "evaluation.task.answer_field"),
    )


# Knock-outs

BESIDE_CLASSES = (
    *((f"--{name}", value) for name, value in (("top", "3"), ("category", "digit"), ("label", "stuck"), ("id", "0"))),
    *(("--text", "So"), ("--together",), ("--controls",), ("--rule", "paper")),
)
"""What says otherwise what to ban, or how to judge it."""


@pytest.mark.parametrize(
    ("options", "naming"),
    [
        (("--id", "1"), ("'<|end|>'", "id 1 is an end token", "leave it out")),
        (("--text", "<|end|>"), ("'<|end|>'", "id 1 is an end token")),
        (("--id", "20", "--id", "1", "--together"), ("id 1 is an end token",)),
        (("--id", "99999"), ("id 99999 is outside the vocabulary of 1301",)),
        (("--id", "-1"), ("id -1 is outside the vocabulary of 1301",)),
        (("--text", "So what"), ("'So what' is not one token", "'So' (id 325)", "--together")),
        (("--text", ""), ("the text '' holds no token",)),
        (("--category", "nouns"), ("category 'nouns'", "digit")),
        (("--top", "0"), ("knockout.top = 0",)),
        (("--samples", "0"), ("knockout.num_samples = 0",)),
        (("--controls",), ("--controls", "--together")),
        (
            ("--id", "5", "--together", "--controls"),
            ("controls are found for rocks", "leave out", "--id, --text"),
        ),
        (("--sequential", "--curtail"), ("--sequential", "--curtail", "give one")),
        (("--classes",), ("classes.json does not exist", "`rocktokens find --classes`")),
        (("--classes", "--sequential", "--curtail"), ("give one",)),
        *((("--classes", *option), ("--classes", f"leave out {option[0]}")) for option in BESIDE_CLASSES),
        (("--checkpoint", "all"), ("checkpoint 'all' names 3 models", "0, 2, 4")),
        (("--checkpoint", "99"), ("'99'", "[0, 2, 4]")),
        (("--set", "knockout.resamples=10"), ("knockout.resamples is not a known key",)),
        (("--set", "knockout.tolerence=1"), ("did you mean knockout.tolerance?",)),
        (("--set", "rollouts.max_prompt_length=5"), ("wordmath-test-", "rollouts.max_prompt_length is 5")),
    ],
)
def test_knockout_with_bad_options(finished: FinishedRun, options: tuple[str, ...], naming: tuple[str, ...]):
    refuse("knockout", finished.path, *options, naming=naming)


def test_knockout_of_a_model_with_another_tokenizer(finished: FinishedRun, tmp_path: Path):
    other = other_tokenizer(tmp_path / "other")
    refuse("knockout", finished.path, "--checkpoint", str(other), naming=("the rocks were found with tokenizer",))


def test_knockout_without_rocks(finished: FinishedRun, tmp_path: Path):
    run = shutil.copytree(finished.path, tmp_path / "run")
    rocks = json.loads((run / "rocks.json").read_text(encoding="utf-8"))
    RunDir(run).commit_text("rocks.json", json.dumps({**rocks, "tokens": []}))
    refuse("knockout", run, naming=("holds no rocks", "rocktokens find"))
    RunDir(run).drop(["rocks.json"])
    refuse("knockout", run, naming=("rocks.json does not exist", "rocktokens find"))


def test_knockout_of_classes_that_were_found_in_the_traces_of_another_run(finished: FinishedRun, tmp_path: Path):
    run = RunDir(shutil.copytree(finished.path, tmp_path / "run"))
    classes = TokenClasses([[7, 8]], source={"manifest_sha256": "f" * 64})
    run.commit("classes.json", classes.save)
    refuse("knockout", run.path, "--classes", naming=("classes.json", "of another run", "`rocktokens find --classes`"))


def test_knockout_where_nothing_can_be_graded(finished: FinishedRun, tmp_path: Path):
    (tmp_path / "task.jsonl").write_text('{"question": "How many?"}\n')
    task = f'{{name = "jsonl", path = "{tmp_path}/task.jsonl", answer_field = ""}}'
    naming = ("task.jsonl", "no answer", "evaluation.task.answer_field")
    refuse("knockout", finished.path, *changed(f"evaluation.task={task}"), naming=naming)


@pytest.mark.parametrize(("content", "naming"), [("{", "not valid JSON"), ("[]", "not a JSON object")])
def test_a_damaged_manifest(finished: FinishedRun, tmp_path: Path, content: str, naming: str):
    run = shutil.copytree(finished.path, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    (run / "manifest.json").write_text(content)
    refuse("find", run, naming=("manifest.json", naming))


def test_a_process_of_its_own_says_one_sentence(finished: FinishedRun, new: Path):
    """With both models loaded, so that nothing they print on the way gets through."""
    settings = changed(f"run.directory={new}", "rollouts.max_prompt_length=5")
    command = [sys.executable, "-m", "rocktokens.cli.main", "distill", str(finished.config), *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert done.stderr.startswith("rocktokens: prompt 'wordmath-train-")


def test_an_unknown_option_is_named(finished: FinishedRun):
    outcome = rocktokens("distill", finished.config, "--resum")
    assert outcome.code == 2 and "--resume" in outcome.stderr and "Traceback" not in outcome.stderr


# Before anything heavy is loaded


def test_what_can_be_refused_at_once_is_refused_without_torch(finished: FinishedRun, tmp_path: Path):
    run, bare = (shutil.copytree(finished.path, tmp_path / name) for name in ("run", "bare"))
    RunDir(bare).drop(["rocks.json"])
    RunDir(run).commit("classes.json", TokenClasses([[1, 2]], tokenizer_sha256="0" * 64).save)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "1 + 1 = ?"}\n', encoding="utf-8")
    task = changed(f'evaluation.task={{name = "jsonl", path = "{prompts}", answer_field = ""}}')
    here = changed(f"run.directory={run}")
    refusals = {
        "is not a run directory": [[verb, tmp_path / "no"] for verb in ("find", "gradients", "knockout", "evaluate")]
        + [["report", tmp_path / "no"]],
        "rocks.json does not exist": [["gradients", bare], ["knockout", bare]],
        "classes.json does not exist": [["knockout", bare, "--classes"]],
        "made with tokenizer 000000000000": [
            ["knockout", run, "--classes"], ["trace", run / "config.toml", "--classes", *here],
        ],
        "is not in": [["knockout", run, "--checkpoint", "3"], ["evaluate", run, "--checkpoint", "3"]],
        "no rock is of it": [["knockout", run, "--category", "none"]],
        "has no answer, so nothing": [["knockout", run, *task]],
        "does not exist": [[verb, tmp_path / "no.toml"] for verb in ("distill", "trace", "check", "run", "study")],
        "belongs to none of them": [["report", run, run]],
    }  # fmt: skip
    commands = [(list(map(str, command)), words) for words, all_of in refusals.items() for command in all_of]
    program = (
        "import json, sys\n"
        "from rocktokens.cli.main import main\n"
        "for arguments in json.loads(sys.stdin.read()):\n"
        "    sys.argv = ['rocktokens', *arguments]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as stop:\n"
        "        print(stop.code, 'torch' in sys.modules, flush=True)\n"
    )
    asked = json.dumps([command for command, _ in commands])
    told = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([sys.executable, "-c", program], input=asked, check=True, **told)
    outcomes = zip(commands, done.stdout.splitlines(), done.stderr.splitlines(), strict=True)
    for (command, words), outcome, sentence in outcomes:
        assert outcome == "2 False" and words in sentence, (command, outcome, sentence)
