"""``rocktokens demo``: the whole path on the embedded pair, in minutes on two CPU cores.

1. How good are the teacher and the untrained student?
2. Distil, on-policy, every token traced.
3. Replay one probe set through the checkpoints and find the rocks.
4. Did accuracy suffer on the way? Which types did training move, which not?
5. Who owns the gradient? Which claims of the paper hold here?
6. Do the rocks matter? Ban each of them, and placebos, and see what happens to the answers.
7. What if they are not trained at all? A short study: all tokens, all but the rocks, all but as many others.
8. All of it on one page, report.html.

Every stage leaves its files in the run directory; a second call picks up what is there.
"""

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from rocktokens.cli.common import AsJson, Overrides, notes, output, print_json, terminal
from rocktokens.cli.find import run_find, split_seed
from rocktokens.cli.find_tables import print_summary
from rocktokens.cli.gradients import run_gradients
from rocktokens.cli.gradients_tables import print_claims
from rocktokens.cli.knockout_tables import print_verdicts
from rocktokens.cli.study import study_with_figures
from rocktokens.cli.study_tables import print_study
from rocktokens.cli.tables import print_table
from rocktokens.config import Config, parse_config
from rocktokens.display.numbers import fixed, percent
from rocktokens.display.rocks import rock_table
from rocktokens.display.table import Column, Table, number, text, token
from rocktokens.evaluation.evaluate import evaluate
from rocktokens.evaluation.records import EvaluationRecord, accuracy_table
from rocktokens.knockout.knockout import knockout
from rocktokens.recipes import shipped
from rocktokens.run_dir import RunDir
from rocktokens.studies.config import StudyConfig, make_study
from rocktokens.types import KEPT, RockSet

if TYPE_CHECKING:
    import pandas as pd

STUDY_SEEDS = 2
LAST_STEPS = 5
"""One step's rollouts are few; the last steps together tell where the loss ended."""


