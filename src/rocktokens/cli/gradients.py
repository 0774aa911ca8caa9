"""``rocktokens gradients``: where the gradient goes, in logit space, in parameter space and through Adam (METHOD 5).

1. The probe rollouts of the prompts that did not select the rocks, and groups of types (``gradients_groups``).
2. Logit space: one replay at the reference and one at the baseline checkpoint.
3. Parameter space at the reference: the groups' gradients on several batches, and, where the checkpoint has the
   optimizer's state, their parts of its next step. The same by category.
4. What holds of the paper's paradox (``rocktokens.gradients.claims``).
5. Figures, then gradients.json. Nothing is committed before everything is known, so an interrupt loses nothing.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocktokens.cli.common import AsJson, Overrides, RunPath, notes, output, print_json, progress_bar
from rocktokens.config import Config, run_config
from rocktokens.errors import RocktokensError
from rocktokens.models.fingerprints import traced_student
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.types import RockSet, Rollout

if TYPE_CHECKING:
    from rocktokens.gradients.adam import AdamSettings
    from rocktokens.gradients.records import GradientsRecord, GradientsSettings, LogitSummary, ParameterSummary
    from rocktokens.gradients.subject import Groups, Subject
    from rocktokens.gradients.type_sums import TypeGradients
    from rocktokens.models.load import LoadedModel


def gradients(
    run_path: RunPath,
    checkpoint: Annotated[int | None, typer.Option(help="The student to look at; default that of the rocks.")] = None,
    baseline: Annotated[int | None, typer.Option(help="The earlier student; default that of the rocks.")] = None,
    batches: Annotated[int | None, typer.Option(help="Batches of parameter space; intervals are over them.")] = None,
    show: Annotated[int, typer.Option(min=1, help="Rows of the table of types.")] = 20,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show who owns the gradient, in logit space, in parameter space and in Adam's step; write RUN/gradients.json.

    Example: [bold]rocktokens gradients runs/mine --batches 8[/bold]
    """
    run = RunDir(run_path)
    settings = [] if batches is None else [f"gradients.batches={batches}"]
    record = run_gradients(run, run_config(run, [*(overrides or []), *settings]), checkpoint, baseline)
    if as_json:
        return print_json(record.to_record())
    from rocktokens.cli.gradients_tables import print_gradients

    print_gradients(record, show)
    output.print(f"everything: {run.gradients}", soft_wrap=True, markup=False)
    output.print(f"figures: {run.path / 'figures'}", soft_wrap=True, markup=False)


def run_gradients(
    run: RunDir, config: Config, checkpoint: int | None = None, baseline: int | None = None
) -> "GradientsRecord":
    """Measure with progress bars; commit gradients.json and the figures."""
    with run.lock():
        rocks = RockSet.load(run.rocks)
        with notes.status("reading traces"):
            from rocktokens.gradients.claims import judge
            from rocktokens.gradients.records import GradientsRecord
            from rocktokens.gradients.subject import category_ids, choose_subject, describe_trace

            subject = choose_subject(run, rocks, checkpoint, baseline)
            _require_same_loss(run, config, subject.store.replay)
            _require_prompts(subject, config.gradients.batches)
            trace = describe_trace(subject)
            categories = category_ids(subject.store, subject.token_ids)
        teacher = _load_teacher(config, rocks)
        logit = _logit_space(run, config, subject, teacher, categories)
        parameter = _parameter_space(run, config, subject, teacher, categories)
        record = GradientsRecord(
            criterion=rocks.criterion,
            source={"manifest_sha256": subject.store.manifest_sha256},
            settings=_settings(config, subject),
            warnings=subject.warnings,
            groups={name: ids.tolist() for name, ids in subject.groups.items()},
            control=subject.control,
            trace=trace,
            logit=logit,
            parameter=parameter,
            claims=judge(trace, logit, parameter),
        )
        with notes.status("drawing"):
            _draw(run, record)
        run.commit_text(run.gradients.name, record.to_json())
    return record


def _require_prompts(subject: "Subject", batches: int) -> None:
    if subject.n_prompts < batches:
        raise RocktokensError(
            f"gradients.batches = {batches}, but there are {subject.n_prompts} prompts to measure on "
            f"({subject.measured_on}): give --batches at most that, or trace more prompts (trace.num_prompts)"
        )


