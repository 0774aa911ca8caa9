"""What a few rollouts tell about a pair of models before a long run (METHOD 9), and what the run will need.

1. ``probe_pair`` forces the student's rollouts through both models once and measures their divergence, the overlap of
   their likeliest tokens, how far the sampler's log-probabilities are from the trainer's, and the seconds spent.
2. The stop mass is the probability the teacher gives to its own end tokens where the student sampled one.
3. ``measure_activations`` counts the bytes that a forward keeps for its backward pass, for one row and for two: the
   difference is what a row costs, the rest (weights cast by autocast, say) does not grow with the batch.
4. ``memory_need``, ``update_seconds`` and ``sampling_seconds`` are arithmetic on these measurements.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from rocktokens.config import ScoringSection
from rocktokens.models.head import LMHead, hidden_states, lm_head
from rocktokens.models.load import LoadedModel
from rocktokens.scoring.batch import collate, response_states, split_by_tokens
from rocktokens.scoring.divergence import token_scores, top_overlap
from rocktokens.types import Rollout

Value = TypeVar("Value")

OVERLAP_K = 16
FLOAT32, HALF = 4, 2
LOGIT_COPIES = 9
"""Float32 arrays of a chunk's logits alive at once: 8 in ``weighted_kl``, 9 with ``jsd`` or the asymmetric term."""
BACKWARD_COST = 2
"""A backward pass does two matrix products for each one of the forward pass."""


@dataclass(frozen=True, slots=True)
class PairProbe:
    """Means over the response tokens of a probe, and the seconds its forwards took."""

    tokens: int
    kl: float
    kl_error: float | None
    """Standard error of ``kl``, rollouts taken as the independent units; None for a single one."""
    overlap: float
    """Share of the student's 16 likeliest tokens that are among the teacher's 16 likeliest."""
    overlap_mass: float
    """Probability the student gives to the shared ones."""
    stop_mass: float | None
    """None when no rollout ended."""
    sampler_gap: float | None
    """Mean distance of the two log-probabilities of a sampled token; None unless scored at temperature 1."""
    seconds_student: float
    seconds_teacher: float
    seconds_heads: float


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes that a forward of the student keeps for its backward pass."""

    fixed: float
    per_token: float


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The numbers of a student that its memory depends on."""

    parameters: int
    trainable: int
    layers: int
    width: int
    head: int
    """Entries of the LM head's weight that get a gradient."""
    cache_per_token: int
    """Numbers in the key-value cache of all layers."""

    @classmethod
    def of(cls, model: Any) -> "ModelSize":
        """Read off a transformers causal LM, PEFT-wrapped or not."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        weight_VD = lm_head(model).weight_VD
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            head=weight_VD.numel() if weight_VD.requires_grad else 0,
            cache_per_token=2 * config.num_hidden_layers * key_heads * head_dim,
        )


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on one device."""

    student: float
    """Float32 weights, their gradients and Adam's two moments."""
    teacher: float
    update: float
    """Activations of a micro-batch and the logits of a chunk."""
    sampling: float
    """The key-value cache, and on a GPU in half width the copy of the student that is sampled from."""
    is_kept: bool = False
    """Whether what is sampled with stays in memory during the update, as on a GPU; else the two take turns."""

    @property
    def peak(self) -> float:
        """Most at once; the models stay."""
        at_work = self.update + self.sampling if self.is_kept else max(self.update, self.sampling)
        return self.student + self.teacher + at_work


