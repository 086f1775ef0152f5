"""How blocks claim items when others are faster, by `claims_check.cc` on the host target.

One block between whose look and swaps others claim, each choice against the rules; and many blocks,
which run each item once and only what can run. Copies of the picker with a fault show that the
program sees them.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastkern.planner import StageTable, Topology, plan, plan_moe
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
LOST_CASES = ("combine", *CASES)


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
    files = {"combine": written(folder / "combine", [[table.bytes] for table in combine_tables()])}
    for name, (shape, policy, kind, chunk_rows) in CASES.items():
        rng = np.random.default_rng(len(files) - 1)
        traffic = random_traffic(*shape, rng, max_rows=60, kind=kind)
        made = plan(
            traffic, Topology(*shape), ROW_BYTES, policy, chunk_bytes=chunk_rows * ROW_BYTES
        )  # type: ignore[arg-type]
        inputs = random_inputs(traffic, ROW_BYTES, rng)
        outputs = reference_all_to_all(traffic, inputs)
        ranks = [
            [made.table(rank).bytes, *rows]
            for rank, rows in enumerate(zip(inputs, outputs, strict=True))
        ]
        files[name] = written(folder / name, ranks)
    return files


def written(path: Path, ranks: Sequence[Sequence[Any]]) -> Path:
    """ranks: table, input and output of each; those left out are empty."""
    with path.open("wb") as file:
        for parts in ranks:
            for raw in (*(part.tobytes() for part in parts), b"", b"")[:3]:
                file.write(len(raw).to_bytes(8, "little") + raw + bytes(-len(raw) % 8))
    return path


def combine_tables() -> list[StageTable]:
    """Sums and reductions too, several chunks of each."""
    servers, per_server = 2, 2
    num_ranks = servers * per_server
    rng = np.random.default_rng(0)
    to_rank = rng.integers(0, 60, (num_ranks, num_ranks))
    # A token goes to one rank of a server, or to several.
    by_server = to_rank.reshape(num_ranks, servers, per_server)
    to_server = rng.integers(by_server.max(axis=2), by_server.sum(axis=2) + 1)
    made = plan_moe(to_server, to_rank, Topology(servers, per_server), 32, "whole", chunk_bytes=96)
    return [made.combine_table(rank, 16, 32, 8, 90) for rank in range(num_ranks)]


@pytest.mark.parametrize("name", LOST_CASES)
def test_lost_claims(name: str, program: Path, cases: dict[str, Path]) -> None:
    heads, later, unseen, past_window, at_end, unasked, passed, widest = counts(
        program, "lost", cases[name]
    )
    assert widest == 16
    assert min(heads, later, unseen, past_window, at_end, unasked) > 0
    assert (passed > 0) == (name != "split")  # uniform: all items have rows


@pytest.mark.parametrize("name", CASES)
def test_every_item_runs_once(name: str, program: Path, cases: dict[str, Path]) -> None:
    (num_items,) = counts(program, "threads", cases[name])
    assert num_items > 500


# What is wrong with a copy of the picker. One block alone shows it; what many do depends on the
# scheduler.
FAULTS = {
    "an item that was not seen to run": (" || look.heads[k].verdict < kNoRows", ""),
    "an item that was not looked at": (
        "num_items = look.window * kNumQueues;\n        look.window",
        "num_items = kMostWindow * kNumQueues;\n        look.window",
    ),
    "another item than that of the ticket": ("look.heads[k].item.ticket != next || ", ""),
    "the head, whatever the ticket said": (
        "*item = look.heads[k].item;",
        "*item = look.heads[queue].item;",
    ),
    "stops at an item without rows": ("head.verdict = kNoRows;", "head.verdict = kMustWait;"),
    "runs an item without rows": ("look.heads[k].verdict == kCanRun", "true"),
    "passes the end of a queue": ("verdict < kNoRows", "verdict == kMustWait"),
    "asks of items of another queue": ("ahead != 0 || head.time", "head.time"),
    "the stage that ends at the ticket": ("(ticket < stage.", "(ticket <= stage."),
    "heads only": ("    look.window = look.open_window;\n            } else", "} else"),
    "heads only at the start": ("look.window = look.open_window;\n        }", "look.window = 1; }"),
    "a window that stays open": ("look.window = (look.window + 1) / 2;", ""),
    "a window that stays open while nothing can run": (
        "look.window = 1;\n            wait_a_little",
        "wait_a_little",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_seen(what: str, tmp_path: Path, cases: dict[str, Path]) -> None:
    line, instead = FAULTS[what]
    text = (ROOT / PICK).read_text()
    assert text.count(line) == 1
    edited = tmp_path / PICK
    edited.parent.mkdir(parents=True)
    edited.write_text(text.replace(line, instead))
    broken = compiled(tmp_path / "claims_check", tmp_path)
    done = (ran(broken, "lost", case) for case in cases.values())
    assert any(d.returncode == 1 and "not: " in d.stdout for d in done)
