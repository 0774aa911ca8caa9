"""``RockDistillationTrainer``: TRL's on-policy distillation with our weights on its tokens and our traces beside it.

1. TRL generates the completions of an optimiser step. The policy weighs all their tokens at once (after a scoring pass
   without gradient if it needs scores first), and the weights travel with the completions through TRL's batches.
2. TRL computes hidden states, heads and scales. Its divergence per token, from its own kernel, is multiplied by the
   weights before it is summed; rows of weight 0 never reach a head. With weights of 1 that is TRL's own loss, bit for
   bit. The term of a policy ``coarse`` is not in TRL's kernel: there our own ``weighted_kl`` takes its place.
3. TRL divides by the tokens of the whole step, over all micro-batches and processes: our denominator ``all``. ``kept``
   divides by the sum of their weights instead.
4. Scores for traces, and scores and likely tokens for policies that watch the run, come from the same hidden states.

Evaluation is TRL's own. See https://huggingface.co/docs/trl/distillation_trainer.
"""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from rocktokens.config import Divergence, PolicySection, Section, validate
from rocktokens.errors import ConfigError, RunDirError
from rocktokens.integrations.trl_run import CheckpointParts, TrlRun
from rocktokens.integrations.trl_seams import HeadInputs, LossParts, PerTokenLoss, require_tested_trl, through_heads
from rocktokens.integrations.trl_step import TrlStep, own_rollouts, weigh
from rocktokens.models.fingerprints import vocabulary_sha256
from rocktokens.policies import Coarse, WeightPolicy, policy_from_section
from rocktokens.run_dir import derive_seed
from rocktokens.training.objective import LIKELY_K
from rocktokens.training.session import DATA_PARALLEL
from rocktokens.training.step import Denominator, concatenated, numpy_scores, require_weight
from rocktokens.types import EXTRA_COLUMNS, TokenScores

require_tested_trl()  # before the imports that an untested TRL would fail in its own words

from trl.trainer import distillation_trainer as stock  # noqa: E402
from trl.trainer.distillation_trainer import DistillationTrainer  # noqa: E402

FORWARD, REVERSE = 0.0, 1.0
DIVERGENCES: dict[float, Divergence] = {FORWARD: "forward", 0.5: "jsd", REVERSE: "reverse"}
"""TRL's ``beta``, for those that our scores know."""


