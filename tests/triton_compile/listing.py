"""Listings of Triton's kernels: instructions, and which functions of the sources they are of.

What tests/device_compile/listing.py reads of assembly in general, with frames of Python sources:
of PTX the innermost, of AMD assembly with its callers. What Triton writes as inline assembly stands
under the line where it begins.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tests.device_compile.listing import Frame, Instruction, Kernel, hip_kernels, ptx_kernels
from tests.device_compile.toolchain import ROOT
from tests.triton_compile.builds import Build

SOURCES = (ROOT / "kernels" / "triton", ROOT / "tests" / "triton_compile")
Chain = tuple[tuple[str, int], ...]  # file and line of each call, the innermost first
_PLACE = re.compile(r"([^\s@:\[\]]+):(\d+):\d+")


def kernel_of(build: Build, sources: tuple[Path, ...] = SOURCES) -> Kernel:
    """The one kernel of a build. sources: the folders that hold what it was made from."""
    if build.arch.startswith("sm_"):
        (kernel,) = ptx_kernels(build.text).values()
        frames = list(_ptx_frames(build.text, sources))
        assert len(frames) == len(kernel.instructions)
        found = [replace(i, frames=f) for i, f in zip(kernel.instructions, frames, strict=True)]
        return Kernel(found, kernel.successors)
    (kernel,) = hip_kernels(build.text, ROOT).values()
    return Kernel([_named(i, sources) for i in kernel.instructions], kernel.successors)


def function_at(place: str, line: int, sources: tuple[Path, ...]) -> str:
    """The function that a line belongs to; "?" outside of the sources and of functions."""
    for folder in sources:
        if (path := folder / Path(place).name).is_file():
            return _lines(path).get(line, "?")
    return "?"


def functions_of(path: Path) -> set[str]:
    """Those of a source, by name."""
    return set(_lines(path).values())


@functools.cache
def _lines(path: Path) -> dict[int, str]:
    tree = ast.parse(path.read_text())
    return {
        line: node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _named(instruction: Instruction, sources: tuple[Path, ...]) -> Instruction:
    frames = tuple((f, n, function_at(f, n, sources)) for f, n, _ in instruction.frames)
    return replace(instruction, frames=frames)


def _ptx_frames(ptx: str, sources: tuple[Path, ...]) -> Iterator[tuple[Frame, ...]]:
    """Of each instruction that ptx_kernels finds, in its order."""
    frames: tuple[Frame, ...] = ()
    in_body = in_assembly = begun = False
    for line in ptx.splitlines():
        in_body = (in_body or line == "{") and line != "}"
        text = line.strip()
        if "begin inline asm" in text or "end inline asm" in text:
            in_assembly = begun = "begin" in text
        elif text.startswith(".loc") and (place := _PLACE.search(text.partition("//")[2])):
            # Within inline assembly lines are counted on, in vain.
            if not in_assembly or begun:
                file, row = place[1], int(place[2])
                frames = ((file, row, function_at(file, row, sources)),)
            begun = False
        elif in_body and re.match(r"(?:@\S+ )?[a-z]", re.sub(r"\s+", " ", text.split("//")[0])):
            begun = False
            yield frames


def ttir_places(ttir: str) -> dict[str, str]:
    """The locations that Triton's own form of a kernel names."""
    return dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttir, re.MULTILINE))


def ttir_frames(location: str, places: Mapping[str, str]) -> Chain:
    """Of what stands in loc(...)."""
    if location in places:
        return ttir_frames(places[location], places)
    if call := re.fullmatch(r"callsite\((#loc\d*) at (#loc\d*)\)", location):
        return ttir_frames(call[1], places) + ttir_frames(call[2], places)
    if named := re.fullmatch(r'"[^"]*"\((#loc\d*)\)', location):
        return ttir_frames(named[1], places)
    place = re.fullmatch(r'"([^"]+)":(\d+):\d+', location)
    return ((Path(place[1]).name, int(place[2])),) if place else (("?", 0),)
