"""Whole runs of ``distill`` whose teacher is behind a server, or on a device of its own: those of one in memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import shard_worker
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_pair import byte_tokenizer, tiny_config, tiny_llama, write_pair

from fake_vllm import FakeVllm, serving
from ranks import run_two_ranks
from rocktokens.config import Config, dump_config
from rocktokens.errors import ConfigError, RocktokensError
from rocktokens.models.head import lm_head
from rocktokens.models.load import load_model
from rocktokens.run_dir import RunDir
from rocktokens.scoring.served import SERVED
from rocktokens.traces.schema import TEACHER_KEY
from rocktokens.training.loop import distill

TIP = ("policy.name=tip", "policy.rho=0.5")
"""A policy that needs scores: the teacher's states of that pass are used again."""


def served_by(pair: Path) -> FakeVllm:
    teacher = load_model(str(pair / "teacher"))
    return FakeVllm(teacher.model, name=teacher.name, tokenizer=teacher.tokenizer)


def over(pair: Path, run: Path, url: str, *overrides: str) -> Config:
    return tiny_config(pair, run, "teacher.engine=vllm", f"teacher.url={url}", "training.max_steps=4", *overrides)


@pytest.mark.parametrize("settings", [(), TIP], ids=["plain", "tip"])
def test_weights_and_traces_are_those_of_a_teacher_in_memory(pair: Path, tmp_path: Path, settings: tuple[str, ...]):
    distill(tiny_config(pair, tmp_path / "memory", "training.max_steps=4", *settings))
    fake = served_by(pair)
    with serving(fake) as url:
        distill(over(pair, tmp_path / "served", url, *settings))
    weights = [load_file(tmp_path / name / "checkpoints/step-4/model.safetensors") for name in ("memory", "served")]
    for name, own in weights[0].items():
        torch.testing.assert_close(weights[1][name], own, rtol=0, atol=1e-6)
    runs = [RunDir(tmp_path / name) for name in ("memory", "served")]
    tables = [pq.read_table(run.path / run.files("traces/training/")[0].path) for run in runs]
    kl = [table.column("kl").to_numpy() for table in tables]
    assert np.abs(kl[0] - kl[1]).max() < 1e-5
    assert TEACHER_KEY not in tables[0].schema.metadata and SERVED not in runs[0].manifest()
    assert tables[1].schema.metadata[TEACHER_KEY] == b"states float32" and len(runs[1].manifest()[SERVED]) == 1
    # 4 steps of 8 sequences, each asked for once, and a canary after each step and twice at first
    assert fake.asked.count("/pooling") == 4 * (8 + 1) + 2


def test_a_run_goes_on_with_the_same_teacher_at_another_address_only(pair: Path, tmp_path: Path):
    run, constant = tmp_path / "run", "training.lr_scheduler_type=constant"
    with serving(served_by(pair)) as url:
        distill(over(pair, tmp_path / "whole", url, constant))
        distill(over(pair, run, url, constant, "training.max_steps=2"))
    other = served_by(pair)
    with torch.no_grad():
        other.model.model.layers[0].mlp.up_proj.weight.mul_(1.05)
    with serving(other) as url, pytest.raises(RocktokensError, match=r"is not what the run .* used before"):
        distill(over(pair, run, url, constant), resume=True)
    with serving(served_by(pair)) as url:
        with pytest.raises(ConfigError, match=r"teacher\.dtype = 'bfloat16', but the run was started with 'float32'"):
            distill(over(pair, run, url, constant, "teacher.dtype=bfloat16"), resume=True)
        distill(over(pair, run, url, constant), resume=True)
    weights = [load_file(own / "checkpoints/step-4/model.safetensors") for own in (run, tmp_path / "whole")]
    assert all(torch.equal(own, weights[1][name]) for name, own in weights[0].items())


def named_by(pair: Path, k: int) -> tuple[FakeVllm, tuple[str, ...]]:
    """A server that names k tokens, and the settings that ask for them."""
    fake = served_by(pair)
    fake.max_logprobs = k
    return fake, ("teacher.values=top_k", f"teacher.top_k={k}", f"trace.top_k={min(k, 8)}")


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunDir(run).logs.read_text().splitlines()]


