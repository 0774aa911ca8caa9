"""``rocktokens find``: the rocks of a run, how sure that is, and how two runs compare.

1. ``find_run`` searches and describes: rocks.json and find.json. The command draws figures/ and prints
   one screen, or everything with ``--verbose``.
2. With ``--classes`` ``find_run_classes`` looks for interchangeable tokens too: classes.json.
3. ``--compare`` sets two searches side by side instead and writes nothing.
"""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from rocktokens.classes import TokenClasses
from rocktokens.cli.common import AsJson, Overrides, output, print_checkpoint_names, print_json, terminal
from rocktokens.errors import RocktokensError
from rocktokens.run_dir import RunDir

if TYPE_CHECKING:
    from rocktokens.traces.store import TraceStore

FEW, MANY = 10, 20
"""Rows of the table on one screen, and where everything is printed."""


def find(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="The folder of a run; with --compare two, or RUN@CHECKPOINT.")
    ],
    compare: Annotated[bool, typer.Option("--compare", help="Set the rocks of two runs side by side.")] = False,
    reference: Annotated[
        int | None, typer.Option(help="Checkpoint whose loss counts as left; default the last.")
    ] = None,
    baseline: Annotated[int | None, typer.Option(help="Checkpoint to compare with; default the first.")] = None,
    k: Annotated[str | None, typer.Option(help="How many types, or auto; default find.k of the run's config.")] = None,
    classes: Annotated[
        bool, typer.Option("--classes", help="Find interchangeable tokens too, and write RUN/classes.json.")
    ] = False,
    show: Annotated[
        int | None, typer.Option(min=1, help="Rows of the table; default 10, 20 with --verbose or --compare.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print every table: what was found, and what it rests on.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="duckdb, spark or sc://HOST:PORT; the result does not depend on it.")
    ] = "duckdb",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the engine; the result does not depend on it.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Find the types that hold the loss training left, say how sure that is, and write RUN/rocks.json.

    Example: [bold]rocktokens find runs/mine --k auto[/bold]

    Tokens that may stand for each other: [bold]rocktokens find runs/mine --classes[/bold]

    Two runs, or two checkpoints of one: [bold]rocktokens find runs/a runs/b@200 --compare[/bold]
    """
    chosen = [*(overrides or []), *([] if k is None else [f"find.k={k}"])]
    _refuse_misuse(len(runs), compare, classes)
    run = RunDir(runs[0]) if compare else RunDir(runs[0]).require()
    with terminal.status("loading"):
        from rocktokens.cli import find_tables as tables
        from rocktokens.knockout.knockout import with_known_verdicts
        from rocktokens.report.charts.figures import draw_figures
        from rocktokens.report.next_steps import next_steps, why_ungraded
        from rocktokens.rocks.classes import choice_is_of, find_run_classes, rows_with_tops, summarise_classes
        from rocktokens.rocks.compare import compare_runs
        from rocktokens.rocks.find import FindOptions, find_run, find_settings
        from rocktokens.traces.store import TraceStore

    options = FindOptions(reference, baseline, engine, threads)
    if compare:
        compared = compare_runs((runs[0], runs[1]), chosen, options, terminal)
        return print_json(compared.to_record()) if as_json else tables.print_comparison(compared, show or MANY)
    section, seed = find_settings(run, chosen)
    with run.lock():
        store = TraceStore(run, engine=engine, threads=threads)
        has_verdicts = _require_readable(store, makes_classes=classes)
        if classes:
            rows_with_tops(store, reference)
        found = find_run(run, section, seed, options, terminal)
        with terminal.status("drawing"):
            draw_figures(run, "find.json")
        linked = find_run_classes(run, section, options, terminal) if classes else None
    summaries = [] if linked is None else summarise_classes(store, linked, found.rocks)
    if as_json:
        record = {**asdict(found.rocks), "analysis": found.analysis.to_record()}
        if linked is not None:
            record |= {"classes": linked.to_record(), "class_summaries": [asdict(own) for own in summaries]}
        return print_json(record)
    print_checkpoint_names(run)
    rocks, analysis = with_known_verdicts(run, found.rocks) if has_verdicts else found.rocks, found.analysis
    if analysis.choice is not None and not choice_is_of(run, analysis.choice):
        terminal.note(f"the traces have the choice within other classes: run `rocktokens trace {run.config} --classes`")
        analysis = replace(analysis, choice=None)
    if verbose:
        tables.print_found(rocks, analysis, show or MANY)
    else:
        tables.print_screen(rocks, analysis.choice, show or FEW)
    if linked is not None:
        if verbose:
            tables.print_classes(linked, summaries, show or MANY)
        else:
            tables.print_short_classes(linked, summaries)
        output.print(f"classes: {run.classes}", soft_wrap=True, markup=False)
    tables.print_next(next_steps(run, rocks), why_ungraded(run))
    output.print(f"rocks: {run.rocks}", soft_wrap=True, markup=False)
    output.print(f"figures: {run.path / 'figures'}", soft_wrap=True, markup=False)


def _refuse_misuse(count: int, compare: bool, classes: bool) -> None:
    if compare and classes:
        raise RocktokensError("--classes looks at one run: leave out --compare, and name the run alone")
    if compare and count != 2:
        raise RocktokensError(f"--compare takes two runs, {count} given: name two, or one twice as RUN@CHECKPOINT")
    if not compare and count != 1:
        raise RocktokensError(f"find takes one run, {count} were given: add --compare to set two side by side")


def _require_readable(store: "TraceStore", makes_classes: bool) -> bool:
    """Refuse damaged records that are read once rocks are found, before anything is written.

    Returns False where verdicts have to be left out: knockout.json is damaged, and so are the rocks that a new
    knock-out would need.
    """
    from rocktokens.knockout.records import KnockoutSweep
    from rocktokens.types import RockSet

    run = store.run
    if not makes_classes and run.lists(run.classes.name):
        TokenClasses.load(run.verified(run.classes.name))
    if not run.lists(run.knockout.name):
        return True
    try:
        KnockoutSweep.load(run.verified(run.knockout.name))
    except RocktokensError as error:
        try:
            store.require_own(run.rocks.name, RockSet.load(run.verified(run.rocks.name)))
        except RocktokensError:
            terminal.note(f"the rocks are shown without verdicts, since {error}")
            return False
        raise
    return True
