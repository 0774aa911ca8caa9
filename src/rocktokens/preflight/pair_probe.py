"""Probe a pair of models: a few rollouts of the student, scored once by both (docs/method.md, section 9).

1. The student answers training prompts, timed.
2. ``probe_pair`` forces the answers through both models once and measures their divergence, the overlap of their
   likeliest tokens, how far the sampler's log-probabilities are from the trainer's, and the seconds spent.
3. The stop mass is the probability the teacher gives to its own end tokens where the student sampled one.
4. Each measurement is judged against a threshold that stands here with its reason.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from rocktokens.config import Config, ScoringSection
from rocktokens.display.numbers import percent
from rocktokens.models.head import lm_head, output_head
from rocktokens.models.likely_head import LikelyHead, OutputHead
from rocktokens.models.load import LoadedModel
from rocktokens.preflight.findings import Finding, warn_if
from rocktokens.progress import Progress
from rocktokens.rollouts.encode import Sampling, make_rollouts
from rocktokens.rollouts.sampler import make_sampler
from rocktokens.run_dir import derive_seed
from rocktokens.scoring.batch import collate, response_states, split_by_tokens
from rocktokens.scoring.divergence import token_scores, top_overlap
from rocktokens.scoring.teachers import tail_sentence
from rocktokens.types import Prompt, Rollout

if TYPE_CHECKING:  # it needs an extra
    from rocktokens.scoring.served_likely import Tails

Value = TypeVar("Value")

OVERLAP_K = 16
MIN_STOP_MASS = 0.01
"""A teacher that stops once in a hundred times where the student stops pulls the student on past its answer."""
MIN_OVERLAP = 0.2
"""Rankings that have nothing to do with each other share 16 / V of their top 16: below 0.02 for any real vocabulary."""
MIN_OVERLAP_MASS = 0.5
"""Below it, most of what the student may write is nothing the teacher would: its scores there are tails."""
MAX_TRUNCATED_SHARE = 0.5
"""Above it, most rollouts show no end to learn from."""
MAX_SAMPLER_GAP = 1e-2
"""Nats per token; rounding in float32 is a thousand times smaller, so more than this is another precision or model."""


@dataclass(frozen=True, slots=True)
class PairProbe:
    """Means over the response tokens of a probe, and the seconds its forwards took."""

    tokens: int
    kl: float
    kl_error: float | None
    """Standard error of ``kl``, rollouts taken as the independent units; None for a single one."""
    overlap: float | None
    """Share of the student's 16 likeliest tokens that are among the teacher's 16; None where it names fewer."""
    overlap_mass: float | None
    """Probability the student gives to the shared ones."""
    stop_mass: float | None
    """None when no rollout ended."""
    sampler_gap: float | None
    """Mean distance of the two log-probabilities of a sampled token; None unless scored at temperature 1."""
    seconds_student: float
    seconds_teacher: float
    seconds_heads: float


def sample_probe(
    config: Config, student: LoadedModel, teacher: LoadedModel, prompts: Sequence[Prompt], progress: Progress
) -> tuple[list[Rollout], float]:
    """Sample the probe's rollouts, and measure the seconds they took.

    On a GPU they are sampled twice: the first time compiles kernels and captures graphs, which a run does once.
    """
    sampler = make_sampler(config, student, teacher)
    sampling = Sampling.of(config.rollouts, derive_seed(config.run.seed, "check"))

    def sample() -> list[Rollout]:
        return make_rollouts(sampler, student.tokenizer, prompts, sampling, on_done=advance)

    on_gpu = student.model.device.type == "cuda"
    with progress.bar("sampling the probe", (1 + on_gpu) * len(prompts)) as advance:
        if on_gpu:
            sample()
        began = time.perf_counter()
        sampled = sample()
        return sampled, time.perf_counter() - began


@torch.no_grad()
def probe_pair(
    student: LoadedModel,
    teacher: LoadedModel,
    rollouts: Sequence[Rollout],
    section: ScoringSection,
    *,
    bf16: bool = False,
) -> PairProbe:
    """Measure the pair, of one vocabulary and on one device, on rollouts of the student: at least one.

    With ``bf16`` the forwards run under bfloat16 autocast, as those of the trainer will.
    """
    groups = [[rollouts[i] for i in group] for group in split_by_tokens(rollouts, section.tokens_per_batch)]
    with torch.autocast(student.model.device.type, dtype=torch.bfloat16, enabled=bf16):
        probed = [_probe_group(student, teacher, group, section) for group in groups]
    columns = {name: np.concatenate([part[name] for part, _ in probed]) for name in probed[0][0]}
    lengths_R = np.array([len(rollout.token_ids) for group in groups for rollout in group])
    student_time, teacher_time, head_time = np.sum([seconds for _, seconds in probed], axis=0).tolist()
    return PairProbe(
        tokens=len(columns["kl"]),
        kl=float(columns["kl"].mean()),
        kl_error=clustered_error(columns["kl"], lengths_R),
        overlap=_mean_or_none(columns["overlap"]),
        overlap_mass=_mean_or_none(columns["overlap_mass"]),
        stop_mass=_mean_or_none(columns["stop_mass"]),
        sampler_gap=_mean_or_none(columns["sampler_gap"]),
        seconds_student=student_time,
        seconds_teacher=teacher_time,
        seconds_heads=head_time,
    )


def clustered_error(values_T: np.ndarray, lengths_R: np.ndarray) -> float | None:
    """Estimate the standard error of a mean over tokens when only whole rollouts are independent of each other."""
    count = len(lengths_R)
    if count < 2:
        return None
    starts_R = np.cumsum(lengths_R) - lengths_R
    residuals_R = np.add.reduceat(values_T - values_T.mean(), starts_R)
    return float(np.sqrt((residuals_R**2).sum() * count / (count - 1)) / len(values_T))


def stop_mass(h_t_NE: torch.Tensor, head: OutputHead, eos_ids: Iterable[int], written_N: torch.Tensor) -> torch.Tensor:
    """Return the probability (N,) of all end tokens after each state; ends beyond the head's width have none.

    Of a teacher that names its likeliest tokens alone, those of them that end, and the end that was written.
    """
    if isinstance(head, LikelyHead):
        likely = head.read(h_t_NE)
        is_end_NK = torch.isin(likely.ids_NK, torch.tensor(sorted(eos_ids), device=h_t_NE.device))
        is_named_N = (likely.ids_NK == written_N.unsqueeze(-1)).any(dim=1)
        return (likely.logp_NK.exp() * is_end_NK).sum(dim=1) + likely.written_N.exp() * ~is_named_N
    ends = torch.tensor(sorted(i for i in eos_ids if i < head.width), dtype=torch.long, device=h_t_NE.device)
    return torch.softmax(head.logits(h_t_NE), dim=-1)[:, ends].sum(dim=-1)


def check_divergence(probe: PairProbe, divergence: str, teacher: str = "") -> Finding:
    """Report what there is to learn, by the label of a teacher that does not say all; any value is in order."""
    error = "" if probe.kl_error is None else f" ± {probe.kl_error:.2f}"
    named = f"{divergence} kl ({teacher})" if teacher else f"{divergence} kl"
    value = f"{named} {probe.kl:.2f}{error} nats per token, over {probe.tokens:,} tokens of the untrained student"
    measured = {"kl": probe.kl, "kl_error": probe.kl_error, "tokens": probe.tokens}
    return Finding("divergence", "ok", value, measured=measured)


def check_overlap(overlap: float | None, mass: float | None) -> Finding:
    """Check whether the teacher ranks what the student would write."""
    if overlap is None or mass is None:
        value = f"not known: the teacher names fewer than {OVERLAP_K} tokens (teacher.top_k)"
        return Finding("overlap", "ok", value, measured={"overlap": None, "mass": None})
    value = f"{percent(overlap)} of the top 16 are shared, with {percent(mass)} of the student's probability"
    low = overlap < MIN_OVERLAP or mass < MIN_OVERLAP_MASS
    problem = "the teacher hardly ranks what the student writes: check the prompts' format, or tune the student to it"
    return warn_if(problem if low else "", "overlap", value, {"overlap": overlap, "mass": mass})


def check_stop_mass(mass: float | None) -> Finding:
    """Check whether the teacher would stop where the student stops."""
    if mass is None:
        remedy = "raise rollouts.max_completion_length until some rollouts end, then check again"
        return Finding("stop mass", "warn", "no rollout ended", remedy, {"stop_mass": None})
    value = f"the teacher ends with probability {mass:.3g} where the student ended"
    problem = (
        "the teacher would hardly ever stop where the student stops, so lengths may explode: give both models the same "
        "end tokens and template"
    )
    return warn_if(problem if mass < MIN_STOP_MASS else "", "stop mass", value, {"stop_mass": mass})


def check_tails(tails: "Tails", top_k: int) -> Finding:
    """Report what a teacher has beside the tokens that it names; any value is in order."""
    measured = {"mass": tails.mean_mass, "unresolved": tails.unresolved_share}
    return Finding("teacher tail", "ok", tail_sentence(tails, top_k), measured=measured)


def check_truncation(rollouts: Sequence[Rollout], limit: int) -> Finding:
    """Check how long responses are, and how many hit the limit."""
    share = sum(not rollout.finished for rollout in rollouts) / len(rollouts)
    length = sum(len(rollout.token_ids) for rollout in rollouts) / len(rollouts)
    value = f"{length:.1f} tokens per response, {percent(share)} cut off at {limit}"
    problem = "raise rollouts.max_completion_length, or start from a student that ends its answers"
    measured = {"mean_length": length, "truncated_share": share}
    return warn_if(problem if share > MAX_TRUNCATED_SHARE else "", "lengths", value, measured)


def check_sampler(gap: float | None) -> Finding:
    """Check whether sampler and trainer agree on the student's probabilities."""
    if gap is None:
        return Finding("sampler", "ok", "not compared: scoring.temperature is not 1", measured={"gap": None})
    value = f"log-probabilities {gap:.1e} from the trainer's"
    problem = "rollouts are off-policy by this much: sample and train in one precision (training.bf16=false)"
    return warn_if(problem if gap > MAX_SAMPLER_GAP else "", "sampler", value, {"gap": gap})


