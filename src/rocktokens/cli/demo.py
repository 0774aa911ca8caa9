"""``rocktokens demo``: the whole path on the embedded pair, in minutes on two CPU cores."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocktokens.classes import TokenClasses
from rocktokens.cli.common import AsJson, Overrides, output, print_json, terminal
from rocktokens.cli.find_tables import print_summary
from rocktokens.cli.gradients_tables import print_claims
from rocktokens.cli.knockout_tables import print_verdicts
from rocktokens.cli.study_tables import print_study
from rocktokens.cli.tables import print_table
from rocktokens.config import parse_config
from rocktokens.display.numbers import fixed, percent
from rocktokens.display.rocks import rock_table
from rocktokens.display.table import Column, Table, number, text, token
from rocktokens.display.text import visible
from rocktokens.evaluation.records import EvaluationRecord, accuracy_table
from rocktokens.recipes import shipped
from rocktokens.rocks.classes import was_tested

if TYPE_CHECKING:
    import pandas as pd

    from rocktokens.demo import DemoResult, Movement


def demo(
    directory: Annotated[Path, typer.Option(help="Where the run goes.")] = Path("runs/demo"),
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run everything on the embedded pair: which tokens hold the loss that is left, and do they matter?

    Example: [bold]rocktokens demo --directory runs/first-look[/bold]
    """
    place = f"run.directory={json.dumps(str(directory))}"
    config = parse_config(shipped("demo"), [place, *(overrides or [])], name="demo")
    with terminal.status("loading"):
        from rocktokens.demo import run_demo
    result = run_demo(config, terminal)
    if as_json:
        return print_json(result.to_record())
    print_demo(result)


def print_demo(result: "DemoResult") -> None:
    """Print all tables, and what they come to."""
    print_table(accuracy_table(result.evaluations))
    print_summary(result.rocks)
    print_table(rock_table(result.rocks, 20))
    print_table(movement_table(result.types, 20, result.movement.prompts))
    print_claims(result.gradients.claims)
    output.print()
    print_verdicts(result.knockout, "method", 20)
    output.print()
    print_coarse_classes(result.classes)
    print_study(result.study)
    print_answer(result.evaluations, result.movement, Path(result.directory))


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


def print_coarse_classes(classes: TokenClasses) -> None:
    """Print what the arm called coarse takes for interchangeable."""
    used = classes.unrefuted
    if used.groups:
        named = "; ".join(" ".join(map(visible, own.texts)) for own in used if len(own.ids) > 1)
        title, shown = ("Classes", "") if was_tested(classes) else ("Candidate classes", " (no ban has tested them)")
        output.print(
            f"{title}, whose choice the arm called coarse leaves out: {named}{shown}",
            markup=False,
            highlight=False,
        )


def print_answer(evaluations: list[EvaluationRecord], movement: "Movement", run: Path) -> None:
    """Print what became of accuracy and loss, and where to read on."""
    before, after = evaluations[1], evaluations[-1]
    lowest = min(evaluations[1:], key=lambda own: own.accuracy)
    first, last = movement.on_policy_kl_first, movement.on_policy_kl_last
    output.print(
        f"the student went from {percent(before.accuracy)} to {percent(after.accuracy)} (lowest on the way "
        f"{percent(lowest.accuracy)}); its on-policy kl went from {first:.3f} to {last:.3f} "
        f"({100 * (last / first - 1):+.0f} %)"
    )
    output.print(
        f"{movement.prompts}: training never moved {movement.unmoved_rocks} of the rocks (stuck on both halves of the "
        f"prompts); they are {percent(movement.unmoved_token_share)} of the tokens "
        f"({percent(movement.unmoved_digit_token_share)} digits) and {percent(movement.unmoved_kl_share)} of the kl "
        "that is left"
    )
    output.print(
        "the study is short, and two seeds and few steps decide nothing: `rocktokens study pebbles-paper` and "
        "`rocktokens study pebbles-coarse` are longer"
    )
    output.print(f"files: {run}, figures in {run / 'figures'}", soft_wrap=True, markup=False)
    output.print(f"all of it on one page: {run / 'report.html'}", soft_wrap=True, markup=False)
    output.print(
        f"how sure is all this, and what else is there? rocktokens find {run}, also gradients and knockout",
        soft_wrap=True,
        markup=False,
    )
