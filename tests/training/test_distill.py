"""Whole runs of ``distill`` on the tiny pair: what it leaves on disk, how it resumes, what it refuses."""

import json
import re
import shutil
from pathlib import Path

import distil_worker
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from accelerate.tracking import get_available_trackers
from safetensors.torch import load_file, save_file
from tiny_pair import END_IDS, byte_tokenizer, tiny_config, tiny_llama

from ranks import run_two_ranks
from rocktokens.classes import TokenClasses
from rocktokens.config import Config, dump_config, load_config
from rocktokens.errors import (
    ConfigError,
    LengthExplosionError,
    NonFiniteLossError,
    RocktokensError,
    RunDirError,
    TokenizerMismatchError,
)
from rocktokens.models.fingerprints import vocabulary_sha256
from rocktokens.models.load import load_model
from rocktokens.rollouts.store import read_rollouts
from rocktokens.run_dir import RunDir
from rocktokens.scoring.score import score_rollouts
from rocktokens.traces.store import TraceStore
from rocktokens.training import loop
from rocktokens.training.loop import TrainingResult, distill


class Interruption(BaseException):
    """Stands for Ctrl-C or anything else that ends a run from outside."""


def distill_until(config: Config, step: int, *, resume: bool = False) -> None:
    def stop(done: int, _total: int, _record: dict) -> None:
        if done == step:
            raise Interruption

    with pytest.raises(Interruption):
        distill(config, resume=resume, on_step=stop)


def hashes(run: RunDir, *prefixes: str) -> dict[str, str]:
    return {entry.path: entry.sha256 for prefix in prefixes for entry in run.files(prefix)}


def log_records(run: RunDir) -> list[dict]:
    return [json.loads(line) for line in run.logs.read_text().splitlines()]


def training_trace(run: RunDir) -> pd.DataFrame:
    return pq.ParquetDataset([run.path / entry.path for entry in run.files("traces/training/")]).read().to_pandas()


@pytest.fixture(scope="module")
def finished(pair, tmp_path_factory) -> tuple[Config, TrainingResult, list[tuple[int, int, dict]]]:
    """An uninterrupted run and what it reported."""
    config = tiny_config(pair, tmp_path_factory.mktemp("finished") / "run")
    seen: list[tuple[int, int, dict]] = []
    result = distill(config, on_step=lambda *call: seen.append(call))
    return config, result, seen


def test_a_run_leaves_everything_a_reader_needs(finished):
    config, result, seen = finished
    run = RunDir(result.directory)
    assert run.checkpoints() == [0, 2, 4, 6] and result.steps == 6 and not result.already_complete
    assert load_config(run.config) == config
    assert [call[:2] for call in seen] == [(step + 1, 6) for step in range(6)]
    assert log_records(run) == [record for *_, record in seen]
    manifest = run.manifest()
    assert (manifest["seed"], manifest["student"]) == (3, config.models.student)
    assert manifest["tokenizer_sha256"] == vocabulary_sha256(byte_tokenizer().get_vocab())
    for entry in run.files():
        run.verify(entry)
    assert {"tokenizer/tokenizer.json", "config.toml"} <= {entry.path for entry in run.files()}


def test_traces_are_the_rollouts_token_by_token(finished):
    _, result, _ = finished
    run = RunDir(result.directory)
    trace = training_trace(run).to_dict("list")
    rollouts = [each for step in range(6) for each in read_rollouts(run, f"rollouts/training/step-{step}.parquet")]
    assert [each.rollout_id for each in rollouts] == list(range(48))
    assert trace["token_id"] == np.concatenate([each.token_ids for each in rollouts]).tolist()
    lengths = [len(each.token_ids) for each in rollouts]
    assert trace["policy_step"] == np.repeat([each.policy_step for each in rollouts], lengths).tolist()
    assert [each.policy_step for each in rollouts] == np.repeat(np.arange(6), 8).tolist()
    assert result.tokens_seen == len(trace["token_id"]) == sum(lengths)
    # the trainer's log-probabilities are the sampler's: the same ids, the same student, no shift
    sampled = np.concatenate([each.logprobs for each in rollouts])
    np.testing.assert_allclose(trace["logp_student"], sampled, atol=1e-4)


