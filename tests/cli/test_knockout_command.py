"""The command on a small run: its numbers against banning by hand, what it keeps, and what it writes back."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from command_line import FinishedRun, changed, refuse, require_sound, rocktokens, snapshot, succeed

from rocktokens.classes import TokenClasses
from rocktokens.config import evaluation_task, load_config
from rocktokens.knockout.journal import RunJournal
from rocktokens.knockout.records import KnockoutSweep
from rocktokens.models.load import load_model
from rocktokens.rollouts.encode import encode_prompt
from rocktokens.rollouts.sampler import SampleRequest, make_sampler
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.tasks import make_task
from rocktokens.types import RockSet

PROMPTS = 8


def knockout(run: Path, *options: str) -> tuple[str, ...]:
    """The command with few prompts and placebos."""
    few = changed("knockout.matched=3", "knockout.never=2")
    return ("knockout", str(run), "--prompts", str(PROMPTS), *few, *options)


@pytest.fixture(scope="module")
def swept(finished: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose rocks were all banned; tests that write take a copy of it."""
    run = shutil.copytree(finished.path, tmp_path_factory.mktemp("swept") / "run")
    succeed(*knockout(run))
    return run


@pytest.fixture
def copy(swept: Path, tmp_path: Path) -> Path:
    return shutil.copytree(swept, tmp_path / "copy")


def decoded(run: Path) -> dict[str, str]:
    """What sweeps have decoded, by file."""
    return {path: sha for path, sha in snapshot(run).items() if path.startswith("knockout/")}


def sweep_of(run: Path) -> KnockoutSweep:
    return KnockoutSweep.load(run / "knockout.json")


def accuracy(run: Path, temperature: float, banned: frozenset[int]) -> float:
    """By hand: the same prompts, every answer decoded from its start."""
    config = load_config(run / "config.toml")
    loaded, task = load_model(str(run / "checkpoints/step-4"), device="cpu"), make_task(evaluation_task(config))
    prompts = task.prompts(PROMPTS, derive_seed(config.run.seed, "evaluation prompts"))
    completions = make_sampler(config, loaded).sample(
        [SampleRequest(p.id, encode_prompt(loaded.tokenizer, p, True, 512), 0, banned) for p in prompts],
        temperature=temperature,
        max_new_tokens=config.rollouts.max_completion_length,
        seed=derive_seed(config.run.seed, "evaluation"),
    )
    texts = [loaded.tokenizer.decode(own.token_ids.tolist(), skip_special_tokens=True) for own in completions]
    return sum(map(task.grade, prompts, texts)) / PROMPTS


# Numbers


@pytest.mark.parametrize("options", [(), ("--greedy",)], ids=["sampled", "greedy"])
def test_changes_are_those_of_banning_by_hand(swept: Path, tmp_path: Path, options: tuple[str, ...]):
    run = shutil.copytree(swept, tmp_path / "run") if options else swept
    if options:
        succeed(*knockout(run, *options))
    sweep, temperature = sweep_of(run), 0.0 if options else 1.0
    assert sweep.settings.temperature == temperature
    free = accuracy(run, temperature, frozenset())
    assert sweep.baseline.accuracy == free
    assert any(own.delta for own in sweep.knockouts)
    for own in sweep.knockouts:
        assert own.delta == pytest.approx(accuracy(run, temperature, frozenset(own.ban.ids)) - free), own.ban


def test_without_a_ban_it_is_the_accuracy_that_evaluate_reports(swept: Path, copy: Path):
    settings = changed(f"evaluation.num_prompts={PROMPTS}")
    [record] = succeed("evaluate", copy, *settings, "--json").record["evaluations"]
    baseline = sweep_of(swept).baseline
    assert baseline.accuracy == record["accuracy"]
    assert [*baseline.interval] == record["wilson_interval"]
    assert baseline.mean_length == record["mean_response_length"]