def _probe_group(
    student: LoadedModel, teacher: LoadedModel, rollouts: Sequence[Rollout], section: ScoringSection
) -> tuple[dict[str, np.ndarray], list[float]]:
    """Measure the columns of one batch, and the seconds of both trunks and of the heads."""
    device = student.model.device
    batch = collate(rollouts, pad_id=0, device=device)
    heads = lm_head(student.model), output_head(teacher.model)
    h_s_TD, student_time = _timed(device, lambda: response_states(student.model, batch))
    h_t_TE, teacher_time = _timed(device, lambda: response_states(teacher.model, batch))
    states = (h_s_TD, heads[0], h_t_TE, heads[1])
    settings = (section.divergence, section.temperature, section.tokens_per_chunk)
    scores, head_time = _timed(device, lambda: token_scores(*states, batch.token_ids_T, *settings))
    overlap_T = mass_T = h_s_TD.new_zeros(0)
    if not isinstance(heads[1], LikelyHead) or heads[1].k >= OVERLAP_K:
        overlap_T, mass_T = top_overlap(*states, k=OVERLAP_K, tokens_per_chunk=section.tokens_per_chunk)
    ends = np.cumsum([len(rollout.token_ids) for rollout in rollouts]) - 1
    ended = torch.from_numpy(ends[[rollout.finished for rollout in rollouts]]).to(device)
    common = heads[1].cut(heads[0].width)
    sampled = np.concatenate([rollout.logprobs for rollout in rollouts])
    gap = np.abs(sampled - _numpy(scores.logp_student)) if section.temperature == 1 else np.zeros(0)
    columns = {
        "kl": _numpy(scores.kl),
        "overlap": _numpy(overlap_T),
        "overlap_mass": _numpy(mass_T),
        "stop_mass": _numpy(stop_mass(h_t_TE[ended], common, teacher.eos_ids, batch.token_ids_T[ended])),
        "sampler_gap": gap,
    }
    return columns, [student_time, teacher_time, head_time]


def _timed(device: torch.device, call: Callable[[], Value]) -> tuple[Value, float]:
    """Return the result, and the seconds until the device has it; a GPU is called twice, as the first call compiles."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _device: None
    if device.type == "cuda":
        call()
    wait(device)
    began = time.perf_counter()
    result = call()
    wait(device)
    return result, time.perf_counter() - began


def _numpy(column: torch.Tensor) -> np.ndarray:
    return column.double().cpu().numpy()


def _mean_or_none(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None
