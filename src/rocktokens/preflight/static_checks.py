"""What ``rocktokens check`` can see without sampling.

1. The models: whether they share a tokenizer, have heads that are understood, and end and begin turns alike.
2. The data: whether the prompts of training and evaluation are there, fit the models, and have answers, and whether
   the grader takes such an answer for right.
3. The run: whether its learning rate fits the student, its rocks can be read, its trackers used, its directory
   written, and its disk holds what will be written.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rocktokens.config import Config, evaluation_task, why_not_graded
from rocktokens.display.numbers import listed, parameter_count
from rocktokens.errors import RocktokensError
from rocktokens.models.fingerprints import SAMPLES, same_tokenizer, vocabulary_sha256
from rocktokens.models.head import lm_head, output_head, verify_head
from rocktokens.models.likely_head import LikelyHead
from rocktokens.models.load import LoadedModel
from rocktokens.policies import policy_from_section
from rocktokens.preflight.findings import Finding, or_fail, warn_if
from rocktokens.preflight.resources import ModelSize, check_disk, disk_need, disk_use, saved_steps
from rocktokens.preflight.starter_rules import usual_learning_rate
from rocktokens.preflight.trackers import check_trackers
from rocktokens.rollouts.encode import encode_prompt
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.tasks import make_task
from rocktokens.tasks.base import DatasetTask, Task, ungraded_note
from rocktokens.training.retention import beyond
from rocktokens.training.session import global_batch
from rocktokens.types import Prompt

FAR_RATE = 10
"""By which factor a learning rate may differ from the usual one; those of the recipes differ by up to 5."""
PROMPT_SAMPLE = 2000
"""Prompts whose length is looked at: seconds to tokenise, and enough to meet a length that one in a thousand has."""


def check_static(
    config: Config, task: Task, lengths: Mapping[str, int], student: LoadedModel, teacher: LoadedModel
) -> list[Finding]:
    """Check the models, the data and the run; ``lengths`` are those of the sampled prompts."""
    contexts = {"student": student.context_length, "teacher": teacher.context_length}
    size = ModelSize.of(student.model)
    directory = Path(config.run.directory)
    weighs = config.policy.name != "uniform" or config.policy.protect is not None
    return [
        check_tokenizers(student.tokenizer, teacher.tokenizer),
        check_widths(lm_head(student.model).width, output_head(teacher.model).width, len(student.tokenizer)),
        check_head("student head", student),
        check_head("teacher head", teacher, config.teacher.url if config.teacher.engine == "vllm" else None),
        check_ends(student.eos_ids, teacher.eos_ids),
        check_templates(student.tokenizer, teacher.tokenizer, used=config.rollouts.chat_template),
        check_batch(config),
        check_learning_rate(config, size.parameters),
        check_prompts(config, task, lengths, contexts),
        *check_evaluation(config, contexts, student.tokenizer),
        *([check_policy(config, student.tokenizer)] if weighs else []),
        *([check_trackers(config.training.report_to)] if config.training.report_to else []),
        *([check_retention(config)] if config.training.save_total_limit is not None else []),
        check_directory(directory),
        check_disk(
            disk_need(config, size.trainable, size.embeddings),
            shutil.disk_usage(_existing_part(directory)).free,
            written=disk_use(RunDir(directory)),
        ),
    ]


def check_tokenizers(student: Any, teacher: Any) -> Finding:
    """Check for one vocabulary, by its hash, and the same splits and joins of sample texts."""

    def compare() -> Finding:
        same_tokenizer(student, teacher)
        sha256 = vocabulary_sha256(student.get_vocab())
        value = f"the same, {len(student):,} entries, vocabulary {sha256[:12]}"
        return Finding("tokenizers", "ok", value, measured={"sha256": sha256})

    return or_fail("tokenizers", compare)


def check_widths(student: int, teacher: int, tokenizer: int) -> Finding:
    """Check the logits of both heads against the entries of the tokenizer."""
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


def check_head(name: str, loaded: LoadedModel, served: str | None = None) -> Finding:
    """Check whether the logits we make from the hidden states are the model's own, or ``served`` ones its states."""

    def verify() -> Finding:
        difference = verify_head(loaded.model, loaded.tokenizer.encode(SAMPLES[0]))
        if isinstance(head := output_head(loaded.model), LikelyHead):
            value = f"none is needed: log-probabilities of {head.k} tokens and one tail, of {served}"
        elif difference is None:
            value = f"states of {served}; its files name no final norm that they could be compared with"
        elif served is not None:
            value = f"states of {served} are of its final norm, within {difference:.1g}"
        else:
            value = f"logits as the model's own, within {difference:.1g}"
        return Finding(name, "ok", value, measured={"difference": difference})

    return or_fail(name, verify)


