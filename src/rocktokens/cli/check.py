"""``rocktokens check``: what would go wrong in a run, and what it will need, before it starts (METHOD 9).

1. Without sampling: tokenizers, LM heads, end tokens, chat templates, prompts, policy, run directory, disk.
2. A probe: the student answers a few training prompts, the teacher scores them. Overlap, stop mass, lengths, the
   distance of the sampler from the trainer; from its timings and sizes an estimate of memory and time.

Every finding is ok, warn (the run works, its result may not be what you want) or fail (the run would stop or mislead).
A failure of what the probe stands on puts the probe off. Nothing is written to the run directory.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from rocktokens.cli.common import AsJson, ConfigPath, Overrides, notes, output, percent, print_json, progress_bar
from rocktokens.cli.trace import make_sampler
from rocktokens.config import Config, load_config
from rocktokens.errors import RocktokensError
from rocktokens.models.fingerprints import SAMPLES, same_tokenizer, vocabulary_sha256
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.types import Prompt, RockSet, Rollout

if TYPE_CHECKING:
    from rocktokens.models.load import LoadedModel
    from rocktokens.scoring.preflight import MemoryNeed, PairProbe
    from rocktokens.tasks.base import Task

Level = Literal["ok", "warn", "fail"]

PROBE_ROLLOUTS = 16
PROMPT_SAMPLE = 2000
"""Prompts whose length is looked at: seconds to tokenise, and enough to meet a length that one in a thousand has."""
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
CHECKPOINT_BYTES = 12
"""A trained parameter on disk: its float32 value and Adam's two moments."""
TRACE_BYTES = 40
"""A token on disk: its trace row and its share of the stored rollouts, before compression."""
PROBE_NEEDS = ("tokenizers", "student head", "teacher head", "batch", "prompts")


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


