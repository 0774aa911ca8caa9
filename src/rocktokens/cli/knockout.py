"""``rocktokens knockout``: what accuracy loses or gains when tokens may not be written (METHOD 6).

1. The rocks, or whatever else is asked for, are banned one by one (or all at once) on the prompts and with the random
   numbers of ``rocktokens evaluate``: without a ban, this is the accuracy it reports.
2. What is decoded is kept in the run as it comes. The same command goes on where it was interrupted, and another one
   finds what was decoded under the same conditions, whatever it bans.
3. The sweep goes into knockout.json; the verdicts go into rocks.json where a checkpoint of the run wrote the answers.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rocktokens.cli.common import AsJson, Overrides, RunPath, notes, output, print_json, terminal
from rocktokens.config import Config, evaluation_task, run_config
from rocktokens.errors import RocktokensError
from rocktokens.evaluation.evaluate import resolve_models
from rocktokens.knockout.bans import Tokens, Wanted, choose_bans, control_ban, ranked_rocks
from rocktokens.knockout.records import Ban, Knockout, KnockoutSweep
from rocktokens.run_dir import RunDir, derive_seed, package_versions
from rocktokens.types import Prompt, RockSet, RockToken

if TYPE_CHECKING:
    from rocktokens.knockout.sweep import Mode
    from rocktokens.models.load import LoadedModel
    from rocktokens.tasks.base import Task

RuleName = Literal["method", "paper"]
DECODING_PACKAGES = ("rocktokens", "torch", "transformers")


def knockout(
    run_path: RunPath,
    top: Annotated[int | None, typer.Option(help="Ban the first N rocks; default knockout.top of the config.")] = None,
    category: Annotated[list[str] | None, typer.Option(help="Only rocks of this category; may be repeated.")] = None,
    token_id: Annotated[list[int] | None, typer.Option("--id", help="Ban this type; may be repeated.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="Ban the type with this text; may be repeated.")] = None,
    together: Annotated[bool, typer.Option("--together", help="Ban all of them at once, as one set.")] = False,
    controls: Annotated[
        bool, typer.Option("--controls", help="With --together: another set, as frequent, of types that are no rocks.")
    ] = False,
    checkpoint: Annotated[str, typer.Option(help="A step of the run, `teacher`, `student`, or any model.")] = "last",
    greedy: Annotated[bool, typer.Option("--greedy", help="Temperature 0.")] = False,
    samples: Annotated[int | None, typer.Option(help="Answers per prompt.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts to answer.")] = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Stop each ban as soon as a test that keeps alpha can tell.")
    ] = False,
    curtail: Annotated[
        bool, typer.Option("--curtail", help="Stop each ban when its verdict is certain; the change is then not known.")
    ] = False,
    rule: Annotated[
        RuleName, typer.Option(help="Whose verdicts are shown and go into rocks.json; both are always counted.")
    ] = "method",
    show: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 30,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Ban tokens at every decoding step, measure what that does to accuracy, and write the verdicts to RUN/rocks.json.

    Example: [bold]rocktokens knockout runs/mine --top 50 --greedy[/bold]

    Some types, or a whole category at once: [bold]rocktokens knockout runs/mine --text So --text Wait[/bold],
    [bold]rocktokens knockout runs/mine --category digit --together[/bold]
    """
    chosen = {"top": top, "num_samples": samples, "num_prompts": prompts, "temperature": 0 if greedy else None}
    settings = [f"knockout.{name}={value}" for name, value in chosen.items() if value is not None]
    run = RunDir(run_path)
    config = run_config(run, [*(overrides or []), *settings])
    if controls and not together:
        raise RocktokensError("--controls is given without --together: a set of controls stands beside a set of rocks")
    wanted = Wanted(
        top=config.knockout.top,
        categories=category or (),
        ids=token_id or (),
        texts=text or (),
        rocks_too=top is not None or bool(category),
        together=together,
    )
    sweep = run_knockout(run, config, wanted, checkpoint, _mode(sequential, curtail), rule, controls=controls)
    if as_json:
        return print_json(asdict(sweep))
    from rocktokens.cli.knockout_tables import print_sweep

    print_sweep(sweep, rule, show)
    output.print(f"everything: {run.knockout}", soft_wrap=True, markup=False)
    rocks = RockSet.load(run.rocks)
    if _tested_rocks(rocks, sweep) and rocks.source.get("verdicts") == provenance(sweep, rule):
        output.print(f"verdicts of single rocks: {run.rocks}", soft_wrap=True, markup=False)


def _mode(sequential: bool, curtail: bool) -> "Mode":
    if sequential and curtail:
        raise RocktokensError("--sequential and --curtail are two ways to stop early: give one of them")
    return "sequential" if sequential else "curtailed" if curtail else "exact"


