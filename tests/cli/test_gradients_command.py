"""The command on a small run: its numbers against the library, on prompts that did not select the rocks."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import FinishedRun, changed, other_tokenizer, refuse, require_sound, rocktokens, snapshot, succeed
from safetensors.torch import load_file
from scipy.sparse import csr_array

from rocktokens import RockSet, TraceStore, gradient_shares
from rocktokens.errors import RunDirError
from rocktokens.gradients.adam import AdamSettings
from rocktokens.gradients.held_out import hold_out, norm_ratio
from rocktokens.gradients.logit_space import logit_gradients
from rocktokens.gradients.logit_summary import persistence
from rocktokens.gradients.records import NormRatio
from rocktokens.gradients.type_gradients import describe_types, members
from rocktokens.inference.bootstrap import bootstrap_counts
from rocktokens.models.load import load_model
from rocktokens.rocks.selectors import Sample
from rocktokens.rocks.sums import prompts_of, split_prompts
from rocktokens.rollouts.store import read_rollouts
from rocktokens.run_dir import OPTIMIZER_FILE, RunDir, derive_seed
from rocktokens.studies.worker import drop_optimizers
from rocktokens.traces.store import SEARCHED
from rocktokens.types import Rollout

BATCHES = ("--batches", "4")
SEED = derive_seed(1, "gradients")


@pytest.fixture(scope="module")
def measured(finished: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose gradients were measured; tests that write take a copy of it."""
    run = shutil.copytree(finished.path, tmp_path_factory.mktemp("measured") / "run")
    succeed("gradients", run, *BATCHES)
    return run


@pytest.fixture(scope="module")
def record(measured: Path) -> dict[str, Any]:
    return record_of(measured)


@pytest.fixture
def copy(finished: FinishedRun, tmp_path: Path) -> Path:
    return shutil.copytree(finished.path, tmp_path / "copy")


def record_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "gradients.json").read_text(encoding="utf-8"))


def rollouts_of(run: Path, half: str) -> list[Rollout]:
    """Those of the prompts that selected the rocks, or of the others, by the split that ``find`` made."""
    criterion = RockSet.load(run / "rocks.json").criterion
    prompts = prompts_of(TraceStore(run).table(criterion["reference"]))
    wanted = getattr(split_prompts(prompts, criterion["split"], criterion["seed"]), half)
    return [own for own in read_rollouts(RunDir(run), "rollouts/probe/checkpoint=4.parquet") if own.prompt_id in wanted]


def count(rollouts: list[Rollout], ids: list[int]) -> int:
    return int(sum(np.isin(rollout.token_ids, ids).sum() for rollout in rollouts))


# Which tokens


def test_it_measures_on_the_prompts_that_did_not_select_the_rocks(measured: Path, record: dict[str, Any]):
    held_out, selecting = rollouts_of(measured, "measuring"), rollouts_of(measured, "selection")
    tokens = [sum(len(rollout.token_ids) for rollout in half) for half in (held_out, selecting)]
    assert tokens[0] != tokens[1]
    assert record["settings"]["measured_on"] == "held-out half"
    assert record["settings"]["n_prompts"] == record["settings"]["n_rollouts"] == len(held_out) == 4
    assert record["settings"]["n_tokens"] == tokens[0]
    for name, ids in record["groups"].items():
        occurrences = count(held_out, ids)
        assert record["trace"]["groups"][name]["n_occurrences"] == occurrences
        assert record["logit"]["reference"]["vocabulary"]["groups"][name]["n_occurrences"] == occurrences
        assert sum(record["parameter"]["shares"]["tokens"][name]) == occurrences


def test_groups_are_disjoint_and_hold_every_token(measured: Path, record: dict[str, Any]):
    groups = record["groups"]
    assert groups["rocks"] == sorted(RockSet.load(measured / "rocks.json").ids.tolist())
    everyone = [token_id for ids in groups.values() for token_id in ids]
    assert len(everyone) == len(set(everyone))
    held_out = rollouts_of(measured, "measuring")
    assert count(held_out, everyone) == sum(len(rollout.token_ids) for rollout in held_out)
    control = record["control"]
    assert control["n_matched"] == len(groups.get("control", []))
    everything = [*held_out, *rollouts_of(measured, "selection")]
    assert control["occurrences"] == count(everything, groups.get("control", []))
    assert control["rock_occurrences"] == count(everything, groups["rocks"])


