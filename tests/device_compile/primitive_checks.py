"""What must hold in the assembly of an operation compiled alone: see primitives.h.

Each check returns the faults that it finds. What devices call things is in devices.py, what only
one of them has to do is empty for the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.device_compile.checks import fused_faults
from tests.device_compile.devices import CUDA, Device
from tests.device_compile.listing import Kernel

Check = Callable[[Kernel, Device], list[str]]


def missing(**found: set[int]) -> list[str]:
    return [f"no {what.replace('_', ' ')}" for what, places in found.items() if not places]


def steps(kernel: Kernel, patterns: tuple[str, ...]) -> list[set[int]]:
    return [kernel.find(pattern) for pattern in patterns]


def wait(kernel: Kernel, device: Device) -> list[str]:
    """A loop that polls at system scope, and acquires what it found; then the reading.

    That the loop ends only where it has acquired is in no single way through it: compilers merge
    "not there yet" and "acquired" into one flag. So both must be in the loop.
    """
    polls = kernel.in_loops(kernel.find(device.system_load, "load_relaxed"))
    acquires = kernel.in_loops(kernel.find(device.system_load, "load_acquire"))
    reads = {
        k
        for k in kernel.find(device.any_load) - kernel.in_loops(kernel.find(device.any_load))
        if kernel.instructions[k].functions[0] == "wait"
    }
    faults = missing(
        poll_in_a_loop=polls,
        acquire_in_a_loop=acquires,
        sleep_in_a_loop=kernel.in_loops(kernel.find(device.sleep)),
        load_after_the_loop=reads,
    )
    if kernel.can_miss([polls], reads):
        faults.append("reads without a poll")
    if kernel.can_miss(steps(kernel, device.acquire), reads, acquires):
        faults.append("reads what was cached before the flag was seen")
    if kernel.after(acquires) & kernel.find(r"s_load"):
        faults.append("reads through the scalar cache, which no acquire empties")
    return faults


def signal(kernel: Kernel, device: Device) -> list[str]:
    """Every wave's stores are visible, all waves are there, one lane releases."""
    data = kernel.find(device.store[8], "tell")
    barriers = kernel.find(device.barrier, "signal_after_writes")
    flags = kernel.find(device.system_store, "store_release")
    faults = missing(data=data, barrier=barriers, flag=flags)
    if kernel.can_miss([barriers], flags):
        faults.append("a flag without a barrier")
    if kernel.can_miss(steps(kernel, device.drain), barriers, data):
        faults.append("a wave whose stores are on their way comes to the barrier")
    if kernel.can_miss(steps(kernel, device.release), flags, barriers):
        faults.append("a flag without a release")
    if kernel.can_miss([kernel.find(device.one_lane)], flags, barriers):
        faults.append("every lane raises the flag")
    return faults


def broadcast(kernel: Kernel, device: Device) -> list[str]:
    """Twice: acquired by lane 0, written for all, a barrier, read; in slots that take turns."""
    acquires = kernel.find(device.system_load, "load_acquire")
    barriers = kernel.find(device.barrier, "broadcast")
    writes, reads = kernel.find(device.write_shared), kernel.find(device.read_shared)
    data = kernel.find(device.load[8], "load8")
    faults = missing(acquire=acquires, write=writes, read=reads, data=data)
    if len(barriers) != 2:
        faults.append(f"{len(barriers)} barriers for two broadcasts")
    acquired = steps(kernel, device.acquire + device.hand_on)
    if kernel.can_miss([*acquired, barriers], data, acquires):
        faults.append("lanes read data before it is acquired for them")
    if kernel.can_miss([*steps(kernel, device.shared_done), barriers], reads, writes):
        faults.append("lanes read the slot before it is written")
    slots = {
        found[0] if (found := re.search(r"\[[^:]*\]|offset:\d+", text)) else "0"
        for text in kernel.texts(device.write_shared)
    }
    if len(slots) != 2:
        faults.append(f"{len(slots)} slots for two broadcasts")
    return faults


def barrier(kernel: Kernel, device: Device) -> list[str]:
    """What lanes write to shared memory before it, others read after it."""
    writes, reads = kernel.find(device.write_shared), kernel.find(device.read_shared)
    barriers = kernel.find(device.barrier)
    faults = missing(write=writes, read=reads, barrier=barriers)
    if kernel.can_miss([*steps(kernel, device.shared_done), barriers], reads, writes):
        faults.append("reads what may not be written yet")
    return faults


