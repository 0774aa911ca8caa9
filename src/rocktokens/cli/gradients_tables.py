"""What ``rocktokens gradients`` prints: the verdicts on the paper's claims, then the numbers they rest on.

Every table says which space it is of. A dash stands for what is not defined.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from rocktokens.cli.common import output
from rocktokens.cli.tables import heading, print_lines, print_table
from rocktokens.display.numbers import Show, counted, decimal, fixed, listed, p_value, percent, points, significant
from rocktokens.display.table import STYLES, WIDE, Cell, Column, Table, ends, number, text, token
from rocktokens.display.text import for_terminal, printable
from rocktokens.gradients.records import (
    CONTRADICTED,
    INCONCLUSIVE,
    ROCKS,
    SUPPORTED,
    BatchMean,
    BySpace,
    Claim,
    ControlGroup,
    GradientsRecord,
    GroupGradient,
    GroupPersistence,
    GroupTest,
    PartitionShares,
    SharesRecord,
    Space,
    SpacePersistence,
    UpdateGeometry,
    WithError,
)

At = Literal["reference", "baseline"]
SPACE_NAMES: dict[Space, str] = {"vocabulary": "over the vocabulary", "hidden": "in the student's last hidden state"}
TEST_NAMES = {
    "mean_norm": "mean ‖g‖",
    "norm": "‖ḡ‖",
    "coherence": "coherence",
    "cos_balanced": "cos with G_bal",
    "cos_pooled": "cos with G",
    "contribution": "contrib",
}
GROUP_LEGEND = (
    "‖ḡ‖, coherence: medians over the types · coherence: mean cosine of two occurrences, weighted by their norms · "
    "cosines: of the group's sum with G_bal (every type once) and G (every token once) · G: signed share of G"
)
TYPE_LEGEND = (
    "cos G_bal: with its own part, as in the paper · others: with the types that are no rocks, itself left out · "
    "contrib: freq · ‖ḡ‖ · cos G_bal · then: cosine with the baseline, noise corrected; a dash where halves of the "
    "prompts do not agree on a direction"
)


def print_gradients(record: GradientsRecord, show: int) -> None:
    """Print everything, in the order a reader asks."""
    print_claims(record.claims)
    print_lines("", *_conditions(record))
    _print_logit_space(record)
    _print_persistence(record)
    _print_parameter_space(record)
    heading("By category", "shares of the tokens, of Σ‖g‖ (logit space), of the gradient and of Adam's step")
    print_table(category_table(record))
    heading("The types with the most gradient", "logit space over the vocabulary")
    print_table(type_table(record, show))


def print_claims(claims: Sequence[Claim]) -> None:
    """Print the verdict on each of the paper's claims, and why."""
    verdicts = [own.verdict for own in claims]
    found = [f"{verdicts.count(word)} {word}" for word in (SUPPORTED, CONTRADICTED, INCONCLUSIVE)]
    heading("The paper's claims on this run", f"{listed(found)}, each by an interval or a test (docs/gradients.md)")
    for own in claims:
        verdict = for_terminal(own.verdict, STYLES[own.verdict])
        output.print(for_terminal(f"· {own.claim}: ") + verdict + for_terminal(f"; {own.because}"))


def _conditions(record: GradientsRecord) -> Iterator[str]:
    settings = record.settings
    yield (
        f"Checkpoint {settings.reference}, compared with {settings.baseline}: {settings.n_tokens:,} tokens of "
        f"{counted(settings.n_rollouts, 'rollout')}, {counted(settings.n_prompts, 'prompt')} "
        f"({settings.measured_on})."
    )
    yield control_sentence(record.control)
    for warning in record.warnings:
        yield f"warning: {printable(warning)}"


