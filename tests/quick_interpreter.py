"""A pytest plugin: Triton's interpreter without the work that it repeats for every operation of every program.

None of it changes what is computed, only how often the same is found out:

1. The language is patched once a launch, not at every call of a device function. What is patched stays so until the
   launch ends, so a second look for the functions of one module finds nothing to do.
2. A type is a value: its numpy dtype, its shape as a tensor has it, and the type of another element with that shape are
   made once. Operands of one shape need no broadcasting.
3. Objects die by their count of references: nothing is left for the garbage collector, which would look at them all.

https://github.com/triton-lang/triton/blob/main/python/triton/runtime/interpreter.py
"""

import gc
from collections.abc import Callable
from typing import Any

from triton.language import core
from triton.runtime import interpreter as own

gc.disable()
SEMANTIC = type(own.interpreter_semantic)
_launch, _patch_lang, _np_dtype = own.GridExecutor.__call__, own._patch_lang, own._get_np_dtype
_make_tensor, _with_element, _broadcast = (
    core.tensor.__init__,
    core.block_type.with_element_ty,
    SEMANTIC.broadcast_impl_value,
)
_patched: set[int] = set()
"""Globals of functions, of this launch."""
_np_dtypes: dict[str, Any] = {}
_scalar_shape = core.constexpr(1), core.tuple([])


def _launch_again(executor: Any, *arguments: Any, **named: Any) -> None:
    _patched.clear()
    _launch(executor, *arguments, **named)


def _patch_once(function: Callable[..., Any]) -> Any:
    if id(function.__globals__) in _patched:
        return None
    _patched.add(id(function.__globals__))
    return _patch_lang(function)


def _known_np_dtype(kind: Any) -> Any:
    element = kind.scalar
    if element.is_ptr():
        return _np_dtype(element)
    if element.name not in _np_dtypes:
        _np_dtypes[element.name] = _np_dtype(element)
    return _np_dtypes[element.name]


def _make_known_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    known = kind.__dict__.get("known_shape") if kind.is_block() else _scalar_shape
    if known is None:
        _make_tensor(tensor, handle, kind)
        kind.known_shape = tensor.numel, tensor.shape
        return
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.numel, tensor.shape = known


def _with_known_element(kind: Any, element: Any) -> Any:
    if element.is_ptr():
        return _with_element(kind, element)
    known = kind.__dict__.setdefault("known_elements", {})
    if element.name not in known:
        known[element.name] = _with_element(kind, element)
    return known[element.name]


def _broadcast_unlike(semantic: Any, left: Any, right: Any) -> Any:
    kinds = left.type, right.type
    if all(kind.is_block() for kind in kinds) and kinds[0].shape.values == kinds[1].shape.values:
        return left, right
    return _broadcast(semantic, left, right)


own.GridExecutor.__call__ = _launch_again
own._patch_lang = _patch_once
own._get_np_dtype = _known_np_dtype
core.tensor.__init__ = _make_known_tensor
core.block_type.with_element_ty = _with_known_element
SEMANTIC.broadcast_impl_value = _broadcast_unlike
