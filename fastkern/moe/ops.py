"""What Communicator's dispatch and combine call: from arguments to operators and back.

All of it can be traced by torch.compile: it looks at no count and at no received number of rows.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .counts import RouteCounts
from .exchanges import functions_of
from .handle import Handle
from .library import check_compiler
from .operators import combine_op, dispatch_again_op, dispatch_op

_NO_OPTIONS = (None, None, "expert", 1, False, None)  # as a call with a handle leaves them
SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # what combine takes


def dispatch(
    comm: Any,
    x: Tensor | Sequence[Tensor],
    topk_idx: Tensor | None = None,
    topk_weights: Tensor | None = None,
    *,
    num_experts: int | None = None,
    expert_to_rank: Sequence[int] | None = None,
    layout: str = "expert",
    expert_alignment: int = 1,
    zero_padding: bool = False,
    num_max_tokens_per_rank: int | None = None,
    host_counts: bool = True,
    counts: RouteCounts | None = None,
    handle: Handle | None = None,
    out: Tensor | Sequence[Tensor] | None = None,
    num_blocks: int | None = None,
) -> tuple[Any, Tensor | None, Tensor, Handle]:
    """recv_x, recv_topk_weights, tokens_per_expert, handle: see Communicator.dispatch.

    comm: has rank, num_ranks and exchange_number. Raises TypeError or ValueError where a gradient
    is asked for that cannot be had; all else is found where the ranks exchange their arguments.
    """
    check_compiler()
    one = not isinstance(x, (list, tuple))
    xs: list[Any] = [x] if one else list(x)
    outs: Any = [out] if one and out is not None else out
    _check_gradients([*xs, topk_weights], outs)
    options = (
        num_experts,
        expert_to_rank,
        layout,
        expert_alignment,
        zero_padding,
        num_max_tokens_per_rank,
    )
    given = (topk_idx, topk_weights, getattr(handle, "meta", None))
    tensors = _tensors(*xs, *(t for t in given if t is not None))
    carried = _carried(options, counts) if handle is None else None
    launched = _is_number(num_blocks)
    past = (comm, xs, topk_idx, topk_weights, options, counts, handle, outs, num_blocks)
    if outs is not None and not torch.compiler.is_compiling():
        moved = _dispatch_past(*past)
    elif carried is not None and tensors and launched and isinstance(topk_idx, Tensor):
        moved = _dispatch(comm, xs, topk_idx, topk_weights, *carried, num_blocks)
    elif handle is not None and _reusable(handle, topk_idx, options) and tensors and launched:
        moved = _dispatch_again(comm, xs, topk_weights, handle, num_blocks)
    else:
        _dispatch_past(*past)
        raise TypeError("dispatch: an argument is of a type that it cannot take")
    recv, recv_topk_weights, tokens_per_expert, made = moved
    if outs is not None and torch.compiler.is_compiling():
        recv = [there.copy_(tensor) for there, tensor in zip(outs, recv, strict=True)]
    made.host_counts = host_counts
    _let_go_after_backward(made)
    return recv[0] if one else recv, recv_topk_weights, tokens_per_expert, made


def combine(
    comm: Any,
    expert_out: Tensor,
    handle: Handle,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    wire_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    *,
    num_blocks: int | None = None,
) -> Tensor:
    """The tokens' sums [T, ...]: see Communicator.combine; errors as those of `dispatch`."""
    check_compiler()
    _check_gradients([expert_out, weights, bias], out)
    given = [t for t in (weights, bias) if t is not None]
    carried = (
        isinstance(handle, Handle)
        and _tensors(handle.meta, expert_out, *given)
        and isinstance(wire_dtype, (torch.dtype, type(None)))
        and _is_number(num_blocks)
    )
    if not carried or (out is not None and not torch.compiler.is_compiling()):
        meta = getattr(handle, "meta", handle)
        with torch.no_grad():  # raises what is wrong, on all ranks
            past: Tensor = functions_of(comm).combine_tensors(
                comm, expert_out, meta, weights, bias, wire_dtype, out, num_blocks
            )
        if not carried:
            raise TypeError("combine: an argument is of a type that it cannot take")
        return past
    made: Tensor = combine_op(
        expert_out,
        weights,
        bias,
        handle.meta,
        _anchor(comm, handle),
        comm.exchange_number,
        wire_dtype,
        num_blocks,
    )
    return made if out is None else out.copy_(made)


# -- inside ----------------------------------------------------------------------------------------

# recv, recv_topk_weights, tokens_per_expert, handle
_Moved = tuple[list[Tensor], Tensor | None, Tensor, Handle]


