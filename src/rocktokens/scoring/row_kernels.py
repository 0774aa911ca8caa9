# type: ignore  (the kernel language is not typed)
"""The Triton kernels that turn two rows of LM-head products into scores and the student's gradient.

``score_rows`` takes every divergence and every head. A program takes one position and reads its two rows twice (three
times for jsd):

1. Normalisers. With s and t the logits over the temperature, relative to those of the sampled token, and b = s − t:
   Σ e^s, Σ e^t and Σ e^s b. On-policy the sampled token is at the top or near it, so no running maximum is kept. Where
   it is not, and digits would be lost, the row is read again relative to its maxima, and b to that of the student's
   likeliest token; where b differs little from its mean, and that is not zero, again relative to the mean.
2. Scores. With p, q and a = log p − log q normalised, every divergence is a sum of terms none of which is negative (see
   ``formulas.py``), so that it keeps its digits where the models agree. In the gradient p (b − Σ p b) the term of the
   likeliest token has b = 0, so that it keeps its digits where the student is sure. Multiplied with the position's
   weight and carried back to the product W h + b, it may be written over the student's row.

``reverse_rows`` is the short way for the reverse KL of plain heads: all scores from one look, the gradient from another
that has little left to compute. Where one look loses digits it takes one more, about the mean. Rows that this does
not settle it leaves to ``score_rows``.

With classes of tokens both take what ``class_kernels.py`` has read of them, ``split``: they add the choice to the table
and move the mean that is taken off in the gradient; the members' columns are then written again.

Logits are z = cap · tanh(scale · (W h + b) / cap), made on the fly; everything is float32 whatever the products are.
A NaN anywhere in a row, an infinite logit, or a row that rules out every token makes that model's entropy NaN.
Triton: https://triton-lang.org
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
RULED_OUT = tl.constexpr(-1e30)
"""Stands for a logit of minus infinity, so that 0 · log 0 is 0."""
INFINITE = tl.constexpr(1e25)
"""A difference of logits beyond this comes from ``RULED_OUT``."""
TOO_LARGE = tl.constexpr(1e12)
"""For ``reverse_rows``, a sum relative to the sampled token beyond this has lost digits."""
LARGE = tl.constexpr(4096.0)
"""For ``score_rows``, which has no other measure of that."""
TOO_FAR = tl.constexpr(16.0)
"""A mean log-ratio beyond this has lost digits, and rows cannot be read relative to it."""
MOST_LOST = tl.constexpr(4.0)
"""A difference of sums may be this many times smaller than these, one of means four and one of squares sixteen times as
many: rounding then stays below 1e-5 of it."""
FURTHEST = tl.constexpr(4096.0)
"""The square of a mean may be this many times larger than those about it: rounding then stays below 1e-5 of what is
left of a log-ratio without it."""
NEAR = tl.constexpr(0.5)
"""Log-ratios below this are taken by their series."""
LIKELY = tl.constexpr(4.0)
"""A sampled token whose log-probability is above minus this does not cost others their digits."""
SPLIT = tl.constexpr(8)
"""Numbers per row of what ``class_kernels.py`` and the kernels here tell each other."""
STAGES = tl.constexpr(3)
"""Blocks of a row that are on their way while one is computed."""


@triton.jit
def _tanh(x):
    y = x * x
    near = x * (1 - y * (1 / 3 - y * (2 / 15 - y * (17 / 315 - y * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def _logits(head, columns, V):
    """The logits of some columns, finite where a token is ruled out and beyond the last; NaN stays NaN.

    Rows that end in ``fused.FILLER`` need no mask, unless something is done to the products that is not for the filler.
    """
    row, is_filled, bias, scale, cap = head
    if is_filled and bias is None and scale is None and cap is None:
        z = tl.maximum(tl.load(row + columns).to(tl.float32), RULED_OUT, propagate_nan=tl.PropagateNan.ALL)
    else:
        z = tl.load(row + columns, mask=columns < V, other=0.0).to(tl.float32)
        if bias is not None:
            z += tl.load(bias + columns, mask=columns < V, other=0.0).to(tl.float32)
        if scale is not None:
            z *= scale
        if cap is not None:
            z = cap * _tanh(z / cap)
        z = tl.where(columns < V, tl.maximum(z, RULED_OUT, propagate_nan=tl.PropagateNan.ALL), RULED_OUT)
    return z


@triton.jit
def _logit(head, column, V):
    """The logit of one column."""
    return tl.sum(_logits(head, column + tl.arange(0, 1), V), 0)


@triton.jit
def _origin(top_s, top_t, pivot, inverse_temperature):
    """What rows are read relative to: a logit of each, NaN if none is left, and the difference that makes b zero."""
    top_s = tl.where(top_s > -INFINITE, top_s, float("nan"))
    top_t = tl.where(top_t > -INFINITE, top_t, float("nan"))
    offset = (pivot - (top_s - top_t)) - _rounded_off(top_s, top_t)
    return top_s, top_t, pivot, offset * inverse_temperature, inverse_temperature


@triton.jit
def _reference(own_s, own_t):
    """What members of classes are relative to: the sampled token, or nothing where a model rules that out.

    Of it the student's logit, its difference from the teacher's, and what that difference lacks.
    """
    is_possible = (own_s > -INFINITE) & (own_t > -INFINITE)
    own_s, own_t = tl.where(is_possible, own_s, 0.0), tl.where(is_possible, own_t, 0.0)
    return own_s, own_s - own_t, _rounded_off(own_s, own_t)


@triton.jit
def _relative(student, teacher, origin, columns, V):
    """For some columns s, t and b relative to the origin, and the student's logits."""
    top_s, top_t, pivot, _, inverse_temperature = origin
    z_s, z_t = _logits(student, columns, V), _logits(teacher, columns, V)
    s, t = (z_s - top_s) * inverse_temperature, (z_t - top_t) * inverse_temperature
    return s, t, ((z_s - z_t - pivot) + _rounded_off(z_s, z_t)) * inverse_temperature, z_s


