"""What ``rocktokens knockout`` prints: what bans did; with ``--verbose`` also what the sample could have shown.

Changes of accuracy are in points (hundredths), with intervals; a dash stands for what is not known.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from rocktokens.cli.tables import heading, print_lines, print_table
from rocktokens.display.numbers import (
    counted,
    decimal,
    fixed,
    interval,
    level,
    listed,
    p_value,
    percent,
    points,
    signed,
    with_interval,
)
from rocktokens.display.table import WIDE, WIDEST, Column, Table, ends, number, text, verdict
from rocktokens.display.text import printable, visible
from rocktokens.knockout.records import Correlation, Knockout, KnockoutSweep
from rocktokens.report.knockout_notes import gold_sentences, lost_in_gold, neutral_sentence, undecided_sentence
from rocktokens.report.page.answers import placebo_sentence
from rocktokens.report.tables import KINDS, ROLES, ban_name, verdict_table

COLUMN_NAMES = {"entropy": "student entropy", "log_freq": "log frequency", "kl": "kl"}
RULE_NAMES = {"method": "by our rule", "paper": "by the paper's rule"}
OTHER_RULE = {"method": "paper", "paper": "method"}
WEAK = 0.2
"""A rank correlation whose interval lies within this is called weak."""


def print_bans(sweep: KnockoutSweep, rule: str, show: int) -> None:
    """Print the conclusion and the bans, with the verdicts of ``rule``, "method" or "paper"."""
    placebos = placebo_sentence(sweep.of_role("matched"), sweep.settings.alpha)
    print_lines(f"{conclusion(sweep, rule)} {placebos}", *brief_conditions(sweep), "")
    _print_table_of_bans(sweep, rule, show)


def print_sweep(sweep: KnockoutSweep, rule: str, show: int) -> None:
    """Print everything, in the order a reader asks; the table has the verdicts of ``rule``, "method" or "paper"."""
    print_verdicts(sweep, rule, show)
    print_table(delta_table(sweep))
    print_lines(*_beyond_placebos(sweep))
    heading("Smallest effect this sweep could detect", "with 80 % power")
    print_lines(detectable_sentence(sweep), *filter(None, [neutral_sentence(sweep)]))
    _print_correlations(sweep)


def print_verdicts(sweep: KnockoutSweep, rule: str, show: int) -> None:
    """Print what bans did and the verdicts on them, without what these rest on."""
    print_lines(conclusion(sweep, rule), *condition_sentences(sweep), "")
    _print_table_of_bans(sweep, rule, show)
    print_lines("")
    print_table(verdict_table(sweep))


def _print_table_of_bans(sweep: KnockoutSweep, rule: str, show: int) -> None:
    print_table(ban_table(sweep, rule, show))
    needs = undecided_sentence(sweep) if rule == "method" else ""
    print_lines(*gold_sentences(sweep), *filter(None, [needs]))


def conclusion(sweep: KnockoutSweep, rule: str) -> str:
    """Count the verdicts on the tested bans in one sentence, by one rule and, in brackets, by the other."""
    tested = sweep.of_role("tested")
    ours, theirs = (
        [sum(_verdict(own, by) == kind for own in tested) for kind in KINDS] for by in (rule, OTHER_RULE[rule])
    )
    kinds = {"pillar": "cost accuracy (pillar)", "stumbling": "improve it (stumbling)"}
    found = [f"{count} {kinds.get(kind, f'are {kind}')}" for kind, count in zip(KINDS, ours, strict=True)]
    other = f"{RULE_NAMES[OTHER_RULE[rule]]} {listed(list(map(str, theirs)))}"
    return f"Of {counted(len(tested), 'ban')}, {listed(found)} ({other})."


def brief_conditions(sweep: KnockoutSweep) -> Iterator[str]:
    """Say who answered what, how well without a ban, and what limits the sweep."""
    baseline, noise, settings = sweep.baseline, sweep.noise, sweep.settings
    yield (
        f"Without a ban, {with_interval(baseline.accuracy, baseline.interval)} of the answers are right: "
        f"{printable(settings.model)} at temperature {settings.temperature:g} on {settings.task}, "
        f"{baseline.n_prompts} prompts × {baseline.num_samples}."
    )
    for warning in sweep.warnings:
        yield f"warning: {printable(warning)}"
    if noise.differing:
        yield (
            f"Decoding again without a ban changes accuracy by {points(noise.delta)} points "
            f"{interval(noise.interval, points)}."
        )


def condition_sentences(sweep: KnockoutSweep) -> Iterator[str]:
    """Say the same, then what the sweep cost, and that decoding again gives the same answers where it does."""
    cost, noise = sweep.cost, sweep.noise
    yield from brief_conditions(sweep)
    yield (
        f"Decoded {cost.decoded_tokens:,} tokens and retraced {cost.retraced_tokens:,}: "
        f"{decimal(cost.share, 2)} of the {cost.full_sweep_tokens:,} of a full sweep."
    )
    if not noise.differing:
        yield f"Decoded again without a ban, 0 of {noise.rollouts} rollouts differ."


def ban_table(sweep: KnockoutSweep, rule: str, show: int) -> Table:
    """Make the table of the tested bans that change most, in order of Δ."""
    tested = sweep.of_role("tested")
    columns: list[Column[Knockout]] = [
        Column("banned", lambda own: text(ban_name(own.ban))),
        Column("id", lambda own: number(own.ban.ids[0] if own.ban.is_one_type else None, str), room=WIDE),
        Column("category", lambda own: text(own.ban.category), room=WIDE),
        Column("in", lambda own: number(own.changes.n_rollouts)),
        Column("Δ", lambda own: number(own.delta, points)),
        Column(level(sweep.settings.alpha), lambda own: ends(own.interval, points)),
        Column("p", lambda own: number(own.p, p_value), room=WIDE),
        Column("q", lambda own: number(own.q, p_value)),
        Column("verdict", lambda own: verdict(_verdict(own, rule) + ("" if own.stopped is None else " *"))),
        Column(
            "neutral at",
            lambda own: number(own.neutral_prompts if _verdict(own, rule) == "undecided" else None),
            room=WIDEST,
        ),
        Column("in gold", lambda own: text(lost_in_gold(own) if own.verdict == "pillar" else ""), room=WIDEST),
        Column("replaced by", lambda own: text(_replacement(own))),
        Column("length", lambda own: number(own.changes.length, lambda length: signed(length, 1)), room=WIDE),
    ]
    title = counted(len(tested), "ban") if show >= len(tested) else f"the {show} of {len(tested)} bans that change most"
    return Table.of("bans", columns, most_changing(tested, show), title, list(_remarks(sweep)))


def most_changing(knockouts: Sequence[Knockout], show: int) -> list[Knockout]:
    """Choose pillars and stumbling blocks first, then the largest changes; return them in order of Δ."""
    strongest = sorted(knockouts, key=lambda own: (own.verdict not in ("pillar", "stumbling"), -abs(own.delta or 0.0)))
    return sorted(strongest[:show], key=_place)


def _place(own: Knockout) -> float:
    """Return Δ, or where it would be if it were known."""
    return {"pillar": -1.0, "stumbling": 1.0}.get(own.verdict, 0.0) if own.delta is None else own.delta


def _remarks(sweep: KnockoutSweep) -> Iterator[str]:
    tested = sweep.of_role("tested")
    yield (
        "in: answers that hold the token without a ban, all others stay the same · Δ: points of accuracy · q: p "
        "corrected among the tested bans (Benjamini–Hochberg) · neutral at: prompts that would show it to be neutral · "
        "in gold: lost prompts with the token in their gold answer · replaced by: the most frequent replacement · "
        "length: change in tokens"
    )
    if stopped := [own for own in tested if own.stopped]:
        is_curtailed = sweep.settings.mode == "curtailed"
        why = "their verdicts are certain, their Δ is not known" if is_curtailed else "their numbers are forecasts"
        yield f"* {len(stopped)} stopped before all prompts were decoded: {why}"
    if absent := sum(own.changes.n_rollouts == 0 for own in tested):
        yield f"{absent} of {len(tested)} occur in no answer: banning them changes nothing here"


def delta_table(sweep: KnockoutSweep) -> Table:
    """Make the table of how Δ is spread over what was tested and over the placebos."""
    rows = [(who, own, _deltas(own)) for role, who in ROLES.items() if (own := sweep.of_role(role))]
    spreads = {"median": median, "lowest": min, "highest": max}
    columns: list[Column[Any]] = [
        Column("Δ in points", lambda row: text(row[0])),
        Column("bans", lambda row: number(len(row[1]))),
        Column("known", lambda row: number(len(row[2]))),
        *(
            Column(name, lambda row, spread=spread: number(spread(row[2]) if row[2] else None, points))
            for name, spread in spreads.items()
        ),
    ]
    return Table.of("deltas", columns, rows)


def _beyond_placebos(sweep: KnockoutSweep) -> Iterator[str]:
    tested, placebos = _deltas(sweep.of_role("tested")), _deltas(sweep.of_role("matched"))
    if not placebos:
        yield "No placebo as frequent was banned, so there is nothing to compare these changes with."
    elif tested:
        below, above = (sum(own < min(placebos) for own in tested), sum(own > max(placebos) for own in tested))
        yield (
            f"Of {len(tested)} tested bans, {below} {'has' if below == 1 else 'have'} a lower Δ than all "
            f"{len(placebos)} placebos as frequent, and {above} a higher one."
        )


def detectable_sentence(sweep: KnockoutSweep) -> str:
    """Say from which loss on a ban would have been called a pillar."""
    single, corrected = sweep.detectable.single, sweep.detectable.corrected
    count = len(sweep.of_role("tested"))
    if single >= 1:
        return f"None: with {sweep.baseline.n_prompts} prompts no loss would be called a pillar."
    after = "none" if corrected >= 1 else f"{decimal(100 * corrected, 1)} points"
    correction = f"; corrected for {counted(count, 'ban')}: {after}" if count > 1 else ""
    return (
        f"{decimal(100 * single, 1)} points, for a ban that only turns right answers wrong{correction}. A ban that "
        "also moves other answers needs more: knockout.json has the figure of each."
    )


def _print_correlations(sweep: KnockoutSweep) -> None:
    from rocktokens.knockout.correlates import FEWEST_TYPES

    if all(record.n < FEWEST_TYPES for record in sweep.correlations):
        return
    heading("Is Δ related to what the trace says of a type?", orthogonality_sentence(sweep.correlations))
    columns: list[Column[Correlation]] = [
        Column("Δ with", lambda own: text(COLUMN_NAMES[own.name])),
        Column("Spearman's ρ", lambda own: number(own.rho, fixed(2))),
        Column("95 %", lambda own: ends(own.interval, fixed(2))),
        Column("p", lambda own: number(own.p, p_value)),
        Column("types", lambda own: number(own.n)),
    ]
    print_table(Table.of("correlations", columns, sweep.correlations))


def orthogonality_sentence(correlations: Sequence[Correlation]) -> str:
    """Judge the paper's claim that Δ is unrelated to entropy, frequency and kl."""
    claim = "the paper's claim that Δ is unrelated to all of them is"
    known = [(own.name, own.interval) for own in correlations if own.interval is not None]
    related = [COLUMN_NAMES[name] for name, (low, high) in known if not low <= 0 <= high]
    if related:
        return f"Δ is related to {listed(related)}: {claim} contradicted."
    if len(known) < len(correlations) or not known:
        return f"Too few different values for all intervals: {claim} inconclusive."
    strongest = max(abs(end) for _, ends_of in known for end in ends_of)
    if strongest <= WEAK:
        return f"Every ρ is within ±{WEAK}: {claim} supported, as far as the noise of Δ lets a ρ show."
    return f"Every interval includes 0, and the widest reaches |ρ| = {decimal(strongest, 2)}: {claim} inconclusive."


def _deltas(knockouts: Sequence[Knockout]) -> list[float]:
    return [own.delta for own in knockouts if own.delta is not None]


def _verdict(own: Knockout, rule: str) -> str:
    return own.paper_verdict if rule == "paper" else own.verdict


def _replacement(own: Knockout) -> str:
    if not own.changes.replacements:
        return "—"
    _, replacement, share = own.changes.replacements[0]
    return f"{visible(replacement)} {percent(share, 0)}"
