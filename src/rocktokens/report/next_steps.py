"""What to do next with a run: commands that make sense for what it holds.

After a search (``next_steps``):

1. Too few prompts: trace more of them, of other data if need be, since nothing else is worth its time before.
2. Rocks that no ban has tested, or whose verdicts are in knockout.json alone, which `find` leaves so: `knockout`.
3. Classes, one step at a time: find them, test them, split the loss by them, train without the choice within those that
   are safe (docs/method.md, section 10).
4. The page, and everything that the search has measured.

Below the answers of a report there is room for one (``step_after_report``): what answers the first question that is
still open, then what would settle an answer that is inconclusive.

A command whose needs are not met, such as a config or answers to grade, is left out; ``why_ungraded`` says why.
"""

import json
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rocktokens.classes import TokenClasses
from rocktokens.config import Config, has_config, load_config, run_config, why_not_graded
from rocktokens.errors import RocktokensError
from rocktokens.rocks.classes import TOPS, was_tested
from rocktokens.run_dir import RunDir
from rocktokens.traces.store import TraceStore
from rocktokens.types import ReplayRecord, RockSet

if TYPE_CHECKING:
    from rocktokens.report.views.run_view import RunView


@dataclass(frozen=True, slots=True)
class Step:
    """A command, and what it is for."""

    command: str
    """As a shell takes it."""
    purpose: str


def next_steps(run: RunDir, rocks: RockSet) -> list[Step]:
    """Return what to do after a search, most useful first, four steps at most.

    Args:
        run: the run.
        rocks: as found, with the verdicts that earlier bans gave them.
    """
    config = run_config(run) if has_config(run) else None
    path = shlex.quote(str(run.path))
    steps: list[Step] = []
    if rocks.too_few_prompts:
        if config is not None:
            steps.append(_more_prompts(_with_config("trace", run), TraceStore(run).replay, rocks))
    else:
        steps += _test_rocks(path, rocks, config)
        with suppress(RocktokensError):  # of classes that cannot be read nothing is suggested
            steps += _class_step(run, path, config, rocks)
    return [
        *steps,
        Step(f"rocktokens report {path}", "all answers on one page"),
        Step(f"rocktokens find {path} --verbose", "every table behind this"),
    ]


def step_after_report(view: "RunView") -> Step:
    """Return what to do after a report was read."""
    return next(_open_questions(view))


def _open_questions(view: "RunView") -> Iterator[Step]:
    rocks, sweep, study, config = view.rocks, view.knockout, view.study, None
    with suppress(RocktokensError):  # a page does without a config, and without one that cannot be read
        config = load_config(view.run.config) if has_config(view.run) else None
    # Where the config says, so that the page does not depend on where the run lies now.
    place = Path(config.run.directory) if config else Path(view.name)
    path = shlex.quote(str(place))
    if rocks is None and view.checkpoints:
        yield Step(f"rocktokens find {path}", "find the rocks")
    if rocks is not None and rocks.too_few_prompts and config is not None:
        trace = f"rocktokens trace {shlex.quote(str(place / view.run.config.name))}"
        yield _more_prompts(trace, view.replay, rocks)
    if rocks is not None and rocks.tokens and sweep is None and _can_grade(config):
        yield Step(f"rocktokens knockout {path}", "does accuracy need the rocks? bans each in turn")
    if rocks is not None and rocks.tokens and study is None and _can_grade(config):
        yield Step("rocktokens study study.toml", "what is gained without the rocks? docs/studies.md has one to copy")
    toml = next((own for own in ("study.toml", "study/study.toml") if (view.path / own).exists()), None)
    if study is not None and toml is not None and any(own.verdict == "undecided" for own in study.comparisons):
        seeds = [*study.seeds, *(max(study.seeds) + more for more in range(1, len(study.seeds) + 1))]
        [override] = _overrides([f"study.seeds={json.dumps(seeds, separators=(',', ':'))}"])
        yield Step(
            f"rocktokens study {shlex.quote(str(place / toml))} {override}", "more seeds, to decide what is gained"
        )
    needs = [own.neutral_prompts for own in sweep.of_role("tested")] if sweep else []
    if (enough := max((own for own in needs if own is not None), default=0)) and _can_grade(config):
        yield Step(f"rocktokens knockout {path} --prompts {enough}", "more prompts, to decide what is undecided")
    yield Step(f"rocktokens explore {path}", "read the rollouts behind these numbers")


