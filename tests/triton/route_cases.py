"""Route in Triton against route on the host target, byte for byte. Bodies for the interpreter."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import triton

from fastkern.device.interpret import interpret
from fastkern.device.records import ROUTE_ARGS, new_record
from fastkern.kernels import _host
from fastkern.kernels.triton.access import store64
from fastkern.kernels.triton.handle import Handle, view_handle
from fastkern.kernels.triton.route import KEYS_PER_PROGRAM
from fastkern.moe.handle import HEADER, LAYOUTS, MAGIC
from tests.route_reference import UNWRITTEN, Bases

Indices = npt.NDArray[np.int64]
Longs = npt.NDArray[np.uint64]
GUARD = 0xA5A5A5A5A5A5A5A5  # what words hold that nobody may write


class Case(NamedTuple):
    """One rank's view. owner: [E]; idx: [T, K]."""

    servers: int
    gpus_per_server: int
    rank: int
    owner: npt.NDArray[np.int64]
    idx: Indices
    num_units: int = 1
    idx_dtype: str = "int64"
    layout: str = "expert"
    seed: int = 0  # of first rows

    @property
    def num_ranks(self) -> int:
        return self.servers * self.gpus_per_server


def local_indices(owner: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """[E]: how many experts of the same rank come before."""
    found = np.zeros(len(owner), np.uint32)
    for rank in np.unique(owner):
        found[owner == rank] = np.arange((owner == rank).sum())
    return found


class Guarded:
    """An array of u64 with a word before and one after it that stay as they are."""

    def __init__(self, count: int, value: int = GUARD) -> None:
        self._memory = np.full(count + 2, value, np.uint64)
        self._memory[[0, -1]] = GUARD
        self.words = self._memory[1:-1]
        self.address = int(self.words.ctypes.data)

    def check(self, name: str) -> None:
        assert (self._memory[[0, -1]] == GUARD).all(), f"{name}: written past its ends"


class TritonRoute:
    """As _host.HostRoute: counts and scans when it is made."""

    def __init__(self, case: Case, idx: npt.NDArray[Any]) -> None:
        self._units = case.num_units
        self._owner = case.owner.astype(np.uint32)
        self._local_index = local_indices(case.owner)
        num_keys = len(case.owner) + case.servers + case.num_ranks
        self._counts = Guarded(case.num_units * num_keys)
        self._totals, self._bad = Guarded(num_keys), Guarded(case.num_units + 1)
        self._args = new_record(
            ROUTE_ARGS,
            topk_idx=idx.ctypes.data,
            num_tokens=len(idx),
            owner=self._owner.ctypes.data,
            local_index=self._local_index.ctypes.data,
            counts=self._counts.address,
            totals=self._totals.address,
            bad=self._bad.address,
            idx_bytes=idx.itemsize,
            topk=idx.shape[1],
            num_experts=len(case.owner),
            num_ranks=case.num_ranks,
            servers=case.servers,
            gpus_per_server=case.gpus_per_server,
            rank=case.rank,
            num_units=case.num_units,
        )
        self._run("count", case.num_units)
        self._run("scan", -(-num_keys // KEYS_PER_PROGRAM))

    def _run(self, kernel: str, grid: int) -> None:
        interpret(f"fastkern_route_{kernel}", grid, self._args.tobytes(), {})
        for name in ("counts", "totals", "bad"):
            getattr(self, f"_{name}").check(f"{name} after {kernel}")

    @property
    def totals(self) -> Longs:
        return self._totals.words

    @property
    def bad(self) -> int:
        return int(self._bad.words[-1])

    def fill(self, handle: int, *bases: Longs, layout: int) -> None:
        names = ("slot_base", "window_base", "list_base", "return_base", "partial_base")
        for name, rows in zip(names, bases, strict=True):
            self._args[name] = rows.ctypes.data
        self._args["handle"], self._args["layout"] = handle, layout
        self._run("fill", self._units)


def first_rows(case: Case, totals: Longs) -> tuple[Bases, int]:
    """Any first rows but those of the pack list, which has no gaps; and the rows of that. Slots
    reach beyond 2^31."""
    generator = np.random.default_rng(case.seed)

    def draw(count: int, most: int = 1000) -> list[int]:
        return [int(n) for n in generator.integers(0, most, count)]

    m, n = case.gpus_per_server, case.servers
    own_server, own_local = divmod(case.rank, m)
    to_server, to_rank = totals[-case.num_ranks - n :][:n], totals[-case.num_ranks :]
    first, rows = [], 0
    for rank in range(case.num_ranks):
        first.append(rows)
        if rank // m == own_server:
            rows += int(to_rank[rank])
        elif rank % m == own_local:
            rows += int(to_server[rank // m])
    slots = draw(len(case.owner), 2**32 - 2**20)
    return Bases(slots, draw(case.num_ranks), first, draw(n), draw(m)), rows


def new_handle(case: Case, num_rows: int) -> tuple[npt.NDArray[np.uint8], int]:
    """A handle's bytes with its header alone filled in, some more behind, and its size."""
    header: Any = np.zeros(1, dtype=HEADER)
    header["magic"] = MAGIC
    header["num_tokens"], header["pack_rows"] = len(case.idx), num_rows
    header["num_ranks"], header["servers"] = case.num_ranks, case.servers
    header["gpus_per_server"], header["topk"] = case.gpus_per_server, case.idx.shape[1]
    header["num_experts"] = len(case.owner)
    header["num_own_experts"] = int((case.owner == case.rank).sum())
    header["layout"], header["rank"] = LAYOUTS.index(case.layout), case.rank
    header["window_rows"], header["receive_rows"], header["num_arrivals"] = 3, 2, 1
    num_bytes = int(_host.handle_layout(header.view(np.uint8))["bytes"])
    raw = np.full(num_bytes // 8 + 8, UNWRITTEN << 32 | UNWRITTEN, np.uint64).view(np.uint8)
    raw[: HEADER.itemsize] = header.view(np.uint8)
    return raw, num_bytes


def check(case: Case) -> int:
    """Triton's route and the host's find the same; returns the first bad position that both name,
    or 2^64 - 1. The handle is compared whole, with what lies behind it."""
    idx = np.ascontiguousarray(case.idx, dtype=case.idx_dtype)
    right = _host.HostRoute(
        topk_idx=idx.ctypes.data,
        idx_bytes=idx.itemsize,
        num_tokens=len(idx),
        topk=idx.shape[1],
        owner=case.owner.tolist(),
        local_index=local_indices(case.owner).tolist(),
        servers=case.servers,
        gpus_per_server=case.gpus_per_server,
        rank=case.rank,
        num_units=case.num_units,
    )
    got = TritonRoute(case, idx)
    assert got.bad == right.bad, f"bad: {got.bad}, not {right.bad}"
    np.testing.assert_array_equal(got.totals, right.totals, "totals")
    bases, num_rows = first_rows(case, right.totals)
    arrays = [np.array(rows, dtype=np.uint64) for rows in bases]
    layout = LAYOUTS.index(case.layout)
    (mine, num_bytes), (theirs, _) = new_handle(case, num_rows), new_handle(case, num_rows)
    right.fill(theirs.ctypes.data, *arrays, layout)
    got.fill(mine.ctypes.data, *arrays, layout=layout)
    offsets = _host.handle_layout(mine[: HEADER.itemsize])
    names = [*offsets][:-1]
    for name, end in zip(names, [*[offsets[n] for n in names[1:]], num_bytes], strict=True):
        begin = int(offsets[name])
        np.testing.assert_array_equal(mine[begin:end], theirs[begin:end], name)
    np.testing.assert_array_equal(mine, theirs, "header, or behind the handle")
    return int(right.bad)


def check_all(cases: list[Case]) -> None:
    """Says which case it was."""
    for number, case in enumerate(cases):
        try:
            check(case)
        except BaseException as error:
            error.add_note(f"case {number}: {case}")
            raise


# -- handles ---------------------------------------------------------------------------------------


@triton.jit
def _tell_addresses(handle, out):
    seen = view_handle(handle)
    store64(out, seen.header)
    store64(out + 8, seen.to_server)
    store64(out + 16, seen.to_rank)
    store64(out + 24, seen.tokens_per_expert)
    store64(out + 32, seen.pack_list)
    store64(out + 40, seen.entries)
    store64(out + 48, seen.token_map)
    store64(out + 56, seen.window_slots)
    store64(out + 64, seen.touched)
    store64(out + 72, seen.arrivals)


def handle_offsets(numbers: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Offsets of a handle's arrays by Triton and by the C++ definition. numbers: of its header."""
    header: Any = np.zeros(1, dtype=HEADER)
    for name, number in numbers.items():
        header[name] = number
    address = int(header.ctypes.data)
    out = np.zeros(len(Handle._fields), np.uint64)
    _tell_addresses[(1,)](address, int(out.ctypes.data))
    got = {name: int(at) - address for name, at in zip(Handle._fields, out, strict=True)}
    assert got.pop("header") == 0
    right = {name: int(at) for name, at in _host.handle_layout(header.view(np.uint8)).items()}
    del right["bytes"]
    return got, right


def parameters() -> dict[str, list[str]]:
    """Of each kernel, by name."""
    from fastkern.kernels.triton.entry import ENTRIES, kernel_of

    return {name: list(kernel_of(name).arg_names) for name in ENTRIES["route"]}
