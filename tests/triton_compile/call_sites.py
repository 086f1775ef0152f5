"""Where kernels call the operations that synchronise: in the sources, and in what was compiled.

A call site is an operation and the lines that it is called through; sites are counted by their
names, "operation < caller < its caller". Of the sources all calls count that can be reached from a
kernel; of these Triton leaves out what a constant decides.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.triton_compile.listing import SOURCES, Chain, function_at, ttir_frames, ttir_places

# Of each operation what it is in Triton's own form, on NVIDIA and on AMD.
_ASM = r"tt\.elementwise_inline_asm .*"
_BARRIER = r"(?:gpu|ttg)\.barrier"
OPERATIONS = {
    "peek": r"tt\.atomic_rmw add, relaxed, sys,",
    "acquire": r"tt\.atomic_rmw add, acquire, sys,",
    "add_word": r"tt\.atomic_rmw add, acq_rel, sys,",
    "swap_if": r"tt\.atomic_cas acq_rel, sys,",
    "store_release": rf"{_ASM}st\.release\.sys|tt\.atomic_rmw exch, release, sys,",
    "finish_writes": _BARRIER,
    "drain": rf"{_ASM}buffer_wbl2",
    "now_ns": rf"{_ASM}(?:globaltimer|s_memrealtime)",
    "pause": rf"{_ASM}(?:nanosleep|s_sleep)",
    "debug_barrier": _BARRIER,  # but those of finish_writes and acquire
}


def source_sites(kernel: Any, cuda: bool) -> Counter[str]:
    """Of a Triton function, by name."""
    sites = {(name, way) for name, way in _below(kernel, {}, ()) if not (cuda and name == "drain")}
    return Counter(_name(operation, way) for operation, way in sites)


def ttir_sites(ttir: str) -> Counter[str]:
    """Of Triton's own form of a kernel, functions inlined, by name."""
    places = ttir_places(ttir)
    sites = set()
    for line in ttir.splitlines():
        for operation, pattern in OPERATIONS.items():
            if re.search(rf"(?:= |^ +){pattern}", line):
                chain = ttir_frames(line[line.rindex("loc(") + 4 :].rstrip(") {"), places)
                own = function_at(*chain[0], SOURCES)
                if own == operation:
                    sites.add((operation, chain[1:]))
                elif operation == "debug_barrier" and own not in OPERATIONS:
                    sites.add((operation, chain))
    return Counter(_name(operation, chain) for operation, chain in sites)


def _name(operation: str, chain: Chain) -> str:
    return " < ".join((operation, *(function_at(*place, SOURCES) for place in chain[:2])))


def _below(function: Any, given: Mapping[str, Any], way: Chain) -> Iterator[tuple[str, Chain]]:
    """Operations and the ways to them. given: the functions that were passed as arguments."""
    file = Path(function.fn.__code__.co_filename).name
    known = {**function.fn.__globals__, **given}
    for call in _calls(function):
        name = (
            call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        )
        here = ((file, call.lineno), *way)
        if name in OPERATIONS:
            yield name, here
        called = known.get(name)
        if hasattr(called, "fn") and (name not in OPERATIONS or name == "finish_writes"):
            arguments = zip(inspect.signature(called.fn).parameters, call.args, strict=False)
            passed = {p: known.get(getattr(value, "id", "")) for p, value in arguments}
            inner = {p: value for p, value in passed.items() if hasattr(value, "fn")}
            for operation, chain in _below(called, inner, here):
                if name != "finish_writes" or operation == "drain":
                    yield operation, chain


@functools.cache
def _calls(function: Any) -> tuple[ast.Call, ...]:
    """All calls in a function, with their lines in its file."""
    lines, first = inspect.getsourcelines(function.fn)
    tree = ast.increment_lineno(ast.parse(textwrap.dedent("".join(lines))), first - 1)
    return tuple(
        node for node in ast.walk(_InOneServer().visit(tree)) if isinstance(node, ast.Call)
    )


class _InOneServer(ast.NodeTransformer):
    """Leaves out what is between servers alone: another kernel."""

    def visit_If(self, node: ast.If) -> Any:
        test = ast.unparse(node.test)
        if test in ("len(call.wire) == PEER", "TRANSPORT == PEER"):
            return [self.visit(child) for child in node.body]
        if test == "len(call.wire) != PEER":
            return [self.visit(child) for child in node.orelse]
        return self.generic_visit(node)
