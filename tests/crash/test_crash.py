"""A process that is really killed, and resumed, leaves the same bytes as one that is not."""

from pathlib import Path

import pytest
from harness import CrashTest


@pytest.mark.slow
@pytest.mark.parametrize(("command", "kills"), [("distill", 3), ("trace", 3), ("knockout", 2)])
def test_killed_runs_end_like_an_uninterrupted_one(command: str, kills: int, tmp_path: Path):
    endings = CrashTest(command, tmp_path, seed=7).run(kills)
    assert sum(ending.killed_after is not None for ending in endings) == kills
