"""The tutorial runs: its commands in its order, with its edits and its program, on less work.

The page is read from top to bottom. Commands of this package run as they stand, with overrides that make them small;
what they print must have the lines that the page shows, numbers aside. The real model is replaced by the embedded
teacher, which has the same parts.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Outcome, changed, succeed

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
SMALLER = changed(
    "models.device=cpu",
    "training.max_steps=4",
    "training.save_steps=2",
    "training.per_device_train_batch_size=4",
    "training.max_truncated_share=1.0",
    "rollouts.max_completion_length=16",
    "trace.num_prompts=40",
    "find.k=3",
    "find.require=any",
    "gradients.batches=2",
    "knockout.num_prompts=4",
    "knockout.top=1",
    "knockout.matched=0",
    "knockout.never=1",
)
_BLOCK = re.compile(r"^```(?P<language>console|toml|python)\n(?P<body>.*?)^```$", re.M | re.S)


def blocks() -> list[tuple[str, str]]:
    text = PAGE.read_text(encoding="utf-8").replace("smollm2-135m-instruct", "pebbles-teacher")
    return [(match["language"], match["body"]) for match in _BLOCK.finditer(text)]


def commands(body: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield each command of a transcript with the lines shown below it."""
    for part in re.split(r"^\$ ", body, flags=re.M)[1:]:
        line, *shown = part.splitlines()
        yield shlex.split(line), shown


def edit(config: Path, body: str) -> None:
    """Replace lines of a config, each of which must be there once, by those of the page."""
    text = config.read_text(encoding="utf-8")
    for line in body.splitlines():
        key = line.split(" = ")[0]
        text, count = re.subn(rf"^{key} = .*$", line, text, flags=re.M)
        assert count == 1, key
    config.write_text(text, encoding="utf-8")


def without_numbers(line: str) -> str:
    return re.sub(r"\d[\d.,]*", "0", line).strip("─ ").rstrip()


def require_shown(outcome: Outcome, shown: list[str]) -> None:
    printed = {without_numbers(line) for line in (outcome.stdout + outcome.stderr).splitlines()}
    assert [line for line in shown if line != "…" and without_numbers(line) not in printed] == [], outcome


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of someone who has followed the page."""
    folder = tmp_path_factory.mktemp("tutorial")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for language, body in blocks():
            if language == "toml":
                edit(folder / "run.toml", body)
            elif language == "python":
                Path("make_pair.py").write_text(body, encoding="utf-8")
            else:
                follow(body)
        yield folder


def follow(body: str) -> None:
    """Run the commands of a transcript, but for those that install or move about."""
    for command, shown in commands(body):
        program, *arguments = command
        if program == "python":
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment)
        elif program == "rocktokens":
            outcome = succeed(*arguments, *(SMALLER if arguments[0] == "run" else ()))
            if arguments[0] != "find":  # what it finds depends on the size of the run
                require_shown(outcome, shown)


def test_both_parts_end_with_a_report(tutorial: Path):
    for name, stages in (("run", {"knockout.json", "gradients.json"}), ("real", {"gradients.json"})):
        run = tutorial / "runs" / name
        assert "<html" in (run / "report.html").read_text(encoding="utf-8")
        assert {"rocks.json", "classes.json", *stages} <= {path.name for path in run.iterdir()}
    assert not (tutorial / "runs" / "real" / "knockout.json").exists()


def test_the_config_that_was_edited_has_the_two_lines_of_the_page(tutorial: Path):
    from rocktokens.config import load_config

    training = load_config(tutorial / "run.toml").training
    assert (training.max_steps, training.save_steps) == (64, 16)


def test_the_page_has_commands_that_this_test_runs():
    programs = [command[:2] for language, body in blocks() if language == "console" for command, _ in commands(body)]
    ours = [verb for program, verb in programs if program == "rocktokens"]
    assert ours == ["init", "check", "run", "find", "init", "run", "find"]
    assert {program for program, _ in programs} == {"python3", ".", "pip", "mkdir", "cd", "python", "rocktokens"}
