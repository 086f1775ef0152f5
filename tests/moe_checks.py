"""One rank's side of a case: the calls, and every result compared with the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastkern import Communicator
from tests.moe_cases import Data
from tests.moe_reference import as_bytes, combine, dispatch

GUARD = 0xC5


def dispatch_options(data: Data) -> dict[str, Any]:
    """The keyword arguments of the case's dispatch, all but `out`."""
    case, routing = data.case, data.routing
    return {
        "num_experts": case.num_experts,
        "expert_to_rank": data.expert_to_rank,
        "layout": case.layout,
        "expert_alignment": case.alignment,
        "zero_padding": case.zero_padding,
        "num_max_tokens_per_rank": routing.num_max,
    }


def payload(tensors: list[Tensor]) -> Any:
    """One tensor as itself, several as a list."""
    return tensors[0] if len(tensors) == 1 else list(tensors)


class Guarded:
    """A tensor with a guard row before and after it, to be written into."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        row_bytes = dtype.itemsize
        for size in shape[1:]:
            row_bytes *= size
        whole = torch.full((shape[0] + 2, row_bytes), GUARD, dtype=torch.uint8)
        self._guards = whole[0], whole[-1]
        self.tensor = whole[1:-1].view(-1).view(dtype).view(shape)

    def check(self, what: str) -> None:
        """The guard rows are as they were."""
        for guard, side in zip(self._guards, ("before", "behind"), strict=True):
            assert (guard == GUARD).all(), f"{what}: the row {side} the output was overwritten"


def same_bytes(got: Tensor, expected: Tensor, what: str) -> None:
    """Dtype, shape and every bit are equal."""
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, not {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {got.shape}, not {expected.shape}"
    if not torch.equal(as_bytes(got), as_bytes(expected)):
        raise AssertionError(f"{what}:\n{got}\nis not\n{expected}")


def same_numbers(got: Tensor, expected: Tensor, what: str) -> None:
    """As `same_bytes`, except that one NaN is as good as another."""
    zero = torch.zeros((), dtype=expected.dtype)
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, not {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {got.shape}, not {expected.shape}"
    same_bytes(got.isnan(), expected.isnan(), f"{what}, where it is NaN")
    same_bytes(got.where(~got.isnan(), zero), expected.where(~expected.isnan(), zero), what)


def check_received(
    data: Data,
    rank: int,
    received: tuple[Any, Tensor | None, Tensor, Any],
    inputs: list[list[Tensor]] | None = None,
    weights: list[Tensor] | None = None,
) -> None:
    """What `dispatch` returned is what the reference says; padding only where it is promised."""
    recv_x, recv_weights, counts, handle = received
    case, routing, name = data.case, data.routing, data.case.name
    expected = dispatch(routing, inputs or data.inputs, weights, rank)
    live = torch.tensor([row is not None for row in data.all_rows[rank]], dtype=torch.bool)
    if case.zero_padding:
        live[:] = True
    assert isinstance(recv_x, Tensor if len(case.dtypes) == 1 else list), f"{name}: {type(recv_x)}"
    tensors = [recv_x] if isinstance(recv_x, Tensor) else recv_x
    assert len(tensors) == len(expected.recv), f"{name}: {len(tensors)} payloads"
    for index, (got, right) in enumerate(zip(tensors, expected.recv, strict=True)):
        assert got.shape == right.shape, f"{name}: payload {index} is {got.shape}"
        same_bytes(got[live], right[live], f"{name}: payload {index} of rank {rank}")
    if expected.weights is None:
        assert recv_weights is None, f"{name}: weights from nowhere"
    else:
        assert recv_weights is not None, f"{name}: no weights"
        assert recv_weights.shape == expected.weights.shape, f"{name}: {recv_weights.shape}"
        shown = live if case.layout == "expert" else torch.ones_like(live)
        same_bytes(recv_weights[shown], expected.weights[shown], f"{name}: weights of rank {rank}")
    same_bytes(counts, expected.counts, f"{name}: tokens_per_expert of rank {rank}")
    if case.layout == "rank":
        assert expected.idx is not None
        same_bytes(handle.recv_topk_idx, expected.idx, f"{name}: recv_topk_idx of rank {rank}")
    else:
        assert handle.recv_topk_idx is None, f"{name}: recv_topk_idx in the expert layout"


def check_handle(data: Data, rank: int, handle: Any) -> None:
    """What the handle says of the call on this rank."""
    routing, name = data.routing, data.case.name
    said = (handle.num_tokens, handle.topk, handle.num_experts, handle.layout)
    right = (routing.num_tokens(rank), routing.topk, routing.num_experts, routing.layout)
    assert said == right, f"{name}: {said}, not {right}"
    assert handle.num_recv_rows == routing.num_rows(rank), f"{name}: {handle.num_recv_rows} rows"
    assert handle.tokens_per_expert.tolist() == routing.counts(rank), name
    assert handle.tokens_per_expert_list == routing.counts(rank), name
    assert isinstance(handle.meta, Tensor), name
    assert handle.meta.dtype == torch.int64, name
    assert handle.nbytes >= handle.meta.nbytes, name


def call_dispatch(comm: Communicator, data: Data) -> Any:
    """The case's dispatch on this rank, compared; its handle."""
    case, routing, rank = data.case, data.routing, comm.rank
    weights = None if data.weights is None else data.weights[rank]
    guarded = [Guarded((routing.num_rows(rank), *x.shape[1:]), x.dtype) for x in data.inputs[rank]]
    out = payload([g.tensor for g in guarded]) if case.out else None
    received = comm.dispatch(
        payload(data.inputs[rank]),
        routing.topk_idx[rank].to(case.idx_dtype),
        weights,
        out=out,
        **dispatch_options(data),
    )
    check_received(data, rank, received, weights=data.weights)
    if case.out:
        tensors = [received[0]] if isinstance(received[0], Tensor) else received[0]
        for given, got in zip(guarded, tensors, strict=True):
            assert got.data_ptr() == given.tensor.data_ptr(), f"{case.name}: not into out"
            given.check(case.name)
    check_handle(data, rank, received[3])
    return received[3]


def call_combine(
    comm: Communicator, data: Data, handle: Any, expert_outs: list[Tensor] | None = None
) -> Tensor:
    """The case's combine on this rank, compared; the sums."""
    case, rank = data.case, comm.rank
    outs = expert_outs or data.expert_outs
    weights = None if data.row_weights is None else data.row_weights[rank]
    bias = None if data.biases is None else data.biases[rank]
    guarded = Guarded((data.routing.num_tokens(rank), case.sum_width), data.sum_dtype)
    sums = comm.combine(
        outs[rank],
        handle,
        weights=weights,
        bias=bias,
        wire_dtype=case.wire_dtype,
        out=guarded.tensor if case.out else None,
    )
    expected = combine(data.routing, outs, data.row_weights, bias, case.wire_dtype, rank)
    same_numbers(sums, expected, f"{case.name}: sums of rank {rank}")
    if case.out:
        assert sums.data_ptr() == guarded.tensor.data_ptr(), f"{case.name}: not into out"
        guarded.check(case.name)
    return sums


def check_case(comm: Communicator, data: Data) -> int:
    """Both calls; the rows that this rank sent to other servers in the dispatch."""
    handle = call_dispatch(comm, data)
    call_combine(comm, data, handle)
    return int(handle.stats.scale_out_rows)