def test_temperature_is_the_sections_then_the_evaluations(copy: Path):
    few = (*knockout(copy, "--top", "1", "--json"), *changed("knockout.num_prompts=2", "evaluation.temperature=0.5"))
    assert succeed(*few).record["settings"]["temperature"] == 0.5
    assert succeed(*few, *changed("knockout.temperature=0.25")).record["settings"]["temperature"] == 0.25
    assert succeed(*few, *changed("knockout.temperature=0.25"), "--greedy").record["settings"]["temperature"] == 0


def test_stopping_when_nothing_can_change_changes_no_verdict(swept: Path, copy: Path):
    succeed(*knockout(copy, "--curtail"))
    sweep = sweep_of(copy)
    assert sweep.settings.mode == "curtailed" and any(own.stopped for own in sweep.knockouts)
    assert [own.verdict for own in sweep.knockouts] == [own.verdict for own in sweep_of(swept).knockouts]
    assert sweep.cost.decoded_tokens < sweep_of(swept).cost.decoded_tokens


def test_sequential_is_passed_on(copy: Path):
    assert succeed(*knockout(copy, "--sequential", "--json")).record["settings"]["mode"] == "sequential"


# What is written


def test_json_is_what_the_file_has(swept: Path, copy: Path):
    record = succeed(*knockout(copy, "--json")).record
    assert {"schema_version": 1, **record} == json.loads((copy / "knockout.json").read_text(encoding="utf-8"))
    assert (copy / "knockout.json").read_bytes() == (swept / "knockout.json").read_bytes()
    require_sound(copy)


def test_verdicts_of_the_tested_rocks_are_written_back(finished: FinishedRun, swept: Path):
    before, after = RockSet.load(finished.path / "rocks.json"), RockSet.load(swept / "rocks.json")
    found = {own.ban.ids[0]: own for own in sweep_of(swept).of_role("tested")}
    ends = load_model("pebbles-student", device="cpu").eos_ids
    assert [own.ban.ids[0] for own in found.values()] == [token.id for token in before.tokens if token.id not in ends]
    for old, new in zip(before.tokens, after.tokens, strict=True):
        own = found.get(new.id)
        judged = ("untested", None, None) if own is None else (own.verdict, own.delta, own.interval)
        assert (new.verdict, new.delta, new.delta_interval) == judged
        assert (new.id, new.text, new.rank, new.score_ctx) == (old.id, old.text, old.rank, old.score_ctx)
    assert after.criterion == before.criterion and after.summary == before.summary


def test_an_end_token_among_the_rocks_is_left_out_and_said(finished: FinishedRun, copy: Path):
    """Should find ever rank none here, this puts one first."""
    rocks = json.loads((finished.path / "rocks.json").read_text(encoding="utf-8"))
    [end] = load_model("pebbles-student", device="cpu").eos_ids
    others = [token for token in rocks["tokens"] if token["id"] != end]
    tokens = [{**others[0], "id": end, "text": "<|end|>", "category": "other"}, *others]
    RunDir(copy).commit_text("rocks.json", json.dumps({**rocks, "tokens": tokens}))
    outcome = succeed(*knockout(copy, "--top", "2", "--json"))
    assert "never banned, since no answer could end without them: '<|end|>'" in outcome.record["warnings"]
    tested = [own["ban"]["name"] for own in outcome.record["knockouts"] if own["ban"]["role"] == "tested"]
    assert tested == [token["text"] for token in others[:2]]


def test_rocks_that_are_not_tested_keep_what_they_had(swept: Path, copy: Path):
    """A laxer rule judges two of them."""
    succeed(*knockout(copy, "--top", "2"), *changed("knockout.margin=1", "knockout.epsilon=1"))
    before, after = RockSet.load(swept / "rocks.json").tokens, RockSet.load(copy / "rocks.json").tokens
    tested = {own.ban.ids[0] for own in sweep_of(copy).of_role("tested")}
    assert len(tested) == 2
    assert [token for token in after if token.id not in tested] == [t for t in before if t.id not in tested]
    assert {token.verdict for token in after if token.id in tested} == {"neutral"}
    assert "neutral" not in {token.verdict for token in before if token.id in tested}


