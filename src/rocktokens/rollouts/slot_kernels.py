# type: ignore  (the kernel language is not typed)
"""A Triton kernel that writes the keys and values of one token per row into a cache of slots.

A program takes one row with all its key heads, reads row and slot once, and copies ``AT_ONCE`` heads at a time, the
keys and the values. The torch path assigns to indexed tensors instead, a kernel for the keys and one for the values.
Triton: https://triton-lang.org
"""

import triton
import triton.language as tl


@triton.jit
def write_tokens(
    k, k_stride_row, k_stride_head, v, v_stride_row, v_stride_head,
    keys, values, stride_row, stride_head, stride_slot, rows, slots,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy row i of k and v to slot ``slots[i]`` of row ``rows[i]`` of ``keys`` and ``values``, which lie alike.

    ``AT_ONCE`` and ``BLOCK`` are powers of 2, and ``BLOCK`` is ``WIDTH`` or more.
    """
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(rows + token) * stride_row + tl.load(slots + token) * stride_slot
    columns = tl.arange(0, BLOCK)[None, :]
    for start in range(0, HEADS, AT_ONCE):
        heads = (start + tl.arange(0, AT_ONCE)).to(tl.int64)[:, None]
        is_inside = (heads < HEADS) & (columns < WIDTH)
        here = place + heads * stride_head + columns
        k_here = token * k_stride_row + heads * k_stride_head + columns
        v_here = token * v_stride_row + heads * v_stride_head + columns
        tl.store(keys + here, tl.load(k + k_here, mask=is_inside), mask=is_inside)
        tl.store(values + here, tl.load(v + v_here, mask=is_inside), mask=is_inside)
