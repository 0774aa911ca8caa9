"""The answers of the last knock-out sweep: free ones, and what was decoded under bans.

They are in ``knockout/<digest>/``, where the digest is over the conditions that knockout.json records.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rocktokens.knockout.journal import Decoded, Key, RunJournal
from rocktokens.report.views.grades import Grades
from rocktokens.run_dir import RunDir
from rocktokens.types import Rollout


@dataclass(frozen=True, slots=True)
class Sweep:
    """Answers with and without bans."""

    free: list[Rollout]
    decoded: Mapping[Key, Decoded]
    """By what was banned and the place of the free rollout it continues."""
    grades: Grades


def read_sweep(run: RunDir, knockout: Mapping[str, Any]) -> Sweep | None:
    """The answers behind a knockout.json; None where they are not kept."""
    conditions = knockout["settings"].get("conditions", {})
    digest = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()
    journal = RunJournal(run, digest)
    free = journal.free()
    return None if free is None else Sweep(free, journal.finished, Grades(conditions, "evaluation prompts"))
