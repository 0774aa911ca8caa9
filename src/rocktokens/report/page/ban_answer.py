"""What banning the rocks did, in one sentence.

1. Only bans of rocks count, and placebos as frequent as a rock: a sweep may have banned other types too.
2. Rocks that were banned one at a time are counted by verdict; of the verdicts that claim an effect it is said how many
   are left when p is corrected for the number of bans (Benjamini-Hochberg, ``q`` of knockout.json).
3. Sets that were banned together stand by themselves.
"""

from typing import Any

from rocktokens.display.numbers import (
    ban_name,
    counted,
    hundredths,
    listed,
    percent,
    points,
    quoted,
    signed_hundredths,
    with_interval,
)
from rocktokens.types import RockSet

Record = dict[str, Any]
NAMED = 4
"""How many bans of a kind the sentence names."""
EFFECTS = {"pillar": "cost accuracy", "stumbling": "improve it"}
NO_EFFECT = {
    "neutral": "change it by less than {margin:g} points either way",
    "undecided": "cannot be told on these prompts",
}


def matter(knockout: Record, rocks: RockSet) -> str:
    """What bans of rocks did, one by one and together, beside what placebos did."""
    if not rocks.tokens:
        return "There are no rocks to ban."
    rock_ids = {token.id for token in rocks.tokens}
    bans = [own for own in knockout["knockouts"] if _is_about(own["ban"], rock_ids)]
    sets = [own for own in bans if len(own["ban"]["ids"]) > 1]
    alone, placebos = (
        [own for own in bans if own["ban"]["role"] == role and len(own["ban"]["ids"]) == 1]
        for role in ("tested", "matched")
    )
    if not alone and not sets:
        return f"Not known: of the {counted(len(rock_ids), 'rock')} none was banned, only other types."
    settings, baseline = knockout["settings"], knockout["baseline"]
    right = with_interval(percent(baseline["accuracy"]), hundredths(baseline["interval"]))
    answers = counted(baseline["n_prompts"] * baseline["num_samples"], "answer")
    parts = [
        f"Of the {counted(len(rock_ids), 'rock')}, {_alone_part(alone, settings)}",
        *([_placebo_part(placebos, settings["alpha"])] if alone else []),
        *([_sets_part(sets, settings["alpha"])] if sets else []),
        f"without a ban {right} of {answers} are right (95 % interval)",
    ]
    return f"{'; '.join(parts)}."


def _is_about(ban: Record, rock_ids: set[int]) -> bool:
    """Whether it bans rocks alone, or what is as frequent as rocks."""
    if ban["role"] == "tested":
        return rock_ids.issuperset(ban["ids"])
    return ban["role"] == "matched" and (ban["beside"] is None or ban["beside"] in rock_ids)


def _alone_part(alone: list[Record], settings: Record) -> str:
    if not alone:
        return "none was banned by itself"
    alpha = settings["alpha"]
    by_verdict = {kind: [own for own in alone if own["verdict"] == kind] for kind in (*EFFECTS, *NO_EFFECT)}
    effects = [
        f"{len(own)} {says} ({_corrected(own, alpha)} for the number of bans{_costs(own, alpha)})"
        for kind, says in EFFECTS.items()
        if (own := by_verdict[kind])
    ]
    others = [
        f"{len(own)} {says.format(margin=100 * settings['margin'])}"
        for kind, says in NO_EFFECT.items()
        if (own := by_verdict[kind])
    ]
    said = [*effects, *others]
    return f"{len(alone)} {'was' if len(alone) == 1 else 'were'} banned, one at a time: {listed(said)}"


def _corrected(effects: list[Record], alpha: float) -> str:
    """How many of the bans with an effect keep it; a sweep that stopped early has no p to correct."""
    if any(own["q"] is None for own in effects):
        return "not corrected"
    return f"{sum(own['q'] <= alpha for own in effects)} after correction"


def _costs(effects: list[Record], alpha: float) -> str:
    """The bans with the largest effects by name, with what they did."""
    known = sorted((own for own in effects if own["delta"] is not None), key=lambda own: -abs(own["delta"]))
    if not known:
        return ""
    names = [f"{quoted(ban_name(own['ban']))} {_change(own)}" for own in known[:NAMED]]
    rest = len(effects) - len(names)
    return f"; {_unit(alpha)}: {', '.join([*names, f'{rest} more'] if rest else names)}"


def _placebo_part(placebos: list[Record], alpha: float) -> str:
    if not placebos:
        return "no other type as frequent was banned to compare with"
    pillars = [own for own in placebos if own["verdict"] == "pillar"]
    correction = f" ({_corrected(pillars, alpha)})" if pillars else ""
    return f"of {counted(len(placebos), 'other type')} as frequent, {len(pillars)} cost accuracy{correction}"


def _sets_part(sets: list[Record], alpha: float) -> str:
    said = [f"{ban_name(own['ban'])} {_change(own)}, {own['verdict']}" for own in sets]
    return f"banned together ({_unit(alpha)}): {listed(said)}"


def _unit(alpha: float) -> str:
    return f"points, {percent(1 - alpha, 0)} intervals"


def _change(own: Record) -> str:
    return with_interval(points(own["delta"]), signed_hundredths(own["interval"]))
