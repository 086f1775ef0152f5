"""The planner's arena under AddressSanitizer, and planning that asks the heap for nothing.

`planner_allocations.cc` replaces malloc and its kin in a program of its own; copies of the sources
with one allocation more show that it sees them.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("-std=c++17", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}")
SHAPES = ((1, 1), (1, 4), (3, 1), (2, 4), (3, 3), (8, 4))


def compiler() -> str:
    found = shutil.which("c++")
    assert found, "no host compiler `c++`; fastkern itself needs one to build"
    return found


def call(*command: str | Path) -> str:
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_arena(tmp_path: Path) -> None:
    program = tmp_path / "arena_check"
    memory = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    call(compiler(), *FLAGS, *memory, ROOT / "tests/arena_check.cc", "-o", program)
    assert call(program) == ""


def compiled(source: Path, folder: Path) -> Path:
    made = folder / f"{source.stem}.o"
    call(compiler(), *FLAGS, "-O0", "-c", source, "-o", made)
    return made


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of planner, host node and the program that counts, by the name of the source."""
    folder = tmp_path_factory.mktemp("objects")
    core = (ROOT / "planner/core").glob("*.cc")
    sources = [source for source in core if not source.stem.startswith("validate")]
    sources += [ROOT / "kernels/entry" / f"host_{name}.cc" for name in ("counts", "planner")]
    sources.append(ROOT / "tests/planner_allocations.cc")
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda source: compiled(source, folder), sources))
    return {source.stem: path for source, path in zip(sources, made, strict=True)}


def allocations(objects: dict[str, Path], folder: Path, *arguments: int) -> tuple[int, ...]:
    """Of the runs of a host node, of planning in a warm arena, and of the same on the heap."""
    program = folder / "planner_allocations"
    if not program.exists():
        call(compiler(), "-pthread", *objects.values(), "-o", program)
    return tuple(int(word) for word in call(program, *map(str, arguments)).split())


def test_warm_planning_allocates_nothing(objects: dict[str, Path], tmp_path: Path) -> None:
    for servers, per_server in SHAPES:
        for seed in (1, 2):
            node, in_arena, on_heap = allocations(
                objects, tmp_path, servers, per_server, 1500, seed
            )
            assert (node, in_arena) == (0, 0)
            assert on_heap > 100


# One allocation more, where it is made, and in which of the two counts it must show.
ALLOCATIONS = {
    "the node's own": (
        "kernels/entry/host_planner.cc",
        "Vector<i64> to_server, to_rank;",
        "std::vector<i64> to_server, to_rank;",
        (True, False),
    ),
    "the first run's": ("kernels/entry/host_planner.cc", "    warm_up();\n", "", (True, False)),
    "in lowering": (
        "planner/core/lower_combine.cc",
        "    Vector<u8> touched;",
        "    std::vector<u8> touched;",
        (True, True),
    ),
    "in sorting": (
        "planner/core/balance.cc",
        "std::sort(order.begin()",
        "std::stable_sort(order.begin()",
        (True, True),
    ),
    "a line that says why": (
        "kernels/entry/host_planner.cc",
        "shape.options.explain = false;",
        "shape.options.explain = true;",
        (True, False),
    ),
    "a vector that grows past what the first run had": (
        "planner/core/lower_planned.cc",
        "table.reserve(most_records_of_dispatch(plan.traffic.servers, m));",
        "table.reserve({});",
        (True, False),
    ),
}


@pytest.mark.parametrize("what", ALLOCATIONS)
def test_an_allocation_more_is_seen(what: str, objects: dict[str, Path], tmp_path: Path) -> None:
    file, line, instead, seen = ALLOCATIONS[what]
    text = (ROOT / file).read_text()
    assert text.count(line) == 1
    edited = tmp_path / Path(file).name
    edited.write_text(text.replace(line, instead))
    changed = {**objects, edited.stem: compiled(edited, tmp_path)}
    node, in_arena, _ = allocations(changed, tmp_path, 3, 3, 300, 1)
    assert (node > 0, in_arena > 0) == seen
