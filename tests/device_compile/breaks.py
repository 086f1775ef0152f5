"""A device target broken on purpose: what is done to it, and what must be found then."""

from __future__ import annotations

from dataclasses import dataclass

from tests.device_compile.toolchain import Edit

UNSEEN = "what came before may not be visible"
STALE = "what follows may see what was cached before"
NO_LOAD = "no load at system scope"
NO_STORE = "no store at system scope"
NO_OPERATION = "no operation at system scope"
NOT_ACQUIRED = "lanes read data before it is acquired for them"
NOT_WRITTEN = "reads what may not be written yet"


@dataclass(frozen=True)
class Broken:
    edits: list[Edit]
    faults: dict[str, str]  # how one begins, by operation; all other operations have none


def body(path: str, function: str, statements: str) -> Edit:
    """Another body for a function of a target."""
    return Edit(path, rf"(\b{function}\(.*\{{)[\s\S]*?\n    \}}", rf"\1 {statements} }}")


def no_loop(width: int, times: int) -> str:
    return f"no loop of {times} loads and stores of {width} bytes"


ALL_LANES = Edit(
    "kernels/body/items.h",
    r"if \(call\.target\.lane\(\) == 0\) (call\.transport\.signal\(rank)",
    r"\1",
)
NARROW_COPY = Edit("kernels/target/block_copy.h", r"skew % 16 == 0", "skew % 16 == 16")
