"""Operators in PyTorch's registry, under "fastkern::".

As torch.library.custom_op makes them, but called directly: custom_op's way loads the compiler at
the first call, seconds in which the other ranks wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import FastkernError

try:
    from torch._library.effects import EffectType
except ImportError:  # a PyTorch whose operators have no effects: not for compilers
    ORDERED: Any = None
else:
    ORDERED = EffectType.ORDERED

_library: Any = torch.library.Library("fastkern", "DEF")  # type: ignore[no-untyped-call]


class Operator:
    """A function as an operator; made by `operator`."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = f"fastkern::{name}"
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, function, "CompositeExplicitAutograd")
        self.overload = getattr(torch.ops.fastkern, name).default
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run it."""
        return self.overload(*args, **options)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The sizes of its results, for compilers; a decorator."""
        torch.library.register_fake(self._name, function, lib=_library)
        return function

    def register_autograd(
        self, backward: Callable[..., Any], setup_context: Callable[..., Any] | None = None
    ) -> None:
        """Its gradients."""
        torch.library.register_autograd(
            self._name, backward, setup_context=setup_context, lib=_library
        )

    def register_effect(self) -> None:
        """That it does more than compute its results: no compiler drops or moves it."""
        if ORDERED is not None:
            _library._register_effectful_op(self._name, ORDERED)


def check_compiler() -> None:
    """Raise FastkernError where a compiler could drop or move exchanges without a word."""
    if ORDERED is None and torch.compiler.is_compiling():
        raise FastkernError(
            "torch.compile of dispatch and combine needs a PyTorch whose operators can have "
            f"effects; this is {torch.__version__}, 2.13 is what was tested"
        )


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make the operator "fastkern::name" of a function of tensors and numbers; a decorator."""
    return lambda function: Operator(name, function)
