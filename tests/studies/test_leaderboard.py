"""The rule by which the leaderboard's best policy is taken to another pair."""

import tomllib
from dataclasses import replace

from docs_scripts import docs_script
from rocktokens.recipes import recipes
from rocktokens.studies.config import make_study
from rocktokens.studies.records import Arm, CurvePoint, StudyResult

best_arm = docs_script("leaderboard").best_arm
STUDY = make_study(tomllib.loads(recipes()["pebbles-leaderboard"].text))


def result(**ends: float) -> StudyResult:
    """All arms end at one half, but for those that are named, with _ for spaces."""
    named = {name.replace("_", " "): end for name, end in ends.items()}
    points = {arm.name: CurvePoint(32, 1.0, 1.0, named.get(arm.name, 0.5), (0.0, 1.0)) for arm in STUDY.arm}
    arms = [Arm(name, [replace(point, step=0), point], [], {}) for name, point in points.items()]
    return StudyResult("uniform", 0.05, None, None, 0, [0], 500, arms, [])


def test_the_best_needs_no_earlier_run_and_no_chance() -> None:
    ahead = {"uniform": 0.99, "coarse": 0.98, "rocks at half weight": 0.97, "random half": 0.96}
    others = {"occurrence-matched control": 0.95, "tip": 0.7, "selectkd": 0.6}
    assert best_arm(result(**ahead, **others), STUDY) == "tip"


def test_of_equal_ones_the_first_in_the_file_is_best() -> None:
    assert best_arm(result(tip=0.9, asymmetric=0.9, high_entropy=0.9), STUDY) == "high entropy"


def test_the_study_of_pair_s_has_the_best_as_an_arm() -> None:
    policies = [arm.policy for arm in STUDY.arm if arm.name == "prefix importance"]
    study = make_study(tomllib.loads(recipes()["smollm2-study"].text))
    assert [arm.policy for arm in study.arm if arm.name == "prefix importance"] == policies
