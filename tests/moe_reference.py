"""What dispatch and combine are: the definition, plainly, for all ranks in one process.

`Routing` says which row holds what on every rank; `dispatch` and `combine` move and sum rows by it,
element for element in the order that the library promises, so that results compare bit for bit.
`ReferenceExchange` makes collective calls of them, for code that needs only the functional layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastkern.moe.calls import DispatchOptions, DispatchResult
from tests.moe_routing import Routing

__all__ = [
    "DispatchOptions",
    "MetaInfo",
    "Received",
    "ReferenceExchange",
    "as_bytes",
    "combine",
    "dense_combine",
    "dispatch",
    "slot_choice",
]

# -- dispatch ------------------------------------------------------------------------------------


class Received(NamedTuple):
    """One rank's side of a dispatch. weights: [rows], or [rows, K] in the rank layout, as idx."""

    recv: list[Tensor]
    weights: Tensor | None
    idx: Tensor | None
    counts: Tensor


def unwritten(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What padding holds here: NaN, or a number that nothing else holds. Nothing may rely on it."""
    return torch.full(tuple(shape), float("nan") if dtype.is_floating_point else 119, dtype=dtype)


def dispatch(
    routing: Routing,
    inputs: Sequence[Sequence[Tensor]],
    weights: Sequence[Tensor] | None,
    rank: int,
) -> Received:
    """What the rank receives. inputs: per rank its tensors [T, ...]; weights: per rank [T, K]."""
    rows = routing.rows(rank)
    recv = []
    for index, mine in enumerate(inputs[rank]):
        out = unwritten((len(rows), *mine.shape[1:]), mine.dtype)
        if routing.zero_padding:
            out = torch.zeros_like(out)
        for place, row in enumerate(rows):
            if row is not None:
                out[place] = inputs[row.source][index][row.token]
        recv.append(out)
    counts = torch.tensor(routing.counts(rank), dtype=torch.int64)
    if routing.layout == "expert":
        expert_weights = None
        if weights is not None:
            expert_weights = unwritten((len(rows),), weights[rank].dtype)
            if routing.zero_padding:
                expert_weights.zero_()
            for place, row in enumerate(rows):
                if row is not None:
                    expert_weights[place] = weights[row.source][row.token, row.choice]
        return Received(recv, expert_weights, None, counts)
    own = routing.experts_of(rank)
    idx = torch.full((len(rows), routing.topk), -1, dtype=torch.int64)
    row_weights = None if weights is None else torch.zeros(idx.shape, dtype=weights[rank].dtype)
    for place, row in enumerate(rows):
        if row is None:
            continue
        for k, expert in enumerate(routing.choices[row.source][row.token]):
            if expert in own:
                idx[place, k] = own.index(expert)
                if weights is not None and row_weights is not None:
                    row_weights[place, k] = weights[row.source][row.token, k]
    return Received(recv, row_weights, idx, counts)


def slot_choice(routing: Routing, rank: int) -> Tensor:
    """int64 [rows]: the k of each row of the expert layout, -1 for padding."""
    return torch.tensor([-1 if row is None else row.choice for row in routing.rows(rank)]).long()


# -- combine -------------------------------------------------------------------------------------


def combine(
    routing: Routing,
    expert_outs: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    bias: Tensor | None,
    wire_dtype: torch.dtype | None,
    rank: int,
) -> Tensor:
    """The sums [T, ...] of the rank's tokens, in expert_out's dtype.

    expert_outs: per rank [rows, ...]; weights: per rank [rows]; bias: the rank's own.
    """
    dtype, row_shape = expert_outs[rank].dtype, expert_outs[rank].shape[1:]
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    result = torch.zeros((routing.num_tokens(rank), *row_shape), dtype=dtype)
    per_server = routing.ranks_per_server
    for token in range(routing.num_tokens(rank)):
        total: Tensor | None = None
        for server in range(routing.servers):
            server_sum: Tensor | None = None
            for peer in range(server * per_server, (server + 1) * per_server):
                rank_sum: Tensor | None = None
                for place in routing.rows_of(rank, token, peer):
                    term = expert_outs[peer][place].to(precision)
                    if weights is not None:
                        term = term * weights[peer][place].to(precision)
                    rank_sum = _plus(rank_sum, term)
                server_sum = _plus(server_sum, rank_sum)
            if server_sum is not None and server != rank // per_server:
                server_sum = server_sum.to(wire_dtype or dtype).to(precision)
            total = _plus(total, server_sum)
        if bias is not None:
            added = bias[token] if bias.dim() > len(row_shape) else bias
            total = _plus(total, added.to(precision))
        if total is not None:
            result[token] = total.to(dtype)
    return result


def _plus(so_far: Tensor | None, term: Tensor | None) -> Tensor | None:
    """The sum; a sum starts with its first term, not with zero."""
    if so_far is None or term is None:
        return term if so_far is None else so_far
    return so_far + term


def dense_combine(
    topk_idx: Tensor, rows: Tensor, weights: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """float64 [T, ...]: the sum over k of weight * row, where topk_idx is not -1.

    topk_idx: [T, K]; rows: [T, K, ...], each choice's row; weights: [T, K]; bias: [T, ...] or
    [...]. To compare with up to rounding: it knows no ranks, no layouts and no order.
    """
    live = topk_idx >= 0
    terms = rows.double()
    wide = (...,) + (None,) * (rows.dim() - 2)
    if weights is not None:
        terms = terms * weights.double()[wide]
    total = torch.where(live[wide], terms, torch.zeros_like(terms)).sum(1)
    return total if bias is None else total + bias.double()


def as_bytes(tensor: Tensor) -> Tensor:
    """uint8 [bytes]: the tensor's elements, one after the other."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return plain.view(-1).view(torch.uint8)


# -- the functional layer over a group -------------------------------------------------------------


@dataclass(frozen=True)
class MetaInfo:
    """What a meta tensor says of its call on this rank; the library's says more."""

    num_tokens: int
    topk: int
    num_experts: int
    layout: str
    num_recv_rows: int
    num_own_experts: int
    serial: int


class ReferenceExchange:
    """Dispatch and combine over any group, slowly: every rank gathers everything.

    Methods as the functional layer's functions, without their first argument; `meta` holds a
    number that this object knows. Padding that need not be written holds NaN (119 for integers).
    """

    def __init__(self, group: Any = None, servers: int = 1) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.num_ranks % servers:
            raise ValueError(f"{self.num_ranks} ranks cannot be cut into {servers} servers")
        self.servers = servers
        self._routings: dict[int, Routing] = {}
        self._serials = itertools.count(1)

    @torch.no_grad()
    def dispatch_tensors(
        self,
        xs: Sequence[Tensor],
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        options: DispatchOptions | None,
        meta: Tensor | None = None,
        out: Sequence[Tensor] | None = None,
        counts: Any = None,
        num_blocks: int | None = None,
    ) -> DispatchResult:
        del counts  # they are in topk_idx
        parts = self._gather(list(xs), topk_idx, topk_weights)
        if meta is None:
            assert options is not None
            routing = Routing(
                self.servers,
                [idx.long() for _, idx, _ in parts],
                options.num_experts,
                options.expert_to_rank,
                options.layout,
                options.expert_alignment,
                options.zero_padding,
                options.num_max_tokens_per_rank,
            )
            serial = next(self._serials)
            self._routings[serial] = routing
            meta = torch.tensor([serial], dtype=torch.int64)
        else:
            routing = self._routing(meta)
        weights = None if topk_weights is None else [part[2] for part in parts]
        got = dispatch(routing, [part[0] for part in parts], weights, self.rank)
        recv = got.recv
        if out is not None:
            recv = [given.copy_(tensor) for given, tensor in zip(out, got.recv, strict=True)]
        return DispatchResult(recv, got.weights, got.idx, got.counts, meta)

    @torch.no_grad()
    def combine_tensors(
        self,
        expert_out: Tensor,
        meta: Tensor,
        weights: Tensor | None = None,
        bias: Tensor | None = None,
        wire_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        num_blocks: int | None = None,
    ) -> Tensor:
        routing = self._routing(meta)
        if len(expert_out) != routing.num_rows(self.rank):
            raise ValueError(f"expert_out has {len(expert_out)} rows")
        parts = self._gather(expert_out, weights)
        all_weights = None if weights is None else [part[1] for part in parts]
        outs = [part[0] for part in parts]
        result = combine(routing, outs, all_weights, bias, wire_dtype, self.rank)
        return result if out is None else out.copy_(result)

    def slot_choice(self, meta: Tensor) -> Tensor:
        return slot_choice(self._routing(meta), self.rank)

    def meta_info(self, meta: Tensor) -> MetaInfo:
        routing = self._routing(meta)
        return MetaInfo(
            routing.num_tokens(self.rank),
            routing.topk,
            routing.num_experts,
            routing.layout,
            routing.num_rows(self.rank),
            len(routing.experts_of(self.rank)),
            int(meta[0]),
        )

    def _routing(self, meta: Tensor) -> Routing:
        found = self._routings.get(int(meta[0]))
        if found is None:
            raise ValueError("this meta is of another exchange")
        return found

    def _gather(self, *what: Any) -> list[Any]:
        parts: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(parts, _as_bytes(what), group=self.group)
        return [_as_tensors(part) for part in parts]


class _Bytes(NamedTuple):
    """A tensor as its bytes: not every dtype can be pickled."""

    data: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]


def _as_bytes(what: Any) -> Any:
    if isinstance(what, Tensor):
        return _Bytes(as_bytes(what), what.dtype, tuple(what.shape))
    return [_as_bytes(part) for part in what] if isinstance(what, (list, tuple)) else what


def _as_tensors(what: Any) -> Any:
    if isinstance(what, _Bytes):
        return what.data.view(what.dtype).view(what.shape)
    return [_as_tensors(part) for part in what] if isinstance(what, list) else what
