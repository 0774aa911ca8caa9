"""The commented config that ``rocktokens init`` writes: one first run for a pair of models and its data.

1. Look at the models and the data (``starter_facts``), and choose what depends on them (``starter_rules``).
2. Write TOML with a reason beside every value; ``load_config`` must read it before it is saved.
3. A file that is there is replaced only if that was asked for.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rocktokens.config import dump_toml, parse_config
from rocktokens.display.numbers import parameter_count
from rocktokens.errors import RocktokensError
from rocktokens.models.facts import tokenizer_if_there
from rocktokens.preflight.starter_facts import data_facts, pair_facts
from rocktokens.preflight.starter_rules import DataFacts, Fitted, PairFacts, fit_settings, memory_gigabytes

ANSWERS = {
    "field": "graded against it",
    "reply": "not a field of the data, so the assistant's last message is the answer",
    "prose": "the answers are prose, which needs a grader of yours: without one, no accuracy and knock-out",
    "none": "no answers found: accuracy and knock-out need them, or a grader of yours",
}
"""What the comment on the field of answers says."""
MOST_OF_REAL_MODELS = 2e-5
"""Learning rates above it are for the pebbles, or for adapters."""
_CHANGE_FIRST = """\
# Change first: training.learning_rate (if the loss jumps, halve it), then training.max_steps and
# rollouts.max_completion_length. To be done sooner, lower training.max_steps and training.save_steps together.
"""
_FIRST_LOOK = """\
# A first look (--small): every stage within minutes on a CPU, and too short to conclude anything from.
# For a real run, write the file again without --small.
"""


def write_starter(
    path: Path,
    student: str,
    teacher: str,
    data: str | None = None,
    *,
    lora: bool = False,
    small: bool = False,
    force: bool = False,
) -> str:
    """Write a config for the pair to ``path`` and return its text; an existing file is kept unless forced."""
    if path.exists() and not force:
        raise RocktokensError(f"{path} exists: give another file, or --force to replace it")
    pair = pair_facts(student, teacher)
    facts = None if data is None else data_facts(data, tokenizer_if_there(student))
    text = starter_text(path, student, teacher, pair, facts, lora=lora, small=small)
    parse_config(text, name=str(path))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RocktokensError(f"{path} cannot be written ({reason}): give another file") from None
    return text


def starter_text(
    path: Path,
    student: str,
    teacher: str,
    pair: PairFacts,
    data: DataFacts | None,
    *,
    lora: bool = False,
    small: bool = False,
) -> str:
    """Return the TOML with its comments."""
    fitted = fit_settings(pair, data, lora=lora, small=small)
    sizes = [parameter_count(own) for own in (pair.student_parameters, pair.teacher_parameters)]
    blocks = [
        _head(path, pair, fitted, lora, small),
        _block("run", ("directory", f"runs/{path.stem}", "where everything of the run goes"), ("seed", 0, "")),
        _block(
            "models",
            ("student", student, f"{sizes[0]} parameters; this one is trained"),
            (
                "teacher",
                teacher,
                f"{sizes[1]} parameters; must have the student's tokenizer",
            ),
            ("dtype", fitted.dtype, "of the teacher and of replayed students; training is in float32"),
        ),
        _task(data),
        _block(
            "rollouts",
            ("temperature", 1.0, "on-policy means as the student writes: leave it at 1"),
            ("max_prompt_length", fitted.max_prompt_length, _why_prompts(data)),
            ("max_completion_length", fitted.max_completion_length, "raise it if `check` says that answers are cut"),
            ("batch_size", fitted.sampling_batch_size, "sequences decoded together: lower it if memory runs out"),
        ),
        *([_block("lora", ("enabled", True, "adapters instead of all weights"), ("r", 16, ""))] if lora else []),
        _training(fitted, lora),
        *_stages(fitted, data),
    ]
    return "\n".join(blocks)


def _head(path: Path, pair: PairFacts, fitted: Fitted, lora: bool, small: bool) -> str:
    memory = memory_gigabytes(pair, fitted, lora=lora)
    change = _FIRST_LOOK if small else _CHANGE_FIRST
    return f"""# A first run for this pair, written by `rocktokens init`. Keys that are not here have their defaults:
