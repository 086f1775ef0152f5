"""Communicators by number: an operator's arguments are tensors and numbers, not objects."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from ..errors import ClosedError
from . import calls

_numbers = itertools.count()
_communicators: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def register(comm: Any, functions: Any = None) -> int:
    """The number by which the operators find `comm`, which stays its owner's to keep.

    functions: what has DispatchOptions, dispatch_tensors, combine_tensors, slot_choice and
    meta_info, as fastkern.moe.calls, which is the default; another one for tests.
    """
    number = next(_numbers)
    _communicators[number] = comm
    if functions is not None:
        _functions[comm] = functions
    return number


def lookup(number: int) -> tuple[Any, Any]:
    """The communicator and its functions. Raises ClosedError when it is gone."""
    comm = _communicators.get(number)
    if comm is None:
        raise ClosedError("the communicator of this call does not exist any more")
    return comm, functions_of(comm)


def functions_of(comm: Any) -> Any:
    """The functions that move rows for this communicator."""
    return _functions.get(comm, calls)
