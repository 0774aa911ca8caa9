"""A run with every part that the report shows, its token texts hostile, made without a model."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from explorer_run import CHECKPOINTS, ROCK_IDS, VOCABULARY, make_run
from hostile_texts import HOSTILE, SURROGATES

from rocktokens.run_dir import RunDir
from rocktokens.types import RockSet, RockToken

CRITERION = {
    "reference": CHECKPOINTS[-1],
    "baseline": CHECKPOINTS[0],
    "k": "auto",
    "stage": "context",
    "tau": 0.8,
    "split": 0.5,
}
SHARES = {"token_share": 0.25, "token_share_median": 0.2, "vocab_share": 0.4, "kl_share": 0.875, "grad_share": 0.95}
SUMMARY = {
    **SHARES,
    "k": 3,
    "n_types": 50,
    "n_prompts": 90,
    "measured_on": "held-out half",
    "mean_kl_rocks": 0.7,
    "mean_kl_rest": 0.05,
    "kl_change_rocks": -0.5,
    "kl_change_rest": -0.25,
    "intervals": {
        "token_share": [0.2, 0.3],
        "kl_share": [0.75, 0.9375],
        "kl_change_rocks": [-0.625, -0.375],
        "kl_change_rest": [-0.5, -0.125],
    },
}
TEXTS = (*HOSTILE, *SURROGATES)
VERDICTS = ("pillar", "stumbling", "neutral", "undecided")


def make_report_run(path: Path) -> Path:
    """Write the run; every hostile text is a rock, a type of the funnel, a ban and an arm somewhere."""
    run = RunDir(make_run(path))
    records = {
        "rocks.json": asdict(make_rocks()),
        "find.json": make_find(),
        "gradients.json": make_gradients(),
        "knockout.json": make_knockout(),
        "evaluations.json": {"evaluations": [_evaluation("teacher", 0.99), _evaluation("step 10", 0.75)]},
        "study/study.json": make_study(),
    }
    for name, record in records.items():
        run.commit_text(name, json.dumps({"schema_version": 1, **record}))
    return path


def make_rocks(texts: tuple[str, ...] = TEXTS, **changes: Any) -> RockSet:
    """One rock a text; every other one kept its kl, every fourth is a pillar."""
    tokens = [
        RockToken(
            id=rock_id(place),
            text=text,
            rank=place + 1,
            freq=100 - place % 50,
            mean_kl=1.5,
            score=150.0 + place,
            ccr=0.5,
            score_ctx=75.0,
            category="latex_math",
            score_interval=(120.0, 180.0),
            p_in_top_k=1.0 if place % 2 == 0 else 0.5,
            verdict=VERDICTS[place % 4],
            delta=-0.25,
            delta_interval=(-0.5, -0.125),
            held_out_mean_kl=1.25,
            held_out_change=0.0 if place % 2 == 0 else -0.5,
        )
        for place, text in enumerate(texts)
    ]
    return RockSet("", CRITERION, {"manifest_sha256": "ab" * 32}, {**SUMMARY, **changes}, tokens)


def rock_id(place: int) -> int:
    """The id of the rock of this place: a token of the run's vocabulary as far as there are some for it."""
    return (*ROCK_IDS, *range(10_000, 10_000 + len(TEXTS)))[place]


def make_find() -> dict[str, Any]:
    places = range(len(TEXTS))
    shares = {"token_share": 0.5, "kl_share": 0.5, "grad_share": 0.5}
    rock_shares = {f"rock_{name}": 0.25 for name in shares}
    curve = {"coverage": 0.5, "coverage_held_out": 0.4, "stability": 0.9, "stability_low": 0.8, "stability_high": 1.0}
    return {
        "criterion": CRITERION,
        "funnel": {
            "token_id": list(places),
            "text": list(TEXTS),
            "category": ["latex_math"] * len(TEXTS),
            "freq": [10 + place for place in places],
            "mean_kl": [0.1 + place / 100 for place in places],
            "group": ["rock" if place % 3 == 0 else "other" for place in places],
            "rank": [place + 1 if place % 3 == 0 else None for place in places],
            "ccr": [0.5] * len(TEXTS),
        },
        "categories": [{"category": name, **shares, **rock_shares} for name in ("latex_math", "digit")],
        "cutoff": {
            "k": 3,
            "auto": {"k": 3, "crossed": True, "coverage": 0.5, "stability": 0.9},
            "curve": [{"k": k, **curve} for k in (1, 2, 3)],
        },
        "sensitivity": [
            {"parameter": "tau", "value": 0.8, "default": True, "jaccard": 1.0},
            {"parameter": "tau", "value": 0.9, "default": False, "jaccard": 0.5},
            {"parameter": "eta", "value": 0.2, "default": False, "jaccard": 0.625},
        ],
        "trajectory": [
            {"checkpoint": at, "group": group, "half": half, "mean_kl": 1.0, "low": 0.9, "high": 1.1}
            for at in CHECKPOINTS
            for group in ("rock", "rare high-kl", "random")
            for half in ("selection half", "held-out half")
        ],
    }


