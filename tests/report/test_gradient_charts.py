"""The figures of gradients: valid Vega-Lite that holds the numbers of the record, and says what it shows."""

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest

from gradient_records import make_gradients
from rocktokens.gradients.records import (
    BatchMean,
    Column,
    Geometry,
    GradientGeometry,
    GradientsRecord,
    TraceTypes,
    TypeColumns,
    TypePersistence,
)
from rocktokens.report.charts.gradient_charts import (
    MOST_MARKS,
    block_records,
    blocks_chart,
    gradient_charts,
    kl_chart,
    kl_records,
    thinned,
    type_records,
    types_chart,
)
from rocktokens.report.charts.save import chart_bytes

PNG = b"\x89PNG\r\n\x1a\n"
POINT = ("panel", "group", "token_id", "token", "value")
KL = ("token_id", "text", "group", "freq", "kl_before", "kl")
GROUPS = ["rocks", "rocks", "high mean kl", "rest"]


def geometry(**shares: float) -> GradientGeometry:
    """The rocks' share in each block; everything else as the record made by hand has it."""
    whole = make_gradients().parameter.shares.gradient
    (block,) = whole.blocks.values()

    def with_share(share: float) -> Geometry:
        own = replace(block.groups["rocks"], share=BatchMean(share, (share - 0.1, share + 0.1), [share]))
        return replace(block, groups={**block.groups, "rocks": own})

    return replace(whole, blocks={name.replace("_", " "): with_share(share) for name, share in shares.items()})


def make_record(*, paired: bool = True, update: bool = True) -> GradientsRecord:
    record = make_gradients(paired=True)
    nothing: Column = [None] * 4
    space, change = record.logit.reference.vocabulary, record.logit.persistence
    assert change is not None
    columns = {field.name: nothing for field in fields(TypeColumns)} | {
        "token_id": [3, 5, 7, 9],
        "freq": [100, 50, 5, 400],
        "mean_norm": [0.1, 0.2, 0.3, None],
        "norm": [0.01, 0.02, 0.03, 0.04],
        "coherence": [0.5, None, 0.1, 0.9],
        "cos_others": [0.1, 0.2, 0.3, 0.4],
    }
    vocabulary = replace(space, types=TypeColumns(**columns))
    corrected = TypePersistence([3, 5, 7, 9], nothing, nothing, nothing, nothing, [1.0, None, 0.5, 0.25])
    persistence = replace(change, vocabulary=replace(change.vocabulary, types=corrected))
    step = make_gradients().parameter.shares.update
    assert step is not None
    shares = replace(
        record.parameter.shares,
        blocks=["embeddings", "layer 0 mlp"],
        gradient=geometry(embeddings=0.5, layer_0_mlp=-0.25),
        update=replace(step, blocks=geometry(embeddings=0.125, layer_0_mlp=0.75).blocks) if update else None,
    )
    return replace(
        record,
        settings=replace(record.settings, n_prompts=192),
        trace=replace(
            record.trace,
            types=TraceTypes(
                token_id=[3, 5, 7, 9],
                text=["\n", " So", "\x1b[31m", "9"],
                category=["other"] * 4,
                group=GROUPS,
                freq=[100, 50, 5, 400],
                kl_before=[1.5, 1.0, 2.0, 0.5] if paired else nothing,
                kl=[1.5, 0.5, 1.0, 0.0],
                mean_norm=nothing,
            ),
        ),
        logit=replace(
            record.logit,
            reference=replace(record.logit.reference, vocabulary=vocabulary),
            persistence=persistence if paired else None,
        ),
        parameter=replace(record.parameter, shares=shares),
    )


def walk(node: Any) -> Iterator[dict[str, Any]]:
    """Every object of a spec."""
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from walk(child)


def data_of(chart: Any, *keys: str) -> list[dict[str, Any]]:
    """The inlined records that have exactly these keys; altair checks the spec against the schema."""
    spec = chart.to_dict()
    values = [node["data"]["values"] for node in walk(spec) if "values" in node.get("data", {})]
    values += spec.get("datasets", {}).values()
    return next(records for records in values if records and set(keys) == set(records[0]))


def subtitle(chart: Any) -> str:
    return "\n".join(chart.to_dict()["title"]["subtitle"])