class RockDistillationTrainer(DistillationTrainer):
    """TRL's ``DistillationTrainer`` with a weight policy and traces.

    Example: ``RockDistillationTrainer(model=…, teacher_model=…, args=…, train_dataset=…, processing_class=…,
    policy={"name": "rocks", "rocks": "runs/a/rocks.json", "lam": 0.0}, trace_dir="runs/trl")``.

    Args:
        *args: What ``DistillationTrainer`` takes.
        policy: A ``WeightPolicy``, the name of one that needs no parameters, or the table of a ``[policy]`` section.
        denominator: What the loss is divided by, ``all`` or ``kept``; default what the section says, else ``all``.
        trace_dir: A run directory for training traces and the policy's log; None writes none.
        **kwargs: What ``DistillationTrainer`` takes.
    """

    def __init__(
        self,
        *args: Any,
        policy: WeightPolicy | str | dict[str, Any] = "uniform",
        denominator: Denominator | None = None,
        trace_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        require_tested_trl()
        section = None
        if not isinstance(policy, WeightPolicy):
            record = {"name": policy} if isinstance(policy, str) else policy
            section = validate(_Chosen, {"policy": record}, "RockDistillationTrainer").policy
        super().__init__(*args, **kwargs)
        sha256 = vocabulary_sha256(self._tokenizer.get_vocab())
        if section is not None:
            seed = derive_seed(self.args.seed, "policy")
            policy = policy_from_section(section, sha256, seed, self._tokenizer, self.eos_token_ids)
        self.policy = cast(WeightPolicy, policy)
        self.denominator: Denominator = denominator or (section.denominator if section else "all")
        observes = type(self.policy).observe is not WeightPolicy.observe
        self._traced = trace_dir is not None
        self._keeps_scores = self._traced or observes
        self._require_weighable()
        self._update: TrlStep | None = None
        self._run: TrlRun | None = None
        if trace_dir is not None and self.is_world_process_zero():
            student, teacher = cast(Any, self.model), self.accelerator.unwrap_model(self.teacher_model)
            facts = {
                "tokenizer_sha256": sha256,
                "seed": self.args.seed,
                "student": getattr(student.config, "_name_or_path", ""),
                "teacher": getattr(teacher.config, "_name_or_path", ""),
                "policy": self.policy.name,
                "denominator": self.denominator,
                "divergence": DIVERGENCES[self.beta],
                "temperature": self.temperature,
            }
            self._run = TrlRun(trace_dir, self._tokenizer, facts)
        self.add_callback(_PolicyInCheckpoints(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does; the traces hold every finished update, however training ends short of a kill."""
        resumed = self._resumed(resume_from_checkpoint) if resume_from_checkpoint else None
        with self._run.writing(resumed) if self._run else nullcontext():
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """TRL's micro-step; after the last one of an optimiser step the policy sees what was scored."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._step % self.args.gradient_accumulation_steps == 0 and self._update is not None:
            self._finish(self._update)
        return loss

    def save_policy(self, directory: Path, step: int) -> None:
        """Commit the traces so far and add our part to a checkpoint."""
        traces = self._run.flush() if self._run else (None, 0)
        CheckpointParts(step, self.policy.name, self.denominator, *traces, self.policy.state()).save(directory)

    # TRL's seams

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        if not cast(Any, self.model).training:
            return batch
        step, rank, ranks = self.state.global_step, self.accelerator.process_index, self.accelerator.num_processes
        rollouts = own_rollouts(batch, inputs, step, (step * ranks + rank) * len(inputs), self.eos_token_ids)
        scores = self._scores_first(batch, step) if self.policy.needs else None
        self._update = weigh(self.policy, self.denominator, rollouts, scores, rank, self.args.seed)
        require_weight(step, self._update.weights)
        return {**batch, **self._update.layout(batch["completion_mask"])}

    def _compute_loss(self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        if self._update is None or "token_weights" not in inputs:  # evaluation
            return super()._compute_loss(unwrapped_student, inputs, num_items_in_batch)
        if self.denominator == "kept":
            share = self._update.weights.denominator / self.accelerator.num_processes
            num_items_in_batch = torch.tensor(share, device=inputs["token_weights"].device)  # as stock: it rounds alike
        compute = partial(self._weighted_loss, self._update, inputs)
        return self._at_heads(unwrapped_student, inputs, num_items_in_batch, compute)

    def _at_heads(self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any, compute: PerTokenLoss) -> Any:
        """TRL's computation of a loss with ``compute`` as its last step."""
        with through_heads(stock, compute):
            return super()._compute_loss(unwrapped_student, inputs, num_items_in_batch)

    # Ours

    def _resumed(self, checkpoint: str | Literal[True]) -> CheckpointParts:
        """Read our part of the checkpoint to continue from, of this same run, and restore the policy."""
        path = get_last_checkpoint(cast(str, self.args.output_dir)) if checkpoint is True else checkpoint
        if path is None:
            raise RunDirError(
                f"resume_from_checkpoint is set, but {self.args.output_dir} holds no checkpoint: leave it out to start "
                "a new run"
            )
        resumed = CheckpointParts.load(Path(path))
        resumed.require_same(self.policy, self.denominator, traced=self._traced)
        if resumed.policy_state:
            self.policy.restore(resumed.policy_state)
        return resumed

    def _weighted_loss(self, update: TrlStep, inputs: Any, heads: HeadInputs) -> LossParts:
        """This micro-batch's part of Σ w · divergence / D, and the entropy and number of the tokens that count."""
        if self.policy.sees_likely:
            likely_N = inputs["token_likely"].flatten()
            top = heads.likely(likely_N, inputs["completion_ids"].flatten(), LIKELY_K)
            update.record_likely(inputs["token_index"].flatten()[likely_N], top)
        weights_N = inputs["token_weights"].flatten()
        kept_N = heads.valid_N & (weights_N != 0)
        term = self.policy.term_at(update.step)
        if isinstance(term, Coarse) and term.lam != 1.0:
            arrays = (kept_N, inputs["completion_ids"].flatten(), weights_N)
            loss, scores = heads.coarse_sum(*arrays, DIVERGENCES[self.beta], term)
            if self._records_scores:
                update.record(inputs["token_index"].flatten()[kept_N], scores)
                probed_N = inputs["token_scored"].flatten() & ~kept_N
                if probed_N.any():
                    self._scored(update, inputs, heads, probed_N)
            return loss / heads.num_items, scores.entropy_student.sum(), kept_N.sum()
        loss, entropy = 0.0, 0.0
        for rows, beta in self._terms(update, inputs, heads, kept_N):
            divergence_n, entropy_n = heads.divergence(rows, beta)
            left_out_n = ~kept_N[rows]
            loss = loss + (divergence_n * weights_N[rows]).masked_fill(left_out_n, 0).sum()
            entropy = entropy + entropy_n.masked_fill(left_out_n, 0).sum()
        return loss / heads.num_items, entropy, kept_N.sum()

    def _terms(
        self, update: TrlStep, inputs: Any, heads: HeadInputs, kept_N: torch.Tensor
    ) -> list[tuple[slice | torch.Tensor, float]]:
        """Which rows go through TRL's kernel, and with which ``beta``; scores are taken on the way where wanted."""
        asymmetric = self.policy.term_at(update.step) == "asymmetric"
        if asymmetric or self._records_scores:
            scored_N = inputs["token_scored"].flatten()
            scores = self._scored(update, inputs, heads, scored_N)
            if asymmetric:
                toward_N = torch.zeros_like(kept_N)
                toward_N[scored_N] = scores.logp_teacher > scores.logp_student
                return [(kept_N & toward_N, REVERSE), (kept_N & ~toward_N, FORWARD)]
        return [(heads.rows_of(kept_N), self.beta)]

    @property
    def _records_scores(self) -> bool:
        """Whether scores are kept that the policy has not asked for before it weighed."""
        return self._keeps_scores and not self.policy.needs

    def _scored(self, update: TrlStep, inputs: Any, heads: HeadInputs, rows_N: torch.Tensor) -> TokenScores:
        """Score some rows of a micro-batch and record that."""
        term = self.policy.term_at(update.step)
        scores = heads.scores(rows_N, inputs["completion_ids"].flatten(), DIVERGENCES[self.beta], term)
        update.record(inputs["token_index"].flatten()[rows_N], scores)
        return scores

    def _scores_first(self, batch: dict[str, Any], step: int) -> TokenScores:
        """Every token of this process's completions, scored without gradient, micro-batch after micro-batch."""
        model: Any = self.model_wrapped
        student = self.accelerator.unwrap_model(model)
        scored = []
        model.eval()
        with torch.no_grad(), self.compute_loss_context_manager():
            for micro in stock.split_tensor_dict(batch, self.args.gradient_accumulation_steps):
                call = (student, micro, None, partial(self._every_score, micro, step))
                scored.append(self._forward_redirection(model, student, self._at_heads, *call)[0])
        model.train()
        return concatenated(scored)

    def _every_score(self, inputs: Any, step: int, heads: HeadInputs) -> LossParts:
        """In the place of a loss: the scores of all tokens, with the columns the policy needs."""
        extras = [name for name in EXTRA_COLUMNS if name in self.policy.needs]
        settings = (DIVERGENCES[self.beta], self.policy.term_at(step), extras)
        scores = heads.scores(heads.valid_N, inputs["completion_ids"].flatten(), *settings)
        nothing = torch.zeros(())
        return numpy_scores([scores]), nothing, nothing

    def _finish(self, update: TrlStep) -> None:
        """Let the policy observe the update, then log and trace it."""
        record: dict[str, Any] = {
            "weight_dropped_share": 1.0 - float(np.mean(update.weights.weights, dtype=np.float64))
        }
        scores = update.scores() if self._keeps_scores else None
        if scores is not None:
            record |= {"head_rows_skipped": float(np.mean(np.isnan(scores.kl))), "kl": float(np.nanmean(scores.kl))}
            if scores.kl_choice is not None:
                record["kl_decision"] = float(np.nanmean(scores.kl - scores.kl_choice))
            record |= self.policy.observe(scores, update.token_ids, update.step)
        if self.policy.sees_likely:
            record |= self.policy.observe_likely(update.likely(), update.step)
        if scores is not None and self._run is not None:
            self._run.append(update, scores, {"step": update.step, **record})
        for name, value in record.items():
            if isinstance(value, int | float):
                self._metrics["train"][name].append(value)

    def _require_weighable(self) -> None:
        """Refuse, in one sentence, what cannot carry our weights or has not been tried."""
        if self.denominator not in ("all", "kept"):
            raise ConfigError(f"denominator = {self.denominator!r} is not valid: use 'all' or 'kept'")
        if self.teacher_model is None:
            raise ConfigError(
                "teacher_model is not set: weights need the teacher's whole distribution, give a local model"
            )
        if self.tools or self._is_vlm:
            raise ConfigError(
                f"{'tools are given' if self.tools else 'the processor takes images'}, but weights and traces are of "
                "text that the student alone wrote: train a text model without tools"
            )
        if self.accelerator.distributed_type not in DATA_PARALLEL:
            raise ConfigError(
                f"the launcher asks for {self.accelerator.distributed_type.value}, but weights are tested with whole "
                "models on every device: launch plain data parallelism (accelerate launch --multi_gpu)"
            )
        scored = self._keeps_scores or self.policy.needs or self.policy.term
        if scored and self.beta not in DIVERGENCES:
            raise ConfigError(
                f"beta = {self.beta} has no scores for traces or for the policy {self.policy.name}: use 1 (reverse), 0 "
                "(forward) or 0.5 (Jensen-Shannon), or leave out trace_dir and choose another policy"
            )


class _PolicyInCheckpoints(TrainerCallback):
    """Adds the policy to every checkpoint that TRL writes."""

    def __init__(self, trainer: RockDistillationTrainer) -> None:
        self._trainer = trainer

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After TRL's own files are there."""
        if state.is_world_process_zero:
            directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            self._trainer.save_policy(directory, state.global_step)


class _Chosen(Section):
    """A ``[policy]`` table as a configuration has it."""

    policy: PolicySection
