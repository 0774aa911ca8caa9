"""From the outcomes of a sweep to everything knockout.json says about it.

1. Every ban gets its verdict by both rules, what its sample could have shown, how many prompts a neutral verdict would
   need where as many answers change, and what else it changes: each continuation is set beside the free rollout it
   belongs to. A sweep that stops early decodes only some of the rollouts that hold a banned token: these are counted in
   full, all else is over the decoded ones.
2. p is corrected for the number of bans by Benjamini–Hochberg, tested bans and placebos each among themselves; a ban
   that was stopped without a p leaves its kind uncorrected.
3. The cost is counted in tokens, beside those of a sweep that decodes every prompt of every ban from its start. It is
   that of a sweep that was never interrupted and found nothing decoded before.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median_high
from typing import Any, get_args

import numpy as np

from rocktokens.display.numbers import counted
from rocktokens.inference.multiplicity import benjamini_hochberg
from rocktokens.inference.paired import Discordance, prompt_changes
from rocktokens.inference.power import detectable_loss, detectable_scattered_loss, neutral_pairs
from rocktokens.inference.proportions import bootstrap_interval, wilson_interval
from rocktokens.knockout.correlates import correlate
from rocktokens.knockout.designs import Interim
from rocktokens.knockout.outcomes import NOWHERE, Continuation, SweepOutcomes
from rocktokens.knockout.records import (
    Ban,
    BanChanges,
    Correlation,
    DetectableLoss,
    EngineNoise,
    FreeAnswers,
    Knockout,
    KnockoutSettings,
    KnockoutSweep,
    NeutralPrompts,
    Role,
    SweepCost,
    VerdictCounts,
)
from rocktokens.knockout.verdicts import ROUNDING, VerdictRule, paper_verdict, without_effect
from rocktokens.traces.token_text import Vocabulary
from rocktokens.types import Interval, Rollout, Verdict

NAMED = 5
MOST_REPLACEMENTS = 5


def summarise(
    outcomes: SweepOutcomes,
    rule: VerdictRule,
    vocabulary: Vocabulary,
    tokenizer_sha256: str,
    settings: Mapping[str, Any],
    columns: Mapping[str, Mapping[int, float]],
    unmatched: Sequence[int],
    gold_of: Mapping[str, str],
) -> KnockoutSweep:
    """Say everything there is to say about a sweep.

    Args:
        outcomes: what was decoded and decided.
        rule: of the verdicts.
        vocabulary: reads the tokens.
        tokenizer_sha256: what the ids belong to.
        settings: recorded as they are, with the rule.
        columns: by name and id, what Δ of the tested types is correlated with.
        unmatched: tested types without a placebo.
        gold_of: by prompt, the right answers.
    """
    noise = outcomes.noise
    knockouts = _knockouts(outcomes, rule, noise.interval, vocabulary, gold_of)
    tested = [knockout for knockout in knockouts if knockout.ban.role == "tested"]
    baseline = _baseline(outcomes, rule.seed)
    single, corrected = (
        detectable_loss(baseline.n_prompts, rule.alpha, rule.epsilon, n_tests, noise.interval[1])
        for n_tests in (None, max(1, len(tested)))
    )
    room = _room(rule, noise.interval)
    needed = [own.neutral_prompts for own in tested if own.neutral_prompts is not None]
    neutral = NeutralPrompts(
        unchanged=int(neutral_pairs(np.zeros(1), rule.alpha, room)[0]) if room > 0 else None,
        typical=median_high(needed) if needed else None,
    )
    judged_by = {name: getattr(rule, name) for name in ("alpha", "epsilon", "margin")}
    return KnockoutSweep(
        tokenizer_sha256=tokenizer_sha256,
        settings=KnockoutSettings(**settings, **judged_by),
        baseline=baseline,
        noise=noise,
        cost=_cost(outcomes),
        counts={role: _counts([own for own in knockouts if own.ban.role == role], rule) for role in get_args(Role)},
        detectable=DetectableLoss(single, corrected),
        correlations=_correlations(tested, columns, rule.seed),
        warnings=_warnings(baseline, noise, [vocabulary.text(token) for token in unmatched], rule, neutral.unchanged),
        knockouts=knockouts,
        neutral=neutral,
    )


def _knockouts(
    outcomes: SweepOutcomes,
    rule: VerdictRule,
    noise: Interval,
    vocabulary: Vocabulary,
    gold_of: Mapping[str, str],
) -> list[Knockout]:
    q_of = _corrected(outcomes)
    interim, right_R = outcomes.interim, outcomes.free_right_R
    needed = _neutral_prompts(interim, rule, noise)
    found = []
    for index, (ban, settled) in enumerate(zip(outcomes.bans, outcomes.settled, strict=True)):
        first_R = outcomes.first_KR[index]
        affected_R = first_R != NOWHERE
        least_N, most_N = (
            prompt_changes(of_KR[[index]], interim.num_samples)[0] for of_KR in (interim.lowest_KR, interim.highest_KR)
        )
        known_N = least_N == most_N
        shares_N = least_N[known_N] / interim.num_samples
        changes = describe_changes(first_R, outcomes.free, outcomes.looked[index], right_R, vocabulary.text)
        found.append(
            Knockout(
                ban=ban,
                delta=settled.delta,
                interval=settled.interval,
                p=settled.p,
                q=q_of.get(index),
                verdict=settled.verdict,
                paper_verdict=paper_verdict(settled.verdict),
                detectable=float(detectable_scattered_loss(shares_N[None], rule.alpha, rule.epsilon, noise[1])[0]),
                bounds=(float(-(affected_R & right_R).mean()), float((affected_R & ~right_R).mean())),
                n_looked=int(known_N.sum()),
                stopped=settled.stopped,
                changes=changes,
                neutral_prompts=needed[index],
                lost_in_gold=_lost_in_gold(ban, changes, vocabulary, gold_of),
            )
        )
    return found


def _neutral_prompts(interim: Interim, rule: VerdictRule, noise: Interval) -> list[int | None]:
    """Return by ban how many prompts a neutral verdict needs, from the discordance and design effect seen so far."""
    room = _room(rule, noise)
    if room <= 0:
        return [None] * len(interim.lowest_KR)
    known_KR = interim.lowest_KR == interim.highest_KR
    seen = Discordance.of(np.where(known_KR, interim.lowest_KR, 0), interim.num_samples)
    n_seen_K = (interim.affected_KR & known_KR).sum(axis=1)
    changed_K = (seen.lost_K + seen.gained_K) / np.maximum(n_seen_K, 1)
    pairs_K = neutral_pairs(changed_K * interim.affected_KR.mean(axis=1), rule.alpha, room)
    prompts_K = np.ceil(pairs_K * seen.design_effects / interim.num_samples - ROUNDING)
    is_known_K = (n_seen_K > 0) | ~interim.affected_KR.any(axis=1)
    return [int(prompts) if is_known else None for prompts, is_known in zip(prompts_K, is_known_K, strict=True)]


def _room(rule: VerdictRule, noise: Interval) -> float:
    """Return how far the interval of an exact engine may reach to be neutral."""
    return rule.margin - max(0.0, -noise[0], noise[1])


def _lost_in_gold(ban: Ban, changes: BanChanges, vocabulary: Vocabulary, gold_of: Mapping[str, str]) -> int | None:
    """Count the prompts with a lost answer whose gold answer has the text of a banned token in it."""
    texts = {vocabulary.text(token_id).strip() for token_id in ban.ids} - {""}
    lost = {prompt for prompt, _ in changes.lost}
    return sum(any(text in gold_of[prompt] for text in texts) for prompt in lost) if texts else None


def _corrected(outcomes: SweepOutcomes) -> dict[int, float]:
    """Return by ban its p, corrected among its kind."""
    q_of: dict[int, float] = {}
    for role in get_args(Role):
        own = [index for index, ban in enumerate(outcomes.bans) if ban.role == role]
        p_values = [p for index in own if (p := outcomes.settled[index].p) is not None]
        if own and len(p_values) == len(own):
            q_of |= dict(zip(own, benjamini_hochberg(p_values), strict=True))
    return q_of


def describe_changes(
    first_R: np.ndarray,
    free: Sequence[Rollout],
    banned: Mapping[int, Continuation],
    free_right_R: np.ndarray,
    text_of: Callable[[int], str],
) -> BanChanges:
    """Describe what one ban changes besides accuracy: where texts part, what takes the token's place, their length.

    Args:
        first_R: the ban's row of ``first_occurrences``.
        free: all free rollouts.
        banned: by index into ``free``, the rollouts decoded under the ban: all that hold a banned token, or fewer.
        free_right_R: bool, whether each free answer is right.
        text_of: what a token id reads.
    """
    holders = np.flatnonzero(first_R != NOWHERE).tolist()
    decoded = [(free[index], bool(free_right_R[index]), banned[index]) for index in sorted(banned)]

    def over(statistic: Callable[[list[float]], Any], value: Callable[[Rollout, Continuation], float]) -> float | None:
        return float(statistic([value(before, after) for before, _, after in decoded])) if decoded else None

    changed = [not np.array_equal(before.token_ids[after.start :], after.token_ids) for before, _, after in decoded]
    counts = Counter(int(after.token_ids[0]) for _, _, after in decoded)
    commonest = sorted(counts, key=lambda token_id: (-counts[token_id], token_id))[:MOST_REPLACEMENTS]
    return BanChanges(
        n_rollouts=len(holders),
        n_prompts=len({free[index].prompt_id for index in holders}),
        length=over(np.mean, lambda before, after: after.length - len(before.token_ids)),
        truncated=over(np.mean, lambda before, after: (not after.finished) - (not before.finished)),
        first_difference=over(np.median, lambda _, after: after.start),
        first_difference_share=over(np.median, lambda before, after: after.start / len(before.token_ids)),
        replacements=[(token_id, text_of(token_id), counts[token_id] / len(decoded)) for token_id in commonest],
        lost=[(before.prompt_id, before.sample) for before, right, after in decoded if right and not after.right],
        gained=[(before.prompt_id, before.sample) for before, right, after in decoded if after.right and not right],
        n_changed=sum(changed),
    )


def _baseline(outcomes: SweepOutcomes, seed: int) -> FreeAnswers:
    num_samples, total = outcomes.interim.num_samples, len(outcomes.free)
    right_N = outcomes.free_right_R.reshape(-1, num_samples).sum(axis=1)
    right = int(right_N.sum())
    interval = (
        wilson_interval(right, total) if num_samples == 1 else bootstrap_interval(right_N.tolist(), num_samples, seed)
    )
    return FreeAnswers(
        accuracy=right / total,
        interval=interval,
        n_prompts=len(right_N),
        num_samples=num_samples,
        mean_length=float(np.mean([len(rollout.token_ids) for rollout in outcomes.free])),
        truncated_share=float(np.mean([not rollout.finished for rollout in outcomes.free])),
    )


def _cost(outcomes: SweepOutcomes) -> SweepCost:
    """Count tokens; where a rollout was not decoded to its end, a full sweep is taken to need the free one's length."""
    lengths_R = np.array([len(rollout.token_ids) for rollout in outcomes.free])
    free_tokens, n_bans = int(lengths_R.sum()), len(outcomes.bans)
    continuations = [(place, own) for looked in outcomes.looked for place, own in looked.items()]
    decoded = free_tokens + outcomes.noise.tokens + sum(len(own.token_ids) for _, own in continuations)
    longer = sum(own.length - int(lengths_R[place]) for place, own in continuations)
    full = (1 + n_bans) * free_tokens + longer
    return SweepCost(
        jobs=len(continuations),
        free_tokens=free_tokens,
        decoded_tokens=decoded,
        retraced_tokens=outcomes.retraced_tokens,
        full_sweep_tokens=full,
        share=(decoded + outcomes.retraced_tokens) / full,
    )


