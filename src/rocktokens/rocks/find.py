"""Find the rocks of a run: what was selected, how sure that is, and what it amounts to (docs/method.md, section 4).

1. Settings come from the caller, then from the run's config (section ``find``, and a seed derived from the run's). So
   ``find_rocks(store)`` and ``rocktokens find`` name the same rocks with the same numbers.
2. The search runs on one half of the prompts: sums, persistent occurrences, contexts, ranking (``search``).
3. Every score gets a bootstrap interval and every rock the probability that it is among the first k.
4. Shares of tokens, vocabulary, kl and gradient, and the change of kl from baseline to reference, are measured on the
   other half, with intervals.
5. ``find_run`` looks at the result from all sides too (``analysis``) and commits find.json and rocks.json.

Paper: https://arxiv.org/abs/2605.09253
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from rocktokens.config import Config, FindSection, has_config, parse_config, run_config
from rocktokens.errors import RocktokensError, UnlistedStudentError
from rocktokens.inference.bootstrap import median_interval
from rocktokens.progress import SILENT, Progress
from rocktokens.rocks.analysis import analyse, other_gammas
from rocktokens.rocks.categories import store_categories
from rocktokens.rocks.encoders import Encoder, context_encoder
from rocktokens.rocks.movement import label_at, label_types, movement
from rocktokens.rocks.ranking import rank_types, rankable
from rocktokens.rocks.records import FindRecord
from rocktokens.rocks.search import Criterion, SearchResult, score_types, search
from rocktokens.rocks.selectors import selector_of
from rocktokens.rocks.sums import HELD_OUT, NOT_SPLIT, occurrences, resolve_checkpoints, rollout_shares, type_sums
from rocktokens.rocks.uncertainty import score_uncertainty, share_intervals
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.traces.store import TraceStore
from rocktokens.types import ONE, RankedType, RockSet, RockToken, has_tail
from rocktokens.windows import WindowRule

if TYPE_CHECKING:
    import pandas as pd


class _FromRun:
    """Stands for an argument that was not given: the run's config decides."""

    def __repr__(self) -> str:
        return "from the run"


FROM_RUN: Any = _FromRun()


@dataclass(frozen=True, slots=True)
class FindOptions:
    """Where to look and with what; of these only the checkpoints change the result."""

    reference: int | None = None
    baseline: int | None = None
    engine: str = "duckdb"
    threads: int | None = None


EVERYWHERE = FindOptions()
RANKED = 20
"""Types behind the rocks that are listed, or as many as there are rocks."""


class Found(NamedTuple):
    """What ``find_run`` left in the run: rocks.json and find.json."""

    rocks: RockSet
    analysis: FindRecord