def test_the_log_agrees_with_the_trace(finished):
    _, result, seen = finished
    run = RunDir(result.directory)
    trace = training_trace(run)
    for step, (_, _, record) in enumerate(seen):
        rows = trace[trace.policy_step == step].astype({"kl": float})
        rollouts = read_rollouts(run, f"rollouts/training/step-{step}.parquet")
        assert record["step"] == step
        assert record["kl"] == pytest.approx(rows.kl.mean(), rel=1e-6)
        assert record["loss"] == pytest.approx(rows.kl.sum() / len(rows), rel=1e-5)
        assert record["log_ratio"] == pytest.approx((rows.logp_student - rows.logp_teacher).mean(), abs=1e-5)
        assert record["entropy_gap"] == pytest.approx(
            (rows.entropy_teacher - rows.entropy_student).abs().mean(), rel=1e-5
        )
        assert record["response_length"] == pytest.approx(len(rows) / 8)
        assert record["truncated_share"] == pytest.approx(np.mean([not each.finished for each in rollouts]))
        assert record["weight_dropped_share"] == record["head_rows_skipped"] == record["head_compute_saved"] == 0
        assert 0 <= record["sampler_gap"] < 1e-4 and 0 < record["overlap16"] < 1 and record["tokens_per_second"] > 0
        seconds = {phase: record[f"seconds_{phase}"] for phase in ("sample", "update", "write")}
        assert record["tokens_per_second"] * sum(seconds.values()) == pytest.approx(len(rows))
        for phase, duration in seconds.items():
            assert record[f"share_{phase}"] == pytest.approx(duration / sum(seconds.values()))
    warm_up = [record["learning_rate"] for *_, record in seen]
    assert warm_up[:2] == [0.005, 0.01] and warm_up[2] < 0.01 and warm_up[5] > 0


def test_training_moves_the_student_to_the_teacher(pair, tmp_path):
    config = tiny_config(pair, tmp_path / "run", "training.max_steps=40", "training.save_steps=40")
    records: list[dict] = []
    distill(config, on_step=lambda _done, _total, record: records.append(record))
    early, late = (np.mean([record["kl"] for record in part]) for part in (records[:5], records[-5:]))
    assert late < 0.8 * early


@pytest.mark.parametrize(("stops", "reused"), [([1], [0]), ([2], [0, 1]), ([3, 5], [2, 4])])
def test_an_interrupted_run_ends_byte_for_byte_like_an_uninterrupted_one(finished, pair, tmp_path, stops, reused):
    _, result, seen = finished
    config = tiny_config(pair, tmp_path / "run")
    for step in stops:
        distill_until(config, step, resume=True)
    distill(config, resume=True)
    one, other = RunDir(result.directory), RunDir(tmp_path / "run")
    parts = ("checkpoints/", "traces/", "rollouts/", "tokenizer/")
    assert hashes(one, *parts) == hashes(other, *parts) and len(hashes(one, "traces/")) == 3
    assert [record["step"] for record in log_records(other)] == [record["step"] for *_, record in seen]
    assert [record["step"] for record in log_records(other) if record.get("rollouts_reused")] == reused
    assert not any("rollouts_reused" in record for *_, record in seen)


def test_a_trace_part_whose_checkpoint_was_never_committed_is_made_again(finished, pair, tmp_path, monkeypatch):
    """The moment between the last flush and the checkpoint that counts it, which a thread was to write."""
    _, result, _ = finished
    config, run, own = tiny_config(pair, tmp_path / "run"), RunDir(tmp_path / "run"), loop.finish_checkpoint

    def finish(run: RunDir, step: int, *rest) -> None:
        if step == 6:
            raise Interruption
        own(run, step, *rest)

    monkeypatch.setattr(loop, "finish_checkpoint", finish)
    with pytest.raises(Interruption):
        distill(config)
    assert run.checkpoints() == [0, 2, 4] and len(run.files("traces/")) == 3
    monkeypatch.undo()
    distill(config, resume=True)
    assert hashes(run, "checkpoints/", "traces/") == hashes(RunDir(result.directory), "checkpoints/", "traces/")