def _counts(knockouts: Sequence[Knockout], rule: VerdictRule) -> VerdictCounts:
    """Count by rule, then by verdict; nothing is corrected where a ban was stopped without a p."""

    def corrected(own: Knockout) -> Verdict | None:
        """Return what is left of a verdict when p is corrected."""
        if own.q is None or own.interval is None:
            return None
        is_call = own.verdict in ("pillar", "stumbling")
        return without_effect(own.interval, rule) if is_call and own.q > rule.alpha else own.verdict

    def tally(verdicts: Sequence[Verdict | None]) -> dict[Verdict, int] | None:
        kinds: tuple[Verdict, ...] = ("pillar", "stumbling", "neutral", "undecided")
        return None if None in verdicts else {kind: verdicts.count(kind) for kind in kinds}

    return VerdictCounts(
        method=tally([own.verdict for own in knockouts]),
        paper=tally([own.paper_verdict for own in knockouts]),
        corrected=tally([corrected(own) for own in knockouts]),
    )


def _correlations(
    tested: Sequence[Knockout], columns: Mapping[str, Mapping[int, float]], seed: int
) -> list[Correlation]:
    """Correlate over types that are written at all; not if some were stopped without Δ: the others are no sample."""
    single = [knockout for knockout in tested if knockout.ban.is_one_type and knockout.changes.n_rollouts]
    if not single or any(knockout.delta is None for knockout in single):
        return []
    deltas_K = np.array([knockout.delta for knockout in single])
    values = {
        name: np.array([value_of.get(knockout.ban.ids[0], np.nan) for knockout in single])
        for name, value_of in columns.items()
    }
    return correlate(deltas_K, values, seed=seed)


