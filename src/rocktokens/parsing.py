"""Parse text that may be damaged or hostile: whatever is not in the format is a ValueError that says why, in one line.

The parsers of the standard library raise other errors where a text is nested too deep or has a number without end.
"""

import json
import tomllib
from collections.abc import Callable
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse JSON, in UTF-8 where it comes as bytes."""
    return _parse(json.loads, text.decode("utf-8") if isinstance(text, bytes) else text)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML."""
    return _parse(tomllib.loads, text)


def _parse(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError):
        raise
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError:  # what int() says of more digits than it takes
        raise ValueError("it has a number of more digits than can be read") from None
