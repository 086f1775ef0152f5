"""LLVM's form of a kernel: the ways through it as branches are meant.

AMD's assembly takes both sides of a branch that threads might take differently, under masks; which
ways through it there are, nobody can read from it. LLVM's form, optimised, still has the branches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.device_compile.listing import Frame, Instruction, Kernel
from tests.triton_compile.listing import SOURCES, function_at

_ROWS = r"{0} .*addrspace\(1\)|call \S.* @llvm\.amdgcn\.raw\.ptr\.buffer\.{0}"
# AMD, as devices.py has it of assembly. No scope is named, so it is the system.
AMD = {
    "barrier": r"call void @llvm\.amdgcn\.s\.barrier",
    "drain": r'call i32 asm sideeffect "buffer_wbl2[^"]*s_waitcnt vmcnt\(0\)',
    "flag": r"atomicrmw xchg (?!.*syncscope).* release,",
    "acquire": r"(?:atomicrmw|load atomic) (?!.*syncscope).* acquire,",
    "hand_on": r'call i64 asm sideeffect "s_waitcnt vmcnt\(0\)',
    "load": _ROWS.format("load"),
    "store": _ROWS.format("store"),
}


def llir_kernel(llir: str, sources: tuple[Path, ...] = SOURCES) -> Kernel:
    """The one kernel of it. sources: the folders of what it was made from."""
    metadata = dict(re.findall(r"^(!\d+) = (.*)$", llir, re.MULTILINE))
    (body,) = re.findall(r"^define [^{]*\{\n(.*?)^\}", llir, re.MULTILINE | re.DOTALL)
    instructions: list[Instruction] = []
    blocks: dict[str, int] = {}
    for line in body.splitlines():
        if label := re.match(r'"?([\w.$-]+)"?:', line):
            blocks[label[1]] = len(instructions)
        elif text := re.sub(r"^(?:%\S+ = )?(?:tail )?", "", line.strip()):
            where = re.search(r"!dbg (!\d+)", line)
            instructions.append(
                Instruction(text, _frames(where[1], metadata, sources) if where else ())
            )
    successors = []
    for k, instruction in enumerate(instructions):
        named = re.findall(r'label %"?([\w.$-]+)', instruction.text)
        last = re.match(r"ret|unreachable", instruction.text)
        successors.append([blocks[name] for name in named] if named else [] if last else [k + 1])
    return Kernel(instructions, successors)


def _frames(
    location: str, metadata: Mapping[str, str], sources: tuple[Path, ...]
) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    while location:
        found = metadata[location]
        line, scope = re.search(r"line: (\d+)", found), re.search(r"scope: (!\d+)", found)
        file = ""
        while scope and not file:
            inside = metadata[scope[1]]
            if at := re.search(r"\bfile: (!\d+)", inside):
                file = re.search(r'filename: "([^"]*)"', metadata[at[1]])[1]
            scope = re.search(r"scope: (!\d+)", inside)
        row = int(line[1]) if line else 0
        frames.append((file, row, function_at(file, row, sources)))
        caller = re.search(r"inlinedAt: (!\d+)", found)
        location = caller[1] if caller else ""
    return tuple(frames)
