"""NVSHMEM and NCCL's device API as the wrappers in kernels/triton/*.ll offer them, in Python, for
wires that are interpreted: puts that are late and in any order, signals of NCCL that only add.

Every rank has a NIC: a thread that carries out what the rank has begun, in random order (with a set
delay in order, one after the other). A transfer reads its bytes when it is carried out, writes
them, then changes its word; between two of them nothing is ordered. What ranks share is the memory
of tests/device/shared_network.py, whose addresses kernels do not know.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from fastkern.device.network import Setting
from fastkern.device.peer_memory import PeerRegion
from tests.device.shared_network import SharedNetwork

NUM_CONTEXTS = 3
_FLAGS_BEFORE_CHUNKS = 2
_SET, _ADD = 9, 10  # NVSHMEM's signal operations
_U64 = (1 << 64) - 1


@dataclass
class Transfer:
    """to, source: addresses of bytes; word: of what is set to `value`, or added to."""

    word: int
    value: int
    add: bool
    to: int = 0
    source: int = 0
    num_bytes: int = 0
    context: int = 0
    late_s: float = 0.0


class Nic:
    """delay_s: of each transfer; 0: random."""

    def __init__(self, seed: int, delay_s: float) -> None:
        self.read = [0] * NUM_CONTEXTS  # puts whose bytes have been read, by context
        self.puts_begun = 0
        self._random = random.Random(seed)
        self._delay_s = delay_s
        self._pending: list[Transfer] = []
        self._unfinished = 0
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="nic", daemon=True)
        self._thread.start()

    def begin(self, transfer: Transfer) -> None:
        with self._changed:
            self.puts_begun += bool(transfer.num_bytes)
            self._pending.append(transfer)
            self._unfinished += 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Until all that has been begun is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._unfinished == 0)

    def close(self) -> None:
        self.wait()
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._pending)
                if not self._pending:
                    return
                k = 0 if self._delay_s else self._random.randrange(len(self._pending))
                transfer = self._pending.pop(k)
            time.sleep(transfer.late_s + (self._delay_s or self._random.random() * 0.02))
            if transfer.num_bytes:
                ctypes.memmove(transfer.to, transfer.source, transfer.num_bytes)
                self.read[transfer.context] += 1
            word = ctypes.c_uint64.from_address(transfer.word)
            word.value = (word.value * transfer.add + transfer.value) & _U64
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()


class Library:
    """The functions of one library, by the names of the wrappers. faults: what is done wrong on
    purpose: "no beats", "no notices" (of NCCL), "no quiet", "early flags", "sets" (signals set,
    not add).

    A library need not vouch at once for what can be seen: of each value that a flag has it denies
    the first question or not, by chance, and `granted` are the flags that it has vouched for.
    """

    def __init__(self, seed: int, delay_s: float, faults: tuple[str, ...]) -> None:
        self.nic = Nic(seed, delay_s)
        self.control, self.data = (0, [0]), (0, [0])  # own address, bases by rank
        self.windows: tuple[int, int] = (0, 0)  # tables that stand for windows
        self.called: set[str] = set()
        self.granted: set[tuple[int, int]] = set()  # a flag's address, what it held
        self._denied: set[tuple[int, int]] = set()
        self._random = random.Random(seed)
        self._faults = faults

    def call(self, name: Any, arguments: Any) -> Any:
        """What external.call_external and external.from_one_thread do."""
        import triton.language as tl

        found = getattr(name, "value", name)
        self.called.add(found)
        value = getattr(self, found.removeprefix("fastkern_"))(*(int(a) for a in arguments))
        return tl.full((), value or 0, tl.int64)

    def _there(self, address: int, rank: int, region: tuple[int, list[int]]) -> int:
        return region[1][rank] + (address - region[0])

    def _begin(self, transfer: Transfer) -> None:
        if "early flags" in self._faults and transfer.num_bytes:
            transfer.late_s = 0.1  # who looks at flags has time to see them
            word = ctypes.c_uint64.from_address(transfer.word)
            word.value = word.value * transfer.add + transfer.value
            transfer.value, transfer.add = 0, True
        self.nic.begin(transfer)

    def _vouch(self, flag: int) -> int:
        """What the flag holds, or 0."""
        value = ctypes.c_int64.from_address(flag).value
        early = "early flags" in self._faults
        if not early and (flag, value) not in self._denied and self._random.random() < 0.3:
            self._denied.add((flag, value))
            return 0
        self.granted.add((flag, value))
        return value

    # -- NVSHMEM -----------------------------------------------------------------------------------

    def nvshmem_put(
        self, to: int, source: int, num_bytes: int, flag: int, stamp: int, pe: int
    ) -> None:
        word = self._there(flag, pe, self.control)
        there = self._there(to, pe, self.data)
        self._begin(Transfer(word, stamp, False, there, source, num_bytes))

    def nvshmem_signal(self, word: int, value: int, operation: int, pe: int) -> None:
        assert operation in (_SET, _ADD)
        if operation == _ADD and "no beats" in self._faults:
            return
        self._begin(Transfer(self._there(word, pe, self.control), value, operation == _ADD))

    def nvshmem_test(self, flag: int, stamp: int) -> int:
        return int(self._vouch(flag) >= stamp)

    def nvshmem_quiet(self, _: int) -> None:
        if "no quiet" not in self._faults:
            self.nic.wait()

    # -- NCCL --------------------------------------------------------------------------------------

    def gin_put(self, comm: int, context: int, peer: int, data: int, *rest: int) -> None:
        to, source, num_bytes, window, flag, add = rest
        assert (window, data) == self.windows
        assert 0 <= context < NUM_CONTEXTS
        self._begin(
            Transfer(
                self.control[1][peer] + flag,
                add & _U64,
                "sets" not in self._faults,
                self.data[1][peer] + to,
                self.data[0] + source,
                num_bytes,
                context,
            )
        )

    def gin_add(self, comm: int, context: int, peer: int, window: int, word: int, add: int) -> None:
        assert window == self.windows[0]
        add_only = "sets" not in self._faults
        if add == 1 and "no beats" in self._faults:
            return
        self._begin(Transfer(self.control[1][peer] + word, add & _U64, add_only))

    def gin_set(self, comm: int, context: int, peer: int, window: int, word: int, v: int) -> None:
        assert window == self.windows[0]
        if "no notices" not in self._faults:
            self._begin(Transfer(self.control[1][peer] + word, v, False))

    def gin_signal(self, window: int, word: int) -> int:
        assert window == self.windows[0]
        return self._vouch(self.control[0] + word)

    def gin_counter(self, comm: int, context: int) -> int:
        if "no quiet" in self._faults:
            return 0 if context else self.nic.puts_begun  # of one context that all would share
        return self.nic.read[context]


class LibraryNetwork(SharedNetwork):
    """The shared network's memory, for a library that is called by its wire."""

    def __init__(self, setting: Setting, library: Library) -> None:
        super().__init__(setting)
        self.library = library

    def fill_record(self) -> None:
        flags = self.setting.topology.num_ranks * (_FLAGS_BEFORE_CHUNKS + self.setting.chunk_slots)
        self.record["written"] = self.keep(bytes(8 * flags))
        self.record["puts"] = self.keep(bytes(8 * NUM_CONTEXTS))
        self.record["num_contexts"] = NUM_CONTEXTS

    def place_in_record(self, control: PeerRegion, data: PeerRegion) -> None:
        super().place_in_record(control, data)
        library = self.library
        library.control = (control.own, list(control.kept[0].bases))
        library.data = (data.own, list(data.kept[0].bases))
        library.windows = (int(self.record["window"]), int(self.record["data_window"]))


@contextmanager
def library_of(
    transport: str, seed: int, delay_s: float = 0.0, faults: tuple[str, ...] = ()
) -> Iterator[tuple[Library, Callable[[Setting], LibraryNetwork]]]:
    """Within, interpreted kernels between servers are those of a transport, whose library is a
    fake; and what makes its network."""
    from fastkern.kernels.triton import entry, external
    from fastkern.kernels.triton import transport as numbers  # made before they are changed

    assert numbers.SHARED.value == entry.TRANSPORTS["shared"]
    library = Library(seed, delay_s, faults)
    try:
        with (
            mock.patch.dict(entry.TRANSPORTS, {"shared": entry.TRANSPORTS[transport]}),
            mock.patch.object(external, "call_external", library.call),
            mock.patch.object(external, "from_one_thread", library.call),
        ):
            yield library, lambda setting: LibraryNetwork(setting, library)
    finally:
        library.nic.close()