def control_sentence(control: ControlGroup) -> str:
    """Say how well the control matches the rocks."""
    within = f"within ±{100 * control.tolerance:g} % of"
    if control.kind == "none":
        return f"Control: none, no other type is {within} a rock's frequency."
    kinds = {"matched": "every rock has a partner", "partial": "a partial match"}
    is_loose = control.kind == "partial" and control.n_matched == control.n_rocks
    kind = "a loose match, not as frequent in all," if is_loose else kinds[control.kind]
    overlap = f"; {control.n_high_mean_kl} of them would be high-mean-kl types" if control.n_high_mean_kl else ""
    return (
        f"Control: {kind} {within} its frequency, {control.n_matched} of {control.n_rocks} rocks; "
        f"{control.occurrences:,} occurrences beside {control.rock_occurrences:,} of all rocks "
        f"({control.matched_rock_occurrences:,} of those with a partner), over all prompts{overlap}."
    )


def _print_logit_space(record: GradientsRecord) -> None:
    for space, title in SPACE_NAMES.items():
        sketch = getattr(record.logit.reference, space).sketch
        precision = "exact" if sketch is None else f"a sketch of width {sketch.width}, standard errors after ±"
        heading(f"Logit space, {title}, checkpoint {record.settings.reference}", precision)
        print_table(group_table(record, "reference", space))
        print_table(test_table(record, space))
    if record.logit.baseline:
        heading(
            f"Logit space, {SPACE_NAMES['vocabulary']}, checkpoint {record.settings.baseline}",
            "the same tokens before",
        )
        print_table(group_table(record, "baseline", "vocabulary"))
    print_lines(GROUP_LEGEND)


def group_table(record: GradientsRecord, at: At, space: Space) -> Table:
    """Make the table of groups at the "reference" or "baseline", in one of the two spaces.

    The trace has the norms of the vocabulary at the reference, so these have intervals over prompts.
    """
    checkpoint = record.logit.reference if at == "reference" else record.logit.baseline
    if checkpoint is None:
        raise ValueError("there is no baseline")
    found, traced = getattr(checkpoint, space), record.trace.groups
    has_interval = (at, space) == ("reference", "vocabulary")

    def estimated(estimate: WithError) -> Cell:
        error = "" if found.sketch is None else f" ± {decimal(estimate.error, 3)}"
        return Cell(decimal(estimate.value, 3) + error, "number", estimate.value)

    columns: list[Column[tuple[str, GroupGradient]]] = [
        Column("group", lambda own: text(own[0])),
        Column("types", lambda own: number(own[1].n_types)),
        Column("tokens", lambda own: number(own[1].token_share, percent)),
        Column("Σ‖g‖", lambda own: number(own[1].norm_share, percent)),
        *([Column("95 %", lambda own: ends(traced[own[0]].norm_share_interval, percent))] if has_interval else []),
        Column("mean ‖g‖", lambda own: number(own[1].mean_norm, fixed(3))),
        Column("‖ḡ‖", lambda own: number(own[1].medians["norm"], fixed(3))),
        Column("coherence", lambda own: number(own[1].medians["coherence"], fixed(3))),
        Column("cos G_bal", lambda own: estimated(own[1].cos_balanced)),
        Column("cos G", lambda own: estimated(own[1].cos_pooled)),
        Column("G", lambda own: estimated(own[1].signed_share)),
    ]
    return Table.of("groups", columns, found.groups.items())


def test_table(record: GradientsRecord, space: Space) -> Table:
    """Make the table of Mann–Whitney tests of the rocks against each other group."""
    tests = [own for own in getattr(record.logit.reference, space).tests if own.first == ROCKS]
    others = list(dict.fromkeys(own.second for own in tests))
    rows = [
        (title, {own.second: own for own in tests if own.column == column})
        for column, title in TEST_NAMES.items()
        if any(own.column == column for own in tests)
    ]

    def tested(own: GroupTest | None) -> Cell:
        return Cell("—" if own is None else f"{decimal(own.median_second, 3)}, {p_value(own.p)}", "number")

    columns: list[Column[tuple[str, dict[str, GroupTest]]]] = [
        Column("Mann–Whitney", lambda row: text(row[0])),
        Column("rocks", lambda row: number(next(iter(row[1].values())).median_first, fixed(3))),
        *(Column(f"{other}, p", lambda row, other=other: tested(row[1].get(other))) for other in others),
    ]
    return Table.of("tests", columns, rows)


