"""Updates to weigh, every policy once, and what each should weigh by the plainest loops."""

from collections import Counter, defaultdict
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rocktokens.classes import TokenClass, TokenClasses
from rocktokens.policies import WeightPolicy, make_policy
from rocktokens.run_dir import derive_seed
from rocktokens.splitmix import occurrence_uniforms
from rocktokens.types import ControlDraw, ControlSet, RockSet, RockToken, TokenScores

COLUMNS = [column.name for column in fields(TokenScores)]
RULE = {"max_each_side": 2, "min_kl": 0.5}


def rock_set(*ids: int, windows: dict[str, Any] | None = None, **columns: list[Any]) -> RockSet:
    """Rocks in rank order; ``category`` and ``verdict`` by name."""
    tokens = [RockToken(token_id, "", rank, 2, 1.0, 2.0, None, None, "other") for rank, token_id in enumerate(ids, 1)]
    for name, values in columns.items():
        tokens = [replace(token, **{name: value}) for token, value in zip(tokens, values, strict=True)]
    return RockSet("", {}, {}, {}, tokens, windows)


ROCKS = rock_set(3, 1, windows=RULE)
CONTROLS = ControlSet(
    "", {}, {}, [3, 1], [2, 2], [ControlDraw([4, 0], [2, 2], 4, 0.0, 0.0), ControlDraw([2, 5], [2, 2], 4, 0.0, 0.0)]
)
CLASSES = TokenClasses([TokenClass((3, 1), safe=True), TokenClass((0, 5, 2), safe=True)])
CASES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "rocks": {"rocks": ROCKS, "lam": 0.25, "window": True},
    "online_rocks": {"lam": 0.25},
    "random_positions": {"rho": 0.4, "seed": 3},
    "type_control": {"controls": CONTROLS, "draw": 1, "lam": 0.25},
    "occurrence_control": {"rocks": ROCKS, "lam": 0.25, "window": True, "draw": 2, "seed": 3},
    "loss_control": {"rocks": ROCKS, "lam": 0.25, "by": "grad_norm", "draw": 2, "seed": 3},
    "weight_control": {"rocks": ROCKS, "lam": 0.25, "window": True},
    "top_frequency": {"k": 2, "lam": 0.25},
    "top_mean_loss": {"k": 2, "lam": 0.25},
    "top_grad_norm": {"k": 2, "lam": 0.25},
    "high_entropy": {"rho": 0.3},
    "tip": {"rho": 0.45},
    "teachable": {"rho": 0.35},
    "selectkd": {"beta": 0.125},
    "prefix": {"fraction": 0.6},
    "first_n": {"n": 2},
    "prefix_importance": {"w_max": 1.75},
    "entropy_mix": {"alpha": 0.5, "beta": 2.0},
    "asymmetric": {},
    "coarse": {"classes": CLASSES, "lam": 0.25},
    "online_coarse": {"lam": 0.25},
    "product": {"policies": [{"name": "tip"}, {"name": "rocks", "rocks": ROCKS, "lam": 0.25}]},
    "schedule": {"steps": [0, 5], "policies": [{"name": "first_n", "n": 1}, {"name": "selectkd"}]},
}
"""Every policy of the registry, with parameters that all matter."""
LOCAL = [
    "uniform",
    "rocks",
    "type_control",
    "occurrence_control",
    "loss_control",
    "selectkd",
    "prefix",
    "first_n",
    "prefix_importance",
    "asymmetric",
    "coarse",
    "online_coarse",
    "schedule",
]
"""Policies whose weights on a response do not depend on the other ones."""


@dataclass(frozen=True)
class Rows:
    """An update, rows in any order."""

    scores: TokenScores
    token_ids: np.ndarray
    positions: np.ndarray
    rollout_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)

    def take(self, index: np.ndarray) -> "Rows":
        scores = TokenScores(**{name: getattr(self.scores, name)[index] for name in COLUMNS})
        return Rows(scores, self.token_ids[index], self.positions[index], self.rollout_ids[index])

    def torch(self, requires_grad: bool = False) -> "Rows":
        columns = {name: torch.from_numpy(getattr(self.scores, name)).requires_grad_(requires_grad) for name in COLUMNS}
        arrays = (torch.from_numpy(array) for array in (self.token_ids, self.positions, self.rollout_ids))
        return Rows(TokenScores(**columns), *arrays)

    def column(self, name: str) -> list[float]:
        return getattr(self.scores, name).astype(np.float64).tolist()

    def responses(self) -> list[list[int]]:
        """Row numbers of every response, in order of position."""
        found = defaultdict(list)
        for row in self.ordered():
            found[int(self.rollout_ids[row])].append(row)
        return list(found.values())

    def ordered(self) -> list[int]:
        return sorted(range(len(self)), key=lambda row: (self.rollout_ids[row], self.positions[row]))