@torch.no_grad()
def probe_pair(
    student: LoadedModel,
    teacher: LoadedModel,
    rollouts: Sequence[Rollout],
    section: ScoringSection,
    *,
    bf16: bool = False,
) -> PairProbe:
    """Measure the pair on rollouts of the student.

    Args:
        student: The writer of the rollouts.
        teacher: Over the same vocabulary, on the same device.
        rollouts: At least one.
        section: Divergence, temperature and sizes of batches.
        bf16: Whether the forwards run under bfloat16 autocast, as those of the trainer will.
    """
    groups = [[rollouts[i] for i in group] for group in split_by_tokens(rollouts, section.tokens_per_batch)]
    with _autocast(student.model.device, bf16):
        probed = [_probe_group(student, teacher, group, section) for group in groups]
    columns = {name: np.concatenate([part[name] for part, _ in probed]) for name in probed[0][0]}
    lengths_R = np.array([len(rollout.token_ids) for group in groups for rollout in group])
    student_time, teacher_time, head_time = np.sum([seconds for _, seconds in probed], axis=0).tolist()
    return PairProbe(
        tokens=len(columns["kl"]),
        kl=float(columns["kl"].mean()),
        kl_error=clustered_error(columns["kl"], lengths_R),
        overlap=float(columns["overlap"].mean()),
        overlap_mass=float(columns["overlap_mass"].mean()),
        stop_mass=_mean_or_none(columns["stop_mass"]),
        sampler_gap=_mean_or_none(columns["sampler_gap"]),
        seconds_student=student_time,
        seconds_teacher=teacher_time,
        seconds_heads=head_time,
    )


def clustered_error(values_T: np.ndarray, lengths_R: np.ndarray) -> float | None:
    """Standard error of the mean over tokens, when only whole rollouts are independent of each other."""
    count = len(lengths_R)
    if count < 2:
        return None
    starts_R = np.cumsum(lengths_R) - lengths_R
    residuals_R = np.add.reduceat(values_T - values_T.mean(), starts_R)
    return float(np.sqrt((residuals_R**2).sum() * count / (count - 1)) / len(values_T))


def stop_mass(h_t_NE: torch.Tensor, head: LMHead, eos_ids: Iterable[int]) -> torch.Tensor:
    """The probability (N,) of all end tokens together after each state; ends beyond the head's width have none."""
    ends = torch.tensor(sorted(i for i in eos_ids if i < head.width), dtype=torch.long, device=h_t_NE.device)
    return torch.softmax(head.logits(h_t_NE), dim=-1)[:, ends].sum(dim=-1)


def measure_activations(model: Any, rollout: Rollout, *, bf16: bool = False) -> Activations:
    """What a forward of ``model`` over one rollout keeps for the backward pass, measured on one row and on two."""
    ids = torch.tensor(np.concatenate([rollout.prompt_ids, rollout.token_ids]), dtype=torch.long, device=model.device)
    one, two = (_kept_bytes(model, ids.repeat(rows, 1), bf16) for rows in (1, 2))
    return Activations(fixed=max(0, 2 * one - two), per_token=(two - one) / len(ids))


def activation_need(activations: Activations, size: ModelSize, tokens: int, *, checkpointing: bool) -> float:
    """Bytes of activations for a micro-batch; with checkpointing, the inputs of all layers and the inside of one."""
    if not checkpointing:
        return activations.fixed + activations.per_token * tokens
    inputs = FLOAT32 * size.layers * size.width
    return activations.fixed + (activations.per_token / size.layers + inputs) * tokens


def memory_need(
    size: ModelSize,
    *,
    teacher_bytes: int,
    activation_bytes: float,
    chunk_positions: int,
    vocab_size: int,
    sampled_tokens: int,
    on_gpu: bool = False,
    bf16: bool = False,
) -> MemoryNeed:
    """Bytes a training run needs on one device.

    Args:
        size: Of the student: 4 bytes a weight, and 12 more for each that is trained.
        teacher_bytes: Its weights as they are loaded.
        activation_bytes: Of one micro-batch.
        chunk_positions: Positions whose logits are in memory at once.
        vocab_size: Width of the wider head.
        sampled_tokens: Prompts and responses of the sequences decoded together, at their longest.
        on_gpu: Whether the sampler's memory stays from step to step.
        bf16: Whether it samples from a copy of the student in half width.
    """
    width = HALF if bf16 else FLOAT32
    logits = FLOAT32 * (LOGIT_COPIES * chunk_positions * vocab_size + size.head)
    return MemoryNeed(
        student=FLOAT32 * (size.parameters + 3 * size.trainable),
        teacher=teacher_bytes,
        update=activation_bytes + logits,
        sampling=width * size.cache_per_token * sampled_tokens + (width * size.parameters if bf16 else 0),
        is_kept=on_gpu,
    )


