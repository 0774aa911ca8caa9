"""The charts: valid Vega-Lite whose data are the numbers given, that can be drawn offline into the same files."""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import altair as alt
import numpy as np
import pandas as pd
import pytest
from type_tables import COLUMNS, HOSTILE, table, zipf_types

from rocktokens.display.text import visible
from rocktokens.errors import RocktokensError
from rocktokens.report.charts.find_charts import cutoff_chart, loss_chart, sensitivity_chart
from rocktokens.report.charts.funnel import funnel
from rocktokens.report.charts.save import chart_bytes, save_chart

PNG = b"\x89PNG\r\n\x1a\n"
KEYS = ("k", "coverage", "coverage_held_out", "stability", "stability_low", "stability_high")
CURVE = [
    dict(zip(KEYS, values, strict=True))
    for values in [(1, 0.25, 0.2, 1.0, 0.9, 1.0), (10, 0.5, 0.45, 0.7, 0.6, 0.8), (100, 1.0, 0.9, 0.9, None, None)]
]
LOSSES = [
    {"checkpoint": step, "group": group, "half": half, "mean_kl": kl / (step + 1), "low": kl / 9, "high": kl * 2}
    for half in ("selection half", "held-out half")
    for group, kl in (("rock", 1.5), ("high mean kl", 2.5), ("random", 0.5))
    for step in (0, 16, 64)
]
SETTINGS = [
    {"parameter": "window", "value": 3, "default": False, "jaccard": 0.8},
    {"parameter": "window", "value": 5, "default": True, "jaccard": 1.0},
    {"parameter": "tau", "value": 0.1 + 0.2, "default": False, "jaccard": 0.5},
    {"parameter": "joint", "value": True, "default": False, "jaccard": 0.25},
]


def walk(node: Any) -> Iterator[dict[str, Any]]:
    """Every object of a spec."""
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from walk(child)


def datasets(chart: Any, *keys: str) -> list[list[dict[str, Any]]]:
    """The inlined data of a chart's spec whose records have these keys; altair checks the spec against the schema."""
    spec = chart.to_dict()
    values = [node["data"]["values"] for node in walk(spec) if "values" in node.get("data", {})]
    values += spec.get("datasets", {}).values()
    return [records for records in values if records and set(keys) <= set(records[0])]


def subtitle(chart: Any) -> str:
    return "\n".join(chart.to_dict()["title"]["subtitle"])


def test_the_funnel_holds_the_given_numbers_with_rocks_on_top():
    types = zipf_types(800, k=20)
    (points,) = datasets(funnel(types, "run X, checkpoint 9"), "token_id")
    given = types.set_index("token_id")
    assert sorted(point["token_id"] for point in points) == list(range(800))
    for point in points:
        row = given.loc[point["token_id"]]
        assert (point["freq"], point["mean_kl"], point["group"]) == (row.freq, row.mean_kl, row.group)
        assert point["score"] == row.freq * row.mean_kl
        assert point["rank"] == (None if math.isnan(row["rank"]) else row["rank"])
        assert point["text"] == visible(row.text)
    assert [point["rank"] for point in points[-20:]] == list(range(20, 0, -1))


def test_the_funnel_says_what_it_shows():
    chart = funnel(zipf_types(800, k=20), "run X, checkpoint 9")
    assert subtitle(chart).splitlines()[0] == "run X, checkpoint 9"
    assert "Types: 800 (rock 20, high mean kl 20, other 760)." in subtitle(chart)
    encodings = [node["encoding"] for node in walk(chart.to_dict()) if "shape" in node.get("encoding", {})]
    scales = {channel: encodings[0][channel]["scale"] for channel in ("color", "shape")}
    assert all(len(set(scale["range"])) == 3 and scale["domain"][0] == "rock" for scale in scales.values())
    titles = {node["title"] for node in walk(chart.to_dict()) if isinstance(node.get("title"), str)}
    assert {"occurrences (log scale)", "mean kl (nats)"} <= titles


def test_the_axes_hold_every_point():
    types = zipf_types(800, k=20)
    encoding = next(node["encoding"] for node in walk(funnel(types).to_dict()) if "shape" in node.get("encoding", {}))
    (left, right), (bottom, top) = (encoding[axis]["scale"]["domain"] for axis in "xy")
    assert encoding["x"]["scale"]["type"] == "log"
    assert left < types["freq"].min() and types["freq"].max() < right
    assert bottom <= types["mean_kl"].min() and types["mean_kl"].max() < top
    assert all(left <= tick <= right for tick in encoding["x"]["axis"]["values"])


