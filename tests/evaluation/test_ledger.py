"""evaluations.json as records: the file comes back as it was, is easy to read in a notebook, and damage is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rocktokens.errors import RocktokensError
from rocktokens.evaluation.records import EvaluationRecord, Ledger

TEACHER = EvaluationRecord(
    name="teacher", settings={"seed": 1}, task="wordmath", accuracy=0.75, n_prompts=2, num_samples=2, n_samples=4,
    wilson_interval=(0.3, 0.95), bootstrap_interval=(0.5, 1.0), mean_response_length=61.5, truncated_share=0.0,
    temperature=1.0, seed=7, prompt_ids=["a", "b"], correct=[2, 1], answers=[["1", "1"], ["2", None]],
)  # fmt: skip
STEP = replace(TEACHER, name="step <4>", bootstrap_interval=None)


def test_a_ledger_comes_back_byte_for_byte(tmp_path: Path):
    path, again = tmp_path / "evaluations.json", tmp_path / "again.json"
    Ledger([TEACHER, STEP]).save(path)
    assert Ledger.load(path) == Ledger([TEACHER, STEP])
    Ledger.load(path).save(again)
    assert path.read_bytes() == again.read_bytes()
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["schema_version"] == 1 and [*record["evaluations"][0]][:3] == ["name", "settings", "task"]


def test_an_evaluation_is_found_by_its_name_and_its_settings(tmp_path: Path):
    other = replace(TEACHER, settings={"seed": 2}, accuracy=0.5)
    ledger = Ledger([TEACHER, STEP, other])
    assert ledger.find("teacher", {"seed": 2}) is other
    assert ledger.find("teacher", {"seed": 3}) is None and ledger.find("another", {"seed": 1}) is None
    assert len(Ledger.load(tmp_path / "evaluations.json")) == 0


def test_a_notebook_shows_accuracy_with_its_interval():
    assert repr(TEACHER) == "EvaluationRecord('teacher': 75.0 % [50.0, 100.0] on wordmath, 2 prompts)"
    ledger = Ledger([TEACHER, STEP])
    assert repr(ledger) == "Ledger('teacher': 75.0 % [50.0, 100.0], 'step <4>': 75.0 % [30.0, 95.0])"
    shown = ledger._repr_html_()
    assert "step &lt;4&gt;" in shown and "<4>" not in shown and shown.count("<tr>") == 3
    assert TEACHER._repr_html_().count("<tr>") == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not valid JSON .* it is damaged: restore it from a copy of the run, or remove it"),
        ('{"schema_version": 1, "evaluations": [{"name": "teacher"}]}', "lacks fields .* it is damaged"),
        ('{"schema_version": 2, "evaluations": []}', "has schema_version 2, this rocktokens reads 1"),
    ],
)
def test_a_damaged_ledger_is_one_sentence(tmp_path: Path, content: str, sentence: str):
    path = tmp_path / "evaluations.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(RocktokensError, match=rf"evaluations\.json {sentence}"):
        Ledger.load(path)
