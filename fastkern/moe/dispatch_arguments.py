"""Checks of the arguments of dispatch, and their row form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..tensors import CPU, dtype_name, shares_bytes
from .handle import ENTRY_BYTES, LAYOUTS, MOST_CHOICES, MOST_PARTS, MetaInfo
from .placement import Placement
from .tensor_checks import (
    ALIGN,
    aligned,
    check_dense,
    check_out,
    check_row_size,
    row_bytes,
    row_form,
)

_MOST_CHOICES_OF_A_RANK = (1 << 32) - 2


@dataclass(frozen=True)
class DispatchOptions:
    """What all ranks say alike; see Communicator.dispatch."""

    num_experts: int
    expert_to_rank: tuple[int, ...] | None = None
    layout: str = "expert"
    expert_alignment: int = 1
    zero_padding: bool = False
    num_max_tokens_per_rank: int | None = None


@dataclass(frozen=True)
class RowFormat:
    """How a token's row is laid out: byte offsets of its parts, and its size.

    part_bytes, offsets: of each payload tensor. weight_bytes: of one weight, 0 without any.
    """

    part_bytes: tuple[int, ...]
    offsets: tuple[int, ...]
    weight_bytes: int
    weights_offset: int
    header_offset: int
    row_bytes: int

    @classmethod
    def of(cls, part_bytes: Sequence[int], weight_bytes: int, topk: int) -> RowFormat:
        """The format for parts of these sizes."""
        at, offsets = 0, []
        for size in part_bytes:
            offsets.append(at)
            at += aligned(size)
        weights_at = at
        at += aligned(weight_bytes * topk)
        total = at + aligned(ENTRY_BYTES * topk)
        return cls(
            tuple(part_bytes), tuple(offsets), weight_bytes, weights_at, at, max(total, ALIGN)
        )


@dataclass
class DispatchCall:
    """One rank's side of a dispatch, checked.

    xs: [T, ...] contiguous. topk_idx: [T, K] contiguous, or None with a handle. weights: [T, K] or
    None. out: given by the caller, or None. num_blocks: of its launch; None: the usual number.
    """

    xs: list[torch.Tensor]
    topk_idx: torch.Tensor | None
    weights: torch.Tensor | None
    options: DispatchOptions | None
    meta: torch.Tensor | None
    out: list[torch.Tensor] | None
    num_tokens: int
    topk: int
    format: RowFormat
    num_blocks: int | None = None

    @property
    def dtypes(self) -> str:
        """The payloads' dtypes, for the agreement."""
        return ",".join(dtype_name(x.dtype) for x in self.xs)

    def agreement(self, serial: int | None) -> str:
        """All that the ranks must have in common, as text."""
        shapes = [[*x.shape[1:]] for x in self.xs]
        text = f"payload rows {shapes}, top {self.topk}"
        text += f", weights of {self.format.weight_bytes} bytes"
        if serial is not None:
            return f"{text}, handle of call {serial}"
        o = self.options
        assert o is not None
        text += f", {o.num_experts} experts, {o.layout} layout, alignment {o.expert_alignment}"
        text += f", at most {o.num_max_tokens_per_rank} tokens per rank"
        if o.expert_to_rank is not None:
            text += f", expert_to_rank {list(o.expert_to_rank)}"
        return text