def find_rocks(
    store: TraceStore,
    *,
    reference: int | None = None,
    baseline: int | None = None,
    k: int | Literal["auto"] = FROM_RUN,
    stage: str = FROM_RUN,
    require: str = FROM_RUN,
    min_freq: int = FROM_RUN,
    min_prompts: int = FROM_RUN,
    exclude_top_freq: int = FROM_RUN,
    joint: bool = FROM_RUN,
    window: int = FROM_RUN,
    tau: float = FROM_RUN,
    gamma: float = FROM_RUN,
    eta: float = FROM_RUN,
    embeddings: np.ndarray | None = None,
    split: float | None = FROM_RUN,
    seed: int | None = None,
    tau_nats: tuple[float, float] | None = FROM_RUN,
    min_score: float | None = FROM_RUN,
    encoder: str | Encoder = FROM_RUN,
    max_pairs: int = FROM_RUN,
) -> RockSet:
    """Rank the types by persistent loss and describe the first ``k``.

    What is not given comes from the section ``find`` of the run's config, as in ``rocktokens find``; in a folder that
    holds nothing but traces it is the default of that section, named below.

    Args:
        store: replay traces of a run.
        reference: the checkpoint whose loss counts as what is left; default the last.
        baseline: the checkpoint to compare with; default the first.
        k: how many types are rocks (100; fewer if fewer can be ranked), or "auto": where coverage meets stability.
        stage: "bound" (the default) ranks by a lower bound of R(v), "score" by R(v) itself, as the paper's code does,
            "context" by R_ctx(v) = R(v) · CCR(v).
        require: "stopped" (the default) leaves out types whose loss is surely still falling, "stuck" takes only those
            that surely kept three quarters of theirs, "any" takes all.
        min_freq: types with fewer occurrences in the selection half are not ranked (2).
        min_prompts: nor are types in fewer prompts of it (5).
        exclude_top_freq: how many of the most frequent types to leave out before ranking (0).
        joint: replace R by the smaller R of the two checkpoints (False).
        window: tokens on each side that make the context of an occurrence (5).
        tau: an occurrence is persistent when its kl reaches this quantile at both checkpoints (0.8).
        gamma: the least cosine of similar contexts.
        eta: the least share of similar contexts of an occurrence that is kept.
        embeddings: float (V, D), rows by token id; default the input embeddings of the reference student.
        split: share of prompts used for selection (0.5); None or 1 uses all prompts for selection and summary alike.
        seed: of the split, of samples and of the bootstrap; None is the run's, 0 without a config.
        tau_nats: (baseline, reference) thresholds in nats instead of quantiles.
        min_score: of the first k, only those whose ranking score reaches this; with 0, the default without a config,
            even a type with score 0 is taken when there are fewer than k others, but none that rounding took below 0.
        encoder: "embeddings" (the default), "hidden" (loads the student), or what
            ``rocktokens.scoring.hidden.hidden_encoder`` makes of a student.
        max_pairs: pairs of contexts to compare; beyond it types are judged on samples, and CCR gets an interval.

    Returns:
        The rocks. ``freq``, ``mean_kl``, ``score``, ``ccr`` of a token are those it was selected by (selection half);
        ``held_out_mean_kl`` and ``summary`` are of the prompts that did not select it.
    """
    arguments = dict(locals())
    given = {name: value for name, value in arguments.items() if value is not FROM_RUN}
    for name in ("store", "embeddings", *(["seed"] if seed is None else [])):
        del given[name]
    if "tau" in given:
        given.setdefault("tau_nats", None)
    if embeddings is not None:
        given.setdefault("encoder", "embeddings")
    own: dict[str, Any] = {}
    if has_config(store.run):
        config = run_config(store.run)
        own = {**config.find.model_dump(), "seed": split_seed(config)}
    kind = {**own, **given}.get("encoder", "embeddings")
    criterion = Criterion(**{**own, **given, "encoder": kind if isinstance(kind, str) else "hidden"})
    return rock_set(store, search_traces(store, criterion, kind, embeddings))


def find_run(
    run: RunDir, section: FindSection, seed: int, options: FindOptions = EVERYWHERE, progress: Progress = SILENT
) -> Found:
    """Find the rocks of a run, prompts split by ``seed``, and look at them from all sides; commit both files."""
    with run.lock():
        store, criterion = open_search(run, section, seed, options)
        result = search_traces(store, criterion, section.encoder, progress=progress, gammas=other_gammas(section.gamma))
        with progress.status("weighing the evidence"):
            rocks = rock_set(store, result)
            analysis = analyse(store, result, rocks)
            store.note_searched()
            run.commit("find.json", analysis.save)
            run.commit(run.rocks.name, rocks.save)
    return Found(rocks, analysis)


def find_settings(run: RunDir, overrides: list[str] | None = None) -> tuple[FindSection, int]:
    """Return the run's own settings and seed; the defaults and 0 for a folder that holds nothing but traces."""
    if has_config(run):
        config = run_config(run, overrides)
        return config.find, split_seed(config)
    # Traces alone name no models, which every config must.
    needed = ["models.student=none", "models.teacher=none", f"run.directory={json.dumps(str(run.path))}"]
    return parse_config("", ["find.min_score=0", *(overrides or []), *needed], name=str(run.path)).find, 0


def split_seed(config: Config) -> int:
    """Return what divides the prompts of a run into those that select its rocks and those that are held out."""
    return derive_seed(config.run.seed, "split")


def open_search(run: RunDir, section: FindSection, seed: int, options: FindOptions) -> tuple[TraceStore, Criterion]:
    """Open the traces of a run and state what is searched for."""
    store = TraceStore(run, engine=options.engine, threads=options.threads)
    checkpoints = {"reference": options.reference, "baseline": options.baseline}
    return store, Criterion(seed=seed, **checkpoints, **section.model_dump())


