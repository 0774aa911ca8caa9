"""Records as CSV that a spreadsheet reads as data only.

1. Numbers stay numbers, what is missing is an empty cell, and the columns are those of all records, first seen first.
2. A text that begins as a formula would (= + - @, in full width too, after spaces or not; tab, carriage return) gets a
   leading apostrophe (https://owasp.org/www-community/attacks/CSV_Injection), and another one stands wherever a
   spreadsheet that separates by semicolons or tabs would see a cell begin so.
3. Characters that cannot be printed are written as their code points: control and bidi characters, lone surrogates.
"""

import csv
import io
import re
from typing import Any

from rocktokens.display.text import printable
from rocktokens.report.charts.theme import Records, finite

_FORMULA_START = re.compile(r"(^|[;\t])(?=\s*[=+\-@＝＋－＠])|^(?=[\t\r])")
LONGEST = 1_000
"""Characters of a text; what is longer is cut, as spreadsheets do themselves further on."""


def csv_text(records: Records) -> str:
    """The records as one CSV with a header, lines ended as RFC 4180 has them."""
    rows = finite(records)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(map(safe_cell, columns))
    writer.writerows([safe_cell(row.get(name)) for name in columns] for row in rows)
    return buffer.getvalue()


def safe_cell(value: Any) -> Any:
    """A cell that no spreadsheet evaluates."""
    if not isinstance(value, str):
        return value
    inert = _FORMULA_START.sub(r"\1'", value[:LONGEST])
    return printable(inert) + ("…" if len(value) > LONGEST else "")
