"""What must hold in the logs and listings of network entries. Each check returns its faults."""

from __future__ import annotations

import re


def spills_by_function(log: str) -> dict[str, int]:
    """Bytes of spill stores by function, from ptxas -v; a function of several kernels: the most."""
    found = re.findall(
        r"Function properties for (\w+)\n.*?(\d+) bytes spill stores", log, re.MULTILINE
    )
    spills: dict[str, int] = {}
    for name, size in found:
        spills[name] = max(spills.get(name, 0), int(size))
    return spills


def innermost_loops(listing: str, label: str, branch: str) -> list[str]:
    """Bodies of loops that hold no other loop: from a label to a branch back to it.

    label, branch: patterns whose first group is the label's name.
    """
    lines = listing.splitlines()
    at: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for k, line in enumerate(lines):
        if found := re.match(label, line):
            at[found[1]] = k
        if (found := re.search(branch, line)) and found[1] in at:
            loops.append((at[found[1]], k))
    return [
        "\n".join(lines[begin + 1 : end])
        for begin, end in loops
        if not any(begin <= a and b <= end for a, b in loops if (a, b) != (begin, end))
    ]


def copy_loop_faults(sass: str) -> list[str]:
    """There is a loop of wide loads and stores, and no such loop spills or reads past coherence."""
    loops = innermost_loops(sass, r"\s*(\.L_x_\d+):", r"\bBRA\b.*`\((\.L_x_\d+)\)")
    loops = [body for body in loops if "LDG.E.128" in body and "STG.E.128" in body]
    faults = [] if loops else ["no loop of 16-byte global loads and stores"]
    for body in loops:
        faults += [f"spilled: {name}" for name in re.findall(r"\b(?:STL|LDL)\S*", body)]
        faults += [f"non-coherent: {name}" for name in re.findall(r"\bLDG\S*\.CONSTANT\S*", body)]
        faults += [f"generic: {name}" for name in re.findall(r"\b(?:LD|ST)\.E\.128\S*", body)]
    return faults


def amd_copy_loop_faults(assembly: str) -> list[str]:
    """The same of an AMD listing."""
    loops = innermost_loops(assembly, r"(\.LBB\d+_\d+):", r"\bs_c?branch\w*\s+(\.LBB\d+_\d+)")
    wide = ("global_load_dwordx4", "global_store_dwordx4")
    loops = [body for body in loops if all(name in body for name in wide)]
    faults = [] if loops else ["no loop of 16-byte global loads and stores"]
    for body in loops:
        faults += [f"spilled: {name}" for name in re.findall(r"\bscratch_\w+", body)]
        faults += [f"generic: {name}" for name in re.findall(r"\bflat_(?:load|store)\w+", body)]
    return faults
