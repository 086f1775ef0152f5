"""What must hold on every way through a whole kernel. Each check returns the faults it finds."""

from __future__ import annotations

import re

from tests.device_compile.call_sites import WORK
from tests.device_compile.devices import CUDA, Device
from tests.device_compile.listing import Frame, Kernel

# They move rows, and what goes with them.
READERS = ("copy", "team_copy", "sum_values")
WRITERS = (*READERS, "tell_arrivals", "record_choices")
# They raise flags that vouch for rows.
SIGNALLERS = ("put", "signal_after_writes", "signal_destinations", "signal_all")

EARLY_FLAG = "a flag may be raised while lanes still write rows"
EARLY_READ = "lanes may read rows for which no flag has been acquired"
UNDRAINED = "a wave may come to a barrier before its rows are visible"


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
        faults.append(EARLY_FLAG)
    # A look's acquires are handed to lane 0 and then to all; its own, before it gives up, to all.
    handed_on = kernel.can_miss([barriers, barriers], loads, looks)
    if handed_on or kernel.can_miss([barriers], loads, acquires):
        faults.append(EARLY_READ)
    drained = [kernel.find(pattern) for pattern in device.drain]
    if drained and kernel.can_miss(drained, signalling, stores):
        faults.append(UNDRAINED)
    return faults


COPIES = ("copy", "team_copy")


def entering_faults(
    kernel: Kernel,
    device: Device,
    readers: tuple[str, ...],
    handed_on: tuple[tuple[str, str], ...],
) -> list[str]:
    """A block that enters a call; its rows are what each rank tells the others.

    The own row is written, then a barrier, then copied; copies are written, then a barrier, then a
    release and the flag; a flag is acquired, then a barrier, then a row is copied on, or read.
    readers: the functions that read rows, each by itself and not in what it calls. handed_on: what
    lanes write in one function, others read in another.
    """

    def by(pattern: str, *functions: str) -> set[int]:
        """Not in what they call."""
        found = kernel.find(pattern)
        return {k for k in found if (*kernel.instructions[k].functions, "?")[0] in functions}

    def in_copies(pattern: str) -> set[int]:
        return {k for function in COPIES for k in kernel.find(pattern, function)}

    def steps(*patterns: str) -> list[set[int]]:
        return [kernel.find(pattern) for pattern in patterns]

    load, store = device.any_load, WORK["store8"]
    barriers, shared = kernel.find(device.barrier), kernel.find(device.write_shared)
    acquires = kernel.find(device.system_load, "load_acquire")
    polls, flags = kernel.find(device.system_load, "seen_at"), kernel.find(store, "store_release")
    flags &= kernel.find(device.system_store, "signal")
    own, copied = by(store, "enter") - shared, in_copies(store)
    waiting = {k for k in polls if _is_repeated(kernel, k, polls, device.sleep, barriers)}
    last_looks = {
        k for k in acquires if kernel.instructions[k].functions[1:3] == ("aborted", "enter_call")
    }
    found = {
        "poll": polls & waiting,
        "acquire": acquires & polls & waiting,
        "flag": flags,
        "own row": own,
        "copy": copied,
        "look for an abort": last_looks,
        **{f"load in {name}": by(load, name) for name in readers},
    }
    for writer, reader in handed_on:
        found |= {f"store in {writer}": kernel.find(f"{store}|{device.swap}", writer)}
        found |= {f"load in {reader}": by(load, reader) or kernel.find(load, reader)}
    faults = [f"no {name}" for name, places in found.items() if not places]

    def always(ways: list[set[int]], goal: set[int], starts: set[int], fault: str) -> None:
        if kernel.can_miss(ways, goal, starts):
            faults.append(fault)

    reads, gives_up = by(load, *readers) | in_copies(load), kernel.find(device.swap, "abort_call")
    always([gives_up], reads, polls - waiting, "a poll that does not wait")
    always([barriers], in_copies(load), own, "a row may be copied while lanes still write it")
    always([barriers], flags, own | copied, EARLY_FLAG)
    always(steps(*device.release), flags, barriers, "a flag without a release")
    if device.drain:
        entering = kernel.find(device.barrier, "enter_call")
        always(steps(*device.drain), entering, own | copied, UNDRAINED)
    acquired = [*steps(*device.acquire, *device.hand_on), barriers]
    always(acquired, reads, acquires & polls, EARLY_READ)
    always([barriers], last_looks, polls, "lane 0 may look for an abort while others still wait")
    for writer, reader in handed_on:
        stores, loads = found[f"store in {writer}"], found[f"load in {reader}"]
        always([barriers], loads, stores, f"{reader} may read what {writer} still writes")
    written = [*steps(*device.shared_done), barriers]
    unwritten = "lanes may read shared memory before it is written"
    always(written, kernel.find(device.read_shared), shared, unwritten)
    return faults


def _is_repeated(
    kernel: Kernel, poll: int, polls: set[int], sleep: str, barriers: set[int]
) -> bool:
    """After a pause, perhaps in a copy of its code, and not just in a loop over flags."""

    def wait_of(k: int) -> tuple[Frame, ...]:
        frames = kernel.instructions[k].frames
        return frames[kernel.instructions[k].functions.index("seen") :]

    pauses = kernel.after([poll], barriers) & kernel.find(sleep)
    again = kernel.after(pauses, barriers) & polls
    return wait_of(poll) in map(wait_of, again)


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
