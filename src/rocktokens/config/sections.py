"""The sections of a run's configuration: a knob lives in the section of the component that uses it.

Names follow TRL and transformers where they have one.
"""

import re
from typing import Literal

from pydantic import Field

from rocktokens.config.base import Divergence, Section, WholeOrAuto
from rocktokens.config.policies import PolicySection, UniformSection
from rocktokens.config.tasks import TaskSection, WordmathTask
from rocktokens.errors import ConfigError
from rocktokens.types import Label

GAMMA, ETA = 0.9, 0.1
"""When contexts are similar, and how many similar ones make an occurrence consistent (docs/decisions.md says why)."""
POSITIVE = 5e-324
"""The smallest number above 0."""
_STEP = re.compile(r"(?:step|checkpoint|global_step)[-_](\d+)$")


class RunSection(Section):
    """Where the run lives and the one seed everything random in it derives from."""

    directory: str = Field(min_length=1, description="folder of the run; created when it does not exist")
    seed: int = Field(default=0, ge=0, lt=2**63)


class ModelsSection(Section):
    """Student and teacher: a hub id, a local directory, or an embedded id such as `pebbles-student`."""

    student: str = "pebbles-student"
    teacher: str = "pebbles-teacher"
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="of the loaded weights; log-softmax is float32 whatever this says"
    )
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")


class RolloutsSection(Section):
    """How the student writes."""

    temperature: float = Field(default=1.0, ge=0, description="0 is greedy")
    max_completion_length: int = Field(default=160, ge=1)
    max_prompt_length: int = Field(default=512, ge=1, description="a longer prompt is an error, never cut")
    num_generations: int = Field(default=1, ge=1, description="rollouts per prompt and step")
    batch_size: int = Field(default=64, ge=1, description="sequences decoded together")
    chat_template: bool = Field(
        default=True, description="wrap the prompt in the tokenizer's chat template if it has one"
    )


class ScoringSection(Section):
    """What is measured and minimised at every token."""

    divergence: Divergence = "reverse"
    temperature: float = Field(default=1.0, gt=0)
    tokens_per_chunk: int = Field(default=1024, ge=1, description="positions whose logits are in memory at once")
    tokens_per_batch: int = Field(default=16384, ge=1, description="tokens and padding of a forward without gradient")
    round_logits: bool = Field(
        default=False, description="training on a GPU, keep logits in the models' half width: faster, less exact"
    )


class LoraSection(Section):
    """Train low-rank adapters instead of all weights (PEFT)."""

    enabled: bool = False
    r: int = Field(default=16, ge=1)
    lora_alpha: float = Field(default=32, gt=0)
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: str = Field(
        default="all-linear", description="PEFT's name for what gets an adapter; never the LM head"
    )