def _print_persistence(record: GradientsRecord) -> None:
    settings, title = record.settings, "The same push at both checkpoints?"
    if not record.logit.persistence:
        return heading(title, "there is only one checkpoint")
    heading(
        title,
        f"cosines of mean gradients at {settings.baseline} and {settings.reference}, medians over types, beside "
        "those of two halves of the prompts, between which nothing changed",
    )
    return print_table(persistence_table(record.logit.persistence, "vocabulary"))


def persistence_table(persistence: BySpace[SpacePersistence], space: Space) -> Table:
    """Make the table of cosines between the checkpoints, beside what chance makes of them."""
    titles = {
        "cosine": "cosine",
        "cross_half": "across halves",
        "split_half_before": "halves before",
        "split_half_after": "halves after",
        "corrected": "noise corrected",
    }
    columns: list[Column[tuple[str, GroupPersistence]]] = [
        Column("group", lambda own: text(own[0])),
        Column("types", lambda own: number(own[1].n_types)),
        *(
            Column(title, lambda own, name=name: number(getattr(own[1], name), fixed(3)))
            for name, title in titles.items()
        ),
    ]
    return Table.of("persistence", columns, getattr(persistence, space).groups.items())


def _print_parameter_space(record: GradientsRecord) -> None:
    parameter = record.parameter
    shares = parameter.shares
    heading(
        f"Parameter space, checkpoint {record.settings.reference}",
        f"means over {shares.n_batches} batches with 95 % intervals; shares are signed and sum to 1",
    )
    if parameter.note:
        print_lines(parameter.note)
    print_table(parameter_table(parameter))
    print_table(cosine_table(shares))
    if shares.update:
        heading(
            "Adam's view", "each group's part of the optimizer's next step; rate: step per gradient, 1 for the whole"
        )
        print_table(adam_table(shares.update))
        print_lines(step_sentence(shares.update.step_shares))
    heading("By block of the student", "where the gradient is, and the rocks' part of it there")
    print_table(block_table(shares))


def parameter_table(parameter: PartitionShares) -> Table:
    """Make the table of each group's part of the gradient."""
    own_of = parameter.shares.gradient.all.groups
    columns: list[Column[str]] = [
        Column("group", text),
        Column("tokens", lambda name: number(parameter.token_share[name], percent)),
        Column("‖g‖", lambda name: number(own_of[name].norm.mean, significant)),
        Column("cos with all", lambda name: number(own_of[name].cosine.mean, fixed(2))),
        *_share_columns("share", lambda name: own_of[name].share),
        *_share_columns("share − tokens", lambda name: parameter.excess[name], points),
    ]
    return Table.of("parameter", columns, parameter.shares.groups)


def adam_table(update: UpdateGeometry) -> Table:
    """Make the table of each group's part of Adam's next step, beside its part of the gradient."""
    own_of, effects = update.all.groups, update.effects
    columns: list[Column[str]] = [
        Column("group", text),
        *_share_columns("share", lambda name: own_of[name].share),
        *_share_columns("step − gradient", lambda name: effects[name].difference, points),
        Column("Adam", lambda name: text(effects[name].verdict)),
        Column("rate", lambda name: number(None if (rate := own_of[name].rate) is None else rate.mean, fixed(2))),
    ]
    return Table.of("adam", columns, own_of)


def cosine_table(shares: SharesRecord) -> Table:
    """Make the table of cosines between the groups' gradients."""
    cosines = shares.gradient.cosines
    columns: list[Column[str]] = [
        Column("cosine of gradients", text),
        *(
            Column(other, lambda name, other=other: number(cosines[name][other].mean, fixed(2)))
            for other in shares.groups
        ),
    ]
    return Table.of("cosines", columns, cosines)