def demo(
    directory: Annotated[Path, typer.Option(help="Where the run goes.")] = Path("runs/demo"),
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run everything on the embedded pair: which tokens did training not move, and does that matter?

    Example: [bold]rocktokens demo --directory runs/first-look[/bold]
    """
    config = parse_config(
        shipped("demo"), [f"run.directory={json.dumps(str(directory))}", *(overrides or [])], name="demo"
    )
    record = run_demo(config, quiet=as_json)
    if as_json:
        print_json(record)


def run_demo(config: Config, *, quiet: bool = False) -> dict[str, Any]:
    """All stages; tables on the way unless quiet; everything measured as a record."""
    run = RunDir(config.run.directory)
    notes.rule("1  distil on-policy")
    with notes.status("loading"):
        from rocktokens.training.loop import distill
    distill(config, resume=True, progress=terminal)
    notes.rule("2  replay through the checkpoints")
    with notes.status("loading"):
        from rocktokens.replay.replay import replay
    replay(config, progress=terminal)
    notes.rule("3  find the rocks")
    rocks = run_find(run, config.find, split_seed(config)).rocks
    notes.rule("4  measure accuracy on new problems")
    records = evaluate(run, config, ["teacher", "all"], terminal)
    notes.rule("5  see where the gradient goes")
    gradients = run_gradients(run, config)
    notes.rule("6  ban the rocks")
    sweep = knockout(run, config, progress=terminal)
    notes.rule("7  bypass the rocks")
    study = study_with_figures(bypass_study(config, run))
    notes.rule("8  write the page")
    page = write_page(run)
    movement, types = measure_movement(run, rocks)
    if not quiet:
        print_table(accuracy_table(records))
        print_summary(rocks)
        print_table(rock_table(rocks, 20))
        print_table(movement_table(types, 20, movement["prompts"]))
        print_claims(gradients.claims)
        output.print()
        print_verdicts(sweep, "method", 20)
        output.print()
        print_study(study)
        _print_answer(records, movement, run)
    return {
        "directory": str(run.path),
        "evaluations": [
            {k: getattr(r, k) for k in ("name", "accuracy", "wilson_interval", "n_prompts")} for r in records
        ],
        "movement": movement,
        "rocks": {"summary": rocks.summary, "top": [token.text for token in rocks.tokens]},
        "gradients": {"claims": [claim.to_record() for claim in gradients.claims]},
        "knockout": {"baseline": sweep.baseline, "counts": sweep.counts, "noise": sweep.noise},
        "study": study.to_record(),
        "report": str(page),
    }


def write_page(run: RunDir) -> Path:
    """Commit report.html."""
    from rocktokens.report.page.page import report_html
    from rocktokens.report.views.run_view import RunView

    with notes.status("drawing"):
        entry = run.commit_text("report.html", report_html([RunView.open(run.path)]))
    return run.path / entry.path


def bypass_study(config: Config, run: RunDir) -> StudyConfig:
    """The study of step 7: no larger than the demo itself, with its rocks, on seeds that had no say in them."""
    record = tomllib.loads(shipped("demo-study"))
    base = config.model_dump(mode="json", exclude_none=True, exclude={"run", "policy"})
    for section, limits in record["base"].items():
        base[section] |= {key: min(base[section][key], limit) for key, limit in limits.items()}
    record["base"] = base
    record["study"] = {
        "directory": str(run.path / "study"),
        "rocks": str(run.rocks),
        "seeds": [config.run.seed + 1 + index for index in range(STUDY_SEEDS)],
        "evaluate_every": base["training"]["max_steps"],
    }
    return make_study(record, "demo")


def measure_movement(run: RunDir, rocks: RockSet) -> tuple[dict[str, Any], "pd.DataFrame"]:
    """What training did to the loss: on-policy at its start and end, and by type on the replayed rollouts.

    The types are measured on the prompts that had no say in which of them are rocks, as far as there are any.
    """
    from rocktokens.rocks.aggregate import prompts_of
    from rocktokens.rocks.find import type_table
    from rocktokens.rocks.split import split_prompts
    from rocktokens.traces.store import TraceStore

    kl = [json.loads(line)["kl"] for line in run.logs.read_text(encoding="utf-8").splitlines()]
    last = kl[-LAST_STEPS:]
    store, reference, baseline = TraceStore(run), rocks.criterion["reference"], rocks.criterion["baseline"]
    split = split_prompts(prompts_of(store.table(reference)), rocks.criterion["split"], rocks.criterion["seed"])
    types = type_table(store, reference, baseline, split.measuring).assign(
        token_share=lambda frame: frame["freq"] / frame["freq"].sum(),
        kept=lambda frame: frame["mean_kl"] / frame["mean_kl_baseline"],
    )
    token_share, kl_mass = types["token_share"].to_numpy(), (types["freq"] * types["mean_kl"]).to_numpy()
    unmoved = (types["kept"].to_numpy() > KEPT) & np.isin(types["token_id"].to_numpy(), rocks.ids)
    digits = unmoved & (types["category"].to_numpy() == "digit")
    return {
        "on_policy_kl_first": kl[0],
        "on_policy_kl_last": sum(last) / len(last),
        "prompts": "all prompts" if split.measuring is None else "held-out prompts",
        "unmoved_rocks": int(unmoved.sum()),
        "unmoved_token_share": float(token_share[unmoved].sum()),
        "unmoved_kl_share": float(kl_mass[unmoved].sum() / kl_mass.sum()),
        "unmoved_digit_token_share": float(token_share[digits].sum()),
    }, types


def movement_table(types: "pd.DataFrame", show: int, prompts: str) -> Table:
    """Make the table of the types that hold the most kl, before and after training, on the same tokens."""
    columns: list[Column[dict[str, Any]]] = [
        Column("token", lambda own: token(own["text"])),
        Column("category", lambda own: text(own["category"])),
        Column("tokens", lambda own: number(own["token_share"], percent)),
        Column("kl before", lambda own: number(own["mean_kl_baseline"], fixed(3))),
        Column("kl after", lambda own: number(own["mean_kl"], fixed(3))),
        Column("kept", lambda own: number(own["kept"], percent)),
    ]
    title = f"kl before and after training, same tokens, {prompts}"
    return Table.of("movement", columns, types.head(show).to_dict("records"), title)


def _print_answer(records: list[EvaluationRecord], movement: dict[str, Any], run: RunDir) -> None:
    before, after = records[1], records[-1]
    lowest = min(records[1:], key=lambda record: record.accuracy)
    first, last = movement["on_policy_kl_first"], movement["on_policy_kl_last"]
    output.print(
        f"the student went from {percent(before.accuracy)} to {percent(after.accuracy)} (lowest on the way "
        f"{percent(lowest.accuracy)}); its on-policy kl went from {first:.3f} to {last:.3f} "
        f"({100 * (last / first - 1):+.0f} %)"
    )
    tokens, digits, kl = (percent(movement[f"unmoved_{name}_share"]) for name in ("token", "digit_token", "kl"))
    output.print(
        f"{movement['prompts']}: {movement['unmoved_rocks']} of the rocks kept more than {100 * KEPT:.0f} % of their "
        f"kl; they are {tokens} of the tokens ({digits} digits) and {kl} of the kl that is left"
    )
    output.print(
        "the study is short, and two seeds and few steps decide little: `rocktokens study pebbles-paper` is longer"
    )
    output.print(f"files: {run.path}, figures in {run.path / 'figures'}", soft_wrap=True, markup=False)
    output.print(f"all of it on one page: {run.path / 'report.html'}", soft_wrap=True, markup=False)
    output.print(
        f"how sure is all this, and what else is there? rocktokens find {run.path}, also gradients and knockout",
        soft_wrap=True,
        markup=False,
    )
