"""Select the rocks of a run: every step from traces to a ranking, with what it rests on kept for later.

The method is docs/method.md, section 4.

1. Gather the sums of both halves of the prompts; rank on the selection half alone.
2. Stage "bound" ranks by L(v), a lower bound of R(v) = Freq(v) · mean kl(v); stage "score" by R itself; with ``joint``
   by the smaller of the two checkpoints. ``ranking`` says who may be ranked: in enough prompts, and no longer moving.
3. Stage "context" multiplies R with CCR(v), the share of the type's occurrences that are persistent *and* stand in
   contexts like those of its other persistent occurrences.
4. R_ctx(v) is at most R(v) · |O_PH(v)| / Freq(v). When there are more pairs of contexts than ``max_pairs``, types are
   compared in the order of that bound, and those whose bound lies below the k-th score are passed over: they cannot be
   rocks, so the pairs go to those that can.
5. Traces whose teacher named its likeliest tokens alone have sums that hold, and single tokens that do not: they are
   ranked, but no token is compared with a threshold, so there is no stage "context" and there are no windows.
6. The first ``k`` are the rocks, or as many as the crossing of coverage and stability says: none where no type that may
   be ranked has a loss.

Paper: https://arxiv.org/abs/2605.09253
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
from scipy.sparse import csr_array

from rocktokens.config import FindSection
from rocktokens.errors import RocktokensError
from rocktokens.progress import SILENT, Progress
from rocktokens.rocks.contexts import ContextResult, context_consistency, judged_sizes
from rocktokens.rocks.cutoff import CutoffCurve, auto_k, cutoff_curve
from rocktokens.rocks.encoders import Encoder
from rocktokens.rocks.persistence import Occurrences, Persistent, Thresholds, find_thresholds, persistent_occurrences
from rocktokens.rocks.ranking import Require, Rules, rank_types, rankable
from rocktokens.rocks.selectors import Sample, Selector, selector_of
from rocktokens.rocks.sums import PromptSums, gather
from rocktokens.run_dir import derive_seed
from rocktokens.traces.store import TraceStore
from rocktokens.types import has_tail

CHOICES = {"stage": ("bound", "score", "context"), "require": ("stopped", "stuck", "any")}
FROM_ZERO = ("reference", "baseline", "exclude_top_freq", "seed")
WHOLE = {**dict.fromkeys(FROM_ZERO, 0), "k": 1, "min_freq": 1, "min_prompts": 1, "window": 1, "max_pairs": 2}
"""Parameters that are whole numbers, with the least they may be."""
NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "gamma": (lambda value: 0 < value <= 1, "a number above 0, up to 1"),
    "eta": (lambda value: 0 < value <= 1, "a number above 0, up to 1"),
    "tau": (lambda value: 0 <= value <= 1, "a quantile from 0 to 1, or tau_nats in nats"),
    "split": (lambda value: 0 < value <= 1, "a share above 0 and up to 1"),
    "min_score": (lambda value: True, "a number of nats"),
}
"""Parameters that are any finite numbers, with what is asked of them."""
OPTIONAL = ("reference", "baseline", "tau_nats", "split")
MANY = 1000
PER_ROCK = 10
"""Types compared at first when there are too many pairs: this many, or this many for every rock."""
_DEFAULT = FindSection()


@dataclass(frozen=True, slots=True)
class Criterion:
    """Every parameter of a search; see ``find_rocks`` for their meaning.

    Defaults are those of the config's section ``find``, but for ``min_score``: here a score of 0 is enough.
    """

    reference: int | None = None
    baseline: int | None = None
    k: int | Literal["auto"] = _DEFAULT.k
    stage: str = _DEFAULT.stage
    require: Require = _DEFAULT.require
    min_freq: int = _DEFAULT.min_freq
    min_prompts: int = _DEFAULT.min_prompts
    exclude_top_freq: int = _DEFAULT.exclude_top_freq
    joint: bool = _DEFAULT.joint
    window: int = _DEFAULT.window
    tau: float = _DEFAULT.tau
    tau_nats: tuple[float, float] | None = _DEFAULT.tau_nats
    gamma: float = _DEFAULT.gamma
    eta: float = _DEFAULT.eta
    encoder: str = _DEFAULT.encoder
    max_pairs: int = _DEFAULT.max_pairs
    min_score: float | None = 0.0
    """None means 0, as in records of older versions."""
    split: float | None = _DEFAULT.split
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that mean nothing, by name; keep numbers as plain ones, which JSON can hold."""
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise RocktokensError(f"{name} = {getattr(self, name)!r} is not known: use one of {', '.join(known)}")
        if self.min_score is None:
            object.__setattr__(self, "min_score", 0.0)
        if not isinstance(self.joint, bool):
            raise RocktokensError(f"joint = {self.joint!r} is not valid: give True or False")
        for name in (*WHOLE, *NUMBERS, "tau_nats"):
            value = getattr(self, name)
            is_no_number = (value is None and name in OPTIONAL) or (name == "k" and value == "auto")
            if not is_no_number:
                object.__setattr__(self, name, _plain(name, value))

    @property
    def selector(self) -> Selector:
        """The score that ranks."""
        return selector_of(self.stage, self.joint)

    def rules(self, k: int) -> Rules:
        """Who may be a rock, with ``k`` to be taken."""
        return Rules(k, self.min_freq, self.exclude_top_freq, self.min_score or 0.0, self.min_prompts, self.require)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The ranking of one search and all it rests on."""

    criterion: Criterion
    """With the checkpoints that were used."""
    sums: PromptSums
    """Its selection half knows which occurrences were kept, after stage "context"."""
    thresholds: Thresholds | None
    """None where the kl of single tokens does not hold, for the teacher named its likeliest tokens alone."""
    persistent: Persistent | None
    context: ContextResult | None
    encoder: Encoder | None
    """Of contexts; None without stage "context"."""
    score_U: np.ndarray
    """R(v), or the joint score, on the selection half."""
    ranking_U: np.ndarray
    """What ranks: L(v), R(v) or R_ctx(v)."""
    curve: CutoffCurve
    k: int
    """How many were asked for, by number or by "auto"."""
    columns: np.ndarray
    """int64 (K,): the rocks in rank order, as indices into the sample's types."""
    teacher: str = ""
    """How its values came (``TraceStore.teacher``)."""

    @property
    def is_rock(self) -> np.ndarray:
        """Which types are rocks, bool (U,)."""
        return np.isin(np.arange(len(self.score_U)), self.columns)

    @property
    def n_persistent(self) -> np.ndarray:
        """|O_PH(v)| on the selection half, int64 (U,); 0 throughout where no contexts were compared."""
        size = len(self.score_U)
        return np.zeros(size, np.int64) if self.persistent is None else self.persistent.counts(size)

    @property
    def is_exact(self) -> bool:
        """Whether all contexts of all types that may be ranked were compared."""
        if self.context is None or self.persistent is None:
            return True
        return compares_all(self.sums.selection, self.persistent, self.context, self.criterion)

    @property
    def consistency(self) -> np.ndarray:
        """CCR(v) on the selection half, float64 (U,); NaN where contexts were passed over or never compared."""
        if self.context is None:
            return np.full(len(self.score_U), np.nan)
        sample = self.sums.selection
        ccr = sample.totals("kept") / np.maximum(sample.totals("freq"), 1)
        return np.where((self.n_persistent >= 2) & (self.context.judged == 0), np.nan, ccr)