def test_a_large_vocabulary_is_thinned_and_says_so():
    types = zipf_types(49_000)
    chart = funnel(types)
    (points,) = datasets(chart, "token_id")
    shown = {
        group: [p["token_id"] for p in points if p["group"] == group] for group in ("rock", "high mean kl", "other")
    }
    for group in ("rock", "high mean kl"):
        assert sorted(shown[group]) == types["token_id"][types["group"] == group].tolist()
    assert 3_000 <= len(shown["other"]) < len(points) < 5_000
    assert f"other 48,800, thinned evenly to {len(shown['other']):,} points" in subtitle(chart)
    drawn, every = (np.log10(types["freq"].to_numpy()[ids]) for ids in (shown["other"], types["group"] == "other"))
    assert np.quantile(drawn, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(every, [0.1, 0.5, 0.9]), abs=0.15)
    assert chart_bytes(chart, "png").startswith(PNG)


def test_the_first_rocks_are_named_beside_their_points():
    rows = [(v, f" t{v}", "other", 10 ** (1 + v / 5), 3 - v / 10, "rock", v + 1) for v in range(15)]
    (labels,) = datasets(funnel(table(rows)), "label", "freq", "mean_kl")[-1:]
    assert {label["label"] for label in labels} == {f"·t{v}" for v in range(12)}
    for label in labels:
        v = int(label["label"].removeprefix("·t"))
        assert abs(math.log10(label["freq"]) - (1 + v / 5)) < 0.3
        assert label["mean_kl"] == pytest.approx(3 - v / 10, abs=0.3)


def test_hostile_texts_stay_text():
    rows = [(v, text, "other", 10 + v * 50, 0.5 + v, "rock", v + 1) for v, text in enumerate(HOSTILE)]
    chart = funnel(table(rows), "run \x1b[31m\ud800</script>\n")
    spec = chart_bytes(chart, "json").decode()
    texts = {point["text"] for point in datasets(chart, "token_id")[0]}
    assert texts == {visible(text) for text in HOSTILE}
    assert all(text.isprintable() and len(text) <= 24 for text in texts)
    assert "\\u001b" not in spec.replace("\\\\u001b", "")
    root = ElementTree.fromstring(chart_bytes(chart, "svg"))
    tags = {element.tag.split("}")[1] for element in root.iter()}
    assert "text" in tags and not tags & {"script", "a", "image", "foreignObject"}
    assert chart_bytes(chart, "png").startswith(PNG)


EMPTY = pd.DataFrame(columns=pd.Index(COLUMNS))
NAN = table([(1, None, None, None, math.nan, None, None)])


@pytest.mark.parametrize(
    ("chart", "sentence"),
    [
        (funnel(EMPTY), "There is no type with a kl to show."),
        (funnel(NAN), "There is no type with a kl to show."),
        (cutoff_chart([]), "There is no K to compare."),
        (cutoff_chart([{"k": 3, "coverage": math.nan}], chosen=3), "There is no K to compare."),
        (loss_chart([]), "There is no checkpoint with a kl to show."),
        (loss_chart([{"checkpoint": 3, "mean_kl": None}]), "There is no checkpoint with a kl to show."),
        (sensitivity_chart([]), "No parameter was moved."),
    ],
)
def test_without_data_a_chart_is_a_sentence(chart: Any, sentence: str):
    assert datasets(chart) == [[{"text": sentence}]]
    assert chart_bytes(chart, "png").startswith(PNG)


@pytest.mark.parametrize(
    "rows",
    [
        [(1, "a", "other", 5, 0.7, "rock", 1)],
        [(v, "a", "other", 10**v, 0.0, "other", None) for v in range(4)],
        [(v, "a", "other", 7, v / 9, "rock", v + 1) for v in range(9)],
        [(v, "a", "other", 6 + v, 1e-9, "rock", v + 1) for v in range(2)],
        [(1, None, None, 5, 0.7, "rock", None), (2, "b", None, None, 0.5, "other", None)],
    ],
    ids=["one type", "no kl", "one frequency", "tiny", "missing values"],
)
def test_odd_tables_are_drawn(rows: list):
    chart = funnel(table(rows))
    assert len(datasets(chart, "token_id")[0]) == sum(row[3] is not None for row in rows)
    assert json.loads(chart_bytes(chart, "json")) and len(chart_bytes(chart, "png")) > 10_000