def step_sentence(parts: Mapping[str, BatchMean]) -> str:
    """Say what the whole next step is made of."""
    made_of = ", ".join(f"{name} {percent(part.mean)}" for name, part in parts.items())
    return f"Adam's whole next step, earlier batches included: {made_of}."


def block_table(shares: SharesRecord) -> Table:
    """Make the table of where the gradient is, and the rocks' part of it there."""
    gradient, update = shares.gradient.blocks, shares.update
    columns: list[Column[str]] = [
        Column("block", text),
        Column("‖g‖² there", lambda block: number(gradient[block].energy.mean, percent)),
        *_share_columns("rocks' share", lambda block: gradient[block].groups[ROCKS].share),
    ]
    if update:
        columns += _share_columns("of the step", lambda block: update.blocks[block].groups[ROCKS].share)
    return Table.of("blocks", columns, shares.blocks)


def category_table(record: GradientsRecord) -> Table:
    """Make the table of shares by category in both spaces."""
    logit, shares = (
        record.logit.reference.vocabulary.categories,
        record.parameter.categories.shares,
    )
    update = shares.update
    columns: list[Column[str]] = [
        Column("category", text),
        Column("types", lambda name: number(logit[name].n_types)),
        Column("tokens", lambda name: number(logit[name].token_share, percent)),
        Column("Σ‖g‖", lambda name: number(logit[name].norm_share, percent)),
        *_share_columns("gradient", lambda name: shares.gradient.all.groups[name].share),
    ]
    if update:
        columns += _share_columns("step", lambda name: update.all.groups[name].share)
    return Table.of("categories", columns, shares.groups)


def _share_columns(title: str, estimate: Callable[[str], BatchMean], show: Show = percent) -> list[Column[str]]:
    """Make two columns of an estimate over batches: its mean and its interval."""
    return [
        Column(title, lambda name: number(estimate(name).mean, show)),
        Column("95 %", lambda name: ends(estimate(name).interval, show)),
    ]


def type_table(record: GradientsRecord, show: int) -> Table:
    """Make the table of the types with the largest shares of Σ‖g‖."""
    columns: list[Column[dict[str, Any]]] = [
        Column("token", lambda own: token(own["text"])),
        Column("group", lambda own: text(own["group"])),
        Column("freq", lambda own: number(own["freq"])),
        Column("Σ‖g‖", lambda own: number(own["share"], percent)),
        Column("mean ‖g‖", lambda own: number(own["mean_norm"], fixed(3))),
        Column("‖ḡ‖", lambda own: number(own["norm"], fixed(3)), room=WIDE),
        Column("coherence", lambda own: number(own["coherence"], fixed(2))),
        Column("cos G_bal", lambda own: number(own["cos_balanced"], fixed(2))),
        Column("others", lambda own: number(own["cos_others"], fixed(2))),
        Column("cos G", lambda own: number(own["cos_pooled"], fixed(2)), room=WIDE),
        Column("contrib", lambda own: number(own["contribution"], significant), room=WIDE),
        Column("then", lambda own: number(own["corrected"], fixed(2))),
    ]
    rows = sorted(type_rows(record), key=lambda row: -row["share"])[:show]
    return Table.of("types", columns, rows, notes=[TYPE_LEGEND])


def type_rows(record: GradientsRecord) -> list[dict[str, Any]]:
    """Join what is known of every type: text and group from the trace, numbers over the vocabulary, what persists."""
    change = record.logit.persistence
    tables = [record.trace.types, record.logit.reference.vocabulary.types]
    tables += [change.vocabulary.types] if change else []
    rows: dict[int, dict[str, Any]] = {}
    for columns in map(asdict, tables):
        for place, token_id in enumerate(columns["token_id"]):
            own = rows.setdefault(token_id, {"corrected": None})
            own |= {name: column[place] for name, column in columns.items()}
    return [row for row in rows.values() if "share" in row and "text" in row]
