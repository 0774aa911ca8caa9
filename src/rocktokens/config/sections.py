"""The sections of a run's configuration: a knob lives in the section of the component that uses it.

Names follow TRL and transformers where they have one.
"""

import re
from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rocktokens.config.base import BoolOrAuto, Divergence, Section, WholeOrAuto
from rocktokens.config.partial_teacher import why_not_top_k
from rocktokens.config.policies import PolicySection, UniformSection
from rocktokens.config.tasks import TaskSection, WordmathTask
from rocktokens.errors import ConfigError
from rocktokens.types import TAIL, Label

GAMMA, ETA = 0.9, 0.1
"""When contexts are similar, and how many similar ones make an occurrence consistent (docs/decisions.md says why)."""
POSITIVE = 5e-324
"""The smallest number above 0."""
TOP_K = 20
"""Log-probabilities that a vLLM server gives for each token of a prompt, unless it is started to give more."""
STEP_NAME = re.compile(r"(?:step|checkpoint|global_step)[-_](\d+)$")
"""How the name of a checkpoint ends that says its step."""


class RunSection(Section):
    """Where the run lives and the one seed everything random in it derives from."""

    directory: str = Field(min_length=1, description="folder of the run; created when it does not exist")
    seed: int = Field(default=0, ge=0, lt=2**63, description="everything random in the run derives from it")


class ModelsSection(Section):
    """Student and teacher: a hub id, a local directory, or an embedded id such as `pebbles-student`."""

    student: str = Field(description="the model that is trained; default: the first of trace.checkpoints, if listed")
    teacher: str = Field(description="the model it learns from; both must have one tokenizer")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="of the teacher and of replayed students; training keeps scores in float32",
    )
    student_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="of the student's weights in training; bfloat16: beside a float32 master copy, which is saved",
    )
    device: str = Field(default="auto", description="auto (a GPU if there is one), cpu, cuda or cuda:N")
    teacher_device: str | None = Field(
        default=None,
        description="where the teacher runs, if not on models.device: cpu, cuda:N, or spread (over all GPUs, then CPU)",
    )


class TeacherSection(Section):
    """Where the teacher's values come from."""

    engine: Literal["local", "vllm"] = Field(
        default="local",
        description="local: the teacher in memory; vllm: a server computes it (teacher.url)",
    )
    values: Literal["states", "top_k"] = Field(
        default="states",
        description="what the server sends. states: last hidden states, for the whole divergence; top_k: "
        "log-probabilities of the likeliest tokens, for the divergence of those and one tail",
    )
    top_k: int = Field(
        default=TOP_K, ge=1, description='how many, with values = "top_k"; a server gives 20 unless told otherwise'
    )
    url: str | None = Field(
        default=None, pattern=r"^https?://", description="of the vLLM server, such as http://127.0.0.1:8001"
    )
    model: str | None = Field(
        default=None, min_length=1, description="what the server calls the teacher; default: models.teacher"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the states that the server sends; float32 needs a server in float32"
    )
    max_gap: float = Field(
        default=1e-3,
        gt=0,
        description="between log-probabilities of a fixed text now and at first, in nats; about 0.2 for bfloat16",
    )
    connections: int = Field(default=64, ge=1, description="requests that are sent at once")
    timeout: float = Field(default=600, gt=0, description="seconds until a server that does not answer is lost")

    @model_validator(mode="after")
    def _server_has_an_address(self) -> Self:
        if self.engine == "vllm" and self.url is None:
            raise ValueError('engine = "vllm" needs the address of a server: set teacher.url = "http://127.0.0.1:8001"')
        return self

    @model_validator(mode="after")
    def _keys_of_its_values(self) -> Self:
        if self.values == "top_k" and self.engine != "vllm":
            raise ValueError(
                'values = "top_k" is what a server gives, and engine is "local", whose teacher gives all: set '
                'engine = "vllm", or drop values'
            )
        if self.values == "states" and self.top_k != TOP_K:
            raise ValueError(f'top_k = {self.top_k} is of values = "top_k", and values is "states": set or drop both')
        if self.values == "top_k" and self.dtype != "float32":
            raise ValueError(f'dtype = "{self.dtype}" is of states, and values = "top_k" asks for none: drop dtype')
        return self

    @property
    def is_top_k(self) -> bool:
        """Whether of the teacher's distributions only the likeliest tokens are known."""
        return self.values == "top_k"

    @property
    def label(self) -> str:
        """How the teacher's values come, as a trace says it; nothing where the teacher is in memory."""
        if self.engine == "local":
            return ""
        return f"top-{self.top_k}{TAIL}" if self.values == "top_k" else f"states {self.dtype}"


