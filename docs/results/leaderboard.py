"""Rank the arms of a leaderboard, and name the best that another pair can try.

``python docs/results/leaderboard.py runs/study-leaderboard`` reads study.json and study.toml of a finished study. It
prints every arm with its mean accuracy after the last step, its difference to the baseline at equal steps with the
study's interval and verdict, and its collapsed runs. The best is the arm with the highest mean among those that need
neither rocks nor classes of an earlier run and draw nothing at random; of equal ones the first in the file.
"""

import argparse
from pathlib import Path

from rocktokens.config.policies import files_of
from rocktokens.errors import RocktokensError
from rocktokens.studies.config import StudyConfig, load_study
from rocktokens.studies.records import StudyResult


def main() -> None:
    """Print the ranking and the best."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path, help="folder of a finished study")
    folder = parser.parse_args().study
    try:
        result, study = StudyResult.load(folder / "study.json"), load_study(folder / "study.toml")
    except (RocktokensError, OSError) as error:
        parser.error(str(error))
    print_ranking(result)
    print(f"\nbest: {best_arm(result, study)}")


def best_arm(result: StudyResult, study: StudyConfig) -> str:
    """Name the arm of highest mean accuracy at the end that another pair can try as it is."""
    chance = [arm for arm in study.arm if arm.is_drawn or arm.policy.name == "random_positions"]
    free = [arm.name for arm in study.arm if not files_of(arm.policy) and arm not in chance]
    return max((name for name in free if name != result.baseline), key=lambda name: result.arm(name).end.accuracy)


def print_ranking(result: StudyResult) -> None:
    """Print one row per arm, the most accurate first."""
    against = {own.first: own for own in result.of_kind("equal_steps") if own.second == result.baseline}
    print(f"{'arm':42}{'end':>8}  {'difference':>26}  {'verdict':12}collapsed")
    for arm in sorted(result.arms, key=lambda arm: -arm.end.accuracy):
        own, change, verdict = against.get(arm.name), "", "baseline"
        if own is not None and own.difference is not None and own.interval is not None:
            low, high = own.interval
            change, verdict = f"{100 * own.difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]", own.verdict
        collapsed = f"{arm.collapsed.count} of {arm.collapsed.n_runs}" if arm.collapsed else ""
        print(f"{arm.name:42}{100 * arm.end.accuracy:7.1f}%  {change:>26}  {verdict:12}{collapsed}")


if __name__ == "__main__":
    main()
