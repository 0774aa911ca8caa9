"""``rocktokens find``: the rocks of a run, how sure that is, and how two runs compare.

1. ``find_run`` searches and describes: rocks.json and find.json. The command draws figures/ and prints.
2. ``--compare`` sets two searches side by side instead and writes nothing.
"""

from dataclasses import asdict
from typing import Annotated

import typer

from rocktokens.cli.common import AsJson, Overrides, output, print_json, terminal
from rocktokens.errors import RocktokensError
from rocktokens.run_dir import RunDir


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
    show: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 20,
    engine: Annotated[str, typer.Option(help="duckdb, or spark; the result does not depend on it.")] = "duckdb",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the engine; the result does not depend on it.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Find the types that hold the loss training left, say how sure that is, and write RUN/rocks.json.

    Example: [bold]rocktokens find runs/mine --k auto[/bold]

    Two runs, or two checkpoints of one: [bold]rocktokens find runs/a runs/b@200 --compare[/bold]
    """
    with terminal.status("loading"):
        from rocktokens.cli.find_tables import print_comparison, print_found
        from rocktokens.report.charts.figures import draw_figures
        from rocktokens.rocks.compare import compare_runs
        from rocktokens.rocks.find import FindOptions, find_run, find_settings

    chosen = [*(overrides or []), *([] if k is None else [f"find.k={k}"])]
    options = FindOptions(reference, baseline, engine, threads)
    if compare:
        if len(runs) != 2:
            raise RocktokensError(
                f"--compare takes two runs, {len(runs)} given: name two, or one twice as RUN@CHECKPOINT"
            )
        compared = compare_runs((runs[0], runs[1]), chosen, options, terminal)
        return print_json(compared.to_record()) if as_json else print_comparison(compared, show)
    if len(runs) != 1:
        raise RocktokensError(f"find takes one run, {len(runs)} were given: add --compare to set two side by side")
    run = RunDir(runs[0]).require()
    section, seed = find_settings(run, chosen)
    with run.lock():
        found = find_run(run, section, seed, options, terminal)
        with terminal.status("drawing"):
            draw_figures(run, "find.json")
    if as_json:
        return print_json({**asdict(found.rocks), "analysis": found.analysis.to_record()})
    print_found(found.rocks, found.analysis, show)
    output.print(f"rocks: {run.rocks}", soft_wrap=True, markup=False)
    output.print(f"figures: {run.path / 'figures'}", soft_wrap=True, markup=False)
