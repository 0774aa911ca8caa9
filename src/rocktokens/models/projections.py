"""One product in place of several that have the same input.

The queries, keys and values of an attention are three products, the two halves of a gated MLP two. A decoding step has
so few rows that each of them costs little more than its launch.

1. ``lay_side_by_side`` moves the weights of such layers into one storage, and their biases into another. Each parameter
   becomes a view of its part, so what is copied into it is in the whole matrix too, and nothing is stored twice. It is
   called where a model is made that is only sampled from or scored with.
2. ``SharedProduct.of`` finds layers that lie so. Anything but plain linear layers is left alone: adapters, quantised or
   sharded weights, layers with hooks or another forward, biases on some layers but not all.
3. While a ``SharedProduct`` is open, the first of its layers that is called computes the outputs of all. The others
   return their parts when they are called with the same, unchanged tensor, and compute their own output otherwise.
   Closing it drops the parts that were not asked for.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Self

import torch

from rocktokens.models.kernels import HALF, on_gpu

ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")
MLP_INPUTS = ("gate_proj", "up_proj")
Layers = Sequence[torch.nn.Linear]


@torch.no_grad()
def lay_side_by_side(model: torch.nn.Module) -> None:
    """Lay out the projections of a model for single products, if it is on a GPU and in half precision.

    Nothing else may train it. Moving or converting the model later undoes this, and costs no more than speed.
    """
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    uses = Counter(_storage(tensor) for _, tensor in named if _is_plain(tensor))
    for module in model.modules():
        for names in (ATTENTION_INPUTS, MLP_INPUTS):
            groups = _parameters(projections(module, names))
            is_own = all(uses[_storage(parameter)] == 1 for parameter in chain(*groups))  # not tied, not laid out yet
            for parameters in groups if is_own else ():
                _join(parameters)
    torch.cuda.empty_cache()  # the places that the weights left are too small for those of the next layer


def projections(module: Any, names: Sequence[str]) -> Layers:
    """A module's layers of these names, if one product could stand for theirs; otherwise none."""
    layers = [module._modules.get(name) for name in names]
    if not all(map(_is_linear, layers)):
        return []
    kinds = {(layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device) for layer in layers}
    return layers if len(kinds) == 1 else []


class SharedProduct:
    """Several linear layers of one input, whose outputs are computed together while it is open."""

    def __init__(self, layers: Layers, weight_ND: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self.layers, self.weight_ND, self.bias_N = layers, weight_ND, bias_N
        self._widths = [layer.out_features for layer in layers]
        self._is_open = False
        self._kept: tuple[torch.Tensor, int, dict[int, torch.Tensor]] | None = None
        """An input, its version, and the outputs that have not been asked for, by the place of their layer."""

    @classmethod
    def of(cls, module: Any, names: Sequence[str]) -> Self | None:
        """The product of a module's layers; None where their weights do not lie side by side."""
        layers = projections(module, names)
        wholes = [whole for parameters in _parameters(layers) if (whole := _whole(parameters)) is not None]
        if not layers or len(wholes) < len(_parameters(layers)):
            return None
        return cls(layers, wholes[0], wholes[1] if len(wholes) > 1 else None)

    def __enter__(self) -> None:
        self._is_open = True

    def __exit__(self, *_error: object) -> None:
        self._is_open, self._kept = False, None

    def forwards(self) -> list[tuple[torch.nn.Linear, Callable[..., torch.Tensor]]]:
        """Each layer with the forward that replaces its own."""
        return [(layer, self._forward(index, layer.forward)) for index, layer in enumerate(self.layers)]

    def _forward(self, index: int, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(*arguments: Any, **named: Any) -> torch.Tensor:
            is_plain = self._is_open and len(arguments) == 1 and not named and self._takes(arguments[0])
            part = self._part(index, arguments[0]) if is_plain else None
            return own(*arguments, **named) if part is None else part

        return forward

    def _takes(self, x: Any) -> bool:
        """Whether an input is a plain tensor that says when it is changed, and no gradient is wanted."""
        return (
            type(x) is torch.Tensor
            and (x.dtype, x.device) == (self.weight_ND.dtype, self.weight_ND.device)
            and not x.is_inference()
            and not torch.is_grad_enabled()
        )

    def _part(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """The output of one layer, if it was computed for this input or can be now."""
        kept = self._kept  # read once: another thread may run the same model
        if kept is None:
            outputs = torch.nn.functional.linear(x, self.weight_ND, self.bias_N).split(self._widths, dim=-1)
            self._kept = kept = x, x._version, dict(enumerate(outputs))
        asked, version, parts = kept
        return parts.pop(index, None) if asked is x and x._version == version else None


def _is_linear(layer: Any) -> bool:
    """Whether a layer is linear, unwatched and of plain weights for which ``SharedProduct`` is meant."""
    if type(layer) is not torch.nn.Linear or "forward" in vars(layer):
        return False
    parameters = [parameter for parameter in layer._parameters.values() if parameter is not None]
    is_watched = layer._forward_hooks or layer._forward_pre_hooks or layer._buffers or layer._modules
    return (
        not is_watched
        and layer._parameters.keys() == {"weight", "bias"}
        and layer.weight.shape == (layer.out_features, layer.in_features)
        and len({parameter.dtype for parameter in parameters}) == 1
        and all(_is_plain(parameter) and parameter.dtype in HALF and on_gpu(parameter) for parameter in parameters)
    )


def _parameters(layers: Layers) -> list[list[torch.nn.Parameter]]:
    """The weights of some layers and, where they have any, their biases."""
    groups = [[layer.weight for layer in layers], [layer.bias for layer in layers if layer.bias is not None]]
    return [group for group in groups if group]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its numbers lie in a storage that is its own to show: no shards, no quantised blocks."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _join(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Move parameters into one storage, the rows of each behind those of the one before."""
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(own) for own in parameters]), strict=True):
        parameter.data = part


def _whole(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor | None:
    """The matrix or vector of all rows, which shares their memory; None where they do not lie side by side."""
    first = parameters[0]
    following = first.storage_offset()
    for parameter in parameters:
        is_next = _storage(parameter) == _storage(first) and parameter.storage_offset() == following
        if not (is_next and parameter.is_contiguous()):
            return None
        following += parameter.numel()
    shape = sum(map(len, parameters)), *first.shape[1:]
    return first.detach().as_strided(shape, torch.empty(shape, device="meta").stride())
