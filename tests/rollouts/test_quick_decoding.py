"""Decoding by kernels: in a process of their own."""

import pytest
import torch

from own_process import no_triton, run_cases

CASES = "rollouts/decoding_cases.py", "rollouts/attention_cases.py"


@no_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the same cases")
@pytest.mark.slow
def test_decoding_under_tritons_interpreter():
    run_cases(*CASES, interpreted=True)


@no_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_decoding_on_a_gpu():
    run_cases(*CASES, interpreted=False)
