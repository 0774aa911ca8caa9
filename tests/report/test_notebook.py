"""What notebooks show: escaped, still, and true to the numbers."""

import re
from html.parser import HTMLParser

import pytest
from explorer_run import LENGTH, N_ROLLOUTS, make_run
from report_run import make_rocks

from hostile_texts import HOSTILE
from rocktokens.display.strip import LEVELS, MOST, Piece, level, strip_html
from rocktokens.report.views.run_view import RunView
from rocktokens.report.views.strips import rollout_strip
from rocktokens.traces.store import TraceStore


class Tags(HTMLParser):
    """The elements and attributes of some HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes.update(name for name, _ in attrs)


def test_rocks_are_a_table_of_text_only():
    html = make_rocks(tuple(HOSTILE[:40]))._repr_html_()
    tags = Tags(html)
    assert tags.names == {"p", "table", "thead", "tbody", "tr", "th", "td"} and not tags.attributes
    assert html.count("<tr>") == 41 and html.isprintable()


def test_many_rocks_are_cut_and_counted():
    html = make_rocks(tuple(str(place) for place in range(60)))._repr_html_()
    assert html.count("<tr>") == 51 and "… and 10 more" in html


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return RunView.open(make_run(tmp_path_factory.mktemp("notebook") / "run"))


def test_a_strip_shows_every_token_as_text(run: RunView):
    for rollout_id in range(0, N_ROLLOUTS, 9):
        html = rollout_strip(run, rollout_id)._repr_html_()
        tags = Tags(html)
        assert tags.names <= {"div", "span", "sup", "br"} and tags.attributes <= {"style", "title"}
        assert html.count("<span") == LENGTH


def test_a_rollout_of_a_store_shows_every_token_as_text(run: RunView):
    store = TraceStore(run.path)
    for rollout_id in range(0, N_ROLLOUTS, 9):
        html = store.rollout(rollout_id, 10)._repr_html_()
        tags = Tags(html)
        assert tags.names <= {"div", "span", "br"} and tags.attributes <= {"style", "title"}
        assert html.count("<span") == LENGTH and html.isprintable() and len(html) < 20_000


def test_a_rollout_of_a_store_has_the_colours_of_its_strip(run: RunView):
    colours = [
        re.findall(r'<span style="background:(#[0-9a-f]+);', own._repr_html_())
        for own in (TraceStore(run.path).rollout(3, 10), rollout_strip(run, 3, 10))
    ]
    assert colours[0] == colours[1] and len(set(colours[0])) > 1


def test_long_strips_are_cut_and_counted():
    html = strip_html("t", [Piece(1, "x", 1.0)] * (MOST + 1_234))
    assert html.count("<span") == MOST and "… 1,234 more" in html
    assert "more" not in strip_html("t", [Piece(1, "x", 1.0)] * MOST)


def test_the_highest_kl_has_the_last_colour_and_the_lowest_the_first(run: RunView):
    strip = rollout_strip(run, 0)
    colours = re.findall(r'<span style="background:(#[0-9a-f]+);', strip._repr_html_())
    by_kl = sorted(zip((token.kl for token in strip.tokens), colours, strict=True))
    assert (by_kl[0][1], by_kl[-1][1]) == (LEVELS[0][0], LEVELS[-1][0])


def test_levels_are_monotone_and_safe_where_all_are_alike():
    assert [level(value, 0.0, 1.0) for value in (-1, 0, 0.5, 1, 2)] == [0, 0, 4, 9, 9]
    assert (level(1.0, 1.0, 1.0), level(float("nan"), 0.0, 1.0)) == (0, 0)
