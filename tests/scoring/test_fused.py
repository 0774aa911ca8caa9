"""The fused path: its kernels' rows and what is around them; and what it leaves to the torch path."""

import pytest
import torch
from pair_oracle import example

from own_process import no_triton, run_cases
from rocktokens.models.head import LMHead
from rocktokens.scoring import fused


@no_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the same cases")
@pytest.mark.slow
def test_the_kernel_under_tritons_interpreter():
    run_cases("scoring/row_cases.py", "scoring/fused_cases.py", "scoring/class_cases.py", interpreted=True)


@no_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_on_a_gpu():
    run_cases("scoring/row_cases.py", "scoring/fused_cases.py", "scoring/class_cases.py", interpreted=False)


def test_states_on_the_cpu_are_left_to_the_torch_path():
    h_s, w_s, h_t, w_t, _ = example(dtype=torch.float32)
    assert not fused.takes(h_s, LMHead(w_s), h_t, LMHead(w_t))
