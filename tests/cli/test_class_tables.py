"""What the command says of classes: the conclusion, a row per class, and what it would take."""

from dataclasses import replace

import pytest

from knockout_records import make_sweep
from rocktokens.classes import TokenClass, TokenClasses
from rocktokens.cli.class_tables import class_sweep_table, conclusion, print_class_sweep
from rocktokens.cli.common import output
from rocktokens.cli.demo import print_coarse_classes
from rocktokens.knockout.class_records import ClassLink, ClassSweep, Replacement
from rocktokens.knockout.records import Ban, BanChanges, Knockout
from rocktokens.types import Interval, Verdict


def knockout(
    ids: tuple[int, ...], delta: float, verdict: Verdict, alternatives: tuple[int, ...] = (), needs: int | None = None
) -> Knockout:
    changes = BanChanges(40 * len(ids), 40, 0.0, 0.0, 1.0, 0.1, [], [], [])
    name = f"{ids} where {alternatives} is likely" if alternatives else str(ids)
    ends: Interval = (delta - 0.02, delta + 0.02)
    ban = Ban(ids, name, alternatives=alternatives)
    return Knockout(ban, delta, ends, 0.5, 0.5, verdict, verdict, 0.03, (-1.0, 1.0), 200, None, changes, needs)


KNOCKOUTS = [
    knockout((3,), 0.005, "undecided", (4,), 290),
    knockout((4,), -0.01, "undecided", (3,), 410),
    knockout((3, 4), -0.86, "pillar"),
    knockout((3,), -0.775, "pillar"),
    knockout((4,), 0.0, "neutral"),
    knockout((5,), 0.0, "neutral", (6,)),
    knockout((6,), -0.08, "pillar", (5,)),
    knockout((5, 6), -0.2, "pillar"),
    knockout((5,), 0.0, "neutral"),
    knockout((6,), -0.1, "pillar"),
]
CLASSES = (
    TokenClass((3, 4), ("\n", "\n\n"), ("undecided", "undecided"), ("undecided", "undecided"), "pillar", None),
    TokenClass((5, 6), ("###", "**"), ("neutral", "pillar"), ("pillar", "neutral"), "pillar", False),
)
LINKS = (
    ClassLink(3, 4, 0.5, Replacement(9, 1.0), Replacement(4, None), kept=True),
    ClassLink(5, 6, 0.5, Replacement(9, 1.0), Replacement(9, 0.5), kept=True),
    ClassLink(4, 5, 0.5, Replacement(9, 0.0), Replacement(9, 0.5), kept=False),
)
FOUND = ClassSweep(CLASSES, LINKS, make_sweep(KNOCKOUTS))


@pytest.mark.parametrize(
    ("safe", "sentence"),
    [
        ((None, False), "Of 2 classes, 1 is not interchangeable and 1 is undecided."),
        ((True, True), "Of 2 classes, 2 are interchangeable."),
        ((None, True, None), "Of 3 classes, 1 is interchangeable and 2 are undecided."),
        ((False,), "The only class is not interchangeable."),
        ((), "No class is left: none of the linked tokens replace each other."),
    ],
)
def test_the_conclusion_counts_the_classes(safe, sentence):
    classes = tuple(replace(CLASSES[0], safe=own) for own in safe)
    assert conclusion(replace(FOUND, classes=classes)) == sentence


def test_a_row_has_the_worst_ban_within_the_class_and_the_ban_of_all_of_it():
    table = class_sweep_table(FOUND, show=2)
    rows = [dict(zip(table.titles, [cell.text for cell in row], strict=True)) for row in table.rows]
    assert rows[0] == {
        "members": "⏎  ⏎⏎", "in": "80", "members are": "undecided", "worst ban within": "undecided", "Δ": "−1.0",
        "95 %": "[−3.0, +1.0]", "neutral at": "410", "none allowed": "pillar", "Δ of none": "−86.0",
    }  # fmt: skip
    assert [rows[1][title] for title in ("members are", "worst ban within", "Δ", "neutral at")] == [
        "not interchangeable", "pillar", "−8.0", "—",
    ]  # fmt: skip
    assert len(class_sweep_table(FOUND, show=1).rows) == 1


def test_the_reader_learns_which_pillars_another_member_can_stand_for():
    with output.capture() as shown:
        print_class_sweep(FOUND, show=5)
    lines = " ".join(shown.get().split())
    assert "of a full sweep" not in lines
    assert lines.startswith("Of 2 classes, 1 is not interchangeable and 1 is undecided.")
    assert "Of 3 links, 2 are kept" in lines and "too few answers hold one of them to tell (1)" in lines
    pillars = lines[lines.index("Pillars when banned everywhere") :]
    assert "“⏎” −77.5 [−79.5, −75.5]" in pillars and "**" not in pillars[: pillars.index(".")]
    assert "“(3,) where (4,) is likely” 290, “(4,) where (3,) is likely” 410" in lines


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (CLASSES, "Classes, whose choice the arm called coarse leaves out: ⏎ ⏎⏎"),
        (CLASSES[1:], ""),
        (
            [TokenClass((5, 6), ("###", "**"))],
            "Candidate classes, whose choice the arm called coarse leaves out: ### ** (no ban has tested them)",
        ),
    ],
)
def test_the_demo_names_the_classes_in_use_and_whether_bans_tested_them(classes, said):
    with output.capture() as shown:
        print_coarse_classes(TokenClasses(classes))
    assert " ".join(shown.get().split()) == said
