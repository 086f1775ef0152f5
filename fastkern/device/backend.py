"""Which device a communicator works on: a driver, and the order of its streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import DeviceUnavailableError
from ..transports import Transport
from .driver import Driver
from .networks import KINDS, NetworkKind
from .open_driver import open_driver, triton_target
from .streams import HostStreams, StreamOrder, TorchStreams
from .triton_network import check_triton_network

# Of the kernels in Triton. Those between servers are libraries' bitcode that Triton links; it links
# none into code for AMD.
TRITON_TRANSPORTS = ("peer", "nvshmem", "nccl_gin")
_MEMBERS = ("target", "device", "launch", "resident_blocks")  # of a Driver, to tell one by


@dataclass
class DeviceBackend:
    """owned: the driver is closed with the backend, unless memory stays that only it can free.
    network: what puts between servers; None: one server is all there can be."""

    driver: Driver
    streams: StreamOrder
    owned: bool
    network: NetworkKind | None = None
    closed: bool = False

    def keep_open_unless(self, freed: bool) -> None:
        """Leave the driver to the process's end where the heap could not be freed."""
        self.owned = self.owned and freed

    def close(self) -> None:
        """Let go of the device. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self.streams.close()
        if self.owned:
            self.driver.close()


def kernels_of(driver: Any) -> str:
    """Which kernels a driver runs, see Driver; those in C++ where it does not say."""
    return str(getattr(driver, "kernels", "cxx"))


def is_triton(backend: Any) -> bool:
    """Whether a backend, a name or a driver, runs the kernels in Triton."""
    return bool(backend == "triton") or kernels_of(backend) == "triton"


def backend_name(backend: Any, transport: Transport) -> str:
    """What all ranks must have in common of the backend that they were given, or None.

    Raises DeviceUnavailableError for "triton" where that is nowhere to run.
    """
    if backend == "triton":
        return f"triton on {triton_target()}"
    if isinstance(backend, str):
        return backend
    if backend is not None:
        triton = ", triton" if kernels_of(backend) == "triton" else ""
        return f"driver of {backend.target}{triton}"
    return _default_target(transport)


def _default_target(transport: Transport) -> str:
    if not transport.device:
        return "host"
    if transport.name in KINDS:
        return KINDS[transport.name].target
    return "hip" if torch.version.hip else "cuda"


def check_backend(backend: Any, transport: Transport) -> None:
    """Raise TypeError or ValueError where they do not go together."""
    if backend is not None and not isinstance(backend, str):
        missing = [name for name in _MEMBERS if not hasattr(backend, name)]
        if missing:
            raise TypeError(f"backend must be a name or a Driver, not {backend!r}")
    if is_triton(backend):
        check_triton_transport(transport)
    name = backend_name(backend, transport)
    on_device = name != "host"
    if on_device and not transport.device:
        raise ValueError(
            f"backend {name} needs a transport between devices, peer, not {transport.name}"
        )
    if transport.device and not on_device:
        raise ValueError(f"transport {transport.name} is between devices, backend is host")
    if transport.device and transport.name != "peer":
        target = _target_of(backend, transport)
        if target != KINDS[transport.name].target:
            wanted = KINDS[transport.name].target
            raise ValueError(f"transport {transport.name} is for {wanted}, and backend is {name}")


def _target_of(backend: Any, transport: Transport) -> str:
    """The target of the driver, of that which `open_backend` opens."""
    if backend == "triton":
        return triton_target()
    if isinstance(backend, str):
        return backend
    return _default_target(transport) if backend is None else str(backend.target)


def check_triton_transport(transport: Transport) -> None:
    """Raise ValueError for a transport that the kernels in Triton do not know."""
    if transport.name not in TRITON_TRANSPORTS:
        raise ValueError(
            f"backend triton: its kernels go over {', '.join(TRITON_TRANSPORTS)}, not over "
            f"{transport.name}"
            + (": rocshmem is for the kernels in C++, backend hip" * (transport.name == "rocshmem"))
        )


def open_backend(backend: Any, transport: Transport) -> DeviceBackend | None:
    """The device that tensors are on; None for the host. What `check_backend` has let pass.

    Raises DeviceUnavailableError saying what is missing, of the transport's library too.
    """
    name = backend_name(backend, transport)
    if name == "host":
        return None
    network = None if transport.name == "peer" else KINDS[transport.name]
    if network is not None and _target_of(backend, transport) == "cuda" and is_triton(backend):
        check_triton_network(transport.name)
    elif network is not None:
        network.check()
    if not isinstance(backend, (str, type(None))):
        return DeviceBackend(backend, _streams_of(backend), owned=False, network=network)
    available = torch.cuda.is_available()
    target = backend if backend == "triton" else name
    driver = open_driver(target, torch.cuda.current_device() if available else 0)
    try:
        return DeviceBackend(driver, _streams_of(driver), owned=True, network=network)
    except BaseException:
        driver.close()
        raise


def _streams_of(driver: Driver) -> StreamOrder:
    if driver.target == "host":
        return HostStreams(driver)
    if not torch.cuda.is_available() or bool(torch.version.hip) != (driver.target == "hip"):
        kind = {"cuda": "CUDA", "hip": "ROCm"}[driver.target]
        raise DeviceUnavailableError(
            f"this PyTorch, {torch.__version__}, has no {kind} device: tensors there need a build "
            f"of PyTorch for {kind}, see pytorch.org"
        )
    return TorchStreams(torch.device("cuda", driver.device))
