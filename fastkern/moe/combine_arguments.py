"""Checks of the arguments of combine, and their row form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..tensors import CPU, dtype_name
from .handle import MetaInfo
from .tensor_checks import (
    VALUE_KINDS,
    aligned_row,
    check_dense,
    check_floating,
    check_out,
    check_row_size,
    num_values,
    row_form,
)


@dataclass
class CombineCall:
    """One rank's side of a combine, checked.

    expert_out: [rows, ...] contiguous. weights, bias: in a dtype that the kernel reads. width:
    values of a row. kinds: of values, wire and bias, as the kernel numbers them. num_blocks: of
    its launch; None: the usual number.
    """

    expert_out: torch.Tensor
    meta: torch.Tensor
    weights: torch.Tensor | None
    bias: torch.Tensor | None
    bias_stride: int
    wire_dtype: torch.dtype
    out: torch.Tensor | None
    width: int
    kinds: tuple[int, int, int]
    num_blocks: int | None = None

    @property
    def sum_bytes(self) -> int:
        """Bytes of a value of a sum."""
        return 8 if self.expert_out.dtype == torch.float64 else 4

    @property
    def row_bytes(self) -> int:
        """Bytes of a row between servers."""
        return aligned_row(self.width * self.wire_dtype.itemsize)

    @property
    def partial_row_bytes(self) -> int:
        """Bytes of a rank's sum inside a server."""
        return aligned_row(self.width * self.sum_bytes)

    def agreement(self, serial: int) -> str:
        """All that the ranks must have in common, as text."""
        return (
            f"rows {[*self.expert_out.shape[1:]]}, {dtype_name(self.wire_dtype)} between servers, "
            f"handle of call {serial}"
        )


def prepare_combine(
    expert_out: Any,
    info: MetaInfo,
    meta: torch.Tensor,
    weights: Any,
    bias: Any,
    wire_dtype: torch.dtype | None,
    out: Any,
    device: torch.device = CPU,
) -> CombineCall:
    """Check one rank's arguments. Raises TypeError or ValueError naming the argument.

    device: where all tensors must be.
    """
    check_dense("expert_out", expert_out, device)
    if expert_out.dtype not in VALUE_KINDS:
        raise TypeError(
            "expert_out must be float64, float32, bfloat16 or float16, "
            f"not {dtype_name(expert_out.dtype)}"
        )
    if expert_out.dim() == 0 or expert_out.shape[0] != info.num_recv_rows:
        raise ValueError(
            f"expert_out {list(expert_out.shape)} must have the {info.num_recv_rows} rows that "
            "the dispatch received"
        )
    sum_dtype = torch.float64 if expert_out.dtype == torch.float64 else torch.float32
    wire = expert_out.dtype if wire_dtype is None else wire_dtype
    if wire not in (expert_out.dtype, sum_dtype):
        names = sorted({dtype_name(expert_out.dtype), dtype_name(sum_dtype)})
        raise TypeError(
            f"wire_dtype must be {' or '.join(names)} for {dtype_name(expert_out.dtype)}, "
            f"not {wire}"
        )
    shape = tuple(expert_out.shape[1:])
    width = num_values(shape)
    check_row_size(aligned_row(width * sum_dtype.itemsize))
    if weights is not None:
        check_floating("weights", weights, device)
        if tuple(weights.shape) != (info.num_recv_rows,):
            raise ValueError(
                f"weights {list(weights.shape)} must have one entry for each of the "
                f"{info.num_recv_rows} rows of expert_out"
            )
        weights = row_form(weights).to(sum_dtype)
    stride = 0
    if bias is not None:
        check_floating("bias", bias, device)
        if tuple(bias.shape) not in (shape, (info.num_tokens, *shape)):
            raise ValueError(
                f"bias {list(bias.shape)} must be {list(shape)} or {[info.num_tokens, *shape]}"
            )
        bias = row_form(bias)
        if sum_dtype == torch.float64 or bias.dtype == torch.float64:
            bias = bias.to(sum_dtype)
        stride = width * bias.element_size() if bias.dim() > len(shape) else 0
    if out is not None:
        check_out("out", out, expert_out)
        if out.shape[0] != info.num_tokens:
            raise ValueError(f"out has {out.shape[0]} rows for {info.num_tokens} tokens")
    kinds = (
        VALUE_KINDS[expert_out.dtype],
        VALUE_KINDS[wire],
        VALUE_KINDS[expert_out.dtype if bias is None else bias.dtype],
    )
    return CombineCall(row_form(expert_out), meta, weights, bias, stride, wire, out, width, kinds)
