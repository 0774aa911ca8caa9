"""Everything ``rocktokens find`` says about a set of rocks, as the record that find.json holds.

Each part answers a question a referee would ask: where the rocks stand among all types (funnel), whether they moved
(persistence, trajectory), why so many of them (cut-off), whether other prompts or another selector would name them too
(sample size, selectors), what depends on the settings (sensitivity), what they are and where they sit (categories,
positions), and whether there are types to compare them with (controls). Claims about the set are measured on prompts
that did not select it, or say so.
"""

from typing import Any

import numpy as np

from rocktokens.errors import RocktokensError
from rocktokens.rocks.aggregate import ONE
from rocktokens.rocks.categories import store_categories
from rocktokens.rocks.controls import match_controls
from rocktokens.rocks.cutoff import auto_k, compare_selectors, sample_size_curve
from rocktokens.rocks.encoding import Encoder
from rocktokens.rocks.persistence import RARE, ROCK, persistence_report, type_groups
from rocktokens.rocks.profile import category_table, position_profile
from rocktokens.rocks.records import ControlMatch, Crossing, Cutoff, FindRecord, FunnelColumns, GroupMean
from rocktokens.rocks.search import Finding
from rocktokens.rocks.selectors import Sample
from rocktokens.rocks.sensitivity import MakeEncoder, sensitivity_table
from rocktokens.rocks.split import checkpoint_samples
from rocktokens.rocks.uncertainty import share_intervals
from rocktokens.run_dir import derive_seed
from rocktokens.traces.store import TraceStore
from rocktokens.types import RockSet

OTHER = "other"
Groups = dict[str, np.ndarray]


def analyse(
    store: TraceStore, finding: Finding, rocks: RockSet, encoder: Encoder | None, make_encoder: MakeEncoder | None
) -> FindRecord:
    """Look at a finding from all sides.

    Args:
        store: the traces of the search.
        finding: the search.
        rocks: what was found.
        encoder: of contexts, as the search used it.
        make_encoder: of contexts of another width; None where width has no meaning.
    """
    evidence, criterion = finding.evidence, finding.criterion
    selection, selector, rules = evidence.selection, criterion.selector, criterion.rules(max(finding.k, 1))
    seed = derive_seed(criterion.seed, "analysis")
    groups = type_groups(selection, finding.columns, criterion.min_freq, seed)
    token_ids = selection.token_ids
    categories = store_categories(store, token_ids)
    return FindRecord(
        criterion=rocks.criterion,
        source=rocks.source,
        funnel=_funnel(store, finding, groups, categories),
        persistence=persistence_report(evidence, groups, finding.persistent, seed),
        trajectory=_trajectory(store, finding, groups, seed),
        cutoff=Cutoff(finding.k, _crossing(finding), finding.curve.points(finding.k)),
        sample_size=sample_size_curve(selection, selector, rules, seed=seed),
        selectors=compare_selectors(selection, rules, seed=seed),
        sensitivity=sensitivity_table(store, finding, encoder, make_encoder),
        categories=category_table(token_ids, categories, evidence.measuring, finding.is_rock),
        positions=position_profile(store, evidence.reference, rocks.ids, evidence.prompts.measuring, seed=seed),
        controls=_controls(store, rocks),
    )


def _funnel(store: TraceStore, finding: Finding, groups: Groups, categories: list[Any]) -> FunnelColumns:
    """Every type used in the selection half: frequency against mean kl, column by column."""
    sample = finding.evidence.selection
    used = np.flatnonzero(sample.totals("freq"))
    freq, kl = sample.totals("freq")[used], sample.totals("kl")[used]
    group_of = {column: name for name in (RARE, ROCK) for column in groups[name].tolist()}
    rank_of = {column: rank for rank, column in enumerate(finding.columns.tolist(), start=1)}
    ccr = finding.consistency[used]
    return FunnelColumns(
        token_id=sample.token_ids[used].tolist(),
        text=store.token_texts(sample.token_ids[used]),
        category=[categories[column] for column in used],
        freq=freq.tolist(),
        mean_kl=(kl / (freq * ONE)).tolist(),
        ccr=[None if np.isnan(value) else float(value) for value in ccr],
        group=[group_of.get(column, OTHER) for column in used.tolist()],
        rank=[rank_of.get(column) for column in used.tolist()],
    )


def _trajectory(store: TraceStore, finding: Finding, groups: Groups, seed: int) -> list[GroupMean]:
    """Mean kl of each group at every checkpoint that scored the same occurrences, on both halves."""
    return [
        GroupMean(checkpoint, half, group, *_mean_with_interval(sample, columns, seed))
        for checkpoint in store.checkpoints
        for half, sample in checkpoint_samples(store, finding.evidence, checkpoint).items()
        for group, columns in groups.items()
    ]


def _mean_with_interval(
    sample: Sample, columns: np.ndarray, seed: int
) -> tuple[float | None, float | None, float | None]:
    chosen = np.isin(np.arange(len(sample.token_ids)), columns)
    freq, kl = (int(sample.totals(name)[chosen].sum()) for name in ("freq", "kl"))
    interval = share_intervals(sample, chosen, paired=False, seed=seed)["mean_kl_rocks"]
    low, high = interval or (None, None)
    return kl / (freq * ONE) if freq else None, low, high


def _crossing(finding: Finding) -> Crossing | None:
    """Return where coverage meets stability; None where that is not defined."""
    try:
        return auto_k(finding.curve)
    except RocktokensError:
        return None


def _controls(store: TraceStore, rocks: RockSet) -> ControlMatch:
    """Whether types of matching frequency exist, or the sentence that says which rocks have no partner."""
    if not rocks.tokens:
        return ControlMatch(matched=False, reason="there are no rocks to match")
    try:
        controls = match_controls(store, rocks, seed=rocks.criterion["seed"])
    except RocktokensError as error:
        return ControlMatch(matched=False, reason=str(error))
    gaps = [draw.total_gap for draw in controls]
    return ControlMatch(matched=True, draws=len(controls), distinct=controls.n_distinct, total_gaps=gaps)
