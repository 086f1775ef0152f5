"""Combine of a virtual cluster: expert outputs of all ranks in, their tokens' sums out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from ..moe.combine_arguments import prepare_combine
from .virtual_handle import VirtualHandle

if TYPE_CHECKING:
    from .virtual_runtime import VirtualRuntime


class Combine:
    """One prepared combine: planned, its tensors on the device.

    handle: of the dispatch. expert_outs: per rank [rows received, ...]. weights: per rank
    [rows received], or None. biases: per rank, or None. wire_dtype: between servers. tables: per
    rank. Raises TypeError or ValueError for bad arguments.
    """

    def __init__(
        self,
        cluster: VirtualRuntime,
        handle: VirtualHandle,
        expert_outs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor] | None = None,
        biases: Sequence[torch.Tensor] | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._cluster = cluster
        ranks = range(cluster.num_ranks)
        none: list[None] = [None] * cluster.num_ranks
        self._infos = [handle.info(rank) for rank in ranks]
        self._calls = [
            prepare_combine(
                expert_outs[rank],
                self._infos[rank],
                handle.starts[rank],
                (weights or none)[rank],
                (biases or none)[rank],
                wire_dtype,
                None,
            )
            for rank in ranks
        ]
        first = self._calls[0]
        for rank, call in enumerate(self._calls):
            if (call.kinds, call.width) != (first.kinds, first.width):
                raise ValueError(f"ranks 0 and {rank} disagree in dtypes or in the width of rows")
        num_partials = handle.num_partials
        self.tables = [
            handle.plan.combine_table(
                rank,
                first.row_bytes,
                first.partial_row_bytes,
                num_partials,
                self._infos[rank].num_tokens,
            )
            for rank in ranks
        ]
        with ExitStack() as made:
            doubles = expert_outs[0].dtype == torch.float64
            kernel = "fastkern_combine_float64" if doubles else "fastkern_combine"
            self.launch = cluster.prepare(kernel, self.tables)
            made.callback(self.launch.close)
            self._inputs, self._outputs = cluster.allocations(), cluster.allocations(True)
            made.callback(self._inputs.close)
            made.callback(self._outputs.close)
            for rank in ranks:
                self._bind(rank, handle.addresses[rank])
            self._owned = made.pop_all()

    def close(self) -> None:
        """Free its memory. A second call does nothing."""
        self._owned.close()

    def _bind(self, rank: int, handle: int) -> None:
        """A rank's tensors, and its MoeArgs."""
        call, moe, put = self._calls[rank], self.launch.moe[rank], self._inputs.filled
        moe["handle"] = handle
        moe["expert_out"] = put(call.expert_out, f"expert_out of rank {rank}")
        if call.weights is not None:
            moe["row_weights"] = put(call.weights, f"weights of rank {rank}")
        if call.bias is not None:
            moe["bias"] = put(call.bias, f"bias of rank {rank}")
        size = self._infos[rank].num_tokens * call.width * call.expert_out.element_size()
        moe["result"] = self._outputs.empty(size, f"result of rank {rank}")
        moe["width"], moe["bias_stride"] = call.width, call.bias_stride
        moe["value_kind"], moe["wire_kind"], moe["bias_kind"] = call.kinds

    def run(self) -> None:
        """Launch, and wait for the end."""
        self._cluster.run(self.launch, "combine")

    def read(self) -> list[torch.Tensor]:
        """Per rank the sums of its tokens [T, ...], as CPU tensors; checks the guards."""
        for memory in (self._inputs, self._outputs):
            memory.check_guards()
        results = []
        for rank, (call, info) in enumerate(zip(self._calls, self._infos, strict=True)):
            shape = (info.num_tokens, *call.expert_out.shape[1:])
            address = int(self.launch.moe[rank]["result"])
            results.append(self._outputs.tensor(address, shape, call.expert_out.dtype))
        return results
