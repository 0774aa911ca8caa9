"""A causal LM whose layers run elsewhere: on a server, or on other devices of this machine.

1. The LM head is here, where the student is: it is all of the model that a loss multiplies with. One that only says
   which tokens it finds likeliest has none (``likely_head.py``).
2. The states it receives are asked for by batch (``states``) and arrive on the head's device.
3. To everyone else it is a model with a config, a head and a device; its parameters are those that are here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from rocktokens.models.likely_head import LikelyHead


class DistantModel(nn.Module, ABC):
    """Has the head of a causal LM, if there is one, and knows where to get its states from."""

    context_length: int | None = None
    """Tokens that it sees where it runs, if that is less than its config says."""
    likely_head: "LikelyHead | None" = None
    """What reads its rows where it names its likeliest tokens; None where it gives states."""

    def __init__(self, config: Any, generation_config: Any, head: nn.Linear | None) -> None:
        super().__init__()
        self.config, self.generation_config = config, generation_config
        self.head = None if head is None else head.requires_grad_(False)
        self._place: torch.Tensor
        self.register_buffer("_place", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where its head is, and its states arrive."""
        return self._place.device if self.head is None else self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of its head, or of its rows."""
        return self._place.dtype if self.head is None else self.head.weight.dtype

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return the LM head, as transformers' models do."""
        return self.head

    @property
    @abstractmethod
    def packs(self) -> bool:
        """Whether sequences reach it without padding, so that a group may have as many as fit without any."""

    @abstractmethod
    def states(self, batch: Any) -> torch.Tensor:
        """Return for every response token of a ``RolloutBatch`` the last hidden state that had not seen it yet."""

    @abstractmethod
    def verify(self, input_ids: Sequence[int]) -> float | None:
        """Refuse a model whose logits are not its head's of its states; return how far they are, None if unknown."""


def linear_head(weight_VD: torch.Tensor, bias_V: torch.Tensor | None = None) -> nn.Linear:
    """Make a layer of a head's tensors, without a copy of them."""
    head = nn.Linear(weight_VD.shape[1], weight_VD.shape[0], bias=bias_V is not None, device="meta")
    head.weight = nn.Parameter(weight_VD, requires_grad=False)
    if bias_V is not None:
        head.bias = nn.Parameter(bias_V, requires_grad=False)
    return head
