"""The choice of the next token on a GPU: two Triton kernels (``choice_kernels.py``) that read every logit once.

In PyTorch the choice is some twenty-five kernels over (rows, vocabulary), most of them of eight bytes a number, and a
float32 copy of the logits. Nothing here waits for the GPU, and grids depend on shapes only, so that a CUDA graph can
capture it. ``decoding.choose`` is the reference, and what to call.
"""

from typing import Any

import torch

from rocktokens.models.kernels import power_of_2

BLOCK, NUM_WARPS = 2048, 8
"""Columns that a program reads, and the warps it has. Few enough that a batch of few rows still fills the GPU."""


def choose_by_kernel(
    logits_RV: torch.Tensor,
    banned_RV: torch.Tensor | None,
    alternatives_RA: torch.Tensor | None,
    stream_keys_R: torch.Tensor,
    positions_R: torch.Tensor,
    temperature: float,
    log_likely: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose as ``decoding.choose`` does, of logits of any dtype up to float32.

    The numbers of a row lie side by side, but rows may be part of longer ones. Ids are those of the reference, but
    where two scores differ by rounding only. ``log_likely`` is the log-probability that an alternative is likely with.
    """
    from rocktokens.rollouts import choice_kernels

    read_rows: Any = choice_kernels.read_rows
    finish_rows: Any = choice_kernels.finish_rows
    rows, width = logits_RV.shape
    blocks = -(-width // BLOCK)
    banned, alternatives, n_alternatives = (None, None), (None, None), 0
    if banned_RV is not None:
        banned = banned_RV.view(torch.uint8), banned_RV.stride(0)
        if alternatives_RA is not None:
            alternatives, n_alternatives = (alternatives_RA, alternatives_RA.stride(0)), alternatives_RA.shape[1]
    wide = {"device": logits_RV.device, "dtype": torch.float32}
    kept_2RB = torch.empty(2, rows, blocks, **wide)
    bests_CRB = torch.empty(1 + (n_alternatives > 0), rows, blocks, dtype=torch.float64, device=logits_RV.device)
    best_ids_CRB = torch.empty_like(bests_CRB, dtype=torch.int32)
    chosen_R = torch.empty(rows, dtype=torch.long, device=logits_RV.device)
    logprobs_R = torch.empty(rows, **wide)
    kept = (*kept_2RB, bests_CRB, best_ids_CRB)
    with torch.cuda.device_of(logits_RV):
        read_rows[(blocks, rows)](
            logits_RV,
            logits_RV.stride(0),
            *banned,
            stream_keys_R.contiguous(),
            positions_R.contiguous(),
            *kept,
            width,
            INVERSE_TEMPERATURE=1 / temperature if temperature > 0 else None,
            IS_CONDITIONAL=n_alternatives > 0,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
        finish_rows[(rows,)](
            logits_RV,
            logits_RV.stride(0),
            *alternatives,
            n_alternatives,
            *kept,
            blocks,
            chosen_R,
            logprobs_R,
            log_likely,
            BLOCKS=power_of_2(blocks),
            ALTERNATIVES=power_of_2(max(1, n_alternatives)),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return chosen_R, logprobs_R