def search(
    store: TraceStore,
    criterion: Criterion,
    encoder: Encoder | None,
    progress: Progress = SILENT,
    gammas: tuple[float, ...] = (),
) -> SearchResult:
    """Rank the types of a run.

    Stage "context" needs an encoder; ``gammas`` are further cosines to count neighbours at, for a later look at other
    settings.
    """
    sums = gather(store, criterion.reference, criterion.baseline, criterion.split, criterion.seed)
    criterion = replace(criterion, reference=sums.reference, baseline=sums.baseline)
    if criterion.joint and sums.reference == sums.baseline:
        raise RocktokensError(
            f"joint needs two checkpoints, both are {sums.reference}: trace another or leave joint out"
        )
    if criterion.require == "stuck" and not sums.paired:
        raise RocktokensError(
            f"require = 'stuck' needs an earlier checkpoint that scored the same tokens as {sums.reference}, and "
            f"{'there is none' if sums.baseline == sums.reference else f'{sums.baseline} did not'}: trace one, or use "
            "require = 'stopped'"
        )
    teacher = traced_teacher(store, sums)
    if criterion.stage == "context" and has_tail(teacher):
        raise RocktokensError(
            f"stage = 'context' compares the kl of single tokens with thresholds, and the teacher of these traces gave "
            f"{teacher}, whose kl holds for sums alone: use stage = 'bound' or 'score'"
        )
    thresholds = None if has_tail(teacher) else find_thresholds(store, sums, criterion.tau, criterion.tau_nats)
    if thresholds is None or criterion.stage != "context":
        return replace(_take_first(criterion, sums, thresholds), teacher=teacher)
    if encoder is None:
        raise RocktokensError("stage = 'context' needs embeddings or an encoder: give one, or use stage='score'")
    persistent = persistent_occurrences(store, sums, thresholds)
    k = criterion.k if isinstance(criterion.k, int) else MANY // PER_ROCK
    while True:
        context = compare_contexts(sums.selection, persistent, criterion, k, encoder, progress, gammas)
        kept = with_kept(sums.selection, persistent, context, criterion.gamma, criterion.eta)
        result = _take_first(criterion, replace(sums, selection=kept), thresholds, persistent, context, encoder)
        is_settled = criterion.k != "auto" or (0 < result.k <= k and auto_k(result.curve).crossed)
        if is_settled or result.is_exact or k >= len(result.score_U):
            return replace(result, teacher=teacher)
        k = 2 * max(k, result.k)  # the curves of "auto" may cross beyond what was compared