def test_without_a_split_all_prompts_are_measured_on_and_it_says_so(copy: Path):
    succeed("find", copy, *changed("find.split=1"))
    held_out = hold_out(RunDir(copy), RockSet.load(copy / "rocks.json"), None, None)
    assert (held_out.measured_on, held_out.n_prompts, held_out.warnings) == ("selection half (no split)", 8, [])


def test_rocks_of_earlier_traces_leave_nothing_to_hold_out(copy: Path):
    rocks = replace(RockSet.load(copy / "rocks.json"), source={"manifest_sha256": "0" * 64})
    with pytest.raises(RunDirError, match="made from traces that this run never had"):
        hold_out(RunDir(copy), rocks, None, None)
    RunDir(copy).update_manifest(**{SEARCHED: ["0" * 64]})
    held_out = hold_out(RunDir(copy), rocks, None, None)
    assert (held_out.measured_on, held_out.n_prompts) == ("selection half (no split)", 8)
    assert held_out.warnings[0].startswith("rocks.json was found in other traces")


# Numbers


@pytest.fixture(scope="module")
def passes(measured: Path) -> Any:
    """The library's own passes over the held-out rollouts, by step."""
    teacher, held_out = load_model("pebbles-teacher", device="cpu"), rollouts_of(measured, "measuring")
    return {
        step: logit_gradients(
            load_model(str(measured / f"checkpoints/step-{step}"), device="cpu"), teacher, held_out, seed=SEED
        )
        for step in (0, 4)
    }


def plain(values: list[float | None]) -> np.ndarray:
    return np.array(values, dtype=np.float64)


@pytest.mark.parametrize("space", ["vocabulary", "hidden"])
def test_logit_space_is_what_the_library_says(passes: Any, record: dict[str, Any], space: Any):
    for role, step in (("reference", 4), ("baseline", 0)):
        frame = describe_types(passes[step], space).to_frame()
        types = record["logit"][role][space]["types"]
        for column in frame.columns:
            np.testing.assert_array_equal(
                plain(types[column]), frame[column].to_numpy(dtype=np.float64), err_msg=column
            )
    found = persistence(passes[0], passes[4], space)
    types = record["logit"]["persistence"][space]["types"]
    for column in ("cosine", "split_half_before", "split_half_after", "cross_half"):
        np.testing.assert_array_equal(plain(types[column]), getattr(found, column))


def test_the_cosine_with_the_others_leaves_rocks_and_the_type_out(passes: Any, record: dict[str, Any]):
    gradients = passes[4]
    everyone = np.arange(len(gradients.freq))
    means_UV = gradients.totals("vocabulary", everyone) / gradients.freq[:, None]
    is_rock_U = np.isin(gradients.token_ids, record["groups"]["rocks"])
    others_UV = means_UV[~is_rock_U].sum(axis=0) - np.where(is_rock_U[:, None], 0, means_UV)
    cosines_U = (means_UV * others_UV).sum(1) / np.linalg.norm(means_UV, axis=1) / np.linalg.norm(others_UV, axis=1)
    found = record["logit"]["reference"]["vocabulary"]
    np.testing.assert_allclose(plain(found["types"]["cos_others"]), cosines_U, atol=1e-9)
    np.testing.assert_allclose(plain(found["rocks"]["cos_others"]), cosines_U[is_rock_U], atol=1e-9)
    assert found["direction"]["median_first"] == pytest.approx(np.median(cosines_U[is_rock_U]))
    assert found["direction"]["median_second"] == pytest.approx(np.median(cosines_U[~is_rock_U]))