def test_dropout_is_the_same_after_a_resume(pair, tmp_path):
    overrides = ("lora.enabled=true", "lora.r=2", "lora.lora_dropout=0.5", "training.max_steps=4")
    runs = [tiny_config(pair, tmp_path / name, *overrides) for name in ("whole", "stopped")]
    distill(runs[0])
    distill_until(runs[1], 3)
    distill(runs[1], resume=True)
    whole, stopped = (hashes(RunDir(config.run.directory), "checkpoints/", "traces/") for config in runs)
    assert whole == stopped


def test_lora_trains_adapters_alone_and_its_checkpoint_loads_as_a_model(pair, tmp_path):
    config = tiny_config(pair, tmp_path / "run", "lora.enabled=true", "lora.r=2", "training.max_steps=2")
    result = distill(config)
    files = {path.name for path in result.checkpoint.iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    adapter = load_file(result.checkpoint / "adapter_model.safetensors")
    assert all("lora_" in name for name in adapter)
    optimizer = load_file(result.checkpoint / "optimizer.safetensors")
    assert all("lora_" in name for name in optimizer) and any(name.endswith("/exp_avg_sq") for name in optimizer)
    base, trained = load_model(config.models.student), load_model(str(result.checkpoint))
    changed = {
        name
        for (name, before), after in zip(base.model.named_parameters(), trained.model.parameters(), strict=True)
        if not torch.equal(before, after)
    }
    assert changed and all("proj" in name for name in changed)


def test_lora_may_not_reach_the_lm_head(pair, tmp_path):
    config = tiny_config(pair, tmp_path / "run", "lora.enabled=true", "lora.target_modules=.*(q_proj|lm_head)")
    with pytest.raises(ConfigError, match=r"lora.target_modules = .*LM head"):
        distill(config)
    config = tiny_config(pair, tmp_path / "run2", "lora.enabled=true", "lora.target_modules=nowhere")
    with pytest.raises(ConfigError, match=r"lora.target_modules = 'nowhere'"):
        distill(config)


def test_frozen_rocks_reach_no_head_and_leave_null_scores(pair, tmp_path):
    rocks = tmp_path / "rocks.json"
    write_rocks(rocks, ids=range(0, 258, 2))
    config = tiny_config(pair, tmp_path / "run", "policy.name=rocks", f"policy.rocks={rocks}", "training.max_steps=2")
    seen: list[dict] = []
    distill(config, on_step=lambda _done, _total, record: seen.append(record))
    run = RunDir(tmp_path / "run")
    trace = training_trace(run)
    assert ((trace.token_id % 2 == 0) == trace.kl.isna()).all() and (trace.weight == (trace.token_id % 2)).all()
    first = trace[trace.policy_step == 0]
    assert seen[0]["weight_dropped_share"] == pytest.approx((first.token_id % 2 == 0).mean())
    assert seen[0]["head_rows_skipped"] == pytest.approx((first.token_id % 2 == 0).mean())
    assert seen[0]["head_compute_saved"] == pytest.approx((first.token_id % 2 == 0).mean())
    assert not any(entry.path.endswith("policy.safetensors") for entry in run.files("checkpoints/"))
    assert seen[0]["loss"] == pytest.approx(first.kl.sum() / len(first), rel=1e-5)


ONLINE = (
    "policy.name=online_rocks",
    "policy.window_steps=2",
    "policy.patience=1",
    "policy.tolerance=0.9",
    "policy.min_share=0.0001",
    "policy.probe=0.5",
    "rollouts.temperature=0.2",
    "training.max_steps=8",
)
"""So hasty that types are frozen within a few steps."""


def same_when_stopped(pair, tmp_path, policy: tuple[str, ...], *logged: str) -> list[dict]:
    """Check that a run stopped twice is the whole one, bit for bit; the log of the whole one."""
    runs = [tiny_config(pair, tmp_path / name, *policy) for name in ("whole", "stopped")]
    distill(runs[0])
    for step in (3, 5):
        distill_until(runs[1], step, resume=True)
    distill(runs[1], resume=True)
    whole, stopped = (RunDir(config.run.directory) for config in runs)
    compared = hashes(whole, "checkpoints/", "traces/", "rollouts/")
    assert compared == hashes(stopped, "checkpoints/", "traces/", "rollouts/")
    assert "checkpoints/step-4/policy.safetensors" in compared
    records, again = log_records(whole), log_records(stopped)
    for key in logged:
        assert [record.get(key) for record in records] == [record.get(key) for record in again]
    return records


def test_what_the_policy_remembers_survives_an_interruption_to_the_last_bit(pair, tmp_path):
    records = same_when_stopped(pair, tmp_path, ONLINE, "online_frozen")
    frozen = [record.get("online_frozen", []) for record in records]
    assert any(frozen[:4]) and any(frozen[5:]), "a type was frozen before the last interruption, and one after it"


CLASSES = (
    "policy.name=online_coarse",
    "policy.window_steps=2",
    "policy.patience=1",
    "policy.share=0.02",
    "policy.min_freq=2",
    "rollouts.temperature=0.2",
    "training.max_steps=7",
)
"""So hasty that classes are made of what random models happen to write."""


def test_classes_found_so_far_survive_an_interruption_to_the_last_bit(pair, tmp_path):
    logged = ("online_classes", "online_formed", "online_dissolved", "kl_decision")
    records = same_when_stopped(pair, tmp_path, CLASSES, *logged)
    formed = [record.get("online_formed", []) for record in records]
    assert formed[1] and any(formed[2:])
    assert not {*END_IDS} & {each for classes in formed for ids in classes for each in ids}
    in_use = [False, *(record["online_classes"] > 0 for record in records[:-1])]
    assert [("kl_decision" in record) for record in records] == in_use
    assert all(record["loss"] == pytest.approx(record["kl_decision"]) for record in records if "kl_decision" in record)


def test_classes_at_lambda_one_train_as_uniform_to_the_last_bit(pair, tmp_path):
    runs = {
        name: tiny_config(pair, tmp_path / name, *arm, "training.max_steps=4")
        for name, arm in {"online": [*CLASSES, "policy.lam=1.0"], "uniform": ["rollouts.temperature=0.2"]}.items()
    }
    for config in runs.values():
        distill(config)
    online, uniform = (RunDir(config.run.directory) for config in runs.values())
    assert log_records(online)[2]["online_classes"] > 0
    compared = ("rollouts/", "checkpoints/step-4/model.safe", "checkpoints/step-4/optimizer.safe")
    assert hashes(online, *compared) == hashes(uniform, *compared) and len(hashes(uniform, *compared)) >= 5
    # The online run adds the choice within its classes to its later parts; the columns of the first are those of both.
    pd.testing.assert_frame_equal(training_trace(online), training_trace(uniform), check_exact=True)


def test_probed_tokens_of_frozen_types_have_scores_and_no_weight(pair, tmp_path):
    distill(tiny_config(pair, tmp_path / "run", *ONLINE))
    trace, records = training_trace(RunDir(tmp_path / "run")), log_records(RunDir(tmp_path / "run"))
    frozen: set[int] = set()
    for step, record in enumerate(records):
        rows = trace[trace.policy_step == step]
        assert ((rows.weight == 0) == rows.token_id.isin(frozen)).all() and rows.kl[rows.weight == 1].notna().all()
        assert record["head_rows_skipped"] == rows.kl.isna().mean()
        frozen |= set(record.get("online_frozen", []))
    assert trace.kl[trace.weight == 0].notna().any() and trace.kl[trace.weight == 0].isna().any()


def test_without_a_trace_the_student_is_the_same(finished, pair, tmp_path):
    _, result, seen = finished
    config = tiny_config(pair, tmp_path / "run", "training.trace=false")
    distill_until(config, 3)
    distill(config, resume=True)
    run = RunDir(tmp_path / "run")
    assert not run.files("traces/") and not (run.path / "traces").exists()
    for name in (*(f"step-{step}/model" for step in (0, 2, 4, 6)), "step-6/optimizer"):
        [traced], [untraced] = (
            each.files(f"checkpoints/{name}.safetensors") for each in (RunDir(result.directory), run)
        )
        assert traced == untraced
    assert [record["loss"] for record in log_records(run)] == [record["loss"] for *_, record in seen]


def test_a_policy_by_scores_trains_and_traces_every_token(pair, tmp_path):
    distill(tiny_config(pair, tmp_path / "run", "policy.name=teachable", "policy.rho=0.25", "training.max_steps=2"))
    run = RunDir(tmp_path / "run")
    trace = training_trace(run)
    assert trace.kl.notna().all() and set(trace.weight) == {0.0, 1.0}
    for step, record in enumerate(log_records(run)):
        rows = trace[trace.policy_step == step]
        kept = rows[rows.weight == 1]
        assert len(kept) == round(0.25 * len(rows))
        assert record["loss"] == pytest.approx(kept.kl.sum() / len(rows), rel=1e-5)
        scoring = (16 + 24) / (3 * 16 + 24)
        assert record["head_compute_saved"] == pytest.approx(1 - len(kept) / len(rows) - scoring)


def test_a_coarse_run_traces_the_choice_within_its_classes(pair, tmp_path):
    """Of the student that wrote the step's rollouts; shifted by a token it is another number. The log agrees."""
    classes = TokenClasses([[60, 61, 62, 70], [64, 69, 80, 90], [200, 3]])
    groups = [list(group.ids) for group in classes]
    run = tmp_path / "run"
    coarse = ("policy.name=coarse", f"policy.classes={groups}", "training.max_steps=1", "training.save_steps=1")
    distill(tiny_config(pair, run, *coarse))
    trace, (record,) = training_trace(RunDir(run)), log_records(RunDir(run))
    assert TraceStore(run, source="training").classes_sha256() == classes.sha256
    student, teacher = (load_model(str(pair / name), "float32", "cpu") for name in ("student", "teacher"))
    rollouts = read_rollouts(RunDir(run), "rollouts/training/step-0.parquet")
    expected = score_rollouts(student, teacher, rollouts, classes=classes)
    np.testing.assert_allclose(trace.kl_choice, expected.kl_choice, atol=1e-6)
    np.testing.assert_allclose(trace.kl, expected.kl, atol=2e-6)
    for shift in (1, -1):
        assert np.abs(np.roll(trace.kl_choice, shift) - expected.kl_choice).max() > 1e-3
    assert record["kl_decision"] == pytest.approx((trace.kl - trace.kl_choice).mean(), abs=1e-6)


def write_rocks(path: Path, ids: range, sha256: str = "", verdict: str = "untested") -> None:
    tokens = [
        {"id": each, "text": "", "rank": rank, "freq": 2, "mean_kl": 1.0, "score": 2.0, "ccr": None, "score_ctx": None}
        | {"category": "other", "verdict": verdict}
        for rank, each in enumerate(ids, start=1)
    ]
    head = {"schema_version": 1, "tokenizer_sha256": sha256, "criterion": {}, "source": {}, "summary": {}}
    path.write_text(json.dumps(head | {"tokens": tokens}))


def test_rocks_of_another_tokenizer_are_refused(pair, tmp_path):
    write_rocks(tmp_path / "rocks.json", range(3), sha256="f" * 64)
    config = tiny_config(pair, tmp_path / "run", "policy.name=rocks", f"policy.rocks={tmp_path}/rocks.json")
    with pytest.raises(TokenizerMismatchError, match="found with tokenizer ffffffffffff"):
        distill(config)


def test_a_resume_with_other_rocks_is_refused(pair, tmp_path):
    """A run records what its policy read, in parts of a whole too; a finished one reads nothing any more."""
    files = {"policy.protect": tmp_path / "tested.json", "policy.policies[1].rocks": tmp_path / "rocks.json"}
    for file in files.values():
        write_rocks(file, range(0, 258, 2), verdict="neutral")
    parts = f'policy.policies=[{{name="uniform"}}, {{name="rocks", rocks="{tmp_path}/rocks.json"}}]'
    overrides = ("policy.name=product", f"policy.protect={tmp_path}/tested.json", parts, "training.max_steps=4")
    config = tiny_config(pair, tmp_path / "run", *overrides)
    distill_until(config, 3)
    run = RunDir(tmp_path / "run")
    before = hashes(run, "")
    for key, file in files.items():
        written = file.read_text()
        write_rocks(file, range(1, 258, 2), verdict="neutral")
        with pytest.raises(
            ConfigError, match=rf"^{re.escape(f'{key} = {str(file)!r}')} is another file now, and .* put"
        ):
            distill(config, resume=True)
        file.unlink()
        with pytest.raises(ConfigError, match=rf"^{re.escape(f'{key} = {str(file)!r}')} is gone, and the run was sta"):
            distill(config, resume=True)
        file.write_text(written)
    assert hashes(run, "") == before
    distill(config, resume=True)
    write_rocks(tmp_path / "rocks.json", range(1, 258, 2))
    assert distill(config, resume=True).already_complete


def test_a_run_that_recorded_no_files_of_its_policy_goes_on(pair, tmp_path):
    write_rocks(tmp_path / "rocks.json", range(0, 258, 2))
    overrides = ("policy.name=rocks", f"policy.rocks={tmp_path}/rocks.json", "training.max_steps=4")
    config = tiny_config(pair, tmp_path / "run", *overrides)
    distill_until(config, 3)
    manifest = tmp_path / "run" / "manifest.json"
    record = json.loads(manifest.read_text())
    assert set(record.pop("policy_files")) == {"policy.rocks"}
    manifest.write_text(json.dumps(record))
    write_rocks(tmp_path / "rocks.json", range(1, 258, 2))
    assert distill(config, resume=True).steps == 4


def test_nan_stops_the_run_and_leaves_the_last_checkpoint(pair, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(pair / "teacher", teacher)
    config = tiny_config(pair, tmp_path / "run", f"models.teacher={teacher}")
    distill_until(config, 3)
    run = RunDir(tmp_path / "run")
    before = hashes(run, "checkpoints/", "traces/")
    weights = load_file(teacher / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteLossError, match="step 2: the teacher's logits"):
        distill(config, resume=True)
    assert max(run.checkpoints(), default=None) == 2 and hashes(run, "checkpoints/", "traces/") == before


def test_answers_that_never_end_stop_the_run_at_the_third_step_even_across_a_resume(pair, tmp_path):
    overrides = ("training.max_truncated_share=0.01", "rollouts.max_completion_length=1", "training.save_steps=1")
    config = tiny_config(pair, tmp_path / "run", *overrides)
    distill_until(config, 2)
    with pytest.raises(LengthExplosionError, match=r"step 2: .*max_completion_length"):
        distill(config, resume=True)
    assert max(RunDir(tmp_path / "run").checkpoints()) == 2


def test_a_finished_run_is_complete_and_untouched_by_a_resume(finished):
    config, result, _ = finished
    before = (result.directory / "manifest.json").read_bytes()
    again = distill(config, resume=True)
    assert again.already_complete and again.checkpoint == result.checkpoint and again.tokens_seen == result.tokens_seen
    assert (result.directory / "manifest.json").read_bytes() == before


def test_a_directory_with_a_run_is_not_overwritten(finished):
    config, _, _ = finished
    with pytest.raises(RunDirError, match=r"already holds a run: continue it with --resume"):
        distill(config)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("training.learning_rate=0.02", "training.learning_rate = 0.02"),
        ("training.warmup_steps=3", "training.warmup_steps = 3"),
        ("run.seed=4", "run.seed = 4"),
        ("rollouts.temperature=0.5", "rollouts.temperature = 0.5"),
        ("training.trace=false", "training.trace = False"),
    ],
)
def test_a_resume_with_another_config_is_refused_by_name(finished, pair, override, key):
    _, result, _ = finished
    with pytest.raises(ConfigError, match=key):
        distill(tiny_config(pair, result.directory, override), resume=True)


