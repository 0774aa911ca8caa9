"""A distillation run whose rocks are known, because the student cannot see what the teacher's choice depends on.

1. A rollout is a row of slots; at every slot student and teacher choose between the two types of that slot, and the
   teacher's choice depends on a hidden sign that is drawn again for every occurrence.
2. What the student's features hold of that sign makes the kind of the slot: ``learned`` all of it, ``slow`` a little
   (so that gradient descent takes long), ``blind`` nothing. At a ``noise`` slot it sees a sign, but what the teacher
   goes by is a coin of its own.
3. The student's head is trained by ``weighted_kl`` on tokens it samples itself, weighed by the policy, with its term;
   rows of weight 0 have no score unless the policy asks for one. The policy sees scores and likely tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from rocktokens.models.head import LMHead
from rocktokens.policies.base import WeightPolicy, term_arguments
from rocktokens.scoring.divergence import token_scores, weighted_kl
from rocktokens.scoring.top_tokens import likely_tokens
from rocktokens.traces.schema import trace_table
from rocktokens.traces.writer import TraceWriter
from rocktokens.types import LikelyTokens, Rollout, TokenScores

SLOTS_OF = {"learned": 18, "slow": 8, "blind": 3, "noise": 3}
KINDS = [kind for kind, number in SLOTS_OF.items() for _ in range(number)]
"""Of every slot."""
SLOTS = len(KINDS)
VOCABULARY = 2 * SLOTS
SIGHT = {"learned": 1.0, "slow": 0.12, "blind": 0.0, "noise": 1.0}
CERTAINTY = {"learned": 1.5, "slow": 1.5, "blind": 2.0, "noise": 2.0}
"""Half the difference of the teacher's two logits, on average; an occurrence's lies within 50 % of it."""
ROLLOUTS = 32
LEARNING_RATE = 40.0


def types_of(*kinds: str) -> set[int]:
    """The token ids of the slots of these kinds."""
    return {token for token in range(VOCABULARY) if KINDS[token // 2] in kinds}


@dataclass
class PlantedRun:
    """The world, the student's head so far, and the log of its training."""

    seed: int
    policy: WeightPolicy
    sight: dict[str, float] = field(default_factory=lambda: dict(SIGHT))
    log: list[dict] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        tokens = torch.arange(VOCABULARY)
        at_slot_VS = torch.nn.functional.one_hot(tokens // 2, SLOTS).float()
        sign_V = 1.0 - 2.0 * (tokens % 2)
        self.w_t_VE = torch.cat([20.0 * at_slot_VS, at_slot_VS * sign_V[:, None]], dim=1)
        self.first_VD = torch.cat([20.0 * at_slot_VS, torch.zeros(VOCABULARY, SLOTS)], dim=1)
        self.head_VD = self.first_VD.clone().requires_grad_()
        self.optimizer = torch.optim.SGD([self.head_VD], lr=LEARNING_RATE)

    def train(self, steps: int) -> None:
        """Make so many updates."""
        for _ in range(steps):
            step = len(self.log)
            h_s_TD, h_t_TE, tokens_T, positions_T, rollouts_T = self.sample(step)
            weights_T = self.policy(None, tokens_T, positions_T, rollouts_T, step)
            states = (h_s_TD, self.head_VD, h_t_TE, self.w_t_VE, tokens_T)
            term = term_arguments(self.policy.term_at(step))
            loss, scores = weighted_kl(*states, weights_T, float(len(tokens_T)), **term)
            probed_T = self.policy.probe(weights_T, tokens_T, positions_T, rollouts_T, step)
            kl_T = scores.kl.detach().clone()
            probed = token_scores(h_s_TD[probed_T], self.head_VD, h_t_TE[probed_T], self.w_t_VE, tokens_T[probed_T])
            kl_T[probed_T] = probed.kl
            likely = self.likely(h_s_TD, h_t_TE, tokens_T, rollouts_T) if self.policy.sees_likely else None
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            seen = TokenScores(kl_T.numpy(), *[np.full(len(kl_T), np.nan)] * 5)
            entries = self.policy.observe(seen, tokens_T.numpy(), step)
            if likely is not None:
                entries |= self.policy.observe_likely(likely, step)
            self.log.append({"step": step, **entries})

    def resumed(self, policy: WeightPolicy) -> "PlantedRun":
        """A run that goes on where this one is, with another object of its policy."""
        other = PlantedRun(self.seed, policy, dict(self.sight), list(self.log))
        other.policy.restore(self.policy.state())
        other.head_VD.data.copy_(self.head_VD.data)
        return other

    def require_same(self, other: "PlantedRun") -> None:
        """Check that two runs have the same log, head and state of their policies, bit for bit."""
        assert self.log == other.log and torch.equal(self.head_VD, other.head_VD)
        states = ({name: array.tobytes() for name, array in run.policy.state().items()} for run in (self, other))
        assert next(states) == next(states)

    def likely(
        self, h_s_TD: torch.Tensor, h_t_TE: torch.Tensor, tokens_T: torch.Tensor, rollouts_T: torch.Tensor
    ) -> LikelyTokens:
        """What both models could have written, as of now."""
        heads = LMHead(self.head_VD), LMHead(self.w_t_VE)
        tops = likely_tokens(h_s_TD, heads[0], h_t_TE, heads[1], tokens_T, 8, 1.0, 1024)
        return LikelyTokens(rollouts_T.numpy(), *(top.numpy() for top in tops))

    @torch.no_grad()
    def sample(self, step: int) -> tuple[torch.Tensor, ...]:
        """States of both models, the tokens the student chose, their positions and rollouts."""
        generator = torch.Generator().manual_seed(self.seed * 100_003 + step)
        slots_T = torch.arange(SLOTS).repeat(ROLLOUTS)
        seen_T, coin_T = (torch.randint(0, 2, (len(slots_T),), generator=generator) * 2.0 - 1.0 for _ in range(2))
        sight_T = torch.tensor([self.sight[kind] for kind in KINDS])[slots_T]
        noise_T = torch.tensor([kind == "noise" for kind in KINDS])[slots_T]
        certainty_T = torch.tensor([CERTAINTY[kind] for kind in KINDS])[slots_T]
        certainty_T = certainty_T * (0.5 + torch.rand(slots_T.shape, generator=generator))
        decisive_T = torch.where(noise_T, coin_T, seen_T) * certainty_T
        at_slot_TS = torch.nn.functional.one_hot(slots_T, SLOTS).float()
        h_s_TD = torch.cat([at_slot_TS, at_slot_TS * (sight_T * seen_T)[:, None]], dim=1)
        h_t_TE = torch.cat([at_slot_TS, at_slot_TS * decisive_T[:, None]], dim=1)
        cumulative_TV = (h_s_TD @ self.head_VD.T).softmax(-1).cumsum(-1)
        draws_T = torch.rand(slots_T.shape, generator=generator)
        tokens_T = (cumulative_TV < draws_T[:, None]).sum(-1).clamp(max=VOCABULARY - 1)
        rollouts_T = torch.arange(ROLLOUTS).repeat_interleave(SLOTS) + ROLLOUTS * step
        return h_s_TD, h_t_TE, tokens_T, slots_T, rollouts_T

    def write_replay(self, run: Path, probe_steps: int = 6) -> None:
        """Trace one probe set, written by the last student, through the first and the last student."""
        heads: Mapping[int, torch.Tensor] = {0: self.first_VD, len(self.log): self.head_VD.detach()}
        for checkpoint, head_VD in heads.items():
            with TraceWriter(run, checkpoint=checkpoint) as writer:
                for batch in range(probe_steps):
                    h_s_TD, h_t_TE, tokens_T, _, rollouts_T = self.sample(1_000_000 + batch)
                    scores = token_scores(h_s_TD, head_VD, h_t_TE, self.w_t_VE, tokens_T)
                    numpy_scores = TokenScores(*(column.numpy() for _, column in scores.items()))
                    writer.append(trace_table(_rollouts(tokens_T, rollouts_T, len(self.log)), numpy_scores))


def _rollouts(tokens_T: torch.Tensor, rollouts_T: torch.Tensor, step: int) -> list[Rollout]:
    return [
        Rollout(
            rollout_id=int(number),
            prompt_id=f"prompt-{number}",
            sample=0,
            prompt_ids=np.zeros(1, dtype=np.int32),
            token_ids=ids.astype(np.int32),
            logprobs=np.zeros(SLOTS, dtype=np.float32),
            policy_step=step,
            finished=True,
        )
        for number, ids in zip(rollouts_T.numpy()[::SLOTS], tokens_T.numpy().reshape(ROLLOUTS, SLOTS), strict=True)
    ]
