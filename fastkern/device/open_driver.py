"""The driver of a device, by the name of its target."""

from __future__ import annotations

from ..errors import DeviceUnavailableError
from .driver import Driver


def open_driver(target: str, device: int = 0) -> Driver:
    """A driver for device `device` of target "cuda", "hip" or "host", or for "triton" one that runs
    the kernels in Triton: on the GPU that PyTorch sees, or interpreted on the CPU.

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
    if target == "triton":
        return _open_triton(device)
    raise ValueError(f'target must be "cuda", "hip", "host" or "triton", not {target!r}')


def triton_target() -> str:
    """Where the kernels in Triton run here: "cuda", "hip", or "host": the interpreter.

    Raises DeviceUnavailableError where they cannot.
    """
    import torch

    from .triton_library import interpreting

    if interpreting():
        return "host"
    if not torch.cuda.is_available():
        raise DeviceUnavailableError(
            f"backend triton: PyTorch {torch.__version__} sees no GPU. It needs one, and a PyTorch "
            "built for it; or TRITON_INTERPRET=1 in the environment, before Triton is imported, "
            "for its interpreter on the CPU"
        )
    return "hip" if torch.version.hip else "cuda"


def _open_triton(device: int) -> Driver:
    target = triton_target()
    if target == "host":
        from .interpreter_driver import InterpreterDriver

        return InterpreterDriver(device)
    from .triton_driver import TritonDriver

    return TritonDriver(open_driver(target, device))
