"""find.json: what is saved loads as the same records; anything else is one sentence that names the field."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocktokens.errors import RocktokensError
from rocktokens.rocks.records import (
    CategoryShares,
    ControlMatch,
    Crossing,
    Cutoff,
    CutoffPoint,
    FindRecord,
    FunnelColumns,
    GroupChange,
    GroupMean,
    PositionBin,
    PositionProfile,
    SampleSizePoint,
    SelectorAgreement,
    SensitivityRow,
)

BIN = PositionBin("0", 5, 2, 1.0, 1.0, 0.4, 0.75)
FOUND = FindRecord(
    criterion={"k": "auto", "reference": 9, "tau_nats": None},
    source={"manifest_sha256": "0" * 64},
    funnel=FunnelColumns([7], ["\n “</script>"], ["markdown_whitespace"], [5], [0.5], [None], ["rock"], [1]),
    persistence=[
        GroupChange(5, 2, 0.5, 0.25, -0.25, (-0.5, 0.0), -0.5, None, 0.03, -1.0, "rock", "held-out half", 1, 0.4)
    ],
    trajectory=[GroupMean(0, "held-out half", "rock", 0.5, 0.25, 0.75), GroupMean(9, "x", "rock", None, None, None)],
    cutoff=Cutoff(1, Crossing(1, 0.5, 0.5, True), [CutoffPoint(1, 0.5, None, 0.5, 0.25, 1.0)]),
    sample_size=[SampleSizePoint(0.5, 2, 1.0, None)],
    selectors=[SelectorAgreement("mean", 1.0, 1.0, None, 0.5, {"freq x mean": 1.0, "joint": None})],
    sensitivity=[
        SensitivityRow("tau", 0.8, True, 1.0, [], [], True),
        SensitivityRow("window", 5, True, 1.0, [], [], True),
        SensitivityRow("joint", False, True, 1.0, [3], [], False),
        SensitivityRow("stage", "score", False, None, [], [7], True),
    ],
    categories=[CategoryShares("markdown_whitespace", 1, 1, 1.0, 1.0, None, 1.0, 1.0, None)],
    positions=PositionProfile(9, 1, 1, 5, 2, [BIN], [BIN], []),
    controls=ControlMatch(matched=False, reason="there are no rocks to match"),
)


def test_what_is_saved_loads_as_the_same_bytes_and_types(tmp_path: Path):
    FOUND.save(tmp_path / "find.json")
    loaded = FindRecord.load(tmp_path / "find.json")
    assert loaded == FOUND
    values = [row.value for row in loaded.sensitivity]
    assert list(map(type, values)) == [float, int, bool, str]
    assert loaded.persistence[0].delta_interval == (-0.5, 0.0)
    loaded.save(tmp_path / "again.json")
    text = (tmp_path / "find.json").read_text(encoding="utf-8")
    assert (tmp_path / "again.json").read_text(encoding="utf-8") == text
    assert text == json.dumps(FOUND.to_record(), ensure_ascii=False, sort_keys=True) + "\n"


def test_what_a_match_does_not_have_is_not_in_the_file():
    assert FOUND.to_record()["controls"] == {"matched": False, "reason": "there are no rocks to match"}


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda r: r.pop("funnel"), r"\(funnel: field required\): write it again with `rocktokens find`"),
        (lambda r: r.update(notes=1), r"\(notes: .*\): write it again"),
        (lambda r: r["cutoff"].update(k="12"), r"\(cutoff\.k: input should be a valid integer\)"),
        (lambda r: r["funnel"]["category"].append("emoji"), r"\(funnel\.category\.1: "),
        (lambda r: r["persistence"][0].update(delta_interval=[1.0]), r"\(persistence\.0\.delta_interval\.1: "),
        (lambda r: r["sample_size"][0].update(jaccard=float("nan")), r"\(sample_size\.0\.jaccard: .*finite number\)"),
        (lambda r: r.update(schema_version=2), "has schema_version 2, this rocktokens reads 1"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path: Path, damage: Callable[[Any], Any], sentence: str):
    record = FOUND.to_record()
    damage(record)
    path = tmp_path / "find.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(RocktokensError, match=sentence) as refused:
        FindRecord.load(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path):
    FOUND.save(tmp_path / "find.json")
    (tmp_path / "find.json").write_text((tmp_path / "find.json").read_text()[:-9])
    with pytest.raises(RocktokensError, match=r"is not valid JSON .*: write it again with `rocktokens find`"):
        FindRecord.load(tmp_path / "find.json")


def test_the_former_name_of_the_group_of_high_mean_kl_is_read(tmp_path: Path):
    change, mean = (
        replace(FOUND.persistence[0], group="high mean kl"),
        replace(FOUND.trajectory[0], group="high mean kl"),
    )
    funnel = replace(FOUND.funnel, group=["high mean kl"], rank=[None])
    found = replace(FOUND, persistence=[change], trajectory=[mean], funnel=funnel)
    content = json.dumps(found.to_record()).replace("high mean kl", "rare high-kl")
    (tmp_path / "find.json").write_text(content, encoding="utf-8")
    assert FindRecord.load(tmp_path / "find.json") == found