def test_rocks_of_one_line_share_a_direction(passes: Any, record: dict[str, Any]):
    gradients, rocks = passes[4], record["logit"]["reference"]["vocabulary"]["rocks"]
    sums_nV = gradients.totals("vocabulary", np.flatnonzero(members(gradients.token_ids, record["groups"]["rocks"])))
    units_nV = sums_nV / np.linalg.norm(sums_nV, axis=1, keepdims=True)
    reached = np.linalg.matrix_power((np.abs(units_nV @ units_nV.T) > 0.9).astype(float), len(units_nV)) > 0
    labels = np.array(rocks["direction"])
    np.testing.assert_array_equal(labels[:, None] == labels, reached)


def test_small_is_said_beside_all_high_kl_types(measured: Path, record: dict[str, Any]):
    """Controls among them too: the highest mean kl on the prompts that selected the rocks, by plain loops."""
    frame: Any = TraceStore(measured).table(4).execute()
    selects = frame["prompt_id"].isin({own.prompt_id for own in rollouts_of(measured, "selection")})
    rocks = set(record["groups"]["rocks"])
    kl_of: dict[int, list[float]] = {}
    for token_id, kl in frame.loc[selects, ["token_id", "kl"]].itertuples(index=False):
        kl_of.setdefault(int(token_id), []).append(float(kl))
    means = {token_id: np.mean(kl) for token_id, kl in kl_of.items() if len(kl) >= 2 and token_id not in rocks}
    highest = sorted(means, key=lambda token_id: -means[token_id])[: len(rocks)]
    held_out: Any = frame[~selects]
    by_set = [held_out[held_out["token_id"].isin(ids)] for ids in (rocks, highest)]
    found = record["trace"]["high_mean_kl"]
    assert found["n_types"] == by_set[1]["token_id"].nunique()
    assert (found["rocks_kl"], found["kl"]) == pytest.approx(tuple(own["kl"].mean() for own in by_set), rel=1e-4)
    norms = [own["grad_norm"].mean() for own in by_set]
    assert found["norm_ratio"]["ratio"] == pytest.approx(norms[0] / norms[1], rel=1e-4)


def test_coherence_is_that_of_the_rocks_and_of_the_others(passes: Any, record: dict[str, Any]):
    found = record["logit"]["reference"]["vocabulary"]
    coherence_U = describe_types(passes[4], "vocabulary").coherence.value
    is_rock_U = np.isin(passes[4].token_ids, record["groups"]["rocks"])
    np.testing.assert_array_equal(plain(found["rocks"]["coherence"]), coherence_U[is_rock_U])
    assert found["others"]["coherence"] == np.nanmedian(coherence_U[~is_rock_U])


def test_the_trace_has_the_norms_of_the_pass(record: dict[str, Any]):
    for name, group in record["logit"]["reference"]["vocabulary"]["groups"].items():
        traced = record["trace"]["groups"][name]
        assert traced["norm_share"] == pytest.approx(group["norm_share"], abs=1e-5)
        assert traced["mean_norm"] == pytest.approx(group["mean_norm"], rel=1e-4)
        low, high = traced["norm_share_interval"]
        assert low <= traced["norm_share"] <= high
    rocks, ratios = record["trace"]["groups"]["rocks"], record["trace"]["norm_ratios"]
    assert ratios["all"]["ratio"] == pytest.approx(rocks["norm_share"] / rocks["token_share"])
    assert ratios["rest"]["ratio"] == pytest.approx(rocks["mean_norm"] / record["trace"]["groups"]["rest"]["mean_norm"])


