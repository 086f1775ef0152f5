"""What must hold in the assembly of an operation compiled alone: see primitives.py.

Each check returns the faults that it finds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from tests.device_compile.listing import Kernel, sass_kernels
from tests.device_compile.toolchain import ROOT
from tests.triton_compile import releases
from tests.triton_compile.builds import CONSTANTS, THREADS, Build
from tests.triton_compile.checks import sum_faults
from tests.triton_compile.devices import AMD_WIDTHS, CUDA, GFX942, SASS_WIDTHS, Device

Check = Callable[[Kernel, Device, Build], list[str]]

NOT_HANDED_ON = "threads go on without what one of them has read"
EARLY_READ = "threads may read what was there before the flag was seen"
EARLY_FLAG = "a flag may be raised while threads still write"
UNDRAINED = "a wave whose stores are on their way comes to the barrier"
UNSEEN = "what came before may not be visible"
STALE = "what follows may see what was cached before"
NOT_ONE = "more than one thread does it"


def missing(**found: set[int]) -> list[str]:
    return [f"no {what.replace('_', ' ')}" for what, places in found.items() if not places]


def steps(kernel: Kernel, *patterns: str) -> list[set[int]]:
    return [kernel.find(pattern) for pattern in patterns]


def one_thread(kernel: Kernel, device: Device, found: set[int]) -> list[str]:
    """Or one for each element of a tensor that is smaller than the block."""
    if device is CUDA:
        masked = all(_by_thread(kernel, kernel.instructions[k].predicate) for k in found)
    else:
        some = kernel.find(r"s_and_saveexec|s_and_b64 exec")
        masked = not kernel.can_miss([some], found)
        masked = masked and not kernel.can_miss([some], found, kernel.find(device.barrier))
    return [] if masked else [NOT_ONE]


def _by_thread(kernel: Kernel, predicate: str) -> bool:
    """Does it depend on the thread's number?"""
    waiting = [predicate.lstrip("@!")] if predicate else []
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name == "%tid.x":
            return True
        if name not in seen:
            seen.add(name)
            for found in kernel.instructions:
                parts = re.findall(r"%?[\w.]+", found.text)
                if len(parts) > 2 and parts[1] == name:
                    waiting.extend(parts[2:])
    return False


def handed_on(kernel: Kernel, device: Device, found: set[int], goal: set[int]) -> list[str]:
    """What one thread has read goes to all through shared memory, behind a barrier."""
    way = (device.write_shared, *device.shared_done, device.barrier, device.read_shared)
    taken = of_some_threads(kernel, device)
    return [NOT_HANDED_ON] if taken.can_miss(steps(taken, *way), goal, found) else []


def of_some_threads(kernel: Kernel, device: Device) -> Kernel:
    """As threads go that a mask lets write to shared memory: no predicate, no way around."""
    instructions, successors = [], []
    for k, found in enumerate(kernel.instructions):
        masked = found.text.startswith("s_cbranch_execz") and re.match(
            r"s_and_saveexec|s_and_b64 exec", kernel.instructions[k - 1].text
        )
        bare = re.sub(rf"^@\S+ (?={device.write_shared})", "", found.text)
        instructions.append(replace(found, text=bare))
        successors.append([k + 1] if masked else kernel.successors[k])
    return Kernel(instructions, successors)


def after_acquire(kernel: Kernel, device: Device, acquires: set[int], goal: set[int]) -> list[str]:
    way = steps(kernel, *device.acquired, *device.hand_on, device.barrier)
    faults = [EARLY_READ] if kernel.can_miss(way, goal, acquires) else []
    if kernel.after(acquires) & kernel.find(r"s_load"):
        faults.append("reads through the scalar cache, which no acquire empties")
    return faults


def wait(kernel: Kernel, device: Device, build: Build) -> list[str]:
    """A loop that looks at system scope; then an acquire, which a barrier hands on; then data."""
    polls = kernel.in_loops(kernel.find(device.look))
    acquires = kernel.find(device.acquire) - polls
    data = kernel.find(device.load)
    faults = missing(
        poll_in_a_loop=polls,
        sleep_in_a_loop=kernel.in_loops(kernel.find(device.sleep)),
        acquire=acquires,
        data=data,
    )
    for what in ("peek", "acquire"):
        if kernel.can_miss([kernel.find(device.read_shared, what)], data):
            faults.append(f"reads without a look: {what}")
    faults += handed_on(kernel, device, polls, polls | acquires | data)
    faults += after_acquire(kernel, device, acquires, data)
    return faults + one_thread(kernel, device, polls | acquires)


