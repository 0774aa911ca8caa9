"""The figures of ``rocktokens gradients``.

1. ``gradient_norm``: how large the gradients of each type are, by group.
2. ``gradient_alignment``: whether a type's occurrences push one way, whether it points where the types point that
   are no rocks, and whether it still does at the other checkpoint, by group.
3. ``gradient_kl``: the kl of each type before and after training; what did not move lies on the diagonal.
4. ``gradient_blocks``: the rocks' signed share of the gradient, and of Adam's step, in each block of the student.
"""

from dataclasses import asdict
from statistics import median
from typing import Any

import altair as alt

from rocktokens.display.numbers import count, fixed, percent, significant
from rocktokens.display.text import visible
from rocktokens.gradients.records import CONTROL, HIGH_KL, REST, ROCKS, GradientsRecord
from rocktokens.report.charts.plots import Axis, Group, Layer, Panel, Plot, by_group, in_rows, layer, panels_of
from rocktokens.report.charts.theme import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    HUES,
    INK,
    VERMILLION,
    WIDTH,
    Chart,
    Figure,
    Records,
    by_name,
    finished,
    finite,
    inline,
    inlined,
    point_groups,
    scale_of,
    sentence_chart,
)

GROUP_LOOKS = {
    ROCKS: (VERMILLION, "diamond"),
    HIGH_KL: (BLUE, "triangle-up"),
    CONTROL: (GREEN, "square"),
    REST: (GREY, "circle"),
}
NORM_PANELS = {"mean_norm": "mean ‖g‖ of an occurrence", "norm": "‖mean gradient‖ of the type"}
ALIGNMENT_PANELS = {
    "coherence": "coherence: mean cosine of two occurrences",
    "cos_others": "cosine with the non-rocks' balanced sum",
    "corrected": "cosine with the baseline, noise corrected",
}
MOST_MARKS = 1000
"""Of one group in one panel: where there are more, they are thinned evenly by value."""
APART, GOLDEN = 0.6, 0.618
"""How far the marks of a row lie apart, as a share of it, and by how much from one to the next."""
SOURCES = {"gradient": ("gradient", VERMILLION), "update": ("Adam's step", BLUE)}


def gradient_charts(record: GradientsRecord, run: str) -> dict[str, Figure]:
    """Make the figures of ``rocktokens gradients``."""
    settings = record.settings
    where = f"{run}, checkpoint {settings.reference}, {settings.measured_on}, {settings.n_prompts} prompts"
    norms, directions = type_records(record, NORM_PANELS), type_records(record, ALIGNMENT_PANELS)
    kl, blocks = kl_records(record), block_records(record)
    each = "each mark is a token type (logit space)"
    return by_name(
        Figure(
            "gradient_norm",
            "Strips of token types by group: how large their gradients are.",
            types_chart(f"How large the gradients are: {each}", norms, where),
            norms,
            types_plot(norms),
        ),
        Figure(
            "gradient_alignment",
            "Strips of token types by group: whether their gradients agree with each other and over training.",
            types_chart(f"Which way the gradients point: {each}", directions, where),
            directions,
            types_plot(directions),
        ),
        Figure(
            "gradient_kl",
            "Scatter of token types: mean kl at the baseline against that at the reference.",
            kl_chart(kl, f"{where}, baseline {settings.baseline}"),
            kl,
            kl_plot(kl),
        ),
        Figure(
            "gradient_blocks",
            "Bars by block of the student: the rocks' signed share of the gradient and of Adam's step.",
            blocks_chart(blocks, record.parameter.token_share[ROCKS], where),
            blocks,
            blocks_plot(blocks, record.parameter.token_share[ROCKS]),
        ),
    )


def type_records(record: GradientsRecord, panels: dict[str, str]) -> list[dict[str, Any]]:
    """Make a record per panel and type that has a value there: what it is, its group, its value in vocabulary space."""
    types, change = record.trace.types, record.logit.persistence
    known = {own[0]: own[1:] for own in zip(types.token_id, types.group, types.text, strict=True)}
    tables = [asdict(record.logit.reference.vocabulary.types), asdict(change.vocabulary.types) if change else {}]
    return [
        {
            "panel": title,
            "group": known[token_id][0],
            "token_id": token_id,
            "token": visible(known[token_id][1]),
            "value": value,
        }
        for column, title in panels.items()
        for table in tables
        if column in table
        for token_id, value in zip(table["token_id"], table[column], strict=True)
        if token_id in known and value is not None
    ]


def kl_records(record: GradientsRecord) -> list[dict[str, Any]]:
    """Make a record per type: its group, and its mean kl before and after."""
    types = record.trace.types
    rows = zip(types.token_id, types.group, types.text, types.freq, types.kl_before, types.kl, strict=True)
    return [
        {"token_id": token_id, "group": group, "text": visible(text), "freq": freq, "kl_before": before, "kl": after}
        for token_id, group, text, freq, before, after in rows
    ]