@triton.jit
def _rounded_off(x, y):
    """What x − y lacks of the difference: https://en.wikipedia.org/wiki/2Sum."""
    difference = x - y
    back = x - difference
    return (x - (difference + back)) + (back - y)


@triton.jit
def _centred(origin, mean_b):
    """The origin that makes b zero at the mean."""
    top_s, top_t, pivot, _, inverse_temperature = origin
    step = mean_b / inverse_temperature
    return _origin(top_s, top_t - step, pivot + step, inverse_temperature)


@triton.jit
def _sums(student, teacher, origin, V, WITH_DIFFERENCE: tl.constexpr, BLOCK: tl.constexpr):
    """Σ e^s, Σ e^t, Σ p b, Σ (e^s − e^t) if it is needed; the largest e^s; whether b − Σ p b keeps its digits."""
    zero = tl.zeros((BLOCK,), tl.float32)
    sum_s, sum_t, sum_ratio, largest, sum_difference = zero, zero, zero, zero, zero
    square, square_ratio, ratio_square = zero, zero, zero
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        s, t, b, _ = _relative(student, teacher, origin, start + tl.arange(0, BLOCK), V)
        e_s, e_t = tl.exp2(s * LOG2E), tl.exp2(t * LOG2E)
        weighted = e_s * b
        sum_s += e_s
        sum_t += e_t
        sum_ratio += weighted
        largest = tl.maximum(largest, e_s)
        square += e_s * e_s
        square_ratio += e_s * weighted
        ratio_square += weighted * weighted
        if WITH_DIFFERENCE:
            sum_difference += _difference(b + origin[3], e_s, e_t)
    z = tl.sum(sum_s, 0)
    mean_b = tl.div_rn(tl.sum(sum_ratio, 0), z)
    terms, squares = _about(mean_b, (tl.sum(square, 0), tl.sum(square_ratio, 0), tl.sum(ratio_square, 0)))
    is_centred = terms <= 16 * MOST_LOST * squares
    return z, tl.sum(sum_t, 0), mean_b, tl.sum(sum_difference, 0), tl.max(largest, 0), is_centred


@triton.jit
def _about(mean, squares):
    """Of Σ e² (b − mean)², made from Σ e² {1, b, b²}, the terms without their signs, and the value."""
    middle, last = 2 * mean * squares[1], mean * mean * squares[0]
    return squares[2] + tl.abs(middle) + last, squares[2] - middle + last