def test_the_papers_rule_is_shown_and_written_back_and_recorded_beside_ours(swept: Path, copy: Path):
    shown = succeed(*knockout(copy, "--rule", "paper")).stdout
    assert (copy / "knockout.json").read_bytes() == (swept / "knockout.json").read_bytes()
    found = {own.ban.ids[0]: own.paper_verdict for own in sweep_of(copy).of_role("tested")}
    verdicts = {token.id: token.verdict for token in RockSet.load(copy / "rocks.json").tokens}
    assert {token_id: verdicts[token_id] for token_id in found} == found
    assert {own.verdict for own in sweep_of(swept).of_role("tested")} & {"undecided"}
    conclusion, rest = " ".join(shown.split()).split("0 are undecided (by our rule ", maxsplit=1)
    assert "undecided" not in conclusion + rest


def test_another_search_shows_the_verdicts_that_are_known(swept: Path, copy: Path):
    verdicts = {own.ban.ids[0]: own.verdict for own in sweep_of(swept).of_role("tested")}
    shown = succeed("find", copy, "--show", "99").stdout
    rocks = RockSet.load(copy / "rocks.json").tokens
    assert {token.verdict for token in rocks} == {"untested"}
    rows = {line.split()[0]: line.split()[-1] for line in shown.splitlines() if line.strip()[:1].isdigit()}
    assert {token.id: rows[str(token.rank)] for token in rocks if token.id in verdicts} == verdicts
    succeed(*knockout(copy, "--checkpoint", "teacher"))
    assert "if banned" not in succeed("find", copy).stdout


def test_a_set_is_banned_at_once_and_judges_no_rock(swept: Path, copy: Path):
    record = succeed(*knockout(copy, "--together", "--controls", "--json"), *changed("knockout.tolerance=1")).record
    [rocks] = (own["ban"] for own in record["knockouts"] if own["ban"]["role"] == "tested")
    [controls] = (own["ban"] for own in record["knockouts"] if own["ban"]["role"] == "matched")
    assert rocks["name"] == f"{len(rocks['ids'])} rocks" and controls["name"] == f"controls of {rocks['name']}"
    assert len(controls["ids"]) == len(rocks["ids"]) and not set(controls["ids"]) & set(rocks["ids"])
    assert [sum(record["counts"][role]["method"].values()) for role in ("tested", "matched")] == [1, 1]
    assert (copy / "rocks.json").read_bytes() == (swept / "rocks.json").read_bytes()


def test_rocks_say_where_their_verdicts_come_from(finished: FinishedRun, swept: Path, copy: Path):
    before, source = RockSet.load(finished.path / "rocks.json").source, RockSet.load(swept / "rocks.json").source
    verdicts = {
        "model": "step 4",
        "n_prompts": PROMPTS,
        "num_samples": 1,
        "temperature": 1.0,
        "mode": "exact",
        "seed": sweep_of(swept).settings.seed,
        "rule": "method",
    }
    assert source == {**before, "verdicts": verdicts} and "verdicts" not in before
    succeed(*knockout(copy, "--top", "1", "--rule", "paper", "--curtail", "--samples", "2", "--greedy"))
    changes = {"num_samples": 2, "temperature": 0, "mode": "curtailed", "rule": "paper"}
    assert RockSet.load(copy / "rocks.json").source["verdicts"] == {**verdicts, **changes}


def test_a_sweep_that_tests_no_rock_leaves_the_rocks_alone(finished: FinishedRun, tmp_path: Path):
    run = shutil.copytree(finished.path, tmp_path / "run")
    before = (run / "rocks.json").read_bytes()
    other = next(token for token in range(20, 99) if token not in RockSet.load(run / "rocks.json").ids)
    shown = succeed(*knockout(run, "--id", str(other), "--prompts", "2")).stdout
    assert [own.ban.ids for own in sweep_of(run).of_role("tested")] == [(other,)]
    assert (run / "rocks.json").read_bytes() == before
    assert str(run / "knockout.json") in shown and str(run / "rocks.json") not in shown


