# type: ignore  (the kernel language is not typed)
"""Triton kernels for what a decoder layer does between its matrix products: the norm, the rotary embedding, the gate.

Each reads and writes every number once, where transformers runs seven kernels a norm, eight a rotation and two a gate,
and rounds where these round, so that a result is theirs:

1. ``rms_norm``: x / √(mean x² + eps) in float32, rounded; times the weight, rounded. A program takes one wide row or
   several short ones. Only the order in which the squares are added is its own.
2. ``rotate``: x cos + (−x₂, x₁) sin, with x₁ and x₂ the halves of x: both products rounded, and their sum. A program
   takes one token with all its query and key heads, and reads its angles once.
3. ``gate``: u · x / (1 + e^(−x)), the quotient rounded and the product.

The first two must be launched with ``enable_fp_fusion=False``: the compiler takes a product that is rounded to half
width and then added for a multiply-add of half width, which leaves that rounding out. Triton: https://triton-lang.org
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_rows"])
def rms_norm(
    x, heads, stride_token, stride_head, weight, out, n_rows, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm ``ROWS`` rows of x, which has ``heads`` to a token, into the contiguous rows of ``out``.

    ``BLOCK`` is ``WIDTH`` or more.
    """
    dtype = out.dtype.element_ty
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    is_inside = (rows < n_rows) & (columns < WIDTH)
    begins = x + (rows // heads) * stride_token + (rows % heads) * stride_head
    wide = tl.load(begins + columns, mask=is_inside, other=0.0).to(tl.float32)
    variance = tl.sum(wide * wide, 1) * (1.0 / WIDTH)
    normed = (wide * tl.rsqrt(variance + eps)[:, None]).to(dtype)
    factor = tl.load(weight + columns, mask=columns < WIDTH, other=0.0)
    weighted = factor.to(tl.float32) * normed.to(tl.float32)
    tl.store(out + rows * WIDTH + columns, weighted.to(dtype), mask=is_inside)


@triton.jit
def _halves(row, columns, HALF: tl.constexpr):
    """Both halves of the row that holds one token's cosines or sines."""
    first = tl.load(row + columns, mask=columns < HALF, other=0.0)
    second = tl.load(row + HALF + columns, mask=columns < HALF, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _product(a, b, dtype):
    """As of two numbers of this dtype."""
    return (a * b).to(dtype).to(tl.float32)


@triton.jit
def _rotate_heads(
    x, stride_x, out, stride_out, cosines, sines, columns,
    HEADS: tl.constexpr, AT_ONCE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of one token, ``AT_ONCE`` at a time."""
    dtype = out.dtype.element_ty
    cos_first, cos_second = cosines
    sin_first, sin_second = sines
    for start in range(0, HEADS, AT_ONCE):
        heads = (start + tl.arange(0, AT_ONCE)).to(tl.int64)[:, None]
        is_inside = (heads < HEADS) & (columns < HALF)
        source, target = x + heads * stride_x + columns, out + heads * stride_out + columns
        first = tl.load(source, mask=is_inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=is_inside, other=0.0).to(tl.float32)
        turned_first = _product(first, cos_first, dtype) - _product(second, sin_first, dtype)
        turned_second = _product(second, cos_second, dtype) + _product(first, sin_second, dtype)
        tl.store(target, turned_first.to(dtype), mask=is_inside)
        tl.store(target + HALF, turned_second.to(dtype), mask=is_inside)


@triton.jit
def rotate(
    q, q_stride_head, q_stride_token, q_out, q_out_stride_head, q_out_stride_token,
    k, k_stride_head, k_stride_token, k_out, k_out_stride_head, k_out_stride_token,
    cos, cos_stride_token, sin, sin_stride_token,
    Q_HEADS: tl.constexpr, Q_AT_ONCE: tl.constexpr, K_HEADS: tl.constexpr, K_AT_ONCE: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate one token of q and k into ``q_out`` and ``k_out``.

    Heads are 2 · ``HALF`` wide, ``BLOCK`` is ``HALF`` or more; ``Q_AT_ONCE`` and ``K_AT_ONCE`` are powers of 2.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    cosines = _halves(cos + token * cos_stride_token, columns, HALF)
    sines = _halves(sin + token * sin_stride_token, columns, HALF)
    q += token * q_stride_token
    k += token * k_stride_token
    q_out += token * q_out_stride_token
    k_out += token * k_out_stride_token
    _rotate_heads(q, q_stride_head, q_out, q_out_stride_head, cosines, sines, columns, Q_HEADS, Q_AT_ONCE, HALF)
    _rotate_heads(k, k_stride_head, k_out, k_out_stride_head, cosines, sines, columns, K_HEADS, K_AT_ONCE, HALF)


@triton.jit
def gate(x, x_stride_row, u, u_stride_row, out, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Put u silu(x) into ``out``, for n numbers in rows of ``WIDTH``; those of ``out`` lie side by side."""
    dtype = out.dtype.element_ty
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rows, columns = here // WIDTH, here % WIDTH
    wide = tl.load(x + rows * x_stride_row + columns, mask=here < n, other=0.0).to(tl.float32)
    opened = (wide / (1 + tl.exp(-wide))).to(dtype).to(tl.float32)
    factor = tl.load(u + rows * u_stride_row + columns, mask=here < n, other=0.0).to(tl.float32)
    tl.store(out + here, (opened * factor).to(dtype), mask=here < n)
