"""The gradients stage: where the gradient goes, in logit space, in parameter space and through Adam.

1. The probe rollouts of the prompts that did not select the rocks, and groups of types (``held_out``).
2. Logit space: one replay at the reference and one at the baseline checkpoint.
3. Parameter space at the reference: the groups' gradients on several batches, and, where the checkpoint has the
   optimizer's state, their parts of its next step. The same by category.
4. Verdicts on the paper's claims (``claims``).
5. gradients.json. Nothing is committed before everything is known, so an interrupt loses nothing.

The quantities are those of docs/method.md, section 5.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load_file

from rocktokens.config import Config, checkpoint_label, checkpoint_names
from rocktokens.errors import RocktokensError
from rocktokens.gradients.adam import AdamSettings
from rocktokens.gradients.claims import judge
from rocktokens.gradients.held_out import Groups, HeldOut, category_ids, describe_trace, hold_out
from rocktokens.gradients.logit_space import logit_gradients
from rocktokens.gradients.logit_summary import describe_change, describe_checkpoint
from rocktokens.gradients.parameter_space import gradient_shares
from rocktokens.gradients.records import (
    REST,
    GradientsRecord,
    GradientsSettings,
    LogitSummary,
    OptimizerSettings,
    ParameterSummary,
    PartitionShares,
)
from rocktokens.gradients.type_gradients import TypeGradients
from rocktokens.models.fingerprints import model_identity, same_tokenizer, traced_student, vocabulary_sha256
from rocktokens.models.load import LoadedModel, load_model
from rocktokens.progress import SILENT, Progress
from rocktokens.run_dir import OPTIMIZER_FILE, RunDir, derive_seed
from rocktokens.scoring.student import load_student
from rocktokens.scoring.teachers import load_teacher, note_teacher
from rocktokens.training.checkpoint import load_trainer_state
from rocktokens.training.optim import make_optimizer, make_scheduler, restore_scheduler
from rocktokens.types import RockSet, has_tail


@dataclass(frozen=True, slots=True)
class Session:
    """A measurement in progress: the run, the tokens, the teacher, and where progress is shown."""

    run: RunDir
    config: Config
    held_out: HeldOut
    categories: Groups
    teacher: LoadedModel
    progress: Progress

    def student_name(self, step: int) -> str:
        """Return what to load for a checkpoint, if it is still the student that was traced."""
        return traced_student(self.run, self.held_out.store.replay, step)

    @property
    def loss(self) -> dict[str, Any]:
        """The settings that both spaces share."""
        return self.config.scoring.model_dump(include={"divergence", "temperature", "tokens_per_chunk"})


@dataclass(frozen=True, slots=True)
class Trainee:
    """A student as it is trained, with the optimizer that trains it; without one where that is not known."""

    student: LoadedModel
    adam: AdamSettings | None = None
    state: dict[str, torch.Tensor] | None = None
    note: str = ""
    """What to know about the optimizer."""


def measure_gradients(
    run: RunDir,
    config: Config,
    checkpoint: int | None = None,
    baseline: int | None = None,
    progress: Progress = SILENT,
) -> GradientsRecord:
    """Measure where the gradient goes at a checkpoint of a run and commit gradients.json.

    Args:
        run: With replayed traces and rocks.json.
        config: The run's.
        checkpoint: The student to look at; by default that of the rocks.
        baseline: The earlier student it is compared with; by default that of the rocks.
        progress: Shown a bar per pass over the rollouts.
    """
    with run.lock():
        rocks = RockSet.load(run.verified(run.rocks.name))
        with progress.status("reading traces"):
            held_out = hold_out(run, rocks, checkpoint, baseline)
            _require_measurable(run, config, held_out)
            trace = describe_trace(held_out)
            categories = category_ids(held_out.store, held_out.token_ids)
        with progress.status("loading"):
            teacher = load_teacher(config, config.models.device)
            teacher.model.requires_grad_(False)
            rocks.require_tokenizer(vocabulary_sha256(teacher.tokenizer.get_vocab()))
            note_teacher(teacher.model, run, config)
        session = Session(run, config, held_out, categories, teacher, progress)
        for step in (held_out.sums.baseline, held_out.sums.reference):
            session.student_name(step)  # both are refused before either is measured
        logit, parameter = _logit_space(session), _parameter_space(session)
        record = GradientsRecord(
            criterion=rocks.criterion,
            source={"manifest_sha256": held_out.store.manifest_sha256},
            settings=_settings(config, held_out),
            warnings=held_out.warnings,
            groups={name: ids.tolist() for name, ids in held_out.groups.items()},
            control=held_out.control,
            trace=trace,
            logit=logit,
            parameter=parameter,
            claims=judge(trace, logit, parameter),
        )
        held_out.store.note_searched()
        run.commit(run.gradients.name, record.save)
    return record


def _require_measurable(run: RunDir, config: Config, held_out: HeldOut) -> None:
    """Refuse settings whose gradients would be of another loss than the rows of the trace, and too few prompts."""
    scoring, models, replay = config.scoring, config.models, held_out.store.replay
    traced = held_out.store.teacher(held_out.sums.reference)
    if has_tail(traced) or config.teacher.is_top_k:
        raise RocktokensError(
            "gradients need the teacher's whole distribution at every token, and that of "
            f"{run.path if has_tail(traced) else 'the config'} gives "
            f"{traced if has_tail(traced) else config.teacher.label}: trace another run with teacher.values = "
            '"states", or with the teacher in memory'
        )
    if replay:
        traced_with = {**replay.scoring, "teacher": replay.teacher}
        for name, given, now in (
            ("scoring.divergence", scoring.divergence, scoring.divergence),
            ("scoring.temperature", scoring.temperature, scoring.temperature),
            ("models.teacher", models.teacher, model_identity(models.teacher, run)),
        ):
            if now != (traced := traced_with[name.split(".")[1]]):
                raise RocktokensError(
                    f"{name} = {given!r} is not what the trace was scored with ({traced!r}): run `rocktokens trace` "
                    "again, or leave out the override"
                )
    if held_out.n_prompts < config.gradients.batches:
        raise RocktokensError(
            f"gradients.batches = {config.gradients.batches}, but there are {held_out.n_prompts} prompts to measure on "
            f"({held_out.measured_on}): trace more (trace.num_prompts), or lower it (--batches)"
        )


def _settings(config: Config, held_out: HeldOut) -> GradientsSettings:
    return GradientsSettings(
        **config.gradients.model_dump(),
        reference=held_out.sums.reference,
        baseline=held_out.sums.baseline,
        measured_on=held_out.measured_on,
        n_prompts=held_out.n_prompts,
        n_rollouts=len(held_out.rollouts),
        n_tokens=sum(len(rollout.token_ids) for rollout in held_out.rollouts),
        divergence=config.scoring.divergence,
        temperature=config.scoring.temperature,
        dtype=config.models.dtype,
        seed=config.run.seed,
    )


# Logit space


def _logit_space(session: Session) -> LogitSummary:
    """Measure both checkpoints, and what changed between them; None where there is one only."""
    sums, groups, categories = session.held_out.sums, session.held_out.groups, session.categories
    now = _type_gradients(session, sums.reference)
    reference = describe_checkpoint(now, groups, categories)
    if sums.baseline == sums.reference:
        return LogitSummary(reference, None, None)
    before = _type_gradients(session, sums.baseline)
    baseline = describe_checkpoint(before, groups, categories)
    return LogitSummary(reference, baseline, describe_change(before, now, groups))


def _type_gradients(session: Session, step: int) -> TypeGradients:
    config, rollouts = session.config, session.held_out.rollouts
    student = load_model(session.student_name(step), config.models.dtype, config.models.device)
    same_tokenizer(student.tokenizer, session.teacher.tokenizer)
    checkpoint = checkpoint_label(step, checkpoint_names(config))
    with session.progress.bar(f"logit space, checkpoint {checkpoint}", len(rollouts)) as advance:
        return logit_gradients(
            student,
            session.teacher,
            rollouts,
            **session.loss,
            tokens_per_batch=config.scoring.tokens_per_batch,
            sketch_width=config.gradients.sketch_width,
            memory=config.gradients.memory,
            seed=derive_seed(config.run.seed, "gradients"),
            on_done=advance,
        )


# Parameter space


def _parameter_space(session: Session) -> ParameterSummary:
    """Measure the partition into groups, and the one into categories."""
    with session.progress.status("loading"):
        trainee = _load_trainee(session)
    by_group = _shares(session, trainee, session.held_out.groups, "groups")
    return ParameterSummary(
        shares=by_group.shares,
        token_share=by_group.token_share,
        excess=by_group.excess,
        categories=_shares(session, trainee, session.categories, "categories"),
        optimizer=None if trainee.adam is None else OptimizerSettings(trainee.adam.learning_rate),
        note=trainee.note,
    )


def _load_trainee(session: Session) -> Trainee:
    """Load the student of the reference checkpoint with what is trainable in it, and its optimizer's state."""
    config, step, device = session.config, session.held_out.sums.reference, str(session.teacher.model.device)
    name, folder = session.student_name(step), session.run.checkpoint(step)
    is_own = name == str(folder)
    student = load_student(config, folder, device) if is_own else load_model(name, "float32", device)
    same_tokenizer(student.tokenizer, session.teacher.tokenizer)
    has_state = is_own and session.run.lists(f"checkpoints/{folder.name}/{OPTIMIZER_FILE}")
    state = load_file(folder / OPTIMIZER_FILE) if has_state else {}
    if not state:
        missing = f"Adam's view needs the optimizer's state, which {name} does not come with"
        if is_own:
            missing = (
                f"{folder.name} keeps no optimizer state (only the latest checkpoint does, and finished runs of a "
                "study drop it)"
            )
        if has_state:
            missing = f"{folder.name} is before the first update, without optimizer state"
        return Trainee(student, note=f"{missing}: only the gradient is shown")
    if config.training.optim != "adamw_torch":
        missing = f"Adam's view is of training.optim = 'adamw_torch', and the run has {config.training.optim!r}"
        return Trainee(student, note=f"{missing}: only the gradient is shown")
    optimizer = make_optimizer(student.model, config.training)
    restore_scheduler(make_scheduler(optimizer, config.training), load_trainer_state(folder).scheduler)
    adam = AdamSettings.of(optimizer, student.model, config.training.max_grad_norm)
    if adam.learning_rate > 0:
        return Trainee(student, adam, state)
    note = (
        "the learning rate has run out at this checkpoint; its next step is shown at the full rate, on which no share "
        "or cosine depends"
    )
    return Trainee(student, replace(adam, learning_rate=config.training.learning_rate), state, note)


def _shares(session: Session, trainee: Trainee, sets: Groups, label: str) -> PartitionShares:
    config, rollouts = session.config, session.held_out.rollouts
    bf16 = config.training.bf16 and session.teacher.model.device.type == "cuda"
    with session.progress.bar(f"parameter space, {label}", len(rollouts)) as advance:
        shares = gradient_shares(
            trainee.student,
            session.teacher,
            rollouts,
            {name: ids for name, ids in sets.items() if name != REST},
            batches=config.gradients.batches,
            adam=trainee.adam,
            optimizer_state=trainee.state,
            **session.loss,
            tokens_per_forward=config.gradients.tokens_per_forward,
            autocast_dtype=torch.bfloat16 if bf16 else None,
            on_done=advance,
        )
    return shares.compared_with_tokens()