@pytest.mark.parametrize("settings", [(), TIP], ids=["plain", "tip"])
def test_all_tokens_named_train_as_a_teacher_in_memory(pair: Path, tmp_path: Path, settings: tuple[str, ...]):
    width = lm_head(load_model(str(pair / "teacher")).model).width
    distill(tiny_config(pair, tmp_path / "memory", "training.max_steps=2", *settings))
    fake, named = named_by(pair, width)
    with serving(fake) as url:
        distill(over(pair, tmp_path / "named", url, *named, "training.max_steps=2", *settings))
    weights = [load_file(tmp_path / name / "checkpoints/step-2/model.safetensors") for name in ("memory", "named")]
    for name, own in weights[0].items():
        torch.testing.assert_close(weights[1][name], own, rtol=0, atol=1e-5)
    tables = [pq.read_table(tmp_path / name / "traces/training/part-00000.parquet") for name in ("memory", "named")]
    assert np.abs(np.subtract(*(own.column("kl").to_numpy() for own in tables))).max() < 1e-5
    assert tables[1].schema.metadata[TEACHER_KEY] == f"top-{width} + tail".encode()
    assert tables[1].column("entropy_teacher").null_count == tables[1].num_rows
    assert all(own["teacher_tail"] == own["tail_unresolved_share"] == 0 for own in log_of(tmp_path / "named"))
    # 2 steps of 8 sequences, each asked for once, and a canary after each step and twice at first
    assert fake.asked.count("/v1/completions") == 2 * (8 + 1) + 2


@pytest.mark.parametrize("k", [4, 20])
def test_few_tokens_train_on_less_and_say_so(pair: Path, tmp_path: Path, k: int):
    fake, named = named_by(pair, k)
    with serving(fake) as url:
        distill(over(pair, tmp_path / "run", url, *named, "training.max_steps=2"))
    distill(tiny_config(pair, tmp_path / "memory", "training.max_steps=2"))
    own, whole = log_of(tmp_path / "run")[0], log_of(tmp_path / "memory")[0]
    assert 0 < own["kl"] < whole["kl"] and own["log_ratio"] == pytest.approx(whole["log_ratio"], abs=1e-4)
    assert 0 < own["teacher_tail"] < 1 and "entropy_teacher" not in own and "entropy_gap" not in own
    assert own["overlap16"] == pytest.approx(whole["overlap16"]) if k >= 16 else "overlap16" not in own
    with (
        serving(served_by(pair)) as url,
        pytest.raises(ConfigError, match=r"teacher\.values = 'states', but the run was started with 'top_k'"),
    ):
        distill(over(pair, tmp_path / "run", url, "training.max_steps=2"), resume=True)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo")
def test_a_halved_student_in_shards_learns_from_the_tokens_that_were_named(tmp_path: Path):
    """From itself it has nothing to learn. Bfloat16 holds no odd id above 256."""
    write_pair(tmp_path)
    tiny_llama(16, 1, seed=1, vocab_size=2000).save_pretrained(tmp_path / "student")
    own = ("models.teacher=" + str(tmp_path / "student"), "models.student_dtype=bfloat16", "training.shard=true")
    fake = FakeVllm(load_model(str(tmp_path / "student")).model, name=str(tmp_path / "student"))
    fake.tokenizer = byte_tokenizer()
    config = tmp_path / "run.toml"
    with serving(fake) as url:
        served = ("teacher.values=top_k", "training.max_steps=1", "training.gradient_accumulation_steps=1")
        config.write_text(dump_config(over(tmp_path, tmp_path / "run", url, *own, *served)))
        run_two_ranks(Path(shard_worker.__file__), [str(config)], tmp_path, ACCELERATE_USE_CPU="true")
    [part] = RunDir(tmp_path / "run").files("traces/training/")
    table = pq.read_table(tmp_path / "run" / part.path)
    assert max(table.column("token_id").to_pylist()) > 256
    assert np.abs(table.column("kl").to_numpy()).max() < 0.02
