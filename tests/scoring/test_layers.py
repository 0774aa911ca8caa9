"""The kernels of a layer: their cases in a process of their own, since Triton is told before its import how to run."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rocktokens.scoring.layers import quick_layers

CASES = Path(__file__).parent / "layer_cases.py"
no_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_cases(**environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=0", str(CASES)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]


@no_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the same cases")
@pytest.mark.slow
def test_the_kernels_under_tritons_interpreter():
    run_cases(TRITON_INTERPRET="1")


@no_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_on_a_gpu():
    run_cases(TRITON_INTERPRET="0")


@torch.no_grad()
def test_a_model_on_the_cpu_runs_as_it_is():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes)).to(torch.bfloat16)
    with quick_layers(model):
        assert not any("forward" in vars(module) for module in model.modules())
