"""Tables of types for the tests of the figures."""

import numpy as np
import pandas as pd

COLUMNS = ["token_id", "text", "category", "freq", "mean_kl", "group", "rank"]
HOSTILE = [
    "</script><script>alert(1)</script>", "\x1b[31mred", "\u202egnp.exe", "[bold]", "\ufffd", "\x00", "&amp;<", "]]>",
    "{{7*7}}", "javascript:alert(1)", "x" * 5000, "datum.x", "",
]  # fmt: skip


def table(rows: list[tuple]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=pd.Index(COLUMNS))


def zipf_types(count: int, k: int = 100, seed: int = 0) -> pd.DataFrame:
    """A vocabulary with Zipf frequencies, the top k of both scores marked."""
    random = np.random.default_rng(seed)
    freq = np.maximum(1, 3e6 / np.arange(1, count + 1) ** 1.05 * random.lognormal(0, 0.3, count)).astype(int)
    mean_kl = random.gamma(0.6, 0.35, count)
    by_score, by_kl = np.argsort(-freq * mean_kl), np.argsort(-mean_kl)
    group, rank = np.full(count, "other", dtype=object), np.full(count, np.nan)
    group[[v for v in by_kl[: 2 * k] if v not in by_score[:k]][:k]] = "high mean kl"
    group[by_score[:k]], rank[by_score[:k]] = "rock", np.arange(1, k + 1)
    texts = [f" t{v}" for v in range(count)]
    columns = (range(count), texts, "content_word", freq, mean_kl, group, rank)
    return pd.DataFrame(dict(zip(COLUMNS, columns, strict=True)))