def search_traces(
    store: TraceStore,
    criterion: Criterion,
    encoder: str | Encoder = "embeddings",
    embeddings: np.ndarray | None = None,
    progress: Progress = SILENT,
    gammas: tuple[float, ...] = (),
) -> SearchResult:
    """Search with the encoder that a criterion asks for; ``gammas`` are cosines to count neighbours at as well."""
    made = None
    with progress.status("reading traces"):
        reference, _ = resolve_checkpoints(store, criterion.reference, criterion.baseline)
        if criterion.stage == "context":
            try:
                made = context_encoder(store, reference, encoder, criterion.window, embeddings)
            except UnlistedStudentError as error:
                raise RocktokensError(
                    f"{error}; or give embeddings=, or stage='score' (on the command line --set find.stage=score)"
                ) from None
    return search(store, criterion, made, progress, gammas)


def rock_set(store: TraceStore, result: SearchResult) -> RockSet:
    """Describe what a search found, with intervals, as it is written to rocks.json."""
    record = asdict(result.criterion)
    thresholds, teacher = result.thresholds, {"teacher": result.teacher} if has_tail(result.teacher) else {}
    record["tau_nats"] = None if record["tau_nats"] is None else list(record["tau_nats"])
    return RockSet(
        tokenizer_sha256=store.tokenizer_sha256,
        criterion=record,
        source={"manifest_sha256": store.manifest_sha256, **teacher},
        summary=_summary(store, result),
        tokens=_tokens(store, result),
        ranked=_ranked(store, result),
        windows=None if thresholds is None else WindowRule(result.criterion.window, thresholds.post).to_dict(),
    )


def type_table(
    store: TraceStore,
    reference: int | None = None,
    baseline: int | None = None,
    prompt_ids: list[str] | None = None,
) -> "pd.DataFrame":
    """List every type used, by summed kl at the reference checkpoint, and what training did to it.

    Checkpoints are by default the last and the first, prompts all of them.

    Returns:
        Columns token_id, text, category, freq, mean_kl, mean_kl_baseline. The last is the mean over the same
        occurrences at the baseline checkpoint, and missing throughout when that was not replayed on the same rollouts.
    """
    import pandas as pd

    reference, baseline = resolve_checkpoints(store, reference, baseline)
    now, before = (type_sums(occurrences(store.table(step), prompt_ids)) for step in (reference, baseline))
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


def _tokens(store: TraceStore, result: SearchResult) -> list[RockToken]:
    selection, measuring, criterion = result.sums.selection, result.sums.measuring, result.criterion
    freq, kl = selection.totals("freq"), selection.totals("kl")
    held_freq, held_kl = measuring.totals("freq"), measuring.totals("kl")
    before = measuring.totals("kl_before") if result.sums.paired else np.zeros_like(held_kl)
    sure = score_uncertainty(
        selection,
        criterion.selector,
        criterion.rules(max(result.k, 1)),
        seed=derive_seed(criterion.seed, "bootstrap"),
        joint=criterion.joint,
    )
    ids = selection.token_ids[result.columns]
    texts, categories = store.token_texts(ids), store_categories(store, ids)
    context, moved = _context_fields(result), _movement_fields(result)
    held_out_labels = label_types(measuring) if result.sums.is_split else None
    return [
        RockToken(
            id=int(ids[place]),
            text=texts[place],
            rank=place + 1,
            freq=int(freq[i]),
            mean_kl=int(kl[i]) / (int(freq[i]) * ONE),
            score=float(result.score_U[i]),
            category=categories[place],
            score_interval=sure.interval(i),
            p_in_top_k=float(sure.p_in_top_k[i]),
            held_out_label=None if held_out_labels is None else label_at(held_out_labels, i),
            **moved(i),
            held_out_mean_kl=int(held_kl[i]) / (int(held_freq[i]) * ONE) if held_freq[i] else None,
            held_out_change=(int(held_kl[i]) - int(before[i])) / int(before[i]) if before[i] > 0 else None,
            **context(i),
        )
        for place, i in enumerate(result.columns)
    ]


def _ranked(store: TraceStore, result: SearchResult) -> list[RankedType]:
    """List the best types that are no rocks, those included that were passed over because they move."""
    sample, rules = result.sums.selection, replace(result.criterion.rules(len(result.ranking_U)), require="any")
    order = rank_types(result.ranking_U, rankable(sample, rules)[0], rules)
    behind = order[~result.is_rock[order]][: max(len(result.columns), RANKED)]
    freq, kl, ids = sample.totals("freq"), sample.totals("kl"), sample.token_ids[behind]
    texts, categories, moved = store.token_texts(ids), store_categories(store, ids), _movement_fields(result)
    return [
        RankedType(
            id=int(ids[place]),
            text=texts[place],
            category=categories[place],
            freq=int(freq[i]),
            mean_kl=int(kl[i]) / (int(freq[i]) * ONE),
            score=float(result.score_U[i]),
            **moved(i),
        )
        for place, i in enumerate(behind)
    ]