def _warnings(
    baseline: FreeAnswers, noise: EngineNoise, unmatched: Sequence[str], rule: VerdictRule, least: int | None
) -> list[str]:
    """Say what limits the sweep; ``least`` is the number of prompts that a neutral verdict needs at least."""
    warnings = []
    if least is None or baseline.n_prompts < least:
        needs = "no number of prompts" if least is None else f"at least {counted(least, 'prompt')}"
        why = "the engine's noise alone reaches the margin" if least is None else "even if no answer changes"
        warnings.append(
            f"{counted(baseline.n_prompts, 'prompt')} cannot show a ban to be neutral within "
            f"{100 * rule.margin:g} points: {needs} would, {why} (knockout.num_prompts)"
        )
    if baseline.accuracy in (0, 1):
        none = "wrong, so no ban can lose" if baseline.accuracy == 0 else "right, so no ban can gain"
        warnings.append(f"every free answer is {none} any: this sample has no power in that direction")
    if noise.differing:
        warnings.append(
            f"the engine is not exact: decoded a second time, {noise.differing} of {noise.rollouts} free "
            f"rollouts differ and {noise.flips} answers change sides; intervals are widened by what that does to "
            "accuracy, p is not"
        )
    if unmatched:
        named = ", ".join(repr(text) for text in unmatched[:NAMED])
        more = f" and {len(unmatched) - NAMED} more" if len(unmatched) > NAMED else ""
        warnings.append(f"no placebo is about as frequent as {named}{more}")
    return warnings
