"""Shares and categories: the numbers of the records, nothing lost between them."""

from pytest import approx
from report_run import SHARES, SUMMARY, make_find

from rocktokens.report.charts.save import chart_bytes
from rocktokens.report.charts.share_charts import categories_chart, category_records, share_records, shares_chart


def test_every_share_of_the_summary_is_a_bar_with_its_interval():
    records = share_records(SUMMARY)
    assert sorted(own["share"] for own in records) == sorted(SHARES.values())
    kl = next(own for own in records if own["of"].startswith("kl"))
    assert (kl["low"], kl["high"]) == (0.75, 0.9375)
    assert "87.5 % [75.0, 93.8]" in chart_bytes(shares_chart(records), "svg").decode()


def test_a_share_that_is_not_known_has_no_bar():
    svg = chart_bytes(shares_chart(share_records({"token_share": 0.5})), "svg").decode()
    assert "50.0 %" in svg and "kl that is left" not in svg


def test_rocks_and_others_of_a_category_add_up_to_its_share():
    categories = make_find().categories
    records = category_records(categories)
    for own in categories:
        parts = [r["share"] for r in records if r["category"] == own.category and r["of"] == "of the kl"]
        assert len(parts) == 2 and sum(parts) == approx(own.kl_share, abs=0)
    assert "latex math" in chart_bytes(categories_chart(records), "svg").decode()


def test_without_data_there_is_a_sentence():
    assert b"There is no share to show." in chart_bytes(shares_chart([]), "svg")
    assert b"There is no category to show." in chart_bytes(categories_chart([]), "svg")
