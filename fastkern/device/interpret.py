"""Triton's kernels run by its interpreter: in Python, on host memory, one program after the other."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from .records import DTYPES

_one_at_a_time = threading.Lock()  # the interpreter keeps the running program in globals


def interpret(name: str, grid: int, arguments: bytes, constants: Mapping[str, Any]) -> None:
    """Run `grid` programs of a kernel, as named in kernels/triton/entry.py, and wait for them.

    arguments: its record. Addresses in it are of this process. constants: its constexpr parameters.
    Kernels of one process run one at a time, in the order in which they were launched.
    """
    from ..kernels.triton.entry import kernel_of, record_of

    (record,) = np.frombuffer(arguments, dtype=DTYPES[record_of(name)])
    fields = record.dtype.names or ()
    with _one_at_a_time:
        kernel_of(name)[(grid,)](*(int(record[field]) for field in fields), **constants)
