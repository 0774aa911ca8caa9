"""Classes tested with bans: replacements against decoding by hand, verdicts, what is written, resumed and refused."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rocktokens.classes import TokenClasses
from rocktokens.config import Config, parse_config
from rocktokens.errors import RocktokensError
from rocktokens.knockout.class_links import judge_links
from rocktokens.knockout.class_records import ClassSweep, Replacement, banned_in, forced_in
from rocktokens.knockout.classes import is_safe, knockout_classes
from rocktokens.knockout.journal import RunJournal
from rocktokens.knockout.records import BanKey, Knockout
from rocktokens.models.load import load_model
from rocktokens.rollouts.encode import encode_prompt
from rocktokens.rollouts.sampler import SampleRequest, TransformersSampler
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.tasks import make_task
from rocktokens.types import Rollout

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="depends on how the library rounds")
PROMPTS = 48
STUDENT = load_model("pebbles-student", device="cpu")


def token_id(text: str) -> int:
    [only] = STUDENT.tokenizer.encode(text, add_special_tokens=False)
    return only


ONE, TWO, SO, NOW, WAIT, STARS = map(token_id, ("\n", "\n\n", "So", "Now", "Wait", "**"))
CANDIDATES = {(ONE, TWO): 0.9, (SO, WAIT): 0.8, (SO, NOW): 0.7, (WAIT, NOW): 0.6, (STARS, SO): 0.5, (TWO, STARS): 0.95}
"""Line breaks and markers compete; bold does with neither, and is linked more strongly than they are."""


def make_config(run: Path, *overrides: str) -> Config:
    return parse_config(
        f"""