def weigh(policy: WeightPolicy, rows: Rows, step: int = 7) -> Any:
    return policy(rows.scores, rows.token_ids, rows.positions, rows.rollout_ids, step)


def make(name: str, **changes: Any) -> WeightPolicy:
    return make_policy(name, **{**CASES[name], **changes})


def rows_of(lengths: list[int], token_ids: list[int], columns: dict[str, list[float]], first_rollout: int = 0) -> Rows:
    """An update of responses of these lengths; score columns that are not given are 0."""
    n = len(token_ids)
    scores = {name: np.array(columns.get(name, [0.0] * n), dtype=np.float32) for name in COLUMNS}
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    rollouts = np.repeat(np.arange(len(lengths), dtype=np.int64) + first_rollout, lengths)
    return Rows(TokenScores(**scores), np.array(token_ids, dtype=np.int32), positions, rollouts)


EXAMPLE = rows_of(
    [4, 3, 2],
    [3, 5, 0, 3, 2, 4, 1, 1, 0],
    {
        "kl": [0.75, 0.5, 0.25, 1.0, 0.5, 0.125, 0.5, 0.25, 0.0],
        "logp_student": [-1, -2, -0.5, -1, -3, -1, 0, -1, -2],
        "logp_teacher": [-1, -1, -1.5, -3, -1, -1, -2, -1, -2],
        "entropy_student": [0.5, 1.0, 1.5, 0.25, 2.0, 0.5, 0.75, 1.25, 0.0],
        "entropy_teacher": [1.0, 0.5, 0.25, 0.75, 1.5, 0.5, 0.25, 2.0, 0.5],
        "grad_norm": [0.1, 0.4, 0.2, 0.3, 0.9, 0.5, 0.6, 0.1, 0.7],
        "teacher_mass_top16": [0.9, 0.5, 0.75, 1.0, 0.25, 0.5, 0.6, 0.8, 0.4],
        "student_top1_in_teacher_top5": [1, 0, 1, 1, 0, 0, 1, 1, 0],
    },
)
"""One update with scores in every column that a policy can need."""


@st.composite
def updates(draw: st.DrawFn) -> Rows:
    """Up to four responses in shuffled rows, coarse scores so that ties are common."""
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    n = sum(lengths)
    ids = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    coarse = st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=n, max_size=n)
    columns = {name: draw(coarse) for name in COLUMNS}
    columns["student_top1_in_teacher_top5"] = [float(value > 0.5) for value in columns["forward_kl"]]
    rows = rows_of(lengths, ids, columns, first_rollout=draw(st.integers(0, 10**12)))
    return rows.take(np.array(draw(st.permutations(range(n)))))


# The policies again, by loops over rows


def oracle(name: str, rows: Rows) -> list[float]:
    """The weights of CASES[name], float64."""
    return ORACLES[name](rows, **CASES[name])


def _top(rows: Rows, values: list[float], rho: float) -> list[float]:
    order = rows.ordered()
    ranked = sorted(order, key=lambda row: (-values[row], order.index(row)))
    kept = set(ranked[: round(rho * len(rows))])
    return [1.0 if row in kept else 0.0 for row in range(len(rows))]


