"""The scores and the weighted sum on a GPU: cuBLAS products a chunk at a time, and Triton kernels between them.

1. Two products give both models' logits of a chunk. ``row_kernels.py`` turns them into scores and into the gradient
   with respect to the student's product: over the student's logits where they have the operands' dtype, else beside.
2. The gradients of several chunks are kept, a span. Two more products then give its ∂h and add to ∂W, summed in float32
   by the product itself: the fewer spans, the less often ∂W is read and written. Where the gradient takes the place of
   the student's logits, the room of a span is there anyway, and one product fills it with them.
3. Chunks and spans are as large as ``SCRATCH_BYTES`` or ``SCORING_BYTES`` allows, and all share the same scratch.
4. The backward pass only multiplies by the gradient of the sum, in place where the dtype allows.
5. With classes of tokens, two small kernels more run before and after those of whole rows (``fused_choice.py``).

Nothing here looks at a result: the caller decides when to wait for the GPU. ``divergence.py`` is the reference, and
holds the checks and the public functions.
"""

import math
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from rocktokens.config import Divergence
from rocktokens.errors import RocktokensError
from rocktokens.models.head import LMHead
from rocktokens.models.kernels import has_triton
from rocktokens.types import STANDARD_COLUMNS

if TYPE_CHECKING:
    from rocktokens.scoring.fused_choice import FusedChoice

SCRATCH_BYTES, SCORING_BYTES = 793 << 20, 1000 << 20
"""For logits and their gradient, and for logits alone. Of a bf16 head of 151,936 × 2560 the float32 ∂W takes 0.72 GiB
more than the bf16 one that is returned: 1.5 GiB in all."""
CHUNKS_PER_SPAN = 4
"""At least: the span takes what the chunk leaves."""
TILE = 256
"""Rows that a matrix product takes at once."""
ALIGNED = 8
"""Columns in 16 bytes of half width: cuBLAS took five times as long at a width that is not a multiple of this."""
OPERAND_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TERM = len(STANDARD_COLUMNS)
"""The column of the table that holds what is minimised."""
BLOCK, NUM_WARPS = 1024, 8
"""Columns that a program takes at once, and the warps it has; rows of logits are a multiple of ``BLOCK`` long."""
LOADED_AT_ONCE = 16
"""Bytes that a thread of ``reverse_rows`` loads at once: that says how many threads share a block."""
SCALED_AT_ONCE = 2048
FILLER = -(2.0**101)
"""Behind the last column: below any logit, and the same number in each of ``FILLED_DTYPES``."""
FILLED_DTYPES = (torch.float32, torch.bfloat16)

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def takes(h_s_TD: torch.Tensor, student: LMHead, h_t_TE: torch.Tensor, teacher: LMHead) -> bool:
    """Whether the functions here apply: everything on CUDA, nothing wider than float32, and Triton installed."""
    pairs = (h_s_TD, student.weight_VD), (h_t_TE, teacher.weight_VD)
    return has_triton() and all(
        h.is_cuda and weight.is_cuda and torch.promote_types(h.dtype, weight.dtype) in OPERAND_DTYPES
        for h, weight in pairs
    )


@torch.no_grad()
def scored(
    h_s_ND: torch.Tensor,
    student: LMHead,
    h_t_NE: torch.Tensor,
    teacher: LMHead,
    token_ids_N: torch.Tensor,
    divergence: Divergence,
    temperature: float,
    *,
    choice: "FusedChoice | None" = None,
    round_logits: bool = False,
) -> torch.Tensor:
    """Score every position, without gradient.

    Both heads are equally wide, and states are multiplied in the dtype of their weights. An id outside the heads is not
    refused here. ``round_logits`` keeps logits in the operands' dtype: half the bytes where that is half as wide.
    ``choice`` has the classes whose choice is wanted, of the reverse KL only.

    Returns:
        (7, N) float32: the standard columns, then what is minimised; (8, N) with classes, the choice last. The entropy
        of a model whose logits are NaN, infinite or all ruled out is NaN; a divergence may be infinite.
    """
    scorer = _Scorer(student, teacher, divergence, temperature, False, round_logits, choice)
    table_CN, *_ = scorer.run(h_s_ND, h_t_NE, token_ids_N)
    return table_CN


