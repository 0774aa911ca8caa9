"""Look for what would go wrong in a run, and estimate what it will need, before it starts (docs/method.md, section 9).

1. Without sampling (``static_checks``): tokenizers, LM heads, end tokens, chat templates, learning rate, prompts,
   policy, trackers, run directory, disk.
2. A probe (``pair_probe``): the student answers a few training prompts, the teacher scores them. Overlap, stop mass,
   lengths, the distance of the sampler from the trainer; from its timings and sizes an estimate of memory and time
   (``resources``).

The probe is put off when something it depends on fails. Nothing is written to the run directory.
"""

from collections.abc import Sequence

from rocktokens.config import Config
from rocktokens.errors import RocktokensError
from rocktokens.models.load import LoadedModel
from rocktokens.preflight.findings import Finding, Preflight
from rocktokens.preflight.pair_probe import (
    check_divergence,
    check_overlap,
    check_sampler,
    check_stop_mass,
    check_tails,
    check_truncation,
    probe_pair,
    sample_probe,
)
from rocktokens.preflight.resources import available_memory, check_memory, estimate_time, run_memory
from rocktokens.preflight.static_checks import check_static, sample_prompts
from rocktokens.progress import SILENT, Progress
from rocktokens.scoring.student import load_student
from rocktokens.scoring.teachers import load_teacher
from rocktokens.tasks import make_task
from rocktokens.training.length import in_steps
from rocktokens.types import Prompt

PROBE_ROLLOUTS = 16
PROBE_NEEDS = ("tokenizers", "student head", "teacher head", "batch", "prompts")


def check(config: Config, progress: Progress = SILENT) -> Preflight:
    """Look at models, data and run directory, probe the pair, and judge everything that was measured."""
    with progress.status("loading"):
        task = make_task(config.task)
        config = in_steps(config, task, max(1, config.training.rollouts_per_step // config.rollouts.num_generations))
        student = load_student(config, None, config.models.device)
        teacher = load_teacher(config, config.models.device)
    with progress.status("looking at models and data"):
        prompts, lengths = sample_prompts(config, task, student.tokenizer)
        findings = check_static(config, task, lengths, student, teacher)
    if any(finding.level == "fail" and finding.name in PROBE_NEEDS for finding in findings):
        findings.append(Finding("probe", "warn", "put off", "fix the failures above, then check again"))
    else:
        longest = max(lengths.values())
        findings += _check_probe(config, student, teacher, prompts[:PROBE_ROLLOUTS], longest, progress)
    return Preflight.of(findings)


def _check_probe(
    config: Config,
    student: LoadedModel,
    teacher: LoadedModel,
    prompts: Sequence[Prompt],
    longest: int,
    progress: Progress,
) -> list[Finding]:
    """Let the student answer, the teacher score, and judge what comes out."""
    device = student.model.device.type
    try:
        rollouts, seconds = sample_probe(config, student, teacher, prompts, progress)
        with progress.status("scoring the probe"):
            bf16 = config.training.bf16 and device == "cuda"
            probe = probe_pair(student, teacher, rollouts, config.scoring, bf16=bf16)
            need = run_memory(config, student, teacher, rollouts, longest)
    except RocktokensError as error:
        return [Finding("probe", "fail", "refused", str(error))]
    return [
        check_divergence(probe, config.scoring.divergence, config.teacher.label if config.teacher.is_top_k else ""),
        check_overlap(probe.overlap, probe.overlap_mass),
        check_stop_mass(probe.stop_mass),
        check_truncation(rollouts, config.rollouts.max_completion_length),
        check_sampler(probe.sampler_gap),
        *([check_tails(teacher.model.tails, config.teacher.top_k)] if config.teacher.is_top_k else []),
        check_memory(need, available_memory(student, teacher)),
        estimate_time(config, probe, seconds, len(rollouts), device),
    ]
