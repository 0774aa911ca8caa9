"""What ``rocktokens trace`` notes in a manifest, made by hand, for tests of what reads it."""

from typing import Any

from rocktokens.types import ReplayRecord


def make_replay(**changes: Any) -> ReplayRecord:
    """The record of a replay; ``changes`` are other fields than the default ones."""
    fields: dict[str, Any] = {
        "checkpoints": {},
        "probe": "last",
        "num_prompts": 8,
        "num_generations": 1,
        "rollouts_per_part": 64,
        "teacher": "pebbles-teacher",
        "dtype": "float32",
        "seed": 0,
        "task": {},
        "rollouts": {},
        "scoring": {},
    }
    return ReplayRecord(**{**fields, **changes})
