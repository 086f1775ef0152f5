"""Checks of the tensors and splits of one call, and their row form."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

CPU = torch.device("cpu")


@dataclass
class RowCall:
    """One rank's side of a call.

    source: contiguous tensor that the kernel reads; target: contiguous tensor that it writes,
    `output` itself or a stand-in that is copied into it. Both are made by `start`, when the call's
    turn has come. input_splits, output_splits: [W] rows. row_bytes: None without rows to measure.
    num_blocks: of its launches; None: the usual number.
    """

    input: torch.Tensor
    output: torch.Tensor
    input_splits: list[int]
    output_splits: list[int]
    row_bytes: int | None
    dtype: str
    source: torch.Tensor = field(init=False)
    target: torch.Tensor = field(init=False)
    num_blocks: int | None = None

    def start(self) -> None:
        """Bring the input into row form; now, so that it sees what earlier calls delivered."""
        output = self.output
        with torch.no_grad():
            self.source = self.input.detach().resolve_conj().resolve_neg().contiguous()
            direct = output.is_contiguous() and not output.is_conj() and not output.is_neg()
            self.target = output if direct else output.new_empty(output.shape)
            if direct and shares_bytes(self.source, output):
                self.source = self.source.clone()

    def finish(self) -> None:
        """Bring the rows where the caller wants them."""
        inference = self.output.is_inference()
        if self.target is not self.output:
            with torch.inference_mode() if inference else torch.no_grad():
                self.output.copy_(self.target)
        elif not inference:
            torch.autograd.graph.increment_version(self.output)


def dtype_name(dtype: torch.dtype) -> str:
    """float32 rather than torch.float32."""
    return str(dtype).removeprefix("torch.")


def prepare(
    output: Any,
    input: Any,
    output_splits: Any,
    input_splits: Any,
    num_ranks: int,
    device: torch.device = CPU,
) -> RowCall:
    """Check one rank's arguments, which must be on `device`. Raises TypeError or ValueError naming
    the argument."""
    for name, tensor in (("output", output), ("input", input)):
        _check_tensor(name, tensor, device)
    if output.dtype != input.dtype:
        raise TypeError(
            f"output is {dtype_name(output.dtype)} but input is {dtype_name(input.dtype)}"
        )
    rows_in = _splits("input", input.shape[0], input_splits, num_ranks)
    rows_out = _splits("output", output.shape[0], output_splits, num_ranks)
    measured = [_row_bytes(t) for t in (input, output) if t.shape[0]]
    if len(set(measured)) > 1:
        raise ValueError(
            f"a row of input {_shape(input)} has {_row_bytes(input)} bytes, "
            f"a row of output {_shape(output)} has {_row_bytes(output)}"
        )
    if may_overlap_itself(output):
        raise ValueError(
            f"output {_shape(output)} with strides {list(output.stride())} may hold one element "
            "at several places: it cannot be written"
        )
    row_bytes = measured[0] if measured else None
    return RowCall(input, output, rows_in, rows_out, row_bytes, dtype_name(input.dtype))


def _shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise TypeError unless the tensor is where the communicator's tensors are."""
    if tensor.device != device:
        raise TypeError(f"{name} is on {tensor.device}, this communicator takes {device} tensors")


def _check_tensor(name: str, tensor: Any, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    check_device(name, tensor, device)
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise TypeError(f"{name} must be a plain dense tensor: not sparse, nested or quantized")
    if tensor.dim() == 0:
        raise ValueError(f"{name} has no dimension to split")


def _splits(name: str, num_rows: int, given: Sequence[int] | None, num_ranks: int) -> list[int]:
    if given is None or (isinstance(given, (list, tuple)) and not given):
        if num_rows % num_ranks:
            raise ValueError(
                f"{name} has {num_rows} rows, which do not divide evenly over {num_ranks} ranks; "
                f"give {name}_split_sizes"
            )
        return [num_rows // num_ranks] * num_ranks
    try:
        splits = [operator.index(k) for k in given]
    except TypeError:
        raise TypeError(f"{name}_split_sizes must be integers, not {given!r}") from None
    if len(splits) != num_ranks:
        raise ValueError(f"{name}_split_sizes has {len(splits)} entries for {num_ranks} ranks")
    for rank, rows in enumerate(splits):
        if rows < 0:
            raise ValueError(f"{name}_split_sizes[{rank}] is {rows}: rows must not be negative")
    if sum(splits) != num_rows:
        raise ValueError(f"{name}_split_sizes sum to {sum(splits)}, but {name} has {num_rows} rows")
    return splits


def _row_bytes(tensor: torch.Tensor) -> int:
    count = tensor.element_size()
    for size in tensor.shape[1:]:
        count *= size
    return count


def may_overlap_itself(tensor: torch.Tensor) -> bool:
    """True where strides do not prove that each element has a place of its own."""
    if tensor.numel() == 0:
        return False
    reach = 0  # elements below the next stride that smaller dimensions reach
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def shares_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    a_end = a.data_ptr() + a.numel() * a.element_size()
    b_end = b.data_ptr() + b.numel() * b.element_size()
    return a.data_ptr() < b_end and b.data_ptr() < a_end