@triton.jit
def _maxima(student, teacher, inverse_temperature, V, BLOCK: tl.constexpr):
    """The origin at both models' largest logits, and b zero at the student's."""
    top_s = tl.full((BLOCK,), RULED_OUT, tl.float32)
    top_t = tl.full((BLOCK,), RULED_OUT, tl.float32)
    likeliest = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK)
        z_s = _logits(student, columns, V)
        likeliest = tl.where(z_s > top_s, columns, likeliest)
        top_s = tl.maximum(top_s, z_s)
        top_t = tl.maximum(top_t, _logits(teacher, columns, V))
    highest_s, highest_t = tl.max(top_s, 0), tl.max(top_t, 0)
    likeliest = tl.max(tl.where(top_s == highest_s, likeliest, 0), 0)
    pivot = _logit(student, likeliest, V) - _logit(teacher, likeliest, V)
    pivot = tl.where(pivot < INFINITE, pivot, highest_s - highest_t)  # the teacher may rule out that token
    return _origin(highest_s, highest_t, pivot, inverse_temperature)


@triton.jit
def _log_ratio(difference, x, y):
    """The logarithm of x / y where x − y is known better than x and y are."""
    w = difference / (x + y)  # the logarithm is twice the area tangent of this
    square = w * w
    series = 2 * w * (1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    return tl.where(tl.abs(w) < 0.2, series, tl.log(x / y))


@triton.jit
def _excess(a, p, q):
    """The value of p a + q − p where a = log(p / q).

    The polynomial interpolates (a + e^(−a) − 1) / a² at the Chebyshev points of ±NEAR, within 9e-7 of it.
    """
    series = 0.5 - a * (0.16666277456 - a * (0.04166618058 - a * (0.00839555305 - a * 0.00139666095)))
    return tl.where(tl.abs(a) < NEAR, p * a * a * series, p * a + (q - p))


@triton.jit
def _difference(a, p, q):
    """The value of p − q where a = log(p / q)."""
    series = 1 - a * (1 / 2 - a * (1 / 6 - a * (1 / 24 - a * (1 / 120 - a * (1 / 720 - a * (1 / 5040))))))
    return tl.where(tl.abs(a) < NEAR, p * a * series, p - q)


@triton.jit
def _log_cosh(h):
    """The logarithm of cosh h for h below NEAR / 2."""
    y = h * h
    return y * (1 / 2 - y * (1 / 12 - y * (1 / 45 - y * (17 / 2520))))


@triton.jit
def _log_to_mean(a):
    """The value of log(p / m) where a = log(p / q) and m = (p + q) / 2."""
    far = tl.minimum(a, 0.0) + tl.log(2 / (1 + tl.exp(-tl.abs(a))))
    return tl.where(tl.abs(a) < NEAR, a / 2 - _log_cosh(a / 2), far)


@triton.jit
def _jsd_excess(a, p, q):
    """½ p log(p / m) + ½ q log(q / m)."""
    near = _difference(a, p, q) * a / 2 - (p + q) * _log_cosh(a / 2)
    return tl.where(tl.abs(a) < NEAR, near, p * _log_to_mean(a) + q * _log_to_mean(-a)) / 2


@triton.jit
def _mean_log_to_mean(student, teacher, origin, log_s, shift, centre, V, BLOCK: tl.constexpr):
    """Σ p (log(p / m) − centre), with more digits the nearer the centre is."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        s, _, b, _ = _relative(student, teacher, origin, start + tl.arange(0, BLOCK), V)
        total += tl.exp2((s - log_s) * LOG2E) * (_log_to_mean(b - shift) - centre)
    return tl.sum(total, 0)


@triton.jit
def _infinite_or(total, largest_ratio):
    """The sum, infinite where one model rules out what the other does not."""
    return tl.where(tl.max(largest_ratio, 0) > INFINITE, float("inf"), tl.sum(total, 0))


@triton.jit
def _choice(split, log_z):
    """The choice in a row, now that its normaliser is known, and the same as the gradient's mean has it.

    Notes the normaliser for ``member_rows``.
    """
    tl.store(split + 3, log_z)
    scale = tl.exp(tl.load(split) - log_z)
    return scale * tl.load(split + 1), scale * tl.load(split + 2)


# chunks begin anywhere in the arrays of N entries: how those are aligned must not make another kernel
@triton.jit(do_not_specialize=["token_ids", "weights", "settled", "out", "n_rows"])
def score_rows(  # noqa: PLR0912, PLR0915
    products_s, stride_s, bias_s, scale_s, cap_s,
    products_t, stride_t, bias_t, scale_t, cap_t,
    token_ids, weights, gradient, stride_gradient, settled, split, left_out, out, n_rows, V, inverse_temperature,
    DIVERGENCE: tl.constexpr, ASYMMETRIC: tl.constexpr, IS_FILLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill ``out``, whose columns are ``n_rows`` apart: those of ``TokenScores`` in order, then what is minimised.

    ``gradient`` may be None, or ``products_s`` itself; a bias, scale or cap that a head lacks is None. Rows that are
    ``settled`` are left alone. An id outside the row is taken for the nearest one inside: it is the caller's to refuse.
    With ``split``, for the reverse KL only, what is minimised lacks ``left_out`` of the choice, which comes last.
    """
    row = tl.program_id(0).to(tl.int64)
    if settled is not None:  # the compiler must know before it reads  # noqa: SIM102
        if tl.load(settled + row) != 0:
            return
    student = (products_s + row * stride_s, IS_FILLED, bias_s, scale_s, cap_s)
    teacher = (products_t + row * stride_t, IS_FILLED, bias_t, scale_t, cap_t)
    token_id = tl.minimum(tl.maximum(tl.load(token_ids + row), 0), V - 1)
    own_s, own_t = _logit(student, token_id, V), _logit(teacher, token_id, V)
    origin = _origin(own_s, own_t, own_s - own_t, inverse_temperature)
    WITH_DIFFERENCE: tl.constexpr = DIVERGENCE != "reverse" or ASYMMETRIC
    sum_s, sum_t, mean_b, sum_difference, largest, is_centred = _sums(
        student, teacher, origin, V, WITH_DIFFERENCE, BLOCK
    )
    is_large = not (sum_s + sum_t < LARGE)  # or not a number
    is_sure_of_another = largest > tl.maximum(sum_s / 2, 1.0)
    if is_large | is_sure_of_another | (tl.abs(mean_b) > TOO_FAR):
        origin = _maxima(student, teacher, inverse_temperature, V, BLOCK)
        sum_s, sum_t, mean_b, sum_difference, _, is_centred = _sums(student, teacher, origin, V, WITH_DIFFERENCE, BLOCK)
    if (not is_centred) & (tl.abs(mean_b) <= TOO_FAR):
        origin = _centred(origin, mean_b)
        sum_s, sum_t, mean_b, sum_difference, _, _ = _sums(student, teacher, origin, V, WITH_DIFFERENCE, BLOCK)
    top_s, top_t, pivot, offset, _ = origin
    log_s, log_t = tl.log(sum_s), tl.log(sum_t)
    shift = (_log_ratio(sum_difference, sum_s, sum_t) if WITH_DIFFERENCE else tl.log(tl.div_rn(sum_s, sum_t))) - offset
    logp_s = (own_s - top_s) * inverse_temperature - log_s
    logp_t = (own_t - top_t) * inverse_temperature - log_t
    is_forward = logp_t <= logp_s  # of the asymmetric term
    if DIVERGENCE == "jsd":
        centre = _log_to_mean(mean_b - shift)
        centre_error = _mean_log_to_mean(student, teacher, origin, log_s, shift, centre, V, BLOCK)
    if gradient is not None:
        factor = tl.load(weights + row) * inverse_temperature
        if scale_s is not None:
            factor *= scale_s

    if split is not None:
        reference_s, reference_ratio, lacking = _reference(own_s, own_t)
        log_z = (top_s - reference_s) * inverse_temperature + log_s
        choice, slope = _choice(split + SPLIT * row, log_z)
        centre = mean_b - left_out * slope
        tl.store(split + SPLIT * row + 4, centre + ((pivot - reference_ratio) - lacking) * inverse_temperature)

    zero = tl.zeros((BLOCK,), tl.float32)
    entropy_s, entropy_t, squares = zero, zero, zero
    divergence, largest_ratio = zero, zero
    term, largest_of_term = zero, zero
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK)
        s, t, b, z = _relative(student, teacher, origin, columns, V)
        log_p, log_q = s - log_s, t - log_t
        p, q = tl.exp2(log_p * LOG2E), tl.exp2(log_q * LOG2E)
        a = b - shift
        entropy_s -= p * log_p
        entropy_t -= q * log_q
        if DIVERGENCE == "reverse":
            divergence += _excess(a, p, q)
            largest_ratio = tl.maximum(largest_ratio, a)
            g = p * (b - mean_b)
        elif DIVERGENCE == "forward":
            divergence += _excess(-a, q, p)
            largest_ratio = tl.maximum(largest_ratio, -a)
            g = _difference(a, p, q)
        else:
            divergence += _jsd_excess(a, p, q)
            g = p * (_log_to_mean(a) - centre - centre_error) / 2
        squares += g * g
        if ASYMMETRIC:
            signed = tl.where(is_forward, -a, a)
            term += _excess(signed, tl.where(is_forward, q, p), tl.where(is_forward, p, q))
            largest_of_term = tl.maximum(largest_of_term, signed)
            g = tl.where(is_forward, _difference(a, p, q), p * (b - mean_b))
        if split is not None:
            g = p * (b - centre)
        if gradient is not None:
            g *= factor
            if cap_s is not None:
                g *= 1 - (z / cap_s) * (z / cap_s)
            here = gradient + row * stride_gradient + columns
            tl.store(here, g.to(gradient.dtype.element_ty), mask=columns < V)

    out += row
    scored = _infinite_or(divergence, largest_ratio)
    if DIVERGENCE == "reverse":  # Σ p a exceeds Σ (p a + q − p) by the error of the shift, which counts by its square
        error = (mean_b - shift) - scored
        scored -= tl.where(tl.abs(error) < NEAR, _excess(error, 1.0, 1.0), 0.0)
    tl.store(out, scored)
    tl.store(out + n_rows, tl.where(own_s > -INFINITE, logp_s, float("-inf")))
    tl.store(out + 2 * n_rows, tl.where(own_t > -INFINITE, logp_t, float("-inf")))
    tl.store(out + 3 * n_rows, tl.sum(entropy_s, 0))
    tl.store(out + 4 * n_rows, tl.sum(entropy_t, 0))
    tl.store(out + 5 * n_rows, tl.sqrt(tl.sum(squares, 0)) * inverse_temperature)
    minimised = _infinite_or(term, largest_of_term) if ASYMMETRIC else scored
    if split is not None:
        choice = tl.minimum(choice, scored)
        minimised -= left_out * choice
        tl.store(out + 7 * n_rows, choice)
    tl.store(out + 6 * n_rows, minimised)