def check_ends(student: frozenset[int], teacher: frozenset[int]) -> Finding:
    """Check the ids that end a response."""
    value = f"student {sorted(student)}, teacher {sorted(teacher)}"
    problem = "rollouts end at the student's end tokens: give both models the same eos_token_id in generation_config"
    measured = {"student": sorted(student), "teacher": sorted(teacher)}
    return warn_if(problem if student != teacher else "", "end tokens", value, measured)


def check_templates(student: Any, teacher: Any, *, used: bool) -> Finding:
    """Check whether both tokenizers render a turn as the same text."""
    if not used:
        return Finding("chat template", "ok", "not used (rollouts.chat_template = false)")
    texts = [_render(tokenizer) for tokenizer in (student, teacher)]
    if texts == [None, None]:
        return Finding("chat template", "ok", "none: prompts go in as plain text")
    value = "the same" if texts[0] == texts[1] else f"student {texts[0]!r}, teacher {texts[1]!r}"
    problem = "the teacher reads the student's template: use a pair with one template or rollouts.chat_template=false"
    measured = {"student": texts[0], "teacher": texts[1]}
    return warn_if(problem if texts[0] != texts[1] else "", "chat template", value, measured)


def _render(tokenizer: Any) -> str | None:
    if not tokenizer.chat_template:
        return None
    turn = [{"role": "user", "content": "What is 3 + 4?"}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)


def sample_prompts(config: Config, task: Task, tokenizer: Any) -> tuple[list[Prompt], dict[str, int]]:
    """Return the first prompts the run will train on, and their lengths in tokens by id."""
    asked = config.training.max_steps * config.training.rollouts_per_step // config.rollouts.num_generations
    prompts = task.prompts(max(1, min(asked, PROMPT_SAMPLE)), derive_seed(config.run.seed, "prompts"))
    return prompts, _lengths(config, prompts, tokenizer)