class RolloutsSection(Section):
    """How the student writes."""

    temperature: float = Field(default=1.0, ge=0, description="of sampling; 0 is greedy")
    max_completion_length: int = Field(default=160, ge=1, description="tokens after which a rollout is cut off")
    max_prompt_length: int = Field(default=512, ge=1, description="in tokens; a longer prompt is an error, never cut")
    num_generations: int = Field(default=1, ge=1, description="rollouts per prompt and step")
    batch_size: int = Field(default=64, ge=1, description="sequences decoded together")
    chat_template: bool = Field(
        default=True, description="wrap the prompt in the tokenizer's chat template if it has one"
    )
    engine: Literal["transformers", "vllm"] = Field(
        default="transformers", description="transformers: the student in memory; vllm: a vLLM server (rollouts.url)"
    )
    url: str | None = Field(
        default=None, pattern=r"^https?://", description="of the vLLM server, such as http://127.0.0.1:8000"
    )
    noise: Literal["plugin", "server"] = Field(
        default="plugin",
        description="plugin: the server draws with our noise, so rollouts are those of transformers; server: its own",
    )
    sync_directory: str | None = Field(
        default=None, description="where the vLLM server finds new weights; default: sync/ in the run's folder"
    )
    max_gap: float = Field(
        default=1e-3, gt=0, description="between log-probabilities of the vLLM server and of the student, in nats"
    )
    timeout: float = Field(default=600, gt=0, description="seconds until a vLLM server that does not answer is lost")

    @model_validator(mode="after")
    def _server_has_an_address(self) -> Self:
        if self.engine == "vllm" and self.url is None:
            raise ValueError(
                'engine = "vllm" needs the address of a server: set rollouts.url = "http://127.0.0.1:8000"'
            )
        return self

    def determining(self) -> dict[str, Any]:
        """Return what rollouts depend on: not where a server is, and nothing of servers where there is none."""
        place = {"url", "sync_directory", "timeout", "max_gap"}
        without = place if self.engine == "vllm" else place | {"engine", "noise"}
        return self.model_dump(mode="json", exclude=without)


class ScoringSection(Section):
    """What is measured and minimised at every token."""

    divergence: Divergence = Field(
        default="reverse",
        description="reverse: KL(student ‖ teacher); forward: KL(teacher ‖ student); jsd: between them",
    )
    temperature: float = Field(default=1.0, gt=0, description="by which the logits of both models are divided")
    tokens_per_chunk: int = Field(default=1024, ge=1, description="positions whose logits are in memory at once")
    tokens_per_batch: int = Field(default=16384, ge=1, description="tokens and padding of a forward without gradient")
    round_logits: bool = Field(
        default=False, description="training on a GPU, keep logits in the models' half width: faster, less exact"
    )


class LoraSection(Section):
    """Train low-rank adapters instead of all weights (PEFT)."""

    enabled: bool = Field(default=False, description="whether adapters are trained instead of all weights")
    r: int = Field(default=16, ge=1, description="rank of an adapter")
    lora_alpha: float = Field(default=32, gt=0, description="an adapter is scaled by lora_alpha / r")
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout before an adapter")
    target_modules: str = Field(
        default="all-linear", description="PEFT's name for what gets an adapter; never the LM head"
    )