def _require_same_loss(run: RunDir, config: Config, replay: dict[str, Any]) -> None:
    """Refuse settings with which the gradients would be of another loss than the rows of the trace."""
    from rocktokens.models.fingerprints import model_identity

    if not replay:
        return
    scoring, traced_with = config.scoring, replay["scoring"]
    loss = {
        "scoring.divergence": (scoring.divergence, scoring.divergence, traced_with["divergence"]),
        "scoring.temperature": (scoring.temperature, scoring.temperature, traced_with["temperature"]),
        "models.teacher": (config.models.teacher, model_identity(config.models.teacher, run), replay["teacher"]),
    }
    for name, (given, now, traced) in loss.items():
        if now != traced:
            raise RocktokensError(
                f"{name} = {given!r} is not what the trace was scored with ({traced!r}): run `rocktokens trace` again, "
                "or leave out the override"
            )


def _settings(config: Config, subject: "Subject") -> "GradientsSettings":
    """What the numbers depend on, and how much they rest on."""
    from rocktokens.gradients.records import GradientsSettings

    return GradientsSettings(
        **config.gradients.model_dump(),
        reference=subject.evidence.reference,
        baseline=subject.evidence.baseline,
        measured_on=subject.measured_on,
        n_prompts=subject.n_prompts,
        n_rollouts=len(subject.rollouts),
        n_tokens=sum(len(rollout.token_ids) for rollout in subject.rollouts),
        divergence=config.scoring.divergence,
        temperature=config.scoring.temperature,
        dtype=config.models.dtype,
        seed=config.run.seed,
    )


def _load_teacher(config: Config, rocks: RockSet) -> "LoadedModel":
    with notes.status("loading"):
        from rocktokens.models.fingerprints import vocabulary_sha256
        from rocktokens.models.load import load_model

        teacher = load_model(config.models.teacher, config.models.dtype, config.models.device)
        teacher.model.requires_grad_(False)
        rocks.require_tokenizer(vocabulary_sha256(teacher.tokenizer.get_vocab()))
    return teacher


def _logit_space(
    run: RunDir, config: Config, subject: "Subject", teacher: "LoadedModel", categories: "Groups"
) -> "LogitSummary":
    """Both checkpoints, and what changed between them; None where there is but one."""
    from rocktokens.gradients.describe import describe_change, describe_checkpoint
    from rocktokens.gradients.records import LogitSummary

    evidence, groups = subject.evidence, subject.groups
    now = _type_gradients(run, config, subject, teacher, evidence.reference)
    reference = describe_checkpoint(now, groups, categories)
    if evidence.baseline == evidence.reference:
        return LogitSummary(reference, None, None)
    before = _type_gradients(run, config, subject, teacher, evidence.baseline)
    return LogitSummary(
        reference, describe_checkpoint(before, groups, categories), describe_change(before, now, groups)
    )


def _type_gradients(
    run: RunDir, config: Config, subject: "Subject", teacher: "LoadedModel", step: int
) -> "TypeGradients":
    from rocktokens.gradients.logit_space import logit_gradients
    from rocktokens.models.load import load_model

    name = traced_student(run, subject.store.replay, step)
    student = _same_words(load_model(name, config.models.dtype, config.models.device), teacher)
    section, scoring = config.gradients, config.scoring
    with progress_bar(f"logit space, checkpoint {step}", len(subject.rollouts)) as advance:
        return logit_gradients(
            student,
            teacher,
            subject.rollouts,
            divergence=scoring.divergence,
            temperature=scoring.temperature,
            tokens_per_chunk=scoring.tokens_per_chunk,
            tokens_per_batch=scoring.tokens_per_batch,
            sketch_width=section.sketch_width,
            memory=section.memory,
            seed=derive_seed(config.run.seed, "gradients"),
            on_done=advance,
        )


def _same_words(student: "LoadedModel", teacher: "LoadedModel") -> "LoadedModel":
    from rocktokens.models.fingerprints import same_tokenizer

    same_tokenizer(student.tokenizer, teacher.tokenizer)
    return student


@dataclass(frozen=True, slots=True)
class Trainee:
    """A student as it is trained, with the optimizer that trains it; without one where that is not known."""

    student: "LoadedModel"
    adam: "AdamSettings | None"
    state: dict[str, Any] | None
    note: str
    """What to know about the optimizer."""