def _dispatch(
    comm: Any,
    xs: list[Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    options: tuple[Any, ...],
    counts: list[Tensor],
    num_blocks: int | None,
) -> _Moved:
    *recv, weights, idx, tokens_per_expert, meta, anchor = dispatch_op(
        xs,
        topk_idx,
        topk_weights,
        counts,
        comm.exchange_number,
        comm.rank,
        comm.num_ranks,
        *options,
        num_blocks,
    )
    made = Handle(meta, idx if idx.dim() == 2 else None)
    made.anchor = anchor
    return recv, None if topk_weights is None else weights, tokens_per_expert, made


def _dispatch_again(
    comm: Any,
    xs: list[Tensor],
    topk_weights: Tensor | None,
    handle: Handle,
    num_blocks: int | None,
) -> _Moved:
    idx = handle.recv_topk_idx
    *recv, weights, tokens_per_expert, anchor = dispatch_again_op(
        xs,
        topk_weights,
        handle.meta,
        _anchor(comm, handle).detach(),
        handle.meta.new_empty(0) if idx is None else idx,
        comm.exchange_number,
        num_blocks,
    )
    made = Handle(handle.meta, idx)
    made.anchor = anchor
    return recv, None if topk_weights is None else weights, tokens_per_expert, made


@torch.no_grad()
def _dispatch_past(
    comm: Any,
    xs: list[Any],
    topk_idx: Any,
    topk_weights: Any,
    options: tuple[Any, ...],
    counts: Any,
    handle: Any,
    outs: Any,
    num_blocks: Any,
) -> _Moved:
    """Past the operators: into given tensors, or to raise what is wrong, on all ranks."""
    functions = functions_of(comm)
    num_experts, owners, *others = options
    chosen, meta = None, getattr(handle, "meta", handle)
    if handle is None or options != _NO_OPTIONS:
        owners = tuple(owners) if isinstance(owners, list) else owners
        chosen = functions.DispatchOptions(num_experts, owners, *others)
    got = functions.dispatch_tensors(
        comm, xs, topk_idx, topk_weights, chosen, meta, outs, counts, num_blocks
    )
    made = Handle(got.meta, got.recv_topk_idx)
    return got.recv, got.recv_topk_weights, got.tokens_per_expert, made


def _reusable(handle: Any, topk_idx: Any, options: tuple[Any, ...]) -> bool:
    """Whether an operator can dispatch on the routes of an earlier call, as asked."""
    known = isinstance(handle, Handle) and isinstance(handle.meta, Tensor)
    return known and topk_idx is None and options == _NO_OPTIONS


def _tensors(*values: Any) -> bool:
    """Whether operators can take them, and move rows: a tensor on "meta" among others would have
    PyTorch infer sizes instead, on this rank alone."""
    if not all(isinstance(value, Tensor) for value in values):
        return False
    on_meta = [value.device.type == "meta" for value in values]
    return all(on_meta) or not any(on_meta)


def _carried(options: tuple[Any, ...], counts: Any) -> tuple[Any, list[Tensor]] | None:
    """Options and counts as the operator takes them; None where it cannot."""
    num_experts, owners, layout, expert_alignment, zero_padding, most = options
    if not isinstance(layout, str):
        return None
    try:
        given = (
            _whole(num_experts),
            None if owners is None else [_whole(owner) for owner in owners],
            layout,
            _whole(expert_alignment),
            bool(zero_padding),
            None if most is None else _whole(most),
        )
        if counts is None:
            return given, []
        parts = (counts.copies, counts.to_server, counts.to_rank)
        return given, [torch.as_tensor(part) for part in parts]
    except (TypeError, ValueError, AttributeError):
        return None


def _is_number(num_blocks: Any) -> bool:
    """Whether an operator can take it; if it is too large or small, the call itself says so."""
    if num_blocks is None:
        return True
    try:
        _whole(num_blocks)
    except (TypeError, ValueError):
        return False
    return True


def _whole(number: Any) -> int:
    """A 64-bit number."""
    if isinstance(number, bool):
        raise TypeError
    whole: int = number if isinstance(number, int) else operator.index(number)
    if not -(1 << 63) <= whole < 1 << 63:
        raise ValueError
    return whole


def _check_gradients(inputs: list[Any], out: Any) -> None:
    """All ranks raise alike: whether a gradient is wanted is the same on all of them."""
    if not torch.is_grad_enabled():
        return
    for tensor in inputs:
        if not isinstance(tensor, Tensor) or not tensor.requires_grad:
            continue
        if out is not None:
            raise ValueError("with out= there is no gradient, but an input requires one")
        if tensor.dtype not in SUMMED:
            raise TypeError(f"there is no gradient of {tensor.dtype}, but an input requires one")


def _anchor(comm: Any, handle: Handle) -> Tensor:
    """The handle's anchor, made now for a handle that was made of a bare meta."""
    if handle.anchor is None:
        try:
            info = functions_of(comm).meta_info(handle.meta)
        except ValueError:  # the call itself says so, on all ranks
            return torch.empty(0, 0, 0, device=_device_of(comm, handle.meta))
        shape = (info.num_recv_rows, info.num_tokens, 0)
        handle.anchor = torch.empty(shape, device=_device_of(comm, handle.meta))
    return handle.anchor


def _device_of(comm: Any, meta: Tensor) -> torch.device:
    """Where the communicator's tensors are."""
    device: torch.device = getattr(comm, "device", meta.device)
    return device


def _let_go_after_backward(handle: Handle) -> None:
    """Cut the handle off from the graph of its dispatch when the backward of that has run.

    The layout can then be used again in later steps, whose backward must not go there.
    """
    if torch.compiler.is_compiling() or handle.anchor is None or handle.anchor.grad_fn is None:
        return
    reference = weakref.ref(handle)

    def let_go(*_: Any) -> None:
        found = reference()
        if found is not None and found.anchor is not None:
            found.anchor = found.anchor.detach()

    handle.anchor.grad_fn.register_hook(let_go)
