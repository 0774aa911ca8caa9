"""A student, a teacher and rollouts small enough for the gradient of every single position, found naively."""

import numpy as np
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from rocktokens.types import Rollout

VOCABULARY = 23


def tiny_gpt2(width: int, seed: int, tied: bool = False) -> GPT2LMHeadModel:
    """Two layers in float64, which GPT-2 keeps throughout; with dropout, which must not matter."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=width,
        n_layer=2,
        n_head=2,
        n_inner=2 * width,
        initializer_range=0.4,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).double().eval()


def make_rollouts(count: int, seed: int = 0, per_prompt: int = 1) -> list[Rollout]:
    """Prompts of 1 to 5 tokens with responses of 1 to 7."""
    rng = np.random.default_rng(seed)
    return [
        Rollout(
            rollout_id=100 + index,
            prompt_id=f"p{index // per_prompt}",
            sample=index % per_prompt,
            prompt_ids=rng.integers(0, VOCABULARY, rng.integers(1, 6), dtype=np.int32),
            token_ids=(response := rng.integers(0, VOCABULARY, rng.integers(1, 8), dtype=np.int32)),
            logprobs=np.zeros(len(response), dtype=np.float32),
            policy_step=0,
            finished=True,
        )
        for index in range(count)
    ]


def token_ids(rollouts: list[Rollout]) -> np.ndarray:
    return np.concatenate([rollout.token_ids for rollout in rollouts])


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def position_kls(student: nn.Module, teacher: nn.Module, rollouts: list[Rollout], temperature: float = 1.0):
    """The reverse kl at every response position, from whole logits, one rollout at a time."""
    for rollout in rollouts:
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.token_ids])).long()[None]
        with torch.no_grad():
            log_q = (teacher(input_ids=ids).logits[0] / temperature).log_softmax(-1)
        log_p = (student(input_ids=ids).logits[0] / temperature).log_softmax(-1)
        for at in range(len(rollout.prompt_ids) - 1, ids.shape[1] - 1):
            yield (log_p[at].exp() * (log_p[at] - log_q[at])).sum()


def position_gradients(student: nn.Module, teacher: nn.Module, rollouts: list[Rollout], temperature: float = 1.0):
    """float64 (T, n): the gradient of every position's kl with respect to all n trainable numbers."""
    parameters = list(trainable(student).values())
    rows = []
    for kl in position_kls(student, teacher, rollouts, temperature):
        gradients = torch.autograd.grad(kl, parameters, retain_graph=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows)


def group_sums(rows_Tn: torch.Tensor, group_T: np.ndarray, n_groups: int) -> torch.Tensor:
    """(A, n): the gradient of every group's part of the mean over all positions."""
    return torch.stack([rows_Tn[group_T == group].sum(dim=0) for group in range(n_groups)]) / len(group_T)


def flat(gradients, parameters) -> torch.Tensor:
    """(A, n): gradients by group and parameter as rows; None is 0."""
    zeros = [torch.zeros_like(parameter) for parameter in parameters]
    filled = [[zero if own is None else own for own, zero in zip(row, zeros, strict=True)] for row in gradients]
    return torch.stack([torch.cat([gradient.flatten() for gradient in row]) for row in filled])
