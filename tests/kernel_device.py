"""Where cases of kernels run: on a GPU or, with TRITON_INTERPRET=1, on the CPU."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def round_to_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round to bfloat16, where it cuts digits off."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(data, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        return torch.from_numpy(data.copy()).to(torch.bfloat16).view(torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounding)