def test_what_training_does_not_depend_on_may_change_at_a_resume(finished, pair):
    _, result, _ = finished
    config = tiny_config(
        pair, result.directory, "find.k=7", "evaluation.num_prompts=3", "rollouts.max_prompt_length=400"
    )
    assert distill(config, resume=True).already_complete


def test_a_damaged_checkpoint_is_refused(pair, tmp_path):
    config = tiny_config(pair, tmp_path / "run")
    distill_until(config, 3)
    weights = tmp_path / "run" / "checkpoints" / "step-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(RunDirError, match=r"model.safetensors is not the file that"):
        distill(config, resume=True)


def test_a_padded_student_never_samples_an_id_the_teacher_does_not_have(pair, tmp_path):
    tiny_llama(16, 1, seed=4, vocab_size=400).save_pretrained(tmp_path / "padded")
    byte_tokenizer().save_pretrained(tmp_path / "padded")
    config = tiny_config(pair, tmp_path / "run", f"models.student={tmp_path}/padded", "training.max_steps=2")
    distill(config)
    trace = training_trace(RunDir(tmp_path / "run"))
    assert trace.token_id.max() < 258 and trace.kl.notna().all()


def test_a_teacher_that_sees_less_than_the_student_is_the_limit(pair, tmp_path):
    teacher = shutil.copytree(pair / "teacher", tmp_path / "teacher")
    settings = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 20}))
    with pytest.raises(RocktokensError, match=r"but the teacher sees only 20: lower rollouts.max_completion_length"):
        distill(tiny_config(pair, tmp_path / "run", f"models.teacher={teacher}"))


