"""What ``rocktokens gradients`` prints: what holds of the paper's paradox, then the numbers it rests on.

Every table says which space it is of. A dash stands for what is not defined.
"""

from collections.abc import Callable, Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from rocktokens.cli.common import output, percent, percent_interval
from rocktokens.cli.tables import WIDE, decimal, heading, p_value, plain_table
from rocktokens.display.text import visible
from rocktokens.gradients.records import ROCKS

SPACE_NAMES = {"vocabulary": "over the vocabulary", "hidden": "in the student's last hidden state"}
TEST_NAMES = {
    "mean_norm": "mean ‖g‖",
    "norm": "‖ḡ‖",
    "coherence": "coherence",
    "cos_balanced": "cos with G_bal",
    "cos_pooled": "cos with G",
    "contribution": "contrib",
}
VERDICT_STYLES = {"supported": "bold green", "contradicted": "bold red", "inconclusive": "bold yellow"}
GROUP_LEGEND = (
    "‖ḡ‖, coherence: medians over the types · coherence: mean cosine of two occurrences, weighted by their norms · "
    "cosines: of the group's sum with G_bal (every type once) and G (every token once) · G: signed share of G"
)
TYPE_LEGEND = (
    "cos G_bal: with its own part, as in the paper · others: with the types that are no rocks, itself left out · "
    "contrib: freq · ‖ḡ‖ · cos G_bal · then: cosine with the baseline, noise corrected; a dash where halves of the "
    "prompts do not agree on a direction"
)
NOT_NARROW = ("contrib", "cos G", "‖ḡ‖")
"""Columns of the types that only a wide screen has room for."""


def print_gradients(record: dict[str, Any], show: int) -> None:
    """Everything, in the order a reader asks."""
    for line in _conditions(record):
        output.print(line, highlight=False, markup=False)
    print_claims(record)
    _print_logit_space(record)
    _print_persistence(record)
    _print_parameter_space(record)
    heading("By category", "shares of the tokens, of Σ‖g‖ (logit space), of the gradient and of Adam's step")
    output.print(category_table(record))
    heading("The types with the most gradient", "logit space over the vocabulary")
    output.print(type_table(record, show))
    output.print(TYPE_LEGEND, highlight=False)


def print_claims(record: dict[str, Any]) -> None:
    """What holds of the paper's paradox here."""
    heading("What holds of the paper's paradox here", "each decided by an interval or a test (docs/gradients.md)")
    for claim in record["claims"]:
        verdict = Text(claim["verdict"], style=VERDICT_STYLES[claim["verdict"]])
        output.print(Text(f"· {claim['claim']}: ") + verdict + Text(f"; {claim['because']}"))


def _conditions(record: dict[str, Any]) -> Iterator[str]:
    settings = record["settings"]
    yield (
        f"checkpoint {settings['reference']}, compared with {settings['baseline']}: {settings['n_tokens']:,} tokens of "
        f"{settings['n_rollouts']} rollouts, {settings['n_prompts']} prompts ({settings['measured_on']})"
    )
    yield control_sentence(record["control"])
    for warning in record["warnings"]:
        yield f"warning: {warning}"


def control_sentence(control: dict[str, Any]) -> str:
    """How well the control matches the rocks."""
    if control["kind"] == "none":
        return f"control: none, no other type is within ±{100 * control['tolerance']:g} % of a rock's frequency"
    kinds = {"matched": "every rock has a partner", "partial": "a partial match"}
    is_loose = control["kind"] == "partial" and control["n_matched"] == control["n_rocks"]
    kind = "a loose match, not as frequent in all," if is_loose else kinds[control["kind"]]
    overlap = f"; {control['n_rare_high_kl']} of them would be rare high-kl types" if control["n_rare_high_kl"] else ""
    return (
        f"control: {kind} within ±{100 * control['tolerance']:g} % of its frequency, {control['n_matched']} of "
        f"{control['n_rocks']} rocks; {control['occurrences']:,} occurrences beside {control['rock_occurrences']:,} of "
        f"all rocks ({control['matched_rock_occurrences']:,} of those with a partner), over all prompts{overlap}"
    )


def _print_logit_space(record: dict[str, Any]) -> None:
    for space, title in SPACE_NAMES.items():
        heading(f"Logit space, {title}, checkpoint {record['settings']['reference']}", _precision(record, space))
        output.print(group_table(record, "reference", space))
        output.print(test_table(record, space))
    if record["logit"]["baseline"]:
        title = f"Logit space, {SPACE_NAMES['vocabulary']}, checkpoint {record['settings']['baseline']}"
        heading(title, "the same tokens before")
        output.print(group_table(record, "baseline", "vocabulary"))
    output.print(GROUP_LEGEND, highlight=False)


def _precision(record: dict[str, Any], space: str) -> str:
    sketch = record["logit"]["reference"][space]["sketch"]
    return "exact" if sketch is None else f"a sketch of width {sketch['width']}, with standard errors after ±"


