"""Rules for the text of the kernels: equal operations on every target, bodies without `#if`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.device_compile.toolchain import ROOT

TARGETS = ("host", "cuda", "hip")
# What the host's launcher and runtime use besides, not the bodies.
HOST_ONLY = {"clock_ns"}
SHARED = sorted(
    [
        *(ROOT / "kernels/body").glob("*.h"),
        ROOT / "kernels/transport/mapped.h",
        ROOT / "kernels/target/block_copy.h",
    ]
)


def target_text(target: str) -> str:
    return (ROOT / f"kernels/target/{target}.h").read_text()


def listed_operations(host_header: str) -> set[str]:
    """Those named at the top of host.h, on the comment's lines of words indented by three."""
    head = host_header.split("#pragma once")[0]
    lines = re.findall(r"^//   ((?:[a-z_]+ ?)+)$", head, re.MULTILINE)
    return {name for line in lines for name in line.split()}


def operations(header: str) -> set[str]:
    """Names of the public member functions of the header's target class."""
    body = re.search(r"^class \w+Target \{\n  public:\n(.*?)^  private:", header, re.S | re.M)
    assert body, "no target class"
    # A declaration starts at the class's own indentation; a constructor has no type before it.
    return set(re.findall(r"^    (?!return\b)\w[\w<>&* ]* [&*]?(\w+)\(", body[1], re.MULTILINE))


def test_operations_are_listed() -> None:
    listed = listed_operations(target_text("host"))
    assert {"lane", "copy", "drain", "compare_and_swap"} <= listed
    assert operations(target_text("host")) - HOST_ONLY == listed


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_operations_are_equal(target: str) -> None:
    assert operations(target_text(target)) == listed_operations(target_text("host"))


@pytest.mark.parametrize("target", TARGETS)
def test_other_operations_are_found(target: str) -> None:
    """A lost one and a new one both change the list."""
    text = target_text(target)
    lost, count = re.subn(r"\bdrain\(\) const", "flush() const", text)
    assert count == 1
    assert operations(text) - operations(lost) == {"drain"}
    assert operations(lost) - operations(text) == {"flush"}


def conditionals(text: str) -> list[str]:
    return re.findall(r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif|else|endif)\b.*", text, re.MULTILINE)


@pytest.mark.parametrize("path", SHARED, ids=lambda path: path.name)
def test_bodies_hold_no_conditionals(path: Path) -> None:
    assert conditionals(path.read_text()) == []


def test_conditionals_are_found() -> None:
    text = SHARED[0].read_text() + "\n#if defined(__HIP__)\n  #  endif\n"
    assert conditionals(text) == ["#if defined(__HIP__)", "  #  endif"]