def weighted_sum(
    h_s_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    student: LMHead,
    h_t_TE: torch.Tensor,
    teacher: LMHead,
    token_ids_T: torch.Tensor,
    weights_N: torch.Tensor,
    divergence: Divergence,
    temperature: float,
    asymmetric: bool = False,
    *,
    rows_N: torch.Tensor | None = None,
    choice: "FusedChoice | None" = None,
    round_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Σ weight · term, differentiable once in the student's states and head.

    Takes what ``scored`` takes, and

    - ``weight_VD``, ``bias_V``: what gets the gradient; ``student`` holds both, the weight in the dtype of the product.
    - ``weights_N``: float32, constants; from the CPU they are sent while the first product runs.
    - ``asymmetric``: minimise the reverse KL at tokens the student underrates, the forward KL elsewhere, not
      ``divergence``.
    - ``rows_N``: the positions that have these weights, each once, beside the states; None if all of them have.
    - ``choice``: the classes, and how much of the choice within them is minimised.

    Returns:
        The sum, and the table of ``scored`` for the positions that count.
    """
    scorer = _Scorer(student, teacher, divergence, temperature, asymmetric, round_logits, choice)
    return _WeightedSum.apply(h_s_TD, weight_VD, bias_V, h_t_TE, token_ids_T, weights_N, rows_N, scorer)


class _WeightedSum(torch.autograd.Function):
    """Finds its gradient in the forward pass, and scales it in the backward pass."""

    @staticmethod
    def forward(ctx, h_s_TD, weight_VD, bias_V, h_t_TE, token_ids_T, weights_N, rows_N, scorer):
        arrays = (h_s_TD, h_t_TE, token_ids_T)
        arrays = arrays if rows_N is None else [array_T[rows_N] for array_T in arrays]
        table_CN, total, ctx.gradients = scorer.run(*arrays, weights_N, ctx.needs_input_grad[:3])
        ctx.rows_N, ctx.n_positions = rows_N, len(h_s_TD)
        ctx.dtypes = [None if x is None else x.dtype for x in (h_s_TD, weight_VD, bias_V)]
        ctx.mark_non_differentiable(table_CN)
        return total, table_CN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RocktokensError(
                "backward through weighted_kl a second time: on a GPU its gradients are kept for one pass only, so "
                "call weighted_kl again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [
            None if gradient is None else _scaled(gradient, grad_outputs[0], dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        h_grad_ND = scaled[0]
        if h_grad_ND is not None and ctx.rows_N is not None:
            h_grad_TD = h_grad_ND.new_zeros(ctx.n_positions, h_grad_ND.shape[1])
            scaled[0] = h_grad_TD.index_copy_(0, ctx.rows_N, h_grad_ND)
        return (*scaled, *[None] * 5)


class _Scorer:
    """Two heads of one width, what is computed between them, and in which dtypes."""

    def __init__(
        self,
        student: LMHead,
        teacher: LMHead,
        divergence: Divergence,
        temperature: float,
        asymmetric: bool,
        round_logits: bool,
        choice: "FusedChoice | None",
    ) -> None:
        self.student, self.teacher, self.choice = student, teacher, choice
        self.settings = {"DIVERGENCE": divergence, "ASYMMETRIC": asymmetric}
        self.is_reverse = divergence == "reverse" and not asymmetric
        self.inverse_temperature = 1 / temperature
        self.logits_dtypes = [head.weight_VD.dtype if round_logits else torch.float32 for head in (student, teacher)]

    def gradients_for(self, h_s_ND: torch.Tensor, wanted: tuple[bool, bool, bool]) -> Gradients:
        """Room for the gradients of h, W and b that are wanted, zeros where no position will fill them.

        That of h is rounded to the dtype of the operands if h has it, once for each of ``_aligned_parts``; sums over
        positions are float32.
        """
        weight_VD, operands = self.student.weight_VD, self.student.weight_VD.dtype
        make = torch.empty if len(h_s_ND) else torch.zeros
        wide = {"dtype": torch.float32, "device": h_s_ND.device}
        h_dtype = operands if h_s_ND.dtype == operands else torch.float32
        return (
            torch.empty_like(h_s_ND, dtype=h_dtype) if wanted[0] else None,
            make(weight_VD.shape, **wide) if wanted[1] else None,
            torch.zeros(self.student.width, **wide) if wanted[2] else None,
        )

    def run(
        self,
        h_s_ND: torch.Tensor,
        h_t_NE: torch.Tensor,
        token_ids_N: torch.Tensor,
        weights_N: torch.Tensor | None = None,
        wanted: tuple[bool, bool, bool] = (False, False, False),
    ) -> tuple[torch.Tensor, torch.Tensor | None, Gradients]:
        """The table of ``scored``, Σ weight · term, and those of its gradients by h, W and b that are wanted.

        What the host does before the first product is queued the GPU waits for, so everything else here comes after it.
        """
        device = h_s_ND.device
        with torch.cuda.device_of(h_s_ND):
            scratch = _Scratch(self, h_s_ND, with_gradient=any(wanted))
            chunks = self._multiplied(scratch, h_s_ND, h_t_NE)
            ahead = list(islice(chunks, 1))
            scratch.fill()
            n_columns = TERM + (1 if self.choice is None else 2)
            table_CN = torch.empty(n_columns, len(h_s_ND), dtype=torch.float32, device=device)
            split_NS = None if self.choice is None else self.choice.room(len(h_s_ND), device)
            gradients = self.gradients_for(h_s_ND, wanted)
            weights_N = None if weights_N is None else sent(weights_N, device)
            for here, span in chain(ahead, chunks):
                weights_n = None if weights_N is None else weights_N[here]
                split_nS = None if split_NS is None else split_NS[here]
                self.score(*scratch.of_chunk(here, span), token_ids_N[here], weights_n, split_nS, table_CN[:, here])
                if any(wanted) and here.stop == span.stop:
                    self._add(gradients, span, scratch.of_span(span), h_s_ND[span])
            total = None if weights_N is None else (table_CN[TERM] * weights_N).sum()
        return table_CN, total, gradients

    def _multiplied(
        self, scratch: "_Scratch", h_s_ND: torch.Tensor, h_t_NE: torch.Tensor
    ) -> Iterator[tuple[slice, slice]]:
        """Chunk after chunk with the span it is of, both models' logits put into the scratch before each."""
        weight_VD, teacher_VE = self.student.weight_VD, self.teacher.weight_VD
        for span in slices(0, len(h_s_ND), scratch.span_rows):
            if scratch.in_place:
                _project(h_s_ND[span], weight_VD, scratch.of_span(span))
            for here in slices(span.start, span.stop, scratch.chunk_rows):
                z_s_nV, z_t_nV, _ = scratch.of_chunk(here, span)
                if not scratch.in_place:
                    _project(h_s_ND[here], weight_VD, z_s_nV)
                _project(h_t_NE[here], teacher_VE, z_t_nV)
                yield here, span

    def score(
        self,
        z_s_nV: torch.Tensor,
        z_t_nV: torch.Tensor,
        gradient_nV: torch.Tensor | None,
        token_ids_n: torch.Tensor,
        weights_n: torch.Tensor | None,
        split_nS: torch.Tensor | None,
        table_Cn: torch.Tensor,
    ) -> None:
        """Products of both heads to a table and, where there is room for it, the weighted gradient.

        With classes, ``split_nS`` is a part of their ``FusedChoice.room``.
        """
        from rocktokens.scoring import row_kernels

        score_rows: Any = row_kernels.score_rows
        is_filled = all(dtype in FILLED_DTYPES for dtype in self.logits_dtypes)
        heads = [
            (z_nV, z_nV.stride(0), head.bias_V, None if head.scale == 1.0 else head.scale, head.softcap)
            for z_nV, head in ((z_s_nV, self.student), (z_t_nV, self.teacher))
        ]
        stride_gradient = None if gradient_nV is None else gradient_nV.stride(0)
        split, split_arguments = None, (None, None)
        if self.choice is not None and split_nS is not None:
            split = self.choice.read(heads, token_ids_n, split_nS, self.inverse_temperature, gradient_nV is not None)
            split_arguments = (split_nS, self.choice.left_out)
        rest = (*split_arguments, table_Cn, table_Cn.stride(0), z_s_nV.shape[1], self.inverse_temperature)
        settled_n = None
        if is_filled and self.is_reverse and all(head[2:] == (None, None, None) for head in heads):
            settled_n = torch.empty(len(z_s_nV), dtype=torch.int8, device=z_s_nV.device)
            reverse_rows: Any = row_kernels.reverse_rows
            reverse_rows[(len(z_s_nV),)](
                *(argument for head in heads for argument in head[:2]),
                token_ids_n,
                weights_n,
                gradient_nV,
                stride_gradient,
                settled_n,
                *rest,
                BLOCK=BLOCK,
                num_warps=BLOCK * z_s_nV.itemsize // (32 * LOADED_AT_ONCE),
            )
        score_rows[(len(z_s_nV),)](
            *(argument for head in heads for argument in head),
            token_ids_n,
            weights_n,
            gradient_nV,
            stride_gradient,
            settled_n,
            *rest,
            **self.settings,
            IS_FILLED=is_filled,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
        if split is not None and gradient_nV is not None:
            split.write(weights_n, gradient_nV, heads[0], self.inverse_temperature)

    def _add(self, gradients: Gradients, here: slice, gradient_RV: torch.Tensor, h_RD: torch.Tensor) -> None:
        """What a span contributes to the gradients of h, W and b."""
        h_grad_ND, weight_grad_VD, bias_grad_V = gradients
        parts = _aligned_parts(self.student.width)
        if h_grad_ND is not None:
            for columns in reversed(parts):  # the few first, so that the long sum is rounded once
                factors = gradient_RV[:, columns], self.student.weight_VD[columns]
                _multiply(*factors, h_grad_ND[here], add=columns is not parts[-1])
        if weight_grad_VD is not None:
            h_RD = h_RD.to(gradient_RV.dtype)
            for columns in parts:
                _multiply(gradient_RV[:, columns].T, h_RD, weight_grad_VD[columns], add=here.start > 0)
        if bias_grad_V is not None:
            bias_grad_V += gradient_RV.sum(dim=0, dtype=torch.float32)


class _Scratch:
    """Room for the logits of a chunk, and for the gradient of a span of chunks where one is wanted."""

    def __init__(self, scorer: _Scorer, h_ND: torch.Tensor, with_gradient: bool) -> None:
        operands, (student_dtype, teacher_dtype) = scorer.student.weight_VD.dtype, scorer.logits_dtypes
        width = scorer.student.width
        stride = math.ceil(width / BLOCK) * BLOCK
        self.in_place = with_gradient and student_dtype == operands
        chunk_bytes = teacher_dtype.itemsize + (0 if self.in_place else student_dtype.itemsize)
        span_bytes = operands.itemsize if with_gradient else 0
        room = SCRATCH_BYTES if with_gradient else SCORING_BYTES
        self.span_rows, self.chunk_rows = _sizes(len(h_ND), stride * span_bytes, stride * chunk_bytes, room)

        self._buffers: list[torch.Tensor] = []

        def matrix(rows: int, dtype: torch.dtype) -> torch.Tensor:
            buffer = torch.empty(rows, stride, dtype=dtype, device=h_ND.device)
            self._buffers.append(buffer)
            return buffer[:, :width]

        self.z_t_nV = matrix(self.chunk_rows, teacher_dtype)
        self.z_s_nV = None if self.in_place else matrix(self.chunk_rows, student_dtype)
        self.gradient_RV = matrix(self.span_rows, operands) if with_gradient else None

    def fill(self) -> None:
        """Put the filler behind the last column, where no product and no gradient is ever written."""
        for buffer in self._buffers:
            if buffer.dtype in FILLED_DTYPES:
                buffer[:, self.z_t_nV.shape[1] :] = FILLER

    def of_span(self, span: slice) -> torch.Tensor:
        """The gradient, and before it the student's logits if it takes their place."""
        assert self.gradient_RV is not None
        return self.gradient_RV[: span.stop - span.start]

    def of_chunk(self, here: slice, span: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The student's logits, the teacher's, and the gradient, which may be the student's logits."""
        n = here.stop - here.start
        gradient_nV = None if self.gradient_RV is None else self.gradient_RV[here.start - span.start :][:n]
        z_s_nV = gradient_nV if self.z_s_nV is None else self.z_s_nV[:n]
        assert z_s_nV is not None
        return z_s_nV, self.z_t_nV[:n], gradient_nV


def _sizes(n_rows: int, span_bytes: int, chunk_bytes: int, room: int) -> tuple[int, int]:
    """Rows of a span and of a chunk, given what a row of each takes: few of both, in whole tiles, within ``room``."""
    if n_rows * (span_bytes + chunk_bytes) <= room:
        return n_rows, n_rows
    most = room // (CHUNKS_PER_SPAN * span_bytes + chunk_bytes)
    most = most // TILE * TILE or 1 << max(0, most.bit_length() - 1)  # whole tiles, or a power of two that is less
    if not span_bytes:
        return n_rows, _even_part(n_rows, most)
    chunks = max(1, (room - most * chunk_bytes) // (most * span_bytes))
    span_rows = _even_part(n_rows, chunks * most)
    return span_rows, min(span_rows, most)


def _even_part(total: int, most: int) -> int:
    """The size of parts of ``total``: as few as can be, about equal, and in tiles where ``most`` is."""
    tile, even = min(TILE, most), math.ceil(total / math.ceil(total / most))
    return min(total, most, math.ceil(even / tile) * tile)


def slices(start: int, stop: int, size: int) -> Iterator[slice]:
    """Yield slices of ``size`` rows, the last of fewer."""
    for first in range(start, stop, max(1, size)):
        yield slice(first, min(first + size, stop))


def _aligned_parts(width: int) -> list[slice]:
    """All columns, those beyond the last multiple of ``ALIGNED`` by themselves."""
    aligned = width // ALIGNED * ALIGNED
    return [part for part in (slice(0, aligned), slice(aligned, width)) if part.start < part.stop]


def _project(h_nD: torch.Tensor, weight_VD: torch.Tensor, out_nV: torch.Tensor) -> None:
    """Put the product of states and a head into ``out_nV``."""
    h_nD = h_nD.to(weight_VD.dtype)
    for columns in _aligned_parts(len(weight_VD)):
        _multiply(h_nD, weight_VD[columns].T, out_nV[:, columns])


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
    """Put a b into ``out``, or add it; a and b have one dtype, ``out`` the same or float32, and sums are float32."""
    options: dict[str, Any] = {}
    if out.dtype != a.dtype and a.is_cuda:
        options = {"out_dtype": out.dtype}
    elif out.dtype != a.dtype:
        a, b = a.to(out.dtype), b.to(out.dtype)
    if add:
        torch.addmm(out, a, b, **options, out=out)
    else:
        torch.mm(a, b, **options, out=out)


def _scaled(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient times a scalar in float32, then in ``dtype``: one pass, in place if it has that dtype already."""
    from rocktokens.scoring import row_kernels

    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    size, scale = gradient.numel(), cast(Any, row_kernels.scale)
    if size:
        scale[(math.ceil(size / SCALED_AT_ONCE),)](gradient, factor, out, size, BLOCK=SCALED_AT_ONCE)
    return out


def sent(array: np.ndarray | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Send an array to a device; to a GPU it goes by way of pinned memory, so that the host does not wait."""
    tensor = torch.as_tensor(array)
    is_leaving_host = torch.device(device).type == "cuda" and not tensor.is_cuda
    return (tensor.pin_memory() if is_leaving_host else tensor).to(device, non_blocking=True)
