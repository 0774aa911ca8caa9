"""One rollout's rows: a pyarrow table in code, a token strip in a notebook."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rocktokens.display.strip import Piece, strip_html
from rocktokens.display.text import visible
from rocktokens.traces.token_text import Vocabulary


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
        """Show the tokens as text, coloured by kl."""
        first = self.table.slice(0, 1).to_pylist()[0]
        title = f"rollout {first['rollout_id']} of prompt {visible(first['prompt_id'])}; coloured by kl"
        columns = (self.table[name].to_pylist() for name in ("token_id", "kl"))
        rows = zip(*columns, strict=True)
        return strip_html(title, [Piece(token_id, self.vocabulary.text(token_id), kl) for token_id, kl in rows])