@dataclass(frozen=True, slots=True)
class _Subject:
    """The model whose tokens are banned."""

    name: str
    identity: str
    loaded: "LoadedModel"
    tokenizer_sha256: str

    @classmethod
    def of(cls, run: RunDir, name: str, loaded: "LoadedModel") -> "_Subject":
        """The model by what it is, not by where it lies."""
        from rocktokens.models.fingerprints import model_identity, vocabulary_sha256

        return cls(name, model_identity(loaded.name, run), loaded, vocabulary_sha256(loaded.tokenizer.get_vocab()))


def run_knockout(
    run: RunDir,
    config: Config,
    wanted: Wanted,
    checkpoint: str = "last",
    mode: "Mode" = "exact",
    rule: RuleName = "method",
    *,
    controls: bool = False,
) -> KnockoutSweep:
    """Ban what is wanted, with progress bars; commit knockout.json and the student's verdicts in rocks.json."""
    with notes.status("loading"):
        from rocktokens.knockout.verdicts import Rule
        from rocktokens.models.load import load_model
        from rocktokens.tasks import make_task

    section, seed = config.knockout, config.run.seed
    judge = Rule(section.alpha, section.epsilon, section.margin, section.resamples, derive_seed(seed, "knockout"))
    with run.lock():
        rocks = RockSet.load(run.rocks)
        name, model = _one_model(run, config, checkpoint)
        task = make_task(evaluation_task(config))
        prompts = task.prompts(section.num_prompts, derive_seed(seed, "evaluation prompts"))
        with notes.status("loading"):
            loaded = load_model(model, config.models.dtype, config.models.device)
        subject = _Subject.of(run, name, loaded)
        rocks.require_tokenizer(subject.tokenizer_sha256)
        bans = _bans(run, config, rocks, wanted, loaded, controls=controls)
        sweep = _sweep(
            run,
            config,
            subject,
            task,
            prompts,
            bans,
            rule=judge,
            mode=mode,
            matched=0 if wanted.together else section.matched,
            rocks=rocks.ids.tolist(),
            columns=_columns(run, rocks, bans),
        )
        sweep = replace(sweep, warnings=[*sweep.warnings, *_left_out(rocks, wanted, loaded.eos_ids)])
        run.commit(run.knockout.name, sweep.save)
        if _is_student(run, config, subject):
            run.commit(run.rocks.name, with_verdicts(rocks, sweep, rule).save)
    return sweep


def _sweep(
    run: RunDir,
    config: Config,
    subject: _Subject,
    task: "Task",
    prompts: Sequence[Prompt],
    bans: Sequence[Ban],
    **design: Any,
) -> KnockoutSweep:
    """The sweep under the conditions of the config; ``design`` goes to ``knockout_sweep`` as it is."""
    from rocktokens.knockout.journal import RunJournal
    from rocktokens.knockout.sweep import knockout_sweep
    from rocktokens.rollouts.sampler import make_sampler

    section, rollouts = config.knockout, config.rollouts
    conditions = _conditions(config, subject, prompts)
    journal = RunJournal(run, _digest(conditions))
    try:
        return knockout_sweep(
            make_sampler(config, subject.loaded, threads=1 if conditions["device"] == "cpu" else None),
            subject.loaded.tokenizer,
            task,
            prompts,
            bans,
            num_samples=section.num_samples,
            temperature=conditions["temperature"],
            max_new_tokens=rollouts.max_completion_length,
            seed=derive_seed(config.run.seed, "evaluation"),
            chat_template=rollouts.chat_template,
            max_prompt_length=rollouts.max_prompt_length,
            never=section.never,
            tolerance=section.tolerance,
            settings={"model": subject.name, "conditions": conditions},
            journal=journal,
            progress=terminal,
            **design,
        )
    finally:
        journal.flush()


def _one_model(run: RunDir, config: Config, checkpoint: str) -> tuple[str, str]:
    """What the model is called, and what to load."""
    models = resolve_models(run, config, [checkpoint])
    if len(models) != 1:
        steps = ", ".join(name.removeprefix("step ") for name in models)
        raise RocktokensError(f"--checkpoint {checkpoint} names {len(models)} models: give one, of {steps}")
    [named] = models.items()
    return named


def _bans(
    run: RunDir, config: Config, rocks: RockSet, wanted: Wanted, loaded: "LoadedModel", *, controls: bool
) -> list[Ban]:
    """What is wanted; a rock that ends answers cannot be banned and is left out."""
    from rocktokens.traces.store import TraceStore
    from rocktokens.traces.token_text import Vocabulary

    bannable = replace(rocks, tokens=[token for token in rocks.tokens if token.id not in loaded.eos_ids])
    tokens = Tokens(
        Vocabulary(getattr(loaded.tokenizer, "backend_tokenizer", None)),
        lambda text: loaded.tokenizer.encode(text, add_special_tokens=False),
    )
    bans = choose_bans(bannable, wanted, tokens)
    if controls:
        seed = derive_seed(config.run.seed, "knockout controls")
        bans.append(control_ban(TraceStore(run), bannable, bans[0], loaded.eos_ids, config.knockout.tolerance, seed))
    return bans


