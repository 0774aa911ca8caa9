"""From the outcomes of a sweep to everything knockout.json says about it.

1. Every ban gets its verdict by both rules, what its sample could have shown, and what else it changes.
2. p is corrected for the number of bans by Benjamini–Hochberg, tested bans and placebos each among themselves; a ban
   that was stopped without a p leaves its kind uncorrected.
3. The cost is counted in tokens, beside those of a sweep that decodes every prompt of every ban from its start. It is
   that of a sweep that was never interrupted and found nothing decoded before.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from rocktokens.inference.multiplicity import benjamini_hochberg
from rocktokens.inference.proportions import bootstrap_interval, wilson_interval
from rocktokens.knockout.changes import Continuation, describe_changes
from rocktokens.knockout.correlates import correlate
from rocktokens.knockout.designs import Interim, Settled
from rocktokens.knockout.power import detectable_by_ban, detectable_loss
from rocktokens.knockout.records import Ban, Interval, Knockout, KnockoutSweep, Role
from rocktokens.knockout.verdicts import Rule, paper_verdict, without_effect
from rocktokens.traces.token_text import Vocabulary
from rocktokens.types import Rollout, Verdict

NAMED = 5


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was decoded and decided; K bans, R free rollouts."""

    bans: list[Ban]
    free: list[Rollout]
    free_right_R: np.ndarray
    first_KR: np.ndarray
    """From ``first_occurrences``."""
    looked: list[dict[int, Continuation]]
    """By ban, what was decoded of which free rollouts."""
    interim: Interim
    settled: list[Settled]
    noise: dict[str, Any]
    retraced_tokens: int


def summarise(
    evidence: Evidence,
    rule: Rule,
    vocabulary: Vocabulary,
    tokenizer_sha256: str,
    settings: Mapping[str, Any],
    columns: Mapping[str, Mapping[int, float]],
    unmatched: Sequence[int],
) -> KnockoutSweep:
    """Everything there is to say about a sweep.

    Args:
        evidence: what was found.
        rule: of the verdicts.
        vocabulary: of the tokens.
        tokenizer_sha256: what the ids belong to.
        settings: recorded as they are, with the rule.
        columns: by name and id, what Δ of the tested types is correlated with.
        unmatched: tested types without a placebo.
    """
    knockouts = _knockouts(evidence, rule, vocabulary)
    tested = [knockout for knockout in knockouts if knockout.ban.role == "tested"]
    baseline = _baseline(evidence, rule.seed)
    noise_interval: Interval = tuple(evidence.noise["interval"])
    n_prompts = baseline["n_prompts"]
    return KnockoutSweep(
        tokenizer_sha256=tokenizer_sha256,
        settings={
            **settings,
            **{name: getattr(rule, name) for name in ("alpha", "epsilon", "margin", "resamples")},
        },
        baseline=baseline,
        noise={**evidence.noise, "interval": [*noise_interval]},
        cost=_cost(evidence),
        counts={role: _counts([own for own in knockouts if own.ban.role == role], rule) for role in get_args(Role)},
        detectable={
            "single": detectable_loss(n_prompts, rule, noise=noise_interval),
            "corrected": detectable_loss(n_prompts, rule, max(1, len(tested)), noise_interval),
        },
        correlations=_correlations(tested, columns, rule.seed),
        warnings=_warnings(baseline, evidence.noise, [vocabulary.text(token) for token in unmatched], rule),
        knockouts=knockouts,
    )


def _knockouts(evidence: Evidence, rule: Rule, vocabulary: Vocabulary) -> list[Knockout]:
    q_of = _corrected(evidence)
    return [
        Knockout(
            ban=ban,
            delta=settled.delta,
            interval=settled.interval,
            p=settled.p,
            q=q_of.get(index),
            verdict=settled.verdict,
            paper_verdict=paper_verdict(settled.verdict),
            detectable=_detectable(evidence, index, rule),
            bounds=_bounds(evidence, index),
            n_looked=int(_known(evidence.interim, index).sum()),
            stopped=settled.stopped,
            changes=describe_changes(
                evidence.first_KR[index], evidence.free, evidence.looked[index], evidence.free_right_R, vocabulary.text
            ),
        )
        for index, (ban, settled) in enumerate(zip(evidence.bans, evidence.settled, strict=True))
    ]


def _corrected(evidence: Evidence) -> dict[int, float]:
    """By ban, p corrected among its kind."""
    q_of: dict[int, float] = {}
    for role in get_args(Role):
        own = [index for index, ban in enumerate(evidence.bans) if ban.role == role]
        p_values = [p for index in own if (p := evidence.settled[index].p) is not None]
        if own and len(p_values) == len(own):
            q_of |= dict(zip(own, benjamini_hochberg(p_values), strict=True))
    return q_of


def _known(interim: Interim, ban: int) -> np.ndarray:
    return interim.lowest_KN[ban] == interim.highest_KN[ban]