def _norm(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def _clip(values: list[float]) -> list[float]:
    low, high = np.quantile(values, 0.05), np.quantile(values, 0.95)
    return [min(max(value, low), high) for value in values]


def _tip(rows: Rows, rho: float) -> list[float]:
    pairs = zip(_norm(rows.column("entropy_student")), _norm(rows.column("kl")), strict=True)
    return _top(rows, [h + d - h * d for h, d in pairs], rho)


def _teachable(rows: Rows, rho: float) -> list[float]:
    pairs = zip(_norm(_clip(rows.column("kl"))), _norm(_clip(rows.column("teacher_mass_top16"))), strict=True)
    return _top(rows, [kl * mass for kl, mass in pairs], rho)


def _top_types(rows: Rows, column: str | None, k: int, lam: float) -> list[float]:
    counts, sums = Counter(rows.token_ids.tolist()), Counter()
    for token_id, value in zip(rows.token_ids.tolist(), rows.column(column or "kl"), strict=True):
        sums[token_id] += value
    ranked = sorted(counts, key=lambda t: (-(sums[t] / counts[t] if column else counts[t]), t))
    return [lam if token_id in ranked[:k] else 1.0 for token_id in rows.token_ids.tolist()]


def _rocks(rows: Rows, rocks: RockSet, lam: float, window: bool = False) -> list[float]:
    weights, kl = [1.0] * len(rows), rows.column("kl")
    for response in rows.responses():
        for place, row in enumerate(response):
            if rows.token_ids[row] not in rocks.ids:
                continue
            weights[row] = lam
            for direction in (-1, 1) if window and kl[row] >= RULE["min_kl"] else ():
                for distance in range(1, RULE["max_each_side"] + 1):
                    other = place + direction * distance
                    if not 0 <= other < len(response) or kl[response[other]] < RULE["min_kl"]:
                        break
                    weights[response[other]] = lam
    return weights


def _loss_control(rows: Rows, rocks: RockSet, lam: float, by: str, draw: int, seed: int, step: int = 7) -> list[float]:
    """Positions one by one until what is missing of the rocks' sum is gone, in exact arithmetic."""
    weights, values = [1.0] * len(rows), [Fraction(round(value * 2**24), 2**24) for value in rows.column(by)]
    order, last = (
        occurrence_uniforms(derive_seed(seed, f"loss_control {use}", draw, step), rows.rollout_ids, rows.positions)
        for use in ("order", "last")
    )
    for response in rows.responses():
        missing = sum((values[row] for row in response if rows.token_ids[row] in rocks.ids), Fraction(0))
        for row in sorted(response, key=lambda row: order[row]):
            if missing <= 0:
                break
            if values[row] <= missing or Fraction(float(last[row])) < missing / values[row]:
                weights[row] = lam
            missing -= values[row]
    return weights


def _weight_control(rows: Rows, rocks: RockSet, lam: float, window: bool) -> list[float]:
    """The mean weight that λ on the rocks leaves, weighed by gradient norm."""
    norms, marked = rows.column("grad_norm"), _rocks(rows, rocks, lam, window)
    left = sum(weight * norm for weight, norm in zip(marked, norms, strict=True))
    return [left / sum(norms) if sum(norms) else 1.0] * len(rows)


def _by_place(rows: Rows, weight: Any) -> list[float]:
    """``weight(place, length, rows of the response)`` for every row."""
    weights = [0.0] * len(rows)
    for response in rows.responses():
        for place, row in enumerate(response):
            weights[row] = weight(place, len(response), response)
    return weights


def _prefix_importance(rows: Rows, w_max: float) -> list[float]:
    pairs = zip(rows.column("logp_teacher"), rows.column("logp_student"), strict=True)
    gaps = [abs(teacher - student) for teacher, student in pairs]

    def weight(place: int, length: int, response: list[int]) -> float:
        total = sum(gaps[row] for row in response)
        behind = sum(gaps[row] for row in response[:place])
        return 1 + (w_max - 1) * (1 - (behind / total if total else 0.0))

    return _by_place(rows, weight)


def _entropy_mix(rows: Rows, alpha: float, beta: float) -> list[float]:
    teacher, student = rows.column("entropy_teacher"), rows.column("entropy_student")
    mixed = [
        (1 + alpha * (1 - t / max(teacher)) if max(teacher) else 1.0)
        * (1 + beta * s / max(student) if max(student) else 1.0)
        for t, s in zip(teacher, student, strict=True)
    ]
    return [value * len(mixed) / sum(mixed) for value in mixed]


ORACLES = {
    "uniform": lambda rows: [1.0] * len(rows),
    "asymmetric": lambda rows: [1.0] * len(rows),
    "coarse": lambda rows, classes, lam: [1.0] * len(rows),
    "online_coarse": lambda rows, lam: [1.0] * len(rows),
    "rocks": _rocks,
    "type_control": lambda rows, controls, draw, lam: [
        lam if t in controls.draws[draw].ids else 1.0 for t in rows.token_ids
    ],
    "loss_control": _loss_control,
    "weight_control": _weight_control,
    "top_frequency": lambda rows, k, lam: _top_types(rows, None, k, lam),
    "top_mean_loss": lambda rows, k, lam: _top_types(rows, "kl", k, lam),
    "top_grad_norm": lambda rows, k, lam: _top_types(rows, "grad_norm", k, lam),
    "high_entropy": lambda rows, rho: _top(rows, rows.column("entropy_student"), rho),
    "tip": _tip,
    "teachable": _teachable,
    "selectkd": lambda rows, beta: [1.0 if v else beta for v in rows.column("student_top1_in_teacher_top5")],
    "prefix": lambda rows, fraction: _by_place(rows, lambda place, n, _: float(place < round(fraction * n))),
    "first_n": lambda rows, n: _by_place(rows, lambda place, _, __: float(place < n)),
    "prefix_importance": _prefix_importance,
    "entropy_mix": _entropy_mix,
    "product": lambda rows, policies: [a * b for a, b in zip(_tip(rows, 0.5), _rocks(rows, ROCKS, 0.25), strict=True)],
    "schedule": lambda rows, steps, policies: [1.0 if v else 0.01 for v in rows.column("student_top1_in_teacher_top5")],
}
