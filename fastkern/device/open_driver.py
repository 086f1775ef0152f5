"""The driver of a device, by the name of its target."""

from __future__ import annotations

from .driver import Driver


def open_driver(target: str, device: int = 0) -> Driver:
    """A driver for device `device` of target "cuda", "hip" or "host".

    Raises DeviceUnavailableError where a library or the device is missing, saying which and how to
    install it; ValueError for another target.
    """
    if target == "cuda":
        from .cuda_driver import CudaDriver

        return CudaDriver(device)
    if target == "hip":
        from .hip_driver import HipDriver

        return HipDriver(device)
    if target == "host":
        from .host_driver import HostDriver

        return HostDriver(device)
    raise ValueError(f'target must be "cuda", "hip" or "host", not {target!r}')
