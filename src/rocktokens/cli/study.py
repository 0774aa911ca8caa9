"""``rocktokens study``: arms × seeds over one base config, trained, evaluated and compared."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rocktokens.cli.common import AsJson, Overrides, output, print_json, terminal
from rocktokens.cli.tables import print_table
from rocktokens.display.numbers import byte_size, duration
from rocktokens.display.table import Column, Table, number, text
from rocktokens.display.text import printable
from rocktokens.studies.config import load_study
from rocktokens.studies.forecast import Forecast, RunForecast, forecast

StudyPath = Annotated[
    Path, typer.Argument(metavar="STUDY.TOML", help="The config of the study, or a recipe's name.", show_default=False)
]


def study(
    path: StudyPath,
    plan: Annotated[bool, typer.Option("--plan", help="List the runs and what is left of them; run nothing.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Train several weight policies alike on several seeds, and say which is better and how sure that is.

    Interrupted, the same command continues where it was. Arms, seeds and draws may be added later. Comparisons at equal
    wall-clock time use the seconds each run took: they mean something only if all ran under the same load,
    uninterrupted.

    Example: [bold]rocktokens study pebbles-paper --set study.seeds=[0,1][/bold]
    """
    config = load_study(path, overrides)
    if plan:
        planned = forecast(config, terminal)
        return print_json(asdict(planned)) if as_json else print_forecast(planned)
    with terminal.status("loading"):
        from rocktokens.cli.study_tables import print_study
        from rocktokens.report.charts.figures import draw_stale
        from rocktokens.studies.study import run_study
    result = run_study(config, terminal, draw_stale)
    if as_json:
        return print_json({"directory": config.study.directory, **result.to_record()})
    print_study(result)
    output.print(f"everything: {config.study.directory}/study.json", soft_wrap=True, markup=False)
    output.print(f"figures: {config.study.directory}/figures", soft_wrap=True, markup=False)


def print_forecast(planned: Forecast) -> None:
    """Print one row per run, and the total."""
    print_table(forecast_table(planned.runs))
    source = "the first of study.compare" if planned.primary_is_default else "study.primary"
    primary = printable(", ".join(f"{first} vs {second}" for first, second in planned.primary))
    for line in (
        f"primary pairs ({source}), corrected together: {primary}",
        planned.interval_width,
        *(f"warning: {sentence}" for sentence in planned.warnings),
    ):
        output.print(line, highlight=False, markup=False, soft_wrap=True)
    if not planned.steps_left and not planned.answers_left:
        return output.print("nothing is left to train or to evaluate")
    time = "time unknown" if planned.seconds_left is None else f"about {duration(planned.seconds_left)}"
    scout = ", after the scout" if planned.scout_left else ""
    output.print(
        f"left: {planned.steps_left:,} steps and {planned.answers_left:,} evaluation answers{scout}; {time}, "
        f"{planned.processes} runs at a time"
    )
    if planned.seconds_left is None:
        output.print("Run `rocktokens check` on the base config to see why time could not be estimated.")
    if planned.disk_bytes is not None:
        output.print(f"on the disk the whole study takes at most {byte_size(planned.disk_bytes)}")


def forecast_table(runs: Sequence[RunForecast]) -> Table:
    """Make the table of the runs of a study, and what is left of each."""
    columns: list[Column[RunForecast]] = [
        Column("arm", lambda own: text(own.arm)),
        Column("seed", lambda own: number(own.seed, str)),
        Column("draw", lambda own: number(own.draw)),
        Column("steps", lambda own: number(own.steps)),
        Column("left", lambda own: number(own.steps_left)),
        Column("evaluations", lambda own: number(own.evaluations)),
    ]
    return Table.of("runs", columns, runs, "runs of the study")
