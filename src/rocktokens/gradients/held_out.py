"""Which tokens are measured: held-out rollouts, groups of their types, and what the trace says of them.

1. The prompts are those that did not select the rocks, by the split that ``find`` made. Where rocks.json does not come
   from the traces of the run, these are not known, and nothing is called held out.
2. Groups, no type in two of them: the rocks; a control as frequent as the rocks; the types of the highest mean kl that
   are neither; the rest. A control that does not fit every rock is the largest that fits some, and says so. Besides
   them, all types of the highest mean kl that are not rocks, controls or not (docs/method.md, section 4.8).
3. The trace has ‖g‖ and kl of every token: shares, means and changes by group, with intervals over prompts.
"""

from dataclasses import dataclass, replace

import numpy as np

from rocktokens.display.rocks import why_none
from rocktokens.errors import ControlMatchError, RocktokensError
from rocktokens.gradients.estimates import column, defined, ratio
from rocktokens.gradients.records import (
    CONTROL,
    HIGH_KL,
    REST,
    ROCKS,
    ControlGroup,
    HighKlTypes,
    KeptKl,
    NormRatio,
    TraceGroup,
    TraceSummary,
    TraceTypes,
)
from rocktokens.inference.bootstrap import bootstrap_counts, quantile_interval
from rocktokens.rocks import persistence
from rocktokens.rocks.categories import store_categories
from rocktokens.rocks.controls import NO_PARTNER, make_market, match_controls, most_partners
from rocktokens.rocks.selectors import Sample
from rocktokens.rocks.sums import HELD_OUT, NOT_SPLIT, ONE, PromptSums, gather, occurrences, type_sums
from rocktokens.rocks.uncertainty import paired_tests, share_intervals
from rocktokens.rollouts.store import read_rollouts
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.traces.store import TraceStore
from rocktokens.types import RockSet, Rollout

