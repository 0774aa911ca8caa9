"""The stage ``knockout``: what accuracy loses or gains when tokens may not be written (docs/method.md, section 6).

1. The rocks, or whatever else is asked for, are banned one by one (or all at once) on the prompts and with the random
   numbers of ``rocktokens evaluate``: without a ban, this is the accuracy it reports.
2. What is decoded is kept in the run as it comes. The same call goes on where it was interrupted, and another one finds
   what was decoded under the same conditions, whatever it bans.
3. The sweep goes into knockout.json. Its verdicts go into rocks.json if a student of the run wrote the answers.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from rocktokens.config import Config, evaluation_task, run_config
from rocktokens.errors import RocktokensError
from rocktokens.evaluation.evaluate import resolve_models
from rocktokens.knockout.bans import Tokens, Wanted, choose_bans, control_ban, ranked_rocks
from rocktokens.knockout.records import Ban, BanKey, Conditions, Knockout, KnockoutSweep, Mode, digest
from rocktokens.models.fingerprints import model_identity, vocabulary_sha256
from rocktokens.progress import SILENT, Progress
from rocktokens.run_dir import MAKERS, RunDir, derive_seed, package_versions
from rocktokens.types import Prompt, RockSet, RockToken

if TYPE_CHECKING:
    from rocktokens.knockout.journal import RunJournal
    from rocktokens.knockout.outcomes import Answering
    from rocktokens.models.load import LoadedModel
    from rocktokens.rollouts.encode import Sampling
    from rocktokens.tasks.base import Task

RuleName = Literal["method", "paper"]
"""Whose verdicts are written to rocks.json: ours, or the paper's."""
INPUTS = "knockout_inputs"
"""Entry of the manifest: knockout.json, whether of rocks, and a digest of what it was made from but for the model."""
DECODING_PACKAGES = ("rocktokens", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class BannedModel:
    """The model whose tokens are banned, known by what it is, not by where it lies."""

    name: str
    identity: str
    loaded: "LoadedModel"
    tokenizer_sha256: str


def knockout(
    run: RunDir,
    config: Config,
    wanted: Wanted | None = None,
    *,
    checkpoint: str = "last",
    mode: Mode = "exact",
    rule: RuleName = "method",
    progress: Progress = SILENT,
) -> KnockoutSweep:
    """Ban tokens at every decoding step; commit knockout.json, and the student's verdicts in rocks.json.

    Args:
        run: a run with rocks.json.
        config: of the run.
        wanted: what to ban; default: the first ``knockout.top`` rocks with ``knockout.labels``, one by one.
        checkpoint: a traced checkpoint by number or name, "first", "last", "teacher", "student", or any model.
        mode: when a ban is settled, as in ``knockout_sweep``.
        rule: whose verdicts go into rocks.json; knockout.json has both.
        progress: shows what is going on.
    """
    section = config.knockout
    wanted = wanted or Wanted(top=section.top, labels=section.labels or ())
    with run.lock():
        rocks = RockSet.load(run.verified(run.rocks.name))
        rocks.require_tokenizer(run.manifest().get("tokenizer_sha256", rocks.tokenizer_sha256))
        asked = ranked_rocks(rocks, wanted) if wanted.any_rocks else []
        answers = RunAnswers.open(run, config, checkpoint, progress)
        banned = answers.banned
        rocks.require_tokenizer(banned.tokenizer_sha256)
        earlier = earlier_traces(run, rocks.source, run.rocks.name)
        bans, left_out = _bans(run, config, rocks, wanted, asked, banned.loaded)
        sweep = answers.sweep(
            bans,
            config,
            mode,
            matched=0 if wanted.together else section.matched,
            rocks=rocks.ids.tolist(),
            columns=_columns(run, rocks, bans),
            progress=progress,
        )
        sweep = replace(sweep, warnings=[*sweep.warnings, *left_out, *earlier])
        entry = run.commit(run.knockout.name, sweep.save)
        prompts, sampling = answers.answering.prompts, answers.answering.sampling
        inputs = _inputs_digest(config, banned.identity, prompts, sampling)
        run.update_manifest(**{INPUTS: {"sha256": entry.sha256, "of_rocks": wanted.any_rocks, "digest": inputs}})
        if is_student(run, config, banned.identity):
            run.commit(run.rocks.name, with_verdicts(rocks, sweep, rule).save)
    return sweep


@dataclass(frozen=True, slots=True)
class RunAnswers:
    """The answers of a run's knock-out: who writes them, to which prompts, and where they are kept."""

    banned: BannedModel
    answering: "Answering"
    conditions: Conditions
    journal: "RunJournal"

    @classmethod
    def open(cls, run: RunDir, config: Config, checkpoint: str, progress: Progress) -> Self:
        """Load the model, and what was decoded under the same conditions before; under the caller's lock."""
        from rocktokens.tasks.base import ungraded_note

        task, prompts = _task_and_prompts(config)
        name, model = _resolve(run, config, checkpoint)
        if note := ungraded_note(task):
            progress.note(note)
        with progress.status("loading"):
            from rocktokens.knockout.journal import RunJournal
            from rocktokens.knockout.outcomes import Answering
            from rocktokens.rollouts.sampler import make_sampler

            banned = _load(run, config, name, model)
        sampling = _sampling(config)
        conditions = Conditions(**_conditions(config, banned, prompts, sampling))
        sampler = make_sampler(config, banned.loaded, threads=1 if conditions.device == "cpu" else None)
        answering = Answering(sampler, banned.loaded.tokenizer, task, prompts, sampling)
        return cls(banned, answering, conditions, RunJournal(run, conditions.digest))

    def sweep(
        self,
        bans: Sequence[Ban],
        config: Config,
        mode: Mode,
        *,
        matched: int = 0,
        rocks: Collection[int] = (),
        columns: Mapping[str, Mapping[int, float]] | None = None,
        progress: Progress = SILENT,
    ) -> KnockoutSweep:
        """Make the sweep over these bans; what it has decoded is kept, however it ends."""
        from rocktokens.knockout.sweep import SweepSettings, knockout_sweep
        from rocktokens.knockout.verdicts import VerdictRule

        section, own = config.knockout, self.answering
        rule = VerdictRule(section.alpha, section.epsilon, section.margin, derive_seed(config.run.seed, "knockout"))
        placebos = {"matched": matched, "never": section.never, "tolerance": section.tolerance}
        try:
            return knockout_sweep(
                own.sampler,
                own.tokenizer,
                own.task,
                own.prompts,
                bans,
                sampling=own.sampling,
                settings=SweepSettings(num_samples=section.num_samples, mode=mode, rule=rule, **placebos),
                rocks=rocks,
                columns=columns,
                model=self.banned.name,
                conditions=self.conditions,
                journal=self.journal,
                progress=progress,
            )
        finally:
            self.journal.flush()


def is_student(run: RunDir, config: Config, identity: str) -> bool:
    """Return whether this is a checkpoint of the run, or one of the students it was traced with.

    Only then are verdicts on it verdicts on the run's rocks and classes.
    """
    students = [*(str(run.checkpoint(step)) for step in run.checkpoints()), *config.trace.checkpoints]
    return identity in {model_identity(name, run) for name in students}


def earlier_traces(run: RunDir, source: Mapping[str, Any], name: str) -> list[str]:
    """Warn of a file found in traces that the run has replaced or extended since; refuse that of another run."""
    from rocktokens.traces.store import TraceStore

    store = TraceStore(run)
    is_current = not store.checkpoints or store.made(source, name)
    return [] if is_current else [f"{name} was found in other traces than the run has now: run `{MAKERS[name]}`"]


def _resolve(run: RunDir, config: Config, checkpoint: str) -> tuple[str, str]:
    """Return what the model is called and what to load."""
    models = resolve_models(run, config, [checkpoint])
    if len(models) != 1:
        steps = ", ".join(name.removeprefix("step ").removeprefix("checkpoint ") for name in models)
        raise RocktokensError(f"checkpoint {checkpoint!r} names {len(models)} models: give one, of {steps}")
    [named] = models.items()
    return named


def _load(run: RunDir, config: Config, name: str, model: str) -> BannedModel:
    from rocktokens.models.load import load_model
    from rocktokens.models.projections import lay_side_by_side

    loaded = load_model(model, config.models.dtype, config.models.device)
    lay_side_by_side(loaded.model)
    return BannedModel(name, model_identity(loaded.name, run), loaded, vocabulary_sha256(loaded.tokenizer.get_vocab()))


def _bans(
    run: RunDir, config: Config, rocks: RockSet, wanted: Wanted, asked: Sequence[RockToken], loaded: "LoadedModel"
) -> tuple[list[Ban], list[str]]:
    """Return what is wanted, and a warning where that includes rocks that end answers, which are left out."""
    from rocktokens.traces.store import TraceStore
    from rocktokens.traces.token_text import Vocabulary

    bannable = replace(rocks, tokens=[token for token in rocks.tokens if token.id not in loaded.eos_ids])
    tokens = Tokens(
        Vocabulary(getattr(loaded.tokenizer, "backend_tokenizer", None)),
        lambda text: loaded.tokenizer.encode(text, add_special_tokens=False),
    )
    bans = choose_bans(bannable, wanted, tokens)
    if wanted.controls:
        seed = derive_seed(config.run.seed, "knockout controls")
        bans.append(control_ban(TraceStore(run), bannable, bans[0], loaded.eos_ids, config.knockout.tolerance, seed))
    ends = [repr(token.text) for token in asked if token.id in loaded.eos_ids]
    return bans, [f"never banned, since no answer could end without them: {', '.join(ends)}"] if ends else []


def _conditions(config: Config, banned: BannedModel, prompts: Sequence[Prompt], sampling: "Sampling") -> dict[str, Any]:
    """Return what rollouts and grades depend on under any ban; not what is banned, nor how the change is judged."""
    from rocktokens.rollouts.encode import encode_prompt
    from rocktokens.tasks.graders import grader_identity

    loaded, template, longest = banned.loaded, sampling.chat_template, sampling.max_prompt_length
    rollouts = config.rollouts
    seen = [encode_prompt(loaded.tokenizer, prompt, template, longest).tolist() for prompt in prompts]
    return {
        **_conditions_without_model(config, banned.identity, prompts, sampling),
        **grader_identity(evaluation_task(config)),
        "tokenizer_sha256": banned.tokenizer_sha256,
        "config_sha256": digest(json.loads(loaded.model.config.to_json_string())),
        "eos_ids": sorted(loaded.eos_ids),
        "versions": package_versions(DECODING_PACKAGES),
        "device": f"vllm, {rollouts.noise} noise" if rollouts.engine == "vllm" else loaded.model.device.type,
        # Prompts as the model sees them, template included, and their answers.
        "prompts_sha256": digest([[prompt.id, prompt.answer, ids] for prompt, ids in zip(prompts, seen, strict=True)]),
    }


def _conditions_without_model(
    config: Config, identity: str, prompts: Sequence[Prompt], sampling: "Sampling"
) -> dict[str, Any]:
    """Return those of the conditions that are known before the model is loaded."""
    return {
        "model": identity,
        "dtype": config.models.dtype,
        "task": evaluation_task(config).model_dump(mode="json"),
        "num_prompts": len(prompts),
        "num_samples": config.knockout.num_samples,
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "batch_size": config.rollouts.batch_size,
        "seed": config.run.seed,
    }


def _inputs_digest(config: Config, identity: str, prompts: Sequence[Prompt], sampling: "Sampling") -> str:
    """Digest all that grades depend on and that is known before the model is loaded, prompts by their content."""
    from rocktokens.tasks.graders import grader_identity

    return digest(
        {
            **_conditions_without_model(config, identity, prompts, sampling),
            **grader_identity(evaluation_task(config)),
            "chat_template": sampling.chat_template,
            "prompts": [_content(prompt) for prompt in prompts],
        }
    )


def _content(prompt: Prompt) -> list[Any]:
    """Return what a prompt says; a conversation is longer by what comes before the last message."""
    earlier = [[own.role, own.content] for own in prompt.messages[:-1]]
    return [prompt.id, prompt.text, prompt.answer, *([earlier] if earlier else [])]


def _sampling(config: Config) -> "Sampling":
    """Return how ``rocktokens evaluate`` samples, at the knock-out's own temperature if it has one."""
    from rocktokens.rollouts.encode import Sampling

    own, other = config.knockout.temperature, config.evaluation.temperature
    return Sampling.of(config.rollouts, derive_seed(config.run.seed, "evaluation"), other if own is None else own)


def _task_and_prompts(config: Config) -> "tuple[Task, list[Prompt]]":
    from rocktokens.tasks import make_task
    from rocktokens.tasks.base import prompts_to_grade

    task = make_task(evaluation_task(config))
    seed = derive_seed(config.run.seed, "evaluation prompts")
    return task, prompts_to_grade(task, config.knockout.num_prompts, seed)


def is_current(run: RunDir, config: Config, checkpoint: str = "last") -> bool:
    """Return whether ``knockout(run, config, checkpoint=checkpoint)`` would find what knockout.json and rocks.json say.

    Versions of packages and the device are not compared.
    """
    [entry] = run.files(run.knockout.name) or [None]
    if entry is None:
        return False
    rocks, sweep = RockSet.load(run.verified(run.rocks.name)), KnockoutSweep.load(run.verify(entry))
    section = config.knockout
    made_under = sweep.settings.conditions
    if made_under is None:
        return False
    [model] = resolve_models(run, config, [checkpoint]).values()
    _, prompts = _task_and_prompts(config)
    inputs = {
        "sha256": entry.sha256,
        "of_rocks": True,
        "digest": _inputs_digest(config, model_identity(model, run), prompts, _sampling(config)),
    }
    settings = {
        **section.model_dump(include={"alpha", "epsilon", "margin", "matched", "never", "tolerance"}),
        "mode": "exact",
        "interval": "score",
    }
    bannable = replace(rocks, tokens=[token for token in rocks.tokens if token.id not in made_under.eos_ids])
    wanted = ranked_rocks(bannable, Wanted(top=section.top, labels=section.labels or ()))
    return (
        run.manifest().get(INPUTS) == inputs
        and settings.items() <= asdict(sweep.settings).items()
        and [own.ban.key for own in sweep.of_role("tested")] == [BanKey((token.id,)) for token in wanted]
        and has_verdicts(rocks, sweep, "method")
    )


def _columns(run: RunDir, rocks: RockSet, bans: Sequence[Ban]) -> dict[str, dict[int, float]]:
    """Return what the trace the rocks were found in says of the types that are banned alone."""
    from rocktokens.knockout.correlates import type_columns
    from rocktokens.traces.store import TraceStore

    store, reference = TraceStore(run), rocks.criterion.get("reference")
    ids = [ban.ids[0] for ban in bans if ban.is_one_type]
    if reference not in store.checkpoints or not ids:
        return {}
    columns = type_columns(store.table(reference), ids)
    return {name: dict(zip(ids, values.tolist(), strict=True)) for name, values in columns.items()}


def with_verdicts(rocks: RockSet, sweep: KnockoutSweep, rule: RuleName) -> RockSet:
    """Return the rocks with the verdicts on those that were banned alone; the others as they were."""
    tested = _tested_rocks(rocks, sweep)
    if not tested:
        return rocks

    def judged(token: RockToken) -> RockToken:
        if (found := tested.get(token.id)) is None:
            return token
        verdict = found.paper_verdict if rule == "paper" else found.verdict
        return replace(token, verdict=verdict, delta=found.delta, delta_interval=found.interval)

    source = {**rocks.source, "verdicts": _provenance(sweep, rule)}
    return replace(rocks, tokens=[judged(token) for token in rocks.tokens], source=source)


def with_known_verdicts(run: RunDir, rocks: RockSet) -> RockSet:
    """Return rocks with the verdicts of the run's knockout.json, as they are without one by a student of the run."""
    if not run.lists(run.knockout.name):
        return rocks
    sweep = KnockoutSweep.load(run.verified(run.knockout.name))
    made_under = sweep.settings.conditions
    try:
        is_own = made_under is not None and is_student(run, run_config(run), made_under.model)
    except RocktokensError:
        return rocks
    return with_verdicts(rocks, sweep, "method") if is_own else rocks


def has_verdicts(rocks: RockSet, sweep: KnockoutSweep, rule: RuleName) -> bool:
    """Return whether the verdicts of rocks are those of this sweep by this rule."""
    return bool(_tested_rocks(rocks, sweep)) and rocks.source.get("verdicts") == _provenance(sweep, rule)


def _provenance(sweep: KnockoutSweep, rule: RuleName) -> dict[str, Any]:
    names = ("model", "n_prompts", "num_samples", "temperature", "mode", "seed")
    return {**{name: getattr(sweep.settings, name) for name in names}, "rule": rule}


def _tested_rocks(rocks: RockSet, sweep: KnockoutSweep) -> dict[int, Knockout]:
    """Return by id the rocks that were banned alone."""
    alone = {own.ban.ids[0]: own for own in sweep.of_role("tested") if own.ban.is_one_type}
    return {token_id: alone[token_id] for token_id in rocks.ids.tolist() if token_id in alone}
