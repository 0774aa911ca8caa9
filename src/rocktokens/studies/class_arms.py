"""What the arms with classes of interchangeable tokens use: the classes of the study, and controls of them.

1. Candidates are found in the scout's traces, and tested by bans.
2. The classes in use are the safe ones and, where an arm has ``untested = true``, those that bans have not
   judged. Without any, the study is refused before an arm is trained.
3. Controls are drawn from the types of the scout's traces (``rocks.class_controls``), for the classes in use. Every
   seed has its own draw, so that no result depends on a single one, and keeps it when seeds and arms are added.

docs/method.md, section 10.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rocktokens.classes import STATES, TokenClasses
from rocktokens.config import Config
from rocktokens.errors import ConfigError
from rocktokens.progress import Progress
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.studies.config import (
    CLASSES,
    OTHER_CLASSES,
    RANDOM_CLASSES,
    TWINS,
    ArmSection,
    StudyConfig,
    arms_with,
    takes_untested,
)
from rocktokens.studies.plan import draws_of, scout_config, study_files
from rocktokens.types import ControlSet, RockSet

Control = TokenClasses | ControlSet


def find_tested_classes(scout: RunDir, config: Config, progress: Progress) -> TokenClasses:
    """Find candidates in the scout's traces, and test them by bans."""
    from rocktokens.knockout.classes import knockout_classes
    from rocktokens.rocks.classes import candidate_links, find_run_classes

    progress.heading("scout: find and test classes of interchangeable tokens")
    found = find_run_classes(scout, config.find, progress=progress)
    if not candidate_links(found):
        raise ConfigError(
            f"the scout found no candidates for classes of interchangeable tokens on {found.source['n_prompts']} "
            "prompts: trace more (base.trace.num_prompts), or leave classes out of scout.stages"
        )
    knockout_classes(scout, config, progress=progress)
    return TokenClasses.load(scout.verified(scout.classes.name))


def require_usable(study: StudyConfig, arm: ArmSection, classes: TokenClasses) -> None:
    """Refuse classes of which the arms may use none; ``arm`` is one that uses them."""
    if _in_use(study, classes).groups:
        return
    count = Counter(each.state for each in classes if len(each.ids) > 1)
    states = ", ".join(f"{count[state]} {state}" for state in STATES)
    raise ConfigError(
        f"arm {arm.name!r} uses {CLASSES} and none of them may be used ({states}): take undecided and untested ones "
        "too (untested = true in its policy), trace and test on more prompts (base.trace.num_prompts, "
        "base.knockout.num_prompts), or name others (study.classes)"
    )


def control_classes(study: StudyConfig, run: RunDir, rocks: RockSet, classes: TokenClasses, progress: Progress) -> None:
    """Commit the controls of the classes that arms want, for every seed; those that are there stay."""
    from rocktokens.rocks.class_controls import ClassControls
    from rocktokens.traces.store import TraceStore

    wanted = {own: arms for own in (RANDOM_CLASSES, OTHER_CLASSES, TWINS) if (arms := arms_with(study, own))}
    if not wanted or study.scout is None:
        return
    used, find = _in_use(study, classes), study.base.find
    store = TraceStore(RunDir(scout_config(study).run.directory))
    controls = ClassControls(store, used, rocks, {token_id for each in classes for token_id in each.ids})
    makers: dict[str, Callable[[int, int], Control]] = {
        RANDOM_CLASSES: lambda seed, _: controls.match(seed),
        OTHER_CLASSES: lambda seed, _: controls.draw(seed, find.min_freq, find.min_prompts),
        TWINS: controls.twins,
    }
    for placeholder, arms in wanted.items():
        draws = draws_of(arms)
        paths = [Path(study_files(run.path, seed)[placeholder]) for seed in study.study.seeds]
        made = {
            path.name: makers[placeholder](derive_seed(study.scout.seed, path.stem), draws)
            for path in paths
            if not _is_kept(run, path, placeholder, used, draws)
        }
        for name, own in made.items():
            run.commit(name, own.save)
        if made and placeholder != TWINS:
            progress.note(_compared(placeholder, list(made.values())))


def _in_use(study: StudyConfig, classes: TokenClasses) -> TokenClasses:
    return classes.only((True, None) if takes_untested(study) else (True,))


def _is_kept(run: RunDir, path: Path, placeholder: str, used: TokenClasses, draws: int) -> bool:
    """Return whether a control is there, with enough draws; one that was made for other classes is refused."""
    from rocktokens.rocks.class_controls import MATCHED_TO

    if not run.lists(path.name):
        return False
    kept = (ControlSet if placeholder == TWINS else TokenClasses).load(run.verified(path.name))
    if kept.criterion[MATCHED_TO] != used.sha256:
        raise ConfigError(
            f"{path} is a control of other classes than the arms now use: put back untested in the arms with {CLASSES} "
            "as it was, or give another study.directory"
        )
    return placeholder != TWINS or len(kept) >= draws


def _compared(placeholder: str, made: Sequence[Control]) -> str:
    """Say how often the types of controls occur, beside those they stand for."""
    totals = [own.criterion["total_ratio"] for own in made]
    ratios = [ratio for own in made for ratio in own.criterion["freq_ratios"]]
    return (
        f"{placeholder}: {len(made)} drawn, which occur {min(totals):.2f} to {max(totals):.2f} times as often as "
        f"{CLASSES}, single types {min(ratios):.2f} to {max(ratios):.2f} times"
    )
