"""What the arms of a study share besides their base: its rocks and classes, and the types matched to them.

1. A scout is distilled with uniform weights, replayed and searched, and its rocks are banned one by one where the study
   wants to know the pillars. Where it wants classes of interchangeable tokens, the scout finds and tests those too
   (``class_arms``). Or the study names a rocks.json or a classes.json.
2. Rocks and classes are copied into the study, once: every arm, now and later, uses these.
3. Types as frequent as the rocks, and sets of types with as much kl, are matched in the scout's traces. A poor match is
   refused before any arm is trained.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rocktokens.classes import TokenClasses
from rocktokens.config import Config
from rocktokens.display.rocks import why_none
from rocktokens.errors import ConfigError
from rocktokens.knockout.knockout import knockout
from rocktokens.progress import SILENT, Progress
from rocktokens.provenance import metered
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.studies.class_arms import control_classes, find_tested_classes, require_usable
from rocktokens.studies.config import CLASSES, CONTROLS, ROCKS, TYPE_SETS, ScoutSection, StudyConfig, arms_with
from rocktokens.studies.plan import draws_of, scout_config, study_files
from rocktokens.types import ControlSet, RockSet

STAGES = "scout_stages"
"""Entry of the study's manifest: what its rocks and classes were made by."""
Given = TypeVar("Given", RockSet, TokenClasses)

Draw = Callable[[RunDir, str], object]
"""Draws a record that a run has committed, such as find.json."""


def prepare_files(
    study: StudyConfig, run: RunDir, progress: Progress = SILENT, draw: Draw | None = None
) -> RockSet | None:
    """Commit the study's rocks and classes, and the controls that its arms need; returns the rocks, if it has any."""
    rocks = None
    if study.scout is not None:
        config = scout_config(study)
        rocks = _scouted_rocks(run, config, study.scout, progress)
        scout = RunDir(config.run.directory)
        if draw is not None and scout.files("find.json"):
            with progress.status("drawing"):
                draw(scout, "find.json")
    elif study.study.rocks is not None:
        rocks = _keep_given(run, run.rocks, study.study.rocks, RockSet)
    if study.study.classes is not None:
        _keep_given(run, run.classes, study.study.classes, TokenClasses)
    if rocks is not None:
        if not rocks.tokens and (arms := arms_with(study, ROCKS)):
            raise ConfigError(f"arm {arms[0].name!r} uses {ROCKS} and there are none: {why_none(rocks)}")
        _match_controls(study, run, rocks)
    if arms := arms_with(study, CLASSES):
        classes = TokenClasses.load(run.verified(run.classes.name))
        require_usable(study, arms[0], classes)
        if rocks is not None:
            control_classes(study, run, rocks, classes, progress)
    return rocks


def _scouted_rocks(run: RunDir, config: Config, section: ScoutSection, progress: Progress) -> RockSet:
    if run.files(run.rocks.name):
        stages = run.manifest().get(STAGES)
        if stages != section.stages:
            raise ConfigError(
                f"scout.stages = {section.stages}, but {run.rocks} was made with {stages}, and arms may have used it: "
                "put them back, or give another study.directory"
            )
        return RockSet.load(run.verified(run.rocks.name))
    scout = RunDir(config.run.directory)
    from rocktokens.replay.replay import replay
    from rocktokens.rocks.find import find_run, split_seed
    from rocktokens.training.loop import distill

    progress.heading("scout: distil, replay, find the rocks")
    with metered(scout, "distill"):
        distill(config, resume=True, progress=progress)
    with metered(scout, "trace"):
        replay(config, progress=progress)
    with metered(scout, "find"):
        find_run(scout, config.find, split_seed(config), progress=progress)
    if "knockout" in section.stages:
        with metered(scout, "knockout"):
            knockout(scout, config, progress=progress)
    if "classes" in section.stages:
        with metered(scout, "classes"):
            run.commit(run.classes.name, find_tested_classes(scout, config, progress).save)
    rocks = RockSet.load(scout.verified(scout.rocks.name))
    run.update_manifest(**{STAGES: section.stages})
    run.commit(run.rocks.name, rocks.save)
    return rocks


def _keep_given(run: RunDir, kept: Path, path: str, kind: type[Given]) -> Given:
    """Copy a file that the study names, once; another content is refused later."""
    given = kind.load(path)
    if not run.lists(kept.name):
        run.commit(kept.name, given.save)
    elif _content(kind.load(run.verified(kept.name))) != _content(given):
        raise ConfigError(
            f"study.{kept.stem} = {path!r} holds other {kept.stem} than {kept}, which arms may have used: put them "
            "back, or give another study.directory"
        )
    return given


def _content(given: RockSet | TokenClasses) -> object:
    """Return what arms depend on: classes with the same members are equal, but not all of them may be used."""
    return given.classes if isinstance(given, TokenClasses) else given


def _match_controls(study: StudyConfig, run: RunDir, rocks: RockSet) -> None:
    """Match as many draws as the arms want; a draw stays the same when more are added."""
    from rocktokens.rocks.controls import match_controls, match_type_sets
    from rocktokens.traces.store import TraceStore

    files = study_files(run.path, study.study.seeds[0])
    for placeholder, match in ((CONTROLS, match_controls), (TYPE_SETS, match_type_sets)):
        arms, path = arms_with(study, placeholder), Path(files[placeholder])
        if not arms or study.scout is None:
            continue
        draws = draws_of(arms)
        if run.lists(path.name) and len(ControlSet.load(run.verified(path.name))) >= draws:
            continue
        store = TraceStore(RunDir(scout_config(study).run.directory))
        controls = match(store, rocks, draws=draws, seed=derive_seed(study.scout.seed, path.stem))
        run.commit(path.name, controls.save)