def wait_by_result(kernel: Kernel, device: Device, build: Build) -> list[str]:
    acquires, data = kernel.find(device.acquire), kernel.find(device.load)
    faults = missing(acquire=acquires, data=data)
    if kernel.can_miss([kernel.find(device.read_shared, "acquire")], data):
        faults.append("reads without a look: acquire")
    faults += handed_on(kernel, device, acquires, data)
    faults += after_acquire(kernel, device, acquires, data)
    return faults + one_thread(kernel, device, acquires)


def signal(kernel: Kernel, device: Device, build: Build) -> list[str]:
    """Every wave's stores are visible, all threads are there, one releases."""
    data, flags = kernel.find(device.store, "store64"), kernel.find(device.flag)
    barriers = kernel.find(device.barrier)
    faults = missing(data=data, flag=flags)
    if kernel.can_miss([barriers], flags, data):
        faults.append(EARLY_FLAG)
    if device.drain and kernel.can_miss(steps(kernel, *device.drain), barriers, data):
        faults.append(UNDRAINED)
    if device.release and kernel.can_miss([kernel.find(device.release[0])], flags, barriers):
        faults.append(UNSEEN)
    return faults + one_thread(kernel, device, flags)


def look(which: str) -> Check:
    """At one word or some: all threads get what was read."""

    def check(kernel: Kernel, device: Device, build: Build) -> list[str]:
        reads = kernel.find(getattr(device, which))
        stores = kernel.find(device.store)
        faults = missing(look_at_system_scope=reads, store=stores)
        faults += handed_on(kernel, device, reads, stores)
        if which == "acquire":
            faults += after_acquire(kernel, device, reads, stores)
        return faults + one_thread(kernel, device, reads)

    return check


def read_modify_write(which: str) -> Check:
    """At system scope; acquires and releases; all threads get the old value."""

    def check(kernel: Kernel, device: Device, build: Build) -> list[str]:
        found, stores = kernel.find(getattr(device, which)), kernel.find(device.store)
        faults = missing(operation_at_system_scope=found, store=stores)
        release = device.release
        if build.triton < releases.WAITS_FOR_WRITE_BACK:
            release = release[:1]  # hence drain() waits by itself
        if release and kernel.can_miss(steps(kernel, *release), found):
            faults.append(UNSEEN)
        if kernel.can_miss(steps(kernel, *device.acquired), stores, found):
            faults.append(STALE)
        faults += handed_on(kernel, device, found, stores)
        return faults + one_thread(kernel, device, found)

    return check


def swap(kernel: Kernel, device: Device, build: Build) -> list[str]:
    """Of one word, with its result."""
    if build.triton < releases.SCALAR_SWAP_HAS_ITS_SCOPE and device is not CUDA:
        device = replace(
            device,
            swap=r"global_atomic_cmpswap_x2 .* (?:sc0|glc)$",
            acquired=(device.acquired[0], r"buffer_(?:inv sc1|wbinvl1_vol)"),
            release=(r"buffer_wbl2 sc1",) if device is GFX942 else (),
        )
    return read_modify_write("swap")(kernel, device, build)


def swap_unseen(kernel: Kernel, device: Device, build: Build) -> list[str]:
    """At system scope, releasing; by one thread, if it can be had."""
    wanted = device.swap.replace(" sc0 sc1$", r"(?: sc0)? sc1$").replace(" glc$", "")
    found = kernel.find(wanted)
    faults = missing(operation_at_system_scope=found)
    if device.release and kernel.can_miss([kernel.find(device.release[0])], found):
        faults.append(UNSEEN)
    by_all = build.triton < releases.TENSOR_SWAP_IS_MASKED and device is not CUDA
    return faults + ([] if by_all else one_thread(kernel, device, found))


def width(num_bytes: int, loads: bool) -> Check:
    """A load or store of so many bytes, and none of another width but the kernel's other access."""

    def check(kernel: Kernel, device: Device, build: Build) -> list[str]:
        kind = "load" if loads else "store"
        machine, widths = machine_code(kernel, build)
        # What AMD's kernels load in no function of access.py are their arguments.
        own = (
            set()
            if build.sass
            else {k for k, i in enumerate(machine.instructions) if len(i.frames) == 1}
        )
        found = [n for n, both in widths.items() if machine.find(both[not loads]) - own]
        return [] if found == [num_bytes] else [f"{kind}s of {found} bytes"]

    return check


