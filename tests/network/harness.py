"""Builds network_check.cc and runs calls on it: ranks are threads, servers share no memory."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastkern.planner import Plan
from tests.device_compile.toolchain import ROOT, Edit
from tests.reference import Rows

KINDS = ("nvshmem", "nccl_gin", "rocshmem")
GUARD_BYTES = 64


class _Run(ctypes.Structure):
    """NetworkRun of network_check.cc."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("kind", "num_ranks", "num_calls", "num_blocks")),
        *((name, ctypes.c_uint32) for name in ("num_lanes", "delay_us")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("tables", "inputs", "outputs", "progress_ns")),
        *((name, ctypes.c_void_p) for name in ("absent", "epochs", "aborts")),
    )


@dataclass(frozen=True)
class Launch:
    """How the kernels run, on which transport, and how slow each transfer is (0: random)."""

    kind: str
    num_blocks: int = 1
    num_lanes: int = 1
    delay_us: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """outputs: by call and rank. epochs, aborts: [R], completed calls and abort words."""

    outputs: list[list[Rows]]
    epochs: npt.NDArray[np.uint64]
    aborts: npt.NDArray[np.uint64]


Runner = Callable[..., Outcome]


def build(folder: Path, edits: Iterable[Edit] = ()) -> ctypes.CDLL:
    """Compile the program in a copy of the sources, edited."""
    for source in (ROOT / "planner", ROOT / "kernels", ROOT / "tests/network"):
        for path in source.rglob("*"):
            if path.suffix in {".h", ".cuh", ".cc"}:
                copy = folder / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    for edit in edits:
        path = folder / edit.path
        text, count = re.subn(edit.pattern, edit.replacement, path.read_text())
        assert count == 1, f"{edit.path}: {edit.pattern!r} matches {count} times, not once"
        path.write_text(text)
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.fail("no host compiler `c++`; fastkern itself needs one to build")
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-fPIC", "-shared", "-ffp-contract=off"]
    library = folder / "network_check.so"
    subprocess.run(
        [
            *(compiler, *flags, "-Wall", "-Wextra", "-Werror"),
            *(f"-I{folder}", f"-I{folder}/tests/network/fake"),
            *(str(folder / "tests/network/network_check.cc"), "-o", str(library)),
        ],
        check=True,
        timeout=280,
    )
    return ctypes.CDLL(str(library))


def run(
    library: ctypes.CDLL,
    plans: Sequence[Plan],
    inputs: Sequence[Sequence[Rows]],
    launch: Launch,
    progress_s: float | Sequence[float] = 60.0,
    absent: Iterable[int] = (),
) -> Outcome:
    """The calls back to back on all ranks but `absent`; checks the guards around outputs.

    progress_s: the deadline without progress, of all ranks or of each.
    """
    num_ranks = plans[0].topology.num_ranks
    tables, sources, guarded = [], [], []
    for made, rows in zip(plans, inputs, strict=True):
        for rank in range(num_ranks):
            table = made.table(rank)
            tables.append(np.frombuffer(table.bytes, dtype=np.uint8).copy())
            sources.append(np.ascontiguousarray(rows[rank]).reshape(-1))
            num_bytes = int(table.header["output_rows"]) * made.row_bytes
            buffer = np.full(num_bytes + 2 * GUARD_BYTES, 0xC5, dtype=np.uint8)
            buffer[GUARD_BYTES : GUARD_BYTES + num_bytes] = 0xEE
            guarded.append(buffer)

    def addresses(arrays: Sequence[npt.NDArray[Any]], offset: int = 0) -> npt.NDArray[np.uint64]:
        return np.array([array.ctypes.data + offset for array in arrays], dtype=np.uint64)

    deadlines = np.broadcast_to(np.asarray(progress_s, dtype=np.float64) * 1e9, num_ranks)
    missing = np.isin(np.arange(num_ranks), list(absent)).astype(np.uint32)
    epochs = np.zeros(num_ranks, dtype=np.uint64)
    aborts = np.zeros(num_ranks, dtype=np.uint64)
    held: list[npt.NDArray[Any]] = [
        addresses(tables),
        addresses(sources),
        addresses(guarded, GUARD_BYTES),
        deadlines.astype(np.uint64),
        missing,
        epochs,
        aborts,
    ]
    library.run_network.restype = ctypes.c_bool
    current = library.run_network(
        ctypes.byref(
            _Run(
                KINDS.index(launch.kind),
                num_ranks,
                len(plans),
                launch.num_blocks,
                launch.num_lanes,
                launch.delay_us,
                launch.seed,
                *(array.ctypes.data for array in held),
            )
        )
    )
    assert current, "tables of another version: the planner was built from other sources"
    for buffer in guarded:
        assert (buffer[:GUARD_BYTES] == 0xC5).all(), "bytes before an output were overwritten"
        assert (buffer[-GUARD_BYTES:] == 0xC5).all(), "bytes after an output were overwritten"
    outputs = [
        [
            buffer[GUARD_BYTES:-GUARD_BYTES].reshape(-1, made.row_bytes)
            for buffer in guarded[call * num_ranks : (call + 1) * num_ranks]
        ]
        for call, made in enumerate(plans)
    ]
    return Outcome(outputs, epochs, aborts)
