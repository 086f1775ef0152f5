"""What dispatch and combine need of the place where tensors are: route, handles, arguments."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt
import torch

from ..kernels import _host
from ..planner import Topology
from .dispatch_arguments import DispatchCall
from .handle import LAYOUTS
from .make_handle import HandleForm
from .placement import Placement


class Route(Protocol):
    """Counts of one rank's tokens. totals: [E + N + R]. bad: the first position of topk_idx that is
    neither -1 nor an expert's, or one past its end and more."""

    @property
    def totals(self) -> npt.NDArray[Any]: ...

    @property
    def bad(self) -> int: ...


class MoeBackend(Protocol):
    """Where the tensors of dispatch and combine are, and the kernels that read them.

    device: the only one that a call's tensors may be on.
    """

    device: torch.device

    def route(self, call: DispatchCall, placement: Placement) -> Route:
        """Count this rank's tokens."""

    def new_handle(self, call: DispatchCall, form: HandleForm, route: Any) -> torch.Tensor:
        """The metadata of a dispatch, filled by the route that `self.route` returned."""

    def check_handle(self, meta: torch.Tensor) -> None:
        """Raise ValueError where what the metadata stands for is gone."""

    def handle_address(self, meta: torch.Tensor) -> int:
        """Where the kernels find the handle."""

    def arguments(self) -> Any:
        """New arguments of a launch, with the methods of _host.MoeArgs."""


class HostMoe:
    """CPU tensors; the metadata tensor is the handle."""

    def __init__(self, rank: int, topology: Topology) -> None:
        self.device = torch.device("cpu")
        self._rank = rank
        self._topology = topology

    def route(self, call: DispatchCall, placement: Placement) -> Route:
        """Count this rank's tokens."""
        idx = call.topk_idx
        assert idx is not None
        return _host.HostRoute(
            topk_idx=idx.data_ptr(),
            idx_bytes=idx.element_size(),
            num_tokens=call.num_tokens,
            topk=call.topk,
            owner=placement.owner.tolist(),
            local_index=placement.local_index.tolist(),
            servers=self._topology.servers,
            gpus_per_server=self._topology.gpus_per_server,
            rank=self._rank,
        )

    def new_handle(self, call: DispatchCall, form: HandleForm, route: Any) -> torch.Tensor:
        """The metadata of a dispatch, filled by route."""
        assert call.options is not None
        meta = torch.empty(form.num_bytes // 8, dtype=torch.int64)
        form.write_start(meta)
        route.fill(
            handle=meta.data_ptr(),
            slot=form.first.slot,
            window=form.first.window,
            list=form.first.pack_list,
            returned=form.first.returned,
            partial=form.first.partial,
            layout=LAYOUTS.index(call.options.layout),
        )
        return meta

    def check_handle(self, meta: torch.Tensor) -> None:
        """All of it is in the metadata."""

    def handle_address(self, meta: torch.Tensor) -> int:
        """The tensor's."""
        return meta.data_ptr()

    def arguments(self) -> _host.MoeArgs:
        """New arguments of a launch."""
        return _host.MoeArgs()