@triton.jit
def _from_own(row_s, row_t, own_s, own_t, columns):
    """Logits of a filled row less that of the sampled token, and the difference of both, which keeps its digits.

    With bfloat16 logits that needs no care: float32 holds the difference of two, unless one is next to nothing.
    """
    z_s, z_t = tl.load(row_s + columns).to(tl.float32), tl.load(row_t + columns).to(tl.float32)
    x_s, x_t = z_s - own_s, z_t - own_t
    if row_s.dtype.element_ty == tl.bfloat16 and row_t.dtype.element_ty == tl.bfloat16:
        return x_s, x_t, x_s - x_t
    difference = (z_s - z_t) - (own_s - own_t)
    return x_s, x_t, difference + (_rounded_off(z_s, z_t) - _rounded_off(own_s, own_t))


@triton.jit
def _reverse_sums(row_s, row_t, own_s, own_t, inverse_temperature, V, BLOCK: tl.constexpr):
    """Of a filled row Σ e, Σ u, Σ e b, Σ φ; then Σ e x and Σ u x with x not over the temperature; then Σ e² {1, b, b²}.

    Letters are those of ``reverse_rows``.
    """
    to_bits = inverse_temperature * LOG2E
    zero = tl.zeros((BLOCK,), tl.float32)
    sum_s, sum_t, sum_ratio, sum_excess = zero, zero, zero, zero
    mean_s, mean_t, square, square_ratio, ratio_square = zero, zero, zero, zero, zero
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        x_s, x_t, difference = _from_own(row_s, row_t, own_s, own_t, start + tl.arange(0, BLOCK))
        e, u, b = tl.exp2(x_s * to_bits), tl.exp2(x_t * to_bits), difference * inverse_temperature
        weighted = e * b
        sum_s += e
        sum_t += u
        sum_ratio += weighted
        sum_excess += _excess(b, e, u)
        mean_s += e * x_s
        mean_t += u * x_t
        square += e * e
        square_ratio += e * weighted
        ratio_square += weighted * weighted
    sums = tl.sum(sum_s, 0), tl.sum(sum_t, 0), tl.sum(sum_ratio, 0), tl.sum(sum_excess, 0)
    squares = tl.sum(square, 0), tl.sum(square_ratio, 0), tl.sum(ratio_square, 0)
    return sums, (tl.sum(mean_s, 0), tl.sum(mean_t, 0)), squares


