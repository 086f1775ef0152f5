"""Operations broken on purpose: what is done to kernels/triton, and what must be found then."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.triton_compile.listing import SOURCES
from tests.triton_compile.primitive_checks import (
    EARLY_FLAG,
    EARLY_READ,
    NOT_HANDED_ON,
    NOT_ONE,
    UNDRAINED,
)

_numbers = itertools.count()


@dataclass(frozen=True)
class Edit:
    """One replacement in one file of the copy; `pattern` (a regex) matches `times` times."""

    file: str
    pattern: str
    replacement: str
    times: int = 1


@dataclass(frozen=True)
class Broken:
    """faults: how one begins, by operation; these operations are compiled, `sound` too, which must
    have none."""

    edits: list[Edit]
    faults: dict[str, str]
    sound: tuple[str, ...] = field(default=("store_8",))


def copy_kernels(folder: Path, edits: Iterable[Edit]) -> tuple[str, Path]:
    """Copy kernels/triton and the primitives to a package of its own below `folder`, edited.

    Returns the package's name and its folder.
    """
    package = f"broken_{next(_numbers)}"
    target = folder / package
    target.mkdir()
    for source in [*SOURCES[0].glob("*.py"), SOURCES[1] / "primitives.py"]:
        text = source.read_text().replace("fastkern.kernels.triton", package)
        (target / source.name).write_text(text)
    for edit in edits:
        path = target / edit.file
        text, count = re.subn(edit.pattern, edit.replacement, path.read_text())
        assert count == edit.times, f"{edit.file}: {edit.pattern!r} matches {count} times"
        path.write_text(text)
    return package, target


def edit(file: str, pattern: str, replacement: str, times: int = 1) -> Edit:
    return Edit(file, pattern, replacement, times)


def access(pattern: str, replacement: str, times: int = 1) -> Edit:
    return Edit("access.py", pattern, replacement, times)


def target(pattern: str, replacement: str, times: int = 1) -> Edit:
    return Edit("target.py", pattern, replacement, times)


NO_LOOK = "no look at system scope"
NO_OPERATION = "no operation at system scope"

BREAKS = {
    # Each thread by itself, and the loop would go if pause() did not keep it: see faulty.py.
    "plain-peek": Broken(
        [access(r'tl\.atomic_add\(pointer, address \* 0, mask=mask, sem="relaxed", scope="sys"\)',
                "tl.load(pointer, mask=mask)")],
        {"wait": "no poll in a loop", "wait_for_all": "no poll in a loop", "peek_one": NO_LOOK},
        sound=("acquire_one", "wait_by_result"),
    ),
    "narrow": Broken(
        [access(r'scope="sys"', 'scope="gpu"', times=4)],
        {
            "wait": "no poll in a loop",
            "peek_some": NO_LOOK,
            "acquire_one": NO_LOOK,
            "add_one": NO_OPERATION,
            "swap_other": NO_OPERATION,
        },
    ),
    "relaxed": Broken(
        [access(r'sem="acquire"', 'sem="relaxed"'), access(r'sem="acq_rel"', 'sem="relaxed"', 2)],
        {
            "wait": "no acquire",
            "acquire_one": NO_LOOK,
            "add_some": NO_OPERATION,
            "swap_other": NO_OPERATION,
        },
        sound=("peek_one",),
    ),
    "no-barrier": Broken(
        [access(r"drain\(\)\n    tl\.debug_barrier\(\)", "drain()")], {"signal": EARLY_FLAG}
    ),
    "all-raise": Broken([target("@first st", "st")], {"signal": NOT_ONE}),
    "own-clocks": Broken(
        [target(r"_MOST_THREADS = tl\.constexpr\(1024\)", "_MOST_THREADS = tl.constexpr(1)")],
        {"clock": NOT_HANDED_ON},
    ),
    "sleepless": Broken(
        [target(r"nanosleep\.u32 \$1;\\n", ""), target(r"s_sleep 8\\n", "")],
        {"pause_once": "no sleep", "wait": "no sleep in a loop"},
    ),
    "narrow-product": Broken(
        [Edit("primitives.py", r"base \+ row \* stride",
              "base + (row.to(tl.int32) * stride.to(tl.int32)).to(tl.int64)")],
        {"row_of": "no product of 64 bits"},
    ),
    "unaligned": Broken(
        [Edit("copy.py", r"tl\.multiple_of\((.*), UNIT\)", r"\1", times=2)],
        {"copy_row": "0 loads and 0 stores of 16 bytes"},
    ),
    "unaligned-rows": Broken(
        [Edit("copy.py", r"tl\.multiple_of\((.*), \[16\]\)", r"\1", times=2)],
        {"copy_some_rows": "0 loads and 0 stores of 16 bytes"},
    ),
    "unaligned-values": Broken(
        [Edit("rounding.py", r"tl\.multiple_of\((.*), ALIGNMENT\)", r"\1")],
        {"sum_values": "0 loads and 0 stores of 16 bytes"},
    ),
    "wide": Broken(
        [access(r"tl\.uint32", "tl.uint64", times=4)],
        {"load_4": "loads of [8]", "get_4": "loads of [8]", "store_4": "stores of [8]",
         "put_4": "stores of [8]"},
    ),
}  # fmt: skip

# What only AMD needs.
HIP_BREAKS = {
    "undrained": Broken(
        [access(r"    drain\(\)\n", "")], {"signal": UNDRAINED}, sound=("drain_between",)
    ),
    # A pure one goes; so does what has no effect that a compiler knows of.
    "pure-drain": Broken(
        [
            target(
                r'("=v,)~\{memory\}(",\n +\[\],\n +dtype=tl\.int32,\n +is_pure=)False', r"\1\2True"
            )
        ],
        {"signal": UNDRAINED, "drain_between": "1 stores, not 2"},
    ),
    "no-write-back": Broken(
        [target(r"buffer_wbl2\{scope\}\\n", "")],
        {"signal": UNDRAINED, "drain_between": "stores again"},
    ),
    "early": Broken(
        [target(r'"s_waitcnt vmcnt\(0\)",', '"",')],
        {"wait": EARLY_READ, "wait_by_result": EARLY_READ, "acquire_one": EARLY_READ},
        sound=("peek_one",),
    ),
}
