"""Images of kernels in Triton: what the compiler made of an entry, as one block of bytes.

    magic | bytes of the header, 8 bytes little-endian | header, JSON | code of each kernel

The header says for each kernel what a launch must know and a binary does not say in a way that both
drivers could be asked for. The fields of its record come first in its parameter buffer, at the
record's own offsets; behind them lie Triton's hidden pointers, which are null:

    fastkern_exchange: LaunchArgs of 16 bytes, offsets 0, 8, 12; two pointers at 16 and 24:
    offsets (0, 8, 12, 16, 24), record_bytes 16, parameter_bytes 32

For the interpreter (target "host") there is no code: it is told constants alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAGIC = b"fastkern triton, format 1\n"
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class TritonKernel:
    """A compiled kernel.

    num_lanes: of its blocks, no other. shared_bytes: dynamic shared memory (LDS) of a block.
    offsets: of each parameter in the parameter buffer, bytes. record_bytes: of the record that
    comes first in it. parameter_bytes: of the whole. code: a cubin, or a code object.
    """

    name: str
    num_lanes: int
    shared_bytes: int
    offsets: tuple[int, ...]
    record_bytes: int
    parameter_bytes: int
    code: bytes = b""


@dataclass(frozen=True)
class TritonImage:
    """An entry's kernels. target: "cuda", "hip" or, for the interpreter, "host". arch: what they
    were compiled for. constants: what they were compiled with."""

    target: str
    arch: str
    constants: Mapping[str, int]
    kernels: tuple[TritonKernel, ...] = field(default=())


def is_triton_image(image: bytes) -> bool:
    """Whether `pack_image` has made it."""
    return image.startswith(MAGIC)


def pack_image(image: TritonImage) -> bytes:
    """One block, which `unpack_image` takes apart."""
    kernels = []
    for kernel in image.kernels:
        fields: dict[str, Any] = dict(vars(kernel))
        fields["code"] = len(kernel.code)
        kernels.append(fields)
    header = json.dumps(
        {
            "target": image.target,
            "arch": image.arch,
            "constants": dict(image.constants),
            "kernels": kernels,
        }
    ).encode()
    length = len(header).to_bytes(_LENGTH_BYTES, "little")
    return b"".join((MAGIC, length, header, *(kernel.code for kernel in image.kernels)))


def unpack_image(image: bytes) -> TritonImage:
    """What was packed. Raises ValueError for what is no such image, or not a whole one."""
    if not is_triton_image(image):
        raise ValueError("not an image of kernels in Triton")
    start = len(MAGIC) + _LENGTH_BYTES
    at = start + int.from_bytes(image[len(MAGIC) : start], "little")
    if at > len(image):
        raise ValueError(f"an image of kernels in Triton is cut off in its header: {len(image)}")
    header = json.loads(image[start:at])
    kernels = []
    for fields in header["kernels"]:
        end = at + fields["code"]
        if end > len(image):
            raise ValueError(f"an image of kernels in Triton is cut off in {fields['name']}")
        given = {**fields, "offsets": tuple(fields["offsets"]), "code": image[at:end]}
        kernels.append(TritonKernel(**given))
        at = end
    if at != len(image):
        raise ValueError(f"an image of kernels in Triton has {len(image) - at} bytes too many")
    return TritonImage(header["target"], header["arch"], header["constants"], tuple(kernels))