def test_ratios_of_norms_are_drawn_over_prompts():
    rng = np.random.default_rng(0)
    freq_CU, norm_CU = rng.integers(0, 5, (30, 3)), rng.integers(0, 1000, (30, 3))
    norm_CU *= freq_CU > 0
    empty = csr_array(np.zeros_like(freq_CU))
    sample = Sample(np.arange(3), csr_array(freq_CU), empty, csr_array(norm_CU))
    first_U, second_U = np.array([True, False, False]), np.array([False, True, True])

    def ratio(prompts: np.ndarray) -> float:
        means = [norm_CU[prompts][:, own].sum() / freq_CU[prompts][:, own].sum() for own in (first_U, second_U)]
        return means[0] / means[1]

    found = norm_ratio(sample, first_U, second_U, seed=3, draws=400)
    replicates = [ratio(np.repeat(np.arange(30), counts)) for counts in bootstrap_counts(30, 400, 3)]
    assert found.ratio == pytest.approx(ratio(np.arange(30)))
    assert found.interval == pytest.approx(np.quantile(replicates, [0.025, 0.975]))
    nobody_U = np.zeros(3, dtype=bool)
    assert norm_ratio(sample, first_U, nobody_U, seed=3) == NormRatio(None, None)


def test_parameter_space_is_what_the_library_says(measured: Path, record: dict[str, Any]):
    folder = measured / "checkpoints/step-4"
    student, state = load_model(str(folder), device="cpu"), load_file(folder / OPTIMIZER_FILE)
    *names, rest = record["parameter"]["shares"]["groups"]
    assert (names[0], rest) == ("rocks", "rest")
    shares = gradient_shares(
        student,
        load_model("pebbles-teacher", device="cpu"),
        rollouts_of(measured, "measuring"),
        {name: record["groups"][name] for name in names},
        batches=4,
        adam=AdamSettings(5e-4, 0.9, 0.99, 1e-8, max_grad_norm=1.0),
        optimizer_state=state,
    )
    assert json.loads(json.dumps(asdict(shares.summary()))) == record["parameter"]["shares"]
    own = shares.tokens_NA[:, 0] / shares.tokens_NA.sum(axis=1)
    excess = plain(record["parameter"]["shares"]["gradient"]["all"]["groups"]["rocks"]["share"]["values"]) - own
    np.testing.assert_allclose(plain(record["parameter"]["excess"]["rocks"]["values"]), excess)
    assert record["parameter"]["excess"]["rocks"]["mean"] == pytest.approx(excess.mean())


def test_categories_are_another_partition_of_the_same_gradient(record: dict[str, Any]):
    parameter = record["parameter"]
    by_group, by_category = parameter["shares"], parameter["categories"]["shares"]
    norms = [shares["gradient"]["all"]["norm"]["values"] for shares in (by_group, by_category)]
    np.testing.assert_allclose(*norms, rtol=1e-5)
    for shares in (by_group, by_category):
        totals = sum(plain(own["share"]["values"]) for own in shares["gradient"]["all"]["groups"].values())
        np.testing.assert_allclose(totals, 1, rtol=1e-6)
    token_share = record["logit"]["reference"]["vocabulary"]["categories"]
    for name, share in parameter["categories"]["token_share"].items():
        assert share == pytest.approx(token_share[name]["token_share"])


def test_claims_rest_on_the_record(record: dict[str, Any]):
    claims = {claim["name"]: claim for claim in record["claims"]}
    names = ["small", "total", "direction", "kept", "unmoved", "parameters", "adam", "cancels", "persists"]
    assert list(claims) == names
    rocks = record["trace"]["groups"]["rocks"]
    assert f"{100 * rocks['norm_share']:.1f} % of Σ‖g‖" in claims["total"]["sentence"]
    assert f"to {rocks['change']['kl_after']:.3f} nats" in claims["unmoved"]["sentence"]
    verdict = record["parameter"]["shares"]["update"]["effects"]["rocks"]["verdict"]
    expected = {"suppresses": "supported", "amplifies": "contradicted", "inconclusive": "inconclusive"}
    assert claims["adam"]["verdict"] == expected[verdict]


# Checkpoints and students


