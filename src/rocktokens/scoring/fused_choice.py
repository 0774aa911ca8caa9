"""The choice within classes of tokens on the fused path: which kernels run before and after those of whole rows.

1. Classes are sorted into tables by size, rounded up to a power of two; the tables lie one behind the other.
2. ``read`` launches ``class_rows`` for each table; the kernels of whole rows then take ``Split.rows_nS``.
3. ``Split.write`` launches ``member_rows``, which puts the members' columns of the gradient right.

A row costs two reads and one write of the members' columns, and 8 bytes of scratch per member.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from rocktokens.classes import TokenClasses
from rocktokens.scoring.fused import sent

LARGEST = 1024
"""Members of a class that a program can hold at once."""
SPLIT = 8
"""Numbers per row that pass between the kernels."""
TILE, NUM_WARPS = 512, 4
"""Members that a program takes at once, at least one class of them, and the warps it has."""


@dataclass(frozen=True, slots=True)
class _Table:
    """Classes of about one size: where they begin among all slots, how many there are, and slots of each."""

    first: int
    classes: int
    size: int


def takes(classes: TokenClasses) -> bool:
    """Whether no class is too large."""
    return max(map(len, classes.groups), default=0) <= LARGEST


@dataclass(frozen=True, slots=True)
class Split:
    """What is known of the choice in a few rows while their logits are read."""

    choice: "FusedChoice"
    rows_nS: torch.Tensor
    """See ``class_kernels.py``."""
    members_n2M: torch.Tensor | None
    """Logits and log-ratios of the members, where their columns of a gradient will have to be written again."""

    def write(self, weights_n: Any, gradient_nV: torch.Tensor, head: Any, inverse_temperature: float) -> None:
        """Write the members' columns of the weighted gradient; ``head`` is the student's, as the kernels take it."""
        from rocktokens.scoring import class_kernels

        slots_M = self.choice.slots_M
        if self.members_n2M is None or not len(slots_M):
            return
        member_rows: Any = class_kernels.member_rows
        member_rows[(len(gradient_nV),)](
            self.rows_nS,
            self.members_n2M,
            slots_M,
            len(slots_M),
            weights_n,
            gradient_nV,
            gradient_nV.stride(0),
            *head[3:],
            gradient_nV.shape[1],
            inverse_temperature,
            BLOCK=TILE,
            num_warps=NUM_WARPS,
        )


class FusedChoice:
    """Classes on a device, and how much of the choice within them is minimised."""

    def __init__(self, classes: TokenClasses, lam: float, device: torch.device) -> None:
        self.lam, self.left_out = float(lam), 1.0 - float(lam)
        self.slots_M, self.tables = _tables(classes, device)

    def room(self, n_rows: int, device: torch.device) -> torch.Tensor:
        """Zeros (n, S) for what passes between the kernels; of all rows at once: one fill, not one per chunk."""
        return torch.zeros(n_rows, SPLIT, dtype=torch.float32, device=device)

    def read(
        self,
        heads: list[Any],
        token_ids_n: torch.Tensor,
        rows_nS: torch.Tensor,
        inverse_temperature: float,
        with_gradient: bool,
    ) -> Split:
        """Read the members' columns of both models' logits; ``heads`` are as the kernels take them.

        ``rows_nS`` is the ``room`` of these rows. Where nothing of the choice is left out, the gradient of whole rows
        is right at the members too.
        """
        from rocktokens.scoring import class_kernels

        z_nV = heads[0][0]
        n, n_slots = len(z_nV), len(self.slots_M)
        members_n2M = rows_nS.new_empty(n, 2, n_slots) if with_gradient and self.left_out else None
        class_rows: Any = class_kernels.class_rows
        for table in self.tables:
            class_rows[(n,)](
                *(argument for head in heads for argument in head),
                token_ids_n,
                self.slots_M[table.first :],
                table.classes,
                rows_nS,
                None if members_n2M is None else members_n2M[:, :, table.first :],
                n_slots,
                z_nV.shape[1],
                inverse_temperature,
                self.lam,
                IS_FILLED=False,
                SIZE=table.size,
                CLASSES=max(1, TILE // table.size),
                num_warps=NUM_WARPS,
            )
        return Split(self, rows_nS, members_n2M)


@lru_cache(maxsize=16)
def _tables(classes: TokenClasses, device: torch.device) -> tuple[torch.Tensor, tuple[_Table, ...]]:
    """The ids (M,), int32 and padded, and the tables they make."""
    padding = 2**31 - 1
    by_size: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
    for ids in classes.groups:
        by_size[1 << (len(ids) - 1).bit_length()].append(ids)
    slots: list[int] = []
    tables = []
    for size, groups in sorted(by_size.items()):
        tables.append(_Table(len(slots), len(groups), size))
        for ids in groups:
            slots += [*ids, *[padding] * (size - len(ids))]
    return sent(torch.tensor(slots, dtype=torch.int32), device), tuple(tables)
