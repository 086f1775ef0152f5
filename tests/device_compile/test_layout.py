"""The layout assertions of the shared records are compiled for both devices, and can fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.device_compile.toolchain import (
    DISPATCH,
    EXCHANGE,
    KERNELS,
    ROOT,
    ROUTE,
    STATIC,
    CompileError,
    Edit,
    compile_cuda,
    compile_hip,
    copy_sources,
)

TABLE = "planner/stage_table.h"
NETWORK = "kernels/entry/network/rocshmem"
# Entries that include a record which the exchange's does not.
INCLUDED_BY = {
    "RouteArgs": ROUTE,
    "StaticValues": STATIC,
    "StaticArgs": STATIC,
    "StaticLaunch": STATIC,
    "NetworkArgs": NETWORK,
}
FAILURE = r"static assertion failed.*(?:layout|padding)"


def records() -> dict[str, tuple[str, str]]:
    """Every record that is made of a field list: its file and the list's name."""
    folders = ("planner", "kernels/body", "kernels/transport")
    return {
        name: (str(path.relative_to(ROOT)), fields)
        for folder in folders
        for path in sorted((ROOT / folder).glob("*.h"))
        for name, fields in re.findall(
            r"^FASTKERN_RECORD\((\w+), (\w+)\);", path.read_text(), re.MULTILINE
        )
    }


def drop_last_field(name: str) -> Edit:
    path, fields = records()[name]
    found = re.search(rf"#define {fields}\(X\).*\\\n(?:.*\\\n)*.*\n", (ROOT / path).read_text())
    assert found, name
    kept = found[0][: found[0].rindex("X(")].rstrip("\\ \n") + "\n"
    return Edit(path, re.escape(found[0]), kept.replace("\\", r"\\"))


def compile_for(device: str, entry: str, root: Path) -> None:
    if device == "cuda":
        compile_cuda(entry, "sm_90", root)
    else:
        compile_hip(entry, "gfx942", root)


@pytest.mark.parametrize("device", ["cuda", "hip"])
def test_copied_sources_compile(device: str, tmp_path: Path) -> None:
    """So that the errors below come from the edit, not from the copy."""
    compile_for(device, EXCHANGE, copy_sources(tmp_path, []))


@pytest.mark.parametrize("entry", KERNELS, ids=lambda entry: Path(entry).name)
@pytest.mark.parametrize("device", ["cuda", "hip"])
def test_every_compile_asserts_the_tables_layout(device: str, entry: str, tmp_path: Path) -> None:
    lost = Edit(TABLE, r" +X\(u64, output_rows\).*\\\n", "")
    with pytest.raises(CompileError, match=FAILURE):
        compile_for(device, entry, copy_sources(tmp_path, [lost]))


def test_records_are_found() -> None:
    names = {"Header", "Stage", "Control", "MoeArgs", "KernelArgs", "LaunchArgs", "RouteArgs"}
    names |= {"HandleHeader", "ErrorRecord", "TraceEvent", *INCLUDED_BY}
    assert names <= set(records())


# CUDA's entries of networks include libraries; HIP's has declarations instead.
@pytest.mark.parametrize(
    ("device", "name"),
    [("hip", name) for name in records()]
    + [("cuda", name) for name in records() if name != "NetworkArgs"],
)
def test_a_lost_field_is_refused(device: str, name: str, tmp_path: Path) -> None:
    entry = INCLUDED_BY.get(name, EXCHANGE)
    root = copy_sources(tmp_path, [drop_last_field(name)])
    with pytest.raises(CompileError, match=FAILURE):
        compile_for(device, entry, root)


OTHERS = {
    "field widened": (Edit(TABLE, r"X\(u32, credit_value\)", "X(u64, credit_value)"), "padding"),
    "padding": (
        Edit(TABLE, r"(STAGE_FIELDS(?:.*\\\n)+?.*num_streams\)) *\\\n.*", r"\1"),
        "padding",
    ),
    "row header": (
        Edit("kernels/body/handle.h", r"X\(u32, local_rank\)", "X(u64, local_rank)"),
        "layout",
    ),
    "handle": (Edit("kernels/body/handle.h", r" +X\(u64, alignment\).*\\\n", ""), "layout"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("device", ["cuda", "hip"])
def test_a_changed_layout_is_refused(device: str, name: str, tmp_path: Path) -> None:
    edit, message = OTHERS[name]
    with pytest.raises(CompileError, match=rf"static assertion failed.*{message}"):
        compile_for(device, DISPATCH, copy_sources(tmp_path, [edit]))