@pytest.mark.parametrize("model", ["pebbles-teacher", "teacher"])
def test_other_models_say_nothing_about_these_rocks(finished: FinishedRun, tmp_path: Path, model: str):
    run = shutil.copytree(finished.path, tmp_path / "run")
    shown = succeed(*knockout(run, "--checkpoint", model, "--top", "2", "--prompts", "2")).stdout
    assert [own.ban.ids[0] for own in sweep_of(run).of_role("tested")]
    assert (run / "rocks.json").read_bytes() == (finished.path / "rocks.json").read_bytes()
    assert str(run / "rocks.json") not in shown
    require_sound(run)


def test_types_can_be_named(copy: Path):
    """And then no rock is missed."""
    record = succeed(*knockout(copy, "--text", "So", "--id", "20", "--json")).record
    assert [own["ban"]["name"] for own in record["knockouts"] if own["ban"]["role"] == "tested"] == ["1", "So"]
    assert not [warning for warning in record["warnings"] if "never banned" in warning]


def test_rocks_can_be_chosen_by_label(copy: Path):
    label = RockSet.load(copy / "rocks.json").tokens[-1].label
    ends = load_model(str(copy / "checkpoints/step-4"), device="cpu").eos_ids
    own = [token.id for token in RockSet.load(copy / "rocks.json").tokens if token.label == label]
    record = succeed(*knockout(copy, "--label", str(label), "--json")).record
    tested = [own["ban"]["ids"] for own in record["knockouts"] if own["ban"]["role"] == "tested"]
    assert tested == [[token_id] for token_id in own if token_id not in ends]
    refuse(*knockout(copy, "--label", "sturdy"), naming=("knockout.labels", "sturdy"))
    older = json.loads((copy / "rocks.json").read_text(encoding="utf-8")) | {"schema_version": 1}
    for token in older["tokens"]:
        token.pop("label")
    RunDir(copy).commit_text("rocks.json", json.dumps(older))
    refuse(*knockout(copy, "--label", "stuck"), naming=("knockout.labels needs rocks with labels", "rocktokens find"))


def test_the_tables_say_what_the_file_says(swept: Path, copy: Path):
    shown = succeed(*knockout(copy, "--show", "2", "--verbose")).stdout
    sweep = sweep_of(swept)
    assert f"the 2 of {len(sweep.of_role('tested'))} bans that change most" in shown
    assert f"0 of {PROMPTS} rollouts differ" in shown and "step 4 at temperature 1 on wordmath" in shown
    assert f"{100 * sweep.detectable.single:.1f} points" in shown.replace("\n", " ")
    assert str(copy / "knockout.json") in shown and str(copy / "rocks.json") in shown


# What is kept


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--top", "2", *changed("knockout.matched=0")),
        ("--rule", "paper"),
        ("--sequential",),
        tuple(changed("knockout.alpha=0.2")),
        tuple(changed("evaluation.num_prompts=7", "find.k=3")),
    ],
    ids=["same", "fewer", "paper", "sequential", "rule", "sections"],
)
def test_what_was_decoded_is_not_decoded_again(swept: Path, copy: Path, options: tuple[str, ...]):
    succeed(*knockout(copy, *options))
    assert decoded(copy) == decoded(swept)


def test_more_bans_add_to_what_is_there(swept: Path, copy: Path):
    succeed(*knockout(copy, "--text", " the"))
    before, after = decoded(swept), decoded(copy)
    assert before.items() < after.items()
    assert {path.rsplit("/", 1)[0] for path in after} == {path.rsplit("/", 1)[0] for path in before}