class TrainingSection(Section):
    """Optimisation. One step = one update on fresh rollouts."""

    max_steps: int = Field(default=100, ge=1)
    per_device_train_batch_size: int = Field(default=32, ge=1, description="rollouts of one micro-batch on one device")
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    learning_rate: float = Field(default=5e-4, gt=0)
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = Field(default=5, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.99, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    bf16: bool = Field(default=True, description="bfloat16 autocast on a GPU; float32 on CPU")
    gradient_checkpointing: bool = False
    save_steps: int = Field(
        default=25, ge=1, description="a checkpoint at step 0, every this many steps, and at the end"
    )
    max_truncated_share: float = Field(
        default=0.9, gt=0, le=1, description="stop when more rollouts than this hit the length limit 3 steps running"
    )
    trace: bool = Field(
        default=True, description="write the scores of every response token to traces/training while training"
    )
    report_to: list[Literal["trackio", "wandb", "tensorboard"]] = Field(default_factory=list)

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts that one process trains on in a step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps


class TraceSection(Section):
    """Replay of one probe set through checkpoints."""

    checkpoints: list[str] = Field(
        default_factory=list, description="directories or hub ids of students, oldest first; empty: those of the run"
    )
    probe: Literal["last", "first", "each"] = Field(
        default="last", description="which checkpoint writes the probe rollouts"
    )
    num_prompts: int = Field(default=256, ge=1)
    num_generations: int = Field(default=1, ge=1)
    rollouts_per_part: int = Field(default=64, ge=1)
    top_k: int = Field(
        default=0, ge=0, le=64, description="likeliest tokens of both models kept at every token, to look at; 0: none"
    )


class FindSection(Section):
    """Which types are rocks (docs/method.md, section 4)."""

    k: WholeOrAuto = Field(
        default=100, description="how many; auto: where coverage of the kl meets stability of the set"
    )
    stage: Literal["bound", "score", "context"] = Field(
        default="bound",
        description="what ranks: a lower bound of frequency × mean kl, that score itself, or the score at hard places "
        "whose contexts recur",
    )
    require: Literal["stopped", "stuck", "any"] = Field(
        default="stopped",
        description="stopped: types whose loss is surely still falling are no rocks; stuck: only types that surely "
        "kept three quarters of theirs",
    )
    min_freq: int = Field(default=2, ge=1)
    min_prompts: int = Field(default=5, ge=1, description="types in fewer prompts of the selection half are not ranked")
    exclude_top_freq: int = Field(default=0, ge=0)
    joint: bool = False
    min_score: float = Field(
        default=POSITIVE, ge=0, description="of the first k, only those that reach it; default: any score above 0"
    )
    window: int = Field(default=5, ge=1, description="tokens on each side that are the context of an occurrence")
    tau: float = Field(default=0.8, ge=0, le=1, description="quantile of kl that a persistent occurrence reaches twice")
    tau_nats: tuple[float, float] | None = Field(
        default=None, description="thresholds at baseline and reference in nats, instead of the quantile"
    )
    gamma: float = Field(default=GAMMA, gt=0, le=1, description="least cosine of similar contexts")
    eta: float = Field(default=ETA, gt=0, le=1, description="least share of similar contexts of a kept occurrence")
    encoder: Literal["embeddings", "hidden"] = Field(
        default="embeddings", description="hidden: the student's last state before the token; needs the student"
    )
    max_pairs: int = Field(default=400_000_000, ge=2, description="pairs of contexts; beyond it types are sampled")
    split: float = Field(
        default=0.5, gt=0, le=1, description="share of prompts used for selection; 1 uses them all for both"
    )


class EvaluationSection(Section):
    """Accuracy on held-out prompts."""

    task: TaskSection | None = Field(
        default=None, description="default: the test problems of wordmath where that is the run's task"
    )
    num_prompts: int = Field(default=500, ge=1)
    num_samples: int = Field(default=1, ge=1)
    temperature: float | None = Field(default=None, ge=0, description="default: that of the rollouts")


class KnockoutSection(Section):
    """Accuracy with tokens banned, on the prompts and random numbers of the evaluation (docs/method.md, section 6)."""

    top: int = Field(default=200, ge=1, description="how many of the rocks are banned, in rank order")
    labels: list[Label] | None = Field(default=None, min_length=1, description="only rocks with these labels")
    num_prompts: int = Field(default=200, ge=1)
    num_samples: int = Field(default=1, ge=1)
    temperature: float | None = Field(default=None, ge=0, description="default: that of the evaluation")
    alpha: float = Field(default=0.05, gt=0, lt=1, description="one minus the coverage of intervals")
    epsilon: float = Field(default=0.01, ge=0, le=1, description="smallest change called pillar or stumbling")
    margin: float = Field(default=0.03, ge=0, le=1, description="an interval within ± this is neutral")
    matched: int = Field(default=20, ge=0, description="most placebos as frequent as the rocks")
    never: int = Field(default=20, ge=0, description="placebos that no answer holds")
    tolerance: float = Field(
        default=0.25, ge=0, le=1, description="by which share the frequency of a placebo may differ from its rock's"
    )


class GradientsSection(Section):
    """Where the gradient goes (docs/method.md, section 5)."""

    batches: int = Field(default=8, ge=1, description="of parameter space; intervals are over batches, verdicts need 4")
    tokens_per_forward: int = Field(default=4096, ge=1, description="padded tokens of one forward with gradient")
    sketch_width: int | None = Field(
        default=None, ge=1, description="of vocabulary space; default: none, exact sums, where they fit, else 1024"
    )
    memory: int = Field(default=180_000_000, ge=1, description="bytes of all sums of logit space")


class Config(Section):
    """Everything one run depends on."""

    run: RunSection
    models: ModelsSection = ModelsSection()
    task: TaskSection = WordmathTask()
    rollouts: RolloutsSection = RolloutsSection()
    scoring: ScoringSection = ScoringSection()
    policy: PolicySection = UniformSection()
    lora: LoraSection = LoraSection()
    training: TrainingSection = TrainingSection()
    trace: TraceSection = TraceSection()
    find: FindSection = FindSection()
    evaluation: EvaluationSection = EvaluationSection()
    knockout: KnockoutSection = KnockoutSection()
    gradients: GradientsSection = GradientsSection()


def evaluation_task(config: Config) -> TaskSection:
    """Return what accuracy is measured on; only word problems come with held-out ones of their own."""
    if config.evaluation.task is not None:
        return config.evaluation.task
    if isinstance(config.task, WordmathTask):
        return config.task.model_copy(update={"split": "test"})
    raise ConfigError(
        f"evaluation.task is not set, and the run's task is {config.task.name}: set [evaluation.task] to held-out "
        "prompts with answers"
    )


def checkpoint_steps(names: list[str]) -> list[int]:
    """Return what ``trace.checkpoints`` are filed under: the steps in their names if all have one, else places."""
    found = [_STEP.search(name.rstrip("/")) for name in names]
    return [int(match.group(1)) if all(found) and match else index for index, match in enumerate(found)]
