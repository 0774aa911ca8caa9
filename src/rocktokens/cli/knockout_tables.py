"""What ``rocktokens knockout`` prints: what bans did, what placebos did, and what the sample could have shown.

Changes of accuracy are in points (hundredths), with intervals; a dash stands for what is not known.
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from rocktokens.cli.common import output, percent, percent_interval
from rocktokens.cli.tables import WIDE, decimal, heading, p_value, plain_table
from rocktokens.display.text import printable, visible
from rocktokens.knockout.records import Ban, Knockout, KnockoutSweep, Role
from rocktokens.types import Verdict

ROLES: dict[Role, str] = {"tested": "tested", "matched": "placebo, as frequent", "never": "placebo, never written"}
RULES = {"method": "ours", "paper": "the paper's", "corrected": "ours, corrected"}
KINDS: tuple[Verdict, ...] = ("pillar", "stumbling", "neutral", "undecided")
COLUMN_NAMES = {"entropy": "student entropy", "log_freq": "log frequency", "kl": "kl"}
NOT_NARROW = ("id", "category", "p", "length")
"""Columns of the bans that only a wide screen has room for."""
WEAK = 0.2
"""A rank correlation that is surely no stronger than this is called weak."""


def print_sweep(sweep: KnockoutSweep, rule: str, show: int) -> None:
    """Everything, in the order a reader asks; the table has the verdicts of ``rule``, "method" or "paper"."""
    print_verdicts(sweep, rule, show)
    output.print(delta_table(sweep))
    for line in _beyond_placebos(sweep):
        output.print(line, highlight=False)
    heading("What these prompts could have shown", "losses that are seen four times in five")
    output.print(detectable_sentence(sweep), highlight=False)
    _print_correlations(sweep)


def print_verdicts(sweep: KnockoutSweep, rule: str, show: int) -> None:
    """What bans did and what that is called, without what it rests on."""
    for line in _conditions(sweep):
        output.print(line, highlight=False, markup=False)
    output.print()
    output.print(ban_table(sweep, rule, show))
    for line in _remarks(sweep):
        output.print(line, highlight=False)
    heading("Verdicts, beside those of placebos", "by both rules, and corrected for the number of bans")
    output.print(count_table(sweep))


def _conditions(sweep: KnockoutSweep) -> Iterator[str]:
    baseline, cost, noise = sweep.baseline, sweep.cost, sweep.noise
    settings = sweep.settings
    yield (
        f"without a ban {percent(baseline['accuracy'])} {percent_interval(baseline['interval'])} of the answers are "
        f"right: {settings['model']} at temperature {settings['temperature']:g} on {settings['task']}, "
        f"{baseline['n_prompts']} prompts × {baseline['num_samples']}"
    )
    yield (
        f"decoded {cost['decoded_tokens']:,} tokens and retraced {cost['retraced_tokens']:,}, {cost['share']:.2f} of "
        f"the {cost['full_sweep_tokens']:,} of a full sweep"
    )
    if not noise["differing"]:
        yield f"the free rollouts decoded again: 0 of {noise['rollouts']} differ"
    for warning in sweep.warnings:
        yield f"warning: {warning}"
    if noise["differing"]:
        yield (
            f"without any ban, the second time changes accuracy by {points(noise['delta'])} points "
            f"{percent_interval(noise['interval'])}"
        )


def ban_table(sweep: KnockoutSweep, rule: str, show: int, width: int | None = None) -> Table:
    """The tested bans that change most, in order of Δ."""
    tested = sweep.of_role("tested")
    cells: dict[str, Callable[[Knockout], str | Text]] = {
        "banned": lambda own: Text(_name(own.ban)),
        "id": lambda own: str(own.ban.ids[0]) if len(own.ban.ids) == 1 else "—",
        "category": lambda own: Text(own.ban.category),
        "in": lambda own: str(own.changes.n_rollouts),
        "Δ": lambda own: points(own.delta),
        f"{100 * (1 - sweep.settings['alpha']):g} %": lambda own: percent_interval(own.interval) or "—",
        "p": lambda own: p_value(own.p),
        "q": lambda own: p_value(own.q),
        "verdict": lambda own: _verdict(own, rule) + ("" if own.stopped is None else " *"),
        "replaced by": lambda own: Text(_replacement(own)),
        "length": lambda own: "—" if own.changes.length is None else f"{own.changes.length:+.1f}",
    }
    hidden = NOT_NARROW if (width or output.width) < WIDE else ()
    shown = {name: cell for name, cell in cells.items() if name not in hidden}
    title = _bans(len(tested)) if show >= len(tested) else f"the {show} of {len(tested)} bans that change most"
    table = plain_table(list(shown), ("banned", "category", "verdict", "replaced by"), title)
    for own in most_changing(tested, show):
        table.add_row(*(cell(own) for cell in shown.values()))
    return table


def most_changing(knockouts: Sequence[Knockout], show: int) -> list[Knockout]:
    """Pillars and stumbling blocks first, then the largest changes; the chosen ones in order of Δ."""
    strongest = sorted(knockouts, key=lambda own: (own.verdict not in ("pillar", "stumbling"), -abs(own.delta or 0.0)))
    return sorted(strongest[:show], key=_place)


def _place(own: Knockout) -> float:
    """Δ, or where it would be if it were known."""
    if own.delta is not None:
        return own.delta
    return {"pillar": -1.0, "stumbling": 1.0}.get(own.verdict, 0.0)


def _remarks(sweep: KnockoutSweep) -> Iterator[str]:
    tested = sweep.of_role("tested")
    yield (
        "in: free answers that hold it, all others are the same · Δ: points of accuracy · q: p corrected "
        "(Benjamini–Hochberg) · replaced by: what comes in its place most often · length: tokens more or fewer there"
    )
    if stopped := [own for own in tested if own.stopped]:
        yield f"* {len(stopped)} stopped before all prompts were looked at{_stopped(sweep.settings['mode'])}"
    if absent := sum(own.changes.n_rollouts == 0 for own in tested):
        yield f"in no free answer: {absent} of the {len(tested)}; banning these changes nothing here, exactly"


def _stopped(mode: str) -> str:
    if mode == "curtailed":
        return ": their verdicts could not change any more, their Δ is not known"
    return ": their numbers are forecasts for all prompts, made from those that were"


def count_table(sweep: KnockoutSweep) -> Table:
    """How many bans are called what, by who was banned and by which rule."""
    table = plain_table(["banned", "rule", *KINDS], ("banned", "rule"))
    for role, who in ROLES.items():
        own = sweep.of_role(role)
        for rule, name in RULES.items() if own else ():
            counts = sweep.counts[role][rule]
            cells = ["—" if counts is None else str(counts[kind]) for kind in KINDS]
            table.add_row(who if rule == "method" else "", name, *cells)
    return table


def delta_table(sweep: KnockoutSweep) -> Table:
    """How Δ is spread over what was tested and over the placebos."""
    table = plain_table(["Δ in points", "bans", "known", "median", "lowest", "highest"], ("Δ in points",))
    for role, who in ROLES.items():
        if own := sweep.of_role(role):
            deltas = _deltas(own)
            spread = [statistic(deltas) if deltas else None for statistic in (median, min, max)]
            table.add_row(who, str(len(own)), str(len(deltas)), *map(points, spread))
    return table


def _beyond_placebos(sweep: KnockoutSweep) -> Iterator[str]:
    tested, placebos = _deltas(sweep.of_role("tested")), _deltas(sweep.of_role("matched"))
    if not placebos:
        yield "no placebo as frequent as what was tested was banned, so there is nothing to set the changes beside"
    elif tested:
        below, above = (sum(own < min(placebos) for own in tested), sum(own > max(placebos) for own in tested))
        yield (
            f"of the {len(tested)} tested, {below} have a Δ below that of every one of the {len(placebos)} placebos as "
            f"frequent, and {above} one above"
        )


def detectable_sentence(sweep: KnockoutSweep) -> str:
    """From which loss on a ban would have been called a pillar."""
    single, corrected = (sweep.detectable[name] for name in ("single", "corrected"))
    count = len(sweep.of_role("tested"))
    if single >= 1:
        return f"nothing: with {sweep.baseline['n_prompts']} prompts no loss would be called a pillar"
    after = "none at all" if corrected >= 1 else f"{100 * corrected:.1f} points"
    correction = f"; corrected for {_bans(count)}: {after}" if count > 1 else ""
    return (
        f"{100 * single:.1f} points, for a ban that does nothing but turn right answers wrong{correction}. A ban that "
        "moves other answers too needs more: each one's own figure is in knockout.json"
    )


def _print_correlations(sweep: KnockoutSweep) -> None:
    from rocktokens.knockout.correlates import FEWEST_TYPES

    if all(record["n"] < FEWEST_TYPES for record in sweep.correlations):
        return
    heading("Does Δ go with what the trace says of a type?", "Spearman's ρ over the tested types, 95 % intervals")
    table = plain_table(["Δ with", "ρ", "95 %", "p", "types"], ("Δ with",))
    for record in sweep.correlations:
        interval = record["interval"]
        table.add_row(
            COLUMN_NAMES[record["name"]],
            decimal(record["rho"], 2),
            "—" if interval is None else "[{:.2f}, {:.2f}]".format(*interval),
            p_value(record["p"]),
            str(record["n"]),
        )
    output.print(table)
    output.print(orthogonality_sentence(sweep.correlations), highlight=False)


def orthogonality_sentence(correlations: Sequence[dict[str, Any]]) -> str:
    """Whether the paper's claim, that Δ has nothing to do with any of them, can be told."""
    claim = "the paper's claim that Δ is unrelated to all of them"
    known = [record for record in correlations if record["interval"] is not None]
    related = [record for record in known if not record["interval"][0] <= 0 <= record["interval"][1]]
    if related:
        names = " and ".join(COLUMN_NAMES[record["name"]] for record in related)
        return f"Δ goes with {names}: {claim} does not hold here"
    if len(known) < len(correlations) or not known:
        return f"too few different values for all intervals: {claim} cannot be told"
    strongest = max(abs(end) for record in known for end in record["interval"])
    if strongest <= WEAK:
        return f"every ρ is surely within ±{WEAK}: {claim} holds, as far as the noise of Δ lets a ρ show"
    return (
        f"every interval includes 0, and the widest reaches |ρ| = {strongest:.2f}: {claim} can be neither confirmed "
        "nor refuted with these types"
    )


def points(delta: float | None) -> str:
    """A change of accuracy in points, signed unless it is 0."""
    if delta is None:
        return "—"
    return f"{100 * delta:+.1f}" if delta else "0.0"


def _bans(count: int) -> str:
    return "1 ban" if count == 1 else f"{count} bans"


def _deltas(knockouts: Sequence[Knockout]) -> list[float]:
    return [own.delta for own in knockouts if own.delta is not None]


def _verdict(own: Knockout, rule: str) -> Verdict:
    return own.paper_verdict if rule == "paper" else own.verdict


def _name(ban: Ban) -> str:
    """A token with its spaces visible; a set by its name."""
    return visible(ban.name) if len(ban.ids) == 1 else printable(ban.name)


def _replacement(own: Knockout) -> str:
    if not own.changes.replacements:
        return "—"
    _, text, share = own.changes.replacements[0]
    return f"{visible(text)} {100 * share:.0f} %"
