"""The records that kernels are launched with, as NumPy dtypes made from their C++ definition."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ..kernels import _host


def _dtypes() -> dict[str, np.dtype[Any]]:
    made: dict[str, np.dtype[Any]] = {}
    for name, (fields, num_bytes) in _host.record_schemas().items():
        formats: list[Any] = []
        for _, text, _ in fields:
            found = re.fullmatch(r"(?:\((\d+),\))?(\w+)", text)
            assert found, text
            base: Any = made.get(found[2], found[2])
            formats.append((base, (int(found[1]),)) if found[1] else base)
        made[name] = np.dtype(
            {
                "names": [field for field, _, _ in fields],
                "formats": formats,
                "offsets": [offset for _, _, offset in fields],
                "itemsize": num_bytes,
            }
        )
    return made


DTYPES = _dtypes()
CONTROL = DTYPES["Control"]
ERROR_RECORD = DTYPES["ErrorRecord"]
TRACE_EVENT = DTYPES["TraceEvent"]
MOE_ARGS = DTYPES["MoeArgs"]
KERNEL_ARGS = DTYPES["KernelArgs"]
LAUNCH_ARGS = DTYPES["LaunchArgs"]
ROUTE_ARGS = DTYPES["RouteArgs"]
STATIC_VALUES = DTYPES["StaticValues"]
STATIC_ARGS = DTYPES["StaticArgs"]
STATIC_LAUNCH = DTYPES["StaticLaunch"]
NETWORK_ARGS = DTYPES["NetworkArgs"]


def offset_of(dtype: np.dtype[Any], field: str) -> int:
    """Bytes before a field of a record."""
    fields: Any = dtype.fields
    return int(fields[field][1])


def new_record(dtype: np.dtype[Any], **fields: Any) -> Any:
    """One record, zero but for the fields given."""
    record: Any = np.zeros((), dtype=dtype)
    for name, value in fields.items():
        record[name] = value
    return record
