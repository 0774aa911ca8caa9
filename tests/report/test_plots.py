"""Plots to be touched: made from the records that the charts are made from, with every number and token of them."""

from dataclasses import fields, replace
from typing import Any

import pytest
from report_run import TEXTS, make_find, make_gradients, make_knockout, make_rocks, make_study

from rocktokens.report.charts.find_charts import find_charts
from rocktokens.report.charts.forest import knockout_charts
from rocktokens.report.charts.gradient_charts import gradient_charts
from rocktokens.report.charts.plots import Layer, Plot, column, overlaid
from rocktokens.report.charts.share_charts import category_charts, share_charts
from rocktokens.report.charts.study_charts import study_charts
from rocktokens.report.charts.theme import Figure
from rocktokens.report.views.run_view import to_json


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return {
        **share_charts(make_rocks(), "run"),
        **find_charts("run", make_find()),
        **category_charts(make_find(), "run"),
        **gradient_charts(make_gradients(), "run"),
        **knockout_charts(make_knockout(), "run"),
        **study_charts(make_study(), "run"),
    }


def data(plot: Plot) -> list[tuple[Layer, int]]:
    """Every datum that can be touched."""
    layers = [layer for panel in plot.panels for layer in panel.layers if layer.group is not None and not layer.faint]
    return [(layer, place) for layer in layers for place in range(len(layer.x))]


def test_every_figure_has_one_whose_columns_fit(figures: dict[str, Figure]):
    assert len(figures) == 13
    for figure in figures.values():
        assert figure.title and figure.plot.panels, figure.name
        for panel in figure.plot.panels:
            for layer in panel.layers:
                columns: list[Any] = [layer.low, layer.high, layer.start, layer.token, *layer.facts.values()]
                columns += [layer.label] if layer.group is not None else []
                assert {len(own) for own in columns} <= {0, len(layer.x)}
                assert layer.group is None or layer.group < len(figure.plot.groups)
                assert panel.y.scale != "rows" or all(-1 < y < len(panel.y.names) for y in layer.y if y is not None)
        assert "<" not in to_json(figure.plot)


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("shares", "share", None),
        ("funnel", "freq", "mean_kl"),
        ("loss", "checkpoint", "mean_kl"),
        ("sensitivity", None, "jaccard"),
        ("gradient_norm", "value", None),
        ("gradient_kl", "kl_before", "kl"),
        ("gradient_blocks", "share", None),
        ("study_comparisons", "difference", None),
    ],
)
def test_the_numbers_are_those_of_the_records(figures: dict[str, Figure], name: str, x: str | None, y: str | None):
    figure = figures[name]
    for field, axis in ((x, "x"), (y, "y")):
        if field is not None:
            known = [record for record in figure.records if record[field] is not None]
            assert {getattr(layer, axis)[place] for layer, place in data(figure.plot)} >= set(column(known, field))


def test_tokens_can_be_followed_from_figure_to_figure(figures: dict[str, Figure]):
    for name in ("funnel", "gradient_kl", "gradient_norm"):
        found = {layer.token[place] for layer, place in data(figures[name].plot) if layer.token}
        assert found == {record["token_id"] for record in figures[name].records}
    forest = figures["knockout"]
    alone = {int(own["ids"]) for own in forest.records if own["role"] != "placebo, never written"}
    drawn = {layer.token[place] for layer, place in data(forest.plot)} - {None}
    assert drawn <= alone and len(drawn) > 1


def test_a_forest_draws_the_rows_of_its_chart(figures: dict[str, Figure]):
    chart = figures["knockout"].chart.to_dict()
    rows = max((own for own in chart["datasets"].values() if "row" in own[0]), key=len)
    drawn = sorted((layer.y[place], layer.label[place]) for layer, place in data(figures["knockout"].plot))
    assert drawn == [(float(row["row"]), row["label"]) for row in rows]


def test_rocks_are_named_in_order_of_rank(figures: dict[str, Figure]):
    [rocks] = [layer for layer in figures["funnel"].plot.panels[0].layers if layer.named]
    ranks = [int(rank) for rank in rocks.facts["rank"]]
    assert ranks == sorted(ranks) and len(ranks) == len(TEXTS[::3])


def test_plots_over_each_other_keep_every_line_under_a_name_of_its_own(figures: dict[str, Figure]):
    own = figures["loss"].plot
    both = overlaid([own, own], ["a", "b"])
    assert [group.name for group in both.groups] == [f"{group.name}, {run}" for run in "ab" for group in own.groups]
    for panel, single in zip(both.panels, own.panels, strict=True):
        half = len(single.layers)
        assert panel.layers[:half] == single.layers
        assert [layer.x for layer in panel.layers[half:]] == [layer.x for layer in single.layers]
        assert [layer.group for layer in panel.layers] == list(range(2 * half))


def test_nothing_to_draw_is_no_plot():
    found = make_find()
    funnel = type(found.funnel)(**{own.name: [] for own in fields(found.funnel)})
    empty = replace(found, funnel=funnel, trajectory=[], sensitivity=[], cutoff=replace(found.cutoff, curve=[]))
    assert all(figure.plot.panels == () for figure in find_charts("run", empty).values())
