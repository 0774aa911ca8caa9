"""Which code made a result, and what that took: kept in the manifest of its run.

1. The commit is that of the checkout the package lies in, with ``+changes`` where its sources differ from it; else the
   one pip installed it from; else ``ROCKTOKENS_COMMIT``, for an image that was built without the history.
2. A ``Meter`` counts seconds and the most memory that torch held on the GPU since it was made. ``rocktokens run`` keeps
   them for each stage, a study for each of its runs and for itself, under ``took``. They are those of the last call
   that made something: of a stage that was interrupted, not what came before.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

TOOK = "took"
"""Entry of the manifest: what each stage took, by its name."""
COMMIT_VARIABLE = "ROCKTOKENS_COMMIT"


class HasManifest(Protocol):
    """A run directory, as far as it matters here."""

    def manifest(self) -> dict[str, Any]:
        """Return its manifest."""
        ...

    def update_manifest(self, **changes: Any) -> None:
        """Replace entries of it."""
        ...


class Meter:
    """Counts from the moment it is made; no memory where other processes do the work."""

    def __init__(self, *, by_others: bool = False) -> None:
        self._began, self._by_others = time.perf_counter(), by_others
        if (cuda := self._cuda()) is not None:
            cuda.reset_peak_memory_stats()

    def keep(self, run: HasManifest, stage: str) -> None:
        """Write into a run's manifest what the stage took, in the place of what it took before."""
        run.update_manifest(**{TOOK: {**run.manifest().get(TOOK, {}), stage: self.read()}})

    def read(self) -> dict[str, Any]:
        """Return seconds, bytes on the GPU if there is one in use, the time now, and the commit."""
        cost: dict[str, Any] = {"seconds": round(time.perf_counter() - self._began, 1)}
        if (cuda := self._cuda()) is not None:
            cost |= {"gpu": cuda.get_device_name(), "peak_allocated": cuda.max_memory_allocated()}
            cost |= {"peak_reserved": cuda.max_memory_reserved()}
        return cost | {"finished": datetime.now(UTC).isoformat(timespec="seconds"), "commit": source_commit()}

    def _cuda(self) -> Any | None:
        """Return torch's CUDA module if this process works with it; torch is not imported for this."""
        torch = None if self._by_others else sys.modules.get("torch")
        return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


@contextmanager
def metered(run: HasManifest, stage: str) -> Iterator[None]:
    """Keep what a stage takes that may have nothing left to do, and then leaves what is known of it as it is."""
    meter, before = Meter(), run.manifest()["files"]
    yield
    now = run.manifest()
    if now["files"] != before or stage not in now.get(TOOK, {}):
        meter.keep(run, stage)


@cache
def source_commit() -> str | None:
    """Return the commit of the code that is running, None where nothing tells."""
    return _checked_out() or _installed_from() or os.environ.get(COMMIT_VARIABLE)


def _checked_out() -> str | None:
    """Ask git, unless it knows the folder but not the package: an environment inside somebody's repository."""
    package = Path(__file__).parent

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()

    try:
        ask("ls-files", "--error-unmatch", "__init__.py")
        return ask("rev-parse", "HEAD") + ("+changes" if ask("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _installed_from() -> str | None:
    try:
        origin = metadata.distribution("rocktokens").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    return json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")
