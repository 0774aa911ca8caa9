"""``rocktokens study``: arms × seeds over one base config, trained, evaluated and compared (METHOD 7).

1. The plan: one ordinary run for every arm, seed and draw, under STUDY/arms. ``--plan`` shows it and stops.
2. The rocks the arms use (``study_scout``), then the runs, several at a time, each resumed where it was.
3. The comparison: tables, verdict lines, study.json and figures.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rocktokens.cli.common import AsJson, Overrides, notes, output, print_json, progress
from rocktokens.run_dir import RunDir
from rocktokens.studies.config import StudyConfig, dump_study, load_study
from rocktokens.studies.forecast import describe_plan, print_plan
from rocktokens.studies.plan import Job, plan_jobs, require_unchanged
from rocktokens.studies.records import StudyResult

StudyPath = Annotated[Path, typer.Argument(metavar="STUDY.TOML", help="The config of the study.", show_default=False)]


def study(
    path: StudyPath,
    plan: Annotated[bool, typer.Option("--plan", help="List the runs and what is left of them; run nothing.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Train several weight policies alike, on several seeds, and say which is better, by how much, and how sure.

    Interrupted, the same command goes on where it was. Arms, seeds and draws may be added later. Comparisons at equal
    wall-clock use the seconds each run took: they mean something only if all ran under the same load, uninterrupted.

    Example: [bold]rocktokens study recipes/pebbles-paper.toml --set study.seeds=[0,1][/bold]
    """
    config = load_study(path, overrides)
    if plan:
        record = describe_plan(config)
        return print_json(record) if as_json else print_plan(record)
    result = run_study(config)
    if as_json:
        return print_json({"directory": config.study.directory, **result.to_record()})
    from rocktokens.cli.study_tables import print_study

    print_study(result)
    output.print(f"everything: {config.study.directory}/study.json", soft_wrap=True, markup=False)
    output.print(f"figures: {config.study.directory}/figures", soft_wrap=True, markup=False)


def run_study(config: StudyConfig) -> StudyResult:
    """All stages with progress bars; commit study.toml, study.json and the figures."""
    with notes.status("loading"):
        from rocktokens.studies.inputs import record_inputs
        from rocktokens.studies.preflight import require_policies, require_ready, student_vocabulary
        from rocktokens.studies.runner import conclude, unfinished
        from rocktokens.studies.scout import prepare_files

    run, jobs = RunDir(config.study.directory), plan_jobs(config)
    require_unchanged(config, jobs)
    is_finished = not unfinished(jobs)
    if not is_finished:
        with notes.status("looking at data, models and policies"):
            require_ready(config)
    with run.lock():
        if not is_finished:
            record_inputs(config, run)
        prepare_files(config, run)
        if not is_finished:
            require_policies(jobs, student_vocabulary(config))
        run.commit_text("study.toml", dump_study(config))
        _finish(config, jobs)
        result = conclude(config, run, jobs)
        _draw(run, result)
    return result


def _finish(config: StudyConfig, jobs: Sequence[Job]) -> None:
    """Train and evaluate what is left, under one bar over all of it."""
    from rocktokens.studies.runner import finish_jobs, unfinished

    left = unfinished(jobs)
    if not left:
        return
    with progress() as bars:
        done = len(jobs) - len(left)
        bar = bars.add_task(f"{done} of {len(jobs)} runs done", total=sum(job.work for job in left))

        def count(_job: Job) -> None:
            nonlocal done
            done += 1
            bars.update(bar, description=f"{done} of {len(jobs)} runs done")

        finish_jobs(config, left, lambda work: bars.update(bar, advance=work), count)


def _draw(run: RunDir, result: StudyResult) -> None:
    """Commit the figures as PNG."""
    from rocktokens.report.charts.save import commit_charts
    from rocktokens.report.charts.study_charts import study_charts

    commit_charts(run, study_charts(result, run.path.name))