def group_table(record: dict[str, Any], at: str, space: str) -> Table:
    """What each group amounts to at the "reference" or "baseline", in one of the two spaces.

    The trace has the norms of the vocabulary at the reference, so these have intervals over prompts.
    """
    found, has_interval = record["logit"][at][space], (at, space) == ("reference", "vocabulary")
    interval = ["95 %"] if has_interval else []
    columns = ["group", "types", "tokens", "Σ‖g‖", *interval, "mean ‖g‖", "‖ḡ‖", "coherence", "cos G_bal", "cos G", "G"]
    table = plain_table(columns, ("group",))
    for name, group in found["groups"].items():
        ends = [percent_interval(record["trace"]["groups"][name]["norm_share_interval"]) or "—"] if has_interval else []
        table.add_row(
            name,
            str(group["n_types"]),
            percent(group["token_share"]),
            percent(group["norm_share"]),
            *ends,
            decimal(group["mean_norm"], 3),
            *(decimal(group["medians"][column], 3) for column in ("norm", "coherence")),
            *(_estimated(group[column], found["sketch"]) for column in ("cos_balanced", "cos_pooled", "signed_share")),
        )
    return table


def test_table(record: dict[str, Any], space: str) -> Table:
    """Mann–Whitney's tests of the rocks against each other group."""
    tests = [test for test in record["logit"]["reference"][space]["tests"] if test["first"] == ROCKS]
    others = list(dict.fromkeys(test["second"] for test in tests))
    table = plain_table(["Mann–Whitney", "rocks", *(f"{other}, p" for other in others)], ("Mann–Whitney",))
    for column, title in TEST_NAMES.items():
        own = [test for test in tests if test["column"] == column]
        if own:
            cells = [f"{decimal(test['median_second'], 3)}, {p_value(test['p'])}" for test in own]
            table.add_row(title, decimal(own[0]["median_first"], 3), *cells)
    return table


def _print_persistence(record: dict[str, Any]) -> None:
    settings = record["settings"]
    if not record["logit"]["persistence"]:
        return heading("The same push at both checkpoints?", "there is one checkpoint only")
    heading(
        "The same push at both checkpoints?",
        f"cosines of mean gradients at {settings['baseline']} and {settings['reference']}, medians over types, beside "
        "those of two halves of the prompts, between which nothing changed",
    )
    output.print(persistence_table(record, "vocabulary"))


def persistence_table(record: dict[str, Any], space: str) -> Table:
    """Cosines between the checkpoints, beside what chance makes of them."""
    columns = {
        "cosine": "cosine",
        "cross_half": "across halves",
        "split_half_before": "halves before",
        "split_half_after": "halves after",
        "corrected": "noise corrected",
    }
    table = plain_table(["group", "types", *columns.values()], ("group",))
    for name, group in record["logit"]["persistence"][space]["groups"].items():
        table.add_row(name, str(group["n_types"]), *(decimal(group[column], 3) for column in columns))
    return table


def _print_parameter_space(record: dict[str, Any]) -> None:
    parameter = record["parameter"]
    shares = parameter["shares"]
    heading(
        f"Parameter space, checkpoint {record['settings']['reference']}",
        f"means over {shares['n_batches']} batches with 95 % intervals; shares are signed and sum to 1",
    )
    if parameter["note"]:
        output.print(parameter["note"], highlight=False, markup=False)
    output.print(parameter_table(parameter))
    output.print(cosine_table(shares))
    if shares["update"]:
        heading(
            "Adam's view", "each group's part of the optimizer's next step; rate: step per gradient, 1 for the whole"
        )
        output.print(adam_table(shares["update"]))
        output.print(step_sentence(shares["update"]["step_shares"]), highlight=False)
    heading("By block of the student", "where the gradient is, and the rocks' part of it there")
    output.print(block_table(shares))


def parameter_table(parameter: dict[str, Any]) -> Table:
    """Each group's part of the gradient."""
    table = plain_table(
        ["group", "tokens", "‖g‖", "cos with all", "share", "95 %", "share − tokens", "95 %"], ("group",)
    )
    for name in parameter["shares"]["groups"]:
        own = parameter["shares"]["gradient"]["all"]["groups"][name]
        table.add_row(
            name,
            percent(parameter["token_share"][name]),
            _number(own["norm"]["mean"]),
            decimal(own["cosine"]["mean"], 2),
            *_share_cells(own["share"]),
            *_share_cells(parameter["excess"][name], signed=True),
        )
    return table


def adam_table(update: dict[str, Any]) -> Table:
    """Each group's part of Adam's next step, beside its part of the gradient."""
    table = plain_table(["group", "share", "95 %", "step − gradient", "95 %", "Adam", "rate"], ("group", "Adam"))
    for name, own in update["all"]["groups"].items():
        effect = update["effects"][name]
        table.add_row(
            name,
            *_share_cells(own["share"]),
            *_share_cells(effect["difference"], signed=True),
            effect["verdict"],
            decimal(own["rate"]["mean"], 2),
        )
    return table