@triton.jit
def _about_mean(row_s, row_t, own_s, own_t, d, mean_b, inverse_temperature, V, BLOCK: tl.constexpr):
    """Of a filled row Σ φ with log-ratios less d; and for c = b − mean_b the sums of e c, (e c)² and e² c."""
    to_bits = inverse_temperature * LOG2E
    zero = tl.zeros((BLOCK,), tl.float32)
    excess, ratio, ratio_square, square_ratio = zero, zero, zero, zero
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        x_s, _, difference = _from_own(row_s, row_t, own_s, own_t, start + tl.arange(0, BLOCK))
        e, b = tl.exp2(x_s * to_bits), difference * inverse_temperature
        a, weighted = b - d, e * (b - mean_b)
        excess += e * _excess(a, 1.0, tl.exp2(-a * LOG2E))
        ratio += weighted
        ratio_square += weighted * weighted
        square_ratio += e * weighted
    return tl.sum(excess, 0), tl.sum(ratio, 0), tl.sum(ratio_square, 0), tl.sum(square_ratio, 0)


@triton.jit
def _entropy(row, reference, inverse_temperature, V, BLOCK: tl.constexpr):
    """Of the softmax of a filled row, with more digits the nearer the reference is to the likely logits."""
    total, mean = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        x = tl.load(row + start + tl.arange(0, BLOCK)).to(tl.float32) - reference
        e = tl.exp2(x * inverse_temperature * LOG2E)
        total += e
        mean += e * x
    z = tl.sum(total, 0)
    return tl.log(z) - tl.sum(mean, 0) * inverse_temperature / z


