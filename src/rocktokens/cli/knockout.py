"""``rocktokens knockout``: what accuracy loses or gains when tokens may not be written."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from rocktokens.classes import TokenClasses
from rocktokens.cli.common import AsJson, Overrides, RunPath, output, print_json, terminal
from rocktokens.config import Config, run_config
from rocktokens.errors import RocktokensError
from rocktokens.knockout.bans import Wanted
from rocktokens.knockout.classes import knockout_classes
from rocktokens.knockout.knockout import RuleName, has_verdicts
from rocktokens.knockout.knockout import knockout as ban_tokens
from rocktokens.knockout.records import Mode
from rocktokens.run_dir import RunDir
from rocktokens.types import RockSet


def knockout(
    run_path: RunPath,
    top: Annotated[int | None, typer.Option(help="Ban the first N rocks; default knockout.top of the config.")] = None,
    category: Annotated[list[str] | None, typer.Option(help="Only rocks of this category; may be repeated.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Only rocks with this label, such as stuck; may be repeated.")
    ] = None,
    token_id: Annotated[list[int] | None, typer.Option("--id", help="Ban this type; may be repeated.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="Ban the type with this text; may be repeated.")] = None,
    together: Annotated[bool, typer.Option("--together", help="Ban all of them at once, as one set.")] = False,
    controls: Annotated[
        bool, typer.Option("--controls", help="With --together: another set, as frequent, of types that are no rocks.")
    ] = False,
    classes: Annotated[
        bool,
        typer.Option(
            "--classes", help="Test whether the tokens of each class of RUN/classes.json are interchangeable."
        ),
    ] = False,
    checkpoint: Annotated[str, typer.Option(help="By number or name, `teacher`, `student`, or any model.")] = "last",
    greedy: Annotated[bool, typer.Option("--greedy", help="Temperature 0.")] = False,
    samples: Annotated[int | None, typer.Option(help="Answers per prompt.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts to answer.")] = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Stop early using a group-sequential test (controls α).")
    ] = False,
    curtail: Annotated[
        bool, typer.Option("--curtail", help="Stop a ban once its verdict is certain; its effect size stays unknown.")
    ] = False,
    rule: Annotated[
        RuleName, typer.Option(help="Whose verdicts are shown and go into rocks.json; both are always counted.")
    ] = "method",
    show: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 30,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Print also the cost, all counts of verdicts, the placebos and correlations."),
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Ban tokens at every decoding step and measure what that does to accuracy.

    The verdicts go into RUN/rocks.json, those of [bold]--classes[/bold] into RUN/classes.json.

    Example: [bold]rocktokens knockout runs/mine --top 50 --greedy[/bold]

    Some types, or a whole category at once: [bold]rocktokens knockout runs/mine --text So --text Wait[/bold],
    [bold]rocktokens knockout runs/mine --category digit --together[/bold]

    Classes of interchangeable tokens: [bold]rocktokens knockout runs/mine --classes --prompts 500[/bold]
    """
    chosen = {"top": top, "num_samples": samples, "num_prompts": prompts, "temperature": 0 if greedy else None}
    settings = [f"knockout.{name}={value}" for name, value in chosen.items() if value is not None]
    settings += [f"knockout.labels={json.dumps(label)}"] if label else []
    run = RunDir(run_path)
    config = run_config(run, [*(overrides or []), *settings])
    if sequential and curtail:
        raise RocktokensError("--sequential and --curtail are two ways to stop early: give one of them")
    mode: Mode = "sequential" if sequential else "curtailed" if curtail else "exact"
    if classes:
        others = {"top": top, "category": category, "label": label, "id": token_id, "text": text}
        others |= {"together": together, "controls": controls, "rule": rule == "paper"}
        if given := [f"--{name}" for name, value in others.items() if value not in (None, False)]:
            raise RocktokensError(
                f"--classes tests the classes of RUN/classes.json and nothing else: leave out {given[0]}"
            )
        return _test_classes(run, config, checkpoint, mode, show, verbose, as_json)
    wanted = Wanted(
        top=config.knockout.top,
        categories=category or (),
        labels=config.knockout.labels or (),
        ids=token_id or (),
        texts=text or (),
        rocks_too=top is not None or bool(category or label),
        together=together,
        controls=controls,
    )
    sweep = ban_tokens(run, config, wanted, checkpoint=checkpoint, mode=mode, rule=rule, progress=terminal)
    if as_json:
        return print_json(asdict(sweep))
    from rocktokens.cli.knockout_tables import print_bans, print_sweep

    (print_sweep if verbose else print_bans)(sweep, rule, show)
    output.print(f"everything: {run.knockout}", soft_wrap=True, markup=False)
    if has_verdicts(RockSet.load(run.verified(run.rocks.name)), sweep, rule):
        output.print(f"verdicts of single rocks: {run.rocks}", soft_wrap=True, markup=False)


def _test_classes(
    run: RunDir, config: Config, checkpoint: str, mode: Mode, show: int, verbose: bool, as_json: bool
) -> None:
    found = knockout_classes(run, config, checkpoint=checkpoint, mode=mode, progress=terminal)
    if as_json:
        return print_json(asdict(found))
    from rocktokens.cli.class_tables import print_class_sweep

    print_class_sweep(found, show, verbose)
    output.print(f"everything: {run.knockout_classes}", soft_wrap=True, markup=False)
    if TokenClasses.load(run.verified(run.classes.name)).classes == found.classes:
        output.print(f"classes and their verdicts: {run.classes}", soft_wrap=True, markup=False)