def test_the_next_step_has_the_learning_rate_of_the_schedule(copy: Path):
    """Asked of a run that stands at step 2: its checkpoint has a state of the optimizer."""
    states = [copy / f"checkpoints/step-{step}" / OPTIMIZER_FILE for step in (4, 2)]
    shutil.copy(*states)
    RunDir(copy).adopt([str(states[1].relative_to(copy))])
    parameter = succeed("gradients", copy, *BATCHES, "--checkpoint", "2", "--json").record["parameter"]
    logged = [json.loads(line) for line in (copy / "logs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert 0 < logged[2]["learning_rate"] < 5e-4
    assert parameter["optimizer"]["learning_rate"] == pytest.approx(logged[2]["learning_rate"])
    assert parameter["note"] == ""


def test_before_the_first_update_there_is_only_the_gradient(copy: Path):
    outcome = succeed("gradients", copy, *BATCHES, "--checkpoint", "0")
    record = record_of(copy)
    assert (record["settings"]["reference"], record["settings"]["baseline"]) == (0, 0)
    assert record["parameter"]["shares"]["update"] is None
    assert record["logit"]["persistence"] is record["logit"]["baseline"] is None
    assert "step-0 is before the first update, without optimizer state: only the gradient is shown" in " ".join(
        outcome.stdout.split()
    )
    unknown = {claim["name"] for claim in record["claims"] if claim["verdict"] == "inconclusive"}
    assert {"kept", "unmoved", "adam", "persists"} <= unknown
    require_sound(copy)


def test_a_checkpoint_whose_optimizer_was_dropped_shows_the_gradient(copy: Path):
    drop_optimizers(RunDir(copy))
    parameter = succeed("gradients", copy, *BATCHES, "--checkpoint", "2", "--json").record["parameter"]
    assert parameter["shares"]["update"] is None and "step-2 keeps no optimizer state" in parameter["note"]


def test_students_from_elsewhere_have_no_optimizer(finished: FinishedRun, tmp_path: Path):
    run = tmp_path / "run"
    students = [str(finished.path / f"checkpoints/step-{step}") for step in (0, 4)]
    settings = changed(f"run.directory={run}", f"trace.checkpoints={json.dumps(students)}")
    succeed("trace", finished.config, *settings)
    succeed("find", run)
    record = succeed("gradients", run, *BATCHES, "--json").record
    assert record["parameter"]["shares"]["update"] is None
    assert students[1] in record["parameter"]["note"]
    assert "layer 0 attention" in record["parameter"]["shares"]["blocks"]


def test_adapters_are_what_is_trained_also_where_the_schedule_has_ended(finished: FinishedRun, tmp_path: Path):
    run = tmp_path / "run"
    settings = changed(f"run.directory={run}", "lora.enabled=true", "lora.r=2", "find.stage=score")
    succeed("distill", finished.config, *settings, *changed("training.max_steps=2", "training.warmup_steps=0"))
    succeed("trace", run / "config.toml")
    succeed("find", run)
    record = succeed("gradients", run, *BATCHES, "--json").record
    blocks = record["parameter"]["shares"]["blocks"]
    assert {block.split()[0] for block in blocks} == {"layer"}
    assert record["parameter"]["optimizer"] == {"learning_rate": 5e-4}
    assert "the learning rate has run out" in record["parameter"]["note"]
    assert record["parameter"]["shares"]["update"]["effects"]["rocks"]["difference"]["mean"] is not None


# Files


def test_the_same_command_writes_the_same_bytes(measured: Path, tmp_path: Path):
    again = shutil.copytree(measured, tmp_path / measured.name)
    succeed("gradients", again, *BATCHES)
    assert snapshot(again) == snapshot(measured)
    require_sound(again)
    figures = {f"figures/gradient_{name}.png" for name in ("norm", "alignment", "kl", "blocks")}
    assert figures | {"gradients.json"} <= snapshot(again).keys()


def test_an_interrupt_loses_nothing(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = shutil.copytree(measured, tmp_path / "run")
    before = snapshot(run)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rocktokens.gradients.parameter_space.group_gradients", interrupted)
        outcome = rocktokens("gradients", run, *BATCHES)
    assert outcome.code == 130
    assert outcome.stderr.endswith("again (distill: with --resume)\n")
    assert snapshot(run) == before


def test_a_sketch_is_labelled_and_has_errors(copy: Path):
    shown = succeed("gradients", copy, *BATCHES, *changed("gradients.sketch_width=64")).stdout
    assert "a sketch of width 64, standard errors after ±" in shown
    found = record_of(copy)["logit"]["reference"]
    assert found["hidden"]["sketch"] is None
    assert found["vocabulary"]["groups"]["rocks"]["cos_pooled"]["error"] > 0


# Refusals


def test_no_rocks(copy: Path):
    RunDir(copy).drop(["rocks.json"])
    refuse("gradients", copy, naming=("rocks.json does not exist", "rocktokens find"))


def test_an_empty_set_of_rocks(copy: Path):
    succeed("find", copy, *changed("find.min_score=1e9"))
    refuse("gradients", copy, naming=("rocks.json holds no rocks", "rocktokens find"))


def test_no_probe(copy: Path):
    RunDir(copy).drop(["rollouts/probe/checkpoint=4.parquet"])
    refuse("gradients", copy, naming=("has no probe rollouts", "rocktokens trace"))


def test_a_checkpoint_that_was_not_traced(copy: Path):
    refuse("gradients", copy, "--checkpoint", "3", naming=("reference = 3", "available are 0, 2, 4"))
    refuse("gradients", copy, "--baseline", "1", naming=("baseline = 1", "available are 0, 2, 4"))


def test_a_checkpoint_that_is_gone(copy: Path):
    shutil.rmtree(copy / "checkpoints/step-4")
    refuse("gradients", copy, *BATCHES, naming=("checkpoints/step-4", "listed in the manifest but missing"))


def test_a_student_that_was_trained_further(finished: FinishedRun, tmp_path: Path):
    run, student = tmp_path / "run", shutil.copytree(finished.path / "checkpoints/step-4", tmp_path / "student")
    settings = changed(f"run.directory={run}", f'trace.checkpoints=["{student}"]')
    succeed("trace", finished.config, *settings)
    succeed("find", run)
    shutil.copy(finished.path / "checkpoints/step-2/model.safetensors", student)
    refuse("gradients", run, *BATCHES, naming=("checkpoint 0 was traced with another student", "rocktokens trace"))


def test_another_tokenizer(copy: Path):
    rocks = json.loads((copy / "rocks.json").read_text(encoding="utf-8"))
    RunDir(copy).commit_text("rocks.json", json.dumps({**rocks, "tokenizer_sha256": "f" * 64}))
    refuse("gradients", copy, naming=("the rocks were found with tokenizer ffffffffffff",))


def test_another_loss_than_the_trace_was_scored_with(copy: Path, tmp_path: Path):
    remedy = ("run `rocktokens trace` again, or leave out the override",)
    for setting, named in (
        (
            "scoring.divergence=forward",
            "scoring.divergence = 'forward' is not what the trace was scored with ('reverse')",
        ),
        ("scoring.temperature=2", "scoring.temperature = 2.0 is not what the trace was scored with (1.0)"),
        (f"models.teacher={other_tokenizer(tmp_path / 'other')}", "is not what the trace was scored with ('pebbles-t"),
    ):
        refuse("gradients", copy, *BATCHES, *changed(setting), naming=(named, *remedy))


def test_rocks_that_do_not_occur_where_they_are_measured(copy: Path):
    rocks = json.loads((copy / "rocks.json").read_text(encoding="utf-8"))
    seen = {int(token_id) for own in rollouts_of(copy, "measuring") for token_id in own.token_ids}
    absent = next(token_id for token_id in range(100) if token_id not in seen)
    alone = [{**rocks["tokens"][0], "id": absent}]
    RunDir(copy).commit_text("rocks.json", json.dumps({**rocks, "tokens": alone}))
    named = ("none of the 1 rocks of rocks.json occurs at checkpoint 4 on the 4 prompts to measure on (held-out half)",)
    refuse("gradients", copy, *BATCHES, naming=(*named, "trace.num_prompts"))


def test_fewer_prompts_than_batches(copy: Path):
    refuse("gradients", copy, naming=("gradients.batches = 8", "4 prompts", "lower it (--batches)"))
    refuse("gradients", copy, "--batches", "0", naming=("gradients.batches = 0",))