def share(kernel: Kernel, device: Device) -> list[str]:
    """CUDA: copied to shared memory; HIP: read by scalar instructions."""
    return barrier(kernel, device) if device is CUDA else _scalar(kernel)


def keep(kernel: Kernel, device: Device) -> list[str]:
    """CUDA: in shared memory, not before all lanes have read what was kept there; HIP: nowhere."""
    if device is not CUDA:
        return _scalar(kernel)
    writes, barriers = kernel.find(device.write_shared), kernel.find(device.barrier)
    faults = barrier(kernel, device)
    if kernel.can_miss([barriers], writes):
        faults.append("writes while others may still read")
    return faults


def _scalar(kernel: Kernel) -> list[str]:
    found = kernel.texts(r"(?:global|flat)_load|ds_|s_barrier")
    return [f"not by scalar instructions: {text}" for text in found]


def forget(kernel: Kernel, device: Device) -> list[str]:
    """HIP: reads again. CUDA: does nothing, since what it is for is in shared memory."""
    again = kernel.after(kernel.find(device.system_store)) & kernel.find(r"s_load")
    return [] if device is CUDA else missing(second_load=again)


def constant(kernel: Kernel, device: Device) -> list[str]:
    """HIP: through the scalar cache. CUDA: an ordinary load."""
    return missing(load=kernel.find(device.load[8])) if device is CUDA else _scalar(kernel)


def drain(kernel: Kernel, device: Device) -> list[str]:
    """HIP: each wave waits until its stores are visible. CUDA: nothing, the barrier orders them."""
    data, ends = kernel.find(device.store[8]), kernel.find(device.end)
    faults = missing(data=data, end=ends)
    if device is CUDA:
        return faults + [f"orders already: {text}" for text in kernel.texts(r"MEMBAR|ERRBAR")]
    if kernel.can_miss(steps(kernel, device.drain), ends, data):
        faults.append("stores are on their way")
    return faults


def alike(texts: list[str], patterns: list[str]) -> bool:
    return len(texts) == len(patterns) and all(
        re.match(rf"(?:@\S+ )?{pattern}", text)
        for pattern, text in zip(patterns, texts, strict=True)
    )


def copies(unrolled: int) -> Check:
    """For each width a loop of `unrolled` loads, then as many stores, and one for what is left."""

    def check(kernel: Kernel, device: Device) -> list[str]:
        accesses = rf"{device.any_load}|(?:ST|global_store|flat_store)"
        found = [
            [text for text in loop if re.match(rf"(?:@\S+ )?(?:{accesses})", text)]
            for loop in kernel.innermost_loops()
        ]
        faults = []
        for width in (16, 8, 4, 1):
            for times in (unrolled, 1):
                wanted = [device.load[width]] * times + [device.store[width]] * times
                if not any(alike(loop, wanted) for loop in found):
                    faults.append(f"no loop of {times} loads and stores of {width} bytes")
        return faults

    return check


def access(width: int, loads: bool) -> Check:
    """One of `width` bytes."""

    def check(kernel: Kernel, device: Device) -> list[str]:
        pattern = (device.load if loads else device.store)[width]
        if not kernel.find(pattern):
            return [f"no access of {width} bytes"]
        return []

    return check


def load_relaxed(kernel: Kernel, device: Device) -> list[str]:
    return missing(load_at_system_scope=kernel.find(device.system_load))


def load_acquire(kernel: Kernel, device: Device) -> list[str]:
    loads = kernel.find(device.system_load)
    faults = missing(load_at_system_scope=loads)
    if kernel.can_miss(steps(kernel, device.acquire), kernel.find(device.end), loads):
        faults.append("what follows may see what was cached before")
    return faults


def store_relaxed(kernel: Kernel, device: Device) -> list[str]:
    return missing(store_at_system_scope=kernel.find(device.system_store, "store_relaxed"))


def store_release(kernel: Kernel, device: Device) -> list[str]:
    stores = kernel.find(device.system_store, "store_release")
    faults = missing(store_at_system_scope=stores)
    if kernel.can_miss(steps(kernel, device.release), stores):
        faults.append("what came before may not be visible")
    return faults


