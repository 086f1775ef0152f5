"""What must hold on every way through a whole kernel. Each check returns the faults it finds."""

from __future__ import annotations

import re

from tests.device_compile.call_sites import WORK
from tests.device_compile.devices import CUDA, Device
from tests.device_compile.listing import Kernel

# They move rows, and what goes with them.
READERS = ("copy", "team_copy", "sum_values")
WRITERS = (*READERS, "tell_arrivals", "record_choices")
# They raise flags that vouch for rows.
SIGNALLERS = ("put", "signal_after_writes", "signal_destinations", "signal_all")


def order_faults(kernel: Kernel, device: Device) -> list[str]:
    """Rows are written, then a barrier, then a flag; a flag is acquired, then barriers, then rows
    are read."""

    def find(pattern: str, functions: tuple[str, ...]) -> set[int]:
        return {k for function in functions for k in kernel.find(pattern, function)}

    polls = kernel.find(device.system_load, "seen_at")
    acquires = polls & kernel.find(device.system_load, "load_acquire")
    looks = acquires & kernel.find(device.system_load, "look_at")
    # What several flags have in common may be merged; not what HIP does before each.
    raising = "|".join([device.system_store, *device.drain[:1]])
    flags = find(raising, SIGNALLERS) & kernel.find(raising, "store_release")
    barriers = kernel.find(device.barrier)
    signalling = find(device.barrier, SIGNALLERS)
    stores, loads = find(WORK["store8"], WRITERS) - flags, find(WORK["load8"], READERS)
    found = {"poll": polls, "acquire": looks, "flag": flags, "store": stores, "load": loads}
    faults = [f"no {name}" for name, places in found.items() if not places]
    if polls - kernel.in_loops(polls):
        faults.append("a poll outside of any loop")
    if kernel.can_miss([barriers], flags, stores):
        faults.append("a flag may be raised while lanes still write rows")
    # A look's acquires are handed to lane 0 and then to all; its own, before it gives up, to all.
    handed_on = kernel.can_miss([barriers, barriers], loads, looks)
    if handed_on or kernel.can_miss([barriers], loads, acquires):
        faults.append("lanes may read rows for which no flag has been acquired")
    drained = [kernel.find(pattern) for pattern in device.drain]
    if drained and kernel.can_miss(drained, signalling, stores):
        faults.append("a wave may come to a barrier before its rows are visible")
    return faults


def synchronising_faults(kernel: Kernel, device: Device) -> list[str]:
    """Nothing but the targets' operations synchronises, and all of that at system scope."""
    if device is CUDA:
        everything = r"\S*\.(?:STRONG|MMIO)|ATOM|RED|MEMBAR|FENCE"
    else:
        everything = r"\w+_atomic|buffer_(?:wb|inv)|\S+ .*\b(?:sc[01]|glc)\b"
    accesses = (device.system_load, device.system_store, device.add, device.swap)
    faults = []
    for found in kernel.instructions:
        text = re.sub(r"^@\S+ ", "", found.text)
        if re.match("|".join(device.acquire + device.release), text):
            continue  # scheduled, in CUDA among other lines
        known = re.match("|".join(accesses), text)
        merged = found.functions[:1] == ("?",)
        if re.match(everything, text) and not (
            known and (merged or set(found.functions) & set(WORK))
        ):
            faults.append(f"{text} in {' < '.join(found.functions[:3])}")
    return faults
