# type: ignore  (the kernel language is not typed)
"""The Triton kernels for the choice within classes of tokens: before and after the kernels that take whole rows.

1. ``class_rows`` reads the members' columns of both models' rows. Within a class it works as ``row_kernels.py`` does
   within a row: logits relative to the largest, log-ratios relative to that of the student's likeliest member, a
   relative entropy whose terms are never negative. That gives KL(p(·|c) ‖ q(·|c)), log(P_c / Q_c), and the choice up to
   the row's normaliser.
2. ``reverse_rows`` or ``score_rows`` has the normaliser and the mean log-ratio. It adds the choice to the table, moves
   the mean by (1 − λ) · choice, and writes the gradient, maybe over the student's logits; at the members its log-ratio
   is not the one of the loss.
3. ``member_rows`` writes the members' columns of the gradient again, from what ``class_rows`` has kept of them.

What passes between them for each row is ``split``. From ``class_rows``: the logarithm of a scale; over that scale and
before normalisation the choice as a sum of terms that are never negative, and as Σ p a with a = log-ratios less those
of their classes; last the student's logit that all is relative to, the sampled token's (``row_kernels._reference``).
From the kernels of whole rows, in between: the logarithm of the normaliser, and the mean log-ratio that the gradient
takes off. That mean has Σ p a as it was rounded, so that it cancels to the last digit where the student is sure.
"""

import triton
import triton.language as tl

from rocktokens.scoring.row_kernels import (
    INFINITE,
    LOG2E,
    SPLIT,
    _difference,
    _excess,
    _log_ratio,
    _logit,
    _logits,
    _reference,
    _rounded_off,
)

PADDING = tl.constexpr(2**31 - 1)
"""In the place of a member, where a class has fewer than its row of the table holds: beyond any vocabulary."""


@triton.jit(do_not_specialize=["token_ids", "member_ids", "members", "n_members", "n_classes"])
def class_rows(
    products_s, stride_s, bias_s, scale_s, cap_s,
    products_t, stride_t, bias_t, scale_t, cap_t,
    token_ids, member_ids, n_classes, split, members, n_members, V, inverse_temperature, lam,
    IS_FILLED: tl.constexpr, SIZE: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Add the classes of one size to ``split``; keep logits and log-ratios of their members, (2, n_members) a row.

    ``member_ids`` holds ``n_classes`` times ``SIZE`` ids. ``members`` may be None.
    """
    row = tl.program_id(0).to(tl.int64)
    student = (products_s + row * stride_s, IS_FILLED, bias_s, scale_s, cap_s)
    teacher = (products_t + row * stride_t, IS_FILLED, bias_t, scale_t, cap_t)
    token_id = tl.minimum(tl.maximum(tl.load(token_ids + row), 0), V - 1)
    own_s, own_ratio, lacking = _reference(_logit(student, token_id, V), _logit(teacher, token_id, V))
    split += SPLIT * row
    log_scale, choice, slope = tl.load(split), tl.load(split + 1), tl.load(split + 2)
    within = tl.arange(0, CLASSES)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    for first in range(0, n_classes, CLASSES):
        slots = first * SIZE + within
        is_slot = slots < n_classes * SIZE
        columns = tl.load(member_ids + slots, mask=is_slot, other=PADDING)
        z_s, z_t = _logits(student, columns, V), _logits(teacher, columns, V)
        top_s, top_t = tl.max(z_s, 1), tl.max(z_t, 1)
        pivot = tl.max(tl.where(z_s == top_s[:, None], z_s - z_t, float("-inf")), 1)
        offset = ((pivot - (top_s - top_t)) - _rounded_off(top_s, top_t)) * inverse_temperature
        b = ((z_s - z_t - pivot[:, None]) + _rounded_off(z_s, z_t)) * inverse_temperature
        e_s = tl.exp2((z_s - top_s[:, None]) * (inverse_temperature * LOG2E))
        e_t = tl.exp2((z_t - top_t[:, None]) * (inverse_temperature * LOG2E))
        sum_s, sum_t = tl.sum(e_s, 1), tl.sum(e_t, 1)
        sum_difference = tl.sum(_difference(b + offset[:, None], e_s, e_t), 1)
        shift = _log_ratio(sum_difference, sum_s, sum_t) - offset
        a = b - shift[:, None]
        p = e_s / sum_s[:, None]
        log_mass = (top_s - own_s) * inverse_temperature + tl.log(sum_s)
        is_possible = top_s > -INFINITE
        log_mass = tl.where(is_possible, log_mass, float("-inf"))
        larger = tl.maximum(log_scale, tl.max(log_mass, 0))
        rest, mass = tl.exp(log_scale - larger), tl.exp(log_mass - larger)
        inner, inner_slope = tl.sum(_excess(a, p, e_t / sum_t[:, None]), 1), tl.sum(p * a, 1)
        choice = choice * rest + tl.sum(tl.where(is_possible, mass * inner, 0.0), 0)
        slope = slope * rest + tl.sum(tl.where(is_possible, mass * inner_slope, 0.0), 0)
        log_scale = larger
        if members is not None:
            of_class = shift + ((pivot - own_ratio) - lacking) * inverse_temperature
            here = members + row * (2 * n_members) + slots
            tl.store(here, z_s, mask=is_slot)
            tl.store(here + n_members, of_class[:, None] + lam * a, mask=is_slot)
    tl.store(split, log_scale)
    tl.store(split + 1, choice)
    tl.store(split + 2, slope)
    tl.store(split + 5, own_s)


@triton.jit(do_not_specialize=["member_ids", "n_members", "weights"])
def member_rows(
    split, members, member_ids, n_members, weights, gradient, stride_gradient, scale_s, cap_s, V, inverse_temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the members' columns of the gradient, from what ``class_rows`` has kept and the normalised ``split``."""
    row = tl.program_id(0).to(tl.int64)
    split += SPLIT * row
    log_z, centre, own_s = tl.load(split + 3), tl.load(split + 4), tl.load(split + 5)
    factor = tl.load(weights + row) * inverse_temperature
    if scale_s is not None:
        factor *= scale_s
    for first in range(0, n_members, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        is_slot = slots < n_members
        columns = tl.load(member_ids + slots, mask=is_slot, other=PADDING)
        here = members + row * (2 * n_members) + slots
        z = tl.load(here, mask=is_slot, other=0.0)
        p = tl.exp2(((z - own_s) * inverse_temperature - log_z) * LOG2E)
        g = p * (tl.load(here + n_members, mask=is_slot, other=0.0) - centre) * factor
        if cap_s is not None:
            g *= 1 - (z / cap_s) * (z / cap_s)
        at = gradient + row * stride_gradient + columns
        tl.store(at, g.to(gradient.dtype.element_ty), mask=columns < V)