def _left_out(rocks: RockSet, wanted: Wanted, end_ids: Collection[int]) -> list[str]:
    """What to say of rocks that were asked for and cannot be banned."""
    asked = ranked_rocks(rocks, wanted) if wanted.any_rocks else []
    ends = [repr(token.text) for token in asked if token.id in end_ids]
    return [f"never banned, since no answer could end without them: {', '.join(ends)}"] if ends else []


def _conditions(config: Config, subject: _Subject, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What rollouts and their grades depend on under any ban; not what is banned, nor how the change is judged."""
    section, rollouts = config.knockout, config.rollouts
    wanted = (section.temperature, config.evaluation.temperature, rollouts.temperature)
    return {
        "model": subject.identity,
        "tokenizer_sha256": subject.tokenizer_sha256,
        "config_sha256": _digest(json.loads(subject.loaded.model.config.to_json_string())),
        "eos_ids": sorted(subject.loaded.eos_ids),
        "versions": package_versions(DECODING_PACKAGES),
        "dtype": config.models.dtype,
        "device": subject.loaded.model.device.type,
        "task": evaluation_task(config).model_dump(mode="json"),
        "prompts_sha256": _prompts_sha256(config, subject, prompts),
        "num_prompts": len(prompts),
        "num_samples": section.num_samples,
        "temperature": next(temperature for temperature in wanted if temperature is not None),
        "max_new_tokens": rollouts.max_completion_length,
        "batch_size": rollouts.batch_size,
        "seed": config.run.seed,
    }


def _prompts_sha256(config: Config, subject: _Subject, prompts: Sequence[Prompt]) -> str:
    """Over the prompts as the model sees them, template included, and their answers."""
    from rocktokens.rollouts.encode import encode_prompt

    rollouts = config.rollouts
    seen = [
        encode_prompt(subject.loaded.tokenizer, prompt, rollouts.chat_template, rollouts.max_prompt_length).tolist()
        for prompt in prompts
    ]
    return _digest([[prompt.id, prompt.answer, ids] for prompt, ids in zip(prompts, seen, strict=True)])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _columns(run: RunDir, rocks: RockSet, bans: Sequence[Ban]) -> dict[str, dict[int, float]]:
    """What the trace the rocks were found in says of the types that are banned alone."""
    from rocktokens.knockout.correlates import type_columns
    from rocktokens.traces.store import TraceStore

    store, reference = TraceStore(run), rocks.criterion.get("reference")
    ids = [ban.ids[0] for ban in bans if len(ban.ids) == 1]
    if reference not in store.checkpoints or not ids:
        return {}
    columns = type_columns(store.table(reference), ids)
    return {name: dict(zip(ids, values.tolist(), strict=True)) for name, values in columns.items()}


def _is_student(run: RunDir, config: Config, subject: _Subject) -> bool:
    """Whether the rocks are this model's: it is a checkpoint of the run, or one of the students it was traced with."""
    from rocktokens.models.fingerprints import model_identity

    own = [*(str(run.checkpoint(step)) for step in run.checkpoints()), *config.trace.checkpoints]
    return subject.identity in {model_identity(name, run) for name in own}


def provenance(sweep: KnockoutSweep, rule: RuleName) -> dict[str, Any]:
    """Where verdicts in rocks.json come from."""
    names = ("model", "n_prompts", "num_samples", "temperature", "mode", "seed")
    return {**{name: sweep.settings[name] for name in names}, "rule": rule}


def with_verdicts(rocks: RockSet, sweep: KnockoutSweep, rule: RuleName) -> RockSet:
    """The rocks with what was found out about those that were banned alone; the others as they were."""
    tested = _tested_rocks(rocks, sweep)
    if not tested:
        return rocks
    return replace(
        rocks,
        tokens=[_judged(token, tested.get(token.id), rule) for token in rocks.tokens],
        source={**rocks.source, "verdicts": provenance(sweep, rule)},
    )


def _tested_rocks(rocks: RockSet, sweep: KnockoutSweep) -> dict[int, Knockout]:
    """By id, the rocks that were banned alone."""
    ids = set(rocks.ids.tolist())
    alone = [own for own in sweep.of_role("tested") if len(own.ban.ids) == 1]
    return {own.ban.ids[0]: own for own in alone if own.ban.ids[0] in ids}


def _judged(token: RockToken, found: Knockout | None, rule: RuleName) -> RockToken:
    if found is None:
        return token
    verdict = found.paper_verdict if rule == "paper" else found.verdict
    return replace(token, verdict=verdict, delta=found.delta, delta_interval=found.interval)
