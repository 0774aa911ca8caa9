"""The kernels of a layer, and where they are put in place."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from own_process import no_triton, run_cases
from rocktokens.models.layers import quick_layers


@no_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the same cases")
@pytest.mark.slow
def test_the_kernels_under_tritons_interpreter():
    run_cases("models/layer_cases.py", "models/projection_cases.py", interpreted=True)


@no_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_on_a_gpu():
    run_cases("models/layer_cases.py", "models/projection_cases.py", interpreted=False)


@torch.no_grad()
def test_a_model_on_the_cpu_runs_as_it_is():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes)).to(torch.bfloat16)
    with quick_layers(model):
        assert not any("forward" in vars(module) for module in model.modules())
