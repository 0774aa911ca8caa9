"""The choice of the next token: its kernels in a process of their own, and what takes which path."""

import pytest
import torch

from own_process import no_triton, run_cases
from rocktokens.rollouts import decoding

CASES = "rollouts/choice_cases.py"


@no_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the same cases")
@pytest.mark.slow
def test_the_kernels_under_tritons_interpreter():
    run_cases(CASES, interpreted=True)


@no_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_on_a_gpu():
    run_cases(CASES, interpreted=False)


def test_logits_on_the_cpu_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(decoding, "choose_by_kernel", None)
    zeros_R = torch.zeros(2, dtype=torch.long)
    ids_R, _ = decoding.choose(torch.eye(2), None, None, zeros_R, zeros_R, 0.0)
    assert ids_R.tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_computed_with_in_float32(dtype):
    logits_RV = (3 * torch.randn(4, 97, generator=torch.Generator().manual_seed(0))).to(dtype)
    keys_R = torch.arange(4)
    narrow = decoding.choose(logits_RV, None, None, keys_R, keys_R, 1.0)
    wide = decoding.choose(logits_RV.float(), None, None, keys_R, keys_R, 1.0)
    assert narrow[1].dtype == torch.float32
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(narrow, wide, strict=True))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("at_once", [1, 97, 3 * 97])
def test_scores_have_the_same_bits_however_many_rows_are_taken_at_once(at_once, temperature, monkeypatch):
    logits_RV = 3 * torch.randn(16, 97, generator=torch.Generator().manual_seed(0))
    arrays = (logits_RV, torch.arange(16) << 50, torch.arange(16))
    whole = decoding._draw(*arrays, temperature)
    monkeypatch.setattr(decoding, "CACHED_SCORES", at_once)
    parts = decoding._draw(*arrays, temperature)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parts, whole, strict=True))
    assert not torch.equal(whole[0], decoding._draw(*arrays[:2], arrays[2] + 1, temperature)[0])
