"""A run in training: its curves, and the types it leaves out of the loss now, from the log alone."""

import tomllib
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocktokens.policies.online_rocks import freezes
from rocktokens.report.views.run_view import RunView

MAX_POINTS = 500
"""Of a curve: more than a screen can tell apart."""


@dataclass(frozen=True, slots=True)
class LogCurve:
    """One number of the log through training; long curves are thinned evenly, first and last point kept."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class LiveRock:
    """A type that the online policy leaves out now."""

    token_id: int
    text: str
    since: int
    """The step it was frozen at."""


@dataclass(frozen=True, slots=True)
class LiveView:
    """Where training stands."""

    run: str
    step: int | None
    """The last finished step; None before the first."""
    max_steps: int | None
    """None where the config does not say."""
    curves: tuple[LogCurve, ...]
    rocks: tuple[LiveRock, ...]
    """Longest frozen first; empty where the policy is another one."""


def live(run: RunView) -> LiveView:
    """Show what the log says now."""
    log = [line for line in run.logs if isinstance(line.get("step"), int)]
    kept = np.unique(np.linspace(0, len(log) - 1, min(len(log), MAX_POINTS)).round().astype(int)) if log else []
    numbers = [{name: value for name, value in log[place].items() if _is_number(value)} for place in kept]
    steps = tuple(line["step"] for line in numbers)
    names = dict.fromkeys(name for line in numbers for name in line if name != "step")
    frozen = [own for own in freezes(log) if own.until is None]
    return LiveView(
        run=run.name,
        step=log[-1]["step"] if log else None,
        max_steps=_max_steps(run),
        curves=tuple(LogCurve(name, steps, tuple(line.get(name) for line in numbers)) for name in names),
        rocks=tuple(
            LiveRock(own.token_id, run.text_of(own.token_id), own.frozen)
            for own in sorted(frozen, key=lambda own: (own.frozen, own.token_id))
        ),
    )


def _max_steps(run: RunView) -> int | None:
    try:
        return int(tomllib.loads(run.config_text)["training"]["max_steps"])
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError):
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
