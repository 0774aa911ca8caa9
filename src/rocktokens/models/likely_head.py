"""What stands in the place of an LM head where a teacher only says which tokens it finds likeliest.

Such a teacher has no states. What it says of a response token is one row of 2K + 2 float32, which is kept, moved and
sliced as a state is, and read by ``LikelyHead``:

    ids of its K likeliest tokens (whole numbers, exact below 2^24), likeliest first
    their K log-probabilities
    the log-probability of all other tokens together, the tail
    the log-probability of the token that was written

Example: K = 2, V = 10, a response token 7 of probability 0.1 where tokens 4 and 2 have 0.6 and 0.2 is the row
[4, 2, log 0.6, log 0.2, log 0.2, log 0.1].
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch

from rocktokens.models.head import LMHead

LARGEST_ID = 1 << 24


class Likely(NamedTuple):
    """What a teacher says of N response tokens."""

    ids_NK: torch.Tensor
    """int64, likeliest first; ``width`` stands, after all others, for tokens that the student does not have, which are
    in the tail."""
    logp_NK: torch.Tensor
    tail_N: torch.Tensor
    """Log-probability of all other tokens together."""
    written_N: torch.Tensor


@dataclass(frozen=True, slots=True)
class LikelyHead:
    """Reads the rows of a teacher with ``width`` tokens, of which it names ``k``."""

    width: int
    k: int

    @property
    def row_width(self) -> int:
        """Numbers of a row."""
        return 2 * self.k + 2

    def cut(self, width: int) -> Self:
        """Return what reads the same rows for a student of this many tokens: the others are left to the tail."""
        return self if width >= self.width else replace(self, width=width)

    def whole(self) -> Self:
        """Return itself: it is never in shards."""
        return self

    def cast_for(self, _rows_NE: torch.Tensor) -> Self:
        """Return itself: it has no weight."""
        return self

    def read(self, rows_NE: torch.Tensor) -> Likely:
        """Take rows apart."""
        k = self.k
        ids_NK, logp_NK, tail_N = rows_NE[:, :k].long(), rows_NE[:, k : 2 * k], rows_NE[:, 2 * k]
        beyond_NK = ids_NK >= self.width
        if beyond_NK.any():
            without_NK = logp_NK.where(beyond_NK, -torch.inf)
            tail_N = torch.cat([without_NK, tail_N.unsqueeze(-1)], dim=-1).logsumexp(dim=-1)
            order_NK = beyond_NK.byte().argsort(dim=-1, stable=True)
            ids_NK = ids_NK.masked_fill(beyond_NK, self.width).gather(1, order_NK)
            logp_NK = logp_NK.masked_fill(beyond_NK, -torch.inf).gather(1, order_NK)
        return Likely(ids_NK, logp_NK, tail_N, rows_NE[:, 2 * k + 1])


OutputHead = LMHead | LikelyHead
