"""Write what the pages of this folder show of a study: its accuracies as CSV, its curves as a picture.

``python docs/results/export.py runs/study-paper pebbles-paper`` reads study.json of a finished study and writes
docs/results/pebbles-paper.csv and docs/images/pebbles-paper.png. It prints the mean accuracy of every arm at each step,
and its difference to the baseline, paired by seed, with a 95 % interval by Student's t over seeds, each by itself. If
the scout tested classes of tokens, it prints every ban: change in points with its interval, p, and p corrected. If the
study has rocks, NAME-rocks.csv lists them; and if an arm froze types while it trained, each is printed with the number
of runs that did so, whether it is one of these rocks, and the first step in each run.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from scipy import stats

from rocktokens.display.text import for_csv, visible
from rocktokens.knockout.class_records import ClassSweep
from rocktokens.parsing import parse_json
from rocktokens.policies.online_rocks import freezes
from rocktokens.report.charts.save import save_chart
from rocktokens.report.charts.study_charts import study_charts
from rocktokens.studies.records import StudyResult
from rocktokens.types import RockSet

RESULTS = Path(__file__).parent


def main() -> None:
    """Export one study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path, help="folder of a finished study")
    parser.add_argument("name", help="of the files to write")
    arguments = parser.parse_args()
    result = StudyResult.load(arguments.study / "study.json")
    write_accuracies(result, RESULTS / f"{arguments.name}.csv")
    chart = study_charts(result, arguments.study.name)["study_curves"].chart
    save_chart(chart, RESULTS.parent / "images" / f"{arguments.name}.png")
    print_steps(result)
    if (rocks := arguments.study / "rocks.json").exists():
        found = RockSet.load(rocks)
        write_rocks(found, RESULTS / f"{arguments.name}-rocks.csv")
        print_freezes(arguments.study, found)
    tests = arguments.study / "scout" / "knockout-classes.json"
    if tests.exists():
        print_bans(ClassSweep.load(tests))


def write_accuracies(result: StudyResult, path: Path) -> None:
    """Write the accuracy of every run at every evaluation, with the training behind it."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("arm", "seed", "draw", "step", "tokens", "seconds", "accuracy"))
        for arm in result.arms:
            for run in arm.runs:
                curve = zip(run.steps, run.tokens, run.seconds, run.accuracy, strict=True)
                rows.writerows(
                    (arm.name, run.seed, run.draw, step, tokens, f"{seconds:.1f}", f"{accuracy:.3f}")
                    for step, tokens, seconds, accuracy in curve
                )


def write_rocks(rocks: RockSet, path: Path) -> None:
    """Write the types that arms leave out."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("rank", "token_id", "token", "score"))
        rows.writerows((own.rank, own.id, for_csv(visible(own.text)), f"{own.score:.4g}") for own in rocks.tokens)


def print_steps(result: StudyResult) -> None:
    """Print means and differences in percent and points, over all runs of a seed."""
    baseline = points_by_seed(result, result.baseline)
    for arm in result.arms:
        points_SE = points_by_seed(result, arm.name)
        difference_SE = points_SE - baseline
        half_E = stats.t.ppf(0.975, len(difference_SE) - 1) * stats.sem(difference_SE, axis=0)
        print(f"{arm.name}, steps {arm.runs[0].steps}: {np.round(points_SE.mean(axis=0), 1).tolist()}")
        for step, middle, half in zip(arm.runs[0].steps, difference_SE.mean(axis=0), half_E, strict=True):
            print(f"  step {step}: {middle:+.1f} [{middle - half:+.1f}, {middle + half:+.1f}]")


def print_bans(tests: ClassSweep) -> None:
    """Print what every ban of a class, within one or of a member everywhere did to the accuracy."""
    for own in tests.sweep.of_role("tested"):
        low, high = own.interval or (np.nan, np.nan)
        change = f"{100 * (own.delta or 0):+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
        print(f"{own.ban.name!r}: {change}, p {own.p:.2g}, corrected {own.q:.2g}, {own.verdict}")


def print_freezes(study: Path, rocks: RockSet) -> None:
    """Print what the runs of each arm froze while they trained."""
    texts = {own.id: f"{visible(own.text)!r}, a rock" for own in rocks.tokens}
    for arm in sorted((study / "arms").iterdir()):
        first: dict[int, list[int]] = {}
        for run in sorted(arm.iterdir()):
            log = map(parse_json, (run / "logs.jsonl").read_bytes().splitlines())
            for token_id, step in {own.token_id: own.frozen for own in reversed(freezes(log))}.items():
                first.setdefault(token_id, []).append(step)
        for token_id, steps in sorted(first.items(), key=lambda own: -len(own[1])):
            print(f"{arm.name}: {texts.get(token_id, token_id)}, frozen by {len(steps)} runs, first at steps {steps}")


def points_by_seed(result: StudyResult, name: str) -> np.ndarray:
    """Return the accuracy of an arm in percent (seeds, evaluations), means over its draws."""
    runs = result.arm(name).runs
    return np.array(
        [100 * np.mean([run.accuracy for run in runs if run.seed == seed], axis=0) for seed in result.seeds]
    )


if __name__ == "__main__":
    main()
