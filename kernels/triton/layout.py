"""Where the fields of the records lie that kernels read, as Triton constants.

Made from the C++ definitions when this is imported, so that nothing is typed twice. For each field
of a record a constant <RECORD>_<FIELD>, which holds the field's offset and width and is for `get`,
`put` and `place` (access.py); for each record SIZEOF_<RECORD>, its bytes:

    STREAM_NUM_ROWS, SIZEOF_STREAM, ARGS_TABLE, CONTROL_TICKETS, ...

and for each queue QUEUE_PACK, QUEUE_PUSH, ..., its number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton.language as tl

from fastkern.kernels import _host
from fastkern.planner import _core, table

WIDTH_BITS = 4  # of a field's constant, below its offset

# Records by the prefix of their fields' constants.
_RECORDS = {
    "KernelArgs": "ARGS",
    "LaunchArgs": "LAUNCH",
    "MoeArgs": "MOE",
    "PayloadPart": "PART",
    "Control": "CONTROL",
    "ErrorRecord": "ERROR",
    "TraceEvent": "TRACE",
    "RouteArgs": "ROUTE",
    "NetworkArgs": "NETWORK",
    "Arrival": "ARRIVAL",
    "RowEntry": "ENTRY",
}


def _fields() -> Iterator[tuple[str, int, int]]:
    """Constant, offset and width of every field; width 0: a record or an array in the record."""
    for record, (fields, num_bytes) in _host.record_schemas().items():
        if record not in _RECORDS:
            continue
        prefix = _RECORDS[record]
        for name, kind, offset in fields:
            yield f"{prefix}_{name.upper()}", offset, {"u4": 4, "u8": 8}.get(kind, 0)
        yield f"SIZEOF_{prefix}", num_bytes, -1
    dtypes: dict[str, np.dtype[Any]] = dict(table.DTYPES)
    dtypes["Handle"] = np.dtype([(name, "<" + kind) for name, kind in _host.handle_schema()])
    for record, dtype in dtypes.items():
        fields_of: Any = dtype.fields
        for name, (kind, offset) in fields_of.items():
            yield f"{record.upper()}_{name.upper()}", int(offset), kind.itemsize
        yield f"SIZEOF_{record.upper()}", dtype.itemsize, -1


def _numbers() -> dict[str, int]:
    made = {}
    for name, offset, width in _fields():
        made[name] = offset if width < 0 else offset << WIDTH_BITS | width
    for number, name in enumerate(table.QUEUES):
        made[f"QUEUE_{name.upper()}"] = number
    for number, name in enumerate(table.OPS):
        made[f"OP_{name.upper()}"] = number
    return made


_MADE = _numbers()
globals().update({name: tl.constexpr(value) for name, value in _MADE.items()})

NUM_QUEUES = tl.constexpr(len(table.QUEUES))
# Of each queue: 4 bits of its phase, 1 bit whether it is planned at a chunk's end (plan_time).
PHASES = tl.constexpr(sum(phase << 4 * q for q, phase in enumerate(table.PHASES)))
AT_CHUNK_END = tl.constexpr(sum(end << q for q, end in enumerate(table.AT_CHUNK_END)))
NO_SLOT = tl.constexpr(table.NO_SLOT)
EXPERT_LAYOUT = tl.constexpr(0)  # LayoutKind in kernels/body/handle.h
RANK_LAYOUT = tl.constexpr(1)
NONE = tl.constexpr(table.NO_SLOT)  # kNone of handles is the same number
LATE = tl.constexpr((1 << 63) - 1)  # after every plan time
VALUE_BITS = tl.constexpr(table.VALUE_BITS)
LAND_PER_RANK = tl.constexpr(_core.constants()["LAND_PER_RANK"])
LAND_PER_CHUNK = tl.constexpr(_core.constants()["LAND_PER_CHUNK"])

DIGEST = hashlib.sha256(json.dumps([_MADE, _core.constants()], sort_keys=True).encode()).hexdigest()
"""Of all that was read: part of the keys of compiled kernels."""
