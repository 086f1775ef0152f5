"""The layout assertions of the shared records are compiled for both devices, and can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device_compile.toolchain import (
    DISPATCH,
    EXCHANGE,
    ROUTE,
    CompileError,
    Edit,
    compile_cuda,
    compile_hip,
    copy_sources,
)

TABLE = "planner/stage_table.h"
BREAKS = {
    "field lost": (EXCHANGE, Edit(TABLE, r" +X\(u64, output_rows\).*\\\n", ""), "layout"),
    "field widened": (
        EXCHANGE,
        Edit(TABLE, r"X\(u32, credit_value\)", "X(u64, credit_value)"),
        "padding",
    ),
    "padding": (
        EXCHANGE,
        Edit(TABLE, r"(STAGE_FIELDS(?:.*\\\n)+?.*num_streams\)) *\\\n.*", r"\1"),
        "padding",
    ),
    "control words": (EXCHANGE, Edit("kernels/body/args.h", r"u64 reserved;", ""), "layout"),
    "row header": (
        DISPATCH,
        Edit("kernels/body/handle.h", r"u32 local_rank;", "u64 local_rank;"),
        "layout",
    ),
    "handle": (
        DISPATCH,
        Edit("kernels/body/handle.h", r"X\(u32, reserved\)", "X(u64, reserved)"),
        "padding",
    ),
    "route": (ROUTE, Edit("kernels/body/route.h", r"u32 reserved;", "u64 reserved;"), "layout"),
}


def compile_for(device: str, entry: str, root: Path, folder: Path) -> None:
    if device == "cuda":
        compile_cuda(entry, "sm_90", root)
    else:
        compile_hip(entry, "gfx942", folder, root)


@pytest.mark.parametrize("device", ["cuda", "hip"])
def test_copied_sources_compile(device: str, tmp_path: Path) -> None:
    """So that the errors below come from the edit, not from the copy."""
    compile_for(device, EXCHANGE, copy_sources(tmp_path, []), tmp_path)


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.parametrize("device", ["cuda", "hip"])
def test_changed_layout_is_refused(device: str, name: str, tmp_path: Path) -> None:
    entry, edit, message = BREAKS[name]
    root = copy_sources(tmp_path, [edit])
    with pytest.raises(CompileError, match=rf"static assertion failed.*{message}"):
        compile_for(device, entry, root, tmp_path)