def read_modify_write(which: str) -> Check:
    """Releases and acquires."""

    def check(kernel: Kernel, device: Device) -> list[str]:
        found = kernel.find(device.add if which == "add" else device.swap)
        faults = missing(operation_at_system_scope=found)
        if kernel.can_miss(steps(kernel, device.release), found):
            faults.append("what came before may not be visible")
        if kernel.can_miss(steps(kernel, device.acquire), kernel.find(device.end), found):
            faults.append("what follows may see what was cached before")
        return faults

    return check


def product(kernel: Kernel, device: Device) -> list[str]:
    return fused_faults(kernel, ["float", "double"])


def instructions(cuda: list[str], hip: list[str]) -> Check:
    """There are as many of each as it is named."""

    def check(kernel: Kernel, device: Device) -> list[str]:
        names = cuda if device is CUDA else hip
        return [
            f"{len(kernel.find(name))} x {name}, not {names.count(name)}"
            for name in dict.fromkeys(names)
            if len(kernel.find(name)) != names.count(name)
        ]

    return check


CHECKS: dict[str, Check] = {
    "wait": wait,
    "signal": signal,
    "broadcast": broadcast,
    "barrier": barrier,
    "share": share,
    "keep": keep,
    "forget": forget,
    "constant": constant,
    "global": access(8, loads=True),
    "drain": drain,
    "copy": copies(unrolled=4),
    "team_copy": copies(unrolled=2),
    "lane": instructions([r"S2R R\d+, SR_TID\.X"], [r"v_lshl\w+ .*, v\[0:1\]"]),
    "num_lanes": instructions(
        [r"\w+ U?R\d+, c\[0x0\]\[(?:0x0|RZ|0x360)\]"], [r"s_and_b32 .*, 0xffff$"]
    ),
    "block": instructions([r"S2U?R U?R\d+, SR_CTAID\.X"], []),  # HIP: in a register from the start
    "team": instructions(
        [r"U?SHF\.R\.U32\.HI .*, 0x5,"], ["v_readfirstlane", r"s_lshr_b32 .*, 6$"]
    ),
    "num_teams": instructions([r"U?SHF\.R\.U32\.HI .*, 0x5,"], [r"s_bfe_u32 .*, 0xa0006$"]),
    "team_lane": instructions([r"LOP3\.LUT .*, 0x1f,"], [r"v_and_b32_e32 v\d+, 63,"]),
    "team_lanes": instructions([r"HFMA2\S* .*, 1.9073486328125e-06"], [r"v_mov_b32_e32 v\d+, 64$"]),
    "team_rank": instructions(
        ["VOTE", "POPC", "POPC"], ["s_bcnt1_i32_b64", "v_bcnt_u32_b32", "v_bcnt_u32_b32"]
    ),
    "team_pick": instructions(["VOTE", r"SHFL\.IDX"], ["s_ff1_i32_b64", "v_readlane_b32"]),
    "team_read": instructions([r"SHFL\.IDX"], ["v_readlane_b32"]),
    "uniform": instructions([], ["v_readfirstlane_b32"]),
    "pause": instructions(["NANOSLEEP"], ["s_sleep 1$", "s_sleep 8$", "s_sleep 32$"]),
    "now_ns": instructions([r"CS2R .*SR_GLOBALTIMERLO"] * 2, ["s_memrealtime"] * 2),
    "load_relaxed": load_relaxed,
    "load_acquire": load_acquire,
    "store_relaxed": store_relaxed,
    "store_release": store_release,
    "fetch_add": read_modify_write("add"),
    "compare_and_swap": read_modify_write("swap"),
    "load16": access(16, loads=True),
    "load8": access(8, loads=True),
    "store16": access(16, loads=False),
    "store8": access(8, loads=False),
    "product": product,
}


def faults_of(name: str, kernel: Kernel, device: Device) -> list[str]:
    """Of the kernel made of the operation `name`."""
    bad = kernel.texts(device.bad)
    if name not in ("wait", "signal"):  # which read pointers to pointers
        bad += kernel.texts(device.generic)
    return [*CHECKS[name](kernel, device), *(f"bad access: {text}" for text in bad)]