def update_seconds(probe: PairProbe, tokens: float) -> float:
    """An update on so many response tokens: the teacher's forward, the student's forward and backward, both heads.

    Of the two heads only the student's has a backward pass, so together they cost twice their forward.
    """
    student = (1 + BACKWARD_COST) * probe.seconds_student
    return (probe.seconds_teacher + student + BACKWARD_COST * probe.seconds_heads) * tokens / probe.tokens


def sampling_seconds(
    probe_seconds: float, probe_tokens: int, *, rollouts: int, tokens: float, batch_size: int, fixed_batches: bool
) -> float:
    """Writing the rollouts of a step, from the time the probe took.

    Args:
        probe_seconds: Spent on sampling the probe.
        probe_tokens: Response tokens of the probe.
        rollouts: Of a step.
        tokens: Response tokens of a step.
        batch_size: Sequences decoded together.
        fixed_batches: Whether a batch takes as long whatever the number of its rows, as on a GPU.
    """
    if fixed_batches:
        return probe_seconds * math.ceil(rollouts / batch_size)
    return probe_seconds * tokens / probe_tokens


def _probe_group(
    student: LoadedModel, teacher: LoadedModel, rollouts: Sequence[Rollout], section: ScoringSection
) -> tuple[dict[str, np.ndarray], list[float]]:
    """Columns of one batch, and the seconds of both trunks and of the heads."""
    device = student.model.device
    batch = collate(rollouts, pad_id=0, device=device)
    heads = lm_head(student.model), lm_head(teacher.model)
    h_s_TD, student_time = _timed(device, lambda: response_states(student.model, batch))
    h_t_TE, teacher_time = _timed(device, lambda: response_states(teacher.model, batch))
    states = (h_s_TD, heads[0], h_t_TE, heads[1])
    settings = (section.divergence, section.temperature, section.tokens_per_chunk)
    scores, head_time = _timed(device, lambda: token_scores(*states, batch.token_ids_T, *settings))
    overlap_T, mass_T = top_overlap(*states, k=OVERLAP_K, tokens_per_chunk=section.tokens_per_chunk)
    ends = np.cumsum([len(rollout.token_ids) for rollout in rollouts]) - 1
    ended = ends[[rollout.finished for rollout in rollouts]]
    common = heads[1].cut(heads[0].width)
    sampled = np.concatenate([rollout.logprobs for rollout in rollouts])
    gap = np.abs(sampled - _numpy(scores.logp_student)) if section.temperature == 1 else np.zeros(0)
    columns = {
        "kl": _numpy(scores.kl),
        "overlap": _numpy(overlap_T),
        "overlap_mass": _numpy(mass_T),
        "stop_mass": _numpy(stop_mass(h_t_TE[torch.from_numpy(ended).to(device)], common, teacher.eos_ids)),
        "sampler_gap": gap,
    }
    return columns, [student_time, teacher_time, head_time]


def _kept_bytes(model: Any, ids_RL: torch.Tensor, bf16: bool) -> int:
    """Bytes of all tensors that autograd saves in a forward, each storage once, the parameters themselves left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with torch.enable_grad(), hooks, _autocast(model.device, bf16):
        states = hidden_states(model, ids_RL)
    del states  # kept alive until here, so that no storage could be freed and counted again under its address
    return sum(kept.values())


def _autocast(device: torch.device, enabled: bool) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def _timed(device: torch.device, call: Callable[[], Value]) -> tuple[Value, float]:
    """The result, and the seconds until the device has it; of a GPU's two calls the second, as the first compiles."""
    if device.type == "cuda":
        call()
    _wait(device)
    began = time.perf_counter()
    result = call()
    _wait(device)
    return result, time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _numpy(column: torch.Tensor) -> np.ndarray:
    return column.double().cpu().numpy()


def _mean_or_none(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None