def _movement_fields(result: SearchResult) -> Callable[[int], dict[str, Any]]:
    """Return what the selection half says of a type's bound, prompts, label and what it kept, by column."""
    sample = result.sums.selection
    bound = score_types(sample, selector_of("bound", result.criterion.joint))
    prompts, labels, kept = np.diff(sample.freq.tocsc().indptr), label_types(sample), movement(sample)

    def fields(i: int) -> dict[str, Any]:
        first, middle = ((None, None) if since is None else since.of(i) for since in kept)
        return {
            "bound": float(bound[i]),
            "n_prompts": int(prompts[i]),
            "label": label_at(labels, i),
            "kept_first": first[0],
            "kept_first_interval": first[1],
            "kept_middle": middle[0],
            "kept_middle_interval": middle[1],
        }

    return fields


def _context_fields(result: SearchResult) -> Callable[[int], dict[str, Any]]:
    """Return what the context stage says of a type, by column."""
    context, criterion = result.context, result.criterion
    if context is None:
        return lambda _: {"ccr": None, "score_ctx": None}
    number, freq, ccr = result.n_persistent, result.sums.selection.totals("freq"), result.consistency
    share = (number / np.maximum(freq, 1))[:, None]
    exact = context.exact
    interval = context.kept_share_interval(criterion.gamma, criterion.eta) * share
    return lambda i: {
        "ccr": None if np.isnan(ccr[i]) else float(ccr[i]),
        "score_ctx": float(result.ranking_U[i]),
        "n_persistent": int(number[i]),
        "ccr_interval": None if exact[i] else (float(interval[i, 0]), float(interval[i, 1])),
    }


def _summary(store: TraceStore, result: SearchResult) -> dict[str, Any]:
    """What the rocks amount to on the measuring prompts."""
    sums, is_rock, thresholds = result.sums, result.is_rock, result.thresholds
    sample, seed = sums.measuring, derive_seed(result.criterion.seed, "bootstrap")
    freq, used = sample.totals("freq"), sample.totals("freq") > 0
    rows = occurrences(store.table(sums.reference), sums.prompts.measuring)
    shares, clusters = rollout_shares(rows, sample.token_ids[is_rock], sums.clusters)
    clusters = clusters - (sums.selection.n_clusters if sums.is_split else 0)
    intervals = share_intervals(sample, is_rock, sums.paired, seed=seed)
    intervals["token_share_median"] = median_interval(shares, clusters, sample.n_clusters, seed=seed)
    return {
        "measured_on": HELD_OUT if sums.is_split else NOT_SPLIT,
        "k": result.k,
        "n_score_zero": int(np.count_nonzero(result.ranking_U[result.columns] <= 0)),
        "n_prompts": sums.prompts.n_measuring,
        "n_prompts_selection": sums.prompts.n_selection,
        "n_clusters": sample.n_clusters,
        "n_occurrences": int(freq.sum()),
        "n_types": int(used.sum()),
        "n_rock_occurrences": int(freq[is_rock].sum()),
        "n_rock_types": int((used & is_rock).sum()),
        "token_share": sample.share("freq", is_rock),
        "token_share_median": float(np.median(shares)),
        "vocab_share": int((used & is_rock).sum()) / int(used.sum()) if used.any() else None,
        "kl_share": sample.share("kl", is_rock),
        "grad_share": sample.share("grad_norm", is_rock),
        "mean_kl": sample.mean_kl(np.ones_like(is_rock)),
        "mean_kl_rocks": sample.mean_kl(is_rock),
        "mean_kl_rest": sample.mean_kl(~is_rock),
        "paired": sums.paired,
        "kl_change_rocks": sample.kl_change(is_rock) if sums.paired else None,
        "kl_change_rest": sample.kl_change(~is_rock) if sums.paired else None,
        "tau_pre_nats": None if thresholds is None else thresholds.pre,
        "tau_post_nats": None if thresholds is None else thresholds.post,
        "intervals": {name: None if ends is None else list(ends) for name, ends in intervals.items()},
    }