[run]
directory = "{run}"
seed = 1
[models]
student = "pebbles-student"
teacher = "pebbles-teacher"
device = "cpu"
[rollouts]
max_completion_length = 90
[trace]
checkpoints = ["pebbles-student"]
[knockout]
num_prompts = {PROMPTS}
never = 2
""",
        list(overrides),
    )


def candidates(links: dict[tuple[int, int], float] | None = CANDIDATES, **settings: Any) -> TokenClasses:
    source = {} if links is None else {"links": [[a, b, strength] for (a, b), strength in links.items()]}
    classes = TokenClasses.from_texts(STUDENT.tokenizer, [["\n", "\n\n"], ["So", "Now", "Wait"]])
    known = {"tokenizer_sha256": classes.tokenizer_sha256, "source": source, "criterion": {"share": 0.1}, **settings}
    return TokenClasses([each.ids for each in classes], **known)


def make_run(path: Path, classes: TokenClasses) -> RunDir:
    run = RunDir(path)
    run.commit(run.classes.name, classes.save)
    return run


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, ClassSweep]:
    run = make_run(tmp_path_factory.mktemp("classes") / "run", candidates())
    return run, knockout_classes(run, make_config(run.path), checkpoint="student")


def free_rollouts(run: RunDir, found: ClassSweep) -> list[Rollout]:
    assert found.sweep.settings.conditions is not None
    return RunJournal(run, found.sweep.settings.conditions.digest).free() or []


def replaced_by_hand(config: Config, free: list[Rollout], banned: int) -> Counter[int]:
    """Decode every prompt from its start under the ban; what stands where the free answer first has the token."""
    prompts = make_task(config.task.model_copy(update={"split": "test"})).prompts(
        PROMPTS, derive_seed(config.run.seed, "evaluation prompts")
    )
    requests = [
        SampleRequest(prompt.id, encode_prompt(STUDENT.tokenizer, prompt, True, 512), 0, frozenset({banned}))
        for prompt in prompts
    ]
    sampler = TransformersSampler(STUDENT.model, STUDENT.eos_ids, STUDENT.pad_id, threads=1)
    written = sampler.sample(
        requests, temperature=1.0, max_new_tokens=90, seed=derive_seed(config.run.seed, "evaluation")
    )
    return Counter(
        int(own.token_ids[np.flatnonzero(rollout.token_ids == banned)[0]])
        for own, rollout in zip(written, free, strict=True)
        if banned in rollout.token_ids
    )


@needs_mkl
def test_a_link_stays_where_both_tokens_replace_each_other(tested):
    run, found = tested
    free = free_rollouts(run, found)
    by_hand = {token: replaced_by_hand(make_config(run.path), free, token) for token in (TWO, STARS)}
    assert {(own.a, own.b): own.strength for own in found.links} == CANDIDATES
    for own in found.links:
        for banned, other, shown in ((own.a, own.b, own.b_for_a), (own.b, own.a, own.a_for_b)):
            if banned in by_hand:
                places = by_hand[banned].total()
                assert shown == Replacement(places, by_hand[banned][other] / places if places >= 5 else None)
    kept = {(own.a, own.b) for own in found.links if own.kept}
    assert kept == {pair for pair in CANDIDATES if STARS not in pair}
    assert {each.ids for each in found.classes} == {tuple(sorted((ONE, TWO))), tuple(sorted((SO, NOW, WAIT)))}


def test_every_class_has_the_verdicts_of_its_bans(tested):
    _, found = tested
    own_of = {own.ban.key: own for own in found.sweep.of_role("tested")}
    expected: set[BanKey] = set()
    for each in found.classes:
        expected |= {BanKey(each.ids), *(BanKey((member,)) for member in each.ids)}
        for member, banned, forced in zip(each.ids, each.banned, each.forced, strict=True):
            others = tuple(sorted(set(each.ids) - {member}))
            assert banned == own_of[BanKey((member,), others)].verdict
            assert forced == own_of[BanKey(others, (member,))].verdict
            expected |= {BanKey((member,), others), BanKey(others, (member,))}
        assert each.verdict == own_of[BanKey(each.ids)].verdict
        assert each.safe == is_safe(found.within(each.ids))
        within = [own.ban.key for own in found.within(each.ids)]
        assert len(within) == len(set(within)) == (2 if len(each.ids) == 2 else 6)
    assert own_of.keys() == expected  # five for the pair, ten for the three
    assert len(own_of) == 5 + 10
    assert own_of[BanKey((ONE,))].verdict == "pillar"
    assert own_of[BanKey((ONE,), (TWO,))].verdict in ("neutral", "undecided")


def test_what_is_written_can_be_read_and_tested_again_to_the_same_bytes(tested, monkeypatch):
    run, found = tested
    assert ClassSweep.load(run.verified("knockout-classes.json")) == found
    classes = TokenClasses.load(run.verified("classes.json"))
    assert classes.classes == found.classes
    assert all(each.texts == tuple(STUDENT.tokenizer.decode([own]) for own in each.ids) for each in classes)
    assert classes.source == candidates().source
    assert classes.criterion["share"] == 0.1
    assert classes.criterion["tested"]["n_prompts"] == PROMPTS
    before = {path.name: path.read_bytes() for path in (run.classes, run.knockout_classes)}
    monkeypatch.setattr(RunJournal, "add", lambda *_: pytest.fail("what was decoded is decoded again"))
    assert knockout_classes(run, make_config(run.path), checkpoint="student") == found
    assert {path.name: path.read_bytes() for path in (run.classes, run.knockout_classes)} == before


@needs_mkl
def test_an_interrupted_test_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    run, other = (make_run(tmp_path / name, candidates({(ONE, TWO): 1.0})) for name in ("run", "other"))
    few = f"knockout.num_prompts={PROMPTS // 4}"
    found = knockout_classes(run, make_config(run.path, few), checkpoint="student")
    calls, add = [], RunJournal.add

    def add_until_interrupted(*arguments: Any) -> None:
        add(*arguments)
        calls.append(arguments)
        if len(calls) == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunJournal, "add", add_until_interrupted)
    with pytest.raises(KeyboardInterrupt):
        knockout_classes(other, make_config(other.path, few), checkpoint="student")
    assert not other.knockout_classes.exists()
    assert TokenClasses.load(other.classes).classes == candidates().classes
    knockout_classes(other, make_config(other.path, few), checkpoint="student")
    assert other.knockout_classes.read_bytes() == run.knockout_classes.read_bytes()
    assert other.classes.read_bytes() == run.classes.read_bytes()
    keys = [key for _, key, _ in calls]
    assert 30 < len(keys) == len(set(keys)) == PROMPTS // 4 + found.sweep.cost.jobs


def test_curtailing_changes_no_class_and_no_verdict(tested, tmp_path):
    run, found = tested
    other = RunDir(shutil.copytree(run.path, tmp_path / "other"))
    curtailed = knockout_classes(other, make_config(run.path), checkpoint="student", mode="curtailed")
    assert (curtailed.classes, curtailed.links) == (found.classes, found.links)
    assert TokenClasses.load(other.classes).criterion["tested"]["mode"] == "curtailed"


def test_answers_of_another_model_leave_the_classes_as_they_were(tested, tmp_path):
    """Without links, as in a file made by hand, every pair of a class is linked."""
    run = make_run(tmp_path / "run", candidates(links=None))
    before = run.classes.read_bytes()
    config = make_config(run.path, "knockout.num_prompts=4", "rollouts.max_completion_length=20")
    found = knockout_classes(run, config, checkpoint="teacher")
    assert {(own.a, own.b, own.strength) for own in found.links} == {
        (ONE, TWO, 1.0), *((min(pair), max(pair), 1.0) for pair in ((SO, NOW), (SO, WAIT), (NOW, WAIT)))
    }  # fmt: skip
    assert all(own.b_for_a.share is None or own.b_for_a.places >= 5 for own in found.links)
    assert run.classes.read_bytes() == before
    assert run.lists("knockout-classes.json")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        # Without traces `find --classes` could not make it again.
        (lambda run: run.drop(["classes.json"]), "classes.json does not exist: restore it from a copy"),
        (lambda run: make_run(run.path, TokenClasses([])), "classes.json holds no classes to test: trace more prompts"),
        (lambda run: make_run(run.path, candidates(tokenizer_sha256="f" * 64)), "made with tokenizer ffffffffffff"),
        (lambda run: make_run(run.path, TokenClasses([[5, 99_999]])), "token id 99999 of the classes is outside the"),
        (lambda run: make_run(run.path, candidates(source={"links": [[1]]})), "do not say which tokens are linked"),
    ],
)
def test_classes_that_cannot_be_tested_are_refused_and_nothing_is_written(tmp_path, change, sentence):
    run = make_run(tmp_path / "run", candidates())
    change(run)
    before = sorted(path.name for path in run.path.iterdir())
    with pytest.raises(RocktokensError, match=sentence) as refused:
        knockout_classes(run, make_config(run.path), checkpoint="student")
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in run.path.iterdir()) == before


def test_a_token_that_ends_answers_is_never_banned(tmp_path):
    end = min(STUDENT.eos_ids)
    run = make_run(tmp_path / "run", candidates({(ONE, TWO): 1.0, (end, ONE): 2.0}))
    config = make_config(run.path, "knockout.num_prompts=4", "rollouts.max_completion_length=20")
    found = knockout_classes(run, config, checkpoint="student")
    assert [(own.a, own.b) for own in found.links] == [(ONE, TWO)]
    assert all(end not in own.ban.ids for own in found.sweep.knockouts)
    assert any(warning.startswith("never banned, since no answer could end") for warning in found.sweep.warnings)


# Parts


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({2: 1, 9: 9}, {1: 1, 9: 9}, (0.1, 0.1, True)),
        ({2: 10}, {1: 1, 9: 10}, (1.0, 1 / 11, False)),
        ({2: 1, 9: 10}, {1: 10}, (1 / 11, 1.0, False)),
        ({2: 10}, {9: 4}, (1.0, None, True)),
        ({9: 4}, {9: 4}, (None, None, True)),
        ({9: 5}, {9: 4}, (0.0, None, False)),
        ({}, {1: 5}, (None, 1.0, True)),
    ],
)
def test_a_link_needs_a_tenth_in_both_directions_of_what_five_places_can_tell(a, b, expected):
    [own] = judge_links({(1, 2): 0.5}, {1: Counter(a), 2: Counter(b)})
    assert (own.b_for_a.share, own.a_for_b.share, own.kept) == expected
    assert (own.b_for_a.places, own.a_for_b.places) == (sum(a.values()), sum(b.values()))


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["neutral", "neutral"], True),
        (["neutral", "undecided"], None),
        (["undecided"], None),
        (["neutral", "undecided", "pillar"], False),
        (["neutral", "stumbling"], False),
    ],
)
def test_a_class_is_safe_only_if_every_ban_within_it_is_neutral_and_was_seen_to_act(tested, verdicts, expected):
    [some, *_] = tested[1].sweep.knockouts

    def bans(n_changed: int | None) -> list[Knockout]:
        changes = replace(some.changes, n_changed=n_changed)
        acting = [replace(some, verdict=own, changes=replace(some.changes, n_changed=5)) for own in verdicts[:-1]]
        return [*acting, replace(some, verdict=verdicts[-1], changes=changes)]

    assert is_safe(bans(5)) is expected
    for too_few in (4, 0, None):
        assert is_safe(bans(too_few)) is (False if expected is False else None)


def test_forcing_one_of_two_is_banning_the_other_and_of_three_it_is_not():
    assert forced_in((3, 8), 3) == banned_in((3, 8), 8) == BanKey((8,), (3,))
    assert forced_in((3, 5, 8), 3) == BanKey((5, 8), (3,))
    assert banned_in((3, 5, 8), 5) == BanKey((5,), (3, 8))


def test_a_newer_or_damaged_file_is_refused(tested, tmp_path):
    _, found = tested
    path = tmp_path / "knockout-classes.json"
    replace(found, schema_version=2).save(path)
    with pytest.raises(
        RocktokensError, match="has schema_version 2, this rocktokens reads 1: use the version that wrote"
    ):
        ClassSweep.load(path)
    found.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "links": [[1, 2]]}))
    with pytest.raises(RocktokensError, match=r"is no knockout-classes\.json .*`rocktokens knockout --classes`"):
        ClassSweep.load(path)
