"""Dispatch and combine as PyTorch operators, which can be differentiated and compiled.

No Python object travels through the graph. A communicator is a number (exchanges.py), a handle is
its `meta` tensor. Dispatch returns one list of tensors, in which empty ones stand for what there is
not: a list, since a compiler loses sight of sizes in a tuple of an operator with an effect.

They are declared to have an effect, so that a compiler neither drops nor moves them: a rank that
has no tokens must take part in every exchange, though it gets nothing from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import autograd
from .exchanges import lookup
from .inductor_order import keep_order
from .library import operator
from .placement import Placement
from .sizes import worst_case_rows


@operator("dispatch")
def dispatch_op(
    xs: list[Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    counts: list[Tensor],
    exchange: int,
    rank: int,
    num_ranks: int,
    num_experts: int,
    expert_to_rank: list[int] | None,
    layout: str,
    expert_alignment: int,
    zero_padding: bool,
    num_max_tokens_per_rank: int | None,
    num_blocks: int | None,
) -> list[Tensor]:
    """recv of each x, recv_topk_weights, recv_topk_idx, tokens_per_expert, meta, anchor.

    rank, num_ranks: of the communicator; sizes follow from them, also for a graph that is compiled
    in one process and used in another. counts: RouteCounts as tensors, or empty. anchor: float32
    [rows, T, 0], without elements: its shape tells a compiler the sizes, and combine, which takes
    it, has its backward tied to dispatch's, also on a rank where no row leads there.
    """
    comm, functions = lookup(exchange)
    options = functions.DispatchOptions(
        num_experts,
        None if expert_to_rank is None else tuple(expert_to_rank),
        layout,
        expert_alignment,
        zero_padding,
        num_max_tokens_per_rank,
    )
    got = functions.dispatch_tensors(
        comm, xs, topk_idx, topk_weights, options, None, None, counts or None, num_blocks
    )
    nothing = topk_idx.new_empty(0)
    weights = nothing.float() if got.recv_topk_weights is None else got.recv_topk_weights
    idx = nothing.long() if got.recv_topk_idx is None else got.recv_topk_idx
    anchor = torch.empty(len(got.recv[0]), topk_idx.shape[0], 0, device=topk_idx.device)
    return [*got.recv, weights, idx, got.tokens_per_expert, got.meta, anchor]


@dispatch_op.register_fake
def _(
    xs: list[Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    counts: list[Tensor],
    exchange: int,
    rank: int,
    num_ranks: int,
    num_experts: int,
    expert_to_rank: list[int] | None,
    layout: str,
    expert_alignment: int,
    zero_padding: bool,
    num_max_tokens_per_rank: int | None,
    num_blocks: int | None,
) -> list[Tensor]:
    keep_order(OVERLOADS)
    context = torch.library.get_ctx()
    placement = Placement(int(num_experts), int(num_ranks), expert_to_rank)
    num_own_experts = int(placement.num_owned[int(rank)])
    num_tokens, topk = topk_idx.shape
    if num_max_tokens_per_rank is None:
        num_rows: Any = context.new_dynamic_size()
    else:
        num_rows = worst_case_rows(
            num_ranks, num_max_tokens_per_rank, topk, num_own_experts, expert_alignment, layout
        )
    recv = [x.new_empty(num_rows, *x.shape[1:]) for x in xs]
    weights = topk_idx.new_empty(0, dtype=torch.float32)
    if topk_weights is not None:
        weights = topk_weights.new_empty((num_rows, topk) if layout == "rank" else (num_rows,))
    idx = topk_idx.new_empty((num_rows, topk) if layout == "rank" else (0,), dtype=torch.int64)
    # counts and metadata are on the CPU, wherever the tokens are
    tokens_per_expert = torch.empty(num_own_experts, dtype=torch.int64, device="cpu")
    meta = torch.empty(context.new_dynamic_size(), dtype=torch.int64, device="cpu")
    anchor = topk_idx.new_empty((num_rows, num_tokens, 0), dtype=torch.float32)
    return [*recv, weights, idx, tokens_per_expert, meta, anchor]


@operator("dispatch_again")
def dispatch_again_op(
    xs: list[Tensor],
    topk_weights: Tensor | None,
    meta: Tensor,
    sizes: Tensor,
    recv_topk_idx: Tensor,
    exchange: int,
    num_blocks: int | None,
) -> list[Tensor]:
    """recv of each x, recv_topk_weights, tokens_per_expert, anchor: an earlier call's routing.

    sizes: the earlier call's anchor, only its shape counts. recv_topk_idx: the earlier call's in
    the rank layout, else [0].
    """
    comm, functions = lookup(exchange)
    got = functions.dispatch_tensors(
        comm, xs, None, topk_weights, None, meta, None, None, num_blocks
    )
    weights = sizes.new_empty(0) if got.recv_topk_weights is None else got.recv_topk_weights
    return [*got.recv, weights, got.tokens_per_expert, torch.empty_like(sizes)]


@dispatch_again_op.register_fake
def _(
    xs: list[Tensor],
    topk_weights: Tensor | None,
    meta: Tensor,
    sizes: Tensor,
    recv_topk_idx: Tensor,
    exchange: int,
    num_blocks: int | None,
) -> list[Tensor]:
    keep_order(OVERLOADS)
    num_rows = sizes.shape[0]
    recv = [x.new_empty(num_rows, *x.shape[1:]) for x in xs]
    weights = sizes.new_empty(0)
    if topk_weights is not None:
        by_rank = recv_topk_idx.dim() == 2
        weights = topk_weights.new_empty(recv_topk_idx.shape if by_rank else (num_rows,))
    tokens_per_expert = meta.new_empty(torch.library.get_ctx().new_dynamic_size())
    return [*recv, weights, tokens_per_expert, sizes.new_empty(sizes.shape)]


@operator("combine")
def combine_op(
    expert_out: Tensor,
    weights: Tensor | None,
    bias: Tensor | None,
    meta: Tensor,
    anchor: Tensor,
    exchange: int,
    wire_dtype: torch.dtype | None,
    num_blocks: int | None,
) -> Tensor:
    """The sums [T, ...] of the tokens; T is the anchor's."""
    comm, functions = lookup(exchange)
    result: Tensor = functions.combine_tensors(
        comm, expert_out, meta, weights, bias, wire_dtype, None, num_blocks
    )
    return result


@combine_op.register_fake
def _(
    expert_out: Tensor,
    weights: Tensor | None,
    bias: Tensor | None,
    meta: Tensor,
    anchor: Tensor,
    exchange: int,
    wire_dtype: torch.dtype | None,
    num_blocks: int | None,
) -> Tensor:
    keep_order(OVERLOADS)
    return expert_out.new_empty(anchor.shape[1], *expert_out.shape[1:])


dispatch_op.register_autograd(autograd.dispatch_backward, setup_context=autograd.dispatch_setup)
dispatch_again_op.register_autograd(
    autograd.dispatch_again_backward, setup_context=autograd.dispatch_again_setup
)
combine_op.register_autograd(autograd.combine_backward, setup_context=autograd.combine_setup)
_OPS = (dispatch_op, dispatch_again_op, combine_op, *autograd.OPS)
for _op in _OPS:
    _op.register_effect()
OVERLOADS = tuple(_op.overload for _op in _OPS)
