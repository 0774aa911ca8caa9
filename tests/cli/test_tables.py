"""Tables for people: whitespace can be seen, and no token text can break or colour what is around it."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import FinishedRun, succeed
from rich.console import Console

from rocktokens.display.rocks import rock_table
from rocktokens.display.table import Table
from rocktokens.display.text import visible
from rocktokens.evaluation.records import EvaluationRecord, accuracy_table
from rocktokens.types import RockSet, RockToken

HOSTILE = ["[bold]", "[/]", "[/bold]", "\\[", "\\", "\\]", "[red]x", "[link=http://x]", ":smile:", "[", "a[b]c\\"]
CONTROL = {"\x1b[31m": "\\u001b[31m", "\r": "␍", "\x00": "\\u0000", "\x07": "\\u0007", "\u202e": "\\u202e"}
WHITESPACE = {" ": "·", "\n\n": "⏎⏎", "\t": "⇥", " So": "·So", "": "∅", "\u3000": "\\u3000", "a\u200bb": "a\\u200bb"}


@pytest.fixture
def copy(finished: FinishedRun, tmp_path: Path) -> Path:
    return shutil.copytree(finished.path, tmp_path / "copy")


def rendered(table: Table) -> list[str]:
    """The lines of a table as a terminal would show them, colours included."""
    file = io.StringIO()
    Console(file=file, width=120, force_terminal=True, color_system="truecolor", emoji=False).print(table.to_rich(120))
    return file.getvalue().splitlines()


def rocks(texts: list[str]) -> RockSet:
    tokens = [RockToken(id, text, id + 1, 2, 0.5, 1.0, None, None, "other") for id, text in enumerate(texts)]
    return RockSet("", {"stage": "score", "split": 0.5, "joint": False}, {}, {}, tokens)


@pytest.mark.parametrize(("text", "shown"), [*CONTROL.items(), *WHITESPACE.items()])
def test_what_cannot_be_seen_is_shown(text: str, shown: str):
    assert visible(text) == shown
    assert visible(text).isprintable()


def test_no_token_text_is_taken_for_markup():
    texts = [*HOSTILE, *CONTROL, *WHITESPACE]
    lines = rendered(rock_table(rocks(texts), len(texts)))
    plain = rendered(rock_table(rocks(["x"] * len(texts)), len(texts)))
    assert len(lines) == len(plain) == len(texts) + 3
    for text, line in zip(texts, lines[3:], strict=True):
        assert f" {visible(text)} " in line
        assert "\x1b" not in line
        assert len(line) == len(lines[3])


def test_no_model_name_is_taken_for_markup():
    record = EvaluationRecord(
        name="", settings={}, task="[bold]", accuracy=0.5, n_prompts=10, num_samples=1, n_samples=10,
        wilson_interval=(0.4, 0.6), bootstrap_interval=None, mean_response_length=3.0, truncated_share=0.0,
        temperature=1.0, seed=0, prompt_ids=[], correct=[], answers=[],
    )  # fmt: skip
    lines = rendered(accuracy_table([replace(record, name=name) for name in HOSTILE]))
    assert all(line.startswith(f"{name} ") for name, line in zip(HOSTILE, lines[3:], strict=True))
    assert "Accuracy on [bold]" in lines[0]


def test_the_tables_of_a_run(finished: FinishedRun, copy: Path):
    found = succeed("find", copy, "--json").record["tokens"]
    shown = succeed("find", copy, "--show", "10", "--verbose").stdout
    assert len(found) == 10 and any(token["text"].isspace() or " " in token["text"] for token in found)
    rows = shown[shown.index("10 rocks at checkpoint") :].splitlines()[3:]
    for token, row in zip(found, rows, strict=False):
        assert row.split()[:4] == [str(token["rank"]), visible(token["text"]), token["category"], str(token["freq"])]
    accuracies = succeed("evaluate", finished.path, "--checkpoint", "all").stdout
    assert "Accuracy on wordmath" in accuracies
    assert [f"step {step} " in accuracies for step in (0, 2, 4)] == [True] * 3
    assert str(finished.path / "evaluations.json") in accuracies