def _more_prompts(trace: str, replay: ReplayRecord | None, rocks: RockSet) -> Step:
    """Return how to trace enough prompts; where as many were asked for before, it is the data that has too few."""
    again, enough = f"{trace} --restart", rocks.enough_prompts
    if replay is not None and replay.num_prompts >= enough:
        return Step(f"{again} --set task.path=MORE.jsonl", f"trace data with {enough} prompts or more, then find again")
    return Step(f"{again} --set trace.num_prompts={enough}", "trace enough prompts, then find again")


def _can_grade(config: Config | None) -> bool:
    """Tell whether the run has prompts with answers, which bans are judged by."""
    return config is not None and not why_not_graded(config)


def why_ungraded(run: RunDir) -> str:
    """Say in one sentence why accuracy cannot be measured in a run; nothing where it can, or the config is unknown."""
    with suppress(RocktokensError):
        return why_not_graded(run_config(run)) if has_config(run) else ""
    return ""


def _test_rocks(path: str, rocks: RockSet, config: Config | None) -> Iterator[Step]:
    if not rocks.tokens or not _can_grade(config):
        return
    if all(own.verdict == "untested" for own in rocks.tokens):
        yield Step(f"rocktokens knockout {path}", "does accuracy need the rocks? bans each in turn")
    else:
        yield Step(f"rocktokens knockout {path}", "write these verdicts into rocks.json again")


def _class_step(run: RunDir, path: str, config: Config | None, rocks: RockSet) -> Iterator[Step]:
    """Return the next step with classes of interchangeable tokens, if there is one."""
    store, reference = TraceStore(run), rocks.criterion["reference"]
    if not run.lists(run.classes.name):
        if set(TOPS) <= set(store.table(reference).columns):
            yield Step(f"rocktokens find {path} --classes", "which tokens may stand for each other?")
        return
    classes = TokenClasses.load(run.verified(run.classes.name)).unrefuted
    if not classes.groups or config is None:
        return
    if not was_tested(classes) and _can_grade(config):
        yield Step(f"rocktokens knockout {path} --classes", "are these tokens really interchangeable?")
    elif rocks.teacher:  # whose mass of whole classes is not known
        return
    elif store.classes_sha256(reference) != classes.sha256:
        yield Step(f"{_with_config('trace', run)} --classes", "how much of the loss is a choice within classes?")
    elif any(each.safe for each in classes) and config.policy.name == "uniform" and not config.trace.checkpoints:
        elsewhere, coarse = Path(f"{run.path}-coarse"), f"policy.classes={json.dumps(str(run.classes))}"
        settings = [f"run.directory={json.dumps(str(elsewhere))}", "policy.name=coarse", coarse]
        command = " ".join(["rocktokens distill", shlex.quote(str(run.config)), *_overrides(settings)])
        yield Step(command, "train without that choice")


def _with_config(verb: str, run: RunDir) -> str:
    """Return a command on the run's own config, which says where the run was when it was made."""
    directory = load_config(run.config).run.directory
    is_here = Path(directory).resolve() == run.path.resolve()
    here = [] if is_here else _overrides([f"run.directory={json.dumps(str(run.path))}"])
    return " ".join([f"rocktokens {verb}", shlex.quote(str(run.config)), *here])


def _overrides(settings: list[str]) -> list[str]:
    return [f"--set {shlex.quote(setting)}" for setting in settings]
