"""Campaigns use what the tests of other folders are made of."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("campaigns", "cli", "report", "training")]
