"""Positions in listings, about which ptxas errs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device_compile.listing import sass_kernels

SOURCES = {
    "target/low": "\n\n\n__device__ void wait() { bar(); }\n",
    "body/one": "\nFASTKERN_DEVICE void once() {\n  go();\n  wait();\n}\n",
    "body/two": "FASTKERN_DEVICE void other() {\n  go();\n  go();\n  go();\n}\n"
    "FASTKERN_DEVICE void twice() { once(); }\n",
}
LOW, ONE, TWO, LAST = ("target/low", 4), ("body/one", 4), ("body/two", 4), ("body/two", 6)
GO = ("body/one", 3)


@pytest.mark.parametrize(
    ("places", "functions"),
    [
        ([LOW, ONE, LAST], ("wait", "once", "twice")),
        ([LOW, TWO, LAST], ("wait", "once", "twice")),
        ([ONE, LAST], ("wait", "once", "twice")),
        ([LOW, LAST], ("wait", "once", "twice")),
        ([GO, LAST], ("once", "twice")),
    ],
    ids=["right", "other-file", "lost-callee", "lost-caller", "own"],
)
def test_callers_call(
    places: list[tuple[str, int]], functions: tuple[str, ...], tmp_path: Path
) -> None:
    """Of a function and its caller that are in the same line, 4, of two files."""
    for name, text in SOURCES.items():
        path = tmp_path / f"kernels/{name}.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    listing = "//--------------------- .text.fastkern_some --------------------------\n"
    for instruction in ([LOW, ONE, LAST], places):
        for name, line in instruction:
            listing += f'\t//## File "/src/kernels/{name}.h", line {line}\n'
        listing += "        /*0000*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;\n"
    first, second = sass_kernels(listing, tmp_path)["fastkern_some"].instructions
    assert first.functions == ("wait", "once", "twice")
    assert second.functions == functions
