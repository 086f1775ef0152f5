"""Where a compiled kernel's parameters lie, as the compiler says in its assembly.

NVIDIA: PTX declares them in order, each at the next multiple of its size:

    .visible .entry fastkern_exchange(
        .param .u64 fastkern_exchange_param_0,                          // 0
        .param .u32 fastkern_exchange_param_1,                          // 8
        .param .u32 fastkern_exchange_param_2,                          // 12
        .param .u64 .ptr .global .align 1 fastkern_exchange_param_3,    // 16, a hidden pointer
    )

AMD: the metadata has offset and size of each. Those that it calls hidden are the runtime's.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ..errors import CompileError

_POINTER_BYTES = 8
Parameters = list[tuple[int, int]]  # offset, bytes


def read_parameters(target: str, name: str, text: str) -> Parameters:
    """Of a kernel in PTX ("cuda") or AMD's assembly ("hip"). Raises CompileError."""
    found = _of_ptx(name, text) if target == "cuda" else _of_metadata(name, text)
    if not found:
        raise CompileError(name, target, "", f"{name}: no parameters are in its assembly")
    return found


def _of_ptx(name: str, text: str) -> Parameters:
    declared = re.search(rf"\.entry {name}\(([^)]*)\)", text)
    at, found = 0, []
    for line in declared[1].split(",") if declared else ():
        kind = re.match(r"\s*\.param \.[usb](32|64)(?: \.ptr [^,]*)? \w+\s*$", line)
        if kind is None:
            raise CompileError(name, "cuda", "", f"{name}: unknown parameter {line.strip()}")
        num_bytes = int(kind[1]) // 8
        at = -(-at // num_bytes) * num_bytes
        found.append((at, num_bytes))
        at += num_bytes
    return found


def _of_metadata(name: str, text: str) -> Parameters:
    found = []
    for kernel in re.split(r"^  - ", text.partition(".amdgpu_metadata")[2], flags=re.MULTILINE):
        if not re.search(rf"^    \.name: +{name}$", kernel, re.MULTILINE):
            continue
        for argument in re.split(r"^ {6}- ", kernel, flags=re.MULTILINE)[1:]:
            fields = dict(re.findall(r"^ *\.(\w+): +(\w+)$", argument, re.MULTILINE))
            if fields["value_kind"] in ("by_value", "global_buffer"):
                found.append((int(fields["offset"]), int(fields["size"])))
            elif not fields["value_kind"].startswith("hidden_"):
                raise CompileError(name, "hip", "", f"{name}: unknown parameter {argument}")
    return found


def check_parameters(name: str, record: np.dtype[Any], parameters: Parameters) -> None:
    """Raise CompileError unless the record's fields come first, where the record has them, and
    then pointers."""
    fields: Any = record.fields
    wanted = [(int(offset), int(kind.itemsize)) for kind, offset in fields.values()]
    own, hidden = parameters[: len(wanted)], parameters[len(wanted) :]
    if own != wanted:
        raise CompileError(name, "", "", f"{name}: parameters are at {own}, fields at {wanted}")
    at = record.itemsize
    for offset, num_bytes in hidden:
        if (offset, num_bytes) != (at, _POINTER_BYTES):
            text = f"{name}: a hidden parameter of {num_bytes} bytes at {offset}, not {at}"
            raise CompileError(name, "", "", text)
        at += _POINTER_BYTES
