"""Gradients of static exchanges: backward of each call is the other one, the other way round.

As of the communicator's own (fastkern.moe.autograd), whose sums they equal bit by bit: the rows'
gradients are combined without weights, the weights' as rows of K columns; the gradients of combined
tokens are dispatched again, weighted on arrival. Every rank makes all exchanges of a backward in
the same order, whatever it received, and whatever its experts did with it: gradients that do not
arrive are zeros, and a combine hangs on its dispatch by an anchor, an empty tensor. What decides is
which of x and topk_weights require a gradient; that must be the same on all ranks.

A backward goes by the handle of the last dispatch, so it comes before the next one; captured, the
graph that holds it is replayed before that of the forward is replayed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import FastkernError
from ..moe.combine_arguments import CombineCall
from ..moe.dispatch_arguments import DispatchCall
from ..moe.static_shape import Reverse, sum_dtype
from ..moe.tensor_checks import VALUE_KINDS, num_values, row_form

if TYPE_CHECKING:
    from .static_calls import DispatchMark
    from .static_exchange import StaticExchange


def differentiable_dispatch(
    exchange: StaticExchange, call: DispatchCall, xs: Sequence[Tensor], weights: Tensor | None
) -> list[Tensor]:
    """A dispatch that has been checked: its received tensors, in StaticDispatched's order.

    xs, weights: the call's tensors, as they were given.
    """
    made: tuple[Tensor, ...] = _Dispatch.apply(exchange, call, weights, *xs)  # type: ignore[no-untyped-call]
    assert exchange.last is not None
    exchange.last = replace(exchange.last, anchor=made[-1])
    return list(made[:-1])


def differentiable_combine(
    exchange: StaticExchange,
    call: CombineCall,
    mark: DispatchMark,
    expert_out: Tensor,
    weights: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """A combine that has been checked; its tensors as they were given."""
    anchor = mark.anchor
    made: Tensor = _Combine.apply(exchange, call, mark, expert_out, weights, bias, anchor)  # type: ignore[no-untyped-call]
    return made


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: StaticExchange,
        call: DispatchCall,
        weights: Tensor | None,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        made = exchange.run_dispatch(call)
        _, _, ctx.wants_weights, *ctx.wanted = ctx.needs_input_grad
        ctx.exchange, ctx.mark = exchange, exchange.last
        ctx.num_parts = len(xs)
        ctx.likes = [(r.shape, r.dtype) for r in made]
        ctx.set_materialize_grads(False)
        fixed = [r for r, wanted in zip(made, ctx.wanted, strict=False) if not wanted]
        beside = made[len(xs) :]
        if weights is not None and ctx.wants_weights:
            beside = beside[1:]
        ctx.mark_non_differentiable(*fixed, *beside)
        return *made, torch.empty(0, device=exchange.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        exchange: StaticExchange = ctx.exchange
        _check_last(exchange, ctx.mark)

        def given(k: int) -> Tensor:
            """The gradient of the k-th result; zeros where none arrives."""
            shape, dtype = ctx.likes[k]
            grad = grads[k]
            if grad is None:
                return torch.zeros(shape, dtype=dtype, device=exchange.device)
            return row_form(grad)

        of_xs = [
            _combined(exchange, ctx.mark, f"gradient {p}", given(p)) if wanted else None
            for p, wanted in enumerate(ctx.wanted)
        ]
        of_weights = None
        if ctx.wants_weights:
            columns = exchange.received.by_choice(given(ctx.num_parts))
            of_weights = _combined(exchange, ctx.mark, "gradient weights", columns)
        return None, None, of_weights, *of_xs


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: StaticExchange,
        call: CombineCall,
        mark: DispatchMark,
        expert_out: Tensor,
        weights: Tensor | None,
        bias: Tensor | None,
        anchor: Tensor | None,
    ) -> Tensor:
        *_, ctx.wants_weights, ctx.wants_bias, _ = ctx.needs_input_grad
        ctx.exchange, ctx.mark, ctx.anchored = exchange, mark, anchor is not None
        ctx.save_for_backward(
            expert_out if ctx.wants_weights else None, weights, bias if ctx.wants_bias else None
        )
        return exchange.run_combine(call, mark)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange: StaticExchange = ctx.exchange
        _check_last(exchange, ctx.mark)
        expert_out, weights, bias = ctx.saved_tensors
        missing = exchange.received.missing()  # first: what follows may be waited for by others
        again = _reverse(exchange, "gradient combined")
        rows = exchange.run_again(row_form(grad), ctx.mark, again)
        precision = sum_dtype(grad.dtype)
        of_rows, of_weights, of_bias = rows, None, None
        if weights is not None:
            wide = weights.to(precision)[(...,) + (None,) * (rows.dim() - 1)]
            of_rows = (rows.to(precision) * wide).to(rows.dtype)
        if weights is not None and expert_out is not None:
            products = rows.to(precision) * expert_out.to(precision)
            sums = products.unsqueeze(-1).flatten(1).sum(1).to(weights.dtype)
            of_weights = sums.masked_fill_(missing, 0)
        if bias is not None:
            whole = bias.dim() < grad.dim()
            of_bias = (grad.to(precision).sum(0) if whole else grad).to(bias.dtype, copy=True)
        if weights is not None:  # else zeros are there already
            of_rows = of_rows.masked_fill_(missing[(...,) + (None,) * (rows.dim() - 1)], 0)
        anchor = grad.new_zeros(0, dtype=torch.float32) if ctx.anchored else None
        return None, None, None, of_rows, of_weights, of_bias, anchor


def _combined(exchange: StaticExchange, mark: DispatchMark, name: str, rows: Tensor) -> Tensor:
    """Rows [rows, ...] summed, without weights, for the tokens [T, ...] that they came from."""
    kind = VALUE_KINDS[rows.dtype]
    call = CombineCall(
        rows,
        torch.empty(0, dtype=torch.int64),
        weights=None,
        bias=None,
        bias_stride=0,
        wire_dtype=rows.dtype,
        out=None,
        width=num_values(rows.shape[1:]),
        kinds=(kind, kind, kind),
    )
    return exchange.run_combine(call, mark, _reverse(exchange, name))


def _reverse(exchange: StaticExchange, name: str) -> Reverse:
    return next(reverse for reverse in exchange.shape.reverses if reverse.name == name)


def _check_last(exchange: StaticExchange, mark: DispatchMark) -> None:
    if exchange.last is None or exchange.last.serial != mark.serial:
        raise FastkernError(
            "static exchange: a backward after another dispatch, which has taken the place of the "
            "one that it belongs to: what is in flight beside it needs a sibling"
        )
