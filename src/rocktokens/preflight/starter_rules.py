"""Settings that fit a pair of models and their data, by rule; nothing is loaded here (docs/config.md has the table).

1. ``PairFacts`` and ``DataFacts`` are what can be known without loading weights (``starter_facts``).
2. ``fit_settings`` turns them into the values that depend on size, context and data, each rule with its reason.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from rocktokens.errors import RocktokensError

BILLION = 10**9
ROLLOUTS_PER_STEP = 64
"""Of a real pair. Gradients of on-policy distillation are dense (a signal at every token), so far fewer rollouts do
than in reinforcement learning; recipes of distillation use 32 to 512."""
DEFAULT_PROMPT_LENGTH = 512
"""Where no data has been seen."""
LEAST_COMPLETION = 16
"""Tokens; where less fits, no answer does."""


@dataclass(frozen=True, slots=True)
class PairFacts:
    """What the configs of two models say."""

    student_parameters: int
    teacher_parameters: int
    vocabulary: int
    context_length: int | None = None
    """The shorter of the two; None where neither names a limit."""


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What a file of JSON lines holds."""

    path: str
    records: int
    prompt_field: str
    answer_field: str = ""
    """Empty where the data has no answers that could be graded."""
    answers: Literal["field", "reply", "prose", "none"] = "none"
    """Where answers are: in a field or in the assistant's last message; or they are prose, or there are none."""
    template: str = "{prompt}"
    grading: Literal["math", "exact"] = "math"
    longest_prompt: int | None = None
    """In tokens, with the template of the tokenizer; None where that did not load."""
    fields: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Fitted:
    """The values of a config that depend on the models and the data."""

    dtype: str
    learning_rate: float
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    max_steps: int
    warmup_steps: int
    save_steps: int
    max_prompt_length: int
    max_completion_length: int
    sampling_batch_size: int
    find_k: int
    trace_prompts: int
    evaluation_prompts: int
    knockout_prompts: int
    knockout_top: int
    max_truncated_share: float | None = None
    """None where the default does."""


@dataclass(frozen=True, slots=True)
class _Size:
    """What goes with a student below a number of parameters."""

    below: float
    """Billions of parameters."""
    learning_rate: float
    micro_batch: int
    completion: int
    saves: int
    """Checkpoints after step 0."""
    probe: int
    """Prompts of the trace."""
    banned_prompts: int
    banned: int
    sampled_together: int


_SIZES = (
    _Size(0.3, 1e-5, 32, 512, 8, 1024, 500, 100, 256),
    _Size(1.0, 5e-6, 16, 1024, 5, 512, 300, 100, 128),
    _Size(3.0, 2e-6, 8, 1024, 4, 512, 300, 50, 128),
    _Size(6.0, 1e-6, 4, 1024, 2, 256, 200, 50, 64),
    _Size(float("inf"), 1e-6, 2, 1024, 2, 256, 200, 50, 64),
)
_PEBBLES = _Size(0.02, 5e-4, 64, 160, 6, 512, 200, 20, 64)
"""Models of a few million parameters: as the recipe `pebbles`."""
LORA_FACTOR = 10
"""Adapters want about ten times the learning rate of full fine-tuning ("LoRA Without Regret", 2025)."""