def make_gradients() -> dict[str, Any]:
    ids = list(range(len(TEXTS)))
    values = np.linspace(-0.5, 0.5, len(TEXTS)).tolist()
    estimate = {"mean": 0.5, "interval": [0.25, 0.75]}
    geometry = {"blocks": {"embeddings": {"groups": {"rocks": {"share": estimate}}}}}
    return {
        "settings": {"reference": 10, "baseline": 0, "measured_on": "held-out half", "n_prompts": 90},
        "claims": [{"name": "small", "claim": "rocks are small", "because": TEXTS[0], "verdict": "holds"}],
        "warnings": [TEXTS[1]],
        "trace": {
            "types": {
                "token_id": ids,
                "text": list(TEXTS),
                "group": ["rocks", *["rest"] * (len(TEXTS) - 1)],
                "freq": [10] * len(TEXTS),
                "kl_before": [1.0] * len(TEXTS),
                "kl": [0.5] * len(TEXTS),
            }
        },
        "logit": {
            "reference": {"vocabulary": {"types": {"token_id": ids, "mean_norm": values, "coherence": values}}},
            "persistence": None,
        },
        "parameter": {
            "token_share": {"rocks": 0.25},
            "shares": {"blocks": ["embeddings"], "gradient": geometry, "update": None},
        },
    }


def make_ban(
    text: str,
    role: str = "tested",
    verdict: str = "pillar",
    delta: float | None = -0.25,
    ids: Sequence[int] = (ROCK_IDS[0],),
) -> dict[str, Any]:
    return {
        "ban": {"ids": list(ids), "name": text, "role": role, "category": "other", "beside": None},
        "delta": delta,
        "interval": None if delta is None else [delta - 0.125, delta + 0.125],
        "p": 0.01,
        "q": 0.02,
        "verdict": verdict,
        "paper_verdict": verdict,
        "changes": {"n_rollouts": 9, "lost": [], "gained": []},
    }


def make_knockout(bans: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    if bans is None:
        bans = [make_ban(text, verdict=VERDICTS[place % 4], ids=[rock_id(place)]) for place, text in enumerate(TEXTS)]
        bans += [
            make_ban(VOCABULARY[6], "matched", ids=[6]),
            make_ban(VOCABULARY[7], "never", "neutral", 0.0, ids=[7]),
        ]
    counts = dict.fromkeys(VERDICTS, 1)
    return {
        "settings": {"margin": 0.03, "alpha": 0.05, "model": "step 10", "task": "wordmath", "conditions": {}},
        "baseline": {"accuracy": 0.875, "interval": [0.75, 0.9375], "n_prompts": 90, "num_samples": 1},
        "detectable": {"single": 0.04, "corrected": 0.06},
        "counts": {"tested": {"method": counts, "paper": counts, "corrected": None}},
        "warnings": [TEXTS[2]],
        "knockouts": bans,
    }


def make_study() -> dict[str, Any]:
    arms = [_arm("uniform", 0.75), _arm("rock freeze", 0.625, saved=0.25), _arm(TEXTS[3], 0.5)]
    pairs = [("rock freeze", -0.125, "undecided"), (TEXTS[3], -0.25, "worse")]
    return {
        "baseline": "uniform",
        "alpha": 0.05,
        "seeds": [1, 2],
        "n_prompts": 90,
        "denominator": "all",
        "notes": [TEXTS[4]],
        "arms": arms,
        "comparisons": [
            {
                "first": first,
                "second": "uniform",
                "kind": kind,
                "at": 16.0,
                "difference": difference,
                "interval": [difference - 0.25, difference + 0.25],
                "never": [0, 0],
                "p": 0.5,
                "p_holm": 0.5,
                "detectable": 0.3125,
                "verdict": verdict,
            }
            for kind in ("equal_steps", "equal_tokens")
            for first, difference, verdict in pairs
        ],
    }


def _arm(name: str, end: float, saved: float = 0.0) -> dict[str, Any]:
    points = [
        {
            "step": step,
            "accuracy": accuracy,
            "interval": [accuracy - 0.125, accuracy + 0.125],
            "tokens": 9.0,
            "seconds": 3.0,
        }
        for step, accuracy in ((0, 0.5), (16, end))
    ]
    runs = [{"seed": seed, "draw": 0, "steps": [0, 16], "accuracy": [0.5, end]} for seed in (1, 2)]
    return {"name": name, "points": points, "runs": runs, "facts": {"head_compute_saved": saved}}


def _evaluation(name: str, accuracy: float) -> dict[str, Any]:
    return {
        "name": name,
        "settings": {},
        "task": "wordmath",
        "accuracy": accuracy,
        "n_prompts": 500,
        "num_samples": 1,
        "n_samples": 500,
        "wilson_interval": [accuracy - 0.1, accuracy],
        "bootstrap_interval": None,
        "mean_response_length": 61.0,
        "truncated_share": 0.0,
        "temperature": 1.0,
        "seed": 0,
        "prompt_ids": [],
        "correct": [],
        "answers": [],
    }
