"""knockout.json: what is saved is what is loaded, and nothing else is accepted."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knockout_records import SETTINGS, make_sweep
from rocktokens.errors import RocktokensError
from rocktokens.knockout.records import (
    Ban,
    BanChanges,
    Conditions,
    Correlation,
    DetectableLoss,
    EngineNoise,
    FreeAnswers,
    Knockout,
    KnockoutSettings,
    KnockoutSweep,
    NeutralPrompts,
    SweepCost,
    VerdictCounts,
)

numbers = st.floats(allow_nan=False, allow_infinity=False)
perhaps = st.none() | numbers
intervals = st.tuples(numbers, numbers)
verdicts = st.sampled_from(["untested", "pillar", "stumbling", "neutral", "undecided"])
rollouts = st.lists(st.tuples(st.text(), st.integers(0)), max_size=3)
bans = st.builds(
    Ban,
    ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3).map(tuple),
    name=st.text(),
    role=st.sampled_from(["tested", "matched", "never"]),
    category=st.text(),
    alternatives=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
)
changes = st.builds(
    BanChanges,
    n_rollouts=st.integers(0),
    n_prompts=st.integers(0),
    length=perhaps,
    truncated=perhaps,
    first_difference=perhaps,
    first_difference_share=perhaps,
    replacements=st.lists(st.tuples(st.integers(0), st.text(), numbers), max_size=3),
    lost=rollouts,
    gained=rollouts,
)
knockouts = st.builds(
    Knockout,
    ban=bans,
    delta=perhaps,
    interval=st.none() | intervals,
    p=perhaps,
    q=perhaps,
    verdict=verdicts,
    paper_verdict=verdicts,
    detectable=numbers,
    bounds=intervals,
    n_looked=st.integers(0),
    stopped=st.none() | st.sampled_from(["curtailed", "efficacy", "futility", "neutral"]),
    changes=changes,
    neutral_prompts=st.none() | st.integers(0),
    lost_in_gold=st.none() | st.integers(0),
)
facts = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | numbers | st.text(), max_size=3)
counts = st.none() | st.dictionaries(verdicts, st.integers(0), max_size=5)
settings = st.builds(
    KnockoutSettings,
    model=st.text(),
    conditions=st.none()
    | st.builds(
        Conditions,
        eos_ids=st.lists(st.integers(0), max_size=2),
        versions=st.dictionaries(st.text(), st.text(), max_size=2),
        task=facts,
        temperature=numbers,
    ),
    n_prompts=st.integers(0),
    task=st.text(),
    temperature=numbers,
    max_new_tokens=st.integers(0),
    seed=st.integers(),
    num_samples=st.integers(0),
    mode=st.sampled_from(["exact", "curtailed", "sequential"]),
    matched=st.integers(0),
    never=st.integers(0),
    tolerance=numbers,
    alpha=numbers,
    epsilon=numbers,
    margin=numbers,
    interval=st.sampled_from(["score", "bootstrap"]),
)
sweeps = st.builds(
    KnockoutSweep,
    tokenizer_sha256=st.text(),
    settings=settings,
    baseline=st.builds(FreeAnswers, numbers, intervals, st.integers(0), st.integers(0), numbers, numbers),
    noise=st.builds(EngineNoise, *[st.integers(0)] * 4, numbers, intervals),
    cost=st.builds(SweepCost, *[st.integers(0)] * 5, numbers),
    counts=st.dictionaries(
        st.sampled_from(["tested", "matched", "never"]), st.builds(VerdictCounts, counts, counts, counts)
    ),
    detectable=st.builds(DetectableLoss, numbers, numbers),
    correlations=st.lists(
        st.builds(Correlation, st.text(), perhaps, st.none() | intervals, perhaps, st.integers(0)), max_size=2
    ),
    warnings=st.lists(st.text(), max_size=2),
    knockouts=st.lists(knockouts, max_size=3),
    neutral=st.none() | st.builds(NeutralPrompts, st.none() | st.integers(0), st.none() | st.integers(0)),
)


@given(sweeps)
def test_a_saved_sweep_loads_equal_and_saves_to_the_same_bytes(tmp_path_factory, sweep):
    folder = tmp_path_factory.mktemp("sweeps")
    sweep.save(folder / "a.json")
    loaded = KnockoutSweep.load(folder / "a.json")
    loaded.save(folder / "b.json")
    assert loaded == sweep
    assert (folder / "a.json").read_bytes() == (folder / "b.json").read_bytes()


def small_sweep() -> KnockoutSweep:
    some = BanChanges(
        3, 2, 1.5, 0.0, 4.0, 0.25, [(9, "Thus", 0.75), (4, "\n", 0.25)], [("p1", 0), ("p2", 1)], [("p3", 0)]
    )
    none = BanChanges(0, 0, None, None, None, None, [], [], [])
    so = Knockout(
        Ban((325,), "So", category="discourse"), -0.05, (-0.09, -0.01), 0.02, 0.03, "pillar", "pillar", 0.04,
        (-0.2, 0.1), 40, None, some,
    )  # fmt: skip
    placebo = replace(so, ban=Ban((7,), "the", "matched"), verdict="undecided", paper_verdict="neutral")
    never = replace(so, ban=Ban((8,), "zz", "never"), delta=0.0, interval=(0.0, 0.0), verdict="neutral", changes=none)
    every = replace(so, ban=Ban((7, 325), "both"), delta=None, interval=None, p=None, q=None, stopped="futility")
    return make_sweep(
        [so, every, placebo, never],
        tokenizer_sha256="f" * 64,
        counts={"tested": VerdictCounts(method={"pillar": 1}, paper={"pillar": 1}, corrected=None)},
        correlations=[Correlation("kl", rho=None, interval=None, p=None, n=1)],
    )


def test_knockouts_are_told_apart_by_role_in_their_order():
    sweep = small_sweep()
    names = {role: [knockout.ban.name for knockout in sweep.of_role(role)] for role in ("tested", "matched", "never")}
    assert names == {"tested": ["So", "both"], "matched": ["the"], "never": ["zz"]}


def test_the_frame_has_a_row_for_every_ban_with_counts_for_lists():
    frame = small_sweep().to_frame()
    assert frame["name"].tolist() == ["So", "both", "the", "zz"]
    assert frame["ids"].tolist() == [(325,), (7, 325), (7,), (8,)]
    assert frame["role"].tolist() == ["tested", "tested", "matched", "never"]
    assert frame["verdict"].tolist() == ["pillar", "pillar", "undecided", "neutral"]
    assert frame["lost"].tolist() == [2, 2, 2, 0]
    assert frame["gained"].tolist() == [1, 1, 1, 0]
    assert frame["replaced_by"].fillna("nothing").tolist() == ["Thus", "Thus", "Thus", "nothing"]
    assert frame["delta"].isna().tolist() == [False, True, False, False]
    assert frame.loc[0, ["delta", "p", "q", "detectable", "n_looked", "n_rollouts", "n_prompts"]].tolist() == [
        -0.05, 0.02, 0.03, 0.04, 40, 3, 2,
    ]  # fmt: skip
    assert frame.loc[0, "interval"] == (-0.09, -0.01)
    assert frame.loc[0, ["length", "truncated", "first_difference", "first_difference_share"]].tolist() == [
        1.5, 0.0, 4.0, 0.25,
    ]  # fmt: skip


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_delta_that_is_no_number_is_never_written(tmp_path, broken):
    sweep = small_sweep()
    sweep = replace(sweep, knockouts=[replace(sweep.knockouts[0], delta=broken)])
    with pytest.raises(ValueError, match="not JSON compliant"):
        sweep.save(tmp_path / "knockout.json")
    assert not (tmp_path / "knockout.json").exists()


@pytest.mark.parametrize("content", ["", "{", "\x00\x01", '{"schema_version": 1'])
def test_a_file_that_is_cut_short_is_refused(tmp_path, content):
    path = tmp_path / "knockout.json"
    path.write_text(content)
    with pytest.raises(RocktokensError, match=r"knockout\.json is not valid JSON .*: write it again"):
        KnockoutSweep.load(path)


def test_a_missing_file_says_what_writes_it(tmp_path):
    with pytest.raises(RocktokensError, match=r"does not exist: run `rocktokens knockout` first"):
        KnockoutSweep.load(tmp_path / "knockout.json")


def drop(record: dict, name: str) -> dict:
    return {key: value for key, value in record.items() if key != name}


FIELDS = r"is no knockout\.json \(.*\): write it again with `rocktokens knockout`"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda r: {**r, "schema_version": 4}, "has schema_version 4, this rocktokens reads 3: use the version that"),
        (lambda r: drop(r, "schema_version"), "has schema_version None, this rocktokens reads 3"),
        (lambda r: {**r, "schema_version": 1, "settings": 3}, FIELDS),
        (lambda r: [r], "is not a JSON object: write it again with `rocktokens knockout`"),
        (lambda r: drop(r, "knockouts"), FIELDS),
        (lambda r: drop(r, "noise"), FIELDS),
        (lambda r: {**r, "later": 1}, FIELDS),
        (lambda r: {**r, "settings": drop(r["settings"], "alpha")}, FIELDS),
        (lambda r: {**r, "baseline": {}}, FIELDS),
        (lambda r: {**r, "noise": {**r["noise"], "later": 1}}, FIELDS),
        (lambda r: {**r, "counts": {"others": {}}}, FIELDS),
        (lambda r: {**r, "knockouts": 3}, FIELDS),
        (lambda r: {**r, "knockouts": ["So"]}, FIELDS),
        (lambda r: {**r, "knockouts": [drop(r["knockouts"][0], "verdict")]}, FIELDS),
        (lambda r: {**r, "knockouts": [drop(r["knockouts"][0], "bounds")]}, FIELDS),
        (lambda r: {**r, "knockouts": [{**r["knockouts"][0], "interval": 0.1}]}, FIELDS),
        (lambda r: {**r, "knockouts": [{**r["knockouts"][0], "ban": {"name": "So"}}]}, FIELDS),
        (lambda r: {**r, "knockouts": [{**r["knockouts"][0], "changes": []}]}, FIELDS),
        (lambda r: {**r, "knockouts": [{**r["knockouts"][0], "changes": {"lost": [3]}}]}, FIELDS),
    ],
)
def test_a_newer_or_damaged_file_is_refused_in_one_sentence(tmp_path, damage, sentence):
    path = tmp_path / "knockout.json"
    small_sweep().save(path)
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(RocktokensError, match=rf"knockout\.json {sentence}") as caught:
        KnockoutSweep.load(path)
    assert "\n" not in str(caught.value)


def test_a_file_of_schema_1_is_read_and_says_that_its_intervals_are_of_a_bootstrap(tmp_path):
    path = tmp_path / "knockout.json"
    small_sweep().save(path)
    record = json.loads(path.read_text())
    old = {**drop(record, "neutral"), "schema_version": 1}
    old["settings"] = {**drop(record["settings"], "interval"), "resamples": 10_000}
    old["knockouts"] = [drop(drop(own, "neutral_prompts"), "lost_in_gold") for own in record["knockouts"]]
    path.write_text(json.dumps(old))
    loaded = KnockoutSweep.load(path)
    expected = small_sweep()
    assert loaded == replace(expected, neutral=None, settings=replace(expected.settings, interval="bootstrap"))


def test_a_notebook_shows_the_verdicts_and_no_token_as_markup():
    sweep = small_sweep()
    named = replace(sweep, settings=replace(SETTINGS, n_prompts=40))
    tally = "2 bans: 2 pillar, 0 stumbling, 0 neutral, 0 undecided"
    assert repr(named) == f"KnockoutSweep(step 4 on wordmath, 40 prompts; {tally})"
    assert len(sweep) == 4
    hostile = replace(sweep.knockouts[0], ban=Ban((9,), "<b>\n"))
    shown = replace(named, knockouts=[hostile, *sweep.knockouts[1:]])._repr_html_()
    assert "<b>" not in shown and "&lt;b&gt;⏎" in shown
    assert "<td>−5.0 [−9.0, −1.0]</td><td>pillar</td>" in shown and "<td>—</td>" in shown


def test_a_sweep_draws_itself():
    drawn = small_sweep().plot_forest().to_dict()
    assert "step 4 on wordmath" in str(drawn["title"]) and "So" in str(drawn["datasets"])
