"""``rocktokens find``: the rocks of a run, in rocks.json and as a table."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from rocktokens.cli.common import AsJson, Overrides, RunPath, config_of, output, percent, print_json, visible
from rocktokens.config import Config, FindSection, parse_config
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.types import RockSet


def find(
    run_path: RunPath,
    reference: Annotated[
        int | None, typer.Option(help="Checkpoint whose loss counts as left; default the last.")
    ] = None,
    baseline: Annotated[int | None, typer.Option(help="Checkpoint to compare with; default the first.")] = None,
    k: Annotated[int | None, typer.Option(help="How many types; default find.k of the run's config.")] = None,
    show: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 20,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the engine; the result does not depend on it.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Rank the vocabulary by the loss that is left and write the top k to RUN/rocks.json.

    Example: [bold]rocktokens find runs/mine --k 50 --set find.joint=true[/bold]
    """
    run = RunDir(run_path).require()
    chosen = [*(overrides or []), *([] if k is None else [f"find.k={k}"])]
    section, seed = _settings(run, chosen)
    rocks = run_find(run, section, seed, reference=reference, baseline=baseline, threads=threads)
    if as_json:
        return print_json(asdict(rocks))
    print_summary(rocks)
    output.print(rock_table(rocks, show))
    output.print(f"all {len(rocks.tokens)} rocks: {run.rocks}", soft_wrap=True, markup=False)


def run_find(
    run: RunDir,
    section: FindSection,
    seed: int,
    *,
    reference: int | None = None,
    baseline: int | None = None,
    threads: int | None = None,
) -> RockSet:
    """Find the rocks, prompts split by ``seed``, and commit rocks.json."""
    from rocktokens.stats.rocks import find_rocks
    from rocktokens.traces.store import TraceStore

    rocks = find_rocks(
        TraceStore(run, threads=threads),
        reference=reference,
        baseline=baseline,
        k=section.k,
        min_freq=section.min_freq,
        exclude_top_freq=section.exclude_top_freq,
        joint=section.joint,
        split=section.split,
        seed=seed,
    )
    run.commit("rocks.json", rocks.save)
    return rocks


def split_seed(config: Config) -> int:
    """What divides the prompts of a run into those that choose its rocks and those that are held out."""
    return derive_seed(config.run.seed, "split")


def _settings(run: RunDir, overrides: list[str]) -> tuple[FindSection, int]:
    """The run's own settings and seed; the defaults and 0 for a folder that holds nothing but traces."""
    if run.config.exists():
        config = config_of(run, overrides)
        return config.find, split_seed(config)
    config = parse_config("", [*overrides, f"run.directory={json.dumps(str(run.path))}"], name=str(run.path))
    return config.find, 0


def print_summary(rocks: RockSet) -> None:
    """The shares, and which prompts they were measured on."""
    summary = rocks.summary
    if not summary["kl_share"]:
        return output.print("there is no kl to rank: on these tokens the student and the teacher are the same")
    output.print(
        f"[bold]{len(rocks.tokens)} rocks[/bold] (checkpoint {rocks.criterion['reference']}, selected on "
        f"{percent(rocks.criterion['split'])} of the prompts, measured on the {summary['measured_on']})"
    )
    output.print(
        f"they are {percent(summary['vocab_share'])} of the types used and {percent(summary['token_share'])} of the "
        f"tokens (median over outputs {percent(summary['token_share_median'])}), and hold "
        f"{percent(summary['kl_share'])} of the kl and {percent(summary['grad_share'])} of the logit-gradient norm"
    )
    if summary["kl_change_rocks"] is not None:
        output.print(
            f"kl from checkpoint {rocks.criterion['baseline']} to {rocks.criterion['reference']} on the same tokens: "
            f"rocks {_signed(summary['kl_change_rocks'])}, the rest {_signed(summary['kl_change_rest'])}"
        )


def _signed(change: float | None) -> str:
    return "—" if change is None else f"{100 * change:+.1f} %"


def rock_table(rocks: RockSet, show: int) -> Table:
    """The first rocks with the numbers they were selected by, whitespace visible."""
    title = f"top {min(show, len(rocks.tokens))} rocks (freq, mean kl, score: selection half)"
    table = Table(title=title, title_justify="left")
    for name, justify in _COLUMNS:
        table.add_column(name, justify=justify)
    for token in rocks.tokens[:show]:
        table.add_row(
            str(token.rank),
            Text(visible(token.text)),
            str(token.id),
            token.category,
            str(token.freq),
            f"{token.mean_kl:.3f}",
            f"{token.score:.2f}",
        )
    return table


_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("rank", "right"),
    ("token", "left"),
    ("id", "right"),
    ("category", "left"),
    ("freq", "right"),
    ("mean kl", "right"),
    ("score", "right"),
)
