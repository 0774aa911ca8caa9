"""A run from its config to its report: distill → trace → classes → find → gradients → knockout → report.

1. Each stage looks at what it left in the run. Its record says what it was made with and from: settings, the hash of
   the traces, the criterion of the rocks. Where all of that is as it is now, and the figures show it, there is nothing
   to do.
2. What is missing or stale is made by the stage's own library call: it resumes what was interrupted, and refuses what
   its command would refuse, such as a training config that changed. A run that was made longer is trained further, and
   replayed from the start. A stage that has nothing to work on, because there are no rocks, too few prompts, no answers
   to grade against, or a teacher that does not say enough, is skipped.
3. The page is written again whenever something it shows may have changed.
4. What every stage took is kept in the manifest (``provenance``).

With ``trace.checkpoints`` there is nothing to train: the run begins with the replay. Without ``trace.top_k`` there is
nothing to find classes in.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rocktokens import __version__
from rocktokens.classes import TokenClasses
from rocktokens.config import Config, why_not_graded
from rocktokens.display.rocks import why_none
from rocktokens.errors import RocktokensError
from rocktokens.progress import SILENT, Progress
from rocktokens.provenance import Meter
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.types import RockSet

SOURCES = "report_sources"
"""Entry of the manifest: a hash over what the page was made from."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """What a stage returns that has nothing to work on."""

    because: str
    """One sentence."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One step on the way to the report."""

    name: str
    title: str
    make: Callable[[RunDir, Config, Progress], bool | Skipped]
    """Makes what is missing or stale; False where all of it was up to date."""


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What a call has done."""

    directory: str
    made: list[str]
    """Stages that had something to do."""
    kept: list[str]
    """Stages whose results were up to date."""
    skipped: dict[str, str]
    """Stages that had nothing to work on, with the sentence why."""
    report: str


def run(config: Config, progress: Progress = SILENT, also: Sequence[Stage] = ()) -> PipelineResult:
    """Make whatever of a run is missing or stale, and the page that shows it; ``also`` are stages before the page."""
    directory = RunDir(config.run.directory)
    own = [stage for stage in STAGES if stage.name not in _left_out(config)]
    made: list[str] = []
    kept: list[str] = []
    skipped: dict[str, str] = {}
    for number, stage in enumerate((*own, *also, REPORT), start=1):
        progress.heading(f"{number}  {stage.title}")
        meter = Meter()
        outcome = stage.make(directory, config, progress)
        if isinstance(outcome, Skipped):
            skipped[stage.name] = outcome.because
            progress.note(f"skipped: {outcome.because}")
        elif outcome:
            made.append(stage.name)
            meter.keep(directory, stage.name)
        else:
            kept.append(stage.name)
            progress.note("up to date")
    return PipelineResult(str(directory.path), made, kept, skipped, str(directory.report))


def _left_out(config: Config) -> set[str]:
    """Name the stages a config has no use for: it gives other students, or classes, or keeps no tokens to link."""
    left_out = {"distill"} if config.trace.checkpoints else set()
    return left_out if config.trace.top_k and config.trace.classes is None else {*left_out, "classes"}


def _distill(_run: RunDir, config: Config, progress: Progress) -> bool:
    with progress.status("loading"):
        from rocktokens.training.loop import distill
    return not distill(config, resume=True, progress=progress).already_complete


def _trace(_run: RunDir, config: Config, progress: Progress) -> bool:
    with progress.status("loading"):
        from rocktokens.replay.replay import is_outgrown, is_replayed, replay
    restart = is_outgrown(config)
    if not restart and is_replayed(config):
        return False
    replay(config, restart=restart, progress=progress)
    return True


def _classes(run: RunDir, config: Config, progress: Progress) -> bool:
    """Link interchangeable tokens, and score the choice among them at the last checkpoint."""
    with progress.status("loading"):
        from rocktokens.replay.replay import is_replayed, replay
        from rocktokens.rocks.classes import find_run_classes
    is_linked = _holds(lambda: _is_linked(run, config))
    if not is_linked:
        find_run_classes(run, config.find, progress=progress)
    classes = TokenClasses.load(run.verified(run.classes.name))
    if not classes.unrefuted.groups:
        if classes.groups:
            progress.note("bans refuted every class: what the traces have of the choice is of earlier classes")
        return not is_linked
    if config.teacher.is_top_k:  # whose traces cannot have the choice
        return not is_linked
    with_classes = config.trace.model_copy(update={"classes": str(run.classes)})
    split = config.model_copy(update={"trace": with_classes})
    if is_replayed(split):
        return not is_linked
    replay(split, progress=progress)
    return True


def _is_linked(run: RunDir, config: Config) -> bool:
    """Return whether classes.json is of the traces that are there and of this config, or was written by hand."""
    from rocktokens.traces.store import TraceStore

    store, classes = TraceStore(run), TokenClasses.load(run.verified(run.classes.name))
    if "manifest_sha256" not in classes.source:
        return True
    wanted = {"reference": store.checkpoints[-1], **config.find.model_dump(include={"min_freq", "min_prompts"})}
    return classes.source["manifest_sha256"] == store.manifest_sha256 and wanted.items() <= classes.criterion.items()


def _find(run: RunDir, config: Config, progress: Progress) -> bool:
    with progress.status("loading"):
        from rocktokens.report.charts.figures import draw_stale
        from rocktokens.rocks.find import find_run, split_seed
    with run.lock():
        is_found = _holds(lambda: _is_found(run, config))
        if not is_found:
            find_run(run, config.find, split_seed(config), progress=progress)
        with progress.status("drawing"):
            return draw_stale(run, "find.json") or not is_found


def _is_found(run: RunDir, config: Config) -> bool:
    """Return whether rocks.json and find.json are of this criterion, of the traces that are there and their classes."""
    from rocktokens.rocks.records import FindRecord
    from rocktokens.rocks.search import Criterion
    from rocktokens.rocks.sums import resolve_checkpoints
    from rocktokens.traces.store import TraceStore

    store = TraceStore(run)
    reference, baseline = resolve_checkpoints(store, None, None)
    wanted = Criterion(
        reference=reference, baseline=baseline, seed=derive_seed(config.run.seed, "split"), **config.find.model_dump()
    )
    criterion = json.loads(json.dumps(asdict(wanted)))
    rocks, found = RockSet.load(run.verified("rocks.json")), FindRecord.load(run.verified("find.json"))
    if store.classes_sha256(reference) != (found.choice and found.choice.classes_sha256):
        return False
    return all(
        record.criterion == criterion and record.source.get("manifest_sha256") == store.manifest_sha256
        for record in (rocks, found)
    )


def _gradients(run: RunDir, config: Config, progress: Progress) -> bool | Skipped:
    with progress.status("loading"):
        from rocktokens.gradients.measure import measure_gradients
        from rocktokens.report.charts.figures import draw_stale
    rocks = RockSet.load(run.verified(run.rocks.name))
    if not rocks.tokens or (rocks.too_few_prompts and rocks.summary["n_prompts"] < config.gradients.batches):
        return Skipped(why_none(rocks))
    if teacher := rocks.teacher or (config.teacher.label if config.teacher.is_top_k else ""):
        return Skipped(f"gradients need the teacher's whole distribution, and it gave {teacher}")
    with run.lock():
        is_measured = _holds(lambda: _is_measured(run, config))
        if not is_measured:
            measure_gradients(run, config, progress=progress)
        with progress.status("drawing"):
            return draw_stale(run, run.gradients.name) or not is_measured


def _is_measured(run: RunDir, config: Config) -> bool:
    """Return whether gradients.json is of these rocks, their checkpoints and traces, and these settings."""
    from rocktokens.gradients.records import GradientsRecord

    rocks = RockSet.load(run.verified(run.rocks.name))
    record = GradientsRecord.load(run.verified(run.gradients.name))
    wanted = {
        **config.gradients.model_dump(mode="json"),
        "divergence": config.scoring.divergence,
        "temperature": config.scoring.temperature,
        "dtype": config.models.dtype,
        "seed": config.run.seed,
        **{name: rocks.criterion[name] for name in ("reference", "baseline")},
    }
    return record.is_of(rocks) and wanted.items() <= asdict(record.settings).items()


def _knockout(run: RunDir, config: Config, progress: Progress) -> bool | Skipped:
    with progress.status("loading"):
        from rocktokens.knockout.knockout import is_current, knockout
    if not (rocks := RockSet.load(run.verified(run.rocks.name))).tokens:
        return Skipped(why_none(rocks))
    wanted = config.knockout.labels
    if wanted and not any(token.label is None or token.label in wanted for token in rocks.tokens):
        return Skipped(f"no rock has one of the labels that knockout.labels asks for ({', '.join(wanted)})")
    if reason := why_not_graded(config):
        return Skipped(reason)
    if _holds(lambda: is_current(run, config)):
        return False
    knockout(run, config, progress=progress)
    return True


def _report(run: RunDir, _config: Config, progress: Progress) -> bool:
    """Write the page, unless it is there and nothing else of the run has changed since."""
    from rocktokens.report.build import build_run_report

    runs = [run, *([RunDir(run.path / "study")] if (run.path / "study").exists() else [])]
    shown = [
        asdict(entry)
        for own in runs
        for entry in own.files()
        if not entry.path.startswith((run.report.name, "figures/"))
    ]
    sources = hashlib.sha256(json.dumps([__version__, *shown], sort_keys=True).encode()).hexdigest()
    if run.manifest().get(SOURCES) == sources and _holds(lambda: bool(run.verified(run.report.name))):
        return False
    with run.lock():
        build_run_report(run, progress=progress)
        run.update_manifest(**{SOURCES: sources})
    return True


def _holds(is_current: Callable[[], bool]) -> bool:
    """Return whether a result is current; one that is missing, damaged or of another version is not."""
    try:
        return is_current()
    except RocktokensError:
        return False


STAGES = (
    Stage("distill", "distil on-policy", _distill),
    Stage("trace", "replay through the checkpoints", _trace),
    Stage("classes", "tell the choice from the decision", _classes),
    Stage("find", "find the rocks", _find),
    Stage("gradients", "see where the gradient goes", _gradients),
    Stage("knockout", "ban the rocks", _knockout),
)
REPORT = Stage("report", "write the page", _report)
