"""Everything that a driver promises, in one pass: the contract that all drivers are held to."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any

from fastkern.device.driver import Driver
from fastkern.device.graphs import record_graph
from fastkern.device.records import ROUTE_ARGS, new_record

KERNEL = "fastkern_route_count"
NUM_BYTES = 4096


def whole_path(driver: Driver, image: bytes, peer_handle: bytes | None = None) -> dict[str, Any]:
    """Use every operation once or more; what is made is freed in any case. Returns what was seen.

    image: a module with KERNEL. peer_handle: another process's memory of NUM_BYTES, or None.
    """
    seen: dict[str, Any] = {}
    calls: list[int] = []
    note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: calls.append(data or 0))
    note_address = ctypes.cast(note, ctypes.c_void_p).value or 0
    with ExitStack() as made:
        device = driver.allocate(NUM_BYTES, coherent=False)
        made.callback(driver.free, device)
        shared = driver.allocate(NUM_BYTES, coherent=True)
        made.callback(driver.free, shared)
        host = driver.allocate_host(NUM_BYTES)
        made.callback(driver.free_host, host)
        seen["aligned"] = device % 256 == shared % 256 == 0
        seen["handle"] = driver.export_memory(shared)
        if peer_handle is not None:
            peer = driver.open_memory(peer_handle)
            made.callback(driver.close_memory, peer)

        stream = driver.create_stream()
        made.callback(driver.destroy_stream, stream)
        other = driver.create_stream()
        made.callback(driver.destroy_stream, other)
        begin = driver.create_event(timing=True)
        made.callback(driver.destroy_event, begin)
        end = driver.create_event(timing=True)
        made.callback(driver.destroy_event, end)
        between = driver.create_event()
        made.callback(driver.destroy_event, between)
        driver.record(begin, stream)
        ctypes.memset(host, 0, NUM_BYTES)
        driver.fill(device, 7, NUM_BYTES, stream)
        driver.copy(shared, device, NUM_BYTES, stream)
        driver.record(between, stream)
        seen["asked"] = driver.event_done(between)
        driver.wait_event(other, between)
        driver.copy(host, shared, NUM_BYTES, other)
        driver.copy(host, shared, 0, other)
        driver.fill(device, 0, 0, other)
        driver.synchronize(other)
        seen["copied"] = ctypes.string_at(host, NUM_BYTES) == b"\7" * NUM_BYTES

        module = driver.load_module(image)
        made.callback(driver.unload_module, module)
        function = driver.function(module, KERNEL)
        seen["resident"] = driver.resident_blocks(function, 4)
        arguments = new_record(ROUTE_ARGS, num_tokens=0).tobytes()
        driver.launch(function, 2, 4, stream, arguments)
        driver.record(end, stream)
        driver.wait_for(end)
        seen["done"] = driver.event_done(end)
        seen["elapsed_us"] = driver.elapsed_us(begin, end)

        def work() -> None:
            driver.fill(shared, 9, 8, stream)
            driver.launch(function, 1, 2, stream, arguments)
            driver.call_host(stream, note_address, 41)

        graph = record_graph(driver, stream, work)
        made.callback(driver.destroy_graph, graph)
        driver.synchronize(stream)
        seen["calls before"] = list(calls)
        driver.replay(graph, stream)
        driver.replay(graph, stream)
        driver.synchronize(stream)
        driver.copy(host, shared, NUM_BYTES, stream)
        driver.synchronize(stream)
        seen["replayed"] = ctypes.string_at(host, 16) == b"\t" * 8 + b"\7" * 8
        seen["calls"] = list(calls)
    return seen


def check_path(seen: dict[str, Any]) -> None:
    """What every driver's pass shows."""
    assert seen["aligned"]
    assert seen["copied"]
    assert seen["resident"] >= 1
    assert seen["asked"] in (False, True)
    assert seen["done"]
    assert seen["elapsed_us"] >= 0
    assert seen["calls before"] == []
    assert seen["replayed"]
    assert seen["calls"] == [41, 41]