def test_every_figure_can_be_drawn_and_says_what_it_is_of():
    charts = {name: figure.chart for name, figure in gradient_charts(make_record(), "run X").items()}
    assert list(charts) == ["gradient_norm", "gradient_alignment", "gradient_kl", "gradient_blocks"]
    for chart in charts.values():
        assert subtitle(chart).startswith("run X, checkpoint 64, held-out half, 192 prompts")
        assert chart_bytes(chart, "png").startswith(PNG)
        assert chart_bytes(chart, "svg") == chart_bytes(chart, "svg")
    assert "baseline 0" in subtitle(charts["gradient_kl"])


def test_types_keep_their_numbers_and_their_groups():
    records = type_records(make_record(), {"coherence": "A", "corrected": "B"})
    chart = types_chart("title", records)
    shown = [(point["panel"], point["token"], point["group"], point["value"]) for point in data_of(chart, *POINT)]
    assert sorted(shown) == [
        ("A", "9", "rest", 0.9),
        ("A", "\\u001b[31m", "high mean kl", 0.1),
        ("A", "⏎", "rocks", 0.5),
        ("B", "9", "rest", 0.25),
        ("B", "\\u001b[31m", "high mean kl", 0.5),
        ("B", "⏎", "rocks", 1.0),
    ]


def test_one_checkpoint_has_no_panel_of_persistence():
    records = type_records(make_record(paired=False), {"coherence": "A", "corrected": "B"})
    assert {record["panel"] for record in records} == {"A"}


def test_kl_before_and_after_with_the_line_of_no_change():
    chart = kl_chart(kl_records(make_record()))
    points = {point["text"]: (point["kl_before"], point["kl"]) for point in data_of(chart, *KL)}
    assert points == {"⏎": (1.5, 1.5), "·So": (1.0, 0.5), "\\u001b[31m": (2.0, 1.0), "9": (0.5, 0.0)}
    assert data_of(chart, "kl_before", "kl") == [{"kl_before": 0.0, "kl": 0.0}, {"kl_before": 2.0, "kl": 2.0}]


def test_blocks_have_bars_for_gradient_and_step_in_their_order():
    records = block_records(make_record())
    assert [(record["block"], record["of"], record["share"]) for record in records] == [
        ("embeddings", "gradient", 0.5),
        ("layer 0 mlp", "gradient", -0.25),
        ("embeddings", "Adam's step", 0.125),
        ("layer 0 mlp", "Adam's step", 0.75),
    ]
    assert (records[0]["low"], records[0]["high"]) == (0.4, 0.6)
    chart = blocks_chart(records, 0.25, "run X")
    assert data_of(chart, "block", "of", "share", "low", "high") == records
    assert data_of(chart, "tokens") == [{"tokens": 0.25}]
    assert "25.0 %" in subtitle(chart)
    assert {record["of"] for record in block_records(make_record(update=False))} == {"gradient"}


@pytest.mark.parametrize(
    "chart", [types_chart("title", [], "run X"), kl_chart([], "run X"), blocks_chart([], None, "run X")]
)
def test_without_data_a_figure_is_one_sentence(chart: Any):
    assert "run X" in subtitle(chart)
    assert chart_bytes(chart, "png").startswith(PNG)


def test_a_large_group_is_thinned_evenly_and_says_so():
    records = [
        {"panel": "A", "group": "rest", "token_id": place, "token": "t", "value": float(place)}
        for place in range(10_000)
    ]
    records += [{"panel": "A", "group": "rocks", "token_id": 10_000, "token": "r", "value": -1.0}]
    kept = [record["value"] for record in thinned(records, ("panel", "group"), "value") if record["group"] == "rest"]
    assert len(kept) == MOST_MARKS and (kept[0], kept[-1]) == (0.0, 9999.0)
    gaps = [high - low for low, high in pairwise(kept)]
    assert max(gaps) - min(gaps) <= 1
    chart = types_chart("title", records)
    assert "thinned evenly" in subtitle(chart) and "thinned" not in subtitle(types_chart("title", records[-5:]))
    assert sum(point["group"] == "rocks" for point in data_of(chart, *POINT)) == 1
