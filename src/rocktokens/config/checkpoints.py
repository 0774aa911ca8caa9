"""The students a run was traced with: what to load for each, what it is called, and how a command names it.

1. They are the entries of ``trace.checkpoints``, filed under the steps in their names or else under their places; a run
   without such entries has its own, ``checkpoints/step-N``.
2. A student of yours keeps its name: the end of its path or hub id, as much of it as tells it from the others.
3. A command names one by its number, by that name, which of the run's own is step-N, as it is listed, or as "first" or
   "last".
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rocktokens.config.files import has_config, run_config
from rocktokens.config.sections import STEP_NAME, Config, checkpoint_steps
from rocktokens.errors import RocktokensError, UnlistedStudentError
from rocktokens.run_dir import RunDir

NO_NAMES: Mapping[int, str] = MappingProxyType({})
"""Where no checkpoint has a name beside its step."""


def traced_students(run: RunDir, config: Config) -> dict[int, str]:
    """Return by step what to load: the students that ``trace.checkpoints`` lists, else the run's own checkpoints."""
    if listed := config.trace.checkpoints:
        return dict(zip(checkpoint_steps(listed), listed, strict=True))
    return {step: str(run.checkpoint(step)) for step in run.checkpoints()}


def student_name(run: RunDir, step: int) -> str:
    """Return the student whose traces are filed under ``step``: a directory, a hub id or an embedded id.

    That is an entry of ``trace.checkpoints`` in the run's config, else ``checkpoints/step-N`` of the run.
    """
    config = run_config(run) if has_config(run) else None
    if config is None or not config.trace.checkpoints:
        return str(run.checkpoint(step))
    by_step = traced_students(run, config)
    if step not in by_step:
        raise UnlistedStudentError(
            f"checkpoint {step} is none of those that trace.checkpoints of {run.config} lists (they are "
            f"{', '.join(map(str, by_step))}): give one of these, or trace it with `rocktokens trace`"
        )
    return by_step[step]


def checkpoint_names(config: Config) -> dict[int, str]:
    """Return by step the names of students of your own, but for names that say the step and nothing else.

    Example: ``trace.checkpoints = ["ckpt/alpha", "ckpt/beta"]`` gives ``{0: "alpha", 1: "beta"}``.
    """
    listed = config.trace.checkpoints
    named = zip(checkpoint_steps(listed), _short_names(listed), strict=True)
    return {step: name for step, name in named if not STEP_NAME.fullmatch(name)}


def run_checkpoint_names(run: RunDir) -> dict[int, str]:
    """Return the names of students of your own in the run's config; none where it has no config."""
    return checkpoint_names(run_config(run)) if has_config(run) else {}


def checkpoint_label(step: int, names: Mapping[int, str]) -> str:
    """Return a checkpoint's number, and beside it the name it has, such as "2 (gamma-final)"."""
    return f"{step} ({names[step]})" if step in names else str(step)


def find_step(name: str, run: RunDir, config: Config) -> int | None:
    """Return the step of the traced checkpoint that ``name`` names; None where it names none."""
    students = traced_students(run, config)
    ends = {"first": next(iter(students), None), "last": next(reversed(students), None)}
    if name in ends:
        return ends[name]
    if name.isdecimal() and int(name) in students:
        return int(name)
    called = dict(zip(_short_names(list(students.values())), students, strict=True))
    return called.get(name, {model.rstrip("/"): step for step, model in students.items()}.get(name.rstrip("/")))


def require_step(name: str, run: RunDir, config: Config) -> int:
    """Return the step of the traced checkpoint that ``name`` names, refused where it names none."""
    step = find_step(name, run, config)
    if step is None:
        raise unknown_checkpoint(name, run, config)
    return step


def unknown_checkpoint(name: str, run: RunDir, config: Config) -> RocktokensError:
    """Return the error that lists the checkpoints there are."""
    names = checkpoint_names(config)
    steps = ", ".join(checkpoint_label(step, names) for step in traced_students(run, config))
    return RocktokensError(f"checkpoint {name!r} is not in {run.path}: it has the steps [{steps}]")


def _short_names(listed: Sequence[str]) -> list[str]:
    """Return the last parts of the names, as many as it takes for no two to be the same."""
    parts = [name.rstrip("/").split("/") for name in listed]
    longest = max(map(len, parts), default=0)
    for count in range(1, longest + 1):
        short = ["/".join(own[-count:]) for own in parts]
        if len(set(short)) == len(short):
            return short
    return list(listed)
