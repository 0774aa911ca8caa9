"""Where cases of kernels run: on a GPU or, with TRITON_INTERPRET=1, on the CPU."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def round_to_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round to bfloat16, where it cuts digits off, and multiply such blocks, not their bits."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert, multiply = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounding(data, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        return torch.from_numpy(data.copy()).to(torch.bfloat16).view(torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounding)

    def widened(block):
        if block.dtype.scalar != tl.bfloat16:
            return block
        data = torch.from_numpy(block.data.copy()).view(torch.bfloat16).float().numpy()
        return interpreter.TensorHandle(data, tl.float32)

    def multiplying(builder, left, right, *rest):
        return multiply(builder, widened(left), widened(right), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiplying)
