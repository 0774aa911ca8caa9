"""What ``rocktokens check`` says: findings, and the judgements that need only plain numbers.

A judgement takes what was measured and returns a ``Finding``: the numbers, the sentence that tells them, and where they
are not in order the remedy. The thresholds stand here, each with its reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rocktokens.cli.common import percent
from rocktokens.errors import RocktokensError
from rocktokens.types import Rollout

if TYPE_CHECKING:
    from rocktokens.preflight.pair_probe import MemoryNeed, PairProbe

Level = Literal["ok", "warn", "fail"]

MIN_STOP_MASS = 0.01
"""A teacher that stops once in a hundred times where the student stops pulls the student on past its answer."""
MIN_OVERLAP = 0.2
"""Rankings that have nothing to do with each other share 16 / V of their top 16: below 0.02 for any real vocabulary."""
MIN_OVERLAP_MASS = 0.5
"""Below it, most of what the student may write is nothing the teacher would: its scores there are tails."""
MAX_TRUNCATED_SHARE = 0.5
"""Above it, most rollouts show no end to learn from."""
MAX_SAMPLER_GAP = 1e-2
"""Nats a token; rounding in float32 is a thousand times smaller, so more than this is another precision or model."""
MEMORY_HEADROOM = 0.8
"""The estimate leaves out fragmentation and the libraries' own buffers."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    level: Level
    value: str
    remedy: str = ""
    """One sentence; empty when the level is ok."""
    measured: dict[str, Any] = field(default_factory=dict)
    """The numbers behind ``value``."""


def warn_if(problem: str, name: str, value: str, measured: dict[str, Any]) -> Finding:
    """A warning with the problem as its remedy, or ok where there is none."""
    return Finding(name, "warn" if problem else "ok", value, problem, measured)


def or_fail(name: str, look: Callable[[], Finding]) -> Finding:
    """What ``look`` finds; where it refuses, a failure with its sentence as the remedy."""
    try:
        return look()
    except RocktokensError as error:
        return Finding(name, "fail", "refused", str(error))


def check_widths(student: int, teacher: int, tokenizer: int) -> Finding:
    """Logits of both heads against the entries of the tokenizer."""
    problem = ""
    if student != teacher:
        extra = abs(student - teacher)
        problem = f"the {extra:,} extra columns are excluded from both softmaxes: fine if they are padding"
    if min(student, teacher) < tokenizer:
        missing = tokenizer - min(student, teacher)
        problem = f"{missing} entries of the tokenizer have no logit: use rollouts and models that never need them"
    padding = f", {max(student, teacher) - tokenizer:,} columns beyond it" if max(student, teacher) > tokenizer else ""
    value = f"student {student:,}, teacher {teacher:,}, tokenizer {tokenizer:,}{padding}"
    return warn_if(problem, "head widths", value, {"student": student, "teacher": teacher, "tokenizer": tokenizer})


def check_ends(student: frozenset[int], teacher: frozenset[int]) -> Finding:
    """The ids that end a response."""
    value = f"student {sorted(student)}, teacher {sorted(teacher)}"
    problem = "rollouts end at the student's end tokens: give both models the same eos_token_id in generation_config"
    measured = {"student": sorted(student), "teacher": sorted(teacher)}
    return warn_if(problem if student != teacher else "", "end tokens", value, measured)


def check_divergence(probe: "PairProbe", divergence: str) -> Finding:
    """What there is to learn; any value is in order."""
    error = "" if probe.kl_error is None else f" ± {probe.kl_error:.2f}"
    value = f"{divergence} kl {probe.kl:.2f}{error} nats a token, over {probe.tokens:,} tokens of the untrained student"
    measured = {"kl": probe.kl, "kl_error": probe.kl_error, "tokens": probe.tokens}
    return Finding("divergence", "ok", value, measured=measured)


def check_overlap(overlap: float, mass: float) -> Finding:
    """Whether the teacher ranks what the student would write."""
    value = f"{percent(overlap)} of the top 16 are shared, with {percent(mass)} of the student's probability"
    low = overlap < MIN_OVERLAP or mass < MIN_OVERLAP_MASS
    problem = "the teacher hardly ranks what the student writes: check the prompts' format, or tune the student to it"
    return warn_if(problem if low else "", "overlap", value, {"overlap": overlap, "mass": mass})


def check_stop_mass(mass: float | None) -> Finding:
    """Whether the teacher would stop where the student stops."""
    if mass is None:
        remedy = "raise rollouts.max_completion_length until some rollouts end, then check again"
        return Finding("stop mass", "warn", "no rollout ended", remedy, {"stop_mass": None})
    value = f"the teacher ends with probability {mass:.3g} where the student ended"
    problem = (
        "the teacher would hardly ever stop where the student stops, so lengths may explode: give both models the same "
        "end tokens and template"
    )
    return warn_if(problem if mass < MIN_STOP_MASS else "", "stop mass", value, {"stop_mass": mass})


def check_truncation(rollouts: Sequence[Rollout], limit: int) -> Finding:
    """How long responses are, and how many hit the limit."""
    share = sum(not rollout.finished for rollout in rollouts) / len(rollouts)
    length = sum(len(rollout.token_ids) for rollout in rollouts) / len(rollouts)
    value = f"{length:.1f} tokens a response, {percent(share)} cut off at {limit}"
    problem = "raise rollouts.max_completion_length, or start from a student that ends its answers"
    measured = {"mean_length": length, "truncated_share": share}
    return warn_if(problem if share > MAX_TRUNCATED_SHARE else "", "lengths", value, measured)


def check_sampler(gap: float | None) -> Finding:
    """Whether sampler and trainer agree on the student's probabilities."""
    if gap is None:
        return Finding("sampler", "ok", "not compared: scoring.temperature is not 1", measured={"gap": None})
    value = f"log-probabilities {gap:.1e} from the trainer's"
    problem = "rollouts are off-policy by this much: sample and train in one precision (training.bf16=false)"
    return warn_if(problem if gap > MAX_SAMPLER_GAP else "", "sampler", value, {"gap": gap})


def check_disk(need: Mapping[str, int], free: int) -> Finding:
    """Room for what the run will write."""
    total = sum(need.values())
    parts = ", ".join(f"{name} {byte_size(part)}" for name, part in need.items())
    problem = "free some space, raise training.save_steps, or give a run.directory on another disk"
    value = f"at most {byte_size(total)} ({parts}), {byte_size(free)} free"
    return warn_if(problem if total > free else "", "disk", value, {**need, "free": free})


def check_memory(need: "MemoryNeed", available: int) -> Finding:
    """Whether the run fits."""
    sizes = {name: part for name, part in asdict(need).items() if name != "is_kept"}
    parts = ", ".join(f"{name} {byte_size(part)}" for name, part in sizes.items())
    together = "what is sampled with stays during the update" if need.is_kept else "sampling and update take turns"
    value = f"about {byte_size(need.peak)} of {byte_size(available)} ({parts}; {together})"
    remedy = (
        "lower training.per_device_train_batch_size or rollouts.batch_size, or set lora.enabled or "
        "training.gradient_checkpointing"
    )
    level: Level = "ok" if need.peak <= MEMORY_HEADROOM * available else "warn" if need.peak <= available else "fail"
    measured = {**sizes, "peak": need.peak, "available": available}
    return Finding("memory", level, value, "" if level == "ok" else remedy, measured)


def byte_size(count: float) -> str:
    """Bytes in the largest unit that leaves at least one."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
