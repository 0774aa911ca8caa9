"""Whole runs of pairs whose end token is also the padding, is missing, or comes at once: from distil to evaluate."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_pair import EOS, byte_tokenizer, tiny_config, tiny_llama

from rocktokens.config import Config
from rocktokens.evaluation.evaluate import evaluate
from rocktokens.models.load import load_model
from rocktokens.replay.replay import replay
from rocktokens.rocks.find import find_rocks
from rocktokens.rollouts.store import read_rollouts
from rocktokens.run_dir import RunDir
from rocktokens.scoring.score import score_rollouts
from rocktokens.traces.store import TraceStore
from rocktokens.training.loop import distill

LENGTH = 10
ENDS = {"padding": [EOS], "none": [], "at once": list(range(258))}
"""The ids that end a response."""
LENGTHS = {"padding": set(range(1, LENGTH + 1)), "none": {LENGTH}, "at once": {1}}
"""That responses may have."""


def write_student_and_teacher(folder: Path, pair: Path, ends: str) -> None:
    """The tiny pair with other end tokens, in tokenizer, config and generation config alike."""
    shutil.copy(pair / "task.jsonl", folder / "task.jsonl")
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    for name, width, layers, seed in (("student", 16, 1, 1), ("teacher", 24, 2, 2)):
        model = tiny_llama(width, layers, seed)
        model.lm_head.weight.data[EOS] *= 5.0  # so that it is now and then by far the likeliest
        model.generation_config.eos_token_id = ENDS[ends] or None
        model.config.pad_token_id = model.generation_config.pad_token_id = EOS if ends == "padding" else None
        model.config.eos_token_id = None if ends == "none" else EOS
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        if ends == "none":
            settings = json.loads((folder / name / "tokenizer_config.json").read_text())
            for token in ("eos_token", "pad_token"):
                settings.pop(token)
            (folder / name / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module", params=ENDS)
def finished(pair: Path, tmp_path_factory: pytest.TempPathFactory, request) -> tuple[str, Config, RunDir]:
    folder = tmp_path_factory.mktemp("ends")
    write_student_and_teacher(folder, pair, request.param)
    config = tiny_config(
        folder, folder / "run", "training.max_steps=2", "trace.num_prompts=24", "evaluation.num_prompts=6",
        "find.min_prompts=1", f'evaluation.task={{name="jsonl",path="{folder}/task.jsonl"}}',
    )  # fmt: skip
    distill(config)
    replay(config)
    return request.param, config, RunDir(folder / "run")


def test_the_end_tokens_are_these_and_responses_end_there_and_nowhere_else(finished):
    ends, config, run = finished
    assert sorted(load_model(config.models.student, device="cpu").eos_ids) == ENDS[ends]
    rollouts = [each for step in range(2) for each in read_rollouts(run, f"rollouts/training/step-{step}.parquet")]
    for each in rollouts:
        *inside, last = each.token_ids.tolist()
        assert not set(inside) & set(ENDS[ends]) and each.finished == (last in ENDS[ends])
        assert each.finished or len(each.token_ids) == LENGTH
    assert {len(each.token_ids) for each in rollouts} <= LENGTHS[ends]
    assert {each.finished for each in rollouts} == {"padding": {True, False}, "none": {False}, "at once": {True}}[ends]


def test_every_token_is_trained_on_and_scored_as_if_alone_in_its_batch(finished):
    """An end token that is also the padding is no padding: it has a kl, and pads around it change nothing."""
    _, config, run = finished
    student, teacher = (load_model(name, device="cpu") for name in (config.models.student, config.models.teacher))
    rollouts = read_rollouts(run, "rollouts/training/step-0.parquet")
    alone = np.concatenate([score_rollouts(student.model, teacher.model, [each]).kl for each in rollouts])
    rows = TraceStore(run, source="training").table().to_pandas()
    rows = rows[rows.policy_step == 0].sort_values(["rollout_id", "position"])
    np.testing.assert_allclose(rows.kl, alone, atol=1e-5)
    assert rows.token_id.tolist() == np.concatenate([each.token_ids for each in rollouts]).tolist()
    logs = [json.loads(line) for line in run.logs.read_text().splitlines()]
    assert all(line["sampler_gap"] < 1e-4 and line["head_rows_skipped"] == 0 for line in logs)


def test_the_later_stages_take_them(finished):
    ends, config, run = finished
    rocks = find_rocks(TraceStore(run), stage="score", min_prompts=1)
    assert rocks.summary["n_occurrences"] > 0
    [record] = evaluate(run, config, {"student": config.models.student})
    assert record.n_samples == 6 and min(LENGTHS[ends]) <= record.mean_response_length <= max(LENGTHS[ends])
    assert (record.truncated_share == 1.0) == (ends == "none")
