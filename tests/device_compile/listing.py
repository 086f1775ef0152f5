"""Listings of compiled kernels: instructions, where each comes from, and the ways through them.

PTX, SASS (nvdisasm -c -gi) and AMD assembly (-S -gline-tables-only) become the same thing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Of an instruction: file below the root, line and function, of the innermost function first, then
# of its callers, the kernel last.
Frame = tuple[str, int, str]


@dataclass(frozen=True)
class Instruction:
    text: str  # without address, comment and final semicolon
    frames: tuple[Frame, ...] = ()

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(function for _, _, function in self.frames)

    @property
    def predicate(self) -> str:
        """What decides whether it does anything ("@P0"), or "". Branches are passed either way."""
        own = re.match(r"(@\S+) (?!BRA|EXIT|bra)", self.text)
        return own[1] if own else ""


@dataclass
class Kernel:
    instructions: list[Instruction]
    successors: list[list[int]] = field(repr=False)  # of each instruction

    def find(self, pattern: str, function: str = "") -> set[int]:
        """The instructions whose text, from the name on, begins like the pattern.

        function: only those of a call to it, however deep.
        """
        begins = re.compile(rf"(?:@\S+ )?(?:{pattern})").match
        return {
            k
            for k, found in enumerate(self.instructions)
            if begins(found.text) and (not function or function in found.functions)
        }

    def texts(self, pattern: str, function: str = "") -> list[str]:
        return [self.instructions[k].text for k in sorted(self.find(pattern, function))]

    def after(self, starts: Iterable[int], without: Collection[int] = ()) -> set[int]:
        """What can run after `starts`, on ways through none of `without`."""
        reached: set[int] = set()
        waiting = list(starts)
        while waiting:
            for k in self.successors[waiting.pop()]:
                if k not in reached and k not in without:
                    reached.add(k)
                    waiting.append(k)
        return reached

    def in_loops(self, found: Iterable[int]) -> set[int]:
        return {k for k in found if k in self.after([k])}

    def can_miss(
        self, steps: Sequence[set[int]], goal: set[int], starts: Collection[int] | None = None
    ) -> bool:
        """Is there a way to `goal` that does not take one of each of the steps, in this order?

        starts: the ways begin after any of these; by default at the kernel's entry. What depends on
        a predicate is no step, unless the start depends on the same one.
        """
        if starts is not None:
            return any(
                self._can_miss(steps, goal, set(self.successors[k]), self.instructions[k].predicate)
                for k in starts
            )
        return self._can_miss(steps, goal, {0}, "")

    def _can_miss(
        self, steps: Sequence[set[int]], goal: set[int], arriving: set[int], predicate: str
    ) -> bool:
        for step in steps:
            seen: set[int] = set()
            taken: set[int] = set()
            waiting = list(arriving)
            while waiting:
                k = waiting.pop()
                if k in seen:
                    continue
                seen.add(k)
                if k in goal:
                    return True
                if k in step and self.instructions[k].predicate in ("", predicate):
                    taken.add(k)
                else:
                    waiting.extend(self.successors[k])
            arriving = {following for k in taken for following in self.successors[k]}
        return False

    def innermost_loops(self) -> list[list[str]]:
        """Texts of the instructions from the target of a branch back to it, no such loop inside."""
        loops = [
            (target, k)
            for k, targets in enumerate(self.successors)
            for target in targets
            if target <= k and len(targets) > 1
        ]
        return [
            [found.text for found in self.instructions[first : last + 1]]
            for first, last in loops
            if not any(first <= a and b <= last for a, b in loops if (a, b) != (first, last))
        ]


def ptx_kernels(ptx: str) -> dict[str, Kernel]:
    """The kernels of a PTX listing, by name; without frames."""
    kernels = {}
    for name, body in re.findall(r"\.entry (\w+)\([\s\S]*?\n\{\n([\s\S]*?)\n\}", ptx):
        lines = [re.sub(r"\s+", " ", line.split("//")[0]).strip() for line in body.splitlines()]
        kept = [line for line in lines if re.match(r"\$L__BB\w+:|(?:@\S+ )?[a-z]", line)]
        kernels[name] = _kernel(
            [(line.rstrip(";"), ()) for line in kept],
            label=r"\$L__BB\w+",
            branch=r"bra",
            ends=r"ret\b|exit\b|trap\b|bra\b",
        )
    return kernels


def sass_kernels(sass: str, root: Path) -> dict[str, Kernel]:
    """The kernels of a SASS listing, by name. root: of their sources."""
    kernels = {}
    barrier = r"\bBSSY\S* (B\d+), `\((\.L_x_\d+)\)"
    for part in re.split(r"^//-+ \.text\.", sass, flags=re.MULTILINE)[1:]:
        lines: list[tuple[str, tuple[Frame, ...]]] = []
        frames: list[Frame] = []
        whole = True  # Are they? Then the next one belongs to other instructions.
        joins = dict(re.findall(barrier, part))
        files = frozenset(re.findall(r'//## File "([^"]+)"', part))
        for line in part.splitlines()[1:]:
            if place := re.match(r'\s*//## File "([^"]+)", line (\d+)', line):
                frames = [*([] if whole else frames), _frame(place[1], place[2], root)]
                whole = False
            elif code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
                text = re.sub(r"\s+", " ", code[1])
                if begun := re.search(barrier, text):
                    joins[begun[1]] = begun[2]
                elif ended := re.search(r"\bBSYNC\S* (B\d+)", text):
                    # Lanes that waited for each other go on where the barrier said they would.
                    text += f", `({joins[ended[1]]})"
                lines.append((text, _with_callers(tuple(frames), files, root)))
                whole = True
            elif re.match(r"\.L_x_\d+:", line):
                lines.append((line.strip(), ()))
        kernels[part.split()[0]] = _kernel(
            lines,
            label=r"\.L_x_\d+",
            branch=r"BRA|BRX|CALL|BSYNC",
            ends=r"EXIT\b|RET\b|BRX\b|BSYNC\b|BRA(?![\w.]* !?U?P\d)\b",
        )
    return kernels


def hip_kernels(assembly: str, root: Path) -> dict[str, Kernel]:
    """The kernels of an AMD listing, by name. root: of their sources."""
    kernels = {}
    for name in re.findall(r"\.amdhsa_kernel (\w+)", assembly):
        body = re.search(rf"^{name}:[\s\S]*?^\.Lfunc_end\d+:", assembly, re.MULTILINE)
        assert body, name
        lines: list[tuple[str, tuple[Frame, ...]]] = []
        frames: tuple[Frame, ...] = ()
        for line in body[0].splitlines()[1:-1]:
            code, _, comment = line.partition(";")
            code = re.sub(r"\s+", " ", code).strip()
            if code.startswith(".loc "):
                places = re.findall(r"([^\s@:]+):(\d+)", comment)
                frames = tuple(_frame(file, row, root) for file, row in places)
            elif re.match(r"\.LBB\w+:|[a-z]+_[a-z]", code):
                lines.append((code, frames))
        kernels[name] = _kernel(
            lines,
            label=r"\.LBB\w+",
            branch=r"s_c?branch",
            ends=r"s_endpgm|s_setpc|s_branch\b",
        )
    return kernels


def _kernel(
    lines: list[tuple[str, tuple[Frame, ...]]], label: str, branch: str, ends: str
) -> Kernel:
    """label: of labels. branch: how instructions begin that may go on at the labels that they name.
    ends: of those that the next instruction does not follow."""
    at: dict[str, int] = {}
    instructions: list[Instruction] = []
    for text, frames in lines:
        if found := re.fullmatch(rf"({label}):", text):
            at[found[1]] = len(instructions)
        else:
            instructions.append(Instruction(text, frames))
    successors = []
    for k, instruction in enumerate(instructions):
        text = instruction.text
        targets = [k + 1] if text.startswith("@") or not re.match(ends, text) else []
        if re.match(rf"(?:@\S+ )?(?:{branch})", text):
            targets += [at[name] for name in re.findall(label, text)]
        successors.append([target for target in targets if target < len(instructions)])
    return Kernel(instructions, successors)


def _frame(path: str, line: str, root: Path) -> Frame:
    file = re.search(r"(?:planner|kernels/\w+|tests/device_compile)(?:/network)?/[^/]+$", path)
    functions = _functions(root, file[0]) if file else []
    # Of a library; merged from several lines (0); or out of range, where ptxas merged two files.
    known = 1 <= int(line) <= len(functions)
    return file[0] if file else path, int(line), functions[int(line) - 1] if known else "?"


@functools.cache
def _with_callers(
    frames: tuple[Frame, ...], files: frozenset[str], root: Path
) -> tuple[Frame, ...]:
    """The same, where the line of each calls the function before it.

    Of two frames of the same line in two files, ptxas loses one, or takes one file for the other.
    files: which it names.
    """

    def in_line(line: int, inner: Frame | None) -> list[Frame]:
        """Of any file, and calling the inner one."""
        places = {_frame(file, str(line), root) for file in files} - {inner}
        return [place for place in places if inner is None or _calls(place, inner[2], root)]

    kept: list[Frame] = []
    for frame in frames:
        inner = kept[-1] if kept else None
        if inner is None or not _calls(frame, inner[2], root):
            lines = {frame[1], inner[1] if inner else frame[1]}
            lost = {place for line in lines for place in in_line(line, inner)}
            lost = {place for place in lost - {frame} if _calls(frame, place[2], root)}
            other = in_line(frame[1], inner) if inner else []
            if len(lost) == 1:
                kept.extend(lost)
            elif len(other) == 1:
                frame = other[0]
        kept.append(frame)
    return tuple(kept)


def _calls(frame: Frame, function: str, root: Path) -> bool:
    file, line, caller = frame
    if "?" in (function, caller):
        return False
    return re.search(rf"\b{function}(?:<[^()]*>)?\(", _lines(root, file)[line - 1]) is not None


@functools.cache
def _lines(root: Path, file: str) -> list[str]:
    return (root / file).read_text().splitlines()


@functools.cache
def _functions(root: Path, file: str) -> list[str]:
    """For each line of a source the function that it belongs to, "?" before the first."""
    device = r"(?:FASTKERN_DEVICE|FASTKERN_HD|__device__)\b.*?\b(\w+)\((?!auto\))"
    function = "?"
    functions = []
    for line in _lines(root, file):
        if not line.lstrip().startswith(("#", "//")):
            if "__global__" in line:  # the name comes after attributes, perhaps on another line
                function = "kernel"
            elif found := re.search(device, line):
                function = found[1]
        functions.append(function)
    return functions
