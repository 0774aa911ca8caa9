"""PDFs in one order: the same document under any numbering of its objects, and a sound table."""

import re

import pytest

from rocktokens.report.charts.find_charts import chart_bytes, loss_chart
from rocktokens.report.charts.pdf import in_one_order

OBJECTS = {
    "catalog": b"<<\n  /Type /Catalog\n  /Pages %(pages)d 0 R\n>>",
    "pages": b"<<\n  /Kids [%(page)d 0 R]\n>>",
    "page": b"<<\n  /Font <<\n    /f0 %(first)d 0 R\n    /f1 %(second)d 0 R\n  >>\n>>",
    "first": b"<<\n  /Length 9\n>>\nstream\n1 0 R\n2 0\nendstream",
    "second": b"<<\n  /Length 3\n>>\nstream\nxyz\nendstream",
}


def write_pdf(order: list[str], swap_fonts: bool = False) -> bytes:
    """A PDF whose objects are numbered and written in this order."""
    numbers = {name.encode(): number for number, name in enumerate(order, start=1)}
    pdf, offsets = b"%PDF-1.7\n", []
    for number, name in enumerate(order, start=1):
        body = OBJECTS[name] % numbers if b"%(" in OBJECTS[name] else OBJECTS[name]
        if swap_fonts and name == "page":
            lines = body.splitlines(keepends=True)
            body = b"".join((*lines[:2], lines[3], lines[2], *lines[4:]))
        offsets.append(len(pdf))
        pdf += b"%d 0 obj\n%s\nendobj\n\n" % (number, body)
    at = len(pdf)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    root = numbers[b"catalog"]
    pdf += b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(order) + 1, table)
    return pdf + b"trailer\n<<\n  /Size %d\n  /Root %d 0 R\n>>\nstartxref\n%d\n%%%%EOF" % (len(order) + 1, root, at)


def require_sound(pdf: bytes) -> None:
    """Every entry of the table points at the object it numbers, and every reference is to one."""
    table = int(re.findall(rb"startxref\n(\d+)", pdf)[-1])
    assert pdf[table:].startswith(b"xref\n")
    entries = re.findall(rb"(\d{10}) 00000 n \n", pdf[table:])
    for number, offset in enumerate(entries, start=1):
        assert pdf[int(offset) :].startswith(b"%d 0 obj\n" % number)
    assert b"/Size %d\n" % (len(entries) + 1) in pdf[table:]


ORDERS = [list(OBJECTS), [*reversed(OBJECTS)], ["second", "catalog", "page", "first", "pages"]]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("swap_fonts", [False, True])
def test_every_numbering_gives_the_same_bytes(order: list[str], swap_fonts: bool):
    written = in_one_order(write_pdf(order, swap_fonts))
    assert written == in_one_order(write_pdf(ORDERS[0]))
    require_sound(written)


def test_what_looks_like_a_reference_inside_a_stream_is_left_alone():
    assert b"stream\n1 0 R\n2 0\nendstream" in in_one_order(write_pdf(ORDERS[2]))


def test_a_chart_is_the_same_bytes_and_sound():
    records = [
        {"checkpoint": at, "group": group, "half": "held-out half", "mean_kl": 1.0, "low": 0.5, "high": 1.5}
        for at in (0, 1)
        for group in ("rock", "random")
    ]
    first, second = (chart_bytes(loss_chart(records), "pdf") for _ in range(2))
    assert first == second == in_one_order(first)
    require_sound(first)


def test_what_is_no_pdf_is_refused():
    with pytest.raises(ValueError, match="table"):
        in_one_order(b"%PDF-1.7\n")
