"""A process that is really killed, and resumed, leaves the same bytes as one that is not."""

from pathlib import Path

import pytest
from harness import CrashTest, count_kills, count_midway


@pytest.mark.slow
@pytest.mark.parametrize(("command", "kills"), [("distill", 2), ("extend", 1), ("trace", 1), ("knockout", 1)])
def test_killed_runs_end_like_an_uninterrupted_one(command: str, kills: int, tmp_path: Path):
    endings = CrashTest(command, tmp_path, seed=7).run(kills)
    assert count_kills(endings) == kills
    assert count_midway(endings) >= 1