def check_batch(config: Config) -> Finding:
    """Check whether the rollouts of a step are whole groups of one prompt each."""

    def lay_out() -> Finding:
        rollouts, each = global_batch(config, 1), config.rollouts.num_generations
        value = f"{rollouts} rollouts per step and device: {rollouts // each} prompts, {each} each"
        return Finding("batch", "ok", value, measured={"rollouts": rollouts, "prompts": rollouts // each})

    return or_fail("batch", lay_out)


def check_learning_rate(config: Config, parameters: int) -> Finding:
    """Compare the learning rate with the one that ``rocktokens init`` would choose for a student of this size."""
    rate, usual = config.training.learning_rate, usual_learning_rate(parameters, lora=config.lora.enabled)
    problem = ""
    if rate > FAR_RATE * usual:
        problem = f"{rate / usual:,.0f} times the usual rate, at which training may diverge"
    elif rate < usual / FAR_RATE:
        problem = f"1/{usual / rate:,.0f} of the usual rate, at which the student may hardly change"
    what = "adapters of a student" if config.lora.enabled else "a student"
    value = f"{rate:g}; usual for {what} of {parameter_count(parameters)} parameters: {usual:g}"
    remedy = f"{problem}: set training.learning_rate near {usual:g}" if problem else ""
    return warn_if(remedy, "learning rate", value, {"learning_rate": rate, "usual": usual, "parameters": parameters})


def check_prompts(
    config: Config, task: Task, lengths: Mapping[str, int], contexts: Mapping[str, int | None]
) -> Finding:
    """Check how many there are, and whether the longest fits with its answer."""
    asked = config.training.max_steps * config.training.rollouts_per_step // config.rollouts.num_generations
    there = "endless" if task.size is None else f"{task.size:,} there"
    value = f"{asked:,} asked for, {there}; the longest of {len(lengths):,} has {max(lengths.values())} tokens"
    measured = {
        "asked": asked,
        "available": task.size,
        "looked_at": len(lengths),
        "longest": max(lengths.values()),
    }
    problem = misfit(config, lengths, contexts)
    return Finding("prompts", "fail" if problem else "ok", value, problem, measured)


def misfit(config: Config, lengths: Mapping[str, int], contexts: Mapping[str, int | None]) -> str:
    """Say why the longest prompt cannot be used; empty if it can."""
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


def check_evaluation(config: Config, contexts: Mapping[str, int | None], tokenizer: Any) -> list[Finding]:
    """Check whether accuracy can be measured later: prompts enough, short enough, with answers that can be graded."""
    asked, seed = config.evaluation.num_prompts, derive_seed(config.run.seed, "evaluation prompts")
    try:
        task = make_task(evaluation_task(config))
        prompts = task.prompts(asked, seed, gradable=True) or task.prompts(asked, seed)
        problem = misfit(config, _lengths(config, prompts, tokenizer), contexts)
    except RocktokensError as error:
        return [Finding("evaluation", "warn", "not possible", str(error))]
    answered = sum(prompt.answer is not None for prompt in prompts)
    if len(prompts) < asked:
        problem = problem or f"only {len(prompts)} prompts are there: lower evaluation.num_prompts"
    problem = why_not_graded(config) or problem or ungraded_note(task)
    value = f"{asked:,} prompts asked for, {len(prompts):,} there, {answered:,} with an answer"
    measured = {"asked": asked, "available": len(prompts), "answered": answered}
    findings = [warn_if(problem, "evaluation", value, measured)]
    if isinstance(task, DatasetTask) and task.can_grade(prompts[0]):
        findings.append(or_fail("grader", lambda: check_grader(task, prompts)))
    return findings


def check_grader(task: Task, prompts: Sequence[Prompt]) -> Finding:
    """Check how long the answers are, and whether a response that is one of them grades as right."""
    task.require_grader()
    answered = [prompt for prompt in prompts if prompt.answers]
    if not answered:
        return Finding("grader", "ok", "found; there is no answer to try it on")
    lengths, first = [len(answer) for prompt in answered for answer in prompt.answers], answered[0]
    is_right = task.grade(first, first.answers[0])
    value = (
        f"answers of {min(lengths):,} to {max(lengths):,} characters; that of {first.id!r} grades as "
        f"{'right' if is_right else 'wrong'}"
    )
    problem = (
        "" if is_right else "a response that is the answer itself should be right: check the grader and its answers"
    )
    measured = {"answered": len(answered), "shortest": min(lengths), "longest": max(lengths), "is_right": is_right}
    return warn_if(problem, "grader", value, measured)


def _lengths(config: Config, prompts: Sequence[Prompt], tokenizer: Any) -> dict[str, int]:
    template = config.rollouts.chat_template
    return {prompt.id: len(encode_prompt(tokenizer, prompt, template, sys.maxsize)) for prompt in prompts}


def check_policy(config: Config, tokenizer: Any) -> Finding:
    """Check whether the policy can be made: its files can be read and are of this vocabulary."""

    def make() -> Finding:
        sha256 = vocabulary_sha256(tokenizer.get_vocab())
        needs = sorted(policy_from_section(config.policy, sha256, tokenizer=tokenizer).needs)
        value = f"{config.policy.name}, {'after scoring ' + ', '.join(needs) if needs else 'before scoring'}"
        return Finding("policy", "ok", value, measured={"needs": needs})

    return or_fail("policy", make)


def check_retention(config: Config) -> Finding:
    """Check that the checkpoint which `find` compares with the last one, that nearest to the middle, stays."""
    steps, last, limit = saved_steps(config), config.training.max_steps, config.training.save_total_limit
    gone = beyond(steps, limit)
    value = f"steps {listed([str(step) for step in steps if step not in gone])} stay"
    wanted, middle = (
        min((step for step in own if 0 < step < last), key=lambda step: (abs(2 * step - last), step), default=None)
        for own in (steps, [step for step in steps if step not in gone])
    )
    if wanted == middle:
        return Finding("checkpoints", "ok", value)
    instead = "do without" if middle is None else f"take step {middle} for it"
    remedy = (
        f"training.save_total_limit = {limit} drops step {wanted}, the middle of the run, since which `find` asks "
        f"whether loss still falls: it would {instead}; raise training.save_steps instead"
    )
    return Finding("checkpoints", "warn", value, remedy)


def check_directory(path: Path) -> Finding:
    """Check whether a run can be written there."""
    parent = _existing_part(path)
    if not parent.is_dir():
        return Finding("run directory", "fail", str(path), f"{parent} is a file: give run.directory another name")
    if not os.access(parent, os.W_OK | os.X_OK):
        return Finding("run directory", "fail", str(path), f"{parent} is not writable: give another run.directory")
    taken = "it already holds a run: continue that with --resume, or give another run.directory"
    return warn_if(taken if RunDir(path).exists() else "", "run directory", str(path), {})


def _existing_part(path: Path) -> Path:
    """Return the path itself, or its nearest ancestor that exists."""
    return next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())