def traced_teacher(store: TraceStore, sums: PromptSums) -> str:
    """Return how the teacher's values came; refuses two checkpoints where one has all of the divergence."""
    now, before = (store.teacher(step) for step in (sums.reference, sums.baseline))
    require_comparable(now, before, f"checkpoints {sums.reference} and {sums.baseline}")
    return now


def require_comparable(first: str, second: str, what: str) -> None:
    """Refuse to compare kl that is of likely tokens and a tail with other kl; teachers are given by their labels."""
    if first != second and (has_tail(first) or has_tail(second)):
        raise RocktokensError(
            f"{what} have teachers that gave different values ({first or 'in memory'}, {second or 'in memory'}), and "
            "kl of different kinds cannot be compared: trace both in one way (teacher.values, teacher.top_k)"
        )


def compare_contexts(
    selection: Sample,
    persistent: Occurrences,
    criterion: Criterion,
    k: int,
    encoder: Encoder,
    progress: Progress = SILENT,
    gammas: tuple[float, ...] = (),
) -> ContextResult:
    """Count similar contexts of every type that can be among the first ``k``; ``gammas`` are counted as well.

    Types that are too frequent, in too few prompts or moving are compared too, if the pairs suffice for all: subsets of
    the prompts, by which a ranking's stability is judged, may exclude others.
    """
    score, freq = score_types(selection, selector_of("score", criterion.joint)), selection.totals("freq")
    number = persistent.counts(len(freq))
    bound = score * number / np.maximum(freq, 1)
    rules = Rules(len(freq), criterion.min_freq)
    order = rank_types(bound, rankable(selection, rules)[0], rules)
    order, pairs = order[number[order] >= 2], number * (number - 1)
    if pairs[order].sum() > criterion.max_pairs:
        order = order[rankable(selection, criterion.rules(len(freq)))[0][order]]
    count = len(order)
    if pairs[order].sum() > criterion.max_pairs:
        count = min(max(MANY, PER_ROCK * k), count)
    while True:
        chosen = np.flatnonzero(np.isin(persistent.columns, order[:count]))
        judged = judged_sizes(number[order[:count]], criterion.max_pairs)
        with progress.bar("comparing contexts", int((judged * (judged - 1)).sum())) as advance:
            context = context_consistency(
                persistent.columns[chosen],
                persistent.rollout_ids[chosen],
                persistent.positions[chosen],
                selection.token_ids,
                encoder,
                tuple(dict.fromkeys((criterion.gamma, *gammas))),
                criterion.max_pairs,
                criterion.seed,
                advance,
            )
        reached = np.sort(score * context.kept_count(criterion.gamma, criterion.eta) / np.maximum(freq, 1))[::-1]
        if count == len(order) or bound[order[count]] < reached[min(k, len(reached)) - 1]:
            return replace(context, occurrences=chosen[context.occurrences])
        count = min(2 * count, len(order))


