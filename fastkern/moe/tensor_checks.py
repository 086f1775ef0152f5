"""Checks and forms of tensors that dispatch and combine share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..tensors import CPU, check_device, dtype_name, may_overlap_itself, shares_bytes

VALUE_KINDS = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
ALIGN = 16  # parts of a row, and rows, lie at multiples of it


def aligned(num_bytes: int) -> int:
    """Rounded up to a multiple of ALIGN."""
    return -(-num_bytes // ALIGN) * ALIGN


def aligned_row(num_bytes: int) -> int:
    """Bytes of a row that moves: rounded up, and at least one unit."""
    return max(ALIGN, aligned(num_bytes))


def check_row_size(num_bytes: int) -> None:
    """Raise ValueError unless the kernels can count a row's bytes in 32 bits."""
    if num_bytes >= 1 << 32:
        raise ValueError(f"rows of {num_bytes} bytes: less than 4 GiB can be moved as one")


def row_form(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values, contiguous."""
    with torch.no_grad():
        return tensor.detach().resolve_conj().resolve_neg().contiguous()


def with_target(
    out: torch.Tensor | None,
    rows: int,
    like: torch.Tensor,
    inputs: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """Where the kernel writes: `out` itself if it can, else fresh memory of the same shape.

    It cannot where the kernel still reads: inputs.
    """
    read = [t for t in inputs if t is not None]
    if out is not None and out.is_contiguous() and not any(shares_bytes(out, t) for t in read):
        return out
    return like.new_empty((rows, *like.shape[1:]))


def check_dense(name: str, tensor: Any, device: torch.device = CPU) -> None:
    """Raise TypeError unless it is a dense tensor on the device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, not {tensor.layout}")
    check_device(name, tensor, device)


def check_floating(name: str, tensor: Any, device: torch.device = CPU) -> None:
    """Raise TypeError unless it holds values that a combine can sum."""
    check_dense(name, tensor, device)
    if tensor.dtype not in VALUE_KINDS:
        raise TypeError(
            f"{name} must be float64, float32, bfloat16 or float16, not {dtype_name(tensor.dtype)}"
        )


def check_out(name: str, out: Any, like: torch.Tensor) -> None:
    """Raise TypeError or ValueError unless it can hold rows like those of `like`."""
    check_dense(name, out, like.device)
    if out.dtype != like.dtype:
        raise TypeError(f"{name} is {dtype_name(out.dtype)}, its rows are {dtype_name(like.dtype)}")
    if tuple(out.shape[1:]) != tuple(like.shape[1:]) or out.dim() == 0:
        raise ValueError(f"{name} {list(out.shape)} must hold rows of {list(like.shape[1:])}")
    if may_overlap_itself(out):
        raise ValueError(
            f"{name} {list(out.shape)} with strides {list(out.stride())} may hold one element at "
            "several places: it cannot be written"
        )


def num_values(shape: Sequence[int]) -> int:
    """Product of the sizes."""
    count = 1
    for size in shape:
        count *= size
    return count


def row_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a row."""
    return tensor.element_size() * num_values(tensor.shape[1:])