def check(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Look for what would go wrong in a run, and estimate its memory and time, before it starts.

    Exits with 2 when something fails; warnings do not.

    Example: [bold]rocktokens check run.toml --set models.student=my/student[/bold]
    """
    record = run_check(load_config(config, overrides))
    if as_json:
        print_json(record)
    else:
        output.print(finding_table(record["findings"]))
    if record["level"] == "fail":
        raise typer.Exit(2)


def run_check(config: Config) -> dict[str, Any]:
    """All findings as a record, with the worst level among them."""
    with notes.status("loading"):
        from rocktokens.models.load import load_model
        from rocktokens.tasks import make_task
        from rocktokens.training.session import load_student

        task = make_task(config.task)
        student = load_student(config, None, config.models.device)
        teacher = load_model(config.models.teacher, config.models.dtype, config.models.device)
    with notes.status("looking at models and data"):
        prompts, lengths = sample_prompts(config, task, student.tokenizer)
        findings = [
            *check_models(config, student, teacher),
            *check_data(config, task, lengths, student, teacher),
            *check_run(config, student),
        ]
    if any(finding.level == "fail" and finding.name in PROBE_NEEDS for finding in findings):
        findings.append(Finding("probe", "warn", "put off", "mend the failures above, then check again"))
    else:
        findings += check_probe(config, student, teacher, prompts[:PROBE_ROLLOUTS], max(lengths.values()))
    levels = {finding.level for finding in findings}
    worst = next(level for level in ("fail", "warn", "ok") if level in levels)
    return {"level": worst, "findings": [asdict(finding) for finding in findings]}


def finding_table(findings: Sequence[Mapping[str, Any]]) -> Table:
    """One row a finding; the remedy stands under the value."""
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table(title="preflight", title_justify="left", show_lines=True)
    for name in ("level", "check", "found"):
        table.add_column(name)
    for finding in findings:
        colour = colours[finding["level"]]
        remedy = f"\n[{colour}]{escape(finding['remedy'])}[/]" if finding["remedy"] else ""
        table.add_row(f"[{colour}]{finding['level']}[/]", finding["name"], escape(finding["value"]) + remedy)
    return table


# Models


def check_models(config: Config, student: "LoadedModel", teacher: "LoadedModel") -> list[Finding]:
    """Whether the two speak of the same tokens, by heads that are understood, and end and begin alike."""
    from rocktokens.models.head import lm_head

    widths = lm_head(student.model).width, lm_head(teacher.model).width
    return [
        check_tokenizers(student.tokenizer, teacher.tokenizer),
        check_widths(*widths, len(student.tokenizer)),
        check_head("student head", student),
        check_head("teacher head", teacher),
        check_ends(student.eos_ids, teacher.eos_ids),
        check_templates(student.tokenizer, teacher.tokenizer, used=config.rollouts.chat_template),
    ]


def check_tokenizers(student: Any, teacher: Any) -> Finding:
    """One vocabulary, by its hash, and the same splits and joins of sample texts."""

    def compare() -> Finding:
        same_tokenizer(student, teacher)
        sha256 = vocabulary_sha256(student.get_vocab())
        value = f"the same, {len(student):,} entries, vocabulary {sha256[:12]}"
        return Finding("tokenizers", "ok", value, measured={"sha256": sha256})

    return _or_fail("tokenizers", compare)


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
    return _warn_if(problem, "head widths", value, {"student": student, "teacher": teacher, "tokenizer": tokenizer})


def check_head(name: str, loaded: "LoadedModel") -> Finding:
    """Whether the logits we make from the hidden states are the model's own."""
    from rocktokens.models.head import verify_head

    def verify() -> Finding:
        difference = verify_head(loaded.model, loaded.tokenizer.encode(SAMPLES[0]))
        value = f"logits as the model's own, within {difference:.1g}"
        return Finding(name, "ok", value, measured={"difference": difference})

    return _or_fail(name, verify)


def check_ends(student: frozenset[int], teacher: frozenset[int]) -> Finding:
    """The ids that end a response."""
    value = f"student {sorted(student)}, teacher {sorted(teacher)}"
    problem = "rollouts end at the student's end tokens: give both models the same eos_token_id in generation_config"
    measured = {"student": sorted(student), "teacher": sorted(teacher)}
    return _warn_if(problem if student != teacher else "", "end tokens", value, measured)


def check_templates(student: Any, teacher: Any, *, used: bool) -> Finding:
    """Whether both tokenizers render a turn as the same text."""
    if not used:
        return Finding("chat template", "ok", "not used (rollouts.chat_template = false)")
    texts = [_render(tokenizer) for tokenizer in (student, teacher)]
    if texts == [None, None]:
        return Finding("chat template", "ok", "none: prompts go in as plain text")
    value = "the same" if texts[0] == texts[1] else f"student {texts[0]!r}, teacher {texts[1]!r}"
    problem = "the teacher reads the student's template: use a pair with one template or rollouts.chat_template=false"
    measured = {"student": texts[0], "teacher": texts[1]}
    return _warn_if(problem if texts[0] != texts[1] else "", "chat template", value, measured)


def _render(tokenizer: Any) -> str | None:
    if not tokenizer.chat_template:
        return None
    turn = [{"role": "user", "content": "What is 3 + 4?"}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)


# Data


def sample_prompts(config: Config, task: "Task", tokenizer: Any) -> tuple[list[Prompt], dict[str, int]]:
    """The first prompts the run will train on, and their lengths in tokens by id."""
    asked = config.training.max_steps * _rollouts_per_step(config) // config.rollouts.num_generations
    prompts = task.prompts(max(1, min(asked, PROMPT_SAMPLE)), derive_seed(config.run.seed, "prompts"))
    return prompts, _lengths(config, prompts, tokenizer)


def check_data(
    config: Config, task: "Task", lengths: Mapping[str, int], student: "LoadedModel", teacher: "LoadedModel"
) -> list[Finding]:
    """Training prompts, the layout of a step, and evaluation prompts with answers."""
    contexts = {"student": _context(student), "teacher": _context(teacher)}
    return [
        check_batch(config),
        check_prompts(config, task, lengths, contexts),
        check_evaluation(config, contexts, student.tokenizer),
    ]


def check_batch(config: Config) -> Finding:
    """Whether the rollouts of a step are whole groups of one prompt each."""
    from rocktokens.training.start import global_batch

    def lay_out() -> Finding:
        rollouts, each = global_batch(config, 1), config.rollouts.num_generations
        value = f"{rollouts} rollouts a step and device: {rollouts // each} prompts, {each} each"
        return Finding("batch", "ok", value, measured={"rollouts": rollouts, "prompts": rollouts // each})

    return _or_fail("batch", lay_out)


def check_prompts(
    config: Config, task: "Task", lengths: Mapping[str, int], contexts: Mapping[str, int | None]
) -> Finding:
    """How many there are, and whether the longest fits with its answer."""
    items = getattr(task, "items", None)
    asked = config.training.max_steps * _rollouts_per_step(config) // config.rollouts.num_generations
    there = "endless" if items is None else f"{len(items):,} there"
    value = f"{asked:,} asked for, {there}; the longest of {len(lengths):,} has {max(lengths.values())} tokens"
    measured = {
        "asked": asked,
        "available": None if items is None else len(items),
        "looked_at": len(lengths),
        "longest": max(lengths.values()),
    }
    problem = misfit(config, lengths, contexts)
    return Finding("prompts", "fail" if problem else "ok", value, problem, measured)


def misfit(config: Config, lengths: Mapping[str, int], contexts: Mapping[str, int | None]) -> str:
    """Why the longest prompt cannot be used, empty if it can."""
    name = max(lengths, key=lambda key: lengths[key])
    longest, rollouts = lengths[name], config.rollouts
    if longest > rollouts.max_prompt_length:
        return (
            f"prompt {name!r} has {longest} tokens, rollouts.max_prompt_length is {rollouts.max_prompt_length}: "
            "raise that or remove the prompt"
        )
    for model, context in contexts.items():
        if context is not None and longest + rollouts.max_completion_length > context:
            return (
                f"prompt {name!r} has {longest} tokens and may be answered by {rollouts.max_completion_length} more, "
                f"but the {model} sees only {context}: lower rollouts.max_completion_length or remove the prompt"
            )
    return ""


def check_evaluation(config: Config, contexts: Mapping[str, int | None], tokenizer: Any) -> Finding:
    """Whether accuracy can be measured later: prompts enough, short enough, with answers."""
    from rocktokens.tasks import make_task

    asked = config.evaluation.num_prompts
    try:
        prompts = make_task(config.evaluation.task).prompts(asked, derive_seed(config.run.seed, "evaluation prompts"))
        problem = misfit(config, _lengths(config, prompts, tokenizer), contexts)
    except RocktokensError as error:
        return Finding("evaluation", "warn", "not possible", str(error))
    unanswered = sum(prompt.answer is None for prompt in prompts)
    if len(prompts) < asked:
        problem = problem or f"only {len(prompts)} prompts are there: lower evaluation.num_prompts"
    if unanswered:
        problem = f"{unanswered} prompts have no answer to grade against: set evaluation.task.answer_field"
    value = f"{asked:,} prompts asked for, {len(prompts):,} there, {len(prompts) - unanswered:,} with an answer"
    measured = {"asked": asked, "available": len(prompts), "answered": len(prompts) - unanswered}
    return _warn_if(problem, "evaluation", value, measured)


def _context(loaded: "LoadedModel") -> int | None:
    """Tokens the model can see, None where its config names no limit."""
    return getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)


def _lengths(config: Config, prompts: Sequence[Prompt], tokenizer: Any) -> dict[str, int]:
    from rocktokens.rollouts.encode import encode_prompt

    template = config.rollouts.chat_template
    return {prompt.id: len(encode_prompt(tokenizer, prompt, template, sys.maxsize)) for prompt in prompts}


def _rollouts_per_step(config: Config) -> int:
    return config.training.per_device_train_batch_size * config.training.gradient_accumulation_steps


# The run


def check_run(config: Config, student: "LoadedModel") -> list[Finding]:
    """The policy, the run directory and the room on its disk."""
    trainable = sum(parameter.numel() for parameter in student.model.parameters() if parameter.requires_grad)
    folder = _existing_part(Path(config.run.directory))
    findings = [
        check_directory(Path(config.run.directory)),
        check_disk(disk_need(config, trainable), shutil.disk_usage(folder).free),
    ]
    if config.policy.name == "rocks":
        findings.insert(0, check_rocks(config, vocabulary_sha256(student.tokenizer.get_vocab())))
    return findings


def check_rocks(config: Config, tokenizer_sha256: str) -> Finding:
    """Whether the rocks of the policy can be read and are of this vocabulary."""

    def load() -> Finding:
        rocks = RockSet.load(config.policy.rocks or "")
        rocks.require_tokenizer(tokenizer_sha256)
        value = f"{len(rocks.tokens)} rocks with weight {config.policy.lam}"
        return Finding("rocks", "ok", value, measured={"rocks": len(rocks.tokens)})

    return _or_fail("rocks", load)


def check_directory(path: Path) -> Finding:
    """Whether a run can be written there."""
    parent = _existing_part(path)
    if not parent.is_dir():
        return Finding("run directory", "fail", str(path), f"{parent} is a file: give run.directory another name")
    if not os.access(parent, os.W_OK | os.X_OK):
        return Finding("run directory", "fail", str(path), f"{parent} is not writable: give another run.directory")
    taken = "it already holds a run: continue that with --resume, or give another run.directory"
    return _warn_if(taken if RunDir(path).exists() else "", "run directory", str(path), {})


def disk_need(config: Config, trainable: int) -> dict[str, int]:
    """Bytes of checkpoints, and of the traces of training and replay if every response is as long as it may be."""
    training, trace = config.training, config.trace
    checkpoints = 1 + math.ceil(training.max_steps / training.save_steps)
    trained = training.max_steps * _rollouts_per_step(config)
    replayed = trace.num_prompts * trace.num_generations * (len(trace.checkpoints) or checkpoints)
    return {
        "checkpoints": checkpoints * CHECKPOINT_BYTES * trainable,
        "traces": TRACE_BYTES * (trained + replayed) * config.rollouts.max_completion_length,
    }


def check_disk(need: Mapping[str, int], free: int) -> Finding:
    """Room for what the run will write."""
    total = sum(need.values())
    parts = ", ".join(f"{name} {_size(part)}" for name, part in need.items())
    problem = "free some space, raise training.save_steps, or give a run.directory on another disk"
    value = f"at most {_size(total)} ({parts}), {_size(free)} free"
    return _warn_if(problem if total > free else "", "disk", value, {**need, "free": free})


def _existing_part(path: Path) -> Path:
    """The path itself, or its nearest ancestor that exists."""
    return next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())


# The probe


def check_probe(
    config: Config, student: "LoadedModel", teacher: "LoadedModel", prompts: Sequence[Prompt], longest: int
) -> list[Finding]:
    """Let the student answer, the teacher score, and judge what comes out."""
    from rocktokens.scoring.preflight import probe_pair

    bf16 = config.training.bf16 and student.model.device.type == "cuda"
    try:
        rollouts, seconds = _sample(config, student, teacher, prompts)
        with notes.status("scoring the probe"):
            probe = probe_pair(student, teacher, rollouts, config.scoring, bf16=bf16)
            need = _memory_need(config, student, teacher, rollouts, longest)
    except RocktokensError as error:
        return [Finding("probe", "fail", "refused", str(error))]
    return [
        check_divergence(probe, config.scoring.divergence),
        check_overlap(probe.overlap, probe.overlap_mass),
        check_stop_mass(probe.stop_mass),
        check_truncation(rollouts, config.rollouts.max_completion_length),
        check_sampler(probe.sampler_gap),
        check_memory(need, available_memory(student, teacher)),
        estimate_time(config, probe, seconds, len(rollouts), student.model.device.type),
    ]


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
    return _warn_if(problem if low else "", "overlap", value, {"overlap": overlap, "mass": mass})


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
    return _warn_if(problem if mass < MIN_STOP_MASS else "", "stop mass", value, {"stop_mass": mass})


def check_truncation(rollouts: Sequence[Rollout], limit: int) -> Finding:
    """How long responses are, and how many hit the limit."""
    share = sum(not rollout.finished for rollout in rollouts) / len(rollouts)
    length = sum(len(rollout.token_ids) for rollout in rollouts) / len(rollouts)
    value = f"{length:.1f} tokens a response, {percent(share)} cut off at {limit}"
    problem = "raise rollouts.max_completion_length, or start from a student that ends its answers"
    measured = {"mean_length": length, "truncated_share": share}
    return _warn_if(problem if share > MAX_TRUNCATED_SHARE else "", "lengths", value, measured)


def check_sampler(gap: float | None) -> Finding:
    """Whether sampler and trainer agree on the student's probabilities."""
    if gap is None:
        return Finding("sampler", "ok", "not compared: scoring.temperature is not 1", measured={"gap": None})
    value = f"log-probabilities {gap:.1e} from the trainer's"
    problem = "rollouts are off-policy by this much: sample and train in one precision (training.bf16=false)"
    return _warn_if(problem if gap > MAX_SAMPLER_GAP else "", "sampler", value, {"gap": gap})


def _sample(
    config: Config, student: "LoadedModel", teacher: "LoadedModel", prompts: Sequence[Prompt]
) -> tuple[list[Rollout], float]:
    """The probe's rollouts, and the seconds they took."""
    from rocktokens.rollouts.encode import make_rollouts

    rollouts = config.rollouts
    with progress_bar("sampling the probe", len(prompts)) as advance:
        began = time.perf_counter()
        sampled = make_rollouts(
            make_sampler(config, student, teacher),
            student.tokenizer,
            prompts,
            num_generations=1,
            policy_step=0,
            first_rollout_id=0,
            temperature=rollouts.temperature,
            max_new_tokens=rollouts.max_completion_length,
            seed=derive_seed(config.run.seed, "check"),
            chat_template=rollouts.chat_template,
            max_prompt_length=rollouts.max_prompt_length,
            on_done=advance,
        )
        return sampled, time.perf_counter() - began


# Memory and time


def _memory_need(
    config: Config, student: "LoadedModel", teacher: "LoadedModel", rollouts: Sequence[Rollout], longest: int
) -> "MemoryNeed":
    """Bytes at the longest prompt and response, with activations measured on the longest rollout."""
    from rocktokens.models.head import lm_head
    from rocktokens.scoring.preflight import ModelSize, activation_need, measure_activations, memory_need

    training, sequence = config.training, longest + config.rollouts.max_completion_length
    size = ModelSize.of(student.model)
    bf16 = training.bf16 and student.model.device.type == "cuda"
    rollout = max(rollouts, key=lambda rollout: len(rollout.prompt_ids) + len(rollout.token_ids))
    responses = training.per_device_train_batch_size * config.rollouts.max_completion_length
    return memory_need(
        size,
        teacher_bytes=_weight_bytes(teacher),
        activation_bytes=activation_need(
            measure_activations(student.model, rollout, bf16=bf16),
            size,
            training.per_device_train_batch_size * sequence,
            checkpointing=training.gradient_checkpointing,
        ),
        chunk_positions=min(config.scoring.tokens_per_chunk, responses),
        vocab_size=max(lm_head(model.model).width for model in (student, teacher)),
        sampled_tokens=config.rollouts.batch_size * sequence,
    )


def check_memory(need: "MemoryNeed", available: int) -> Finding:
    """Whether the run fits."""
    parts = ", ".join(f"{name} {_size(part)}" for name, part in asdict(need).items())
    value = f"about {_size(need.peak)} of {_size(available)} ({parts}; sampling and update take turns)"
    remedy = (
        "lower training.per_device_train_batch_size or rollouts.batch_size, or set lora.enabled or "
        "training.gradient_checkpointing"
    )
    level: Level = "ok" if need.peak <= MEMORY_HEADROOM * available else "warn" if need.peak <= available else "fail"
    measured = {**asdict(need), "peak": need.peak, "available": available}
    return Finding("memory", level, value, "" if level == "ok" else remedy, measured)


def available_memory(student: "LoadedModel", teacher: "LoadedModel") -> int:
    """Bytes the run could have on the models' device: what is free, and what these two hold already."""
    import psutil
    import torch

    device = student.model.device
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return psutil.virtual_memory().available + _weight_bytes(student) + _weight_bytes(teacher)


def estimate_time(config: Config, probe: "PairProbe", sampled_in: float, rollouts: int, device: str) -> Finding:
    """Seconds of a step and of the run, were all steps like the probe."""
    from rocktokens.scoring.preflight import sampling_seconds, update_seconds

    per_step, steps = _rollouts_per_step(config), config.training.max_steps
    tokens = per_step * probe.tokens / rollouts
    sampling = sampling_seconds(
        sampled_in,
        probe.tokens,
        rollouts=per_step,
        tokens=tokens,
        batch_size=config.rollouts.batch_size,
        fixed_batches=device == "cuda",
    )
    update = update_seconds(probe, tokens)
    total = steps * (sampling + update)
    value = (
        f"about {_duration(total)} for {steps} steps: {sampling:.2g} s sampling and {update:.2g} s updating a step "
        f"(estimated from {rollouts} rollouts of {probe.tokens / rollouts:.0f} tokens on {device})"
    )
    measured = {"sampling": sampling, "update": update, "run": total, "tokens_per_step": tokens}
    return Finding("time", "ok", value, measured=measured)


def _weight_bytes(loaded: "LoadedModel") -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in loaded.model.parameters())


def _or_fail(name: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except RocktokensError as error:
        return Finding(name, "fail", "refused", str(error))


def _warn_if(problem: str, name: str, value: str, measured: dict[str, Any]) -> Finding:
    return Finding(name, "warn" if problem else "ok", value, problem, measured)


def _size(count: float) -> str:
    """Bytes in the largest unit that leaves at least one."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
