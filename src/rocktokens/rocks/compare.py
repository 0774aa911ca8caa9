"""Two searches side by side: do runs, tasks, seeds or checkpoints have the same rocks?

1. Both were made by one criterion over one vocabulary.
2. The sets are compared by their Jaccard index, the scores of all types ranked in both by Spearman's correlation.
3. Two yardsticks tell whether an index is high: what random sets of these sizes would share, and what two halves of the
   prompts of one and the same run share.
4. Scores are shown as shares of the run's kl, so that runs of different size compare; what moved most comes first.
"""

from typing import Any

import numpy as np

from rocktokens.errors import TokenizerMismatchError
from rocktokens.rocks.categories import store_categories
from rocktokens.rocks.cutoff import jaccard, spearman, split_half
from rocktokens.rocks.search import Finding
from rocktokens.run_dir import derive_seed
from rocktokens.traces.store import TraceStore


def compare_findings(stores: tuple[TraceStore, TraceStore], findings: tuple[Finding, Finding]) -> dict[str, Any]:
    """Agreement of two searches and what moved between them, JSON-ready; ``a`` is the first, ``b`` the second."""
    require_same_vocabulary(*(store.tokenizer_sha256 for store in stores))
    ids = [finding.evidence.selection.token_ids[finding.columns] for finding in findings]
    scores = [_scores_by_id(finding) for finding in findings]
    shared = sorted(set(scores[0]) & set(scores[1]))
    return {
        "jaccard": jaccard(*ids),
        "jaccard_by_chance": _chance(len(ids[0]), len(ids[1]), len(shared)),
        "jaccard_within": [_within(finding) for finding in findings],
        "spearman": spearman(*(np.array([side[v] for v in shared]) for side in scores)),
        "n_types_in_both": len(shared),
        "n_rocks": [len(side) for side in ids],
        "only_a": np.setdiff1d(ids[0], ids[1]).tolist(),
        "only_b": np.setdiff1d(ids[1], ids[0]).tolist(),
        "moved": _moved(stores[0], findings, np.union1d(*ids)),
    }


def require_same_vocabulary(first: str, second: str) -> None:
    """Refuse two runs, given by vocabulary hash, whose token ids mean different things."""
    if first != second:
        raise TokenizerMismatchError(
            f"the runs have different tokenizers ({first[:12] or 'none'} and {second[:12] or 'none'}): their token ids "
            "mean different things, compare runs of one vocabulary"
        )


def _scores_by_id(finding: Finding) -> dict[int, float]:
    """Ranking scores of the types that may be ranked."""
    sample = finding.evidence.selection
    ranked = sample.totals("freq") >= finding.criterion.min_freq
    return dict(zip(sample.token_ids[ranked].tolist(), finding.ranking_U[ranked].tolist(), strict=True))


def _chance(first: int, second: int, types: int) -> float | None:
    """The Jaccard index of two sets of these sizes that share as many of the types as random ones do on average."""
    shared = first * second / types if types else 0.0
    union = first + second - shared
    return shared / union if union > 0 and types >= max(first, second) else None


def _within(finding: Finding) -> float | None:
    """Mean Jaccard index of the rocks of two halves of one run's prompts; which contexts recur is taken as found."""
    criterion, seed = finding.criterion, derive_seed(finding.criterion.seed, "compare")
    rules = criterion.rules(max(finding.k, 1))
    return split_half(finding.evidence.selection, criterion.selector, rules, seed=seed)["jaccard_halves"]


def _moved(store: TraceStore, findings: tuple[Finding, Finding], union: np.ndarray) -> list[dict[str, Any]]:
    """Every type that is a rock in either: rank, share of the kl and of the tokens on both sides."""
    sides = [_side(finding, union) for finding in findings]
    texts, categories = store.token_texts(union), store_categories(store, union)
    records = [
        {
            "id": int(token_id),
            "text": texts[i],
            "category": categories[i],
            **{f"{name}_{label}": side[name][i] for label, side in zip("ab", sides, strict=True) for name in side},
        }
        for i, token_id in enumerate(union)
    ]
    return sorted(records, key=lambda record: (-abs(record["kl_share_b"] - record["kl_share_a"]), record["id"]))


def _side(finding: Finding, union: np.ndarray) -> dict[str, list[Any]]:
    sample = finding.evidence.selection
    freq, kl = (
        dict(zip(sample.token_ids.tolist(), sample.totals(name).tolist(), strict=True)) for name in ("freq", "kl")
    )
    rocks = sample.token_ids[finding.columns].tolist()
    total_freq, total_kl = max(sum(freq.values()), 1), max(sum(kl.values()), 1)
    return {
        "rank": [rocks.index(v) + 1 if v in rocks else None for v in union.tolist()],
        "kl_share": [kl.get(v, 0) / total_kl for v in union.tolist()],
        "token_share": [freq.get(v, 0) / total_freq for v in union.tolist()],
    }