def fit_settings(pair: PairFacts, data: DataFacts | None = None, *, lora: bool = False, small: bool = False) -> Fitted:
    """Choose the settings of a first run for a pair and its data; ``small``: of a first look on a CPU (``first_look``).

    - Learning rate: 1e-5 below 0.3 B parameters, 5e-6 below 1 B, 2e-6 below 3 B, 1e-6 above. It falls with size as the
      step that a model bears does. TRL's examples of on-policy distillation (GKD) take 2e-5 for half a billion, its
      GRPO 1e-6 for every size; larger models are kept near the second. Adapters take ten times as much.
    - Batch: 64 rollouts per step. Micro-batches halve as models double, and from 3 B on activations are computed again
      (gradient checkpointing): they grow with both, and weights and optimizer leave them less room.
    - Lengths: the longest prompt with a quarter to spare, since a longer one is an error; then 512 tokens of answer
      below 0.3 B, which hardly reasons, else 1,024, or what the shorter context leaves.
    - dtype (of the teacher and replayed students, not of training): bfloat16 from 0.3 B on, where the half that
      it saves is gigabytes.
    - Checkpoints: 8 for small students, 2 beside the start from 3 B on: each takes 4 bytes per parameter, and `find`
      needs a first, a middle and a last one.
    - Probe and bans: statistics want many prompts, time few: 1,024 prompts for small students, 256 for large ones.
      Every ban answers its prompts again, so fewer rocks are banned for larger models.
    - find.k: 100, the default; 20 for a vocabulary below 5,000 types.
    """
    billions = pair.student_parameters / BILLION
    size = _size_of(pair.student_parameters)
    steps = 150 if size is _PEBBLES else 200
    rollouts = max(ROLLOUTS_PER_STEP, size.micro_batch)
    prompt, completion = _lengths(pair.context_length, data, size.completion)
    available = data.records if data else size.probe
    fitted = Fitted(
        dtype="float32" if billions < 0.3 else "bfloat16",
        learning_rate=usual_learning_rate(pair.student_parameters, lora=lora),
        per_device_train_batch_size=size.micro_batch,
        gradient_accumulation_steps=rollouts // size.micro_batch,
        gradient_checkpointing=billions >= 3,
        max_steps=steps,
        warmup_steps=5 if size is _PEBBLES else 10,
        save_steps=steps // size.saves,
        max_prompt_length=prompt,
        max_completion_length=completion,
        sampling_batch_size=size.sampled_together,
        find_k=20 if pair.vocabulary < 5000 else 100,
        trace_prompts=min(size.probe, available),
        evaluation_prompts=min(500, available) if data else 500,
        knockout_prompts=min(size.banned_prompts, available),
        knockout_top=size.banned,
    )
    return first_look(fitted, is_pebbles=size is _PEBBLES) if small else fitted


def first_look(fitted: Fitted, *, is_pebbles: bool) -> Fitted:
    """Cut settings down to what two CPU cores do in minutes: enough to see every stage, too little to conclude from.

    The embedded pair trains as long as in the demo. A real pair makes four steps of eight rollouts, with a first, a
    middle and a last checkpoint for `find`. Answers end after 48 tokens, most of them cut short, which must not stop
    the run. 40 prompts are the least that `find` asks for.
    """
    if is_pebbles:
        return replace(fitted, max_steps=64, save_steps=16)
    return replace(
        fitted,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        max_steps=4,
        warmup_steps=1,
        save_steps=2,
        max_completion_length=min(fitted.max_completion_length, 48),
        max_truncated_share=1.0,
        sampling_batch_size=16,
        trace_prompts=min(fitted.trace_prompts, 40),
        evaluation_prompts=min(fitted.evaluation_prompts, 40),
        knockout_prompts=min(fitted.knockout_prompts, 40),
        knockout_top=5,
    )


def usual_learning_rate(parameters: int, *, lora: bool) -> float:
    """Return the rate of ``fit_settings`` for a student of this size."""
    return _size_of(parameters).learning_rate * (LORA_FACTOR if lora else 1)


def _size_of(parameters: int) -> _Size:
    billions = parameters / BILLION
    return _PEBBLES if billions < _PEBBLES.below else next(own for own in _SIZES if billions < own.below)


def _lengths(context: int | None, data: DataFacts | None, wanted: int) -> tuple[int, int]:
    """Return the longest prompt and the longest answer, both within the context."""
    longest = data.longest_prompt if data else None
    prompt = DEFAULT_PROMPT_LENGTH if longest is None else _round_up(longest * 1.25)
    if context is None:
        return prompt, wanted
    if longest is None:
        prompt = min(prompt, context // 2)
    elif context - longest < LEAST_COMPLETION:
        raise RocktokensError(
            f"the longest prompt has {longest} tokens and the shorter context of the models {context}: remove the long "
            "prompts, or choose models with a longer context"
        )
    prompt = min(prompt, context - LEAST_COMPLETION)
    return prompt, min(wanted, context - prompt)


def _round_up(tokens: float, unit: int = 32) -> int:
    return -(-int(tokens) // unit) * unit


def memory_gigabytes(pair: PairFacts, fitted: Fitted, *, lora: bool = False) -> float:
    """Estimate what the models alone take while training: adapters are too small to count.

    A trained parameter has a float32 weight and gradient and two moments of Adam, 16 bytes; the teacher has the width
    of its dtype.
    """
    teacher = 4 if fitted.dtype == "float32" else 2
    return (pair.student_parameters * (4 if lora else 16) + pair.teacher_parameters * teacher) / BILLION
