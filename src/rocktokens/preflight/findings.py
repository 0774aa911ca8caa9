"""What ``rocktokens check`` says: one ``Finding`` for each thing that was looked at, and the worst level of all."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from rocktokens.errors import RocktokensError

Level = Literal["ok", "warn", "fail"]
"""ok; warn: the run works, but its result may not be what you want; fail: the run would stop or mislead."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    level: Level
    value: str
    remedy: str = ""
    """One sentence; empty when the level is ok."""
    measured: dict[str, Any] = field(default_factory=dict)
    """The numbers behind ``value``."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """Everything that was looked at before a run."""

    level: Level
    """The worst of the findings."""
    findings: list[Finding]

    @classmethod
    def of(cls, findings: list[Finding]) -> "Preflight":
        """Put the worst level among the findings beside them."""
        levels = {finding.level for finding in findings}
        return cls(next(level for level in ("fail", "warn", "ok") if level in levels), findings)

    def measured(self, name: str) -> dict[str, Any] | None:
        """Return the numbers behind one finding; None where it was not made."""
        return next((finding.measured for finding in self.findings if finding.name == name), None)


def warn_if(problem: str, name: str, value: str, measured: dict[str, Any]) -> Finding:
    """Make a warning with the problem as its remedy, or ok where there is none."""
    return Finding(name, "warn" if problem else "ok", value, problem, measured)


def or_fail(name: str, look: Callable[[], Finding]) -> Finding:
    """Return what ``look`` finds; where it refuses, a failure with its sentence as the remedy."""
    try:
        return look()
    except RocktokensError as error:
        return Finding(name, "fail", "refused", str(error))
