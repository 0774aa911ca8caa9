"""Two processes as the documented command starts them, each with a shard of the student, and one served teacher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_pair import tiny_config

from fake_vllm import FakeVllm, serving
from rocktokens.config import dump_config
from rocktokens.models.head import lm_head
from rocktokens.models.load import load_model
from rocktokens.run_dir import RunDir
from rocktokens.training.loop import distill

LAUNCH = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "-m")


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo")
@pytest.mark.parametrize("values", ["states", "top_k"])
def test_two_processes_train_as_one_does(pair: Path, tmp_path: Path, values: str):
    """Also where the teacher names its likeliest tokens, here all of them."""
    length = ("training.max_steps=1", "training.save_steps=1")
    distill(tiny_config(pair, tmp_path / "one", *length))
    config = tmp_path / "run.toml"
    config.write_text(dump_config(tiny_config(pair, tmp_path / "two", *length)))
    teacher = load_model(str(pair / "teacher"))
    fake = FakeVllm(teacher.model, name=teacher.name, tokenizer=teacher.tokenizer)
    fake.max_logprobs = lm_head(teacher.model).width
    with serving(fake) as url:
        settings = ("training.shard=true", "training.gradient_accumulation_steps=1", "models.device=cpu")
        settings += (f"teacher.values={values}", *([f"teacher.top_k={fake.max_logprobs}"] * (values == "top_k")))
        given = [part for own in (*settings, "teacher.engine=vllm", f"teacher.url={url}") for part in ("--set", own)]
        command = [*LAUNCH, "rocktokens.cli.main", "distill", str(config), *given]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert RunDir(tmp_path / "two").manifest()["num_processes"] == 2
    assert "sharded over 2 processes" in done.stdout + done.stderr
    assert done.stdout.count("done: 1 steps") == 1, "the main process alone says what was done"
    weights = [load_file(tmp_path / own / "checkpoints/step-1/model.safetensors") for own in ("one", "two")]
    for name, own in weights[0].items():
        torch.testing.assert_close(weights[1][name], own, atol=1e-6 if values == "states" else 1e-5, rtol=0)
