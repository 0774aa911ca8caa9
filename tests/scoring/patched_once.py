"""A pytest plugin: Triton's interpreter patches its language once a launch, not at every call of a device function.

What it patches stays so until the launch ends, so a second look for the functions of one module finds nothing to do;
looking is half of the interpreter's time. https://github.com/triton-lang/triton/blob/main/python/triton/runtime/interpreter.py
"""

from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter as own

_launch, _patch_lang = own.GridExecutor.__call__, own._patch_lang
_patched: set[int] = set()
"""Globals of functions, of this launch."""


def _launch_again(executor: Any, *arguments: Any, **named: Any) -> None:
    _patched.clear()
    _launch(executor, *arguments, **named)


def _patch_once(function: Callable[..., Any]) -> Any:
    if id(function.__globals__) in _patched:
        return None
    _patched.add(id(function.__globals__))
    return _patch_lang(function)


own.GridExecutor.__call__ = _launch_again
own._patch_lang = _patch_once
