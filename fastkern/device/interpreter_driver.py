"""The CPU as a device that runs the kernels in Triton, by Triton's interpreter.

For tests and for looking into a kernel: programs run as Python, one after the other, so that the
kernels of a rank only end where the other ranks are other processes. What is there in C++ alone,
the fastkern_static_* kernels, runs as on HostDriver.
"""

from __future__ import annotations

from typing import Any

from .driver import DriverError
from .host_driver import HostDriver, HostFunction, HostModule
from .host_stream import Work
from .interpret import interpret
from .triton_image import is_triton_image, unpack_image


class InterpreterDriver(HostDriver):
    """Driver for the CPU with the kernels in Triton; see HostDriver for its arguments.

    Images are those of `triton_image` for target "host", which hold the constants that kernels are
    run with, or any others, which stand for all kernels of the host target.
    """

    kernels = "triton"

    def load_module(self, image: bytes) -> Any:
        module: HostModule = super().load_module(image)
        if is_triton_image(image):
            from ..kernels.triton.entry import NAMES

            found = unpack_image(image)
            if found.target != "host":
                super().unload_module(module)
                raise DriverError("load_module", "invalid image", f"of target {found.target}")
            module.kernels, module.constants = NAMES, found.constants
        return module

    def _work_of(self, function: HostFunction, grid: int, num_lanes: int, arguments: bytes) -> Work:
        constants = function.module.constants
        if constants is None:
            return super()._work_of(function, grid, num_lanes, arguments)
        return lambda: interpret(function.name, grid, arguments, constants)