def _detectable(evidence: Evidence, ban: int, rule: Rule) -> float:
    differences_N = evidence.interim.lowest_KN[ban][_known(evidence.interim, ban)]
    noise: Interval = tuple(evidence.noise["interval"])
    return float(detectable_by_ban(differences_N[None], evidence.interim.num_samples, rule, noise)[0])


def _bounds(evidence: Evidence, ban: int) -> Interval:
    affected_R = evidence.first_KR[ban] >= 0
    return float(-(affected_R & evidence.free_right_R).mean()), float((affected_R & ~evidence.free_right_R).mean())


def _baseline(evidence: Evidence, seed: int) -> dict[str, Any]:
    right_N, num_samples = evidence.interim.free_right_N, evidence.interim.num_samples
    right, total = int(right_N.sum()), len(evidence.free)
    interval = (
        wilson_interval(right, total) if num_samples == 1 else bootstrap_interval(right_N.tolist(), num_samples, seed)
    )
    return {
        "accuracy": right / total,
        "interval": [*interval],
        "n_prompts": len(right_N),
        "num_samples": num_samples,
        "mean_length": float(np.mean([len(rollout.token_ids) for rollout in evidence.free])),
        "truncated_share": float(np.mean([not rollout.finished for rollout in evidence.free])),
    }


def _cost(evidence: Evidence) -> dict[str, Any]:
    """In tokens; where a rollout was not decoded to its end, a full sweep is taken to need the free one's length."""
    lengths_R = np.array([len(rollout.token_ids) for rollout in evidence.free])
    free_tokens, n_bans = int(lengths_R.sum()), len(evidence.bans)
    continuations = [(place, own) for looked in evidence.looked for place, own in looked.items()]
    decoded = free_tokens + evidence.noise["tokens"] + sum(len(own.token_ids) for _, own in continuations)
    longer = sum(own.length - int(lengths_R[place]) for place, own in continuations)
    full = (1 + n_bans) * free_tokens + longer
    return {
        "jobs": len(continuations),
        "free_tokens": free_tokens,
        "decoded_tokens": decoded,
        "retraced_tokens": evidence.retraced_tokens,
        "full_sweep_tokens": full,
        "share": (decoded + evidence.retraced_tokens) / full,
    }


def _counts(knockouts: Sequence[Knockout], rule: Rule) -> dict[str, dict[str, int] | None]:
    """By rule; nothing is corrected where a ban was stopped without a p."""
    corrected = [_corrected_verdict(own, rule) for own in knockouts]
    return {
        "method": _tally([own.verdict for own in knockouts]),
        "paper": _tally([own.paper_verdict for own in knockouts]),
        "corrected": None if None in corrected else _tally(corrected),
    }


def _tally(verdicts: Sequence[str | None]) -> dict[str, int]:
    return {kind: Counter(verdicts)[kind] for kind in ("pillar", "stumbling", "neutral", "undecided")}


def _corrected_verdict(knockout: Knockout, rule: Rule) -> Verdict | None:
    """What is left of a verdict when p is corrected."""
    if knockout.q is None or knockout.interval is None:
        return None
    if knockout.verdict not in ("pillar", "stumbling") or knockout.q <= rule.alpha:
        return knockout.verdict
    return without_effect(knockout.interval, rule)


def _correlations(
    tested: Sequence[Knockout], columns: Mapping[str, Mapping[int, float]], seed: int
) -> list[dict[str, Any]]:
    """Over types that are written at all; none where some were stopped without their Δ: the others are no sample."""
    single = [knockout for knockout in tested if len(knockout.ban.ids) == 1 and knockout.changes.n_rollouts]
    if any(knockout.delta is None for knockout in single):
        return []
    deltas_K = np.array([knockout.delta for knockout in single])
    values = {
        name: np.array([value_of.get(knockout.ban.ids[0], np.nan) for knockout in single])
        for name, value_of in columns.items()
    }
    return correlate(deltas_K, values, seed=seed) if single else []


def _warnings(baseline: dict[str, Any], noise: dict[str, Any], unmatched: Sequence[str], rule: Rule) -> list[str]:
    warnings = []
    unseen = (1 - rule.margin) ** baseline["n_prompts"]
    if unseen > rule.alpha:
        warnings.append(
            f"{baseline['n_prompts']} prompts are few: a ban that loses {100 * rule.margin:g} points changes none of "
            f"them in {100 * unseen:.0f} % of samples, and is then called neutral"
        )
    if baseline["accuracy"] in (0, 1):
        none = "wrong, so no ban can lose" if baseline["accuracy"] == 0 else "right, so no ban can gain"
        warnings.append(f"every free answer is {none} any: this sample has no power in that direction")
    if noise["differing"]:
        warnings.append(
            f"the engine is not exact: decoded a second time, {noise['differing']} of {noise['rollouts']} free "
            f"rollouts differ and {noise['flips']} answers change sides; intervals are widened by what that does to "
            "accuracy, p is not"
        )
    if unmatched:
        named = ", ".join(repr(text) for text in unmatched[:NAMED])
        more = f" and {len(unmatched) - NAMED} more" if len(unmatched) > NAMED else ""
        warnings.append(f"no placebo is about as frequent as {named}{more}")
    return warnings