@triton.jit
def _write_gradient(row_s, row_t, gradient, origin, factor, inverse_temperature, V, BLOCK: tl.constexpr):
    """The gradient p (b − Σ p b) times a factor, for a filled row.

    Goes from the end of the row to its beginning: the end is what the look before has left in the cache.
    """
    own_s, own_t, centre, bits_of_sum = origin
    slope, to_bits = factor * inverse_temperature, inverse_temperature * LOG2E
    blocks = tl.cdiv(V, BLOCK)
    for number in tl.range(0, blocks, num_stages=STAGES):
        columns = (blocks - 1 - number) * BLOCK + tl.arange(0, BLOCK)
        x_s, _, difference = _from_own(row_s, row_t, own_s, own_t, columns)
        g = tl.exp2(x_s * to_bits - bits_of_sum) * (difference * slope - centre)
        tl.store(gradient + columns, g.to(gradient.dtype.element_ty), mask=columns < V)


@triton.jit(do_not_specialize=["token_ids", "weights", "settled", "out", "n_rows"])
def reverse_rows(
    products_s, stride_s, products_t, stride_t,
    token_ids, weights, gradient, stride_gradient, settled, split, left_out, out, n_rows, V, inverse_temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What ``score_rows`` does for the reverse KL of filled rows, and whether that has all its digits.

    With e = e^s, u = e^t and φ = e b + u − e, which is never negative, Σ e − Σ u = Σ e b − Σ φ. So d, the logarithm of
    the ratio of both sums, is known to many digits, and kl is Σ φ / Σ e − (d + e^(−d) − 1) or Σ e b / Σ e − d: the one
    with the smaller terms is taken. Where these almost cancel, or those of the gradient's length or of an entropy do,
    the row is read again about the mean, and kl is Σ φ / Σ e with log-ratios less d. What that cannot fix is
    log-ratios that differ little beside a mean that is far from zero, and an infinite logit: such rows are not settled,
    and their gradient is not written.
    """
    row = tl.program_id(0).to(tl.int64)
    products_s += row * stride_s
    products_t += row * stride_t
    token_id = tl.minimum(tl.maximum(tl.load(token_ids + row), 0), V - 1)
    own_s, own_t = tl.load(products_s + token_id).to(tl.float32), tl.load(products_t + token_id).to(tl.float32)
    sums, means, squares_of = _reverse_sums(products_s, products_t, own_s, own_t, inverse_temperature, V, BLOCK)
    z, y, ratio, excess = sums
    d, mean_b, scaled_excess = _log_ratio(ratio - excess, z, y), tl.div_rn(ratio, z), tl.div_rn(excess, z)
    terms = tl.abs(mean_b) + tl.abs(d)
    is_close = scaled_excess < terms
    kl = tl.where(is_close, scaled_excess - _excess(d, 1.0, tl.exp(-d)), mean_b - d)
    log_z, log_y, mean_s, mean_t = tl.log(z), tl.log(y), means[0] / z, means[1] / y
    digits_lost = tl.maximum(log_z / LIKELY, 1.0)  # what the exponentials of other tokens have lost
    has_digits = tl.where(is_close, scaled_excess * digits_lost, terms / 4) <= MOST_LOST * kl
    terms_of_squares, squares = _about(mean_b, squares_of)
    has_digits &= terms_of_squares <= 16 * MOST_LOST * squares
    if not has_digits:
        excess, ratio_left, squares, cross = _about_mean(
            products_s, products_t, own_s, own_t, d, mean_b, inverse_temperature, V, BLOCK
        )
        kl, error = tl.div_rn(excess, z), tl.div_rn(ratio_left, z)
        _, squares = _about(error, (squares_of[0], cross, squares))
        mean_b += error
    is_settled = (z + y < TOO_LARGE) & (tl.abs(ratio) < TOO_LARGE) & (kl < TOO_LARGE)
    is_settled &= mean_b * mean_b * squares_of[0] <= FURTHEST * squares
    entropy_s, entropy_t = log_z - mean_s * inverse_temperature, log_y - mean_t * inverse_temperature
    if log_z > tl.maximum(LIKELY, 4 * MOST_LOST * entropy_s):
        entropy_s = _entropy(products_s, own_s + mean_s, inverse_temperature, V, BLOCK)
    if log_y > tl.maximum(LIKELY, 4 * MOST_LOST * entropy_t):
        entropy_t = _entropy(products_t, own_t + mean_t, inverse_temperature, V, BLOCK)
    tl.store(settled + row, is_settled.to(tl.int8))
    out += row
    tl.store(out, kl)
    tl.store(out + n_rows, -log_z)
    tl.store(out + 2 * n_rows, -log_y)
    tl.store(out + 3 * n_rows, entropy_s)
    tl.store(out + 4 * n_rows, entropy_t)
    tl.store(out + 5 * n_rows, tl.sqrt(squares) / z * inverse_temperature)
    minimised = kl
    if split is not None:
        choice, slope = _choice(split + SPLIT * row, log_z)
        minimised, mean_b = kl - left_out * tl.minimum(choice, kl), mean_b - left_out * slope
        tl.store(split + SPLIT * row + 4, mean_b)
        tl.store(out + 7 * n_rows, tl.minimum(choice, kl))
    tl.store(out + 6 * n_rows, minimised)
    if gradient is not None:  # the compiler must know before it reads  # noqa: SIM102
        if is_settled:
            factor = tl.load(weights + row) * inverse_temperature
            origin = (own_s, own_t, factor * mean_b, tl.log2(z))
            gradient += row * stride_gradient
            _write_gradient(products_s, products_t, gradient, origin, factor, inverse_temperature, V, BLOCK)


@triton.jit
def scale(source, factor, target, n, BLOCK: tl.constexpr):
    """Put ``source`` times the one number at ``factor`` into ``target``, which may be the same or of another dtype."""
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.load(source + here, mask=here < n).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(target + here, scaled.to(target.dtype.element_ty), mask=here < n)
