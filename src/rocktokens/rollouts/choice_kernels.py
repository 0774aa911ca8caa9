# type: ignore  (the kernel language is not typed)
"""The Triton kernels that choose the next id of every row of logits; ``decoding.choose`` is the reference.

1. ``read_rows``: a program takes one block of one row, and reads it once, in the model's dtype. It keeps the largest
   logit, Σ e^(z − largest) in float32, and the best score with its id. A score is the logit where decoding is greedy,
   else noise + z / τ in float64; that of a banned id is −∞. Where the ban depends on alternatives, whose probabilities
   no block knows, the best score is kept with the ban and without it.
2. ``finish_rows``: a program takes one row, adds up what its blocks have kept, and reads the logits of the alternatives
   to say which of the two counts. The best score of all blocks chooses the id; of equal ones the lowest id is taken.
3. The noise is that of ``noise.py``, bit by bit: SplitMix64 on uint64, whose shifts are logical, then 52 bits to
   −log(−log u) in float64.

A row is cut into blocks whatever the other rows are, so that what it gets does not depend on them. A score that is NaN
is taken for +∞: it wins, as it does in torch, and the log-probability is NaN. Triton: https://triton-lang.org
"""

import triton
import triton.language as tl

from rocktokens.rollouts.noise import GAMMA_TOKEN as TOKEN_STEP
from rocktokens.splitmix import GAMMA, MIX_1, MIX_2

POSITION_GAMMA, TOKEN_GAMMA = tl.constexpr(GAMMA), tl.constexpr(TOKEN_STEP)
FIRST_FACTOR, SECOND_FACTOR = tl.constexpr(MIX_1), tl.constexpr(MIX_2)
NO_ID = tl.constexpr(2**31 - 1)
"""Above every id."""


@triton.jit
def _mix(words):
    """SplitMix64's finaliser."""
    words = (words ^ (words >> 30)) * FIRST_FACTOR
    words = (words ^ (words >> 27)) * SECOND_FACTOR
    return words ^ (words >> 31)


@triton.jit
def noise_bits(stream_key, position, columns):
    """The 52 random bits behind the noise of some ids, uint64."""
    row_key = _mix(stream_key.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64) * POSITION_GAMMA)
    return _mix(row_key + (columns + 1).to(tl.uint64) * TOKEN_GAMMA) >> 12


@triton.jit
def scored(logits, stream_key, position, columns, INVERSE_TEMPERATURE: tl.constexpr):
    """The value of noise + z / τ, float64, multiplied and added in one rounding as torch does."""
    uniform = (noise_bits(stream_key, position, columns).to(tl.float64) + 0.5) * 2.0**-52
    noise = -tl.log(-tl.log(uniform))
    return tl.fma(logits.to(tl.float64), tl.full(logits.shape, INVERSE_TEMPERATURE, tl.float64), noise)


@triton.jit
def _origin(top):
    """What logits are read relative to: the largest, or 0 where that is infinite."""
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@triton.jit
def _store_best(scores, columns, best, best_id):
    highest = tl.max(scores, 0)
    tl.store(best, highest)
    tl.store(best_id, tl.min(tl.where(scores == highest, columns, NO_ID), 0))


@triton.jit
def read_rows(
    logits, stride_row, banned, stride_banned, stream_keys, positions, tops, sums, bests, best_ids, V,
    INVERSE_TEMPERATURE: tl.constexpr, IS_CONDITIONAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill what is kept of each block, (R, blocks); with ``IS_CONDITIONAL`` best scores without the ban follow.

    ``banned`` is None where no row has a ban, ``INVERSE_TEMPERATURE`` where decoding is greedy.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    here = row * tl.num_programs(0) + block
    columns = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * stride_row + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    top = tl.max(z, 0)
    tl.store(tops + here, top)
    tl.store(sums + here, tl.sum(tl.exp(z - _origin(top)), 0))
    if INVERSE_TEMPERATURE is None:
        scores = z
    else:
        scores = scored(z, tl.load(stream_keys + row), tl.load(positions + row), columns, INVERSE_TEMPERATURE)
    scores = tl.where(scores == scores, scores, float("inf"))  # not of NaN  # noqa: PLR0124
    if IS_CONDITIONAL:
        free = here + tl.num_programs(1).to(tl.int64) * tl.num_programs(0)
        _store_best(scores, columns, bests + free, best_ids + free)
    if banned is not None:
        is_banned = tl.load(banned + row * stride_banned + columns, mask=columns < V, other=1) != 0
        scores = tl.where(is_banned, float("-inf"), scores)
    _store_best(scores, columns, bests + here, best_ids + here)


@triton.jit
def finish_rows(
    logits, stride_row, alternatives, stride_alternatives, n_alternatives, tops, sums, bests, best_ids, n_blocks,
    chosen, logprobs, log_likely, BLOCKS: tl.constexpr, ALTERNATIVES: tl.constexpr,
):  # fmt: skip
    """Fill ``chosen`` and ``logprobs`` from what ``read_rows`` has kept; ``alternatives`` may be None.

    ``BLOCKS`` and ``ALTERNATIVES`` are powers of 2, ``n_blocks`` and ``n_alternatives`` or more.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_row
    blocks = tl.arange(0, BLOCKS)
    is_inside, here = blocks < n_blocks, row * n_blocks + blocks
    block_tops = tl.load(tops + here, mask=is_inside, other=float("-inf"))
    origin = _origin(tl.max(block_tops, 0))
    block_sums = tl.load(sums + here, mask=is_inside, other=0.0) * tl.exp(block_tops - origin)
    log_sum = tl.log(tl.sum(block_sums, 0))
    if alternatives is not None:
        places = tl.arange(0, ALTERNATIVES)
        ids = tl.load(alternatives + row * stride_alternatives + places, mask=places < n_alternatives, other=-1)
        is_one = ids >= 0
        z = tl.load(logits + ids, mask=is_one, other=float("-inf")).to(tl.float32)
        is_likely = z - origin - log_sum >= log_likely
        acts = (tl.max(is_likely.to(tl.int32), 0) > 0) | (tl.max(is_one.to(tl.int32), 0) == 0)
        here += tl.where(acts, 0, tl.num_programs(0).to(tl.int64) * n_blocks)
    scores = tl.load(bests + here, mask=is_inside, other=float("-inf"))
    best_ids = tl.load(best_ids + here, mask=is_inside, other=NO_ID)
    best = tl.max(scores, 0)
    best_id = tl.min(tl.where(scores == best, best_ids, NO_ID), 0)
    logprob = tl.load(logits + best_id).to(tl.float32) - origin - log_sum
    tl.store(chosen + row, best_id.to(tl.int64))
    tl.store(logprobs + row, tl.where(tl.abs(best) < float("inf"), logprob, float("nan")))
