"""A GPU whose kernels are those in Triton: what a launch of a compiled kernel has to know.

Everything else is the wrapped driver's. Images that `triton_image` has not packed go to it as they
are: `fastkern_static_*` are launched beside the kernels in Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from .driver import ONE_RECORD, Driver, DriverError
from .triton_image import TritonKernel, is_triton_image, unpack_image


@dataclass(frozen=True)
class _Module:
    """An image's kernels by name, each a module of the wrapped driver."""

    kernels: dict[str, tuple[TritonKernel, Any]]


@dataclass(frozen=True)
class _Function:
    kernel: TritonKernel
    handle: Any


class TritonDriver:
    """Driver for the device of another driver, with the kernels in Triton. See driver.Driver.

    driver: of target "cuda" or "hip"; closed with this one.
    """

    kernels = "triton"

    def __init__(self, driver: Driver) -> None:
        if driver.target not in ("cuda", "hip") or driver.kernels != "cxx":
            raise ValueError(f"a driver of target cuda or hip is needed, not {driver!r}")
        self._driver = driver
        self.target, self.device = driver.target, driver.device
        self.properties, self.current, self.close = driver.properties, driver.current, driver.close
        self.allocate, self.free = driver.allocate, driver.free
        self.allocate_host, self.free_host = driver.allocate_host, driver.free_host
        self.copy, self.fill = driver.copy, driver.fill
        self.export_memory, self.open_memory = driver.export_memory, driver.open_memory
        self.close_memory = driver.close_memory
        self.create_stream, self.destroy_stream = driver.create_stream, driver.destroy_stream
        self.synchronize = driver.synchronize
        self.create_event, self.destroy_event = driver.create_event, driver.destroy_event
        self.record, self.wait_event = driver.record, driver.wait_event
        self.event_done, self.wait_for = driver.event_done, driver.wait_for
        self.elapsed_us, self.call_host = driver.elapsed_us, driver.call_host
        self.begin_capture, self.end_capture = driver.begin_capture, driver.end_capture
        self.replay, self.destroy_graph = driver.replay, driver.destroy_graph

    def load_module(self, image: bytes) -> Any:
        if not is_triton_image(image):
            return self._driver.load_module(image)
        found = unpack_image(image)
        architecture = self._driver.properties().architecture
        if (found.target, found.arch) != (self.target, architecture):
            text = f"for {found.target} {found.arch}, the device is {self.target} {architecture}"
            raise DriverError("load_module", "invalid image", text)
        with ExitStack() as made:
            kernels = {}
            for kernel in found.kernels:
                module = self._driver.load_module(kernel.code)
                made.callback(self._driver.unload_module, module)
                kernels[kernel.name] = kernel, module
            made.pop_all()
        return _Module(kernels)

    def unload_module(self, module: Any) -> None:
        if not isinstance(module, _Module):
            self._driver.unload_module(module)
            return
        while module.kernels:
            _, (_, loaded) = module.kernels.popitem()
            self._driver.unload_module(loaded)

    def parts_of(self, module: Any) -> list[Any]:
        """The wrapped driver's modules: one, or one of each kernel."""
        if not isinstance(module, _Module):
            return [module]
        return [loaded for _, loaded in module.kernels.values()]

    def function(self, module: Any, name: str) -> Any:
        if not isinstance(module, _Module):
            return self._driver.function(module, name)
        if name not in module.kernels:
            raise DriverError("function", "not found", name)
        kernel, loaded = module.kernels[name]
        return _Function(kernel, self._driver.function(loaded, name))

    def launch(
        self,
        function: Any,
        grid: int,
        num_lanes: int,
        stream: int,
        arguments: bytes,
        shared_bytes: int = 0,
        offsets: Sequence[int] = ONE_RECORD,
    ) -> None:
        """A kernel in Triton has its own shared_bytes and offsets; arguments: its record alone."""
        if not isinstance(function, _Function):
            self._driver.launch(function, grid, num_lanes, stream, arguments, shared_bytes, offsets)
            return
        kernel = function.kernel
        self._check_lanes("launch", kernel, num_lanes)
        if shared_bytes or tuple(offsets) != ONE_RECORD or len(arguments) != kernel.record_bytes:
            text = f"{kernel.name} takes one record of {kernel.record_bytes} bytes"
            raise DriverError("launch", "invalid value", f"{text}, not {len(arguments)}")
        self._driver.launch(
            function.handle,
            grid,
            num_lanes,
            stream,
            arguments.ljust(kernel.parameter_bytes, b"\0"),
            kernel.shared_bytes,
            kernel.offsets,
        )

    def resident_blocks(self, function: Any, num_lanes: int, shared_bytes: int = 0) -> int:
        if not isinstance(function, _Function):
            return self._driver.resident_blocks(function, num_lanes, shared_bytes)
        self._check_lanes("resident_blocks", function.kernel, num_lanes)
        return self._driver.resident_blocks(
            function.handle, num_lanes, function.kernel.shared_bytes
        )

    @staticmethod
    def _check_lanes(operation: str, kernel: TritonKernel, num_lanes: int) -> None:
        if num_lanes != kernel.num_lanes:
            text = f"{kernel.name} was compiled for {kernel.num_lanes} lanes, not {num_lanes}"
            raise DriverError(operation, "invalid value", text)
