"""How blocks claim items when others are faster, by `claims_check.cc` on the host target.

One block between whose look and swaps others claim, each choice against the rules; and many blocks,
which run each item once and only what can run. Copies of the picker with a fault show that the
program sees them.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fastkern.planner import Topology, plan
from tests.reference import random_inputs, random_traffic, reference_all_to_all

ROOT = Path(__file__).resolve().parents[1]
PICK = "kernels/body/pick.h"
ROW_BYTES = 48
# Servers, ranks of each, policy, traffic, rows of a chunk.
CASES = {
    "whole": ((2, 2), "whole", "ragged", 1),
    "split": ((3, 1), "split", "uniform", 3),
    "direct": ((1, 4), "direct", "ragged", 3),
    "spreadout": ((2, 2), "spreadout", "hot_tile", 3),
}


def compiled(program: Path, *first: Path) -> Path:
    """first: where headers are looked for before the repository."""
    compiler = shutil.which("c++")
    assert compiler, "no host compiler `c++`; fastkern itself needs one to build"
    flags = ("-std=c++17", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror")
    folders = [f"-I{folder}" for folder in (*first, ROOT)]
    command = [compiler, *flags, *folders, str(ROOT / "tests/claims_check.cc"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return program


def ran(program: Path, mode: str, case: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), mode, str(case)], capture_output=True, text=True, timeout=120, check=False
    )


def counts(program: Path, mode: str, case: Path) -> list[int]:
    done = ran(program, mode, case)
    assert done.returncode == 0, done.stdout + done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("claims") / "claims_check")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name: tables, inputs and outputs of all ranks in a file."""
    folder = tmp_path_factory.mktemp("cases")
    files = {}
    for name, (shape, policy, kind, chunk_rows) in CASES.items():
        rng = np.random.default_rng(len(files))
        traffic = random_traffic(*shape, rng, max_rows=60, kind=kind)
        made = plan(
            traffic, Topology(*shape), ROW_BYTES, policy, chunk_bytes=chunk_rows * ROW_BYTES
        )  # type: ignore[arg-type]
        inputs = random_inputs(traffic, ROW_BYTES, rng)
        outputs = reference_all_to_all(traffic, inputs)
        files[name] = folder / name
        with files[name].open("wb") as file:
            for rank, rows in enumerate(zip(inputs, outputs, strict=True)):
                for part in (made.table(rank).bytes, *rows):
                    raw = part.tobytes()
                    file.write(len(raw).to_bytes(8, "little") + raw + bytes(-len(raw) % 8))
    return files


@pytest.mark.parametrize("name", CASES)
def test_lost_claims(name: str, program: Path, cases: dict[str, Path]) -> None:
    heads, later, unseen, past_window, at_end, widest = counts(program, "lost", cases[name])
    assert widest == 16
    assert min(heads, later, unseen, past_window, at_end) > 0


@pytest.mark.parametrize("name", CASES)
def test_every_item_runs_once(name: str, program: Path, cases: dict[str, Path]) -> None:
    (num_items,) = counts(program, "threads", cases[name])
    assert num_items > 500


# What is wrong with a copy of the picker, and the mode that must see it.
FAULTS = {
    "an item that was not seen to run": (
        " || look.heads[k].verdict != kCanRun",
        "",
        ("lost", "threads"),
    ),
    "an item that was not looked at": (
        "num_items = look.window * kNumQueues;\n        look.window",
        "num_items = kMostWindow * kNumQueues;\n        look.window",
        ("lost",),
    ),
    "another item than that of the ticket": (
        "look.heads[k].item.ticket != held || ",
        "",
        ("lost",),
    ),
    "the head, whatever the ticket said": (
        "*item = look.heads[k].item;",
        "*item = look.heads[queue].item;",
        ("lost", "threads"),
    ),
    "heads only": ("look.window = look.open_window;", "", ("lost",)),
    "a window that stays open": ("look.window = (look.window + 1) / 2;", "", ("lost",)),
    "a window that stays open while nothing can run": (
        "look.window = 1;\n            wait_a_little",
        "wait_a_little",
        ("lost",),
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_seen(what: str, tmp_path: Path, cases: dict[str, Path]) -> None:
    line, instead, modes = FAULTS[what]
    text = (ROOT / PICK).read_text()
    assert text.count(line) == 1
    edited = tmp_path / PICK
    edited.parent.mkdir(parents=True)
    edited.write_text(text.replace(line, instead))
    broken = compiled(tmp_path / "claims_check", tmp_path)
    for mode in modes:
        done = (ran(broken, mode, case) for case in cases.values())
        assert any(d.returncode == 1 and "not: " in d.stdout for d in done), mode
