"""All ranks of a cluster in one process on one device: the kernels as they are, no second GPU.

Every rank is a slice of one allocation, and all blocks of all ranks run in one launch. What a rank
writes into a peer's slice takes the way that it takes over mapped memory, with the same flags,
table and plan; only the links are missing. On the driver of the CPU the same runs without a GPU.

A call plans on the CPU, brings tables and arguments over in one copy, launches once, and waits:

    cluster = VirtualCluster(driver, Topology(2, 4), num_blocks=2)
    outputs = cluster.all_to_all(inputs, splits)
    got = cluster.dispatch(xs, topk_idx, weights, DispatchOptions(num_experts=64))
    sums = cluster.combine(got.handle, expert_outs)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..moe.dispatch_arguments import DispatchOptions
from ..moe.static_shape import StaticShape
from .virtual_all_to_all import AllToAll
from .virtual_combine import Combine
from .virtual_handle import VirtualHandle
from .virtual_moe import Dispatch, VirtualDispatch
from .virtual_runtime import VirtualOptions, VirtualRuntime
from .virtual_static import VirtualStatic

__all__ = ["VirtualCluster", "VirtualOptions"]


class VirtualCluster(VirtualRuntime):
    """Ranks of `topology` on the driver's device.

    num_blocks: of each rank. num_lanes: of a block, by default 512, of a kernel in Triton 256, or
    what the device has. load: the image of an entry ("exchange", "dispatch", "combine", "route")
    for blocks of so many lanes; by default compiled for the device, through the cache of compiled
    kernels.

    A call raises ValueError for bad input and where its blocks do not fit the device all at once,
    and DeadlineError where a rank stood still for progress_timeout_s; after that the cluster is of
    no more use, and every call says so. launched_ranks: how many ranks' blocks are launched; fewer
    than all of them shows what a missing rank does to the others.
    """

    def all_to_all(
        self, inputs: Sequence[torch.Tensor], splits: npt.ArrayLike
    ) -> list[torch.Tensor]:
        """Every rank's rows to every rank.

        inputs: per rank a CPU tensor [rows, ...], rows by destination, all of one dtype and row
        shape. splits: [R, R] rows from each rank to each. Returns per rank [rows, ...], by source.
        """
        self.check()
        traffic, shape = np.asarray(splits), tuple(inputs[0].shape[1:])
        row_bytes = int(np.prod(shape, dtype=np.int64)) * inputs[0].element_size()
        if len(inputs) != self.num_ranks or any(
            x.dtype != inputs[0].dtype or tuple(x.shape[1:]) != shape for x in inputs
        ):
            raise ValueError(f"inputs must be {self.num_ranks} tensors of one dtype and row shape")
        if row_bytes == 0:
            return [inputs[0].new_empty((int(n), *shape)) for n in traffic.sum(axis=0)]
        call = self.prepare_all_to_all(traffic, row_bytes)
        try:
            call.write_inputs(inputs)
            call.run()
            return call.read_outputs(shape, inputs[0].dtype)
        finally:
            call.close()

    def prepare_all_to_all(
        self,
        splits: npt.ArrayLike,
        row_bytes: int,
        most_rows: int | None = None,
        table_bytes: int = 0,
    ) -> AllToAll:
        """An all-to-all to be run again and again, captured, or given other splits.

        most_rows: in or out of a rank, for later splits. table_bytes: room for later tables. Both
        by default as much as these splits need.
        """
        self.check()
        return AllToAll(self, splits, row_bytes, most_rows, table_bytes)

    def dispatch(
        self,
        xs: Sequence[Sequence[torch.Tensor]],
        topk_idx: Sequence[torch.Tensor] | None,
        topk_weights: Sequence[torch.Tensor] | None = None,
        options: DispatchOptions | None = None,
        handle: VirtualHandle | None = None,
    ) -> VirtualDispatch:
        """Send every rank's tokens to the ranks of their experts; see Dispatch."""
        self.check()
        call = Dispatch(self, xs, topk_idx, topk_weights, options, handle)
        try:
            call.run()
            return call.read()
        except BaseException:
            if handle is None:
                call.handle.close()
            raise
        finally:
            call.close()

    def combine(
        self,
        handle: VirtualHandle,
        expert_outs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor] | None = None,
        biases: Sequence[torch.Tensor] | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> list[torch.Tensor]:
        """Sum the experts' outputs of every token, per rank [T, ...]; see Combine."""
        self.check()
        call = Combine(self, handle, expert_outs, weights, biases, wire_dtype)
        try:
            call.run()
            return call.read()
        finally:
            call.close()

    def static_exchange(self, shape: StaticShape, entry_timeout_s: float = 30.0) -> VirtualStatic:
        """Dispatches and combines of one shape, run or captured; see VirtualStatic. Closed before
        the cluster is."""
        self.check()
        return VirtualStatic(self, shape, entry_timeout_s)
