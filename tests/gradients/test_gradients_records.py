"""gradients.json and its record: one is the other, older words are read, damage is refused in one sentence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradient_records import make_gradients
from rocktokens.errors import RocktokensError
from rocktokens.gradients.records import GradientsRecord, SketchSettings


@pytest.mark.parametrize("settings", [{}, {"update": False}, {"paired": True, "sketch": SketchSettings(64, 3)}])
def test_what_is_saved_is_loaded(settings: Any, tmp_path: Path):
    record = make_gradients(**settings)
    record.save(tmp_path / "gradients.json")
    assert GradientsRecord.load(tmp_path / "gradients.json") == record
    content = json.loads((tmp_path / "gradients.json").read_text(encoding="utf-8"))
    assert content == json.loads(json.dumps(record.to_record()))
    assert content["schema_version"] == 1 and content["claims"][0]["sentence"] == record.claims[0].sentence


def test_former_words_are_read(tmp_path: Path):
    record = make_gradients()
    content = record.to_record()
    former = {"supported": "holds", "contradicted": "does not hold", "inconclusive": "cannot be told here"}
    for claim in content["claims"]:
        claim["verdict"] = former[claim["verdict"]]
    content["parameter"]["shares"]["update"]["effects"]["rest"]["verdict"] = "cannot be told"
    (tmp_path / "gradients.json").write_text(json.dumps(content), encoding="utf-8")
    found = GradientsRecord.load(tmp_path / "gradients.json")
    assert found.claims == record.claims
    update = found.parameter.shares.update
    assert update is not None and update.effects["rest"].verdict == "inconclusive"


def test_former_names_of_the_group_of_high_mean_kl_are_read(tmp_path: Path):
    record = make_gradients()
    types = replace(record.trace.types, group=["rocks", "high mean kl"])
    groups = {**record.trace.groups, "high mean kl": record.trace.groups["rest"]}
    record = replace(record, trace=replace(record.trace, types=types, groups=groups))
    former = json.dumps(record.to_record()).replace("high mean kl", "rare high-kl")
    former = former.replace("high_mean_kl", "rare_high_kl")
    assert "n_rare_high_kl" in former and '"rare high-kl": {' in former
    (tmp_path / "gradients.json").write_text(former, encoding="utf-8")
    assert GradientsRecord.load(tmp_path / "gradients.json") == record


def without_trace(content: dict[str, Any]) -> None:
    del content["trace"]


def with_words_for_numbers(content: dict[str, Any]) -> None:
    content["logit"]["reference"]["vocabulary"]["groups"]["rocks"]["n_types"] = "many"


def with_a_list_for_settings(content: dict[str, Any]) -> None:
    content["settings"] = []


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (without_trace, "(trace: "),
        (with_words_for_numbers, "(logit.reference.vocabulary.groups.rocks.n_types: "),
        (with_a_list_for_settings, "(settings: "),
        (lambda content: content.update(schema_version=9), "schema_version 9"),
    ],
)
def test_damage_is_refused_in_one_sentence(damage: Any, part: str, tmp_path: Path):
    content = make_gradients().to_record()
    damage(content)
    (tmp_path / "gradients.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(RocktokensError) as refused:
        GradientsRecord.load(tmp_path / "gradients.json")
    assert part in str(refused.value) and "`rocktokens gradients`" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_notebook_shows_the_verdicts():
    record = make_gradients(paired=True)
    assert repr(record).startswith("GradientsRecord(checkpoint 64 against 0, 1,234 tokens of 10 prompts; supported: ")
    shown = record._repr_html_()
    assert [claim.claim for claim in record.claims if claim.claim not in shown] == []
    assert "<td>inconclusive</td>" in shown


@pytest.mark.parametrize("name", ["plot_norms", "plot_alignment", "plot_kl", "plot_blocks"])
@pytest.mark.parametrize("update", [True, False])
def test_a_record_draws_itself(name: str, update: bool):
    spec = getattr(make_gradients(paired=True, update=update), name)("runs/one").to_dict()
    assert "runs/one, checkpoint 64" in json.dumps(spec["title"])