@pytest.mark.parametrize(
    "options",
    [
        ("--greedy",),
        ("--samples", "2"),
        ("--checkpoint", "0"),
        tuple(changed("rollouts.max_completion_length=50")),
        tuple(changed("evaluation.task.max_steps=2", "evaluation.task.split=test")),
        tuple(changed("run.seed=2")),
    ],
    ids=["temperature", "samples", "model", "length", "task", "seed"],
)
def test_other_conditions_share_nothing(swept: Path, copy: Path, options: tuple[str, ...]):
    succeed(*knockout(copy, "--top", "1", *options))
    before, after = decoded(swept), decoded(copy)
    assert before.items() <= after.items()
    assert len({path.rsplit("/", 1)[0] for path in after}) == 2


def test_the_same_weights_under_another_config_share_nothing(swept: Path, copy: Path, tmp_path: Path):
    """The checkpoint elsewhere is the same model; with another epsilon in its norms it is not."""
    model = shutil.copytree(copy / "checkpoints/step-4", tmp_path / "model")
    succeed(*knockout(copy, "--checkpoint", str(model)))
    assert decoded(copy) == decoded(swept)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    assert config["rms_norm_eps"] < 0.5
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}), encoding="utf-8")
    succeed(*knockout(copy, "--checkpoint", str(model), "--top", "1"))
    before, after = decoded(swept), decoded(copy)
    assert before.items() < after.items()
    assert len({path.rsplit("/", 1)[0] for path in after}) == 2
    free = {(copy / path).read_bytes() for path in after if path.endswith("free.parquet")}
    assert len(free) == 2


def test_decoded_bans_that_were_changed_are_refused(copy: Path):
    part = next(copy / path for path in decoded(copy) if "part-" in path)
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    outcome = rocktokens(*knockout(copy))
    assert outcome.code == 2 and part.name in outcome.stderr and "SHA-256" in outcome.stderr


def test_an_interrupt_loses_nothing_that_was_decoded(
    finished: FinishedRun, swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, calls = shutil.copytree(finished.path, tmp_path / "run"), []
    add = RunJournal.add

    def add_until_interrupted(*arguments: Any) -> None:
        add(*arguments)
        calls.append(arguments)
        if len(calls) == 20:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunJournal, "add", add_until_interrupted)
    outcome = rocktokens(*knockout(run))
    monkeypatch.undo()
    assert outcome.code == 130 and "interrupted; what was committed is kept" in outcome.stderr
    [conditions] = {path.split("/")[1] for path in decoded(run)}
    assert len(RunJournal(RunDir(run), conditions).finished) == len(calls) == 20
    succeed(*knockout(run))
    assert (run / "knockout.json").read_bytes() == (swept / "knockout.json").read_bytes()
    assert (run / "rocks.json").read_bytes() == (swept / "rocks.json").read_bytes()
    require_sound(run)


def test_classes_are_tested_with_the_options_of_a_sweep_and_verdicts_are_written_back(copy: Path):
    rocks, swept = (copy / "rocks.json").read_bytes(), (copy / "knockout.json").read_bytes()
    tokenizer = load_model(str(copy / "checkpoints/step-4"), device="cpu").tokenizer
    RunDir(copy).commit("classes.json", TokenClasses.from_texts(tokenizer, [["\n", "\n\n"]]).save)
    asked = knockout(copy, "--classes", "--greedy", "--samples", "1", "--curtail")
    found = succeed(*asked, "--json").record
    settings = found["sweep"]["settings"]
    assert (settings["n_prompts"], settings["temperature"], settings["mode"]) == (PROMPTS, 0.0, "curtailed")
    [tested] = TokenClasses.load(copy / "classes.json")
    assert [list(tested.ids), list(tested.banned)] == [found["classes"][0]["ids"], found["classes"][0]["banned"]]
    assert "untested" not in (*tested.banned, *tested.forced, tested.verdict)
    shown = succeed(*asked).stdout
    assert shown.startswith("The only class is undecided.")
    assert "knockout-classes.json" in shown and "classes and their verdicts:" in shown
    assert ((copy / "rocks.json").read_bytes(), (copy / "knockout.json").read_bytes()) == (rocks, swept)
    require_sound(copy)
