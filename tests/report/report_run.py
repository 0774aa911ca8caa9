"""A run with every part that the report shows, its token texts hostile, made without a model."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from explorer_run import CHECKPOINTS, CLASSES, ROCK_IDS, VOCABULARY, make_run

from gradient_records import make_gradients as make_gradients_record
from hostile_texts import HOSTILE, SURROGATES
from knockout_records import FREE, SETTINGS, make_sweep
from rocktokens.gradients.records import Claim, GradientsRecord
from rocktokens.knockout.records import Ban, BanChanges, DetectableLoss, Knockout, KnockoutSweep, Role, VerdictCounts
from rocktokens.report.tables import ROLES
from rocktokens.rocks.records import (
    CategoryShares,
    ChoiceShares,
    ControlMatch,
    Crossing,
    Cutoff,
    CutoffPoint,
    FindRecord,
    FunnelColumns,
    GroupMean,
    PositionProfile,
    SensitivityRow,
)
from rocktokens.run_dir import RunDir
from rocktokens.studies.records import (
    Arm,
    Comparison,
    CurvePoint,
    Kind,
    RunAccuracy,
    StudyResult,
    StudyVerdict,
)
from rocktokens.types import RockSet, RockToken, Verdict

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
VERDICTS: tuple[Verdict, ...] = ("pillar", "stumbling", "neutral", "undecided")


def make_report_run(path: Path) -> Path:
    """Write the run; every hostile text is a rock, a type of the funnel, a ban and an arm somewhere."""
    run = RunDir(make_run(path))
    records = {
        "rocks.json": asdict(make_rocks()),
        "find.json": make_find().to_record(),
        "gradients.json": make_gradients().to_record(),
        "knockout.json": asdict(make_knockout()),
        "evaluations.json": {"evaluations": [_evaluation("teacher", 0.99), _evaluation("step 10", 0.75)]},
    }
    for name, record in records.items():
        run.commit_text(name, json.dumps({"schema_version": 1, **record}))  # surrogates escaped
    study = {"schema_version": 1, **make_study().to_record()}
    RunDir(path / "study").commit_text("study.json", json.dumps(study))
    return path


def make_rocks(texts: tuple[str, ...] = TEXTS, **changes: Any) -> RockSet:
    """One rock a text; every other one is stuck on both halves, every fourth is a pillar."""
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
            label="stuck" if place % 2 == 0 else "residual",
            held_out_label="stuck" if place % 2 == 0 else "residual",
        )
        for place, text in enumerate(texts)
    ]
    return RockSet("", CRITERION, {"manifest_sha256": "ab" * 32}, {**SUMMARY, **changes}, tokens)


def rock_id(place: int) -> int:
    """The id of the rock of this place: a token of the run's vocabulary as far as there are some for it."""
    return (*ROCK_IDS, *range(10_000, 10_000 + len(TEXTS)))[place]


def make_find() -> FindRecord:
    places = range(len(TEXTS))
    cutoff = Cutoff(3, Crossing(3, 0.5, 0.9, True), [CutoffPoint(k, 0.5, 0.4, 0.9, 0.8, 1.0) for k in (1, 2, 3)])
    return FindRecord(
        criterion=CRITERION,
        source={},
        funnel=FunnelColumns(
            token_id=list(places),
            text=list(TEXTS),
            category=["latex_math"] * len(TEXTS),
            freq=[10 + place for place in places],
            mean_kl=[0.1 + place / 100 for place in places],
            group=["rock" if place % 3 == 0 else "other" for place in places],
            rank=[place + 1 if place % 3 == 0 else None for place in places],
            ccr=[0.5] * len(TEXTS),
        ),
        persistence=[],
        trajectory=[
            GroupMean(at, half, group, 1.0, 0.9, 1.1)
            for at in CHECKPOINTS
            for group in ("rock", "high mean kl", "random")
            for half in ("selection half", "held-out half")
        ],
        cutoff=cutoff,
        sample_size=[],
        selectors=[],
        sensitivity=[
            SensitivityRow("tau", 0.8, True, 1.0, [], [], True),
            SensitivityRow("tau", 0.9, False, 0.5, [], [], True),
            SensitivityRow("eta", 0.2, False, 0.625, [], [], True),
        ],
        categories=[CategoryShares(name, 2, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25) for name in ("latex_math", "digit")],
        positions=PositionProfile(CHECKPOINTS[-1], 1, 1, 1, 1, [], [], []),
        controls=ControlMatch(matched=False, reason="there are none"),
        choice=ChoiceShares(CLASSES.unrefuted.sha256, "held-out half", 0.25, (0.125, 0.375), 0.5, (0.25, 0.75)),
    )