PARTIAL_TOLERANCE = 0.25
"""By which share the frequency of a control may differ from its rock's where a full match is not possible."""
LEVEL = 0.95
Groups = dict[str, np.ndarray]
_UNKNOWN_SELECTION = (
    "rocks.json was found in other traces than the run has now, so which prompts selected the rocks is not known: all "
    "prompts are measured on; run `rocktokens find` again to hold some out"
)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The rollouts that are measured, and the groups of their types."""

    store: TraceStore
    sums: PromptSums
    rollouts: list[Rollout]
    """Of the prompts that are measured on, in the order of the probe."""
    groups: Groups
    """Ascending token ids by name: disjoint, and together all that occur. A group without types is left out."""
    high_kl_ids: np.ndarray
    """All high-mean-kl types: those of the group, and those that are in the control."""
    control: ControlGroup
    warnings: list[str]
    seed: int
    """Of bootstrap intervals."""

    @property
    def measured_on(self) -> str:
        """Which prompts."""
        return HELD_OUT if self.sums.is_split else NOT_SPLIT

    @property
    def n_prompts(self) -> int:
        """How many."""
        return len({rollout.prompt_id for rollout in self.rollouts})

    @property
    def token_ids(self) -> np.ndarray:
        """All types, ascending."""
        return np.sort(np.concatenate(list(self.groups.values())))

    @property
    def sample(self) -> Sample:
        """The traced tokens of these prompts at the reference."""
        return self.sums.measuring


def hold_out(run: RunDir, rocks: RockSet, reference: int | None, baseline: int | None) -> HeldOut:
    """Choose rollouts and groups of a run; the checkpoints are those of the rocks where none are named."""
    if not rocks.tokens:
        raise RocktokensError(
            f"{run.rocks} holds no rocks, so there is no group to look at ({why_none(rocks)}): run `rocktokens find` "
            "again"
        )
    store, criterion = TraceStore(run), rocks.criterion
    rocks.require_tokenizer(store.tokenizer_sha256)
    known = store.made(rocks.source, run.rocks.name)
    if baseline is None and (baseline := criterion.get("baseline")) is not None and reference is not None:
        baseline = min(baseline, reference)
    sums = gather(
        store,
        criterion.get("reference") if reference is None else reference,
        baseline,
        criterion.get("split") if known else None,
        criterion.get("seed", 0),
    )
    sample, prompts = sums.measuring, sums.prompts.measuring
    if not np.isin(rocks.ids, sample.token_ids[sample.totals("freq") > 0]).any():
        raise RocktokensError(
            f"none of the {len(rocks.tokens)} rocks of rocks.json occurs at checkpoint {sums.reference} on the "
            f"{sums.prompts.n_measuring} prompts to measure on ({HELD_OUT if sums.is_split else NOT_SPLIT}): "
            "trace more prompts (trace.num_prompts), or run `rocktokens find` again"
        )
    groups, high_kl_ids, control = _groups(store, rocks, sums)
    measured = None if prompts is None else set(prompts)
    probe = _probe(run, sums.reference)
    return HeldOut(
        store=store,
        sums=sums,
        rollouts=[rollout for rollout in probe if measured is None or rollout.prompt_id in measured],
        groups=groups,
        high_kl_ids=high_kl_ids,
        control=control,
        warnings=[] if known else [_UNKNOWN_SELECTION],
        seed=derive_seed(criterion.get("seed", 0), "gradients"),
    )


def _probe(run: RunDir, reference: int) -> list[Rollout]:
    """Read the probe rollouts; where every checkpoint wrote its own, those of the reference."""
    probes = [entry.path for entry in run.files("rollouts/probe/")]
    own = f"rollouts/probe/checkpoint={reference}.parquet"
    if not probes or (len(probes) > 1 and own not in probes):
        raise RocktokensError(
            f"{run.path} has no probe rollouts to take gradients of: replay some with `rocktokens trace`"
        )
    return read_rollouts(run, own if len(probes) > 1 else probes[0])


def _groups(store: TraceStore, rocks: RockSet, sums: PromptSums) -> tuple[Groups, np.ndarray, ControlGroup]:
    """Return the groups by name, all high-mean-kl types, and how the control was matched."""
    token_ids, criterion = sums.selection.token_ids, rocks.criterion
    rock_columns = np.flatnonzero(np.isin(token_ids, rocks.ids))
    columns = persistence.type_groups(
        sums.selection,
        rock_columns,
        criterion.get("min_freq", 2),
        derive_seed(criterion.get("seed", 0), "analysis"),
    )
    high_kl_ids = token_ids[columns[persistence.HIGH_KL]]
    rocks = replace(rocks, criterion={**criterion, "reference": sums.reference})
    control_ids, control = _control(store, rocks, high_kl_ids)
    groups = {
        ROCKS: token_ids[rock_columns],
        HIGH_KL: np.setdiff1d(high_kl_ids, control_ids),
        CONTROL: np.sort(control_ids),
    }
    groups[REST] = np.setdiff1d(token_ids, np.concatenate(list(groups.values())))
    return {name: ids for name, ids in groups.items() if len(ids)}, high_kl_ids, control


def _control(store: TraceStore, rocks: RockSet, high_kl_ids: np.ndarray) -> tuple[np.ndarray, ControlGroup]:
    """Match types as frequent as the rocks: all of them by ``match_controls`` if it can, else as many as possible."""
    sums = type_sums(occurrences(store.table(rocks.criterion["reference"])))
    matched, reason = rocks.ids, None
    try:
        controls = match_controls(store, rocks, draws=1, seed=rocks.criterion.get("seed", 0))
        ids, kind, tolerance = controls.ids(0), "matched", controls.criterion["tolerance"]
    except ControlMatchError as refusal:
        market = make_market(sums.token_id, sums.freq, rocks.ids, PARTIAL_TOLERANCE)
        partners_K = most_partners(market)
        has_partner_K = partners_K != NO_PARTNER
        ids, matched = market.ids[partners_K[has_partner_K]], rocks.ids[has_partner_K]
        kind, tolerance, reason = "partial" if len(ids) else "none", PARTIAL_TOLERANCE, str(refusal)
    occurring, matched_occurring, rocks_occurring = (
        int(sums.freq[np.isin(sums.token_id, own)].sum()) for own in (ids, matched, rocks.ids)
    )
    return ids, ControlGroup(
        kind=kind,
        tolerance=tolerance,
        reason=reason,
        n_matched=len(ids),
        n_rocks=len(rocks.tokens),
        occurrences=occurring,
        matched_rock_occurrences=matched_occurring,
        rock_occurrences=rocks_occurring,
        n_high_mean_kl=len(np.intersect1d(high_kl_ids, ids)),
    )


def category_ids(store: TraceStore, token_ids: np.ndarray) -> Groups:
    """Group the types by category."""
    categories = np.array(store_categories(store, token_ids))
    return {str(name): token_ids[categories == name] for name in np.unique(categories)}


# What the trace says


def describe_trace(held_out: HeldOut) -> TraceSummary:
    """Summarize the trace by group and by type: norms, kl before and after, intervals over prompts."""
    sample, seed, paired = held_out.sample, held_out.seed, held_out.sums.paired
    members = {name: np.isin(sample.token_ids, ids) for name, ids in held_out.groups.items()}
    rocks_U, high_kl_U = members[ROCKS], np.isin(sample.token_ids, held_out.high_kl_ids)
    against = {"all": np.ones(len(sample.token_ids), dtype=bool), **members}
    freq, kl = sample.totals("freq"), sample.totals("kl")
    kept_U = ratio(kl, sample.totals("kl_before")) if paired else None
    high_kl, rocks_kl = (defined(ratio(kl[own_U].sum(), freq[own_U].sum() * ONE)) for own_U in (high_kl_U, rocks_U))
    return TraceSummary(
        paired=paired,
        groups={name: _describe_group(held_out, chosen_U) for name, chosen_U in members.items()},
        norm_ratios={
            name: norm_ratio(sample, rocks_U, chosen_U, seed) for name, chosen_U in against.items() if name != ROCKS
        },
        high_mean_kl=HighKlTypes(
            n_types=int((high_kl_U & (freq > 0)).sum()),
            kl=high_kl,
            rocks_kl=rocks_kl,
            norm_ratio=norm_ratio(sample, rocks_U, high_kl_U, seed),
        ),
        rocks_kept=None if kept_U is None else KeptKl(sample.token_ids[rocks_U].tolist(), column(kept_U[rocks_U])),
        types=_types(held_out, members),
    )


def norm_ratio(sample: Sample, first_U: np.ndarray, second_U: np.ndarray, seed: int, draws: int = 1000) -> NormRatio:
    """Divide the mean ‖g‖ of an occurrence of the first types by that of the second; bootstrap interval over prompts.

    Against all types, this is the first types' share of Σ‖g‖ over their share of the tokens.
    """
    weights_BC = np.vstack([np.ones(sample.n_clusters), bootstrap_counts(sample.n_clusters, draws, seed)])
    norm_first, freq_first, norm_second, freq_second = (
        weights_BC @ (matrix @ chosen_U.astype(np.int64))
        for chosen_U in (first_U, second_U)
        for matrix in (sample.grad_norm, sample.freq)
    )
    above_B, below_B = norm_first * freq_second, freq_first * norm_second
    if not below_B[0]:
        return NormRatio(None, None)
    defined = below_B > 0
    ratios_B = above_B[defined] / below_B[defined]
    return NormRatio(float(ratios_B[0]), quantile_interval(ratios_B[1:], LEVEL))


def _describe_group(held_out: HeldOut, chosen_U: np.ndarray) -> TraceGroup:
    sample, paired, seed = held_out.sample, held_out.sums.paired, held_out.seed
    intervals = share_intervals(sample, chosen_U, paired, seed=seed)
    freq, norm, kl = (sample.totals(name) for name in ("freq", "grad_norm", "kl"))
    count = int(freq[chosen_U].sum())
    token_share, norm_share, kl_share = (
        int(values[chosen_U].sum()) / total if (total := int(values.sum())) else None for values in (freq, norm, kl)
    )
    return TraceGroup(
        n_types=int((chosen_U & (freq > 0)).sum()),
        n_occurrences=count,
        token_share=token_share,
        token_share_interval=intervals["token_share"],
        norm_share=norm_share,
        norm_share_interval=intervals["grad_share"],
        kl_share=kl_share,
        kl_share_interval=intervals["kl_share"],
        mean_norm=int(norm[chosen_U].sum()) / (count * ONE) if count else None,
        change=paired_tests(sample, chosen_U, seed=seed) if paired else None,
    )


def _types(held_out: HeldOut, members: Groups) -> TraceTypes:
    """List every type that occurs, column by column."""
    sample, store = held_out.sample, held_out.store
    used = np.flatnonzero(sample.totals("freq"))
    ids, freq = sample.token_ids[used], sample.totals("freq")[used]

    def mean(name: str) -> list[float | None]:
        return (sample.totals(name)[used] / (freq * ONE)).tolist()

    return TraceTypes(
        token_id=ids.tolist(),
        text=store.token_texts(ids),
        category=list(store_categories(store, ids)),
        group=np.select([chosen_U[used] for chosen_U in members.values()], list(members), default=REST).tolist(),
        freq=freq.tolist(),
        kl_before=mean("kl_before") if held_out.sums.paired else [None] * len(ids),
        kl=mean("kl"),
        mean_norm=mean("grad_norm"),
    )
