"""The device targets' copy loop, run on the host: the only part of them that can run without a GPU.

Lanes 1-96, sizes 0-3001 bytes, all 256 alignments of the two addresses.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.device_compile.toolchain import Edit, copy_sources

COPY = "kernels/target/block_copy.h"


def run_check(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.fail("no host compiler `c++`; fastkern itself needs one to build")
    program = folder / "block_copy_check"
    source = Path(__file__).with_name("block_copy_check.cc")
    flags = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{root}"]
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
        (Edit(COPY, r"b = tail \+ lane", "b = tail"), "not written once"),
        (Edit(COPY, r"k < head;", "k <= head;"), "not written once"),
        (Edit(COPY, r"k \+= kUnroll \* stride", "k += 3 * stride"), "not written once"),
    ],
    ids=["width", "tail", "head", "stride"],
)
def test_faulty_copy_is_found(edit: Edit, fault: str, tmp_path: Path) -> None:
    result = run_check(copy_sources(tmp_path, [edit]), tmp_path)
    assert result.returncode != 0
    assert fault in result.stdout