def test_a_tracker_that_is_not_installed_is_named(pair, tmp_path):
    installed = {str(name) for name in get_available_trackers()}
    missing = sorted({"trackio", "wandb", "tensorboard"} - installed)
    if not missing:
        pytest.skip("every tracker is installed")
    with pytest.raises(ConfigError, match=f"training.report_to names '{missing[0]}', which is not installed"):
        distill(tiny_config(pair, tmp_path / "run", f'training.report_to=["{missing[0]}"]'))


def test_generations_must_divide_the_batch(pair, tmp_path):
    with pytest.raises(ConfigError, match=r"rollouts.num_generations = 3 does not divide the 8 rollouts"):
        distill(tiny_config(pair, tmp_path / "run", "rollouts.num_generations=3"))


PAIR_ARMS = {
    "uniform": ["training.max_steps=3"],
    "parts": ["training.max_steps=3"],
    "scores": ["policy.name=tip", "policy.rho=0.7", "training.max_steps=3"],
    "classes": [*CLASSES, "training.max_steps=3", "training.learning_rate=0.001"],
    "online": [*ONLINE, "policy.window_steps=3", "training.max_steps=5", "training.learning_rate=0.001"],
}
"""In the last one types are frozen at the end of the third step, in the one before a choice is left out of it."""


