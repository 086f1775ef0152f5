"""Rules for the text of the kernels: equal operations on every target, bodies without `#if`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.device_compile.toolchain import ROOT

TARGETS = ("host", "cuda", "hip")
# What the host's launcher and runtime use besides, not the bodies.
HOST_ONLY = {"clock_ns"}
# Sizes that the host's teams have besides, for its launcher.
TEAM_ONLY = {"kTeam", "kMostTeams"}
# These include a library in one of two ways; nothing else asks what it is compiled for.
LIBRARIES = {"nvshmem.h", "rocshmem.h"}
SHARED = sorted(
    path
    for pattern in ("body/*.h", "transport/*.h", "target/block_copy.h", "target/words16.h")
    for path in (ROOT / "kernels").glob(pattern)
    if path.name not in LIBRARIES
)


def target_text(target: str) -> str:
    return (ROOT / f"kernels/target/{target}.h").read_text()


def listed_operations(host_header: str) -> set[str]:
    """Those named at the top of host.h, on the comment's lines of words indented by three."""
    head = host_header.split("#pragma once")[0]
    lines = re.findall(r"^//   ((?:[A-Za-z_]\w* ?)+)$", head, re.MULTILINE)
    return {name for line in lines for name in line.split()}


def operations(header: str) -> set[str]:
    """Names of the public member functions and constants of the header's target class."""
    body = re.search(
        r"^class \w+Target\b[^{;]*\{\n  public:\n(.*?)^  (?:private|protected):",
        header,
        re.S | re.M,
    )
    assert body, "no target class"
    # A declaration starts at the class's own indentation, after its template's parameters; a
    # constructor has no type before its name.
    word = r"[\w:]+(?:\(auto\))?(?:<[^()]*>)?[*&]*"
    declaration = rf"^    (?!return\b|using\b|template\b)(?:{word} )+[*&]*(\w+)\("
    functions = re.findall(declaration, body[1], re.MULTILINE)
    constants = re.findall(r"^    static constexpr u32 (\w+) =", body[1], re.MULTILINE)
    return {*functions, *constants}


def test_operations_are_listed() -> None:
    listed = listed_operations(target_text("host"))
    assert {"lane", "copy", "drain", "compare_and_swap", "kValues", "product"} <= listed
    assert {"kept", "team_rank", "load16", "kWide", "constant"} <= listed
    assert operations(target_text("host")) - HOST_ONLY == listed


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_operations_are_equal(target: str) -> None:
    assert operations(target_text(target)) == listed_operations(target_text("host"))


def test_the_hosts_teams_add_no_operations() -> None:
    teams = operations(target_text("host_team"))
    assert {"team_copy", "team_rank", "kWide"} <= teams
    assert teams - TEAM_ONLY <= listed_operations(target_text("host"))


@pytest.mark.parametrize(
    ("name", "pattern", "count"),
    [
        ("drain", r"\b{}\(\) const", 1),
        ("kept", r"\b{}\(const Make&", 1),
        ("forget", r"\b{}\(const T\*\*", 1),
        ("kWide", r"\b{} =", 1),
        ("kValues", r"\b{} =", 1),
        ("product", r"\b{}\(", 2),
    ],
    ids=["function", "template", "static-template", "constant", "constant-template", "overloads"],
)
@pytest.mark.parametrize("target", TARGETS)
def test_other_operations_are_found(target: str, name: str, pattern: str, count: int) -> None:
    """A lost one and a new one both change the list."""
    text = target_text(target)
    renamed = re.subn(pattern.format(name), lambda found: f"x{found[0]}", text)
    assert renamed[1] == count
    assert operations(text) - operations(renamed[0]) == {name}
    assert operations(renamed[0]) - operations(text) == {f"x{name}"}


@pytest.mark.parametrize("target", TARGETS)
def test_products_are_equal(target: str) -> None:
    """Of floats and of doubles, on every target."""
    assert re.findall(r"(\w+) product\((\w+) a, (\w+) b\)", target_text(target)) == [
        ("float",) * 3,
        ("double",) * 3,
    ]


def conditionals(text: str) -> list[str]:
    return re.findall(r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif|else|endif)\b.*", text, re.MULTILINE)


@pytest.mark.parametrize("path", SHARED, ids=lambda path: path.name)
def test_bodies_hold_no_conditionals(path: Path) -> None:
    assert conditionals(path.read_text()) == []


def test_conditionals_are_found() -> None:
    text = SHARED[0].read_text() + "\n#if defined(__HIP__)\n  #  endif\n"
    assert conditionals(text) == ["#if defined(__HIP__)", "  #  endif"]


# What is read through caches that no acquire empties, since nobody writes it during a kernel.
CONSTANT = {
    ("items.h", "constant(arguments->table)"),
    ("dispatch.h", "constant(reinterpret_cast<const HandleHeader*>(moe_arguments->handle))"),
    ("network.h", "constant(args.table)"),
    ("exchange.h", "share(launch.ranks[target.block() / launch.blocks_per_rank])"),
    ("exchange.h", "share(*args.moe)"),
    ("static.h", "share(*fixed.call)"),
}


def read_as_constant(text: str) -> set[str]:
    """Calls of constant() and share(), with their arguments."""
    calls = set()
    for found in re.finditer(r"(?:::|\.)((?:constant|share)\()", text):
        end, depth = found.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        calls.add(re.sub(r"\s+", " ", text[found.start(1) : end]))
    return calls


def test_what_peers_write_is_not_read_as_constant() -> None:
    found = {(path.name, call) for path in SHARED for call in read_as_constant(path.read_text())}
    assert found == CONSTANT


def test_other_constants_are_found() -> None:
    text = "u64 x = Target::constant(call.own_data() +\n  first(1))[0];"
    assert read_as_constant(text) == {"constant(call.own_data() + first(1))"}
