"""Charts as files: PNG, SVG, PDF, or the Vega-Lite spec as JSON; and the figures of a run, committed into it."""

import io
import json
from collections.abc import Mapping
from pathlib import Path

from rocktokens.errors import RocktokensError
from rocktokens.report.charts.theme import Chart, Figure
from rocktokens.run_dir import RunDir, write_atomically

FORMATS = ("png", "svg", "pdf", "json")


def commit_charts(run: RunDir, figures: Mapping[str, Figure]) -> list[str]:
    """Draw each figure as PNG, commit it to the run as ``figures/NAME.png``, and return these paths."""
    paths = {name: f"figures/{name}.png" for name in figures}
    for name, figure in figures.items():
        content = chart_bytes(figure.chart, "png")
        run.commit(paths[name], lambda path, content=content: path.write_bytes(content))
    return list(paths.values())


def save_chart(chart: Chart, path: str | Path) -> None:
    """Write a chart atomically; the ending of the path chooses the format: png, svg, pdf or json (the spec)."""
    path = Path(path)
    content = chart_bytes(chart, path.suffix.removeprefix(".").lower())
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def chart_bytes(chart: Chart, file_format: str) -> bytes:
    """Render a chart; a PNG has twice the pixels of the screen.

    The same data and fonts give the same bytes, except in a PDF, whose writer orders its objects at random.
    """
    if file_format not in FORMATS:
        raise RocktokensError(f"a chart cannot be saved as {file_format!r}: end its name in {', '.join(FORMATS)}")
    if file_format == "json":
        text = json.dumps(chart.to_dict(), indent=1, ensure_ascii=False, sort_keys=True, allow_nan=False)
        return (text + "\n").encode()
    buffer = io.StringIO() if file_format == "svg" else io.BytesIO()
    chart.save(buffer, format=file_format, scale_factor=2 if file_format == "png" else 1)
    content = buffer.getvalue()
    return content.encode() if isinstance(content, str) else content
