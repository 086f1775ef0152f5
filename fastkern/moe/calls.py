"""Dispatch and combine on plain tensors, no autograd: what the operators call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .combine_arguments import CombineCall, prepare_combine
from .counts import RouteCounts
from .dispatch_arguments import DispatchCall, DispatchOptions, prepare_dispatch
from .handle import MetaInfo, meta_info, slot_choice
from .runner import DispatchResult, MoeRunner
from .started import take_turn

__all__ = [
    "DispatchOptions",
    "DispatchResult",
    "MetaInfo",
    "combine_tensors",
    "dispatch_tensors",
    "meta_info",
    "slot_choice",
]


def dispatch_tensors(
    comm: Any,
    xs: Sequence[torch.Tensor],
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    options: DispatchOptions | None,
    meta: torch.Tensor | None = None,
    out: Sequence[torch.Tensor] | None = None,
    counts: RouteCounts | Sequence[torch.Tensor] | None = None,
    num_blocks: int | None = None,
) -> DispatchResult:
    """A dispatch; with `meta`, routing and plan of the call that made it."""
    runner: MoeRunner = comm.moe
    call: DispatchCall | Exception
    try:
        info = None if meta is None else runner.own_handle(meta)
        call = prepare_dispatch(
            xs, topk_idx, topk_weights, options, info, meta, out, runner.num_ranks, runner.device
        )
        call.num_blocks = runner.blocks.check(num_blocks)
    except Exception as error:  # the other ranks must learn of it
        call = error
    return take_turn(comm.turns, lambda: runner.dispatch(call, counts))


def combine_tensors(
    comm: Any,
    expert_out: torch.Tensor,
    meta: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    wire_dtype: torch.dtype | None,
    out: torch.Tensor | None = None,
    num_blocks: int | None = None,
) -> torch.Tensor:
    """A combine of the dispatch that made `meta`."""
    runner: MoeRunner = comm.moe
    call: CombineCall | Exception
    try:
        info = runner.own_handle(meta)
        call = prepare_combine(
            expert_out, info, meta, weights, bias, wire_dtype, out, runner.device
        )
        call.num_blocks = runner.blocks.check(num_blocks)
    except Exception as error:  # the other ranks must learn of it
        call = error
    return take_turn(comm.turns, lambda: runner.combine(call))
