# type: ignore  (the kernel language is not typed)
"""The Triton kernels of attention over slots; ``slots.grouped_attention`` is the reference.

1. ``attend``: a program takes one row, one key head with the query heads that share it, and one part of the slots that
   the row has filled. It reads the keys and values of these slots once, and no others: a maximum and two sums are kept
   while it goes through them (online softmax), in float32. Query heads are padded to 16, as products of blocks need.
2. ``combine``: where a row has several parts, a program takes one query head of it and weights what the parts found by
   their shares of the sum of exponentials (flash decoding).

The parts of a row are equal shares of its own slots, whatever the other rows are. Exponentials are powers of 2.
Online softmax: https://arxiv.org/abs/1805.02867; flash decoding: https://crfm.stanford.edu/2023/10/12/flashdecoding.html
Triton: https://triton-lang.org
"""

import triton
import triton.language as tl


@triton.jit
def _part(newest, before, width, SLOTS: tl.constexpr):
    """The first slot of this program's part of a row, and the slot behind its last; an empty part has no slots.

    A row without a rollout may have been left beyond ``width``: it is given one slot at least, and none from there on.
    """
    end = tl.minimum(newest + 1, width)
    first = tl.minimum(newest - before, width - 1)
    share = tl.cdiv(tl.cdiv(end - first, tl.num_programs(2)), SLOTS) * SLOTS
    start = first + tl.program_id(2) * share
    return start, tl.minimum(start + share, end)


@triton.jit
def attend(
    q, q_stride_row, q_stride_head, keys, values, stride_row, stride_head, stride_slot, row_slots, row_slots_stride,
    out, log_sums, width, scale,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Fill ``out`` (rows, heads, parts, WIDTH) and, unless it is None, ``log_sums`` (rows, heads, parts), base 2.

    ``row_slots`` has the newest slot of each row, then how many are filled before it. ``scale`` includes log2(e).
    ``HEADS``, ``SLOTS`` and ``COLUMNS`` are powers of 2 of at least 16, and no less than ``GROUP`` and ``WIDTH``.
    """
    row, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    newest = tl.load(row_slots + row).to(tl.int32)
    before = tl.load(row_slots + row_slots_stride + row).to(tl.int32)
    start, end = _part(newest, before, width, SLOTS)
    in_group, columns = tl.arange(0, HEADS), tl.arange(0, COLUMNS)
    heads = key_head * GROUP + in_group
    is_head, is_column = in_group < GROUP, columns < WIDTH
    is_own = is_head[:, None] & is_column[None, :]
    q_here = row * q_stride_row + heads[:, None] * q_stride_head + columns[None, :]
    query = tl.load(q + q_here, mask=is_own, other=0.0)
    keys += row * stride_row + key_head.to(tl.int64) * stride_head
    values += row * stride_row + key_head.to(tl.int64) * stride_head
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    attended = tl.zeros([HEADS, COLUMNS], tl.float32)
    for slot in range(start, end, SLOTS):
        slots = slot + tl.arange(0, SLOTS)
        here = slots[:, None] * stride_slot + columns[None, :]
        is_inside = (slots < end)[:, None] & is_column[None, :]
        key = tl.load(keys + here, mask=is_inside, other=0.0)
        scores = tl.where((slots < end)[None, :], tl.dot(query, tl.trans(key)) * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        kept, weights = tl.exp2(top - new_top), tl.exp2(scores - new_top[:, None])
        value = tl.load(values + here, mask=is_inside, other=0.0)
        total = total * kept + tl.sum(weights, 1)
        attended = attended * kept[:, None] + tl.dot(weights.to(value.dtype), value)
        top = new_top
    total = tl.where(start < end, total, 1.0)
    places = (row * tl.num_programs(1) * GROUP + heads) * tl.num_programs(2) + tl.program_id(2)
    tl.store(out + places[:, None] * WIDTH + columns[None, :], attended / total[:, None], mask=is_own)
    if log_sums is not None:
        tl.store(log_sums + places, top + tl.log2(total), mask=is_head)


@triton.jit
def combine(parts, log_sums, out, WIDTH: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Fill ``out`` (heads, WIDTH) from ``parts`` (heads, PARTS, WIDTH) and their ``log_sums``; the first has slots."""
    head = tl.program_id(0).to(tl.int64)
    places, columns = head * PARTS + tl.arange(0, PARTS), tl.arange(0, COLUMNS)
    own_sums = tl.load(log_sums + places)
    shares = tl.exp2(own_sums - tl.max(own_sums, 0))
    is_column = columns < WIDTH
    here = places[:, None] * WIDTH + columns[None, :]
    attended = tl.load(parts + here, mask=is_column[None, :], other=0.0)
    whole = tl.sum(attended * shares[:, None], 0) / tl.sum(shares, 0)
    tl.store(out + head * WIDTH + columns, whole, mask=is_column)
