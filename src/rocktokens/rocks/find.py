"""The rocks of a run as a RockSet: what was selected, how sure that is, and what it amounts to (METHOD 4).

1. ``find_rocks`` searches on one half of the prompts: sums, persistent occurrences, contexts, ranking (``selection``).
2. Every score gets a bootstrap interval and every rock the probability that it is among the first k.
3. Shares of tokens, vocabulary, kl and gradient, and the change of kl from baseline to reference, are measured on the
   other half, with intervals.

Paper: https://arxiv.org/abs/2605.09253
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rocktokens.config import ETA, GAMMA
from rocktokens.errors import RocktokensError
from rocktokens.inference.bootstrap import median_interval
from rocktokens.rocks.aggregate import ONE, TypeSums, occurrences, rollout_shares, type_sums
from rocktokens.rocks.categories import store_categories
from rocktokens.rocks.embeddings import student_embeddings
from rocktokens.rocks.encoding import Encoder, embedding_encoder
from rocktokens.rocks.search import MAX_PAIRS, Criterion, Finding, search
from rocktokens.rocks.selectors import Sample, selector_of
from rocktokens.rocks.split import HELD_OUT, NOT_SPLIT, resolve_checkpoints
from rocktokens.rocks.uncertainty import score_uncertainty, share_intervals
from rocktokens.run_dir import derive_seed
from rocktokens.traces.store import TraceStore
from rocktokens.types import RockSet, RockToken
from rocktokens.windows import WindowRule

if TYPE_CHECKING:
    import pandas as pd


def find_rocks(
    store: TraceStore,
    reference: int | None = None,
    baseline: int | None = None,
    k: int | Literal["auto"] = 100,
    stage: str = "context",
    min_freq: int = 2,
    exclude_top_freq: int = 0,
    joint: bool = False,
    window: int = 5,
    tau: float = 0.8,
    gamma: float = GAMMA,
    eta: float = ETA,
    embeddings: np.ndarray | None = None,
    split: float | None = 0.5,
    seed: int = 0,
    *,
    tau_nats: tuple[float, float] | None = None,
    min_score: float | None = None,
    encoder: str | Encoder = "embeddings",
    max_pairs: int = MAX_PAIRS,
) -> RockSet:
    """Rank the types by persistent loss and describe the first ``k``.

    Args:
        store: replay traces of a run.
        reference: the checkpoint whose loss counts as what is left; default the last.
        baseline: the checkpoint to compare with; default the first.
        k: how many types are rocks (fewer if fewer can be ranked), or "auto": where coverage meets stability.
        stage: "context" ranks by R_ctx(v) = R(v) · CCR(v), "score" by R(v) alone, as the paper's code does.
        min_freq: types with fewer occurrences in the selection half are not ranked.
        exclude_top_freq: how many of the most frequent types to leave out before ranking.
        joint: replace R by the smaller R of the two checkpoints.
        window: tokens on each side that make the context of an occurrence.
        tau: an occurrence is persistent when its kl reaches this quantile at both checkpoints.
        gamma: the least cosine of similar contexts.
        eta: the least share of similar contexts of an occurrence that is kept.
        embeddings: float (V, D), rows by token id; default the input embeddings of the reference student.
        split: share of prompts used for selection; None or 1 uses all prompts for selection and summary alike.
        seed: of the split, of samples and of the bootstrap.
        tau_nats: (baseline, reference) thresholds in nats instead of quantiles.
        min_score: of the first k, only those whose ranking score reaches this; without it even a type with score 0 is
            taken when there are fewer than k others.
        encoder: "embeddings", or what ``rocktokens.scoring.hidden.hidden_encoder`` makes of a student.
        max_pairs: pairs of contexts to compare; beyond it types are judged on samples, and CCR gets an interval.

    Returns:
        The rocks. ``freq``, ``mean_kl``, ``score``, ``ccr`` of a token are those it was selected by (selection half);
        ``held_out_mean_kl`` and ``summary`` are of the prompts that had no say in it.
    """
    criterion = Criterion(
        reference=reference,
        baseline=baseline,
        k=k,
        stage=stage,
        min_freq=min_freq,
        exclude_top_freq=exclude_top_freq,
        joint=joint,
        window=window,
        tau=tau,
        tau_nats=tau_nats,
        gamma=gamma,
        eta=eta,
        encoder=encoder if isinstance(encoder, str) else "hidden",
        max_pairs=max_pairs,
        min_score=min_score,
        split=split,
        seed=seed,
    )
    contexts = context_encoder(store, criterion, embeddings, encoder)
    return rock_set(store, search(store, criterion, contexts))


def context_encoder(
    store: TraceStore, criterion: Criterion, embeddings: np.ndarray | None, encoder: str | Encoder
) -> Encoder | None:
    """What makes vectors of contexts for a search; None where none are compared."""
    if criterion.stage != "context":
        return None
    if not isinstance(encoder, str):
        return encoder
    if encoder != "embeddings":
        raise RocktokensError(
            f"encoder = {encoder!r} is not known here: use 'embeddings', or give hidden_encoder(student, rollouts)"
        )
    reference, _ = resolve_checkpoints(store, criterion.reference, criterion.baseline)
    vectors = student_embeddings(store, reference) if embeddings is None else embeddings
    return embedding_encoder(store.table(reference), vectors, criterion.window)


def rock_set(store: TraceStore, finding: Finding) -> RockSet:
    """What a search found, with intervals, as it is written to rocks.json."""
    record = asdict(finding.criterion)
    record["tau_nats"] = None if record["tau_nats"] is None else list(record["tau_nats"])
    return RockSet(
        tokenizer_sha256=store.tokenizer_sha256,
        criterion=record,
        source={"manifest_sha256": store.manifest_sha256},
        summary=_summary(store, finding),
        tokens=_tokens(store, finding),
        windows=WindowRule(finding.criterion.window, finding.thresholds.post).to_dict(),
    )


def type_table(
    store: TraceStore,
    reference: int | None = None,
    baseline: int | None = None,
    prompt_ids: list[str] | None = None,
) -> "pd.DataFrame":
    """Every type used, by summed kl at the reference checkpoint: what training did to it.

    Args:
        store: replay traces of a run.
        reference: the later checkpoint; default the last.
        baseline: the earlier checkpoint; default the first.
        prompt_ids: the prompts to look at; default all.

    Returns:
        Columns token_id, text, category, freq, mean_kl, mean_kl_baseline. The last is the mean over the same
        occurrences at the baseline checkpoint, and missing throughout when that was not replayed on the same rollouts.
    """
    import pandas as pd

    reference, baseline = resolve_checkpoints(store, reference, baseline)
    now, before = _sums(store, reference, prompt_ids), _sums(store, baseline, prompt_ids)
    paired = now.same_occurrences(before)
    frame = pd.DataFrame(
        {
            "token_id": now.token_id,
            "text": store.token_texts(now.token_id),
            "category": store_categories(store, now.token_id),
            "freq": now.freq,
            "mean_kl": now.kl / (now.freq * ONE),
            "mean_kl_baseline": before.kl / (before.freq * ONE) if paired else np.nan,
        }
    )
    return frame.iloc[np.lexsort((now.token_id, -now.kl))].reset_index(drop=True)


def _sums(store: TraceStore, checkpoint: int, prompt_ids: list[str] | None = None) -> TypeSums:
    return type_sums(occurrences(store.table(checkpoint), prompt_ids))


def _tokens(store: TraceStore, finding: Finding) -> list[RockToken]:
    selection, measuring = finding.evidence.selection, finding.evidence.measuring
    freq, kl = selection.totals("freq"), selection.totals("kl")
    held_freq, held_kl = measuring.totals("freq"), measuring.totals("kl")
    before = measuring.totals("kl_before") if finding.evidence.paired else np.zeros_like(held_kl)
    seed = derive_seed(finding.criterion.seed, "bootstrap")
    rules = finding.criterion.rules(max(finding.k, 1))
    scored = selector_of("score", finding.criterion.joint)
    sure = score_uncertainty(selection, finding.criterion.selector, rules, seed=seed, scored=scored)
    prompts = np.diff(selection.freq.tocsc().indptr)
    ids = selection.token_ids[finding.columns]
    context = _context_fields(finding)
    return [
        RockToken(
            id=int(ids[rank - 1]),
            text=text,
            rank=rank,
            freq=int(freq[i]),
            mean_kl=int(kl[i]) / (int(freq[i]) * ONE),
            score=float(finding.score_U[i]),
            category=category,
            score_interval=sure.interval(i),
            p_in_top_k=float(sure.p_in_top_k[i]),
            n_prompts=int(prompts[i]),
            held_out_mean_kl=int(held_kl[i]) / (int(held_freq[i]) * ONE) if held_freq[i] else None,
            held_out_change=(int(held_kl[i]) - int(before[i])) / int(before[i]) if before[i] > 0 else None,
            **context(i),
        )
        for rank, (i, text, category) in enumerate(
            zip(finding.columns, store.token_texts(ids), store_categories(store, ids), strict=True), start=1
        )
    ]


def _context_fields(finding: Finding) -> Callable[[int], dict[str, Any]]:
    """What the context stage says of a type, by column."""
    if finding.context is None or finding.persistent is None:
        return lambda _: {"ccr": None, "score_ctx": None}
    criterion, freq = finding.criterion, finding.evidence.selection.totals("freq")
    number = np.bincount(finding.persistent.columns, minlength=len(freq))
    exact = finding.context.exact
    interval = (
        finding.context.kept_share_interval(criterion.gamma, criterion.eta) * (number / np.maximum(freq, 1))[:, None]
    )
    ccr = finding.consistency

    def fields(i: int) -> dict[str, Any]:
        return {
            "ccr": None if np.isnan(ccr[i]) else float(ccr[i]),
            "score_ctx": float(finding.ranking_U[i]),
            "n_persistent": int(number[i]),
            "ccr_interval": None if exact[i] else (float(interval[i, 0]), float(interval[i, 1])),
        }

    return fields


def _summary(store: TraceStore, finding: Finding) -> dict[str, Any]:
    """What the rocks amount to on the measuring prompts."""
    evidence, is_rock = finding.evidence, finding.is_rock
    sample, seed = evidence.measuring, derive_seed(finding.criterion.seed, "bootstrap")
    freq, used = sample.totals("freq"), sample.totals("freq") > 0
    rows = occurrences(store.table(evidence.reference), evidence.prompts.measuring)
    shares, clusters = rollout_shares(rows, sample.token_ids[is_rock], evidence.clusters)
    clusters = clusters - (evidence.selection.n_clusters if evidence.is_split else 0)
    intervals = share_intervals(sample, is_rock, evidence.paired, seed=seed)
    intervals["token_share_median"] = median_interval(shares, clusters, sample.n_clusters, seed=seed)
    return {
        "measured_on": HELD_OUT if evidence.is_split else NOT_SPLIT,
        "k": finding.k,
        "n_score_zero": int(np.count_nonzero(finding.ranking_U[finding.columns] <= 0)),
        "n_prompts": evidence.prompts.n_measuring,
        "n_clusters": sample.n_clusters,
        "n_occurrences": int(freq.sum()),
        "n_types": int(used.sum()),
        "n_rock_occurrences": int(freq[is_rock].sum()),
        "n_rock_types": int((used & is_rock).sum()),
        "token_share": _share(freq, is_rock),
        "token_share_median": float(np.median(shares)),
        "vocab_share": _share(used.astype(np.int64), is_rock),
        "kl_share": _share(sample.totals("kl"), is_rock),
        "grad_share": _share(sample.totals("grad_norm"), is_rock),
        "mean_kl": _mean_kl(sample, np.ones_like(is_rock)),
        "mean_kl_rocks": _mean_kl(sample, is_rock),
        "mean_kl_rest": _mean_kl(sample, ~is_rock),
        "paired": evidence.paired,
        "kl_change_rocks": _kl_change(sample, is_rock, evidence.paired),
        "kl_change_rest": _kl_change(sample, ~is_rock, evidence.paired),
        "tau_pre_nats": finding.thresholds.pre,
        "tau_post_nats": finding.thresholds.post,
        "intervals": {name: None if ends is None else list(ends) for name, ends in intervals.items()},
    }


def _share(values: np.ndarray, chosen: np.ndarray) -> float | None:
    total = int(values.sum())
    return int(values[chosen].sum()) / total if total else None


def _mean_kl(sample: Sample, chosen: np.ndarray) -> float | None:
    freq = int(sample.totals("freq")[chosen].sum())
    return int(sample.totals("kl")[chosen].sum()) / (freq * ONE) if freq else None


def _kl_change(sample: Sample, chosen: np.ndarray, paired: bool) -> float | None:
    """Relative change of the summed kl from baseline to reference; None unless both scored the same occurrences."""
    start = int(sample.totals("kl_before")[chosen].sum()) if paired else 0
    return (int(sample.totals("kl")[chosen].sum()) - start) / start if start > 0 else None
