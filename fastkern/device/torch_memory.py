"""Memory that ranks share by PyTorch's symmetric memory, for CUDA. See memory.py for the choice."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from ..errors import DeviceUnavailableError, FastkernError
from .driver import Driver
from .peer_memory import PeerRegion
from .together import together
from .transfer import fill


class TorchPeerMemory:
    """Provider over torch.distributed._symmetric_memory (PyTorch 2.6 or later).

    All ranks of the group must be reachable by loads and stores: GPUs of one host, or of one NVLink
    domain. module: what to use in place of torch.distributed._symmetric_memory.
    """

    def __init__(self, driver: Driver, group: Any, module: Any = None) -> None:
        if driver.target != "cuda":
            raise ValueError(f"PyTorch's symmetric memory needs target cuda, not {driver.target}")
        self._driver = driver
        self._group = group
        self._num_ranks = dist.get_world_size(group)
        self._symmetric = module if module is not None else _import_module()

    def open(self, num_bytes: int, zero: bool) -> PeerRegion:
        device = torch.device("cuda", self._driver.device)
        region = PeerRegion(0, ())

        def make() -> None:
            tensor = self._symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
            region.kept.append(tensor)
            region.own = tensor.data_ptr()
            if zero:
                fill(self._driver, region.own, 0, num_bytes)

        def map_peers() -> None:
            mapped = self._symmetric.rendezvous(region.kept[0], self._group)
            region.kept.append(mapped)
            region.addresses = tuple(int(address) for address in mapped.buffer_ptrs)
            if len(region.addresses) != self._num_ranks:
                text = f"{len(region.addresses)} of {self._num_ranks} ranks can be mapped"
                raise FastkernError(text)

        try:
            together(self._group, "allocation of the heap", make)
            together(self._group, "mapping of the heap", map_peers)
        except BaseException:
            region.kept.clear()
            raise
        return region

    def unmap(self, region: PeerRegion) -> None:
        """Nothing yet: the mappings hold references, and go with the memory in `free`."""

    def free(self, region: PeerRegion) -> None:
        region.kept.clear()
        region.own = 0

    def place(self, control: PeerRegion, data: PeerRegion) -> None:
        """Addresses are all that kernels need."""

    def close(self) -> None:
        """Nothing is held but regions."""


def _import_module() -> Any:
    try:
        return importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        raise DeviceUnavailableError(
            f"cannot import PyTorch's symmetric memory ({error}): it needs PyTorch 2.6 or later, "
            "built for CUDA"
        ) from error
