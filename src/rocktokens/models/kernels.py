"""What every launch of a Triton kernel asks: whether it can run, where and in which dtypes; sizes as powers of 2."""

from functools import cache
from importlib import import_module
from typing import Any

import torch

HALF = (torch.bfloat16, torch.float16)


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    try:
        import_module("triton.language")
    except ImportError:
        return False
    return True


def on_gpu(x: Any) -> bool:
    """Whether a tensor or a model is where kernels run."""
    return x.device.type == "cuda"


def power_of_2(n: int) -> int:
    """The smallest that is n or more."""
    return 1 << (n - 1).bit_length()