def test_two_processes_train_like_one(pair, tmp_path):
    """One process with two micro-batches, two processes with one each: the same data, the same updates.

    The dataset is smaller than a step, so that a prompt comes to both processes. With uniform weights, with some that
    depend on the scores of the whole update, with classes found in earlier ones, and with weights that depend on
    earlier ones and on probes.
    """
    alone = ["training.gradient_accumulation_steps=1", "task.limit=3"]
    configs = {
        f"{how}-{name}": tiny_config(pair, tmp_path / f"{how}-{name}", *alone, *arm)
        for how in ("two", "stopped")
        for name, arm in PAIR_ARMS.items()
    }
    files = [tmp_path / f"{name}.toml" for name in configs]
    for file, config in zip(files, configs.values(), strict=True):
        file.write_text(dump_config(config))
    run_two_processes(files)
    for name, arm in PAIR_ARMS.items():
        distill(tiny_config(pair, tmp_path / f"one-{name}", "task.limit=3", *arm))
        require_alike(RunDir(tmp_path / f"one-{name}"), RunDir(tmp_path / f"two-{name}"))
    require_distinct_answers(RunDir(tmp_path / "two-uniform"))
    require_frozen_on_both_ranks(RunDir(tmp_path / "two-online"))
    assert log_records(RunDir(tmp_path / "two-classes"))[2]["online_classes"] > 0

    require_parts_of_each_rank(RunDir(tmp_path / "two-parts"))

    found = {name: hashes(RunDir(tmp_path / name), "checkpoints/", "traces/") for name in configs}
    assert "checkpoints/step-5/policy.safetensors" in found["two-online"]
    for name in PAIR_ARMS:
        assert found[f"stopped-{name}"] == found[f"two-{name}"]
        reused = [
            record["step"]
            for record in log_records(RunDir(tmp_path / f"stopped-{name}"))
            if "rollouts_reused" in record
        ]
        assert reused == [configs[f"two-{name}"].training.max_steps - 1]
    with pytest.raises(ConfigError, match="1 processes were launched, but the run was started with 2"):
        distill(configs["two-uniform"], resume=True)


