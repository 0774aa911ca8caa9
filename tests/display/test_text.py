"""Token text made visible: nothing a token holds can act on the terminal or the page, and nothing of it is hidden."""

import json
import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rocktokens.display.text import MARKS_LEGEND, MAX_LENGTH, for_json, legible, printable, visible

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=60)
"""Every code point, lone surrogates too."""
SHOWN = {
    "": "∅",
    " the": "·the",
    "\n\n": "⏎⏎",
    "\t\r": "⇥␍",
    "a·b": "a\\u00b7b",
    "⏎⇥␍": "\\u23ce\\u21e5\\u240d",
    "\x1b[31m": "\\u001b[31m",
    "\u202eevil\u2066": "\\u202eevil\\u2066",
    "a\u200b\ufeffb": "a\\u200b\\ufeffb",
    "\ud800": "\\ud800",
    "\U000e0041": "\\U000e0041",
    "\u3164": "\\u3164",
    "❤\ufe0f": "❤\\ufe0f",
    "\u0301": "◌\u0301",
    "e\u0301": "e\u0301",
    "漢字": "漢字",
    "</script>": "</script>",
}


@pytest.mark.parametrize(("text", "shown"), SHOWN.items())
def test_known_texts(text: str, shown: str):
    assert visible(text) == shown


@given(ANY_TEXT)
@example("\u2028\u2029\x85")
@example("\ud83d")
def test_any_token_is_one_short_line_of_printable_characters(text: str):
    shown = visible(text)
    assert 1 <= len(shown) <= MAX_LENGTH
    assert shown.isprintable() and " " not in shown
    assert not {unicodedata.bidirectional(c) for c in shown} & {"RLO", "LRO", "RLE", "LRE", "RLI", "LRI", "FSI", "PDF"}
    assert shown.encode("utf-8")
    assert len(shown.splitlines()) == 1


@given(st.text(st.characters(codec="utf-8", exclude_characters="\\…∅◌"), max_size=2), ANY_TEXT)
def test_short_texts_that_differ_look_different(text: str, other: str):
    if text != other and not set(other) & set("\\…∅◌"):
        assert visible(text) != visible(other)


@pytest.mark.parametrize(("text", "name"), [(" ", "a space"), ("\n", "a line end"), ("\t", "a tab")])
def test_the_legend_names_the_marks_that_are_shown(text: str, name: str):
    assert re.search(rf"{visible(text)} (is )?{name}", MARKS_LEGEND)


def test_a_long_text_is_cut_and_says_so():
    assert visible("x" * 24) == "x" * 24
    assert visible("x" * 25) == "x" * 23 + "…"
    assert visible("y" * 10_000_000) == "y" * 23 + "…"
    assert visible("abcdef", max_length=4) == "abc…"


@given(st.text("\x00\u202e\U000e0041a", min_size=25, max_size=40))
def test_a_cut_never_halves_a_code_point(text: str):
    assert re.fullmatch(r"(a|\\u0000|\\u202e|\\U000e0041)*…", visible(text))


def test_names_keep_their_spaces():
    assert printable("runs/my run · 2") == "runs/my run · 2"
    assert printable("a\nb\x1b\udcff") == "a\\u000ab\\u001b\\udcff"


@given(ANY_TEXT)
def test_legible_text_differs_from_visible_text_in_its_layout_alone(text: str):
    marked = legible(text).translate({ord(" "): "·", ord("\t"): "⇥", ord("\n"): "⏎"})
    assert marked == (visible(text, 10_000) if text else "")


def test_long_legible_text_is_cut_and_says_so():
    assert legible("a b", max_length=3) == "a b"
    assert legible("a bc", max_length=3) == "a …"
    assert legible("x" * 10_000_000, max_length=50) == "x" * 49 + "…"
    assert legible("\x00\x00", max_length=8) == "\\u0000…"
    assert (legible(""), legible("\u0301a"), legible("e\u0301 \u0301")) == ("", "◌\u0301a", "e\u0301 \u0301")


@given(ANY_TEXT)
@example("\x9b5m\u202e\x7f\U000e0041\ud800")
def test_json_for_a_terminal_holds_the_same_value_and_acts_on_nothing(text: str):
    shown = for_json(json.dumps({"text": text}, ensure_ascii=False))
    assert json.loads(shown) == {"text": text} and shown.isprintable() and shown.encode("utf-8")