def _parameter_space(
    run: RunDir, config: Config, subject: "Subject", teacher: "LoadedModel", categories: "Groups"
) -> "ParameterSummary":
    """The partition into groups, and the one into categories."""
    from rocktokens.gradients.describe import describe_shares
    from rocktokens.gradients.records import OptimizerSettings, ParameterSummary

    with notes.status("loading"):
        name = traced_student(run, subject.store.replay, subject.evidence.reference)
        trainee = load_trainee(run, config, name, subject, teacher)
    by_group, by_category = (
        describe_shares(_shares(config, trainee, teacher, subject.rollouts, sets, label))
        for sets, label in ((subject.groups, "groups"), (categories, "categories"))
    )
    return ParameterSummary(
        by_group.shares,
        by_group.token_share,
        by_group.excess,
        categories=by_category,
        optimizer=None if trainee.adam is None else OptimizerSettings(trainee.adam.learning_rate),
        note=trainee.note,
    )


def load_trainee(run: RunDir, config: Config, name: str, subject: "Subject", teacher: "LoadedModel") -> Trainee:
    """The student of the reference checkpoint with what is trainable in it, and its optimizer's state."""
    from rocktokens.models.load import load_model
    from rocktokens.scoring.student import load_student

    step, device = subject.evidence.reference, str(teacher.model.device)
    folder = run.checkpoint(step)
    if name != str(folder):
        student = _same_words(load_model(name, "float32", device), teacher)
        return Trainee(student, None, None, f"{name} has no optimizer state here: only the gradient is shown")
    student = _same_words(load_student(config, folder, device), teacher)
    return _with_optimizer(student, config, folder)


def _with_optimizer(student: "LoadedModel", config: Config, folder: Path) -> Trainee:
    from safetensors.torch import load_file

    from rocktokens.gradients.adam import AdamSettings
    from rocktokens.training.checkpoint import OPTIMIZER_FILE, load_trainer_state
    from rocktokens.training.optim import make_optimizer, make_scheduler, restore_scheduler

    if not (folder / OPTIMIZER_FILE).exists():
        note = f"{folder.name} keeps no optimizer state (finished runs of a study drop it): only the gradient is shown"
        return Trainee(student, None, None, note)
    state = load_file(folder / OPTIMIZER_FILE)
    if not state:
        note = f"{folder.name} is before the first update, without optimizer state: only the gradient is shown"
        return Trainee(student, None, None, note)
    optimizer = make_optimizer(student.model, config.training)
    restore_scheduler(make_scheduler(optimizer, config.training), load_trainer_state(folder).scheduler)
    adam = AdamSettings.of(optimizer, student.model, config.training.max_grad_norm)
    if adam.learning_rate > 0:
        return Trainee(student, adam, state, "")
    note = (
        "the learning rate has run out at this checkpoint; its next step is shown at the full rate, on which no share "
        "or cosine depends"
    )
    return Trainee(student, replace(adam, learning_rate=config.training.learning_rate), state, note)


def _shares(
    config: Config, trainee: Trainee, teacher: "LoadedModel", rollouts: list[Rollout], sets: "Groups", label: str
) -> Any:
    import torch

    from rocktokens.gradients.parameter_space import gradient_shares
    from rocktokens.gradients.partition import REST

    section, scoring = config.gradients, config.scoring
    bf16 = config.training.bf16 and teacher.model.device.type == "cuda"
    with progress_bar(f"parameter space, {label}", len(rollouts)) as advance:
        return gradient_shares(
            trainee.student,
            teacher,
            rollouts,
            {name: ids for name, ids in sets.items() if name != REST},
            batches=section.batches,
            adam=trainee.adam,
            optimizer_state=trainee.state,
            divergence=scoring.divergence,
            temperature=scoring.temperature,
            tokens_per_chunk=scoring.tokens_per_chunk,
            tokens_per_forward=section.tokens_per_forward,
            autocast_dtype=torch.bfloat16 if bf16 else None,
            on_done=advance,
        )


def _draw(run: RunDir, record: "GradientsRecord") -> None:
    """Commit the figures as PNG."""
    from rocktokens.report.charts.gradient_charts import gradient_figures
    from rocktokens.report.charts.save import commit_figures

    commit_figures(run, gradient_figures(run.path.name, record))