def block_records(record: GradientsRecord) -> list[dict[str, Any]]:
    """Make a record per block and source: the rocks' signed share there with its interval."""
    shares = record.parameter.shares
    found = []
    for source, (label, _) in zip((shares.gradient, shares.update), SOURCES.values(), strict=True):
        if source is None:
            continue
        for block in shares.blocks:
            share = source.blocks[block].groups[ROCKS].share
            low, high = share.interval or (None, None)
            found.append({"block": block, "of": label, "share": share.mean, "low": low, "high": high})
    return found


def types_chart(title: str, records: Records, subtitle: str = "") -> Chart:
    """Draw strips of types by group, one panel per quantity, the median of each group marked.

    Args:
        title: of the figure.
        records: panel, group, token, value.
        subtitle: the run, checkpoint and prompts the numbers are of.
    """
    points = thinned(finite(records, ("value",)), ("panel", "group"), "value")
    if not points:
        return sentence_chart("There is no type with a gradient to show.", title, subtitle)
    value = alt.X("value:Q", title=None, scale=alt.Scale(zero=True))
    group = alt.Y("group:N", title=None, sort=list(GROUP_LOOKS))
    median = alt.Chart().mark_tick(color=INK, thickness=2, size=26).encode(x="median(value):Q", y=group)
    marks = alt.Chart().mark_point(filled=True, size=45, opacity=0.6)
    layers = alt.layer(
        marks.encode(x=value, y=group, **_looks(points), tooltip=["token:N", "group:N", "value:Q"]),
        median,
        data=inlined(points),
    ).properties(width=WIDTH // 2, height=130)
    panel = alt.Facet("panel:N", title=None, sort=list(dict.fromkeys(point["panel"] for point in points)))
    panels = layers.facet(panel, columns=2).resolve_scale(x="independent")
    return finished(panels, title, [subtitle, "Black: the median of the group.", _left_out(records, points)])


def types_plot(records: Records) -> Plot:
    """Make the plot of the same strips; marks of a row lie a little apart, so that each can be touched."""
    points = thinned(finite(records, ("value",)), ("panel", "group"), "value")
    groups = point_groups(points, "group", GROUP_LOOKS)
    names = tuple(group.name for group in groups)
    panels = []
    for title, panel in panels_of(points, "panel").items():
        strips, medians = [], []
        for row, own in by_group(groups, panel, "group"):
            apart = [{**record, "row": row + APART * (place * GOLDEN % 1 - 0.5)} for place, record in enumerate(own)]
            strips.append(
                layer(
                    "points",
                    row,
                    apart,
                    "value",
                    "row",
                    label="token",
                    token="token_id",
                    facts={"value": ("value", significant)},
                )
            )
            medians += [{"value": median(record["value"] for record in own), "row": row}] if own else []
        middle = layer("points", len(groups), medians, "value", "row", facts={"median": ("value", significant)})
        panels.append(Panel(Axis(), Axis(scale="rows", names=names), (*strips, middle), title))
    return Plot((*groups, Group("median of the group", "ink", "tick")), tuple(panels))


def kl_chart(records: Records, subtitle: str = "") -> Chart:
    """Draw the mean kl of every type at the baseline against that at the reference.

    Args:
        records: text, group, freq, kl_before, kl.
        subtitle: the run, checkpoints and prompts the numbers are of.
    """
    title = "What training did to the kl of each type, on the same tokens"
    points = thinned(finite(records, ("kl_before", "kl")), ("group",), "kl")
    if not points:
        return sentence_chart("No other checkpoint scored the same tokens.", title, subtitle)
    top = max(max(point["kl_before"], point["kl"]) for point in points)
    scale = alt.Scale(type="sqrt", domainMin=0)
    before = alt.X("kl_before:Q", title="mean kl at the baseline (nats, square-root scale)", scale=scale)
    after = alt.Y("kl:Q", title="mean kl at the reference (nats)", scale=scale)
    diagonal = inline([{"kl_before": end, "kl": end} for end in (0.0, top)])
    marks = inline(points).mark_point(filled=True, opacity=0.75)
    layers = alt.layer(
        diagonal.mark_line(color=FAINT, strokeDash=[4, 3], strokeWidth=1).encode(x=before, y=after),
        marks.encode(
            x=before,
            y=after,
            **_looks(points, legend=True),
            size=alt.Size("freq:Q", title="occurrences", scale=alt.Scale(range=[25, 250]), legend=None),
            tooltip=["text:N", "group:N", "freq:Q", "kl_before:Q", "kl:Q"],
        ),
    ).properties(width=WIDTH * 4 // 5, height=WIDTH * 2 // 3)
    notes = [subtitle, "On the dashed line: not moved. Size: occurrences.", _left_out(records, points)]
    return finished(layers, title, notes)


def kl_plot(records: Records) -> Plot:
    """Make the plot of the same points."""
    points = thinned(finite(records, ("kl_before", "kl")), ("group",), "kl")
    if not points:
        return Plot()
    groups = point_groups(points, "group", GROUP_LOOKS)
    top = 1.05 * max(max(point["kl_before"], point["kl"]) for point in points) or 1.0
    facts = {
        "occurrences": ("freq", count),
        "kl at the baseline": ("kl_before", fixed(3)),
        "kl at the reference": ("kl", fixed(3)),
    }
    drawn = [
        layer("points", group, own, "kl_before", "kl", label="text", token="token_id", facts=facts)
        for group, own in by_group(groups, points, "group")
    ]
    before = Axis("mean kl at the baseline (nats, square-root scale)", "sqrt", (0.0, top))
    after = Axis("mean kl at the reference (nats)", "sqrt", (0.0, top))
    return Plot(groups, (Panel(before, after, (Layer("line", None, (0.0, top), (0.0, top)), *drawn[::-1])),))


def blocks_chart(records: Records, token_share: float | None = None, subtitle: str = "") -> Chart:
    """Draw the rocks' signed share by block of the student, with intervals over batches.

    Args:
        records: block, of, share, low, high.
        token_share: what share of the tokens the rocks are.
        subtitle: the run, checkpoint and prompts the numbers are of.
    """
    title = "Who moves the parameters: the rocks' signed share in each block"
    bars = finite(records, ("share",))
    if not bars:
        return sentence_chart("There is no gradient to show.", title, subtitle)
    labels, colors = zip(*(look for look in SOURCES.values() if any(bar["of"] == look[0] for bar in bars)), strict=True)
    block = alt.Y("block:N", title=None, sort=list(dict.fromkeys(bar["block"] for bar in bars)))
    offset = alt.YOffset("of:N", sort=list(labels))
    legend = alt.Legend(title=None, orient="bottom")
    base = inline(bars).encode(y=block, yOffset=offset)
    layers = [
        base.mark_bar(height=alt.RelativeBandSize(0.8)).encode(
            x=alt.X("share:Q", title="signed share of the block's gradient, or step", axis=alt.Axis(format="%")),
            color=alt.Color("of:N", scale=scale_of(labels, colors), legend=legend),
            tooltip=["block:N", "of:N", "share:Q", "low:Q", "high:Q"],
        ),
        base.mark_rule(color=INK).encode(x="low:Q", x2="high:Q"),
    ]
    notes = [subtitle, "Lines: 95 % intervals over batches."]
    if token_share is not None:
        layers.append(inline([{"tokens": token_share}]).mark_rule(color=FAINT, strokeDash=[4, 3]).encode(x="tokens:Q"))
        notes.append(f"Dashed: their share of the tokens, {100 * token_share:.1f} %.")
    height = 26 * len({bar["block"] for bar in bars})
    return finished(alt.layer(*layers).properties(width=WIDTH * 4 // 5, height=height), title, notes)


def blocks_plot(records: Records, token_share: float | None = None) -> Plot:
    """Make the plot of the same bars."""
    bars = finite(records, ("share",))
    if not bars:
        return Plot()
    names, rows = in_rows(bars, "block")
    groups = tuple(
        Group(label, HUES[color]) for label, color in SOURCES.values() if any(bar["of"] == label for bar in bars)
    )
    facts = {"signed share": ("share", percent), "from": ("low", percent), "to": ("high", percent)}
    drawn = []
    for group, own in by_group(groups, rows, "of"):
        beside = [{**bar, "row": bar["row"] + (group - (len(groups) - 1) / 2) * 0.8 / len(groups)} for bar in own]
        drawn.append(
            layer(
                *("bars", group, beside, "share", "row"),
                label="block",
                interval=("low", "high"),
                facts=facts,
                thickness=0.7 / len(groups),
            )
        )
    tokens = [] if token_share is None else [Layer("rule", x=(token_share,))]
    share = Axis("signed share of the block's gradient, or step", percent=True)
    return Plot(groups, (Panel(share, Axis(scale="rows", names=names), (*drawn, *tokens)),))


def thinned(records: Records, keys: tuple[str, ...], by: str) -> list[dict[str, Any]]:
    """Keep at most ``MOST_MARKS`` of the records alike in ``keys``, evenly spread in the order of ``by``."""
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        alike.setdefault(tuple(record[key] for key in keys), []).append(record)
    kept = []
    for own in alike.values():
        ordered = sorted(own, key=lambda record: record[by])
        last, count = len(ordered) - 1, min(len(ordered), MOST_MARKS)
        kept += [ordered[round(place * last / max(count - 1, 1))] for place in range(count)]
    return kept


def _left_out(records: Records, shown: Records) -> str:
    """Say where marks were thinned."""
    is_thinned = len(records) > len(shown) >= MOST_MARKS
    return f"Groups of more than {MOST_MARKS:,} types are thinned evenly." if is_thinned else ""


def _looks(points: Records, legend: bool = False) -> dict[str, Any]:
    """Choose colour and shape by group."""
    present = {point["group"] for point in points}
    groups, colors, shapes = zip(
        *((group, *look) for group, look in GROUP_LOOKS.items() if group in present), strict=True
    )
    shown = alt.Legend(title=None, orient="bottom", symbolOpacity=1) if legend else None
    return {
        "color": alt.Color("group:N", scale=scale_of(groups, colors), legend=shown),
        "shape": alt.Shape("group:N", scale=scale_of(groups, shapes), legend=shown),
    }