def require_alike(one: RunDir, two: RunDir) -> None:
    """As many steps of eight rollouts, the same up to rounding."""
    steps = max(one.checkpoints(), default=None)
    assert steps == max(two.checkpoints(), default=None)
    for step in range(steps):
        ours, theirs = (read_rollouts(run, f"rollouts/training/step-{step}.parquet") for run in (one, two))
        assert len({(each.prompt_id, each.sample) for each in ours}) == len(ours) == 8
        assert [(e.prompt_id, e.sample) for e in ours] == [(e.prompt_id, e.sample) for e in theirs]
    weights = load_file(two.checkpoint(steps) / "model.safetensors")
    for name, weight in load_file(one.checkpoint(steps) / "model.safetensors").items():
        torch.testing.assert_close(weight, weights[name], atol=1e-6, rtol=0)
    traces = training_trace(one), training_trace(two)
    assert traces[0][["rollout_id", "token_id", "weight"]].equals(traces[1][["rollout_id", "token_id", "weight"]])
    np.testing.assert_allclose(traces[0].kl, traces[1].kl, atol=1e-5)
    for ours, theirs in zip(log_records(one), log_records(two), strict=True):
        for key in ("loss", "kl", "grad_norm", "overlap16", "response_length", "learning_rate", "head_compute_saved"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key
        for key in ("online_frozen", "online_rocks", "online_classes", "online_formed", "online_dissolved"):
            assert ours.get(key) == theirs.get(key)


def require_parts_of_each_rank(run: RunDir) -> None:
    """Every process wrote its own rows, in parts of at most that many rows, and left nothing else."""
    entries = run.files("traces/training/")
    rows = [pq.read_table(run.path / entry.path)["rollout_id"].to_numpy() % 8 // 4 for entry in entries]
    assert [len(set(ranks)) for ranks in rows] == [1] * len(entries) and {int(ranks[0]) for ranks in rows} == {0, 1}
    assert len(entries) > 6 and max(entry.rows for entry in entries) == distil_worker.FEW_ROWS
    assert {path.name for path in (run.path / "traces/training").iterdir()} == {Path(e.path).name for e in entries}


def require_distinct_answers(run: RunDir) -> None:
    """A prompt that comes to both processes is not answered twice in the same way."""
    for entry in run.files("rollouts/training/"):
        rollouts = read_rollouts(run, entry.path)
        assert len({(each.prompt_id, tuple(each.token_ids)) for each in rollouts}) == 8


def require_frozen_on_both_ranks(run: RunDir) -> None:
    """Tokens of types called in the third step weigh nothing afterwards, on either rank; some are probed, some not."""
    called, trace = set(log_records(run)[2]["online_frozen"]), training_trace(run)
    later = trace[trace.policy_step == 3]
    frozen = later[later.token_id.isin(called)]
    ranks = [frozen[frozen.rollout_id % 8 < 4], frozen[frozen.rollout_id % 8 >= 4]]
    for rows in ranks:
        assert len(rows) and (rows.weight == 0).all()
        assert rows.kl.notna().any() and rows.kl.isna().any()


def run_two_processes(config_files: list[Path]) -> None:
    """Distil one config after the other, in the same two processes."""
    logs = config_files[0].parent
    run_two_ranks(Path(distil_worker.__file__), map(str, config_files), logs, ACCELERATE_USE_CPU="true")
