"""How long a step would take, from arithmetic alone: an estimate for comparing layouts, not a measurement.

1. Sampling: every token of a batch reads all weights and, of each rollout, the keys and values so far. What takes
   longest counts: reading, multiplying, or starting the kernels of all layers. Of experts those are read that any token
   of the batch passes.
2. Teacher: one forward over prompts and responses, and its LM head over responses.
3. Update: the student's forward, the backward pass at twice its cost (once where only adapters are trained), the
   forward again with gradient checkpointing, and its LM head.
4. Gathering: what is sent between GPUs. Sharded, each micro-batch gathers the teacher once and the student for every
   pass, and sums gradients; whole, gradients are summed once per step.

All prompts and responses are as long as they may be, and nothing overlaps.
"""

from dataclasses import asdict, dataclass

from rocktokens.config import Config
from rocktokens.preflight.resources import BACKWARD_COST, FLOAT32, HALF
from rocktokens.preflight.shapes import ModelShape

BANDWIDTH, BANDWIDTH_SHARE = 3.35e12, 0.7
"""Bytes per second that a GPU reads from its memory (H100 SXM), and the share that decoding reaches."""
LAYER_SECONDS = 0.2e-3
"""That a layer takes at least to sample a token, however small it is (SmolLM2-135M on an H200, docs/performance.md)."""
THROUGHPUT = {HALF: 989e12, FLOAT32: 67e12}
"""Floating-point operations per second of matrix products, by the bytes of a number (H100 SXM, dense)."""
THROUGHPUT_SHARE, EXPERTS_SHARE = 0.4, 0.25
"""The share of it that a forward or backward pass reaches, and one through experts."""
LINK = 300e9
"""Bytes per second between GPUs of one machine (NVLink); between machines it is less."""
ASSUMPTIONS = (
    f"a GPU reads {BANDWIDTH / 1e12:g} TB/s, of which decoding reaches {BANDWIDTH_SHARE:.0%}",
    f"a layer takes at least {LAYER_SECONDS * 1e3:g} ms to sample a token",
    f"a GPU multiplies at {THROUGHPUT[HALF] / 1e12:g} TFLOP/s in bfloat16 ({THROUGHPUT[FLOAT32] / 1e12:g} in float32), "
    f"of which a pass reaches {THROUGHPUT_SHARE:.0%}, {EXPERTS_SHARE:.0%} through experts",
    f"GPUs send {LINK / 1e9:g} GB/s to each other, as within one machine",
    "every prompt and response is as long as it may be, and no two parts of a step overlap",
)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step, on every GPU alike."""

    sampling: float
    teacher: float
    update: float
    gathering: float

    @property
    def total(self) -> float:
        """One part after the other."""
        return sum(asdict(self).values())

    @property
    def bottleneck(self) -> str:
        """The part that takes longest."""
        parts = asdict(self)
        return max(parts, key=lambda name: parts[name])


def step_time(
    config: Config, student: ModelShape, teacher: ModelShape, *, gpus: int, is_sharded: bool, at_once: int
) -> StepTime:
    """Estimate a step in which each GPU writes its rollouts ``at_once`` at a time."""
    training, width = config.training, HALF if config.training.bf16 else FLOAT32
    rollouts, response = training.rollouts_per_step, config.rollouts.max_completion_length
    length = config.rollouts.max_prompt_length + response
    again = int(training.gradient_checkpointing)
    head = 2 * student.vocabulary * student.size.width
    is_whole_trained = student.size.trainable == student.size.parameters
    backward = BACKWARD_COST if is_whole_trained else BACKWARD_COST - 1
    head_products = 3 if student.size.head else 2
    return StepTime(
        sampling=_sampling(config, student, width, min(at_once, rollouts)),
        teacher=_seconds(
            rollouts * length * _forward(teacher, length)
            + rollouts * response * 2 * teacher.vocabulary * teacher.size.width,
            teacher,
            width,
        ),
        update=_seconds(
            rollouts * length * (1 + backward + again) * _forward(student, length)
            + rollouts * response * head_products * head,
            student,
            width,
        ),
        gathering=_gathered_bytes(config, student, teacher, width, is_sharded=is_sharded) * (gpus - 1) / gpus / LINK,
    )


def _forward(shape: ModelShape, length: int) -> float:
    """Operations of one token in the layers: a product and a sum for each parameter, and attention to half a row."""
    return 2 * shape.active_in_layers + 2 * shape.size.layers * shape.attention_width * length


def _seconds(operations: float, shape: ModelShape, width: int) -> float:
    return operations / (THROUGHPUT[width] * (EXPERTS_SHARE if shape.experts else THROUGHPUT_SHARE))


def _sampling(config: Config, student: ModelShape, width: int, at_once: int) -> float:
    """Seconds to write all rollouts of a GPU: full batches, and one of the rest."""
    full, rest = divmod(config.training.rollouts_per_step, at_once)
    seconds = full * _token_time(config, student, width, at_once)
    if rest:
        seconds += _token_time(config, student, width, rest)
    return config.rollouts.max_completion_length * seconds


def _token_time(config: Config, student: ModelShape, width: int, rows: int) -> float:
    """Seconds in which each of ``rows`` rollouts gets one token, on average over their length."""
    prompt, response = config.rollouts.max_prompt_length, config.rollouts.max_completion_length
    missed = student.experts * (1 - student.expert_share) ** rows
    cached = rows * student.size.cache_per_token * (prompt + response / 2)
    reading = width * (student.size.parameters - missed + cached) / (BANDWIDTH * BANDWIDTH_SHARE)
    head = 2 * student.vocabulary * student.size.width
    multiplying = _seconds(rows * (_forward(student, prompt + response) + head), student, width)
    return max(reading, multiplying, LAYER_SECONDS * student.size.layers)


def _gathered_bytes(config: Config, student: ModelShape, teacher: ModelShape, width: int, *, is_sharded: bool) -> float:
    """Bytes that a GPU would be sent in a step if it had none of them."""
    gradients = FLOAT32 * student.size.trainable
    if not is_sharded:
        return 2 * gradients  # a sum over all GPUs is a scatter and a gather
    teacher_width = HALF if config.models.dtype != "float32" else FLOAT32
    passes = 2 + int(config.training.gradient_checkpointing)
    taught = teacher_width * teacher.size.parameters if config.teacher.engine == "local" else 0
    each = taught + passes * width * student.size.parameters + gradients
    return config.training.gradient_accumulation_steps * each + width * student.size.parameters
