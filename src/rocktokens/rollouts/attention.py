"""Attention of one new token per row over the slots of that row alone: two Triton kernels (``attention_kernels.py``).

Torch's attention under a mask reads the slots of the longest row for every row. Here each row is read from its first
filled slot to its newest, both of which lie on the GPU. Nothing waits for the GPU, and grids depend on shapes only, so
that a CUDA graph can capture it. Where rows and key heads are too few to fill the GPU, the slots of a row are split
into parts, which a second kernel combines.
"""

import math
from typing import Any

import torch

from rocktokens.models.kernels import power_of_2

FEWEST_HEADS = 16
"""Of a block of query heads, as products of blocks need."""
MOST_GROUP, MOST_WIDTH = 32, 256
"""Query heads per key head, and numbers per head: beyond, the blocks of a program are too large for smaller GPUs."""
BLOCK, FEWEST_SLOTS = 8192, 128
"""Numbers of keys that a program holds at once, and slots of the shortest part of the widest rows."""
PROGRAMS, MOST_PARTS = 384, 32
"""About as many programs as a large GPU runs at once, and parts that one program can combine."""
NUM_WARPS, NUM_STAGES = 4, 3
OTHER_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What transformers passes where attention is more than a softmax of scaled products."""


def suits(
    q_AH1d: torch.Tensor,
    k_AGLd: torch.Tensor,
    v_AGLd: torch.Tensor,
    mask: torch.Tensor,
    row_slots_2A: torch.Tensor,
    **others: Any,
) -> bool:
    """Whether the kernels are for this call: ``others`` are the further arguments of an attention of transformers."""
    rows, heads, length, width = q_AH1d.shape
    return (
        length == 1
        and len(k_AGLd) == rows == row_slots_2A.shape[1]
        and k_AGLd.shape == v_AGLd.shape
        and k_AGLd.stride() == v_AGLd.stride()
        and k_AGLd.shape[2] == mask.shape[-1]  # they lie in slots
        and k_AGLd.shape[3] == width <= MOST_WIDTH
        and heads <= k_AGLd.shape[1] * MOST_GROUP
        and q_AH1d.dtype == k_AGLd.dtype == v_AGLd.dtype
        and q_AH1d.stride(-1) == k_AGLd.stride(-1) == row_slots_2A.stride(-1) == 1
        and not others.get("dropout")
        and all(others.get(name) is None for name in OTHER_ATTENTION)
    )


def attend_to_slots(
    q_AH1d: torch.Tensor,
    k_AGLd: torch.Tensor,
    v_AGLd: torch.Tensor,
    row_slots_2A: torch.Tensor,
    scale: float | None = None,
    parts: int | None = None,
) -> torch.Tensor:
    """What each row's new token attends to, (A, 1, H, d), in bfloat16 or float16.

    Args:
        q_AH1d: queries; each key head serves H / G of them.
        k_AGLd: keys in their slots, of which those outside of a row's range are not read.
        v_AGLd: values, which lie as the keys do.
        row_slots_2A: the newest slot of each row, int64, and how many filled slots come right before it.
        scale: what products are multiplied by; 1 / √d unless told.
        parts: into how many parts, a power of 2, a row's slots are split; chosen by shape unless told.
    """
    from rocktokens.rollouts import attention_kernels

    rows, heads, _, width = q_AH1d.shape
    key_heads, slots = k_AGLd.shape[1:3]
    parts = parts or parts_of(rows * key_heads, slots)
    out_A1Hd = q_AH1d.new_empty(rows, 1, heads, width)
    found, log_sums = out_A1Hd, None
    if parts > 1:
        found = q_AH1d.new_empty(rows, heads, parts, width, dtype=torch.float32)
        log_sums = torch.empty(rows, heads, parts, dtype=torch.float32, device=q_AH1d.device)
    columns = max(16, power_of_2(width))
    attend: Any = attention_kernels.attend
    combine: Any = attention_kernels.combine
    with torch.cuda.device_of(q_AH1d):
        attend[(rows, key_heads, parts)](
            *(q_AH1d, *q_AH1d.stride()[:2]),
            *(k_AGLd, v_AGLd, *k_AGLd.stride()[:3]),
            *(row_slots_2A, row_slots_2A.stride(0)),
            *(found, log_sums, slots),
            math.log2(math.e) * (width**-0.5 if scale is None else scale),
            GROUP=heads // key_heads,
            WIDTH=width,
            HEADS=max(FEWEST_HEADS, power_of_2(heads // key_heads)),
            SLOTS=min(64, BLOCK // columns),
            COLUMNS=columns,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
        if parts > 1:
            combine[(rows * heads,)](found, log_sums, out_A1Hd, WIDTH=width, PARTS=parts, COLUMNS=columns)
    return out_A1Hd


def parts_of(programs: int, slots: int) -> int:
    """Into how many parts the slots of a row are split where rows × key heads are ``programs``: a power of 2."""
    most = max(1, min(MOST_PARTS, PROGRAMS // programs, slots // FEWEST_SLOTS))
    return 1 << (most.bit_length() - 1)