def machine_code(kernel: Kernel, build: Build) -> tuple[Kernel, dict[int, tuple[str, str]]]:
    """What runs, and what it calls loads and stores."""
    if not build.sass:
        return kernel, AMD_WIDTHS
    (machine,) = sass_kernels(build.sass, ROOT).values()
    return machine, SASS_WIDTHS


def row_of(kernel: Kernel, device: Device, build: Build) -> list[str]:
    """The product of row and stride has 64 bits."""
    return missing(product_of_64_bits=kernel.find(device.product, "row_of"))


def clock(kernel: Kernel, device: Device, build: Build) -> list[str]:
    """Read by all threads, then the same for all."""
    reads, stores = kernel.find(device.clock), kernel.find(device.store)
    faults = missing(clock=reads, store=stores)
    return faults + handed_on(kernel, device, reads, stores)


def pause(kernel: Kernel, device: Device, build: Build) -> list[str]:
    """Sleeps, but not in the first rounds."""
    sleeps = kernel.find(device.sleep)
    always = not kernel.can_miss([sleeps], kernel.find(device.end))
    return missing(sleep=sleeps) + ["sleeps at once"] * always


def drain(kernel: Kernel, device: Device, build: Build) -> list[str]:
    """HIP: each wave's stores are visible before it stores again. CUDA: nothing, barriers order."""
    stores = kernel.find(device.store)
    faults = [] if len(stores) >= 2 else [f"{len(stores)} stores, not 2"]
    if device is CUDA:
        return faults + [f"orders already: {text}" for text in kernel.texts(r"membar|fence")]
    if kernel.can_miss(steps(kernel, *device.drain), stores, stores):
        faults.append("stores again while others are on their way")
    return faults


def copies(*widths_wanted: int) -> Check:
    """As many loads as stores of each width; of 16 bytes what a tile has for a thread."""

    def check(kernel: Kernel, device: Device, build: Build) -> list[str]:
        machine, widths = machine_code(kernel, build)
        faults = []
        for num_bytes in widths_wanted:
            load, store = (len(machine.find(pattern)) for pattern in widths[num_bytes])
            wanted = CONSTANTS["TILE_BYTES"] // THREADS // 16 if num_bytes == 16 else 1
            if load != store or load < wanted:
                faults.append(f"{load} loads and {store} stores of {num_bytes} bytes, not {wanted}")
        return faults

    return check


def again(name: str) -> Check:
    """What is computed from it is computed again."""

    def check(kernel: Kernel, device: Device, build: Build) -> list[str]:
        products = kernel.find(device.product, name)
        return [] if len(products) >= 2 else [f"{len(products)} products, not 2"]

    return check


def sum_products(kernel: Kernel, device: Device, build: Build) -> list[str]:
    kinds = ("32", "64")
    found = {f"sum_of_{kind}_bits": kernel.find(rf"(?:add|v_add_)\S*f{kind}") for kind in kinds}
    return missing(**found) + sum_faults(kernel)


CHECKS: dict[str, Check] = {
    "wait": wait,
    "wait_for_all": wait,
    "wait_by_result": wait_by_result,
    "signal": signal,
    "peek_one": look("look"),
    "peek_some": look("look"),
    "acquire_one": look("acquire"),
    "add_one": read_modify_write("add"),
    "add_some": read_modify_write("add"),
    "swap_one": swap,
    "swap_some": swap_unseen,
    "swap_other": swap_unseen,
    "load_4": width(4, loads=True),
    "load_8": width(8, loads=True),
    "store_4": width(4, loads=False),
    "store_8": width(8, loads=False),
    "get_4": width(4, loads=True),
    "get_8": width(8, loads=True),
    "put_4": width(4, loads=False),
    "put_8": width(8, loads=False),
    "row_of": row_of,
    "clock": clock,
    "pause_once": pause,
    "drain_between": drain,
    "forget_between": again("forget_between"),
    "lanes_twice": again("lanes_twice"),
    "copy_aligned": copies(16),
    "copy_row": copies(16, 4, 1),
    "copy_some_rows": copies(16, 1),
    "sum_values": copies(16),
    "sum_products": sum_products,
}
