"""The backward of dispatch and combine: each is the other one, the other way round.

Backward of dispatch: the rows' gradients are combined, without weights, into those of the tokens;
the gradients of recv_topk_weights are combined as rows of topk columns. Backward of combine: the
tokens' gradients are dispatched to the rows and weighted; a weight's gradient is the product of its
row with its row's gradient. Integers have no gradient.

Every rank must issue the same exchanges in the same order, whatever it received. So a backward
issues them all: gradients that do not arrive, because nothing that was received counts in the loss
of this rank, are zeros. What decides is which of dispatch's inputs require a gradient; that must be
the same on all ranks, as must whether gradients are enabled. Of combine's inputs none decides: its
backward has one exchange, always. On every rank the loss must depend on what combine (or, without
one, dispatch) returned.

Padding rows get zeros as gradients, and those that they get count nowhere. But a layer that
computes with padding which nobody wrote has it in its own weights' gradients, since 0 * NaN is NaN:
zero_padding is for that.

Backward's exchanges are launched with the num_blocks of the call that they belong to.

A derivative of second order is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import FastkernError
from .exchanges import lookup
from .library import operator

# -- dispatch ------------------------------------------------------------------------------------


@operator("dispatch_backward")
def dispatch_backward_op(
    grads: list[Tensor],
    grad_weights: Tensor | None,
    meta: Tensor,
    recv_topk_idx: Tensor,
    exchange: int,
    num_tokens: int,
    topk: int,
    num_blocks: int | None,
) -> list[Tensor]:
    """[T, ...] of each of the rows' gradients, then [T, K] of those of the weights.

    grads: [rows, ...]. grad_weights: [rows], or [rows, K] in the rank layout. recv_topk_idx:
    [rows, K] in the rank layout, else [0]. num_tokens, topk: T and K.
    """
    comm, functions = lookup(exchange)
    rows = list(grads)
    if grad_weights is not None and recv_topk_idx.dim() == 1:
        choice = functions.slot_choice(meta).unsqueeze(1)
        columns = torch.arange(topk, device=choice.device)
        rows.append(torch.where(choice == columns, grad_weights.unsqueeze(1), 0))
    elif grad_weights is not None:
        rows.append(torch.where(recv_topk_idx >= 0, grad_weights, 0))
    return [
        functions.combine_tensors(comm, r, meta, None, None, None, None, num_blocks) for r in rows
    ]


@dispatch_backward_op.register_fake
def _(
    grads: list[Tensor],
    grad_weights: Tensor | None,
    meta: Tensor,
    recv_topk_idx: Tensor,
    exchange: int,
    num_tokens: int,
    topk: int,
    num_blocks: int | None,
) -> list[Tensor]:
    made = [grad.new_empty(num_tokens, *grad.shape[1:]) for grad in grads]
    return made if grad_weights is None else [*made, grad_weights.new_empty(num_tokens, topk)]


def dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    xs, topk_idx, topk_weights, counts, exchange, *_, num_blocks = inputs
    *recv, recv_topk_weights, recv_topk_idx, _, meta, _ = output
    received = (recv, recv_topk_weights, recv_topk_idx)
    _setup(ctx, xs, topk_weights, received, meta, (exchange, *topk_idx.shape, num_blocks))
    ctx.num_counts = len(counts)


def dispatch_again_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    xs, topk_weights, meta, sizes, recv_topk_idx, exchange, num_blocks = inputs
    *recv, recv_topk_weights, _, _ = output
    topk = 0 if topk_weights is None else topk_weights.shape[1]
    received = (recv, recv_topk_weights, recv_topk_idx)
    _setup(ctx, xs, topk_weights, received, meta, (exchange, sizes.shape[1], topk, num_blocks))


def _setup(
    ctx: Any,
    xs: list[Tensor],
    topk_weights: Tensor | None,
    received: tuple[list[Tensor], Tensor, Tensor],
    meta: Tensor,
    numbers: tuple[int, int, int, int | None],
) -> None:
    """Keep what the backward needs; received tensors require a gradient where those sent do."""
    recv, recv_topk_weights, recv_topk_idx = received
    ctx.set_materialize_grads(False)
    ctx.wanted = [x.requires_grad for x in xs]
    ctx.wants_weights = topk_weights is not None and topk_weights.requires_grad
    fixed = [r for r, wanted in zip(recv, ctx.wanted, strict=True) if not wanted]
    ctx.mark_non_differentiable(*fixed, *([] if ctx.wants_weights else [recv_topk_weights]))
    ctx.save_for_backward(meta, recv_topk_idx)
    ctx.device = recv_topk_weights.device
    ctx.likes = [(r.shape, r.dtype) for r in (*recv, recv_topk_weights)]
    ctx.numbers = numbers


def dispatch_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    of_xs, of_weights = _dispatch_backward(ctx, grads)
    return of_xs, None, of_weights, [None] * ctx.num_counts, *[None] * 10


def dispatch_again_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    of_xs, of_weights = _dispatch_backward(ctx, grads)
    return of_xs, of_weights, *[None] * 5


def _dispatch_backward(
    ctx: Any, grads: list[Tensor | None]
) -> tuple[list[Tensor | None], Tensor | None]:
    """The gradients of each x and of topk_weights, None for those that none is wanted of."""
    meta, recv_topk_idx = ctx.saved_tensors
    wanted = [*ctx.wanted, ctx.wants_weights]
    there = [
        torch.zeros(shape, dtype=dtype, device=ctx.device) if grad is None else grad
        for grad, (shape, dtype), want in zip(grads, ctx.likes, wanted, strict=False)
        if want
    ]
    weights = there.pop() if ctx.wants_weights else None
    made = iter(dispatch_backward_op(there, weights, meta, recv_topk_idx, *ctx.numbers))
    each = [next(made) if want else None for want in wanted]
    return each[:-1], each[-1]


# -- combine -------------------------------------------------------------------------------------


@operator("combine_backward")
def combine_backward_op(
    grad_out: Tensor,
    expert_out: Tensor | None,
    weights: Tensor | None,
    bias: Tensor | None,
    meta: Tensor,
    anchor: Tensor,
    exchange: int,
    num_blocks: int | None,
) -> list[Tensor]:
    """The gradients of expert_out [rows, ...], of weights [rows] and of bias, for those given.

    grad_out: [T, ...]. expert_out: given where the weights' gradient is wanted. bias: given where
    its gradient is wanted. anchor: see operators.dispatch_op.
    """
    comm, functions = lookup(exchange)
    got = functions.dispatch_tensors(
        comm, [grad_out], None, None, None, meta, None, None, num_blocks
    )
    grad_rows = got.recv[0]
    if got.recv_topk_idx is None:
        padding = functions.slot_choice(meta) < 0
    else:
        padding = (got.recv_topk_idx < 0).all(1)
    precision = torch.float64 if grad_out.dtype == torch.float64 else torch.float32
    grad_expert_out = grad_rows
    if weights is not None:
        wide = weights.to(precision)[(...,) + (None,) * (grad_rows.dim() - 1)]
        grad_expert_out = (grad_rows.to(precision) * wide).to(grad_rows.dtype)
    made = [_without_rows(grad_expert_out, padding)]
    if weights is not None and expert_out is not None:
        products = grad_rows.to(precision) * expert_out.to(precision)
        sums = products.unsqueeze(-1).flatten(1).sum(1).to(weights.dtype)
        made.append(_without_rows(sums, padding))
    if bias is not None:
        whole = bias.dim() < grad_out.dim()
        grad_bias = grad_out.to(precision).sum(0) if whole else grad_out
        made.append(grad_bias.to(bias.dtype, copy=True))
    return made


def _without_rows(rows: Tensor, padding: Tensor) -> Tensor:
    """Rows [rows, ...] with zeros where padding [rows] says so, which may hold anything now."""
    if rows.device.type == "cpu":
        return rows.index_fill_(0, padding.nonzero().squeeze(1), 0)
    return rows.masked_fill_(padding[(...,) + (None,) * (rows.dim() - 1)], 0)  # nobody waits


@combine_backward_op.register_fake
def _(
    grad_out: Tensor,
    expert_out: Tensor | None,
    weights: Tensor | None,
    bias: Tensor | None,
    meta: Tensor,
    anchor: Tensor,
    exchange: int,
    num_blocks: int | None,
) -> list[Tensor]:
    made = [grad_out.new_empty(anchor.shape[0], *grad_out.shape[1:])]
    if weights is not None and expert_out is not None:
        made.append(weights.new_empty(weights.shape))
    return made if bias is None else [*made, bias.new_empty(bias.shape)]


def combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    expert_out, weights, bias, meta, anchor, exchange, _, num_blocks = inputs
    ctx.wants_weights = weights is not None and weights.requires_grad
    ctx.wants_bias = bias is not None and bias.requires_grad
    ctx.save_for_backward(
        expert_out if ctx.wants_weights else None,
        weights,
        bias if ctx.wants_bias else None,
        meta,
        anchor,
    )
    ctx.numbers = (exchange, num_blocks)


def combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    made = iter(combine_backward_op(grad, *ctx.saved_tensors, *ctx.numbers))
    of_rows = next(made)
    of_weights = next(made) if ctx.wants_weights else None
    of_bias = next(made) if ctx.wants_bias else None
    return of_rows, of_weights, of_bias, *[None] * 5


# -- second order --------------------------------------------------------------------------------


def _refuse(ctx: Any, *grads: Any) -> None:
    raise FastkernError("dispatch and combine have no derivative of second order")


OPS = (dispatch_backward_op, combine_backward_op)
for _op in OPS:
    _op.register_autograd(_refuse)
