"""``rocktokens find``: the rocks of a run, how sure that is, and how two runs compare.

1. Search and describe (rocks.json), look at the finding from all sides (find.json), draw it (figures/).
2. ``--compare`` sets two searches side by side instead and writes nothing.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rocktokens.cli.common import AsJson, Overrides, notes, output, print_json, progress
from rocktokens.config import Config, FindSection, parse_config, run_config, student_name
from rocktokens.errors import RocktokensError
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.types import RockSet

if TYPE_CHECKING:
    import numpy as np

    from rocktokens.rocks.encoding import Encoder
    from rocktokens.rocks.records import FindRecord
    from rocktokens.rocks.search import Criterion, Finding
    from rocktokens.traces.store import TraceStore


def find(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="The folder of a run; with --compare two, or RUN@CHECKPOINT.")
    ],
    compare: Annotated[bool, typer.Option("--compare", help="Set the rocks of two runs side by side.")] = False,
    reference: Annotated[
        int | None, typer.Option(help="Checkpoint whose loss counts as left; default the last.")
    ] = None,
    baseline: Annotated[int | None, typer.Option(help="Checkpoint to compare with; default the first.")] = None,
    k: Annotated[str | None, typer.Option(help="How many types, or auto; default find.k of the run's config.")] = None,
    show: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 20,
    engine: Annotated[str, typer.Option(help="duckdb, or spark; the result does not depend on it.")] = "duckdb",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the engine; the result does not depend on it.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Find the types that hold the loss training left, say how sure that is, and write RUN/rocks.json.

    Example: [bold]rocktokens find runs/mine --k auto[/bold]

    Two runs, or two checkpoints of one: [bold]rocktokens find runs/a runs/b@200 --compare[/bold]
    """
    chosen = [*(overrides or []), *([] if k is None else [f"find.k={k}"])]
    options = Options(reference, baseline, engine, threads)
    if compare:
        return _compare(runs, chosen, options, show, as_json)
    if len(runs) != 1:
        raise RocktokensError(f"find takes one run, {len(runs)} were given: add --compare to set two side by side")
    run = RunDir(runs[0]).require()
    section, seed = settings_of(run, chosen)
    found = run_find(run, section, seed, options)
    if as_json:
        return print_json({**asdict(found.rocks), "analysis": found.analysis.to_record()})
    from rocktokens.cli.find_tables import print_found

    print_found(found.rocks, found.analysis, show)
    output.print(f"rocks: {run.rocks}", soft_wrap=True, markup=False)
    output.print(f"figures: {run.path / 'figures'}", soft_wrap=True, markup=False)


@dataclass(frozen=True, slots=True)
class Options:
    """Where to look and with what."""

    reference: int | None = None
    baseline: int | None = None
    engine: str = "duckdb"
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What a search left in the run."""

    rocks: RockSet
    analysis: "FindRecord"


def run_find(run: RunDir, section: FindSection, seed: int, options: Options | None = None) -> Found:
    """Find the rocks, prompts split by ``seed``; commit rocks.json, find.json and the figures."""
    from rocktokens.rocks.analysis import analyse
    from rocktokens.rocks.find import rock_set
    from rocktokens.rocks.sensitivity import other_gammas

    with run.lock():
        store, finding, encoders = _search(run, section, seed, options or Options(), other_gammas(section.gamma))
        with notes.status("weighing the evidence"):
            rocks = rock_set(store, finding)
            analysis = analyse(store, finding, rocks, encoders.encoder, encoders.with_window)
            _draw(run, rocks, analysis)
            run.commit("find.json", analysis.save)
            run.commit("rocks.json", rocks.save)
    return Found(rocks, analysis)


def split_seed(config: Config) -> int:
    """What divides the prompts of a run into those that choose its rocks and those that are held out."""
    return derive_seed(config.run.seed, "split")


def settings_of(run: RunDir, overrides: list[str]) -> tuple[FindSection, int]:
    """The run's own settings and seed; the defaults and 0 for a folder that holds nothing but traces."""
    if run.config.exists():
        config = run_config(run, overrides)
        return config.find, split_seed(config)
    config = parse_config("", [*overrides, f"run.directory={json.dumps(str(run.path))}"], name=str(run.path))
    return config.find, 0


@dataclass(frozen=True, slots=True)
class Encoders:
    """What makes vectors of contexts: the one of the search, and others with a wider or narrower window."""

    encoder: "Encoder | None"
    with_window: "Callable[[int], Encoder] | None"


def _search(
    run: RunDir, section: FindSection, seed: int, options: Options, gammas: tuple[float, ...] = ()
) -> "tuple[TraceStore, Finding, Encoders]":
    with notes.status("reading traces"):
        from rocktokens.rocks.search import Criterion, search
        from rocktokens.rocks.split import resolve_checkpoints
        from rocktokens.traces.store import TraceStore

        store = TraceStore(run, engine=options.engine, threads=options.threads)
        reference, baseline = resolve_checkpoints(store, options.reference, options.baseline)
        criterion = Criterion(reference=reference, baseline=baseline, seed=seed, **section.model_dump())
        encoders = _encoders(store, criterion)
    if encoders.encoder is None:
        return store, search(store, criterion, None), encoders
    with _pairs_bar() as on_pairs:
        return store, search(store, criterion, encoders.encoder, on_pairs, gammas), encoders


