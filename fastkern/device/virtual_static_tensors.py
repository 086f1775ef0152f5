"""Tensors of a virtual cluster's static exchange: for all ranks at places that stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..moe.combine_arguments import prepare_combine
from ..moe.dispatch_arguments import DispatchCall
from ..moe.static_shape import StaticShape
from .moe_record import MoeRecord
from .records import STATIC_VALUES, new_record
from .static_launches import StaticLaunches
from .static_memory import StaticMemory
from .virtual_memory import tensor_bytes

if TYPE_CHECKING:
    from .virtual_runtime import VirtualRuntime


@dataclass(frozen=True)
class StaticResult:
    """Per rank what a dispatch and the combine of its first payload have given.

    recv: its payloads, the worst case of rows. weights, idx: or None. tokens_per_expert: int64 [own
    experts]. sums: [T, ...], or None without a combine.
    """

    recv: list[list[torch.Tensor]]
    weights: list[torch.Tensor] | None
    idx: list[torch.Tensor] | None
    tokens_per_expert: list[torch.Tensor]
    sums: list[torch.Tensor] | None


class StaticTensors:
    """Room for the most tokens and rows there can be, poisoned and guarded as the cluster's options
    say, and the records that tell kernels where it is."""

    def __init__(
        self,
        cluster: VirtualRuntime,
        shape: StaticShape,
        memory: StaticMemory,
        launches: StaticLaunches,
    ) -> None:
        self._cluster = cluster
        self._shape = shape
        self._memory = memory
        self._launches = launches
        self._rows = shape.most_rows(cluster.num_ranks)
        self._allocations = cluster.allocations(poisoned=True)
        try:
            ranks = range(cluster.num_ranks)
            self._places = [
                {
                    name: (self._allocations.empty(size, f"{name} of rank {rank}"), size)
                    for name, size in self._sizes(rank).items()
                }
                for rank in ranks
            ]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the memory; nothing in the stream may still use it."""
        self._allocations.close()

    def _sizes(self, rank: int) -> dict[str, int]:
        """Bytes of a rank's tensors; those that a call writes: "recv ..." and "sums"."""
        shape, most, rows = self._shape, self._shape.num_max_tokens, self._rows[rank]
        form, weight_bytes = shape.format, shape.format.weight_bytes
        per_row = 1 if shape.options.layout == "expert" else shape.topk
        sizes = {"topk_idx": most * shape.topk * 8}
        for p, size in enumerate(form.part_bytes):
            sizes |= {f"x {p}": most * size, f"recv {p}": rows * size}
        if weight_bytes:
            sizes["weights"] = most * shape.topk * weight_bytes
            sizes["recv weights"] = rows * per_row * weight_bytes
        if shape.options.layout == "rank":
            sizes["recv idx"] = rows * shape.topk * 8
        if shape.expert_dtype is not None:
            sizes["sums"] = most * form.part_bytes[0]
        return sizes

    # -- inputs ------------------------------------------------------------------------------------

    def write(self, rank: int, call: DispatchCall) -> Any:
        """A rank's inputs, and its records of them. Returns RouteArgs."""
        at, memory = self._places[rank], self._memory.rank[rank]
        write = self._cluster.copier.write
        assert call.topk_idx is not None
        for p, x in enumerate(call.xs):
            write(at[f"x {p}"][0], tensor_bytes(x))
        write(at["topk_idx"][0], tensor_bytes(call.topk_idx))
        if call.weights is not None:
            write(at["weights"][0], tensor_bytes(call.weights))
        values = new_record(STATIC_VALUES, moe=self._dispatch_args(rank, call))
        route = self._launches.route_args(rank, call, at["topk_idx"][0])
        values["route"] = route
        write(memory["values"], np.frombuffer(values.tobytes(), dtype=np.uint8))
        moe = np.frombuffer(values["moe"].tobytes(), dtype=np.uint8)
        write(memory["dispatch moe"], moe)
        if self._shape.expert_dtype is not None:
            combine = self._combine_args(rank, call).tobytes()
            write(memory["combine moe"], np.frombuffer(combine, dtype=np.uint8))
        return route

    def _dispatch_args(self, rank: int, call: DispatchCall) -> Any:
        at, form, made = self._places[rank], call.format, MoeRecord()
        for p, (size, offset) in enumerate(zip(form.part_bytes, form.offsets, strict=True)):
            made.add_part(at[f"x {p}"][0], at[f"recv {p}"][0], size, offset)
        nowhere = (0, 0)
        made.set_dispatch(
            handle=self._memory.rank[rank]["handle"],
            header_offset=form.header_offset,
            record=True,
            weights_input=at.get("weights", nowhere)[0],
            weights_output=at.get("recv weights", nowhere)[0],
            weights_offset=form.weights_offset,
            weight_bytes=form.weight_bytes,
            index_output=at.get("recv idx", nowhere)[0],
        )
        return made.record

    def _combine_args(self, rank: int, call: DispatchCall) -> Any:
        at, made, shape = self._places[rank], MoeRecord(), self._shape
        info = shape.info(rank, self._cluster.topology, call.num_tokens)
        like = torch.empty((info.num_recv_rows, *shape.expert_shape), dtype=shape.expert_dtype)
        args = prepare_combine(like, info, like, None, None, shape.wire_dtype, None)
        value, wire, bias = args.kinds
        made.set_combine(
            handle=self._memory.rank[rank]["handle"],
            expert_out=at["recv 0"][0],
            row_weights=self._row_weights(rank),
            result=at["sums"][0],
            width=args.width,
            value_kind=value,
            wire_kind=wire,
            bias_kind=bias,
        )
        return made.record

    def _row_weights(self, rank: int) -> int:
        """The weights received, where the combine can read them; else 0."""
        sums = torch.float64 if self._shape.expert_dtype == torch.float64 else torch.float32
        if self._shape.options.layout == "rank" or self._shape.weights_dtype != sums:
            return 0
        return self._places[rank]["recv weights"][0]

    # -- before a call -----------------------------------------------------------------------------

    def poison(self, value: int) -> None:
        """Put into the stream: this byte over all that a call writes."""
        driver, stream = self._cluster.driver, self._cluster.stream
        for at in self._places:
            for name, (address, size) in at.items():
                if name.startswith("recv") or name == "sums":
                    driver.fill(address, value, size, stream)

    def clear(self, ranks: Sequence[int]) -> None:
        """Put into the stream what a dispatch clears for rows that nothing is received into:
        weights 0, indices -1, payloads zero on request."""
        driver, stream = self._cluster.driver, self._cluster.stream
        for rank in ranks:
            for name, (address, size) in self._places[rank].items():
                if name == "recv idx":
                    driver.fill(address, 0xFF, size, stream)
                elif name == "recv weights" or (
                    name.startswith("recv ") and self._shape.options.zero_padding
                ):
                    driver.fill(address, 0, size, stream)

    # -- outputs -----------------------------------------------------------------------------------

    def read(self, calls: Sequence[DispatchCall]) -> StaticResult:
        """What the last call has given, as CPU tensors; checks the guards."""
        self._allocations.check_guards()
        shape, rows = self._shape, self._rows
        ranks, tail = range(self._cluster.num_ranks), (shape.topk,)
        weights, idx, sums = None, None, None
        if (dtype := shape.weights_dtype) is not None:
            per_row = () if shape.options.layout == "expert" else tail
            weights = [self._tensor(r, "recv weights", (rows[r], *per_row), dtype) for r in ranks]
        if shape.options.layout == "rank":
            idx = [self._tensor(r, "recv idx", (rows[r], *tail), torch.int64) for r in ranks]
        if shape.expert_dtype is not None:
            sums = [self.sums(rank, call) for rank, call in enumerate(calls)]
        return StaticResult(
            [self._payloads(rank) for rank in ranks],
            weights,
            idx,
            [self.tokens_per_expert(rank) for rank in ranks],
            sums,
        )

    def _tensor(
        self, rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        return self._allocations.tensor(self._places[rank][name][0], shape, dtype)

    def _payloads(self, rank: int) -> list[torch.Tensor]:
        forms = zip(self._shape.row_shapes, self._shape.dtypes, strict=True)
        rows = self._rows[rank]
        return [
            self._tensor(rank, f"recv {p}", (rows, *row), dtype)
            for p, (row, dtype) in enumerate(forms)
        ]

    def sums(self, rank: int, call: DispatchCall) -> torch.Tensor:
        """[T, ...], of a rank's combine."""
        dtype = self._shape.expert_dtype
        assert dtype is not None
        return self._tensor(rank, "sums", (call.num_tokens, *self._shape.expert_shape), dtype)

    def tokens_per_expert(self, rank: int) -> torch.Tensor:
        """int64 [own experts], of a rank's dispatch."""
        own = int(self._shape.placement(self._cluster.num_ranks).num_owned[rank])
        address = self._launches.tokens_per_expert(rank)
        return self._allocations.tensor(address, (own,), torch.int64)
