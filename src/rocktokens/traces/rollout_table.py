"""One rollout's rows: a pyarrow table to code, a token strip to a notebook."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rocktokens.traces.notebook import Piece, strip_html
from rocktokens.traces.token_text import Vocabulary

LONGEST = 48
"""Characters of a token that are shown."""


@dataclass(frozen=True, slots=True)
class RolloutTable:
    """The rows of one rollout in order of position; what it does not have itself is asked of ``table``.

    Example: ``store.rollout(3, 64).to_pandas()``.
    """

    table: pa.Table
    vocabulary: Vocabulary

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)

    def __getitem__(self, column: int | str) -> pa.ChunkedArray:
        return self.table[column]

    def __len__(self) -> int:
        return self.table.num_rows

    def _repr_html_(self) -> str:
        """The tokens as text, coloured by kl."""
        first = self.table.slice(0, 1).to_pylist()[0]
        title = f"rollout {first['rollout_id']} of prompt {_seen(first['prompt_id'])}; coloured by kl"
        columns = (self.table[name].to_pylist() for name in ("token_id", "kl"))
        return strip_html(title, [self._piece(*row) for row in zip(*columns, strict=True)])

    def _piece(self, token_id: int, kl: float | None) -> Piece:
        text = self.vocabulary.text(token_id)
        tip = f"{token_id}: kl {'—' if kl is None else f'{kl:.3f}'} nats"
        return Piece(_seen(text), kl, tip, ends_line="\n" in text)


def _seen(text: str) -> str:
    """A text on one line, what cannot be printed escaped as in Python, and not too long."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: LONGEST + 1])
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"
