"""Small scored rollouts for the tests of traces."""

import numpy as np
import pyarrow as pa

from rocktokens.traces.schema import trace_table
from rocktokens.types import Rollout, TokenScores

SCORES = ("kl", "logp_student", "logp_teacher", "entropy_student", "entropy_teacher", "grad_norm")


def rollout(rollout_id: int, token_ids: list[int], prompt_id: str = "p", policy_step: int = 0) -> Rollout:
    return Rollout(
        rollout_id=rollout_id,
        prompt_id=prompt_id,
        sample=0,
        prompt_ids=np.array([1, 2], np.int32),
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.zeros(len(token_ids), np.float32),
        policy_step=policy_step,
        finished=True,
    )


def scores(count: int, seed: int = 0) -> TokenScores:
    values = np.random.default_rng(seed).exponential(1.0, (len(SCORES), count)).astype(np.float32)
    return TokenScores(**dict(zip(SCORES, values, strict=True)))


def sample_table(rows: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    lengths = []
    while sum(lengths) < rows:
        lengths.append(min(int(rng.integers(1, 9)), rows - sum(lengths)))
    rollouts = [
        rollout(index, rng.integers(0, 50, length).tolist(), f"p{index % 3}", policy_step=7)
        for index, length in enumerate(lengths)
    ]
    return trace_table(rollouts, scores(rows, seed), None)
