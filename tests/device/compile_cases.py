"""A compiler that is none, a small tree of sources for it, and what looks into caches."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fastkern.device.kernel_cache import key_of

ENTRY = '#include "kernels/body/outer.h"\n  #  include "planner/table.h" // twice\nint entry;\n'
FILES = {
    "kernels/entry/thing.cu": ENTRY,
    "kernels/entry/thing.hip": ENTRY,
    "kernels/body/outer.h": '// #include "not/there.h"\n#include "planner/table.h"\nint outer;\n',
    "planner/table.h": '#pragma once\n#include "planner/table.h"\nint table;\n',
    "planner/unused.h": "int unused;\n",
}


def write_tree(root: Path) -> Path:
    """FILES below root. Returns root."""
    for path, text in FILES.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


class FakeCompiler:
    """What it returns tells its calls apart."""

    def __init__(
        self, name: str = "fake", version: str = "1", flags: tuple[str, ...] = ("-O2",)
    ) -> None:
        self.name = name
        self.flags = flags
        self.calls = 0
        self._version = version

    def check_arch(self, arch: str) -> None:
        if not arch.startswith("sm_"):
            raise ValueError(arch)

    def version(self) -> str:
        return self._version

    def compile(self, source: object, arch: str, defines: dict[str, str]) -> bytes:
        self.calls += 1
        return f"{self.name} {arch} {defines} {self.calls}".encode()


KEY = key_of(test=["one"])
OTHER = key_of(test=["other"])


class Maker:
    """Makes code, and counts how often."""

    def __init__(self, code: bytes = b"code") -> None:
        self.code = code
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.code


def entry_of(folder: Path, key: str = KEY) -> Path:
    return folder / f"{key}.kernel"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
