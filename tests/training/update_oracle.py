"""Random rollouts, the gradients training computes for them, and the same by a loop over single positions."""

from collections.abc import Sequence

import numpy as np
import torch

from rocktokens.training.session import Session
from rocktokens.training.step import Weighing, accumulate_gradients
from rocktokens.types import Rollout, TokenWeights


def make_rollout(index: int, rng: np.random.Generator) -> Rollout:
    prompt, response = rng.integers(1, 9), rng.integers(1, 13)
    return Rollout(
        rollout_id=index,
        prompt_id=f"p{index}",
        sample=0,
        prompt_ids=rng.integers(0, 256, prompt, dtype=np.int32),
        token_ids=rng.integers(60, 70, response, dtype=np.int32),
        logprobs=np.zeros(response, dtype=np.float32),
        policy_step=0,
        finished=True,
    )


def watching(weights: TokenWeights, *rows: int) -> Weighing:
    """These weights, with these rows of weight 0 to score all the same."""
    watched_T = np.zeros(len(weights.weights), dtype=bool)
    watched_T[list(rows)] = True
    return Weighing(weights, watched_T)


def gradients(
    session: Session, rollouts: list[Rollout], weights: TokenWeights
) -> tuple[float, dict[str, torch.Tensor]]:
    """The update's loss and the gradient of every parameter, as training computes them."""
    session.student.zero_grad()
    outputs = accumulate_gradients(session, rollouts, watching(weights), step=0)
    named = session.student.named_parameters()
    loss = float(sum(output.loss for output in outputs))
    return loss, {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def naive_gradients(
    session: Session,
    rollouts: list[Rollout],
    weights_by_rollout: list[np.ndarray],
    denominator: float,
    *,
    asymmetric: bool = False,
    classes: Sequence[Sequence[int]] = (),
) -> tuple[float, dict[str, torch.Tensor]]:
    """One rollout and one position at a time, whole logits, float64; each class is one outcome."""
    student, teacher = session.student.double(), session.teacher.double()
    student.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for rollout, weights in zip(rollouts, weights_by_rollout, strict=True):
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.token_ids])).long()[None]
        log_p, log_q = (model(input_ids=ids).logits[0].log_softmax(-1) for model in (student, teacher))
        for t, weight in enumerate(weights):
            a, b, token = *(log[len(rollout.prompt_ids) + t - 1] for log in (log_p, log_q)), int(rollout.token_ids[t])
            if asymmetric and not b[token] > a[token]:
                a, b = b, a
            a, b = (merged(log, classes) for log in (a, b))
            total = total + weight * (a.exp() * (a - b)).sum() / denominator
    total.backward()
    found = {name: parameter.grad.clone() for name, parameter in student.named_parameters()}
    session.student.float(), session.teacher.float()
    return total.item(), found


def merged(log_p: torch.Tensor, classes: Sequence[Sequence[int]]) -> torch.Tensor:
    """The log-probabilities of a distribution in which each class is one outcome."""
    others = torch.ones(len(log_p), dtype=torch.bool)
    others[[v for ids in classes for v in ids]] = False
    return torch.cat([log_p[others], *(log_p[list(ids)].logsumexp(-1, keepdim=True) for ids in classes)])


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def per_rollout(values: np.ndarray, rollouts: list[Rollout]) -> list[np.ndarray]:
    return np.split(values, np.cumsum([len(rollout.token_ids) for rollout in rollouts])[:-1])
