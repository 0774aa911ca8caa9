"""Try a student before anything is sampled: what it writes must have the probabilities that it is scored with.

1. Two prompts of different lengths are answered together by the sampler, a few tokens each.
2. Each answer is forced through the model as scoring does, trunk and LM head apart, with padding behind it that a
   causal LM cannot see.
3. The log-probabilities of the tokens must be the same up to rounding.

What fails here would fail in silence: positions that a decoder counts by itself, layers between trunk and head, padding
that is read as text. A model that cannot do one of these things at all is refused with what it says.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rocktokens.errors import NonFiniteLossError, RocktokensError
from rocktokens.models.head import causal_lm, hidden_states, lm_head, refusing_strangers

if TYPE_CHECKING:
    from rocktokens.rollouts.sampler import TransformersSampler

PROMPTS, ANSWER, PADDING = (3, 14), 3, 8
"""Tokens of the prompts, of an answer, and behind it."""


def require_scored_as_sampled(sampler: "TransformersSampler") -> None:
    """Refuse a model that is sampled from with other probabilities than it is scored with."""
    longest = PROMPTS[-1] + ANSWER + PADDING
    if any(own is not None and own < longest for own in sampler.context_lengths.values()):
        return
    with refusing_strangers(sampler.model):
        try:
            gap, tolerance = _gap(sampler)
        except NonFiniteLossError:  # named where it matters, with the step
            return
    if not gap <= tolerance:
        raise RocktokensError(
            f"{type(causal_lm(sampler.model)).__name__} is sampled from with other probabilities than it is scored "
            f"with (they differ by {gap:.3g} nats): use a student of another architecture"
        )


def _gap(sampler: "TransformersSampler") -> tuple[float, float]:
    """The largest difference of a log-probability, and what rounding explains."""
    from rocktokens.rollouts.sampler import SampleRequest, evaluation_mode

    model: Any = sampler.model
    prompts = [np.arange(1, 1 + length, dtype=np.int32) % sampler.vocab_size for length in PROMPTS]
    requests = [SampleRequest(f"probe {number}", prompt, 0) for number, prompt in enumerate(prompts)]
    completions = sampler.sample(requests, temperature=1.0, max_new_tokens=ANSWER, seed=0)
    gap, largest = 0.0, 1.0
    with torch.inference_mode(), evaluation_mode(model):
        head = lm_head(model).whole().cut(sampler.vocab_size)
        for prompt, own in zip(prompts, completions, strict=True):
            ids = np.concatenate([prompt, own.token_ids, np.full(PADDING, sampler.pad_id, np.int32)])
            states_LD = hidden_states(model, torch.from_numpy(ids).long().to(model.device)[None])[0]
            logits_TV = head.logits(states_LD[len(prompt) - 1 : len(prompt) - 1 + len(own.token_ids)])
            written_T = torch.from_numpy(own.token_ids).long().to(logits_TV.device)
            scored_T = logits_TV.log_softmax(-1).gather(1, written_T[:, None])[:, 0].cpu().numpy()
            gap = max(gap, float(np.abs(scored_T - own.logprobs).max()))
            largest = max(largest, logits_TV.abs().max().item())
    return gap, max(1e-3, 4 * torch.finfo(model.dtype).eps) * largest
