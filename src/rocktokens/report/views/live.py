"""A run in training: its curves, and the types it leaves out of the loss now, from the log alone."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocktokens.config import TeacherSection
from rocktokens.parsing import parse_toml
from rocktokens.policies.online_rocks import freezes
from rocktokens.report.views.run_row import max_steps
from rocktokens.report.views.run_view import RunView
from rocktokens.types import of_teacher

OF_KL = frozenset({"kl", "loss", "grad_norm"})
"""Numbers of the log that are of another kind where the teacher names its likeliest tokens alone."""
MAX_POINTS = 500
"""Of a curve: more than a screen can tell apart."""
UNITS = (
    (r"^(kl|loss|log_ratio|kl_choice|forward_kl)$|^entropy_", "nats"),
    (r"^tokens_per_second$", "tokens/s"),
    (r"^seconds_", "s"),
    (r"_length$", "tokens"),
    (r"share|^overlap|_saved$", "share"),
)
"""Patterns of names in the log, and the unit of their numbers."""


@dataclass(frozen=True, slots=True)
class LogCurve:
    """One number of the log through training; long curves are thinned evenly, first and last point kept."""

    name: str
    unit: str
    """Empty where it has none."""
    teacher: str
    """Of ``OF_KL``, which kind of teacher it is of, as ``of_teacher`` says it; else empty."""
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
    log = [line for line in run.logs if type(line.get("step")) is int]
    kept = np.unique(np.linspace(0, len(log) - 1, min(len(log), MAX_POINTS)).round().astype(int)) if log else []
    numbers = [{name: value for name, value in log[place].items() if _is_number(value)} for place in kept]
    steps = tuple(line["step"] for line in numbers)
    names = dict.fromkeys(name for line in numbers for name in line if name not in ("step", "epoch"))
    teacher = of_teacher(_trained_with(run.config_text))
    frozen = [own for own in freezes(log) if own.until is None]
    return LiveView(
        run=run.name,
        step=log[-1]["step"] if log else None,
        max_steps=max_steps(run.manifest, run.config_text),
        curves=tuple(
            LogCurve(
                name,
                _unit(name),
                teacher if name in OF_KL else "",
                steps,
                tuple(line.get(name) for line in numbers),
            )
            for name in names
        ),
        rocks=tuple(
            LiveRock(own.token_id, run.text_of(own.token_id), own.frozen)
            for own in sorted(frozen, key=lambda own: (own.frozen, own.token_id))
        ),
    )


def _trained_with(config_text: str) -> str:
    """Read the label of the teacher that a run trains with; empty where the config does not say."""
    try:
        return TeacherSection(**parse_toml(config_text).get("teacher", {})).label
    except (ValueError, TypeError):
        return ""


def _unit(name: str) -> str:
    return next((unit for pattern, unit in UNITS if re.search(pattern, name)), "")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