def test_the_cutoff_chart_holds_the_curves_and_the_chosen_k():
    chart = cutoff_chart(CURVE, chosen=10)
    (lines,) = datasets(chart, "curve")
    drawn = {(line["curve"], line["k"]): line["share"] for line in lines}
    for point in CURVE:
        assert drawn["coverage, selection half", point["k"]] == point["coverage"]
        assert drawn["coverage, held-out half", point["k"]] == point["coverage_held_out"]
        assert drawn["stability (mean Jaccard)", point["k"]] == point["stability"]
    (band,) = datasets(chart, "stability_low")
    assert [(at["k"], at["stability_low"], at["stability_high"]) for at in band] == [(1, 0.9, 1.0), (10, 0.6, 0.8)]
    assert datasets(chart, "k", "label")[0] == [{"k": 10, "label": "K = 10"}]
    assert datasets(cutoff_chart(CURVE), "k", "label") == []


def test_the_loss_chart_holds_every_group_and_half():
    chart = loss_chart(
        [*LOSSES, {**LOSSES[0], "checkpoint": np.int64(99), "mean_kl": np.float32(0.5), "low": math.nan}]
    )
    (points,) = datasets(chart, "checkpoint")
    assert points[:-1] == LOSSES
    assert points[-1] == {**LOSSES[0], "checkpoint": 99, "mean_kl": 0.5, "low": None}
    facets = [node["column"] for node in walk(chart.to_dict()) if "column" in node]
    assert facets[0]["sort"] == ["selection half", "held-out half"]
    dashes = [node["strokeDash"]["scale"] for node in walk(chart.to_dict()) if "strokeDash" in node and "y" in node]
    assert dashes[0]["domain"] == ["rock", "high mean kl", "random"]
    assert len({tuple(dash) for dash in dashes[0]["range"]}) == 3
    assert chart_bytes(chart, "png").startswith(PNG)


def test_the_sensitivity_chart_holds_every_setting():
    chart = sensitivity_chart(SETTINGS)
    (points,) = datasets(chart, "parameter")
    assert points == [
        {**given, "value": shown} for given, shown in zip(SETTINGS, ("3", "5", "0.3", "True"), strict=True)
    ]
    assert chart_bytes(chart, "png").startswith(PNG)


@pytest.fixture(scope="module")
def small() -> Any:
    return funnel(zipf_types(300, k=15), "run X")


def test_saved_files_are_what_their_ending_says(small: Any, tmp_path: Path):
    contents = {}
    for ending in ("png", "svg", "pdf", "json", "PNG"):
        save_chart(small, tmp_path / f"funnel.{ending}")
        contents[ending] = (tmp_path / f"funnel.{ending}").read_bytes()
    assert json.loads(contents["json"]) == small.to_dict()
    assert contents["pdf"].startswith(b"%PDF-") and contents["pdf"].rstrip().endswith(b"%%EOF")
    svg = ElementTree.fromstring(contents["svg"])
    width, height = struct.unpack(">II", contents["png"][16:24])
    assert contents["png"].startswith(PNG) and contents["png"][12:16] == b"IHDR"
    assert (width, height) == (2 * int(svg.attrib["width"]), 2 * int(svg.attrib["height"]))
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg", ".pdf", ".json", ".PNG"}


@pytest.mark.parametrize("file_format", ["png", "svg", "json"])
def test_the_same_data_give_the_same_bytes(file_format: str):
    make = [lambda: funnel(zipf_types(300, k=15)), lambda: cutoff_chart(CURVE, 10), lambda: loss_chart(LOSSES)]
    first, again = ([chart_bytes(chart(), file_format) for chart in make] for _ in range(2))
    assert first == again
    assert chart_bytes(funnel(zipf_types(300, k=15, seed=1)), file_format) != first[0]


@pytest.mark.parametrize("name", ["funnel.gif", "funnel", "funnel.html"])
def test_an_unknown_ending_is_refused(small: Any, tmp_path: Path, name: str):
    with pytest.raises(
        RocktokensError, match=r"^a chart cannot be saved as '.*': end its name in png, svg, pdf, json$"
    ):
        save_chart(small, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_fetched_and_settings_of_altair_do_not_matter(small: Any):
    with alt.data_transformers.enable("json"):
        for chart in (small, cutoff_chart(CURVE, 10), loss_chart(LOSSES), sensitivity_chart(SETTINGS)):
            assert not any("url" in node or "href" in node for node in walk(chart.to_dict()))
            assert datasets(chart)
