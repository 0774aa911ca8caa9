"""What is wrong with a configuration, in one sentence that names the field, the value and the remedy.

1. Validation reports where a problem is as a path through the models; the tags of named sections are part of it.
2. The path is walked along the models, which gives the key as the user wrote it and the section it belongs to.
3. An unknown key is looked up by what it means elsewhere (``lr``), then among the keys of other sections, then by
   spelling: among the keys of its section, at last among all.
"""

import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError

from rocktokens.config.base import NamedSection, Section
from rocktokens.display.numbers import listed
from rocktokens.errors import ConfigError

M = TypeVar("M", bound=Section)
_SHOWN = 80
"""Characters of a value that a sentence shows."""
_FEW = 5
"""Up to this many names are listed rather than guessed from."""
OTHER_NAMES = {
    "run.directory": "output_dir out_dir run_dir save_dir",
    "run.seed": "seed random_seed random_state",
    "models": "model",
    "models.student": "student_model student_model_name_or_path model_name model_name_or_path",
    "models.teacher": "teacher_model teacher_model_name_or_path",
    "models.dtype": "torch_dtype precision",
    "task": "data dataset dataset_name",
    "task.path": "data_path dataset_path train_file",
    "task.prompt_field": "messages_field messages_column prompt_column question_field question_column text_field",
    "task.answer_field": "answer_column answers_field label_field target_field",
    "task.system_prompt": "system system_message",
    "task.grader": "reward reward_func reward_funcs reward_function scorer verifier judge",
    "task.subset": "config config_name dataset_config",
    "rollouts": "sampling generation sampler",
    "rollouts.max_completion_length": "max_new_tokens max_length max_tokens max_response_length completion_length",
    "rollouts.max_prompt_length": "max_prompt_tokens prompt_length",
    "rollouts.num_generations": "n num_samples num_return_sequences samples_per_prompt group_size",
    "rollouts.batch_size": "batch_size",
    "scoring.divergence": "kl beta loss kl_type kl_direction objective",
    "lora": "peft",
    "training": "train trainer optimizer optim",
    "training.learning_rate": "lr peak_lr max_lr",
    "training.per_device_train_batch_size": "batch_size train_batch_size micro_batch_size",
    "training.gradient_accumulation_steps": "grad_accum accumulation_steps",
    "training.max_steps": "steps num_steps max_steps max_iters iterations",
    "training.num_train_epochs": "epochs num_epochs num_train_epochs",
    "training.lr_scheduler_type": "scheduler lr_scheduler",
    "training.warmup_steps": "warmup warmup_ratio num_warmup_steps",
    "training.max_grad_norm": "grad_clip clip_grad max_norm",
    "training.save_steps": "save_every save_interval checkpoint_every",
    "training.report_to": "logger tracker log_with",
    "evaluation": "eval",
    "evaluation.num_samples": "num_samples",
    "knockout.num_samples": "num_samples",
}
"""What other trainers call a key; a name that may mean several keys means that of the section it stands in, if any."""


def validate(model: type[M], record: Mapping[str, Any], name: str, context: Mapping[str, Any] | None = None) -> M:
    """Make the model of a record; the first mistake is a ConfigError, one sentence that begins with ``name``."""
    try:
        return model.model_validate(record, context=context)
    except ValidationError as error:
        raise ConfigError(f"{name}: {_one_sentence(model, error)}") from None


def _one_sentence(model: type[Section], error: ValidationError) -> str:
    problem = min(error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden")
    key, place, choices = _walk(model, problem["loc"])
    value, message = problem["input"], problem["msg"].removeprefix("Value error, ")
    match problem["type"]:
        case "extra_forbidden":
            return f"{key} is not a known key{_nearest(model, key, place[0], choices)}"
        case "missing":
            fields = place[0].model_fields.items() if len(place) == 1 else ()
            # Of a section that is missing, the first key it needs.
            key = ".".join([key, *[name for name, field in fields if field.is_required()][:1]])
            can_be_set = "." in key and "[" not in key
            init = ", or run `rocktokens init` for a config of your pair" if key.startswith("models.") else ""
            return f"{key} is missing: set it in the file{f' or with --set {key}=…' if can_be_set else ''}{init}"
        case "union_tag_invalid":
            return f"{key}.name = {_shown(value['name'])} {_not_one_of(place, str(value['name']))}"
        case "value_error" if place:  # what is wrong is how the keys of a section go together
            return f"{key}: {message}" if key else message
    return f"{key} = {_shown(value)} is not valid: {message}"


def _walk(
    model: type[Section], location: tuple[int | str, ...]
) -> tuple[str, list[type[Section]], list[type[Section]]]:
    """Find the key that a location means, the sections that can stand there, and those the last name chose from.

    For an unknown key the section is the one around it.
    """
    place: Any = model
    key, choices = "", []
    for part in location:
        sections = sections_of(place)
        if isinstance(part, int):
            key, place = f"{key}[{part}]", _item(place)
        elif len(sections) > 1:
            place, choices = next(section for section in sections if tag_of(section) == part), sections
        elif len(sections) == 1:
            key = f"{key}.{part}" if key else part
            field = sections[0].model_fields.get(part)
            place = field.annotation if field else place
    return key, sections_of(place), choices


def sections_of(annotation: Any) -> list[type[Section]]:
    """Return the models an annotation allows, not those within lists."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return sections_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [section for argument in get_args(annotation) for section in sections_of(argument)]
    return []


def _item(annotation: Any) -> Any:
    """Return what the entries of a list are, where the annotation is one."""
    if get_origin(annotation) is list:
        return get_args(annotation)[0]
    return next((found for argument in get_args(annotation) if (found := _item(argument)) is not None), None)


def tag_of(section: type[Section]) -> str:
    """Return the name by which a named section is chosen."""
    return get_args(section.model_fields["name"].annotation)[0]


def _kind(section: type[Section]) -> str:
    return section.kind if issubclass(section, NamedSection) else "section"


def _not_one_of(sections: list[type[Section]], name: str) -> str:
    known = sorted(tag_of(section) for section in sections)
    match = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {match[0]}?" if match and len(known) > _FEW else f"use one of {', '.join(known)}"
    return f"is not a {_kind(sections[0])}: {remedy}"


def _nearest(model: type[Section], key: str, section: type[Section], choices: list[type[Section]]) -> str:
    parent, _, leaf = key.rpartition(".")
    if section in choices and any(leaf in other.model_fields for other in choices):
        return f" of {_kind(section)} {tag_of(section)}"
    known = sorted(set(dotted_keys(model)))
    meant = [own for own in known if leaf.lower() in OTHER_NAMES.get(own.removeprefix("base."), "").split()]
    here = [own for own in meant if own.rpartition(".")[0] == parent]
    elsewhere = [own for own in known if own.rpartition(".")[2] == leaf and not own.startswith("policy.")]
    if likely := here or meant or elsewhere:
        return f": did you mean {listed(likely, 'or')}?"
    if match := difflib.get_close_matches(leaf, section.model_fields, n=1):
        return f": did you mean {f'{parent}.{match[0]}' if parent else match[0]}?"
    by_leaf = {own.rpartition(".")[2]: own for own in reversed(known)}
    match = difflib.get_close_matches(leaf, by_leaf, n=1)
    return f": did you mean {by_leaf[match[0]]}?" if match else ""


def dotted_keys(model: type[Section], above: str = "") -> Iterator[str]:
    """Yield every key there can be, dotted; those of lists are left out."""
    for name, field in model.model_fields.items():
        yield above + name
        for section in sections_of(field.annotation):
            yield from dotted_keys(section, f"{above}{name}.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
