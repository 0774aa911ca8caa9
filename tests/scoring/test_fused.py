"""The fused path: its cases in a process of their own, since Triton is told before its import how to run kernels."""

import importlib.util
import os
import subprocess
import sys

import fused_cases
import pytest
import torch
from pair_oracle import example

from rocktokens.models.head import LMHead
from rocktokens.scoring import fused

no_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_cases(**environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=0", fused_cases.__file__]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]


@no_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the same cases")
@pytest.mark.slow
def test_the_kernel_under_tritons_interpreter():
    run_cases(TRITON_INTERPRET="1")


@no_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_on_a_gpu():
    run_cases(TRITON_INTERPRET="0")


def test_states_on_the_cpu_are_left_to_the_torch_path():
    h_s, w_s, h_t, w_t, _ = example(dtype=torch.float32)
    assert not fused.takes(h_s, LMHead(w_s), h_t, LMHead(w_t))