def prepare_dispatch(
    xs: Sequence[Any],
    topk_idx: Any,
    topk_weights: Any,
    options: DispatchOptions | None,
    info: MetaInfo | None,
    meta: torch.Tensor | None,
    out: Sequence[Any] | None,
    num_ranks: int,
    device: torch.device = CPU,
) -> DispatchCall:
    """Check one rank's arguments. Raises TypeError or ValueError naming the argument.

    device: where all tensors must be.
    """
    if not 1 <= len(xs) <= MOST_PARTS:
        raise ValueError(f"x: {len(xs)} tensors; 1 to {MOST_PARTS} travel together")
    for k, x in enumerate(xs):
        check_dense(f"x[{k}]" if len(xs) > 1 else "x", x, device)
        if x.dim() == 0:
            raise ValueError("x has no dimension to hold tokens")
    num_tokens = xs[0].shape[0]
    for k, x in enumerate(xs):
        if x.shape[0] != num_tokens:
            raise ValueError(f"x[{k}] has {x.shape[0]} tokens, x[0] has {num_tokens}")
    if info is None:
        if options is None or meta is not None:
            raise ValueError("dispatch needs num_experts, or the handle of an earlier call")
        check_options(options, num_ranks)
        topk = _check_indices(topk_idx, num_tokens, device)
        limit = options.num_max_tokens_per_rank
        if limit is not None and num_tokens > limit:
            raise ValueError(f"{num_tokens} tokens, but num_max_tokens_per_rank is {limit}")
    else:
        topk = info.topk
        if options is not None:
            raise ValueError(
                "handle: num_experts, expert_to_rank, layout, alignment, padding and limits are "
                "those of the call that made it"
            )
        if topk_idx is not None:
            raise ValueError("topk_idx and handle: the handle has the routing already")
        if num_tokens != info.num_tokens:
            raise ValueError(
                f"x has {num_tokens} tokens, but the handle's call had {info.num_tokens}"
            )
    if topk_weights is not None:
        check_dense("topk_weights", topk_weights, device)
        if topk_weights.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"topk_weights must be float32 or float64, not {dtype_name(topk_weights.dtype)}"
            )
        if tuple(topk_weights.shape) != (num_tokens, topk):
            raise ValueError(
                f"topk_weights {list(topk_weights.shape)} must have the shape of the choices, "
                f"[{num_tokens}, {topk}]"
            )
    weight_bytes = 0 if topk_weights is None else topk_weights.element_size()
    form = RowFormat.of([row_bytes(x) for x in xs], weight_bytes, topk)
    check_row_size(form.row_bytes)
    outs = None
    if out is not None:
        outs = list(out)
        if len(outs) != len(xs):
            raise ValueError(f"out: {len(outs)} tensors for {len(xs)} of x")
        for o, x in zip(outs, xs, strict=True):
            check_out("out", o, x)
        rows = outs[0].shape[0] if info is None else info.num_recv_rows
        for o in outs:
            if o.shape[0] != rows:
                raise ValueError(f"out has {o.shape[0]} rows, but {rows} are received")
        for k, o in enumerate(outs):
            others = [other for other in outs[:k] if other.is_contiguous()]
            if o.is_contiguous() and any(shares_bytes(o, other) for other in others):
                raise ValueError(f"out[{k}] shares memory with another tensor of out")
    return DispatchCall(
        [row_form(x) for x in xs],
        None if topk_idx is None else row_form(topk_idx),
        None if topk_weights is None else row_form(topk_weights),
        options,
        meta,
        outs,
        num_tokens,
        topk,
        form,
    )


def check_options(o: DispatchOptions, num_ranks: int) -> None:
    """Raise TypeError or ValueError naming the option."""
    Placement(o.num_experts, num_ranks, o.expert_to_rank)
    if o.layout not in LAYOUTS:
        raise ValueError(f'layout must be "expert" or "rank", not {o.layout!r}')
    for name in ("expert_alignment", "num_max_tokens_per_rank"):
        value = getattr(o, name)
        if value is None and name == "num_max_tokens_per_rank":
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be a whole number, not {value!r}")
        least = 1 if name == "expert_alignment" else 0
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")


def _check_indices(topk_idx: Any, num_tokens: int, device: torch.device) -> int:
    check_dense("topk_idx", topk_idx, device)
    if topk_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_idx must be int32 or int64, not {dtype_name(topk_idx.dtype)}")
    if topk_idx.dim() != 2 or topk_idx.shape[0] != num_tokens:
        raise ValueError(f"topk_idx {list(topk_idx.shape)} must be [{num_tokens} tokens, K]")
    topk = topk_idx.shape[1]
    if not 1 <= topk <= MOST_CHOICES:
        raise ValueError(f"topk_idx has {topk} choices per token, not 1 to {MOST_CHOICES}")
    if num_tokens * topk > _MOST_CHOICES_OF_A_RANK:
        raise ValueError(f"{num_tokens} tokens with {topk} choices are more than 2^32 - 2")
    return int(topk)
