"""A small gradients.json with every field, its numbers made by hand."""

from dataclasses import replace
from typing import Any

from rocktokens.gradients.claims import judge
from rocktokens.gradients.records import (
    REST,
    ROCKS,
    AdamEffect,
    BatchMean,
    BySpace,
    ControlGroup,
    DirectionTest,
    Geometry,
    GradientGeometry,
    GradientsRecord,
    GradientsSettings,
    GroupGeometry,
    GroupGradient,
    GroupPersistence,
    GroupTest,
    HighKlTypes,
    KeptKl,
    LargestPart,
    LogitSummary,
    NormRatio,
    OptimizerSettings,
    OtherTypes,
    ParameterSummary,
    PartitionShares,
    RockColumns,
    RockPersistence,
    SharesRecord,
    SketchSettings,
    SpaceGradients,
    SpacePersistence,
    TraceGroup,
    TraceSummary,
    TraceTypes,
    TypeColumns,
    TypePersistence,
    UpdateGeometry,
    WholeGradient,
    WithError,
)
from rocktokens.rocks.records import PairedChange

BLOCK = "layer 0 mlp"
TEXTS = (" So", "9")


def over_batches(mean: float | None, half: float = 0.01, count: int = 4) -> BatchMean:
    return BatchMean(mean, None if mean is None else (mean - half, mean + half), [mean] * count)


def rock_columns(count: int, directions: list[int] | None = None, **columns: Any) -> RockColumns:
    """Rocks that each have a direction of their own unless told otherwise."""
    defaults: dict[str, Any] = {name: [0.5] * count for name in ("alignment", "coherence", "cos_others")}
    ids = list(range(count))
    return RockColumns(token_id=ids, direction=directions or ids, **(defaults | columns))


def high_kl_types(interval: Any, ratio: float | None = 0.8, kl: float = 2.0) -> HighKlTypes:
    return HighKlTypes(n_types=9, kl=kl, rocks_kl=1.5, norm_ratio=NormRatio(ratio, interval))


def direction_test(superiority: float, p: float | None, largest: float = 0.3) -> DirectionTest:
    return DirectionTest(18, 30, 0.4, 0.1, superiority, p, largest=LargestPart(token_id=7, freq=1, share=largest))


def kl_change(relative: float | None, interval: Any) -> PairedChange:
    return PairedChange(100, 10, 2.0, 1.5, -0.5, None, relative, interval, None, None)


def adam_effect(mean: float | None, verdict: Any, below: int = 7) -> AdamEffect:
    return AdamEffect(over_batches(mean), below=below, above=8 - below, p=0.07, verdict=verdict)


def trace_group(token_share: float | None, norm_share: float | None) -> TraceGroup:
    return TraceGroup(
        n_types=18,
        n_occurrences=100,
        token_share=token_share,
        token_share_interval=None,
        norm_share=norm_share,
        norm_share_interval=(0.4, 0.6),
        kl_share=0.5,
        kl_share_interval=None,
        mean_norm=0.125,
        change=None,
    )


def make_gradients(
    *, update: bool = True, paired: bool = False, sketch: SketchSettings | None = None, texts: tuple[str, ...] = TEXTS
) -> GradientsRecord:
    """Two types, 7 a rock and 9 not; ``update``: with the optimizer's state; ``paired``: with a baseline."""
    trace, logit, parameter = _trace(texts, paired), _logit(sketch, paired), _parameter(update)
    return GradientsRecord(
        criterion={"reference": 64},
        source={"manifest_sha256": "0" * 64},
        settings=GradientsSettings(
            batches=4,
            tokens_per_forward=4096,
            sketch_width=None if sketch is None else sketch.width,
            memory=180_000_000,
            reference=64,
            baseline=0,
            measured_on="held-out half",
            n_prompts=10,
            n_rollouts=20,
            n_tokens=1234,
            divergence="reverse",
            temperature=1.0,
            dtype="float32",
            seed=1,
        ),
        warnings=[],
        groups={ROCKS: [7], REST: [9]},
        control=make_control("none", tolerance=0.25, n_matched=0),
        trace=trace,
        logit=logit,
        parameter=parameter,
        claims=judge(trace, logit, parameter),
    )


def make_control(kind: Any, *, tolerance: float = 0.1, n_matched: int = 18, n_high_mean_kl: int = 0) -> ControlGroup:
    return ControlGroup(
        kind=kind,
        tolerance=tolerance,
        reason=None,
        n_matched=n_matched,
        n_rocks=18,
        occurrences=600,
        matched_rock_occurrences=590,
        rock_occurrences=1000,
        n_high_mean_kl=n_high_mean_kl,
    )


