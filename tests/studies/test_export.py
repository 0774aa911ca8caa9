"""What the program behind the study pages prints of types that were frozen while training."""

import json
from pathlib import Path

import pytest

from docs_scripts import docs_script
from rocktokens.types import RockSet, RockToken

print_freezes = docs_script("export").print_freezes


def test_frozen_types_are_counted_over_the_runs_of_an_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """By the first time in each run: a type on trial may be frozen again. Runs that froze nothing count too."""
    logs = [
        [{"step": 3, "online_frozen": [7]}, {"step": 9, "online_tried": [7]}, {"step": 11, "online_refrozen": [7]}],
        [{"step": 5, "online_frozen": [8, 7]}],
        [{"step": 5}],
    ]
    for seed, lines in enumerate(logs):
        run = tmp_path / "arms" / "online" / f"seed-{seed}"
        run.mkdir(parents=True)
        (run / "logs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rock = RockToken(7, "So", 1, 10, 1.0, 10.0, None, None, "discourse")
    print_freezes(tmp_path, RockSet("", {}, {}, {}, [rock]))
    assert capsys.readouterr().out.splitlines() == [
        "online: 'So', a rock, frozen by 2 runs, first at steps [3, 5]",
        "online: 8, frozen by 1 runs, first at steps [5]",
    ]
