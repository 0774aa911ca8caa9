"""rocks.json: what is saved is what is loaded, and nothing else is accepted."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_records import make_replay
from rocktokens.errors import RocktokensError, TokenizerMismatchError
from rocktokens.types import ControlDraw, ControlSet, ReplayRecord, RockSet, RockToken, TokenScores

numbers = st.floats(allow_nan=False, allow_infinity=False)
intervals = st.none() | st.tuples(numbers, numbers)
rock_tokens = st.builds(
    RockToken,
    id=st.integers(0, 2**31 - 1),
    text=st.text(),
    rank=st.integers(1),
    freq=st.integers(0),
    mean_kl=numbers,
    score=numbers,
    ccr=st.none() | numbers,
    score_ctx=st.none() | numbers,
    category=st.sampled_from(["digit", "other"]),
    score_interval=intervals,
    p_in_top_k=st.none() | st.floats(0, 1),
    verdict=st.sampled_from(["untested", "pillar", "stumbling", "neutral", "undecided"]),
    delta=st.none() | numbers,
    delta_interval=intervals,
    n_persistent=st.none() | st.integers(0),
    ccr_interval=intervals,
    held_out_mean_kl=st.none() | numbers,
)
records = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | numbers | st.text(), max_size=3)
windows = st.none() | st.fixed_dictionaries({"max_each_side": st.integers(0), "min_kl": numbers})
rock_sets = st.builds(RockSet, st.text(), records, records, records, st.lists(rock_tokens, max_size=3), windows)


@st.composite
def control_sets(draw) -> ControlSet:
    size = draw(st.integers(0, 3))
    whole = st.lists(st.integers(0, 2**31), min_size=size, max_size=size)
    draws = st.lists(st.builds(ControlDraw, whole, whole, st.integers(0), numbers, numbers), max_size=3)
    return ControlSet(draw(st.text()), draw(records), draw(records), draw(whole), draw(whole), draw(draws))


@given(rock_sets | control_sets())
def test_a_saved_set_loads_equal_and_saves_to_the_same_bytes(tmp_path_factory, saved):
    folder = tmp_path_factory.mktemp("sets")
    saved.save(folder / "a.json")
    loaded = type(saved).load(folder / "a.json")
    loaded.save(folder / "b.json")
    assert loaded == saved
    assert (folder / "a.json").read_bytes() == (folder / "b.json").read_bytes()


def one_rock() -> RockSet:
    token = RockToken(17, "So", 1, 40, 0.5, 20.0, None, None, "discourse")
    return RockSet("f" * 64, {"k": 1}, {"run": "a"}, {"kl_share": 0.5}, [token, replace(token, id=3, rank=2)])


def test_ids_and_frame_follow_the_ranking():
    rocks = one_rock()
    assert rocks.ids.tolist() == [17, 3]
    assert rocks.ids.dtype == np.int64
    frame = rocks.to_frame()
    assert frame["id"].tolist() == [17, 3]
    assert frame.loc[0, "category"] == "discourse"
    assert list(replace(rocks, tokens=[]).to_frame().columns) == list(frame.columns)


def test_an_infinite_score_is_never_written(tmp_path):
    rocks = one_rock()
    broken = replace(rocks, tokens=[replace(rocks.tokens[0], score=float("inf"))])
    with pytest.raises(ValueError, match="not JSON compliant"):
        broken.save(tmp_path / "rocks.json")
    assert not (tmp_path / "rocks.json").exists()


def test_another_tokenizer_is_refused_and_none_recorded_is_not():
    rocks = one_rock()
    rocks.require_tokenizer("f" * 64)
    replace(rocks, tokenizer_sha256="").require_tokenizer("0" * 64)
    with pytest.raises(TokenizerMismatchError, match="found with tokenizer ffffffffffff, this model's is 000000000000"):
        rocks.require_tokenizer("0" * 64)


def test_missing_damaged_and_newer_files_are_refused(tmp_path):
    path = tmp_path / "rocks.json"
    with pytest.raises(RocktokensError, match=r"does not exist: run `rocktokens find` first"):
        RockSet.load(path)
    path.write_text("{")
    with pytest.raises(RocktokensError, match=r"is not valid JSON .*: write it again"):
        RockSet.load(path)
    one_rock().save(path)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "schema_version": 3}))
    with pytest.raises(RocktokensError, match="has schema_version 3, this rocktokens reads 2"):
        RockSet.load(path)
    path.write_text(json.dumps({name: value for name, value in record.items() if name != "tokens"}))
    with pytest.raises(RocktokensError, match=r"rocks\.json \(tokens: field required\)"):
        RockSet.load(path)
    record["tokens"][0]["score"] = float("nan")
    path.write_text(json.dumps(record))
    with pytest.raises(RocktokensError, match=r"rocks\.json \(tokens\.0\.score: input should be a finite number\)"):
        RockSet.load(path)


@pytest.mark.parametrize("content", ['{"schema_version": 1}', '{"schema_version": 1, "tokens": [3]}', "[]", "null"])
def test_json_that_is_no_rock_set_is_refused(tmp_path, content):
    (tmp_path / "rocks.json").write_text(content)
    with pytest.raises(RocktokensError, match=r"rocks\.json .*: write it again with `rocktokens find`"):
        RockSet.load(tmp_path / "rocks.json")


def test_files_without_windows_and_the_later_fields_of_tokens_still_load(tmp_path):
    path = tmp_path / "rocks.json"
    one_rock().save(path)
    record = json.loads(path.read_text())
    del record["windows"]
    for token in record["tokens"]:
        for name in ("n_persistent", "ccr_interval", "held_out_mean_kl"):
            del token[name]
    path.write_text(json.dumps(record))
    assert RockSet.load(path) == one_rock()


def test_a_folder_in_the_place_of_the_file_is_refused(tmp_path):
    with pytest.raises(RocktokensError, match=r"cannot be read \(Is a directory\): give the rocks\.json"):
        RockSet.load(tmp_path)


def test_scores_are_named_in_the_order_of_the_trace():
    columns = ["kl", "logp_student", "logp_teacher", "entropy_student", "entropy_teacher", "grad_norm"]
    scores = TokenScores(**{name: index for index, name in enumerate(columns)})
    assert list(scores.items()) == [(name, index) for index, name in enumerate(columns)]


# controls.json


def two_draws() -> ControlSet:
    first, second = ControlDraw([5, 6], [9, 20], 29, -0.03, 0.1), ControlDraw([6, 5], [20, 9], 29, -0.03, 1.0)
    return ControlSet("f" * 64, {"seed": 0}, {"run": "a"}, [17, 3], [10, 20], [first, second])


def test_controls_are_their_draws_and_the_order_of_partners_makes_no_other_control():
    controls = two_draws()
    assert list(controls) == controls.draws
    assert len(controls) == 2
    assert controls.ids(1).tolist() == [6, 5]
    assert controls.ids(1).dtype == np.int64
    assert controls.n_distinct == 1
    assert replace(controls, draws=[*controls.draws, ControlDraw([5, 7], [9, 21], 30, 0.0, 0.1)]).n_distinct == 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"schema_version": 3}, "has schema_version 3, this rocktokens reads 2"),
        ({"rock_freq": [10]}, r"is no controls\.json \(lists of different lengths\)"),
        ({"more": 1}, r"is no controls\.json \(more: unexpected"),
        ({"draws": [{"ids": [5, 6]}]}, r"is no controls\.json \(draws\.0\.freq: field required"),
    ],
)
def test_files_that_hold_no_controls_are_refused(tmp_path, change, sentence):
    path = tmp_path / "controls.json"
    with pytest.raises(RocktokensError, match="does not exist: run `match_controls` first"):
        ControlSet.load(path)
    two_draws().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RocktokensError, match=rf"controls\.json {sentence}.*: .*write it again with `match_controls`"):
        ControlSet.load(path)


def test_controls_of_an_older_schema_are_read_without_their_kl(tmp_path):
    path = tmp_path / "controls.json"
    two_draws().save(path)
    record = json.loads(path.read_text())
    for draw in record["draws"]:
        del draw["kl_gap"]
    path.write_text(json.dumps({**record, "schema_version": 1}))
    assert ControlSet.load(path) == two_draws()


# Notebooks


def test_sets_say_what_they_are():
    rocks = one_rock()
    assert (len(rocks), repr(rocks)) == (2, "RockSet(2 rocks at checkpoint None: So, So)")
    nothing = replace(rocks, tokens=[])
    assert nothing and len(nothing) == 0
    assert "·<b>" in repr(replace(rocks, tokens=[replace(rocks.tokens[0], text=" <b>")]))
    assert "<b>" not in replace(rocks, tokens=[replace(rocks.tokens[0], text=" <b>")])._repr_html_()
    controls = two_draws()
    assert repr(controls).startswith("ControlSet(2 draws for 2 rocks, 1 distinct; total occurrences within ")
    assert controls._repr_html_().count("<tr>") == 3


def test_rocks_draw_themselves():
    rocks = replace(one_rock(), summary={"token_share": 0.25, "measured_on": "held-out half"})
    scored = replace(rocks.tokens[0], score_interval=(10.0, 30.0))
    for chart in (rocks.plot_shares(), rocks.plot_scores(), replace(rocks, tokens=[scored]).plot_scores()):
        assert chart.to_dict()["title"]
    assert replace(rocks, tokens=[]).plot_scores().to_dict()


# The record of a replay


@pytest.mark.parametrize("top_k", [0, 8])
def test_a_replay_is_read_from_the_manifest_as_it_was_noted(top_k: int):
    replay = make_replay(checkpoints={0: "a", 64: "b"}, top_k=top_k)
    entry = json.loads(json.dumps(replay.to_manifest()))
    assert ReplayRecord.of({"replay": entry}, "manifest.json") == replay
    assert ("top_k" in entry) == bool(top_k) and entry["checkpoints"] == {"0": "a", "64": "b"}


@pytest.mark.parametrize("manifest", [{}, {"replay": None}, {"replay": {}}])
def test_a_run_without_a_replay_has_no_record_of_one(manifest: dict):
    assert ReplayRecord.of(manifest, "manifest.json") is None


def test_a_damaged_record_of_a_replay_is_refused_in_one_sentence():
    entry = {**make_replay().to_manifest(), "probe": 3}
    with pytest.raises(RocktokensError, match=r"manifest\.json is no record of a replay \(probe: .*\): write it again"):
        ReplayRecord.of({"replay": entry}, "manifest.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_refused_also_where_any_value_may_stand(tmp_path, value):
    path = tmp_path / "rocks.json"
    rocks = RockSet(tokenizer_sha256="", criterion={"tau": 0.5, "name": "NaN"}, source={}, summary={}, tokens=[])
    rocks.save(path)
    assert RockSet.load(path) == rocks
    path.write_text(json.dumps({**json.loads(path.read_text()), "criterion": {"tau": [value]}}))
    with pytest.raises(RocktokensError, match=r"rocks\.json \(it has a number that is not finite\)"):
        RockSet.load(path)
