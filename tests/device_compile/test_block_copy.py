"""The device targets' copy loop, run on the host: the only part of them that can run without a GPU.

Teams 1-4 of 4, 32 and 64 lanes, 2 and 4 vectors of each, sizes 0-3001 bytes and those around tiles,
all 256 alignments of the two addresses, lengths of 32 and 64 bits.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.device_compile.toolchain import Edit, copy_sources

COPY = "kernels/target/block_copy.h"


def run_check(root: Path, folder: Path, optimise: str = "-O1") -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.fail("no host compiler `c++`; fastkern itself needs one to build")
    program = folder / "block_copy_check"
    source = Path(__file__).with_name("block_copy_check.cc")
    flags = [optimise, "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{root}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True, timeout=120)
    return subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)


def test_block_copy(tmp_path: Path) -> None:
    result = run_check(copy_sources(tmp_path, []), tmp_path)
    assert result.returncode == 0, result.stdout
    # 1600 bytes as stores of 16, 8, 4 and 1 bytes.
    assert result.stdout.splitlines() == [
        "skew 0: 100 0 0 0",
        "skew 8: 0 200 0 0",
        "skew 4: 0 0 400 0",
        "skew 2: 0 0 0 1600",
    ]


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (Edit(COPY, r"skew % 8 == 0", "skew % 4 == 0"), "misaligned"),
        (Edit(COPY, r"to \+ tail, from \+ tail, rest", "to, from, rest"), "wrong bytes"),
        (Edit(COPY, r"if \(lane < bytes\)", "if (lane <= bytes)"), "not written once"),
        (Edit(COPY, r"k < bytes; k \+= kLanes", "k < kLanes; k += kLanes"), "not written once"),
        (Edit(COPY, r"at \+= Size\{num_teams\} \* kTile", "at += kTile"), "not written once"),
        (Edit(COPY, r"at = Size\{team\} \* kTile", "at = 0"), "not written once"),
        (Edit(COPY, r"j \* kLanes \+ lane\), values", "j + lane), values"), "wrong bytes"),
        (Edit(COPY, r"k = team \* kLanes \+ lane", "k = lane"), "not written once"),
        (Edit(COPY, r"if \(team == 0\) \{", "{"), "not written once"),
        (Edit(COPY, r"bytes / kTile \* kTile", "(bytes + 1) / kTile * kTile"), "not written once"),
    ],
    ids=[
        *("width", "tail", "head", "small-teams", "stride", "first-tile", "order", "rest"),
        *("all-teams", "tile-too-many"),
    ],
)
def test_faulty_copy_is_found(edit: Edit, fault: str, tmp_path: Path) -> None:
    # They fail early: what takes time is the compiler.
    result = run_check(copy_sources(tmp_path, [edit]), tmp_path, "-O0")
    assert result.returncode != 0
    assert fault in result.stdout