def _trace(texts: tuple[str, ...], paired: bool) -> TraceSummary:
    rocks = replace(trace_group(0.25, 0.5), change=kl_change(-0.25, (-0.4, -0.1)) if paired else None)
    return TraceSummary(
        paired=paired,
        groups={ROCKS: rocks, REST: trace_group(0.25, 0.5)},
        norm_ratios={"all": NormRatio(2.0, (1.5, 2.5)), REST: NormRatio(None, None)},
        high_mean_kl=high_kl_types((0.5, 0.9)),
        rocks_kept=KeptKl(list(range(10)), [0.9] * 10) if paired else None,
        types=TraceTypes(
            token_id=[7, 9],
            text=list(texts),
            category=["discourse", "other"],
            group=[ROCKS, REST],
            freq=[5, 6],
            kl_before=[2.0, 1.0] if paired else [None, None],
            kl=[1.5, 0.5],
            mean_norm=[0.25, 0.125],
        ),
    )


def _logit(sketch: SketchSettings | None, paired: bool) -> LogitSummary:
    found = BySpace(_space("vocabulary", sketch), _space("hidden", None))
    change = BySpace(_persistence("vocabulary"), _persistence("hidden"))
    return LogitSummary(found, found if paired else None, change if paired else None)


def _space(space: Any, sketch: SketchSettings | None) -> SpaceGradients:
    column = [0.5, None]
    names = ("mean_norm", "norm", "alignment", "coherence", "cos_balanced", "cos_pooled", "contribution", "cos_others")
    errors = ("norm", "alignment", "coherence", "cos_balanced", "cos_pooled", "contribution")
    columns = dict.fromkeys(names, column) | {f"{name}_error": [0.0, None] for name in errors}
    return SpaceGradients(
        sketch=sketch,
        whole=WholeGradient(space, 2.0, 1.0, 0.5, 0.25),
        groups={ROCKS: _group(ROCKS, space, 18, 0.25), REST: _group(REST, space, 28, 0.375)},
        tests=[GroupTest(18, 28, 0.5, 0.25, 0.75, 0.0001, column="mean_norm", space=space, first=ROCKS, second=REST)],
        categories={ROCKS: _group(ROCKS, space, 3, 0.25), REST: _group(REST, space, 4, 0.375)},
        direction=direction_test(0.8, 0.01),
        rocks=rock_columns(10, alignment=[0.4] * 10, coherence=[0.1] * 10),
        others=OtherTypes(0.5),
        types=TypeColumns(token_id=[7, 9], freq=[5, 6], share=[0.25, 0.75], **columns),
    )


def _group(name: str, space: Any, n_types: int, share: float) -> GroupGradient:
    return GroupGradient(
        name=name,
        space=space,
        n_types=n_types,
        n_occurrences=100,
        token_share=share,
        norm_share=2 * share,
        mean_norm=0.125,
        norm=WithError(1.0, 0.0),
        alignment=WithError(0.5, 0.0),
        cos_pooled=WithError(None, 0.0),
        cos_balanced=WithError(0.25, 0.03125),
        signed_share=WithError(0.75, 0.0625),
        medians={"norm": 0.0625, "coherence": None},
    )


def _persistence(space: Any) -> SpacePersistence:
    group = GroupPersistence(ROCKS, space, 18, 18, 0.5, 0.5, 0.75, 0.75, 0.5, 0.625)
    cosines: Any = [[1.0, 0.5]] * 4
    return SpacePersistence({ROCKS: group}, RockPersistence([0.9] * 10), TypePersistence([7, 9], *cosines, [1.0, None]))


def _parameter(update: bool) -> ParameterSummary:
    excess = {ROCKS: over_batches(0.0), REST: over_batches(0.0)}
    shares, token_share = _shares(update), {ROCKS: 0.25, REST: 0.75}
    return ParameterSummary(
        shares,
        token_share,
        excess,
        categories=PartitionShares(shares, token_share, excess),
        optimizer=OptimizerSettings(5e-4) if update else None,
        note="" if update else "no optimizer state here",
    )


def _shares(update: bool) -> SharesRecord:
    pair = {ROCKS: over_batches(1.0), REST: over_batches(-0.125)}
    cosines, blocks = {ROCKS: pair, REST: pair}, {BLOCK: _geometry(0.375)}
    step = UpdateGeometry(
        all=_geometry(0.125, rate=over_batches(0.5)),
        blocks=blocks,
        cosines=cosines,
        step_shares={ROCKS: over_batches(0.0625), "momentum": over_batches(0.9375)},
        effects={name: adam_effect(-0.125, "suppresses", below=8) for name in (ROCKS, REST)},
    )
    return SharesRecord(
        groups=[ROCKS, REST],
        blocks=[BLOCK],
        n_batches=4,
        tokens={ROCKS: [25] * 4, REST: [75] * 4},
        gradient=GradientGeometry(_geometry(0.25), blocks, cosines),
        update=step if update else None,
    )


def _geometry(share: float, rate: BatchMean | None = None) -> Geometry:
    norm, cosine = over_batches(3.0), over_batches(0.5)
    shares = {ROCKS: over_batches(share), REST: over_batches(1 - share)}
    groups = {name: GroupGeometry(norm, cosine, own, rate) for name, own in shares.items()}
    return Geometry(norm, over_batches(0.3), groups)
