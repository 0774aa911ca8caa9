"""A whole record of a knock-out sweep made by hand, for tests of what reads one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rocktokens.knockout.records import (
    Conditions,
    DetectableLoss,
    EngineNoise,
    FreeAnswers,
    Knockout,
    KnockoutSettings,
    KnockoutSweep,
    NeutralPrompts,
    Role,
    SweepCost,
    VerdictCounts,
)

CONDITIONS = Conditions(
    model="f" * 64,
    tokenizer_sha256="",
    config_sha256="",
    eos_ids=[1],
    versions={},
    dtype="float32",
    device="cpu",
    task={},
    prompts_sha256="",
    num_prompts=200,
    num_samples=1,
    temperature=1.0,
    max_new_tokens=160,
    batch_size=64,
    seed=0,
)
SETTINGS = KnockoutSettings(
    model="step 4",
    conditions=CONDITIONS,
    n_prompts=200,
    task="wordmath",
    temperature=1.0,
    max_new_tokens=160,
    seed=0,
    num_samples=1,
    mode="exact",
    matched=20,
    never=20,
    tolerance=0.25,
    alpha=0.05,
    epsilon=0.01,
    margin=0.03,
)
FREE = FreeAnswers(0.715, (0.649, 0.773), n_prompts=200, num_samples=1, mean_length=60.0, truncated_share=0.0)
EXACT = EngineNoise(rollouts=200, tokens=6000, differing=0, flips=0, delta=0.0, interval=(0.0, 0.0))
COST = SweepCost(
    jobs=900, free_tokens=12000, decoded_tokens=81203, retraced_tokens=1200, full_sweep_tokens=262114, share=0.3144
)
UNCOUNTED = VerdictCounts(method={}, paper={}, corrected=None)
ROLES: tuple[Role, ...] = ("tested", "matched", "never")


def make_sweep(knockouts: Sequence[Knockout], **changes: Any) -> KnockoutSweep:
    """A sweep with these bans; ``changes`` are other fields than the default ones."""
    sweep = KnockoutSweep(
        tokenizer_sha256="",
        settings=SETTINGS,
        baseline=FREE,
        noise=EXACT,
        cost=COST,
        counts=dict.fromkeys(ROLES, UNCOUNTED),
        detectable=DetectableLoss(single=0.0412, corrected=0.0931),
        correlations=[],
        warnings=[],
        knockouts=list(knockouts),
        neutral=NeutralPrompts(unchanged=125, typical=441),
    )
    return replace(sweep, **changes)