@contextmanager
def _pairs_bar() -> "Iterator[Callable[[int, int], None]]":
    with progress() as bars:
        task = bars.add_task("comparing contexts", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _encoders(store: "TraceStore", criterion: "Criterion") -> Encoders:
    from rocktokens.rocks.encoding import embedding_encoder

    reference = criterion.reference
    if criterion.stage != "context" or reference is None:
        return Encoders(None, None)
    if criterion.encoder == "hidden":
        return Encoders(_hidden_encoder(store, reference), None)
    embeddings = _embeddings(store, reference)
    return Encoders(
        embedding_encoder(store.table(reference), embeddings, criterion.window),
        lambda window: embedding_encoder(store.table(reference), embeddings, window),
    )


def _embeddings(store: "TraceStore", checkpoint: int) -> "np.ndarray":
    """The student's input embeddings from its files, or from the model itself when it has a hub or embedded id."""
    from rocktokens.rocks.embeddings import student_embeddings

    name = _student(store, checkpoint)
    if Path(name).exists() or name == str(store.run.checkpoint(checkpoint)):
        return student_embeddings(store, checkpoint)
    from rocktokens.models.load import load_model

    return load_model(name, device="cpu").model.get_input_embeddings().weight.detach().float().numpy()


def _student(store: "TraceStore", checkpoint: int) -> str:
    """The student that was replayed, if it still is the one the traces are of."""
    from rocktokens.models.fingerprints import model_identity

    name = student_name(store.run, checkpoint)
    traced = store.replay.get("checkpoints", {}).get(str(checkpoint))
    if traced is not None and model_identity(name, store.run) != traced:
        raise RocktokensError(
            f"checkpoint {checkpoint} was traced with another student than {name}: use find.stage = 'score', or "
            "find_rocks(embeddings=…) with the embeddings of the one that was traced"
        )
    return name


def _hidden_encoder(store: "TraceStore", checkpoint: int) -> "Encoder":
    from rocktokens.models.load import load_model
    from rocktokens.rollouts.store import read_rollouts
    from rocktokens.scoring.hidden import hidden_encoder

    probes = [entry.path for entry in store.run.files("rollouts/probe/")]
    if not probes:
        raise RocktokensError(
            f"find.encoder = 'hidden' needs the probe rollouts, {store.run.path} has none: use 'embeddings'"
        )
    student = load_model(_student(store, checkpoint))
    return hidden_encoder(student, [rollout for probe in probes for rollout in read_rollouts(store.run, probe)])


def _draw(run: RunDir, rocks: RockSet, analysis: "FindRecord") -> None:
    """Commit the figures as PNG."""
    from rocktokens.report.charts.find_charts import find_charts
    from rocktokens.report.charts.save import commit_charts

    commit_charts(run, find_charts(run.path.name, analysis))


def _compare(runs: list[str], overrides: list[str], options: Options, show: int, as_json: bool) -> None:
    from rocktokens.cli.find_tables import print_comparison
    from rocktokens.rocks.compare import compare_findings, require_same_vocabulary
    from rocktokens.rocks.split import resolve_checkpoints
    from rocktokens.traces.store import TraceStore

    if len(runs) != 2:
        raise RocktokensError(f"--compare takes two runs, {len(runs)} given: name two, or one twice as RUN@CHECKPOINT")
    sides = [_run_at(name, options) for name in runs]
    section, seed = settings_of(sides[0][0], overrides)
    require_same_vocabulary(*(run.manifest().get("tokenizer_sha256", "") for run, _ in sides))
    for run, at in sides:
        resolve_checkpoints(TraceStore(run), at.reference, at.baseline)
    searched = [_search(run, section, seed, at)[:2] for run, at in sides]
    (store_a, finding_a), (store_b, finding_b) = searched
    record = {
        "a": runs[0],
        "b": runs[1],
        "criterion": {**section.model_dump(), "seed": seed},
        **compare_findings((store_a, store_b), (finding_a, finding_b)),
    }
    if as_json:
        return print_json(record)
    print_comparison(record, show)


def _run_at(name: str, options: Options) -> tuple[RunDir, Options]:
    """``RUN`` or ``RUN@CHECKPOINT``; a folder whose name has an @ in it is a folder first."""
    folder, at, checkpoint = name.rpartition("@")
    if not at or Path(name).exists():
        return RunDir(name).require(), options
    if not checkpoint.isdecimal():
        raise RocktokensError(f"{name!r} names checkpoint {checkpoint!r}: give a step, as in {folder}@200")
    return RunDir(folder).require(), Options(int(checkpoint), options.baseline, options.engine, options.threads)
