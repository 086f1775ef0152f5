"""Kernels in Triton run by its interpreter: Python, host memory, one program after the other."""

from __future__ import annotations

import inspect
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FastkernError
from .records import DTYPES

_one_at_a_time = threading.Lock()  # the interpreter keeps the running program in globals


def interpret(name: str, grid: int, arguments: bytes, constants: Mapping[str, Any]) -> None:
    """Run `grid` programs of a kernel, as named in kernels/triton/entry.py, and wait for them.

    arguments: its record. Addresses in it are of this process. constants: its constexpr parameters.
    Kernels of one process run one at a time, in the order in which they were launched. Raises
    FastkernError with what went wrong, and where in the kernels.
    """
    from ..kernels.triton.entry import kernel_of, record_of

    (record,) = np.frombuffer(arguments, dtype=DTYPES[record_of(name)])
    fields = record.dtype.names or ()
    with _one_at_a_time, _language_patched_once():
        try:
            kernel = kernel_of(name, between_servers="TRANSPORT" in constants)
            kernel[(grid,)](*(int(record[field]) for field in fields), **constants)
        except Exception as error:
            raise _first_error(name, error) from error


def _first_error(name: str, error: BaseException) -> FastkernError:
    """The interpreter wraps an error anew in each function that it passes."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    frames = traceback.extract_tb(error.__traceback__)
    here = [frame for frame in frames if "triton" in Path(frame.filename).parts[-3:-1]]
    where = here[-1] if here else frames[-1]
    place = f"{Path(where.filename).name}:{where.lineno}"
    return FastkernError(f"{name}, interpreted, {place}: {type(error).__name__}: {error}")


@contextmanager
def _language_patched_once() -> Iterator[None]:
    """Triton's interpreter patches its language again at each call of each function, in 2 ms: two
    thirds of a kernel's time. Within a launch once is enough, for each set of modules."""
    from triton.runtime import interpreter

    real = getattr(interpreter, "_patch_lang", None)
    scope = getattr(interpreter, "_LangPatchScope", None)
    if real is None or scope is None:  # another release: right all the same
        yield
        return
    done: set[tuple[str, ...]] = set()
    known: set[int] = set()  # modules, by their globals

    def patch(function: Any) -> Any:
        where = id(function.__globals__)
        if where in known:
            return scope()
        known.add(where)
        names = sorted(v.__name__ for v in function.__globals__.values() if inspect.ismodule(v))
        key = tuple(name for name in names if name.startswith("triton."))
        if key in done:
            return scope()
        done.add(key)
        return real(function)

    module: Any = interpreter
    module._patch_lang = patch
    try:
        yield
    finally:
        module._patch_lang = real