def make_gradients() -> GradientsRecord:
    """The record of two types, with hostile texts for all it says of types, claims and warnings."""
    record = make_gradients_record(paired=True, texts=TEXTS[:2])
    ids, values = list(range(len(TEXTS))), np.linspace(-0.5, 0.5, len(TEXTS)).tolist()
    types = replace(
        record.trace.types,
        token_id=ids,
        text=list(TEXTS),
        category=["other"] * len(TEXTS),
        group=["rocks", *["rest"] * (len(TEXTS) - 1)],
        freq=[10] * len(TEXTS),
        kl_before=[1.0] * len(TEXTS),
        kl=[0.5] * len(TEXTS),
        mean_norm=[0.25] * len(TEXTS),
    )
    space = record.logit.reference.vocabulary
    columns = {field.name: values for field in fields(space.types)} | {"token_id": ids, "freq": [10] * len(TEXTS)}
    reference = replace(record.logit.reference, vocabulary=replace(space, types=replace(space.types, **columns)))
    rocks = make_rocks()
    return replace(
        record,
        criterion=rocks.criterion,
        source=rocks.source,
        settings=replace(record.settings, reference=10, n_prompts=90),
        warnings=[TEXTS[1]],
        trace=replace(record.trace, types=types),
        logit=replace(record.logit, reference=reference),
        claims=[Claim("small", "rocks are small", TEXTS[0], "supported")],
    )


def make_ban(
    text: str,
    role: Role = "tested",
    verdict: Verdict = "pillar",
    delta: float | None = -0.25,
    ids: Sequence[int] = (ROCK_IDS[0],),
    beside: int | None = None,
) -> Knockout:
    return Knockout(
        ban=Ban(tuple(ids), text, role, "other", beside),
        delta=delta,
        interval=None if delta is None else (delta - 0.125, delta + 0.125),
        p=0.01,
        q=0.02,
        verdict=verdict,
        paper_verdict=verdict,
        detectable=0.05,
        bounds=(-1.0, 1.0),
        n_looked=90,
        stopped=None,
        changes=BanChanges(9, 9, None, None, None, None, [], [], []),
    )


def make_knockout(bans: list[Knockout] | None = None, alpha: float = 0.05) -> KnockoutSweep:
    if bans is None:
        bans = [make_ban(text, verdict=VERDICTS[place % 4], ids=[rock_id(place)]) for place, text in enumerate(TEXTS)]
        bans += [
            make_ban(VOCABULARY[6], "matched", ids=[6]),
            make_ban(VOCABULARY[7], "never", "neutral", 0.0, ids=[7]),
        ]
    counts: dict[Verdict, int] = dict.fromkeys(VERDICTS, 1)
    return make_sweep(
        bans,
        settings=replace(SETTINGS, alpha=alpha, model="step 10"),
        baseline=replace(FREE, accuracy=0.875, interval=(0.75, 0.9375), n_prompts=90),
        counts={role: VerdictCounts(method=counts, paper=counts, corrected=None) for role in ROLES},
        detectable=DetectableLoss(single=0.04, corrected=0.06),
        warnings=[TEXTS[2]],
    )


def make_study() -> StudyResult:
    pairs: list[tuple[str, float, StudyVerdict]] = [("rock freeze", -0.125, "undecided"), (TEXTS[3], -0.25, "worse")]
    kinds: tuple[Kind, ...] = ("equal_steps", "equal_tokens")
    return StudyResult(
        baseline="uniform",
        alpha=0.05,
        margin=None,
        target_accuracy=None,
        n_pairs=2,
        seeds=[1, 2],
        n_prompts=90,
        arms=[_arm("uniform", 0.75), _arm("rock freeze", 0.625, saved=0.25), _arm(TEXTS[3], 0.5)],
        comparisons=[
            Comparison(
                first=first,
                second="uniform",
                kind=kind,
                at=16.0,
                difference=difference,
                interval=(difference - 0.25, difference + 0.25),
                standard_error=0.1,
                degrees_of_freedom=2.0,
                p=0.5,
                p_holm=0.5,
                detectable=(0.125, 0.3125),
                verdict=verdict,
            )
            for kind in kinds
            for first, difference, verdict in pairs
        ],
        notes=[TEXTS[4]],
    )


def _arm(name: str, end: float, saved: float = 0.0) -> Arm:
    points = [
        CurvePoint(step, 9.0, 3.0, accuracy, (accuracy - 0.125, accuracy + 0.125))
        for step, accuracy in ((0, 0.5), (16, end))
    ]
    runs = [RunAccuracy(seed, 0, [0, 16], [0, 9], [0.0, 3.0], [0.5, end]) for seed in (1, 2)]
    return Arm(name, points, runs, {"head_compute_saved": saved})


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
