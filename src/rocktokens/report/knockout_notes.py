"""Sentences about a knock-out sweep that both the command and the page show."""

from collections import Counter
from collections.abc import Iterable

from rocktokens.classes import STATES, State
from rocktokens.display.numbers import about, counted, listed, quoted
from rocktokens.knockout.records import Knockout, KnockoutSweep
from rocktokens.report.tables import ban_name

NAMED = 4
"""Bans that a sentence names."""


def states_sentence(states: Iterable[State]) -> str:
    """Count classes of tokens by what bans have shown of them; there is at least one."""
    count = Counter(states)
    if count.total() == 1:
        return f"The only class is {next(iter(count))}."
    said = [f"{count[state]} {'is' if count[state] == 1 else 'are'} {state}" for state in STATES if count[state]]
    return f"Of {count.total():,} classes, {listed(said)}."


def neutral_sentence(sweep: KnockoutSweep) -> str:
    """Say how many prompts a neutral verdict takes; empty where the file does not."""
    needs = sweep.neutral
    if needs is None or needs.unchanged is None:
        return ""
    sentence = f"A neutral verdict needs {counted(needs.unchanged, 'prompt')} even if no answer changes"
    if needs.typical is not None and needs.typical > needs.unchanged:
        sentence += (
            f", and about {about(needs.typical)} (80 % power) where as many answers change as under the median ban"
        )
    return f"{sentence}."


def undecided_sentence(sweep: KnockoutSweep) -> str:
    """Say what it would take to call undecided bans neutral; empty where there are none, or nothing is known of it."""
    needs = {
        own.ban: own.neutral_prompts
        for own in sweep.of_role("tested")
        if own.verdict == "undecided" and own.neutral_prompts is not None
    }
    if not needs:
        return ""
    fewest_first = sorted(needs, key=lambda ban: needs[ban])
    named = [(quoted(ban_name(ban)), about(needs[ban])) for ban in fewest_first]
    if len(named) == 1:
        [(name, prompts)] = named
        return f"Undecided: about {prompts} prompts would be needed to call {name} neutral."
    shown = ", ".join(f"{name} {prompts}" for name, prompts in named[:NAMED])
    more = f", {len(named) - NAMED} more up to {named[-1][1]}" if len(named) > NAMED else ""
    return f"Undecided: about this many prompts would be needed to call each neutral: {shown}{more}."


def gold_sentences(sweep: KnockoutSweep) -> list[str]:
    """Say of pillars how many of their losses may only mean that the gold answer cannot be written without them."""
    pillars = [own for own in sweep.of_role("tested") if own.verdict == "pillar"]
    return [
        f"{quoted(ban_name(own.ban))}: {share} have it in the gold answer, which the ban may make unwritable."
        for own in pillars
        if (share := lost_in_gold(own)) and (own.lost_in_gold or own.ban.category == "digit")
    ]


def lost_in_gold(own: Knockout) -> str:
    """Show how many of the prompts lost have a banned token in their gold answer; empty where that is not known."""
    found = own.lost_in_gold
    return "" if found is None else f"{found} of {counted(own.changes.lost_prompts, 'lost prompt')}"
