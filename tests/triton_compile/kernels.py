"""The whole kernels, as programs compile them."""

from __future__ import annotations

from fastkern.device.records import DTYPES
from fastkern.kernels.triton.entry import entry_of, record_of
from tests.triton_compile.builds import THREADS, Source

ROUTE_THREADS = 128
_TYPES = {4: "i32", 8: "i64"}

registers_used: list[str] = []  # a line for each kernel and architecture, for the report


def source_of(name: str, package: str = "fastkern.kernels.triton", folder: str = "") -> Source:
    """A kernel of kernels/triton/entry.py, or of a copy; its parameters are its record's fields."""
    record = DTYPES[record_of(name)]
    types = tuple((field, _TYPES[record[field].itemsize]) for field in record.names or ())
    entry = entry_of(name)
    threads = ROUTE_THREADS if entry == "route" else THREADS
    return Source(f"{package}.{entry}", name, folder, types, threads, entry)
