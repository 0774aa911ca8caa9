"""Finds the rocks of a run: the types whose loss is still there when training has saturated (METHOD 4.1, 4.7, 4.8).

1. Split the prompts at the reference checkpoint, seeded, into a selection half and a measuring half.
2. On the selection half score every type, R(v) = Freq(v) · mean kl(v) = its summed kl; with ``joint`` the smaller of R
   at the baseline and at the reference checkpoint.
3. Drop the ``exclude_top_freq`` most frequent types, then those with Freq < ``min_freq``; the top ``k`` are the rocks,
   ties in order of token id.
4. On the measuring half, and nowhere else, state what the set amounts to: shares of tokens, vocabulary, kl and
   gradient, and the change of its kl from baseline to reference over the same occurrences.

Paper: https://arxiv.org/abs/2605.09253
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rocktokens.errors import RocktokensError
from rocktokens.stats.aggregate import ONE, TypeSums, occurrences, prompts_of, share_per_rollout, type_sums
from rocktokens.stats.categories import categorise
from rocktokens.traces.store import TraceStore
from rocktokens.types import RockSet, RockToken

if TYPE_CHECKING:
    import pandas as pd

HELD_OUT = "held-out half"
NOT_SPLIT = "selection half (no split)"


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """Prompts that choose the rocks and prompts that are used to speak about them; None means all of them."""

    selection: list[str] | None
    measuring: list[str] | None
    n_measuring: int


def find_rocks(
    store: TraceStore,
    reference: int | None = None,
    baseline: int | None = None,
    k: int = 100,
    stage: str = "score",
    min_freq: int = 2,
    exclude_top_freq: int = 0,
    joint: bool = False,
    split: float | None = 0.5,
    seed: int = 0,
) -> RockSet:
    """Rank the types by persistent loss and describe the top ``k``.

    Args:
        store: replay traces of a run.
        reference: the checkpoint whose loss counts as what is left; default the last.
        baseline: the checkpoint to compare with; default the first.
        k: how many types are rocks; fewer if fewer can be ranked.
        stage: "score" ranks by R(v).
        min_freq: types with fewer occurrences in the selection half are not ranked.
        exclude_top_freq: how many of the most frequent types to leave out before ranking.
        joint: rank by the smaller R of the two checkpoints.
        split: share of prompts used for selection; None or 1 uses all prompts for selection and summary alike.
        seed: of the split.

    Returns:
        The rocks. ``freq``, ``mean_kl`` and ``score`` of a token are those it was selected by (reference checkpoint,
        selection half); ``summary`` says in ``measured_on`` which prompts it speaks of.
    """
    _require_valid(k, stage, min_freq, exclude_top_freq, split)
    reference, baseline = resolve_checkpoints(store, reference, baseline)
    if joint and reference == baseline:
        raise RocktokensError(f"joint needs two checkpoints, both are {reference}: trace another or leave joint out")
    prompts = split_prompts(prompts_of(store.table(reference)), split, seed)

    selection = type_sums(occurrences(store.table(reference), prompts.selection))
    score = selection.kl
    if joint:
        score = np.minimum(score, _kl_of(selection.token_id, _sums(store, baseline, prompts.selection)))
    order = _rank(selection, score, k, min_freq, exclude_top_freq)

    return RockSet(
        tokenizer_sha256=store.tokenizer_sha256,
        criterion={
            "reference": reference,
            "baseline": baseline,
            "k": int(k),
            "stage": stage,
            "min_freq": int(min_freq),
            "exclude_top_freq": int(exclude_top_freq),
            "joint": joint,
            "split": None if split is None else float(split),
            "seed": seed,
        },
        source={"manifest_sha256": store.manifest_sha256},
        summary=_summary(store, reference, baseline, prompts, selection.token_id[order]),
        tokens=_tokens(store, selection, score, order),
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
    texts = store.token_texts(now.token_id)
    paired = now.same_occurrences(before)
    frame = pd.DataFrame(
        {
            "token_id": now.token_id,
            "text": texts,
            "category": [categorise(text) for text in texts],
            "freq": now.freq,
            "mean_kl": now.kl / (now.freq * ONE),
            "mean_kl_baseline": before.kl / (before.freq * ONE) if paired else np.nan,
        }
    )
    return frame.iloc[np.lexsort((now.token_id, -now.kl))].reset_index(drop=True)


def resolve_checkpoints(store: TraceStore, reference: int | None, baseline: int | None) -> tuple[int, int]:
    """The last and first replayed checkpoint where none was named; a checkpoint without traces is refused by name."""
    available = store.checkpoints
    if not available:
        raise RocktokensError(f"{store.run.path} has no replay traces: run `rocktokens trace`")
    _require_finished(store, [step for step in (reference, baseline) if step is not None])
    resolved = {
        "reference": available[-1] if reference is None else reference,
        "baseline": available[0] if baseline is None else baseline,
    }
    for role, checkpoint in resolved.items():
        if checkpoint not in available:
            steps = ", ".join(map(str, available))
            raise RocktokensError(f"{role} = {checkpoint} is not a traced checkpoint: available are {steps}")
    if resolved["baseline"] > resolved["reference"]:
        raise RocktokensError(
            "baseline = {baseline} is later than reference = {reference}: swap them".format(**resolved)
        )
    return resolved["reference"], resolved["baseline"]


def _require_finished(store: TraceStore, named: list[int]) -> None:
    """Refuse a replay that was interrupted, unless both checkpoints are named and it is done with them."""
    steps = sorted(map(int, store.replay.get("checkpoints", {})))
    rows = {step: store.rows(step) for step in steps}
    paired = store.replay.get("probe") != "each"
    for step in steps if len(named) < 2 else sorted(set(steps) & set(named)):
        if not rows[step] or (paired and rows[step] < max(rows.values())):
            found = f"{rows[step]} of {max(rows.values())} rows" if rows[step] else "no traces"
            raise RocktokensError(
                f"the replay is not finished (checkpoint {step} of {', '.join(map(str, steps))} has {found}): "
                "run `rocktokens trace` again"
            )


def split_prompts(prompt_ids: list[str], share: float | None, seed: int) -> PromptSplit:
    """Divide sorted prompt ids by a seeded permutation, both sides getting at least one; None or 1 does not divide."""
    count = len(prompt_ids)
    if not count:
        raise RocktokensError("no row of the trace has a kl: trace again, with a student that is scored at every token")
    if share is None or share >= 1:
        return PromptSplit(None, None, count)
    if count < 2:
        raise RocktokensError(f"split = {share} needs at least 2 prompts, the trace has {count}: give split = 1")
    order = np.random.Generator(np.random.PCG64(seed)).permutation(count)
    cut = min(max(int(share * count + 0.5), 1), count - 1)
    selection, measuring = (sorted(prompt_ids[i] for i in half) for half in (order[:cut], order[cut:]))
    return PromptSplit(selection, measuring, count - cut)


def _require_valid(k: int | str, stage: str, min_freq: int, exclude_top_freq: int, split: float | None) -> None:
    if stage == "context":
        raise RocktokensError("stage = 'context' is not available yet: use stage='score'")
    if stage != "score":
        raise RocktokensError(f"stage = {stage!r} is not known: use 'score'")
    if k == "auto":
        raise RocktokensError("k = 'auto' is not available yet: give a whole number, such as k=100")
    for name, value, least in (("k", k, 1), ("min_freq", min_freq, 1), ("exclude_top_freq", exclude_top_freq, 0)):
        if not isinstance(value, int | np.integer) or value < least:
            raise RocktokensError(f"{name} = {value!r} is not valid: give a whole number of at least {least}")
    if split is not None and not 0 < split <= 1:
        raise RocktokensError(f"split = {split} is not valid: give a share above 0 and up to 1")


def _sums(store: TraceStore, checkpoint: int, prompt_ids: list[str] | None = None) -> TypeSums:
    return type_sums(occurrences(store.table(checkpoint), prompt_ids))


def _kl_of(token_ids: np.ndarray, sums: TypeSums) -> np.ndarray:
    """Fixed-point kl of the given types in other sums, 0 for a type that does not occur there."""
    kl_by_id = dict(zip(sums.token_id.tolist(), sums.kl.tolist(), strict=True))
    return np.array([kl_by_id.get(token_id, 0) for token_id in token_ids.tolist()], dtype=np.int64)


def _rank(sums: TypeSums, score: np.ndarray, k: int, min_freq: int, exclude_top_freq: int) -> np.ndarray:
    """Indices into ``sums`` of the rocks, in rank order."""
    eligible = sums.freq >= min_freq
    eligible[np.lexsort((sums.token_id, -sums.freq))[:exclude_top_freq]] = False
    order = np.lexsort((sums.token_id, -score))
    return order[eligible[order]][:k]


def _tokens(store: TraceStore, sums: TypeSums, score: np.ndarray, order: np.ndarray) -> list[RockToken]:
    texts = store.token_texts(sums.token_id[order])
    return [
        RockToken(
            id=int(sums.token_id[i]),
            text=text,
            rank=rank,
            freq=int(sums.freq[i]),
            mean_kl=int(sums.kl[i]) / (int(sums.freq[i]) * ONE),
            score=int(score[i]) / ONE,
            ccr=None,
            score_ctx=None,
            category=categorise(text),
        )
        for rank, (i, text) in enumerate(zip(order, texts, strict=True), start=1)
    ]


def _summary(
    store: TraceStore, reference: int, baseline: int, prompts: PromptSplit, rock_ids: np.ndarray
) -> dict[str, Any]:
    """What the rocks amount to on the measuring prompts."""
    rows = occurrences(store.table(reference), prompts.measuring)
    now = type_sums(rows)
    is_rock = np.isin(now.token_id, rock_ids)
    return {
        "measured_on": NOT_SPLIT if prompts.measuring is None else HELD_OUT,
        "n_prompts": prompts.n_measuring,
        "n_occurrences": int(now.freq.sum()),
        "n_types": len(now.token_id),
        "n_rock_occurrences": int(now.freq[is_rock].sum()),
        "n_rock_types": int(is_rock.sum()),
        "token_share": _share(now.freq, is_rock),
        "token_share_median": float(np.median(share_per_rollout(rows, rock_ids))),
        "vocab_share": float(is_rock.mean()),
        "kl_share": _share(now.kl, is_rock),
        "grad_share": _share(now.grad_norm, is_rock),
        "mean_kl": _mean_kl(now, np.ones_like(is_rock)),
        "mean_kl_rocks": _mean_kl(now, is_rock),
        "mean_kl_rest": _mean_kl(now, ~is_rock),
        **_paired_change(now, is_rock, _sums(store, baseline, prompts.measuring) if baseline != reference else None),
    }


def _paired_change(now: TypeSums, is_rock: np.ndarray, before: TypeSums | None) -> dict[str, Any]:
    """Relative change of the summed kl from baseline to reference; None unless both scored the same occurrences."""
    paired = before is not None and now.same_occurrences(before)

    def change(chosen: np.ndarray) -> float | None:
        if before is None or not paired or not before.kl[chosen].sum() > 0:
            return None
        start, end = int(before.kl[chosen].sum()), int(now.kl[chosen].sum())
        return (end - start) / start

    return {"paired": paired, "kl_change_rocks": change(is_rock), "kl_change_rest": change(~is_rock)}


def _share(values: np.ndarray, chosen: np.ndarray) -> float | None:
    total = int(values.sum())
    return int(values[chosen].sum()) / total if total else None


def _mean_kl(sums: TypeSums, chosen: np.ndarray) -> float | None:
    freq = int(sums.freq[chosen].sum())
    return int(sums.kl[chosen].sum()) / (freq * ONE) if freq else None