def cosine_table(shares: dict[str, Any]) -> Table:
    """Cosines between the groups' gradients."""
    table = plain_table(["cosine of gradients", *shares["groups"]], ("cosine of gradients",))
    for name, row in shares["gradient"]["cosines"].items():
        table.add_row(name, *(decimal(row[other]["mean"], 2) for other in shares["groups"]))
    return table


def step_sentence(parts: dict[str, Any]) -> str:
    """What the whole next step is made of."""
    made_of = ", ".join(f"{name} {percent(part['mean'])}" for name, part in parts.items())
    return f"Adam's whole next step, earlier batches included: {made_of}"


def block_table(shares: dict[str, Any]) -> Table:
    """Where the gradient is, and the rocks' part of it there."""
    update = shares["update"]
    columns = ["block", "‖g‖² there", "rocks' share", "95 %", *(("of the step", "95 %") if update else ())]
    table = plain_table(columns, ("block",))
    for block in shares["blocks"]:
        there = shares["gradient"]["blocks"][block]
        cells = [percent(there["energy"]["mean"]), *_share_cells(there["groups"][ROCKS]["share"])]
        if update:
            cells += _share_cells(update["blocks"][block]["groups"][ROCKS]["share"])
        table.add_row(block, *cells)
    return table


def category_table(record: dict[str, Any]) -> Table:
    """Shares by category in both spaces."""
    logit, parameter = record["logit"]["reference"]["vocabulary"]["categories"], record["parameter"]["categories"]
    shares = parameter["shares"]
    update = shares["update"]
    columns = ["category", "types", "tokens", "Σ‖g‖", "gradient", "95 %", *(("step", "95 %") if update else ())]
    table = plain_table(columns, ("category",))
    for name in shares["groups"]:
        own = logit[name]
        cells = [str(own["n_types"]), percent(own["token_share"]), percent(own["norm_share"])]
        cells += _share_cells(shares["gradient"]["all"]["groups"][name]["share"])
        if update:
            cells += _share_cells(update["all"]["groups"][name]["share"])
        table.add_row(name, *cells)
    return table


def type_table(record: dict[str, Any], show: int, width: int | None = None) -> Table:
    """The types with the largest shares of Σ‖g‖."""
    hidden = NOT_NARROW if (width or output.width) < WIDE else ()
    cells = {name: cell for name, cell in _TYPE_CELLS.items() if name not in hidden}
    table = plain_table(list(cells), ("token", "group"))
    for row in sorted(type_rows(record), key=lambda row: -row["share"])[:show]:
        table.add_row(*(cell(row) for cell in cells.values()))
    return table


_TYPE_CELLS: dict[str, Callable[[dict[str, Any]], str | Text]] = {
    "token": lambda row: Text(visible(row["text"])),
    "group": lambda row: row["group"],
    "freq": lambda row: str(row["freq"]),
    "Σ‖g‖": lambda row: percent(row["share"]),
    "mean ‖g‖": lambda row: decimal(row["mean_norm"], 3),
    "‖ḡ‖": lambda row: decimal(row["norm"], 3),
    "coherence": lambda row: decimal(row["coherence"], 2),
    "cos G_bal": lambda row: decimal(row["cos_balanced"], 2),
    "others": lambda row: decimal(row["cos_others"], 2),
    "cos G": lambda row: decimal(row["cos_pooled"], 2),
    "contrib": lambda row: _number(row["contribution"]),
    "then": lambda row: decimal(row["corrected"], 2),
}


def type_rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Every type: text, category and group from the trace, its numbers over the vocabulary, and what persists."""
    change = record["logit"]["persistence"]
    tables = [record["trace"]["types"], record["logit"]["reference"]["vocabulary"]["types"]]
    tables += [change["vocabulary"]["types"]] if change else []
    rows: dict[int, dict[str, Any]] = {}
    for table in tables:
        for place, token_id in enumerate(table["token_id"]):
            own = rows.setdefault(token_id, {"corrected": None})
            own |= {name: column[place] for name, column in table.items()}
    return [row for row in rows.values() if "share" in row and "text" in row]


def _share_cells(estimate: dict[str, Any], signed: bool = False) -> list[str]:
    mean = estimate["mean"]
    text = "—" if mean is None else f"{100 * mean:+.1f}" if signed else percent(mean)
    return [text, percent_interval(estimate["interval"]) or "—"]


def _estimated(estimate: dict[str, Any], sketch: dict[str, int] | None) -> str:
    value = decimal(estimate["value"], 3)
    return value if sketch is None else f"{value} ± {decimal(estimate['error'], 3)}"


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.3g}"
