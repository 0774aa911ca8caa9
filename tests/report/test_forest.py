"""The forest plot: rows, verdicts and what is left out, from the content of knockout.json."""

from typing import Any

from report_run import make_ban

from rocktokens.report.charts.forest import MATCHED, MOST, NEVER, TESTED, forest_chart, forest_records
from rocktokens.report.charts.save import chart_bytes


def rows_of(chart: Any) -> list[dict[str, Any]]:
    """The records that have a row, once."""
    spec = chart.to_dict()
    inlined = [layer["data"].get("values", []) for layer in spec["layer"]]
    return next(
        records for records in (*inlined, *spec.get("datasets", {}).values()) if records and "row" in records[0]
    )


def notes_of(chart: Any) -> list[str]:
    return chart.to_dict()["title"]["subtitle"]


def test_records_are_in_points_in_order_of_role_and_change():
    bans = [make_ban("a", "never", "neutral", 0.0), make_ban("b", delta=0.25), make_ban("c", "matched"), make_ban("d")]
    records = forest_records(bans)
    assert [own["banned"] for own in records] == ["d", "b", "c", "a"]
    assert [own["role"] for own in records] == [TESTED, TESTED, MATCHED, NEVER]
    assert (records[0]["delta_points"], records[0]["low"], records[0]["high"]) == (-25.0, -37.5, -12.5)


def test_a_token_shows_its_spaces_and_a_set_its_name():
    one, several = make_ban(" \n"), make_ban("all digits", ids=[1, 2])
    assert [own["banned"] for own in forest_records([one, several])] == ["·⏎", "all digits"]


def test_roles_are_set_apart_and_ids_that_never_occur_share_a_row():
    bans = [make_ban("a"), make_ban("a"), make_ban("b", "matched")]
    bans += [make_ban(text, "never", "neutral", 0.0) for text in "cde"]
    rows = rows_of(forest_chart(forest_records(bans), 3.0))
    assert [(own["row"], own["label"]) for own in rows] == [
        (0, "a"),
        (1, "a"),
        (3, "placebo b"),
        (5, "3 ids never written"),
    ]


def test_of_many_those_with_a_verdict_and_the_largest_changes_are_drawn():
    many = [make_ban(str(place), verdict="undecided", delta=place / 1000) for place in range(MOST[TESTED] + 9)]
    chart = forest_chart(forest_records([*many, make_ban("pillar", delta=-0.001)]), 3.0)
    labels = [own["label"] for own in rows_of(chart)]
    assert len(labels) == MOST[TESTED] and labels[0] == "pillar" and "1" not in labels
    assert notes_of(chart)[-1] == "Not drawn: 10 that change least."


def test_a_ban_without_a_known_change_is_counted_not_drawn():
    chart = forest_chart(forest_records([make_ban("a"), make_ban("b", delta=None)]), 3.0)
    assert [own["label"] for own in rows_of(chart)] == ["a"]
    assert notes_of(chart)[-1] == "Not drawn: 1 whose change is not known."


def test_without_bans_there_is_a_sentence():
    assert b"No ban has a known effect." in chart_bytes(forest_chart([], 3.0), "svg")
