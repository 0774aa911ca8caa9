"""The geometry of the funnel against naive references: thinning, lines of equal score, label places."""

import math
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from type_tables import table, zipf_types

from rocktokens.report.charts.funnel_layout import GROUPS, Box, Frame, drawable, equal_scores, place_labels, thin


def test_only_types_with_a_place_are_drawn_and_rocks_last():
    types = table(
        [
            (7, "a", "other", 10, 0.5, "rock", 1),
            (5, "b", "other", 10, 0.5, "rock", 2),
            (1, "c", "other", 3, 0.1, "other", None),
            (2, "d", "other", 0, 0.1, "other", None),
            (3, "e", "other", 3, math.nan, "rock", 3),
            (4, "f", "other", None, 0.1, "other", None),
            (6, "g", "other", 2, 3.0, "high mean kl", None),
            (8, "h", "other", 2, math.inf, "other", None),
            (0, "i", "other", 4, 0.0, None, None),
        ]
    )
    points = drawable(types)
    assert points.token_id.tolist() == [0, 1, 6, 5, 7]
    assert [GROUPS[layer] for layer in points.layer] == ["other", "other", "high mean kl", "rock", "rock"]
    assert drawable(types.convert_dtypes()).token_id.tolist() == [0, 1, 6, 5, 7]
    assert len(drawable(types.iloc[:0])) == len(drawable(pd.DataFrame())) == 0


def test_the_window_holds_every_type_and_places_are_inverse():
    points = drawable(zipf_types(500))
    frame = Frame.around(points, margin=0.1)
    x, y = frame.place(points.freq, points.mean_kl)
    assert x.min() == pytest.approx(0.1 / 1.2) and x.max() == pytest.approx(1.1 / 1.2)
    assert y.min() >= 0 and y.max() == pytest.approx(1 / 1.1)
    for index in (0, 17, 499):
        freq, mean_kl = frame.at(x[index], y[index])
        assert freq == pytest.approx(points.freq[index]) and mean_kl == pytest.approx(points.mean_kl[index])


def test_thinning_keeps_density_outline_and_every_marked_type():
    points = drawable(zipf_types(20_000))
    shown = thin(points, limit=1_000, cells=20)
    kept = set(shown.token_id.tolist())
    marked = points.layer > 0
    assert kept >= set(points.token_id[marked].tolist())
    assert shown.token_id.tolist() == [v for v in points.token_id.tolist() if v in kept]

    low, high = math.log10(points.freq.min()), math.log10(points.freq.max())
    in_cell, kept_in_cell = Counter(), Counter()
    for v, freq, mean_kl in zip(*(a[~marked] for a in (points.token_id, points.freq, points.mean_kl)), strict=True):
        column = min(int(20 * (math.log10(freq) - low) / (high - low)), 19)
        cell = (column, min(int(20 * mean_kl / points.mean_kl.max()), 19))
        in_cell[cell] += 1
        kept_in_cell[cell] += int(v) in kept
    others = int((~marked).sum())
    assert kept_in_cell == {cell: math.ceil(n * 1_000 / others) for cell, n in in_cell.items()}


def test_thinning_is_seeded_and_leaves_small_tables_alone():
    points = drawable(zipf_types(5_000, k=10))
    first, again, other = (thin(points, limit=500, seed=seed).token_id.tolist() for seed in (0, 0, 1))
    assert first == again != other
    assert thin(points, limit=4_980) is points


def test_lines_of_equal_score_run_through_the_window():
    points = drawable(zipf_types(2_000))
    frame = Frame.around(points, margin=0.05)
    lines = equal_scores(points, frame)
    highest = (points.freq * points.mean_kl).max()
    assert max(lines) <= highest < 10 * max(lines)
    for score, line in lines.items():
        assert math.log10(score) == pytest.approx(round(math.log10(score)))
        assert [freq * mean_kl for freq, mean_kl in line] == pytest.approx([score] * len(line))
        places = np.array([frame.place(np.array(freq), np.array(kl)) for freq, kl in line])
        assert (places > -1e-9).all() and (places < 1 + 1e-9).all()
        assert places[-1, 0] == pytest.approx(1)
        assert places[0, 0] == pytest.approx(0) or places[0, 1] == pytest.approx(1)


def test_no_lines_where_there_is_no_loss():
    points = drawable(table([(1, "a", "other", 10, 0.0, "other", None), (2, "b", "other", 99, 0.0, "other", None)]))
    assert equal_scores(points, Frame.around(points)) == {}


PLOT = Box(0, 640, 0, 400)
PIXELS = st.tuples(st.floats(0, 640), st.floats(0, 400))
SIZES = st.tuples(st.floats(6, 150), st.just(13.0))


def overlap(a: Box, b: Box) -> float:
    across = min(a.right, b.right) - max(a.left, b.left)
    return max(across, 0) * max(min(a.high, b.high) - max(a.low, b.low), 0)


@given(st.lists(st.tuples(PIXELS, SIZES), max_size=12), st.lists(PIXELS, max_size=8))
def test_labels_cover_neither_points_nor_each_other(labelled: list, more: list):
    points = [point for point, _ in labelled] + more
    boxes = place_labels(points, [size for _, size in labelled], PLOT, 7)
    assert len(boxes) == len(labelled)
    placed = [box for box in boxes if box]
    dots = [Box.centred(point, 10, 10) for point in points]
    assert all(overlap(box, dot) < 1e-6 for box in placed for dot in dots)
    assert all(overlap(a, b) < 1e-6 for i, a in enumerate(placed) for b in placed[:i])
    assert all(box.left >= 0 and box.right <= 640 and box.low >= 0 and box.high <= 400 for box in placed)


def test_a_free_label_stands_to_the_right_and_a_crowded_one_moves_or_goes():
    assert place_labels([(100, 100)], [(40, 12)], PLOT, 7) == [Box(107, 147, 94, 106)]
    assert place_labels([(630, 100)], [(40, 12)], PLOT, 7) == [Box(583, 623, 94, 106)]
    second = place_labels([(100, 100), (100, 100)], [(40, 12)] * 2, PLOT, 7)[1]
    assert second == Box(53, 93, 94, 106)
    crowd = place_labels([(100, 100)] * 40, [(40, 12)] * 40, PLOT, 7)
    assert None in crowd and crowd[0] is not None
