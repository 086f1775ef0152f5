"""Gradients of static exchanges: backward of each call is the other one, the other way round.

As of the communicator's own (fastkern.moe.autograd), whose sums they equal bit by bit: the rows'
gradients are combined without weights, the weights' as rows of K columns; the gradients of combined
tokens are dispatched again, weighted on arrival. Every rank makes all exchanges of a backward in
the same order, whatever it received: gradients that do not arrive are zeros.

A backward goes by the handle of the last dispatch, so it comes before the next one; captured, the
graph that holds it is replayed before that of the forward is replayed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import FastkernError
from ..moe.combine_arguments import CombineCall
from ..moe.dispatch_arguments import DispatchCall
from ..moe.static_shape import Reverse, sum_dtype
from ..moe.tensor_checks import VALUE_KINDS, num_values, row_form

if TYPE_CHECKING:
    from .static_exchange import StaticExchange


def differentiable_dispatch(
    exchange: StaticExchange, call: DispatchCall, xs: Sequence[Tensor], weights: Tensor | None
) -> list[Tensor]:
    """A dispatch that has been checked: its received tensors, in StaticDispatched's order.

    xs, weights: the call's tensors, as they were given.
    """
    made: tuple[Tensor, ...] = _Dispatch.apply(exchange, call, weights, *xs)  # type: ignore[no-untyped-call]
    return list(made)


def differentiable_combine(
    exchange: StaticExchange,
    call: CombineCall,
    expert_out: Tensor,
    weights: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """A combine that has been checked; its tensors as they were given."""
    made: Tensor = _Combine.apply(exchange, call, expert_out, weights, bias)  # type: ignore[no-untyped-call]
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
        ctx.exchange, ctx.serial = exchange, exchange.serial
        ctx.num_parts = len(xs)
        ctx.likes = [(r.shape, r.dtype) for r in made]
        ctx.set_materialize_grads(False)
        fixed = [r for r, wanted in zip(made, ctx.wanted, strict=False) if not wanted]
        beside = made[len(xs) :]
        if weights is not None and ctx.wants_weights:
            beside = beside[1:]
        ctx.mark_non_differentiable(*fixed, *beside)
        return tuple(made)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        exchange: StaticExchange = ctx.exchange
        _check_serial(exchange, ctx.serial)

        def given(k: int) -> Tensor:
            """The gradient of the k-th result; zeros where none arrives."""
            shape, dtype = ctx.likes[k]
            grad = grads[k]
            if grad is None:
                return torch.zeros(shape, dtype=dtype, device=exchange.device)
            return row_form(grad)

        of_xs = [
            _combined(exchange, f"gradient {p}", given(p)) if wanted else None
            for p, wanted in enumerate(ctx.wanted)
        ]
        of_weights = None
        if ctx.wants_weights:
            columns = exchange.received.by_choice(given(ctx.num_parts))
            of_weights = _combined(exchange, "gradient weights", columns)
        return None, None, of_weights, *of_xs


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: StaticExchange,
        call: CombineCall,
        expert_out: Tensor,
        weights: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        _, _, _, ctx.wants_weights, ctx.wants_bias = ctx.needs_input_grad
        ctx.exchange, ctx.serial = exchange, exchange.serial
        ctx.save_for_backward(
            expert_out if ctx.wants_weights else None, weights, bias if ctx.wants_bias else None
        )
        return exchange.run_combine(call)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange: StaticExchange = ctx.exchange
        _check_serial(exchange, ctx.serial)
        expert_out, weights, bias = ctx.saved_tensors
        rows = exchange.run_again(row_form(grad), _reverse(exchange, "gradient combined"))
        precision, missing = sum_dtype(grad.dtype), exchange.received.missing()
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
        of_rows = of_rows.masked_fill(missing[(...,) + (None,) * (rows.dim() - 1)], 0)
        return None, None, of_rows, of_weights, of_bias


def _combined(exchange: StaticExchange, name: str, rows: Tensor) -> Tensor:
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
    return exchange.run_combine(call, _reverse(exchange, name))


def _reverse(exchange: StaticExchange, name: str) -> Reverse:
    return next(reverse for reverse in exchange.shape.reverses if reverse.name == name)


def _check_serial(exchange: StaticExchange, serial: int) -> None:
    if exchange.serial != serial:
        raise FastkernError(
            "static exchange: a backward after another dispatch, which has taken the place of the "
            "one that it belongs to: two in flight need two exchanges"
        )
