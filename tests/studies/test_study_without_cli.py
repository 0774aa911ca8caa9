"""A library call needs no command line: a scouted study runs in processes that cannot import ``rocktokens.cli``."""

from pathlib import Path

from rocktokens.studies.records import StudyResult
from rocktokens.types import RockSet
from warm_process import start_script

PROGRAM = """
import sys

for name in [own for own in sys.modules if own.startswith("rocktokens.cli.")]:
    del sys.modules[name]  # the server that forked this process may have imported them
sys.modules["rocktokens.cli"] = None  # workers import this file too, so it is out of their reach as well

from rocktokens import run_study
from rocktokens.studies.config import make_study

RECORD = {
    "study": {"directory": sys.argv[1], "seeds": [0], "evaluate_every": 2, "processes": 1},
    "scout": {"seed": 5},
    "base": {
        "models": {"student": "pebbles-student", "teacher": "pebbles-teacher", "device": "cpu"},
        "rollouts": {"max_completion_length": 32},
        "training": {
            "max_steps": 2, "save_steps": 2, "per_device_train_batch_size": 4, "max_truncated_share": 1.0,
            "trace": False,
        },
        "trace": {"num_prompts": 8, "top_k": 0},
        "find": {"stage": "score", "k": 1, "exclude_top_freq": 20, "min_prompts": 1},
        "evaluation": {"num_prompts": 2},
    },
    "arm": [
        {"name": "uniform", "policy": {"name": "uniform"}},
        {"name": "freeze", "policy": {"name": "rocks", "rocks": "@rocks"}},
    ],
}
if __name__ == "__main__":
    run_study(make_study(RECORD))
    assert not [name for name in sys.modules if name.startswith("rocktokens.cli.")]
"""


def test_a_scouted_study_runs_where_the_command_line_cannot_be_imported(tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    study = tmp_path / "study"
    ran = start_script(tmp_path / "program.py", [str(study)], tmp_path / "log", {})
    ran.join()
    assert ran.exitcode == 0, (tmp_path / "log").read_text(encoding="utf-8")
    assert len(RockSet.load(study / "rocks.json").tokens) == 1
    assert [arm.name for arm in StudyResult.load(study / "study.json").arms] == ["uniform", "freeze"]