class TrainingSection(Section):
    """Optimisation. One step = one update on fresh rollouts."""

    max_steps: int = Field(default=100, ge=1, description="updates of the run")
    num_train_epochs: float | None = Field(
        default=None, gt=0, description="passes over the task's prompts, instead of max_steps; not for wordmath"
    )
    per_device_train_batch_size: int = Field(default=32, ge=1, description="rollouts of one micro-batch on one device")
    gradient_accumulation_steps: int = Field(default=1, ge=1, description="micro-batches of one step")
    optim: Literal["adamw_torch", "adamw_8bit"] = Field(
        default="adamw_torch",
        description="adamw_8bit: AdamW with moments in 8 bits, by bitsandbytes (pip install 'rocktokens[bnb]')",
    )
    learning_rate: float = Field(default=5e-4, gt=0, description="of AdamW, after the warm-up")
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="how the learning rate goes on after the warm-up; cosine and linear end at 0"
    )
    warmup_steps: int = Field(default=5, ge=0, description="steps in which the learning rate rises from 0")
    weight_decay: float = Field(default=0.0, ge=0, description="of AdamW")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean of gradients")
    adam_beta2: float = Field(default=0.99, ge=0, lt=1, description="decay of the mean of squared gradients")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="added to the root of the mean square")
    max_grad_norm: float = Field(default=1.0, gt=0, description="a longer gradient is scaled down to this norm")
    bf16: bool = Field(default=True, description="bfloat16 autocast on a GPU; float32 on CPU")
    gradient_checkpointing: bool = Field(
        default=False, description="compute activations again in the backward pass: less memory, about a third slower"
    )
    shard: BoolOrAuto = Field(
        default="auto",
        description="several processes hold a part each of models, gradient and optimizer; auto: where all do not fit",
    )
    save_steps: int = Field(
        default=25, ge=1, description="a checkpoint at step 0, every this many steps, and at the end"
    )
    save_total_limit: int | None = Field(
        default=None, ge=1, description="most checkpoints that stay beside step 0, the latest ones; default: all"
    )
    max_truncated_share: float = Field(
        default=0.9, gt=0, le=1, description="stop when more rollouts than this hit the length limit 3 steps running"
    )
    trace: bool = Field(
        default=True, description="write the scores of every response token to traces/training while training"
    )
    report_to: list[Literal["trackio", "wandb", "tensorboard"]] = Field(
        default_factory=list, description="trackers that also get the log; the package of each must be installed"
    )

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.num_train_epochs is not None and "max_steps" in self.model_fields_set:
            raise ValueError(
                f"max_steps = {self.max_steps} and num_train_epochs = {self.num_train_epochs} are two lengths of one "
                "run: remove one of them"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_other_length(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the steps that epochs stand for: what is written can be read."""
        record = dump(self)
        if self.num_train_epochs is not None:
            record.pop("max_steps", None)
        return record

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
    num_prompts: int = Field(default=256, ge=1, description="prompts of the probe set")
    num_generations: int = Field(default=1, ge=1, description="rollouts per prompt of the probe set")
    rollouts_per_part: int = Field(default=64, ge=1, description="rollouts of one Parquet file")
    top_k: int = Field(
        default=8,
        ge=0,
        le=64,
        description="likeliest tokens of both models kept at every token, for `find --classes` and to look at; 0: none",
    )
    classes: str | None = Field(
        default=None,
        min_length=1,
        description="a classes.json: how much of every token's kl is a choice within its classes is kept too",
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
    min_freq: int = Field(default=2, ge=1, description="types with fewer occurrences are not ranked")
    min_prompts: int = Field(default=5, ge=1, description="types in fewer prompts of the selection half are not ranked")
    exclude_top_freq: int = Field(default=0, ge=0, description="leave out this many of the most frequent types")
    joint: bool = Field(default=False, description="rank by the smaller score of the two checkpoints")
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
    num_prompts: int = Field(default=500, ge=1, description="prompts to answer")
    num_samples: int = Field(default=1, ge=1, description="answers per prompt")
    temperature: float | None = Field(default=None, ge=0, description="default: that of the rollouts")


class KnockoutSection(Section):
    """Accuracy with tokens banned, on the prompts and random numbers of the evaluation (docs/method.md, section 6)."""

    top: int = Field(default=200, ge=1, description="how many of the rocks are banned, in rank order")
    labels: list[Label] | None = Field(default=None, min_length=1, description="only rocks with these labels")
    num_prompts: int = Field(default=200, ge=1, description="prompts to answer under every ban")
    num_samples: int = Field(default=1, ge=1, description="answers per prompt and ban")
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
    models: ModelsSection
    teacher: TeacherSection = TeacherSection()
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

    @model_validator(mode="before")
    @classmethod
    def _student_of_checkpoints(cls, record: Any) -> Any:
        """Take the first of ``trace.checkpoints`` for the student where none is named: nothing else is trained."""
        match record:
            case {"models": dict(models), "trace": {"checkpoints": [str(first), *_]}}:
                return {**record, "models": {"student": first, **models}}
        return record

    @model_validator(mode="after")
    def _teacher_says_enough(self) -> Self:
        if self.teacher.is_top_k and (reason := why_not_top_k(self)):
            raise ValueError(reason)
        return self


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


def why_not_graded(config: Config) -> str:
    """Say in one sentence why the config has no answers to measure accuracy against; nothing where it has."""
    try:
        task = evaluation_task(config)
    except ConfigError as error:
        return str(error)
    if has_grades(task):
        return ""
    return (
        "evaluation.task.answer_field is empty, so there are no answers to measure accuracy by: name the field that "
        "has them, or an evaluation.task.grader that needs none"
    )


def has_grades(task: TaskSection) -> bool:
    """Return whether responses can be graded: by an answer, or by a grader that may do without."""
    return isinstance(task, WordmathTask) or bool(task.answer_field) or task.grader is not None


def checkpoint_steps(names: list[str]) -> list[int]:
    """Return what ``trace.checkpoints`` are filed under: the steps in their names if all have one, else places."""
    found = [STEP_NAME.search(name.rstrip("/")) for name in names]
    return [int(match.group(1)) if all(found) and match else index for index, match in enumerate(found)]