# `rocktokens config --reference` lists them all, `rocktokens config {path} --show` shows what will be used.
#   rocktokens check {path}    tokenizers, memory and time, before anything starts
#   rocktokens run {path}      distill, trace, find, gradients, knockout, report
# Both models with gradients and optimizer take about {memory:.2g} GB before activations.
{change}"""


def _training(fitted: Fitted, lora: bool) -> str:
    rollouts = fitted.per_device_train_batch_size * fitted.gradient_accumulation_steps
    why = "falls with size; TRL's examples use 1e-6 to 2e-5"
    if fitted.learning_rate > MOST_OF_REAL_MODELS:
        why = "for models of a few million parameters; from 0.1 B on take 1e-5 or less"
    if lora:
        why = "ten times that of full training, as adapters want"
    rows: list[tuple[str, Any, str]] = [
        ("max_steps", fitted.max_steps, "enough for the loss to level off; rocks are what is left then"),
        ("learning_rate", fitted.learning_rate, why),
        ("warmup_steps", fitted.warmup_steps, ""),
        ("per_device_train_batch_size", fitted.per_device_train_batch_size, "halve it if memory runs out, and"),
        (
            "gradient_accumulation_steps",
            fitted.gradient_accumulation_steps,
            f"double this: a step stays {rollouts} rollouts per device",
        ),
        ("save_steps", fitted.save_steps, "checkpoints that `find` compares; 4 bytes per parameter on disk each"),
    ]
    if fitted.max_truncated_share is not None:
        rows.append(("max_truncated_share", fitted.max_truncated_share, "do not stop where most answers are cut short"))
    if fitted.gradient_checkpointing:
        rows.append(("gradient_checkpointing", True, "less memory, about a third slower"))
    return _block("training", *rows)


def _task(data: DataFacts | None) -> str:
    if data is None:
        why = 'embedded word problems, to start with; your data: name = "jsonl", path = …'
        return _block("task", ("name", "wordmath", why))
    fields = ", ".join(map(repr, data.fields))  # a name may hold a line break, which would end the comment
    return _block("task", *_dataset(data), lead=f"{data.records:,} records with the fields {fields}.")


def _dataset(data: DataFacts) -> list[tuple[str, Any, str]]:
    return [
        ("name", "jsonl", ""),
        ("path", data.path, ""),
        ("prompt_field", data.prompt_field, "guessed from the names of the fields"),
        ("answer_field", data.answer_field, ANSWERS[data.answers]),
        (
            "template",
            data.template,
            "what the student is asked; {prompt} is the field above, or the last message in it",
        ),
        ("grading", data.grading, "math: numbers and formulas that are equal; exact: the same text"),
    ]


def _stages(fitted: Fitted, data: DataFacts | None) -> Iterator[str]:
    yield _block("trace", ("num_prompts", fitted.trace_prompts, "of the probe; more prompts, narrower intervals"))
    yield _block("find", ("k", fitted.find_k, 'how many rocks at most; "auto" weighs coverage against stability'))
    yield _block("evaluation", ("num_prompts", fitted.evaluation_prompts, ""))
    if data is not None and data.answer_field:
        lead = "CHANGE THIS to held-out data: until then accuracy is measured on prompts of the training."
        yield _block("evaluation.task", *_dataset(data), lead=lead)
    yield _block(
        "knockout",
        ("top", fitted.knockout_top, "rocks that are banned, one at a time"),
        ("num_prompts", fitted.knockout_prompts, "answered again under every ban; a neutral verdict may need more"),
    )


def _why_prompts(data: DataFacts | None) -> str:
    if data is None or data.longest_prompt is None:
        return "a longer prompt is an error"
    return f"the longest has {data.longest_prompt} tokens; a longer one is an error"


def _block(name: str, *rows: tuple[str, Any, str], lead: str = "") -> str:
    """Write one section; a comment stands behind its value."""
    lines = [f"# {lead}"] if lead else []
    lines.append(f"[{name}]")
    for key, value, why in rows:
        line = dump_toml({key: value}).strip()
        lines.append(f"{line}  # {why}" if why else line)
    return "\n".join(lines) + "\n"
