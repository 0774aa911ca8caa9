"""One question put to DuckDB and to Spark, whose answers must be the same."""

import importlib.util
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ibis.expr.types as ir
import pyarrow as pa
import pytest

from rocktokens.traces.store import TraceStore


def _spark_lacks() -> str | None:
    """What keeps Spark from running here."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed: pip install 'rocktokens[spark]'"
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else "java"
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError):
        return "Java is not installed: Spark needs 17 or newer"
    version = re.search(r'version "(\d+)', said)
    return None if version and int(version[1]) >= 17 else f"Java is too old, Spark needs 17 or newer: {said}"


# A test lasts seconds: the second compiler of the Java machine costs more than it gains in them.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
LACKS = _spark_lacks()
needs_spark = pytest.mark.skipif(LACKS is not None, reason=LACKS or "")


def on_both(run: Path, question: Callable[[TraceStore], Any]) -> Any:
    """The answer, which must be the same from both engines: a table in columns, types, values and order of rows."""
    answers = [_arrow(question(TraceStore(run, engine=engine))) for engine in ("duckdb", "spark")]
    if isinstance(answers[0], pa.Table):
        assert answers[0].schema.equals(answers[1].schema), (answers[0].schema, answers[1].schema)
        assert answers[0].to_pylist() == answers[1].to_pylist()
    else:
        assert answers[0] == answers[1]
    return answers[0]


def _arrow(answer: Any) -> Any:
    return answer.to_pyarrow() if isinstance(answer, ir.Expr) else answer