def compares_all(selection: Sample, persistent: Occurrences, context: ContextResult, criterion: Criterion) -> bool:
    """Whether no type that may be ranked was judged on a sample or passed over: then other settings are exact too."""
    size = len(selection.token_ids)
    ranked = np.flatnonzero(rankable(selection, criterion.rules(size))[0])
    number = persistent.counts(size)[ranked]
    return bool((context.judged[ranked] == np.where(number < 2, 0, number)).all())


def with_kept(sample: Sample, persistent: Occurrences, context: ContextResult, gamma: float, eta: float) -> Sample:
    """Add to a sample how many occurrences of each type and cluster were kept."""
    kept = context.kept(gamma, eta)
    columns, clusters = context.columns[kept], persistent.clusters[context.occurrences[kept]]
    each = context.scales[columns]
    counts = each.astype(np.int64) if context.exact.all() else each
    return replace(sample, kept=csr_array((counts, (clusters, columns)), shape=sample.freq.shape))


def score_types(sample: Sample, selector: Selector) -> np.ndarray:
    """Score every type on the whole sample, float64 (U,)."""
    return selector(sample, np.ones((1, sample.n_clusters)))[0]


def _take_first(
    criterion: Criterion,
    sums: PromptSums,
    thresholds: Thresholds | None,
    persistent: Persistent | None = None,
    context: ContextResult | None = None,
    encoder: Encoder | None = None,
) -> SearchResult:
    """Rank what has been scored and take the first k."""
    sample, selector = sums.selection, criterion.selector
    ranking = score_types(sample, selector)
    held_out = sums.measuring if sums.is_split else None
    seed = derive_seed(criterion.seed, "cutoff")
    curve = cutoff_curve(sample, held_out, selector, criterion.rules(len(ranking)), seed=seed)
    k = int(criterion.k) if criterion.k != "auto" else auto_k(curve).k if len(curve.coverage) else 0
    columns = rank_types(ranking, rankable(sample, criterion.rules(k))[0], criterion.rules(k))
    score = score_types(sample, selector_of("score", criterion.joint))
    return SearchResult(criterion, sums, thresholds, persistent, context, encoder, score, ranking, curve, k, columns)


def _plain(name: str, value: Any) -> Any:
    """A parameter as a plain number, or a pair of them; one sentence where it is not what it should be."""
    if name in WHOLE:
        if isinstance(value, bool) or not isinstance(value, Integral) or value < WHOLE[name]:
            raise RocktokensError(f"{name} = {value!r} is not valid: give a whole number of at least {WHOLE[name]}")
        return int(value)
    if name == "tau_nats":
        if not isinstance(value, tuple | list) or len(value) != 2 or not all(map(_is_number, value)):
            raise RocktokensError(f"tau_nats = {value!r} is not valid: give two numbers, (baseline, reference)")
        return float(value[0]), float(value[1])
    is_valid, remedy = NUMBERS[name]
    if not _is_number(value) or not is_valid(value):
        raise RocktokensError(f"{name} = {value!r} is not valid: give {remedy}")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
